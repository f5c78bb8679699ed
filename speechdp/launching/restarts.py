"""Start a job again after a fault: whether that may help, over which hosts, and with which command line."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from speechdp import exit_codes
from speechdp.errors import ConfigError
from speechdp.launching.hostfile import Host, Hostfile, is_this_machine
from speechdp.launching.launcher_output import Fault
from speechdp.launching.outcome import Target, last_checkpoint
from speechdp.launching.supervise import JobEnd

#: A host on which ranks died so often is left out where the others have room for all ranks.
_FAILURES_OF_A_BAD_HOST = 2
_PROBE_S = 15.0
_POLL_S = 0.1


@dataclass(frozen=True)
class RestartPolicy:
    """How often, and with how few ranks, a job may be started again.

    Attributes:
        max_restarts: starts after the first; 0: none.
        min_ranks: fewest ranks to go on with where hosts are gone; None: as many as at the start.
    """

    max_restarts: int = 0
    min_ranks: int | None = None

    def check(self, num_ranks: int, target: Target | None) -> None:
        """Refuse, before the first start, what could never be.  Raises ConfigError."""
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts {self.max_restarts}: must be at least 0")
        if self.max_restarts and target is None:
            raise ConfigError("--max-restarts: only train and sweep can be started again and go on")
        if self.min_ranks is None:
            return
        if not 1 <= self.min_ranks <= num_ranks:
            raise ConfigError(
                f"--min-ranks {self.min_ranks}: must be from 1 to the number of ranks, {num_ranks}"
            )
        if not self.max_restarts:
            raise ConfigError(
                "--min-ranks says with how few ranks to start again; give --max-restarts as well"
            )


@dataclass
class Restarts:
    """Decides about every further start of a job.

    Args:
        policy: how often.
        hostfile: all hosts that may be used.
        num_ranks: wanted.
        target: the run; None: nothing that could go on.
        reachable: returns those of some hosts on which a process can be started.
    """

    policy: RestartPolicy
    hostfile: Hostfile
    num_ranks: int
    target: Target | None
    reachable: Callable[[Sequence[Host]], list[Host]]
    _done: int = 0
    _before: Path | None = None
    _failures: Counter[str] = field(default_factory=Counter)

    def begin(self) -> tuple[Host, ...]:
        """Return the hosts of the first start.  Raises ConfigError: too few slots."""
        self._before = None if self.target is None else last_checkpoint(self.target)
        return self.hostfile.allocate(self.num_ranks)

    def why_not(self, end: JobEnd, exit_code: int) -> str | None:
        """Return why the job is not to be started again, None where it is; "": there is no need to say."""
        if (
            exit_code == 0
            or self.policy.max_restarts == 0
            or end.stop_signal is not None
            or self.target is None
        ):
            return ""
        if exit_code in (exit_codes.USAGE, exit_codes.STOPPED):
            return ""
        # Open MPI 5 returns 0 when a host is lost: that is no refusal.
        if exit_code == exit_codes.FAILED and end.exit_code != 0 and not self._has_gone_on():
            return "not started again: it would fail in the same way, as there is no checkpoint of this start"
        if self._done >= self.policy.max_restarts:
            return f"not started again: --max-restarts {self.policy.max_restarts} are used up"
        return None

    def next_hosts(self, faults: Sequence[Fault]) -> tuple[Host, ...]:
        """Return the hosts for the next start, leaving out those that failed.

        Raises:
            ConfigError: too few slots are left.
        """
        self._done += 1
        suspects = _hosts_at_fault(faults)
        self._failures.update(suspects)
        usable = self.reachable(self.hostfile.hosts)
        good = [host for host in usable if self._failures[_short(host.name)] < _FAILURES_OF_A_BAD_HOST]
        if sum(host.slots for host in good) >= self.num_ranks:
            usable = good
        slots = sum(host.slots for host in usable)
        least = self.num_ranks if self.policy.min_ranks is None else self.policy.min_ranks
        if slots < least:
            gone = ", ".join(host.name for host in self.hostfile.hosts if host not in usable)
            raise ConfigError(
                f"not started again: {least} ranks need as many slots, the hosts that answer have {slots} "
                f"(no answer: {gone}); mend them, add hosts to the hostfile, or lower --min-ranks"
            )
        self._before = None if self.target is None else last_checkpoint(self.target)
        left = replace(self.hostfile, hosts=tuple(usable))
        return left.allocate(min(self.num_ranks, slots))

    @property
    def number(self) -> int:
        """Starts so far after the first."""
        return self._done

    def _has_gone_on(self) -> bool:
        assert self.target is not None
        return last_checkpoint(self.target) != self._before


def going_on(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a further start: the same run goes on."""
    kept = [word for word in arguments if word not in ("--overwrite", "--resume")]
    # A sweep keeps what is finished by itself.
    return (*kept, "--resume") if kept[0] == "train" else tuple(kept)


def find_reachable(
    hosts: Sequence[Host], probe: Callable[[Host], list[str]], environment: Mapping[str, str]
) -> list[Host]:
    """Return the hosts on which the launcher can start a process; all are tried at the same time.

    Args:
        probe: returns the command line that runs `true` on a host.
        environment: of the probes.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    for host in hosts:
        if not is_this_machine(host.name):
            running[host.name] = subprocess.Popen(
                probe(host),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    deadline = time.monotonic() + _PROBE_S
    while time.monotonic() < deadline and any(child.poll() is None for child in running.values()):
        time.sleep(_POLL_S)
    for child in running.values():
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return [host for host in hosts if host.name not in running or running[host.name].returncode == 0]


def _hosts_at_fault(faults: Sequence[Fault]) -> set[str]:
    """Return the short names of hosts that a fault names, those of ranks that only noticed it left out."""
    hosts = {_short(fault.host) for fault in faults if fault.host and fault.kind in ("killed", "host lost")}
    return hosts | {_short(host) for fault in faults for host in fault.silent_hosts}


def _short(host: str) -> str:
    return host if host.replace(".", "").isdigit() else host.split(".", maxsplit=1)[0]
