"""compare.json: which runs a comparison consists of and how far it has come (docs/compare.md)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speechdp.experiments.compare.plan import PlannedRun
from speechdp.experiments.record import PENDING, reading, refuse_others, write_record_file
from speechdp.json_input import parse_json
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.records import check_beside

FILE_NAME = "compare.json"


@dataclass(frozen=True)
class RunRecord:
    """A run as compare.json lists it.

    Attributes:
        folder: name of its folder beside compare.json; None: not begun.
        state: pending, complete or failed.
        message: why it failed.
        wall_s: how long training, decoding and start took; None: it was not run by the last command.
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

    @classmethod
    def of(cls, run: PlannedRun) -> RunRecord:
        """Return the record of a run that has not begun."""
        return cls(run.strategy, run.ranks, run.seed, run.mode, run.epochs)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunRecord:
        """Return what `to_json` gave, or an earlier version, or a later one with more in it."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{**known, "strategy": StrategyChoice(str(values["strategy"]))})

    def to_json(self) -> dict[str, Any]:
        """Return what stands in compare.json; the strategy as it was given."""
        return {**vars(self), "strategy": self.strategy.text}

    @property
    def planned(self) -> PlannedRun:
        """What is to be trained."""
        return PlannedRun(self.strategy, self.ranks, self.seed, self.mode, self.epochs)


@dataclass(frozen=True)
class CompareRecord:
    """The content of compare.json.

    Attributes:
        settings: what all runs share: data, options, batch; another comparison in the folder has others.
        runs: in the order they are trained in.
        metric: what runs of a script are judged by, as for `--metric`; "": what they log last.
        failed_races: why, by the number of ranks.
    """

    settings: dict[str, Any]
    runs: tuple[RunRecord, ...] = ()
    completed: bool = False
    metric: str = ""
    failed_races: dict[str, str] = field(default_factory=dict)

    def with_run(self, index: int, **changes: Any) -> CompareRecord:
        """Return the record with some fields of run `index` changed."""
        runs = list(self.runs)
        runs[index] = replace(runs[index], **changes)
        return replace(self, runs=tuple(runs))


def write_record(out: Path, record: CompareRecord) -> None:
    """Write OUT/compare.json.  Raises RunError (disk)."""
    content = {
        "settings": record.settings,
        "runs": [run.to_json() for run in record.runs],
        "completed": record.completed,
        **({"metric": record.metric} if record.metric else {}),
        **({"failed_races": record.failed_races} if record.failed_races else {}),
    }
    write_record_file(out / FILE_NAME, "compare", content)


def read_record(out: Path) -> CompareRecord:
    """Read OUT/compare.json.

    Raises:
        ConfigError: it cannot be read, is damaged, or names a folder elsewhere.
    """
    path = out / FILE_NAME
    with reading(path, "give the command of the comparison again"):
        content = parse_json(path.read_text(encoding="utf-8"))
        runs = tuple(RunRecord.from_json(run) for run in content["runs"])
        settings, completed = dict(content["settings"]), bool(content["completed"])
        metric = str(content.get("metric", ""))
        failed_races = {str(ranks): str(why) for ranks, why in content.get("failed_races", {}).items()}
    for run in runs:
        if run.folder is not None:
            check_beside(path, run.folder)
    return CompareRecord(settings, runs, completed, metric, failed_races)


def check_same(out: Path, settings: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse to go on in a folder whose comparison was begun with other settings.

    Args:
        defaults: of options that the comparison's record lacks: an earlier version did not have them.

    Raises:
        ConfigError: they differ; the message names the first difference.
    """
    if (out / FILE_NAME).is_file():
        refuse_others(out / FILE_NAME, read_record(out).settings, settings, defaults=defaults)
