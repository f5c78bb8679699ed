"""One training step of one rank: what is done with a strategy, in which order, and how it is timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speechdp.parallel.strategy import Progress, Strategy
from speechdp.timing.timeline import Span, Timeline


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
