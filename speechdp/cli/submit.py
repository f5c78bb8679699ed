"""`speechdp submit`: write a batch script for a speechdp command and submit it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from speechdp.cli.launch import LaunchCommand, check_options
from speechdp.cli.support.command_line import check_forwarded
from speechdp.errors import ConfigError
from speechdp.launching.allocation import Scheduler
from speechdp.launching.batch_script import BatchJob, Placement, Resources, job_name, render
from speechdp.launching.command import is_script
from speechdp.launching.forwarded_options import split_words
from speechdp.launching.hostfile import Host, Hostfile
from speechdp.launching.submit import (
    Submission,
    check_command,
    check_output_folder,
    detect_scheduler,
    find_program,
    how_to_cancel,
    plan_submission,
    submit,
    where_output_goes,
    write_script,
)
from speechdp.options.shown import shown


@dataclass(frozen=True)
class SubmitCommand:
    """Submit a speechdp command or a script of yours as a batch job to Slurm, LSF, PBS or Grid Engine.

    For example: speechdp submit --nodes 2 --ranks-per-node 4 --time 8:00:00 -- train DATA RUN"""

    nodes: int
    """Number of nodes."""
    ranks_per_node: int
    """Number of ranks on each node.
    On Grid Engine only nodes x ranks counts; the parallel environment places the ranks."""
    time: Annotated[str, tyro.conf.arg(metavar="TIME")]
    """Time limit of the job, H:MM:SS or D-HH:MM:SS."""
    command: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- COMMAND ...", help_behavior_hint="")
    ] = ()
    """Command each rank runs, after `--`: a speechdp command with its options, or `python SCRIPT ...`.
    --resume is added to train; a script has to load its own state."""
    scheduler: Literal["auto", Scheduler] = "auto"
    """Batch system; auto: the one whose submit program is on PATH; sge is Grid Engine."""
    gpus_per_rank: int = 0
    """Number of GPUs to request for each rank."""
    cpus_per_rank: Annotated[int | None, shown("N", "the batch system's")] = None
    """Number of cores to request for each rank.
    Not for Grid Engine, which counts slots."""
    queue: Annotated[
        str | None,
        tyro.conf.arg(
            aliases=("--partition",), metavar="NAME", help_behavior_hint="(default: the batch system's)"
        ),
    ] = None
    """Queue or partition to submit to."""
    account: Annotated[str | None, shown("NAME", "the batch system's")] = None
    """Account (Slurm, PBS) or project (LSF, Grid Engine) to charge."""
    name: Annotated[str | None, shown("NAME", "the name of the RUN folder")] = None
    """Name of the job."""
    output: Annotated[str | None, shown("FILE", "named after the job, in the current folder")] = None
    """File for the job's output; %j in it is replaced by the job id (not on PBS)."""
    signal_s: Annotated[int, shown("SECONDS")] = 60
    """How long before the time limit all ranks save a checkpoint and exit."""
    requeue: bool = True
    """Requeue the job at the time limit or after losing a node; it continues from its last checkpoint.
    A script is requeued at the time limit only if it saved when asked to stop (docs/api.md)."""
    max_restarts: Annotated[int | None, shown("N", "0")] = None
    """How often the ranks may be restarted within the job after a failure."""
    parallel_environment: Annotated[str | None, shown("NAME", "orte")] = None
    """Grid Engine only: parallel environment to request."""
    scheduler_args: Annotated[str, shown("'OPTIONS'", "none")] = ""
    """More options for sbatch, bsub or qsub, quoted as one argument:
    --scheduler-args="--mem=64G --exclude=n7"."""
    launch_args: Annotated[str, shown("'OPTIONS'", "none")] = ""
    """More options for `speechdp launch`, quoted as one argument:
    --launch-args="--launcher srun --interface ib0"."""
    dry_run: bool = False
    """Print the job script and the submit command instead of submitting."""

    def run(self) -> int:
        """Submit; return the exit code."""
        scheduler = self._scheduler()
        if self.parallel_environment is not None and scheduler != "sge":
            raise ConfigError(
                f"--parallel-environment {self.parallel_environment}: is for Grid Engine only; leave it out"
            )
        job = _batch_job(self)
        options = split_words("--scheduler-args", self.scheduler_args)
        launch = _check_launch(scheduler, job, may_get_others=bool(options))
        job = replace(job, outlives_node=_outlives_node(launch, job.resources))
        submission = plan_submission(scheduler, job.placement.name, job.folder, options)
        script = render(scheduler, job)
        if self.dry_run:
            _show(script, submission)
            _look_for_data(job.command)
            return 0
        find_program(scheduler, _search_path())  # fails before anything is written
        check_output_folder(job)
        kept = write_script(submission.path, script)
        if kept is not None:
            _print_message(f"{submission.path.name} was a different script; it is kept as {kept}")
        job_id = submit(submission, _search_path())
        print(f"job {job_id} submitted: {submission.path}")
        print(f"output: {where_output_goes(scheduler, job, job_id)}")
        print(f"end it: {how_to_cancel(scheduler, job_id)}")
        _look_for_data(job.command)
        return 0

    def _scheduler(self) -> Scheduler:
        if self.scheduler != "auto":
            return self.scheduler
        scheduler, because = detect_scheduler(_search_path(), os.environ, only_shown=self.dry_run)
        # Not to stdout: with --dry-run the script goes there.
        _print_message(f"using --scheduler {scheduler}, as {because}")
        return scheduler


def _print_message(message: str) -> None:
    print(f"speechdp submit: {message}", file=sys.stderr)


def _batch_job(options: SubmitCommand) -> BatchJob:
    """Check the options together and return the job they describe."""
    command = check_command(options.command, requeue=options.requeue)
    environment = options.parallel_environment
    if not is_script(command):
        check_forwarded(command, with_torch=True)  # fails now, not after hours in a queue
    launch_options = split_words("--launch-args", options.launch_args)
    if options.max_restarts is not None:
        launch_options = ("--max-restarts", str(options.max_restarts), *launch_options)
    return BatchJob(
        resources=Resources(
            nodes=options.nodes,
            ranks_per_node=options.ranks_per_node,
            time=options.time,
            gpus_per_rank=options.gpus_per_rank,
            cpus_per_rank=options.cpus_per_rank,
        ),
        placement=Placement(
            name=_default_name(command) if options.name is None else options.name,
            queue=options.queue,
            account=options.account,
            output=options.output,
            parallel_environment="orte" if environment is None else environment,
        ),
        # Not resolved: python in a virtual environment is a link, and the link's place leads to its packages.
        python=Path(sys.executable).absolute(),
        folder=Path.cwd(),
        command=command,
        launch_options=launch_options,
        signal_s=options.signal_s,
        requeue=options.requeue,
    )


def _check_launch(scheduler: Scheduler, job: BatchJob, *, may_get_others: bool) -> LaunchCommand:
    """Refuse now what `speechdp launch` would refuse in the job, hours later; return launch's options.

    Args:
        may_get_others: options of the scheduler itself may request other hosts than the script does.
    """
    if scheduler == "sge" and job.resources.cpus_per_rank is not None:
        raise ConfigError(
            f"--cpus-per-rank {job.resources.cpus_per_rank}: Grid Engine counts slots (one per rank), "
            "not cores; leave it out, and name a --parallel-environment that gives each slot its cores"
        )
    launch: LaunchCommand = check_forwarded(["launch", *job.launch_words, "--", *job.command])
    nodes, ranks_per_node = job.resources.nodes, job.resources.ranks_per_node
    num_ranks = nodes * ranks_per_node if launch.num_ranks is None else launch.num_ranks
    hosts: tuple[Host, ...] = ()
    # The hosts in a file may be known only when the job begins.
    if launch.hostfile is None and not may_get_others:
        asked = f"--nodes {nodes} --ranks-per-node {ranks_per_node}"
        hosts = tuple(Host(f"node {number}", ranks_per_node) for number in range(nodes))
        Hostfile(asked, hosts).allocate(num_ranks)
    elif launch.num_ranks is None:
        num_ranks = max(num_ranks, launch.min_ranks or 1)
    check_options(launch, num_ranks, scheduler, is_script=is_script(job.command), hosts=hosts)
    return launch


def _outlives_node(launch: LaunchCommand, resources: Resources) -> bool:
    """Return whether a job that has lost a node can be restarted on the remaining nodes.

    If not, it is better that the batch system ends it and starts it again on other nodes.
    """
    num_ranks = launch.num_ranks or resources.nodes * resources.ranks_per_node
    least = num_ranks if launch.min_ranks is None else launch.min_ranks
    return launch.max_restarts > 0 and least <= (resources.nodes - 1) * resources.ranks_per_node


def _look_for_data(command: tuple[str, ...]) -> None:
    """Warn if DATA does not exist; it is no error, because another job may still prepare it."""
    if command[0] in ("train", "sweep") and len(command) > 1 and not Path(command[1], "data.json").exists():
        _print_message(f"warning: {Path(command[1], 'data.json')} is not there (yet); the job will need it")


def _default_name(command: tuple[str, ...]) -> str:
    """Return the name of RUN, of the script, or of the subcommand if it has no such folder."""
    if is_script(command):
        script = next((word for word in command[1:] if word[:1] != "-"), "script")
        return job_name(Path(script).name.removesuffix(".py"))
    has_run = command[0] in ("train", "sweep") and len(command) > 2
    return job_name(Path(command[2]).absolute().name if has_run else command[0])


def _show(script: str, submission: Submission) -> None:
    """Print the script, followed by the submit command as a comment of the script."""
    output = sys.stdout
    output.flush()
    output.buffer.write(os.fsencode(script))
    output.buffer.flush()
    print(f"# {submission.path.name} would be written to the current folder and submitted by:")
    print(f"# {submission.command_line}")


def _search_path() -> str:
    return os.environ.get("PATH", os.defpath)
