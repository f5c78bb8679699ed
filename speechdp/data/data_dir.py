"""Make a data directory whole or not at all."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speechdp.data.dataset import MANIFEST_NAME
from speechdp.errors import ConfigError, ShardError
from speechdp.files import cannot_be_written, hand_over
from speechdp.folder_owner import OWNER_FILE
from speechdp.overwrite import check_deletable, may_write


def place_of(path: Path) -> Path:
    """Return where a data directory of that name is made: where a symbolic link leads to."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()


def owner_file(path: Path) -> Path:
    """Return the file that tells who makes a data directory, beside it: it is replaced as a whole."""
    place = place_of(path)
    return place.with_name(f".{place.name}.{OWNER_FILE}")


def check_place(path: Path) -> None:
    """Refuse a name under which this user cannot make a folder.

    Raises:
        ConfigError: a link that leads nowhere, or a place where this user may not write.
    """
    try:
        place = place_of(path)
        is_there = place.exists()
        parent = next(parent for parent in place.parents if parent.exists())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made ({error.strerror}); give another folder") from error
    if path.is_symlink() and not is_there:
        raise ConfigError(
            f"{path}: is a symbolic link to {place}, where there is nothing; make a folder there, or remove "
            "the link"
        )
    if not parent.is_dir():
        raise ConfigError(f"{path}: {parent} is a file; give the name of a new folder for the data")
    if not may_write(parent):
        inside = f"a folder in {place}" if place.is_dir() and may_write(place) else "a folder elsewhere"
        raise ConfigError(f"{path}: is made in {parent}, where this user may not write; give {inside}")
    state = parent.stat()
    is_sticky = state.st_mode & stat.S_ISVTX and os.geteuid() not in (0, state.st_uid)
    if is_sticky and is_there and place.stat().st_uid != os.geteuid():
        raise ConfigError(f"{path}: belongs to another user and cannot be replaced; give another folder")


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse a target that cannot be made, or exists, unless it is a data directory and may be overwritten.

    Raises:
        ConfigError: a file, another kind of folder, a data directory without `overwrite`, a link that leads
            nowhere, or rights that this user does not have.
    """
    check_place(path)
    place = place_of(path)
    if not place.exists():
        return
    if not place.is_dir():
        raise ConfigError(f"{path}: is a file; give the name of a new folder for the data")
    if not may_write(place):
        raise ConfigError(f"{path}: this user may not write there; give another folder")
    if os.path.ismount(place):
        raise ConfigError(f"{path}: is a disk's own folder, which cannot be replaced; give a folder in it")
    if not any(place.iterdir()):
        return
    if not (place / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{path}: exists and is no data directory of speechdp; give the name of a new folder"
        )
    if not overwrite:
        raise ConfigError(f"{path}: exists; give another folder or add --overwrite")
    check_deletable(place)


@contextmanager
def new_data_dir(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on a clean exit it takes the name of `path`.

    Nothing is left behind, and an old directory stays untouched, if the block raises.  A symbolic link
    stays, and leads to the new directory.

    Raises:
        ConfigError: the target may not be written (see `check_target`).
        ShardError: the disk refuses.
    """
    check_target(path, overwrite)
    place = place_of(path)
    partial = place.with_name(f".{place.name}.partial")
    former = place.with_name(f".{place.name}.former")
    for left in (partial, former):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ShardError(cannot_be_written(partial, error)) from error
    try:
        yield partial
        _replace(place, partial, former)
    except OSError as error:
        raise ShardError(cannot_be_written(error.filename or partial, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(place: Path, partial: Path, former: Path) -> None:
    """Give the new directory its name; the old one goes only when that is done.  Raises OSError."""
    replaces = place.exists()
    if replaces:
        hand_over(place, former)
    try:
        hand_over(partial, place)
    except OSError:
        if replaces:
            hand_over(former, place)
        raise
    shutil.rmtree(former, ignore_errors=True)
