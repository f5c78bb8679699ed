"""Options of `speechdp shard`.  The docstring under a field is its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from speechdp.errors import ConfigError
from speechdp.options.seed import check_seed
from speechdp.options.shown import shown

Balance = Literal["frames", "utterances"]


@dataclass(frozen=True)
class ReshardOptions:
    """Which data directory to reshard, and how; equal seeds give equal bytes."""

    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Data directory to write."""
    shards: int
    """Number of shards in each split; a split with fewer utterances gets one shard per utterance."""
    balance: Balance = "frames"
    """What to balance across shards: the number of frames, or of utterances."""
    split: Annotated[str | None, shown("SPLIT", "all splits")] = None
    """Reshard only this split, e.g. train, and copy the others unchanged."""
    seed: Annotated[int, shown("SEED")] = 1
    """Seed for the assignment of utterances to shards."""
    overwrite: bool = False
    """Replace OUT if it is already a data directory."""

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigError(f"--shards {self.shards}: must be at least 1")
        check_seed(self.seed)
        data = self.data.resolve()
        if self.out.resolve() in (data, *data.parents):
            raise ConfigError(f"{self.out}: contains the data to be read; give another folder")
