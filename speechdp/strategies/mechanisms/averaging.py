"""The base class of periodic strategies whose averages may travel as quantised differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from speechdp.errors import ConfigError
from speechdp.parallel.strategy import Traits, part_of
from speechdp.strategies.mechanisms.number_formats import Compression, refuse_half_precision
from speechdp.strategies.mechanisms.periodic import PeriodicStrategy
from speechdp.strategies.mechanisms.quantised_mean import Outbox, QuantisedMean


@dataclass(eq=False)
class AveragingStrategy(PeriodicStrategy):
    """A periodic strategy whose averages may travel as quantised differences to a vector that all ranks have.

    Only the mean at a window's end is compressed.  Evaluation and `finish` average in full precision, so they
    show the exact mean of the replicas.

    Subclasses call `average_parameters(compressed=True)`, and `start_from_here` when all ranks have the same
    parameters; or they use `means` directly.

    Attributes:
        means: one for each piece that is averaged separately; empty if this rank exchanges none.
        reference: the vector that differences are relative to.  (n,)
    """

    #: Number format of an average: full precision, or differences to the last one in 8 or 4 bits per value.
    compression: Compression = "none"

    @property
    def traits(self) -> Traits:
        compressed = self.compression != "none"
        return replace(
            super().traits, needs_peers=compressed and self.opens_peers, partners_follow_size=compressed
        )

    @property
    def opens_peers(self) -> bool:
        """Whether compressed averages use the channel of all ranks."""
        return True

    def check_options(self) -> None:
        super().check_options()
        if self.compression != "none" and getattr(self, "momentum", "keep") == "average":
            raise ConfigError(
                f"{self.name}:compression={self.compression},momentum=average: the optimizer's vectors would "
                "be sent in full precision; give momentum=keep or reset, or leave compression out"
            )

    def set_up(self) -> None:
        super().set_up()
        self.means: list[QuantisedMean] = []
        self._is_training = False  # between `resume` and `pause`
        if self.compression != "none" and self.comm.size > 1:
            option = f"{self.name}:compression={self.compression}"
            refuse_half_precision(option, self.replica.parameters.values.dtype)
        self._compresses = self.keeps_reference()
        if self._compresses:
            self.means = self.make_means()
            self.reference = self.make_reference()

    def keeps_reference(self) -> bool:
        """Return whether this rank sends differences."""
        return self.compression != "none" and self.comm.size > 1

    def make_means(self) -> list[QuantisedMean]:
        """Return the objects that average the pieces, one each, over the channel `peers`."""
        values = self.replica.parameters.values
        self._outbox = Outbox(self.peers)
        return [QuantisedMean(self._outbox, values[p], self.compression) for p in self.pieces()]

    def pieces(self) -> list[slice]:
        """Return the parts of the parameters that are averaged separately."""
        return [slice(0, self.replica.parameters.values.numel())]

    def make_reference(self) -> Tensor:
        """Return the vector for differences to refer to; the same on all ranks at a window's end.  (n,)"""
        return self.replica.parameters.values.clone()

    def start_apart(self) -> None:
        super().start_apart()
        self.start_from_here()

    def start_from_here(self) -> None:
        """Make the next differences relative to the current parameters, which are the same on all ranks."""
        if self._compresses:
            self.reference.copy_(self.replica.parameters.values)

    def resume(self) -> None:
        super().resume()
        self._is_training = True
        if self.means:
            self._outbox.open()

    def pause(self) -> None:
        self._is_training = False
        if self.means:
            self._outbox.close()
        super().pause()

    def average_parameters(self, *, compressed: bool = False) -> None:
        """Replace the replica's parameters by the weighted mean over ranks.  Collective.

        Args:
            compressed: use `compression` during training.  Averages while paused are for evaluation or final,
                and always in full precision.
        """
        if compressed and self._compresses and self._is_training:
            self.average_compressed()
        else:
            super().average_parameters()

    def average_compressed(self) -> None:
        """Replace the replica's parameters by the mean computed from quantised differences.  Collective."""
        self.move_to_means(self.weight())

    def move_to_means(self, weight: float) -> None:
        """Replace the replica's parameters by the mean over the channel's ranks.  Collective there."""
        values = self.replica.parameters.values
        for piece, mean in zip(self.pieces(), self.means, strict=True):
            mean.average(values[piece], self.reference[piece], weight, out=values[piece])

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._compresses:
            state["reference"] = self.reference
        for number, mean in enumerate(self.means):
            state |= {f"mean.{number}.{k}": v for k, v in mean.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not self._compresses:
            return
        # A single rank saved none; ranks that resume from it start where it was.
        self.reference.copy_(state.get("reference", self.replica.parameters.values))
        for number, mean in enumerate(self.means):
            if part := part_of(f"mean.{number}.", state):
                mean.load_state_dict(part)
