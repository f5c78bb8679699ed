"""What commands share that start jobs, one after another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from speechdp.comm.environment import announced
from speechdp.errors import ConfigError
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.allocation import Allocation, find_allocation
from speechdp.launching.command import own_program, share_of_cores
from speechdp.launching.cores import available_cores
from speechdp.launching.forwarded_options import has_option, split_words
from speechdp.launching.hostfile import Host, Hostfile, is_this_machine, read_hostfile


@dataclass(frozen=True)
class JobHosts:
    """Where a command's jobs run, which `speechdp launch` finds by itself in the same way.

    Attributes:
        hostfile: their hosts; None: this machine, or those of a --hostfile in --launch-args.
        path: of the file, where they are of one.
        allocation: the batch job whose hosts they are.
    """

    hostfile: Hostfile | None = None
    path: Path | None = None
    allocation: Allocation | None = None

    @property
    def are_counted_here(self) -> bool:
        """Whether the ranks have the cores and GPUs of this machine, as far as --launch-args says nothing."""
        if self.hostfile is None:
            return True
        return self.path is None and all(is_this_machine(host.name) for host in self.hostfile.hosts)

    def allocate(self, most_ranks: int) -> tuple[Host, ...]:
        """Return the hosts with the ranks of the largest job.  Raises ConfigError: too few slots."""
        return () if self.hostfile is None else self.hostfile.allocate(most_ranks, option="--ranks")


def hosts_of_jobs(hostfile: Path | None, launch_args: str) -> JobHosts:
    """Return where jobs run: on the hosts of the file, else of the batch job this is in, else here.

    Raises:
        ConfigError: hosts that cannot be read, or `launch_args` are no words.
    """
    if hostfile is not None:
        return JobHosts(read_hostfile(hostfile), path=hostfile)
    if has_option(split_words("--launch-args", launch_args), "--hostfile"):
        return JobHosts()
    allocation = find_allocation(os.environ)
    return JobHosts() if allocation is None else JobHosts(allocation.hostfile, allocation=allocation)


def make_starter(command: str, launch_args: str, hosts: JobHosts, threads: int) -> JobStarter:
    """Return what starts the jobs of a command.

    Args:
        command: of the user, for messages.
        launch_args: more options for `speechdp launch`, in one word.
        hosts: of the jobs.
        threads: of each rank.

    Raises:
        ConfigError: the command was itself started over ranks, or `launch_args` are no words.
    """
    if announced() is not None:
        raise ConfigError(
            f"{command} starts its own jobs: give the command without mpirun, horovodrun, srun, launch"
        )
    launch_options = split_words("--launch-args", launch_args)
    if hosts.path is not None:
        launch_options += ("--hostfile", str(hosts.path.absolute()))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    program = own_program(Path(sys.executable))
    return JobStarter(program, environment, launch_options, elsewhere=not hosts.are_counted_here)


def threads_of_a_rank(
    threads: int | None, most_ranks: int, hosts: JobHosts, before: int | None = None
) -> int:
    """Return the threads of a rank, in every job the same, or speeds could not be compared.

    Args:
        threads: what was asked for; None: what there was before, else what OMP_NUM_THREADS says, else cores
            by the most ranks.
        most_ranks: of any job.
        hosts: of the jobs.
        before: of the finished jobs that are kept; None: there are none.

    Raises:
        ConfigError: none was asked for, or another number than there was before; or nothing is finished yet,
            and the hosts have too few slots, at which jobs would fail one after another.
    """
    placed = () if before is not None else hosts.allocate(most_ranks)
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"--threads {threads}: at least 1")
        if before not in (None, threads):
            raise ConfigError(
                f"--threads {threads}: finished runs had {before}, and speeds are compared; "
                "leave it out, choose another folder, or --overwrite"
            )
        return threads
    if before is not None:
        return before
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    if not placed:
        return max(1, available_cores() // most_ranks)
    share = share_of_cores(placed, hosts.allocation, available_cores())
    return share or max(1, available_cores() // max(host.slots for host in placed))


def line_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line verbatim: names of files are no markup, and nothing is folded."""
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
