"""Tell whether a job did what it was started for, from what stands in its run directory."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speechdp.errors import ConfigError
from speechdp.launching.supervise import JobEnd

#: Subcommands that leave a completion marker, and how they name their two folders.
_WITH_MARKER = {"train": "DATA RUN", "sweep": "DATA OUT"}
_MPIRUN_LOST_HOST = 205
#: Exit codes of ranks that refused what they were asked for: an error of the user's, an unknown option.
_REFUSED = (1, 2)
#: The ranks saved a checkpoint and left on request (cli/train.py); passed on, as schedulers requeue on it.
_SAVED_AND_LEFT = 75


@dataclass(frozen=True)
class Target:
    """The run a forwarded command works on.

    Attributes:
        subcommand: "train" or "sweep".
        directory: RUN or OUT.
        marker_before: state of the completion marker when the job was started, None: it was not there.
    """

    subcommand: str
    directory: Path
    marker_before: tuple[int, int] | None


def find_target(arguments: Sequence[str]) -> Target | None:
    """Return what a forwarded command line works on; None where nothing is left to check.

    Raises:
        ConfigError: no subcommand, a nested launch, or a folder that cannot be told from the options.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            "nothing to launch; write it after --, e.g. speechdp launch -np 2 -- train DATA RUN"
        )
    subcommand, *rest = arguments
    if subcommand == "launch":
        raise ConfigError("launch cannot launch itself; write train, sweep or another subcommand after --")
    if subcommand not in _WITH_MARKER or {"-h", "--help"} & set(rest):
        return None
    folders = rest[:2]
    if len(folders) < 2 or any(word.startswith("-") for word in folders):
        raise ConfigError(
            f"write the folders right after the subcommand, options after them: "
            f"speechdp launch ... -- {subcommand} {_WITH_MARKER[subcommand]} [options]"
        )
    directory = Path(folders[1])
    return Target(subcommand, directory, _marker_state(subcommand, directory))


def is_complete(target: Target) -> bool:
    """Tell whether the job left its completion marker.

    A marker that stood there before and was not written again does not count: the exit code alone is
    no proof (Open MPI 5 returns 0 when a host is lost), and an old marker proves as little. Not
    compared by the clock, which a file server may have of its own. A sweep skips what it has done.
    """
    state = _marker_state(target.subcommand, target.directory)
    if target.subcommand == "sweep":
        return state is not None
    return state is not None and state != target.marker_before


def last_checkpoint(target: Target) -> Path | None:
    """Return the newest whole checkpoint of the run, its realignments or a sweep's runs; None: there is none.

    Checkpoints get their name when they are whole, so a name that fits is enough.
    """
    found = [
        path
        for path in target.directory.glob("**/checkpoints/step-*")
        if path.name.removeprefix("step-").isdigit()
    ]
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def verdict(end: JobEnd, target: Target | None) -> tuple[int, str | None]:
    """Return the exit code of the launch and the one line that says what went wrong, if anything did."""
    if end.stop_signal is not None and end.exit_code == 0 and (target is None or is_complete(target)):
        return 0, None
    if end.stop_signal is not None:
        name = signal.Signals(end.stop_signal).name
        exit_code = _SAVED_AND_LEFT if end.exit_code == _SAVED_AND_LEFT else 128 + end.stop_signal
        return exit_code, f"the job was stopped by {name}{_how_to_go_on(target)}"
    if end.exit_code != 0:
        # A mistake in the command is not mended by giving it again: then the rank's own line says what to do.
        refused = end.exit_code in _REFUSED and (target is None or last_checkpoint(target) is None)
        advice = "" if refused else _how_to_go_on(target)
        return end.exit_code, (
            f"the job ended with exit code {end.exit_code} ({_meaning(end.exit_code)}){advice}"
        )
    if target is not None and not is_complete(target):
        return 1, (
            f"the job ended with exit code 0 but left no completion marker in {target.directory} "
            f"(a host may have been lost){_how_to_go_on(target)}"
        )
    return 0, None


def _how_to_go_on(target: Target | None) -> str:
    """Name the last checkpoint and the next step."""
    if target is None:
        return ""
    checkpoint = last_checkpoint(target)
    if target.subcommand == "sweep":
        known = f"; last checkpoint: {checkpoint}" if checkpoint else ""
        return f"{known}; start the same command again, finished runs are kept"
    if checkpoint is None:
        return f"; no checkpoint in {target.directory} yet; start again with --resume"
    return f"; last checkpoint: {checkpoint}; start again with --resume"


def _meaning(exit_code: int) -> str:
    """Say what an exit code of the launcher tells."""
    if exit_code == _SAVED_AND_LEFT:
        return "the ranks were asked to stop, and saved"
    if exit_code == _MPIRUN_LOST_HOST:
        return "a host or its daemon was lost"
    if exit_code > 128 and exit_code - 128 in {int(known) for known in signal.Signals}:
        return f"a rank was killed by signal {exit_code - 128}"
    return "a rank failed, its message stands above"


def _marker_state(subcommand: str, directory: Path) -> tuple[int, int] | None:
    """Return what tells one writing of the completion marker from another; None: not complete."""
    try:
        if subcommand == "train":
            marker = (directory / "completed.json").stat()
        else:
            path = directory / "sweep.json"
            content = json.loads(path.read_text(encoding="utf-8"))
            if not (isinstance(content, dict) and content.get("completed") is True):
                return None
            marker = path.stat()
    except (OSError, ValueError):
        return None
    return marker.st_mtime_ns, marker.st_ino
