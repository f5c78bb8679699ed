"""One training step of one rank: how it calls the strategy, how it is timed, and what ends training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speechdp.comm.base import Communicator, ReduceOp
from speechdp.parallel.loss_scale import LEAST_SCALE, finite_loss
from speechdp.parallel.strategy import Progress, Strategy, trains_together
from speechdp.timing.timeline import Span, Timeline

#: On a GPU losses are checked only every so many steps, because each check makes the host wait for the
#: device.
_GPU_LOSS_STEPS = 20


class TrainingStep:
    """One step: `begin`, forward, `backward` once or more often, `end`.

    The trainer, the profile and scripts with their own loop all use it.

    Args:
        strategy: attached strategy; its replica holds the model.
        timeline: timeline of this rank.
        weight: number of items (frames, examples) that this rank's loss is a sum over; 0: the rank only
            joins.
    """

    def __init__(self, strategy: Strategy, timeline: Timeline, weight: int) -> None:
        self._strategy, self._timeline = strategy, timeline
        self.weight = weight
        self._loss: Tensor | None = None  # of the passes so far

    def begin(self) -> None:
        """Tell the strategy that the step begins; some strategies start an exchange here."""
        self._strategy.before_backward(self.weight)

    def backward(
        self, loss: Tensor, *, compute: Callable[[Tensor | None], object] | None = None, last: bool = True
    ) -> None:
        """Add the gradients of `loss`, scaled by the replica's scaler if it has one.

        Args:
            loss: summed over (part of) the items that `weight` counts.  ()
            compute: computes the gradients instead of `loss.backward`, given the gradient of the loss (None:
                it is 1).
            last: whether this is the last backward pass of the step, so gradients may be exchanged as they
                are computed.
        """
        strategy, scaler = self._strategy, self._strategy.replica.scaler
        if strategy.observer is not None:
            total = loss.detach()
            self._loss = total if self._loss is None else self._loss + total
            if last:
                strategy.observer.observe_loss(self._loss, self.weight)
        strategy.replica.more_to_come = not last
        with self._timeline.span(Span.BACKWARD):
            # With an explicit gradient, even of 1, torch imports its symbolic shapes: half a second of
            # start-up.
            gradient = None if scaler is None else scaler.scale(torch.ones_like(loss))
            (compute or loss.backward)(gradient)

    def end(self, progress: Progress, *, number: int, epoch: int = 0) -> None:
        """Let the strategy exchange and update; close the step's record.  Collective if it exchanges.

        Args:
            progress: training progress including this step.
            number: number of the record in this rank's timeline.
            epoch: epoch of the record.
        """
        self._strategy.replica.bind_parameters()
        self._strategy.step(progress)
        self._timeline.end_step(number, epoch, self.weight)


def given_for_loss(value: object) -> str:
    """Describe, for messages, a value that cannot be a loss (a scalar that requires grad); say what to do."""
    if isinstance(value, Tensor) and value.dim() > 0 and value.requires_grad:
        return f"a tensor of shape {list(value.shape)}: sum it"
    if isinstance(value, Tensor):
        return "a tensor that does not require grad: compute it without detach() and torch.no_grad()"
    if isinstance(value, (int, float)):
        return f"the number {value:g}: give the tensor, without .item() or float()"
    if value is None:
        return "None: return the loss from the function that computes it"
    return f"an object of type {type(value).__name__}"


class DivergenceWatch:
    """Decide which losses and loss scales end a training, and when they are checked.

    Args:
        strategy: attached strategy; its replica holds the model.
        comm: the ranks that it exchanges with.
    """

    def __init__(self, strategy: Strategy, comm: Communicator) -> None:
        self._strategy, self._comm = strategy, comm
        self._mends = comm.size > 1 and strategy.traits.survives_divergence
        replica = strategy.replica
        self._replica = replica
        # A disabled scaler skips no update.
        self._scaler = replica.scaler if replica.scaler is not None and replica.scaler.is_enabled() else None
        self._waits = replica.parameters.values.device.type == "cuda"

    @property
    def others_mend(self) -> bool:
        """Whether other ranks repair this one's loss or parameters when they are not finite."""
        return self._mends and not trains_together(self._strategy)

    def counted(self, total: Tensor, frames: int) -> tuple[Tensor, Tensor | int]:
        """Return a loss and its frames, for a sum of losses that must stay finite.

        Both are 0 if the loss is not finite but need not end training: other ranks repair this one, or a
        scaler skips the update.  If losses are finite at no scale, `fallen_scale` finds it.

        Args:
            total: sum over `frames` frames.  ()
            frames: number of frames.
        """
        if self.others_mend or self._scaler is not None:
            return finite_loss(total, frames)
        return total, frames

    def is_due(self, steps: int) -> bool:
        """Return whether losses, or the scale, are checked after this number of steps of this rank."""
        return not self._waits or steps % _GPU_LOSS_STEPS == 0

    def fallen_scale(self) -> float | None:
        """Return the loss scale if it is below LEAST_SCALE, too low for training to recover; else None.

        If other ranks repair this one, set the scale to LEAST_SCALE instead and return None.  Waits for the
        device.
        """
        if self._scaler is None or (scale := self._scaler.get_scale()) >= LEAST_SCALE:
            return None
        if self.others_mend:
            self._scaler.update(LEAST_SCALE)  # until the next average
            return None
        return scale

    def all_finite(self) -> bool:
        """Return whether the parameters of all ranks are finite.  Collective."""
        bad = torch.tensor([0.0 if self._replica.is_finite else 1.0], dtype=torch.float64)
        return self._comm.allreduce(bad, name="final_model", op=ReduceOp.MAX).item() == 0
