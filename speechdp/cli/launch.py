"""`speechdp launch`: start a job over N ranks with mpirun or horovodrun, and watch over it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from speechdp.errors import ConfigError
from speechdp.launching.allocation import Allocation, find_allocation
from speechdp.launching.command import (
    Controller,
    Job,
    Launcher,
    child_environment,
    horovodrun_command,
    horovodrun_environment,
    mpirun_command,
    own_program,
    srun_command,
    srun_environment,
)
from speechdp.launching.cores import available_cores
from speechdp.launching.hostfile import Host, Hostfile, local_hosts, read_hostfile
from speechdp.launching.launcher_output import located
from speechdp.launching.outcome import Target, find_target, verdict
from speechdp.launching.programs import find_horovodrun, find_open_mpi
from speechdp.launching.requeue import is_to_go_on, requeue
from speechdp.launching.restarts import RestartPolicy, Restarts, find_reachable, going_on
from speechdp.launching.supervise import StopPolicy, run_job

#: So long a GPU may need to free the memory of a killed rank, s.
_RESTART_DELAY_S = 1.0


@dataclass(frozen=True)
class LaunchCommand:
    """Start a speechdp command over N ranks: speechdp launch -np 2 -- train DATA RUN [options]."""

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """What every rank runs, after `--`: a subcommand with its arguments, passed on untouched."""
    hostfile: Path | None = None
    """File with one line `host slots=N` a host (see hostfiles/); without it: the hosts of the batch job this
    runs in (Slurm, LSF, PBS, Grid Engine), else this machine."""
    num_ranks: Annotated[int | None, tyro.conf.arg(name="np", aliases=("-np", "-n"))] = None
    """Number of ranks; without it: one a slot of the hostfile or batch job."""
    launcher: Launcher = "mpirun"
    """Program that starts the ranks."""
    controller: Controller = "mpi"
    """What Horovod coordinates itself over; horovodrun only."""
    interface: str | None = None
    """Network interface for traffic between hosts, e.g. eth0; needed where all share an address (docker0)."""
    mpi_args: str = ""
    """More options for mpirun, in one word: --mpi-args="--mca plm_rsh_agent 'ssh -F file'"."""
    tag_output: bool = False
    """Put job and rank before each line of output; the live bar is then no bar any more."""
    max_restarts: int = 0
    """Start train or sweep so often again, from the last checkpoint, after a rank or host was lost or hung;
    hosts that do not answer, or on which ranks died twice, are left out."""
    min_ranks: int | None = None
    """Go on with fewer ranks, but not fewer than these, where hosts are left out; default: only with all."""
    requeue: bool = False
    """In a batch job that was stopped by a signal and saved: give it back to the scheduler, to go on."""
    grace_s: float = 30.0
    """Seconds the ranks have to save and leave after SIGTERM or SIGINT; a second signal cuts it short."""
    dry_run: bool = False
    """Print the command and the variables set for it instead of running it."""

    def run(self) -> int:
        """Launch; return the exit code."""
        return launch(self, own_program(Path(sys.executable)))


@dataclass(frozen=True)
class _Place:
    """Where a job may run.

    Attributes:
        hostfile: all hosts it may use.
        num_ranks: how many are wanted.
        allocation: the batch job this is part of, None outside of one.
    """

    hostfile: Hostfile
    num_ranks: int
    allocation: Allocation | None


def launch(options: LaunchCommand, program: tuple[str, ...]) -> int:
    """Check hosts and command, start `program` over the ranks, and return the exit code of it all."""
    target = find_target(options.command)
    place = _find_place(options)
    policy = RestartPolicy(options.max_restarts, options.min_ranks)
    policy.check(place.num_ranks, target)
    starter = _Starter(options, program, place)
    restarts = Restarts(policy, place.hostfile, place.num_ranks, target, starter.reachable)
    hosts, command, reason = restarts.begin(), options.command, ""
    while True:
        argv, environment = starter.prepare(hosts, command)
        if options.dry_run:
            _print_command(argv, environment)
            return 0
        environment["SPEECHDP_RESTART_REASON"] = reason
        end = run_job(argv, environment, _stop_policy(options, target))
        end = replace(end, faults=located(end.faults, hosts))
        result = verdict(end, target)
        why_not = restarts.why_not(end, result.exit_code)
        if result.reason is not None:
            _say(result.reason + ("" if why_not is None else result.advice))
        if why_not is not None:
            if why_not:
                _say(why_not)
            break
        time.sleep(_RESTART_DELAY_S)
        hosts, command = restarts.next_hosts(end.faults), going_on(options.command)
        reason = result.reason or ""
        where = ", ".join(f"{host.name} ({host.slots})" for host in hosts)
        num_ranks = sum(host.slots for host in hosts)
        _say(f"start {restarts.number + 1} of {policy.max_restarts + 1}: {num_ranks} ranks on {where}")
    if options.requeue and place.allocation is not None and is_to_go_on(end, result.exit_code):
        return requeue(place.allocation)
    return result.exit_code


class _Starter:
    """Builds command lines for one set of hosts after another."""

    def __init__(self, options: LaunchCommand, program: tuple[str, ...], place: _Place) -> None:
        self._options, self._program, self._place = options, program, place
        prefix, search_path = Path(sys.prefix), os.environ.get("PATH", os.defpath)
        if options.launcher != "horovodrun" and options.controller != "mpi":
            raise ConfigError(f"--controller {options.controller} belongs to --launcher horovodrun")
        if options.launcher == "srun" and (place.allocation is None or place.allocation.scheduler != "slurm"):
            raise ConfigError("--launcher srun works inside a Slurm job only; start it with sbatch or salloc")
        self._mpi = find_open_mpi(prefix, search_path)
        self._horovodrun = find_horovodrun(prefix, search_path) if options.launcher == "horovodrun" else None

    def prepare(
        self, hosts: tuple[Host, ...], arguments: tuple[str, ...]
    ) -> tuple[list[str], dict[str, str]]:
        """Return argv and environment of the launcher."""
        options = self._options
        job = Job(
            hosts=hosts,
            program=self._program,
            arguments=arguments,
            interface=options.interface,
            tag_output=options.tag_output,
            extra_options=_split(options.mpi_args),
        )
        environment = child_environment(
            job, self._mpi, os.environ, is_root=os.geteuid() == 0, num_cores=available_cores()
        )
        environment["SPEECHDP_TERMINAL"] = _terminal()
        environment["SPEECHDP_HOSTFILE"] = self._place.hostfile.source
        environment["SPEECHDP_HOSTS"] = job.host_list
        environment["SPEECHDP_LAUNCH"] = json.dumps(["speechdp", *sys.argv[1:]])
        if self._horovodrun is not None:
            program = (sys.executable, str(self._horovodrun))
            argv = horovodrun_command(job, program, options.controller, self._mpi)
            return argv, horovodrun_environment(environment)
        if options.launcher == "srun":
            return srun_command(job, environment), srun_environment(job, environment)
        return mpirun_command(job, self._mpi, environment), environment

    def reachable(self, hosts: Sequence[Host]) -> list[Host]:
        """Return the hosts on which mpirun can start a process.

        Also for horovodrun, which starts processes in the same way (ssh), but has no such test.
        """
        _, environment = self.prepare(tuple(hosts), ())

        def probe(host: Host) -> list[str]:
            job = Job((replace(host, slots=1),), ("true",), (), extra_options=_split(self._options.mpi_args))
            if self._options.launcher == "srun":
                return srun_command(job, environment)
            return mpirun_command(job, self._mpi, environment)

        return find_reachable(hosts, probe, environment)


def _find_place(options: LaunchCommand) -> _Place:
    """Return the hosts given, those of the batch job this runs in, or this machine."""
    allocation = find_allocation(os.environ)
    if options.hostfile is not None:
        hostfile = read_hostfile(options.hostfile)
    elif allocation is not None:
        hostfile = allocation.hostfile
    elif options.num_ranks is None:
        raise ConfigError("say how many ranks: -np N, or --hostfile FILE (see hostfiles/)")
    else:
        hostfile = local_hosts(options.num_ranks)
    num_ranks = hostfile.num_slots if options.num_ranks is None else options.num_ranks
    return _Place(hostfile, num_ranks, allocation)


def _stop_policy(options: LaunchCommand, target: Target | None) -> StopPolicy:
    # horovodrun with gloo starts the ranks itself and understands no SIGUSR1.
    gloo = options.launcher == "horovodrun" and options.controller == "gloo"
    first_signal = signal.SIGTERM if gloo else signal.SIGUSR1
    runs_mpirun = not gloo and options.launcher != "srun"
    tolerates_loss = target is not None and target.tolerates_loss
    policy = StopPolicy(first_signal, options.grace_s, terminate_after_fault=not runs_mpirun)
    return replace(policy, fault_grace_s=None) if tolerates_loss else policy


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"speechdp launch: {message}", file=sys.stderr, flush=True)


def _split(words: str) -> tuple[str, ...]:
    """Split --mpi-args as a shell would."""
    try:
        return tuple(shlex.split(words))
    except ValueError as error:
        raise ConfigError(f"--mpi-args {words!r} cannot be split into words ({error})") from error


def _terminal() -> str:
    """Return "COLUMNSxLINES" if our output is a terminal, else "".

    A rank cannot find out itself: mpirun gives every rank a pseudo-terminal of its own as stdout.
    """
    if not sys.stdout.isatty():
        return ""
    size = shutil.get_terminal_size()
    return f"{size.columns}x{size.lines}"


def _print_command(argv: list[str], environment: dict[str, str]) -> None:
    """Print what would be run so that it can be pasted into a shell."""
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(changed.items())]
    print(" ".join([*words, shlex.join(argv)]))
