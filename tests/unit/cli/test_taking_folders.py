"""A folder is looked at again once it is owned: another command may have come first meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.cli import main
from speechdp.cli.support.out_folder import OutFolder, owned_folder
from speechdp.errors import ConfigError
from speechdp.ownership.overwrite import PROFILE, RUN, SWEEP, FolderKind
from speechdp.ownership.owner import FolderOwner
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data


def is_last_of(kind: FolderKind, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a command of this kind begin and end just before the folder is owned."""
    acquire = FolderOwner.acquire

    def late(owner: FolderOwner) -> None:
        if owner.folder == folder:
            folder.mkdir(exist_ok=True)
            (folder / kind.record).write_text("{}")
        acquire(owner)

    monkeypatch.setattr(FolderOwner, "acquire", late)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_another_command_has_begun_meanwhile_is_left_to_it(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = tmp_path / "out", list[str]()
    is_last_of(SWEEP, out, monkeypatch)
    with (
        pytest.raises(ConfigError, match=r"holds a sweep \(sweep\.json\); give a profile another folder"),
        owned_folder(OutFolder(out, overwrite), "profile", said.append, PROFILE),
    ):
        raise AssertionError("it is owned")
    assert [path.name for path in out.iterdir()] == ["sweep.json"] and said == []


@pytest.mark.parametrize(("command", "other"), [("train", SWEEP), ("sweep", RUN)])
def test_ranks_leave_it_to_the_other(
    command: str,
    other: FolderKind,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, out = write_tiny_data(tmp_path / "data", TinySizes(4, 2, 2, shards=1)).path, tmp_path / "out"
    is_last_of(other, out, monkeypatch)
    code = main.run([command, str(data), str(out), *TINY_MODEL, "--epochs", "1", "--backend", "serial"])
    said = capsys.readouterr().err
    assert code == 1 and f"{out}: holds {other.what} ({other.record}); give " in said, said
    assert [path.name for path in out.iterdir()] == [other.record]
