"""compare.json: which runs a comparison consists of and how far it has come (docs/compare.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from speechdp.errors import ConfigError, RunError
from speechdp.experiments.compare.plan import PlannedRun
from speechdp.files import cannot_be_written, write_text_atomically
from speechdp.json_input import parse_json

FILE_NAME = "compare.json"
COMPARE_FORMAT = "speechdp-compare"
COMPARE_VERSION = 1
PENDING, COMPLETE, FAILED = "pending", "complete", "failed"


@dataclass(frozen=True)
class RunRecord:
    """A run as compare.json lists it.

    Attributes:
        folder: name of its folder beside compare.json; None: not begun.
        state: pending, complete or failed.
        message: why it failed.
        wall_s: how long training, decoding and start took; None: it was not run by the last command.
    """

    strategy: str
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
    """

    settings: dict[str, Any]
    runs: tuple[RunRecord, ...] = ()
    completed: bool = False
    metric: str = ""

    def with_run(self, index: int, **changes: Any) -> CompareRecord:
        """Return the record with some fields of run `index` changed."""
        runs = list(self.runs)
        runs[index] = replace(runs[index], **changes)
        return replace(self, runs=tuple(runs))


def write_record(out: Path, record: CompareRecord) -> None:
    """Write OUT/compare.json; a reader sees the old one or the new one.  Raises RunError (disk)."""
    content = {
        "format": COMPARE_FORMAT,
        "version": COMPARE_VERSION,
        "settings": record.settings,
        "runs": [asdict(run) for run in record.runs],
        "completed": record.completed,
        **({"metric": record.metric} if record.metric else {}),
    }
    path = out / FILE_NAME
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise RunError(cannot_be_written(path, error)) from error


def read_record(out: Path) -> CompareRecord:
    """Read OUT/compare.json.

    Raises:
        ConfigError: it cannot be read, is damaged, or names a folder elsewhere.
    """
    path = out / FILE_NAME
    known = set(RunRecord.__dataclass_fields__)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        runs = tuple(
            RunRecord(**{key: value for key, value in run.items() if key in known}) for run in content["runs"]
        )
        settings, completed = dict(content["settings"]), bool(content["completed"])
        metric = str(content.get("metric", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); give the command of the comparison again"
        ) from error
    for run in runs:
        name = run.folder
        if name is not None and (not isinstance(name, str) or name in ("", "..") or Path(name).name != name):
            raise ConfigError(f"{path}: {name!r} is not the name of a folder beside it; mend the file")
    return CompareRecord(settings, runs, completed, metric)


def check_same(out: Path, settings: dict[str, Any]) -> None:
    """Refuse to go on in a folder whose comparison was begun with other settings.

    Raises:
        ConfigError: they differ; the message names the first difference.
    """
    if not (out / FILE_NAME).is_file():
        return
    refuse_others(out / FILE_NAME, read_record(out).settings, settings)


def refuse_others(path: Path, before: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to go on with what was begun with other settings.

    Args:
        path: the file that holds those before.

    Raises:
        ConfigError: they differ; the message names the first difference.
    """
    now = json.loads(json.dumps(settings))
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise ConfigError(f"{path}: was begun with another {key}; choose another folder, or --overwrite")
