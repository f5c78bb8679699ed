"""One rank of a job that evaluates slowly on rank 1 and then waits there for a disk: `hang.py ARGUMENTS`.

ARGUMENTS are those of `speechdp train`.  Each batch that rank 1 evaluates takes a second; after as many as
HANG_AFTER its next read does not return.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from speechdp.cli.main import run
from speechdp.comm import environment
from speechdp.data.shards import contiguous
from speechdp.tasks.acoustic import AcousticTask

launch = environment.announced()
if launch is not None and launch.rank == 1:
    score = AcousticTask.score
    scored: list[None] = []

    def slow_score(*arguments: Any) -> Any:
        time.sleep(1)
        scored.append(None)
        return score(*arguments)

    def hanging_read(*arguments: Any) -> int:
        if len(scored) >= int(os.environ["HANG_AFTER"]):
            time.sleep(1000)
        return os.preadv(*arguments)

    AcousticTask.score = slow_score  # type: ignore[method-assign, assignment]
    contiguous.preadv = hanging_read

sys.exit(run(sys.argv[1:]))
