"""`speechdp shard`: copy a data directory into another number of shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from speechdp.cli.inspect import describe
from speechdp.cli.support.console import make_console
from speechdp.cli.support.folders import owner_of, say_aside
from speechdp.cli.support.progress import progress_bar
from speechdp.data.prepare.reshard import ReshardOptions, reshard
from speechdp.data.shards.data_dir import check_place, owner_file
from speechdp.options.shown import shown


@dataclass(frozen=True)
class ShardCommand:
    """Copy a data directory with its utterances spread over another number of shards."""

    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Data directory to write."""
    shards: int
    """Number of shards in each split."""
    balance: Literal["frames", "utterances"] = "frames"
    """What is balanced across shards: their number of frames, or of utterances."""
    split: Annotated[str | None, shown("SPLIT", "all splits")] = None
    """Reshard only this split, e.g. train, and copy the others unchanged."""
    seed: int = 1
    """Seed for the assignment of utterances to shards."""
    overwrite: bool = False
    """Replace OUT if it is already a data directory."""

    def run(self) -> int:
        """Write the new directory and print what is in it."""
        options = ReshardOptions(
            data=self.data,
            out=self.out,
            num_shards=self.shards,
            balance=self.balance,
            split=self.split,
            seed=self.seed,
            overwrite=self.overwrite,
        )
        check_place(self.out)
        with (
            owner_of(self.out, "shard", say_aside, file=owner_file(self.out)),
            progress_bar(Console(stderr=True)) as progress,
        ):
            dataset = reshard(options, progress)
        make_console().print(describe(dataset))
        return 0
