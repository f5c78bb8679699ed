"""Quantised exchanges on a GPU: what they come to, and the streams that they are made on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from speechdp.comm.base import Communicator, PeerCommunicator
from speechdp.comm.staging import Staged, as_bytes
from speechdp.comm.threads.communicator import run_threads
from speechdp.strategies.delayed_averaging import _Aside
from speechdp.strategies.mechanisms.neighbours import QuantisedNeighbours
from speechdp.strategies.mechanisms.quantisation import Quantiser
from speechdp.strategies.mechanisms.quantised_mean import Outbox, QuantisedMean
from speechdp.strategies.mechanisms.topology import ring_mixing
from speechdp.timing.timeline import Timeline
from tests.helpers.fake_gpu.cuda import Event, Log, Stream

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Make streams and events up, the current one of each thread its own; yield what they were told."""
    log, of_thread = Log(), threading.local()
    compute = Stream(log, "compute")

    @contextlib.contextmanager
    def stream(chosen: Stream | None) -> Iterator[None]:
        of_thread.current = chosen or compute
        yield
        of_thread.current = compute

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, "aside"))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(log))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: getattr(of_thread, "current", compute)
    )
    yield log


def _current() -> str:
    return str(torch.cuda.current_stream(DEVICE).name)  # type: ignore[attr-defined]


class _NotingPeers(PeerCommunicator):
    """Notes the stream that a message is sent on."""

    rank, size = 0, 2

    def __init__(self, log: Log) -> None:
        self._log = log

    def send(self, x: Tensor, dest: int, *, tag: int = 0) -> None:
        self._log.append(f"sent on {_current()}")

    def recv(self, x: Tensor, source: int | None = None, *, tag: int = 0) -> int:
        self._log.append(f"received on {_current()}")
        return 1

    def close(self) -> None:
        return None


def test_an_average_beside_training_has_a_stream_of_its_own_and_so_have_its_messages(told: Log) -> None:
    aside, outbox = _Aside(DEVICE), Outbox(_NotingPeers(told))
    aside.open("aside")
    outbox.open()
    message: Any = SimpleNamespace(is_cuda=True, device=DEVICE)

    def job() -> None:
        told.append(f"averaged on {_current()}")
        outbox.post(message, 1, 0)
        outbox.flush()

    work = aside.start(job)
    work.wait()
    aside.close()
    outbox.close()
    assert told == [
        "aside: waits for compute",
        "averaged on aside",
        "aside: event",
        "host: waits for event of aside",
        "sent on aside",
        "compute: waits for aside",
    ]


def test_differences_of_neighbours_are_made_and_added_on_their_own_stream(
    told: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline, parameters = Timeline(None, rank=0, device=torch.device("cpu")), torch.ones(5)
    route = QuantisedNeighbours(_NotingPeers(told), timeline, parameters, ring_mixing(0, 2), "int8")
    route._stream = Stream(told, "aside")  # type: ignore[assignment]
    for name, what in (("write_difference", "written"), ("add_difference", "added")):
        monkeypatch.setattr(Quantiser, name, lambda *_, what=what: told.append(f"{what} on {_current()}"))
    monkeypatch.setattr(route, "_average", lambda: told.append(f"averaged on {_current()}"))
    route.open()
    route.start(ring_mixing(0, 2))
    route.complete()
    route.close()
    assert [told[0], *told[-2:]] == [
        "aside: waits for compute",
        "compute: waits for aside",
        "averaged on compute",
    ]
    sending, receiving = (
        [line for line in told[1:-2] if line.startswith(words)]
        for words in (("written", "sent"), ("received", "added"))
    )
    assert sending == ["written on aside", "sent on aside"]
    assert receiving == ["received on aside", "added on aside"]


def test_on_a_cpu_there_is_no_stream() -> None:
    aside, done = _Aside(torch.device("cpu")), list[int]()
    aside.open("aside")
    aside.start(lambda: done.append(1)).wait()
    aside.close()
    assert done == [1]


class _OverTheHost(PeerCommunicator):
    """Carries messages of a GPU over the host's memory, as the back-ends do."""

    def __init__(self, peers: PeerCommunicator) -> None:
        self._peers, self.rank, self.size = peers, peers.rank, peers.size

    def send(self, x: Tensor, dest: int, *, tag: int = 0) -> None:
        self._peers.send(Staged(as_bytes(x)).fetch(), dest, tag=tag)

    def recv(self, x: Tensor, source: int | None = None, *, tag: int = 0) -> int:
        staged = Staged(as_bytes(x), load=False)
        sender = self._peers.recv(staged.fetch(), source, tag=tag)
        staged.store()
        return sender

    def close(self) -> None:
        self._peers.close()


def _means(comm: Communicator, vectors: Tensor, device: torch.device, *, aside: bool) -> list[Tensor]:
    """Average one vector a round, from the last mean on; return the means.

    Args:
        vectors: of each round and rank.  (rounds, N, n)
        aside: in a thread and on a stream of their own, while this one's is kept busy.
    """
    peers = _OverTheHost(comm.peers())
    outbox, beside = Outbox(peers), _Aside(device)
    outbox.open()
    beside.open(f"aside {comm.rank}")
    out = torch.zeros(vectors.shape[-1], device=device)
    mean, found = QuantisedMean(outbox, out, "int8"), []
    for round_ in vectors:
        own, reference = round_[comm.rank].to(device), out.clone()

        def average(own: Tensor = own, reference: Tensor = reference) -> None:
            mean.average(own, reference, 3.0 + comm.rank, out=out)

        if aside:
            work = beside.start(average)
            busy = torch.randn(512, 512, device=device)
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)
            work.wait()
        else:
            average()
        found.append(out.to("cpu", copy=True))
    beside.close()
    outbox.close()
    peers.close()
    return found


@pytest.mark.parametrize(
    ("device", "aside"),
    [
        ("cpu", True),
        pytest.param("cuda", False, marks=[pytest.mark.gpu, needs_gpu]),
        pytest.param("cuda", True, marks=[pytest.mark.gpu, needs_gpu]),
    ],
)
def test_means_are_those_of_the_cpu(device: str, aside: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(6, 2, 200_000, generator=generator)
    expected = run_threads(2, lambda c: _means(c, vectors, torch.device("cpu"), aside=False))[0]
    found = run_threads(2, lambda c: _means(c, vectors, torch.device(device), aside=aside))
    # A product and a sum in one rounding, as a GPU has it, may choose the next code: one step of it, and what
    # is owed for it.
    step = 4 * float(vectors.abs().max()) / 127
    for of_rank in found:
        for mean, same, on_cpu in zip(of_rank, found[0], expected, strict=True):
            assert torch.equal(mean, same), "ranks hold different bits"
            torch.testing.assert_close(mean, on_cpu, rtol=0, atol=0 if device == "cpu" else step)


def _averages_of_neighbours(comm: Communicator, vectors: Tensor, device: torch.device) -> list[Tensor]:
    """Exchange one vector a round while the device is kept busy; return the parameters after each.

    Args:
        vectors: what each rank moves by in each round.  (rounds, N, n)
    """
    peers, timeline = _OverTheHost(comm.peers()), Timeline(None, rank=comm.rank, device=torch.device("cpu"))
    mixing, parameters = ring_mixing(comm.rank, comm.size), torch.zeros(vectors.shape[-1], device=device)
    route, found = QuantisedNeighbours(peers, timeline, parameters, mixing, "int8"), []
    route.open()
    for round_ in vectors:
        parameters.add_(round_[comm.rank].to(device))
        route.start(mixing)
        busy = torch.randn(512, 512, device=device)
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        route.complete()
        found.append(parameters.to("cpu", copy=True))
    route.close()
    peers.close()
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_parameters_of_neighbours_are_those_of_the_cpu(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(6, 3, 200_000, generator=generator)
    on_cpu, found = (
        run_threads(3, lambda comm, d=d: _averages_of_neighbours(comm, vectors, torch.device(d)))
        for d in ("cpu", device)
    )
    # The next code may be chosen, as above, in each round.
    step = 0 if device == "cpu" else 4 * float(vectors.abs().max()) / 127
    for rank, rounds in enumerate(found):
        for parameters, expected in zip(rounds, on_cpu[rank], strict=True):
            torch.testing.assert_close(parameters, expected, rtol=0, atol=step)
    mean = torch.stack([rounds[-1] for rounds in found]).double().mean(0)
    torch.testing.assert_close(mean, vectors.double().sum(0).mean(0), rtol=0, atol=1e-5)
