"""What to start, and which variables to pass to its ranks on other hosts.  Pure functions."""

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
#: Names of GPUs that differ from host to host.
_GPU_UUID = re.compile(r"(?:GPU|MIG)-")
_NO_GPU = ("", "-1", "none", "NoDevFiles")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,31}")


@dataclass(frozen=True)
class LaunchJob:
    """What to start and where.

    Attributes:
        hosts: hosts from Hostfile.allocate; `slots` is the number of ranks placed on each host.
        program: beginning of a rank's command line, e.g. (python, "-m", "speechdp").
        arguments: rest of that command line, passed on unchanged.
        interface: network interface for all traffic between hosts; None: MPI tries every interface.
        tag_output: whether to put the rank before each line of output (this breaks the live bar).
        extra_options: the user's options for mpirun or srun.
        in_batch_job: whether a batch system has chosen the hosts, and the GPUs of each.
        ends_at_once: whether the remaining ranks are killed without delay once one has failed: a restart
            waits for their end, and what they have saved survives it.
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
        """Number of ranks on all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def spans_hosts(self) -> bool:
        """Whether any rank runs on another machine."""
        return len(self.hosts) > 1 or not is_this_machine(self.hosts[0].name)

    @property
    def host_list(self) -> str:
        """Hosts as mpirun and horovodrun read them on the command line: `a:2,b:2`.

        The hostfile itself is not passed on: horovodrun fails on its comments and blank lines, and in this
        way the launcher is sure to use the hosts that were checked.
        """
        return ",".join(f"{host.name}:{host.slots}" for host in self.hosts)


def forwarded_names(
    job: LaunchJob, environment: Mapping[str, str], of_mpi: tuple[str, ...] = ()
) -> list[str]:
    """Return the names of variables that ranks on other hosts receive, sorted.

    They are only a few: the whole environment, secrets included, would show in `ps` on every host.

    Args:
        environment: environment of the launcher.
        of_mpi: prefixes of the MPI's own variables, if its launcher does not pass them on by itself.
    """
    families = (*_FORWARDED_FAMILIES, *of_mpi)
    names = {name for name in environment if name in _FORWARDED or name.startswith(families)}
    if job.spans_hosts and _are_of_one_host(environment.get(_GPUS, ""), in_batch_job=job.in_batch_job):
        names.discard(_GPUS)
    return sorted(names)


def _are_of_one_host(gpus: str, *, in_batch_job: bool) -> bool:
    """Return whether the value of CUDA_VISIBLE_DEVICES holds for this host only.

    It does if it names GPUs that other hosts do not have, or in a batch job, where the batch system says on
    each host which GPUs are the job's.  "No GPU" holds for all hosts; CUDA ignores what follows an entry that
    is not a GPU.
    """
    if gpus.split(",", maxsplit=1)[0].strip() in _NO_GPU:
        return False
    return in_batch_job or _GPU_UUID.search(gpus) is not None
