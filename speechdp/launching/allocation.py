"""Find the hosts a batch system has given this job, from the variables and files it leaves.

Checked in this order (an allocation needs all variables of a row, not only one):

| scheduler | variables | ranks on a host |
|---|---|---|
| slurm | SLURM_JOB_ID, SLURM_JOB_NODELIST | SLURM_TASKS_PER_NODE, else SLURM_NTASKS_PER_NODE |
| lsf | LSB_JOBID and LSB_DJOB_HOSTFILE, LSB_MCPU_HOSTS or LSB_HOSTS | slots of the host |
| pbs | PBS_JOBID, PBS_NODEFILE | lines of the host (mpiprocs) |
| sge | JOB_ID, PE_HOSTFILE | second word of the host's line |

Only Slurm tells how many cores the job has on each host, by SLURM_JOB_CPUS_PER_NODE.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Address
from pathlib import Path
from typing import Literal

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.launching.hostfile import Host, Hostfile, is_address, is_host_name, is_this_machine
from speechdp.launching.hostlist import HostListError, expand_host_list, expand_task_counts

Scheduler = Literal["slurm", "lsf", "pbs", "sge"]

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\[\]-]{0,127}")
_COUNT = re.compile(r"[1-9][0-9]{0,4}")
#: Names of the node that runs an LSF job's script if that is not a compute node.
_LSF_BATCH_NODE = re.compile(r"batch|login|launch", re.IGNORECASE)
#: Most hosts of a job that a message names.
_SHOWN_HOSTS = 4
#: Longest piece of a variable or line that a message shows.
_SHOWN = 80
_REMEDY = "start the job with --hostfile FILE, or unset the variable if this is no batch job"


@dataclass(frozen=True)
class Allocation:
    """What a batch system has allocated to this job.

    Attributes:
        scheduler: the batch system.
        job_id: job id for its commands (scontrol requeue, qrerun); checked, so it cannot be taken for an
            option.
        hostfile: hosts with their ranks; `source` is the variable (and file) they were read from.
        restarts: number of earlier starts of this job; LSF and Grid Engine tell only whether there was one,
            PBS not even that.
        cores: the job's cores on each host, by host name; empty: unknown.
    """

    scheduler: Scheduler
    job_id: str
    hostfile: Hostfile
    restarts: int = 0
    cores: Mapping[str, int] = field(default_factory=dict)


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation this process runs in; None: no batch system has given it hosts.

    Also None in a rank, i.e. below mpirun or in a step of several tasks, whose job has already been placed.

    Args:
        environ: environment of the batch script.

    Raises:
        ConfigError: the allocation cannot be read, or cannot be used from here; the message names variable,
            file, content and remedy.
    """
    if _is_rank(environ):
        return None
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST"):
        return _slurm(environ)
    if environ.get("LSB_JOBID") and any(environ.get(name) for name in _LSF_SOURCES):
        return _lsf(environ)
    if environ.get("PBS_JOBID") and environ.get("PBS_NODEFILE"):
        return _pbs(environ)
    if environ.get("JOB_ID") and environ.get("PE_HOSTFILE"):
        return _grid_engine(environ)
    return None


def with_names_of_slurm(allocation: Allocation, hostfile: Hostfile) -> Hostfile:
    """Return a hostfile with its addresses replaced by the Slurm job's names of these nodes.

    mpirun and srun know the nodes of a job only by these names.  The job's names are resolved only if the
    file has an address.  An address that belongs to none of the nodes that can be resolved here is kept.

    Raises:
        ConfigError: the file lists a node twice, by its name and an address, or by two addresses.
    """
    if allocation.scheduler != "slurm" or not any(is_address(host.name) for host in hostfile.hosts):
        return hostfile
    names = [host.name for host in allocation.hostfile.hosts]
    called = {address: name for name in names for address in _addresses_of(name)}
    own = next(filter(is_this_machine, names), None)
    given: dict[str, str] = {}
    hosts: list[Host] = []
    for host in hostfile.hosts:
        name = called.get(host.name, host.name)
        if is_address(name) and own is not None and is_this_machine(name):
            name = own  # our own name may resolve to loopback
        other = given.setdefault(name.lower(), host.name)
        if other != host.name:
            raise ConfigError(
                f"{hostfile.source}: {other} and {host.name} are both the node {name}; keep one line and add "
                "up its slots"
            )
        hosts.append(Host(name, host.slots))
    return Hostfile(hostfile.source, tuple(hosts))


@lru_cache(maxsize=4096)
def _addresses_of(name: str) -> tuple[str, ...]:
    """Return a host's IPv4 addresses, without loopback; none if the name is unknown."""
    try:
        addresses = socket.gethostbyname_ex(name)[2]
    except (OSError, UnicodeError):
        return ()
    return tuple(address for address in addresses if not IPv4Address(address).is_loopback)


def check_hosts(
    allocation: Allocation, hosts: Sequence[Host], source: str, environ: Mapping[str, str], *, by_srun: bool
) -> None:
    """Refuse hosts of a hostfile that are not the Slurm job's, or have more ranks than may start there.

    mpirun and srun check this, too, but say only that all nodes are filled, or that more processors are
    requested than permitted.  Other batch systems are left to mpirun, which does not know them all.

    Args:
        hosts: hosts of the job; `slots` are the ranks placed.
        source: source of the hosts, for the message.
        environ: environment of the launcher.
        by_srun: whether srun, which counts cores, starts the ranks; mpirun counts tasks.

    Raises:
        ConfigError: there is such a host.
    """
    if allocation.scheduler != "slurm":
        return
    _check_names(allocation, hosts, source, launcher="srun" if by_srun else "mpirun")
    if by_srun:
        _check_cores(allocation, hosts, source, environ)
        return
    given = {host.name.lower(): host.slots for host in allocation.hostfile.hosts}
    for host in hosts:
        slots = given.get(host.name.lower(), host.slots)
        if host.slots > slots:
            raise ConfigError(
                f"{source}: {counted(host.slots, 'rank')} on {host.name}, where the batch job has only "
                f"{counted(slots, 'slot')}, the most that mpirun starts; ask Slurm for more tasks "
                "(--ntasks-per-node), or start fewer ranks there"
            )


def _check_names(allocation: Allocation, hosts: Iterable[Host], source: str, *, launcher: str) -> None:
    """Refuse hosts that cannot belong to the job.  Raises ConfigError.

    These may belong to it: this machine by any of its names, a name with another domain, and any address if
    not all of the job's names can be resolved here.
    """
    names = [host.name for host in allocation.hostfile.hosts]
    known = {_first_label(name) for name in names}
    for host in hosts:
        is_here = is_this_machine(host.name) and any(map(is_this_machine, names))
        is_unknown = is_address(host.name) and not all(map(_addresses_of, names))
        if is_here or is_unknown or _first_label(host.name) in known:
            continue
        shown = ", ".join(names[:_SHOWN_HOSTS]) + (", ..." if len(names) > _SHOWN_HOSTS else "")
        raise ConfigError(
            f"{source}: {host.name} is not one of the hosts of Slurm job {allocation.job_id} ({shown}), and "
            f"{launcher} starts ranks on these only; name them in the file, or leave --hostfile out"
        )


def _check_cores(
    allocation: Allocation, hosts: Iterable[Host], source: str, environ: Mapping[str, str]
) -> None:
    """Refuse more ranks on a host than the job has cores for there, if that is known.  Raises ConfigError."""
    words = environ.get("SLURM_CPUS_PER_TASK", "")
    of_rank = int(words) if _COUNT.fullmatch(words) else 1
    if environ.get("SLURM_OVERCOMMIT"):
        return
    for host in hosts:
        cores = allocation.cores.get(host.name)
        if cores is not None and host.slots * of_rank > cores:
            ranks, given = counted(host.slots, "rank"), counted(cores, "core")
            raise ConfigError(
                f"{source}: {ranks} of {counted(of_rank, 'core')} on {host.name}, where the batch job has "
                f"only {given}, the most that srun uses; ask Slurm for more tasks (--ntasks-per-node), or "
                "start fewer ranks there"
            )


def _first_label(name: str) -> str:
    return name.lower().partition(".")[0]


def _is_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process is below mpirun, or is one of several tasks of a step.

    Raises:
        ConfigError: it is a shell in a step of several tasks on several nodes.  (salloc's own shell may be a
            step of one task; on one node ranks are started without Slurm.)
    """
    if "OMPI_COMM_WORLD_SIZE" in environ or "HOROVOD_SIZE" in environ:
        return True
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    is_one_of_several = tasks.isascii() and tasks.isdigit() and int(tasks) > 1
    is_on_one_node = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "")) == "1"
    if is_one_of_several and environ.get("SLURM_PTY_PORT") and not is_on_one_node:
        raise ConfigError(
            "SLURM_PTY_PORT: this is a shell of srun --pty, whose step occupies the job's tasks on all "
            "nodes; exit it, and run speechdp launch in the shell that salloc opens, or in a batch script"
        )
    return is_one_of_several


def _slurm(environ: Mapping[str, str]) -> Allocation:
    parts = environ.get("SLURM_HET_SIZE", "")
    if _COUNT.fullmatch(parts) and int(parts) > 1:
        raise ConfigError(
            f"SLURM_HET_SIZE={parts}: the hosts of a heterogeneous job cannot be used together; submit a job "
            "of one part (no `#SBATCH hetjob`, no ` : ` between options)"
        )
    source = "SLURM_JOB_NODELIST"
    try:
        names = expand_host_list(environ[source])
    except HostListError as error:
        raise _unreadable(f"{source}={_shown(environ[source])}", str(error)) from error
    counts = _slurm_counts(environ, len(names))
    hosts = _checked(zip(names, counts, strict=True), f"{source}={_shown(environ[source])}")
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    cores = {}
    if environ.get("SLURM_JOB_CPUS_PER_NODE"):
        # Errors are ignored: if the job's hosts were narrowed down, this variable may describe others.
        with suppress(ConfigError):
            counts = _per_node(environ, "SLURM_JOB_CPUS_PER_NODE", len(names))
            cores = dict(zip(names, counts, strict=True))
    return Allocation(
        "slurm",
        _job_id(environ, "SLURM_JOB_ID"),
        Hostfile(source, hosts),
        int(restarts) if re.fullmatch(r"[0-9]{1,9}", restarts) else 0,
        cores,
    )


def _slurm_counts(environ: Mapping[str, str], num_hosts: int) -> list[int]:
    """Return the number of tasks of each node."""
    source = "SLURM_TASKS_PER_NODE"
    if not environ.get(source):
        source = "SLURM_NTASKS_PER_NODE"
        if not environ.get(source):
            return [1] * num_hosts
        uniform = environ[source]
        if not _COUNT.fullmatch(uniform):
            raise _unreadable(f"{source}={_shown(uniform)}", "it is not a number from 1 to 99999")
        return [int(uniform)] * num_hosts
    return _per_node(environ, source, num_hosts)


def _per_node(environ: Mapping[str, str], source: str, num_hosts: int) -> list[int]:
    """Return the numbers in a variable that has one for each node."""
    try:
        counts = expand_task_counts(environ[source])
    except HostListError as error:
        raise _unreadable(f"{source}={_shown(environ[source])}", str(error)) from error
    if len(counts) != num_hosts:
        raise ConfigError(
            f"{source}={_shown(environ[source])} is for {len(counts)} nodes, SLURM_JOB_NODELIST for "
            f"{num_hosts}; call speechdp launch in the batch script itself, not in an srun step, or give "
            "--hostfile FILE"
        )
    return counts


#: In order of preference: the file is never truncated, LSB_HOSTS may be missing or truncated.
_LSF_SOURCES = ("LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS")


def _lsf(environ: Mapping[str, str]) -> Allocation:
    source = next(name for name in _LSF_SOURCES if environ.get(name))
    value = environ[source]
    if source == "LSB_DJOB_HOSTFILE":
        source = f"{source}={value}"
        hosts = _counted(_lines(source, value), source)
    elif source == "LSB_MCPU_HOSTS":
        words = value.split()
        if len(words) % 2:
            raise _unreadable(f"{source}={_shown(value)}", "not pairs of a host and its slots")
        pairs = zip(words[::2], (_count(word, source, value) for word in words[1::2]), strict=True)
        hosts = _checked(pairs, f"{source}={_shown(value)}")
    else:
        hosts = _counted([(f"{source}={_shown(value)}", word) for word in value.split()], source)
    restarts = 1 if environ.get("LSB_RESTART", "").lower() in ("y", "yes") else 0
    hosts = _without_batch_node(hosts, "CSM_ALLOCATION_ID" in environ)
    return Allocation("lsf", _job_id(environ, "LSB_JOBID"), Hostfile(source, hosts), restarts)


def _without_batch_node(hosts: tuple[Host, ...], is_csm: bool) -> tuple[Host, ...]:
    """Leave out a node that only runs the script, as on Summit: the first, with one slot and such a name.

    `bsub -n 5 -R span[ptile=4]` may give a compute node a single slot, too, so one slot is not proof enough.
    """
    first, *others = hosts
    is_called_so = is_csm or _LSF_BATCH_NODE.search(first.name) is not None
    return tuple(others) if others and first.slots == 1 and is_called_so else hosts


def _pbs(environ: Mapping[str, str]) -> Allocation:
    source = f"PBS_NODEFILE={environ['PBS_NODEFILE']}"
    hosts = _counted(_lines(source, environ["PBS_NODEFILE"]), source)
    return Allocation("pbs", _job_id(environ, "PBS_JOBID"), Hostfile(source, hosts))


def _grid_engine(environ: Mapping[str, str]) -> Allocation:
    source = f"PE_HOSTFILE={environ['PE_HOSTFILE']}"
    pairs: list[tuple[str, int]] = []
    for where, line in _lines(source, environ["PE_HOSTFILE"]):
        words = line.split()
        if len(words) < 2:
            raise _unreadable(where, f"{_shown(line)} is not `host slots queue range`")
        pairs.append((words[0], _count(words[1], where, line)))
    job_id = _job_id(environ, "JOB_ID")
    task = environ.get("SGE_TASK_ID", "")
    if _COUNT.fullmatch(task):
        job_id = f"{job_id}.{task}"
    restarts = 1 if environ.get("RESTARTED") in ("1", "2") else 0
    return Allocation("sge", job_id, Hostfile(source, _checked(pairs, source)), restarts)


def _lines(source: str, path: str) -> list[tuple[str, str]]:
    """Return the non-blank lines of a file, each preceded by its name in messages."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable(source, reason) from error
    lines = enumerate(text.splitlines(), start=1)
    return [(f"{source}, line {number}", line.strip()) for number, line in lines if line.strip()]


def _counted(words: Iterable[tuple[str, str]], source: str) -> tuple[Host, ...]:
    """Return hosts in the order of their first mention, with one slot per mention."""
    slots: dict[str, int] = {}
    for where, name in words:
        _check_name(name, where)
        slots[name] = slots.get(name, 0) + 1
    return _checked(slots.items(), source)


def _checked(pairs: Iterable[tuple[str, int]], source: str) -> tuple[Host, ...]:
    """Check host names; return one entry per host in the order of their first mention."""
    slots: dict[str, int] = {}
    for name, count in pairs:
        _check_name(name, source)
        slots[name] = slots.get(name, 0) + count
    if not slots:
        raise _unreadable(source, "no hosts in it")
    _refuse_one_host_under_two_names(list(slots), source)
    return tuple(Host(name, count) for name, count in slots.items())


def _refuse_one_host_under_two_names(names: Sequence[str], source: str) -> None:
    lower: dict[str, str] = {}
    for name in names:
        other = lower.setdefault(name.lower(), name)
        if other != name:
            raise _unreadable(source, f"{other!r} and {name!r} are one host")


def _check_name(name: str, where: str) -> None:
    if not is_host_name(name):
        raise _unreadable(where, f"{_shown(name)} is not a host name or IPv4 address")


def _count(word: str, where: str, content: str) -> int:
    if not _COUNT.fullmatch(word):
        raise _unreadable(where, f"{_shown(word)} in {_shown(content)} is not a number of slots")
    return int(word)


def _job_id(environ: Mapping[str, str], variable: str) -> str:
    job_id = environ[variable]
    if not _JOB_ID.fullmatch(job_id):
        raise _unreadable(f"{variable}={_shown(job_id)}", "it is not a job's number")
    return job_id


def _unreadable(where: str, reason: str) -> ConfigError:
    return ConfigError(f"{where}: the batch system's hosts cannot be read ({reason}); {_REMEDY}")


def _shown(text: str) -> str:
    """Return a foreign text for a message: on one line, and shortened."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
