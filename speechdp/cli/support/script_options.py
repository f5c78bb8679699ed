"""Options of commands that start jobs, and of those that run a training script of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import tyro

from speechdp.cli.support.several_runs import check_target
from speechdp.errors import ConfigError
from speechdp.options.shown import BATCH_JOB_OR_HERE, shown

if TYPE_CHECKING:
    from speechdp.cli.support.starting import JobHosts
    from speechdp.experiments.compare.script_training import UserScript
    from speechdp.experiments.jobs import JobStarter


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
