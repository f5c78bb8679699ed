"""The base class of strategies that move one global model by the ranks' mean movement."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from speechdp.parallel.strategy import Traits
from speechdp.strategies.mechanisms.nodes import NodewiseStrategy
from speechdp.timing.timeline import Span


@dataclass(eq=False)
class OuterStrategy(NodewiseStrategy):
    """Move a global model once per period; all ranks continue from it.

    Subclasses write `outer_step`.  The global model and its velocity are flat vectors.  Every rank computes
    them from the same mean, so they are the same everywhere, and only the parameters are exchanged.

    Evaluation right after an exchange shows the global model.  Within a window it shows the weighted mean of
    the replicas, as the end of training does: an outer step for a shortened window would add the velocity of
    whole windows.
    """

    @property
    def traits(self) -> Traits:
        return replace(super().traits, has_outer_step=True)

    def set_up(self) -> None:
        #: Where all ranks continued from after the last exchange.
        self._start = self.replica.parameters.values.clone()
        super().set_up()
        self._velocity = self._start.new_zeros(self._start.shape)

    def make_reference(self) -> Tensor:
        return self._start

    def start_apart(self) -> None:
        super().start_apart()
        self._start.copy_(self.replica.parameters.values)

    @abstractmethod
    def outer_step(self, start: Tensor, movement: Tensor, velocity: Tensor) -> None:
        """Move the global model; update `start` and `velocity` in place.

        Args:
            start: where the ranks started from; becomes where they continue from.  (n,)
            movement: mean parameters of the ranks minus `start`; may be overwritten.  (n,)
            velocity: the outer momentum, in the subclass's own scale.  (n,)
        """

    def settle(self) -> None:
        """Adjust the optimizer's state after an outer step.  Collective."""
        return None

    def to_global_model(self, values: Tensor) -> None:
        """Turn `values`, where the ranks continue from, into the global model in place."""
        return None

    def exchange(self) -> None:
        values = self.replica.parameters.values
        with self.timeline.span(Span.COMM):
            self.average_parameters(compressed=True)
        with self.timeline.span(Span.UPDATE):
            self.outer_step(self._start, values.sub_(self._start), self._velocity)
            values.copy_(self._start)
        with self.timeline.span(Span.COMM):
            self.settle()

    def finish(self) -> None:
        if self._together is None:
            self._show_global_model()
        self.forget_window()  # local training is in the mean
        super().finish()

    def _show_global_model(self) -> None:
        if self.is_apart:
            self.average_parameters()
        else:
            self.to_global_model(self.replica.parameters.values)

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        if self._together is not None:
            yield
            return
        with self.replica.restored():
            self._show_global_model()
            yield

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "start": self._start, "velocity": self._velocity}
        state.pop("reference", None)  # the same as `start`
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._start.copy_(state["start"])
        self._velocity.copy_(state["velocity"])
