"""One rank of a job that runs every check of the communicator contract.

`contract.py BACKEND SIZE [--without-peers] [--in-pieces] [--between-hosts]`: the first where the back-end has
collectives only, the second to let MPI count no more than 2^20 elements in a call, the third to let MPI sum,
and torch meet, as they do between hosts.
"""

from __future__ import annotations

import sys
from unittest import mock

import torch

from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.comm.startup.world import check_world
from tests.helpers.communicator_checks import CHECKS
from tests.helpers.listening import is_let_in
from tests.helpers.peer_checks import PEER_CHECKS, peers_and_groups_are_refused_with_the_remedy
from tests.helpers.waiting import no_thread_left


def main(comm: Communicator) -> None:
    assert comm.backend == sys.argv[1]
    assert comm.size == int(sys.argv[2])
    if "--in-pieces" in sys.argv:
        from speechdp.comm.mpi import communicator as mpi  # noqa: PLC0415  initialises MPI

        mpi._MAX_COUNT = 1 << 20
    if "--between-hosts" in sys.argv and comm.backend == "torch":
        _check_that_strangers_are_kept_out(comm)
    elif "--between-hosts" in sys.argv:
        from speechdp.comm.mpi import communicator as mpi  # noqa: PLC0415

        assert isinstance(comm, mpi.MpiCommunicator)
        comm._over_network, mpi._NETWORK_BYTES = True, 0
    check_world(comm, {"seed": 1, "nothing": None})
    without_peers = "--without-peers" in sys.argv
    checks = (*CHECKS, *((peers_and_groups_are_refused_with_the_remedy,) if without_peers else PEER_CHECKS))
    for check in checks:
        try:
            check(comm)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error
    if comm.backend != "torch" and not without_peers and "--between-hosts" not in sys.argv:
        _check_that_groups_take_few_communicators(comm)
    if comm.backend == "mpi" and comm.size > 1:
        _check_that_what_fails_beside_a_rank_fails_where_it_is_awaited(comm)
    if comm.rank == 0:
        print(f"{len(checks)} checks passed on {comm.size} ranks")


def _check_that_strangers_are_kept_out(comm: Communicator) -> None:
    from speechdp.comm.torchdist.communicator import TorchCommunicator  # noqa: PLC0415

    assert isinstance(comm, TorchCommunicator)
    listener = comm._meeting.listener
    assert (listener is not None) == (comm.rank == 0), "rank 0 serves the store"
    if listener is not None:
        assert not is_let_in(listener.getsockname())


def _check_that_groups_take_few_communicators(comm: Communicator) -> None:
    """MPI makes each in rounds over all ranks: a group on one host takes two, messages one."""
    from speechdp.comm.mpi import communicator as mpi  # noqa: PLC0415

    comm.peers().close()  # from now on Horovod has all that it needs of MPI
    with (
        mock.patch.object(mpi, "_place_on_host", wraps=mpi._place_on_host) as placed,
        mock.patch.object(mpi, "MpiCommunicator", wraps=mpi.MpiCommunicator) as made,
    ):
        for _ in range(2):
            comm.split(0).close()
            comm.peers().close()
    assert (made.call_count, placed.call_count) == (2, 0), (made.call_count, placed.call_count)


def _check_that_what_fails_beside_a_rank_fails_where_it_is_awaited(comm: Communicator) -> None:
    """The rank would go on with numbers that were never summed."""
    from speechdp.comm.mpi import communicator as mpi  # noqa: PLC0415

    x = torch.ones(1)
    with mock.patch.object(mpi, "_reduce", side_effect=MemoryError("of the GPU")):
        work = comm.allreduce_async(x, name="failing")
        try:
            work.wait()
        except MemoryError:
            pass
        else:
            raise AssertionError("a failed allreduce has ended like any other")
    comm.allreduce(x, name="afterwards")
    assert x.item() == comm.size


def _communicator() -> Communicator:
    launch = environment.announced()
    if "--between-hosts" in sys.argv and launch is not None:
        # Every second rank under another name of this machine.
        name = ("localhost", "127.0.0.1")[launch.rank % 2]
        environment.host_name = lambda: name
    return create_communicator(sys.argv[1])


with no_thread_left():
    exit_code = guard(_communicator, main)
sys.exit(exit_code)
