"""Ways to write files that this package once had, or might have: the tests of faults must find them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from speechdp import files
from speechdp.checkpoint import folder as checkpoint_folder
from speechdp.parallel import run_files


def syncs_what_it_has_handed_over() -> None:
    """Sync a folder after its file was handed over to rank 0, which may have renamed the folder by then."""

    def hand_over(temporary: Path, path: Path) -> None:
        files.hand_over(temporary, path)
        files.sync(path.parent)

    checkpoint_folder.hand_over = hand_over


def takes_no_for_an_answer() -> None:
    """Go on where the files of a run could not be written."""

    def write(path: Path, text: str) -> None:
        with contextlib.suppress(OSError):
            files.write_text_atomically(path, text)

    run_files.write_text_atomically = write


def writes_in_place() -> None:
    """Write the files of a run under their names at once."""

    def write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")

    run_files.write_text_atomically = write
