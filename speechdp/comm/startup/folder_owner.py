"""Ownership of folders by one process: of a command without ranks, or rank 0 of a script for all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from speechdp import exit_codes
from speechdp.comm import environment
from speechdp.ownership.claimant import Claimant
from speechdp.ownership.owner import FolderOwner, Surroundings


def owner_of(
    folder: Path, command: str, say: Callable[[str], None], *, file: Path | None = None
) -> FolderOwner:
    """Return what owns a folder for this process while its block runs.

    Args:
        command: what it does, for whoever else wants the folder.
        say: takes a line of news.
        file: see FolderOwner.
    """

    def end(message: str) -> None:
        environment.end_process_with(f"speechdp: {message}\n", exit_codes.IN_USE)

    return FolderOwner(folder, Claimant.here(command, os.environ), Surroundings(say, end), file=file)


def say_aside(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)
