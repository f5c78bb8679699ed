"""Delays at random in every exchange, message and operation on files change nothing: some of many."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
from torch import Tensor

from speechdp.checkpoint import writer as checkpoint_writer
from speechdp.checkpoint.folder import CheckpointPlace, Entry, hand_over_entry
from speechdp.comm.base import ReduceOp
from speechdp.comm.threads import communicator as threads
from speechdp.errors import RunError
from speechdp.files import sync
from speechdp.train import run
from tests.faults.late import Killed, Pace, late
from tests.faults.late_runs import Bench, Story, Threads
from tests.faults.schedules import STRATEGIES, fuzz_schedules

#: For some 20 s of a core; benchmarks/faults/io_faults.py runs thousands.
NUM_SCHEDULES = 36
PUNCTUAL = Pace(1, share=0.0, longest_s=0.0)
#: Only what rank 1 opens is late, by up to so many seconds: the first do, unless rank 0 gets no core.
OPENS_LATE = [
    Pace(1, share=0.0, longest_s=0.0, slow=frozenset({"open"}), slow_rank=1, slow_s=seconds)
    for seconds in (2.0, 10.0, 40.0)
]


def test_every_strategy_ends_the_same_however_late_anything_is() -> None:
    assert len(STRATEGIES) <= NUM_SCHEDULES, "a schedule for each: raise NUM_SCHEDULES"
    assert fuzz_schedules(NUM_SCHEDULES, seed=0) == (NUM_SCHEDULES, [])


def test_what_touches_a_folder_that_is_no_longer_its_own_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hand_over_entry_and_sync(place: CheckpointPlace, rank: int, entry: Entry) -> None:
        hand_over_entry(place, rank, entry)
        sync(place.temporary)  # which rank 0 may have renamed by now

    monkeypatch.setattr(checkpoint_writer, "hand_over_entry", hand_over_entry_and_sync)
    bench = Bench(tmp_path, Threads())

    def is_found(pace: Pace) -> bool:
        try:
            bench.run(Story("gradient_averaging", 2), pace)
        except RunError as error:
            assert "No such file or directory on rank 1" in str(error)
            return True
        return False

    assert any(map(is_found, OPENS_LATE))


def test_a_rank_that_only_sleeps_ends_with_its_job(tmp_path: Path) -> None:
    """As rank 0 does that asks its own server for work when the others have ended: seed 21 hung at times."""
    begun = threading.Event()

    def sleep_on() -> None:
        while True:
            begun.set()
            time.sleep(0.001)

    with late(PUNCTUAL, tmp_path) as force:
        rank = threading.Thread(target=sleep_on, name="rank 0", daemon=True)
        rank.start()
        assert begun.wait(300)
        force.end_job(Killed())
        rank.join(300)
        assert not rank.is_alive()


def test_the_operation_that_a_killed_rank_is_in_is_over_before_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it may take long, and would change the folder of the run that is resumed."""
    reading, writing = os.pipe()
    begun = threading.Event()

    def sync_long(_fd: int) -> None:
        begun.set()
        os.read(reading, 1)

    monkeypatch.setattr(os, "fsync", sync_long)
    with late(PUNCTUAL, tmp_path) as force:
        rank = threading.Thread(target=lambda: os.fsync(0), name="rank 0", daemon=True)
        rank.start()
        assert begun.wait(300)
        ending = threading.Thread(target=force.end_all)
        ending.start()
        ending.join(1.0)
        assert ending.is_alive()
        os.write(writing, b".")
        ending.join(300)
        assert not ending.is_alive()
        rank.join(300)


def test_a_reference_that_has_failed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each later schedule of its story would find the folder that the first has left."""

    def fail(*_: object) -> None:
        raise RunError("once")

    story, bench = Story("gradient_averaging", 2), Bench(tmp_path, Threads())
    with monkeypatch.context() as patch, pytest.raises(RunError, match="once"):
        patch.setattr(run, "save_trained", fail)
        bench.run(story, PUNCTUAL)
    assert list(tmp_path.glob("reference-*/run.json"))
    assert list(bench.run(story, PUNCTUAL).differences()) == []


def test_another_order_of_summation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story, bench = Story("gradient_averaging", 3), Bench(tmp_path, Threads())
    assert list(bench.run(story, PUNCTUAL).differences()) == []
    reduce, rng = threads._reduce, random.Random(1)

    def reduce_in_any_order(parts: list[Tensor], op: ReduceOp) -> Tensor:
        return reduce(rng.sample(parts, len(parts)), op)

    monkeypatch.setattr(threads, "_reduce", reduce_in_any_order)
    (wrong, *_) = bench.run(story, PUNCTUAL).differences()
    assert wrong.startswith("another model: [")
