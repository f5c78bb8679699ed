"""Carry out every run of a comparison, each as a job of its own, one after another."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from speechdp.counting import counted
from speechdp.experiments.compare.plan import FRAMES, MODES, TIME, ComparePlan, equal_time_epochs
from speechdp.experiments.compare.record import CompareRecord, RunRecord, find_earlier, write_record
from speechdp.experiments.compare.training import ComparedTraining
from speechdp.experiments.record import COMPLETE, FAILED, PENDING
from speechdp.options.run import TrainOptions
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.runs.derived import run_figures
from speechdp.report.runs.folders import common_metric, read_run


class Comparer:
    """Carries a comparison out.  Finished runs are kept, interrupted ones go on.

    Args:
        out: folder of the comparison.
        training: what each run is.
        say: takes a line of progress.
        metric: for the record.
        threads: of a rank, for the record.
    """

    def __init__(
        self,
        out: Path,
        plan: ComparePlan,
        training: ComparedTraining,
        say: Callable[[str], None],
        *,
        metric: str = "",
        threads: int | None = None,
    ) -> None:
        self._out, self._plan, self._training, self._say = out, plan, training, say
        records = tuple(RunRecord.of(run) for run in plan.runs())
        self._record = CompareRecord(training.settings(), records, metric=metric, threads=threads)

    def run(self) -> CompareRecord:
        """Train and decode all runs; return what became of them.

        Raises:
            JobStopped: a signal asked for it; the same command goes on.
            ConfigError: the folder holds another comparison, or the runs do not log the metric.
            RunError: what all runs need failed, or the disk is full.
        """
        earlier = find_earlier(self._out, self._training.settings(), TrainOptions().to_json())
        if earlier is not None:
            self._take_over(earlier)
        self._update(self._record)
        self._training.begin()
        # Equal times are those of the runs at equal frames, which come first.
        for mode in sorted(self._plan.modes, key=MODES.index):
            if mode == TIME:
                self._update(plan_time_runs(self._record, self._out))
                self._say_what_needs_no_job()
            for index, run in enumerate(self._record.runs):
                # At equal frames also those that were finished before: a line says that they are kept.
                if run.mode == mode and (mode == FRAMES or run.state == PENDING):
                    self._carry_out(index)
        self._race()
        done = all(run.state == COMPLETE for run in self._record.runs) and not self._record.failed_races
        self._update(dataclasses.replace(self._record, completed=done))
        return self._record

    def _take_over(self, earlier: CompareRecord) -> None:
        """Begin with what an earlier command has finished, which the page has in the meantime."""
        self._record = with_finished(
            self._record, earlier, lambda folder: self._training.is_done((self._out / folder).absolute())
        )
        named = set(map(_key, self._record.runs))
        others = [run for run in earlier.runs if run.state == COMPLETE and _key(run) not in named]
        if others:
            self._say(
                f"{counted(len(others), 'finished run')} of {self._out} will not be in the report, first "
                f"{others[0].planned.title}: this command does not name what they train with; add it and "
                "repeat the command to have them back"
            )

    def _update(self, record: CompareRecord) -> None:
        self._record = record
        write_record(self._out, record)

    def _race(self) -> None:
        """Let those strategies race on each number of ranks that have been trained there."""
        failed: dict[str, str] = {}
        for ranks in sorted({run.ranks for run in self._record.runs if run.ranks > 1}):
            trained = dict.fromkeys(
                run.strategy for run in self._record.runs if run.ranks == ranks and run.state == COMPLETE
            )
            given = [choice for choice in self._plan.strategies_on(ranks) if choice in trained]
            message = self._training.race(ranks, given)
            if message is not None:
                failed[str(ranks)] = message
            self._update(dataclasses.replace(self._record, failed_races=failed))

    def _say_what_needs_no_job(self) -> None:
        total = len(self._record.runs)
        for index, run in enumerate(self._record.runs):
            if run.mode == TIME and run.state != PENDING:
                what = run.message or "is the one at equal frames: as many epochs"
                self._say(f"[{index + 1}/{total}] {run.planned.title}: {what}")

    def _carry_out(self, index: int) -> None:
        """Train and decode run `index`, unless that is done, and record what became of it."""
        run = self._record.runs[index]
        folder = run.planned.folder
        place = f"[{index + 1}/{len(self._record.runs)}] {run.planned.title}"
        self._update(self._record.with_run(index, folder=folder))
        message, wall_s = carry_out(
            self._training,
            run,
            self._out / folder,
            place,
            self._say,
            metric=self._record.metric,
            expectation=self._time_left(),
        )
        state = COMPLETE if message is None else FAILED
        wall_s = run.wall_s if wall_s is None else wall_s
        self._update(self._record.with_run(index, state=state, message=message or "", wall_s=wall_s))
        # Before hours of further runs: refuse a name that none of those so far has logged.
        done = [other.folder for other in self._record.runs if other.state == COMPLETE]
        common_metric([self._out / name for name in done if name is not None], self._record.metric)

    def _time_left(self) -> str:
        left_s = estimate_left_s(self._record.runs)
        return "" if left_s is None else f"; about {formatting.seconds(left_s)} left"


def with_finished(
    record: CompareRecord, earlier: CompareRecord, is_done: Callable[[str], bool]
) -> CompareRecord:
    """Return a record with what became of those of its runs that an earlier one has as finished.

    Args:
        is_done: tells of a run's folder whether it holds all that is wanted now.
    """
    done = {_key(run): run for run in earlier.runs if run.state == COMPLETE and run.folder is not None}
    for index, run in enumerate(record.runs):
        found = done.get(_key(run))
        if found is not None and found.folder is not None and is_done(found.folder):
            record = record.with_run(
                index, epochs=found.epochs, folder=found.folder, state=COMPLETE, wall_s=found.wall_s
            )
    return record


def _key(run: RunRecord) -> tuple[str, int, int, str, int | None]:
    """Return what tells runs apart; the epochs of those at equal time follow from the others."""
    epochs = run.epochs if run.mode == FRAMES else None
    return run.strategy.text, run.ranks, run.seed, run.mode, epochs


def carry_out(
    training: ComparedTraining,
    run: RunRecord,
    run_dir: Path,
    place: str,
    say: Callable[[str], None],
    *,
    metric: str = "",
    expectation: str = "",
) -> tuple[str | None, float | None]:
    """Do what is left of a run, and say how it went.

    Args:
        place: which of all runs it is, to begin lines with.
        say: takes a line of progress.
        metric: what a script's run is judged by, as for `--metric`.
        expectation: to be said when it starts.

    Returns:
        What went wrong, in one line, or None; how long it took, s, None where nothing was left to do.

    Raises:
        as ComparedTraining.run
    """
    run_dir = run_dir.absolute()
    message, wall_s = None, None
    if not training.is_done(run_dir):
        say(f"{place}: started{expectation}")
        start_s = time.monotonic()
        message = training.run(run, run_dir)
        wall_s = time.monotonic() - start_s
    say(f"{place}: {run_news(run_dir, message, wall_s, metric)}")
    return message, wall_s


def plan_time_runs(record: CompareRecord, out: Path) -> CompareRecord:
    """Give the runs at equal time their epochs, from how long the runs at equal frames trained.

    A run whose epochs do not change is the run at equal frames itself; it is not trained twice.
    """
    trained_s = {
        (run.strategy, run.ranks, run.seed): _training_time_s(out / run.folder)
        for run in record.runs
        if run.mode == FRAMES and run.state == COMPLETE and run.folder is not None
    }
    of_frames = {(run.strategy, run.ranks, run.seed): run for run in record.runs if run.mode == FRAMES}
    for index, run in enumerate(record.runs):
        if run.mode != TIME:
            continue
        key = (run.strategy, run.ranks, run.seed)
        own_s, base = trained_s.get(key), of_frames[key]
        if not own_s or base.epochs is None:
            message = "its run at equal frames has no training time to start from"
            record = record.with_run(index, folder=None, state=FAILED, message=message)
            continue
        slowest_s = max(value for (_, *group), value in trained_s.items() if group == [run.ranks, run.seed])
        epochs = equal_time_epochs(base.epochs, own_s, slowest_s)
        if epochs == base.epochs:
            record = record.with_run(index, epochs=epochs, folder=base.folder, state=COMPLETE)
            continue
        # A finished one of as many epochs is found in its folder, and kept.
        wall_s = run.wall_s if run.epochs == epochs else None
        record = record.with_run(index, epochs=epochs, folder=None, state=PENDING, wall_s=wall_s)
    return record


def estimate_left_s(runs: Sequence[RunRecord]) -> float | None:
    """Return the time for the runs still to come: each the mean of those with as many ranks, else of all."""
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


def run_news(run_dir: Path, message: str | None, wall_s: float | None, metric: str = "") -> str:
    """Return the figures of a run in a line, or why it failed."""
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
