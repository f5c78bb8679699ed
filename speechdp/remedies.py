"""What messages advise: options of the speechdp command that runs, or what a user's own script has instead.

Code below the command line does not know who uses it.  It asks here, so that nobody is told of an option that
their command does not have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

#: The options of each command that runs in this process; none: a script of the user's runs.
_commands: list[frozenset[str]] = []
#: Folders of runs that are trained as parts of a command's work: --overwrite would delete other parts, too.
_parts: list[Path] = []


@contextmanager
def of_command(options: Collection[str]) -> Iterator[None]:
    """Advise the options of a command inside the block.

    Args:
        options: their names as Python has them, e.g. `hang_timeout`.
    """
    names = frozenset(options)
    _commands.append(names)
    try:
        yield
    finally:
        _commands.remove(names)


@contextmanager
def of_part(folder: Path) -> Iterator[None]:
    """Take the run in `folder`, inside the block, for a part of a command's work, e.g. a run of a sweep."""
    _parts.append(folder)
    try:
        yield
    finally:
        _parts.remove(folder)


def going_on() -> str:
    """Return what continues work that was broken off, to complete "free some space, then ..."."""
    return "continue with --resume" if goes_on_by_option() else "run again"


def starting_over(folder: Path) -> str:
    """Return how the run in `folder` is begun anew, as an order."""
    if _has("overwrite") and folder not in _parts:
        return "start over with --overwrite"
    return f"delete {folder}, then {going_on()}"


def goes_on_by_option() -> bool:
    """Tell whether the command goes on with a run where it is told to, by --resume."""
    return _has("resume")


def going_on_as_begun() -> str:
    """Return how a run is gone on with that was begun with other options than those given, as an order."""
    if goes_on_by_option():
        return "give only --resume, which uses the run's own options"
    return "repeat its command (recorded in run.json)"


def backend(name: str) -> str:
    """Return how a communicator back-end is chosen, to complete "choose ..."."""
    return f"--backend {name}" if _commands else f"SPEECHDP_BACKEND={name}"


def device(name: str) -> str:
    """Return how the device is chosen, to complete "use ..."."""
    return f"--device {name}" if _commands else f'run_ranks(device="{name}")'


def less_memory() -> str:
    """Return how less memory is taken, as an order."""
    if not _commands:
        return "take smaller batches"
    options = [f"--{name.replace('_', '-')}" for name in ("batch_size", "batch_frames") if _has(name)]
    return f"lower {' or '.join(options)}" if options else "free some memory, then run again"


def is_script() -> bool:
    """Tell whether a script of the user's runs, whose stack shows them where they are."""
    return not _commands


def longer_wait() -> str:
    """Return how ranks are given longer to start, as the end of a list of remedies; "": they are not."""
    return ", or raise --hang-timeout if a disk is merely slow" if _has("hang_timeout") else ""


def _has(option: str) -> bool:
    return bool(_commands) and option in _commands[-1]
