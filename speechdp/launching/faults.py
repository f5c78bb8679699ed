"""What is known about the end of a job: which rank or host failed, and how."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from speechdp import exit_codes
from speechdp.launching.hostfile import Host

FaultKind = Literal[
    "reported",
    "killed",
    "exited",
    "host lost",
    "aborted",
    "not reached",
    "no program",
    "no folder",
    "no room",
    "no shared memory",
    "start hung",
    "step aborted",
    "step timed out",
]
#: srun's messages about all ranks: that it ends them, and that it waited in vain for some to end.  They are
#: not faults by themselves, but show which hosts are lost (`located`).
_OF_STEP = ("step aborted", "step timed out")
#: Faults that may be only notices: srun's messages about all ranks, and a problem that a launcher meets while
#: it starts ranks and may overcome.  If the ranks then fail, that problem is the cause.
_NOTICES = (*_OF_STEP, "no room")
#: Exit code of Open MPI's mpirun when a host or its daemon is lost; used for all launchers that report this.
LOST_HOST = 205
#: Exit code of ssh, whatever ended the remote program.
ENDED_BY_SSH = 255


@dataclass(frozen=True)
class Fault:
    """A failure reported in a launcher's output.

    Attributes:
        kind: a rank's own message; a rank killed by a signal or ended with an exit code; a lost host; a rank
            that aborted all others after saying why; a host on which no daemon could be started, or without
            the program; a launcher that cannot make its folder, or has no room there; a host without room for
            what its ranks share; ranks that waited in vain for others to start; or a message of srun about
            all ranks.
        rank: index of the rank; None if the launcher does not tell.
        host: host of the rank; None likewise.
        signal: signal that killed the rank.
        exit_code: exit code of the rank.
        silent_hosts: hosts of ranks that gave no sign of life, by a hung rank's message.
        detail: for "no folder": which folder, and why.
    """

    kind: FaultKind
    rank: int | None = None
    host: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    silent_hosts: tuple[str, ...] = ()
    detail: str = ""

    def describe(self) -> str:
        """Return which rank or host failed, and how, as part of a line."""
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        if self.host is not None and self.rank is not None:
            who += f" on {self.host}"
        if self.kind == "reported" and self.exit_code == exit_codes.HUNG:
            return f"the job hung; the message of {who} above names the late ranks"
        return {
            "reported": f"{who} failed, its message is above",
            "aborted": f"{who} failed, its message is above",
            "start hung": "not all ranks have started; run `speechdp doctor` to check every host",
            "killed": f"{who} was killed by {_signal_name(self.signal)}",
            "exited": f"{who} ended with exit code {self.exit_code} without a message",
            "host lost": "a host was lost: it is down, or its link is cut"
            if self.host is None
            else f"host {self.host} was lost: it is down, or its link is cut",
            "not reached": "a host could not be reached, the message of ssh is above; "
            "run `speechdp doctor` to check every host",
            "no folder": f"mpirun cannot create its folder {self.detail}; set TMPDIR to a folder that is "
            "writable on every host",
            "no room": f"mpirun has no space for its files on {self.host}; free some space in TMPDIR (/tmp "
            "if unset), or set it to a folder with free space on every host",
            "no shared memory": f"ranks on {self.host} exchange data through /dev/shm, which is full"
            '; enlarge it (in a container: --shm-size=1g), or give --mpi-args="--mca btl tcp,self"',
            "no program": f"this Python is not on {self.host}; install speechdp there at the same path",
            "step aborted": "srun has ended all ranks",
            "step timed out": "srun timed out waiting for ranks to end",
        }[self.kind]


def ends_job(fault: Fault, *, tolerates_loss: bool = False) -> bool:
    """Return whether no rank can continue after a fault; False for what may be only a notice.

    Args:
        tolerates_loss: whether ranks continue without a lost one (--tolerate-loss).
    """
    if fault.kind in _NOTICES:
        return False
    if fault.kind in ("killed", "exited"):
        return not tolerates_loss
    return fault.kind != "reported" or fault.rank is not None


def is_gone(fault: Fault) -> bool:
    """Return whether a fault is a rank process that ended in any way other than a requested stop.

    Example:
        >>> is_gone(Fault("killed", 1, signal=9)), is_gone(Fault("exited", 1, exit_code=exit_codes.STOPPED))
        (True, False)
    """
    if fault.kind == "exited":
        return fault.exit_code not in (exit_codes.STOPPED, exit_codes.STOPPED_UNSAVED)
    return fault.kind == "killed"


def located(faults: Sequence[Fault], hosts: Sequence[Host], *, was_killed: bool = False) -> tuple[Fault, ...]:
    """Return the faults with hosts named as in the hostfile, even if the launcher names none.

    A host listed by an address or alias calls itself by another name.

    Args:
        hosts: hosts of the job, filled with ranks in order; `slots` are the ranks placed.
        was_killed: whether the launcher was killed because it did not end in time.
    """
    of_rank = [host.name for host in hosts for _ in range(host.slots)]
    known = {short_name(host.name): host.name for host in hosts}

    def locate(fault: Fault) -> Fault:
        host = None if fault.host is None else known.get(short_name(fault.host))
        # With feeders, a rank's own message numbers only training ranks.
        if host is None and fault.kind != "reported" and fault.rank is not None and fault.rank < len(of_rank):
            host = of_rank[fault.rank]
        if host == "localhost":
            host = fault.host  # more informative
        return replace(fault, host=host or fault.host)

    return tuple(map(locate, _after_srun(faults, hosts, was_killed=was_killed)))


def _after_srun(faults: Sequence[Fault], hosts: Sequence[Host], *, was_killed: bool) -> list[Fault]:
    """Return the faults, with the hosts that srun has lost.

    When ranks fail, srun kills the remaining ones and reports how each ended.  It waits for those of a lost
    node, whose loss Slurm learns only minutes later.  So hosts that srun does not report on are lost, and
    ranks that it killed are not the cause.
    """
    of_hosts = [fault for fault in faults if fault.kind not in _OF_STEP]
    kinds = [fault.kind for fault in faults]
    if "step aborted" not in kinds or not (was_killed or "step timed out" in kinds):
        return of_hosts
    reported_hosts = {
        short_name(f.host) for f in of_hosts if f.kind in ("killed", "exited") and f.host is not None
    }
    lost = [host.name for host in hosts if short_name(host.name) not in reported_hosts]
    if len(lost) in (0, len(hosts)):
        return of_hosts
    killed = [fault for fault in faults[kinds.index("step aborted") :] if fault.kind == "killed"]
    rest = [fault for fault in of_hosts if fault not in killed]
    return [*(Fault("host lost", host=host) for host in lost), *rest]


def short_name(host: str) -> str:
    """Return a host's name without its domain, or an address unchanged."""
    return host if host.replace(".", "").isdigit() else host.split(".", maxsplit=1)[0]


def first_cause(faults: Sequence[Fault]) -> Fault | None:
    """Return the fault that best explains why a job ended; None: none is known.

    It is the first of these that there is: a rank killed by a signal other than SIGTERM, a lost host, a rank
    that ended with ssh's exit code and without a message, a message, any other fault.  srun's messages about
    all ranks do not count.
    """
    faults = [fault for fault in faults if fault.kind not in _OF_STEP]
    reported = next((fault for fault in faults if fault.kind == "reported"), None)
    # Behind ssh a killed rank looks like this; ranks with messages have only noticed its end.
    with_message = {fault.rank for fault in faults if fault.kind == "reported"}
    cut_off = next((f for f in faults if f.exit_code == ENDED_BY_SSH and f.rank not in with_message), None)
    lost = next((fault for fault in faults if fault.kind == "host lost"), None)
    killed = next(
        (fault for fault in faults if fault.kind == "killed" and fault.signal != signal.SIGTERM), None
    )
    return killed or lost or cut_off or reported or next(iter(faults), None)


def _signal_name(number: int | None) -> str:
    if number is None:
        return "a signal"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    hint = ", by a user or by the kernel because memory ran out" if number == signal.SIGKILL else ""
    return f"{name}{hint}"
