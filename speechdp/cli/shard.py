"""`speechdp shard`: copy a data directory into another number of shards."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from speechdp.cli.inspect import describe
from speechdp.cli.support.console import make_console
from speechdp.cli.support.progress import progress_bar
from speechdp.comm.startup.folder_owner import owner_of, print_to_stderr
from speechdp.data.prepare.reshard import reshard, too_few_utterances
from speechdp.data.shards.data_dir import check_place, owner_file
from speechdp.options.reshard import ReshardOptions


@dataclass(frozen=True)
class ShardCommand(ReshardOptions):
    """Copy a data directory with its utterances spread over another number of shards."""

    def run(self) -> int:
        """Write the new directory and print what is in it."""
        check_place(self.out)
        with (
            owner_of(self.out, "shard", print_to_stderr, file=owner_file(self.out)),
            progress_bar(Console(stderr=True)) as progress,
        ):
            dataset = reshard(self, progress)
        console = make_console()
        console.print(describe(dataset))
        for line in too_few_utterances(dataset, self):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
