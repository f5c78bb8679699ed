"""The files of a run that rank 0 writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speechdp.errors import ConfigError, RunError
from speechdp.parallel.run_files import Metrics, RunDirectory
from tests.helpers.faulty_disk import faulty_disk, full


def metrics(step: int) -> Metrics:
    return Metrics(step / 10, step, 1000 * step, 0.1 * step, 2.0, 0.001, {"log_prob": -1 / 3}, 77)


def begun(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    run.begin({"fingerprint": "abc", "data": {"path": "/data/digits", "checksum": "123"}})
    return run


def test_a_run_is_begun_by_its_record_and_complete_by_its_marker(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "run")
    assert not run.is_begun and not run.is_complete
    run.begin({"fingerprint": "abc", "seed": 3})
    assert run.is_begun and not run.is_complete
    record = json.loads((run.path / "run.json").read_text())
    assert record["format"] == "speechdp-run" and record["version"] == 1 and record["seed"] == 3
    run.complete({"step": 12})
    assert run.is_complete and json.loads((run.path / "completed.json").read_text())["step"] == 12


def test_a_run_of_another_version_is_not_gone_on_with(tmp_path: Path) -> None:
    run = begun(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(ConfigError, match=r"run.json: is of version 2, and this speechdp reads version 1"):
        run.check_same("abc", "123")


def test_a_renewed_marker_says_the_same_and_is_another_file(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.complete({"step": 12})
    path = tmp_path / "completed.json"
    content, before = path.read_text(), path.stat()
    run.complete_again()
    after = path.stat()
    assert path.read_text() == content
    # As `speechdp launch` compares them.
    assert (after.st_mtime_ns, after.st_ino) != (before.st_mtime_ns, before.st_ino)


def test_other_options_and_other_data_are_refused(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.check_same("abc", "123")
    with pytest.raises(ConfigError, match=r"run\.json: the run was begun with other options"):
        run.check_same("abd", "123")
    with pytest.raises(ConfigError, match=r"begun on other data \(/data/digits/data\.json had another"):
        run.check_same("abc", "124")


def test_options_that_an_earlier_version_did_not_have_are_not_what_differs(tmp_path: Path) -> None:
    run = begun(tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    run.renew({**record, "options": {"seed": 1, "model": {"cells": 8}}})
    defaults = {"flat_start": False, "model": {"cells": None, "criterion": "frame"}}
    model = {"criterion": "frame", "cells": 8}
    given = {"flat_start": False, "model": model, "seed": 2}
    with pytest.raises(ConfigError, match=r"\(--seed was 1, is 2\)"):
        run.check_same("abd", "123", given, defaults)
    with pytest.raises(ConfigError, match=r"\(--criterion was frame, is ctc; --seed was 1, is 2\)"):
        run.check_same("abd", "123", {**given, "model": {**model, "criterion": "ctc"}}, defaults)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3", '"text"', '{"fingerprint": "abc"}'])
def test_a_damaged_record_is_named(tmp_path: Path, content: str) -> None:
    run = begun(tmp_path)
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=rf"run\.json: cannot be read .*; delete {tmp_path}, then run again"):
        run.check_same("abc", "123")


def test_metrics_are_a_line_an_evaluation(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for step in (10, 20):
        run.add_metrics(metrics(step))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [metrics(10).to_json(), metrics(20).to_json()]
    assert json.loads(lines[1])["heldout_log_prob"] == -1 / 3 and "held_out" not in json.loads(lines[1])


def test_a_resumed_run_makes_the_evaluations_after_its_checkpoint_again(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.truncate_metrics(0, 0)  # there are none yet
    for step in (10, 20, 30):
        run.add_metrics(metrics(step))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 40, "tor\xff')  # killed while writing
    run.truncate_metrics(35, 3)
    assert path.read_bytes() == whole
    run.truncate_metrics(30, 2)  # saved after the last step of epoch 3, before its evaluation
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    run.truncate_metrics(10, 1)
    assert path.read_bytes() == whole.splitlines(keepends=True)[0]
    run.truncate_metrics(0, 0)
    assert path.read_bytes() == b""


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.add_metrics(metrics(10))
    run.add_metrics(metrics(20))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    attempts = {
        "run.json": lambda: run.begin({"fingerprint": "other"}),
        "completed.json": lambda: run.complete({}),
        "metrics.jsonl": lambda: run.truncate_metrics(10, 1),
    }
    for name, attempt in attempts.items():
        for fails_at in (1, 2):
            with faulty_disk(fails_at, full()), pytest.raises(RunError) as raised:
                attempt()
            assert str(raised.value).startswith(f"{tmp_path / name}: cannot be written (No space left")
            assert str(raised.value).endswith("then run again")
            assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    for fails_at in (1, 2):  # written, and kept by the disk before a checkpoint follows
        with (
            faulty_disk(fails_at, full()),
            pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written"),
        ):
            run.add_metrics(metrics(30))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/run/run\.json: cannot be written \(Not a directory\)"):
        RunDirectory(tmp_path / "file" / "run").begin({})
