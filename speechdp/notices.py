"""Notices in a folder's notices.txt: what went wrong beside a run and did not end it."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

FILE_NAME = "notices.txt"


def add_notice(folder: Path, text: str) -> bool:
    """Append a line with the present time; return whether it stands there.

    False where there is no such folder, or nothing can be written in it: a notice must not end a run either.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        with (folder / FILE_NAME).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{now} {text}\n")
    except OSError:
        return False
    return True
