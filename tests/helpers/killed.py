"""What a job whose rank was killed leaves behind, and how it resumes: shared by ranks and feeders."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from speechdp.checkpoint.state import checkpoint_steps
from tests.helpers.jobs import DEADLINE_S, ended_within, our_lines
from tests.helpers.mpi import Ended


def last_step(run: Path) -> int:
    """Return the step of the last checkpoint; 0 where there is none."""
    return next(checkpoint_steps(run), 0)


def assert_ended_by_a_kill(ended: Ended, run: Path) -> None:
    """Check that the job failed with one line of the launcher's that names the last checkpoint."""
    assert ended.exit_code == 137, ended.output
    assert not (run / "completed.json").exists()
    (line,) = [line for line in our_lines(ended) if line.startswith("speechdp launch:")]
    assert re.match(r"speechdp launch: rank \d+ on \S+ was killed by SIGKILL", line), line
    assert "(exit code 137); last checkpoint: " in line and "MPI" not in line, line


def assert_goes_on_to_the_end(command: Sequence[str], run: Path, frames: int) -> None:
    """Resume a run of 10 epochs of so many frames: it continues from its checkpoint, nothing is missing."""
    saved = last_step(run)
    assert saved > 0
    ended = ended_within(DEADLINE_S, [*command, "--resume"])
    assert ended.exit_code == 0, ended.output
    assert f"{run}: resuming from step {saved}" in ended.stdout, ended.output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["frames"] for line in lines] == [frames * (epoch + 1) for epoch in range(10)]
