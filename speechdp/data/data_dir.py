"""Make a data directory whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speechdp.data.dataset import MANIFEST_NAME
from speechdp.errors import ConfigError, ShardError
from speechdp.files import cannot_be_written


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse a target that exists, unless it is a data directory and may be overwritten.

    Raises:
        ConfigError: a file, another kind of folder, or a data directory without `overwrite`.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"{path}: is a file; give the name of a new folder for the data")
    if not any(path.iterdir()):
        return
    if not (path / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{path}: exists and is no data directory of speechdp; give the name of a new folder"
        )
    if not overwrite:
        raise ConfigError(f"{path}: exists; give another folder or add --overwrite")


@contextmanager
def new_data_dir(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on a clean exit it takes the name of `path`.

    Nothing is left behind, and an old directory stays untouched, if the block raises.

    Raises:
        ConfigError: the target may not be written (see `check_target`).
        ShardError: the disk refuses.
    """
    path = path.absolute()
    check_target(path, overwrite)
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
        partial.mkdir(parents=True)
    except OSError as error:
        raise ShardError(cannot_be_written(partial, error)) from error
    try:
        yield partial
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
    except OSError as error:
        raise ShardError(cannot_be_written(error.filename or partial, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
