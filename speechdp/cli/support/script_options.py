"""Shared by commands that make several runs: options of scripts, checks, and the folder that they own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import tyro

from speechdp import exit_codes
from speechdp.errors import ConfigError
from speechdp.options.shown import BATCH_JOB_OR_HERE, shown
from speechdp.process.notices import print_message

if TYPE_CHECKING:
    from speechdp.cli.support.starting import JobHosts
    from speechdp.experiments.compare.script_training import UserScript
    from speechdp.experiments.jobs import JobStarter
    from speechdp.options.run import TrainOptions
    from speechdp.ownership.overwrite import FolderKind
    from speechdp.ownership.owner import FolderOwner
    from speechdp.tasks.metrics import TaskRecord


class StartsJobs(Protocol):
    """Base of commands that start jobs, with the options `--hostfile`, `--launch-args` and `--threads`."""

    @property
    def hostfile(self) -> Path | None: ...

    @property
    def launch_args(self) -> str: ...

    @property
    def threads(self) -> int | None: ...

    @property
    def hosts(self) -> JobHosts:
        """Hosts on which jobs run.  Raises ConfigError: hosts that cannot be read."""
        from speechdp.cli.support.starting import hosts_of_jobs  # noqa: PLC0415 - keeps --help fast

        return hosts_of_jobs(self.hostfile, self.launch_args)

    def starter(
        self,
        command: str,
        most_ranks: int,
        threads_before: int | None = None,
        feeders: int = 0,
    ) -> JobStarter:
        """Return the starter of the command's jobs.

        Args:
            command: the user's command, for messages.
            most_ranks: largest number of training ranks of any job.
            threads_before: threads of a rank in the finished jobs that are kept; None: there are none.
            feeders: number of feeders of each job, in addition.

        Raises:
            ConfigError: feeders on several machines, or as in `threads_of_a_rank` and `make_starter`.
        """
        from speechdp.cli.support.starting import make_starter, threads_of_a_rank  # noqa: PLC0415

        hosts = self.hosts
        if feeders and not hosts.are_counted_here:
            raise ConfigError(
                f"--feeders: {command} counts them on one machine only; leave out --hostfile, or in a batch "
                "job of several hosts --feeders"
            )
        threads = threads_of_a_rank(self.threads, most_ranks + feeders, hosts, threads_before)
        return make_starter(command, self.launch_args, hosts, threads)


@dataclass(frozen=True)
class ScriptOptions(StartsJobs):
    """Your training script, and where it runs."""

    script: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Python script that trains with speechdp.DataParallel (docs/api.md).
    It is run unchanged; arguments after `--` are passed to it, with {seed} replaced by the seed."""
    metric: Annotated[str, shown("NAME[:min|:max]", "the value that the script logged last")] = ""
    """Value passed to run.log() by which runs are ranked, e.g. valid_loss:min or accuracy:max.
    min: lower is better; max: higher is better.
    Without :min or :max the name decides: higher is better for accuracy, auc, bleu, f1, score, ..."""
    backend: Literal["auto", "horovod", "mpi", "torch", "threads"] = "auto"
    """Library the ranks communicate with.
    auto: horovod if installed, else mpi; torch: torch.distributed; threads: ranks are threads, for trials."""
    hostfile: Annotated[Path | None, shown("FILE", BATCH_JOB_OR_HERE)] = None
    """File with a line `host slots=N` for each host."""
    launch_args: Annotated[str, shown("'OPTIONS'", "none")] = ""
    """More options for `speechdp launch`, quoted as one argument: "--launcher horovodrun"."""
    threads: Annotated[int | None, shown("N", "cores / largest number of ranks, at least 1")] = None
    """CPU threads of each rank, the same in all runs."""
    target: Annotated[
        float | None,
        shown(
            "VALUE",
            "the best value that all runs reached, in a comparison three quarters of them, in a search the "
            "last settings",
        ),
    ] = None
    """Value of the metric; the report has the time that each run took to reach it.
    tune looks for the setting that reaches it soonest."""

    def check(self) -> None:
        """Refuse options that no run could use.  Raises ConfigError."""
        from speechdp.report.runs.script_metric import script_task  # noqa: PLC0415 - keeps --help fast

        if not self.script.is_file():
            raise ConfigError(f"--script {self.script}: no such file")
        check_target(self.target, script_task(self.metric))

    def user_script(self, arguments: Sequence[str]) -> UserScript:
        """Return the script with its arguments."""
        from speechdp.experiments.compare.script_training import UserScript  # noqa: PLC0415

        return UserScript(self.script, tuple(arguments), self.backend)

    @property
    def hosts(self) -> JobHosts:
        """Hosts on which jobs run.  Raises ConfigError: hosts that cannot be read."""
        from speechdp.cli.support.starting import JobHosts  # noqa: PLC0415

        if self.backend == "threads" and self.hostfile is None:
            return JobHosts()  # one process, so no slots are needed
        return super().hosts


def report_failures(failed: int, runs: int, logs: Path | None, what: str = "runs") -> None:
    """Print how many runs failed and where to look, if any did.

    Args:
        logs: folder with the output of the runs; None: they were not separate jobs.
    """
    if failed:
        output = "" if logs is None else f", their output in {logs}"
        print_message(
            f"{failed} of {runs} {what} failed; their messages are above{output}; the same command tries "
            "them again"
        )


def until_stopped(out: Path, print_line: Callable[[str], None], work: Callable[[], int]) -> int:
    """Do the work in OUT, including its report; return its exit code, or that of a requested stop.

    Args:
        out: folder that the command writes.
        print_line: prints a line of progress.
        work: does the work; a signal may stop it at any time, and what it has finished is kept.
    """
    from speechdp.experiments.jobs import JobStopped, stops_between_jobs  # noqa: PLC0415 - keeps --help fast

    try:
        with stops_between_jobs():
            return work()
    except JobStopped:
        print_line(f"stopped as requested; the same command continues {out}")
        return exit_codes.STOPPED


def check_target(target: float | None, task: TaskRecord) -> None:
    """Refuse a target that no run can reach, before any run is trained.  Raises ConfigError.

    Args:
        target: value of the task's first metric, as reports show it; None: not given.
        task: the task's record, or its substitute in runs of a script.
    """
    if target is not None:
        from speechdp.report.kit.metric_names import Terms  # noqa: PLC0415 - matplotlib, which few wait for

        Terms(task).score_of_target(target)


def inputs_of(data: Path, options: TrainOptions) -> dict[str, Path | None]:
    """Return the paths that a training reads, by option; --overwrite must not delete them."""
    return {"DATA": data, "--initial-model": options.initial_model, "--alignments": options.alignments}


def check_new(options: TrainOptions, out: Path, kind: FolderKind) -> None:
    """Refuse options without effect, unless OUT continues work that an earlier version began with them.

    Raises:
        ConfigError: an option has no effect.
    """
    if not (out / kind.record).is_file():
        options.check_warmup()


def check_training(data: Path, options: TrainOptions, out: Path, *, on_this_machine: bool) -> None:
    """Refuse a training that its ranks would refuse, before the output folder is emptied.

    The ranks still check whatever depends on their number, on a strategy, or on devices of other hosts.

    Args:
        out: folder to be emptied.
        on_this_machine: the ranks will run on this machine.

    Raises:
        ConfigError, ShardError: options that do not fit the data or the devices.
    """
    import torch  # noqa: PLC0415 - keeps --help fast

    from speechdp.comm.device import ranks_on_gpus  # noqa: PLC0415
    from speechdp.comm.serial import SerialCommunicator  # noqa: PLC0415
    from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
    from speechdp.experiments.compare.plan import SEQUENTIAL  # noqa: PLC0415
    from speechdp.train.build import check_shards  # noqa: PLC0415
    from speechdp.train.realign import check_overwriting  # noqa: PLC0415
    from speechdp.train.session import Session  # noqa: PLC0415

    shared = dataclasses.replace(options, strategy=SEQUENTIAL, faults=type(options.faults)())
    on_gpu = on_this_machine and ranks_on_gpus(options.device) > 0
    if not on_this_machine:
        loading = dataclasses.replace(options.loading, preprocess_on="cpu")
        shared = dataclasses.replace(shared, loading=loading)
    if on_gpu or not on_this_machine:
        # Trying a number format on a GPU would leave this process holding GPU memory while the ranks run.
        shared = dataclasses.replace(shared, precision="fp32")
    device = torch.device("cuda" if on_gpu else "cpu")
    session = Session(Dataset.open(data), SerialCommunicator(), device)
    check_overwriting(session, shared, out)
    check_shards(session, shared)


def check_precision(data: Path, options: TrainOptions, *, on_this_machine: bool) -> None:
    """Refuse a number format that no rank could compute in, as `train` would, before any job starts.

    Checks only CPUs of this machine; the ranks check GPUs and other hosts, as in `check_training`.

    Args:
        on_this_machine: the ranks will run on this machine.

    Raises:
        ConfigError, ShardError: a format that the model cannot be computed in, or data that do not fit it.
    """
    if options.precision == "fp32" or not on_this_machine:
        return
    import torch  # noqa: PLC0415 - keeps --help fast

    from speechdp.comm.device import ranks_on_gpus  # noqa: PLC0415
    from speechdp.comm.serial import SerialCommunicator  # noqa: PLC0415
    from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
    from speechdp.train import models  # noqa: PLC0415
    from speechdp.train.session import Session  # noqa: PLC0415

    if ranks_on_gpus(options.device) == 0:
        session = Session(Dataset.open(data), SerialCommunicator(), torch.device("cpu"))
        models.check_precision(session, options)


@dataclass(frozen=True)
class OutFolder:
    """The folder that a command writes.

    Attributes:
        overwrite: delete its contents first.
        read: paths that the command reads, as in `check_overwrite`.
    """

    path: Path
    overwrite: bool = False
    read: Mapping[str, Path | None] = field(default_factory=dict)

    def check(self, kind: FolderKind) -> None:
        """Refuse a folder of another command, or one that must not be overwritten, before any work.

        Args:
            kind: kind of folder that the command writes.

        Raises:
            ConfigError: it holds something else or the input, or this user may not delete it.
        """
        from speechdp.ownership.overwrite import check_kind, check_overwrite  # noqa: PLC0415 - fast --help

        if self.overwrite:
            check_overwrite(self.path, kind, self.read)
        else:
            check_kind(self.path, kind)

    def take(self, owner: FolderOwner, kind: FolderKind) -> str:
        """Start writing in a folder that this process owns: check its contents again, and empty it if asked.

        Another command may have owned it and written to it since `check`.

        Returns:
            A line that names what stays in it; "" if there is nothing.

        Raises:
            ConfigError: another command has written to it, or a folder in it is in use.
            RunError: something cannot be deleted.
        """
        from speechdp.ownership.overwrite import check_kind, empty  # noqa: PLC0415 - fast --help

        check_kind(self.path, kind)
        return empty(owner, kind) if self.overwrite else ""


@contextmanager
def owned_folder(
    out: OutFolder, command: str, print_line: Callable[[str], None], kind: FolderKind
) -> Iterator[FolderOwner]:
    """Own a folder during the block, and empty it first if asked; yield its owner.

    Args:
        command: the user's command, for messages.
        print_line: prints a line of progress.
        kind: kind of folder that the command writes.

    Raises:
        ConfigError: as in OutFolder.check.
    """
    from speechdp.comm.startup.folder_owner import owner_of  # noqa: PLC0415
    from speechdp.process.ending import heed_put_off  # noqa: PLC0415

    heed_put_off()
    out.check(kind)
    with owner_of(out.path, command, print_line) as owner:
        if stays := out.take(owner, kind):
            print_line(stays)
        yield owner
