"""Runs with made-up times of every step: in memory, and as a run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.parallel.registry import StrategyChoice
from speechdp.simulation.measured import MeasuredRun, StepTimes
from tests.helpers.runs import MadeUpRun, write_run

#: Of a step's work: forward, backward, update, and what no span covers.
SHARES = (0.3, 0.5, 0.15, 0.05)
FRAMES = 500.0


@dataclass(frozen=True)
class MadeUpSteps:
    """Steps of 100 ms that all take equally long, unless the attributes differ.

    Attributes:
        hosts: of each rank.
        work_s: of each step, or of each step and rank.
        exchange_s: of every step's exchange.
        data_wait_s: of every step.
    """

    hosts: Sequence[str] = ("a", "a")
    strategy: str = "gradient_averaging"
    work_s: npt.NDArray[np.float64] = field(default_factory=lambda: np.full(100, 0.1))
    exchange_s: float = 0.02
    data_wait_s: float = 0.0
    nbytes: float = 4e6

    @property
    def table(self) -> npt.NDArray[np.float64]:
        """The work of each step and rank, s.  (steps, ranks)"""
        work = self.work_s if self.work_s.ndim == 2 else self.work_s[:, None]
        return np.broadcast_to(work, (len(work), len(self.hosts)))

    def measured(self) -> MeasuredRun:
        """Return them as a run that was read."""
        work = self.table
        slowest = work.max(axis=1, keepdims=True)
        comm = slowest - work + (self.exchange_s if len(self.hosts) > 1 else 0.0)
        choice = StrategyChoice(self.strategy)
        times = StepTimes(
            *(share * work for share in SHARES),
            data_wait=np.full_like(work, self.data_wait_s),
            comm=comm,
            frames=np.full_like(work, FRAMES),
        )
        return MeasuredRun(
            "made-up", tuple(self.hosts), choice, choice.parsed.traits.synchronous, self.nbytes, 2, times,
            frames_trained=1e6,
        )  # fmt: skip

    def write(self, parent: Path, name: str = "run", *, completed: bool = True) -> Path:
        """Write them as the folder of a run; return it."""
        measured = self.measured()
        times = measured.times
        path = write_run(
            MadeUpRun(
                name,
                size=len(self.hosts),
                completed=completed,
                settings={
                    "strategy": self.strategy,
                    "period": str(measured.strategy.parsed.traits.period),
                    "num_parameters": int(self.nbytes / 4),
                },
            ),
            parent,
        )
        folder = path / "timeline"
        folder.mkdir()
        for rank in range(len(self.hosts)):
            lines = []
            for number, row in enumerate(zip(*(getattr(times, k)[:, rank] for k in _SPANS), strict=True), 1):
                spans = [[span, 0.0, seconds] for span, seconds in zip(_SPANS, row, strict=True)]
                wall = sum(row) + times.others[number - 1, rank]
                lines.append(json.dumps({"step": number, "wall": wall, "frames": FRAMES, "spans": spans}))
            (folder / f"rank-{rank:04d}.jsonl").write_text("\n".join(lines) + "\n")
        return path


_SPANS = ("data_wait", "forward", "backward", "comm", "update")
