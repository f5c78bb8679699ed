"""A group of ranks that trains as one learner, whose parameters another thread mixes with other groups'."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from speechdp.parallel.flat_buffer import Bucket
from speechdp.strategies.mechanisms.bucketed_gradients import BucketedGradients
from speechdp.strategies.mechanisms.pending_correction import EffectiveParameters

#: Larger than any model: one rank alone has nothing to exchange in pieces.
_ONE_BUCKET_MIB = 2.0**40


@dataclass(eq=False)
class SuperLearner(BucketedGradients):
    """Average gradients inside a group, in which every rank learns at each step what its leader has to share.

    Update rule: as gradient_averaging inside the group.

    Exchange: besides the gradients two integers, sent after the last bucket and overlapped in the same way:
    the group's frames, and the mixings that wait in the leader's correction.

    Guarantee: members are bitwise equal after every update.
    """

    effective: EffectiveParameters = field(kw_only=True)

    #: Frames of the last update, all members together.
    num_frames: int = field(default=0, init=False)
    #: Mixings that the leader had waiting when the gradients of the last update were complete.
    num_announced: int = field(default=0, init=False)

    def set_up(self) -> None:
        if self.comm.size == 1:
            self.overlap, self.bucket_mib = False, _ONE_BUCKET_MIB
        super().set_up()
        self._counts = torch.zeros(2, dtype=torch.int64)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its group."""
        return self.comm.rank == 0

    def _launch(self, bucket: Bucket) -> None:
        super()._launch(bucket)
        if self._next_bucket == len(self._buckets):
            # After the last bucket on every rank, whether backward or the update has launched that.
            self._counts[0], self._counts[1] = self.replica.frames, self._num_waiting()
            self._works.append(self.comm.allreduce_async(self._counts, name="gradients.counts"))

    def apply(self, frames: float | Tensor) -> None:
        """Update by the group's frames, counted exactly and on the host, so that there may be none."""
        self.num_frames, self.num_announced = self._counts.tolist()
        with self.effective.update():
            super().apply(float(self.num_frames))

    def take_correction(self) -> int:
        """Add what the leader has announced to every member's parameters; return the mixings in it.

        Collective in the group where something was announced, which all of it know.
        """
        if self.comm.size == 1:
            return self.effective.take()
        if self.num_announced == 0:
            return 0
        return self.effective.take(self._share, self.num_announced)

    def announce(self) -> None:
        """Let the group know what waits, outside of an update.  Collective in the group."""
        self._counts[0], self._counts[1] = 0, self._num_waiting()
        self.num_announced = int(self.comm.allreduce(self._counts, name="gradients.counts")[1])

    def _num_waiting(self) -> int:
        return self.effective.num_pending if self.leads else 0

    def _share(self, correction: Tensor) -> None:
        self.comm.broadcast(correction, name="correction")
