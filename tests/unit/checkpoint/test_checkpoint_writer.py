"""Checkpoints are written behind training, which may change its state; a kill at any stage loses none."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speechdp import files
from speechdp.checkpoint import folder as checkpoint_folder
from speechdp.checkpoint import rank_file
from speechdp.checkpoint import writer as checkpoint_writer
from speechdp.checkpoint.folder import CheckpointPlace, prune
from speechdp.checkpoint.rank_file import Snapshot, take_snapshot
from speechdp.checkpoint.state import RankState, checkpoint_steps, load_checkpoint
from speechdp.checkpoint.writer import CheckpointWriter
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import CommunicationError, RunError
from tests.helpers.mpi import REPOSITORY
from tests.helpers.waiting import LIMIT_S

ALONE = SerialCommunicator()
#: Where a process is killed, what the thread calls there, and before or after the call.
STAGES = {
    "nothing written": ("checkpoint_writer.write_rank_file", "before"),
    "own file written": ("checkpoint_writer.write_rank_file", "after"),
    "all have told": ("CheckpointWriter._collect", "after"),
    "head written": ("checkpoint_folder.write_synced", "after"),
    "folder named": ("checkpoint_writer.commit", "after"),
    "old ones gone": ("checkpoint_writer.prune", "after"),
}
KILLED = """
import json, os, signal, sys
from pathlib import Path
import torch
from speechdp.comm.threads.communicator import run_threads
from speechdp.checkpoint import folder as checkpoint_folder, writer as checkpoint_writer
from speechdp.checkpoint.state import RankState
from speechdp.checkpoint.writer import CheckpointWriter

def train(comm, run, function, when):
    writer = CheckpointWriter(run, comm)
    for step in (1, 2, 3):
        if step == 3 and comm.rank == 0:
            owner, name = function.split(".")
            owner = globals()[owner]
            original = getattr(owner, name)

            def killed(*arguments, **options):
                if when == "after":
                    original(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(owner, name, killed)
        comm.barrier()
        values = {"counters": {"step": step}}
        writer.start(step, RankState(values, {"parameters": torch.full((1000,), float(step))}))
        writer.flush()

for stage, (function, when) in json.loads(sys.argv[2]).items():
    pid = os.fork()  # of a process without threads: cheaper than a start
    if pid == 0:
        run_threads(2, lambda comm: train(comm, Path(sys.argv[1]) / stage, function, when))
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, stage
"""


def state_of(step: int) -> RankState:
    return RankState({"counters": {"step": step}}, {"parameters": torch.full((1000,), float(step))})


def step_of(state: RankState | None) -> int:
    assert state is not None
    step = int(state.values["counters"]["step"])
    assert bool((state.tensors["parameters"] == step).all())
    return step


class Gate:
    """Holds a function up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, rank_file: str = "") -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        original = getattr(owner, name)

        def held(*arguments: Any, **options: Any) -> Any:
            if not rank_file or Path(str(arguments[0])).name == rank_file:
                self.reached.set()
                assert self.opened.wait(LIMIT_S)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, held)


def test_training_changes_its_state_while_the_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, checkpoint_writer, "write_rank_file")
    writer = CheckpointWriter(tmp_path, ALONE)
    state = state_of(5)
    writer.start(5, state)
    assert gate.reached.wait(LIMIT_S)
    state.tensors["parameters"].fill_(6.0)  # the next step
    state.values["counters"]["step"] = 6
    assert list(checkpoint_steps(tmp_path)) == []
    gate.opened.set()
    writer.flush()
    assert step_of(load_checkpoint(tmp_path, ALONE, [])) == 5


def test_the_next_checkpoint_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, checkpoint_writer, "commit")
    writer = CheckpointWriter(tmp_path, ALONE)
    writer.start(1, state_of(1))
    assert gate.reached.wait(LIMIT_S)
    threading.Timer(0.1, gate.opened.set).start()
    writer.start(2, state_of(2))
    assert 1 in checkpoint_steps(tmp_path)
    writer.flush()
    assert list(checkpoint_steps(tmp_path)) == [2, 1]


def test_memory_serves_again_where_shapes_stay() -> None:
    first = take_snapshot(state_of(1), Snapshot())
    places = {name: tensor.data_ptr() for name, tensor in first.tensors.items()}
    second = take_snapshot(state_of(2), first)
    assert {name: tensor.data_ptr() for name, tensor in second.tensors.items()} == places
    third = take_snapshot(RankState({}, {"parameters": torch.ones(7, dtype=torch.float64)}), second)
    assert third.tensors["parameters"].tolist() == [1.0] * 7


@pytest.mark.parametrize("dtype", rank_file._TYPES)
def test_every_type_of_number_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"b": torch.arange(12).to(dtype).view(3, 4), "a": torch.ones(3, dtype=torch.uint8)}
    writer = CheckpointWriter(tmp_path, ALONE)
    writer.start(1, RankState({"é": "\n"}, tensors))
    writer.flush()
    state = load_checkpoint(tmp_path, ALONE, [])
    assert state is not None and state.values == {"é": "\n"}
    for name, tensor in tensors.items():
        assert state.tensors[name].dtype == tensor.dtype and torch.equal(state.tensors[name], tensor)


def test_what_goes_wrong_behind_training_is_raised_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "write_rank_file", full)
    writer = CheckpointWriter(tmp_path, ALONE)
    writer.start(1, state_of(1))
    writer._join()
    for attempt in (writer.check, writer.flush, lambda: writer.start(2, state_of(2))):
        with pytest.raises(
            RunError, match=r"cannot be written \(No space left on device on rank 0\); free some"
        ):
            attempt()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_rank_that_writes_nothing_is_named_with_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, checkpoint_writer, "write_rank_file", rank_file="rank-0002.safetensors")
    has_reported, hand_over_entry, collect = (
        threading.Event(),
        checkpoint_writer.hand_over_entry,
        CheckpointWriter._collect,
    )

    def hand_over_entry_and_report(*arguments: Any) -> None:
        hand_over_entry(*arguments)
        has_reported.set()

    def collecting(*arguments: Any) -> None:
        assert has_reported.wait(LIMIT_S)  # rank 1, whose disk may be slower than rank 0 is patient
        collect(*arguments)

    monkeypatch.setattr(checkpoint_writer, "hand_over_entry", hand_over_entry_and_report)
    monkeypatch.setattr(CheckpointWriter, "_collect", collecting)

    def train(comm: Communicator) -> None:
        writer = CheckpointWriter(tmp_path, comm, patience_s=0.2)
        writer.start(1, state_of(1))
        if comm.rank == 0:
            writer._join()
            gate.opened.set()
        writer.flush()

    with pytest.raises(
        RunError, match=r"checkpoint is not complete: nothing from rank 2 on \S+ for 0.2 s; check"
    ):
        run_threads(3, train)


@pytest.mark.parametrize(("look_s", "num_looks", "bytes_a_look"), [(500.0, 5, 0.0), (0.9, 2000, 0.01)])
def test_a_slow_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_s: float, num_looks: int, bytes_a_look: float
) -> None:
    """A disk may stand still longer than 600 s, or a rank take longer for its file, which grows."""
    looks = 0

    def entries(folder: Path, ranks: list[int]) -> dict[int, Any]:
        nonlocal looks
        looks += 1
        return {1: {"file": "rank-0001.safetensors"}} if looks == num_looks else {}

    clock = SimpleNamespace(monotonic=lambda: looks * look_s)
    monkeypatch.setattr(checkpoint_writer, "time", clock)
    monkeypatch.setattr(checkpoint_writer, "_LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(checkpoint_writer, "read_entries", entries)
    monkeypatch.setattr(checkpoint_writer, "bytes_written", lambda folder: int(looks * bytes_a_look))
    found: dict[int, Any] = {0: {}}

    def collect(comm: Communicator) -> None:
        if comm.rank == 0:
            CheckpointWriter(tmp_path, comm)._collect(CheckpointPlace(1, tmp_path, tmp_path), found)

    run_threads(2, collect)
    assert sorted(found) == [0, 1]


@pytest.mark.parametrize("late", [1, 2])
def test_what_a_rank_has_handed_over_it_does_not_touch_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Rank 0 completes a checkpoint as soon as all have told, however late the others are with the rest."""
    rank_of = threading.local()
    work, open_ = CheckpointWriter._work, os.open

    def numbered(writer: CheckpointWriter, *arguments: Any) -> None:
        rank_of.value = writer._comm.rank
        work(writer, *arguments)

    def slow_for_folders(path: Any, *arguments: Any, **options: Any) -> int:
        if getattr(rank_of, "value", None) == late and Path(path).is_dir():
            deadline_s = time.monotonic() + 5  # until rank 0 has taken the folder away, as it does
            while Path(path).is_dir() and time.monotonic() < deadline_s:
                time.sleep(0.002)
        return open_(path, *arguments, **options)

    monkeypatch.setattr(CheckpointWriter, "_work", numbered)
    monkeypatch.setattr(os, "open", slow_for_folders)

    def train(comm: Communicator) -> None:
        writer = CheckpointWriter(tmp_path, comm)
        for step in (1, 2, 3):
            writer.start(step, state_of(step))
        writer.flush()

    run_threads(3, train)
    assert list(checkpoint_steps(tmp_path)) == [3, 2]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT])
def test_a_checkpoint_that_has_its_name_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whatever the disk says afterwards; and the file that shows ranks the disk may stay."""
    sync, unlink = files.sync, Path.unlink

    def failing_sync(path: Path) -> None:
        if path.name == "checkpoints":
            raise OSError(number, os.strerror(number))
        sync(path)

    def failing_unlink(path: Path, *, missing_ok: bool = False) -> None:
        if path.suffix == ".probe":
            raise OSError(number, os.strerror(number))
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", failing_sync)
        patch.setattr(Path, "unlink", failing_unlink)
        write(tmp_path, 1)
    assert step_of(load_checkpoint(tmp_path, ALONE, [])) == 1
    CheckpointWriter(tmp_path, ALONE).open()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EIO, "check the disk"), (errno.ESTALE, "check that the network disk")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_remedy_is_that_of_the_rank_s_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, number: int, remedy: str
) -> None:
    original: Callable[..., Any] = rank_file.write_rank_file

    def failing(path: Path, *arguments: Any) -> Any:
        if path.name == f"rank-{rank:04d}.safetensors":
            raise OSError(number, os.strerror(number))
        return original(path, *arguments)

    monkeypatch.setattr(checkpoint_writer, "write_rank_file", failing)

    def train(comm: Communicator) -> None:
        writer = CheckpointWriter(tmp_path, comm)
        writer.start(1, state_of(1))
        writer.flush()

    reason = rf"{os.strerror(number)} on rank {rank}"
    with pytest.raises(RunError, match=rf"checkpoints: cannot be written \({reason}\); {remedy}"):
        run_threads(2, train)


def test_a_failed_run_leaves_what_it_cannot_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "_GRACE_S", 0.2)
    waits = Gate(monkeypatch, checkpoint_writer, "read_entries")
    waits.opened.set()

    def train(comm: Communicator) -> None:
        writer = CheckpointWriter(tmp_path, comm)
        if comm.rank == 1:
            writer.open()
            return  # killed
        writer.start(1, state_of(1))
        assert waits.reached.wait(LIMIT_S)
        writer.close()
        assert writer._thread is not None
        writer._thread.join(LIMIT_S)  # at once, but for a busy machine
        assert not writer._thread.is_alive()

    run_threads(2, train)
    assert list(checkpoint_steps(tmp_path)) == []
    (left,) = (tmp_path / "checkpoints").glob(".step-*")  # the next start clears it
    CheckpointWriter(tmp_path, ALONE).open()
    assert not left.exists() and list((tmp_path / "checkpoints").iterdir()) == []


def test_a_failed_run_completes_a_checkpoint_that_takes_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "_GRACE_S", LIMIT_S)  # of a disk that may be slow
    gate = Gate(monkeypatch, checkpoint_writer, "commit")
    writer = CheckpointWriter(tmp_path, ALONE)
    writer.start(1, state_of(1))
    threading.Timer(0.1, gate.opened.set).start()
    writer.close()
    assert list(checkpoint_steps(tmp_path)) == [1]


def test_leftovers_of_a_killed_job_are_never_mixed_in(tmp_path: Path) -> None:
    """A process of it may even come back and write on."""
    killed, alive = CheckpointWriter(tmp_path, ALONE), CheckpointWriter(tmp_path, ALONE)
    for writer in (killed, alive):
        writer.open()
    assert killed._nonce != alive._nonce
    alive.start(3, state_of(3))
    alive.flush()
    assert step_of(load_checkpoint(tmp_path, ALONE, [])) == 3


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run for each stage, killed at its third checkpoint."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", KILLED, str(folder), json.dumps(STAGES)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=LIMIT_S)
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_leaves_the_last_two(killed_runs: Path, stage: str) -> None:
    run = killed_runs / stage
    notices: list[str] = []
    for state in run_threads(2, lambda comm: load_checkpoint(run, comm, notices)):
        assert step_of(state) == (3 if stage in {"folder named", "old ones gone"} else 2)
    assert notices == [] and len(list(checkpoint_steps(run))) >= 2

    def go_on(comm: Communicator) -> None:
        writer = CheckpointWriter(run, comm)
        writer.start(4, state_of(4))
        writer.flush()

    run_threads(2, go_on)
    newest, _ = checkpoint_steps(run)
    assert newest == 4
    assert not [p for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]


def write(run: Path, step: int) -> Path:
    writer = CheckpointWriter(run, ALONE)
    path = writer.start(step, state_of(step))
    writer.flush()
    return path


def test_a_good_checkpoint_stays_until_two_newer_ones_are_whole(tmp_path: Path) -> None:
    """Those after the one a run went on from could not be read: they do not count among the last two."""
    write(tmp_path, 10)
    (write(tmp_path, 20) / "rank-0000.safetensors").write_bytes(b"damaged")
    assert step_of(load_checkpoint(tmp_path, ALONE, [])) == 10
    write(tmp_path, 15)
    assert list(checkpoint_steps(tmp_path)) == [15, 10]


@pytest.mark.parametrize("new_is_whole", [True, False])
def test_a_kill_while_a_checkpoint_takes_the_place_of_another_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_is_whole: bool
) -> None:
    """Asynchronous ranks may save twice at a step; a new one that could not be named has been deleted."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    with monkeypatch.context() as patches:
        patches.setattr(checkpoint_folder, "hand_over", lambda *_: sys.exit("killed"))
        writer = CheckpointWriter(tmp_path, ALONE)
        writer.start(2, RankState({"counters": {"step": 2, "frames": 7}}, state_of(2).tensors))
        with pytest.raises(SystemExit, match="killed"):
            writer.flush()
    assert list(checkpoint_steps(tmp_path)) == [1]
    folder = tmp_path / "checkpoints"
    if not new_is_whole:
        shutil.rmtree(next(folder.glob(".step-*.tmp")))
    state = load_checkpoint(tmp_path, ALONE, [])
    assert state is not None and step_of(state) == 2
    assert ("frames" in state.values["counters"]) == new_is_whole
    CheckpointWriter(tmp_path, ALONE).open()
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_that_cannot_be_named_leaves_the_one_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(checkpoint_folder, "hand_over", refuse)
    writer = CheckpointWriter(tmp_path, ALONE)
    writer.start(2, state_of(2))
    with pytest.raises(RunError, match="step-00000002"):
        writer.flush()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]
    assert step_of(load_checkpoint(tmp_path, ALONE, [])) == 2


def test_a_checkpoint_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    shutil.rmtree(path)
    path.mkdir()  # broken
    write(tmp_path, 2)
    assert step_of(load_checkpoint(tmp_path, ALONE, [])) == 2
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-00000001", "step-00000002"]


def test_ranks_whose_comrade_cannot_write_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = rank_file.write_rank_file

    def full(path: Path, *arguments: Any) -> Any:
        if path.name == "rank-0001.safetensors":
            raise OSError(28, "No space left on device")
        return original(path, *arguments)

    monkeypatch.setattr(checkpoint_writer, "write_rank_file", full)

    def train(comm: Communicator) -> None:
        writer = CheckpointWriter(tmp_path, comm)
        writer.start(1, state_of(1))
        while True:  # until rank 1's thread has come to it
            writer.check()
            comm.barrier()  # a step

    with pytest.raises((RunError, CommunicationError), match="No space left on device on rank 1"):
        run_threads(3, train)


def test_a_broken_checkpoint_does_not_push_out_the_one_that_was_loaded(tmp_path: Path) -> None:
    for step in (200, 220):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000300").mkdir()
    prune(tmp_path, [300], resumed_from=200)  # 220 could not be read
    assert list(checkpoint_steps(tmp_path)) == [300, 200]
    (tmp_path / "checkpoints" / "step-00000400").mkdir()
    prune(tmp_path, [300, 400], resumed_from=200)
    assert list(checkpoint_steps(tmp_path)) == [400, 300]
