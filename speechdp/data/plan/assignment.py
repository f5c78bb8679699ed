"""Describe what a rank does next: train on some segments, or meet the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from speechdp.data.plan.epoch_plan import EpochPlan, Segments


class MeetingKind(Enum):
    """Why all ranks come together."""

    EPOCH = "epoch"
    CHECKPOINT = "checkpoint"
    STOP = "stop"
    END = "end"


@dataclass(frozen=True)
class Meeting:
    """A place in training at which asynchronous ranks wait for one another.

    Attributes:
        kind: what is done there.
        epoch: epochs done.
        step: batches trained on so far, over the number of teams.
        frames: frames trained on so far, all ranks together.
        state: where dealing stands, for a checkpoint; on rank 0 only.
    """

    kind: MeetingKind
    epoch: int
    step: int
    frames: int
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanPosition:
    """Identifies batch `index` of part `part` of epoch `epoch`; seeds what is drawn at random in it."""

    epoch: int
    part: int
    index: int


@dataclass(frozen=True)
class Assignment:
    """Segments to train on and their place in training; or a meeting, without segments.

    Attributes:
        segments: none where this rank only joins the others' step, or meets them.
        place: place of the batch in the plan.
        index: steps of the epoch before this one.
        num_steps: steps of the epoch.
        mean_frames: frames of this step averaged over ranks.
        total_frames: frames of this step summed over ranks.
        meeting: the meeting, if this is one.
    """

    segments: Segments
    place: PlanPosition
    index: int
    num_steps: int
    mean_frames: float
    total_frames: int
    meeting: Meeting | None = None


@dataclass(frozen=True)
class Position:
    """Where training begins: step `step` of epoch `epoch`."""

    epoch: int = 0
    step: int = 0


def planned(
    plan: Callable[[int], EpochPlan], part: int | None, num_epochs: int, start: Position = Position()
) -> Iterator[Assignment]:
    """Yield the steps of one part of the plan, epoch after epoch: what synchronous strategies train on.

    Args:
        plan: returns the plan of an epoch.
        part: which part; None (a server) yields all steps without segments.
        num_epochs: epochs of the run.
        start: the first step.
    """
    for epoch in range(start.epoch, num_epochs):
        whole = plan(epoch)
        means, totals = whole.frames.mean(axis=0), whole.frames.sum(axis=0)
        for index in range(start.step if epoch == start.epoch else 0, whole.num_steps):
            segments = Segments.none() if part is None else whole.ranks[part].batch(index)
            place = PlanPosition(epoch, part or 0, index)
            yield Assignment(segments, place, index, whole.num_steps, float(means[index]), int(totals[index]))


def meeting_of(meeting: Meeting) -> Assignment:
    """Return the assignment that makes a rank join `meeting`."""
    return Assignment(Segments.none(), PlanPosition(meeting.epoch, 0, 0), 0, 1, 0.0, 0, meeting)


def augmentation_seed(seed: int, place: PlanPosition) -> np.random.Generator:
    """Return the generator for a batch's random values, the same whichever rank trains on it."""
    return np.random.default_rng([seed, place.part, place.epoch, place.index])
