"""Draw the steps of many ranks from those measured on a few: the bootstrap of the simulation.

A step's work has a part that all ranks share, which depends on the size of its batch (batches of a step have
about the same length on all ranks), and a rest that is each rank's own.  Waiting for the slowest of N ranks
means waiting for the largest of N such rests, not for a mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from speechdp.simulation.measured import MeasuredRun

Times: TypeAlias = npt.NDArray[np.float64]
Drawn: TypeAlias = npt.NDArray[np.float32]
Rows: TypeAlias = npt.NDArray[np.intp]

#: Number of resamples of the measured steps; intervals are computed from their results.
REPLICATES = 40
#: Number of consecutive steps drawn together: a slow step is often followed by another.
_RUN = 8
#: Number of parts of the measurements that are resampled as a whole: machines also change over minutes.
_PARTS = 10
#: Number of steps of all ranks together that are held in memory.
_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class MeasuredWork:
    """The work of measured steps: everything but exchanges.

    A step of measured rank r takes common[s] * own[s', r], with s' = s where ranks are alike at the same
    time, and another step otherwise.

    Attributes:
        common: the part explained by the size of the batches, s.  (steps,)
        own: the rest as a factor, mean 1 over steps and ranks.  (steps, ranks)
        alike: correlation of the rests of different ranks at the same step, 0 to 1.
        frames: mean frames of a rank per step.
        backward, update, data_wait: shares of the work, 0 to 1.
        batch_s: time of the data path for a batch of a rank, s; 0 if it was not recorded.
    """

    common: Times
    own: Times
    alike: float
    frames: float
    backward: float
    update: float
    data_wait: float
    batch_s: float = 0.0

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun], speedup: float = 1.0, *, loads: bool = True) -> MeasuredWork:
        """Split the steps of runs on equally many ranks into their parts.

        Args:
            runs: at least one.
            speedup: of forward, backward and update only.
            loads: False: assume that no rank ever waits for data.
        """
        times = [run.times for run in runs]
        kept = [t.trained for t in times]
        work = np.concatenate(
            [(t.work(speedup) - (0 if loads else t.data_wait))[k] for t, k in zip(times, kept, strict=True)]
        )
        frames = np.concatenate([t.frames[k] for t, k in zip(times, kept, strict=True)])

        def share(name: str, divisor: float) -> float:
            seconds = [getattr(t, name)[k].sum() for t, k in zip(times, kept, strict=True)]
            return float(sum(seconds) / divisor / work.sum())

        aligned = all(run.aligned for run in runs)
        common = _explained(frames, work)
        if aligned:  # batches of a step may also differ between ranks: all wait for the longest
            common = np.broadcast_to(common.mean(axis=1, keepdims=True), work.shape)
        own = work / common
        own *= work.mean() / (common.mean() * own.mean())
        rates = [run.deliverable_per_s / run.trainers for run in runs if run.deliverable_per_s]
        return cls(
            common=common.mean(axis=1),
            own=own,
            alike=_alike(own) if aligned else 0.0,
            frames=float(frames.mean()),
            backward=share("backward", speedup),
            update=share("update", speedup),
            data_wait=share("data_wait", 1.0) if loads else 0.0,
            batch_s=float(frames.mean() / np.mean(rates)) if rates and loads else 0.0,
        )

    @property
    def step_s(self) -> float:
        """Mean work of a step, s."""
        return float(self.common.mean() * self.own.mean())

    def without_stragglers(self) -> MeasuredWork:
        """Return the same work with all ranks equally fast at every step, at their average speed."""
        own = np.broadcast_to(self.own.mean(axis=1, keepdims=True), self.own.shape)
        return replace(self, own=own, alike=1.0)


def _explained(frames: Times, work: Times) -> Times:
    """Return a step's work as a linear function of the frames of its batch, s.  (steps, ranks)

    Returns the mean if longer batches do not take longer, or if the line would fall below half the shortest
    step.
    """
    centred = frames - frames.mean()
    variance = float((centred**2).mean())
    slope = float((centred * (work - work.mean())).mean()) / variance if variance > 0 else 0.0
    line = work.mean() + max(slope, 0.0) * centred
    return line if line.min() > 0.5 * work.min() else np.full_like(work, work.mean())


def _alike(own: Times) -> float:
    """Return the mean correlation of different ranks' rests; 0 for one rank or without variation."""
    ranks = own.shape[1]
    centred = own - own.mean(axis=0)
    total = float((centred**2).mean())
    if ranks == 1 or total == 0:
        return 0.0
    # The variance of the ranks' mean is total * (1 + (ranks - 1) * correlation) / ranks.
    of_mean = float((centred.mean(axis=1) ** 2).mean())
    return float(np.clip((ranks * of_mean / total - 1) / (ranks - 1), 0.0, 1.0))


@dataclass(frozen=True)
class Draws:
    """Drawn steps of simulated ranks.

    Attributes:
        work: the measured work to draw from.
        ranks: number of simulated ranks; rank i behaves like measured rank i modulo their number.
        replicates: number of resamples of the measured steps.
        factors: by rank, how much slower (or faster) it is than measured.
        seed: the same seed and number of ranks give the same steps, whatever else is simulated.
    """

    work: MeasuredWork
    ranks: int
    replicates: int = REPLICATES
    factors: Mapping[int, float] | None = None
    seed: int = 1

    def resampled(self) -> Rows:
        """Return the rows of the measured steps in each replicate.  (replicates, steps)

        They are drawn in long parts, so that changes during the measurements appear as uncertainty.  They are
        the same for every number of ranks.
        """
        steps = len(self.work.common)
        length = -(-steps // _PARTS)
        generator = np.random.default_rng([self.seed, 0])
        starts = generator.integers(steps, size=(self.replicates, -(-steps // length)))
        parts = (starts[..., None] + np.arange(length)) % steps
        rows: Rows = parts.reshape(self.replicates, -1)[:, :steps]
        return rows

    @cached_property
    def columns(self) -> Rows:
        """The measured rank that each simulated rank behaves like.  (ranks,)"""
        columns: Rows = np.arange(self.ranks) % self.work.own.shape[1]
        return columns

    @cached_property
    def scale(self) -> Drawn:
        """Factor of each rank's work.  (ranks,)"""
        scale = np.ones(self.ranks, np.float32)
        for rank, factor in (self.factors or {}).items():
            if rank < self.ranks:
                scale[rank] = factor
        return scale

    @cached_property
    def alone_s(self) -> Times:
        """Work of a step on ranks that are not slowed and do not wait, each at its pace, s.  (replicates,)"""
        alone: Times = 1 / (1 / self._unslowed_s).mean(axis=1)
        return alone

    @cached_property
    def _unslowed_s(self) -> Times:
        """Mean work of a step of each rank, as fast as measured, s.  (replicates, ranks)"""
        rows = self.resampled()
        own = self.work.own[rows].mean(axis=1)[:, self.columns]
        mean: Times = self.work.common[rows].mean(axis=1)[:, None] * own
        return mean

    @cached_property
    def mean_s(self) -> Times:
        """Mean work of a step of each rank, including `factors`, s.  (replicates, ranks)"""
        return self._unslowed_s * self.scale

    def together(self, steps: int) -> Iterator[tuple[slice, Drawn]]:
        """Yield steps that all ranks take with batches of the same size.

        Yields:
            A slice of replicates, and the work of their steps, s.  (replicates, steps, ranks)
        """
        for part in self._parts(steps):
            common, rows = self._rows(part, steps, 0, 1), self._rows(part, steps, 1, self.ranks)
            own = self._own[rows, self.columns]
            if self.work.alike > 0:
                own = np.where(self._is_shared(part, steps), self._shared(part, steps), own)
            drawn = self._common[common] * own * self.scale
            # For many ranks only few steps are drawn: their mean is known more precisely than from these.
            level = self.mean_s[part].mean(axis=1) / drawn.mean(axis=(1, 2), dtype=float)
            yield part, drawn * level[:, None, None].astype(np.float32)

    def apart(self, steps: int) -> Iterator[tuple[slice, Drawn]]:
        """Yield steps that ranks take at their own pace, each with its own batch; as `together`."""
        for part in self._parts(steps):
            own = self._rows(part, steps, 1, self.ranks)
            yield part, self._common[own] * self._own[own, self.columns] * self.scale

    @cached_property
    def _common(self) -> Drawn:
        return self.work.common.astype(np.float32)

    @cached_property
    def _own(self) -> Drawn:
        return self.work.own.astype(np.float32)

    def _parts(self, steps: int) -> Iterator[slice]:
        """Yield slices of replicates, as many at once as fit into memory."""
        at_once = max(1, _AT_ONCE // (steps * self.ranks))
        for first in range(0, self.replicates, at_once):
            yield slice(first, min(first + at_once, self.replicates))

    def _rows(self, part: slice, steps: int, purpose: int, width: int) -> Rows:
        """Draw rows of the measured steps, in short consecutive runs.  (replicates, steps, width)"""
        drawn = []
        for replicate, rows in zip(range(part.start, part.stop), self.resampled()[part], strict=True):
            length = min(_RUN, len(rows))
            shape = (-(-steps // length), 1, width)
            starts = self._generator(replicate, purpose).integers(len(rows), size=shape)
            places = (starts + np.arange(length)[:, None]) % len(rows)
            drawn.append(rows[places.reshape(-1, width)[:steps]])
        return np.stack(drawn)

    def _is_shared(self, part: slice, steps: int) -> npt.NDArray[np.bool_]:
        """Draw at which steps a rank has the rest that all share.  (replicates, steps, ranks)

        Two ranks are alike if both have it: with the square of a rank's probability.
        """
        probability = np.sqrt(self.work.alike)
        shape = (-(-steps // _RUN), self.ranks)
        return np.stack(
            [
                np.repeat(self._generator(replicate, 3).random(shape, np.float32) < probability, _RUN, axis=0)
                for replicate in range(part.start, part.stop)
            ]
        )[:, :steps]

    def _shared(self, part: slice, steps: int) -> Drawn:
        """Draw the shared rests, from one measured rank at a time.  (replicates, steps, ranks)"""
        rows, means = self._rows(part, steps, 2, 1), self._own.mean(axis=0)
        shape = (-(-steps // _RUN), 1)
        like = np.stack(
            [
                np.repeat(self._generator(replicate, 4).integers(len(means), size=shape), _RUN, axis=0)
                for replicate in range(part.start, part.stop)
            ]
        )[:, :steps]
        shared: Drawn = (self._own / means)[rows, like] * means[self.columns]
        return shared

    def _generator(self, replicate: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, 1 + replicate, self.ranks, purpose])
