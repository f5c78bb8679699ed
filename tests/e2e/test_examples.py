"""The examples run as they stand, and show what they are to show."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

from speechdp.report.runs.folders import read_run
from tests.helpers.mpi import REPOSITORY, job_environment

ASR = REPOSITORY / "examples" / "asr_ctc"


def held_out_loss(script: str, **settings: str) -> float:
    ended = subprocess.run(
        [sys.executable, ASR / script],
        env={**job_environment(), **settings},
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    )
    return float(re.findall(r"held-out loss ([\d.]+)", ended.stdout)[-1])


def test_the_recogniser_trains_as_in_plain_pytorch_and_on_two_ranks(tmp_path: Path) -> None:
    plain = held_out_loss("plain.py")
    assert plain < 1.0
    assert abs(held_out_loss("train.py") - plain) < 0.02  # one rank: the same but for rounding
    together = held_out_loss(
        "train.py",
        SPEECHDP_BACKEND="threads:2",
        SPEECHDP_STRATEGY="model_averaging:period=8",
        SPEECHDP_FOLDER=str(tmp_path / "run"),
    )
    run = read_run(tmp_path / "run")
    assert together < 1.0 and run.completed and (run.size, run.period) == (2, "8")


def test_few_lines_differ_from_plain_pytorch() -> None:
    plain, ours = (
        [line.strip() for line in (ASR / name).read_text().splitlines()[1:]]
        for name in ("plain.py", "train.py")
    )
    added = [line for line in difflib.ndiff(plain, ours) if re.match(r"\+ .", line)]
    assert len(added) <= 7, added
