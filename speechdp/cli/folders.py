"""What commands without ranks do about the folder they write: own it, and leave it tidy when ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from speechdp import exit_codes
from speechdp.claimant import Claimant
from speechdp.comm import environment
from speechdp.folder_owner import FolderOwner, Surroundings


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
        environment.end_process_with(f"speechdp: {message}\n", exit_codes.FAILED)

    return FolderOwner(folder, Claimant.here(command, os.environ), Surroundings(say, end), file=file)


def say_aside(text: str) -> None:
    """Print a line of news to stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def tidied_on_sigterm() -> Iterator[None]:
    """Leave the block on SIGTERM as by an exception, so that what is unfinished is removed; exit code 143."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would end the tidying
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except SystemExit:
        print("speechdp: ended by SIGTERM", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, former)
