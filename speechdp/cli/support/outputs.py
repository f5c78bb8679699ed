"""Output files whose paths the user gives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from speechdp.counting import counted
from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_written, check_writable, hand_over, sync, sync_name, why_no_folder
from speechdp.process.notices import print_message


def output_file(path: Path, *, overwrite: bool) -> Path:
    """Return the path to write to, with symbolic links resolved, after checking that it can be written.

    Args:
        path: path as given.
        overwrite: replace an existing file.

    Raises:
        ConfigError: the path exists and must not be replaced, or its folder is missing or not writable.

    Example:
        >>> output_file(Path("/dev/null"), overwrite=True)
        Traceback (most recent call last):
        speechdp.errors.ConfigError: /dev/null: is a device or pipe; give the name of a file
    """
    try:
        # Before links are resolved: the link /dev/stdout leads to no path if standard output is a pipe.
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "a device or pipe"
            raise ConfigError(f"{path}: is {what}; give the name of a file")
        place = Path(os.path.realpath(path)) if path.is_symlink() else path
        if place.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if place.exists() and not overwrite:
            raise _exists(path)
        folder = place.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"{place.parent}: {why_no_folder(folder)}; give a name in a folder that exists")
        check_writable(folder)
    except OSError as error:
        raise ConfigError(cannot_be_written(path, error)) from error
    return place


def partial_of(path: Path) -> Path:
    """Return the name under which `growing_files` writes a file until it is complete."""
    return path.with_name(f"{path.name}.partial")


def _exists(path: Path) -> ConfigError:
    return ConfigError(f"{path}: exists; give another name or add --overwrite")


@contextmanager
def growing_files(
    paths: Sequence[Path], what: str, *, overwrite: bool
) -> Iterator[Callable[[Sequence[str]], None]]:
    """Yield a function that appends one item's texts to the files, in the order of `paths`.

    On a clean exit the files get their final names; if nothing was added, no file is made.  If the block
    raises, the files may hold hours of work: they stay as NAME.partial, with all items that were added
    completely, and a line says so.  Empty ones are removed.

    Args:
        paths: files to write.
        what: name of an item, to count items by: "recording".
        overwrite: replace existing files.

    Raises:
        RunError: the disk refuses.
        ConfigError: another command is writing one of the files, or has written it meanwhile.
    """
    sizes: dict[Path, int] = {}
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

    with ExitStack() as claims:
        try:
            for path in paths:
                claims.enter_context(_claimed(path, overwrite=overwrite))
                sizes[partial_of(path)] = 0
            yield add
            if count == 0:  # keep existing files, and leave nothing in the way of the corrected command
                for partial in sizes:
                    partial.unlink(missing_ok=True)
                return
            for path in paths:
                with _writing(path):
                    sync(partial_of(path))
                    hand_over(partial_of(path), path)
                del sizes[partial_of(path)]  # a file of that name is another command's from now on
                sync_name(path)
        except BaseException:
            for partial, size in sizes.items():
                with contextlib.suppress(OSError):  # the first error is the one to report
                    _leave(partial, size, counted(count, what))
            raise


@contextmanager
def _claimed(path: Path, *, overwrite: bool) -> Iterator[None]:
    """Make the partial file of `path`, empty; no other command writes either of them during the block.

    Raises:
        RunError: the disk refuses.
        ConfigError: another command is writing `path`; or without `overwrite`, one of the files exists.
    """
    partial = partial_of(path)
    while True:
        with _writing(partial):
            file = partial.open("ab")
        with file:
            if not _is_locked(partial, file):
                continue
            if not overwrite and path.exists():
                if os.fstat(file.fileno()).st_size == 0:
                    partial.unlink(missing_ok=True)
                raise _exists(path)
            if not overwrite and os.fstat(file.fileno()).st_size:
                raise _exists(partial)
            with _writing(partial):
                os.ftruncate(file.fileno(), 0)
            yield
            return


def _is_locked(partial: Path, file: BinaryIO) -> bool:
    """Lock an open partial file; return whether it still has its name, which its last writer may have taken.

    Raises:
        ConfigError: another command has locked it.
    """
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"{partial}: another command is writing it; wait until that has ended, or give another name"
        ) from error
    except OSError:  # some network disks have no locks
        return True
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), partial.stat())
    return False


def _leave(partial: Path, size: int, finished: str) -> None:
    """Truncate a partial file to its complete items and say where it is; remove it if it has none."""
    if size == 0:
        partial.unlink(missing_ok=True)
    elif partial.exists():
        os.truncate(partial, size)
        advice = "move it away, or --overwrite replaces it"
        print_message(f"{partial}: holds the finished part, {finished}; {advice}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(cannot_be_written(path, error)) from error
