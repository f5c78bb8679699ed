"""What every kind of mpirun offers to whoever starts a job."""

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
        mpirun: the program, by absolute path.
        prefix: installation folder, where it is the environment's own; None: the system's.
    """

    mpirun: Path
    prefix: Path | None

    @property
    @abstractmethod
    def product(self) -> str:
        """Whose it is, with its version: "Open MPI 4"."""

    @property
    def gone_grace_s(self) -> float:
        """How long it may take to end a job by itself once it is known that a rank's process is gone, s."""
        return StopPolicy.gone_grace_s

    @property
    @abstractmethod
    def srun_type(self) -> str:
        """What `srun --mpi` has to offer to this MPI's ranks."""

    @abstractmethod
    def command(self, job: LaunchJob, environment: Mapping[str, str]) -> list[str]:
        """Return the argv that starts `job`.

        Args:
            environment: of the child (see child_environment); what travels to other hosts is taken from it.
        """

    @abstractmethod
    def settings(self, job: LaunchJob, environment: Mapping[str, str], *, is_root: bool) -> dict[str, str]:
        """Return variables that the launcher and its ranks need besides those of `environment`.

        What the user has set there is not among them, unless the job cannot do with it.
        """

    @abstractmethod
    def srun_settings(self, job: LaunchJob, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which ranks of srun get what `command` has as options."""

    @abstractmethod
    def daemons(self) -> list[Path]:
        """Return what the launcher starts on other hosts, by the paths that it has there."""

    @abstractmethod
    def login_agent(self, options: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return what logs in to hosts, as words: the user's choice, else ssh.

        Args:
            options: the words of --mpi-args.
        """
