"""Lines on stderr, and notices of problems that do not end a run, in RUN/notices.txt."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path

FILE_NAME = "notices.txt"
#: Beginning of a line on stderr that does not report a failure.
WARNING = "speechdp: warning: "
_RECORDS = ("run.json", "sweep.json")


def print_message(text: str) -> None:
    """Print a line to stderr."""
    print(f"speechdp: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a line to stderr whose beginning tells `speechdp launch` that no rank has failed."""
    print(f"{WARNING}{text}", file=sys.stderr, flush=True)


def add_notice(folder: Path, text: str) -> bool:
    """Append a line with the current time; return whether it was written.

    False if no run or sweep has begun in the folder, or if writing fails: a notice must not end a run.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        if not any((folder / name).is_file() for name in _RECORDS):  # raises where a network disk is stale
            return False
        with (folder / FILE_NAME).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{now} {text}\n")
    except OSError:
        return False
    return True
