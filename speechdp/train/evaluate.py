"""Evaluation on held-out data, divided among the ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.comm.loss_tolerance import in_shares
from speechdp.data.loading.source import Pending, SplitSource
from speechdp.data.plan.epoch_plan import PlanOptions, RankPlan, plan_epoch
from speechdp.errors import ConfigError, RunError
from speechdp.models.evaluating import evaluating
from speechdp.models.precision import Precision
from speechdp.parallel.replica import Replica
from speechdp.tasks.base import FrameScores, Task, score_mistake
from speechdp.watchdog.progress_beats import Pulse

#: Held-out segments scored at a time, relative to a training batch: nothing is kept for a backward pass.
_LARGER = 4


@dataclass(frozen=True)
class HeldOutScores:
    """Metrics over all held-out frames.

    Attributes:
        values: means of the task's metrics, by their keys, without metrics for which no frame counts.
        num_frames: number of frames scored.
        score: the first metric, negated if smaller is better.
    """

    values: dict[str, float]
    num_frames: int
    score: float


def relative_distance(own: Tensor, shown: Tensor) -> Tensor:
    """Return |own - shown| / |shown| of two flat parameter vectors, (1,) float64 on the CPU; never NaN."""
    distance: Tensor = torch.linalg.vector_norm(own - shown) / torch.linalg.vector_norm(shown)
    return distance.double().cpu().view(1).nan_to_num(nan=math.inf)


class Evaluator:
    """Scores a model on a held-out split; each rank takes its part, the same as long as no rank is lost.

    Every batch that is scored gives a beat to `pulse`.
    """

    def __init__(
        self,
        source: SplitSource,
        options: PlanOptions,
        comm: Communicator,
        device: torch.device,
        precision: Precision,
        pulse: Pulse | None = None,
    ) -> None:
        self._source = source
        self._pulse = pulse or Pulse()
        self._comm = comm
        self._device, self._precision = device, precision
        self._larger = PlanOptions(
            options.batch_size * _LARGER,
            options.chunk_frames,
            batch_frames=options.batch_frames * _LARGER,
            window_frames=options.window_frames,
        )
        self._share = (comm.rank, comm.size)
        self._plan: RankPlan = self._plan_of(*self._share)

    def _plan_of(self, share: int, num_shares: int) -> RankPlan:
        return plan_epoch(self._source.index, self._larger, epoch=0, size=num_shares).ranks[share]

    def evaluate(self, model: nn.Module, task: Task) -> HeldOutScores:
        """Score `model` on the whole split.  Collective; the same figures on every rank.

        Raises:
            ConfigError: the task gives no FrameScores of numbers, or leaves out a metric that it declares.
            RunError: the task has scored no frame.
        """
        return in_shares(self._comm, lambda *share: self._evaluate(model, task, share))

    def _evaluate(self, model: nn.Module, task: Task, share: tuple[int, int]) -> HeldOutScores:
        if share != self._share:
            self._share, self._plan = share, self._plan_of(*share)
        keys = [metric.key for metric in task.metrics]
        sums = np.zeros(1 + 2 * len(keys))
        with evaluating(model), torch.no_grad():
            for pending in self._batches():
                batch = pending.result().to(self._device)
                with self._precision.computing():
                    scores = task.score(model, batch)
                sums += _sums(task, scores)
                self._pulse.beat()
        # One float64 vector: exact for any number of frames, and one message.
        total = self._comm.allreduce(torch.from_numpy(sums), name="held_out")
        frames, *values = total.tolist()
        counted = zip(keys, values[: len(keys)], values[len(keys) :], strict=True)
        means = {key: value / count for key, value, count in counted if count}
        if keys[0] not in means:
            raise RunError("no frame of the held-out split was scored; choose another split with --held-out")
        return HeldOutScores(means, int(frames), task.metrics[0].score(means[keys[0]]))

    def _batches(self) -> Iterator[Pending]:
        """Yield this rank's batches, the next one begun before the one at hand is scored."""
        begun: deque[Pending] = deque()
        for index in range(self._plan.num_batches):
            segments = self._plan.batch(index)
            if len(segments) == 0:
                continue
            begun.append(self._source.start(segments))
            if len(begun) > 1:
                yield begun.popleft()
        yield from begun


def _sums(task: Task, scores: FrameScores) -> list[float]:
    """Return the frames scored, the sums of a task's metrics, and the frames that each of these is over.

    Raises:
        ConfigError: these are not FrameScores of numbers, or a metric is missing.
    """
    if mistake := score_mistake(task, scores):
        raise ConfigError(mistake)
    keys = [metric.key for metric in task.metrics]
    return [scores.num_frames, *(scores.sums[key] for key in keys), *map(scores.count, keys)]


def choose_final_model(candidates: list[Tensor], replica: Replica, score: Callable[[], HeldOutScores]) -> int:
    """Leave the best of the replica's parameters and `candidates` in the replica.  Collective.

    Args:
        candidates: flat parameter vectors, the same on every rank.
        replica: holds the model that `score` scores.
        score: scores the replica's model on the held-out split; collective.

    Returns:
        0 if the replica's own parameters were best, else the number of the candidate, from 1.
    """
    values = replica.parameters.values
    vectors = [values.clone(), *candidates]
    scores = []
    for vector in vectors:
        values.copy_(vector)
        scores.append(score().score)
        replica.bind_parameters()
    best = max(range(len(vectors)), key=scores.__getitem__)
    values.copy_(vectors[best])
    return best
