"""MPICH, the MPIs derived from it (MVAPICH, Intel MPI), and their common launcher, Hydra."""

from __future__ import annotations

import shlex
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from speechdp.launching.mpi import rank_process
from speechdp.launching.mpi.job import LaunchJob, forwarded_names
from speechdp.launching.mpi.mpirun import Mpirun

#: Prefixes of the variables that MPI and its network libraries read; Hydra passes on only those that it is
#: told to.
_OF_MPI = ("MPICH_", "MPIR_", "MV2_", "MVP_", "I_MPI_", "FI_", "UCX_")
_LAUNCHER_OPTIONS = ("-launcher", "--launcher", "-bootstrap", "--bootstrap")
_AGENT_OPTIONS = ("-launcher-exec", "--launcher-exec", "-bootstrap-exec", "--bootstrap-exec")
_AGENT_VARIABLES = ("HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC")


@dataclass(frozen=True)
class Hydra(Mpirun):
    """Hydra's mpiexec, which connects its ranks by PMI.

    In a batch job it finds by itself how to start processes on other hosts; otherwise it uses ssh.

    Attributes:
        version: version of the MPI.
    """

    version: str

    @property
    def srun_type(self) -> str:
        return "pmi2"

    @property
    def gone_grace_s(self) -> float:
        # Hydra kills all ranks at once, or never: not if they wait in MPI_Init for a rank that died earlier.
        return 1.0

    def command(self, job: LaunchJob, environment: Mapping[str, str]) -> list[str]:
        argv = [str(self.mpirun), "-n", str(job.num_ranks), *self._places(job)]
        if job.interface is not None:
            argv += ["-iface", job.interface]
        if job.tag_output:
            argv += ["-prepend-rank"]
        argv += ["-genvlist", ",".join(forwarded_names(job, environment, _OF_MPI))]
        return [*argv, *job.extra_options, *_watched(job.program), *job.arguments]

    def settings(self, job: LaunchJob, environment: Mapping[str, str], *, is_root: bool) -> dict[str, str]:
        return self._traffic(job)

    def srun_settings(self, job: LaunchJob, environment: Mapping[str, str]) -> dict[str, str]:
        return {}  # `settings` are variables already

    def daemons(self) -> list[Path]:
        # Hydra starts its proxy on other hosts under the path that it has here, even the system's Hydra.
        return [path for name in self._proxies() if (path := self.mpirun.parent / name).exists()]

    def login_agent(self, options: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
        chosen = [value for option, value in pairwise(options) if option in _AGENT_OPTIONS]
        chosen += [environ[name] for name in _AGENT_VARIABLES if environ.get(name)]
        return tuple(shlex.split(chosen[0])) if chosen else ("ssh",)

    def _places(self, job: LaunchJob) -> list[str]:
        """Return the options that place the ranks on hosts."""
        if job.spans_hosts:
            return self._hosts(job)
        # For a localhost that is given with slots, Intel MPI would use ssh.
        is_chosen = any(option in _LAUNCHER_OPTIONS for option in job.extra_options)
        return [*([] if is_chosen else ["-launcher", "fork"]), "-hosts", job.hosts[0].name]

    def _traffic(self, job: LaunchJob) -> dict[str, str]:
        """Return the variables that select the network interface; the libraries below MPI read their own."""
        if job.interface is None:
            return {}
        return {"FI_TCP_IFACE": job.interface, "UCX_NET_DEVICES": job.interface}

    @abstractmethod
    def _hosts(self, job: LaunchJob) -> list[str]:
        """Return the options that give each of several hosts its number of ranks."""

    @abstractmethod
    def _proxies(self) -> tuple[str, ...]:
        """Return possible names of the programs that Hydra starts on other hosts."""


@dataclass(frozen=True)
class Mpich(Hydra):
    """MPICH, or another MPI with MPICH's mpiexec."""

    @property
    def product(self) -> str:
        return f"MPICH {self.version}"

    def _hosts(self, job: LaunchJob) -> list[str]:
        return ["-hosts", job.host_list]

    def _proxies(self) -> tuple[str, ...]:
        return ("hydra_pmi_proxy",)


@dataclass(frozen=True)
class IntelMpi(Hydra):
    """Intel MPI."""

    @property
    def product(self) -> str:
        return f"Intel MPI {self.version}"

    def settings(self, job: LaunchJob, environment: Mapping[str, str], *, is_root: bool) -> dict[str, str]:
        # Intel MPI would pin ranks to cores, and the ranks of two jobs on a host to the same cores.
        pinning = {} if "I_MPI_PIN" in environment else {"I_MPI_PIN": "0"}
        return {**pinning, **self._traffic(job)}

    def _hosts(self, job: LaunchJob) -> list[str]:
        # Intel MPI ignores slots after a host's name, and fills the hosts by its own count of their cores.
        names = [host.name for host in job.hosts for _ in range(host.slots)]
        return ["-hosts", ",".join(names), "-ppn", "1"]

    def _proxies(self) -> tuple[str, ...]:
        return ("hydra_bstrap_proxy", "hydra_pmi_proxy")


def _watched(program: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that runs `program` below a process that reports how it ended."""
    return (str(Path(sys.executable).absolute()), "-IS", str(Path(rank_process.__file__)), *program)
