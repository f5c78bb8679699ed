"""Empty a folder that --overwrite is to begin anew: looked at before anything is done, owned meanwhile."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_written
from speechdp.folder_owner import OWNER_FILE, FolderOwner, is_owners


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
    # What a start leaves that was killed before it had begun.
    is_left = folder.is_dir() and (names := os.listdir(folder)) and all(map(is_owners, names))  # noqa: PTH208
    if not is_left and not any(next(folder.glob(record), None) for record in records):
        raise ConfigError(f"{folder}: --overwrite deletes only folders {what}; remove it yourself")
    check_deletable(folder)


def check_deletable(folder: Path) -> None:
    """Refuse a folder of which this user may not delete all that is in it.  Raises ConfigError."""
    for directory, folders, files in os.walk(folder):
        if not may_write(Path(directory)):
            raise ConfigError(
                f"{directory}: this user may not delete what is in it ({_rights(Path(directory))}), as "
                "--overwrite has to; choose another folder"
            )
        if (state := Path(directory).stat()).st_mode & stat.S_ISVTX and state.st_uid != os.geteuid() != 0:
            for name in (*folders, *files):
                if (Path(directory) / name).lstat().st_uid != os.geteuid():
                    raise ConfigError(
                        f"{Path(directory) / name}: belongs to another user, so --overwrite cannot delete "
                        "it; choose another folder"
                    )


def may_write(directory: Path) -> bool:
    """Return whether this user may make and delete files in a folder."""
    return os.access(
        directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
    )


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
    folder = owner.folder
    with ExitStack() as stack:
        for file in folder.glob(f"*/{OWNER_FILE}"):
            stack.enter_context(owner.of(file.parent))
        paths = [path for path in sorted(folder.iterdir()) if not is_owners(path.name)]
        last = {path for record in records for path in folder.glob(record)}
        for path in [
            *(path for path in paths if path not in last),
            *(path for path in paths if path in last),
        ]:
            _delete(path)


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise RunError(cannot_be_written(path, error, "give the same command again")) from error


def _rights(directory: Path) -> str:
    state = directory.stat()
    return f"it belongs to user {state.st_uid}, rights {stat.S_IMODE(state.st_mode):04o}"
