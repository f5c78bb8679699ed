"""Feeding that goes wrong, ranks as threads: damaged data, defects, early leavers; and packets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.comm.packets import Packet, PacketChannel, Sent
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading.loader import Loader
from speechdp.data.loading.source import SplitSource
from speechdp.data.loading.source_request import SourceRequest
from speechdp.data.plan.assignment import planned
from speechdp.data.plan.epoch_plan import plan_epoch
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import CommunicationError, ShardError
from speechdp.feeding import feeder as feeding
from speechdp.feeding.fed_source import FedSource
from speechdp.feeding.feeder_link import DEPTH, FeederLink
from tests.contract.test_feeders import PLAIN, PLAN, no_thread_is_left, segments_of
from tests.helpers.feeding import Trainer, fed
from tests.helpers.packet_checks import CHECKS
from tests.helpers.tiny_data import TinySizes, flip_byte, truncate, write_tiny_data
from tests.helpers.waiting import LIMIT_S

__all__ = ["no_thread_is_left"]  # holds here as well


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("failing") / "data", TinySizes(shards=3))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_packets(check: Callable[[Communicator], None], size: int) -> None:
    run_threads(size, check, timeout_s=LIMIT_S)


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_a_shard_damaged_in_mid_epoch_is_told_with_file_and_feeder(tmp_path: Path, how: str) -> None:
    dataset = write_tiny_data(tmp_path / "data", TinySizes(shards=1))
    path = dataset.shard_paths("train")[0]

    def train(trainer: Trainer) -> None:
        with closing(trainer.feeders.open(PLAIN)) as source:
            plan = plan_epoch(source.index, PLAN, 0, trainer.comm.size)
            source.batch(plan.ranks[trainer.comm.rank].batch(0))
            trainer.comm.barrier()
            if trainer.comm.rank == 0 and how == "flipped":
                read = {int(u) for part in plan.ranks for u in part.batch(0).utterance}
                flip_byte(path, min(set(range(len(source.index))) - read))
            elif trainer.comm.rank == 0:
                truncate(path, path.stat().st_size // 2)
            trainer.comm.barrier()
            with Loader(source, planned(lambda epoch: plan, trainer.comm.rank, 1)) as loader:
                for _ in loader:
                    pass

    with pytest.raises(ShardError, match=rf"^feeder rank [23]: .*{path.name}"):
        fed(2, 2, lambda feeder: dataset, train)


def test_what_cannot_be_opened_is_told_with_the_feeder(dataset: Dataset, tmp_path: Path) -> None:
    wanted = SourceRequest("train", alignments=tmp_path / "nowhere")
    with pytest.raises(ShardError, match=r"^feeder rank 1: .*nowhere: no such alignment directory"):
        fed(1, 1, lambda feeder: dataset, lambda trainer: trainer.feeders.open(wanted))


def test_a_defect_on_a_feeder_ends_the_job(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_source(*args: object) -> SplitSource:
        raise ValueError("a defect")

    monkeypatch.setattr(feeding, "open_local_source", open_source)
    woken: list[str] = []

    def train(trainer: Trainer) -> FedSource:
        try:
            return trainer.feeders.open(PLAIN)
        except CommunicationError as error:
            woken.append(str(error))
            raise

    with pytest.raises(ValueError, match="a defect") as caught:
        fed(2, 1, lambda feeder: dataset, train)
    assert caught.value.__notes__ == ["raised on rank 2 of 3"]
    assert [text.startswith("rank 2 failed (ValueError)") for text in woken] == [True, True]


def test_feeders_leave_with_the_exit_code_of_the_trainers(dataset: Dataset) -> None:
    """Also where a trainer leaves with batches under way, as one that is asked to stop does."""

    def train(trainer: Trainer) -> None:
        source = trainer.feeders.open(PLAIN)
        for segments in segments_of(source, 9):
            source.start(segments)
        source.close()
        source.close()

    fed(2, 2, lambda feeder: dataset, train, exit_code=75)


class BrokenOff(PacketChannel):
    """A feeder that has answered once when it is gone: the third question cannot be sent any more."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.num_asked = 0
        self.answers = [Packet(1, {"op": "batch", "number": 0})]
        self.may_answer = threading.Event()

    def send(
        self, dest: int, head: dict[str, Any], tensors: Sequence[Tensor] = (), sent: Sent | None = None
    ) -> None:
        self.num_asked += 1
        if self.num_asked > DEPTH:
            raise CommunicationError("the cable is gone")

    def receive(self) -> Packet | None:
        return self.answers.pop() if self.may_answer.is_set() and self.answers else None

    @property
    def is_moving(self) -> bool:
        return False

    def close(self) -> None:
        return None


def test_nobody_waits_for_an_answer_that_came_with_the_end_of_the_link() -> None:
    """The answer makes room for the next question, which cannot be sent."""
    channel = BrokenOff()
    link = FeederLink(channel, [1])
    answers = [link.ask_for_batch({}, []) for _ in range(DEPTH + 1)]
    channel.may_answer.set()
    for answer in answers:
        with pytest.raises(CommunicationError, match="the cable is gone"):
            answer.result(LIMIT_S)
    link.abandon()
