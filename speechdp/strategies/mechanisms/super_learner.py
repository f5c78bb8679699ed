"""Let a group of ranks train as one learner, whose parameters a thread mixes with other groups'."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from speechdp.parallel.flat_buffer import Bucket
from speechdp.strategies.mechanisms.bucketed_gradients import BucketedGradients
from speechdp.strategies.mechanisms.pending_correction import EffectiveParameters

#: Larger than any model: a single rank need not exchange in pieces.
_ONE_BUCKET_MIB = 2.0**40


@dataclass(eq=False)
class SuperLearner(BucketedGradients):
    """Average gradients inside a group; with each update the leader announces its pending correction.

    Update rule: as gradient_averaging inside the group.

    Exchange: in addition to the gradients, two integers, sent after the last bucket and overlapped in the
    same way: the group's frames, and the number of mixings that wait in the leader's correction.

    Guarantee: members are bitwise equal after every update.
    """

    effective: EffectiveParameters = field(kw_only=True)

    #: Frames of the last update, of all members together.
    num_frames: int = field(default=0, init=False)
    #: Mixings waiting on the leader when the gradients of the last update were complete.
    num_announced: int = field(default=0, init=False)

    def set_up(self) -> None:
        if self.comm.size == 1:
            self.overlap, self.bucket_mib = False, _ONE_BUCKET_MIB
        super().set_up()
        self._counts = torch.zeros(2, dtype=torch.int64)

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader of its group."""
        return self.comm.rank == 0

    def _launch(self, bucket: Bucket) -> None:
        super()._launch(bucket)
        if self._next_bucket == len(self._buckets):
            # After the last bucket on every rank, whether backward or the update has launched it.
            self._counts[0], self._counts[1] = self.replica.frames, self._num_waiting()
            self._works.append(self.comm.allreduce_async(self._counts, name="gradients.counts"))

    def apply(self, frames: float | Tensor) -> None:
        """Update with the group's frames, an exact count on the host, which may be 0."""
        self.num_frames, self.num_announced = self._counts.tolist()
        with self.effective.update():
            super().apply(float(self.num_frames))

    def take_correction(self) -> int:
        """Add the correction that the leader has announced to every member's parameters; return its mixings.

        Collective in the group if something was announced, which all members know.
        """
        if self.comm.size == 1:
            return self.effective.take()
        if self.num_announced == 0:
            return 0
        return self.effective.take(self._share, self.num_announced)

    def announce(self) -> None:
        """Tell the group how many mixings wait, outside of an update.  Collective in the group."""
        self._counts[0], self._counts[1] = 0, self._num_waiting()
        self.num_announced = int(self.comm.allreduce(self._counts, name="gradients.counts")[1])

    def _num_waiting(self) -> int:
        return self.effective.num_pending if self.leads else 0

    def _share(self, correction: Tensor) -> None:
        self.comm.broadcast(correction, name="correction")
