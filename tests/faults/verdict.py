"""How a job may fail whose file could not be written: by one line that names the file and helps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.faults.fork_server import JobEnd
from tests.faults.points import Point, reason_of

#: What fits an error: one of these stands in its line.
_REMEDIES = {
    "ENOSPC": ("free some space",),
    "EDQUOT": ("free some space",),
    "EROFS": ("have the disk mounted read-write",),
    "EMFILE": ("raise the limit on open files",),
    "EIO": ("check the disk",),
    "ESTALE": ("network disk",),
    "EINTR": ("wait a moment",),
    "ENOENT": ("nothing removes or moves", "put RUN on a disk all hosts share"),
    "EACCES": ("make it writable", "make it readable", "permit reading it"),
}
#: What a rank says whose peer has ended: under a launcher it would mostly be ended itself by then.
_CONSEQUENCE = re.compile(r"failed in torch\.distributed|: rank \d+ (is gone|has failed)")
#: What is said where a rank misses what rank 0 has just written.
_UNSEEN = "put RUN on a disk all hosts share"
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
    wrong: list[str] = []
    if any(code is not None and code <= 0 for code in end.exit_codes):
        wrong.append(f"exit codes {end.exit_codes}")
    told: list[str] = []
    for number, text in enumerate(end.stderr):
        lines = [line for line in text.splitlines() if line.strip() and not _is_expected(line)]
        if len(lines) > 1 and not through:
            wrong.append(f"process {number} prints {len(lines)} lines: {text[:700]}")
        told += lines
    errors = [point.error]
    if point.operation.kind == "open" and point.operation.path.endswith(".safetensors"):
        errors.append("ENOENT")  # to safetensors every file is missing that it cannot open
    if through:
        every = [*told, *"".join(end.stdout).splitlines()]
        told = [line for line in every if any(reason_of(error) in line for error in errors)][:1]
    if not told:
        wrong.append("nobody says why")
    return wrong + [fault for line in told if (fault := _fault_of_line(line, errors, folder, through))]


def _fault_of_line(line: str, errors: Sequence[str], folder: Path, through: bool) -> str:
    if not line.startswith("speechdp") and not through:
        return f"not our line: {line}"
    if "ENOENT" in errors and _UNSEEN in line:
        return ""  # what is missing on one rank and there on another is not on a disk both share
    named = [error for error in errors if reason_of(error) in line]
    if not named:
        return f"does not say {reason_of(errors[0])!r}: {line}"
    if not any(word in line for error in named for word in _REMEDIES[error]):
        return f"its remedy is not for {named[0]}: {line}"
    return "" if str(folder) in line else f"names no file: {line}"


def _is_expected(line: str) -> bool:
    return bool(_CONSEQUENCE.search(line) or _PROGRESS.fullmatch(line))


def summary(end: JobEnd) -> str:
    """Return how a job ended, in a line."""
    told = [line for text in end.stderr for line in text.splitlines()]
    return f"exit codes {end.exit_codes}, {end.seconds:.1f} s; {' | '.join(told[:3])}"
