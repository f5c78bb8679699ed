"""Reports of runs that a user's script made: its metric under its own name, sign and direction."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speechdp import DataParallel
from speechdp.cli.main import run as speechdp
from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError
from speechdp.experiments.compare.record import CompareRecord, RunRecord, read_record, write_record
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.compare.report import write_comparison
from speechdp.report.runs.folders import read_run, read_sweep
from speechdp.report.runs.results import SCRIPT
from speechdp.report.runs.script_metric import parse_metric
from speechdp.report.sweep.report import write_report
from tests.helpers.page_reader import words_of
from tests.helpers.races import made_up_race, write_made_up_race
from tests.helpers.runs import MadeUpRun, write_run

#: What a reader who never saw our tasks must not meet.
OURS = ("log-prob", "frames", "nats", "WER", "word error", "decoded", "L1", "epochs")


def script_run(parent: Path, name: str, speed: float, losses: Sequence[float], size: int = 2) -> str:
    """Write the folder of a script's run; its accuracy is 1 - loss.  Return its name."""
    run = MadeUpRun(name, size=size, frames_per_s=speed, wer=None, num_evaluations=0)
    run.settings["script"] = "train.py"
    path = write_run(run, parent)
    (path / "run.json").write_text(
        json.dumps({k: v for k, v in json.loads((path / "run.json").read_text()).items() if k != "preset"})
    )
    lines = [
        {"step": 100 * n, "time_s": float(n), "learning_rate": 0.1, "frames": 800 * n, "accuracy": 1 - loss,
         "valid_loss": loss}
        for n, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return name


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """A comparison: bmuf is within 2 % of the best, easgd is the fastest and learns too little."""
    runs = [
        ("gradient_averaging", 1, 900.0, 0.200),
        ("gradient_averaging", 2, 1000.0, 0.200),
        ("bmuf:period=16", 2, 1500.0, 0.203),
        ("easgd", 2, 1800.0, 0.500),
    ]
    records = []
    for strategy, ranks, speed, loss in runs:
        record = RunRecord(StrategyChoice(strategy), ranks, 1, "frames", None)
        folder = script_run(tmp_path, record.planned.folder, speed, (0.9, loss), ranks)
        records.append(replace(record, folder=folder, state="complete"))
    write_record(tmp_path, CompareRecord({"script": "train.py"}, tuple(records), completed=True))
    return tmp_path


def test_a_comparison_shows_the_scripts_own_metric(
    compared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert speechdp(["report", str(compared)]) == 0
    printed = capsys.readouterr().out
    assert "valid_loss" in printed and "0.203" in printed and "items/s" in printed and "All runs" in printed
    assert "Bmuf (period=16) seems the best choice, judging by one seed and without a race" in " ".join(
        printed.split()
    )
    assert "the smallest valid_loss is that of gradient averaging: valid_loss 0.2 at 1,000 items/s" in printed
    page = words_of(compared / "compare" / "compare.html")
    for text in (printed, page):
        assert [word for word in OURS if word in text] == []
    assert "valid_loss is within 2 % of the smallest" in page and "less is better" in page
    assert "accura" not in page and "sequential" not in page
    assert "less is better" not in printed and "<p>Valid_loss" not in page  # no reason for caution
    assert "sent per rank" not in printed and "staleness" not in printed  # nobody counted
    assert "Every run is the whole script." in page
    rows = list(csv.DictReader((compared / "compare" / "compare.csv").open()))
    assert [float(row["valid_loss_mean"]) for row in rows] == [0.2, 0.2, 0.203, 0.5]
    assert {float(row["target_valid_loss"]) for row in rows} == {0.203}
    assert [float(row["items_per_s_mean"]) for row in rows] == [900, 1000, 1500, 1800]


def _with_speed(folder: Path, factor: float) -> None:
    """Make a run faster."""
    timing = json.loads((folder / "timing.json").read_text())
    for rank in timing["ranks"]:
        rank["frames"] = round(factor * rank["frames"])
    (folder / "timing.json").write_text(json.dumps(timing))


def test_one_rank_that_is_faster_and_as_good_is_advised(compared: Path) -> None:
    (alone,) = compared.glob("1x-*")
    _with_speed(alone, 1600 / 900)  # faster than bmuf, which is near enough to the best
    report = write_comparison(compared)
    assert report.answer[0] == (
        "This training seems not worth distributing, judging by one seed and without a race: one rank alone "
        "keeps the valid_loss low, and no strategy on 2 ranks that does so was faster. To know, repeat the "
        "command with --seeds 1,2,3 --race 6."
    )
    assert report.answer[1].startswith("2 ranks: bmuf (period=16) with 1,500 items/s (0.94 times one rank,")
    page = report.html.read_text()
    (chosen,) = re.findall(r'<tr class="chosen.*?</tr>', page, re.DOTALL)
    assert 'data-sort="one rank"' in chosen
    assert "one rank where it is as fast and as near to the best." in words_of(report.html)
    # One rank that learns less is no alternative, however fast it is.
    metrics = alone / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 300, "time_s": 3.0, "valid_loss": 0.4}\n')
    assert write_comparison(compared).answer[0].startswith("Bmuf (period=16) seems the best choice")


def test_the_best_is_the_best_on_as_many_ranks(compared: Path) -> None:
    (alone,) = compared.glob("1x-*")
    metrics = alone / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 300, "time_s": 3.0, "valid_loss": 0.1}\n')
    answer = write_comparison(compared, metric="valid_loss:max").answer
    assert answer[1].endswith("valid_loss 0.5, the best valid_loss on 2 ranks.")


def test_which_metric_and_which_way_is_better_can_be_said(compared: Path) -> None:
    best = write_comparison(compared, metric="accuracy").answer
    assert "Bmuf (period=16) seems" in best[0] and "accuracy 0.797" in best[1]
    worst = write_comparison(compared, metric="valid_loss:max").answer
    assert "easgd seems" in worst[0]
    with pytest.raises(ConfigError, match="--metric wer: no run logged it; they logged accuracy, valid_loss"):
        write_comparison(compared, metric="wer")
    # What the comparison was started with counts when nothing else is said.
    content = json.loads((compared / "compare.json").read_text())
    (compared / "compare.json").write_text(json.dumps({**content, "metric": "valid_loss:max"}))
    assert "easgd seems" in write_comparison(compared).answer[0]


def test_runs_of_ours_have_no_metric_to_choose(tmp_path: Path) -> None:
    write_run(MadeUpRun("ours"), tmp_path)
    with pytest.raises(ConfigError, match="--metric: no script of yours made these runs"):
        write_report(tmp_path, metric="valid_loss")


def test_without_a_metric_only_speeds_are_compared(compared: Path) -> None:
    for path in compared.glob("*/metrics.jsonl"):
        path.unlink()
    answer = write_comparison(compared).answer
    assert "No finished run on several ranks has logged a metric by run.log()" in answer[0]
    record = read_record(compared)
    failed = [replace(run, state="failed" if run.ranks > 1 else run.state) for run in record.runs]
    write_record(compared, replace(record, runs=tuple(failed)))
    assert write_comparison(compared).answer[0].startswith("No strategy has finished on more than one rank")
    sweep = write_report(compared).answer
    assert "no finished run has logged a metric by run.log()" in sweep[0]
    assert not any(word in sentence for sentence in (*answer, *sweep) for word in ("WER", "log-prob"))


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_a_run_that_has_diverged_has_no_score(compared: Path, last: float) -> None:
    path = next(compared.glob("2x-bmuf*")) / "metrics.jsonl"
    line = {"step": 300, "time_s": 3.0, "valid_loss": last}
    path.write_text(path.read_text() + json.dumps(line) + "\n" + '{"step": 400, "valid_loss": null}\n')
    run = read_run(path.parent, "valid_loss")
    assert [evaluation.score for evaluation in run.evaluations] == [-0.9, -0.203, None]
    assert run.problems == ("metrics.jsonl: the last valid_loss is not finite, so the run has no score",)
    assert "Gradient averaging seems" in write_comparison(compared).answer[0]
    assert read_sweep(path.parent).runs[0].evaluations[-1].score is None  # it is the metric, too


def test_a_run_that_does_not_name_its_script_is_a_scripts(compared: Path) -> None:
    path = next(compared.glob("2x-bmuf*")) / "run.json"
    settings = json.loads(path.read_text())
    assert read_run(path.parent).kind is SCRIPT
    path.write_text(json.dumps({k: v for k, v in settings.items() if k not in ("script", "data")}))
    run = read_run(path.parent)
    assert run.kind is SCRIPT and run.metric.key == "valid_loss" and run.evaluations[-1].score == -0.203
    write_report(path.parent, metric="accuracy")
    path.write_text(json.dumps({k: v for k, v in settings.items() if k != "script"}))
    assert read_run(path.parent).kind is not SCRIPT


def test_a_race_counts_what_the_script_counts(tmp_path: Path) -> None:
    script_run(tmp_path, "slow", 1000.0, (0.9, 0.2))
    script_run(tmp_path, "fast", 1500.0, (0.8, 0.201))
    write_made_up_race(tmp_path, made_up_race({"slow": 1.0, "fast": 1.5}))
    page = words_of(write_report(tmp_path).html)
    assert "items/s over the baseline's in the same round" in page and "frames/s over" not in page


def test_a_target_is_given_as_the_script_logs_it(compared: Path) -> None:
    write_comparison(compared, target=0.3)
    rows = list(csv.DictReader((compared / "compare" / "compare.csv").open()))
    assert [row["time_to_target_s_mean"] for row in rows] == ["2.0", "2.0", "2.0", ""]
    assert {row["target_valid_loss"] for row in rows} == {"0.3"}


def test_a_folder_of_runs_is_put_into_one_table(tmp_path: Path) -> None:
    script_run(tmp_path, "slow", 1000.0, (0.9, 0.2))
    script_run(tmp_path, "fast", 1500.0, (0.8, 0.201))
    report = write_report(tmp_path)
    rests_on = "judging by one seed and without a race: 1,500"
    assert report.answer[0].startswith(
        f"fast seems the fastest setting that keeps the valid_loss low, {rests_on}"
    )
    rows = {row["run"]: row for row in csv.DictReader(report.csv.open())}
    assert (float(rows["fast"]["valid_loss"]), float(rows["fast"]["valid_loss_best"])) == (0.201, 0.201)
    assert rows["fast"]["steps"] == "604" and "heldout_log_prob" not in rows["fast"]
    page = words_of(report.html)
    assert [word for word in OURS if word in page] == [] and "Learning over items" in report.html.read_text()


def test_a_script_that_waits_for_data_is_told_nothing_that_it_cannot_use(tmp_path: Path) -> None:
    for name, speed in (("slow", 1000.0), ("fast", 1500.0)):
        script_run(tmp_path, name, speed, (0.9, 0.2))
        path = tmp_path / name / "timing.json"
        timing = json.loads(path.read_text())
        for rank in timing["ranks"]:
            rank["spans_s"]["data_wait"] = 0.1 * rank["wall_s"]
        path.write_text(json.dumps(timing))
    answer = " ".join(write_report(tmp_path).answer).replace("\u00a0", " ")
    assert "fast waits for data 10.0 % of the step time, where at most 2 % is aimed for. In these" in answer
    assert "a rank waits for data for over 2 % of the step time: slow (10.0 %)." in answer
    assert "was not recorded" not in answer


def test_report_takes_the_folder_of_a_script_as_it_is(tmp_path: Path) -> None:
    def main(comm: Communicator) -> None:
        torch.manual_seed(comm.rank)
        model = torch.nn.Linear(3, 1)
        run = DataParallel(
            model, torch.optim.SGD(model.parameters(), 0.1), comm, "bmuf:period=2", tmp_path / "run"
        )
        with run:
            while run.steps < 8:
                x = torch.randn(4, 3)
                with run.step(weight=len(x)) as step:
                    step.backward(model(x).square().sum())
                if run.steps % 4 == 0:
                    with run.evaluating():
                        run.log(valid_loss=1 / run.steps)
        run.log(test_loss=0.1)

    run_threads(2, main)
    report = write_report(tmp_path / "run")
    (row,) = csv.DictReader(report.csv.open())
    assert (row["strategy"], row["ranks"], row["steps"], row["test_loss"]) == ("bmuf", "2", "8", "0.1")
    (row,) = csv.DictReader(write_report(tmp_path / "run", metric="valid_loss").csv.open())
    assert row["valid_loss"] == "0.125" and report.png is not None
    # Also after the block what all ranks have trained on is known.
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["frames"] == 64


@pytest.mark.parametrize(
    ("text", "is_error"),
    [
        ("valid_loss", True), ("wer", True), ("perplexity", True), ("accuracy", False), ("bleu", False),
        ("valid/acc", False), ("accuracy:min", True), ("valid_loss:max", False),
        ("layer2_loss", True), ("accent_error", True), ("error_score", True), ("tracking", True),
        ("train.r2", False), ("top1-acc5", False), ("validAccuracy", False), ("heldout_log_prob", False),
        ("macro_F1", False), ("scoreLoss", True), ("per", True), ("accuracy_per_class", False),
    ],
)  # fmt: skip
def test_less_is_better_unless_the_name_or_the_user_says_otherwise(text: str, is_error: bool) -> None:
    metric = parse_metric(text)
    assert (metric.recorded_as, metric.higher_is_better) == (text.partition(":")[0], not is_error)
    assert metric.score(2.0) == (-2.0 if is_error else 2.0)


@pytest.mark.parametrize("text", ["", ":max", "loss:up"])
def test_a_metric_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write NAME"):
        parse_metric(text)


def _logged(folder: Path, **curve: Sequence[float]) -> None:
    """Give a run other values; the steps are those of `script_run`."""
    ((name, values),) = curve.items()
    lines = [{"step": 100 * n, "time_s": float(n), name: value} for n, value in enumerate(values, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _compared_with_seeds(out: Path, curves: Sequence[Sequence[float]], name: str = "valid_loss") -> str:
    """Return the answer of a comparison of two strategies, one curve a seed, as it is printed."""
    records = []
    for strategy, speed in (("gradient_averaging", 1000.0), ("bmuf:period=16", 1500.0)):
        for seed, curve in enumerate(curves, start=1):
            record = RunRecord(StrategyChoice(strategy), 2, seed, "frames", None)
            folder = script_run(out, record.planned.folder, speed, curve, 2)
            _logged(out / folder, **{name: curve})
            records.append(replace(record, folder=folder, state="complete"))
    write_record(out, CompareRecord({"script": "train.py"}, tuple(records), completed=True))
    return " ".join(write_comparison(out).answer)


def test_seeds_that_a_script_does_not_take_are_one(tmp_path: Path) -> None:
    told = _compared_with_seeds(tmp_path / "same", [(0.9, 0.25)] * 3)
    assert "seems the best choice, judging by one seed and without a race" in told
    assert "This rests on one seed: differences may be chance. A claim needs 3." in told
    assert "Runs with different seeds logged exactly the same, so they count as one: the script" in told
    assert "from SPEECHDP_SEED, or from {seed} in its arguments." in told
    other = _compared_with_seeds(tmp_path / "other", [(0.9, 0.25), (0.9, 0.26), (0.9, 0.24)])
    assert "one seed" not in other and "exactly the same" not in other
    # As right as can be with every seed is no sign of that.
    whole = _compared_with_seeds(tmp_path / "whole", [(0.0, 1.0)] * 3, "accuracy")
    assert "exactly the same" not in whole


def test_a_script_whose_runs_have_all_failed_as_they_began_is_none_of_ours(tmp_path: Path) -> None:
    record = RunRecord(StrategyChoice("bmuf"), 2, 1, "frames", None)
    failed = replace(record, folder=record.planned.folder, state="failed", message="no module")
    write_record(tmp_path, CompareRecord({"script": "train.py"}, (failed,), completed=False))
    report = write_comparison(tmp_path)
    assert "Failed: 2 ranks, bmuf, seed 1: no module" in report.answer
    for text in (" ".join(report.answer), words_of(report.html)):
        assert [word for word in (*OURS, "equal frames") if word in text] == []


def _give_version(folder: Path, *versions: str) -> None:
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "script_versions": versions}))


def test_runs_of_a_script_that_was_changed_meanwhile_are_named(compared: Path) -> None:
    def told() -> tuple[str, ...]:
        return (" ".join(write_comparison(compared).answer), " ".join(write_report(compared).answer))

    folders = sorted(path.parent for path in compared.glob("*x-*/run.json"))
    for folder in folders:
        _give_version(folder, "a")
    assert not any("was changed" in text for text in told())
    _give_version(next(compared.glob("*-easgd-*")), "b")
    for text in told():
        assert "train.py, or a module of its folder, was changed between runs, or while one was" in text
        assert re.search(r"than the rest: (2 ranks, |2x-)easgd(, |-)seed1?( 1)?\. Use", text)
    # A resumed run is of both versions.
    for folder in folders:
        _give_version(folder, "b")
    _give_version(next(compared.glob("*-bmuf-*")), "a", "b")
    named = r"than the rest: (2 ranks, |2x-)bmuf[^,]*(, seed 1)?\. Use"
    assert all(re.search(named, text) for text in told())


@pytest.mark.parametrize(
    ("name", "curve", "is_told"),
    [("quality", (0.2, 0.4), True), ("quality", (0.4, 0.2), False), ("valid_loss", (0.2, 0.4), False),
     ("accuracy", (0.4, 0.2), False)],
)  # fmt: skip
def test_a_direction_that_was_guessed_and_not_gone_is_doubted(
    name: str, curve: Sequence[float], is_told: bool, tmp_path: Path
) -> None:
    words = (
        "quality grew in every run, but less is taken to be better, because its name does not show which is: "
        "if more is better, give --metric quality:max."
    )
    told = _compared_with_seeds(tmp_path, [curve], name)
    assert (words in told) is is_told and ("grew in every run" in told) is is_told
    if is_told:
        assert "grew" not in " ".join(write_comparison(tmp_path, metric=f"{name}:max").answer)
        assert words in " ".join(write_report(tmp_path).answer)


def test_large_values_are_not_written_as_powers_of_ten() -> None:
    number = parse_metric("perplexity").number
    assert [number(value) for value in (0.12345, 9999.4, 12345.6)] == ["0.1235", "9999", "12,346"]
