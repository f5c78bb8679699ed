"""Which runs are held against one another: scores on the same data, speed-ups for the same work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speechdp.report.runs.derived import RunFigures, sweep_figures, target_of_all
from speechdp.report.runs.folders import read_sweep
from speechdp.report.sweep.answer import SweepAnswer, find_answer
from tests.helpers.runs import MadeUpRun, write_run

OTHER_DATA = {"data": {"path": "/data/an4", "checksum": "0a1b" * 16}}


def _rows(folder: Path, runs: list[MadeUpRun]) -> list[RunFigures]:
    for run in runs:
        write_run(run, folder)
    sweep = read_sweep(folder)
    return sweep_figures(sweep, target_of_all(sweep.runs))


def _answer(folder: Path, runs: list[MadeUpRun]) -> SweepAnswer:
    return find_answer(_rows(folder, runs))


@pytest.mark.parametrize(
    ("first", "other", "difference"),
    [
        ({}, OTHER_DATA, "data: /data/an4 instead of /data/fsdd"),
        (
            {},
            {"data": {"path": "/data/fsdd", "checksum": "0a1b" * 16}},
            "data: another state of /data/fsdd",
        ),
        ({"num_classes": 123}, {"num_classes": 81}, "number of classes: 81 instead of 123"),
        (
            {"options": {"held_out": "dev"}},
            {"options": {"held_out": "test"}},
            "held-out split: test instead of dev",
        ),
    ],
)
def test_runs_judged_on_other_data_or_classes_are_not_compared(
    tmp_path: Path, first: dict[str, Any], other: dict[str, Any], difference: str
) -> None:
    runs = [
        MadeUpRun("a", period="4", settings=first),
        MadeUpRun("b", period="16", frames_per_s=1e6, final_log_prob=-0.01, settings=other),
    ]
    rows = _rows(tmp_path / "two", runs)
    answer = find_answer(rows)
    assert answer.chosen is None and "fastest" not in answer.headline
    assert not any("best" in text for text in answer.details)
    (caution,) = [text for text in answer.cautions if "not all judged on the same data and classes" in text]
    assert caution.endswith(f"period 16 ({difference}).")
    assert [row.time_to_target_s is None for row in rows] == [False, True]
    # Two of the same are compared beside it.
    third = MadeUpRun("c", period="8", frames_per_s=30_000.0, settings=first)
    answer = _answer(tmp_path / "three", [*runs, third])
    assert answer.chosen is not None and answer.chosen.run.name == "c"
    assert any(difference in text for text in answer.cautions)


def test_what_older_runs_did_not_record_tells_against_nothing(tmp_path: Path) -> None:
    runs = [
        MadeUpRun("a", period="4", settings={"data": {"path": "/data/fsdd"}}),
        MadeUpRun("b", period="16", frames_per_s=30_000.0, settings={"num_classes": 123}),
    ]
    answer = _answer(tmp_path, runs)
    assert answer.chosen is not None and answer.chosen.run.name == "b"
    assert not any("judged on" in text for text in answer.cautions)


@pytest.mark.parametrize(
    "other", [OTHER_DATA, {"num_parameters": 9}, {"task": "synthesis"}, {"script": "train.py"}]
)
def test_a_speed_up_is_over_one_rank_that_did_the_same_work(tmp_path: Path, other: dict[str, Any]) -> None:
    task = {"task": "acoustic"}
    alone = MadeUpRun("a", size=1, frames_per_s=1_000.0, settings={**task, **other})
    runs = [
        alone,
        *(MadeUpRun(name, period=period, settings=task) for name, period in (("b", "4"), ("c", "8"))),
    ]
    rows = _rows(tmp_path / "other", runs)
    assert [row.speedup for row in rows] == [1.0, None, None]
    assert [row.efficiency for row in rows[1:]] == [None, None]
    if other is not OTHER_DATA:
        return
    # Its own is used where there is one as well, wherever it stands.
    runs.append(MadeUpRun("d", size=1, frames_per_s=10_000.0, settings=task))
    assert [row.speedup for row in _rows(tmp_path / "same", runs)] == [1.0, 2.0, 2.0, 1.0]
    # What was not recorded tells against nothing.
    runs = [MadeUpRun("a", size=1, frames_per_s=10_000.0), MadeUpRun("b", settings={"num_parameters": None})]
    assert [row.speedup for row in _rows(tmp_path / "older", runs)] == [1.0, 2.0]


def test_that_no_run_of_one_rank_is_like_the_others_is_said(tmp_path: Path) -> None:
    runs = [MadeUpRun("b", period="4"), MadeUpRun("c", period="8")]
    text = "There is no timed run of one rank{}, so speed-up and efficiency are not known."
    assert text.format("") in _answer(tmp_path / "none", runs).cautions
    alone = MadeUpRun("z", size=1, settings=OTHER_DATA)
    like = " of the same task, data and model size"
    assert text.format(like) in _answer(tmp_path / "other", [*runs, alone]).cautions


def test_a_run_that_is_not_decoded_is_not_chosen_where_others_are(tmp_path: Path) -> None:
    runs = [
        MadeUpRun("a", period="4", final_log_prob=-0.5),
        MadeUpRun("b", period="8", final_log_prob=-0.3, frames_per_s=30_000.0, wer=None),
        MadeUpRun("c", period="16", final_log_prob=-0.9, frames_per_s=40_000.0),
    ]
    answer = _answer(tmp_path / "some", runs)
    assert answer.chosen is not None and answer.chosen.run.name == "a"
    assert "Not eligible, because not decoded: period 8." in answer.cautions
    assert answer.details[0] == "Of the decoded runs it has the best held-out log-probability, too."
    assert answer.details[1].startswith("Period 8 has a better one, ")
    assert answer.details[1].endswith("but is not decoded yet.")
    for run in runs:
        run.wer = None
    answer = _answer(tmp_path / "none", runs)
    assert answer.chosen is not None and answer.chosen.run.name == "b"
    assert not any("Not eligible" in text for text in answer.cautions)
