"""How a job may fail whose file could not be written: one line that names the file and helps, no traceback."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.fork_server import JobEnd
from tests.faults.points import Point

#: What fits an error: one of these stands in its line.
_REMEDIES = {
    "ENOSPC": ("free some space",),
    "EIO": ("look at the disk",),
    "ESTALE": ("network disk",),
    "EINTR": ("wait a moment",),
    "ENOENT": ("nothing removes or moves",),
    "EACCES": ("permit ",),
}
#: What a rank says whose peer has ended: under a launcher it would mostly be ended itself by then.
_CONSEQUENCE = re.compile(r"failed in torch\.distributed|: rank \d+ (is gone|has failed)")
#: What is told of how far a command has come.
_PROGRESS = re.compile(r"[a-z0-9 ]+: \d+ of \d+$")
_NEVER = ("Traceback", "Fatal Python error", "Exception ignored", "terminate called", "unexpected ")


def faults_of_output(end: JobEnd) -> list[str]:
    """Return what nobody should ever see."""
    texts = [*end.stdout, *end.stderr]
    return [f"{word}... printed: {text[-700:]}" for text in texts for word in _NEVER if word in text][:1]


def faults_of_refusal(end: JobEnd, point: Point, folder: Path, *, through: bool) -> list[str]:
    """Return what is wrong about the way a job has failed.

    Args:
        point: what was made to fail.
        folder: in which the file is that must be named.
        through: a launcher or another command hands the line on, and adds its own.
    """
    wrong = []
    if any(code is not None and code <= 0 for code in end.exit_codes):
        wrong.append(f"exit codes {end.exit_codes}")
    told = []
    for number, text in enumerate(end.stderr):
        lines = [line for line in text.splitlines() if line.strip() and not _is_expected(line)]
        if len(lines) > 1 and not through:
            wrong.append(f"process {number} prints {len(lines)} lines: {text[:700]}")
        told += lines
    if through:
        told = [line for line in [*told, *"".join(end.stdout).splitlines()] if point.reason in line][:1]
    if not told:
        wrong.append("nobody says why")
    for line in told:
        if not line.startswith("speechdp") and not through:
            wrong.append(f"not our line: {line}")
        elif point.reason not in line:
            wrong.append(f"does not say {point.reason!r}: {line}")
        elif not any(word in line for word in _REMEDIES[point.error]):
            wrong.append(f"its remedy is not for {point.error}: {line}")
        elif str(folder) not in line:
            wrong.append(f"names no file: {line}")
    return wrong


def _is_expected(line: str) -> bool:
    return bool(_CONSEQUENCE.search(line) or _PROGRESS.fullmatch(line))


def summary(end: JobEnd) -> str:
    """Return how a job ended, in a line."""
    told = [line for text in end.stderr for line in text.splitlines()]
    return f"exit codes {end.exit_codes}, {end.seconds:.1f} s; {' | '.join(told[:3])}"
