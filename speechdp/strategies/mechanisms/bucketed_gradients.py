"""Sum the gradients of all ranks bucket by bucket, overlapped with backward."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from speechdp.comm.base import Communicator, ReduceOp, Work
from speechdp.errors import ConfigError, RunError
from speechdp.parallel.flat_buffer import Bucket
from speechdp.parallel.strategy import Progress, Strategy, Traits, part_of
from speechdp.strategies.mechanisms.low_rank import LowRankSum
from speechdp.strategies.mechanisms.number_formats import refuse_half_precision
from speechdp.timing.timeline import Span

_COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: Prefix of the names of a low-rank sum's state.
_LOW_RANK = "low_rank."


@dataclass(eq=False)
class BucketedGradients(Strategy):
    """Average gradients over ranks at every update: the base class of `gradient_averaging`.

    Periodic strategies use it before `begin`, ad_psgd inside its groups.
    Exchange: the flat gradient, bucket by bucket, each as soon as backward has filled it (hooks on the
    parameters); the frame count is appended to the gradients in the same vector.  With compression=powersgd
    the exchange follows backward, without buckets: `LowRankSum`.
    """

    #: Backward passes whose gradients are accumulated before one exchange and update.
    every: int = 1
    #: Number format of the exchange: full precision, or half the bytes; powersgd: matrices as two factors.
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    #: Number of columns of each factor, with compression=powersgd.
    rank: int = 4
    #: Size of the pieces exchanged during backward, in MiB.
    bucket_mib: float = 25.0
    #: Exchange during backward, or after it (for comparison); none: during it, except with powersgd.
    overlap: bool | None = None

    def __post_init__(self) -> None:
        # Set the effective value here, so that records contain it and can be parsed again.
        if self.overlap is None:
            self.overlap = self.compression != "powersgd"

    @property
    def traits(self) -> Traits:
        return Traits(replicas_equal=True, period=str(self.every))

    def check_options(self) -> None:
        if self.every < 1:
            raise ConfigError(f"gradient_averaging:every={self.every}: at least 1 backward pass an update")
        if not 0 < self.bucket_mib < math.inf:
            raise ConfigError(f"gradient_averaging:bucket_mib={self.bucket_mib}: must be positive")
        if self.rank < 1:
            raise ConfigError(f"gradient_averaging:rank={self.rank}: factors have at least 1 column")
        default = BucketedGradients()
        if self.compression != "powersgd":
            if self.rank != default.rank:
                raise ConfigError(
                    "gradient_averaging:rank: an option of compression=powersgd, not of "
                    f"compression={self.compression}; leave it out or give compression=powersgd"
                )
            return
        for name, is_given in (
            ("bucket_mib", self.bucket_mib != default.bucket_mib),
            ("overlap", self.overlap),
        ):
            if is_given:
                raise ConfigError(
                    f"gradient_averaging:{name}: with compression=powersgd gradients are exchanged after "
                    "backward, in no buckets; leave it out"
                )

    def check_ranks(self, comm: Communicator) -> None:
        self.check_compression(comm)
        super().check_ranks(comm)

    def check_compression(self, comm: Communicator) -> None:
        """Refuse a number format that the back-end cannot sum.

        Raises:
            ConfigError: the back-end cannot sum it.
        """
        dtype = _COMPRESSED.get(self.compression)
        if dtype is not None and dtype not in comm.reducible:
            raise ConfigError(
                f"gradient_averaging:compression={self.compression}: the {comm.backend} back-end cannot "
                "sum that type; use compression=none or another back-end"
            )

    @property
    def group(self) -> Communicator:
        """The ranks whose gradients are averaged."""
        return self.comm

    def set_up(self) -> None:
        self._buckets = self.replica.gradients.buckets(int(self.bucket_mib * 2**20))
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.tensor_indices}
        self._passes = 0  # backward passes since the last update
        self._log2_scale: int | None = None
        self._works: list[Work] = []
        self._packed: list[tuple[Tensor, Tensor]] = []
        #: Sums the gradients if compression=powersgd; None: they are summed in buckets.
        self._low_rank = self._make_low_rank_sum()
        self._start_round()
        if self.overlap and self._low_rank is None:
            own = weakref.ref(self)  # else autograd would keep the strategy and the model alive for ever
            for index, parameter in enumerate(self.replica.model_parameters):
                needs_gradient = parameter.requires_grad
                parameter.requires_grad_(True)  # a parameter that is frozen now may be trained later
                parameter.register_post_accumulate_grad_hook(partial(_forward_gradient, own, index))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(needs_gradient)

    def _make_low_rank_sum(self) -> LowRankSum | None:
        """Return the sum by low-rank factors; None: gradients are summed in buckets.

        Raises:
            ConfigError: the parameters are in half precision, or no matrix would travel as factors.
        """
        if self.compression != "powersgd" or self.group.size == 1:
            return None
        refuse_half_precision("gradient_averaging:compression=powersgd", self.replica.parameters.values.dtype)
        made = LowRankSum(self.replica.gradients, self.group, self.rank)
        if self.rank > made.largest_rank:
            smaller = f"give rank={made.largest_rank}, or " if made.largest_rank > 0 else ""
            raise ConfigError(
                f"gradient_averaging:compression=powersgd,rank={self.rank}: the model has no matrix of "
                f"which two factors would be half as large; {smaller}leave compression out"
            )
        return made

    def before_backward(self, frames: int) -> None:
        super().before_backward(frames)
        self._passes += 1
        if self._passes == self.every:
            self.replica.gradients.extra[0] = self.replica.frames

    def _start_round(self) -> None:
        self._next_bucket = 0
        self._missing = [len(bucket.tensor_indices) for bucket in self._buckets]
        self._has_come = bytearray(len(self.replica.model_parameters))

    def _on_gradient(self, tensor_index: int) -> None:
        if self._passes < self.every or self.replica.more_to_come:
            return
        number = self._bucket_of[tensor_index]
        if self._has_come[tensor_index]:
            self._check_not_gone(number)
            return
        self._has_come[tensor_index] = True
        self._missing[number] -= 1
        # Strictly in order: every rank must start the same exchanges in the same sequence, whatever the order
        # in which autograd finishes.
        while self._next_bucket < len(self._buckets) and self._missing[self._next_bucket] == 0:
            self._launch(self._buckets[self._next_bucket])

    def _check_not_gone(self, number: int) -> None:
        """Refuse an addition to a gradient whose bucket is already sent: autograd adds to most only once."""
        if number < self._next_bucket:
            raise RunError(
                "a gradient changed after its exchange had started: a layer is used several times under "
                "reentrant checkpointing, or the script calls loss.backward() itself; checkpoint with "
                "use_reentrant=False and call step.backward(loss) alone, or train with "
                "gradient_averaging:overlap=false"
            )

    def _launch(self, bucket: Bucket) -> None:
        name = f"gradients.{self._next_bucket}"
        self._next_bucket += 1
        dtype = _COMPRESSED.get(self.compression)
        if dtype is None:
            self._works.append(self.group.allreduce_async(bucket.piece, name=name))
            return
        count = self.replica.gradients.extra
        if self._next_bucket == 1:  # this bucket ends with the frame count, which must stay exact
            self._works.append(self.group.allreduce_async(count, name="gradients.frames"))
        piece = bucket.piece[: -count.numel()] if self._next_bucket == 1 else bucket.piece
        packed = torch.mul(piece, 2.0 ** -self._compression_exponent()).to(dtype)
        self._packed.append((piece, packed))
        self._works.append(self.group.allreduce_async(packed, name=name))

    def _compression_exponent(self) -> int:
        """Return e: sums are scaled by 2**-e so that half precision neither overflows nor loses small values.

        Gradients are sums over frames; dividing by about the global number of frames scales them to a mean.
        A power of two loses no bit.  All ranks must use the same one.
        """
        if self._log2_scale is None:
            frames = torch.tensor([float(self.replica.frames)], dtype=torch.float64)
            self.comm.allreduce(frames, name="gradients.scale", op=ReduceOp.MAX)
            if frames.item() == 0:  # an update without frames says nothing about later ones
                return 0
            self._log2_scale = math.ceil(math.log2(frames.item() * self.comm.size))
        return self._log2_scale

    def step(self, progress: Progress) -> None:
        if self._passes < self.every:
            return
        self._update()

    def _update(self) -> None:
        with self.timeline.span(Span.COMM):
            if self._low_rank is None:
                self._end_buckets()
            else:
                # The sum's errors must not keep gradients of parameters that no update changes: a script may
                # let the optimizer update these later.
                self.replica.clear_left_out(self.replica.gradients.values)
                self._low_rank.sum(self.replica.loss_scale)
        with self.timeline.span(Span.UPDATE):
            self.apply(self._frames_of_all())
        self._works.clear()
        self._packed.clear()
        self._passes = 0
        self._start_round()

    def _end_buckets(self) -> None:
        """Exchange the buckets not sent during backward, and wait for all."""
        while self._next_bucket < len(self._buckets):
            self._launch(self._buckets[self._next_bucket])
        for work in self._works:
            work.wait()
        for piece, packed in self._packed:
            # In the piece's own dtype, because the sum may exceed the range of half precision.
            torch.mul(packed.to(piece.dtype), 2.0 ** self._compression_exponent(), out=piece)

    def _frames_of_all(self) -> float | Tensor:
        """Return the frames in the summed gradients; on a GPU a tensor, so that the host need not wait.

        The host must know when the sum is 0, because nothing is updated then.  It waits only if that is
        possible: a rank with frames of its own knows that the sum is positive.
        """
        frames = self.replica.gradients.extra[0]
        if not frames.is_cuda:
            return frames.item()
        is_positive = self.replica.frames > 0 or frames.item() > 0
        return frames if is_positive else 0.0

    def apply(self, frames: float | Tensor) -> None:
        """Update the parameters with the summed gradients of `frames` frames."""
        self.replica.apply_gradients(frames)

    def finish(self) -> None:
        if self._passes > 0:  # gradients of an incomplete round count, too
            self.replica.gradients.extra[0] = self.replica.frames
            self._update()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"passes": self._passes, "log2_scale": self._log2_scale}
        if self._passes > 0:
            state |= {"frames": self.replica.frames, "gradients": self.replica.gradients.values}
        if self._low_rank is not None:
            state |= {f"{_LOW_RANK}{k}": v for k, v in self._low_rank.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._passes, self._log2_scale = state["passes"], state["log2_scale"]
        if self._passes > 0:
            self.replica.frames = state["frames"]
            self.replica.gradients.values.copy_(state["gradients"])
        # A single rank saved none.
        if self._low_rank is not None and (part := part_of(_LOW_RANK, state)):
            self._low_rank.load_state_dict(part)


def _forward_gradient(own: weakref.ref[BucketedGradients], tensor_index: int, _: Tensor) -> None:
    """Tell a strategy, if it still exists, that the gradient of one of its tensors is complete."""
    strategy = own()
    if strategy is not None:
        strategy._on_gradient(tensor_index)
