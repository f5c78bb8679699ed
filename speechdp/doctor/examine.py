"""Run a whole examination: hosts, programs, logins, the probe's job, and its judgement."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speechdp.doctor.finding import Finding, ok, some_of
from speechdp.doctor.job import JobRecord, run_probe
from speechdp.doctor.judge_network import judge_clocks, judge_interfaces, judge_speed
from speechdp.doctor.judge_nodes import judge_nodes
from speechdp.doctor.judge_paths import judge_data, judge_folder
from speechdp.doctor.judge_start import judge_job, judge_reach
from speechdp.doctor.probe import TOKEN_PREFIX, ProbeOptions
from speechdp.doctor.reach import Login, Reach, look_at_hosts
from speechdp.doctor.seen import label_ranks
from speechdp.errors import ConfigError
from speechdp.launching.allocation import Allocation
from speechdp.launching.command import (
    Controller,
    Launcher,
    child_environment,
    horovodrun_command,
    horovodrun_environment,
    share_of_cores,
    srun_command,
    srun_environment,
)
from speechdp.launching.cores import available_cores
from speechdp.launching.hostfile import Host
from speechdp.launching.mpi.job import LaunchJob
from speechdp.launching.mpi.mpirun import Mpirun
from speechdp.launching.programs import find_horovodrun, find_mpirun

_PROBE = ("-m", "speechdp.doctor.probe")


@dataclass(frozen=True)
class DoctorRequest:
    """What to examine.

    Attributes:
        hosts: hosts, with the number of probe ranks to place on each.
        slots: slots of each host, which a job would fill.
        source: where the list of hosts comes from.
        allocation: the batch job that this is part of; None: outside of one.
        launcher, controller, interface, mpi_options: as for `speechdp launch`.
        data: data directory to check; None: none.
        folder: folder, to check, that a run is to be written to; None: none.
        verify: whether to read all data.
        num_bytes: size of the allreduce that is timed, bytes.
        limit_s: time limit of each part of the probe, s.
    """

    hosts: tuple[Host, ...]
    slots: Mapping[str, int]
    source: str
    allocation: Allocation | None
    launcher: Launcher
    controller: Controller
    interface: str | None
    mpi_options: tuple[str, ...]
    data: Path | None
    folder: Path | None
    verify: bool
    num_bytes: int
    limit_s: float


@dataclass
class Examination:
    """The results of an examination.

    Attributes:
        findings: findings, in the order of the table.
        command: command line that started the probe.
        reaches: state of each host as seen from here.
        job: record of the probe's job; None: it was not started.
    """

    findings: list[Finding] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    reaches: list[Reach] = field(default_factory=list)
    job: JobRecord | None = None

    @property
    def is_sound(self) -> bool:
        """Whether no check failed."""
        return all(finding.status != "fail" for finding in self.findings)


def examine(request: DoctorRequest, print_line: Callable[[str], None]) -> Examination:
    """Check hosts from here, run the probe on those that can be reached, and judge all results.

    Args:
        request: what to examine.
        print_line: prints a line about what is being done.
    """
    result = Examination([ok("hosts", f"{some_of(h.name for h in request.hosts)} ({request.source})")])
    try:
        programs = _find_programs(request)
    except ConfigError as error:
        remedy = "run launch/setup on this machine, or choose another --launcher"
        result.findings.append(Finding("programs", "fail", str(error), (), remedy))
        return result
    result.findings.append(ok("programs", programs.describe()))
    print_line(f"checking hosts: {len(request.hosts)} ...")
    names = [host.name for host in request.hosts]
    result.reaches = look_at_hosts(names, _login(request, programs))
    _judge_reaches(result)
    good = {reach.host for reach in result.reaches if reach.is_reachable}
    hosts = tuple(host for host in request.hosts if host.name in good)
    if hosts:
        num_ranks = sum(host.slots for host in hosts)
        print_line(f"starting the job with {request.launcher}, ranks: {num_ranks} ...")
        _run_job(request, programs, hosts, result)
    return result


@dataclass(frozen=True)
class _Programs:
    """The launcher's programs on this machine."""

    launcher: Path
    mpi: Mpirun

    def describe(self) -> str:
        """Return the programs as text for a line."""
        mpirun = f"{self.mpi.mpirun} ({self.mpi.product})"
        return mpirun if self.launcher == self.mpi.mpirun else f"{self.launcher}, {mpirun}"


def _find_programs(request: DoctorRequest) -> _Programs:
    prefix, search_path = Path(sys.prefix), os.environ.get("PATH", os.defpath)
    mpi = find_mpirun(prefix, search_path)
    if request.launcher == "horovodrun":
        return _Programs(find_horovodrun(prefix, search_path), mpi)
    if request.launcher == "mpirun":
        return _Programs(mpi.mpirun, mpi)
    found = shutil.which("srun", path=search_path)
    if found is None:
        raise ConfigError("no srun on PATH; choose --launcher mpirun, or start inside a Slurm allocation")
    return _Programs(Path(found), mpi)


def _login(request: DoctorRequest, programs: _Programs) -> Login | None:
    """Return how the launcher will log in to hosts; None: it needs no ssh."""
    # In a Slurm job mpirun lets srun start its daemons, and hosts may refuse ssh.
    in_slurm = request.allocation is not None and request.allocation.scheduler == "slurm"
    if request.launcher == "srun" or (request.launcher == "mpirun" and in_slurm):
        return None
    wanted = [Path(sys.executable).absolute()]
    if request.controller != "mpi":
        return Login(("ssh",), tuple(wanted))
    agent = programs.mpi.login_agent(request.mpi_options, os.environ)
    return Login(agent, (*wanted, *programs.mpi.daemons()))


def _judge_reaches(result: Examination) -> None:
    for reach in result.reaches:
        result.findings += judge_reach(reach)
    good = [reach for reach in result.reaches if reach.is_reachable and reach.tried]
    if good:
        others = [reach.host for reach in good if not reach.is_local]
        how = f"{some_of(others)} by ssh without a prompt" if others else "this machine"
        result.findings.append(ok("reachable", how))


def _run_job(
    request: DoctorRequest, programs: _Programs, hosts: tuple[Host, ...], result: Examination
) -> None:
    placed = [host.name for host in hosts for _ in range(host.slots)]
    options = ProbeOptions(
        data="" if request.data is None else str(request.data.absolute()),
        folder="" if request.folder is None else str(request.folder),
        token=secrets.token_hex(8),
        verify=request.verify,
        num_bytes=request.num_bytes,
        limit_s=request.limit_s,
        hosts=tuple(placed),
    )
    program = (str(Path(sys.executable).absolute()), *_PROBE)
    job = LaunchJob(
        hosts,
        program,
        (options.to_json(),),
        interface=request.interface,
        extra_options=request.mpi_options,
        in_batch_job=request.allocation is not None,
    )
    # With the number of threads that each rank of a job would have, not that of the few probe ranks.
    filled = tuple(replace(host, slots=max(host.slots, request.slots.get(host.name, 0))) for host in hosts)
    environment = child_environment(
        replace(job, hosts=filled),
        programs.mpi,
        os.environ,
        is_root=os.geteuid() == 0,
        cores=share_of_cores(filled, request.allocation, available_cores()),
    )
    try:
        result.command, environment = _command(request, programs, job, environment)
    except ConfigError as error:
        result.findings.append(Finding("job", "fail", str(error), (), "choose another --launcher"))
        return
    result.job = run_probe(result.command, environment, job.num_ranks, request.limit_s)
    if request.folder is not None:
        _remove_tokens(request.folder, options.token)
    result.findings += _judge(request, result.job, placed)


def _command(
    request: DoctorRequest, programs: _Programs, job: LaunchJob, environment: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's argv and environment, as `speechdp launch` would make them."""
    if request.launcher == "srun":
        return srun_command(job, programs.mpi, environment), srun_environment(job, programs.mpi, environment)
    if request.launcher == "horovodrun":
        horovodrun = (sys.executable, str(programs.launcher))
        argv = horovodrun_command(job, horovodrun, request.controller, programs.mpi)
        return argv, horovodrun_environment(environment)
    return programs.mpi.command(job, environment), environment


def _judge(request: DoctorRequest, job: JobRecord, placed: Sequence[str]) -> list[Finding]:
    facts = {number: record.facts for number, record in job.ranks.items()}
    ranks = label_ranks(facts, placed, trust_place=request.launcher != "srun")
    ended = judge_job(job, placed)
    hangs = ended.status == "fail" and bool(ranks)
    return [
        ended,
        *judge_nodes(ranks, request.slots),
        *judge_data(ranks, str(request.data)),
        *judge_folder(ranks, str(request.folder)),
        *judge_clocks(ranks),
        *judge_interfaces(ranks, request.interface, job_hangs=hangs),
        *judge_speed(ranks),
    ]


def _remove_tokens(folder: Path, token: str) -> None:
    """Remove files that killed ranks have left here."""
    for path in folder.glob(f"{TOKEN_PREFIX}{token}-*"):
        path.unlink(missing_ok=True)


def to_json(result: Examination) -> dict[str, Any]:
    """Return all results, as JSON."""
    job = result.job
    return {
        "findings": [finding.to_json() for finding in result.findings],
        "command": result.command,
        "hosts": [
            {"host": r.host, "address": r.address, "exit_code": r.exit_code, "said": r.output}
            for r in result.reaches
        ],
        "ranks": {} if job is None else {str(n): record.facts for n, record in sorted(job.ranks.items())},
        "exit_code": None if job is None else job.exit_code,
        "output": [] if job is None else job.output,
    }
