"""Failure handling of a training run; none of these options affects the result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from speechdp.errors import ConfigError
from speechdp.options.shown import shown


@dataclass(frozen=True)
class FaultOptions:
    """What happens on failures.  These options may be changed when a run is resumed."""

    hang_timeout: Annotated[float, shown("SECONDS")] = 600.0
    """End the job, printing stack traces, if a rank completes no step or evaluation batch for this long.
    0: never."""
    tolerate_loss: bool = False
    """Continue with the remaining ranks when others are lost, instead of ending the job.
    Needs --strategy ad_psgd and the mpi back-end with ULFM (Open MPI 5)."""

    def __post_init__(self) -> None:
        if not 0 <= self.hang_timeout < math.inf:
            raise ConfigError(f"--hang-timeout {self.hang_timeout:g}: must be at least 0 seconds")
