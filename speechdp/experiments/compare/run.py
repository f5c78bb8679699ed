"""Train and decode every run of a comparison, each as a job of its own, one after another."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from speechdp.errors import RunError
from speechdp.experiments.compare.arguments import train_arguments
from speechdp.experiments.compare.jobs import JobStarter
from speechdp.experiments.compare.plan import (
    FRAMES,
    SEQUENTIAL,
    TIME,
    ComparePlan,
    equal_time_epochs,
    stretched,
)
from speechdp.experiments.compare.record import (
    COMPLETE,
    FAILED,
    PENDING,
    CompareRecord,
    RunRecord,
    check_same,
    write_record,
)
from speechdp.options.run import TrainOptions
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.runs.derived import run_figures
from speechdp.report.runs.folders import read_run

ALIGNMENT = "alignment"
LOGS = "logs"


@dataclass(frozen=True)
class CompareRequest:
    """A comparison to be made.

    Attributes:
        data: data directory, and its checksum.
        out: folder of the comparison.
        options: of every run; strategy, seed, and epochs at equal time are set run by run.
        decode_split: split whose word error rate is reported; "" for none.
        most_decoding_ranks: more than this decode nothing faster on this machine; None: any number.
    """

    data: Path
    data_checksum: str
    out: Path
    options: TrainOptions
    plan: ComparePlan
    decode_split: str
    most_decoding_ranks: int | None = None

    def settings(self) -> dict[str, Any]:
        """Return what all runs share."""
        options = self.options.to_json()
        return {
            "data": self.data_checksum,
            "decode_split": self.decode_split,
            **{key: value for key, value in options.items() if key not in ("strategy", "seed")},
        }

    def options_of(self, strategy: str, seed: int) -> TrainOptions:
        """Return the options of a run at equal frames."""
        return dataclasses.replace(self.options, strategy=strategy, seed=seed)


class Comparer:
    """Carries a comparison out.  Finished runs are kept, interrupted ones go on.

    Args:
        say: takes a line of progress.
    """

    def __init__(self, request: CompareRequest, starter: JobStarter, say: Callable[[str], None]) -> None:
        self._request, self._starter, self._say = request, starter, say
        self._alignments = request.options.alignments
        records = tuple(RunRecord.of(run) for run in request.plan.runs())
        self._record = CompareRecord(request.settings(), records)

    def run(self) -> CompareRecord:
        """Train and decode all runs; return what became of them.

        Raises:
            Stopped: a signal asked for it; the same command goes on.
            ConfigError: the folder holds another comparison.
            RunError: the alignment failed, without which nothing can be compared, or the disk is full.
        """
        check_same(self._request.out, self._request.settings())
        self._update(self._record)
        self._align()
        for mode in self._request.plan.modes:
            if mode == TIME:
                self._update(plan_time_runs(self._record, self._request.out))
                self._say_what_needs_no_job()
            for index, run in enumerate(self._record.runs):
                if run.mode == mode and run.state == PENDING:
                    self._carry_out(index)
        done = all(run.state == COMPLETE for run in self._record.runs)
        self._update(dataclasses.replace(self._record, completed=done))
        return self._record

    def _update(self, record: CompareRecord) -> None:
        self._record = record
        write_record(self._request.out, record)

    def _align(self) -> None:
        """Make the targets of all runs once, with the fewest ranks: most like plain training."""
        request, options = self._request, self._request.options
        if options.realign == 0:
            return
        run_dir = (request.out / ALIGNMENT).absolute()
        self._alignments = run_dir / "alignments" / str(options.realign)
        if not (run_dir / "completed.json").is_file():
            plan = request.plan
            ranks = min(plan.ranks)
            own = dataclasses.replace(
                request.options_of(SEQUENTIAL, plan.seeds[0]),
                epochs=1,
                realign_epochs=options.realign_epochs or options.num_epochs,
            )
            self._say(f"alignment, {options.realign} round(s): started")
            message = self._train(run_dir, own, ranks)
            if message is not None:
                raise RunError(f"{run_dir}: the alignment failed: {message}")

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
        run_dir = (self._request.out / folder).absolute()
        place = f"[{index + 1}/{len(self._record.runs)}] {run.planned.title}"
        self._update(self._record.with_run(index, folder=folder))
        wall_s = None
        message = None
        if not self._is_done(run_dir):
            self._say(f"{place}: started{self._time_left()}")
            start_s = time.monotonic()
            message = self._train_and_decode(run, run_dir)
            wall_s = time.monotonic() - start_s
        state = COMPLETE if message is None else FAILED
        self._update(self._record.with_run(index, state=state, message=message or "", wall_s=wall_s))
        self._say(f"{place}: {_news(run_dir, message, wall_s)}")

    def _is_done(self, run_dir: Path) -> bool:
        decoded = self._request.decode_split == "" or self._errors_file(run_dir).is_file()
        return decoded and (run_dir / "completed.json").is_file()

    def _errors_file(self, run_dir: Path) -> Path:
        return run_dir / f"wer-{self._request.decode_split}.json"

    def _train_and_decode(self, run: RunRecord, run_dir: Path) -> str | None:
        request = self._request
        if not (run_dir / "completed.json").is_file():
            options = request.options_of(run.strategy, run.seed)
            assert run.epochs is not None
            if run.epochs != options.num_epochs:
                options = stretched(options, run.epochs)
            options = dataclasses.replace(
                options, alignments=self._alignments, realign=0, realign_epochs=None
            )
            message = self._train(run_dir, options, run.ranks)
            if message is not None:
                return message
        if not request.decode_split:
            return None
        ranks = min(run.ranks, request.most_decoding_ranks or run.ranks)
        words = ["decode", str(run_dir), str(request.data.absolute()), "--split", request.decode_split]
        words += [f"--device={request.options.device}"]
        if ranks > 1:
            words += [f"--backend={request.options.backend}"]
        return self._starter.run(ranks, words, self._log(run_dir))

    def _train(self, run_dir: Path, options: TrainOptions, ranks: int) -> str | None:
        if ranks == 1:  # other back-ends have nothing to do there, and some need a launcher
            options = dataclasses.replace(options, backend="auto")
        words = ["train", str(self._request.data.absolute()), str(run_dir), *train_arguments(options)]
        # The ranks of a comparison are those that train.
        num_ranks = ranks + options.loading.feeders
        message = self._starter.run(num_ranks, [*words, "--resume"], self._log(run_dir))
        if message is None and not (run_dir / "completed.json").is_file():
            return "the job ended well but left no completed.json (a host may have been lost)"
        return message

    def _log(self, run_dir: Path) -> Path:
        return self._request.out / LOGS / f"{run_dir.name}.log"

    def _time_left(self) -> str:
        left_s = estimate_left_s(self._record.runs)
        return "" if left_s is None else f"; about {formatting.seconds(left_s)} left"


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
            record = record.with_run(index, state=FAILED, message=message)
            continue
        slowest_s = max(value for (_, *group), value in trained_s.items() if group == [run.ranks, run.seed])
        epochs = equal_time_epochs(base.epochs, own_s, slowest_s)
        record = record.with_run(index, epochs=epochs)
        if epochs == base.epochs:
            record = record.with_run(index, folder=base.folder, state=COMPLETE)
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


def _news(run_dir: Path, message: str | None, wall_s: float | None) -> str:
    """Return the figures of a run in a line, or why it failed."""
    if message is not None:
        return f"failed: {message}"
    figures = run_figures(read_run(run_dir), None, None)
    words = [
        f"{formatting.count(figures.frames_per_s)} frames/s",
        terms_of([figures.run]).with_unit(figures.score),
    ]
    if figures.word_errors is not None:
        words.append(f"WER {formatting.percent(figures.word_errors.wer, 1)} %")
    words.append("kept" if wall_s is None else formatting.seconds(wall_s))
    return ", ".join(words)
