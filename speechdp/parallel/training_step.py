"""One training step of one rank: what is done with a strategy, how it is timed, what ends it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speechdp.comm.base import Communicator, ReduceOp
from speechdp.parallel.loss_scale import LEAST_SCALE, finite_loss
from speechdp.parallel.strategy import Progress, Strategy, trains_together
from speechdp.timing.timeline import Span, Timeline

#: On a GPU losses are looked at once in so many steps: each look makes the host wait for the device.
_GPU_LOSS_STEPS = 20


class TrainingStep:
    """One step: `begin`, forward, `backward` once or more often, `end`.

    Whoever trains goes through here: the trainer, the profile, and scripts with a loop of their own.

    Args:
        strategy: attached; its replica holds the model.
        timeline: of this rank.
        weight: what the loss of this rank is a sum over (frames, examples); 0: the rank only joins.
    """

    def __init__(self, strategy: Strategy, timeline: Timeline, weight: int) -> None:
        self._strategy, self._timeline = strategy, timeline
        self.weight = weight
        self._loss: Tensor | None = None  # of the passes so far

    def begin(self) -> None:
        """Note that the step begins; some strategies start an exchange here."""
        self._strategy.before_backward(self.weight)

    def backward(
        self, loss: Tensor, *, compute: Callable[[Tensor | None], object] | None = None, last: bool = True
    ) -> None:
        """Add the gradients of `loss`, scaled by the replica's scaler if it has one.

        Args:
            loss: summed over (part of) what `weight` counts.  ()
            compute: computes the gradients where `loss.backward` does not, from that of the loss (None: 1).
            last: no other backward pass follows in this step, so gradients may be exchanged as they come.
        """
        strategy, scaler = self._strategy, self._strategy.replica.scaler
        if strategy.observer is not None:
            total = loss.detach()
            self._loss = total if self._loss is None else self._loss + total
            if last:
                strategy.observer.observe_loss(self._loss, self.weight)
        strategy.replica.more_to_come = not last
        with self._timeline.span(Span.BACKWARD):
            # Given a gradient, even of one, torch imports its symbolic shapes: half a second of a start.
            gradient = None if scaler is None else scaler.scale(torch.ones_like(loss))
            (compute or loss.backward)(gradient)

    def end(self, progress: Progress, *, number: int, epoch: int = 0) -> None:
        """Exchange and update as the strategy does; close the step's record.  Collective where it exchanges.

        Args:
            progress: where training stands with this step.
            number: of the record in this rank's timeline.
            epoch: that the record belongs to.
        """
        self._strategy.replica.bind_parameters()
        self._strategy.step(progress)
        self._timeline.end_step(number, epoch, self.weight)


def given_for_loss(value: object) -> str:
    """Return what messages call something that cannot be a loss, no scalar that requires grad; what to do."""
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
    """What is not finite and ends a training: which losses and loss scales, and when they are looked at.

    Args:
        strategy: attached; its replica holds the model.
        comm: the ranks that it exchanges with.
    """

    def __init__(self, strategy: Strategy, comm: Communicator) -> None:
        self._strategy, self._comm = strategy, comm
        self._mends = comm.size > 1 and strategy.traits.survives_divergence
        replica = strategy.replica
        self._replica = replica
        # One that is not enabled leaves no update out.
        self._scaler = replica.scaler if replica.scaler is not None and replica.scaler.is_enabled() else None
        self._waits = replica.parameters.values.device.type == "cuda"

    @property
    def others_mend(self) -> bool:
        """Whether other ranks mend a loss or parameters of this one that are no longer numbers."""
        return self._mends and not trains_together(self._strategy)

    def counted(self, total: Tensor, frames: int) -> tuple[Tensor, Tensor | int]:
        """Return of a loss and its frames what must be finite: both 0 where it may be none.

        With a scaler its update will be skipped; what is no number at any scale, the scale will tell.
        """
        if self.others_mend or self._scaler is not None:
            return finite_loss(total, frames)
        return total, frames

    def is_due(self, steps: int) -> bool:
        """Return whether losses, or the scale, are looked at after so many steps of this rank."""
        return not self._waits or steps % _GPU_LOSS_STEPS == 0

    def fallen_scale(self) -> float | None:
        """Return the loss scale if it is so low that hardly any will do; None: it is not.

        Where other ranks mend this one it stands at the least scale until they do.  Waits for the device.
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
