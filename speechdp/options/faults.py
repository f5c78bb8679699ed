"""Options of a training run that say what is done about faults; none changes what is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from speechdp.errors import ConfigError


@dataclass(frozen=True)
class FaultOptions:
    """What is done about faults.  Runs may be resumed with other ones."""

    hang_timeout: float = 600.0
    """Seconds without the end of a step or an evaluated batch after which a rank takes the job for hung,
    prints its stack and ends it; 0: never."""
    tolerate_loss: bool = False
    """Go on without ranks that are gone (strategy ad_psgd, back-end mpi with ULFM: Open MPI 5)."""

    def __post_init__(self) -> None:
        if not 0 <= self.hang_timeout < math.inf:
            raise ConfigError(f"--hang-timeout {self.hang_timeout:g}: must be at least 0 seconds")
