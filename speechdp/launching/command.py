"""Build the command line and environment that start a job.  Pure functions, no shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from speechdp.errors import ConfigError, UsageError
from speechdp.launching.allocation import Allocation
from speechdp.launching.hostfile import Host, is_this_machine
from speechdp.launching.mpi.job import LaunchJob
from speechdp.launching.mpi.mpirun import Mpirun
from speechdp.launching.mpi.open_mpi import OpenMpi, given_settings

Launcher = Literal["mpirun", "horovodrun", "srun"]
Controller = Literal["mpi", "gloo"]

#: Python's own options: those that run a module, also `-um NAME` and `-mNAME`, and those with a separate
#: value.
_MODULE_OPTION = re.compile(r"-[^-cmWX]*m(.*)")
_OPTION_WITH_WORD = re.compile(r"-[^-cmWX]*[WX]|--check-hash-based-pycs")

#: Settings that horovodrun always gives mpirun, and one that it adds if ranks are on several hosts.
_SETTINGS_OF_HOROVODRUN = ("pml", "btl")
_INTERFACE_OF_HOROVODRUN = "btl_tcp_if_include"


def check_controller(launcher: Launcher, controller: Controller) -> None:
    """Check that a controller is given only to the launcher that has one.

    Raises:
        ConfigError: it is given to another launcher.
    """
    if launcher != "horovodrun" and controller != "mpi":
        raise ConfigError(f"--controller {controller} belongs to --launcher horovodrun")


def horovodrun_command(
    job: LaunchJob, horovodrun: tuple[str, ...], controller: Controller, mpi: Mpirun | None
) -> list[str]:
    """Return the argv that starts `job` with horovodrun.

    Horovod makes a shell command of `--mpi-args` and quotes the program itself.  It also adds binding, `-x`
    of the whole environment, and the rank before each line of output.

    Args:
        horovodrun: command that starts it: (python, path), so that the script's first line does not matter.
        mpi: needed only for controller "mpi".

    Raises:
        ConfigError: with controller "mpi": Open MPI 5, which fails inside Horovod; an MPI other than Open
            MPI; or mpirun options that horovodrun sets, too.
    """
    argv = [*horovodrun, "-np", str(job.num_ranks), "-H", job.host_list]
    if job.interface is not None:
        argv += ["--network-interfaces", job.interface]
    if controller == "gloo":
        if job.extra_options:
            raise ConfigError("--mpi-args has no meaning for --controller gloo; leave it out")
        return [*argv, "--gloo", *job.program, *job.arguments]
    assert mpi is not None
    if not isinstance(mpi, OpenMpi):
        raise ConfigError(
            f"horovodrun starts ranks over Open MPI, but {mpi.mpirun} belongs to {mpi.product}; "
            "use --launcher mpirun or --controller gloo"
        )
    if mpi.major >= 5:
        raise ConfigError(
            f"horovodrun fails with Open MPI {mpi.major} ({mpi.mpirun}); "
            "use --launcher mpirun, --controller gloo, or openmpi==4.1.8"
        )
    by_itself = {*_SETTINGS_OF_HOROVODRUN, *((_INTERFACE_OF_HOROVODRUN,) if job.spans_hosts else ())}
    twice = sorted(by_itself & given_settings(job.extra_options))
    if twice:
        raise ConfigError(
            f"--mpi-args: horovodrun gives mpirun {' and '.join(twice)} by itself, and mpirun takes each "
            "once; leave it out, or use --launcher mpirun"
        )
    settings = mpi.own_prefix() + mpi.runtime_options(job, {})
    options = shlex.join([*settings, *job.extra_options])
    # One word with `=`: argparse would treat a value that begins with a dash as an option.
    return [*argv, "--mpi", f"--mpi-args={options}", *job.program, *job.arguments]


def srun_command(job: LaunchJob, mpi: Mpirun, environment: Mapping[str, str]) -> list[str]:
    """Return the argv that starts `job` with Slurm's srun, inside an allocation.

    Every host gets its number of ranks; if the numbers differ, host names are repeated in rank order.
    `--export=ALL` passes the environment over Slurm's own channel (invisible in ps), even if sbatch was given
    --export=NONE.  What mpirun gets as options, ranks get through `srun_environment`.

    Args:
        environment: environment of the child.
    """
    names = [host.name for host in job.hosts]
    most_ranks = max(host.slots for host in job.hosts)
    argv = ["srun", f"--mpi={mpi.srun_type}", f"--nodes={len(names)}", f"--ntasks={job.num_ranks}"]
    if all(host.slots == most_ranks for host in job.hosts):
        argv += [f"--ntasks-per-node={most_ranks}", "--distribution=block", f"--nodelist={','.join(names)}"]
    else:
        repeated = [host.name for host in job.hosts for _ in range(host.slots)]
        argv += ["--distribution=arbitrary", f"--nodelist={','.join(repeated)}"]
    cpus_per_task = environment.get("SLURM_CPUS_PER_TASK", "")
    if re.fullmatch(r"[1-9][0-9]{0,4}", cpus_per_task):
        # From 22.05 on srun does not read this itself: each rank would get one core.
        argv += [f"--cpus-per-task={cpus_per_task}"]
    # Not --kill-on-bad-exit=1: it would kill ranks that exit with 75 a moment after the first, and the job
    # would not look stopped.  A rank that dies ends the step through PMIx or PMI, within a second.
    argv += ["--kill-on-bad-exit=0", "--wait=30", "--export=ALL", "--cpu-bind=none"]
    if job.tag_output:
        argv += ["--label"]
    return [*argv, *job.extra_options, *job.program, *job.arguments]


def srun_environment(job: LaunchJob, mpi: Mpirun, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an srun job: `environment` and what mpirun would get as options."""
    # Set by sbatch's --ntasks-per-node; srun without that option would apply it.
    kept = {name: value for name, value in environment.items() if name != "SLURM_NTASKS_PER_NODE"}
    return {**mpi.srun_settings(job, environment), **kept}


def horovodrun_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which horovodrun uses the hosts it is given.

    If LSB_JOBID is set, horovodrun asks LSF's CSM for hosts, even though -H names them, and on clusters
    without CSM it ends with `KeyError: 'CSM_ALLOCATION_ID'`.
    """
    return {name: value for name, value in environment.items() if name != "LSB_JOBID"}


def share_of_cores(hosts: Sequence[Host], allocation: Allocation | None, num_cores: int) -> int | None:
    """Return the number of cores per rank on the most crowded host.

    None if that is not known here; each rank then takes its share by itself (`cores.share_cores`).

    Args:
        hosts: hosts of the job; `slots` are the ranks placed.
        allocation: the batch job that this is part of.  Its cores on each host take precedence, as `salloc`
            may leave its user on a login node.
        num_cores: cores of this machine; used if it is the only host, or one of a batch job's hosts, which
            are assumed to be alike.
    """
    known: Mapping[str, int] = {} if allocation is None else allocation.cores
    if all(host.name in known for host in hosts):
        return max(1, min(known[host.name] // host.slots for host in hosts))
    are_here = [is_this_machine(host.name) for host in hosts]
    if all(are_here) or (allocation is not None and any(are_here)):
        return max(1, num_cores // max(host.slots for host in hosts))
    return None


def child_environment(
    job: LaunchJob, mpi: Mpirun | None, environ: Mapping[str, str], *, is_root: bool, cores: int | None
) -> dict[str, str]:
    """Return the launcher's environment: the current one and what a rank needs besides.

    Args:
        environ: current environment; values set by the user, not by PBS, are kept.
        is_root: whether this is root, as whom Open MPI's mpirun runs only if two variables allow it.
        cores: cores per rank, from `share_of_cores`.
    """
    environment = _without_threads_of_pbs(job, environ, cores)
    if mpi is not None:
        environment.update(mpi.settings(job, environment, is_root=is_root))
    if environ.get("SLURM_JOB_ID"):
        # For srun, by which mpirun starts its daemons, too.  A lost node's step lasts until Slurm gives up
        # the node, after minutes; meanwhile the steps of a restart would wait for its cores on all other
        # nodes.
        environment.setdefault("SLURM_OVERLAP", "1")
        # In a job of `sbatch --export=NONE` the daemons would get no environment and would not find Open MPI.
        environment["SLURM_EXPORT_ENV"] = "ALL"
    if cores is not None:
        environment.setdefault("OMP_NUM_THREADS", str(cores))
    if mpi is not None and mpi.prefix is not None:
        # horovodrun looks mpirun up on PATH.
        bin_dir = str(mpi.prefix / "bin")
        if environment.get("PATH", "").split(":")[0] != bin_dir:
            environment["PATH"] = ":".join(filter(None, [bin_dir, environment.get("PATH", "")]))
    if job.interface is not None:
        environment.setdefault("NCCL_SOCKET_IFNAME", job.interface)
        environment.setdefault("GLOO_SOCKET_IFNAME", job.interface)
    return environment


def _without_threads_of_pbs(job: LaunchJob, environ: Mapping[str, str], cores: int | None) -> dict[str, str]:
    """Return the environment with each rank's share, if PBS set OMP_NUM_THREADS to all cores of a node.

    PBS sets OMP_NUM_THREADS and NCPUS to `ompthreads` of the job's first chunk or, without that, to its
    `ncpus`, however many ranks share these.  If ranks have fewer cores than that, it must be `ncpus`.
    """
    environment = dict(environ)
    threads = environ.get("OMP_NUM_THREADS", "")
    is_by_pbs = "PBS_JOBID" in environ and threads == environ.get("NCPUS") and threads.isdecimal()
    most_ranks = max(host.slots for host in job.hosts)
    if is_by_pbs and most_ranks > 1 and cores is not None and int(threads) > cores:
        environment["OMP_NUM_THREADS"] = str(max(1, int(threads) // most_ranks))
    return environment


def own_program(python: Path) -> tuple[str, ...]:
    """Return the command that starts a rank: this Python, by absolute path, running speechdp."""
    return (str(python.absolute()), "-m", "speechdp")


def is_script(command: Sequence[str]) -> bool:
    """Return whether the command after `--` is a user's script, `python train.py ...`."""
    return bool(command) and re.fullmatch(r"python[0-9.]*", Path(command[0]).name) is not None


def check_script(command: Sequence[str]) -> None:
    """Refuse a speechdp command written as a script, `python -m speechdp train ...`.

    It would train, but it would be treated as a script, whose checkpoints and completion are unknown.

    Args:
        command: command after `--`, for which `is_script` is true.

    Raises:
        UsageError: it is a speechdp command.
    """
    words = list(command[1:])
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if match := _MODULE_OPTION.fullmatch(option):
            words[:0] = filter(None, [match[1]])
            break
        if _OPTION_WITH_WORD.fullmatch(option):
            del words[:1]
    if words and Path(words[0]).name == "speechdp":  # the module, or the program in bin/
        raise UsageError(
            "do not start a speechdp command with python, which would run it as a script of your own; "
            "write the command itself after --: ... -- train DATA RUN"
        )


def python_program(command: Sequence[str], python: Path) -> tuple[str, ...]:
    """Return the start of a rank's command for a user's script, `python train.py ...`; () if not Python.

    Args:
        command: command after `--`.
        python: Python of this environment, used if the command says just `python`.

    Raises:
        UsageError: as for `check_script`.
    """
    if not is_script(command):
        return ()
    check_script(command)
    return (str(python.absolute()) if command[0] in ("python", "python3") else command[0],)
