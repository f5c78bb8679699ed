"""Read JSON files that may be missing, damaged or odd; problems are collected as lines, never raised."""

from __future__ import annotations

import fnmatch
import math
import os
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.json_input import parse_json

#: Version of the records of experiments: sweep.json, compare.json and so on.
RECORD_VERSION = 1
#: Longest text read from a file if a word or two are expected.
_LONGEST_WORDS = 60


def read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None after appending what is wrong with it to `problems`."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name}: missing")
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
    except ValueError:
        problems.append(f"{path.name}: not valid JSON")
    else:
        if isinstance(value, dict):
            return value
        problems.append(f"{path.name}: not a JSON object")
    return None


def note_damaged_lines(name: str, number: int, problems: list[str]) -> None:
    """Append to `problems` how many damaged lines of a file were skipped, if any.

    Args:
        name: name of the file in problems.
    """
    if number:
        problems.append(f"{name}: {counted(number, 'damaged line')} passed over")


def files_of(folder: Path, pattern: str, problems: list[str]) -> list[Path]:
    """Return a folder's files whose names match, sorted; none, with a problem, if it cannot be read."""
    try:
        names = [entry.name for entry in os.scandir(folder)]  # Path.glob ignores folders it may not open
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{folder.name}/: cannot be read ({error.strerror})")
        return []
    return [folder / name for name in sorted(fnmatch.filter(names, pattern))]


def check_beside(path: Path, name: Any) -> None:
    """Raise ConfigError unless `name` can be the name of a folder beside the file `path`."""
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name or "\\" in name:
        raise ConfigError(f"{path}: {name!r} is not the name of a folder beside it; correct the file")


def number(record: dict[str, Any], key: str) -> float | None:
    """Return the finite number at `key`, or None if there is none."""
    return finite(record.get(key))


def finite(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:  # JSON's integers have no bound
        return None
    return converted if math.isfinite(converted) else None


def amount(record: dict[str, Any], key: str) -> float | None:
    """Return the finite, non-negative number at `key`, or None if there is none."""
    value = number(record, key)
    return None if value is None or value < 0 else value


def whole_amount(record: dict[str, Any], key: str) -> int | None:
    """Return the non-negative number at `key` without its fraction, or None if there is none."""
    value = amount(record, key)
    return None if value is None else int(value)


def words(value: Any) -> str:
    """Return a short text on one line without control characters; empty if `value` holds no text.

    Several texts (a list, or the keys of an object) are joined by commas.
    """
    if isinstance(value, (list, dict)):
        return ", ".join(dict.fromkeys(filter(None, map(words, value))))[:_LONGEST_WORDS]
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() else " " for c in value[:_LONGEST_WORDS]).strip()
