"""What the files of a decoding are called."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speechdp.decode.results import results_name, wer_path


def named(run: Path, split: str, folder: str, checksum: str) -> str:
    """Decode a split of a folder, and leave the record of it; return the name of its files."""
    dataset: Any = SimpleNamespace(path=run.parent / folder, checksum=checksum)
    name = results_name(run, split, dataset, "own")
    wer_path(run, name).write_text(json.dumps({"data": {"checksum": checksum}}))
    return name


def make_run(folder: Path, *splits: str) -> Path:
    (folder / "run" / "trained_on").mkdir(parents=True)
    record = {"splits": {split: {} for split in splits}}
    (folder / "run" / "trained_on" / "data.json").write_text(json.dumps(record))
    return folder / "run"


def test_other_data_do_not_take_the_place_of_the_runs_own(tmp_path: Path) -> None:
    run = make_run(tmp_path, "train", "dev", "test")
    assert named(run, "test", "other", "1") == "test@other"
    assert named(run, "test", "data", "own") == "test"
    assert named(run, "test", "another", "2") == "test@another"
    assert named(run, "test", "another", "3456789012") == "test@another-34567890"  # elsewhere
    assert named(run, "test", "another", "2") == "test@another"


def test_a_test_set_by_itself_is_that_of_the_run_and_the_next_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path, "train", "dev")
    assert named(run, "test", "official", "1") == "test"
    assert named(run, "test", "another", "2") == "test@another"
    assert named(run, "test", "official", "1") == "test"


def test_what_says_nothing_is_replaced_as_ever(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    wer_path(run, "test").write_text('{"wer": 0.1}')
    (run / "trained_on" / "data.json").write_text("[")
    assert named(run, "test", "other", "1") == "test"
    dataset: Any = SimpleNamespace(path=tmp_path, checksum="2")
    assert results_name(run, "test", dataset, None) == "test"
