"""Read a comparison's runs and sum them up over seeds: one group for each strategy, ranks and mode."""

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

#: Share of the runs at equal frames that reach the target, where none is given: a strategy that fails
#: altogether must not make the target one that all others reach at once.
TARGET_SHARE = 0.75


@dataclass(frozen=True)
class ComparedRun:
    """A run of a comparison: what was planned, and what its folder holds (None: no folder)."""

    record: RunRecord
    result: RunResult | None

    @property
    def is_finished(self) -> bool:
        """Whether it counts."""
        return self.record.state == COMPLETE and self.result is not None and self.result.completed


@dataclass(frozen=True)
class Comparison:
    """A comparison as it was found.

    Attributes:
        trials: runs that tried learning rates.
        failed_races: why, by the number of ranks.
    """

    path: Path
    settings: dict[str, Any]
    runs: tuple[ComparedRun, ...]
    races: ShownRaces = field(default_factory=ShownRaces)
    failed_races: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[ComparedRun, ...] = ()


@dataclass(frozen=True)
class Spread:
    """Figures of several seeds."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of what is known; None where nothing is."""
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
        runs: one a seed, unfinished and failed ones included.
        figures: of the finished ones.
        word_errors: means of rate and interval over seeds; None also where those were decoded on different
            splits.
        wer_over_lowest: its word error rate less the lowest on as many ranks in the same mode; None where
            errors are not known by utterance, or they were not decoded alike.
        raced: its speed by the race on as many ranks; None: it took no part, or there was none.
        alone: that of one rank in the same race.
        alone_on: of one rank, its speeds by the races in which it took part, by their number of ranks.
        learning_rate: of its runs, where several were tried; None: what the training has by itself.
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
        """Return a figure of the finished runs; None where none has it."""
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
        """Exchanges by age, of all ranks and seeds together."""
        return sum_of_counts(row.ages for row in self.figures)

    @property
    def unjudged(self) -> tuple[ComparedRun, ...]:
        """Finished runs whose last score is no number, where others of the group have one."""
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
        """The runs that count."""
        return tuple(run for run in self.runs if run.is_finished)

    @property
    def results(self) -> list[RunResult]:
        """What the folders of the finished runs hold."""
        return [run.result for run in self.finished if run.result is not None]

    @property
    def num_judged(self) -> int:
        """Number of the finished runs that have a score, or of all of them where none has."""
        return len(self.scores.values) if self.scores else len(self.finished)

    @property
    def score(self) -> float | None:
        """Mean final held-out score."""
        return None if self.scores is None else self.scores.mean

    @property
    def epochs(self) -> Spread | None:
        """Epochs of the finished runs; None of a script, which trains as long as it does."""
        return Spread.of(run.record.epochs for run in self.finished)

    @property
    def failures(self) -> list[ComparedRun]:
        """The runs that failed."""
        return [run for run in self.runs if run.record.state == FAILED]


def read_comparison(out: Path, metric: str = "") -> Comparison:
    """Read OUT/compare.json and the runs it names.

    Args:
        metric: what runs of a script are judged by; "": what compare.json says, else what they log last.

    Raises:
        ConfigError: compare.json is damaged, or `metric` is none.
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
    """Read a run; that of a script which has failed before its run began is one of a script as well."""
    # Of unfinished runs no figures are shown.
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
    """Sum the runs up, in the order of modes, ranks, and strategies as they were given."""
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
    """Return the runs that tried learning rates, each by itself, in the order they were trained in."""
    return [
        _group((run.record.mode, run.record.ranks, run.record.strategy.text), [run], target)
        for run in comparison.trials
    ]


def compared_by_race(groups: Sequence[Group]) -> dict[int, dict[str, str]]:
    """Return the labels of what has finished on several ranks, by their number and the strategies' texts."""
    found: dict[int, dict[str, str]] = {}
    for group in groups:
        if group.ranks > 1 and group.figures:
            found.setdefault(group.ranks, {})[group.strategy] = group.label
    return found


def with_all_seeds(groups: Sequence[Group]) -> list[Group]:
    """Return the groups no seed of which came to nothing, all where there are none.

    Of the others it is not known that they keep the accuracy: the seeds that are left may be the lucky ones.
    """
    return [group for group in groups if not (group.unjudged or group.failures)] or list(groups)


def _with_differences(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with what their word error rates are above the lowest in their part of the table.

    The lowest is that of a group with all seeds, as in the choice.
    """
    found: list[Group] = []
    for group in groups:
        beside = [other for other in groups if (other.ranks, other.mode) == (group.ranks, group.mode)]
        found.append(replace(group, wer_over_lowest=over_lowest(group, beside, with_all_seeds(beside))))
    return found


def _with_race(groups: list[Group], ranks: int, speeds: Mapping[str, RacedSpeed]) -> list[Group]:
    """Return the groups with the speeds of the race on so many ranks."""
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
    decoded = [item for item in known if item.weights]  # of the others it was not recorded how
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
    """Return what seeds have in common, or what each has: groups that mix otherwise are not alike."""
    return texts[0] if len(set(texts)) == 1 else " or ".join(sorted(texts))
