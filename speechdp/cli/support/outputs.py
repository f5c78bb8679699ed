"""Files that a command writes where its user says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from speechdp.errors import ConfigError
from speechdp.files import cannot_be_written, check_writable, why_no_folder


def output_file(path: Path, *, overwrite: bool) -> Path:
    """Return where to write a file, after a look whether it can be: where a symbolic link leads.

    Args:
        path: as it was given.
        overwrite: replace a file that is there.

    Raises:
        ConfigError: something is there that must not be replaced, or its folder is missing or not writable.

    Example:
        >>> output_file(Path("/dev/null"), overwrite=True)
        Traceback (most recent call last):
        speechdp.errors.ConfigError: /dev/null: is a device or pipe; give the name of a file
    """
    try:
        place = Path(os.path.realpath(path)) if path.is_symlink() else path
        if place.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if place.exists() and not place.is_file():
            what = "a folder" if place.is_dir() else "a device or pipe"
            raise ConfigError(f"{path}: is {what}; give the name of a file")
        if place.exists() and not overwrite:
            raise ConfigError(f"{path}: exists; give another name or add --overwrite")
        folder = place.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"{place.parent}: {why_no_folder(folder)}; give a name in a folder that exists")
        check_writable(folder)
    except OSError as error:
        raise ConfigError(cannot_be_written(path, error)) from error
    return place
