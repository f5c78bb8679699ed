"""What is right after an operation has failed: the same result, or one line that helps, and the same result then."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.fork_server import JobEnd
from tests.faults.points import Point

#: What fits an error: one of these stands in its line.
_REMEDIES = {
    "ENOSPC": ("free some space",),
    "EIO": ("look at the disk",),
    "ESTALE": ("network disk",),
    "EINTR": ("wait a moment",),
    "ENOENT": ("nothing removes or moves", "give the right path"),
    "EACCES": ("permit ",),
}
#: What a rank says whose peer has ended: under a launcher it would have been ended itself by then.
_CONSEQUENCE = re.compile(r"failed in torch\.distributed|has failed|gone")

Result = Mapping[str, object]


def differences(result: Result, expected: Result) -> list[str]:
    """Return what differs from the result of a command in which nothing failed."""
    return [
        f"{name}: {result.get(name)!r:.200} instead of {expected.get(name)!r:.200}"
        for name in sorted({*result, *expected})
        if result.get(name) != expected.get(name)
    ]


def faults_of_output(end: JobEnd) -> list[str]:
    """Return what nobody should ever see."""
    wrong = []
    for number, text in enumerate([*end.stdout, *end.stderr]):
        if "Traceback" in text or "Exception ignored" in text or "terminate called" in text:
            wrong.append(f"traceback ({number % len(end.stdout)}): {text[-600:]}")
    return wrong


def faults_of_refusal(end: JobEnd, point: Point, folder: Path) -> list[str]:
    """Return what is wrong about the way a job has failed.

    Args:
        point: what was made to fail.
        folder: in which the file is that must be named.
    """
    wrong = []
    if any(code == 0 for code in end.exit_codes):
        wrong.append(f"exit codes {end.exit_codes}")
    if any(code < 0 for code in end.exit_codes):
        wrong.append(f"ended by a signal: exit codes {end.exit_codes}")
    told = []
    for number, text in enumerate(end.stderr):
        lines = [line for line in text.splitlines() if line.strip() and not _CONSEQUENCE.search(line)]
        if len(lines) > 1:
            wrong.append(f"rank {number} prints {len(lines)} lines: {text[:600]}")
        told += lines
    if not told:
        wrong.append("nobody says why")
    for line in told:
        if not line.startswith("speechdp"):
            wrong.append(f"not our line: {line}")
        elif point.reason not in line:
            wrong.append(f"does not say {point.reason!r}: {line}")
        elif not any(word in line for word in _REMEDIES[point.error]):
            wrong.append(f"its remedy is not for {point.error}: {line}")
        if str(folder) not in line:
            wrong.append(f"names no file: {line}")
    return wrong


def summary(end: JobEnd) -> str:
    """Return how a job ended, in a line."""
    told: Sequence[str] = [line for text in end.stderr for line in text.splitlines()]
    return f"exit codes {end.exit_codes}, {end.seconds:.1f} s; {' | '.join(told[:3])}"
