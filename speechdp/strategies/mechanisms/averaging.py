"""What periodic strategies share whose exchange is one weighted mean of the parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from speechdp.errors import ConfigError
from speechdp.parallel.strategy import Traits
from speechdp.strategies.mechanisms.periodic import PeriodicStrategy
from speechdp.strategies.mechanisms.quantised_mean import Compression, Outbox, QuantisedMean


@dataclass(eq=False)
class AveragingStrategy(PeriodicStrategy):
    """A periodic strategy whose averages may travel as quantised differences.

    What is compressed is the mean at a window's end.  Evaluation and `finish` average in full precision: what
    they show is the mean of the replicas.

    Subclasses call `average_parameters(compressed=True)`, and `start_from_here` where all ranks have come to
    the same parameters; or they work with `means` themselves.

    Attributes:
        means: of the pieces that are averaged by themselves; none where nothing is compressed.
        reference: the vector that differences are taken to.  (n,)
    """

    #: Number format of an average: full precision, or differences to the last one in 8 or 4 bits a value.
    compression: Compression = "none"

    @property
    def traits(self) -> Traits:
        compressed = self.compression != "none"
        return replace(super().traits, needs_peers=compressed, partners_follow_size=compressed)

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
        if self.compression == "none" or self.comm.size == 1:
            return
        values = self.replica.parameters.values
        if values.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"{self.name}:compression={self.compression}: the parameters are "
                f"{str(values.dtype).removeprefix('torch.')}; make them float32, or leave compression out"
            )
        self._outbox = Outbox(self.peers)
        self.means = [QuantisedMean(self._outbox, values[p], self.compression) for p in self.pieces()]
        self.reference = self.make_reference()

    def pieces(self) -> list[slice]:
        """Return the parts of the parameters that are averaged by themselves."""
        return [slice(0, self.replica.parameters.values.numel())]

    def make_reference(self) -> Tensor:
        """Return the vector that differences are taken to; the same on all ranks at a window's end.  (n,)"""
        return self.replica.parameters.values.clone()

    def start_apart(self) -> None:
        super().start_apart()
        self.start_from_here()

    def start_from_here(self) -> None:
        """Take the next differences to the parameters, which are the same on all ranks."""
        if self.means:
            self.reference.copy_(self.replica.parameters.values)

    def resume(self) -> None:
        super().resume()
        if self.means:
            self._outbox.open()

    def pause(self) -> None:
        if self.means:
            self._outbox.close()
        super().pause()

    def average_parameters(self, *, compressed: bool = False) -> None:
        """Replace the replica's parameters by the weighted mean over ranks.  Collective.

        Args:
            compressed: as `compression` says while training goes on; what is averaged while paused is shown
                or kept, and in full precision.
        """
        if not (compressed and self.means and self._outbox.is_open):
            super().average_parameters()
            return
        values = self.replica.parameters.values
        for piece, mean in zip(self.pieces(), self.means, strict=True):
            mean.average(values[piece], self.reference[piece], self.weight(), out=values[piece])

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.means:
            state["reference"] = self.reference
        for number, mean in enumerate(self.means):
            state |= {f"mean.{number}.{k}": v for k, v in mean.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not self.means:
            return
        # One rank alone has none; those that go on from it are where it was.
        self.reference.copy_(state.get("reference", self.replica.parameters.values))
        for number, mean in enumerate(self.means):
            prefix = f"mean.{number}."
            part = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            if part:
                mean.load_state_dict(part)
