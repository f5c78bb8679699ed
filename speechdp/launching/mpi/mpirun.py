"""The interface of all kinds of mpirun, for code that starts a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speechdp.launching.mpi.job import LaunchJob
from speechdp.launching.supervise import StopPolicy


@dataclass(frozen=True)
class Mpirun(ABC):
    """The launcher of an MPI installation.

    Attributes:
        mpirun: absolute path of the program.
        prefix: installation folder if the MPI belongs to the Python environment; None: it is the system's.
    """

    mpirun: Path
    prefix: Path | None

    @property
    @abstractmethod
    def product(self) -> str:
        """Name and version of the MPI: "Open MPI 4"."""

    @property
    def gone_grace_s(self) -> float:
        """Time it has to end a job by itself once a rank's process is known to be gone, s (StopPolicy)."""
        return StopPolicy.gone_grace_s

    @property
    @abstractmethod
    def srun_type(self) -> str:
        """Value of `srun --mpi` for ranks of this MPI."""

    @abstractmethod
    def command(self, job: LaunchJob, environment: Mapping[str, str]) -> list[str]:
        """Return the argv that starts `job`.

        Args:
            environment: environment of the child (see child_environment), from which the variables for other
                hosts are taken.
        """

    @abstractmethod
    def settings(self, job: LaunchJob, environment: Mapping[str, str], *, is_root: bool) -> dict[str, str]:
        """Return the variables that the launcher and its ranks need in addition to `environment`.

        They override what the user has set there only if the job cannot run with it.
        """

    @abstractmethod
    def srun_settings(self, job: LaunchJob, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that give ranks of srun the settings that `command` passes as options."""

    @abstractmethod
    def daemons(self) -> list[Path]:
        """Return the paths, on other hosts, of the programs that the launcher starts there."""

    @abstractmethod
    def login_agent(self, options: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the command that logs in to hosts, as words: the user's choice, else ssh.

        Args:
            options: the words of --mpi-args.
            environ: environment of the launcher.
        """
