"""Ranks that sleep instead of computing: a script as a user's, for `benchmarks/strategies/simulate.py`.

    mpirun -n N python benchmarks/strategies/sleeping_ranks.py JOB.json

Strategies, exchanges and timelines are the real ones, and 16 ranks fit on two cores.  How long a rank sleeps
in a step is played back from a recording of real steps.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import speechdp
from speechdp.comm.base import Communicator

#: Of the time slept in a step; the rest is backward.
_FORWARD = 1 / 3
#: Parts of the model: gradients come one after another during backward.
_BLOCKS = 6
#: Steps of the recording that a rank plays back in a row: a slow step is often followed by another.
_STRETCH = 32
#: Nodes of a cluster are not quite equally fast: standard deviation of the logarithm.
_NODE_SPREAD = 0.02
#: Name of the file in a run's folder that says when each rank ended its steps.
ENDS = "ends.json"


@dataclass(frozen=True)
class Recording:
    """Steps as they were measured.

    Attributes:
        frames: of each batch.
        seconds: of each step.
    """

    frames: tuple[float, ...]
    seconds: tuple[float, ...]

    @cached_property
    def rests(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Each step's time over what a straight line in the frames of its batch gives.  (steps,)"""
        seconds = np.array(self.seconds)
        rests: np.ndarray[Any, np.dtype[np.float64]] = seconds / self.line(np.array(self.frames))
        return rests

    def line(self, frames: Any) -> Any:
        """Return what a straight line in the frames of a batch gives, s."""
        slope, constant = np.polyfit(self.frames, self.seconds, 1)
        return constant + slope * frames


class Playback:
    """The steps of one rank: batches are equally long on all ranks, the rests are each rank's own.

    Args:
        recording: what is played back.
        mean_s: to which the recording's mean is scaled, s.
        rank: this rank; its node is a little faster or slower, in every run.
        seed: of the run.
    """

    def __init__(self, recording: Recording, mean_s: float, rank: int, seed: int) -> None:
        self._recording = recording
        node = float(np.exp(_NODE_SPREAD * np.random.default_rng([7, rank]).standard_normal()))
        self._scale = node * mean_s / float(np.mean(recording.seconds))
        self._batches = np.random.default_rng([seed, 0])
        self._own = np.random.default_rng([seed, 1, rank])
        self._place = self._played = 0

    def next_step(self) -> tuple[int, float]:
        """Return the frames of the next batch, and the time that it takes, s."""
        count = len(self._recording.frames)
        frames = self._recording.frames[int(self._batches.integers(count))]
        if self._played % _STRETCH == 0:
            self._place = int(self._own.integers(count))
        self._played += 1
        rest = self._recording.rests[(self._place + self._played) % count]
        return int(frames), float(self._scale * self._recording.line(frames) * rest)


@dataclass(frozen=True)
class Job:
    """A run of sleeping ranks.

    Attributes:
        strategy: with its options.
        folder: of the run.
        steps: of each rank.
        seed: of its batches and of what its ranks sleep.
    """

    strategy: str
    folder: str
    steps: int
    seed: int


@dataclass(frozen=True)
class Work:
    """What all runs have in common.

    Attributes:
        parameters: of the model.
        step_s: mean time that a rank sleeps in a step.
        recording: file of the `Recording`.
    """

    parameters: int
    step_s: float
    recording: str


class _Sleep(torch.autograd.Function):
    """The identity; takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s, ctx.shape = backward_s, weights.shape
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], torch.zeros(ctx.shape), None, None


class SleepingModel(nn.Module):
    """A model of some parameters, which does nothing but take its time."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.blocks = nn.ParameterList(
            [nn.Parameter(torch.zeros(parameters // _BLOCKS)) for _ in range(_BLOCKS)]
        )

    def forward(self, frames: int, seconds: float) -> Tensor:
        """Return the same loss for each frame.  ()"""
        x = torch.full((), float(frames), requires_grad=True)
        for block in self.blocks:
            x = _Sleep.apply(  # type: ignore[no-untyped-call]
                x, block, _FORWARD * seconds / _BLOCKS, (1 - _FORWARD) * seconds / _BLOCKS
            )
        return x


def run_job(comm: Communicator, job: Job, work: Work) -> None:
    """Train by sleeping; rank 0 writes when every rank ended its steps.  Collective."""
    recording = Recording(**json.loads(Path(work.recording).read_text()))
    playback = Playback(recording, work.step_s, comm.rank, job.seed)
    model = SleepingModel(work.parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    frames, ends = [], []
    run = speechdp.DataParallel(model, optimizer, comm, strategy=job.strategy, folder=job.folder)
    with run:
        for _ in range(job.steps):
            batch, seconds = playback.next_step()
            with run.step(weight=batch) as step:
                step.backward(model(batch, seconds))
            frames.append(batch)
            ends.append(time.monotonic())  # the same clock on all nodes: they are on one machine
    ranks = comm.allgather_object({"frames": frames, "ends": ends})
    if comm.rank == 0:
        written = Path(job.folder, ENDS)
        written.with_suffix(".part").write_text(json.dumps({"job": asdict(job), "ranks": ranks}))
        written.with_suffix(".part").rename(written)
        print(f"{job.strategy}: {job.steps} steps", flush=True)


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    work = Work(**given["work"])
    torch.set_num_threads(1)

    def on_rank(comm: Communicator) -> None:
        for job in given["jobs"]:
            run_job(comm, Job(**job), work)

    speechdp.run_ranks(on_rank, backend="mpi")


if __name__ == "__main__":
    main()
