"""Sizes of the acoustic model, for options and `--help`, which do without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from speechdp.errors import ConfigError


@dataclass(frozen=True)
class LstmConfig:
    """Sizes of an acoustic model.

    Attributes:
        layers: number of LSTM layers.
        cells: cells per layer and direction.
        bidirectional: BLSTM instead of LSTM.
        projection: size of the recurrent projection (LSTMP), 0 for none.
        bottleneck: size of a linear layer before the softmax, 0 for none.
        dropout: dropout between LSTM layers and before the output, 0 to 1.
        subsampling: number of frames that the LSTM takes in one step; 1: each frame is a step.
    """

    layers: int
    cells: int
    bidirectional: bool
    projection: int = 0
    bottleneck: int = 0
    dropout: float = 0.0
    subsampling: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ConfigError(f"--{field.name} {getattr(self, field.name)}: must not be negative")
        for name in ("layers", "cells", "subsampling"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least 1")
        if not self.dropout < 1:
            raise ConfigError(f"--dropout {self.dropout}: must be less than 1")
        if self.projection >= self.cells:
            raise ConfigError(f"--projection {self.projection}: must be smaller than --cells {self.cells}")
