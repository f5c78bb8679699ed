"""Judge the outcome of a job, from how its launcher ended and from its run directory."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechdp import exit_codes
from speechdp.errors import UsageError
from speechdp.files import see_folder_anew
from speechdp.json_input import parse_json
from speechdp.launching.faults import LOST_HOST, Fault, first_cause
from speechdp.launching.forwarded_options import has_option
from speechdp.launching.supervise import JobEnd

#: Subcommands that leave a completion marker, and how they name their two folders.
_WITH_MARKER = {"train": "DATA RUN", "sweep": "DATA OUT"}
_CONTINUES = (
    "the same command continues if the script saves and loads checkpoints (docs/api.md), or else starts over"
)
#: How to continue a script that was not asked to save: only the script knows whether it has saved.
SCRIPT_CONTINUES = f"{_CONTINUES} once its folder is removed"

#: Faults after which no rank has begun; their own messages name the remedy.
_NOT_STARTED = ("not reached", "no program", "no folder", "no room", "no shared memory")
#: Exit codes of ranks that refused the command: a user error, an unknown option, another job's folder.
_REFUSED = (exit_codes.FAILED, exit_codes.USAGE, exit_codes.IN_USE)


@dataclass(frozen=True)
class Target:
    """The run or sweep that a forwarded command works on.

    Attributes:
        subcommand: "train" or "sweep".
        directory: RUN or OUT.
        marker_before: state of the completion marker when the job was started; None: there was none.
        tolerates_loss: whether ranks may be lost on the way (--tolerate-loss), so that the exit code proves
            nothing.
    """

    subcommand: str
    directory: Path
    marker_before: tuple[int, int] | None
    tolerates_loss: bool = False


def find_target(arguments: Sequence[str]) -> Target | None:
    """Return what a forwarded command line works on; None if there is no marker to check.

    Raises:
        UsageError: there is no subcommand, a nested launch, or a folder cannot be told from the options.
    """
    if not arguments or arguments[0].startswith("-"):
        raise UsageError("nothing to launch; write it after --, e.g. speechdp launch -np 2 -- train DATA RUN")
    subcommand, *rest = arguments
    if subcommand in ("launch", "submit", "doctor"):
        raise UsageError(
            f"launch cannot start {subcommand}; write train, sweep or another subcommand after --"
        )
    if has_option(rest, "--script"):
        raise UsageError(f"{subcommand} --script starts its own ranks: give the command without launch")
    if subcommand not in _WITH_MARKER or {"-h", "--help"} & set(rest):
        return None
    folders = list(itertools.takewhile(lambda word: not word.startswith("-"), rest[:2]))
    if len(folders) == 1:  # e.g. `train RUN --resume`: a folder is missing, not misplaced
        raise UsageError(
            f"{subcommand} needs two folders, but got only {folders[0]}: "
            f"speechdp launch ... -- {subcommand} {_WITH_MARKER[subcommand]} [options]"
        )
    if not folders:
        raise UsageError(
            f"write the folders right after the subcommand, options after them: "
            f"speechdp launch ... -- {subcommand} {_WITH_MARKER[subcommand]} [options]"
        )
    directory = Path(folders[1])
    tolerates_loss = has_option(rest, "--tolerate-loss")
    return Target(subcommand, directory, _marker_state(subcommand, directory), tolerates_loss)


def is_complete(target: Target) -> bool:
    """Return whether the job left its completion marker.

    A marker from before that was not written again does not count: the exit code alone is no proof (Open MPI
    5 returns 0 when a host is lost), and neither is an old marker.  Clocks are not compared, as a file server
    may have its own.
    """
    state = _marker_state(target.subcommand, target.directory)
    return state is not None and state != target.marker_before


def has_tried_all(target: Target) -> bool:
    """Return whether a sweep has trained all runs except those recorded as failed, and so is over for now."""
    if target.subcommand != "sweep":
        return False
    record = _sweep_record(target.directory)
    try:
        runs, failed = list(record["runs"]), dict(record["failed"])
        done = [(target.directory / name / "completed.json").is_file() for name in runs if name not in failed]
    except (OSError, ValueError, TypeError, KeyError):  # not what a sweep writes
        return False
    return bool(failed) and all(done)


def how_a_script_resumes(
    end: JobEnd, exit_code: int, folder: Path | None, *, may_begin_anew: bool = False
) -> str:
    """Return the advice to append to the reason why a user's script was stopped or failed: a clause or "".

    Args:
        end: end of the job.
        exit_code: exit code of the launch.
        folder: folder named by SPEECHDP_FOLDER; None: the script's own, which is unknown here.
        may_begin_anew: whether it can start over in its folder as it is, like runs of an experiment.
    """
    is_stopped = end.stop_signal is not None and exit_code in (exit_codes.STOPPED, 128 + end.stop_signal)
    if not is_stopped and not _has_broken_off(end, exit_code):
        return ""  # messages of the ranks, or about them, name the remedy
    found = None if folder is None else newest_checkpoint(folder)
    known = "" if found is None else f"; last checkpoint: {found}"
    if folder is not None and found is None:
        known = f"; no checkpoint in {folder} yet"
    if exit_code == exit_codes.STOPPED:
        return f"{known}; the script has saved: the same command continues"
    return f"{known}; {_CONTINUES if may_begin_anew else SCRIPT_CONTINUES}"


def _has_broken_off(end: JobEnd, exit_code: int) -> bool:
    """Return whether ranks were lost without a stop request: killed, hung, crashed, or with their host."""
    cause = first_cause(end.faults)
    if end.stop_signal is not None or (cause is not None and cause.kind in _NOT_STARTED):
        return False
    return exit_code not in (0, *_REFUSED, exit_codes.STOPPED, exit_codes.STOPPED_UNSAVED)


def last_checkpoint(target: Target) -> Path | None:
    """Return the newest complete checkpoint of the run, its realignments or a sweep's runs; None: none.

    Checkpoints get their name when they are complete, so a matching name is enough.
    """
    return newest_checkpoint(target.directory)


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint anywhere in a folder; None: there is none.

    Within one run that is the checkpoint of the last step, from which the run resumes, whatever the clock
    says.
    """
    changes = {
        path: changed_ns
        for path in whole_checkpoints(directory)
        if (changed_ns := _changed_ns(path)) is not None
    }
    last_of_runs = {path.parent: path for path in sorted(changes, key=_step_key)}
    return max(last_of_runs.values(), key=lambda path: (changes[path], path.name), default=None)


def whole_checkpoints(directory: Path) -> list[Path]:
    """Return all complete checkpoints anywhere in a folder."""
    found: list[Path] = []
    see_folder_anew(directory)
    # Not by glob, which raises if others delete folders meanwhile.
    for name, folders, _files in os.walk(directory):
        folder = Path(name)
        if folder.name == "checkpoints":
            steps = [step for step in folders if step.startswith("step-")]
            # A script's may have a version: step-00000003-2.
            whole = [step for step in steps if step.removeprefix("step-").replace("-", "").isdigit()]
            found += [folder / step for step in whole]
            folders.clear()
    return found


def _step_key(path: Path) -> list[int]:
    return [int(number) for number in path.name.removeprefix("step-").split("-") if number]


def _changed_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # deleted meanwhile
        return None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a job.

    Attributes:
        exit_code: exit code of the launch.
        reason: what went wrong, with the last checkpoint; None: nothing.
        advice: what the user may do next, a clause to follow the reason; "": the ranks have said so.
    """

    exit_code: int
    reason: str | None = None
    advice: str = ""


def verdict(end: JobEnd, target: Target | None) -> Verdict:
    """Judge by the launcher's exit code, by what it printed, and by the completion marker."""
    is_well = end.exit_code == 0 or (target is not None and target.tolerates_loss)
    if is_well and (target is None or is_complete(target)):
        return Verdict(0)
    exit_code = ranks_exit_code(end)
    if end.stop_signal is not None:
        return _stopped(end, exit_code, target)
    cause = first_cause(end.faults)
    if exit_code == 0:
        assert target is not None
        reason = "a host may have been lost" if cause is None else cause.describe()
        happened = (
            f"the job ended with exit code 0 but left no completion marker in {target.directory} ({reason})"
        )
        return Verdict(exit_codes.FAILED, f"{happened}{_known(target)}", _how_to_resume(target))
    happened = _what_happened(end, exit_code, cause)
    begun = target is not None and last_checkpoint(target) is not None
    if exit_code in _REFUSED and cause is None:  # the launcher's own exit code: no rank refused anything
        return Verdict(exit_code, f"{happened}{_known(target)}", _how_to_resume(target) if begun else "")
    if exit_code in _REFUSED or (cause is not None and cause.kind in _NOT_STARTED):
        # Repeating the command does not correct a user error; its own message names the remedy.
        return Verdict(exit_code, f"{happened}{_known(target) if begun else ''}")
    return Verdict(exit_code, f"{happened}{_known(target)}", _how_to_resume(target))


def _stopped(end: JobEnd, exit_code: int, target: Target | None) -> Verdict:
    """Judge a job that was asked to end: its ranks saved, had nothing to save yet, or failed to save."""
    assert end.stop_signal is not None
    if not end.is_begun:
        by = signal.Signals(end.stop_signal).name
        return Verdict(
            exit_code, f"the job was stopped by {by} before its ranks were started", "; repeat the command"
        )
    happened = f"the job was stopped by {signal.Signals(end.stop_signal).name}"
    cause = first_cause(end.faults)
    if (
        cause is not None and cause.kind == "reported"
    ):  # e.g. a full disk, which must not be reported as an ordinary stop
        happened = f"{happened}, and {_what_happened(end, exit_code, cause)}"
    elif exit_code not in (exit_codes.STOPPED, exit_codes.STOPPED_UNSAVED):
        exit_code = 128 + end.stop_signal
    return Verdict(exit_code, f"{happened}{_known(target)}", _how_to_resume(target))


def ranks_exit_code(end: JobEnd) -> int:
    """Return the exit code of the rank that ended first; if no rank's is known, the launcher's.

    It is 0 if the launcher's is 0.  horovodrun's own exit code is 1 after any failure.
    """
    if end.exit_code == 0:
        return 0
    for fault in end.faults:
        if fault.kind == "killed" and fault.signal is not None:
            return 128 + fault.signal
        if fault.exit_code:
            return fault.exit_code
    return end.exit_code


def _what_happened(end: JobEnd, exit_code: int, cause: Fault | None) -> str:
    """Name the failed rank and host if the launcher reported them, else the meaning of its exit code."""
    if cause is not None and exit_code != exit_codes.STOPPED:
        is_exit_code_of_job = cause.kind == "exited" and cause.exit_code == exit_code
        return cause.describe() if is_exit_code_of_job else f"{cause.describe()} (exit code {exit_code})"
    if end.killed_by is not None:
        return f"the launcher itself was killed by {signal.Signals(end.killed_by).name}"
    return f"the job ended with exit code {exit_code} ({_meaning(exit_code)})"


def _known(target: Target | None) -> str:
    """Name the last checkpoint."""
    if target is None:
        return ""
    checkpoint = last_checkpoint(target)
    if checkpoint is not None:
        return f"; last checkpoint: {checkpoint}"
    return "" if target.subcommand == "sweep" else f"; no checkpoint in {target.directory} yet"


def _how_to_resume(target: Target | None) -> str:
    """Name the next step."""
    if target is None:
        return ""
    if target.subcommand == "sweep":
        return "; start the same command again, finished runs are kept"
    begun = (target.directory / "run.json").exists() or last_checkpoint(target) is not None
    # If nothing records the run's options, --resume alone would begin another run, with the defaults.
    return "; start again with --resume" if begun else "; give the same command again, with --resume"


def _meaning(exit_code: int) -> str:
    """Return the meaning of a launcher's exit code."""
    if exit_code == exit_codes.STOPPED:
        return "the ranks were asked to stop, and saved"
    if exit_code == exit_codes.STOPPED_UNSAVED:
        return "the ranks were asked to stop, and saved nothing"
    if exit_code == LOST_HOST:
        return "a host or its daemon was lost"
    if exit_code > 128 and exit_code - 128 in {int(known) for known in signal.Signals}:
        return f"a rank was killed by signal {exit_code - 128}"
    return "no rank failed first: the launcher was ended from outside, or failed itself with a message above"


def _marker_state(subcommand: str, directory: Path) -> tuple[int, int] | None:
    """Return a value that identifies this writing of the completion marker; None: not complete."""
    see_folder_anew(directory)
    if subcommand == "sweep" and _sweep_record(directory).get("completed") is not True:
        return None
    try:
        # Opening makes NFS ask the server; its cached state may be from before the job.
        with (directory / ("sweep.json" if subcommand == "sweep" else "completed.json")).open("rb") as file:
            marker = os.fstat(file.fileno())
    except OSError:
        return None
    return marker.st_mtime_ns, marker.st_ino


def _sweep_record(out: Path) -> dict[str, Any]:
    """Return a sweep's record of itself; {} if it cannot be read."""
    try:
        record = parse_json((out / "sweep.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
