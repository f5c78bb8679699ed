"""Shared by the records of all experiments: writing, reading, and refusing other settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_written, record_cannot_be_read, write_text_atomically
from speechdp.json_input import other_version, parse_json
from speechdp.parallel.run_files import change_text, difference
from speechdp.report.runs.records import RECORD_VERSION

#: States of a run or job.
STATES = PENDING, COMPLETE, FAILED = "pending", "complete", "failed"
#: The setting whose value is a checksum.
_CHECKSUM = "data"


def write_record_file(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write the record of an experiment.  Raises RunError (disk)."""
    write_json(path, {"format": f"speechdp-{kind}", "version": RECORD_VERSION, **content})


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, and make its folder.  Raises RunError (disk)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise RunError(cannot_be_written(path, error)) from error


def delete_file(path: Path) -> None:
    """Delete a file, if it exists.  Raises RunError (disk)."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(cannot_be_written(path, error)) from error


@contextmanager
def reading(path: Path, then: str) -> Iterator[None]:
    """Turn errors in the block into the message that a record cannot be read or is damaged.

    Args:
        then: what the user can do.

    Raises:
        ConfigError: the block failed.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(record_cannot_be_read(path, error, then)) from error


def check_format(content: Mapping[str, Any], kind: str) -> None:
    """Refuse a record of another kind or version; for files that can be made again.

    Raises:
        ValueError: another kind or version; or another error that `reading` handles.
    """
    if content["format"] != f"speechdp-{kind}" or content["version"] != RECORD_VERSION:
        raise ValueError(f"format {content['format']!r}, version {content['version']!r}")


def read_record_file(path: Path, kind: str) -> dict[str, Any]:
    """Return the content that `write_record_file` wrote.

    Raises:
        ConfigError: the record has an unknown version.
        OSError, ValueError, KeyError, TypeError: it cannot be read, is damaged, or is of another kind.
    """
    content = dict(parse_json(path.read_text(encoding="utf-8")))
    if (of := content.get("format", f"speechdp-{kind}")) != f"speechdp-{kind}":
        raise ValueError(f"format {of!r}")
    if what := other_version(content, RECORD_VERSION):
        raise ConfigError(f"{path}: {what}")
    return content


def refuse_others(
    path: Path,
    before: Mapping[str, Any],
    settings: Mapping[str, Any],
    named: Callable[[str], str] = str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Refuse to continue work that was begun with other settings.

    Args:
        path: file with the earlier settings.
        named: formats the name of a setting that differs.
        defaults: defaults of settings, or of parts of them, that an earlier version did not have.

    Raises:
        ConfigError: the settings differ; the message names the first difference.
    """
    if what := first_difference(before, settings, named, defaults):
        raise ConfigError(
            f"{path}: was started with other options{what}; choose another folder, or --overwrite"
        )


def first_difference(
    before: Mapping[str, Any],
    settings: Mapping[str, Any],
    named: Callable[[str], str] = str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the first setting that differs from the earlier ones, for a message; "": none.

    Args: as in `refuse_others`.
    """
    now = json.loads(json.dumps(settings))
    for key in sorted({*before, *now}):
        was, given = (
            _whole(values.get(key, defaults.get(key)), defaults.get(key)) for values in (before, now)
        )
        if was != given:
            return _change_text(named(key).replace("_", " "), was, given)
    return ""


def _change_text(name: str, was: Any, given: Any) -> str:
    """Return the name of a setting that differs, with both values in brackets if these are informative."""
    if name == _CHECKSUM:
        return " (on other data)"
    if isinstance(was, dict) or isinstance(given, dict):
        return difference(was, given if isinstance(given, dict) else None) or f" ({name})"
    if isinstance(was, list) and isinstance(given, list):
        gone, new = ([str(x) for x in one if x not in other] for one, other in ((was, given), (given, was)))
        changes = [f"{word} {', '.join(of)}" for word, of in (("without", gone), ("with", new)) if of]
        return f" ({name}: now {' and '.join(changes) or 'in another order'})"
    return f" ({name} {change_text(was, given)})"


def _whole(value: Any, default: Any) -> Any:
    """Return a setting, with defaults for the parts that it lacks."""
    return {**default, **value} if isinstance(value, dict) and isinstance(default, dict) else value
