"""A network disk's memory of what was not there: on NFS, until the folder above is listed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def remember_as_missing(monkeypatch: pytest.MonkeyPatch, paths: Iterable[Path]) -> None:
    """Let this process see none of `paths`, which may be there, until it lists the folder of each."""
    remembered = set(paths)
    scandir = os.scandir

    def refuse(path: Path) -> None:
        if path in remembered:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def as_remembered(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            refuse(path)
            return function(path, *arguments, **options)

        return call

    def list_anew(folder: str | Path) -> Any:
        refuse(Path(folder))
        remembered.difference_update(path for path in tuple(remembered) if path.parent == Path(folder))
        return scandir(folder)

    monkeypatch.setattr(Path, "open", as_remembered(Path.open))
    monkeypatch.setattr(Path, "stat", as_remembered(Path.stat))
    monkeypatch.setattr(os, "scandir", list_anew)
