"""A comparison that tries learning rates: which are chosen, what is kept, and what its report says."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from speechdp.experiments.compare.plan import RATES, ComparePlan, checked_strategies
from speechdp.experiments.compare.record import RunRecord, read_record, threads_before, write_record
from speechdp.experiments.compare.run import Comparer
from speechdp.experiments.compare.training import ComparedTraining
from speechdp.experiments.record import COMPLETE, FAILED, PENDING
from speechdp.report.compare.report import write_comparison
from speechdp.report.kit.formatting import MINUS
from tests.helpers.comparisons import EPOCHS
from tests.helpers.runs import MadeUpRun, write_run
from tests.helpers.terminal import on_terminal

TEXTS = ("gradient_averaging", "bmuf:period=4")
#: How well a strategy on 2 ranks learns with each rate; what is not listed fails.
LEARNT = {
    "gradient_averaging": {0.001: -0.5, 0.002: -0.4, 0.004: -0.45},
    "bmuf:period=4": {0.001: -0.6, 0.002: -0.5, 0.004: -0.42, 0.008: -0.47},
}


@dataclass
class MadeUpTraining(ComparedTraining):
    """Writes each run with the score of its learning rate."""

    learnt: Mapping[str, Mapping[float | None, float]] = field(default_factory=lambda: LEARNT)
    trained: list[RunRecord] = field(default_factory=list)

    def settings(self) -> dict[str, Any]:
        return {"epochs": EPOCHS}

    def is_done(self, run: RunRecord, run_dir: Path) -> bool:
        return (run_dir / "completed.json").is_file()

    def run(self, run: RunRecord, run_dir: Path) -> str | None:
        self.trained.append(run)
        score = self.learnt[run.strategy.text].get(run.learning_rate)
        if score is None:
            return "the loss is nan"
        made = MadeUpRun(
            run_dir.name, run.strategy.name, size=2, final_log_prob=score, wer=(0.02, 0.01, 0.03)
        )
        write_run(made, run_dir.parent)
        return None


def compare(
    out: Path, training: ComparedTraining, rates: Sequence[float], seeds: Sequence[int] = (1,)
) -> list[str]:
    """Compare both strategies on 2 ranks; return what is said."""
    said: list[str] = []
    strategies = checked_strategies(",".join(TEXTS))
    plan = ComparePlan(strategies, (2,), tuple(seeds), ("frames",), EPOCHS, tuple(rates))
    Comparer(out, plan, training, said.append).run()
    return said


def rates_of(out: Path) -> dict[str, float | None]:
    """Return the learning rates of the runs, all of which are complete."""
    runs = read_record(out).runs
    assert {run.state for run in runs} == {COMPLETE}
    return {run.strategy.text: run.learning_rate for run in runs}


def test_each_strategy_has_the_rate_with_which_it_learnt_best(tmp_path: Path) -> None:
    training = MadeUpTraining()
    said = compare(tmp_path, training, (0.001, 0.002, 0.004), seeds=(1, 2))
    assert rates_of(tmp_path) == {"gradient_averaging": 0.002, "bmuf:period=4": 0.004}
    assert [run.mode for run in training.trained] == [RATES] * 6 + ["frames"] * 4
    assert not {run.seed for run in training.trained[:6]} & {1, 2}
    assert "2 ranks, gradient averaging: learning rate 0.002 from here on" in said
    assert any(line.startswith("[6/6] 2 ranks, bmuf (period=4), learning rate 0.004: ") for line in said)
    # What is done is kept, and a seed more is trained with the same rates.
    training.trained.clear()
    compare(tmp_path, training, (0.001, 0.002, 0.004), seeds=(1, 2, 3))
    assert [(run.seed, run.learning_rate) for run in training.trained] == [(3, 0.002), (3, 0.004)]


def test_rates_that_are_added_may_change_the_choice(tmp_path: Path) -> None:
    training = MadeUpTraining()
    compare(tmp_path, training, (0.001, 0.002))
    assert rates_of(tmp_path)["bmuf:period=4"] == 0.002
    training.trained.clear()
    said = compare(tmp_path, training, (0.001, 0.002, 0.004))
    assert rates_of(tmp_path) == {"gradient_averaging": 0.002, "bmuf:period=4": 0.004}
    assert [(run.mode, run.strategy.name) for run in training.trained] == [
        (RATES, "gradient_averaging"), (RATES, "bmuf"), ("frames", "bmuf")
    ]  # fmt: skip
    assert (
        f"1 finished run of {tmp_path} will not be in the report, first equal frames, 2 ranks, bmuf "
        "(period=4), seed 1, learning rate 0.002: of the learning rates tried another is better now"
    ) in said


def test_a_rate_that_is_no_more_named_can_be_had_back(tmp_path: Path) -> None:
    compare(tmp_path, MadeUpTraining(), (0.001, 0.002, 0.004))
    said = compare(tmp_path, MadeUpTraining(), (0.001, 0.002))
    (line,) = (line for line in said if "will not be in the report" in line)
    assert "learning rate 0.004: this command does not name their settings; add these and" in line
    training = MadeUpTraining()
    compare(tmp_path, training, (0.001, 0.002, 0.004))
    assert not training.trained


def test_a_command_that_is_killed_while_it_tries_rates_loses_nothing_of_finished_runs(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    @dataclass
    class KilledTraining(MadeUpTraining):
        def run(self, run: RunRecord, run_dir: Path) -> str | None:
            raise Killed

    compare(tmp_path, MadeUpTraining(), (0.001, 0.002))
    trials, runs = read_record(tmp_path).trials, read_record(tmp_path).runs
    with pytest.raises(Killed):
        compare(tmp_path, KilledTraining(), (0.001, 0.002, 0.004))
    killed = read_record(tmp_path)
    # Which rate each has is open, and how long finished ones took and with how many threads is known still.
    assert [run.learning_rate for run in killed.runs] == [None, None]
    assert killed.left_out == runs and set(trials) <= set(killed.trials)
    with pytest.raises(Killed):
        compare(tmp_path, KilledTraining(), (0.001, 0.002, 0.004))
    said = compare(tmp_path, MadeUpTraining(), (0.001, 0.002, 0.004))
    after = read_record(tmp_path)
    assert after.runs[0] == runs[0] and runs[0].wall_s is not None
    assert after.left_out == (runs[1],)
    assert any("of the learning rates tried another is better now" in line for line in said)


def test_threads_are_those_of_finished_runs_that_wait_for_a_rate(tmp_path: Path) -> None:
    compare(tmp_path, MadeUpTraining(), (0.001, 0.002))
    record = read_record(tmp_path)
    waiting = tuple(replace(run, state=PENDING) for run in (*record.runs, *record.trials))
    write_record(tmp_path, replace(record, threads=3, runs=waiting, trials=(), left_out=record.runs))
    assert threads_before(tmp_path) == 3


def test_runs_of_a_comparison_without_rates_are_none_of_one_with_them(tmp_path: Path) -> None:
    own = {text: {None: -0.41, **rates} for text, rates in LEARNT.items()}
    training = MadeUpTraining(own)
    compare(tmp_path, training, ())
    assert rates_of(tmp_path) == dict.fromkeys(TEXTS)
    (line,) = (line for line in compare(tmp_path, training, (0.001, 0.002)) if "not be in the report" in line)
    assert line.startswith("2 finished runs of") and line.endswith(
        "seed 1: they were not trained with one of --learning-rates; leave out that option to include them"
    )
    assert rates_of(tmp_path) == dict.fromkeys(TEXTS, 0.002)
    assert len(training.trained) == 2 + 4 + 2


def test_a_rate_that_fails_is_not_chosen_and_is_tried_again(tmp_path: Path) -> None:
    training = MadeUpTraining()
    said = compare(tmp_path, training, (0.004, 0.008))
    assert rates_of(tmp_path) == dict.fromkeys(TEXTS, 0.004)
    trials = read_record(tmp_path).trials
    assert [(run.learning_rate, run.state) for run in trials[:2]] == [(0.004, COMPLETE), (0.008, FAILED)]
    assert "[2/4] 2 ranks, gradient averaging, learning rate 0.008: failed: the loss is nan" in said
    training.trained.clear()
    compare(tmp_path, training, (0.004, 0.008))
    assert [(run.mode, run.learning_rate) for run in training.trained] == [(RATES, 0.008)]


def test_a_rate_whose_trial_was_deleted_and_fails_now_is_not_called_worse(tmp_path: Path) -> None:
    compare(tmp_path, MadeUpTraining(), (0.001, 0.002))
    (trial,) = (
        run
        for run in read_record(tmp_path).trials
        if run.strategy.text == "gradient_averaging" and run.learning_rate == 0.002
    )
    assert trial.folder is not None
    shutil.rmtree(tmp_path / trial.folder)
    own = {**LEARNT, "gradient_averaging": {0.001: LEARNT["gradient_averaging"][0.001]}}
    said = compare(tmp_path, MadeUpTraining(own), (0.001, 0.002))
    (line,) = (line for line in said if "will not be in the report" in line)
    assert line.endswith(
        "learning rate 0.002: its learning rate was tried again, which failed: the loss is nan"
    )


def test_a_trial_that_was_deleted_and_is_made_again_is_recorded_as_it_went_now(tmp_path: Path) -> None:
    compare(tmp_path, MadeUpTraining(), (0.001, 0.002))
    record = read_record(tmp_path)
    trial = record.trials[0]
    write_record(tmp_path, record.with_changed(trial, wall_s=1e6))
    assert trial.folder is not None
    shutil.rmtree(tmp_path / trial.folder)
    training = MadeUpTraining()
    compare(tmp_path, training, (0.001, 0.002))
    assert [run.key for run in training.trained] == [trial.key]
    again = read_record(tmp_path).trials[0]
    assert again.state == COMPLETE and again.wall_s is not None and again.wall_s < 1e6


def test_the_log_that_shows_how_far_a_training_is_is_named_as_it_starts(tmp_path: Path) -> None:
    own = {text: {None: -0.41} for text in TEXTS}
    (line, *_) = (line for line in compare(tmp_path, MadeUpTraining(own), ()) if ": started" in line)
    folder = read_record(tmp_path).runs[0].folder
    assert line.endswith(f": started; {tmp_path}/logs/{folder}.log shows how far it is")


def test_a_strategy_that_no_rate_suits_has_failed(tmp_path: Path) -> None:
    training = MadeUpTraining({**LEARNT, "gradient_averaging": {}})
    compare(tmp_path, training, (0.001, 0.002))
    first, second = read_record(tmp_path).runs
    assert (first.state, second.state) == (FAILED, COMPLETE)
    assert first.message == "none of the learning rates that were tried for it has led to a score"
    assert [run.mode for run in training.trained] == [RATES] * 4 + ["frames"]


def test_one_strategy_alone_is_not_called_all(tmp_path: Path) -> None:
    compare(tmp_path, MadeUpTraining({**LEARNT, "bmuf:period=4": {}}), (0.001, 0.002, 0.004))
    text = " ".join(write_comparison(tmp_path).answer)
    assert "On 2 ranks gradient averaging learnt best with the learning rate 0.002, of those tried" in text


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rates")
    compare(out, MadeUpTraining(), (0.001, 0.002, 0.004, 0.008), seeds=(1, 2, 3))
    return out


def test_the_report_says_at_which_rates_strategies_were_compared(reported: Path) -> None:
    written = write_comparison(reported)
    text = " ".join(written.answer)
    assert (
        "On 2 ranks each strategy has the learning rate with which it learnt best, of those tried, by one "
        "run each: 0.002 for gradient averaging; 0.004 for bmuf (period=4)."
    ) in text
    assert "gradient averaging, learning rate 0.008, which failed: the loss is nan" in text
    assert "one beyond it may be better" not in text
    shown = on_terminal(written.table, 160)
    tried = shown[shown.index("Learning rates tried") :]
    assert re.search(rf"bmuf \(period=4\) +2 +0\.008 +{MINUS}0\.470", tried), tried
    with (reported / "compare" / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["mode"], row["strategy"], row["learning_rate"], row["seeds"]) for row in rows]
    assert found[:2] == [
        ("frames", "gradient_averaging", "0.002", "3"), ("frames", "bmuf:period=4", "0.004", "3")
    ]  # fmt: skip
    assert [row[2] for row in found[2:]] == ["0.001", "0.002", "0.004", "0.008"] * 2
    assert {row[0] for row in found[2:]} == {RATES}
    assert [row["heldout_log_prob_mean"] for row in rows[2:5]] == ["-0.5", "-0.4", "-0.45"]
    assert [row["failed"] for row in rows[2:6]] == ["0", "0", "0", "1"]


def test_with_one_learning_rate_for_all_the_report_says_so(reported: Path, tmp_path: Path) -> None:
    words = "All were trained with the same learning rate"
    compare(tmp_path, MadeUpTraining({text: {None: -0.4} for text in TEXTS}), ())
    assert words in " ".join(write_comparison(tmp_path).answer)
    assert words not in " ".join(write_comparison(reported).answer)


def test_a_best_rate_at_the_end_of_those_tried_is_told(tmp_path: Path) -> None:
    compare(tmp_path, MadeUpTraining(), (0.002, 0.004))
    text = " ".join(write_comparison(tmp_path).answer)
    for end, name in (("the lowest, 0.002", "gradient averaging"), ("the highest, 0.004", "bmuf (period=4)")):
        assert f"Of the learning rates tried {end}, was the best for {name} on 2 ranks: one beyond" in text


def test_rates_that_one_run_each_does_not_tell_apart_are_named(tmp_path: Path) -> None:
    learnt = {**LEARNT, "gradient_averaging": {0.001: -0.6, 0.002: -0.405, 0.004: -0.4}}
    compare(tmp_path, MadeUpTraining(learnt), (0.001, 0.002, 0.004))
    text = " ".join(write_comparison(tmp_path).answer)
    assert "the tolerance: 0.002 beside 0.004 for gradient averaging on 2 ranks." in text
    assert "the highest, 0.004, was the best for bmuf (period=4) on 2 ranks: one beyond" in text


@pytest.mark.parametrize(
    ("shifts", "named"),
    [
        # Seeds deviate by 0.07; of gradient averaging 0.05 are between the rates, of bmuf 0.08.
        ({1: 0.05, 2: -0.05}, "0.004 beside 0.002 for gradient averaging on 2 ranks."),
        # The only run with the rate is 0.09 from the one that tried it.
        ({1: -0.09}, "0.004 beside 0.002 for gradient averaging on 2 ranks; 0.002 beside 0.004 for bmuf"),
    ],
)
def test_how_seeds_differ_tells_how_near_rates_may_be(
    shifts: Mapping[int, float], named: str, tmp_path: Path
) -> None:
    @dataclass
    class Shifted(MadeUpTraining):
        def run(self, run: RunRecord, run_dir: Path) -> str | None:
            shift = shifts.get(run.seed, 0.0)
            moved = {rate: score + shift for rate, score in self.learnt[run.strategy.text].items()}
            return MadeUpTraining({run.strategy.text: moved}).run(run, run_dir)

    compare(tmp_path, Shifted(), (0.001, 0.002, 0.004), seeds=tuple(shifts))
    assert f"the tolerance: {named}" in " ".join(write_comparison(tmp_path).answer)


def test_before_all_rates_are_tried_the_report_says_so(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    class StopsSoon(MadeUpTraining):
        def run(self, run: RunRecord, run_dir: Path) -> str | None:
            if len(self.trained) == 3:
                raise StoppedError
            return super().run(run, run_dir)

    with pytest.raises(StoppedError):
        compare(tmp_path, StopsSoon(), (0.001, 0.002))
    text = " ".join(write_comparison(tmp_path).answer)
    assert (
        "1 of 4 runs that try learning rates have not finished yet; a strategy is shown once all of its "
        "own have."
    ) in text
    training = MadeUpTraining()
    compare(tmp_path, training, (0.001, 0.002))
    assert [run.mode for run in training.trained] == [RATES, "frames", "frames"]
