"""Small profiles for tests, and their answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from speechdp.experiments.profile.derived import all_scalings
from speechdp.experiments.profile.measured import FunctionTime, RankRecord, StepRecord
from speechdp.experiments.profile.record import WEAK, JobEntry, ProfileJob, read_profile
from speechdp.report.kit.answer import Answer
from speechdp.report.profile.answer import find_answer
from tests.helpers.profiles import MadeUpProfile, write_profile


def answer_of(out: Path) -> Answer:
    """Return the answer of a profile."""
    profile = read_profile(out)
    return find_answer(profile, all_scalings(profile))


def small_profile(tmp_path: Path, **changes: object) -> Path:
    """Write a profile of one and two ranks with two steps after the warm-up; return its folder."""
    made_up = replace(MadeUpProfile(ranks=(1, 2), steps=5, samples=False), **changes)  # type: ignore[arg-type]
    return write_profile(tmp_path / "out", made_up)


def recorded_seconds(out: Path, job: str, rank: int, name: str, phase: str) -> list[float]:
    """Read a function's times after the warm-up from the file itself."""
    lines = (out / job / f"rank-{rank:04d}.jsonl").read_text().splitlines()[1:]
    steps = [json.loads(line) for line in lines][3:]
    return [sum(f[3] for f in step["functions"] if f[:2] == [name, phase]) for step in steps]


def job_of_one_step(*ranks: list[tuple[float, float]], name: str = "exchange") -> ProfileJob:
    """Return a job of one step whose ranks have these spans, (start, duration) in s."""
    records = tuple(
        RankRecord(rank, "node", 1, 0.0, (
            StepRecord(1, 0.0, 10.0, 100, tuple(FunctionTime(name, "", *span) for span in spans)),
        ))
        for rank, spans in enumerate(ranks)
    )  # fmt: skip
    return ProfileJob(JobEntry("weak-2", WEAK, len(ranks), 8, "pooled", "weak-2"), Path("out"), records)
