"""A comparison's report: figures from run folders, spread over seeds, the choice, table, CSV and page."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import Markup

from speechdp.cli.report import ReportCommand
from speechdp.report.compare.choice import choose, rule_for
from speechdp.report.compare.groups import Group, make_groups, read_comparison, target_of_most
from speechdp.report.compare.panels import make_canvas, make_panels, mean_curve
from speechdp.report.compare.report import write_comparison as write_report
from speechdp.report.compare.table import make_tables, written
from speechdp.report.kit.canvas import dashes
from speechdp.report.kit.choice import word_error_sentences
from speechdp.report.kit.columns import OVER_LOWEST, FigureColumn
from speechdp.report.kit.pages import WrittenReport
from speechdp.report.kit.theme import PRINT
from speechdp.report.runs.derived import mean_age
from tests.helpers.comparisons import (
    MadeUpStrategy,
    failed,
    realistic_strategies,
    write_comparison,
    write_record,
)
from tests.helpers.page_reader import PageReader
from tests.helpers.runs import add_utterance_errors
from tests.helpers.terminal import on_terminal

HOSTILE = "<script>alert(1)</script>:x=$y_1$&[red]"


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WrittenReport]:
    out = write_comparison(tmp_path_factory.mktemp("compare") / "out", realistic_strategies())
    return out, write_report(out)


def _groups(out: Path, target: float | None = None) -> dict[tuple[str, int, str], Group]:
    groups = make_groups(read_comparison(out), target)
    return {(group.mode, group.ranks, group.strategy): group for group in groups}


def _entries(out: Path) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = json.loads((out / "compare.json").read_text())["runs"]
    return entries


def test_figures_are_means_and_deviations_of_the_seeds(realistic: tuple[Path, WrittenReport]) -> None:
    out, _ = realistic
    group = _groups(out, target=-0.5)["frames", 2, "ad_psgd"]
    finals = []
    for seed in (1, 2, 3):
        run = out / f"frames-2x-ad_psgd-seed{seed}-12ep"
        finals.append(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["heldout_log_prob"])
    assert group.scores is not None and group.scores.mean == pytest.approx(statistics.mean(finals))
    assert group.scores.deviation == pytest.approx(statistics.stdev(finals))
    assert [row.sent_per_s for row in group.figures] == pytest.approx([22e6] * 3)
    assert [row.replica_distance for row in group.figures] == pytest.approx([0.041] * 3)
    assert all(row.time_to_target_s is not None for row in group.figures)
    # 2 ranks and 3 seeds have the same counts.
    assert group.ages == tuple(6 * count for count in (40, 310, 180, 60, 12, 3, 1))
    assert group.figures[0].staleness == pytest.approx((310 + 360 + 180 + 48 + 15 + 6) / 606)


def test_what_was_not_recorded_is_missing_and_not_zero(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "out", [MadeUpStrategy("a", sent=None)], (2,), (1,), ("frames",))
    group = _groups(out)["frames", 2, "a"]
    (row_of_run,) = group.figures
    assert row_of_run.sent_per_s is None and row_of_run.staleness is None and group.ages == ()
    assert mean_age(()) is None
    report = write_report(out)
    (row,) = csv.DictReader(io.StringIO(report.csv.read_text()))
    assert (row["sent_bytes_per_s_n"], row["sent_bytes_per_s_mean"], row["frames_per_s_sd"]) == ("0", "", "")


def test_a_strategy_that_fails_to_learn_does_not_set_the_target(
    realistic: tuple[Path, WrittenReport],
) -> None:
    runs = read_comparison(realistic[0]).runs
    target = target_of_most(runs)
    assert target is not None and -0.6 < target < -0.4
    best = [max(e.score or -9 for e in run.result.evaluations) for run in runs
            if run.result and run.record.mode == "frames"]  # fmt: skip
    assert sum(value >= target for value in best) / len(best) == pytest.approx(0.75, abs=0.03)


def test_the_fastest_within_the_noise_is_chosen(realistic: tuple[Path, WrittenReport]) -> None:
    answer = realistic[1].answer
    assert answer[0] == (
        "Bmuf (period=16) seems the best choice, without a race: on 2 and 4 ranks it was the fastest "
        "strategy that is as accurate as any there. On 2 ranks it ends 0.028 nats/frame below one rank (WER "
        "1.8\u00a0% against 1.6\u00a0%); on 4 ranks it ends 0.052 nats/frame below one rank (WER "
        "1.8\u00a0% against "
        "1.6\u00a0%), more than the rule allows. To know, repeat the command with --race 24."
    )
    assert "2 ranks: bmuf (period=16) with" in answer[1] and "times one rank, which reaches" in answer[1]
    # By less than what counts as a difference.
    assert "In equal time on 2 ranks bmuf (period=16) is about as accurate as gradient averaging" in answer[2]
    assert not any("rests on" in sentence for sentence in answer)


def test_a_wide_deviation_of_the_best_counts_as_noise(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out",
        [MadeUpStrategy("a", 8000, -0.40), MadeUpStrategy("b", 9000, -0.43)],
        (2,),
        modes=("frames",),
    )
    assert choose(list(_groups(out).values())).chosen[2].strategy == "a"
    for seed, shift in ((1, 0.05), (2, 0.0), (3, -0.05)):
        path = out / f"frames-2x-a-seed{seed}-12ep" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[-1]["heldout_log_prob"] += shift
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert choose(list(_groups(out).values())).chosen[2].strategy == "b"


def test_a_strategy_that_alone_has_finished_is_no_choice(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a", 9000), MadeUpStrategy("b", 8000)], (2, 4), (1,), ("frames",)
    )
    (out / "frames-4x-b-seed1-12ep" / "completed.json").unlink()
    assert choose(list(_groups(out).values())).headline == (
        "a seems the best choice, judging by one seed and without a race: on 2 ranks it was the fastest "
        "strategy that keeps the accuracy. Only a on 4 ranks has finished. To know, repeat the command with "
        "--seeds 1,2,3."
    )
    (out / "frames-2x-b-seed1-12ep" / "completed.json").unlink()
    assert choose(list(_groups(out).values())).headline == (
        "Only a on 2 and 4 ranks has finished, so there is nothing to choose from yet."
    )


def test_different_choices_are_named_by_ranks(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a", 9000), MadeUpStrategy("b", 8000)], (2, 4), (1,), ("frames",)
    )
    path = out / "frames-4x-a-seed1-12ep" / "timing.json"
    timing = json.loads(path.read_text())
    for rank in timing["ranks"]:
        rank["wall_s"] *= 2
    path.write_text(json.dumps(timing))
    choice = choose(list(_groups(out).values()))
    assert choice.headline.startswith(
        "It seems to depend on the number of ranks, judging by one seed and without a race."
    )
    assert "a on 2; b on 4 ranks" in choice.headline
    assert "This rests on one seed" in choice.cautions[0] and "A claim needs 3" in choice.cautions[0]


def test_one_rank_is_as_fast_on_some_numbers_of_ranks_alone(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a", 5_000), MadeUpStrategy("b", 4_000)]  # of a rank; one rank alone: 10,670
    out = write_comparison(tmp_path / "out", strategies, (1, 2, 4), (1,), ("frames",))
    choice = choose(list(_groups(out).values()))
    assert choice.headline == (
        "a seems the best choice, judging by one seed and without a race: on 4 ranks it was the fastest "
        "strategy that is as accurate as any there. On 4 ranks it ends 0.051 nats/frame below one rank (WER "
        "2.2\u00a0% against 1.8\u00a0%), more than the rule allows. 2 ranks seem to gain nothing: one "
        "rank alone keeps "
        "the accuracy, too, and was as fast. To know, repeat the command with --seeds 1,2,3 --race 24."
    )
    assert [(ranks, group.label) for ranks, group in choice.chosen.items()] == [(2, "one rank"), (4, "a")]


def test_failed_and_pending_runs_are_shown_as_such(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a"), MadeUpStrategy("b")], (2,), (1, 2), ("frames",)
    )
    entries = _entries(out)
    entries[1] = failed(entries[1], "rank 1 on vm: the loss is nan")
    entries[2] = {**entries[2], "state": "pending"}
    write_record(out, entries, completed=False)
    report = write_report(out)
    assert "Failed: equal frames, 2 ranks, b, seed 1: rank 1 on vm: the loss is nan" in report.answer
    assert any(
        "1 run has not finished yet; the command of the comparison continues it." in sentence
        for sentence in report.answer
    )
    rows = {row["strategy"]: row for row in csv.DictReader(io.StringIO(report.csv.read_text()))}
    assert (rows["b"]["seeds"], rows["b"]["finished"], rows["b"]["failed"]) == ("2", "1", "1")
    assert "1 failed" in report.html.read_text()


def test_the_conditions_of_its_gpus_stand_with_each_run(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "out", [MadeUpStrategy("a")], (2,), (1, 2), ("frames",))
    assert "<dt>conditions</dt>" not in write_report(out).html.read_text()
    path = out / str(_entries(out)[0]["folder"]) / "timing.json"
    timing = json.loads(path.read_text())
    for rank in timing["ranks"]:
        rank["gpu"] = {"index": rank["rank"], "clock_mhz": 1980 - rank["rank"], "lowest_clock_mhz": 1200}
    path.write_text(json.dumps(timing))
    page = write_report(out).html.read_text()
    assert page.count("<dt>conditions</dt>") == 1
    assert "median 1,979 to 1,980 MHz, lowest 1,200 MHz (GPU 0)." in page


def test_a_comparison_without_a_finished_run_still_has_a_page(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = {"strategy": "a", "ranks": 2, "seed": 1, "mode": "frames", "epochs": 3, "folder": None}
    write_record(out, [run], completed=False)
    report = write_report(out)
    assert report.png is None
    assert "nothing to choose from yet" in report.html.read_text()


def test_the_command_report_recognises_a_comparison(
    realistic: tuple[Path, WrittenReport], capsys: pytest.CaptureFixture[str]
) -> None:
    out, paths = realistic
    paths.html.unlink()
    assert ReportCommand(out).run() == 0
    printed = capsys.readouterr().out
    assert paths.html.is_file() and str(paths.html) in printed
    assert "At equal time" in printed and "Bmuf (period=16) seems the best choice" in printed


def test_the_terminal_table_has_a_line_a_group(realistic: tuple[Path, WrittenReport]) -> None:
    text = on_terminal(realistic[1].table, 220)
    assert text.count("bmuf (period=16)") == 4
    line = next(line for line in text.splitlines() if "ad psgd" in line)
    assert "± " in line and " 22 ± 0" in line and "1.5 ± 0" in line


def test_plots_have_a_panel_a_number_of_ranks(realistic: tuple[Path, WrittenReport]) -> None:
    groups = list(_groups(realistic[0]).values())
    names = [[panel.name for panel in line] for line in make_panels(groups)]
    kinds = ("speed", "frames", "time", "staleness")
    assert names == [[f"{kind}-{ranks}" for ranks in (2, 4)] for kind in kinds]
    page = realistic[1].html.read_text()
    assert all(f'id="plot-{kind}-{ranks}"' in page for kind in kinds for ranks in (2, 4))
    assert realistic[1].png is not None and realistic[1].png.stat().st_size > 10_000


def test_many_strategies_can_be_told_apart(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy(f"s{i}") for i in range(12)], (2,), (1,), ("frames",)
    )
    canvas = make_canvas(list(_groups(out).values()), PRINT)
    assert len({(colour, dashes(label, canvas)) for label, colour in canvas.colours.items()}) == 12


def test_the_mean_curve_goes_from_the_mean_of_the_beginnings_to_the_mean_of_the_ends() -> None:
    curves = [[(1.0, -3.0), (2.0, -2.0), (3.0, -1.0)], [(3.0, -1.0), (4.0, 0.0)]]
    assert mean_curve(curves) == [(2.0, -2.0), (2.75, -1.25), (3.5, -0.5)]
    assert mean_curve([[(1.0, -3.0)], [(2.0, -1.0)]]) == [(1.5, -2.0)]


def test_the_page_reaches_nothing_outside_and_runs_no_foreign_code(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "out", [MadeUpStrategy(HOSTILE), MadeUpStrategy("b")], (2,), (1,))
    page = PageReader(write_report(out).html.read_text())
    assert page.tags.count("script") == 1
    assert all(reference.startswith(("#", "data:,")) for reference in page.references)
    assert len(page.ids) == len(set(page.ids))


def test_synthesis_is_compared_in_its_own_terms(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a", 8000), MadeUpStrategy("b", 9000, -0.43)], (2,)
    )
    for path in out.glob("*/wer-test.json"):
        path.unlink()
    for path in out.glob("*/run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"task": "synthesis"}))
    report = write_report(out)
    for text in (on_terminal(report.table), " ".join(report.answer), report.html.read_text()):
        assert "nats" not in text and "log-prob" not in text and "frame acc" not in text
        assert re.search(r"0\.4\d\d\d", text)
    assert "L1 error by speed" in report.html.read_text()


def test_word_errors_are_those_of_the_split_that_the_comparison_decoded(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a", 9_000, wer=0.02), MadeUpStrategy("b", 8_000, wer=0.021)]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",))
    content = json.loads((out / "compare.json").read_text())
    content["settings"]["decode_split"] = "dev"
    (out / "compare.json").write_text(json.dumps(content))
    for path in out.glob("*/wer-test.json"):
        path.with_name("wer-dev.json").write_text(path.read_text().replace('"test"', '"dev"'))
        if "-b-" in path.parent.name:
            path.unlink()
        else:  # decoded by hand afterwards, on harder speech
            errors = json.loads(path.read_text())
            path.write_text(json.dumps({**errors, "wer": 0.5, "wer_low": 0.45, "wer_high": 0.55}))
    choice = choose(list(_groups(out).values()))
    assert choice.chosen[2].strategy == "a" and choice.chosen[2].word_errors is not None
    assert choice.chosen[2].word_errors.split == "dev"


def _compared_by_utterance(out: Path, more: float, ranks: Sequence[int] = (2,), names: str = "ab") -> Path:
    """Write a comparison of b, with 20 % errors, and a, which is faster, and has more in some utterances."""
    strategies = [MadeUpStrategy("a", 9_000), MadeUpStrategy("b", 8_000)]
    strategies = [strategy for strategy in strategies if strategy.text in names]
    write_comparison(out, strategies, ranks, modes=("frames",))
    for path in out.glob("*/wer-test.json"):
        seed = int(path.parent.name.split("seed")[1][0])
        errors = [(place + seed) % 5 for place in range(100)]
        if "-a-" in path.parent.name:
            errors = [number + (place < 100 * more) for place, number in enumerate(errors)]
        add_utterance_errors(path.parent, errors)
    return out


def test_a_deviation_has_no_more_digits_than_its_mean(tmp_path: Path) -> None:
    """Not 5.92 ± 0.302."""
    out = write_comparison(tmp_path / "out", realistic_strategies()[:1], (2,), modes=("frames",))
    (group,) = _groups(out).values()
    for values, shown in (
        ((5.618, 5.92, 6.222), "5.92 ± 0.30"),
        ((0.0, 4.0, 8.0), "4 ± 4"),
        ((0.3, 0.4, 0.8), "0.5 ± 0.3"),
    ):
        given = itertools.cycle(values)
        measure = FigureColumn("x", "x", "", "", lambda _, of=given: next(of), lambda value: f"{value:.3g}")
        assert written(measure, group) == shown


def test_word_error_rates_are_told_apart_by_their_difference_on_the_same_utterances(tmp_path: Path) -> None:
    out = _compared_by_utterance(tmp_path / "out", more=0.3)
    groups = _groups(out)
    first, second = (group.word_errors for group in groups.values())
    assert first is not None and second is not None
    assert first.low is not None and second.high is not None and first.low < second.high  # they overlap
    choice = choose(list(groups.values()))
    assert choice.chosen[2].strategy == "b"
    assert any(
        text.startswith("a is faster on 2 ranks, with ") and ", but has too many word errors: " in text
        for text in choice.details
    )
    sentence = "Word error rates on 2 ranks: surely above the lowest, that of b: a (3.0 ["
    assert any(text.startswith(sentence) for text in choice.details)
    assert "not surely above the lowest one" in rule_for(list(groups.values()))
    report = write_report(out)
    lines = {line["strategy"]: line for line in csv.DictReader(report.csv.read_text().splitlines())}
    assert float(lines["a"]["wer_over_lowest"]) == pytest.approx(0.03)
    assert 0 < float(lines["a"]["wer_over_lowest_low"]) < 0.03 < float(lines["a"]["wer_over_lowest_high"])
    # The lowest less itself is no chance.
    assert [float(lines["b"][f"wer_over_lowest{end}"]) for end in ("", "_low", "_high")] == [0, 0, 0]
    assert ">0.0</td>" in report.html.read_text()
    page = report.html.read_text().replace("\u00a0", " ")
    assert "WER over lowest: above the lowest on as many ranks [95 % interval of the difference]." in page
    # Who cannot point at a heading reads it.
    assert f"<dt>WER over lowest, points</dt><dd>{OVER_LOWEST.meaning}</dd>" in page


def test_what_the_chosen_is_best_in_is_said(tmp_path: Path) -> None:
    """Its word error rate need not be the lowest."""
    strategies = [MadeUpStrategy("a", 9_000, -0.3), MadeUpStrategy("b", 8_000, -0.31)]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",))
    sentence = choose(list(_groups(out).values())).details[0]
    assert sentence.startswith("2 ranks: a with ")
    assert sentence.endswith(", the best log-probability on 2 ranks.")


def test_a_run_whose_metrics_are_gone_is_not_said_to_end_without_a_number(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a"), MadeUpStrategy("b")]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",))
    (run,) = out.glob("*-a-seed1-*")
    (run / "metrics.jsonl").unlink()
    (note,) = (
        text for text in choose(list(_groups(out).values())).cautions if "strategies of which all" in text
    )
    assert f"it has no held-out log-probability (metrics.jsonl: missing; delete {run} and repeat" in note


def test_a_strategy_that_is_no_better_than_guessing_is_named(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a"), MadeUpStrategy("b", log_prob=-9.0)]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",), seeds=(1,))
    for path in out.glob("*/run.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_classes": 60}))
    (note,) = [text for text in choose(list(_groups(out).values())).cautions if "guessing" in text]
    assert "below that of guessing among the classes: equal frames, " in note
    assert "b, seed 1 (" in note and "a, seed 1 (" not in note and "guessing \u22124.094)" in note


def test_it_says_that_final_models_are_means_and_how_many_are_worse_than_the_last(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a"), MadeUpStrategy("b")]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",), seeds=(1,))

    def said() -> list[str]:
        cautions = choose(list(_groups(out).values())).cautions
        return [text for text in cautions if "--average-epochs" in text]

    assert said() == []
    for strategy, loss in (("a", 0.5), ("b", 0.0)):
        (run,) = out.glob(f"*-{strategy}-seed1-*")
        path = run / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        last = json.loads(lines[-1])
        mean = {**last, "averaged_epochs": 2, "heldout_log_prob": last["heldout_log_prob"] - loss}
        path.write_text("\n".join([*lines, json.dumps(mean)]) + "\n", encoding="utf-8")
    (text,) = said()
    assert text.startswith(
        "Final models are means of the last epochs' models (--average-epochs); in 1 of 2 runs the last one "
        "alone is better"
    )


def test_why_a_faster_strategy_is_not_chosen_is_said(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a", 9_000, -0.5), MadeUpStrategy("b", 8_000, -0.3)]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",))
    choice = choose(list(_groups(out).values()))
    assert choice.chosen[2].strategy == "b"
    (said,) = (text for text in choice.details if text.startswith("a is faster on 2 ranks, with "))
    assert ", but it is not accurate enough: 0." in said and said.endswith(" nats/frame below the best.")


@pytest.mark.parametrize(("apart", "may_be_chance"), [(0.08, True), (0.4, False)])
def test_what_chance_of_the_seeds_may_explain_is_said(
    tmp_path: Path, apart: float, may_be_chance: bool
) -> None:
    strategies = [MadeUpStrategy("a", 9_000, -0.3 - apart), MadeUpStrategy("b", 8_000, -0.3)]
    strategies += [MadeUpStrategy("c", 7_000, -0.31), MadeUpStrategy("d", 6_000, -2.9)]
    out = write_comparison(tmp_path / "out", strategies, (2,), seeds=(1, 2, 3), modes=("frames",))
    for seed, off in ((1, -0.05), (2, 0.0), (3, 0.05)):
        for metrics in out.glob(f"*-seed{seed}-*/metrics.jsonl"):
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            # The one that does not learn tells nothing of the others.
            lines[-1]["heldout_log_prob"] += 20 * off if "-d-" in metrics.parent.name else off
            metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    details = choose(list(_groups(out).values())).details
    (said,) = (text for text in details if text.startswith("a is faster on 2 ranks, with "))
    assert said.endswith(", which may be due to the seeds.") is may_be_chance
    (least,) = (text for text in details if "be due to the seeds alone" in text)
    # The t-test's: 2.776 * 0.05 * sqrt(2 / 3), besides what the seeds of the helper differ by.
    assert re.fullmatch(
        r"On 2 ranks, among those accurate enough, differences below 0\.1[01]\d? nats/frame may "
        r"be due to the seeds alone \(95 %\)\.",
        least,
    )


def test_one_seed_is_told_apart_from_several(tmp_path: Path) -> None:
    """The seeds of one side say what chance does to both: only of two single models that is not known."""
    out = _compared_by_utterance(tmp_path / "out", more=0.3)
    for path in out.glob("*-a-seed[23]*/wer-test.json"):
        path.unlink()
    groups = list(_groups(out).values())
    rule = "or, between single models and where errors are not known by utterance, 95 % interval"
    assert rule in rule_for(groups)
    assert any(text.startswith("Word error rates on 2 ranks:") for text in choose(groups).details)


def test_how_many_more_words_are_wrong_than_on_one_rank_is_said(tmp_path: Path) -> None:
    out = _compared_by_utterance(tmp_path / "out", more=0.3, ranks=(1, 2), names="a")
    text = choose(list(_groups(out).values())).headline
    assert re.search(
        r"\(WER 23.0\u00a0% against 20.0\u00a0%, 3.0 \[[12]\.\d, [34]\.\d\] points more\), more", text
    )


def test_word_error_rates_that_may_be_chance_leave_the_choice_to_speed(tmp_path: Path) -> None:
    groups = list(_groups(_compared_by_utterance(tmp_path / "out", more=0.01)).values())
    choice = choose(groups)
    assert choice.chosen[2].strategy == "a"
    assert "Word error rates on 2 ranks: none is surely above the lowest, that of b." in choice.details


def test_the_lowest_of_the_table_is_that_of_the_sentence(tmp_path: Path) -> None:
    """What has lost a seed was the lowest in the table, and not in the sentence below it."""
    out = _compared_by_utterance(tmp_path / "out", more=0.3)
    entries = json.loads((out / "compare.json").read_text())["runs"]
    lost = next(n for n, entry in enumerate(entries) if (entry["strategy"], entry["seed"]) == ("b", 3))
    write_record(out, [failed(e, "the loss is nan") if n == lost else e for n, e in enumerate(entries)])
    groups = {group.strategy: group for group in _groups(out).values()}
    of_a, of_b = (groups[name].wer_over_lowest for name in "ab")
    assert of_a is not None and of_a.mean == 0 and of_b is not None and of_b.mean == pytest.approx(-0.03)


def test_a_rate_is_not_compared_with_itself_alone_nor_with_one_of_no_words(tmp_path: Path) -> None:
    out = _compared_by_utterance(tmp_path / "out", more=0.3)
    for path in out.glob("*-b-*/wer-test.json"):
        nothing_said = {"words": 0, "wer": math.inf, "wer_low": math.inf, "wer_high": math.inf}
        path.write_text(json.dumps(json.loads(path.read_text()) | nothing_said))
    a, b = _groups(out).values()
    assert a.word_errors is not None and b.word_errors is None
    assert a.wer_over_lowest is None and b.wer_over_lowest is None
    assert b.finished[0].result is not None
    (problem,) = b.finished[0].result.problems
    assert problem.startswith("wer-test.json: its transcripts have no words, so that there is no word error")


def test_the_lowest_is_named_where_one_of_its_seeds_was_decoded(tmp_path: Path) -> None:
    out = _compared_by_utterance(tmp_path / "out", more=0.3)
    for path in out.glob("*-b-*/wer-test.json"):
        if "seed1" not in path.parent.name:
            path.unlink()
    (sentence,) = (text for text in choose(list(_groups(out).values())).details if "Word error" in text)
    assert sentence.startswith("Word error rates on 2 ranks: surely above the lowest, that of b: a (3.0 [")


def test_rates_that_nothing_is_known_of_are_not_said_to_be_as_low(tmp_path: Path) -> None:
    a, b = _groups(_compared_by_utterance(tmp_path / "out", more=0.01)).values()
    assert a.word_errors is not None
    old = replace(a, strategy="old", word_errors=replace(a.word_errors, wer=0.5, low=0.4, utterances=None))
    assert word_error_sentences([a, b, old], lambda group: group.strategy) == [
        "Word error rates: none is surely above the lowest, that of b; not known by utterance and seeds: old."
    ]
    assert word_error_sentences([b, old], lambda group: group.strategy) == []
    assert word_error_sentences([a, replace(a, strategy="c"), b, old], lambda group: group.strategy) == [
        "Word error rates: none is surely above the lowest, that of b; not known by utterance and seeds: old."
    ]


def test_word_error_rates_without_intervals_have_a_mean_without_one(tmp_path: Path) -> None:
    out = _compared_by_utterance(tmp_path / "out", more=0.3)
    for path in out.glob("*-b-*/wer-test.json"):
        found = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in found.items() if k not in ("wer_low", "wer_high")}))
    _, b = _groups(out).values()
    assert b.word_errors is not None and (b.word_errors.low, b.word_errors.high) == (None, None)


def test_errors_of_other_decodings_are_told_and_left_aside(tmp_path: Path) -> None:
    out = _compared_by_utterance(tmp_path / "out", more=0.3)
    paths = sorted(out.glob("*-a-*/hypotheses/test.errors"))
    paths[0].write_text("u0 0 0 1 10\n")
    paths[1].write_text("u0 none\n")
    paths[2].unlink()
    groups = list(_groups(out).values())
    said = [run.result.problems for run in groups[0].finished if run.result is not None]
    assert [text for (text,) in said] == [
        "hypotheses/test.errors: of another decoding than wer-test.json; decode the run again",
        "hypotheses/test.errors: damaged; decode the run again",
        "hypotheses/test.errors: cannot be read (No such file or directory); decode the run again",
    ]
    # As before errors were kept by utterance: the intervals decide.
    assert choose(groups).chosen[2].strategy == "a"
    assert " or, between single models and where errors are not known by utterance, 95 %" in rule_for(groups)


def test_word_errors_of_different_splits_are_not_compared(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a", 9_000, wer=0.3), MadeUpStrategy("b", 8_000, wer=0.02)]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",))
    content = json.loads((out / "compare.json").read_text())
    content["settings"]["decode_split"] = ""
    (out / "compare.json").write_text(json.dumps(content))
    for path in out.glob("*-b-*/wer-test.json"):
        path.with_name("wer-dev.json").write_text(path.read_text().replace('"test"', '"dev"'))
        path.unlink()
    choice = choose(list(_groups(out).values()))
    assert choice.chosen[2].strategy == "a"
    assert any("decoded on different splits (dev, test)" in caution for caution in choice.cautions)
    for path in out.glob("*-b-*/wer-dev.json"):
        path.unlink()
    choice = choose(list(_groups(out).values()))
    assert "Not eligible, because not decoded: b on 2 ranks." in choice.cautions


def test_runs_on_ranks_where_none_is_decoded_are_not_called_ineligible(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a", 9_000), MadeUpStrategy("b", 8_000)]
    out = write_comparison(tmp_path / "out", strategies, (2, 4), modes=("frames",))
    groups = _groups(out)
    for group in groups.values():
        for run in group.finished if group.ranks == 4 else ():
            assert run.result is not None
            (run.result.path / "wer-test.json").unlink()
    choice = choose(list(_groups(out).values()))
    assert 4 in choice.chosen and not any("Not eligible" in text for text in choice.cautions)
    expected = "No run on 4 ranks was decoded: the word error rate played no part in the choice there."
    assert expected in choice.cautions


def test_word_errors_with_other_weights_count_where_they_are_compared_with_none(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a", 9_000, wer=0.3), MadeUpStrategy("b", 8_000, wer=0.02)]
    out = write_comparison(tmp_path / "out", strategies, (2, 4), modes=("frames",))
    assert choose(list(_groups(out).values())).chosen[4].strategy == "b"
    for path in out.glob("*/wer-test.json"):
        scale = 0.4 if path.parent.name.startswith("frames-4x-b") else 1.0
        path.write_text(json.dumps({**json.loads(path.read_text()), "options": {"acoustic_scale": scale}}))
    choice = choose(list(_groups(out).values()))
    assert choice.chosen[2].strategy == "b" and choice.chosen[4].strategy == "a"
    (caution,) = (text for text in choice.cautions if "not decoded alike" in text)
    assert "b on 4 ranks with word-loop, acoustic scale 0.4" in caution and "2 ranks" not in caution


def test_a_seed_whose_record_lacks_the_weights_does_not_set_its_strategy_apart(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "out", [MadeUpStrategy("a", wer=0.3)], (2,), modes=("frames",))
    for path in out.glob("*/wer-test.json"):
        if "seed1" not in path.parent.name:
            path.write_text(json.dumps({**json.loads(path.read_text()), "options": {"acoustic_scale": 0.4}}))
    (a,) = _groups(out).values()
    assert a.word_errors is not None and a.word_errors.weights == "acoustic scale 0.4"


def test_a_strategy_one_of_whose_seeds_came_to_nothing_is_not_preferred(tmp_path: Path) -> None:
    strategies = [MadeUpStrategy("a", 9_000), MadeUpStrategy("b", 8_000)]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",))
    assert choose(list(_groups(out).values())).chosen[2].strategy == "a"
    path = out / "frames-2x-a-seed2-12ep" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["heldout_log_prob"] = None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    choice = choose(list(_groups(out).values()))
    assert choice.chosen[2].strategy == "b"
    assert any("Equal frames, 2 ranks, a, seed 2: its last" in caution for caution in choice.cautions)
    assert any("rests on 2 seeds" in caution for caution in choice.cautions)


def test_more_seeds_are_advised_that_keep_those_there_are(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a"), MadeUpStrategy("b")], (2,), (7,), ("frames",)
    )
    (caution,) = (text for text in choose(list(_groups(out).values())).cautions if "rests on" in text)
    assert "(--seeds 7,8,9 with the same folder keeps what is done)" in caution
    entries = _entries(out)
    more = [
        {**entry, "seed": seed, "state": "pending", "folder": None} for entry in entries for seed in (8, 9)
    ]
    write_record(out, [*entries, *more])
    (caution,) = (text for text in choose(list(_groups(out).values())).cautions if "rests on" in text)
    assert "--seeds" not in caution  # they are on their way


def test_a_run_that_went_on_with_other_ranks_is_named(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a"), MadeUpStrategy("b")], (4,), (1,), ("frames",)
    )
    path = out / "frames-4x-b-seed1-12ep" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "earlier_sizes": [4, 4], "size": 2}))
    cautions = choose(list(_groups(out).values())).cautions
    assert any("4 ranks, b, seed 1: it trained on 4 and then 2 ranks" in caution for caution in cautions)


def test_a_run_that_lost_ranks_is_named(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a"), MadeUpStrategy("b")], (4,), (1,), ("frames",)
    )
    path = out / "frames-4x-b-seed1-12ep" / "timing.json"
    timing = json.loads(path.read_text())
    path.write_text(json.dumps({**timing, "ranks": timing["ranks"][:2], "lost_ranks": [2, 3]}))
    cautions = choose(list(_groups(out).values())).cautions
    told = "4 ranks, b, seed 1: ranks 2, 3 were lost in training, so its speed, efficiency and shares of time"
    assert any(told in caution for caution in cautions)


def test_the_speed_of_a_resumed_run_is_said_to_be_that_of_its_last_start(tmp_path: Path) -> None:
    out = write_comparison(
        tmp_path / "out", [MadeUpStrategy("a"), MadeUpStrategy("b")], (4,), (1,), ("frames",)
    )
    path = out / "frames-4x-b-seed1-12ep" / "timing.json"
    timing = json.loads(path.read_text())
    ranks = [{**rank, "first_step": 165} for rank in timing["ranks"]]
    path.write_text(json.dumps({**timing, "ranks": ranks}))
    groups = list(_groups(out).values())
    (table,) = make_tables(groups, [], {group.label: Markup("") for group in groups})
    told = "are those since the last start: equal frames, 4 ranks, b, seed 1 (from step 165)."
    assert table.note.endswith(told)


def test_a_strategy_one_of_whose_seeds_failed_is_not_preferred(tmp_path: Path) -> None:
    """One that diverged with two of three seeds was the best, by the third."""
    strategies = [MadeUpStrategy("a", 9_000), MadeUpStrategy("b", 8_000)]
    out = write_comparison(tmp_path / "out", strategies, (2,), modes=("frames",))
    entries = _entries(out)
    of_a = [place for place, entry in enumerate(entries) if entry["strategy"] == "a"]
    diverged = [
        failed(entry, "the loss is nan") if n in of_a[1:] else entry for n, entry in enumerate(entries)
    ]
    write_record(out, diverged)
    choice = choose(list(_groups(out).values()))
    assert choice.chosen[2].strategy == "b"
    assert any("is preferred to one of which some failed" in caution for caution in choice.cautions)
    write_record(out, [failed(entry, "no memory") if entry["seed"] == 2 else entry for entry in entries])
    assert choose(list(_groups(out).values())).chosen[2].strategy == "a"  # each has one


def test_a_strategy_one_of_whose_seeds_failed_at_equal_time_is_not_preferred_there(tmp_path: Path) -> None:
    """At equal frames it was lowered and marked, at equal time neither."""
    strategies = [MadeUpStrategy("a", 9_000, -0.40), MadeUpStrategy("b", 8_000, -0.46)]
    out = write_comparison(tmp_path / "out", strategies, (2,))
    (told,) = (text for text in choose(list(_groups(out).values())).details if "In equal time" in text)
    assert told.startswith("In equal time on 2 ranks a is the most accurate, too")
    entries = _entries(out)
    of_a = [place for place, e in enumerate(entries) if (e["strategy"], e["mode"]) == ("a", "time")]
    write_record(out, [failed(e, "the loss is nan") if n in of_a[1:] else e for n, e in enumerate(entries)])
    choice = choose(list(_groups(out).values()))
    assert choice.chosen[2].strategy == "a"  # at equal frames all its seeds came to their end
    (told,) = (text for text in choice.details if "In equal time" in text)
    assert told.startswith("In equal time on 2 ranks b is the most accurate")
    assert re.search(r", where a has \S+ by 1 of 3 seeds\.$", told)
    assert any("is preferred to one of which some failed" in caution for caution in choice.cautions)


def test_a_fast_link_and_old_updates_have_plain_figures(tmp_path: Path) -> None:
    made_up = MadeUpStrategy("a", sent=2.5e9, ages=(*[0] * 255, 4))
    out = write_comparison(tmp_path / "out", [made_up], (2,), (1,), ("frames",))
    cells = on_terminal(write_report(out).table, 250).split()
    assert "2,500" in cells and "255" in cells
