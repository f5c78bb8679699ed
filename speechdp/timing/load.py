"""Measure how busy a host's cores are while a rank trains: with the rank, and with everything else."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import psutil

#: Cores not available to a job, as a share of one per rank, below which they make no difference: ranks whose
#: strategy exchanges in the background slow down their own forward passes.
NOTABLE_LOAD = 0.05


@dataclass(frozen=True)
class CpuTimes:
    """What a host's cores have done since some earlier time, in core-seconds.

    Attributes:
        at_s: time of reading, by `time.perf_counter`.
        own_s: time spent on this process, all its threads.
        busy_s: time spent on any process.
        stolen_s: time in which a virtual machine's cores were ready to run, but its host ran others.
    """

    at_s: float
    own_s: float
    busy_s: float
    stolen_s: float

    @classmethod
    def now(cls) -> CpuTimes:
        """Read the counters; takes about 50 microseconds."""
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
        return cls(perf_counter(), time.process_time(), busy_s, getattr(times, "steal", 0.0))


class LoadMeter:
    """Measure from its creation on."""

    def __init__(self) -> None:
        self._begun = CpuTimes.now()

    def so_far(self) -> dict[str, float]:
        """Return mean numbers of cores since the creation.

        Returns:
            Cores busy with this process (`own`), with any process, including this one (`host`), and taken
            from a virtual machine by its host (`stolen`).  Empty if no time has passed.
        """
        begun, now = self._begun, CpuTimes.now()
        seconds = now.at_s - begun.at_s
        if seconds <= 0:
            return {}
        spent = {
            "own": now.own_s - begun.own_s,
            "host": now.busy_s - begun.busy_s,
            "stolen": now.stolen_s - begun.stolen_s,
        }
        return {name: round(core_s / seconds, 3) for name, core_s in spent.items()}


@dataclass(frozen=True)
class OutsideLoad:
    """Mean numbers of a host's cores that did not work for a job.

    Attributes:
        others: cores busy with processes outside of the job.
        stolen: cores taken from a virtual machine by its host.
        ranks: number of the job's ranks on that host.
    """

    others: float
    stolen: float
    ranks: int = 1

    @classmethod
    def of(cls, own: Iterable[float], host: float, stolen: float) -> OutsideLoad:
        """Return the load computed from the values of `LoadMeter`.

        Args:
            own: cores of each of the job's processes on the host.
            host: cores busy with any process there.
            stolen: cores taken from the host.
        """
        cores = list(own)
        return cls(max(0.0, host - sum(cores)), stolen, len(cores))

    @property
    def total(self) -> float:
        """Cores that the job did not have, for either reason."""
        return self.others + self.stolen

    @property
    def is_notable(self) -> bool:
        """Whether `total` is enough to make a difference to the job."""
        return self.total > NOTABLE_LOAD * self.ranks

    @property
    def is_notably_stolen(self) -> bool:
        """Whether `stolen` is enough to make a difference to the job."""
        return self.stolen > NOTABLE_LOAD * self.ranks
