"""Ownership of folders by this process: a command without ranks, or rank 0 on behalf of all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from speechdp import exit_codes
from speechdp.comm import environment
from speechdp.comm.startup.failure import rank_and_name
from speechdp.ownership.claimant import Claimant
from speechdp.ownership.owner import FolderOwner, Surroundings
from speechdp.process.bounded import bounded

if TYPE_CHECKING:  # it loads torch, which preparing data does not need
    from speechdp.comm.base import Communicator


def _nothing() -> None:
    return None


def _never() -> bool:
    return False


@dataclass(frozen=True)
class OwningProcess:
    """A process that owns folders.

    Attributes:
        comm: the ranks on whose behalf this one owns folders; None: a process without ranks.
        clean_up: called before the process ends because it has lost a folder.
        stopped: returns whether the process was asked to stop.
    """

    comm: Communicator | None = None
    clean_up: Callable[[], None] = _nothing
    stopped: Callable[[], bool] = _never

    def end(self, message: str) -> None:
        """End the process at once, with a line that names this rank."""
        bounded(self.clean_up, default=None)  # training may hold its lock while it prints to a full pipe
        _, name = rank_and_name(self.comm)
        environment.end_process_with(f"{name}: {message}\n", exit_codes.IN_USE)


def owner_of(
    folder: Path,
    command: str,
    print_line: Callable[[str], None],
    process: OwningProcess = OwningProcess(),
    *,
    file: Path | None = None,
) -> FolderOwner:
    """Return a context manager that owns a folder for this process during its block.

    Args:
        command: what the process does, for the message to others that want the folder.
        print_line: prints a line for the user.
        file: see FolderOwner.
    """
    surroundings = Surroundings(print_line, process.end, process.stopped)
    return FolderOwner(folder, Claimant.here(command, os.environ), surroundings, file=file)


def print_to_stderr(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)
