"""Start the jobs of an experiment one after another, and find the cause of failures."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speechdp import exit_codes
from speechdp.errors import RunError
from speechdp.files import cannot_be_written, refused_by_disk, see_folder_anew
from speechdp.launching.forwarded_options import has_option
from speechdp.launching.supervise import JobEnd, StopPolicy, run_job
from speechdp.process.ending import Ended
from speechdp.process.notices import WARNING

#: Folder of the jobs' output, beside the runs' folders.
LOGS = "logs"
#: More than the 30 s that `speechdp launch` gives its ranks to save (--grace-s); a second signal would cut
#: that short.
_POLICY = StopPolicy(first_signal=signal.SIGTERM, grace_s=45.0)
_OURS = "speechdp: "
_LAUNCHERS = "speechdp launch: "
#: The last line of a traceback: a script may fail before its ranks can report an error.
_UNCAUGHT = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)(: .*)?")


class JobStopped(Exception):  # noqa: N818 (not an error)
    """The user or a batch system requested a stop; the same command continues."""


@contextmanager
def stops_between_jobs() -> Iterator[None]:
    """Treat a signal that arrives between jobs like one that arrives during a job.

    Raises:
        JobStopped: in place of `Ended` and KeyboardInterrupt.
    """
    try:
        yield
    except (Ended, KeyboardInterrupt) as end:
        raise JobStopped from end


@dataclass(frozen=True)
class JobStarter:
    """Runs `speechdp` commands over ranks, as `speechdp launch` does, with their output in a log.

    Attributes:
        program: first words of a speechdp command, e.g. (python, "-m", "speechdp").
        environment: environment variables of the jobs.
        launch_options: options for `speechdp launch`, e.g. ("--hostfile", "F").
        elsewhere: jobs run on other hosts than this machine, or on more; in a batch job `launch` finds them
            without an option.
    """

    program: tuple[str, ...]
    environment: Mapping[str, str]
    launch_options: tuple[str, ...] = ()
    elsewhere: bool = False

    @property
    def threads(self) -> int | None:
        """CPU threads of each rank; None: the libraries' default."""
        given = self.environment.get("OMP_NUM_THREADS", "")
        return int(given) if given.isdigit() else None

    def run(
        self,
        num_ranks: int,
        arguments: Sequence[str],
        log: Path,
        *,
        folder: Path | None = None,
        may_pause: bool = False,
    ) -> str | None:
        """Run a command; return None, or the cause of its failure in one line.

        Args:
            num_ranks: number of ranks.  On this machine a single rank needs no launcher; otherwise it is
                launched on the first host, to run where the jobs do that it is compared with.
            arguments: subcommand and its arguments.
            log: file to which the command and its output are appended.
            folder: folder that the command writes and that is read afterwards; None: nothing is read.
            may_pause: the command was told where to stop, so it may end with the exit code of a stop.

        Raises:
            JobStopped: a signal arrived meanwhile.
            RunError: the disk refused the log or a file of the command, which is no fault of the setting.
        """
        argv = [*self.program, *arguments]
        if num_ranks > 1 or not self.starts_here:
            argv = self._launched(num_ranks, arguments)
        return self._run(argv, self.environment, log, folder, may_pause=may_pause)

    def run_script(
        self,
        num_ranks: int,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        folder: Path,
        may_pause: bool = False,
    ) -> str | None:
        """Run a user's script over ranks, in the same way as `run`.

        Args:
            num_ranks: number of processes; as in `run`.
            words: the script's path and its arguments.
            environment: variables to add to those of the jobs.
            folder, may_pause: as in `run`.
        """
        argv = [self.program[0], *words]
        if num_ranks > 1 or not self.starts_here:
            argv = self._launched(num_ranks, argv)
        return self._run(argv, {**self.environment, **environment}, log, folder, may_pause=may_pause)

    def _launched(self, num_ranks: int, words: Sequence[str]) -> list[str]:
        return [*self.program, "launch", *self.launch_options, "-np", str(num_ranks), "--", *words]

    def _run(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None,
        *,
        may_pause: bool,
    ) -> str | None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                file.write(f"$ {shlex.join(argv)}\n".encode())
                file.flush()
                begin = file.tell()
                end = run_job(argv, environment, _POLICY, file)
            printed = log.read_bytes()[begin:].decode(errors="replace")
            if not self.starts_here and folder is not None:
                _see_anew(folder)
        except OSError as error:
            raise RunError(cannot_be_written(log, error)) from error
        if end.stop_signal is not None:
            raise JobStopped
        if may_pause and end.exit_code == exit_codes.STOPPED:
            return None
        message = what_went_wrong(end, printed)
        refused = None if message is None else refused_by_disk(message)
        if refused is not None:
            raise RunError(f"{refused}, then give the same command again (its output is in {log})")
        return message

    @property
    def starts_here(self) -> bool:
        """Whether all jobs are known to run on this machine."""
        return not (self.elsewhere or has_option(self.launch_options, "--hostfile"))


def _see_anew(folder: Path) -> None:
    """Let a network disk show what other hosts have written: NFS remembers what there was not before."""
    see_folder_anew(folder)
    for _ in os.walk(folder):  # lists every folder in it
        pass


def what_went_wrong(end: JobEnd, printed: str) -> str | None:
    """Return one line: of the first failed rank, of an uncaught error, of the launcher, else the last."""
    if end.exit_code == 0:
        return None
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    of_failures = [line for line in lines if not line.startswith(WARNING)]
    for beginning in (_OURS, None, _LAUNCHERS):
        for line in of_failures:
            if beginning is None and _UNCAUGHT.fullmatch(line):
                return line
            if beginning is not None and line.startswith(beginning):
                return line.removeprefix(beginning)
    return f"exit code {end.exit_code}: {lines[-1] if lines else 'it printed nothing'}"
