"""Checkpoints: whole or not there, on every rank, whatever breaks when; and never a pickle."""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import speechdp
from speechdp import remedies
from speechdp.checkpoint import state as checkpoint
from speechdp.checkpoint.state import (
    RankState,
    checkpoint_steps,
    join_state,
    last_checkpoint_note,
    load_checkpoint,
    split_state,
)
from speechdp.checkpoint.writer import CheckpointWriter
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import CommunicationError, RunError
from speechdp.files import listed_anew
from speechdp.watchdog import shared_disk
from tests.helpers.faulty_disk import Crash, faulty_disk, full

ALONE = SerialCommunicator()


def state_of(step: int, rank: int = 0) -> RankState:
    """Return a state that tells step and rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tensors = {
        "parameters": torch.randn(5, generator=generator),
        "double": torch.randn(2, 3, generator=generator, dtype=torch.float64),
        "random.cpu": torch.randint(256, (9,), generator=generator, dtype=torch.uint8),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(float(step)),
    }
    values = {"counters": {"step": step, "time_s": 0.1 + step}, "rank": rank, "none": None, "nan": [1e300]}
    return RankState(values, tensors)


def assert_same(one: RankState | None, other: RankState) -> None:
    assert one is not None
    assert one.values == other.values
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype and torch.equal(tensor, other.tensors[name]), name


def save(run: Path, step: int, comm: Communicator = ALONE, state: RankState | None = None) -> Path:
    """Write a checkpoint and wait until it is whole."""
    writer = CheckpointWriter(run, comm)
    path = writer.start(step, state or state_of(step, comm.rank))
    writer.flush()
    return path


def load(run: Path, notices: list[str] | None = None) -> RankState | None:
    return load_checkpoint(run, ALONE, [] if notices is None else notices)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_its_own_state_back(tmp_path: Path, size: int) -> None:
    run_threads(size, lambda comm: save(tmp_path, 7, comm))
    states = run_threads(size, lambda comm: load_checkpoint(tmp_path, comm, []))
    for rank, state in enumerate(states):
        assert_same(state, state_of(7, rank))
    folder = tmp_path / "checkpoints" / "step-00000007"
    files = [f"rank-{rank:04d}.safetensors" for rank in range(size)]
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint.json", *files]


def test_tensors_that_are_views_are_saved_as_they_are_seen(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    tensors = {
        "part": whole[2:5],
        "turned": whole.view(3, 4).t(),
        "needs_grad": whole.clone().requires_grad_(),
    }
    save(tmp_path, 1, state=RankState({}, tensors))
    state = load(tmp_path)
    assert state is not None
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in tensors.items())


def test_without_a_checkpoint_there_is_no_state(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    assert last_checkpoint_note(tmp_path) == "there is no earlier checkpoint"


def test_the_last_two_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".step-00000002.tmp"
    leftover.mkdir(parents=True)
    (leftover / "rank-0000.safetensors").write_bytes(b"half of a file")
    for step in (1, 3, 20, 100):
        save(tmp_path, step)
    assert list(checkpoint_steps(tmp_path)) == [100, 20]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000020", "step-00000100"]
    assert_same(load(tmp_path), state_of(100))
    assert last_checkpoint_note(tmp_path) == f"last checkpoint: {tmp_path}/checkpoints/step-00000100"


def test_states_part_and_join() -> None:
    state = {"passes": 2, "scale": None, "gradients": torch.ones(3), "list": [1, 2]}
    parts = split_state("strategy", state)
    assert parts.values == {"passes": 2, "scale": None, "list": [1, 2]}
    assert parts.tensors.keys() == {"strategy.gradients"}
    others = {"optimizer.gradients": torch.zeros(3)}
    joined = join_state("strategy", parts.values, {**parts.tensors, **others})
    assert joined.keys() == state.keys() and torch.equal(joined["gradients"], torch.ones(3))


# --- a disk that fails --------------------------------------------------------------------------------


def count_operations(run: Path) -> int:
    """Save the first two checkpoints of a run; return the operations a third takes."""
    save(run, 1)
    save(run, 2)
    spare = run / "spare"
    shutil.copytree(run / "checkpoints", spare / "checkpoints")
    with faulty_disk(0, full()) as disk:
        save(spare, 3)
    shutil.rmtree(spare)
    assert disk.num_operations >= 6  # folder, content, sync, list, its sync, renames
    return disk.num_operations


def test_a_disk_that_is_full_at_any_operation_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    outcomes = []
    for fails_at in range(1, count_operations(tmp_path) + 1):
        message = None
        with faulty_disk(fails_at, full()):
            try:
                save(tmp_path, 3)
            except RunError as error:
                message = str(error)
        notices: list[str] = []
        state = load(tmp_path, notices)
        assert state is not None and notices == []
        step = state.values["counters"]["step"]
        assert_same(state, state_of(step))
        assert step == (3 if message is None else 2)
        if message is not None:
            assert message == (
                f"{tmp_path}/checkpoints: cannot be written ({os.strerror(errno.ENOSPC)}"
                f"{' on rank 0' if ' on rank 0)' in message else ''}); free some space, then run again; "
                f"last checkpoint: {tmp_path}/checkpoints/step-00000002"
            )
        outcomes.append(message is None)
        left = [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]
        assert left == [], f"operation {fails_at}"
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000003", ignore_errors=True)
    # Only the last, the sync of a name that has been given already, changes nothing.
    assert outcomes == [False] * (len(outcomes) - 1) + [True]
    save(tmp_path, 3)
    assert_same(load(tmp_path), state_of(3))


def test_a_process_that_dies_at_any_operation_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    for dies_at in range(1, count_operations(tmp_path) + 1):
        with faulty_disk(dies_at, Crash()), pytest.raises(Crash):
            save(tmp_path, 3)
        notices: list[str] = []
        state = load(tmp_path, notices)
        assert state is not None and notices == []
        assert_same(state, state_of(state.values["counters"]["step"]))
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000003", ignore_errors=True)
    save(tmp_path, 3)
    assert_same(load(tmp_path), state_of(3))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


def test_the_first_checkpoint_of_all_may_fail_too(tmp_path: Path) -> None:
    with faulty_disk(2, full()), pytest.raises(RunError, match="there is no earlier checkpoint"):
        save(tmp_path, 1)
    assert load(tmp_path) is None


def test_one_rank_that_cannot_write_leaves_the_last_checkpoint_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_threads(3, lambda comm: save(tmp_path, 1, comm))
    open_ = Path.open

    def full_for_rank_1(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "rank-0001.safetensors" and "wb" in arguments:
            raise full()
        return open_(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", full_for_rank_1)

    # All ranks say the same, whichever is heard first, and the others wrote to the end.
    def fail(comm: Communicator) -> None:
        with pytest.raises(RunError, match=r"cannot be written \(No space left on device on rank 1\); free"):
            save(tmp_path, 2, comm)

    run_threads(3, fail)
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    for rank, state in enumerate(run_threads(3, lambda comm: load_checkpoint(tmp_path, comm, []))):
        assert_same(state, state_of(1, rank))


def test_a_disk_the_hosts_do_not_share_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 writes on a disk of its own, where rank 0 has made no folder; or there was one of old."""
    monkeypatch.setattr(shared_disk, "_VISIBLE_S", 0.1)
    for _ in range(2):
        with pytest.raises(
            RunError, match=r"host\d/checkpoints: rank 1 on \S+ does not see what rank 0 .* share"
        ):
            run_threads(2, lambda comm: save(tmp_path / f"host{comm.rank}", 1, comm))
        (tmp_path / "host1" / "checkpoints").mkdir(parents=True, exist_ok=True)


def test_a_folder_that_a_rank_may_not_list_is_not_taken_for_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_disk, "_UNREADABLE_S", 0.1)

    def refused(folder: Path) -> list[str]:
        if threading.current_thread().name == "rank 1":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return listed_anew(folder)

    monkeypatch.setattr(shared_disk, "listed_anew", refused)
    words = r"checkpoints: cannot be read \(Stale file handle on rank 1\); check that the network disk"
    with pytest.raises(RunError, match=words):
        run_threads(2, lambda comm: save(tmp_path, 1, comm))


def test_a_disk_that_stands_still_at_the_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three looks of 100 s each, and the file is there: nobody says the disk is not shared."""
    looks = 0

    def names(folder: Path) -> list[str]:
        nonlocal looks
        looks += 1
        return ["probe"] if looks == 3 else []

    clock = SimpleNamespace(monotonic=lambda: looks * 100.0, sleep=lambda seconds: None)
    monkeypatch.setattr(shared_disk, "time", clock)
    monkeypatch.setattr(shared_disk, "file_system", lambda path: "nfs4")
    monkeypatch.setattr(shared_disk, "listed_anew", names)
    assert shared_disk.why_unseen(tmp_path / "checkpoints" / "probe") is None


# --- broken checkpoints -------------------------------------------------------------------------------


def flip(folder: Path) -> None:
    path = folder / "rank-0000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def cut(folder: Path) -> None:
    path = folder / "rank-0000.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def rewrite(folder: Path, content: bytes) -> None:
    """Replace a rank's file and mend its checksum, as nobody but an attacker would."""
    (folder / "rank-0000.safetensors").write_bytes(content)
    head = json.loads((folder / "checkpoint.json").read_text())
    head["ranks"][0]["bytes"] = len(content)
    head["ranks"][0]["sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps(head))


class Exploding:
    """Would leave a file behind if it were unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.trace,)


def replace_by_pickle(folder: Path) -> None:
    rewrite(folder, pickle.dumps(Exploding(folder.parent / "exploded")))


def replace_by_torch_pickle(folder: Path) -> None:
    path = folder / "rank-0000.safetensors"
    torch.save({"a": Exploding(folder.parent / "exploded")}, path)
    rewrite(folder, path.read_bytes())


def without_state(folder: Path) -> None:
    import safetensors.torch  # noqa: PLC0415

    rewrite(folder, safetensors.torch.save({"parameters": torch.zeros(1)}))


def with_head(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "checkpoint.json").write_text(text)

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped byte": flip,
    "truncated": cut,
    "empty file": lambda folder: (folder / "rank-0000.safetensors").write_bytes(b""),
    "missing rank file": lambda folder: (folder / "rank-0000.safetensors").unlink(),
    "missing head": lambda folder: (folder / "checkpoint.json").unlink(),
    "empty head": with_head(""),
    "head not UTF-8": lambda folder: (folder / "checkpoint.json").write_bytes(b"\xff\xfe"),
    "head is a list": with_head("[]"),
    "head is an object of nothing": with_head("{}"),
    "head without ranks": with_head('{"format": "speechdp-checkpoint", "version": 1}'),
    "ranks are no list": with_head('{"format": "speechdp-checkpoint", "version": 1, "ranks": 1}'),
    "ranks are a list of nothing": with_head('{"format": "speechdp-checkpoint", "version": 1, "ranks": [1]}'),
    "another version": with_head('{"format": "speechdp-checkpoint", "version": 2, "ranks": []}'),
    "pickle": replace_by_pickle,
    "torch's pickle": replace_by_torch_pickle,
    "no state": without_state,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_broken_newest_is_passed_over_with_a_notice(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    notices: list[str] = []
    assert_same(load(tmp_path, notices), state_of(1))
    (notice,) = notices
    assert notice.startswith(f"skipping checkpoint {tmp_path}/checkpoints/step-00000002")
    assert "\n" not in notice
    assert not (tmp_path / "checkpoints" / "exploded").exists()
    # And it does not stand in the way of its successor.
    save(tmp_path, 2)
    assert_same(load(tmp_path), state_of(2))


def test_a_file_that_was_blown_up_is_not_read(tmp_path: Path) -> None:
    """Of 3 TB, all of it a hole: no machine could hold it, and reading it would take hours."""
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "rank-0000.safetensors"
    written = path.stat().st_size
    os.truncate(path, 3 * 10**12)
    notices: list[str] = []
    assert_same(load(tmp_path, notices), state_of(1))
    assert notices == [f"skipping checkpoint {path}: damaged (3000000000000 bytes, {written} were written)"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError("Cannot allocate memory (os error 12)"),  # of safetensors
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 92088448 bytes."),
    ],
)
def test_a_checkpoint_that_memory_does_not_hold_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is whole: training would go on from an older one, or the run be given up where there is none."""
    save(tmp_path, 1)
    last = save(tmp_path, 2)

    def short_of_memory(path: Path) -> str:
        raise error

    monkeypatch.setattr(checkpoint, "sha256_of", short_of_memory)
    notices: list[str] = []
    with pytest.raises(RunError) as raised:
        load(tmp_path, notices)
    assert str(raised.value) == (
        f"{last}: cannot be read (Cannot allocate memory); free some memory, or raise its limit (ulimit -v), "
        "then run again"
    )
    assert not notices


def test_a_thread_that_cannot_be_started_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = CheckpointWriter(tmp_path, ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            writer.start(1, state_of(1))
    writer.close()


def test_folders_of_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in ("step-abcdefgh", "step-12", "step-00000009.bak", "step-"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert list(checkpoint_steps(tmp_path)) == [1]
    assert_same(load(tmp_path), state_of(1))
    for step in (2, 3):
        save(tmp_path, step)
    assert list(checkpoint_steps(tmp_path)) == [3, 2]
    assert (tmp_path / "checkpoints" / "step-abcdefgh").is_dir()


def test_steps_beyond_eight_digits_are_in_order(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert list(checkpoint_steps(tmp_path)) == [100_000_000, 99_999_999]


def test_one_damaged_file_makes_the_checkpoint_broken_for_all_ranks(tmp_path: Path) -> None:
    for step in (1, 2):
        run_threads(3, lambda comm, step=step: save(tmp_path, step, comm))  # type: ignore[misc]
    flip_of = tmp_path / "checkpoints" / "step-00000002" / "rank-0002.safetensors"
    flip_of.write_bytes(flip_of.read_bytes()[:-1] + b"?")

    def resume(comm: Communicator) -> list[str]:
        notices: list[str] = []
        assert_same(load_checkpoint(tmp_path, comm, notices), state_of(1, comm.rank))
        return notices

    notices = run_threads(3, resume)
    assert notices[0] == [f"skipping checkpoint {flip_of}: damaged (checksum)"]
    assert notices[1] == notices[2] == notices[0]


def test_checkpoints_of_another_version_alone_are_not_to_be_deleted_first(tmp_path: Path) -> None:
    with_head('{"format": "speechdp-checkpoint", "version": 2, "ranks": []}')(save(tmp_path, 1))
    with pytest.raises(RunError) as raised:
        load(tmp_path)
    said = "is of version 2, and this speechdp reads version 1; continue with the speechdp that wrote it, or"
    assert said in str(raised.value)


def test_nothing_whole_is_an_error_that_names_each(tmp_path: Path) -> None:
    flip(save(tmp_path, 1))
    cut(save(tmp_path, 2))
    with pytest.raises(RunError, match="no checkpoint can be used") as raised:
        load(tmp_path)
    assert "step-00000001" in str(raised.value) and "step-00000002" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(f"; delete {tmp_path}, then run again")
    with (
        remedies.of_command({"resume", "overwrite"}),
        pytest.raises(RunError, match="; start over with --ov"),
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EIO, "check the disk"),
        (errno.ESTALE, "check that the network disk"),
        (errno.ENOENT, "nothing removes or moves"),
    ],
)
def test_a_disk_that_reads_no_checkpoint_is_told_of_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def fail(*arguments: object, **options: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(RunError, match=remedy) as raised:
        load(tmp_path)
    assert os.strerror(number) in str(raised.value) and "then run again, or delete" in str(raised.value)


@pytest.mark.parametrize(
    ("number", "passes_on"),
    [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOENT, True), (errno.EACCES, False)],
)
def test_the_checkpoint_before_one_that_the_disk_has_lost_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, passes_on: bool
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    read_text = Path.read_text

    def fail(path: Path, **options: Any) -> str:
        if path.parent.name == "step-00000002":
            raise OSError(number, os.strerror(number))
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", fail)
    notices: list[str] = []
    if not passes_on:
        with pytest.raises(RunError, match=f"step-00000002: cannot be read .{os.strerror(number)}"):
            load_checkpoint(tmp_path, ALONE, notices)
        return
    assert_same(load_checkpoint(tmp_path, ALONE, notices), state_of(1))
    assert "step-00000002: cannot be read (" + os.strerror(number) in notices[0]


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run_threads(2, lambda comm: save(tmp_path, 5, comm))
    with pytest.raises(RunError, match=r"step-00000005: written by 2 ranks, cannot be resumed by 1; .*-np 2"):
        load(tmp_path)
    with pytest.raises((RunError, CommunicationError), match="written by 2 ranks, cannot be resumed by 3"):
        run_threads(3, lambda comm: load_checkpoint(tmp_path, comm, []))
    with pytest.raises(RunError, match=r"resumed by 1; start with -np 5, of which 3 feed$"):
        load_checkpoint(tmp_path, ALONE, [], num_feeders=3)


# --- no code in data ----------------------------------------------------------------------------------

_UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
_UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("os", "system")}
_UNSAFE_OPTIONS = {"allow_pickle", "shell"}


def unsafe_things(path: Path) -> list[str]:
    """Name what in a source file could run code that stands in data."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in _UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _UNSAFE_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in _UNSAFE_CALLS:
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(node.func.id)
            found += [k.arg for k in node.keywords if k.arg in _UNSAFE_OPTIONS]
    return found


def test_nothing_in_speechdp_loads_pickles_or_runs_a_shell() -> None:
    sources = sorted(Path(speechdp.__file__).parent.rglob("*.py"))
    assert len(sources) > 50
    found = {path.name: sorted(set(unsafe_things(path))) for path in sources if unsafe_things(path)}
    # A script may ask for .pt files, as PyTorch users do: writing one runs nothing, and its own checkpoints
    # are read with weights_only=True, which makes tensors and plain values only (test_security_code.py).
    assert found == {"script_folder.py": ["torch.load", "torch.save"]}


def test_the_search_for_unsafe_things_finds_them(tmp_path: Path) -> None:
    path = tmp_path / "unsafe.py"
    path.write_text(
        "import pickle\nfrom dill import loads\ntorch.load(f)\nnp.load(f, allow_pickle=True)\n"
        "subprocess.run(c, shell=True)\neval(x)\n"
    )
    assert sorted(unsafe_things(path)) == sorted(
        ["pickle", "dill", "torch.load", "np.load", "allow_pickle", "shell", "eval"]
    )
