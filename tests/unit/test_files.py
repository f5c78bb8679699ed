"""A name shows the whole of its file, and what has been handed over by a rename is handed over."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

from speechdp import files
from speechdp.cli import main
from speechdp.errors import RunError
from speechdp.files import (
    atomic_path,
    cannot_be_used,
    cannot_be_written,
    hand_over,
    remove_left_over,
    write_text_atomically,
)
from speechdp.jsonl import each_line, read_lines
from speechdp.parallel.run_files import RunDirectory
from speechdp.report.kit.pages import write_files

ERRORS = (errno.EIO, errno.ENOENT, errno.ESTALE, errno.ENOSPC, errno.EINVAL)


def failing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture(params=ERRORS, ids=errno.errorcode.get)
def no_folder_sync(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sync of every folder fail."""
    original = files.sync

    def sync(path: Path) -> None:
        if path.is_dir():
            raise failing(request.param)
        original(path)

    monkeypatch.setattr(files, "sync", sync)


@pytest.mark.usefixtures("no_folder_sync")
def test_what_is_written_counts_as_written(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    run = RunDirectory(tmp_path / "run")
    run.begin({"fingerprint": "abc"})
    run.add_start({"step": 0})
    run.complete({"step": 3})
    assert run.is_begun and run.is_complete
    assert sorted(path.name for path in run.path.iterdir()) == ["completed.json", "run.json", "starts.jsonl"]


def test_a_start_removes_what_a_killed_one_has_left_and_nothing_of_others(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.begin({"fingerprint": "abc"})
    others = [".owner.json.5f.tmp", ".wer-test.json.0a1b2c.tmp", "model.safetensors.tmp", ".run.json.swp"]
    left = [".model.safetensors.0a1b2c.tmp", ".model.safetensors.ffffff.tmp", ".run.json.0a1b2c.tmp"]
    for name in (*others, *left):
        (tmp_path / name).touch()
    run.add_start({"step": 3})
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "starts.jsonl", *others}


def left_by_killed(folder: Path, *names: str) -> None:
    """Make files as they were left in a folder two days ago."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
        os.utime(folder / name, (time.time() - 2 * 86400,) * 2)


OLD = [".owner.json.0123456789abcdef0123456789abcdef.tmp", ".wer-test.json.0a1b2c.tmp"]
KEPT = [".mine.tmp", ".backup.20261201.tmp", "wer-test.json", ".owner.json.0123456789abcdef.next"]


def test_what_is_old_is_removed_beside_a_new_file(tmp_path: Path) -> None:
    left_by_killed(tmp_path, *OLD, *KEPT)
    (tmp_path / ".wer-dev.json.0a1b2c.tmp").touch()  # perhaps being written
    (tmp_path / ".folder.0a1b2c.tmp").mkdir()
    written = tmp_path / "new"
    written.touch()
    remove_left_over(written)
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {".wer-dev.json.0a1b2c.tmp", ".folder.0a1b2c.tmp", "new", *KEPT}
    left_by_killed(tmp_path, *OLD, "new")  # all of one age
    remove_left_over(written)
    assert there | set(OLD) == {path.name for path in tmp_path.iterdir()}
    remove_left_over(tmp_path / "gone" / "new")


def test_a_start_and_a_report_remove_what_is_old(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.begin({"fingerprint": "abc"})
    left_by_killed(run.path, *OLD, *KEPT)
    left_by_killed(run.path / "trained_on", "lm.json")
    (run.path / "trained_on" / ".lm.arpa.gz.0a1b2c.tmp").touch()  # only this job writes there
    run.add_start({"step": 0})
    here = {path.name for path in run.path.iterdir()}
    assert here == {"run.json", "starts.jsonl", "trained_on", *KEPT}
    assert [path.name for path in (run.path / "trained_on").iterdir()] == ["lm.json"]
    left_by_killed(run.path / "report", *OLD)
    write_files(run.path / "report", "report", "page", "table", {})
    assert {path.name for path in (run.path / "report").iterdir()} == {"report.html", "report.csv"}


def test_two_that_write_one_file_at_once_leave_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes may have one number: on two hosts, or in two containers."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "wer-test.json"
    with atomic_path(path) as slow:
        with slow.open("w") as file:
            file.write("first")
            write_text_atomically(path, "the other's")
            assert path.read_text() == "the other's"
            file.write(" and last")
        assert path.read_text() == "the other's"
    assert path.read_text() == "first and last" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_goes_after_the_rename_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when rank 0 gives a checkpoint its name before this rank has synced the folder."""
    folder = tmp_path / "step.tmp"
    folder.mkdir()

    def hand_over_and_lose(temporary: Path, path: Path) -> None:
        hand_over(temporary, path)
        folder.rename(tmp_path / "step")

    monkeypatch.setattr(files, "hand_over", hand_over_and_lose)
    write_text_atomically(folder / "rank-0001.json", "{}")
    assert [path.name for path in (tmp_path / "step").iterdir()] == ["rank-0001.json"]


def patch_replace(monkeypatch: pytest.MonkeyPatch, replace: Callable[[Path, Path, Any], Any]) -> None:
    original = Path.replace
    monkeypatch.setattr(Path, "replace", lambda source, target: replace(source, target, original))


def test_a_rename_that_was_done_though_the_disk_says_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS sends a request again whose answer was lost; the second finds no such file."""

    def replace(source: Path, target: Path, original: Any) -> None:
        original(source, target)
        original(source, target)

    patch_replace(monkeypatch, replace)
    write_text_atomically(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


@pytest.mark.parametrize("times", [1, 9])
def test_an_interrupted_rename_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    tries = []

    def replace(source: Path, target: Path, original: Any) -> None:
        tries.append(source)
        if len(tries) <= times:
            raise failing(errno.EINTR)
        original(source, target)

    patch_replace(monkeypatch, replace)
    write_text_atomically(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new" and len(tries) == times + 1


@pytest.mark.parametrize("number", [errno.EINTR, errno.EIO, errno.ENOENT])
def test_a_rename_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "a").write_text("old")

    def replace(source: Path, target: Path, original: Any) -> None:
        raise failing(number)

    patch_replace(monkeypatch, replace)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_text_atomically(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_what_went_wrong_first_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlink(path: Path, *, missing_ok: bool = False) -> None:
        raise failing(errno.EIO)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match="No space left"), atomic_path(tmp_path / "a"):
        raise failing(errno.ENOSPC)


def test_every_error_has_its_own_remedy() -> None:
    expected = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some space",
        errno.EIO: "check the disk (the kernel log of that host says what failed)",
        errno.ESTALE: "check that the network disk is mounted and responds",
        errno.ENOENT: "check that nothing removes or moves its folder, and that it can hold files",
        errno.EACCES: "make it writable",
        errno.EROFS: "have the disk mounted read-write",
        errno.EXDEV: "check the disk and the folder's permissions",
    }
    for number, remedy in expected.items():
        reason = os.strerror(number)
        line = cannot_be_written(Path("/run/a"), failing(number), "continue with --resume")
        assert line == f"/run/a: cannot be written ({reason}); {remedy}, then continue with --resume"


def test_an_error_of_hdf5_is_told_as_the_disk_told_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="errno = 2") as raised:
        h5py.File(tmp_path / "missing" / "a.h5", "w")
    for error in (raised.value, RuntimeError(str(raised.value))):
        line = cannot_be_written("a.h5", error)
        assert line.startswith("a.h5: cannot be written (No such file or directory); check that nothing")
    assert "(truncated (or worse))" in cannot_be_written("a.h5", RuntimeError("truncated\n(or worse)"))


def test_the_run_names_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: Path, target: Path, original: Any) -> None:
        raise failing(errno.EIO)

    patch_replace(monkeypatch, replace)
    with pytest.raises(
        RunError, match=r"run\.json: cannot be written \(Input/output error\); check the disk"
    ):
        RunDirectory(tmp_path).begin({})


def test_what_nobody_has_words_for_is_one_line_if_it_is_of_a_file() -> None:
    error = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/run/run.json")
    assert cannot_be_used(error) == (
        "/run/run.json: cannot be used (Stale file handle); check that the network disk is mounted and "
        "responds, then run again"
    )
    assert cannot_be_used(OSError(errno.EPIPE, "Broken pipe")) is None
    assert cannot_be_used(OSError("no number")) is None


def test_a_command_ends_in_one_line_where_a_disk_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stale(original: Callable[..., bool]) -> Callable[..., bool]:
        def ask(path: Path, **options: Any) -> bool:
            if path.is_relative_to(tmp_path):  # what the command imports only now lies elsewhere
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return original(path, **options)

        return ask

    for name in ("is_file", "exists", "is_dir"):
        monkeypatch.setattr(Path, name, stale(getattr(Path, name)))
    assert main.run(["report", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"speechdp: {tmp_path}") and printed.count("\n") == 1
    assert "cannot be used (Stale file handle); check that the network disk" in printed


def test_a_scratch_folder_that_cannot_be_removed_is_named_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: str, **_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", path)  # what the system is given: the last name

    with (
        pytest.raises(OSError, match="Input/output error") as caught,
        files.scratch_folder(tmp_path, "x-") as folder,
    ):
        (folder / "part").touch()
        monkeypatch.setattr(os, "unlink", broken)
    assert caught.value.filename == str(folder / "part")


def test_a_scratch_folder_that_cannot_be_opened_again_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def refuse(path: object, *arguments: object, **options: object) -> int:
        raise refused

    with pytest.raises(OSError, match="No space left"), files.scratch_folder(tmp_path, "x-") as folder:
        (folder / "a").touch()
        monkeypatch.setattr(os, "open", refuse)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.undo()
    with pytest.raises(PermissionError), files.scratch_folder(tmp_path, "y-") as folder:
        (folder / "a").touch()
        monkeypatch.setattr(os, "open", refuse)
    monkeypatch.undo()
    with files.scratch_folder(tmp_path, "z-") as folder:
        (folder / "a").touch()
    assert not folder.exists()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_disk_that_has_no_sync_keeps_what_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some file systems refuse to sync folders, others anything; checkpoints sync both."""
    asked = []

    def refuse(fd: int) -> None:
        asked.append(fd)
        raise failing(number)

    monkeypatch.setattr(os, "fsync", refuse)
    write_text_atomically(tmp_path / "a", "new")
    files.sync(tmp_path)
    assert (tmp_path / "a").read_text() == "new" and len(asked) == 3


def test_a_sync_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise failing(errno.EIO)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_text_atomically(tmp_path / "a", "new")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["open", "write"])
def test_an_error_of_writing_names_the_file(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk's has no name, or the temporary one."""

    def fail(path: Path, text: str, **options: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([str(path)] if place == "open" else []))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space left") as raised:
        write_text_atomically(tmp_path / "wer-test.json", "{}")
    assert raised.value.filename == str(tmp_path / "wer-test.json")


@pytest.mark.filterwarnings("always::ResourceWarning")
def test_a_file_of_lines_is_closed_also_where_not_all_are_read(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 2}\n')
    assert read_lines(path).records == [{"a": 1}, {"a": 2}]
    assert next(each_line(path)) == {"a": 1}
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(
    ("end", "unfinished", "whole"),
    [
        ('{"a": 2', 1, 0),
        ('{"a": ', 1, 0),
        ('{"a": 2}', 0, 1),  # only its newline is to come
        ('{"a": \n', 1, None),
        ("", 0, 0),
    ],
)
def test_a_line_that_is_being_written_is_no_damage(
    tmp_path: Path, end: str, unfinished: int, whole: int | None
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n' + end)
    assert read_lines(path).num_damaged == unfinished
    lines = read_lines(path, grows=True)
    assert (len(lines.records) - 1, lines.num_damaged) == ((0, 1) if whole is None else (whole, 0))
