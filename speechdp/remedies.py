"""Remedies for messages: options of the running speechdp command, or their equivalents in a user's script.

Code below the command line does not know what uses it.  It asks here, so that no message names an option that
the command does not have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

#: The options of each command that runs in this process; empty: a user's script runs.
_commands: list[frozenset[str]] = []
#: Folders of runs that are trained as parts of a command's work: --overwrite would delete other parts, too.
_parts: list[Path] = []


@contextmanager
def of_command(options: Collection[str]) -> Iterator[None]:
    """Let messages name the options of a command inside the block.

    Args:
        options: names of the options in Python's form, e.g. `hang_timeout`.
    """
    names = frozenset(options)
    _commands.append(names)
    try:
        yield
    finally:
        _commands.remove(names)


@contextmanager
def of_part(folder: Path) -> Iterator[None]:
    """Treat the run in `folder`, inside the block, as part of a command's work, e.g. a run of a sweep."""
    _parts.append(folder)
    try:
        yield
    finally:
        _parts.remove(folder)


def resuming() -> str:
    """Return how to continue interrupted work, to complete "free some space, then ..."."""
    return "continue with --resume" if resumes_by_option() else "run again"


def starting_over(folder: Path) -> str:
    """Return how to start the run in `folder` over, as an imperative."""
    if _has("overwrite") and folder not in _parts:
        return "start over with --overwrite"
    return f"delete {folder}, then {resuming()}"


def resumes_by_option() -> bool:
    """Return whether the command resumes a run by the option --resume."""
    return _has("resume")


def resuming_as_begun() -> str:
    """Return how to resume a run that was begun with other options than those given, as an imperative."""
    if resumes_by_option():
        return "give only --resume, which uses the run's own options"
    return "repeat its command (recorded in run.json)"


def backend(name: str) -> str:
    """Return how to choose a communicator back-end, to complete "choose ..."."""
    return f"--backend {name}" if _commands else f"SPEECHDP_BACKEND={name}"


def device(name: str) -> str:
    """Return how to choose the device, to complete "use ..."."""
    return f"--device {name}" if _commands else f'run_ranks(device="{name}")'


def less_memory() -> str:
    """Return how to use less memory, as an imperative."""
    if not _commands:
        return "take smaller batches"
    options = [f"--{name.replace('_', '-')}" for name in ("batch_size", "batch_frames") if _has(name)]
    return f"lower {' or '.join(options)}" if options else "free some memory, then run again"


def is_script() -> bool:
    """Return whether a user's script runs, in which a stack trace shows the user the place."""
    return not _commands


def longer_wait() -> str:
    """Return how to give ranks longer to start, as the end of a list of remedies; "": it is not possible."""
    return ", or raise --hang-timeout if a disk is merely slow" if _has("hang_timeout") else ""


def _has(option: str) -> bool:
    return bool(_commands) and option in _commands[-1]
