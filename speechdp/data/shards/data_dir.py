"""Create a data directory completely or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speechdp.data.shards.dataset import MANIFEST_NAME
from speechdp.errors import ConfigError, ShardError
from speechdp.files import cannot_be_written, hand_over, may_write
from speechdp.ownership.overwrite import DATA, check_deletable, first_of, refuse_inside
from speechdp.ownership.owner import OWNER_FILE


def place_of(path: Path) -> Path:
    """Return where the data directory of that name is created: the target of a symbolic link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()


def owner_file(path: Path) -> Path:
    """Return the file that names a data directory's owner; it is outside the directory, which is replaced."""
    place = place_of(path)
    return place.with_name(f".{place.name}.{OWNER_FILE}")


def _former_of(place: Path) -> Path:
    """Return the name that an old data directory has while the new one takes its place."""
    return place.with_name(f".{place.name}.former")


def check_place(path: Path) -> None:
    """Refuse a path at which this user cannot create a folder.

    Raises:
        ConfigError: a dangling link, a place inside another command's output, or one where this user may not
            write.
    """
    try:
        place = place_of(path)
        is_there = place.exists()
        comes_back = not is_there and _former_of(place).exists()
        parent = next(parent for parent in place.parents if parent.exists())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made ({error.strerror}); give another folder") from error
    if path.is_symlink() and not is_there and not comes_back:
        raise ConfigError(
            f"{path}: is a symbolic link to {place}, which does not exist; make a folder there, or remove "
            "the link"
        )
    refuse_inside(place)
    if not parent.is_dir():
        raise ConfigError(f"{path}: {parent} is a file; give the name of a new folder for the data")
    if not may_write(parent):
        inside = f"a folder in {place}" if place.is_dir() and may_write(place) else "a folder elsewhere"
        raise ConfigError(
            f"{path}: cannot be created in {parent}, where you have no write permission; give {inside}"
        )
    state = parent.stat()
    is_sticky = state.st_mode & stat.S_ISVTX and os.geteuid() not in (0, state.st_uid)
    if is_sticky and is_there and place.stat().st_uid != os.geteuid():
        raise ConfigError(f"{path}: belongs to another user and cannot be replaced; give another folder")


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse a target that cannot be created, or exists and is not a data directory that may be overwritten.

    If a run was killed while it replaced a data directory, the old directory gets its name back.

    Raises:
        ConfigError: a file, another kind of folder, a data directory without `overwrite` or with other files
            in it, a dangling link, or missing permissions.
        ShardError: a disk error.
    """
    check_place(path)
    place = place_of(path)
    try:
        _bring_back(_former_of(place), place)
    except OSError as error:
        raise ShardError(cannot_be_written(place, error)) from error
    if not place.exists():
        return
    if not place.is_dir():
        raise ConfigError(f"{path}: is a file; give the name of a new folder for the data")
    if not may_write(place):
        raise ConfigError(f"{path}: you have no write permission there; give another folder")
    if os.path.ismount(place):
        raise ConfigError(
            f"{path}: is the root folder of a disk, which cannot be replaced; give a folder in it"
        )
    if not any(place.iterdir()):
        return
    if not (place / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{path}: exists and is not a data directory of speechdp; give the name of a new folder"
        )
    if not overwrite:
        raise ConfigError(f"{path}: exists; give another folder or add --overwrite")
    others = sorted(entry.name for entry in place.iterdir() if not DATA.owns(entry))
    if others:
        raise ConfigError(
            f"{path}: holds {first_of(others)} besides the data, which --overwrite would delete; move it, or "
            "give another folder"
        )
    check_deletable(place)


@contextmanager
def new_data_dir(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder beside `path`; rename it to `path` when the block ends without an exception.

    If the block raises, the new folder is deleted and an old directory stays untouched.  A symbolic link
    stays and leads to the new directory.

    Raises:
        ConfigError: the target may not be written (see `check_target`).
        ShardError: a disk error.
    """
    check_target(path, overwrite)
    place = place_of(path)
    partial = place.with_name(f".{place.name}.partial")
    former = _former_of(place)
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed, as `former`
    _discard(former)
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
    """Give the new directory its name, and only then delete the old one.  Raises OSError."""
    replaces = place.exists()
    try:
        if replaces:
            hand_over(place, former)
        hand_over(partial, place)
    except BaseException:  # a signal may also come between the two renames
        if replaces and not place.exists():
            hand_over(former, place)
        raise
    _discard(former)


def _discard(former: Path) -> None:
    """Delete an old directory, its manifest first: an incomplete one must not be brought back."""
    with contextlib.suppress(OSError):
        (former / MANIFEST_NAME).unlink()
    shutil.rmtree(former, ignore_errors=True)


def _bring_back(former: Path, place: Path) -> None:
    """Give an old directory its name back if a run was killed before the new one had it."""
    if not place.exists() and (former / MANIFEST_NAME).is_file():
        hand_over(former, place)
