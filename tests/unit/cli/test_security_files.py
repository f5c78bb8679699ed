"""Files get the modes the user's umask says, and no name that others can guess stands in a shared folder."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from speechdp.cli.main import run as run_command
from speechdp.files import write_text_atomically
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"), [(0o077, 0o600, 0o700), (0o022, 0o644, 0o755)]
)
def test_a_run_follows_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, file_mode: int, folder_mode: int
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    before = os.umask(umask)
    try:
        dataset = write_tiny_data(tmp_path / "data", TinySizes(train=4, dev=2, test=1, shards=1))
        run = tmp_path / "run"
        monkeypatch.setenv("TMPDIR", str(shared))
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert run_command(["train", str(dataset.path), str(run), *TINY_MODEL, "--epochs", "1"]) == 0
    finally:
        os.umask(before)
    for folder in (dataset.path, run):
        for path in (folder, *folder.rglob("*")):
            expected = folder_mode if path.is_dir() else file_mode
            assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert (run / "model.safetensors").is_file() and list((run / "checkpoints").iterdir())
    assert list(shared.iterdir()) == []


def test_an_atomic_file_has_the_umasks_mode_from_its_beginning(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text_atomically(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
