"""Files that a command writes where its user says."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from speechdp.counting import counted
from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_written, check_writable, hand_over, sync, sync_name, why_no_folder
from speechdp.process.notices import tell


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
        # Before links are followed: that of /dev/stdout leads to no path where standard output is a pipe.
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "a device or pipe"
            raise ConfigError(f"{path}: is {what}; give the name of a file")
        place = Path(os.path.realpath(path)) if path.is_symlink() else path
        if place.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if place.exists() and not overwrite:
            raise ConfigError(f"{path}: exists; give another name or add --overwrite")
        folder = place.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"{place.parent}: {why_no_folder(folder)}; give a name in a folder that exists")
        check_writable(folder)
    except OSError as error:
        raise ConfigError(cannot_be_written(path, error)) from error
    return place


def partial_of(path: Path) -> Path:
    """Return what a file is called by `growing_files` until it is whole."""
    return path.with_name(f"{path.name}.partial")


@contextmanager
def growing_files(paths: Sequence[Path], what: str) -> Iterator[Callable[[Sequence[str]], None]]:
    """Yield what adds the text of one thing more to each of the files, in the order of `paths`.

    They have their names on a clean exit; if nothing was added, there are none.  Where the block raises,
    hours of work may be in them: they stay as NAME.partial, which a line says, with what was added whole;
    those with nothing in them go.

    Args:
        paths: where to write them; what is there is replaced.
        what: what is added, to count it by: "recording".

    Raises:
        RunError: the disk refuses.
    """
    sizes = {partial_of(path): 0 for path in paths}
    count = 0

    def add(texts: Sequence[str]) -> None:
        nonlocal sizes, count
        grown = dict(sizes)
        for (path, size), text in zip(sizes.items(), texts, strict=True):
            data = text.encode()
            with _writing(path), path.open("ab") as file:
                file.write(data)
            grown[path] = size + len(data)
        sizes, count = grown, count + 1

    try:
        for partial in sizes:
            with _writing(partial), partial.open("wb"):
                pass
        yield add
        if count == 0:  # what was there stays, and nothing stands in the way of the mended command
            for partial in sizes:
                partial.unlink(missing_ok=True)
            return
        for path in paths:
            with _writing(path):
                sync(partial_of(path))
                hand_over(partial_of(path), path)
            sync_name(path)
    except BaseException:
        for partial, size in sizes.items():
            with contextlib.suppress(OSError):  # what went wrong first is what counts
                _leave(partial, size, counted(count, what))
        raise


def _leave(partial: Path, size: int, finished: str) -> None:
    """Leave a file with what was added to it whole, and tell of it; remove it where that is nothing."""
    if size == 0:
        partial.unlink(missing_ok=True)
    elif partial.exists():
        os.truncate(partial, size)
        advice = "move it away, or --overwrite replaces it"
        tell(f"{partial}: holds the finished part, {finished}; {advice}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(cannot_be_written(path, error)) from error
