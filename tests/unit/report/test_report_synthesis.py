"""The report of synthesis: its own terms, errors that fall, and what was measured of the speech."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from speechdp.report.kit.canvas import make_canvas
from speechdp.report.kit.pages import WrittenReport
from speechdp.report.kit.theme import PRINT
from speechdp.report.runs.derived import sweep_figures
from speechdp.report.runs.folders import read_sweep
from speechdp.report.sweep.answer import find_answer
from speechdp.report.sweep.columns import COLUMNS, main_columns
from speechdp.report.sweep.plots import draw_learning
from speechdp.report.sweep.report import write_report
from tests.helpers.runs import MadeUpRun, realistic_sweep, write_run, write_sweep


def _csv(report: WrittenReport) -> dict[str, dict[str, str]]:
    return {row["run"]: row for row in csv.DictReader(io.StringIO(report.csv.read_text()))}


def _printed(report: WrittenReport) -> str:
    console = Console(file=io.StringIO(), width=250, record=True)
    console.print(report.table)
    return console.export_text()


def _synthesis_sweep(out: Path) -> Path:
    runs = realistic_sweep()
    for run in runs:
        run.settings, run.wer, run.final_log_prob = {"task": "synthesis"}, None, 0.3 * run.final_log_prob
    return write_sweep(out, runs)


def test_synthesis_is_reported_in_its_own_terms(tmp_path: Path) -> None:
    report = write_report(_synthesis_sweep(tmp_path / "sweep"), target=0.2)
    printed, page = _printed(report), report.html.read_text()
    for text in (printed, " ".join(report.answer), page):
        shown = text.partition("<h2>How it")[0]
        assert not re.search("log-probab|>log-prob<|nats|WER|frame acc|\u22120\\.1", shown)
    assert "held-out L1" in printed and "attention max." in printed
    assert "until L1 0.2000 per frame" in printed and "until L1 0.2000 per frame" in page
    assert "with L1 0.1194 per frame" in report.answer[0]
    assert "L1 0.0162 per frame above the smallest" in " ".join(report.answer)
    assert "Learning over frames (held-out L1 error)" in page and "attention maximum" in page
    # Programs read the same columns of both tasks.
    assert float(_csv(report)["model_averaging-4"]["heldout_log_prob"]) == pytest.approx(-0.1194)


def test_errors_fall_in_the_picture(tmp_path: Path) -> None:
    sweep = read_sweep(_synthesis_sweep(tmp_path / "sweep"))
    ax, rows = Figure().add_subplot(), sweep_figures(sweep, None)
    assert draw_learning(ax, rows, make_canvas(rows, PRINT), over_time=False)
    assert ax.yaxis_inverted()
    assert ax.yaxis.get_major_formatter()(-0.15) == "0.15"


def test_runs_of_both_tasks_keep_the_names_of_recognition_under_a_caution(tmp_path: Path) -> None:
    runs = [MadeUpRun("a", settings={"task": "synthesis"}, wer=None), MadeUpRun("b", period="4")]
    sweep = read_sweep(write_sweep(tmp_path, runs))
    rows = sweep_figures(sweep, None)
    assert main_columns(rows) == COLUMNS
    assert "neither can be compared with the figures of recognition" in " ".join(find_answer(rows).cautions)


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
        "test (50)", "4.42 [4.24, 4.57]", "88.7", "98", "2.29", "1.0 [0.0, 2.0]", "-", "118.0 [77.1, 175.8]",
    ]  # fmt: skip
    page = report.html.read_text()
    assert '<table id="speech"' in page and "118.0 [77.1, 175.8]" in page
    assert (_csv(report)["a"]["speech_wer_synthetic"], _csv(report)["a"]["speech_wer_copy"]) == ("1.18", "")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "speechdp-synthesis", "version": 1}'])
def test_a_damaged_record_of_speech_is_one_problem(tmp_path: Path, text: str) -> None:
    run = write_run(MadeUpRun("a", settings={"task": "synthesis"}), tmp_path)
    (run / "synthesis.json").write_text(text)
    (found,) = read_sweep(run).runs
    assert found.spoken is None
    assert [problem.partition(":")[0] for problem in found.problems] == ["synthesis.json"]
