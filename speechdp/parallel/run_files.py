"""The files of a run that rank 0 writes: run.json, metrics.jsonl, completed.json (docs/run-directory.md)."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

from speechdp import remedies
from speechdp.errors import ConfigError, RunError
from speechdp.files import (
    cannot_be_read,
    cannot_be_written,
    remove_left_over,
    sync,
    sync_name,
    write_text_atomically,
)
from speechdp.json_input import other_version, parse_json

RUN_FORMAT = "speechdp-run"
RUN_VERSION = 1
#: Folder of a run with copies of the files beside the shards of its data: settings, classes, lexicon,
#: language model.
TRAINED_ON = "trained_on"
#: What the latest decoding with --tune-on chose for a run, and the options that weight scores: their values
#: belong together, and mean nothing in other combinations.
TUNED_NAME = "tuned.json"
WEIGHTS = ("acoustic_scale", "prior_scale", "insertion_log_prob", "lm_scale", "silence_probability")
#: The trained model.
MODEL_NAME = "model.safetensors"
#: Files of a run that only its owner writes, each replaced as a whole.
_OF_OWNER = ("run.json", "starts.jsonl", "metrics.jsonl", "timing.json", "completed.json", MODEL_NAME)
#: Key in lines of metrics.jsonl that evaluate the mean of so many epochs' models, not the step's own model.
AVERAGED_EPOCHS = "averaged_epochs"
#: Written when a script's job has ended well, including what follows its training.
SCRIPT_ENDED = "script-ended.json"


@dataclass(frozen=True)
class Metrics:
    """One evaluation: a line of metrics.jsonl.

    Attributes:
        epoch: epochs done.
        step: steps done.
        frames: frames trained on, all ranks together.
        time_s: training time without evaluations and checkpoints, s.
        train_loss: mean over the epoch's frames.
        learning_rate: at the end of the epoch.
        held_out: the task's metrics by key, `heldout_KEY` in the file; a metric that no frame counts for is
            absent.
        heldout_frames: frames scored.
        replica_distance: largest over ranks of |w_i - w| / |w|, w the parameters evaluated.
        period: current averaging period, if the strategy changes it.
        frames_per_s: rate of all ranks since the previous evaluation, or since this start; not in the file,
            because it differs between repeated runs.
    """

    epoch: float
    step: int
    frames: int
    time_s: float
    train_loss: float
    learning_rate: float
    held_out: dict[str, float]
    heldout_frames: int
    replica_distance: float = 0.0
    period: str | None = None
    frames_per_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the line."""
        values = asdict(self)
        del values["frames_per_s"]
        held_out = {f"heldout_{key}": value for key, value in values.pop("held_out").items()}
        if self.period is None:
            del values["period"]
        return {**values, **held_out}


@dataclass(frozen=True)
class DataOfRun:
    """The data a run was trained on, as recorded in run.json."""

    path: Path
    checksum: str


class RunDirectory:
    """A run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = path / "metrics.jsonl"
        self._completed = path / "completed.json"
        self._script_ended = path / SCRIPT_ENDED

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended well."""
        return self._completed.is_file()

    def steps_done(self) -> float:
        """Return the last step of a complete run; inf: its completed.json does not record it."""
        return _of(self._completed.read_text(encoding="utf-8"), "step")

    @property
    def has_model(self) -> bool:
        """Whether the trained model is there."""
        return (self.path / MODEL_NAME).is_file()

    @property
    def script_has_ended_well(self) -> bool:
        """Whether the script that made the run has done all of its work, including what follows training."""
        return self.is_complete and self._script_ended.is_file()

    def mark_script_ended(self, wall_s: float) -> None:
        """Write script-ended.json: the script's job ended with exit code 0.  Raises RunError (disk).

        Args:
            wall_s: wall-clock time of the job, s.
        """
        content = {"exit_code": 0, "ended": utc_now(), "wall_s": round(wall_s, 3)}
        with _disk_errors(self._script_ended):
            write_text_atomically(self._script_ended, json.dumps(content) + "\n")

    @property
    def script_s(self) -> float | None:
        """Wall-clock time of the script's job, s; None: unknown (earlier versions did not write it)."""
        try:
            return float(parse_json(self._script_ended.read_text(encoding="utf-8"))["wall_s"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def forget_end(self) -> None:
        """Delete the records that run and script have ended, and the timing.  Raises RunError (disk)."""
        with _disk_errors(self.path):
            for path in (self._script_ended, self._completed, self.path / "timing.json"):
                path.unlink(missing_ok=True)

    def launch(self) -> str:
        """Return the name of the `speechdp launch` that began the run; "": none, or unknown."""
        return str(self._head().get("launch") or "")

    def id(self) -> str:
        """Return the id of a script's run; "": an earlier version wrote none."""
        return str(self._head().get("id") or "")

    def script_versions(self) -> list[str]:
        """Return the script's checksum at each start that changed it; empty if an earlier version ran it."""
        found = self._head().get("script_versions")
        return [str(one) for one in found] if isinstance(found, list) else []

    def records_option(self, name: str) -> bool:
        """Return whether run.json records an option of training; an earlier version may not have had it.

        Raises:
            RunError: run.json cannot be read.
        """
        with self._reading_record() as record:
            return name in record["options"]

    def recorded_option(self, name: str) -> Any:
        """Return the value that run.json records for an option of training; None if it records none.

        Raises:
            RunError: run.json cannot be read.
        """
        with self._reading_record() as record:
            return dict(record["options"]).get(name)

    @contextmanager
    def _reading_record(self) -> Iterator[dict[str, Any]]:
        """Read run.json; report what the block finds wrong with it in one line, as RunError."""
        path = self.path / "run.json"
        try:
            record = dict(parse_json(path.read_text(encoding="utf-8")))
            if what := other_version(record, RUN_VERSION):
                raise ConfigError(f"{path}: {what}")
            yield record
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"{path}: cannot be read ({error}); {remedies.starting_over(self.path)}"
            ) from error
        except OSError as error:
            raise RunError(cannot_be_read(path, error, remedies.resuming())) from error

    def _head(self) -> dict[str, Any]:
        """Return run.json; empty if it is missing or cannot be read."""
        try:
            head = parse_json((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return head if isinstance(head, dict) else {}

    def renew(self, facts: dict[str, Any]) -> None:
        """Update run.json when a script's run continues.  Raises RunError (disk)."""
        path = self.path / "run.json"
        with _disk_errors(path):
            write_text_atomically(path, json.dumps({**self._head(), **facts}, indent=2) + "\n")

    @property
    def is_begun(self) -> bool:
        """Whether the folder holds a run already."""
        return (self.path / "run.json").is_file()

    def data(self) -> DataOfRun:
        """Return the data it was trained on.  Raises RunError if run.json does not record it."""
        try:
            data = self._head()["data"]
            return DataOfRun(Path(data["path"]), str(data["checksum"]))
        except (LookupError, TypeError) as error:
            raise RunError(
                f"{self.path / 'run.json'}: does not say which data it was trained on; give a run of "
                "speechdp train"
            ) from error

    def begin(self, facts: dict[str, Any]) -> None:
        """Write run.json.  Raises RunError where the folder cannot be written."""
        head = {"format": RUN_FORMAT, "version": RUN_VERSION, "started": utc_now(), **facts}
        with _disk_errors(self.path / "run.json"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.path / "run.json", json.dumps(head, indent=2) + "\n")

    def clear(self) -> None:
        """Delete all records of a run, run.json last; other files stay.  Raises RunError (disk)."""
        with _disk_errors(self.path):
            if (self.path / "timeline").is_dir():
                shutil.rmtree(self.path / "timeline")
            self.forget_end()
            for name in ("metrics.jsonl", "timing.json", "run.json"):
                (self.path / name).unlink(missing_ok=True)

    def check_same(
        self,
        fingerprint: str,
        data_checksum: str,
        options: dict[str, Any] | None = None,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        """Refuse to continue a run that began with other options or data.

        Args:
            fingerprint: fingerprint of the options given, which must be the run's.
            data_checksum: checksum of the data given.
            options: the options given, as in run.json, to name those that differ.
            defaults: defaults of options that run.json lacks because an earlier version did not have them.

        Raises:
            ConfigError: other options or data.
            RunError: run.json cannot be read.
        """
        path = self.path / "run.json"
        with self._reading_record() as record:
            begun, data = record["fingerprint"], record["data"]
            same_data = data["checksum"] == data_checksum
        if begun != fingerprint:
            differs = difference(record.get("options"), options, defaults or {})
            raise ConfigError(
                f"{path}: the run was begun with other options{differs}; "
                f"{remedies.resuming_as_begun()}, or choose another folder"
            )
        if not same_data:
            raise ConfigError(
                f"{path}: the run was begun on other data ({data['path']}/data.json had another checksum); "
                "resume it with that data, or choose another folder"
            )

    def resize(self, facts: dict[str, Any]) -> None:
        """Update what run.json says about the ranks when another number continues.  Raises RunError (disk).

        Args:
            facts: `size`, `hosts` and whatever else depends on them.
        """
        path = self.path / "run.json"
        with _disk_errors(path):
            head = parse_json(path.read_text(encoding="utf-8"))
            if head["size"] == facts["size"]:
                return
            sizes = [*head.get("earlier_sizes", []), head["size"]]
            write_text_atomically(
                path, json.dumps({**head, **facts, "earlier_sizes": sizes}, indent=2) + "\n"
            )

    def add_start(self, facts: dict[str, Any]) -> None:
        """Append a line to starts.jsonl: ranks start or resume.  Raises RunError on a full disk.

        Also removes the temporary files of an earlier start that was killed while it wrote.
        """
        self._remove_half_written()
        path = self.path / "starts.jsonl"
        with _disk_errors(path):
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            # Leave a line that a full disk cut off as it is; start the next one on a new line.
            whole = text if text.endswith("\n") or not text else f"{text}\n"
            write_text_atomically(path, whole + json.dumps({"started": utc_now(), **facts}) + "\n")
        remove_left_over(path)

    def _remove_half_written(self) -> None:
        """Remove temporary files that `atomic_path` left of files that only the folder's owner writes.

        Other files, such as owner.json and wer-test.json, may be being written by a command right now:
        `remove_left_over` removes these when they are old.
        """
        for pattern in (*(f".{name}.*.tmp" for name in _OF_OWNER), f"{TRAINED_ON}/.*.tmp"):
            with suppress(OSError):  # it takes room, and no more
                for path in self.path.glob(pattern):
                    path.unlink()

    def truncate_metrics(self, step: int, epochs_done: int | None = None) -> None:
        """Drop evaluations after a checkpoint: the resumed run makes them again.  Raises RunError (disk).

        Args:
            step: step of the checkpoint.
            epochs_done: epochs done by then; asynchronous ranks may save at the last step before they
                evaluate there.  None: lines have no epoch.
        """
        if not self._metrics.is_file():
            return
        with _disk_errors(self._metrics):
            text = self._metrics.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if _of(line, "step") <= step]
            if epochs_done is not None:  # a paused run was evaluated within the next epoch
                lines = [line for line in lines if _of(line, "epoch") < epochs_done + 1]
                # A resumed run reaches its end again, and evaluates the mean there.
                lines = [line for line in lines if not _is_of_mean(line)]
            write_text_atomically(self._metrics, "".join(f"{line}\n" for line in lines))

    @property
    def evaluated_step(self) -> int:
        """Last step that metrics.jsonl has an evaluation of; 0: there is none."""
        steps = [_of(line, "step") for line in self._evaluations()]
        return int(max((step for step in steps if step < math.inf), default=0))

    def has_evaluation(self, step: int, frames: int) -> bool:
        """Whether metrics.jsonl has an evaluation after these steps and frames.  Raises RunError."""
        at = (step, frames)
        return any((_of(line, "step"), _of(line, "frames")) == at for line in self._evaluations())

    def values(self, key: str) -> list[tuple[float, float]]:
        """Return (epochs done, value) of the evaluations during training with a finite value of `key`.

        Raises:
            RunError: metrics.jsonl cannot be read.
        """
        lines = [line for line in self._evaluations() if not _is_of_mean(line)]
        pairs = [(_of(line, "epoch"), _of(line, key)) for line in lines]
        return [pair for pair in pairs if all(map(math.isfinite, pair))]

    def _evaluations(self) -> list[str]:
        """Return the lines of metrics.jsonl; empty if there is no such file.  Raises RunError (disk)."""
        if not self._metrics.is_file():
            return []
        with _disk_errors(self._metrics):
            return self._metrics.read_text(encoding="utf-8", errors="replace").splitlines()

    def add_metrics(self, metrics: Metrics) -> None:
        """Append a line to metrics.jsonl and sync it to disk, like the checkpoint that follows.

        Raises:
            RunError: the line cannot be written.
        """
        self.add_values(metrics.to_json())
        self.sync_metrics()

    def sync_metrics(self) -> None:
        """Sync metrics.jsonl to disk, if it exists.  Raises RunError (disk)."""
        if self._metrics.is_file():
            with _disk_errors(self._metrics):
                sync(self._metrics)
            sync_name(self._metrics)

    def add_values(self, values: dict[str, Any]) -> None:
        """Append a line with any values to metrics.jsonl.  Raises RunError on a full disk."""
        with _disk_errors(self._metrics), self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def complete(self, facts: dict[str, Any]) -> None:
        """Write completed.json: the run ended well, whatever exit code a launcher reports."""
        with _disk_errors(self._completed):
            content = {"finished": utc_now(), **facts}
            write_text_atomically(self._completed, json.dumps(content, indent=2) + "\n")

    def complete_again(self) -> None:
        """Write completed.json again unchanged: a launcher ignores a marker from before its start."""
        with _disk_errors(self._completed):
            write_text_atomically(self._completed, self._completed.read_text(encoding="utf-8"))


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(cannot_be_written(path, error, remedies.resuming())) from error


def _of(line: str, name: str) -> float:
    """Return a number of a line of metrics.jsonl."""
    try:
        return float(parse_json(line)[name])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # torn by a crash


def _is_of_mean(line: str) -> bool:
    """Return whether a line of metrics.jsonl evaluates the mean of several epochs' models."""
    return _of(line, AVERAGED_EPOCHS) < math.inf


def utc_now() -> str:
    """Return the time as records have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def difference(
    begun: Any, given: dict[str, Any] | None, defaults: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Name, in parentheses, the options that differ between the recorded and the given ones.

    Returns:
        "" if none is known to differ.

    Example:
        >>> difference({"seed": 1, "epochs": 8}, {"seed": 5, "epochs": 2})
        ' (--seed was 1, is 5; --epochs was 8, is 2)'
    """
    if not isinstance(begun, dict) or given is None:
        return ""
    found = [f"{name} {change_text(was, now)}" for name, was, now in differing(begun, given, defaults)]
    return f" ({'; '.join(found)})" if found else ""


def differing(
    begun: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each option that changed, including those in groups.

    Args:
        defaults: defaults of options that `begun` lacks.
    """
    for name, value in given.items():
        default = defaults.get(name)
        before = begun.get(name, default)
        if isinstance(value, dict) and isinstance(before, dict):
            yield from differing(before, value, default if isinstance(default, dict) else {})
        elif name != "resolved" and before != value:
            yield f"--{name.replace('_', '-')}", before, value


def change_text(before: Any, now: Any) -> str:
    """Describe the change of a setting: `was 1, is 5`."""

    def text(value: Any) -> str:
        if value in (None, "", []):
            return "not given"
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    return f"was {text(before)}, is {text(now)}"
