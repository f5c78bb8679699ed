"""What is known of the end of a job: which rank or host failed, and how."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from speechdp import exit_codes
from speechdp.launching.hostfile import Host

FaultKind = Literal[
    "said",
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
#: What srun says about all ranks: that it ends them, and that it has waited in vain for some to end.  No
#: fault by itself: it tells which hosts are lost (`located`).
_OF_STEP = ("step aborted", "step timed out")
#: What a launcher notices while it starts ranks, and may get over; it tells why where they then fail.
_NOTICES = (*_OF_STEP, "no room")
#: What Open MPI's mpirun returns when a host or its daemon is lost; for all launchers, where they tell it.
LOST_HOST = 205
#: What ssh returns, whatever ended the program on the other side.
ENDED_BY_SSH = 255


@dataclass(frozen=True)
class Fault:
    """What a launcher's output tells about the end of a job.

    Attributes:
        kind: a rank's own message, a rank killed by a signal or ended with an exit code, a host lost, a rank
            that aborted all others, having said why, a host on which no daemon could be started, or one
            without the program, a launcher that can make no folder for itself, or has no room there, a host
            whose ranks have no room for what they share, or ranks that waited in vain for others to start;
            and what srun says of all ranks.
        rank: index of the rank, None where the launcher does not tell.
        host: its host, None likewise.
        signal: what killed it.
        exit_code: what it ended with.
        silent_hosts: hosts of ranks that, by a hung rank's message, gave no sign of life.
        detail: of "no folder": which, and why not.
    """

    kind: FaultKind
    rank: int | None = None
    host: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    silent_hosts: tuple[str, ...] = ()
    detail: str = ""

    def describe(self) -> str:
        """Return who failed and how, for one line."""
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        if self.host is not None and self.rank is not None:
            who += f" on {self.host}"
        if self.kind == "said" and self.exit_code == exit_codes.HUNG:
            return f"the job hung; the message of {who} above names the late ranks"
        return {
            "said": f"{who} failed, its message is above",
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
            "step timed out": "srun has waited in vain for ranks to end",
        }[self.kind]


def ends_job(fault: Fault, *, tolerates_loss: bool = False) -> bool:
    """Tell whether a fault is one after which no rank can go on; what might be a mere notice is not.

    Args:
        tolerates_loss: the ranks go on without one that is gone (--tolerate-loss).
    """
    if fault.kind in _NOTICES:
        return False
    if fault.kind in ("killed", "exited"):
        return not tolerates_loss
    return fault.kind != "said" or fault.rank is not None


def is_gone(fault: Fault) -> bool:
    """Tell whether a fault is a rank whose process has ended otherwise than it was asked to.

    Example:
        >>> is_gone(Fault("killed", 1, signal=9)), is_gone(Fault("exited", 1, exit_code=exit_codes.STOPPED))
        (True, False)
    """
    if fault.kind == "exited":
        return fault.exit_code not in (exit_codes.STOPPED, exit_codes.STOPPED_UNSAVED)
    return fault.kind == "killed"


def located(faults: Sequence[Fault], hosts: Sequence[Host], *, was_killed: bool = False) -> tuple[Fault, ...]:
    """Return the faults with hosts called as the hostfile has them, also where the launcher tells none.

    A host that is an address or an alias there calls itself something else.

    Args:
        hosts: of the job, filled with ranks in order; `slots` are the ranks placed.
        was_killed: the launcher was, as it did not end in time.
    """
    of_rank = [host.name for host in hosts for _ in range(host.slots)]
    known = {short_name(host.name): host.name for host in hosts}

    def locate(fault: Fault) -> Fault:
        host = None if fault.host is None else known.get(short_name(fault.host))
        # What a rank says of itself counts training ranks only, where others feed.
        if host is None and fault.kind != "said" and fault.rank is not None and fault.rank < len(of_rank):
            host = of_rank[fault.rank]
        if host == "localhost":
            host = fault.host  # which tells more
        return replace(fault, host=host or fault.host)

    return tuple(map(locate, _after_srun(faults, hosts, was_killed=was_killed)))


def _after_srun(faults: Sequence[Fault], hosts: Sequence[Host], *, was_killed: bool) -> list[Fault]:
    """Return the faults with the hosts that srun has lost.

    When ranks fail it kills those that are left, and tells of each how it has ended.  It waits for those of
    a lost node, of which Slurm knows only minutes later: hosts that it tells nothing of are lost, and ranks
    that it has killed are no cause.
    """
    told = [fault for fault in faults if fault.kind not in _OF_STEP]
    kinds = [fault.kind for fault in faults]
    if "step aborted" not in kinds or not (was_killed or "step timed out" in kinds):
        return told
    heard = {short_name(f.host) for f in told if f.kind in ("killed", "exited") and f.host is not None}
    lost = [host.name for host in hosts if short_name(host.name) not in heard]
    if len(lost) in (0, len(hosts)):
        return told
    killed = [fault for fault in faults[kinds.index("step aborted") :] if fault.kind == "killed"]
    rest = [fault for fault in told if fault not in killed]
    return [*(Fault("host lost", host=host) for host in lost), *rest]


def short_name(host: str) -> str:
    """Return a host's name without its domain; an address as it is."""
    return host if host.replace(".", "").isdigit() else host.split(".", maxsplit=1)[0]


def first_cause(faults: Sequence[Fault]) -> Fault | None:
    """Return the fault that tells most about why a job ended: what came first, a message before others."""
    faults = [fault for fault in faults if fault.kind not in _OF_STEP]
    said = next((fault for fault in faults if fault.kind == "said"), None)
    # Behind ssh a killed rank looks like this; those who speak have only noticed it.
    speakers = {fault.rank for fault in faults if fault.kind == "said"}
    cut_off = next((f for f in faults if f.exit_code == ENDED_BY_SSH and f.rank not in speakers), None)
    lost = next((fault for fault in faults if fault.kind == "host lost"), None)
    killed = next(
        (fault for fault in faults if fault.kind == "killed" and fault.signal != signal.SIGTERM), None
    )
    return killed or lost or cut_off or said or next(iter(faults), None)


def _signal_name(number: int | None) -> str:
    if number is None:
        return "a signal"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    hint = ", by a user or by the kernel because memory ran out" if number == signal.SIGKILL else ""
    return f"{name}{hint}"
