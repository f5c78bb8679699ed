"""A rank that is gone while losses are tolerated: nothing is missed, nobody waits, figures stay whole."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speechdp.comm.base import Communicator, ReduceOp
from speechdp.comm.loss_tolerance import PeerLost, Star, in_shares
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.comm.threads.job import Vanished
from speechdp.data.plan.assignment import Meeting, MeetingKind
from speechdp.data.plan.epoch_plan import CorpusIndex, PlanOptions, plan_epoch
from speechdp.data.shards import alignment_file
from speechdp.data.shards.dataset import Dataset
from speechdp.dealing.batch_server import BatchServer, DealingLimits
from speechdp.dealing.epoch_batches import Deal
from speechdp.decode import align
from speechdp.errors import CommunicationError, ConfigError, RunError
from speechdp.options.batch import BatchOptions
from speechdp.options.faults import FaultOptions
from speechdp.options.model import ModelOptions
from speechdp.options.run import TrainOptions
from speechdp.parallel.declared import Roster
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.folders import read_run
from speechdp.train import tied_states
from speechdp.train.progress import SilentReporter
from speechdp.train.realign import make_alignments, train_with_realignment
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.strategy_checks.ad_psgd import Descent
from tests.helpers.tiny_data import write_tiny_data
from tests.helpers.waiting import LIMIT_S

CPU = torch.device("cpu")
TOLERANT = FaultOptions(tolerate_loss=True)
OPTIONS = TrainOptions(
    ModelOptions(layers=1, cells=4),
    BatchOptions(batch_size=1),
    epochs=3,
    strategy=StrategyChoice("ad_psgd"),
    checkpoint_steps=4,
    faults=TOLERANT,
)
ends_threads = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("losses") / "data")


# --- channels and collectives ---------------------------------------------------------------------------


def test_collectives_and_channels_go_on_without_a_rank_that_vanishes() -> None:
    def work(comm: Communicator) -> None:
        peers = comm.peers()
        if comm.rank == 1:
            raise Vanished
        x = torch.tensor([comm.rank + 1.0])
        assert comm.allreduce(x, name="x").item() == 1.0 + 3.0
        assert comm.alive == (0, 2) and comm.gone == {1}
        assert comm.allreduce(torch.tensor([comm.rank]), name="y", op=ReduceOp.MAX).item() == 2
        assert comm.allgather_object(comm.rank) == [0, 2]
        assert comm.broadcast_object(comm.rank, root=2) == 2
        for call in (lambda: peers.recv(x, 1), lambda: peers.send(x, 1)):
            with pytest.raises(PeerLost) as caught:
                call()
            assert caught.value.ranks == {1}
        if comm.rank == 0:
            with pytest.raises(PeerLost):
                peers.recv(x)  # once: the next waits for those that are left
            assert peers.recv(x) == 2 and x.item() == 7
        else:
            peers.send(torch.tensor([7.0]), 0)
        peers.close()

    assert len(run_threads(3, work)) == 2


@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives_through_rank_0_are_those_of_the_ranks_that_are_left(size: int) -> None:
    def work(comm: Communicator) -> None:
        star = Star(comm.peers())
        left = list(range(size))
        for lost in (None, size - 1, 1):
            if comm.rank == lost:
                raise Vanished
            left = [rank for rank in left if rank != lost]
            x = torch.tensor([[comm.rank, 1.0]])
            star.allreduce(x, ReduceOp.SUM)
            assert x.tolist() == [[sum(left), len(left)]] and star.alive == tuple(left)
            for op, expected in ((ReduceOp.MAX, left[-1]), (ReduceOp.MIN, 0)):
                y = torch.tensor([comm.rank])
                star.allreduce(y, op)
                assert y.item() == expected
            assert star.allgather(b"x" * comm.rank) == [b"x" * rank for rank in left]
            z = torch.tensor([comm.rank], dtype=torch.uint8)
            star.broadcast(z, left[-1])
            assert z.item() == left[-1]
            star.barrier()
        if lost := set(range(size)) - set(left):
            with pytest.raises(CommunicationError, match="is gone, and the others need its values"):
                star.broadcast(torch.zeros(1), min(lost))
        star.part()

    assert len(run_threads(size, work)) == max(1, size - 2)


def test_without_rank_0_there_are_no_collectives() -> None:
    def work(comm: Communicator) -> None:
        star = Star(comm.peers())
        if comm.rank == 0:
            raise Vanished
        with pytest.raises(
            CommunicationError, match="rank 0 is gone, and only it deals the batches, evaluates and saves"
        ):
            star.barrier()

    run_threads(3, work)


def test_a_share_that_is_lost_is_done_by_others() -> None:
    def work(comm: Communicator) -> float:
        def share(number: int, of: int) -> float:
            if comm.rank == 2:
                raise Vanished
            return float(comm.allreduce(torch.arange(12.0)[number::of].sum().reshape(1), name="sum"))

        return in_shares(comm, share)

    assert run_threads(4, work) == [66.0] * 3


# --- the server -----------------------------------------------------------------------------------------


def planner(parts: int) -> Any:
    index = CorpusIndex.of_lengths([np.random.default_rng(3).integers(5, 30, size=57)])
    return lambda epoch: plan_epoch(index, PlanOptions(4, seed=1), epoch, parts)


def is_batch(item: Any) -> bool:
    return isinstance(item, tuple)


class Ranks:
    """Ranks that are a batch in work, one read ahead and one asked for; one of them is lost on its way."""

    def __init__(self, server: BatchServer, size: int, lost: int, after: int, order: list[int]) -> None:
        self.server, self.lost, self.after = server, lost, after
        self.hands: list[list[Any]] = [[] for _ in range(size)]
        #: Batches and meetings that each rank has come to the end of.
        self.done: list[list[Any]] = [[] for _ in range(size)]
        self.dealt_before: set[Any] = set()
        going, self.asked = set(range(size)), 0
        while going:
            for rank in order:
                if rank in going and not self.turn(rank):
                    going.discard(rank)

    def turn(self, rank: int) -> bool:
        """Let a rank ask; say whether it goes on."""
        self.asked += 1
        assert self.asked < 20_000, "ranks are kept waiting for ever"
        if rank == self.lost and self.asked > self.after:
            self.dealt_before = {
                b for done in (*self.done, *self.hands) for b in done if isinstance(b, tuple)
            }
            assert self.server.lose(rank) and not self.server.lose(rank)
            return False
        answer = self.server.answer(rank, stop=False)
        hand = self.hands[rank]
        if isinstance(answer.item, Deal):
            hand.append((answer.epoch, answer.item.owner, answer.item.index))
        elif isinstance(answer.item, Meeting):
            hand.append(answer.item)
        if hand and (answer.item is None or len(hand) > 2):
            self.done[rank].append(hand.pop(0))
        if isinstance(answer.item, Meeting) and answer.item.kind in {MeetingKind.STOP, MeetingKind.END}:
            self.done[rank] += hand
            return False
        return True

    def batches(self, rank: int) -> list[tuple[int, int, int]]:
        return [item for item in self.done[rank] if is_batch(item)]

    def before(self, rank: int, meeting: Meeting) -> list[tuple[int, int, int]]:
        """Return the batches a rank had done when it came to a meeting, all of them if it never did."""
        done = self.done[rank]
        end = next((i for i, item in enumerate(done) if item is meeting), len(done))
        return [item for item in done[:end] if is_batch(item)]


def all_batches(plan: Any, size: int, epochs: range) -> set[tuple[int, int, int]]:
    frames = {epoch: plan(epoch).frames for epoch in epochs}
    return {(e, r, int(i)) for e in epochs for r in range(size) for i in np.flatnonzero(frames[e][r])}


cases = st.integers(2, 4).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.integers(1, size - 1),
        st.integers(0, 120),
        st.lists(st.integers(0, size - 1), max_size=8).map(lambda extra: [*range(size), *extra]),
    )
)


@settings(deadline=None, max_examples=80)
@given(cases)
def test_what_a_lost_rank_had_in_hand_is_dealt_again(case: tuple[int, int, int, list[int]]) -> None:
    size, lost, after, order = case
    plan, epochs = planner(size), 2
    roster = Roster(list(range(size)), list(range(size)))
    server = BatchServer(plan, roster, DealingLimits(epochs, checkpoint_steps=2))
    ranks = Ranks(server, size, lost, after, order)
    done = Counter(batch for rank in range(size) for batch in ranks.batches(rank))
    expected = all_batches(plan, size, range(epochs))
    in_hand = {item for item in ranks.hands[lost] if is_batch(item)}
    missed = expected - set(done)
    # Only what it held when its epoch had been dealt out.
    assert missed <= in_hand and len(missed) <= 3
    for epoch in {batch[0] for batch in missed}:
        assert all_batches(plan, size, range(epoch, epoch + 1)) <= ranks.dealt_before
    assert all(times <= 2 for times in done.values())
    assert sum(times - 1 for times in done.values()) <= 3
    # A run that goes on from any meeting misses nothing either, but what the meeting could not know.
    for meeting in (item for item in ranks.done[0] if isinstance(item, Meeting)):
        before = {batch for rank in range(size) for batch in ranks.before(rank, meeting)}
        server = BatchServer(plan, roster, DealingLimits(epochs), meeting.state)
        second = Ranks(server, size, -1, 0, list(range(size)))
        after_it = {batch for rank in range(size) for batch in second.batches(rank)}
        assert expected - before - after_it <= missed


# --- the strategy ---------------------------------------------------------------------------------------


@ends_threads
@pytest.mark.parametrize("kind", ["all", "ring", "exponential"])
@pytest.mark.parametrize("lost", [1, 2])
def test_ad_psgd_mixes_all_that_are_left_and_keeps_their_mean(kind: str, lost: int) -> None:
    def check(comm: Communicator) -> None:
        run = Descent(comm, f":topology={kind}", learning_rate=0.0)

        def scattering() -> tuple[Tensor, float]:
            """Return the mean of those that are left, and the sum of their squared distances to it."""
            own = run.parameters()
            mean = comm.allreduce(own.clone(), name="mean") / len(comm.alive)
            return mean, float(comm.allreduce(((own - mean) ** 2).sum().reshape(1), name="spread"))

        run.descend(3)
        if comm.rank == lost:
            raise Vanished
        run.descend(20, pause_s=0.002)
        run.strategy.pause()
        comm.barrier()
        assert comm.alive == tuple(rank for rank in range(4) if rank != lost)
        run.scatter()
        mean, before = scattering()
        for _ in range(30):
            run.round(2)
        mean_after, after = scattering()
        assert float((mean_after - mean).abs().max()) <= 1e-12
        assert after < 0.05 * before  # a graph in two parts would leave the parts apart
        run.finish()

    assert len(run_threads(4, check)) == 3


# --- a whole run ----------------------------------------------------------------------------------------


class Losing(SilentReporter):
    """Of a rank that vanishes after its first step, or of one that goes on only then; keeps the notices."""

    def __init__(self, is_gone: threading.Event, *, vanishes: bool = False) -> None:
        self.notices: list[str] = []
        self._is_gone, self._vanishes = is_gone, vanishes

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        if self._vanishes:
            self._is_gone.set()
            raise Vanished
        assert self._is_gone.wait(LIMIT_S)


@ends_threads
def test_a_run_ends_well_without_a_lost_rank_and_goes_on_with_it(dataset: Dataset, tmp_path: Path) -> None:
    is_gone = threading.Event()
    said = Losing(is_gone)

    def work(comm: Communicator) -> None:
        # Ranks that hurried ahead could come to the last checkpoints before it is lost.
        reporter = said if comm.rank == 0 else Losing(is_gone, vanishes=comm.rank == 2)
        train_run(Session(dataset, comm, CPU, reporter, facts={"hosts": list("abcd")}), OPTIONS, tmp_path)

    assert len(run_threads(4, work)) == 3
    assert said.notices.count("rank 2 on c is gone; continuing with 3 ranks") == 1
    # Every batch counts once: 24 segments in 3 epochs, by 4 ranks.
    completed = json.loads((tmp_path / "completed.json").read_text())
    assert completed["step"] == 24 * 3 / 4 and completed["lost_ranks"] == [2]
    run = read_run(tmp_path)
    assert run.problems == () and run.timing is not None
    assert [rank.rank for rank in run.timing.ranks] == [0, 1, 3]
    assert json.loads((tmp_path / "timing.json").read_text())["lost_ranks"] == [2]
    for metrics in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert metrics["heldout_frames"] == dataset.num_frames("dev")
    older, newest = sorted((tmp_path / "checkpoints").glob("step-*"))
    head = json.loads((older / "checkpoint.json").read_text())
    assert head["lost"] == [2] and head["step"] < completed["step"]
    assert [entry["file"][:9] for entry in head["ranks"]] == ["rank-0000", "rank-0001", "rank-0003"]
    # The checkpoint belongs to four ranks: the one that was lost begins again as a copy.
    (tmp_path / "completed.json").unlink()
    shutil.rmtree(newest)
    run_threads(4, lambda comm: train_run(Session(dataset, comm, CPU), OPTIONS, tmp_path, resume=True))
    assert json.loads((tmp_path / "completed.json").read_text())["step"] == completed["step"]


@ends_threads
def test_nothing_is_aligned_by_fewer_than_all_ranks(dataset: Dataset, tmp_path: Path) -> None:
    """A rank's shards are its own: without it, the targets would never be whole."""
    is_gone = threading.Event()
    options = dataclasses.replace(OPTIONS, epochs=1, realign=1)

    def work(comm: Communicator) -> None:
        reporter = Losing(is_gone, vanishes=comm.rank == 2)
        with pytest.raises(RunError, match=r"rank 2 is gone, .*; run again"):
            train_with_realignment(Session(dataset, comm, CPU, reporter), options, tmp_path)

    run_threads(3, work)
    assert (tmp_path / "realign" / "1" / "completed.json").is_file()
    assert not (tmp_path / "alignments").exists()
    run_threads(
        3, lambda comm: train_with_realignment(Session(dataset, comm, CPU), options, tmp_path, resume=True)
    )
    assert (tmp_path / "completed.json").is_file()


@ends_threads
@pytest.mark.parametrize("context", ["none", "left"])
def test_no_targets_are_marked_whole_that_a_lost_rank_has_left_out(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: Literal["none", "left"]
) -> None:
    """It is lost while it aligns, or while it ties states."""
    realign = int(context == "none")
    options = dataclasses.replace(OPTIONS, epochs=1, realign=realign, context=context)
    write, lost = alignment_file.write_targets, threading.Event()

    def write_or_vanish(path: Path, *arguments: Any) -> None:
        if path.name == dataset.shard_paths("train")[-1].name:
            lost.set()
            raise Vanished
        write(path, *arguments)

    for module in (align, tied_states):
        monkeypatch.setattr(module, "write_targets", write_or_vanish)

    def work(comm: Communicator) -> None:
        with pytest.raises(RunError, match=r"rank 1 is gone, .*; run again"):
            make_alignments(Session(dataset, comm, CPU), options, tmp_path)

    assert len(dataset.shard_paths("train")) == 2  # of which rank 1 has the second
    run_threads(2, work)
    assert lost.is_set() and not list((tmp_path / "alignments").glob("*/completed.json"))


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"strategy": StrategyChoice("gradient_averaging")},
            "gradient_averaging waits for every rank in its exchanges",
        ),
        ({"strategy": StrategyChoice("ad_psgd:groups=2")}, "choose --strategy ad_psgd (without groups)"),
        ({}, "the serial back-end cannot continue without a lost rank"),
    ],
)
def test_who_cannot_go_on_is_refused_before_the_run_begins(
    dataset: Dataset, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    session = Session(dataset, SerialCommunicator(), CPU)
    with pytest.raises(ConfigError, match=f"^--tolerate-loss: .*{re.escape(words)}"):
        train_run(session, dataclasses.replace(OPTIONS, **change), tmp_path)
    assert list(tmp_path.iterdir()) == []


@ends_threads
def test_a_second_run_does_not_begin_with_fewer_ranks(dataset: Dataset, tmp_path: Path) -> None:
    started = threading.Barrier(2)

    def work(comm: Communicator) -> None:
        started.wait(LIMIT_S)
        if comm.rank == 1:
            raise Vanished
        comm.barrier()
        with pytest.raises(RunError, match="rank 1 is gone, but a run needs all its ranks to start"):
            train_run(Session(dataset, comm, CPU), OPTIONS, tmp_path)

    run_threads(2, work)
