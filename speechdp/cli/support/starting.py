"""Shared by commands that start jobs one after another."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

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
    """The hosts of a command's jobs; `speechdp launch` determines them in the same way.

    Attributes:
        hostfile: the hosts; None: this machine, or the hosts of a --hostfile in --launch-args.
        path: path of the hostfile, if they come from one.
        allocation: the batch job, if they come from one.
    """

    hostfile: Hostfile | None = None
    path: Path | None = None
    allocation: Allocation | None = None

    @property
    def are_counted_here(self) -> bool:
        """Whether ranks use this machine's cores and GPUs, unless --launch-args names other hosts."""
        if self.hostfile is None:
            return True
        return self.path is None and all(is_this_machine(host.name) for host in self.hostfile.hosts)

    def allocate(self, most_ranks: int) -> tuple[Host, ...]:
        """Return the hosts that the largest job uses.  Raises ConfigError: too few slots."""
        return () if self.hostfile is None else self.hostfile.allocate(most_ranks, option="--ranks")


def hosts_of_jobs(hostfile: Path | None, launch_args: str) -> JobHosts:
    """Return the hosts of jobs: those of the file, else of the surrounding batch job, else this machine.

    Raises:
        ConfigError: hosts that cannot be read, or `launch_args` that cannot be split into words.
    """
    if hostfile is not None:
        return JobHosts(read_hostfile(hostfile), path=hostfile)
    if has_option(split_words("--launch-args", launch_args), "--hostfile"):
        return JobHosts()
    allocation = find_allocation(os.environ)
    return JobHosts() if allocation is None else JobHosts(allocation.hostfile, allocation=allocation)


def make_starter(command: str, launch_args: str, hosts: JobHosts, threads: int) -> JobStarter:
    """Return the starter of a command's jobs.

    Args:
        command: the user's command, for messages.
        launch_args: more options for `speechdp launch`, as one string.
        hosts: hosts of the jobs.
        threads: CPU threads of each rank.

    Raises:
        ConfigError: the command was itself started over ranks, or `launch_args` cannot be split into words.
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
    """Return the threads of a rank, the same in every job so that speeds can be compared.

    Args:
        threads: number requested; None: the number of `before`, else OMP_NUM_THREADS, else cores /
            `most_ranks`.
        most_ranks: largest number of ranks of any job.
        hosts: hosts of the jobs.
        before: threads of a rank in the finished jobs that are kept; None: there are none.

    Raises:
        ConfigError: fewer than 1 thread requested, or another number than `before`; or nothing is finished
            yet and the hosts have too few slots, so that jobs would fail one after another.
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
