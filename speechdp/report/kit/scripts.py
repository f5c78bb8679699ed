"""Cautions on runs of a user's script: its seed, its metric's direction, its versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from speechdp.report.kit.metric_names import terms_of
from speechdp.report.runs.results import SCRIPT, RunResult
from speechdp.report.runs.script_metric import LoggedMetric


def wrong_way(runs: Sequence[RunResult], again: str = "") -> str:
    """Return a caution if a script's metric got worse in all runs but its direction is a guess; else "".

    Args:
        again: where the command must be repeated to judge by the other direction, e.g. ` in another folder`.
    """
    metric = terms_of(runs).metric
    if not (isinstance(metric, LoggedMetric) and metric.is_guessed):
        return ""
    learnt = [scores for run in runs if len(scores := _scores(run)) > 1]
    if not learnt or any(each[-1] >= each[0] for each in learnt):
        return ""
    return (
        f"{metric.name} grew in every run, but less is taken to be better, because its name does not show "
        f"which is: if more is better, give --metric {metric.name}:max{again}."
    )


def distinct_trainings(runs: Sequence[RunResult]) -> int:
    """Return how many runs of one setting differ: all runs of a script that ignores its seed count as one.

    Runs with whole scores only (such as an accuracy of 1) always count, because such scores may coincide.
    """
    broken = [run for run in runs if run.kind is SCRIPT and any(map(_is_broken, _scores(run)))]
    curves = {tuple((each.step, each.score) for each in run.evaluations) for run in broken}
    return len(runs) - len(broken) + len(curves)


def _scores(run: RunResult) -> list[float]:
    return [each.score for each in run.evaluations if each.score is not None]


def _is_broken(score: float) -> bool:
    return not score.is_integer()


def without_seed(settings: Iterable[Sequence[RunResult]]) -> str:
    """Return a caution if seeds made no difference to a script; "" if they did, or if there was only one.

    Args:
        settings: the runs of each setting, one per seed.
    """
    if all(distinct_trainings(runs) == len(runs) for runs in settings):
        return ""
    return (
        "Runs with different seeds logged exactly the same, so they count as one: the script has to take its "
        "seed from SPEECHDP_SEED, or from {seed} in its arguments."
    )


def several_versions(runs: Sequence[tuple[RunResult, str]]) -> str:
    """Name the runs made with another version of the script than most; "" if all used one version.

    Args:
        runs: runs and their labels.
    """
    versions = [(_versions(run), label, run) for run, label in runs]
    known = [one for one in versions if one[0]]  # older runs did not record it
    counts = Counter(version for version, _, _ in known)
    if not known or (len(counts) == 1 and len(known[0][0]) == 1):
        return ""
    most = max(counts, key=lambda version: (len(version) == 1, counts[version]))
    others = [label for version, label, _ in known if version != most or len(version) > 1]
    script = Path(str(known[0][2].setting("script"))).name
    return (
        f"{script}, or a module of its folder, was changed between runs, or while one was interrupted, so "
        f"they may not be comparable; made by another version than the rest: {', '.join(others)}. Use "
        "another folder to compare runs of one version."
    )


def _versions(run: RunResult) -> tuple[str, ...]:
    found = run.setting("script_versions")
    return tuple(map(str, found)) if isinstance(found, list) else ()
