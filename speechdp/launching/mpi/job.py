"""What is to be started, and which variables travel to its ranks on other hosts; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from speechdp.errors import ConfigError
from speechdp.launching.hostfile import Host, is_this_machine

#: Variables every rank needs, besides those of the families below.
_FORWARDED = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH")
_FORWARDED_FAMILIES = ("CUDA_", "HOROVOD_", "NCCL_", "GLOO_SOCKET_", "SPEECHDP_")
_GPUS = "CUDA_VISIBLE_DEVICES"
#: Names of GPUs, other ones on each host.
_GPU_UUID = re.compile(r"(?:GPU|MIG)-")
_NO_GPU = ("", "-1", "none", "NoDevFiles")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,31}")


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
        ends_at_once: where one rank has failed the others are killed without delay: another start waits for
            their end, and what they save outlives that.
    """

    hosts: tuple[Host, ...]
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    interface: str | None = None
    tag_output: bool = False
    extra_options: tuple[str, ...] = ()
    in_batch_job: bool = False
    ends_at_once: bool = False

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


def forwarded_names(
    job: LaunchJob, environment: Mapping[str, str], of_mpi: tuple[str, ...] = ()
) -> list[str]:
    """Return the names of variables that ranks on other hosts receive, sorted.

    Only a few: the whole environment would show, secrets included, in `ps` on every host.

    Args:
        of_mpi: how the names of the MPI's own settings begin, where its launcher passes none on by itself.
    """
    families = (*_FORWARDED_FAMILIES, *of_mpi)
    names = {name for name in environment if name in _FORWARDED or name.startswith(families)}
    if job.spans_hosts and _are_of_one_host(environment.get(_GPUS, ""), in_batch_job=job.in_batch_job):
        names.discard(_GPUS)
    return sorted(names)


def _are_of_one_host(gpus: str, *, in_batch_job: bool) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES names GPUs that other hosts lack, or lack for this job.

    A batch system says on each host which are the job's. No GPU at all is meant for all hosts: CUDA stops at
    the first entry that is none.
    """
    if gpus.split(",", maxsplit=1)[0].strip() in _NO_GPU:
        return False
    return in_batch_job or _GPU_UUID.search(gpus) is not None
