"""Files that commands write where their user says."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

from speechdp.cli.support.outputs import growing_files, output_file, partial_of
from speechdp.errors import ConfigError, RunError
from tests.helpers.faulty_disk import faulty_disk, full


def refused(path: Path, words: str, *, overwrite: bool = True) -> None:
    with pytest.raises(ConfigError) as error:
        output_file(path, overwrite=overwrite)
    assert re.match(f"({path}|{path.parent}): ", str(error.value)) and words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_device_or_pipe_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), tmp_path / "pipe"):
        for overwrite in (False, True):
            refused(path, "is a device or pipe; give the name of a file", overwrite=overwrite)
    refused(tmp_path, "is a folder; give the name of a file")
    reading, writing = os.pipe()  # what /dev/stdout leads to in a pipe; as a path it is not there
    refused(Path(f"/proc/self/fd/{writing}"), "is a device or pipe; give the name of a file")
    os.close(reading)
    os.close(writing)


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real.txt")
    assert output_file(tmp_path / "link", overwrite=False) == tmp_path / "real.txt"
    (tmp_path / "real.txt").write_text("")
    refused(tmp_path / "link", "exists; give another name or add --overwrite", overwrite=False)
    assert output_file(tmp_path / "link", overwrite=True) == tmp_path / "real.txt"
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop", "fix the symbolic links in its path")


def test_its_folder_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert output_file(tmp_path / "new.txt", overwrite=False) == tmp_path / "new.txt"
    refused(tmp_path / "file" / "x", "is a file, not a folder; give a name in a folder that exists")
    refused(tmp_path / "none" / "x", "no such folder; give a name in a folder that exists")


@pytest.mark.parametrize("ended_by", ["disk", "text"])
def test_files_that_grow_are_left_with_what_is_whole_in_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended_by: str
) -> None:
    """The first file has the third text already when the second cannot be written."""
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    paths[0].write_text("of before")
    last = "z" if ended_by == "disk" else "\udcff"
    error = RunError if ended_by == "disk" else UnicodeEncodeError
    with (
        faulty_disk(6 if ended_by == "disk" else 0, full()),
        pytest.raises(error) as raised,
        growing_files(paths, "recording", overwrite=True) as add,
    ):
        for texts in (("x\n", "1\n"), ("y\n", "2\n"), ("third\n", last)):
            add(texts)
    if ended_by == "disk":
        assert str(raised.value).startswith(f"{tmp_path}/b.txt.partial: cannot be written (No space left")
    keep = "move it away, or --overwrite replaces it"
    assert capsys.readouterr().err == "".join(
        f"speechdp: {path}.partial: holds the finished part, 2 recordings; {keep}\n" for path in paths
    )
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {"a.txt": "of before", "a.txt.partial": "x\ny\n", "b.txt.partial": "1\n2\n"}


def test_files_that_grow_have_their_names_when_they_are_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with growing_files([tmp_path / "a.txt", tmp_path / "none.txt"], "recording", overwrite=True) as add:
        add(("x\n", ""))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt.partial", "none.txt.partial"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "x\n", "none.txt": ""}
    # Nothing to write, as no recording could be read: the mended command finds no file in its way.
    with growing_files([tmp_path / "a.txt", tmp_path / "new.txt"], "recording", overwrite=True):
        pass
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "x\n", "none.txt": ""}
    # A disk that does not keep them, or does not rename one, leaves it as it is.
    with (
        faulty_disk(2, full()),
        pytest.raises(RunError, match=r"c\.txt: cannot be written"),
        growing_files([tmp_path / "c.txt"], "recording", overwrite=True) as add,
    ):
        add(("x\n",))
    assert (tmp_path / "c.txt.partial").read_text() == "x\n" and not (tmp_path / "c.txt").exists()
    assert "c.txt.partial: holds the finished part, 1 recording; " in capsys.readouterr().err


def test_two_commands_do_not_write_the_same_file(tmp_path: Path) -> None:
    path, other, partial = (tmp_path / name for name in ("a.txt", "b.txt", "a.txt.partial"))

    def refused_with(message: str, *paths: Path, overwrite: bool = True) -> None:
        with (
            pytest.raises(ConfigError, match=f"^{re.escape(message)}$"),
            growing_files(paths, "recording", overwrite=overwrite),
        ):
            raise AssertionError("it has begun")
        assert not other.with_name("b.txt.partial").exists()

    with growing_files([path], "recording", overwrite=False) as add:
        add(("x\n",))
        for overwrite in (False, True):
            refused_with(
                f"{partial}: another command is writing it; wait until that has ended, or give another name",
                other,
                path,
                overwrite=overwrite,
            )
        add(("y\n",))
    assert path.read_text() == "x\ny\n"
    # Written by another command after this one has looked for existing files.
    refused_with(f"{path}: exists; give another name or add --overwrite", path, overwrite=False)
    assert [found.name for found in tmp_path.iterdir()] == ["a.txt"] and path.read_text() == "x\ny\n"
    path.unlink()
    partial.write_text("of before")  # left by a command that was killed
    refused_with(f"{partial}: exists; give another name or add --overwrite", path, overwrite=False)
    assert partial.read_text() == "of before"
    with growing_files([path], "recording", overwrite=True) as add:
        add(("z\n",))
    assert path.read_text() == "z\n" and not partial.exists()


def test_a_file_that_another_command_renames_meanwhile_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "a.txt", fcntl.flock
    partial = path.with_name("a.txt.partial")
    partial.write_text("of another command")

    def once_it_has_ended(descriptor: int, how: int) -> None:
        if not path.exists():
            partial.rename(path)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", once_it_has_ended)
    with (
        pytest.raises(ConfigError, match=r"a\.txt: exists; give another name"),
        growing_files([path], "recording", overwrite=False),
    ):
        pass
    assert path.read_text() == "of another command" and not partial.exists()


def test_a_partial_file_that_another_command_begins_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first file is complete, and another command replaces it; then the disk refuses the second."""
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    others = partial_of(paths[0])

    def refuse_the_second(partial: Path) -> None:
        if paths[0].exists():
            others.write_text("of the other command")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("speechdp.cli.support.outputs.sync", refuse_the_second)
    with pytest.raises(RunError), growing_files(paths, "item", overwrite=True) as add:
        add(["one\n", "1\n"])
    assert others.read_text() == "of the other command"
    assert capsys.readouterr().err.splitlines() == [
        f"speechdp: {partial_of(paths[1])}: holds the finished part, 1 item; move it away, "
        "or --overwrite replaces it"
    ]


def test_a_disk_without_locks_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with growing_files([tmp_path / "a.txt"], "recording", overwrite=False) as add:
        add(("x\n",))
    assert (tmp_path / "a.txt").read_text() == "x\n"
