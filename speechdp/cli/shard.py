"""`speechdp shard`: divide a data directory into another number of shards."""

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


@dataclass(frozen=True)
class ShardCommand:
    """Deal the utterances of a data directory into another number of shards; nothing else changes."""

    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """Data directory that `speechdp prepare` wrote."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to make."""
    shards: int
    """Number of shards of each split."""
    balance: Literal["frames", "utterances"] = "frames"
    """What the shards are to have in equal numbers."""
    split: str | None = None
    """Deal only this split, e.g. train, and copy the others as they are."""
    seed: int = 1
    """Of the dealing."""
    overwrite: bool = False
    """Replace OUT if it is a data directory already."""

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
