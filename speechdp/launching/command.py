"""Build the command line and environment that start a job; pure functions, no shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from speechdp.errors import ConfigError, UsageError
from speechdp.launching.allocation import Allocation
from speechdp.launching.forwarded_options import has_option
from speechdp.launching.hostfile import Host, is_this_machine
from speechdp.launching.programs import OpenMpi

Launcher = Literal["mpirun", "horovodrun", "srun"]
Controller = Literal["mpi", "gloo"]

#: Variables every rank needs, besides those of the families below.
_FORWARDED = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH")
_FORWARDED_FAMILIES = ("CUDA_", "HOROVOD_", "NCCL_", "GLOO_SOCKET_", "SPEECHDP_")
_GPUS = "CUDA_VISIBLE_DEVICES"
#: Names of GPUs, other ones on each host.
_GPU_UUID = re.compile(r"(?:GPU|MIG)-")
_NO_GPU = ("", "-1", "none", "NoDevFiles")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,31}")
#: Python's own options: what runs a module, also `-um NAME` and `-mNAME`, and those whose value may follow.
_MODULE_OPTION = re.compile(r"-[^-cmWX]*m(.*)")
_OPTION_WITH_WORD = re.compile(r"-[^-cmWX]*[WX]|--check-hash-based-pycs")

#: By which a user gives mpirun, or its daemons, a setting: NAME VALUE follow.
_SETTING_OPTIONS = ("--mca", "-mca", "--gmca", "-gmca", "--prtemca", "-prtemca")
#: Where a setting that each of our options gives may stand in the environment: options go before that.
_SETTING_VARIABLE = {"--mca": "OMPI_MCA_", "--prtemca": "PRTE_MCA_"}
#: What horovodrun gives mpirun, whatever the user does, and what besides where ranks are on several hosts.
_SETTINGS_OF_HOROVODRUN = ("pml", "btl")
_INTERFACE_OF_HOROVODRUN = "btl_tcp_if_include"

#: Without these a cut cable is noticed after minutes; with them in 7 s.
_KEEPALIVE = {
    "oob_tcp_keepalive_time": "5",
    "oob_tcp_keepalive_intvl": "2",
    "oob_tcp_keepalive_probes": "2",
}


@dataclass(frozen=True)
class LaunchJob:
    """What to start and where.

    Attributes:
        hosts: from Hostfile.allocate; `slots` is the number of ranks placed on each host.
        program: how a rank begins, e.g. (python, "-m", "speechdp").
        arguments: handed to the program untouched.
        interface: network interface all traffic between hosts takes; None: every one is tried.
        tag_output: put the rank before each line of output (this breaks the live bar).
        extra_options: more options for mpirun or srun.
        in_batch_job: a batch system has chosen the hosts, and the GPUs of each.
    """

    hosts: tuple[Host, ...]
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    interface: str | None = None
    tag_output: bool = False
    extra_options: tuple[str, ...] = ()
    in_batch_job: bool = False

    def __post_init__(self) -> None:
        if self.interface is not None and not _INTERFACE.fullmatch(self.interface):
            raise ConfigError(
                f"--interface {self.interface!r} is not the name of a network interface, e.g. eth0"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def spans_hosts(self) -> bool:
        """Whether any rank runs on another machine."""
        return len(self.hosts) > 1 or not is_this_machine(self.hosts[0].name)

    @property
    def host_list(self) -> str:
        """Hosts as both launchers read them on the command line: `a:2,b:2`.

        The file itself is not handed on: horovodrun fails on comments and blank lines, and what was
        checked is then surely what is used.
        """
        return ",".join(f"{host.name}:{host.slots}" for host in self.hosts)


def check_controller(launcher: Launcher, controller: Controller) -> None:
    """Check that a controller is only given to the launcher that has one.

    Raises:
        ConfigError: it is given to another.
    """
    if launcher != "horovodrun" and controller != "mpi":
        raise ConfigError(f"--controller {controller} belongs to --launcher horovodrun")


def mpirun_command(job: LaunchJob, mpi: OpenMpi, environment: Mapping[str, str]) -> list[str]:
    """Return the argv that starts `job` with mpirun.

    In a Grid Engine job Open MPI, 4 and 5, starts its daemons by `qrsh -inherit` of its own accord, in a
    Slurm job by srun: accounted, and killed with the job. Under LSF, and with Open MPI 4 under PBS, the
    wheels take ssh.

    Args:
        environment: of the child (see child_environment); names of `-x` are taken from it.
    """
    argv = [str(mpi.mpirun), "-np", str(job.num_ranks), "--host", job.host_list]
    argv += ["--bind-to", "none", "--map-by", "slot"]
    argv += _own_prefix(mpi)
    argv += _setting_options("--mca", _traffic_settings(job), job, environment)
    argv += _setting_options(_runtime_option(mpi), _runtime_settings(job), job, environment)
    if mpi.major >= 5 and has_option(job.arguments, "--tolerate-loss"):
        # Whose processes are gone, the daemons tell. ULFM's own detector would take a rank for dead that
        # computes for some seconds without a call of MPI's.
        argv += ["--with-ft", "ulfm", *_setting_options("--mca", {"mpi_ft_detector": "0"}, job, environment)]
    if job.tag_output:
        argv += ["--tag-output"]
    for name in forwarded_names(job, environment):
        argv += ["-x", name]
    return [*argv, *job.extra_options, *job.program, *job.arguments]


def horovodrun_command(
    job: LaunchJob, horovodrun: tuple[str, ...], controller: Controller, mpi: OpenMpi | None
) -> list[str]:
    """Return the argv that starts `job` with horovodrun.

    Horovod composes a shell command of `--mpi-args` and quotes the program itself; binding, `-x` of the
    whole environment and the rank before each line of output are its own.

    Args:
        horovodrun: how it is started: (python, path), so that the script's first line does not matter.
        mpi: needed for controller "mpi" only.

    Raises:
        ConfigError: Open MPI 5 with controller "mpi", which fails inside Horovod, or options of mpirun's that
            horovodrun gives it, too.
    """
    argv = [*horovodrun, "-np", str(job.num_ranks), "-H", job.host_list]
    if job.interface is not None:
        argv += ["--network-interfaces", job.interface]
    if controller == "gloo":
        if job.extra_options:
            raise ConfigError("--mpi-args has no meaning for --controller gloo; leave it out")
        return [*argv, "--gloo", *job.program, *job.arguments]
    assert mpi is not None
    if mpi.major >= 5:
        raise ConfigError(
            f"horovodrun fails with Open MPI {mpi.major} ({mpi.mpirun}); "
            "use --launcher mpirun, --controller gloo, or openmpi==4.1.8"
        )
    by_itself = {*_SETTINGS_OF_HOROVODRUN, *((_INTERFACE_OF_HOROVODRUN,) if job.spans_hosts else ())}
    twice = sorted(by_itself & _given_settings(job.extra_options))
    if twice:
        raise ConfigError(
            f"--mpi-args: horovodrun gives mpirun {' and '.join(twice)} by itself, and mpirun takes each "
            "once; leave it out, or use --launcher mpirun"
        )
    settings = _own_prefix(mpi) + _setting_options(_runtime_option(mpi), _runtime_settings(job), job, {})
    options = shlex.join([*settings, *job.extra_options])
    # One word with `=`: argparse would take a value that begins with a dash for an option.
    return [*argv, "--mpi", f"--mpi-args={options}", *job.program, *job.arguments]


def srun_command(job: LaunchJob, environment: Mapping[str, str]) -> list[str]:
    """Return the argv that starts `job` with Slurm's srun, inside an allocation.

    Every host gets its number of ranks; where these differ, host names are repeated in the order of the
    ranks. `--export=ALL` carries the environment over Slurm's own channel (it does not show in ps), also
    where sbatch was told --export=NONE. What mpirun gets as options, ranks find in srun_environment.

    Args:
        environment: of the child.
    """
    names = [host.name for host in job.hosts]
    most_ranks = max(host.slots for host in job.hosts)
    argv = ["srun", "--mpi=pmix", f"--nodes={len(names)}", f"--ntasks={job.num_ranks}"]
    if all(host.slots == most_ranks for host in job.hosts):
        argv += [f"--ntasks-per-node={most_ranks}", "--distribution=block", f"--nodelist={','.join(names)}"]
    else:
        repeated = [host.name for host in job.hosts for _ in range(host.slots)]
        argv += ["--distribution=arbitrary", f"--nodelist={','.join(repeated)}"]
    cpus_per_task = environment.get("SLURM_CPUS_PER_TASK", "")
    if re.fullmatch(r"[1-9][0-9]{0,4}", cpus_per_task):
        # From 22.05 on srun does not read this itself: each rank would get one core.
        argv += [f"--cpus-per-task={cpus_per_task}"]
    # Not --kill-on-bad-exit=1: it would kill ranks that are leaving with 75 a moment after the first, and the
    # job would not look stopped. A rank that dies ends the step by PMIx, within a second.
    argv += ["--kill-on-bad-exit=0", "--wait=30", "--export=ALL", "--cpu-bind=none"]
    if job.tag_output:
        argv += ["--label"]
    return [*argv, *job.extra_options, *job.program, *job.arguments]


def srun_environment(job: LaunchJob, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an srun job: `environment`, and what mpirun would get as options."""
    settings = {f"OMPI_MCA_{name}": value for name, value in _traffic_settings(job).items()}
    if "OPAL_PREFIX" in environment:
        # Slurm offers munge first, for which the wheels have no component, and each rank says so in 9 lines.
        settings["PMIX_MCA_psec"] = "^munge"
    # sbatch's --ntasks-per-node: srun would take it for its own where none is given it.
    kept = {name: value for name, value in environment.items() if name != "SLURM_NTASKS_PER_NODE"}
    return {**settings, **kept}


def horovodrun_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which horovodrun takes the hosts it is given.

    Where LSB_JOBID is set it asks LSF's CSM for them, even though -H names them, and ends with
    `KeyError: 'CSM_ALLOCATION_ID'` on clusters that have none.
    """
    return {name: value for name, value in environment.items() if name != "LSB_JOBID"}


def share_of_cores(hosts: Sequence[Host], allocation: Allocation | None, num_cores: int) -> int | None:
    """Return how many cores each rank has where ranks are most crowded.

    None where that is not known here: each rank then takes its share by itself (cores.share_cores).

    Args:
        hosts: of the job; `slots` are the ranks placed.
        allocation: the batch job it is part of. What that has on each host counts first: `salloc` may leave
            its user on a login node.
        num_cores: of this machine, which counts if it is the only host, or one of a batch job's, whose nodes
            are taken to be alike.
    """
    known: Mapping[str, int] = {} if allocation is None else allocation.cores
    if all(host.name in known for host in hosts):
        return max(1, min(known[host.name] // host.slots for host in hosts))
    are_here = [is_this_machine(host.name) for host in hosts]
    if all(are_here) or (allocation is not None and any(are_here)):
        return max(1, num_cores // max(host.slots for host in hosts))
    return None


def child_environment(
    job: LaunchJob, mpi: OpenMpi | None, environ: Mapping[str, str], *, is_root: bool, cores: int | None
) -> dict[str, str]:
    """Return the launcher's environment: the present one, and what a rank needs besides.

    Args:
        environ: the present environment; what the user, not PBS, has set there stays.
        is_root: mpirun refuses to run as root unless told twice.
        cores: of each rank, as share_of_cores returns them.
    """
    environment = _without_threads_of_pbs(job, environ, cores)
    if is_root:
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    if not job.spans_hosts:
        # Open MPI 4 looks for ssh even where it needs none, and gives up on a machine without it, as
        # container images are.
        environment.setdefault("OMPI_MCA_plm", "isolated")
    if environ.get("SLURM_JOB_ID"):
        # Of srun, by which mpirun starts its daemons, too. A lost node's step is there until Slurm gives the
        # node up, after minutes, and those of a restart would wait for its cores on all other nodes.
        environment.setdefault("SLURM_OVERLAP", "1")
        # In a job of `sbatch --export=NONE` the daemons would get no environment, and not find Open MPI.
        environment["SLURM_EXPORT_ENV"] = "ALL"
    if cores is not None:
        environment.setdefault("OMP_NUM_THREADS", str(cores))
    if mpi is not None and mpi.prefix is not None:
        # horovodrun looks mpirun up on PATH; ranks started without mpirun (gloo) are MPI jobs of one,
        # for which the wheel finds its own files by OPAL_PREFIX only.
        bin_dir = str(mpi.prefix / "bin")
        if environment.get("PATH", "").split(":")[0] != bin_dir:
            environment["PATH"] = ":".join(filter(None, [bin_dir, environment.get("PATH", "")]))
        environment["OPAL_PREFIX"] = str(mpi.prefix)
    if job.interface is not None:
        environment.setdefault("NCCL_SOCKET_IFNAME", job.interface)
        environment.setdefault("GLOO_SOCKET_IFNAME", job.interface)
    return environment


def forwarded_names(job: LaunchJob, environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that ranks on other hosts receive, sorted.

    Only a few: the whole environment would show, secrets included, in `ps` on every host.
    """
    names = {name for name in environment if name in _FORWARDED or name.startswith(_FORWARDED_FAMILIES)}
    if job.spans_hosts and _are_of_one_host(environment.get(_GPUS, ""), in_batch_job=job.in_batch_job):
        names.discard(_GPUS)
    return sorted(names)


def _are_of_one_host(gpus: str, *, in_batch_job: bool) -> bool:
    """Tell whether CUDA_VISIBLE_DEVICES names GPUs of this host that others do not have, or not for this job.

    A batch system says on each host which are the job's. No GPU at all is meant for all hosts: CUDA stops at
    the first entry that is none.
    """
    if gpus.split(",", maxsplit=1)[0].strip() in _NO_GPU:
        return False
    return in_batch_job or _GPU_UUID.search(gpus) is not None


def _without_threads_of_pbs(job: LaunchJob, environ: Mapping[str, str], cores: int | None) -> dict[str, str]:
    """Return the environment with each rank's share where PBS's OMP_NUM_THREADS is all cores of a node.

    PBS sets it, and NCPUS with it, to `ompthreads` of the job's first chunk, or where that is not given to
    its `ncpus`, however many ranks share these. Where ranks have fewer cores than that it is the latter.
    """
    environment = dict(environ)
    threads = environ.get("OMP_NUM_THREADS", "")
    is_by_pbs = "PBS_JOBID" in environ and threads == environ.get("NCPUS") and threads.isdecimal()
    most_ranks = max(host.slots for host in job.hosts)
    if is_by_pbs and most_ranks > 1 and cores is not None and int(threads) > cores:
        environment["OMP_NUM_THREADS"] = str(max(1, int(threads) // most_ranks))
    return environment


def own_program(python: Path) -> tuple[str, ...]:
    """Return how a rank begins: this Python, by absolute path, running speechdp."""
    return (str(python.absolute()), "-m", "speechdp")


def is_script(command: Sequence[str]) -> bool:
    """Return whether what follows `--` is a script of the user's, `python train.py ...`."""
    return bool(command) and re.fullmatch(r"python[0-9.]*", Path(command[0]).name) is not None


def check_script(command: Sequence[str]) -> None:
    """Refuse a speechdp command written as a script, `python -m speechdp train ...`.

    It would train, but as a script, of which it is not known what it has saved and whether it is complete.

    Args:
        command: what follows `--`, of which is_script is true.

    Raises:
        ConfigError: it is one.
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
            "a speechdp command is not started by python, which would take it for a script of yours; "
            "write the command itself after --: ... -- train DATA RUN"
        )


def python_program(command: Sequence[str], python: Path) -> tuple[str, ...]:
    """Return how a rank begins that runs a user's own script, `python train.py ...`; () if it is no Python.

    Args:
        command: what follows `--`.
        python: of this environment, which is taken where the command says just `python`.

    Raises:
        ConfigError: as check_script does.
    """
    if not is_script(command):
        return ()
    check_script(command)
    return (str(python.absolute()) if command[0] in ("python", "python3") else command[0],)


def _own_prefix(mpi: OpenMpi) -> list[str]:
    """Return --prefix for an mpirun of the environment, which may stand elsewhere than it was built for."""
    return [] if mpi.prefix is None else ["--prefix", str(mpi.prefix)]


def _traffic_settings(job: LaunchJob) -> dict[str, str]:
    """Return how ranks talk, by Open MPI's names; horovodrun gives its own.

    The algorithm of allreduce and yielding while waiting are set by the ranks themselves
    (comm/environment.py), so that they hold under srun too and the user's own settings come first.
    """
    # ob1 over shared memory and TCP: what was tried; a half-configured InfiniBand is left alone.  ofi would
    # be for one-sided exchanges, of which there are none, and takes a second at the end of each job.
    settings = {"pml": "ob1", "btl": "^openib,ofi"}
    if job.interface is not None:
        settings["btl_tcp_if_include"] = job.interface
    elif not job.spans_hosts:
        settings["btl"] += ",tcp"  # else every rank listens on all interfaces, and nobody ever calls
    return settings


def _runtime_settings(job: LaunchJob) -> dict[str, str]:
    """Return how the launcher's daemons talk."""
    settings: dict[str, str] = {}
    if job.spans_hosts:
        settings.update(_KEEPALIVE)
    if job.interface is not None:
        settings["oob_tcp_if_include"] = job.interface
    return settings


def _runtime_option(mpi: OpenMpi) -> str:
    """Return the option for settings of the daemons, of which Open MPI 5 has one of its own."""
    return "--prtemca" if mpi.major >= 5 else "--mca"


def _setting_options(
    option: str, settings: Mapping[str, str], job: LaunchJob, environment: Mapping[str, str]
) -> list[str]:
    """Return options for those of our settings that the user has not made: mpirun takes none twice.

    Args:
        option: that gives one.
        settings: by name.
        job: whose options are the user's.
        environment: of the child, in which the user may have made them.
    """
    given = _given_settings(job.extra_options)
    own = {
        name: value
        for name, value in settings.items()
        if name not in given
        # --interface is the user's as well, and said for this job, not for all.
        and (f"{_SETTING_VARIABLE[option]}{name}" not in environment or name.endswith("_if_include"))
    }
    return [word for name, value in own.items() for word in (option, name, value)]


def _given_settings(options: Sequence[str]) -> set[str]:
    """Return the names of the settings that a user's options for mpirun make."""
    return {name for word, name in pairwise(options) if word in _SETTING_OPTIONS}
