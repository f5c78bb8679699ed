"""What the reader of runs of a user's script must know: its seed, its metric's direction, its versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from speechdp.report.kit.metric_names import terms_of
from speechdp.report.runs.results import SCRIPT, RunResult
from speechdp.report.runs.script_metric import LoggedMetric


def wrong_way(runs: Sequence[RunResult], again: str = "") -> str:
    """Say that a script's metric went the worse way in all runs, where which way is better was only guessed.

    Args:
        again: where a command has to be given to judge by the other direction, ` in another folder`.
    """
    metric = terms_of(runs).metric
    if not (isinstance(metric, LoggedMetric) and metric.is_guessed):
        return ""
    learnt = [scores for run in runs if len(scores := _scores(run)) > 1]
    if not learnt or any(each[-1] >= each[0] for each in learnt):
        return ""
    return (
        f"{metric.name} grew in every run, and is taken to be better the smaller it is, as its name does not "
        f"tell: if more is better, give --metric {metric.name}:max{again}."
    )


def distinct_trainings(runs: Sequence[RunResult]) -> int:
    """Return how many runs of one setting differ: those of a script that takes no seed are all one.

    Figures that are whole, as an accuracy of 1 is, may be alike without that.
    """
    told = [run for run in runs if run.kind is SCRIPT and any(map(_is_broken, _scores(run)))]
    curves = {tuple((each.step, each.score) for each in run.evaluations) for run in told}
    return len(runs) - len(told) + len(curves)


def _scores(run: RunResult) -> list[float]:
    return [each.score for each in run.evaluations if each.score is not None]


def _is_broken(score: float) -> bool:
    return not score.is_integer()


def without_seed(settings: Iterable[Sequence[RunResult]]) -> str:
    """Say that seeds have made no difference to a script; "" where they did, or there was one.

    Args:
        settings: the runs of each, one a seed.
    """
    if all(distinct_trainings(runs) == len(runs) for runs in settings):
        return ""
    return (
        "Runs with different seeds logged exactly the same, so they count as one: the script has to take its "
        "seed from SPEECHDP_SEED, or from {seed} in its arguments."
    )


def several_versions(runs: Sequence[tuple[RunResult, str]]) -> str:
    """Say which runs were made by another version of a script than most; "" where all are of one.

    Args:
        runs: each with its label.
    """
    versions = [(_versions(run), label, run) for run, label in runs]
    known = [one for one in versions if one[0]]  # older runs did not note it
    counts = Counter(version for version, _, _ in known)
    if not known or (len(counts) == 1 and len(known[0][0]) == 1):
        return ""
    most = max(counts, key=lambda version: (len(version) == 1, counts[version]))
    others = [label for version, label, _ in known if version != most or len(version) > 1]
    script = Path(str(known[0][2].setting("script"))).name
    return (
        f"{script}, or a module of its folder, was changed between runs, or while one was interrupted, so "
        f"they may not be comparable; otherwise than the rest were made: {', '.join(others)}. Begin in "
        "another folder to compare one version."
    )


def _versions(run: RunResult) -> tuple[str, ...]:
    found = run.setting("script_versions")
    return tuple(map(str, found)) if isinstance(found, list) else ()
