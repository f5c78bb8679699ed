"""Where Horovod's ranks stand on their hosts, for any order mpirun places them in, and how they meet."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import nullcontext

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed; launch/setup builds it")

from speechdp.comm import environment, network
from speechdp.comm.base import Communicator
from speechdp.comm.horovod import gloo
from speechdp.comm.horovod.gloo import GlooMeeting, _Place, _places, check_own_name, gloo_is_better
from speechdp.comm.network import Interface
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import CommunicationError


def test_two_hosts_filled_one_after_the_other() -> None:
    assert _places(["a", "a", "b"]) == [_Place(0, 2, 0, 2), _Place(1, 2, 0, 1), _Place(0, 1, 1, 2)]


def test_a_second_start_in_a_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's own ends in a segmentation fault; here it is a line before anything is started."""
    from speechdp.comm.horovod import communicator  # noqa: PLC0415

    monkeypatch.setattr(communicator.HorovodCommunicator, "_has_ended", True)
    monkeypatch.setattr(communicator.hvd, "init", lambda: pytest.fail("it is started again"))
    with pytest.raises(
        CommunicationError, match=r"cannot start a second time in a process: call run_ranks once"
    ):
        communicator.HorovodCommunicator(SerialCommunicator())


def test_hosts_in_turn() -> None:
    assert _places(["a", "b", "a", "b"]) == [
        _Place(0, 2, 0, 2),
        _Place(0, 2, 1, 2),
        _Place(1, 2, 0, 2),
        _Place(1, 2, 1, 2),
    ]


@pytest.mark.parametrize(
    ("adapters", "pml", "over_gloo"),
    [
        (["ib", "ib"], "", False),
        (["ib", "ib"], "ucx", False),
        (["ib", "ib"], "ob1", True),  # as `speechdp launch` has it: MPI takes TCP as well
        (["ib", ""], "", True),
        (["", ""], "", True),
    ],
)
def test_gloo_is_left_for_an_infiniband_that_mpi_uses(
    adapters: list[str], pml: str, over_gloo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "OMPI_MCA_pml"):
        monkeypatch.delenv(name, raising=False)
    if pml:
        monkeypatch.setenv("OMPI_MCA_pml", pml)
    here = threading.local()
    monkeypatch.setattr(environment, "host_name", lambda: f"n{here.rank}")
    monkeypatch.setattr(network, "has_infiniband", lambda: bool(adapters[here.rank]))

    def choose(comm: Communicator) -> bool:
        here.rank = comm.rank
        return gloo_is_better(comm)

    assert run_threads(2, choose) == [over_gloo] * 2


#: Horovod as it is released, as others build it, and as launch/horovod_recipe built it and builds it.
RELEASED, OTHERS, FORMER, OURS = "0.28.1", "0.28.1+ifaces.2", "0.28.1+iface", "0.28.1+iface.2"
AWAY = re.escape(
    "its name vm resolves to 127.0.1.1, and this build of Horovod over Gloo would send other hosts there for "
    "its ranks; rebuild it with launch/build_horovod --install, or"
)


@pytest.mark.parametrize(
    ("build", "address", "refusal"),
    [
        (RELEASED, "10.0.0.1", None),
        (RELEASED, "127.0.1.1", AWAY),  # as Debian has it
        (RELEASED, "10.9.9.9", "resolves to 10.9.9.9"),  # another interface's
        (RELEASED, None, "resolves to no address of its own"),
        (OTHERS, "127.0.1.1", AWAY),
        (FORMER, "127.0.1.1", None),
        (OURS, "127.0.1.1", None),
        (OURS, "10.9.9.9", None),
        (OURS, None, None),
    ],
)
def test_ranks_that_others_would_look_for_elsewhere_are_refused(
    build: str, address: str | None, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours has them looked for at the interface that it is given."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(gloo, "version", {"horovod": build}.get)
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found if address else [])
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    with nullcontext() if refusal is None else pytest.raises(CommunicationError, match=refusal):
        check_own_name("10.0.0.1")


@pytest.mark.parametrize("hosts", [("n0", "n1"), ("n0", "n0")])
def test_ranks_of_several_hosts_look_at_their_names_before_they_meet(
    hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host each finds the other at any address."""
    looked: list[str | None] = []
    here = threading.local()
    monkeypatch.setattr(environment, "host_name", lambda: hosts[here.rank])
    monkeypatch.setattr(network, "interface_between", lambda rank, _: Interface("lo", "127.0.0.1"))
    monkeypatch.setattr(gloo, "check_own_name", looked.append)

    def meet(comm: Communicator) -> None:
        here.rank = comm.rank
        meeting = GlooMeeting(comm)
        comm.barrier()
        meeting.close()

    run_threads(2, meet)
    assert looked == ["127.0.0.1"] * (2 if hosts[0] != hosts[1] else 0)


def test_only_who_knows_the_secret_reads_and_writes_where_ranks_meet(
    capfd: pytest.CaptureFixture[str],
) -> None:
    meeting = GlooMeeting(SerialCommunicator())
    place, port = (meeting.settings[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    ours = f"http://{place}:{port}"  # as Horovod puts it together
    host, served_at = place.partition("/")[0].split(":")
    try:
        assert _asked(f"{ours}/global_/0", b"here I am") == (200, b"")
        assert _asked(f"{ours}/global_/0") == (200, b"here I am")
        assert _asked(f"{ours}/global_/1")[0] == 404
        for stranger in ("", "global_/0", "0" * 34 + "/global_/0"):
            assert _asked(f"http://{host}:{served_at}/{stranger}")[0] == 403
            assert _asked(f"http://{host}:{served_at}/{stranger}", b"poison")[0] == 403
        for words in (b"GET nothing HTTP/1.0\r\n\r\n", b"\xff\x00\r\n\r\n", b"PUT"):
            with socket.create_connection((host, int(served_at))) as connection:
                connection.sendall(words)
        assert _asked(f"{ours}/global_/0") == (200, b"here I am")
    finally:
        meeting.close()
    assert capfd.readouterr().err == ""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(served_at)))


def _asked(url: str, put: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, data=put, method="GET" if put is None else "PUT")
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status), bytes(answer.read())
    except urllib.error.HTTPError as refusal:
        return refusal.code, b""
