"""`speechdp doctor`: check every host through the launcher itself before starting a job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from speechdp import exit_codes
from speechdp.cli.support.console import make_console
from speechdp.cli.support.outputs import output_file
from speechdp.comm.environment import announced
from speechdp.doctor.examine import DoctorRequest, Examination, examine, to_json
from speechdp.doctor.finding import Finding
from speechdp.doctor.table import print_findings
from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_written, write_text_atomically
from speechdp.launching.allocation import Allocation, find_allocation
from speechdp.launching.command import Controller, Launcher, check_controller
from speechdp.launching.forwarded_options import split_words
from speechdp.launching.hostfile import Host, Hostfile, local_hosts, read_hostfile
from speechdp.options.shown import shown
from speechdp.ownership.owner import check_no_file


@dataclass(frozen=True)
class DoctorCommand:
    """Check hosts, network and folders by running a short job; print a line per check, with remedies.

    Use the same --hostfile and --launcher as for the real job."""

    hostfile: Annotated[
        Path | None, shown("FILE", "the hosts of the batch job this runs in, else this machine")
    ] = None
    """File with a line `host slots=N` for each host (examples in hostfiles/)."""
    num_ranks: Annotated[int, tyro.conf.arg(name="np", aliases=("-np", "-n"), metavar="N")] = 1
    """Number of ranks on each host.
    Give the job's number to check whether cores and GPUs suffice."""
    data: Annotated[Path | None, shown("DATA", "not checked")] = None
    """Data directory that every host must be able to read."""
    run_folder: Annotated[
        Path | None,
        tyro.conf.arg(aliases=("--run",), metavar="RUN", help_behavior_hint="(default: not checked)"),
    ] = None
    """Run directory that will be written; its parent folder must be shared by all hosts."""
    verify: bool = False
    """Read all of --data on every host and verify the checksums."""
    launcher: Launcher = "mpirun"
    """Program that starts the ranks."""
    controller: Controller = "mpi"
    """Library that Horovod coordinates its ranks over; only with --launcher horovodrun."""
    interface: Annotated[str | None, shown("NAME", "the launcher's choice")] = None
    """Network interface for traffic between hosts, e.g. eth0."""
    mpi_args: Annotated[str, shown("'OPTIONS'", "none")] = ""
    """More options for mpirun, quoted as one argument: --mpi-args="--mca plm_rsh_agent 'ssh -F file'"."""
    bandwidth_mib: Annotated[int, shown("MIB")] = 16
    """Size in MiB of the allreduce that measures the bandwidth."""
    part_limit_s: Annotated[float, shown("SECONDS")] = 60.0
    """Time limit for each check; ranks that exceed it are named."""
    json_file: Annotated[
        Path | None, tyro.conf.arg(aliases=("--json",), metavar="FILE", help_behavior_hint="(default: none)")
    ] = None
    """Also write all findings to this file, as JSON."""

    def run(self) -> int:
        """Run the checks and print their results; return 1 if any check is red."""
        console = make_console()
        file = None if self.json_file is None else output_file(self.json_file, overwrite=True)
        result = self._examine(lambda line: console.print(line, markup=False, highlight=False))
        print_findings(console, result.findings)
        if file is not None:
            try:
                write_text_atomically(file, json.dumps(to_json(result), indent=2) + "\n")
            except OSError as error:
                raise RunError(cannot_be_written(file, error)) from error
        return 0 if result.is_sound else exit_codes.FAILED

    def _examine(self, print_line: Callable[[str], None]) -> Examination:
        if announced() is not None:
            raise ConfigError("doctor starts its own job: give the command without mpirun, srun or launch")
        if self.num_ranks < 1 or self.bandwidth_mib < 1 or self.part_limit_s <= 0:
            raise ConfigError("-np, --bandwidth-mib and --part-limit-s must be positive")
        if self.verify and self.data is None:
            raise ConfigError("--verify: there is no data to verify; give --data DATA, or leave it out")
        check_controller(self.launcher, self.controller)
        mpi_options = split_words("--mpi-args", self.mpi_args)
        try:
            allocation = self._allocation()
            hostfile = self._hosts(allocation)
        except ConfigError as error:
            found, _, remedy = str(error).partition("; ")
            remedy = remedy or "name the hosts with --hostfile FILE (hostfiles/ has examples)"
            return Examination([Finding("hosts", "fail", found, (), remedy)])
        hosts = tuple(replace(host, slots=self.num_ranks) for host in hostfile.hosts)
        return examine(self._request(hosts, hostfile, allocation, mpi_options), print_line)

    def _request(
        self,
        hosts: tuple[Host, ...],
        hostfile: Hostfile,
        allocation: Allocation | None,
        mpi_options: tuple[str, ...],
    ) -> DoctorRequest:
        return DoctorRequest(
            hosts=hosts,
            slots={host.name: host.slots for host in hostfile.hosts},
            source=hostfile.source,
            allocation=allocation,
            launcher=self.launcher,
            controller=self.controller,
            interface=self.interface,
            mpi_options=mpi_options,
            data=self.data,
            folder=None if self.run_folder is None else _folder_of(self.run_folder),
            verify=self.verify,
            num_bytes=self.bandwidth_mib << 20,
            limit_s=self.part_limit_s,
        )

    def _allocation(self) -> Allocation | None:
        """Return the surrounding batch job; with a hostfile, ignore one that cannot be read."""
        try:
            return find_allocation(os.environ)
        except ConfigError:
            if self.hostfile is None:
                raise
            return None

    def _hosts(self, allocation: Allocation | None) -> Hostfile:
        if self.hostfile is not None:
            return read_hostfile(self.hostfile)
        return local_hosts(self.num_ranks) if allocation is None else allocation.hostfile


def _folder_of(run: Path) -> Path:
    """Return the folder to test: the run's own if it exists, else its nearest existing parent.

    Raises:
        ConfigError: the run or a folder above it is a file or a dangling link.
    """
    run = run.absolute()
    folder = next(path for path in (run, *run.parents) if os.path.lexists(path))
    check_no_file(folder)
    return folder
