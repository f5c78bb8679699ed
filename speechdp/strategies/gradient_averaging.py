"""Synchronous SGD: gradients of all ranks are summed by a ring-allreduce, overlapped with backward."""

from __future__ import annotations

from dataclasses import dataclass

from speechdp.strategies.mechanisms.bucketed_gradients import BucketedGradients


@dataclass(eq=False)
class GradientAveraging(BucketedGradients):
    """Average gradients over all ranks at every update.

    Update rule: g = (sum_i sum_frames dL/dw) / (sum_i frames_i), then one optimizer step with g on every
    rank.  One rank with the union of the batches computes the same, also with unequal frame counts.

    Exchange: the flat gradient, bucket by bucket, each as soon as backward has filled it (hooks on the
    parameters); the frame count is appended to the gradients in the same vector.  2 (N-1)/N times the
    gradient's bytes sent by each rank per update (ring).

    Guarantee: replicas are bitwise equal after every update.

    Source: ring-allreduce SGD as in Horovod (Sergeev & Del Balso 2018, arXiv 1802.05799).
    """
