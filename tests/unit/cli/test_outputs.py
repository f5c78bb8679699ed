"""Files that commands write where their user says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from speechdp.cli.support.outputs import output_file
from speechdp.errors import ConfigError


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


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real.txt")
    assert output_file(tmp_path / "link", overwrite=False) == tmp_path / "real.txt"
    (tmp_path / "real.txt").write_text("")
    refused(tmp_path / "link", "exists; give another name or add --overwrite", overwrite=False)
    assert output_file(tmp_path / "link", overwrite=True) == tmp_path / "real.txt"
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop", "mend the symbolic links of its path")


def test_its_folder_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert output_file(tmp_path / "new.txt", overwrite=False) == tmp_path / "new.txt"
    refused(tmp_path / "file" / "x", "is a file, not a folder; give a name in a folder that exists")
    refused(tmp_path / "none" / "x", "no such folder; give a name in a folder that exists")
