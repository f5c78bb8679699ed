"""compare.json: the runs of a comparison and its progress (docs/compare.md)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speechdp.experiments.compare.plan import TIME, PlannedRun
from speechdp.experiments.record import (
    COMPLETE,
    PENDING,
    read_record_file,
    reading,
    refuse_others,
    write_record_file,
)
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.records import check_beside

FILE_NAME = "compare.json"
_THEN = "delete it and give the command of the comparison again (its runs are kept), or with --overwrite"


@dataclass(frozen=True)
class RunRecord:
    """A run as compare.json lists it.

    Attributes:
        folder: name of its folder beside compare.json; None: not begun.
        state: pending, complete or failed.
        message: why it failed.
        wall_s: time of start, training and decoding in the last command that ran it, s; None: no command with
            this record has run it.
        learning_rate: as in PlannedRun.
    """

    strategy: StrategyChoice
    ranks: int
    seed: int
    mode: str
    epochs: int | None
    folder: str | None = None
    state: str = PENDING
    message: str = ""
    wall_s: float | None = None
    learning_rate: float | None = None

    @classmethod
    def of(cls, run: PlannedRun) -> RunRecord:
        """Return the record of a run that has not begun."""
        return cls(**vars(run))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunRecord:
        """Return a record from the result of `to_json`, of any version; unknown keys are ignored."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if known.get("learning_rate") is not None:
            known["learning_rate"] = float(known["learning_rate"])
        return cls(**{**known, "strategy": StrategyChoice(str(values["strategy"]))})

    def to_json(self) -> dict[str, Any]:
        """Return the entry for compare.json, with the strategy as given."""
        values = {**vars(self), "strategy": self.strategy.text}
        if self.learning_rate is None:
            del values["learning_rate"]
        return values

    @property
    def planned(self) -> PlannedRun:
        """The run to train."""
        return PlannedRun(self.strategy, self.ranks, self.seed, self.mode, self.epochs, self.learning_rate)

    @property
    def key(self) -> tuple[str, int, int, str, int | None, float | None]:
        """Return the identity of a run; without the epochs at equal time, which follow from other runs."""
        epochs = None if self.mode == TIME else self.epochs
        return self.strategy.text, self.ranks, self.seed, self.mode, epochs, self.learning_rate


@dataclass(frozen=True)
class CompareRecord:
    """The content of compare.json.

    Attributes:
        settings: settings that all runs share: data, options, batch; they identify the comparison.
        runs: runs in training order.
        metric: metric that ranks a script's runs, as in `--metric`; "": the value that they log last.
        failed_races: causes of failure, by number of ranks.
        threads: threads of a rank, the same in all runs; None: recorded by an earlier version.
        trials: runs that try learning rates, from which the rates of `runs` are chosen.
        left_out: finished runs of earlier commands that are not, or not yet, among `runs`; which of them
            belong there is known only when all learning rates have been tried.
    """

    settings: dict[str, Any]
    runs: tuple[RunRecord, ...] = ()
    completed: bool = False
    metric: str = ""
    failed_races: dict[str, str] = field(default_factory=dict)
    threads: int | None = None
    trials: tuple[RunRecord, ...] = ()
    left_out: tuple[RunRecord, ...] = ()

    def with_changed(self, run: RunRecord, **changes: Any) -> CompareRecord:
        """Return the record with some fields changed in one of its runs or trials, found by its key."""
        trials, runs = (
            tuple(replace(one, **changes) if one.key == run.key else one for one in among)
            for among in (self.trials, self.runs)
        )
        return replace(self, trials=trials, runs=runs)


def write_record(out: Path, record: CompareRecord) -> None:
    """Write OUT/compare.json.  Raises RunError (disk)."""
    content = {
        "settings": record.settings,
        "runs": [run.to_json() for run in record.runs],
        "completed": record.completed,
        **({"metric": record.metric} if record.metric else {}),
        **({"failed_races": record.failed_races} if record.failed_races else {}),
        **({} if record.threads is None else {"threads": record.threads}),
        **({"trials": [run.to_json() for run in record.trials]} if record.trials else {}),
        **({"left_out": [run.to_json() for run in record.left_out]} if record.left_out else {}),
    }
    write_record_file(out / FILE_NAME, "compare", content)


def read_record(out: Path) -> CompareRecord:
    """Read OUT/compare.json.

    Raises:
        ConfigError: it cannot be read, is damaged, or names a folder outside OUT.
    """
    path = out / FILE_NAME
    with reading(path, _THEN):
        content = read_record_file(path, "compare")
        runs = tuple(RunRecord.from_json(run) for run in content["runs"])
        trials = tuple(RunRecord.from_json(run) for run in content.get("trials", ()))
        left_out = tuple(RunRecord.from_json(run) for run in content.get("left_out", ()))
        settings, completed = dict(content["settings"]), bool(content["completed"])
        metric = str(content.get("metric", ""))
        failed_races = {str(ranks): str(why) for ranks, why in content.get("failed_races", {}).items()}
        threads = None if content.get("threads") is None else int(content["threads"])
    for run in (*trials, *runs, *left_out):
        if run.folder is not None:
            check_beside(path, run.folder)
    return CompareRecord(settings, runs, completed, metric, failed_races, threads, trials, left_out)


def find_earlier(out: Path, settings: dict[str, Any], defaults: dict[str, Any]) -> CompareRecord | None:
    """Return the record of an earlier command in a folder; None: there is none.

    Args:
        settings: settings that the runs of this command share.
        defaults: defaults of options that an earlier version's record lacks.

    Raises:
        ConfigError: the settings differ (the message names the first difference), or the record is damaged.
    """
    if not (out / FILE_NAME).is_file():
        return None
    earlier = read_record(out)
    refuse_others(out / FILE_NAME, earlier.settings, settings, defaults=defaults)
    return earlier


def threads_before(out: Path) -> int | None:
    """Return the threads of a rank in the finished runs of a folder; None: no such runs, or unknown.

    Raises:
        ConfigError: its record is damaged.
    """
    earlier = read_record(out) if (out / FILE_NAME).is_file() else None
    if earlier is None or all(
        run.state != COMPLETE for run in (*earlier.trials, *earlier.runs, *earlier.left_out)
    ):
        return None
    return earlier.threads
