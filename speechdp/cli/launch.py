"""`speechdp launch`: start a job on N ranks with mpirun or horovodrun, and supervise it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from speechdp import exit_codes
from speechdp.cli.support.command_line import check_forwarded
from speechdp.cli.support.console import describe_terminal
from speechdp.comm.environment import announced
from speechdp.counting import counted
from speechdp.errors import ConfigError, UsageError
from speechdp.launching.allocation import (
    Allocation,
    Scheduler,
    check_hosts,
    find_allocation,
    with_names_of_slurm,
)
from speechdp.launching.command import (
    Controller,
    Launcher,
    check_controller,
    child_environment,
    horovodrun_command,
    horovodrun_environment,
    own_program,
    python_program,
    share_of_cores,
    srun_command,
    srun_environment,
)
from speechdp.launching.cores import available_cores, room_for_ranks
from speechdp.launching.faults import located
from speechdp.launching.forwarded_options import has_option, split_words
from speechdp.launching.hostfile import Host, Hostfile, is_this_machine, local_hosts, read_hostfile
from speechdp.launching.mpi.job import LaunchJob
from speechdp.launching.mpi.mpirun import Mpirun
from speechdp.launching.outcome import (
    Target,
    Verdict,
    find_target,
    how_a_script_resumes,
    last_checkpoint,
    verdict,
)
from speechdp.launching.programs import find_horovodrun, find_mpirun
from speechdp.launching.requeue import is_ended_unsaved, is_to_be_resumed, requeue, why_not_requeued
from speechdp.launching.restarts import RestartPolicy, Restarts, find_reachable
from speechdp.launching.subcommands import check_ranks
from speechdp.launching.submit import check_command, check_pause
from speechdp.launching.supervise import JobEnd, StopPolicy, SupervisorStop, noted_signals, run_job
from speechdp.launching.variables import (
    FOLDER,
    HOSTFILE,
    HOSTS,
    LAUNCH,
    RESTART_REASON,
    RESUME,
    TERMINAL,
)
from speechdp.options.shown import BATCH_JOB_OR_HERE, shown
from speechdp.ownership.claimant import START_VARIABLE
from speechdp.process.ending import WARNINGS
from speechdp.process.output import STDERR, is_read, losses_noted_in

#: Time that a GPU may need to free the memory of a killed rank, in seconds.
_RESTART_DELAY_S = 1.0
#: Default of --grace-s, in seconds.
_GRACE_S = 30.0
#: Maximum number of other hosts to which a connection over --interface is tried.
_MOST_PROBED = 8
#: A machine with a GPU has at least one of these devices: NVIDIA's, AMD's, or WSL's.
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
#: Variables in the user's environment that set where Open MPI finds slots and how many ranks it puts there.
_SLOT_SETTING = re.compile(r"(?:OMPI|PRTE)_MCA_(?:ras|rmaps)(?:_|$)")


@dataclass(frozen=True)
class LaunchCommand:
    """Start a speechdp command on several ranks, supervise it, and restart it after failures if asked.

    For example: speechdp launch -np 2 -- train DATA RUN --strategy model_averaging:period=16"""

    command: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- COMMAND ...", help_behavior_hint="")
    ] = ()
    """Command each rank runs, after `--`: a speechdp command with its options, or `python SCRIPT ...`."""
    hostfile: Annotated[Path | None, shown("FILE", BATCH_JOB_OR_HERE)] = None
    """File with a line `host slots=N` for each host (examples in hostfiles/).
    Not needed in a batch job of Slurm, LSF, PBS or Grid Engine, whose hosts are detected."""
    num_ranks: Annotated[
        int | None,
        tyro.conf.arg(
            name="np",
            aliases=("-np", "-n"),
            metavar="N",
            help_behavior_hint="(default: one per slot of the hostfile or batch job)",
        ),
    ] = None
    """Total number of ranks."""
    launcher: Launcher = "mpirun"
    """Program that starts the ranks."""
    controller: Controller = "mpi"
    """Library that Horovod coordinates its ranks over; only with --launcher horovodrun."""
    interface: Annotated[str | None, shown("NAME", "the launcher's choice")] = None
    """Network interface for traffic between hosts, e.g. eth0.
    Needed if some interface, such as docker0, has the same address on all hosts."""
    mpi_args: Annotated[str, shown("'OPTIONS'", "none")] = ""
    """More options for mpirun, quoted as one argument: --mpi-args="--mca plm_rsh_agent 'ssh -F file'"."""
    tag_output: bool = False
    """Prefix each line of output with the job and rank; progress is then printed as lines, not as a bar."""
    max_restarts: Annotated[int, shown("N")] = 0
    """How often to restart train or sweep from its last checkpoint after a rank or host fails or hangs.
    A Python script is started again with the same arguments and has to load its own checkpoint.
    Hosts that do not answer, or on which ranks died twice, are excluded."""
    min_ranks: Annotated[int | None, shown("N", "all ranks")] = None
    """Smallest number of ranks to restart with when hosts are excluded.
    Not for ad_psgd, parameter_server and asynchronous easgd, which need all their ranks."""
    requeue: bool = False
    """Return a batch job to the queue, to continue later, if a signal stops it and it saves a checkpoint.
    A Python script tells by exit code 75 that it has saved (run.should_stop, docs/api.md)."""
    grace_s: Annotated[float, shown("SECONDS")] = _GRACE_S
    """Time for the ranks to save and exit after SIGTERM, SIGINT or a batch system's warning.
    A second SIGTERM or SIGINT ends them at once."""
    dry_run: bool = False
    """Print the launcher's command line and environment variables instead of running it."""

    def run(self) -> int:
        """Launch the job; return its exit code."""
        if script := python_program(self.command, Path(sys.executable)):
            return launch(replace(self, command=self.command[1:]), script, is_script=True)
        find_target(self.command)
        check_forwarded(self.command)
        return launch(self, own_program(Path(sys.executable)))


@dataclass(frozen=True)
class _JobPlace:
    """Where a job may run.

    Attributes:
        hostfile: all hosts that the job may use.
        num_ranks: number of ranks to start.
        allocation: the batch job that this process is part of; None outside a batch job.
    """

    hostfile: Hostfile
    num_ranks: int
    allocation: Allocation | None

    @property
    def is_started_again(self) -> bool:
        """Whether the batch system reports that it has started this job before; PBS never reports it."""
        return self.allocation is not None and self.allocation.restarts > 0


def launch(options: LaunchCommand, program: tuple[str, ...], *, is_script: bool = False) -> int:
    """Check hosts and command, start `program` on the ranks, and return the job's exit code."""
    command = options.command
    if options.requeue and is_script:
        check_pause(command, is_script=True)
    elif options.requeue:
        command = check_command(command, requeue=True)
    # Where a script writes is not known.
    target = None if is_script else find_target(command)
    place = _find_place(options)
    scheduler = None if place.allocation is None else place.allocation.scheduler
    policy = check_options(
        options, place.num_ranks, scheduler, is_script=is_script, hosts=place.hostfile.hosts
    )
    hosts = place.hostfile.allocate(place.num_ranks)
    if place.allocation is not None and _are_slots_counted(options):
        by_srun = options.launcher == "srun"
        check_hosts(place.allocation, hosts, place.hostfile.source, os.environ, by_srun=by_srun)
    _check_room(hosts)
    if options.interface is not None:
        _check_interface(options.interface, hosts)
    # The block also handles signals that arrive between two starts.
    with ExitStack() as stack:
        request = stack.enter_context(noted_signals())
        if target is not None:
            stack.enter_context(losses_noted_in(target.directory))
        # What a script saves on SIGTERM is not known.
        ends_at_once = target is not None and policy.max_restarts > 0
        starter = _Starter(options, program, place, request, ends_at_once=ends_at_once)
        restarts = Restarts(
            policy, place.hostfile, place.num_ranks, target, starter.reachable, is_script=is_script
        )
        _warn_of_short_grace(options, hosts)
        if options.dry_run:
            _print_command(*starter.prepare(restarts.begin(), command))
            return 0
        _check_way(options, hosts, starter)
        requeued_by = scheduler if options.requeue else None
        end, result = _run_until_done(starter, restarts, command, request, requeued_by=requeued_by)
    if place.allocation is None:
        return result.exit_code
    # Without a target, it is a script, or a command such as decode that saves nothing before its end.
    if _is_given_back(end, result, restarts, scheduler):
        if not options.requeue:
            return result.exit_code
        return _give_back(place.allocation, target, is_script=is_script, is_begun=end.is_begun)
    if options.requeue and target is None and is_ended_unsaved(end, result.exit_code, scheduler):
        why = why_not_requeued(command, end, is_script=is_script)
        _print_message(f"job {place.allocation.job_id} is not requeued: {why}")
    ended_by_user = end.stop_signal is not None and result.exit_code == exit_codes.STOPPED
    if ended_by_user and place.allocation.scheduler == "lsf":
        return 128 + (end.stop_signal or 0)  # LSF would restart a job that ends with 75
    return result.exit_code


def check_options(
    options: LaunchCommand,
    num_ranks: int,
    scheduler: Scheduler | None,
    *,
    is_script: bool,
    hosts: Sequence[Host] = (),
) -> RestartPolicy:
    """Refuse options that do not go together; return the restart policy.

    Called before the first start, and by `speechdp submit` before a job may wait for hours in a queue.

    Args:
        num_ranks: number of ranks to start.
        scheduler: batch system of the job; None: no batch job.
        is_script: the job runs a user's script.
        hosts: hosts that the job may use, as far as they are known.

    Raises:
        ConfigError: options that do not go together.
    """
    if options.grace_s < 0:
        raise ConfigError(f"--grace-s {options.grace_s:g}: must be at least 0 seconds")
    check_controller(options.launcher, options.controller)
    if options.launcher == "srun" and scheduler != "slurm":
        raise ConfigError(
            "--launcher srun works inside a Slurm job only; leave it out, or start with sbatch or salloc"
        )
    policy = RestartPolicy(options.max_restarts, options.min_ranks)
    if not is_script:
        check_ranks(options.command, num_ranks)
    target = None if is_script else find_target(options.command)
    policy.check(num_ranks, target, is_script=is_script)
    if target is not None and target.subcommand == "train" and (policy.min_ranks or num_ranks) < num_ranks:
        _check_fewer_ranks(options, policy.fewer_ranks(hosts, num_ranks))
    return policy


def _check_fewer_ranks(options: LaunchCommand, numbers: Sequence[int]) -> None:
    """Refuse fewer ranks than the run can continue with; the restart would fail, hours later.

    Args:
        numbers: numbers of ranks that a restart may have.

    Raises:
        ConfigError: the strategy or the batch does not allow it, or there is no such strategy.
    """
    training = check_forwarded(options.command).options
    strategy = training.strategy
    if not strategy.parsed.traits.resumes_with_other_size:  # imports torch, needed only here
        raise ConfigError(
            f"--min-ranks {options.min_ranks}: {strategy.text} cannot continue with fewer ranks, as each "
            "holds its own part; leave it out and keep a spare host, or choose another --strategy "
            "(docs/training.md)"
        )
    for number in () if training.loading.feeders else numbers:  # feeders do not train
        try:
            training.resolve(number)
        except ConfigError as error:
            raise ConfigError(
                f"--min-ranks {options.min_ranks}: the loss of hosts may leave {counted(number, 'rank')}, "
                f"and {error}"
            ) from error


def _check_room(hosts: Sequence[Host]) -> None:
    """Refuse more ranks than this machine's memory can hold; it would become unusable before a rank failed.

    Raises:
        ConfigError: too many ranks.
    """
    here = sum(host.slots for host in hosts if is_this_machine(host.name))
    if here > room_for_ranks():
        raise ConfigError(
            f"{here:,} ranks on this machine: its memory has room for {room_for_ranks():,} at most; start "
            "fewer, or name more hosts with --hostfile FILE"
        )


def _check_interface(name: str, hosts: Sequence[Host]) -> None:
    """Refuse an interface that this host of the job does not have; mpirun would print two long banners.

    Raises:
        ConfigError: this host has no such interface.
    """
    known = [known for _, known in socket.if_nameindex()]
    # After a colon comes the label of an additional address.
    if name.partition(":")[0] not in known and any(is_this_machine(host.name) for host in hosts):
        raise ConfigError(
            f"--interface {name}: {socket.gethostname()} has no such network interface, but "
            f"{', '.join(known)}; give one that all hosts have"
        )


def _check_way(options: LaunchCommand, hosts: Sequence[Host], starter: _Starter) -> None:
    """Refuse --interface if hosts are reachable only without it.

    Raises:
        ConfigError: such a host exists.
    """
    if options.interface is None or options.launcher == "srun":  # srun's daemons use Slurm's network
        return
    others = [host for host in hosts if not is_this_machine(host.name)][:_MOST_PROBED]
    reached = starter.reachable(others)
    silent = [host for host in others if host not in reached]
    led = starter.reachable(silent, by_interface=False)
    if led:
        raise ConfigError(
            f"--interface {options.interface}: mpirun cannot start ranks on {led[0].name} over it, but can "
            "without it; give the interface of the network that connects the hosts, or leave it out"
        )


def _give_back(allocation: Allocation, target: Target | None, *, is_script: bool, is_begun: bool) -> int:
    exit_code = requeue(allocation, is_script=is_script)
    if is_script and is_begun:
        then = "to continue from what the script has saved"
    elif target is not None and last_checkpoint(target) is not None:
        then = "to continue from its checkpoint"
    else:
        then = "to be started again"
    _print_message(f"job {allocation.job_id} is requeued by {allocation.scheduler}, {then}")
    return exit_code


def _is_given_back(end: JobEnd, result: Verdict, restarts: Restarts, scheduler: Scheduler | None) -> bool:
    """Return whether --requeue will continue a batch job that has ended in this way."""
    return is_to_be_resumed(end, result.exit_code, scheduler, begins_anew=restarts.target is None)


def _run_until_done(
    starter: _Starter,
    restarts: Restarts,
    command: tuple[str, ...],
    request: SupervisorStop,
    *,
    requeued_by: Scheduler | None,
) -> tuple[JobEnd, Verdict]:
    """Start the job, and restart it as long as requested and useful; return how it last ended.

    Args:
        requeued_by: the batch system that will start the job again; None: none will. If one will, the user
            is not advised to start the job by hand: two jobs would wait for one folder.
    """

    def is_given_back(end: JobEnd, result: Verdict) -> bool:
        return requeued_by is not None and _is_given_back(end, result, restarts, requeued_by)

    def stopped(end: JobEnd) -> tuple[JobEnd, Verdict]:
        result = _judge(end, restarts)
        _print_message(f"{result.reason}{'' if is_given_back(end, result) else result.advice}")
        return end, result

    most = restarts.policy.max_restarts + 1
    hosts, arguments, reason = restarts.begin(), command, ""
    if request.signals:  # while this process was starting
        return stopped(_end_before_start(request.signals[0]))
    while True:
        if not reason and os.isatty(STDERR):  # until the ranks print something: imports may take long
            _print_message(f"starting {_ranks_on(hosts)}")
        end = starter.run(hosts, arguments, reason)
        result = _judge(end, restarts)
        why_not = restarts.why_not(end, result.exit_code)
        if result.reason is not None:
            is_over = why_not is not None and not is_given_back(end, result)
            _print_message(result.reason + (result.advice if is_over else ""))
        if why_not is not None:
            if why_not:
                _print_message(why_not)
            return end, result
        time.sleep(_restart_delay_s(hosts))
        try:
            hosts = restarts.next_hosts(end.faults)
        except ConfigError as error:
            if not request.signals:  # a signal ends the search for hosts, as if none had answered
                _print_message(str(error))
                return end, result  # report the exit code of the fault, not of the signal
        if request.signals:
            return stopped(replace(end, stop_signal=request.signals[0], faults=()))
        without = f"; without {', '.join(restarts.left_out)}" if restarts.left_out else ""
        arguments, reason = restarts.resume_arguments(command), f"{result.reason or ''}{without}"
        where = ", ".join(f"{host.name} ({host.slots})" for host in hosts)
        num_ranks = sum(host.slots for host in hosts)
        _print_message(
            f"start {restarts.number + 1} of {most}: {counted(num_ranks, 'rank')} on {where}{without}"
        )


def _end_before_start(signum: int) -> JobEnd:
    """Return the end of a job that a signal stopped before its ranks were started."""
    exit_code = exit_codes.STOPPED if signum in WARNINGS else 128 + signum
    return JobEnd(exit_code, signum, is_begun=False)


def _judge(end: JobEnd, restarts: Restarts) -> Verdict:
    """Return how the job ended, and what the user can do next."""
    result = verdict(end, restarts.target)
    if not restarts.is_script or not end.is_begun:
        return result
    folder = os.environ.get(FOLDER)
    script_advice = how_a_script_resumes(
        end,
        result.exit_code,
        Path(folder) if folder else None,
        may_begin_anew=os.environ.get(RESUME) == "1",
    )
    return replace(result, advice=result.advice + script_advice)


def _restart_delay_s(hosts: Sequence[Host]) -> float:
    """Return how long GPUs may still hold the memory of dead ranks, in s; 0 if there surely is no GPU."""
    has_gpu = any(device.exists() for device in _GPU_DEVICES)
    return 0.0 if _are_here(hosts) and not has_gpu else _RESTART_DELAY_S


class _Starter:
    """Start the ranks on a given set of hosts."""

    def __init__(
        self,
        options: LaunchCommand,
        program: tuple[str, ...],
        place: _JobPlace,
        request: SupervisorStop,
        *,
        ends_at_once: bool,
    ) -> None:
        self._options, self._program, self._place, self._request = options, program, place, request
        self._ends_at_once = ends_at_once
        self._environ = dict(os.environ)
        self._name, self._starts = uuid.uuid4().hex, 0
        prefix, search_path = Path(sys.prefix), os.environ.get("PATH", os.defpath)
        self._mpi = find_mpirun(prefix, search_path)
        self._horovodrun = find_horovodrun(prefix, search_path) if options.launcher == "horovodrun" else None

    def run(self, hosts: tuple[Host, ...], arguments: tuple[str, ...], reason: str) -> JobEnd:
        """Run the job to its end.

        Args:
            reason: why the job is restarted; "" at the first start.
        """
        self._starts += 1
        argv, environment = self.prepare(hosts, arguments, reason)
        # If ranks are packed differently after a fault, keep the threads, or sums would round differently.
        if "OMP_NUM_THREADS" in environment:
            self._environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]
        policy = _stop_policy(self._options, hosts, self._mpi)
        end = run_job(argv, environment, policy, request=self._request)
        return replace(end, faults=located(end.faults, hosts, was_killed=end.killed_by is not None))

    def prepare(
        self, hosts: tuple[Host, ...], arguments: tuple[str, ...], reason: str = ""
    ) -> tuple[list[str], dict[str, str]]:
        """Return the launcher's argv and environment."""
        options = self._options
        job = LaunchJob(
            hosts=hosts,
            program=self._program,
            arguments=arguments,
            interface=options.interface,
            tag_output=options.tag_output,
            extra_options=split_words("--mpi-args", options.mpi_args),
            in_batch_job=self._place.allocation is not None,
            ends_at_once=self._ends_at_once,
        )
        cores = share_of_cores(hosts, self._place.allocation, available_cores())
        environment = child_environment(job, self._mpi, self._environ, is_root=os.geteuid() == 0, cores=cores)
        environment[TERMINAL] = describe_terminal()
        # Tells a restart which earlier start owned the folder that it takes over.
        if self._starts:
            environment[START_VARIABLE] = f"{self._name}:{self._starts}"
        if reason:
            environment[RESTART_REASON] = reason
        if reason or (options.requeue and self._place.is_started_again):
            environment[RESUME] = "1"
        environment[HOSTFILE] = self._place.hostfile.source
        environment[HOSTS] = job.host_list
        environment[LAUNCH] = json.dumps(["speechdp", *sys.argv[1:]])
        if self._horovodrun is not None:
            program = (sys.executable, str(self._horovodrun))
            argv = horovodrun_command(job, program, options.controller, self._mpi)
            return argv, horovodrun_environment(environment)
        if options.launcher == "srun":
            return srun_command(job, self._mpi, environment), srun_environment(job, self._mpi, environment)
        return self._mpi.command(job, environment), environment

    def reachable(self, hosts: Sequence[Host], *, by_interface: bool = True) -> list[Host]:
        """Return the hosts on which mpirun can start a process.

        This also holds for horovodrun, which starts processes in the same way (ssh) but has no such test.

        Args:
            by_interface: test over --interface, if it is given.
        """
        if not hosts:
            return []
        _, environment = self.prepare(tuple(hosts), ())

        def probe(host: Host) -> list[str]:
            job = LaunchJob(
                hosts=(replace(host, slots=1),),
                program=("true",),
                arguments=(),
                interface=self._options.interface if by_interface else None,
                extra_options=split_words("--mpi-args", self._options.mpi_args),
            )
            if self._options.launcher == "srun":
                return srun_command(job, self._mpi, environment)
            return self._mpi.command(job, environment)

        return find_reachable(hosts, probe, environment, lambda: bool(self._request.signals))


def _find_place(options: LaunchCommand) -> _JobPlace:
    """Return the given hosts, else those of the surrounding batch job, else this machine."""
    try:
        allocation = find_allocation(os.environ)
    except ConfigError:
        if options.hostfile is None or options.requeue:
            raise
        allocation = None  # hosts are given, so an unreadable batch job does not matter
    if options.requeue and allocation is None:
        raise ConfigError("--requeue: this is not a batch job; leave it out, or start it by speechdp submit")
    if options.hostfile is not None:
        hostfile = read_hostfile(options.hostfile)
        if allocation is not None:
            hostfile = with_names_of_slurm(allocation, hostfile)
    elif allocation is not None:
        hostfile = allocation.hostfile
    elif options.num_ranks is None:
        _refuse_to_be_one_of_several()
        raise UsageError("give the number of ranks: -np N, or --hostfile FILE (see hostfiles/)")
    else:
        hostfile = local_hosts(options.num_ranks)
    num_ranks = hostfile.num_slots if options.num_ranks is None else options.num_ranks
    return _JobPlace(hostfile, num_ranks, allocation)


def _refuse_to_be_one_of_several() -> None:
    """Refuse to run under srun or mpirun: every task would start a whole job.  Raises ConfigError.

    The shell of srun --pty on one node is also one of several tasks, but the only one in use.
    """
    found = announced()
    if found is None or found.size == 1 or os.environ.get("SLURM_PTY_PORT"):
        return
    if found.launcher in ("srun", "PMI") and "SLURM_STEP_NUM_TASKS" in os.environ:  # srun --mpi=pmi2 is both
        name, remedy = (
            "srun",
            "in the batch script or the shell of salloc, where it finds the job's hosts itself",
        )
    else:
        name, remedy = found.launcher, "with -np N"
    raise ConfigError(
        f"{name} has started speechdp launch {found.size} times, and each would start a whole job; start it "
        f"once, without {name}, {remedy}"
    )


def _stop_policy(options: LaunchCommand, hosts: Sequence[Host], mpi: Mpirun) -> StopPolicy:
    # horovodrun with gloo starts the ranks itself and understands no SIGUSR1.
    gloo = _is_over_gloo(options)
    return StopPolicy(
        first_signal=signal.SIGTERM if gloo else signal.SIGUSR1,
        ranks_have="HOROVOD_RANK" if gloo and _are_here(hosts) else "",
        grace_s=options.grace_s,
        gone_grace_s=mpi.gone_grace_s if options.launcher == "mpirun" else StopPolicy.gone_grace_s,
        terminate_after_fault=gloo or options.launcher == "srun",
        tolerates_loss=has_option(options.command, "--tolerate-loss"),
    )


def _warn_of_short_grace(options: LaunchCommand, hosts: Sequence[Host]) -> None:
    """Warn that ranks on other hosts get less time to save than requested."""
    asked = options.requeue or options.grace_s != _GRACE_S
    if asked and _is_over_gloo(options) and not _are_here(hosts):
        _print_message(
            "warning: horovodrun over Gloo kills ranks on other hosts 5 s after it is asked to end, whatever "
            "--grace-s says; where saving takes longer, leave out --controller gloo, or use --launcher mpirun"
        )


def _is_over_gloo(options: LaunchCommand) -> bool:
    return options.launcher == "horovodrun" and options.controller == "gloo"


def _are_slots_counted(options: LaunchCommand) -> bool:
    """Return whether the launcher enforces the slots of a batch job; with Gloo nothing does.

    The user's own settings, such as OMPI_MCA_rmaps_base_oversubscribe=1, may override this.
    """
    return not (_is_over_gloo(options) or options.mpi_args or any(map(_SLOT_SETTING.match, os.environ)))


def _are_here(hosts: Sequence[Host]) -> bool:
    return all(is_this_machine(host.name) for host in hosts)


def _ranks_on(hosts: Sequence[Host]) -> str:
    """Return "2 ranks on 1 host"."""
    return f"{counted(sum(host.slots for host in hosts), 'rank')} on {counted(len(hosts), 'host')}"


def _print_message(message: str) -> None:
    sys.stdout.flush()
    if is_read(STDERR):
        print(f"speechdp launch: {message}", file=sys.stderr, flush=True)


def _print_command(argv: list[str], environment: dict[str, str]) -> None:
    """Print the command line in a form that can be pasted into a shell."""
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(changed.items())]
    print(" ".join([*words, shlex.join(argv)]))
