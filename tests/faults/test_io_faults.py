"""Operations on files that fail or are late: a sample; benchmarks/faults/io_faults.py tries all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.cases import Cases
from tests.faults.driver import Driver
from tests.faults.fork_server import ForkServer, fork_server, why_no_shim
from tests.faults.points import Operation, Point, points

_WHY_NOT = why_no_shim()
#: The largest sample takes two minutes of two idle cores.
pytestmark = [
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
    pytest.mark.timeout(1200),
]

#: Points of each command; a try takes about a second of a core, launched 10.
_SAMPLES = {
    **{"train": 70, "resume": 25, "train-alone": 10, "train-averaging": 10, "train-realign": 4},
    **{"prepare": 30, "shard": 20, "decode": 10, "report": 6, "sweep": 8},
    **({"prepare-synthetic": 4} if find_spec("espeakng_loader") else {}),
    **{"train-mpi": 2, "train-horovod": 2, "compare": 1, "compare-rank": 1},
}
#: Errors that code treats as others that are drawn, but for the words of their remedies;
#: benchmarks/faults/io_faults.py tries them, too.
_ALIKE = ("EDQUOT", "EROFS", "EMFILE")
#: Points that have been wrong once.
_WERE_WRONG = {
    "train": (
        "0 opendir RUN/checkpoints 3 EIO on",  # ranks waited for a minute, then said the disk is not shared
        "0 opendir RUN/checkpoints 5 EIO once",  # a traceback when old checkpoints were looked for
        "0 open RUN/checkpoints/.step-00000008.*-4.tmp/rank-0001.json 1 EIO on",  # waited for 10 minutes
        "1 mkdir RUN/checkpoints/.step-00000002.*-1.tmp 1 ENOENT on",  # a traceback
        "0 create RUN/tensorboard/events.out.tfevents.* 5 ESTALE on",  # ended the run, by a traceback
    ),
    "resume": (
        "1 open RUN/checkpoints/step-00000006/checkpoint.json 1 EIO on",  # no remedy
        "0 open RUN/checkpoints/step-00000006/rank-0000.safetensors 3 ENOENT on",  # no remedy
        "0 open RUN/run.json 1 ENOENT once",  # --overwrite, for a file that is there
    ),
    "train-realign": (
        "0 open RUN/alignments/1/train-00001.h5 2 EINTR once",  # damaged, align again
        "0 open RUN/alignments/1/train-00000.h5 3 EIO once",  # check the path
    ),
    "sweep": ("0 open OUT/sweep.json 2 EIO once",),  # run the sweep again to rewrite it
    "prepare": (
        "0 write .DATA.partial/.test-00001.h5.*.tmp 6 EIO once",  # HDF5 crashed
        "0 open DATA/data.json 1 ESTALE once",  # not a complete data directory, run prepare
    ),
    "prepare-synthetic": ("0 rename .DATA.partial/train-00000.h5 1 EACCES on",),  # recursed without end
    "report": ("0 opendir RUN/timeline 1 EACCES once",),  # the page lacked the samples and did not say so
    "decode": ("0 open RUN/model.safetensors 2 EIO once",),  # "train again"
}
#: At a time: other tests run beside these.
_JOBS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as running:
        yield running


@pytest.fixture(scope="module")
def cases(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(server, tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("name", _SAMPLES)
def test_it_goes_on_or_says_what_to_do(name: str, server: ForkServer, cases: Cases, tmp_path: Path) -> None:
    driver = Driver(server, cases.make(name), tmp_path)
    every = list(points(driver.learn()))
    chosen = random.Random(name).sample([one for one in every if one.error not in _ALIKE], _SAMPLES[name])
    chosen += map(Point.parse, _WERE_WRONG.get(name, ()))
    wrong = [verdict for verdict in driver.try_points(chosen, _JOBS) if verdict.wrong]
    assert not wrong, "\n".join(
        f"benchmarks/faults/io_faults.py --only '{name} {verdict.point}': {'; '.join(verdict.wrong)}"
        for verdict in wrong
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_folders_may_be_opened_late_on_any_rank(
    rank: int, server: ForkServer, cases: Cases, tmp_path: Path
) -> None:
    driver = Driver(server, cases.make("train"), tmp_path)
    driver.learn()
    assert driver.try_order(rank, op="opendir,fsyncdir", delay_us=300_000) == []


def test_every_operation_may_be_late(server: ForkServer, cases: Cases, tmp_path: Path) -> None:
    driver = Driver(server, cases.make("train"), tmp_path)
    driver.learn()
    assert driver.try_order(1, longest_us=20_000, seed=7) == []


def test_operations_of_all_kinds_are_seen(server: ForkServer, cases: Cases, tmp_path: Path) -> None:
    done = Driver(server, cases.make("train"), tmp_path).learn()
    kinds = {(operation.rank, operation.kind) for operation in done}
    assert kinds >= {
        (rank, kind) for rank in (0, 1) for kind in ("create", "write", "fsync", "close", "mkdir")
    }
    shards = Driver(server, cases.make("shard"), tmp_path).learn()
    # HDF5's own.
    assert {operation.kind for operation in shards if ".h5" in operation.path} >= {
        "write",
        "truncate",
        "rename",
    }


def test_a_sync_behind_a_rename_is_found(server: ForkServer, cases: Cases, tmp_path: Path) -> None:
    driver = Driver(server, cases.make("train"), tmp_path, spoilt="syncs_what_it_has_handed_over")
    driver.learn()
    # Late enough for rank 0 to rename the folder meanwhile; at first, unless it gets no core for so long.
    tries = (
        driver.try_order(1, op="opendir", path="RUN/checkpoints/.step-*", delay_us=seconds * 1_000_000)
        for seconds in (3, 12, 48)
    )
    (wrong,) = next(filter(None, tries), ("nothing was found",))
    assert "No such file or directory" in wrong


@pytest.mark.parametrize(
    ("spoilt", "point", "expected"),
    [
        ("takes_no_for_an_answer", "0 create RUN/.completed.json.*.tmp 1 EIO once", "completed.json"),
        ("writes_in_place", "0 write RUN/run.json 1 ENOSPC on", "repeated"),
    ],
)
def test_bad_writers_are_found(
    spoilt: str, point: str, expected: str, server: ForkServer, cases: Cases, tmp_path: Path
) -> None:
    driver = Driver(server, cases.make("train"), tmp_path, spoilt=spoilt)
    driver.learn()
    verdict = driver.try_point(Point.parse(point))
    assert verdict.wrong and expected in " ".join(verdict.wrong), verdict


def test_a_point_survives_its_text() -> None:
    for is_late in (False, True):
        point = Point(Operation(1, "fsync", "RUN/.run.json.*.tmp", 3), "EIO", is_late=is_late)
        assert Point.parse(str(point)) == point
