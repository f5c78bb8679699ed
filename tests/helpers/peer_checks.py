"""Checks that every channel between two ranks, and every split communicator, must pass.

Each function is collective and takes this rank's communicator; `PEER_CHECKS` lists them.  A `send` may wait
for its receiver, so ranks that send to one another at the same time do it in threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from speechdp.comm.base import Communicator, PeerCommunicator, ReduceOp
from speechdp.comm.calls import Calls
from speechdp.errors import CommunicationError, ConfigError


@contextmanager
def channel(comm: Communicator) -> Iterator[PeerCommunicator]:
    peers = comm.peers()
    assert (peers.rank, peers.size, peers.sent_bytes) == (comm.rank, comm.size, 0)
    yield peers
    peers.close()


def at_once(*calls: Callable[[], object]) -> None:
    """Run every call in a thread of its own and raise what one of them raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def others(comm: Communicator) -> list[int]:
    return [r for r in range(comm.size) if r != comm.rank]


def partner(comm: Communicator) -> int | None:
    """Return the other rank of this one's pair; the last of an odd number has none."""
    other = comm.rank ^ 1
    return other if other < comm.size else None


def a_ring_passes_on_what_it_gets(comm: Communicator) -> None:
    if comm.size == 1:
        return
    with channel(comm) as peers:
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        x = torch.arange(1000.0) + comm.rank
        for _ in range(comm.size):
            received = torch.empty_like(x)
            at_once(lambda x=x: peers.send(x, after), lambda y=received: peers.recv(y, before))
            x = received
        assert torch.equal(x, torch.arange(1000.0) + comm.rank)  # once round


def any_source_tells_whose_message_it_took(comm: Communicator) -> None:
    with channel(comm) as peers:
        if comm.rank > 0:
            for number in range(5):
                peers.send(torch.tensor([comm.rank, number]), 0, tag=3)
            return
        seen: dict[int, list[int]] = {r: [] for r in others(comm)}
        for _ in range(5 * (comm.size - 1)):
            x = torch.zeros(2, dtype=torch.int64)
            source = peers.recv(x, tag=3)
            assert source == x[0]
            seen[source].append(int(x[1]))
        assert seen == {r: list(range(5)) for r in others(comm)}  # in order, rank by rank


def messages_of_one_tag_arrive_in_order(comm: Communicator) -> None:
    lengths = (10, 0, 100_000, 1, 30)
    with channel(comm) as peers:
        if comm.rank == 0:
            for dest in others(comm):
                for number, length in enumerate(lengths):
                    peers.send(torch.full((length,), float(number)), dest, tag=999)
        else:
            for number, length in enumerate(lengths):
                x = torch.full((length,), -1.0)
                assert peers.recv(x, 0, tag=999) == 0
                assert torch.all(x == number)


def tags_do_not_mix(comm: Communicator) -> None:
    with channel(comm) as peers:
        if comm.rank == 0:
            for dest in others(comm):
                at_once(*(lambda t=tag, d=dest: peers.send(torch.full((8,), t), d, tag=t) for tag in (5, 7)))
        else:
            for tag, source in ((7, None), (5, 0)):
                x = torch.zeros(8, dtype=torch.int64)
                peers.recv(x, source, tag=tag)
                assert x.tolist() == [tag] * 8


def two_channels_do_not_see_each_other(comm: Communicator) -> None:
    with channel(comm) as first, channel(comm) as second:
        if comm.rank == 0:
            for dest in others(comm):
                at_once(
                    *(
                        lambda c=c, n=n, d=dest: c.send(torch.tensor([n]), d)
                        for n, c in ((1.0, first), (2.0, second))
                    )
                )
        else:
            for number, peers in ((2.0, second), (1.0, first)):
                x = torch.zeros(1)
                peers.recv(x)
                assert x.item() == number


def large_messages_pass_each_other(comm: Communicator) -> None:
    other = partner(comm)
    with channel(comm) as peers:
        if other is not None:
            received = torch.empty(5_000_000)  # 20 MB
            at_once(
                lambda: peers.send(torch.arange(5_000_000.0) + comm.rank, other),
                lambda: peers.recv(received, other),
            )
            assert torch.equal(received, torch.arange(5_000_000.0) + other)


def any_dtype_and_shape_arrives_bit_by_bit(comm: Communicator) -> None:
    cases: list[Tensor] = [
        torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
    ]
    cases += [torch.tensor(float("nan")), torch.tensor(7.0), torch.empty(0), torch.empty(0, 3).long()]
    with channel(comm) as peers:
        for x in cases:
            if comm.rank == 0:
                for dest in others(comm):
                    peers.send(x, dest)
            else:
                y = torch.zeros_like(x)
                assert peers.recv(y, 0) == 0
                assert torch.equal(y.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)), x


def parts_and_leaves_may_travel(comm: Communicator) -> None:
    with channel(comm) as peers:
        if comm.rank == 0:
            for dest in others(comm):
                peers.send(torch.full((10,), 3.0, requires_grad=True), dest)
        else:
            flat = torch.ones(100, requires_grad=True)
            peers.recv(flat.detach()[10:20], 0)
            assert flat.sum().item() == 90 + 30


def threads_receive_with_tags_of_their_own(comm: Communicator) -> None:
    """A server takes requests from anybody while others of its rank's threads wait for answers."""
    answers: dict[int, float] = {}
    with channel(comm) as peers:

        def serve() -> None:
            for _ in others(comm):
                x = torch.zeros(3)
                source = peers.recv(x, tag=1)
                peers.send(x * 2, source, tag=2)

        def ask() -> None:
            for rank in others(comm):
                x = torch.full((3,), float(comm.rank + 10 * rank))
                peers.send(x, rank, tag=1)
                peers.recv(x, rank, tag=2)
                answers[rank] = x[0].item()

        at_once(serve, ask)
    assert answers == {r: 2.0 * (comm.rank + 10 * r) for r in others(comm)}


def messages_and_collectives_go_on_side_by_side(comm: Communicator) -> None:
    other = partner(comm)
    with channel(comm) as peers, ThreadPoolExecutor(2) as pool:
        works = []
        if other is not None:
            received = [torch.empty(50_000) for _ in range(10)]
            works.append(pool.submit(lambda: [peers.recv(x, tag=4) for x in received]))
            sent = [torch.full((50_000,), float(comm.rank + n)) for n in range(10)]
            works.append(pool.submit(lambda: [peers.send(x, other, tag=4) for x in sent]))
        for step in range(20):
            x = torch.full((10_000,), float(step))
            comm.allreduce(x, name="beside")
            assert torch.all(x == step * comm.size)
        for work in works:
            work.result()
        if other is not None:
            assert [x.unique().tolist() for x in received] == [[float(other + n)] for n in range(10)]


def a_message_of_another_size_is_an_error(comm: Communicator) -> None:
    with channel(comm) as peers:
        for length in (4, 2, 0, 100_000):
            if comm.rank == 0:
                for dest in others(comm):
                    peers.send(torch.ones(length), dest, tag=2)
                    peers.send(torch.ones(3), dest, tag=2)
            else:
                x = torch.zeros(3)
                expected = f"expected 12 bytes with tag 2 from rank 0, which sent {4 * length};"
                with pytest.raises(CommunicationError, match=expected):
                    peers.recv(x, 0, tag=2)
                peers.recv(x, 0, tag=2)  # the channel is still in order
                assert x.tolist() == [1.0] * 3


def waiting_for_a_message_keeps_no_core_busy(comm: Communicator) -> None:
    last = comm.size - 1
    with channel(comm) as peers:
        comm.barrier()
        if comm.rank == last:
            time.sleep(0.5)
            for dest in others(comm):
                peers.send(torch.ones(100), dest)
            return
        begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
        peers.recv(torch.zeros(100), None if comm.rank % 2 else last)
        waited_s, cpu_s = time.monotonic() - begun_s, time.thread_time() - begun_cpu_s
        # Half a second, on a busy machine more, or less where this rank itself comes late.
        assert cpu_s < max(0.2, 0.4 * waited_s)


def what_cannot_be_sent_is_refused(comm: Communicator) -> None:
    peers = comm.peers()
    x = torch.zeros(4)
    if comm.size == 1:
        for call in (lambda: peers.send(x, 0), lambda: peers.recv(x), lambda: peers.recv(x, 0)):
            with pytest.raises(CommunicationError, match="it is the only rank"):
                call()
    else:
        for rank in (comm.rank, comm.size, -1):
            with pytest.raises(CommunicationError, match=f"to rank {rank}: not one of the other ranks"):
                peers.send(x, rank)
            with pytest.raises(CommunicationError, match=f"from rank {rank}: not one of the other ranks"):
                peers.recv(x, rank)
        for tag in (-1, 1000):
            with pytest.raises(CommunicationError, match="tags are 0 to 999"):
                peers.send(x, others(comm)[0], tag=tag)
        with pytest.raises(CommunicationError, match="not contiguous"):
            peers.recv(torch.zeros(4, 4)[:, 0])
    assert peers.sent_bytes == 0
    peers.close()
    peers.close()
    with pytest.raises(CommunicationError, match="channel is closed"):
        peers.recv(x)


def what_was_sent_is_counted(comm: Communicator) -> None:
    before = comm.sent_bytes
    with channel(comm) as peers:
        if comm.rank == 0:
            for dest in others(comm):
                at_once(*(lambda t=tag, d=dest: peers.send(torch.zeros(25), d, tag=t) for tag in (0, 1)))
                peers.send(torch.zeros(3, dtype=torch.bfloat16), dest)
        else:
            peers.recv(torch.zeros(25), 0, tag=0)
            peers.recv(torch.zeros(25), 0, tag=1)
            peers.recv(torch.zeros(3, dtype=torch.bfloat16), 0)
        assert peers.sent_bytes == (206 * (comm.size - 1) if comm.rank == 0 else 0)
    assert comm.sent_bytes == before  # the channel counts its own


def a_split_communicator_has_its_own_ranks(comm: Communicator) -> None:
    group = comm.split(-(comm.rank % 2))  # any integer will do
    members = list(range(comm.rank % 2, comm.size, 2))
    assert (group.rank, group.size) == (members.index(comm.rank), len(members))
    assert group.local_rank == comm.local_rank  # it still selects the GPU
    assert group.allgather_object(comm.rank) == members
    assert group.broadcast_object(comm.rank, root=group.size - 1) == members[-1]
    x = torch.full((1000,), float(comm.rank))
    assert torch.all(group.allreduce(x, name="within") == sum(members))
    y = torch.full((3,), float(comm.rank))
    assert torch.all(group.allreduce(y, name="most", op=ReduceOp.MAX) == members[-1])
    z = torch.full((3,), float(comm.rank))
    assert torch.all(group.broadcast(z, name="root", root=group.size - 1) == members[-1])
    group.barrier()
    _exchange_within(group, members, comm.rank)
    _exchange_within(group, members, comm.rank)  # a channel that is opened again
    group.close()
    group.close()
    assert comm.allgather_object(comm.rank) == list(range(comm.size))


def _exchange_within(group: Communicator, members: list[int], rank: int) -> None:
    if group.size == 1:
        return
    with channel(group) as peers:
        received = torch.zeros(1)
        after = (group.rank + 1) % group.size
        at_once(lambda: peers.send(torch.tensor([float(rank)]), after), lambda: peers.recv(received))
        assert received.item() == members[group.rank - 1]


def groups_and_the_whole_exchange_side_by_side(comm: Communicator) -> None:
    for _ in range(2):  # split, released and split again
        group = comm.split(comm.rank // 2)
        inside = sum(r for r in range(comm.size) if r // 2 == comm.rank // 2)
        works = []
        for n in range(5):
            x, y = torch.full((500,), float(comm.rank)), torch.full((500,), float(comm.rank))
            works += [
                (comm.allreduce_async(x, name=f"all-{n}"), x, sum(range(comm.size))),
                (group.allreduce_async(y, name=f"group-{n}"), y, inside),
            ]
        assert group.spans_job == (group.size == comm.size)
        for work, z, expected in works:
            work.wait()
            assert torch.all(z == expected)
        group.close()


def splitting_into_one_changes_nothing(comm: Communicator) -> None:
    comm.calls = Calls()
    group = comm.split(7)
    assert (group.rank, group.size) == (comm.rank, comm.size)
    assert group.calls is comm.calls  # which the rank's watchdog looks at
    assert group.spans_job
    assert group.allgather_object(group.rank) == list(range(comm.size))
    if group is not comm:
        group.close()


def what_is_abandoned_waits_for_nobody(comm: Communicator) -> None:
    peers, group = comm.peers(), comm.split(3)
    comm.barrier()
    for rank in range(comm.size):  # one after another: closing would wait for all
        if rank == comm.rank:
            for _ in range(2):
                peers.abandon()
                if group is not comm:
                    group.abandon()
        comm.barrier()
    if comm.size > 1:
        with pytest.raises(CommunicationError, match="the channel is closed"):
            peers.send(torch.zeros(1), others(comm)[0])
    again = comm.split(3)
    with channel(comm):
        assert again.allgather_object(comm.rank) == list(range(comm.size))
    if again is not comm:
        again.close()


def peers_and_groups_are_refused_with_the_remedy(comm: Communicator) -> None:
    """Checks a back-end that has neither."""
    remedy = "start with mpirun, or speechdp launch without --launcher"
    with pytest.raises(ConfigError, match=rf"no messages between two ranks .*{remedy}"):
        comm.peers()
    with pytest.raises(ConfigError, match=rf"cannot be split .*{remedy}"):
        comm.split(0)


PEER_CHECKS: tuple[Callable[[Communicator], None], ...] = (
    a_ring_passes_on_what_it_gets,
    any_source_tells_whose_message_it_took,
    messages_of_one_tag_arrive_in_order,
    tags_do_not_mix,
    two_channels_do_not_see_each_other,
    large_messages_pass_each_other,
    any_dtype_and_shape_arrives_bit_by_bit,
    parts_and_leaves_may_travel,
    threads_receive_with_tags_of_their_own,
    messages_and_collectives_go_on_side_by_side,
    a_message_of_another_size_is_an_error,
    waiting_for_a_message_keeps_no_core_busy,
    what_cannot_be_sent_is_refused,
    what_was_sent_is_counted,
    a_split_communicator_has_its_own_ranks,
    what_is_abandoned_waits_for_nobody,
    groups_and_the_whole_exchange_side_by_side,
    splitting_into_one_changes_nothing,
)
