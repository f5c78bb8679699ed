"""A disk that fails at the n-th operation: writing, syncing, renaming, making a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Crash(BaseException):
    """Simulates the end of the process: nothing cleans up after it."""


def full() -> OSError:
    """Return the error of a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FaultyDisk:
    """Counts operations on the disk and fails at one of them.

    Attributes:
        num_operations: how many there were.
    """

    def __init__(self, fails_at: int, error: BaseException) -> None:
        self.num_operations = 0
        self._fails_at = fails_at
        self._error = error

    def operate(self) -> None:
        """Count one operation, or fail."""
        self.num_operations += 1
        if self.num_operations == self._fails_at:
            raise self._error


class _File:
    """A file whose writes count."""

    def __init__(self, file: Any, disk: FaultyDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        self._disk.operate()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


@contextmanager
def faulty_disk(fails_at: int, error: BaseException) -> Iterator[FaultyDisk]:
    """Let the `fails_at`-th operation of the block fail; 0: none."""
    disk = FaultyDisk(fails_at, error)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir")):
            patch.setattr(owner, name, _counted(getattr(owner, name), disk))
        open_ = Path.open

        def counted_open(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            file = open_(path, mode, *arguments, **options)
            return file if mode.startswith("r") and "+" not in mode else _File(file, disk)

        patch.setattr(Path, "open", counted_open)
        yield disk


def _counted(function: Any, disk: FaultyDisk) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        disk.operate()
        return function(*arguments, **options)

    return call
