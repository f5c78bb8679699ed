"""Start the jobs of an experiment, one after another, and say what went wrong."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speechdp import exit_codes
from speechdp.errors import RunError
from speechdp.files import cannot_be_written, refused_by_disk
from speechdp.launching.forwarded_options import has_option
from speechdp.launching.supervise import JobEnd, StopPolicy, run_job
from speechdp.process.ending import Ended
from speechdp.process.notices import WARNING

#: `speechdp launch` gives its ranks 30 s to save (--grace-s), and a second signal would cut that short.
_POLICY = StopPolicy(first_signal=signal.SIGTERM, grace_s=45.0)
_OURS = "speechdp: "
_LAUNCHERS = "speechdp launch: "
#: The last line of a traceback: a script may fail before its ranks can say so.
_UNCAUGHT = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)(: .*)?")


class JobStopped(Exception):  # noqa: N818 (not an error)
    """The user or a batch system asked for the end: the same command goes on."""


@contextmanager
def stops_between_jobs() -> Iterator[None]:
    """Take a signal that comes while no job is under way as one that comes during a job.

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
        program: how a process of ours begins, e.g. (python, "-m", "speechdp").
        environment: of the jobs.
        launch_options: for `speechdp launch`, e.g. ("--hostfile", "F").
        elsewhere: jobs have other hosts than this machine, or more, which no option need name: in a batch job
            `launch` finds them.
    """

    program: tuple[str, ...]
    environment: Mapping[str, str]
    launch_options: tuple[str, ...] = ()
    elsewhere: bool = False

    @property
    def threads(self) -> int | None:
        """CPU threads of each rank; None: whatever the libraries take."""
        given = self.environment.get("OMP_NUM_THREADS", "")
        return int(given) if given.isdigit() else None

    def run(
        self, num_ranks: int, arguments: Sequence[str], log: Path, *, may_pause: bool = False
    ) -> str | None:
        """Run a command; return None, or what went wrong in one line.

        Args:
            num_ranks: 1 needs no launcher on this machine; otherwise it goes to the first host, or it
                would run on another machine than the jobs it is compared with.
            arguments: subcommand and its arguments.
            log: the command and what it prints are appended to it.
            may_pause: it was told where to stop, so that it may end with the code for that.

        Raises:
            JobStopped: a signal came meanwhile.
            RunError: the disk refused the log or a file of the command's: no fault of what was tried.
        """
        argv = [*self.program, *arguments]
        if num_ranks > 1 or not self.starts_here:
            argv = self._launched(num_ranks, arguments)
        return self._run(argv, self.environment, log, may_pause=may_pause)

    def run_script(
        self,
        num_ranks: int,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        may_pause: bool = False,
    ) -> str | None:
        """Run a script of the user's over ranks as `run` does a command of ours.

        Args:
            num_ranks: processes; as in `run`.
            words: the script's path and its arguments.
            environment: added to that of the jobs.
            may_pause: as in `run`.
        """
        argv = [self.program[0], *words]
        if num_ranks > 1 or not self.starts_here:
            argv = self._launched(num_ranks, argv)
        return self._run(argv, {**self.environment, **environment}, log, may_pause=may_pause)

    def _launched(self, num_ranks: int, words: Sequence[str]) -> list[str]:
        return [*self.program, "launch", *self.launch_options, "-np", str(num_ranks), "--", *words]

    def _run(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path, *, may_pause: bool = False
    ) -> str | None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                file.write(f"$ {shlex.join(argv)}\n".encode())
                file.flush()
                begin = file.tell()
                end = run_job(argv, environment, _POLICY, file)
            printed = log.read_bytes()[begin:].decode(errors="replace")
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
        """Whether all jobs run on this machine; not so where that is not known."""
        return not (self.elsewhere or has_option(self.launch_options, "--hostfile"))


def what_went_wrong(end: JobEnd, printed: str) -> str | None:
    """Return one line: of the rank that failed first, of an uncaught error, of the launcher, or the last."""
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
