"""Read a comparison's runs and aggregate them over seeds: one group for each strategy, ranks and mode."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speechdp.decode.paired import Difference, UtteranceErrors
from speechdp.experiments.compare.plan import FRAMES, MODES
from speechdp.experiments.compare.record import FILE_NAME, RunRecord, read_record
from speechdp.experiments.race.shown import ShownRaces, read_races
from speechdp.experiments.record import COMPLETE, FAILED
from speechdp.report.kit.choice import over_lowest
from speechdp.report.kit.formatting import strategy_label
from speechdp.report.kit.tables import Value
from speechdp.report.runs.derived import RunFigures, best_score, run_figures, sum_of_counts
from speechdp.report.runs.folders import common_metric, read_run
from speechdp.report.runs.raced import RacedSpeed
from speechdp.report.runs.results import ONE_RANK, RunResult, WordErrors
from speechdp.report.runs.script_metric import script_task

#: Share of the runs at equal frames that reach the default target. It is below 1, because a strategy that
#: fails altogether must not lower the target so far that all others reach it at once.
TARGET_SHARE = 0.75


@dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison: its plan, and the content of its folder (None: no folder)."""

    record: RunRecord
    result: RunResult | None

    @property
    def is_finished(self) -> bool:
        """Whether it counts."""
        return self.record.state == COMPLETE and self.result is not None and self.result.completed


@dataclass(frozen=True)
class Comparison:
    """A comparison as found.

    Attributes:
        trials: runs that tried learning rates.
        failed_races: causes of failure, by number of ranks.
    """

    path: Path
    settings: dict[str, Any]
    runs: tuple[ComparedRun, ...]
    races: ShownRaces = field(default_factory=ShownRaces)
    failed_races: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[ComparedRun, ...] = ()


@dataclass(frozen=True)
class Spread:
    """A figure over several seeds."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of the known values; None if there are none."""
        known = tuple(value for value in values if value is not None)
        return cls(known) if known else None

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds (n - 1); None for one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Group:
    """The runs of one strategy, number of ranks and mode: one row of the table.

    Attributes:
        runs: one run for each seed, including unfinished and failed ones.
        figures: figures of the finished runs.
        word_errors: means of rate and interval over seeds; None also if these were decoded on different
            splits.
        wer_over_lowest: its word error rate minus the lowest on as many ranks in the same mode; None if
            errors by utterance are unknown, or decoding differed.
        raced: its speed in the race on as many ranks; None: it took no part, or there was no race.
        alone: speed of one rank in the same race.
        alone_on: for one rank, its speeds in races, by their number of ranks.
        learning_rate: rate of its runs, if several were tried; None: the training's own.
    """

    strategy: str
    ranks: int
    mode: str
    runs: tuple[ComparedRun, ...]
    figures: tuple[RunFigures, ...]
    word_errors: WordErrors | None
    wer_over_lowest: Difference | None = None
    raced: RacedSpeed | None = None
    alone: RacedSpeed | None = None
    alone_on: Mapping[int, RacedSpeed] = field(default_factory=dict)
    learning_rate: float | None = None

    def spread(self, figure: Callable[[RunFigures], Value]) -> Spread | None:
        """Return a figure of the finished runs; None if none has it."""
        found = map(figure, self.figures)
        return Spread.of(value for value in found if isinstance(value, (int, float)))

    @property
    def frames_per_s(self) -> Spread | None:
        """Throughput."""
        return self.spread(lambda row: row.frames_per_s)

    @property
    def scores(self) -> Spread | None:
        """Scores of held-out data at the end, higher is better."""
        return self.spread(lambda row: row.score)

    @property
    def ages(self) -> tuple[int, ...]:
        """Numbers of exchanges by age, over all ranks and seeds."""
        return sum_of_counts(row.ages for row in self.figures)

    @property
    def unjudged(self) -> tuple[ComparedRun, ...]:
        """Finished runs whose last score is not finite, if others of the group have a finite one."""
        if self.scores is None:
            return ()
        without = {row.run.name for row in self.figures if row.score is None}
        return tuple(run for run in self.finished if run.result is not None and run.result.name in without)

    @property
    def label(self) -> str:
        """Its name for people: the strategy with its options, or `one rank`."""
        return strategy_label(self.strategy, self.ranks)

    @property
    def finished(self) -> tuple[ComparedRun, ...]:
        """The finished runs, which count."""
        return tuple(run for run in self.runs if run.is_finished)

    @property
    def results(self) -> list[RunResult]:
        """The results of the finished runs."""
        return [run.result for run in self.finished if run.result is not None]

    @property
    def num_judged(self) -> int:
        """Number of finished runs with a score; of all finished runs if none has one."""
        return len(self.scores.values) if self.scores else len(self.finished)

    @property
    def score(self) -> float | None:
        """Mean final held-out score."""
        return None if self.scores is None else self.scores.mean

    @property
    def epochs(self) -> Spread | None:
        """Epochs of the finished runs; None for a script, which decides itself how long it trains."""
        return Spread.of(run.record.epochs for run in self.finished)

    @property
    def failures(self) -> list[ComparedRun]:
        """The runs that failed."""
        return [run for run in self.runs if run.record.state == FAILED]


def read_comparison(out: Path, metric: str = "") -> Comparison:
    """Read OUT/compare.json and the runs it names.

    Args:
        metric: metric that ranks runs of a script; "": that of compare.json, else the one they log last.

    Raises:
        ConfigError: compare.json is damaged, or `metric` is invalid.
    """
    record = read_record(out)
    planned = (*record.trials, *record.runs)
    folders = [out / run.folder for run in planned if run.folder is not None]
    metric = common_metric(folders, metric, record.metric, out / FILE_NAME)
    split = str(record.settings.get("decode_split") or "")

    def read(run: RunRecord) -> ComparedRun:
        found = (
            None if run.folder is None else _read_compared(out / run.folder, record.settings, metric, split)
        )
        return ComparedRun(run, found)

    runs, trials = (tuple(map(read, among)) for among in (record.runs, record.trials))
    return Comparison(out, record.settings, runs, read_races(out), record.failed_races, trials)


def _read_compared(folder: Path, settings: Mapping[str, Any], metric: str, split: str) -> RunResult:
    """Read a run; a script's run that failed before it began is also recognised as a script's."""
    # No figures are shown for unfinished runs.
    result = read_run(folder, metric, split, times_unfinished=False)
    if "script" in settings and not result.settings:
        return replace(result, script_task=script_task(metric))
    return result


def target_of_most(runs: Sequence[ComparedRun]) -> float | None:
    """Return the highest held-out score that three quarters of the runs at equal frames reached."""
    best = [
        best_score(run.result.evaluations)
        for run in runs
        if run.is_finished and run.record.mode == FRAMES and run.result is not None
    ]
    reached = sorted((value for value in best if value is not None), reverse=True)
    if not reached:
        return None
    return reached[math.ceil(len(reached) * TARGET_SHARE) - 1]


def make_groups(comparison: Comparison, target: float | None) -> list[Group]:
    """Aggregate the runs, in the given order of modes, ranks, and strategies."""
    keys: dict[tuple[str, int, str], list[ComparedRun]] = {}
    for run in sorted(comparison.runs, key=lambda run: run.record.seed):
        keys.setdefault((run.record.mode, run.record.ranks, run.record.strategy.text), []).append(run)
    given = list(dict.fromkeys(run.record.strategy.text for run in comparison.runs))
    order = sorted(keys, key=lambda key: (MODES.index(key[0]), key[1], given.index(key[2])))
    groups = _with_differences([_group(key, keys[key], target) for key in order])
    for ranks, labels in compared_by_race(groups).items():
        if comparison.races.compares(ranks, labels):
            groups = _with_race(groups, ranks, comparison.races.speeds(ranks))
    return groups


def make_trials(comparison: Comparison, target: float | None) -> list[Group]:
    """Return the runs that tried learning rates as separate groups, in training order."""
    return [
        _group((run.record.mode, run.record.ranks, run.record.strategy.text), [run], target)
        for run in comparison.trials
    ]


def compared_by_race(groups: Sequence[Group]) -> dict[int, dict[str, str]]:
    """Return the labels of finished groups on several ranks, by number of ranks and strategy text."""
    found: dict[int, dict[str, str]] = {}
    for group in groups:
        if group.ranks > 1 and group.figures:
            found.setdefault(group.ranks, {})[group.strategy] = group.label
    return found


def with_all_seeds(groups: Sequence[Group]) -> list[Group]:
    """Return the groups in which no seed failed; all groups if there are none.

    The others may not keep their accuracy, because the remaining seeds may be the lucky ones.
    """
    return [group for group in groups if not (group.unjudged or group.failures)] or list(groups)


def _with_differences(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with the differences of their word error rates from the lowest in their table part.

    The lowest is that of a group with all seeds, as in the choice.
    """
    found: list[Group] = []
    for group in groups:
        beside = [other for other in groups if (other.ranks, other.mode) == (group.ranks, group.mode)]
        found.append(replace(group, wer_over_lowest=over_lowest(group, beside, with_all_seeds(beside))))
    return found


def _with_race(groups: list[Group], ranks: int, speeds: Mapping[str, RacedSpeed]) -> list[Group]:
    """Return the groups with the speeds of the race on `ranks` ranks."""
    alone = speeds.get(ONE_RANK)
    found: list[Group] = []
    for group in groups:
        if group.ranks == ranks:
            group = replace(group, raced=speeds.get(group.strategy), alone=alone)  # noqa: PLW2901
        elif group.ranks == 1 and alone is not None:
            group = replace(group, alone_on={**group.alone_on, ranks: alone})  # noqa: PLW2901
        found.append(group)
    return found


def _group(key: tuple[str, int, str], runs: list[ComparedRun], target: float | None) -> Group:
    mode, ranks, strategy = key
    results = [run.result for run in runs if run.is_finished and run.result is not None]
    figures = tuple(run_figures(result, None, target) for result in results)
    return Group(
        strategy,
        ranks,
        mode,
        tuple(runs),
        figures,
        _mean_errors([result.word_errors for result in results]),
        learning_rate=runs[0].record.learning_rate,
    )


def _mean_errors(errors: Sequence[WordErrors | None]) -> WordErrors | None:
    known = [item for item in errors if item is not None]
    if not known or len({item.split for item in known}) > 1:
        return None
    decoded = [item for item in known if item.weights]  # older records lack how they were decoded
    low, high = (Spread.of(getattr(item, name) for item in known) for name in ("low", "high"))
    return WordErrors(
        wer=statistics.fmean(item.wer for item in known),
        low=low.mean if low else None,
        high=high.mean if high else None,
        words=known[0].words,
        insertions=None,
        deletions=None,
        substitutions=None,
        split=known[0].split,
        grammar=known[0].grammar,
        weights=_common([item.weights for item in decoded]),
        chosen_on=decoded[0].chosen_on if len({item.chosen_on for item in decoded}) == 1 else "",
        rescoring=_common([item.rescoring for item in decoded]),
        utterances=UtteranceErrors.join([item.utterances for item in known]),
    )


def _common(texts: Sequence[str]) -> str:
    """Return the common text of seeds, or all their texts, so that groups with other mixtures differ."""
    return texts[0] if len(set(texts)) == 1 else " or ".join(sorted(texts))
