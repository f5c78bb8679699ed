"""The report: the answer in words, the table in its three forms, the page's safety, odd inputs."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from speechdp.cli.report import ReportCommand
from speechdp.errors import ConfigError, RunError
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import metric_text
from speechdp.report.kit.pages import WrittenReport
from speechdp.report.runs.derived import run_figures, sweep_figures, target_of_all
from speechdp.report.runs.folders import read_run, read_sweep
from speechdp.report.runs.results import RankTiming
from speechdp.report.sweep.answer import SweepAnswer, find_answer
from speechdp.report.sweep.bars import shown_ranks
from speechdp.report.sweep.columns import main_columns
from speechdp.report.sweep.plots import focus_on_end
from speechdp.report.sweep.report import write_report
from speechdp.tasks.metrics import LOG_PROB
from speechdp.watchdog.status import StatusFolder
from tests.helpers.page_reader import PageReader
from tests.helpers.runs import MadeUpRun, add_newer_figures, realistic_sweep, write_run, write_sweep
from tests.helpers.terminal import on_terminal

HOSTILE = '<script>alert("x")</script>$x_1$&[red]'


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> WrittenReport:
    return write_report(write_sweep(tmp_path_factory.mktemp("report") / "sweep", realistic_sweep()))


def _answer(tmp_path: Path, runs: list[MadeUpRun], missing: tuple[str, ...] = ()) -> SweepAnswer:
    sweep = read_sweep(write_sweep(tmp_path / "sweep", runs, missing))
    return find_answer(sweep_figures(sweep, target_of_all(sweep.runs)))


def _csv(report: WrittenReport) -> dict[str, dict[str, str]]:
    return {row["run"]: row for row in csv.DictReader(io.StringIO(report.csv.read_text()))}


def _printed(report: WrittenReport, width: int = 250) -> str:
    return on_terminal(report.table, width)


def test_the_answer_is_the_fastest_run_that_keeps_the_accuracy(tmp_path: Path) -> None:
    answer = _answer(tmp_path, realistic_sweep())
    assert answer.chosen is not None
    assert answer.chosen.run.name == "model_averaging-16"
    rests_on = "judging by one seed and without a race: "
    assert answer.headline.startswith(
        f"Period 16 seems the fastest setting that keeps the accuracy, {rests_on}"
    )
    assert "21,650 frames/s on 2 ranks (1.74 times one rank, efficiency 87 %)" in answer.headline
    assert "gradient averaging" in answer.details[0]
    assert (
        "Period 64 is faster (22,140 frames/s) but it is not accurate enough: 0.054 nats" in answer.details[1]
    )
    assert "computing slower than one rank does alone" in answer.limit
    improving, one_each = answer.cautions
    assert improving.startswith("Every run was still improving")
    assert one_each.startswith(
        "Each setting was trained once: how much of a difference in accuracy is chance"
    )


def test_runs_shorter_than_their_period_are_named(tmp_path: Path) -> None:
    runs = [
        MadeUpRun("g", "gradient_averaging", None),
        MadeUpRun("p1", period="1"),
        MadeUpRun("long", period="100000"),
    ]
    (caution,) = [text for text in _answer(tmp_path, runs).cautions if "Too short" in text]
    assert "period 100000 (" in caution.replace(",", "") and "period 1 (" not in caution


def test_runs_of_different_seeds_are_not_called_one_seed(tmp_path: Path) -> None:
    runs = [
        MadeUpRun("a", "gradient_averaging", None, settings={"seed": 1}),
        MadeUpRun("b", period="4", frames_per_s=30_000.0, settings={"seed": 2}),
    ]
    assert "judging by one run of each and without a race: 30,000" in _answer(tmp_path, runs).headline


def test_where_no_period_is_chosen_the_best_period_is_named(tmp_path: Path) -> None:
    gradient = MadeUpRun("g", "gradient_averaging", None, frames_per_s=30_000.0)
    answer = _answer(tmp_path / "a", [gradient, MadeUpRun("p1", period="1", final_log_prob=-0.41)])
    assert answer.headline.startswith("Gradient averaging seems the fastest setting that keeps")
    assert "Model averaging, period 1 seems the fastest averaging period that keeps" in answer.details[-1]
    answer = _answer(tmp_path / "b", [gradient, MadeUpRun("p1", period="1", final_log_prob=-0.51)])
    assert answer.details[-1] == "No averaging period seems to keep the accuracy."


def test_a_run_that_is_not_decoded_yet_is_not_called_less_accurate(tmp_path: Path) -> None:
    decoded = MadeUpRun("g", "gradient_averaging", None, frames_per_s=20_000.0)
    faster = MadeUpRun("p4", period="4", frames_per_s=30_000.0, wer=None)
    answer = _answer(tmp_path / "a", [decoded, faster])
    assert any(text.endswith("is faster (30,000 frames/s) but not decoded yet.") for text in answer.details)
    assert answer.details[-1] == "No averaging period has been decoded yet."
    worse = MadeUpRun("p8", period="8", frames_per_s=10_000.0, final_log_prob=-0.9)
    answer = _answer(tmp_path / "b", [decoded, faster, worse])
    assert answer.details[-1] == "No averaging period that has been decoded seems to keep the accuracy."


def _decode_otherwise(run: Path, *, acoustic_scale: float, tuned_on: str = "") -> None:
    path = run / "wer-test.json"
    record = json.loads(path.read_text())
    record["options"] = {"acoustic_scale": acoustic_scale, "prior_scale": 1.0, "beam": 16.0}
    if tuned_on:
        record["tuning"] = {"split": tuned_on}
        (run / "tuned.json").write_text(json.dumps(record))
    path.write_text(json.dumps(record))


def test_word_errors_with_other_weights_of_the_scores_are_not_compared(tmp_path: Path) -> None:
    runs = [
        MadeUpRun("exact", period="1", frames_per_s=10.0, wer=(0.01, 0.005, 0.015)),
        MadeUpRun("worse", period="4", frames_per_s=20.0, wer=(0.02, 0.016, 0.025)),
    ]
    sweep = write_sweep(tmp_path / "sweep", runs)

    def answer() -> SweepAnswer:
        return find_answer(sweep_figures(read_sweep(sweep), None))

    for name in ("exact", "worse"):
        _decode_otherwise(sweep / name, acoustic_scale=1.0)
    fixed = answer()
    assert fixed.chosen is not None and fixed.chosen.run.name == "exact"
    assert not any("decoded alike" in text for text in fixed.cautions)
    _decode_otherwise(sweep / "exact", acoustic_scale=0.4, tuned_on="dev")
    mixed = answer()
    assert mixed.chosen is not None and mixed.chosen.run.name == "worse"
    assert (
        "The runs were not decoded alike (period 1 with word-loop, weights chosen on dev; period 4 with "
        "word-loop, acoustic scale 1, prior scale 1), so the word error rate played no part in the choice: "
        "decode all of them in the same way."
    ) in mixed.cautions
    # Values may differ that were chosen in the same way; a later decoding takes what was chosen before.
    _decode_otherwise(sweep / "worse", acoustic_scale=0.6, tuned_on="dev")
    record = json.loads((sweep / "worse" / "wer-test.json").read_text())
    del record["tuning"]
    (sweep / "worse" / "wer-test.json").write_text(json.dumps(record))
    tuned = answer()
    assert tuned.chosen is not None and tuned.chosen.run.name == "exact"
    # Values that were chosen may be those of the other run, whose own record of the choice is damaged.
    (sweep / "worse" / "tuned.json").write_text(json.dumps({"options": record["options"], "tuning": []}))
    assert any("decoded alike" in text for text in answer().cautions)
    _decode_otherwise(sweep / "exact", acoustic_scale=0.6, tuned_on="dev")
    same = answer()
    assert same.chosen is not None and same.chosen.run.name == "exact"
    # A language model for rescoring is no matter of weights; its weight is none of those that are reused.
    path = sweep / "exact" / "wer-test.json"
    record = json.loads(path.read_text())
    record["options"] |= {
        "rescore_lm": "/models/of/long/paths/" + 60 * "x" + "/big.arpa",
        "rescore_weight": 0.5,
    }
    path.write_text(json.dumps(record))
    (caution,) = (text for text in answer().cautions if "decoded alike" in text)
    assert (
        "(period 1 with word-loop, weights chosen on dev, rescored with big.arpa at 0.5; period 4" in caution
    )


def test_work_of_others_is_named_beside_what_ranks_share(tmp_path: Path) -> None:
    alone = MadeUpRun("one-rank", "gradient_averaging", None, size=1, frames_per_s=30_000.0, wer=None)
    spans = (0.01, 0.0, 0.38, 0.56, 0.02, 0.03)
    quiet, busy = (MadeUpRun("p4", period="4", others=others, spans=spans) for others in (0.05, 0.9))
    said = [_answer(tmp_path / name, [alone, run]).limit for name, run in (("a", quiet), ("b", busy))]
    assert "does alone (shared cores or memory):" in said[0]
    assert "(shared cores or memory, and 0.9 cores busy with other work):" in said[1]


def test_ranks_that_are_slower_than_one_are_called_so(tmp_path: Path) -> None:
    alone = MadeUpRun("one-rank", "gradient_averaging", None, size=1, frames_per_s=30_000.0, wer=None)
    for rate, is_slower in ((20_000.0, True), (40_000.0, False)):
        runs = [
            alone,
            MadeUpRun("p4", period="4", frames_per_s=rate),
            MadeUpRun("p8", period="8", frames_per_s=5.0),
        ]
        said = (
            "On 2 ranks period 4 is slower than one rank alone."
            in _answer(tmp_path / f"{rate}", runs).details
        )
        assert said is is_slower


def test_many_evaluations_make_a_curve_of_some_hundred_points_and_no_dots(tmp_path: Path) -> None:
    def page(name: str, evaluations: int) -> str:
        runs = [MadeUpRun("p4", period="4", num_evaluations=evaluations), MadeUpRun("p8", period="8")]
        return write_report(write_sweep(tmp_path / name, runs)).html.read_text()

    few, many = page("few", 50), page("many", 2000)
    assert few.count("Period 4, step") or few.count("period 4, step") == 2 * 50
    assert many.count("period 4, step") == 0
    assert len(many) < len(few) + 60_000


def test_of_few_evaluations_most_are_in_the_picture_and_the_others_are_told_of() -> None:
    ax = Figure().add_subplot()
    steep = [-40.0, -20.0, -10.0, -5.0, -2.9, -2.8]
    focus_on_end(ax, [steep, steep])
    low, high = ax.get_ylim()
    assert sum(low <= y <= high for y in steep) >= 4


def test_a_curve_whose_beginning_is_cut_off_says_so(tmp_path: Path) -> None:
    page = write_report(write_sweep(tmp_path / "sweep", realistic_sweep())).html.read_text()
    assert page.count("earlier evaluations lie below") == 2


def test_results_stand_before_what_explains_the_speed(tmp_path: Path) -> None:
    rows = sweep_figures(read_sweep(write_sweep(tmp_path / "sweep", realistic_sweep())), None)
    keys = [column.key for column in main_columns(rows)]
    assert keys.index("wer") < keys.index("efficiency") < len(keys) - 1


def test_a_single_run_that_went_on_with_other_ranks_is_not_called_several(tmp_path: Path) -> None:
    out = write_run(MadeUpRun("p4", period="4"), tmp_path)
    settings = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**settings, "earlier_sizes": [4]}))
    answer = write_report(out).answer
    assert (
        f"The run trained on 4 and then {settings['size']} ranks, which changes speed and accuracy too."
        in answer
    )


def test_ranks_that_were_lost_are_told_of(tmp_path: Path) -> None:
    """The frames of a lost rank are in no figure: the run looked slow, and nothing said why."""
    out = write_run(MadeUpRun("a"), tmp_path)
    timing = json.loads((out / "timing.json").read_text())
    *left, lost = timing["ranks"]
    (out / "timing.json").write_text(json.dumps({**timing, "ranks": left, "lost_ranks": [lost["rank"]]}))
    told = (
        f"rank {lost['rank']} was lost in training, so its speed, efficiency and shares of time count only "
        f"what the {len(left)} rank{'s' if len(left) > 1 else ''} left at the end did."
    )
    assert any(sentence.endswith(told) for sentence in write_report(out).answer)


def test_the_speed_of_a_resumed_run_is_said_to_be_that_of_its_last_start(tmp_path: Path) -> None:
    """The documents said so, the table did not."""
    out = write_sweep(tmp_path / "sweep", [MadeUpRun("p4", period="4"), MadeUpRun("p16", period="16")])
    path = out / "p4" / "timing.json"
    timing = json.loads(path.read_text())

    def note(first_step: int) -> str:
        ranks = [{**rank, "first_step": first_step} for rank in timing["ranks"]]
        path.write_text(json.dumps({**timing, "ranks": ranks}))
        written = write_report(out)
        page = " ".join(written.html.read_text(encoding="utf-8").split())
        (figures,) = (table for table in written.table.renderables if table.id == "figures")
        assert figures.note in page
        return str(figures.note)

    assert "Resumed" not in note(5)  # of a run in one go: behind the warm-up
    told = "Resumed, so that speed and shares of time are those since the last start: "
    assert note(1205).endswith(f"{told}period 4 (from step 1,205).")


def test_names_that_are_no_utf_8_and_backslashes_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"swe\xffep\\1")
    run = MadeUpRun(os.fsdecode(b"r\xff\\g<9>"), "", settings={"strategy_name": ""}, period=None)
    run.settings |= {"directory": os.fsdecode(b"/a\xff"), "strategy": ""}
    report = write_report(write_run(run, folder).parent)
    assert "r\\udcff" in report.html.read_text(encoding="utf-8") and report.csv.is_file()
    assert report.png is not None


def test_a_run_whose_word_error_interval_lies_above_the_best_is_not_chosen(tmp_path: Path) -> None:
    exact = MadeUpRun("exact", period="1", frames_per_s=10.0, wer=(0.01, 0.005, 0.015))
    worse = MadeUpRun("worse", period="4", frames_per_s=20.0, wer=(0.02, 0.016, 0.025))
    chosen = _answer(tmp_path / "a", [exact, worse]).chosen
    assert chosen is not None
    assert chosen.run.name == "exact"
    worse.wer = (0.02, 0.014, 0.025)
    chosen = _answer(tmp_path / "b", [exact, worse]).chosen
    assert chosen is not None
    assert chosen.run.name == "worse"


@pytest.mark.parametrize(
    ("spans", "rank_spans", "words"),
    [
        ((0.01, 0, 0.3, 0.4, 0.25, 0.04), {}, "is communication itself: 25 %"),
        ((0.30, 0, 0.25, 0.35, 0.06, 0.04), {}, "is waiting for data: 30 %"),
        (
            (0.01, 0, 0.3, 0.3, 0.35, 0.04),
            {1: (0.01, 0, 0.4, 0.5, 0.05, 0.04)},
            "is waiting for slower ranks (the slowest is rank 1 on node-a): 15 %",
        ),
        ((0.005, 0, 0.3, 0.6, 0.01, 0.08), {}, "Nothing in particular holds model averaging, period 16 back"),
    ],
)
def test_what_holds_the_job_back(tmp_path: Path, spans: Any, rank_spans: Any, words: str) -> None:
    limit = _answer(tmp_path, [MadeUpRun("a", spans=spans, rank_spans=rank_spans)]).limit
    assert words in limit.replace("\u00a0", " ")


def test_cautions_name_what_was_not_compared(tmp_path: Path) -> None:
    runs = [
        MadeUpRun("a", period="1", num_evaluations=5, frames_per_s=10.0),
        MadeUpRun("b", period="4", wer=None, frames_per_s=30.0),
        MadeUpRun("c", period="16", completed=False, frames_per_s=90.0),
    ]
    answer = _answer(tmp_path, runs, missing=("d",))
    assert answer.chosen is not None
    assert answer.chosen.run.name == "a"
    text = " ".join(answer.cautions)
    assert "because unfinished: period 16" in text
    assert "because missing: d" in text
    assert "because not decoded: period 4" in text
    assert "490,000 to 1,176,000 frames" in text
    assert "no timed run of one rank" in text


def test_cautions_name_runs_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    runs = [MadeUpRun("a", period="1"), MadeUpRun("b", period="4", size=4)]
    text = " ".join(_answer(tmp_path, runs).cautions)
    assert "which changes speed and accuracy too: period 1 on 2, period 4 on 4." in text


def test_what_ended_an_unfinished_run_is_said_where_its_folder_records_it(tmp_path: Path) -> None:
    """Its watchdog's words stay until the next start; who was killed could write nothing."""
    for name, completed in (("killed", False), ("hung", False), ("whole", True)):
        run = write_run(MadeUpRun(name, "bmuf", "8", completed=completed), tmp_path)
        if name != "killed":
            line = "speechdp: rank 1 on n2: no step ended for 600 s (step 5, forward for 600 s)\n"
            (run / "status").mkdir()
            assert StatusFolder(run).claim_end(line)
    why = "Failed: hung: rank 1 on n2: no step ended for 600 s (step 5, forward for 600 s)"
    report = write_report(tmp_path)
    assert [line for line in report.answer if line.startswith("Failed")] == [why]
    assert why in report.html.read_text().replace("\u00a0", " ")
    assert [line for line in write_report(tmp_path / "hung").answer if line.startswith("Failed")] == [
        why.replace("hung", "Bmuf, period 8")
    ]
    assert not any("Failed" in line for line in write_report(tmp_path / "killed").answer)


def test_runs_without_evaluations_have_a_speed_but_no_choice(tmp_path: Path) -> None:
    answer = _answer(tmp_path, [MadeUpRun("a", num_evaluations=0, wer=None)])
    assert answer.chosen is None
    assert answer.headline.startswith("Model averaging, period 16: 20,000 frames/s on 2 ranks; how accurate")


def test_of_a_single_unfinished_run_it_is_said_what_it_is(tmp_path: Path) -> None:
    answer = _answer(tmp_path / "a", [MadeUpRun("run", "bmuf", "8", completed=False)])
    assert answer.headline.startswith(
        "Bmuf, period 8 is unfinished: so far 20,000 frames/s on 2 ranks, with \u22120.400 nats/frame"
    )
    assert "What holds bmuf, period 8 back most" in answer.limit
    assert not any("compared" in sentence or "fastest" in sentence for sentence in answer.sentences)
    answer = _answer(tmp_path / "b", [], missing=("gone",))
    assert answer.sentences == ("gone is missing.",)


def test_of_a_single_run_that_is_not_decoded_no_choice_is_spoken_of(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("alone", wer=None), tmp_path)
    cautions = find_answer([run_figures(read_run(run), None, None)]).cautions
    assert cautions == ("The run is not decoded, so its word error rate is not known.",)


def test_a_model_that_is_no_better_than_guessing_is_called_so(tmp_path: Path) -> None:
    runs = [
        MadeUpRun("fine", period="1", settings={"num_classes": 60}),
        MadeUpRun("near", period="4", final_log_prob=-4.09, settings={"num_classes": 60}),
        MadeUpRun("lost", period="16", final_log_prob=-13976803.8, settings={"num_classes": 60}),
        MadeUpRun("unknown", period="64", final_log_prob=-4.2),
    ]
    written = write_report(write_sweep(tmp_path / "sweep", runs))
    (caution,) = (text for text in written.answer if "guessing" in text)
    assert caution == (
        "Held-out log-probability below that of guessing among the classes: period 16 (\u221213,976,803.800, "
        "guessing \u22124.094). Such a model has learned nothing, or lost it again: try a lower "
        "--learning-rate. "
        "The plots of this figure, and the target, leave it out."
    )
    page = written.html.read_text()
    assert "until \u22124.200\u00a0nats/frame" in page.replace("To target: ", "")
    assert ">\u221210,000,000<" not in page and ">\u221213,976,803.800<" in page


def test_the_shares_of_communication_are_put_together(tmp_path: Path) -> None:
    late = MadeUpRun("a", spans=(0, 0, 0.3, 0.3, 0.33, 0.07), rank_spans={1: (0, 0, 0.4, 0.5, 0.03, 0.07)})
    limit = _answer(tmp_path, [late]).limit.replace("\u00a0", " ")
    assert "15 % of the step time. The other losses: communication itself 3 %" in limit
    assert "The table's communication, 18.0 %, is communication itself and waiting for slower ranks" in limit


def test_what_no_run_has_makes_no_column(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", [MadeUpRun("a", "ad_psgd", None), MadeUpRun("b", period="4")])
    report = write_report(out)
    assert "speed-up" not in _printed(report) and "period" in _printed(report)
    assert _csv(report)["a"]["speedup"] == ""
    for run in ("a", "b"):
        (out / run / "metrics.jsonl").unlink()
    assert "log-prob" not in _printed(write_report(out))


def test_one_rank_has_one_name(realistic: WrittenReport) -> None:
    (line,) = (line for line in _printed(realistic).splitlines() if line.strip().startswith("one-rank"))
    assert "one rank" in line and "gradient averaging" not in line
    assert _csv(realistic)["one-rank"]["strategy"] == "gradient_averaging"


def test_the_three_files_and_the_table(realistic: WrittenReport) -> None:
    report = realistic
    assert report.html.parts[-3:] == ("sweep", "report", "report.html")
    assert report.png is not None
    assert report.png.read_bytes().startswith(b"\x89PNG")
    rows = _csv(report)
    row = rows["model_averaging-16"]
    assert float(row["frames_per_s"]) == pytest.approx(21650)
    assert float(row["speedup"]) == pytest.approx(21650 / 12470)
    assert float(row["efficiency"]) == pytest.approx(21650 / 12470 / 2)
    assert float(row["communication_share"]) == pytest.approx((0.055 + 0.015) / 2)
    assert (row["period"], row["ranks"], row["wer"], row["wer_high"]) == ("16", "2", "0.0167", "0.0333")
    assert float(row["target_log_prob"]) == pytest.approx(-0.446)
    assert rows["one-rank"]["wer"] == ""
    assert rows["gradient_averaging"]["straggler_rank"] == "1"
    printed = _printed(report)
    assert re.search(
        r"model_averaging-16 .* 16 .* 21,650 .* 1\.74 .* 1\.7 \[0\.3, 3\.3\] .* 87 .* 3\.5", printed
    )
    assert re.search(r"one-rank .* - ", printed)


def test_figures_that_older_runs_lack_are_shown_where_runs_have_them(tmp_path: Path) -> None:
    old, new = (write_run(MadeUpRun(name), tmp_path / name) for name in ("old", "new"))
    assert not any(title in _printed(write_report(old)) for title in ("SER", "no silence"))
    add_newer_figures(new)
    report = write_report(new)
    (row,) = _csv(report).values()
    assert (row["ser"], row["frame_accuracy_no_silence"]) == ("0.25", "0.625")
    printed = _printed(report)
    assert re.search(r" 62\.5 .* 25\.0 ", printed)
    page = report.html.read_text()
    assert "frame accuracy without silence 62.5 %" in page


@pytest.mark.parametrize(
    ("periods", "unit"), [(("4", "16"), " (steps)"), (("200kf", "600kf"), ""), (("5s", "20s"), "")]
)
def test_the_axis_of_periods_names_steps_only_where_they_are_steps(
    periods: tuple[str, str], unit: str, tmp_path: Path
) -> None:
    runs = [MadeUpRun(f"model_averaging-{period}", period=period) for period in periods]
    page = write_report(write_sweep(tmp_path, runs)).html.read_text()
    assert set(re.findall(r">averaging period([^<]*)<", page)) == {unit}


def test_a_narrow_terminal_gets_a_figure_a_line(tmp_path: Path, realistic: WrittenReport) -> None:
    printed = _printed(realistic, width=80)
    (speed,) = [line for line in printed.splitlines() if line.startswith(" frames/s")]
    assert speed.split() == ["frames/s", "12,470", "17,900", "15,300", "19,800", "21,650", "22,140"]
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "averagin\n" not in printed and re.search(r"\baveraging\b", printed)  # no word is broken
    assert "[red]" in _printed(write_report(write_run(MadeUpRun("[red]x", HOSTILE), tmp_path)), width=80)


def test_the_time_to_a_given_target(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", realistic_sweep())
    row = _csv(write_report(out, target=-0.6))["model_averaging-16"]
    evaluations = [json.loads(line) for line in (out / row["run"] / "metrics.jsonl").read_text().splitlines()]
    reached = next(e["time_s"] for e in evaluations if e["heldout_log_prob"] >= -0.6)
    assert float(row["time_to_target_s"]) == reached
    assert _csv(write_report(out, target=-0.1))["model_averaging-16"]["time_to_target_s"] == ""
    with pytest.raises(ConfigError, match="--target"):
        write_report(out, target=0.45)


def test_unfinished_and_missing_runs_are_shown_as_such(tmp_path: Path) -> None:
    runs = [MadeUpRun("a"), MadeUpRun("b", period="4", completed=False)]
    out = write_sweep(tmp_path / "sweep", runs, missing=["c"])
    report = write_report(out)
    assert {name: row["status"] for name, row in _csv(report).items()} == {
        "a": "complete",
        "b": "unfinished",
        "c": "missing",
    }
    printed = _printed(report)
    assert "b (unfinished)" in printed
    assert "c (missing)" in printed
    page = report.html.read_text()
    assert page.count('<span class="status">unfinished</span>') == 2
    assert "completed.json: missing" in page


def test_a_sweep_of_missing_runs_still_gives_a_report(tmp_path: Path) -> None:
    report = write_report(write_sweep(tmp_path / "sweep", [], missing=["a", "b"]))
    assert report.png is None
    assert "nothing to choose from" in report.html.read_text()


def test_names_and_commands_are_text_never_markup(tmp_path: Path) -> None:
    settings = {"command": ["speechdp", HOSTILE], "strategy": HOSTILE, "hosts": [HOSTILE], HOSTILE: HOSTILE}
    hostile_name = HOSTILE.replace("/", "")
    runs = [
        MadeUpRun(hostile_name, HOSTILE, HOSTILE, settings=settings, wer=None),
        MadeUpRun("plain", HOSTILE, None, frames_per_s=9.0),
    ]
    out = write_sweep(tmp_path / HOSTILE.replace("/", ""), runs)
    (out / hostile_name / "wer-test.json").write_text(json.dumps({"wer": 0.1, "split": HOSTILE}))
    timing = json.loads((out / hostile_name / "timing.json").read_text())
    timing["ranks"][0]["host"] = HOSTILE
    (out / hostile_name / "timing.json").write_text(json.dumps(timing))
    report = write_report(out)
    page = report.html.read_text()
    reader = PageReader(page)
    assert reader.tags.count("script") == 1  # our own
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "[red]" in _printed(report)


def test_the_page_stands_alone_and_its_ids_are_its_own(realistic: WrittenReport) -> None:
    page = realistic.html.read_text()
    reader = PageReader(page)
    assert all(reference.startswith("#") or reference == "data:," for reference in reader.references)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert len(reader.ids) == len(set(reader.ids))
    for target in re.findall(r"url\(#([^)]*)\)", page):
        assert target in reader.ids
    assert reader.tags.count("svg") == 6
    assert "#fe0" not in page  # every stand-in colour became a variable
    assert page.count("<title>") > 60  # texts under the pointer


def test_one_run_and_a_folder_of_runs(tmp_path: Path) -> None:
    run = write_run(MadeUpRun("alone", period="600kf"), tmp_path)
    report = write_report(run)
    assert "Model averaging, period 600kf: 20,000 frames/s on 2 ranks, with" in report.answer[0]
    assert PageReader(report.html.read_text()).tags.count("svg") == 3  # no period axis for one run
    write_run(MadeUpRun("other", period="5s"), tmp_path)
    folder = write_report(tmp_path)
    assert set(_csv(folder)) == {"alone", "other"}
    assert PageReader(folder.html.read_text()).tags.count("svg") == 6
    assert set(_csv(write_report(tmp_path))) == {"alone", "other"}  # its own folder is no run


def test_settings_are_written_for_people(tmp_path: Path) -> None:
    options = {"model": {"preset": "tiny", "cells": None}, "epochs": 2}
    page = write_report(write_run(MadeUpRun("a", settings={"options": options}), tmp_path)).html.read_text()
    assert "<dt>options</dt><dd>model (preset=tiny), epochs 2</dd>" in page
    assert "<dt>hosts</dt><dd>node-a (2)</dd>" in page
    assert "<dt>parameters</dt><dd>1,234,567</dd>" in page
    assert "speechdp train data" in page


def test_many_ranks_are_shown_by_three() -> None:
    ranks = [RankTiming(i, "h", 10, 1, 1.0, {"forward": float((7 * i) % 16)}) for i in range(16)]
    assert [rank.spans_s["forward"] for rank in shown_ranks(ranks)] == [0.0, 8.0, 15.0]
    assert shown_ranks(ranks[:8]) == ranks[:8]


def test_labels_say_what_tells_the_runs_apart(tmp_path: Path) -> None:
    runs = [
        MadeUpRun("one-rank", "gradient_averaging", None, 1),
        MadeUpRun("g", "gradient_averaging", None),
        MadeUpRun("p4", period="4"),
        MadeUpRun("p16-seed1"),
        MadeUpRun("p16-seed2"),
    ]
    sweep = read_sweep(write_sweep(tmp_path, runs))
    assert list(formatting.run_labels(sweep.runs).values()) == [
        "one rank",
        "gradient averaging",
        "period 4",
        "p16-seed1",
        "p16-seed2",
    ]


def test_numbers_are_written_in_one_style() -> None:
    assert formatting.count(21649.6) == "21,650"
    assert formatting.count(8.25) == "8.25"
    assert metric_text(LOG_PROB, -0.4071) == "\u22120.407"
    assert formatting.percent(0.0864, 1) == "8.6"
    assert [formatting.seconds(s) for s in (8.26, 365.2, 7800.0, None)] == [
        "8.3 s",
        "6 min 05 s",
        "2 h 10 min",
        "-",
    ]


def test_the_command_prints_table_answer_and_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = write_sweep(tmp_path / "sweep", realistic_sweep())
    ReportCommand(out).run()
    printed = capsys.readouterr().out
    assert "Period 16 seems the fastest setting" in printed
    assert printed.rstrip().splitlines()[-3:] == [
        str(out / "report" / f"report.{kind}") for kind in ("html", "csv", "png")
    ]


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "sweep", [MadeUpRun("a")])
    (out / "report").write_text("in the way")
    with pytest.raises(RunError, match=r"sweep/report: cannot be written \(File exists\); remove"):
        write_report(out)


def test_runs_that_may_not_be_written_beside_are_reported_by_the_commands_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_sweep(tmp_path / "RUN", realistic_sweep())
    write_report(run)
    page = (run / "report" / "report.html").read_bytes()
    mkdir = Path.mkdir

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        if self == run / "report":
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere
    with pytest.raises(
        RunError, match=r"or give a folder of your own with links to all in .*RUN but report \(docs/run-dir"
    ):
        write_report(run)
    docs = (Path(__file__).parents[3] / "docs" / "run-directory.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (mkdir MINE .*)$", docs, re.MULTILINE)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    mine = tmp_path / "MINE"
    assert write_report(mine).html == mine / "report" / "report.html"
    assert not (mine / "report").is_symlink()
    assert (run / "report" / "report.html").read_bytes() == page


def test_nothing_there_is_refused_with_the_folder_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`speechdp sweep`, `speechdp compare`, `speechdp tune` or "):
        ReportCommand(tmp_path).run()


def test_a_table_without_a_terminal_breaks_no_word_and_sentences_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"a-run-whose-name-is-by-far-the-longest-of-all-names-of-runs-{number}" for number in range(12)]
    out = write_sweep(tmp_path / "sweep", [MadeUpRun(name, others=None) for name in names])
    ReportCommand(out).run()
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert all(any(name in line for line in lines) for name in names)
    assert any("frames/s" in line for line in lines) and any("Only on the page:" in line for line in lines)
    answer = lines[[line.startswith("There is no timed run") for line in lines].index(True) :]
    assert answer and all(len(line) <= 200 for line in answer)


def test_damages_of_finished_runs_are_told_with_the_answer(tmp_path: Path) -> None:
    runs = [MadeUpRun("a", period="1"), MadeUpRun("b", period="4")]
    out = write_sweep(tmp_path, runs)
    with (out / "b" / "metrics.jsonl").open("a") as file:
        file.write("{torn\n")
    assert (
        "Period 4: metrics.jsonl: 1 damaged line passed over."
        in find_answer([run_figures(read_run(out / name), None, None) for name in ("a", "b")]).cautions
    )


@pytest.mark.parametrize(
    ("spans", "limit"),
    [
        ((0.01, 0.0, 0.20, 0.30, 0.08, 0.40), "the optimizer's update: 40 % of the step time"),
        ((0.01, 0.0, 0.20, 0.30, 0.08, 0.05), "what the loop does beside its steps: 36 % of the step time"),
        ((0.01, 0.0, 0.28, 0.48, 0.08, 0.15), "communication itself: 8 % of the step time"),
    ],
)
def test_what_takes_most_of_a_step_is_named(tmp_path: Path, spans: tuple[float, ...], limit: str) -> None:
    out = write_sweep(
        tmp_path, [MadeUpRun("a", spans=spans), MadeUpRun("b", frames_per_s=9_000, spans=spans)]
    )
    text = find_answer(sweep_figures(read_sweep(out), None)).limit
    assert f" back most is {limit}" in text.replace("\u00a0", " ")


def test_long_pauses_for_evaluations_and_checkpoints_are_said(tmp_path: Path) -> None:
    out = write_sweep(tmp_path, [MadeUpRun("a"), MadeUpRun("b", frames_per_s=9_000)])
    path = out / "a" / "timing.json"
    timing = json.loads(path.read_text())
    for rank in timing["ranks"]:
        rank["eval_s"], rank["checkpoint_s"] = rank["wall_s"], 0.1 * rank["wall_s"]
    path.write_text(json.dumps(timing))
    text = find_answer(sweep_figures(read_sweep(out), None)).limit
    assert text.endswith(
        " Pauses, as shares of its total time: 48\u00a0% for evaluations; figures of speed leave them out."
    )
