"""Compute the figures of reports from the records of runs: pure functions, formulas in docs/timing.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean

from speechdp.decode.paired import Difference
from speechdp.report.runs.alike import Alike, baseline_of, judged_alike
from speechdp.report.runs.data_path import DataFigures, DataWait, data_figures, data_wait
from speechdp.report.runs.raced import RacedSpeed
from speechdp.report.runs.results import Evaluation, RankTiming, RunResult, RunTiming, Sweep, WordErrors
from speechdp.tasks.metrics import TaskRecord, task_record

#: Compute times of ranks that differ by less (share of the mean) count as even.
NOTABLE_SKEW = 0.05


@dataclass(frozen=True)
class RankSkew:
    """How unevenly the ranks compute: (max - min) / mean of their compute time per step.

    `straggler` is the rank that the others wait for; None if the skew is too small to name one.
    """

    value: float
    straggler: int | None
    straggler_host: str = ""


@dataclass(frozen=True)
class Losses:
    """Shares of the training time that do not train, mean over ranks, 0 to 1.

    Attributes:
        exchange: communication of the rank that waits least, step by step: the exchange itself.
        waiting: communication beyond that: waiting for ranks that had more to do in a step.
        data_wait: no batch was ready, either on the rank or on the straggler that it waited for.
        update: update by the optimizer.
        other: time that no span covers: work of a loop beside its steps.
        slower_compute: additional compute time per frame relative to one rank alone; None without a
            baseline.
    """

    exchange: float
    waiting: float
    data_wait: float
    update: float
    other: float
    slower_compute: float | None


@dataclass(frozen=True)
class RunFigures:
    """One row of the report; values that the run did not record are None.

    Attributes:
        score, best_score: held-out scores: of the final model, and the highest of all evaluations during
            training (`Evaluation.score`).
        values: the task's final metrics by key, as recorded.
        wer_over_lowest: its word error rate minus the lowest of the compared runs.
        raced: its setting's speed in a race; speedup and efficiency then also come from the race.
        has_raced_speedup: the speedup comes from the race, not from the runs.
        speedup_interval: 95 % interval of a raced speedup; None if the race had too few rounds.
    """

    run: RunResult
    frames_per_s: float | None
    speedup: float | None
    efficiency: float | None
    comm_share: float | None
    data_wait: DataWait | None
    data: DataFigures | None
    skew: RankSkew | None
    losses: Losses | None
    score: float | None
    best_score: float | None
    word_errors: WordErrors | None
    values: dict[str, float | None]
    frames_trained: float | None
    training_time_s: float | None
    time_to_target_s: float | None
    wer_over_lowest: Difference | None = None
    raced: RacedSpeed | None = None
    has_raced_speedup: bool = False
    speedup_interval: tuple[float, float] | None = None

    @property
    def data_wait_share(self) -> float | None:
        """Share of the step time without a batch to work on, mean over ranks."""
        return None if self.data_wait is None else self.data_wait.mean

    @property
    def steps(self) -> int | None:
        """Steps of the rank that took most, including those of earlier starts and those not timed."""
        timing = self.run.timing
        if timing is None:
            return None
        return max(rank.last_step or rank.steps + timing.warmup_steps for rank in timing.ranks)

    @property
    def wer(self) -> float | None:
        """Word error rate, 0 to 1."""
        return None if self.word_errors is None else self.word_errors.wer

    @property
    def sent_per_s(self) -> float | None:
        """Bytes that a rank sends per second of training, mean over ranks; None if not counted."""
        ranks = self.run.timing.ranks if self.run.timing else ()
        rates = [r.sent_bytes / r.trained_s for r in ranks if r.sent_bytes is not None and r.trained_s]
        return fmean(rates) if rates and len(rates) == len(ranks) else None

    @property
    def replica_distance(self) -> float | None:
        """The largest replica distance of its evaluations."""
        known = [e.replica_distance for e in self.run.evaluations if e.replica_distance is not None]
        return max(known, default=None)

    @property
    def ages(self) -> tuple[int, ...]:
        """Numbers of exchanges by age, over all ranks; empty if the strategy does not count them."""
        ranks = self.run.timing.ranks if self.run.timing else ()
        counted = (rank.statistics.get("staleness") for rank in ranks)
        return sum_of_counts(
            counts
            for counts in counted
            if isinstance(counts, list) and all(isinstance(count, int) for count in counts)
        )

    @property
    def staleness(self) -> float | None:
        """Mean age of exchanges."""
        return mean_age(self.ages)


def sum_of_counts(histograms: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the elementwise sum of histograms; shorter ones are padded with zeros."""
    return tuple(map(sum, zip_longest(*histograms, fillvalue=0)))


def mean_age(ages: Sequence[int]) -> float | None:
    """Return the mean age of exchanges; None if there were none."""
    return sum(age * count for age, count in enumerate(ages)) / sum(ages) if sum(ages) else None


def frames_per_s(timing: RunTiming) -> float | None:
    """Return the job's throughput: frames of all ranks divided by the slowest rank's training time."""
    training_s = max(rank.training_s for rank in timing.ranks)
    return sum(rank.frames for rank in timing.ranks) / training_s if training_s > 0 else None


def mean_share(timing: RunTiming, seconds: Sequence[float]) -> float | None:
    """Return the mean over ranks of seconds / training time; `seconds` in the order of `timing.ranks`."""
    shares = [s / rank.training_s for s, rank in zip(seconds, timing.ranks, strict=True) if rank.training_s]
    return fmean(shares) if shares else None


def rank_skew(timing: RunTiming) -> RankSkew | None:
    """Compare the ranks' own work per step; None for fewer than two ranks.

    The straggler is the rank with the SHORTEST communication: it arrives last at the exchange and waits
    for nobody, while the communication of the others includes waiting for it.
    """
    ranks = [rank for rank in timing.ranks if rank.steps > 0]
    if len(ranks) < 2:
        return None
    compute = [rank.compute_s / rank.steps for rank in ranks]
    mean = fmean(compute)
    if mean <= 0:
        return None
    skew = (max(compute) - min(compute)) / mean
    if skew < NOTABLE_SKEW:
        return RankSkew(skew, None)
    straggler = min(ranks, key=_comm_per_step)
    return RankSkew(skew, straggler.rank, straggler.host)


def losses(timing: RunTiming, baseline: RunTiming | None) -> Losses | None:
    """Split the time that does not train into causes; None if no step was timed."""
    timed = [rank for rank in timing.ranks if rank.training_s > 0]
    if not timed:
        return None
    shares = [rank.comm_s / rank.training_s for rank in timed]
    # Meetings between steps exchange nothing.
    exchange = min((rank.comm_s - rank.meeting_s) / rank.training_s for rank in timed)
    if timing.exchange_s is not None:
        exchange = min(exchange, timing.exchange_s / fmean(rank.training_s for rank in timed))
    waiting = fmean(shares) - exchange
    data_wait = fmean(rank.data_wait_s / rank.training_s for rank in timed)
    last = min(timed, key=_comm_per_step)
    for_its_data = min(max(last.data_wait_s / last.training_s - data_wait, 0.0), waiting)
    return Losses(
        exchange=exchange,
        waiting=waiting - for_its_data,
        data_wait=data_wait + for_its_data,
        update=fmean(rank.spans_s.get("update", 0.0) / rank.training_s for rank in timed),
        other=fmean(rank.other_s / rank.training_s for rank in timed),
        slower_compute=None if baseline is None else _slower_compute(timing, baseline),
    )


def task_of(runs: Iterable[RunResult]) -> TaskRecord:
    """Return the task's declarations, from the first run that still has its settings."""
    return next((run.task for run in runs if run.settings or run.script_task), task_record({}))


def comparable_runs(runs: Sequence[RunResult]) -> Alike:
    """Group the runs of the first one's task that were evaluated on the same data; see judged_alike."""
    metric = task_of(runs).metrics[0]
    return judged_alike(run for run in runs if not run.is_baseline and run.metric.key == metric.key)


def best_score(evaluations: Sequence[Evaluation]) -> float | None:
    """Return the highest held-out score."""
    return max((e.score for e in evaluations if e.score is not None), default=None)


def learned(runs: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs whose model is better than guessing; all if none is."""
    return [run for run in runs if not run.is_guessing] or list(runs)


def target_of_all(runs: Sequence[RunResult]) -> float | None:
    """Return the lowest of the best scores of the comparable runs that learned, which all of them reached."""
    best = [best_score(run.evaluations) for run in learned(comparable_runs(runs).runs)]
    return min((value for value in best if value is not None), default=None)


def time_to_target(evaluations: Sequence[Evaluation], target: float) -> float | None:
    """Return the training time of the first evaluation at or above `target`, s, without interpolation."""
    for evaluation in evaluations:
        if evaluation.score is not None and evaluation.score >= target:
            return evaluation.time_s
    return None


def run_figures(run: RunResult, baseline: RunTiming | None, target: float | None) -> RunFigures:
    """Compute a run's row.

    Args:
        run: what it recorded.
        baseline: timing of one rank alone; None: leave speed-up and efficiency unknown.
        target: held-out score for the time to target.
    """
    timing = run.timing
    rate = frames_per_s(timing) if timing else None
    one_rank_rate = frames_per_s(baseline) if baseline else None
    speedup = rate / one_rank_rate if rate is not None and one_rank_rate else None
    last = run.final
    return RunFigures(
        run=run,
        frames_per_s=rate,
        speedup=speedup,
        efficiency=speedup / run.size if speedup is not None and run.size else None,
        comm_share=mean_share(timing, [r.comm_s for r in timing.ranks]) if timing else None,
        data_wait=data_wait(timing) if timing else None,
        data=data_figures(timing, run.order) if timing else None,
        skew=rank_skew(timing) if timing else None,
        losses=losses(timing, baseline) if timing else None,
        score=last.score if last else None,
        best_score=best_score(run.evaluations),
        word_errors=run.word_errors,
        values=last.values if last else {},
        frames_trained=last.frames if last else None,
        training_time_s=last.time_s if last else None,
        time_to_target_s=None if target is None else time_to_target(run.evaluations, target),
    )


def sweep_figures(sweep: Sweep, target: float | None) -> list[RunFigures]:
    """Compute every run's row, in the sweep's order; the target applies only to comparable runs."""
    comparable = comparable_runs(sweep.runs)
    rows: list[RunFigures] = []
    for run in sweep.runs:
        baseline = baseline_of(run, sweep.runs)
        timing = None if baseline is None else baseline.timing
        rows.append(run_figures(run, timing, target if comparable.has(run) else None))
    return rows


def finished_rows(rows: Sequence[RunFigures]) -> list[RunFigures]:
    """Return the rows of finished runs, without a sweep's run on one rank, which is never chosen."""
    return [row for row in rows if row.run.completed and not row.run.is_baseline]


def with_race(rows: Sequence[RunFigures], speeds: Mapping[str, RacedSpeed]) -> list[RunFigures]:
    """Return the rows with the speeds of their race, and with its speed-ups if one rank raced too.

    In that case a row that did not race gets no speed-up, because its run's own would be misleading beside
    the raced ones.

    Args:
        speeds: raced speeds, by the names of the runs.
    """
    alone = next((speeds.get(row.run.name) for row in rows if row.run.is_baseline), None)
    return [_with_speed(row, speeds.get(row.run.name), alone) for row in rows]


def _with_speed(row: RunFigures, speed: RacedSpeed | None, alone: RacedSpeed | None) -> RunFigures:
    if alone is None or not row.run.size:
        return replace(row, raced=speed)
    if speed is None:
        return replace(row, speedup=None, efficiency=None)
    over_one = speed.over(alone)
    speedup = over_one.ratio
    return replace(
        row,
        raced=speed,
        speedup=speedup,
        has_raced_speedup=True,
        speedup_interval=over_one.interval,
        efficiency=speedup / row.run.size,
    )


def _comm_per_step(rank: RankTiming) -> float:
    return rank.comm_s / max(rank.steps, 1)


def _slower_compute(timing: RunTiming, baseline: RunTiming) -> float | None:
    """Return the share of the step time that one rank alone would have saved for the same frames."""
    per_frame, alone = _work_per_frame(timing), _work_per_frame(baseline)
    if per_frame is None or alone is None or per_frame <= 0:
        return None
    work_share = mean_share(timing, [rank.compute_s - rank.data_wait_s for rank in timing.ranks])
    assert work_share is not None
    return max(work_share * (1 - alone / per_frame), 0.0)


def _work_per_frame(timing: RunTiming) -> float | None:
    """Return the compute time per frame, s, without waiting for data."""
    frames = sum(rank.frames for rank in timing.ranks)
    return sum(rank.compute_s - rank.data_wait_s for rank in timing.ranks) / frames if frames else None
