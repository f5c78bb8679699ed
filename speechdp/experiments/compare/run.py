"""Make the runs of a comparison one after another, each as a separate job."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from speechdp.counting import counted
from speechdp.experiments.compare.plan import (
    FRAMES,
    MODES,
    RATES,
    SEQUENTIAL,
    TIME,
    ComparePlan,
    equal_time_epochs,
)
from speechdp.experiments.compare.record import CompareRecord, RunRecord, find_earlier, write_record
from speechdp.experiments.compare.training import ComparedTraining, log_of
from speechdp.experiments.record import COMPLETE, FAILED, PENDING
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.runs.derived import run_figures
from speechdp.report.runs.folders import common_metric, read_run


class Comparer:
    """Makes a comparison.  Finished runs are kept, interrupted ones continue.

    Args:
        out: folder of the comparison.
        training: makes the runs.
        print_line: prints a line of progress.
        metric: metric, for the record.
        threads: threads of a rank, for the record.
    """

    def __init__(
        self,
        out: Path,
        plan: ComparePlan,
        training: ComparedTraining,
        print_line: Callable[[str], None],
        *,
        metric: str = "",
        threads: int | None = None,
    ) -> None:
        self._out, self._plan, self._training, self._print_line = out, plan, training, print_line
        runs, trials = (tuple(map(RunRecord.of, planned)) for planned in (plan.runs(), plan.trials()))
        self._record = CompareRecord(training.settings(), runs, metric=metric, threads=threads, trials=trials)
        #: Runs that earlier commands finished, whether or not this command has reached them.
        self._finished: tuple[RunRecord, ...] = ()

    def run(self) -> CompareRecord:
        """Train and decode all runs; return their record.

        Raises:
            JobStopped: a signal requested a stop; the same command continues.
            ConfigError: the folder holds another comparison, or the runs do not log the metric.
            RunError: the preparation for all runs failed, or the disk is full.
        """
        earlier = find_earlier(self._out, self._training.settings(), TrainOptions().to_json())
        if earlier is not None:
            self._finished = self._still_finished(earlier)
            self._take_over()
        self._update(self._record)
        self._training.begin()
        if self._record.trials:
            self._try_rates()
        self._print_left_out()
        # Runs at equal time need the times of the runs at equal frames, which therefore come first.
        for mode in sorted(self._plan.modes, key=MODES.index):
            if mode == TIME:
                self._update(plan_time_runs(self._record, self._out))
                self._print_runs_without_job()
            for place, run in _placed(self._record.runs):
                # At equal frames also go through finished runs, to print that they are kept.
                if run.mode == mode and (mode == FRAMES or run.state == PENDING):
                    self._carry_out(run, place)
        self._race()
        done = all(run.state == COMPLETE for run in self._record.runs) and not self._record.failed_races
        self._update(dataclasses.replace(self._record, completed=done))
        return self._record

    def _still_finished(self, earlier: CompareRecord) -> tuple[RunRecord, ...]:
        """Return the runs that an earlier command finished and this one need not repeat."""
        of_earlier = (*earlier.trials, *earlier.runs, *earlier.left_out)
        return tuple(run for run in of_earlier if run.state == COMPLETE and self._is_done(run))

    def _take_over(self) -> None:
        """Start with the finished runs of an earlier command, so that the page has them in the meantime."""
        trials = with_finished(self._record.trials, self._finished)
        self._take_over_runs(with_rates(dataclasses.replace(self._record, trials=trials), self._out))

    def _take_over_runs(self, record: CompareRecord) -> None:
        """Continue with a record, and with those of its runs that are finished."""
        self._record = dataclasses.replace(record, runs=with_finished(record.runs, self._finished))

    def _print_left_out(self) -> None:
        others: dict[str, list[RunRecord]] = {}
        for run in self._record.left_out:
            if run.mode != RATES:
                others.setdefault(self._why_left_out(run), []).append(run)
        for why, runs in others.items():
            self._print_line(
                f"{counted(len(runs), 'finished run')} of {self._out} will not be in the report, first "
                f"{runs[0].planned.title}: {why}"
            )

    def _why_left_out(self, run: RunRecord) -> str:
        """Return why a finished run is not part of this command, and what, if anything, brings it back."""
        named = {dataclasses.replace(one, learning_rate=run.learning_rate).key for one in self._record.runs}
        tried = self._plan.learning_rates
        if run.key in named and tried and run.learning_rate is None:
            return "they were not trained with one of --learning-rates; leave out that option to include them"
        if run.key in named and run.learning_rate in tried:
            return self._why_other_rate(run)
        return "this command does not name their settings; add these and repeat the command to include them"

    def _why_other_rate(self, run: RunRecord) -> str:
        """Return why a finished run does not have the best learning rate, although its rate was tried."""
        own = next(
            (
                trial
                for trial in self._record.trials
                if (trial.strategy.text, trial.ranks, trial.learning_rate)
                == (run.strategy.text, run.ranks, run.learning_rate)
            ),
            None,
        )
        if own is not None and own.state == FAILED:  # its first trial was deleted
            return f"its learning rate was tried again, which failed: {own.message}"
        return "of the learning rates tried another is better now"

    def _is_done(self, run: RunRecord) -> bool:
        """Return whether the folder of a finished run holds all that this command needs."""
        return run.folder is not None and self._training.is_done(run, (self._out / run.folder).absolute())

    def _update(self, record: CompareRecord) -> None:
        named = {run.key for run in (*record.trials, *record.runs)}
        left_out = tuple(run for run in self._finished if run.key not in named)
        self._record = dataclasses.replace(record, left_out=left_out)
        write_record(self._out, self._record)

    def _change(self, run: RunRecord, **changes: Any) -> None:
        self._update(self._record.with_changed(run, **changes))

    def _try_rates(self) -> None:
        """Train once with every learning rate, and give each strategy on each number of ranks its best."""
        for place, trial in _placed(self._record.trials):
            self._carry_out(trial, place)
        self._take_over_runs(with_rates(self._record, self._out))
        self._update(self._record)
        chosen = {(run.strategy.text, run.ranks): run.learning_rate for run in self._record.runs}
        for (strategy, ranks), rate in chosen.items():
            if rate is not None:
                where = f"{formatting.rank_count(ranks)}, " if ranks > 1 else ""
                self._print_line(
                    f"{where}{formatting.strategy_label(strategy, ranks)}: "
                    f"learning rate {formatting.learning_rate(rate)} from here on"
                )

    def _race(self) -> None:
        """Race the strategies that have been trained, on each number of ranks."""
        failed: dict[str, str] = {}
        finished: dict[tuple[StrategyChoice, int], RunRecord] = {}
        for run in self._record.runs:
            if run.mode == FRAMES and run.state == COMPLETE:
                finished.setdefault((run.strategy, run.ranks), run)
        for ranks in sorted({run.ranks for run in self._record.runs if run.ranks > 1}):
            settings = [(SEQUENTIAL, 1), *((choice, ranks) for choice in self._plan.strategies_on(ranks))]
            message = self._training.race(ranks, [finished[one] for one in settings if one in finished])
            if message is not None:
                failed[str(ranks)] = message
            self._update(dataclasses.replace(self._record, failed_races=failed))

    def _print_runs_without_job(self) -> None:
        for place, run in _placed(self._record.runs):
            if run.mode == TIME and run.state != PENDING:
                what = run.message or "is the one at equal frames: as many epochs"
                self._print_line(f"{place}: {what}")

    def _carry_out(self, run: RunRecord, place: str) -> None:
        """Train and decode a run or trial, unless that is done, and record the outcome.

        Args:
            place: start of its lines of progress: its number among all runs.
        """
        folder = run.planned.folder
        if self._record.trials and run.learning_rate is None:
            why = "none of the learning rates that were tried for it has led to a score"
            self._print_line(f"{place}: failed: {why}")
            self._change(run, state=FAILED, message=why)
            return
        self._change(run, folder=folder)
        message, wall_s = carry_out(
            self._training,
            run,
            self._out / folder,
            place,
            self._print_line,
            metric=self._record.metric,
            expectation=self._time_left(),
        )
        state = COMPLETE if message is None else FAILED
        wall_s = run.wall_s if wall_s is None else wall_s
        self._change(run, state=state, message=message or "", wall_s=wall_s)
        # Before hours of further runs, refuse a metric that none of the runs so far has logged.
        runs = (*self._record.trials, *self._record.runs)
        done = [other.folder for other in runs if other.state == COMPLETE]
        common_metric([self._out / name for name in done if name is not None], self._record.metric)

    def _time_left(self) -> str:
        left_s = estimate_left_s([*self._record.trials, *self._record.runs])
        return "" if left_s is None else f"; about {formatting.seconds(left_s)} left"


def _placed(runs: Sequence[RunRecord]) -> Iterator[tuple[str, RunRecord]]:
    """Yield each run with the start of its lines of progress: its number among all runs."""
    for number, run in enumerate(runs, 1):
        yield f"[{number}/{len(runs)}] {run.planned.title}", run


def with_finished(runs: Sequence[RunRecord], finished: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """Return runs, with the outcome of those that were finished earlier."""
    done = {run.key: run for run in finished}
    return tuple(done.get(run.key, run) for run in runs)


def with_rates(record: CompareRecord, out: Path) -> CompareRecord:
    """Return a record whose runs have the learning rates chosen by its finished trials.

    A run that gets another rate is another run, which has not begun.
    """
    chosen, runs = chosen_rates(record, out), list[RunRecord]()
    for run in record.runs:
        rate = chosen.get((run.strategy.text, run.ranks))
        if rate != run.learning_rate:
            epochs = run.epochs if run.mode == FRAMES else None
            run = RunRecord(run.strategy, run.ranks, run.seed, run.mode, epochs, learning_rate=rate)  # noqa: PLW2901
        runs.append(run)
    return dataclasses.replace(record, runs=tuple(runs))


def chosen_rates(record: CompareRecord, out: Path) -> dict[tuple[str, int], float]:
    """Return the best of the tried learning rates for each strategy on each number of ranks.

    The best rate has the best final held-out score; of two equally good rates, take the lower.  There is no
    best rate before all are tried.  A trial that failed or has no score does not count.
    """
    scores: dict[tuple[str, int], dict[float, float]] = {}
    waiting = {(run.strategy.text, run.ranks) for run in record.trials if run.state == PENDING}
    for run in record.trials:
        key = run.strategy.text, run.ranks
        if run.state == COMPLETE and run.folder is not None and key not in waiting:
            score = run_figures(read_run(out / run.folder, record.metric), None, None).score
            if score is not None and run.learning_rate is not None:
                scores.setdefault(key, {})[run.learning_rate] = score
    return {key: min(of, key=lambda rate, of=of: (-of[rate], rate)) for key, of in scores.items()}  # type: ignore[misc]


def carry_out(
    training: ComparedTraining,
    run: RunRecord,
    run_dir: Path,
    place: str,
    print_line: Callable[[str], None],
    *,
    metric: str = "",
    expectation: str = "",
) -> tuple[str | None, float | None]:
    """Make or finish a run, and print the outcome.

    Args:
        place: start of its lines of progress: its number among all runs.
        print_line: prints a line of progress.
        metric: metric that ranks a script's runs, as in `--metric`.
        expectation: text to print when it starts.

    Returns:
        The cause of failure in one line, or None; and the time it took, s, or None if it was done already.

    Raises:
        As ComparedTraining.run.
    """
    shown_dir, run_dir = run_dir, run_dir.absolute()
    message, wall_s = None, None
    if not training.is_done(run, run_dir):
        print_line(f"{place}: started{expectation}; {log_of(shown_dir)} shows how far it is")
        start_s = time.monotonic()
        message = training.run(run, run_dir)
        wall_s = time.monotonic() - start_s
    print_line(f"{place}: {run_summary(run_dir, message, wall_s, metric)}")
    return message, wall_s


def plan_time_runs(record: CompareRecord, out: Path) -> CompareRecord:
    """Set the epochs of the runs at equal time from the training times of the runs at equal frames.

    A run whose epochs do not change is identical to the run at equal frames and is not trained twice.
    """
    trained_s = {
        (run.strategy, run.ranks, run.seed): _training_time_s(out / run.folder)
        for run in record.runs
        if run.mode == FRAMES and run.state == COMPLETE and run.folder is not None
    }
    of_frames = {(run.strategy, run.ranks, run.seed): run for run in record.runs if run.mode == FRAMES}
    for run in record.runs:
        if run.mode != TIME:
            continue
        key = (run.strategy, run.ranks, run.seed)
        own_s, base = trained_s.get(key), of_frames[key]
        if not own_s or base.epochs is None:
            message = "its run at equal frames has no training time to start from"
            record = record.with_changed(run, folder=None, state=FAILED, message=message)
            continue
        slowest_s = max(value for (_, *group), value in trained_s.items() if group == [run.ranks, run.seed])
        epochs = equal_time_epochs(base.epochs, own_s, slowest_s)
        if epochs == base.epochs:
            record = record.with_changed(run, epochs=epochs, folder=base.folder, state=COMPLETE)
            continue
        # A finished run with the same number of epochs is found in its folder, and kept.
        wall_s = run.wall_s if run.epochs == epochs else None
        record = record.with_changed(run, epochs=epochs, folder=None, state=PENDING, wall_s=wall_s)
    return record


def estimate_left_s(runs: Sequence[RunRecord]) -> float | None:
    """Estimate the time of the remaining runs, s: each as the mean of runs on as many ranks, else of all."""
    known = [run for run in runs if run.wall_s is not None and run.state == COMPLETE]
    if not known:
        return None
    total_s = 0.0
    for run in runs:
        if run.state == PENDING:
            alike = [other.wall_s for other in known if other.ranks == run.ranks]
            total_s += fmean(wall or 0.0 for wall in alike or [other.wall_s for other in known])
    return total_s


def _training_time_s(run_dir: Path) -> float:
    evaluations = read_run(run_dir).evaluations
    return (evaluations[-1].time_s or 0.0) if evaluations else 0.0


def run_summary(run_dir: Path, message: str | None, wall_s: float | None, metric: str = "") -> str:
    """Return a line with the figures of a run, or why it failed."""
    if message is not None:
        return f"failed: {message}"
    figures = run_figures(read_run(run_dir, metric), None, None)
    terms = terms_of([figures.run])
    if figures.score is not None:
        score = terms.with_unit(figures.score)
    elif figures.run.evaluations:
        score = f"its last {terms.metric.name} is no number"
    else:
        score = f"{terms.metric.name} was not logged" if metric else "no metric logged"
    words = [f"{formatting.count(figures.frames_per_s)} {terms.amount}/s", score]
    if figures.word_errors is not None:
        words.append(f"WER {formatting.percent(figures.word_errors.wer, 1)} %")
    words.append("kept" if wall_s is None else formatting.seconds(wall_s))
    return ", ".join(words)
