"""Copy the files that describe a data directory's shards, without the shards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from speechdp import remedies
from speechdp.data.shards.dataset import LANGUAGE_MODEL_NAMES, MANIFEST_NAME, SYMBOLS_NAME, Dataset
from speechdp.errors import RunError, ShardError
from speechdp.files import atomic_path, cannot_be_read, cannot_be_written

#: Files beside the shards that describe their contents, apart from data.json and the language model.
_NAMES = ("classes.txt", "lexicon.txt", SYMBOLS_NAME)
_PIECE_BYTES = 1 << 20


def keep_description(dataset: Dataset, folder: Path) -> list[str]:
    """Copy all files of a data directory except its shards to `folder`, data.json last.

    The copy can be opened as a data directory whose shards are missing.  Files that `folder` has already,
    with the same size and modification time, are not read again.  A language model that cannot be read is
    left out: the rest can be used without it.

    Returns:
        A line for each thing that could not be copied.

    Raises:
        ShardError: a file of the data directory cannot be read.
        RunError: a disk error.
    """
    notices: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_or_remove(_NAMES, dataset.path, folder)
        try:
            _copy_or_remove(LANGUAGE_MODEL_NAMES, dataset.path, folder)
        except ShardError as error:
            for name in LANGUAGE_MODEL_NAMES:  # parts of two models would not fit together
                (folder / name).unlink(missing_ok=True)
            notices.append(f"{folder} holds no language model: {error}")
        _copy(dataset.path / MANIFEST_NAME, folder / MANIFEST_NAME)
    except OSError as error:
        raise RunError(cannot_be_written(folder, error, remedies.resuming())) from error
    return notices


def _copy_or_remove(names: tuple[str, ...], source: Path, folder: Path) -> None:
    for name in names:
        try:
            is_there = (source / name).exists()
        except OSError as error:
            raise ShardError(cannot_be_read(source / name, error)) from error
        if is_there:
            _copy(source / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    """Copy a file and its modification time, unless the target has both its size and its time already.

    Raises:
        ShardError: the file cannot be read.
        OSError: the copy cannot be written.
    """
    try:
        state = source.stat()
    except OSError as error:
        raise ShardError(cannot_be_read(source, error)) from error
    with contextlib.suppress(FileNotFoundError):
        kept = target.stat()
        if (kept.st_size, kept.st_mtime_ns) == (state.st_size, state.st_mtime_ns):
            return
    with atomic_path(target) as temporary:
        with temporary.open("wb") as file:
            for piece in _pieces(source):
                file.write(piece)
        with contextlib.suppress(OSError):  # the time only saves copying again
            os.utime(temporary, ns=(state.st_atime_ns, state.st_mtime_ns))


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file in pieces.  Raises ShardError."""
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise ShardError(cannot_be_read(path, error)) from error
