"""Decide which runs can be compared: by the data they were evaluated on, and by the work they did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speechdp.report.runs.records import words
from speechdp.report.runs.results import RunResult


@dataclass(frozen=True)
class Fact:
    """A fact besides the model on which a score depends.

    Attributes:
        value: value that is compared between runs.
        text: text for readers; different values may have the same text.
    """

    value: str
    text: str


@dataclass(frozen=True)
class Alike:
    """Runs whose scores can be compared, and runs whose scores cannot be compared with theirs.

    Attributes:
        runs: runs evaluated on the same data, in the order given.
        others: the other runs, each with what differs, e.g. `data: b instead of a`.
    """

    runs: tuple[RunResult, ...] = ()
    others: tuple[tuple[RunResult, str], ...] = ()

    def has(self, run: RunResult) -> bool:
        """Return whether a run is one of those that can be compared."""
        return any(run is one for one in self.runs)


def judged_alike(runs: Iterable[RunResult]) -> Alike:
    """Select the runs that were evaluated on the same data, split and classes, from runs of one task.

    The reference is the first run that finished with a score, else the first run.  Facts that a run did not
    record, as older runs did not, exclude nothing.
    """
    runs = list(runs)
    known: dict[str, Fact] = {}
    differs: dict[int, str] = {}
    for run in sorted(runs, key=lambda run: not _has_result(run)):
        facts = _judged_on(run)
        unlike = [
            _difference(name, fact, known[name])
            for name, fact in facts.items()
            if name in known and known[name].value != fact.value
        ]
        if unlike:
            differs[id(run)] = "; ".join(unlike)
        else:
            known = {**facts, **known}
    return Alike(
        tuple(run for run in runs if id(run) not in differs),
        tuple((run, differs[id(run)]) for run in runs if id(run) in differs),
    )


def baseline_of(run: RunResult, runs: Sequence[RunResult]) -> RunResult | None:
    """Return the run that a speed-up is measured against: `one-rank`, else the first run of size 1.

    Only a timed run with the same work counts: the same task, data and model size, as far as both recorded
    them.
    """
    named = [one for one in runs if one.is_baseline]
    single = [one for one in runs if one.size == 1]
    timed = (one for one in named + single if one.timing is not None)
    return next((one for one in timed if _does_same_work(run, one)), None)


def _has_result(run: RunResult) -> bool:
    return run.completed and any(line.score is not None for line in run.evaluations)


def _judged_on(run: RunResult) -> dict[str, Fact]:
    """Return the recorded facts besides the model on which a run's score depends, by name."""
    checksum, path = words(run.setting("data", "checksum")), words(run.setting("data", "path"))
    split, number = words(run.setting("options", "held_out")), run.setting("num_classes")
    classes = str(number) if isinstance(number, int) else ""
    found = {
        "data": Fact(checksum, path or checksum[:8]),
        "held-out split": Fact(split, split),
        "number of classes": Fact(classes, classes),
    }
    return {name: fact for name, fact in found.items() if fact.value}


def _difference(name: str, own: Fact, other: Fact) -> str:
    if own.text == other.text:
        return f"{name}: another state of {own.text}"
    return f"{name}: {own.text} instead of {other.text}"


def _does_same_work(run: RunResult, other: RunResult) -> bool:
    """Return whether both runs compute as much for a frame, as far as recorded."""
    if not run.settings or not other.settings:
        return True
    if run.kind != other.kind:
        return False
    return all(
        run.setting(*keys) in (None, other.setting(*keys)) or other.setting(*keys) is None
        for keys in (("task",), ("data", "checksum"), ("num_parameters",))
    )
