"""The process that claims a folder, and what another process can know about whether it is gone."""

from __future__ import annotations

import enum
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from speechdp.errors import printable
from speechdp.ownership.batch_job import SchedulerJob, find_batch_job

CLAIM_FORMAT = "speechdp-owner"
CLAIM_VERSION = 1
#: PID namespace of a host's own processes, not of those in containers; the number is fixed in Linux.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
#: Variable set by `speechdp launch` for its ranks: a unique word, a colon, and the number of the start.
START_VARIABLE = "SPEECHDP_START"


class ProcessState(enum.Enum):
    """What is known of a process."""

    GONE = "gone"
    ALIVE = "alive"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Claimant:
    """A process that claims a folder.

    Attributes:
        command: what the process does, e.g. "train".
        host: host name.
        pid: process id on that host.
        process_start: start time of the process, in ticks since the host booted; None without /proc.
        boot: id of the host's boot; "" if unknown, as for the next two.
        pid_namespace: namespace of `pid`: containers number their processes separately.
        machine: id of the installation on the host.
        since: time of the claim (ISO 8601).
        nonce: a word that no other claim has.
        job: the batch job that the process is part of.
        launch: the `speechdp launch` that started it; `launch_start`: which of its starts; "" and 0 without.
    """

    command: str
    host: str
    pid: int
    process_start: int | None
    boot: str
    pid_namespace: str
    machine: str
    since: str
    nonce: str
    job: SchedulerJob | None = None
    launch: str = ""
    launch_start: int = 0

    @classmethod
    def here(cls, command: str, environment: Mapping[str, str]) -> Claimant:
        """Return this process as a new claimant.

        Args:
            environment: environment of this process.
        """
        launch, _, start = environment.get(START_VARIABLE, "").partition(":")
        counted = start.isascii() and start.isdigit()
        return cls(
            command=command,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_start=_process_start(os.getpid()),
            boot=_read("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_pid_namespace(),
            machine=_read("/etc/machine-id"),
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            nonce=uuid.uuid4().hex,
            job=find_batch_job(environment),
            launch=launch if counted else "",
            launch_start=int(start) if counted else 0,
        )

    @classmethod
    def from_json(cls, values: Any) -> Claimant:
        """Return what `to_json` wrote.

        Raises:
            ValueError, LookupError, TypeError: the values are not a claimant's.
        """
        if values["format"] != CLAIM_FORMAT or values["version"] != CLAIM_VERSION:
            raise ValueError("not the claim of a folder, or of another version")
        job = values["job"]
        start = values["process_start"]
        return cls(
            **{name: str(values[name]) for name in ("command", "host", "boot", "pid_namespace", "machine")},
            **{name: str(values[name]) for name in ("since", "nonce", "launch")},
            pid=int(values["pid"]),
            process_start=None if start is None else int(start),
            job=None
            if job is None
            else SchedulerJob(
                str(job["scheduler"]), str(job["job_id"]), str(job["task"]), int(job["restarts"])
            ),
            launch_start=int(values["launch_start"]),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of owner.json."""
        return {"format": CLAIM_FORMAT, "version": CLAIM_VERSION, **asdict(self)}

    def state_of(self, other: Claimant) -> ProcessState:
        """Return what this process, on its host, knows about another."""
        if self.boot and self.pid_namespace and self.boot == other.boot:
            if self.pid_namespace != other.pid_namespace:
                return ProcessState.UNKNOWN
            return process_state(other.pid, other.process_start)
        if self._is_on_machine_of(other) and self.boot and other.boot:
            return ProcessState.GONE  # the host has been rebooted since
        return ProcessState.UNKNOWN

    def _is_on_machine_of(self, other: Claimant) -> bool:
        """Return whether both are certainly on one host; containers may share both name and id."""
        here, there = ((one.host, one.machine, one.pid_namespace) for one in (self, other))
        return bool(self.machine) and here == there and self.pid_namespace == _FIRST_PID_NAMESPACE

    def comes_after(self, other: Claimant) -> bool:
        """Return whether this process replaces another: after a requeue, or restarted by launch."""
        if self.job is not None and other.job is not None and self.job.is_later_start_of(other.job):
            return True
        return bool(self.launch) and self.launch == other.launch and self.launch_start > other.launch_start

    def __str__(self) -> str:
        job = "" if self.job is None else f", {self.job}"
        text = f"speechdp {self.command}, process {self.pid} on {self.host}{job}, since {self.since}"
        return printable(text)  # it may come from a file


def process_state(pid: int, start: int | None) -> ProcessState:
    """Return whether the process with this id and start time still exists on this host."""
    here = _stat(pid)
    if here is not None and start is not None:
        state, started = here
        return ProcessState.ALIVE if started == start and state not in ("Z", "X") else ProcessState.GONE
    # Last, as the process may end meanwhile.  /proc may hide other users' processes.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ProcessState.GONE
    except (OverflowError, OSError):
        pass
    return ProcessState.UNKNOWN


def _process_start(pid: int) -> int | None:
    here = _stat(pid)
    return None if here is None else here[1]


def _stat(pid: int) -> tuple[str, int] | None:
    """Return a process's state and start time, in ticks since the boot."""
    # The name, in brackets, may itself contain blanks and brackets: parse after the last bracket.
    words = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    try:
        return words[0], int(words[19])
    except (LookupError, ValueError):
        return None


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
