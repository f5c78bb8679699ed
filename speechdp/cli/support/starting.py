"""What commands share that start jobs, one after another."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from speechdp.comm.environment import announced
from speechdp.errors import ConfigError
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.allocation import find_allocation
from speechdp.launching.command import own_program
from speechdp.launching.cores import available_cores
from speechdp.launching.forwarded_options import has_option
from speechdp.launching.hostfile import is_this_machine, read_hostfile


def make_starter(command: str, launch_args: str, hostfile: Path | None, threads: int) -> JobStarter:
    """Return what starts the jobs of a command.

    Args:
        command: of the user, for messages.
        launch_args: more options for `speechdp launch`, in one word.
        hostfile: of the jobs; None: this machine.
        threads: of each rank.

    Raises:
        ConfigError: the command was itself started over ranks, or `launch_args` are no words.
    """
    if announced() is not None:
        raise ConfigError(
            f"{command} starts its own jobs: give the command without mpirun, horovodrun, launch"
        )
    try:
        launch_options = shlex.split(launch_args)
    except ValueError as error:
        raise ConfigError(f"--launch-args {launch_args!r} cannot be split into words ({error})") from error
    if hostfile is not None:
        launch_options += ["--hostfile", str(hostfile.absolute())]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return JobStarter(own_program(Path(sys.executable)), environment, tuple(launch_options))


def starts_here(starter: JobStarter) -> bool:
    """Return whether all jobs run on this machine; not so where that is not known."""
    if has_option(starter.launch_options, "--hostfile"):
        return False
    try:
        allocation = find_allocation(starter.environment)
    except ConfigError:  # `launch` says it, unless it needs none
        return False
    return allocation is None or all(is_this_machine(host.name) for host in allocation.hostfile.hosts)


def threads_of_a_rank(
    threads: int | None, most_ranks: int, hostfile: Path | None, before: int | None = None
) -> int:
    """Return the threads of a rank, in every job the same, or speeds could not be compared.

    Args:
        threads: what was asked for; None: what there was before, else what OMP_NUM_THREADS says, else cores
            by the most ranks.
        most_ranks: of any job.
        before: of the finished jobs that are kept; None: there are none.

    Raises:
        ConfigError: none was asked for, or another number than there was before.
    """
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"--threads {threads}: at least 1")
        if before not in (None, threads):
            raise ConfigError(
                f"--threads {threads}: the ranks of what is finished had {before}, and speeds are compared; "
                "leave it out, choose another folder, or --overwrite"
            )
        return threads
    if before is not None:
        return before
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    if hostfile is not None:
        most_ranks = max(host.slots for host in read_hostfile(hostfile).allocate(most_ranks))
    return max(1, available_cores() // most_ranks)


def line_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line verbatim: names of files are no markup, and nothing is folded."""
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
