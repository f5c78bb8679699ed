"""`speechdp prepare`: make a data directory from a corpus, or from synthetic speech."""

from __future__ import annotations

from dataclasses import dataclass

import tyro
from rich.console import Console

from speechdp.cli.inspect import describe
from speechdp.cli.support.console import make_console
from speechdp.cli.support.progress import progress_bar
from speechdp.comm.startup.folder_owner import owner_of, print_to_stderr
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.data_dir import check_place, owner_file
from speechdp.options.prepare import PrepareOptions


@dataclass(frozen=True)
class PrepareCommand(PrepareOptions):
    """Make a data directory (HDF5 shards) to train on.

    From a corpus: speechdp prepare SOURCE DATA

    From its parts: speechdp prepare data/train DATA --dev data/dev --test data/test

    Synthetic speech: speechdp prepare --synthetic HOURS DATA

    With Kaldi's alignments: speechdp prepare --kaldi DATA_DIR --ali ALI_DIR DATA"""

    advise: tyro.conf.Suppress[str] = ""
    """`no`: print no advice on training, which follows it already; given by launch/quickstart."""

    def run(self) -> int:
        """Make the data directory and print what is in it."""
        console = make_console()
        check_place(self.data)
        with (
            progress_bar(Console(stderr=True)) as progress,
            owner_of(self.data, "prepare", print_to_stderr, file=owner_file(self.data)),
        ):
            prepared = prepare(self, progress)
        console.print(describe(prepared.dataset, advises=self.advise != "no"))
        for notice in prepared.notices:
            console.print(notice)
        return 0
