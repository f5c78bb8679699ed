"""Submit a batch script to the batch system, without a shell."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speechdp import exit_codes
from speechdp.errors import ConfigError, UsageError
from speechdp.files import atomic_path
from speechdp.launching.allocation import Scheduler
from speechdp.launching.batch_script import SYSTEMS, BatchJob, output_file, quote
from speechdp.launching.command import check_script, is_script
from speechdp.launching.forwarded_options import has_option
from speechdp.launching.outcome import find_target
from speechdp.launching.subcommands import STARTS_JOBS
from speechdp.launching.variables import PAUSE

_SUBMIT_TIMEOUT_S = 120
_RESUME = ("--resume", "--no-resume")
#: Commands whose --overwrite deletes the run that a restarted job would resume.
_DELETES_RUN = ("train", "sweep")


@dataclass(frozen=True)
class Submission:
    """A script and how to submit it.

    Attributes:
        path: absolute path of the script.
        argv: argv of the batch system's program.
    """

    scheduler: Scheduler
    path: Path
    argv: tuple[str, ...]

    @property
    def reads_stdin(self) -> bool:
        """Whether the program reads the script from stdin (bsub)."""
        return SYSTEMS[self.scheduler].reads_stdin

    @property
    def command_line(self) -> str:
        """The command as it would be typed."""
        line = " ".join(quote(word) for word in self.argv)
        return f"{line} < {quote(str(self.path))}" if self.reads_stdin else line


def plan_submission(
    scheduler: Scheduler, name: str, folder: Path, scheduler_arguments: Sequence[str]
) -> Submission:
    """Return how to submit a job's script, which is to be written into `folder`.

    Args:
        scheduler_arguments: more options of the batch system's program, after ours.

    Raises:
        ConfigError: the batch system cannot work in such a folder.
    """
    system = SYSTEMS[scheduler]
    signs = [sign for sign in system.replaced_in_folder if sign in str(folder)]
    if signs:
        raise ConfigError(
            f"{folder}: {scheduler} replaces {' and '.join(signs)} in the path of a job's folder and "
            "would not find it; submit from another folder"
        )
    path = folder / f"speechdp-{name}{Path(system.template).suffix}"
    script = () if system.reads_stdin else (str(path),)
    return Submission(scheduler, path, (*system.program, *scheduler_arguments, *script))


def detect_scheduler(
    search_path: str, environ: Mapping[str, str], *, only_shown: bool = False
) -> tuple[Scheduler, str]:
    """Return the batch system found here, and the evidence: a program on PATH or a variable.

    Args:
        only_shown: whether the script is only shown (--dry-run), which needs no batch system.

    Raises:
        ConfigError: there is none, or there is a qsub that may be PBS's or Grid Engine's.
    """
    if shutil.which("sbatch", path=search_path):
        return "slurm", "sbatch is on PATH"
    if shutil.which("bsub", path=search_path):
        return "lsf", "bsub is on PATH"
    if shutil.which("qsub", path=search_path) is None:
        raise ConfigError(
            "no batch system found: neither sbatch, bsub nor qsub is on PATH; "
            + (
                "name the one that the script is for: --scheduler slurm, lsf, pbs or sge"
                if only_shown
                else "submit where one is, or name it with --scheduler and look at the script with --dry-run"
            )
        )
    if shutil.which("qconf", path=search_path):
        return "sge", "qsub and qconf are on PATH"
    if shutil.which("pbsnodes", path=search_path):
        return "pbs", "qsub and pbsnodes are on PATH"
    if environ.get("SGE_ROOT"):
        return "sge", "qsub is on PATH and SGE_ROOT is set"
    raise ConfigError("qsub is on PATH, but is it PBS's or Grid Engine's? give --scheduler pbs or sge")


def check_command(command: Sequence[str], *, requeue: bool) -> tuple[str, ...]:
    """Return the command that a job runs: as given, and for train with --resume.  Scripts are not examined.

    --resume starts over if there is no checkpoint, so it is safe, and a job started again resumes.

    Raises:
        UsageError: there is nothing to run, a nested launch, a speechdp command written as a script, or
            folders that cannot be told from the options.
        ConfigError: --overwrite in a job that would delete its own checkpoints when it is started again, or a
            step to pause at in one that would then be requeued.
    """
    if not command:
        raise UsageError(
            "nothing to submit; write it after --, e.g. speechdp submit --nodes 2 --ranks-per-node 4 "
            "--time 8:00:00 -- train DATA RUN"
        )
    if command[0] in ("launch", "submit"):
        raise UsageError(
            f"write the subcommand itself after --, not {command[0]}: the script calls speechdp launch "
            "(its options go into --launch-args)"
        )
    if command[0] in STARTS_JOBS:
        raise UsageError(
            f"{command[0]} starts its own jobs, but the script would start it on every rank; run it with "
            "--hostfile in a job script of your own, or in the shell of an interactive job (docs/clusters.md)"
        )
    if is_script(command):
        check_script(command)
        if requeue:
            check_pause(command, is_script=True)
        return tuple(command)
    find_target(command)
    if requeue:
        check_pause(command, is_script=False)
    deletes_run = command[0] in _DELETES_RUN and has_option(command, "--overwrite")
    if deletes_run and (requeue or command[0] == "train"):
        raise ConfigError(
            "--overwrite in a batch job would delete the run each time the job is started; remove the folder "
            "before you submit, or take another"
        )
    if command[0] == "train" and not any(word in command for word in _RESUME):
        return (*command, "--resume")
    return tuple(command)


def check_pause(command: Sequence[str], *, is_script: bool) -> None:
    """Refuse a step to pause at in a job that is requeued: it would pause there again, for ever.

    Args:
        command: what every rank runs.
        is_script: whether that is a user's script, which gets the step from the environment.

    Raises:
        ConfigError: there is such a step.
    """
    given, remedy = "", "leave it out"
    if is_script:
        step = os.environ.get(PAUSE)
        given, remedy = f"{PAUSE}={step}" if step else "", "unset it"
    elif has_option(command, "--pause-at"):
        given = "--pause-at"
    if given:
        raise ConfigError(
            f"{given} ends the job with exit code {exit_codes.STOPPED}, so it would be requeued without end; "
            f"{remedy}, or give --no-requeue"
        )


def check_output_folder(job: BatchJob) -> None:
    """Refuse an output file in a missing folder: no batch system makes it, and jobs would fail silently.

    Raises:
        ConfigError: the folder does not exist.
    """
    output = job.placement.output
    if output is None:
        return
    folder = (job.folder / output).parent
    if not folder.is_dir():
        remedy = "put %j into the file's name instead" if "%j" in str(folder) else "make it first"
        raise ConfigError(f"--output {output}: there is no folder {folder}; {remedy}")


def find_program(scheduler: Scheduler, search_path: str) -> str:
    """Return the path of the program that submits scripts.  Raises ConfigError: it is not on PATH."""
    program = SYSTEMS[scheduler].program[0]
    found = shutil.which(program, path=search_path)
    if found is None:
        raise ConfigError(
            f"{program} is not on PATH; submit on a machine of the cluster that has it, "
            "or look at the script with --dry-run"
        )
    return found


def write_script(path: Path, script: str) -> Path | None:
    """Write the script, with the permissions the user's umask leaves.

    Returns:
        New path of a different, perhaps edited, script that had this name; None: there was none.

    Raises:
        ConfigError: the script cannot be written.
    """
    kept = None
    try:
        if path.is_file() and path.read_bytes() != os.fsencode(script):
            kept = path.with_name(f"{path.name}.old")
            path.replace(kept)
        # "x": never through a link that another user has put there, in a folder that all may write to.
        with atomic_path(path) as temporary, temporary.open("xb") as file:
            file.write(os.fsencode(script))
    except OSError as error:
        raise ConfigError(
            f"{path}: the script cannot be written ({error.strerror}); submit from a folder you may write to"
        ) from error
    return kept


def submit(submission: Submission, search_path: str) -> str:
    """Submit the script and return the job id.

    Raises:
        ConfigError: the program is missing, refuses the script, or prints no job id.
    """
    program = submission.argv[0]
    answer = _run_program(submission, search_path)
    answered = " ".join(f"{answer.stderr} {answer.stdout}".split()) or "nothing"
    if answer.returncode != 0:
        raise ConfigError(
            f"{program} refused {submission.path} with exit code {answer.returncode}; it says: {answered}; "
            "the script is kept, to be edited and submitted by hand"
        )
    match = SYSTEMS[submission.scheduler].printed_id.search(answer.stdout)
    if match is None:
        raise ConfigError(
            f"{program} took {submission.path} but printed no job id; it says: {answered}; "
            "ask the batch system which jobs are queued before you submit again"
        )
    return match.group(1)


def _run_program(submission: Submission, search_path: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = submission.argv
    found = find_program(submission.scheduler, search_path)
    stdin = submission.path if submission.reads_stdin else Path(os.devnull)
    try:
        with stdin.open("rb") as file:
            return subprocess.run(
                [found, *arguments],
                stdin=file,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_SUBMIT_TIMEOUT_S,
                check=False,
            )
    except OSError as error:
        raise ConfigError(f"{found} cannot be run ({error.strerror}); look at {submission.path}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{program} has not answered for {_SUBMIT_TIMEOUT_S} s; ask the batch system whether the job of "
            f"{submission.path} is queued before you submit again"
        ) from error


def where_output_goes(scheduler: Scheduler, job: BatchJob, job_id: str) -> Path:
    """Return the file the job's output will be in."""
    output = output_file(scheduler, job.placement)
    if output is None:
        return job.folder / f"{job.placement.name}.o{job_id.partition('.')[0]}"
    placeholder = SYSTEMS[scheduler].id_in_output
    return job.folder / (output if placeholder is None else output.replace(placeholder, job_id))


def how_to_cancel(scheduler: Scheduler, job_id: str) -> str:
    """Return the command that ends the job."""
    return f"{SYSTEMS[scheduler].cancel} {job_id}"
