"""--overwrite deletes what a command wrote, and nothing that somebody else keeps there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speechdp.data.shards.data_dir import check_target
from speechdp.data.shards.dataset import ARPA_NAME, GRAMMAR_NAME, LM_RECORD_NAME, MANIFEST_NAME, SYMBOLS_NAME
from speechdp.data.shards.dataset import WORDS_NAME as GRAMMAR_WORDS_NAME
from speechdp.errors import ConfigError
from speechdp.experiments.compare.record import FILE_NAME as COMPARE_JSON
from speechdp.experiments.profile.record import FILE_NAME as PROFILE_JSON
from speechdp.experiments.sweep.plan import FILE_NAME as SWEEP_JSON
from speechdp.ownership.claimant import Claimant
from speechdp.ownership.overwrite import (
    COMPARISON,
    DATA,
    PROFILE,
    RUN,
    SWEEP,
    FolderKind,
    check_kind,
    check_overwrite,
    empty,
)
from speechdp.ownership.owner import FolderOwner, Surroundings, is_owners
from tests.helpers.mpi import REPOSITORY

KINDS = (RUN, SWEEP, COMPARISON, PROFILE, DATA)
TABLES = [
    (RUN, "run-directory.md", "## RUN/"),
    (SWEEP, "run-directory.md", "## OUT/ (`speechdp sweep"),
    (COMPARISON, "compare.md", "## Files in OUT"),
    (PROFILE, "profile.md", "## Files in OUT"),
]


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")


def names_in(folder: Path) -> list[str]:
    return sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not is_owners(p.name)
    )


def emptied(folder: Path, kind: FolderKind) -> str:
    check_overwrite(folder, kind)
    with FolderOwner(folder, Claimant.here("train", {}), Surroundings(print, print), beats=False) as owner:
        return empty(owner, kind)


def test_the_records_are_those_that_commands_write() -> None:
    assert [kind.record for kind in KINDS] == [
        "run.json",
        SWEEP_JSON,
        COMPARE_JSON,
        PROFILE_JSON,
        MANIFEST_NAME,
    ]
    for name in (SYMBOLS_NAME, ARPA_NAME, GRAMMAR_NAME, GRAMMAR_WORDS_NAME, LM_RECORD_NAME):
        assert DATA.owns(Path(name))


@pytest.mark.parametrize(("kind", "page", "heading"), TABLES, ids=[table[0].what for table in TABLES])
def test_all_that_the_documentation_names_is_deleted(
    tmp_path: Path, kind: FolderKind, page: str, heading: str
) -> None:
    text = (REPOSITORY / "docs" / page).read_text()
    section = text[text.index(f"\n{heading}") + 1 :].split("\n#", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    files = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    # Not the end of a name, ".csv", nor an owner's file, whose owner would be waited for.
    files = [name for name in files if name[0] != "." and name != "owner.json"]
    assert len(files) > 4 or kind is SWEEP
    parts = {COMPARISON: "run.json", SWEEP: "run.json", PROFILE: "job.json"}
    for file in files:
        top = file.split("/")[0]
        if not (tmp_path / file).exists():
            make(tmp_path, f"{file}{parts[kind]}" if top.isupper() and file.endswith("/") else file)
        if re.match("(MODE-|NAME|Nx-)", top):
            make(tmp_path, f"{top}/{parts[kind]}")
    make(tmp_path, kind.record)
    assert emptied(tmp_path, kind) == "" and names_in(tmp_path) == []


def test_what_is_of_somebody_else_stays_and_is_named(tmp_path: Path) -> None:
    kept = ["data/data.json", "data/train-00000.h5", "thesis.txt"]
    make(tmp_path, "run.json", "checkpoints/step-00000001/checkpoint.json", ".run.json.7.tmp", *kept)
    assert emptied(tmp_path, RUN) == f"{tmp_path}: data (and 1 more) is not part of a run and is kept"
    assert names_in(tmp_path) == kept


@pytest.mark.parametrize("left", [[], ["status/"], ["status/rank-0000.json", ".run.json.7.tmp"]])
def test_what_a_start_leaves_that_had_not_begun_is_deleted(tmp_path: Path, left: list[str]) -> None:
    make(tmp_path, *left)
    assert emptied(tmp_path, RUN) == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", ["thesis.txt", "alignments/ali.1.gz", "report/", "model.safetensors"])
def test_what_may_be_of_somebody_else_is_refused_though_a_run_may_have_it(tmp_path: Path, other: str) -> None:
    make(tmp_path, "status/rank-0000.json", other)
    for folder in (tmp_path, tmp_path / "status" / "rank-0000.json"):
        with pytest.raises(ConfigError, match="deletes only folders that hold a run; remove it yourself"):
            check_overwrite(folder, RUN)


def test_the_runs_of_a_sweep_go_and_other_folders_stay(tmp_path: Path) -> None:
    make(
        tmp_path, "sweep.json", "one-rank/run.json", "model_averaging-4/completed.json", "begun/", "mine/a.py"
    )
    assert emptied(tmp_path, SWEEP) == f"{tmp_path}: mine is not part of a sweep and is kept"
    assert names_in(tmp_path) == ["mine/a.py"] and not (tmp_path / "begun").exists()


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("other", KINDS)
def test_the_folder_of_another_command_is_refused(
    tmp_path: Path, kind: FolderKind, other: FolderKind
) -> None:
    make(tmp_path, other.record)
    if other is kind:
        check_kind(tmp_path, kind)
        return
    for check in (check_kind, check_overwrite):
        with pytest.raises(
            ConfigError, match=rf"holds {other.what} \({other.record}\); give {kind.what} ano"
        ):
            check(tmp_path, kind)


def test_data_beside_which_something_lies_are_not_replaced(tmp_path: Path) -> None:
    make(tmp_path, "data.json", "train-00000.h5", "classes.txt")
    check_target(tmp_path, overwrite=True)
    make(tmp_path, "src/zero.wav")
    with pytest.raises(
        ConfigError, match="holds src besides the data, which --overwrite would delete; move it"
    ):
        check_target(tmp_path, overwrite=True)


@pytest.mark.parametrize("kind", KINDS)
def test_data_are_not_made_in_what_a_command_has_written(tmp_path: Path, kind: FolderKind) -> None:
    folder = tmp_path / "made"
    (folder / "trained_on").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    record = folder / kind.record
    record.write_text('{"format": "another-program"}')  # such names are common
    check_target(folder / "new", overwrite=False)
    record.write_text('{"format": "speechdp-something"}')
    for path in (folder / "new", folder / "trained_on" / "new", tmp_path / "link" / "new"):
        with pytest.raises(ConfigError) as refused:
            check_target(path, overwrite=True)
        assert str(refused.value).endswith(
            f"/new: lies in {folder}, which holds {kind.what} ({kind.record}); give a folder beside it"
        )
    check_target(tmp_path / "beside", overwrite=False)
