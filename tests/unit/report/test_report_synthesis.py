"""Reports in the terms of the runs' task: synthesis, tasks from outside, and what was measured of speech."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from speechdp.errors import ConfigError
from speechdp.report.compare.table import measures
from speechdp.report.kit.canvas import make_canvas
from speechdp.report.kit.metric_names import Terms
from speechdp.report.kit.pages import WrittenReport
from speechdp.report.kit.theme import PRINT
from speechdp.report.runs.derived import sweep_figures
from speechdp.report.runs.folders import read_run, read_sweep
from speechdp.report.sweep.answer import find_answer
from speechdp.report.sweep.columns import main_columns
from speechdp.report.sweep.plots import draw_learning
from speechdp.report.sweep.report import write_report
from speechdp.report.sweep.speech_columns import SPEECH_COLUMNS
from speechdp.tasks.metrics import (
    FRAME_ACCURACY,
    LOG_PROB,
    RECORDS,
    Metric,
    TaskRecord,
    is_reserved,
    task_record,
)
from tests.helpers.runs import MadeUpRun, realistic_sweep, write_run, write_sweep
from tests.helpers.terminal import on_terminal


def _csv(report: WrittenReport) -> dict[str, dict[str, str]]:
    return {row["run"]: row for row in csv.DictReader(io.StringIO(report.csv.read_text()))}


def _printed(report: WrittenReport) -> str:
    return on_terminal(report.table)


def _record_as(run: Path, values: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Have a run's evaluations hold `values` of what was made up, in place of figures of recognition."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.update(values(line))
        del line["heldout_log_prob"], line["heldout_frame_accuracy"]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _synthesis_sweep(out: Path, *, is_older: bool = False) -> Path:
    """Write a sweep of synthesis; older runs recorded minus the error as a log-probability."""
    runs = realistic_sweep()
    for run in runs:
        run.settings, run.wer, run.final_log_prob = {"task": "synthesis"}, None, 0.3 * run.final_log_prob
        if not is_older:
            run.settings |= RECORDS["synthesis"].to_json()
    write_sweep(out, runs)
    for file in () if is_older else out.glob("*/metrics.jsonl"):
        _record_as(
            file.parent,
            lambda line: {
                "heldout_l1_error": -line["heldout_log_prob"],
                "heldout_attention_maximum": line["heldout_frame_accuracy"],
            },
        )
    return out


@pytest.mark.parametrize("is_older", [False, True])
def test_synthesis_is_reported_in_its_own_terms(tmp_path: Path, is_older: bool) -> None:
    report = write_report(_synthesis_sweep(tmp_path / "sweep", is_older=is_older), target=0.2)
    printed, page = _printed(report), report.html.read_text().replace("\u00a0", " ")
    for text in (printed, " ".join(report.answer), page):
        shown = text.partition("<h2>How it")[0]
        assert not re.search("log-probab|>log-prob<|nats|WER|frame acc|\u22120\\.1", shown)
    assert "held-out L1" in printed and "attention max." in printed
    assert "until L1 0.2000 per frame" in printed and "until L1 0.2000 per frame" in page
    assert "with L1 0.1194 per frame" in report.answer[0]
    assert "L1 0.0162 per frame above the smallest" in " ".join(report.answer)
    assert "Learning over frames (held-out L1 error)" in page and "attention maximum" in page
    row = _csv(report)["model_averaging-4"]
    assert "heldout_log_prob" not in row and "frame_accuracy" not in row
    assert float(row["heldout_l1_error"]) == pytest.approx(0.1194)
    assert float(row["target_l1_error"]) == pytest.approx(0.2)
    assert 0.1 < float(row["heldout_l1_error_best"]) <= 0.1194 and 0.8 < float(row["attention_maximum"]) < 1


def test_errors_fall_in_the_picture(tmp_path: Path) -> None:
    sweep = read_sweep(_synthesis_sweep(tmp_path / "sweep"))
    ax, rows = Figure().add_subplot(), sweep_figures(sweep, None)
    assert draw_learning(ax, rows, make_canvas(rows, PRINT), over_time=False)
    assert ax.yaxis_inverted()
    assert ax.yaxis.get_major_formatter()(-0.15) == "0.15"


def test_runs_of_several_tasks_have_their_own_columns_and_are_not_compared(tmp_path: Path) -> None:
    runs = [
        MadeUpRun("a", period="4"),
        MadeUpRun("b", settings={"task": "synthesis"}, wer=None, final_log_prob=-0.01, frames_per_s=1e6),
    ]
    rows = sweep_figures(read_sweep(write_sweep(tmp_path, runs)), -0.5)
    log_prob, error = (
        next(column for column in main_columns(rows) if column.key == key)
        for key in ("heldout_log_prob", "heldout_l1_error")
    )
    assert [log_prob.text(row) for row in rows] == ["\u22120.400", "-"]
    assert [error.text(row) for row in rows] == ["-", "0.0100"]
    assert rows[0].time_to_target_s is not None and rows[1].time_to_target_s is None
    answer = find_answer(rows)
    assert answer.chosen is rows[0]
    assert "the others have a held-out L1 error, which cannot be compared" in " ".join(answer.cautions)


def _own_sweep(out: Path) -> Path:
    """Write a sweep of a task from outside that declares a share, of which more is better."""
    hits = Metric("hit_rate", "hits", "hit rate", "%", "Frames found.", tolerance=0.03, decimals=1)
    record = {"task": "spotting", **TaskRecord((hits,)).to_json()}
    runs = realistic_sweep()
    for run in runs:
        run.settings, run.wer = dict(record), None
    write_sweep(out, runs)
    for file in out.glob("*/metrics.jsonl"):
        _record_as(file.parent, lambda line: {"heldout_hit_rate": 1 + line["heldout_log_prob"]})
    return out


def test_a_task_from_outside_is_reported_by_what_its_runs_recorded(tmp_path: Path) -> None:
    report = write_report(_own_sweep(tmp_path / "sweep"), target=50)
    printed, answer = _printed(report), " ".join(report.answer)
    assert "hits" in printed and "60.2" in printed and "until hit rate 50.0 % on held-out data" in printed
    assert not re.search("log-prob|nats|WER|decoded", printed + answer)
    assert "with hit rate 59.3 %" in report.answer[0]  # period 16, within 3 points of the best
    assert "Frames found" not in answer and "Hit rate: Frames found." in report.html.read_text()
    assert float(_csv(report)["model_averaging-16"]["heldout_hit_rate"]) == pytest.approx(0.593)


@pytest.mark.parametrize(
    ("synthesis", "target", "message"),
    [
        (False, 0.5, "--target 0.5: the log-probability is below 0, e.g. --target=-0.45"),
        (False, math.nan, "--target nan: give a number"),
        (True, 0.0, "--target 0: the L1 error is above 0, e.g. --target=0.45"),
    ],
)
def test_a_target_that_no_model_reaches_is_refused(
    tmp_path: Path, synthesis: bool, target: float, message: str
) -> None:
    out = tmp_path / "sweep"
    if synthesis:
        _synthesis_sweep(out)
    else:
        write_sweep(out, realistic_sweep())
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_report(out, target)


@pytest.mark.parametrize(
    ("task", "said"), [("synthesis", "its L1 error is too high"), ("acoustic", "it is not accurate enough")]
)
def test_what_is_far_from_the_best_is_told_in_the_words_of_its_metric(task: str, said: str) -> None:
    assert Terms(RECORDS[task]).misses == said


def test_a_target_in_per_cent_is_held_against_its_limit_in_per_cent() -> None:
    error = replace(FRAME_ACCURACY, name="held-out error rate", higher_is_better=False, limit=0.5)
    terms = Terms(TaskRecord((error,)))
    assert terms.score_of_target(85) == -0.85
    with pytest.raises(ConfigError, match=r"--target 40: the error rate is above 50, e\.g\. --target=95"):
        terms.score_of_target(40)


@pytest.mark.parametrize(
    "metrics",
    [
        [], 3, [3], [{}], [{"key": "a b"}], [{**asdict(LOG_PROB), "decimals": "3"}],
        [{**asdict(LOG_PROB), "decimals": 3.0}], [{**asdict(LOG_PROB), "decimals": True}],
        [{**asdict(LOG_PROB), "limit": 10**400}], [{**asdict(LOG_PROB), "higher_is_better": "no"}],
        [asdict(LOG_PROB), asdict(LOG_PROB)],
    ],
)  # fmt: skip
def test_a_damaged_record_of_metrics_is_passed_over_and_told(metrics: object) -> None:
    problems: list[str] = []
    assert task_record({"task": "synthesis", "metrics": metrics}, problems) == RECORDS["synthesis"]
    (problem,) = problems
    assert re.fullmatch(
        r"run.json: metrics cannot be used \(.+\); shown as a run of --task synthesis", problem
    )


def test_what_a_later_version_says_of_a_metric_is_passed_over() -> None:
    problems: list[str] = []
    metrics = [{**asdict(LOG_PROB), "key": "mine", "colour": "red"}]
    record = task_record({"task": "own", "metrics": metrics}, problems)
    assert record == TaskRecord((replace(LOG_PROB, key="mine"),)) and problems == []


def test_a_run_whose_metrics_cannot_be_used_says_so(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("a", settings={"task": "own", "metrics": [3]}), tmp_path)
    assert any("shown as a run of --task acoustic" in problem for problem in read_run(run).problems)


def test_no_metric_can_have_the_name_of_another_column(tmp_path: Path) -> None:
    report = write_report(_own_sweep(tmp_path / "sweep"))
    columns = set(report.csv.read_text().splitlines()[0].split(","))
    compared = {measure.key for measure in measures(())}
    own = {"heldout_hit_rate", "heldout_hit_rate_best", "target_hit_rate"}
    task_less = {metric.key for metric in RECORDS["acoustic"].metrics}
    others = (columns - own) | (compared - task_less) | {column.key for column in SPEECH_COLUMNS}
    assert not {name for name in others if not is_reserved(name)}


def _speech_record() -> dict[str, Any]:
    return {
        "format": "speechdp-synthesis", "version": 1, "split": "test", "utterances": 50,
        "mcd_db": {"mean": 4.417, "low": 4.239, "high": 4.571}, "focus_rate": {"mean": 0.887},
        "stopped_share": 0.98, "length_ratio": 2.289,
        "word_errors": {
            "recorded": {"wer": 0.01, "wer_low": 0.0, "wer_high": 0.02},
            "synthetic": {"wer": 1.18, "wer_low": 0.771, "wer_high": 1.758},
        },
    }  # fmt: skip


def test_what_was_measured_of_synthetic_speech_is_a_table(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("a", settings={"task": "synthesis"}, wer=None), tmp_path)
    (run / "synthesis.json").write_text(json.dumps(_speech_record()))
    report = write_report(run)
    cells = re.search(r"test \(50\) .*", _printed(report))
    assert cells is not None
    assert re.split(r"\s{2,}", cells[0].strip()) == [
        "test (50)", "4.42 [4.24, 4.57]", "88.7", "98", "2.29", "1.0 [0.0, 2.0]", "118.0 [77.1, 175.8]",
    ]  # fmt: skip
    page = report.html.read_text()
    assert '<table id="speech"' in page and "118.0 [77.1,\u00a0175.8]" in page
    assert (_csv(report)["a"]["speech_wer_synthetic"], _csv(report)["a"]["speech_wer_copy"]) == ("1.18", "")


def test_speech_that_no_recogniser_has_heard_has_no_columns_of_words(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("a", settings={"task": "synthesis"}, wer=None), tmp_path)
    (run / "synthesis.json").write_text(json.dumps({**_speech_record(), "word_errors": {}}))
    report = write_report(run)
    page, printed = report.html.read_text(), _printed(report)
    assert "focus rate" in printed and "focus rate" in page  # the table is there
    for text in ("WER, ", "Word errors are those"):
        assert text not in printed and text not in page


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "speechdp-synthesis", "version": 1}'])
def test_a_damaged_record_of_speech_is_one_problem(tmp_path: Path, text: str) -> None:
    run = write_run(MadeUpRun("a", settings={"task": "synthesis"}), tmp_path)
    (run / "synthesis.json").write_text(text)
    (found,) = read_sweep(run).runs
    assert found.spoken is None
    assert [problem.partition(":")[0] for problem in found.problems] == ["synthesis.json"]
