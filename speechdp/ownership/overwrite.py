"""Empty a folder for --overwrite: checked before anything is deleted, owned meanwhile."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_read, cannot_be_written, may_write
from speechdp.ownership.owner import OWNER_FILE, FolderOwner, is_owners


def check_overwrite(folder: Path, records: Sequence[str], what: str) -> None:
    """Refuse what --overwrite must not, or cannot, delete.

    Args:
        folder: to be emptied; a symbolic link stands for the folder it leads to, and stays.
        records: patterns, one of which every folder of the command has.
        what: the folder holds, for the message, e.g. "that hold a run".

    Raises:
        ConfigError: it holds something else, or may not be deleted by this user.
    """
    try:
        if not folder.exists():
            return
    except OSError:
        return  # who tries to own it is told why
    try:
        holds_what_is_said = _is_left(folder) or any(next(folder.glob(record), None) for record in records)
    except OSError as error:
        _refuse(error)
    if not holds_what_is_said:
        raise ConfigError(f"{folder}: --overwrite deletes only folders {what}; remove it yourself")
    check_deletable(folder)


def _is_left(folder: Path) -> bool:
    """Return whether a folder holds only what a start leaves that was killed before it had begun."""
    names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208
    return bool(names) and all(map(is_owners, names))


def check_deletable(folder: Path) -> None:
    """Refuse a folder of which this user may not delete all that is in it.  Raises ConfigError."""
    for directory, folders, files in os.walk(folder, onerror=_refuse):
        if not may_write(Path(directory)):
            raise _not_deletable(directory)
        try:
            other = _of_another_user(Path(directory), [*folders, *files])
        except OSError as error:
            _refuse(error)
        if other is not None:
            raise ConfigError(
                f"{other}: belongs to another user, so --overwrite cannot delete it; choose another folder"
            )


def _of_another_user(directory: Path, names: Sequence[str]) -> Path | None:
    """Return something of another user that this one may not delete from a folder where it may write."""
    state = directory.stat()
    if not state.st_mode & stat.S_ISVTX or os.geteuid() in (0, state.st_uid):
        return None
    paths = (directory / name for name in names)
    return next((path for path in paths if path.lstat().st_uid != os.geteuid()), None)


def empty(owner: FolderOwner, records: Sequence[str]) -> None:
    """Delete all that is in a folder, but what tells of its owner.

    The records go last: what was cut short can be begun again.

    Args:
        owner: of the folder.
        records: as in `check_overwrite`.

    Raises:
        ConfigError: a folder in it is in use.
        RunError: something cannot be deleted.
    """
    with ExitStack() as stack:
        for file in _list(owner.folder, f"*/{OWNER_FILE}"):
            stack.enter_context(owner.of(file.parent))
        paths = [path for path in sorted(_list(owner.folder)) if not is_owners(path.name)]
        last = {path for record in records for path in _list(owner.folder, record)}
        for path in [
            *(path for path in paths if path not in last),
            *(path for path in paths if path in last),
        ]:
            _delete(path)


def _list(folder: Path, pattern: str = "") -> list[Path]:
    try:
        return list(folder.glob(pattern) if pattern else folder.iterdir())
    except OSError as error:
        raise _not_emptied(folder, error) from error


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise _not_emptied(path, error) from error


def _not_emptied(path: Path, error: OSError) -> RunError:
    return RunError(cannot_be_written(path, error, "give the same command again"))


def _refuse(error: OSError) -> NoReturn:
    if isinstance(error, PermissionError):
        raise _not_deletable(error.filename) from error
    raise ConfigError(cannot_be_read(error.filename, error, "give the same command again")) from error


def _not_deletable(directory: str) -> ConfigError:
    return ConfigError(
        f"{directory}: this user may not delete what is in it ({_rights(Path(directory))}), as "
        "--overwrite has to; choose another folder"
    )


def _rights(directory: Path) -> str:
    state = directory.stat()
    return f"it belongs to user {state.st_uid}, rights {stat.S_IMODE(state.st_mode):04o}"
