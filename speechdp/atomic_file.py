"""Write a file so that its name only ever shows the whole of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on a clean exit sync it and rename it to `path`.

    The temporary file is removed if the block (or the sync) raises, so a full disk or an interrupted
    run leaves either the old file or none.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)  # else the rename itself may be lost in a crash


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 `text` to `path` so that readers see the old content or all of the new."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
