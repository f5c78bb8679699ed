"""`speechdp launch`: start a job over N ranks with mpirun or horovodrun, and watch over it."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from speechdp.errors import ConfigError
from speechdp.launching.command import (
    Controller,
    Job,
    Launcher,
    child_environment,
    horovodrun_command,
    mpirun_command,
    own_program,
)
from speechdp.launching.cores import available_cores
from speechdp.launching.hostfile import Host, local_hosts, read_hostfile
from speechdp.launching.outcome import find_target, verdict
from speechdp.launching.programs import find_horovodrun, find_open_mpi
from speechdp.launching.supervise import StopPolicy, run_job


@dataclass(frozen=True)
class LaunchCommand:
    """Start a speechdp command over N ranks: speechdp launch -np 2 -- train DATA RUN [options]."""

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """What every rank runs, after `--`: a subcommand with its arguments, passed on untouched."""
    hostfile: Path | None = None
    """File with one line `host slots=N` a host (see hostfiles/); without it: this machine."""
    num_ranks: Annotated[int | None, tyro.conf.arg(name="np", aliases=("-np", "-n"))] = None
    """Number of ranks; without it: one a slot of the hostfile."""
    launcher: Launcher = "mpirun"
    """Program that starts the ranks."""
    controller: Controller = "mpi"
    """What Horovod coordinates itself over; horovodrun only."""
    interface: str | None = None
    """Network interface for traffic between hosts, e.g. eth0; needed where all share an address (docker0)."""
    mpi_args: str = ""
    """More options for mpirun, in one word: "--mca plm_rsh_agent 'ssh -F file'"."""
    tag_output: bool = False
    """Put job and rank before each line of output; the live bar is then no bar any more."""
    grace_s: float = 30.0
    """Seconds the ranks have to save and leave after SIGTERM or SIGINT; a second signal cuts it short."""
    dry_run: bool = False
    """Print the command and the variables set for it instead of running it."""

    def run(self) -> int:
        """Launch; return the exit code."""
        return launch(self, own_program(Path(sys.executable)))


def launch(options: LaunchCommand, program: tuple[str, ...]) -> int:
    """Check hosts and command, start `program` over the ranks, and return the exit code of it all."""
    target = find_target(options.command)
    argv, environment = _prepare(options, program)
    if options.dry_run:
        _print_command(argv, environment)
        return 0
    # horovodrun with gloo starts the ranks itself and understands no SIGUSR1.
    gloo = options.launcher == "horovodrun" and options.controller == "gloo"
    policy = StopPolicy(signal.SIGTERM if gloo else signal.SIGUSR1, options.grace_s)
    exit_code, message = verdict(run_job(argv, environment, policy), target)
    if message is not None:
        sys.stdout.flush()
        print(f"speechdp launch: {message}", file=sys.stderr, flush=True)
    return exit_code


def _prepare(options: LaunchCommand, program: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Return argv and environment of the launcher."""
    job = Job(
        hosts=_hosts(options),
        program=program,
        arguments=options.command,
        interface=options.interface,
        tag_output=options.tag_output,
        extra_options=_split(options.mpi_args),
    )
    prefix, search_path = Path(sys.prefix), os.environ.get("PATH", os.defpath)
    if options.launcher == "mpirun" and options.controller != "mpi":
        raise ConfigError(f"--controller {options.controller} belongs to --launcher horovodrun")
    mpi = find_open_mpi(prefix, search_path)
    environment = child_environment(
        job, mpi, os.environ, is_root=os.geteuid() == 0, num_cores=available_cores()
    )
    environment["SPEECHDP_TERMINAL"] = _terminal()
    if options.launcher == "mpirun":
        return mpirun_command(job, mpi, environment), environment
    horovodrun = (sys.executable, str(find_horovodrun(prefix, search_path)))
    return horovodrun_command(job, horovodrun, options.controller, mpi), environment


def _hosts(options: LaunchCommand) -> tuple[Host, ...]:
    """Return the hosts with the ranks placed on each."""
    if options.hostfile is not None:
        hostfile = read_hostfile(options.hostfile)
        return hostfile.allocate(hostfile.num_slots if options.num_ranks is None else options.num_ranks)
    if options.num_ranks is None:
        raise ConfigError("say how many ranks: -np N, or --hostfile FILE (see hostfiles/)")
    return local_hosts(options.num_ranks).allocate(options.num_ranks)


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
