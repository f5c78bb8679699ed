"""Write files atomically, so that a name only ever shows a complete file; find remedies for disk errors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speechdp.errors import lacks_memory, one_line

_PIECE_BYTES = 4 * 2**20
_NETWORK_DISK = "check that the network disk is mounted and responds"
_PERMIT = "make it writable"
_SPACE = "free some space"
#: Remedies by errno of disk errors; errors of HDF5 and others without a number get `_UNKNOWN`.
_REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EACCES: _PERMIT,
    errno.EPERM: _PERMIT,
    errno.EROFS: "have the disk mounted read-write",
    errno.EIO: "check the disk (the kernel log of that host says what failed)",
    errno.EREMOTEIO: _NETWORK_DISK,
    errno.ESTALE: _NETWORK_DISK,
    errno.ENOTCONN: _NETWORK_DISK,
    errno.ENODEV: _NETWORK_DISK,
    errno.EHOSTDOWN: _NETWORK_DISK,
    errno.ETIMEDOUT: _NETWORK_DISK,
    # Making a folder in /proc says so, too.
    errno.ENOENT: "check that nothing removes or moves its folder, and that it can hold files",
    errno.ENOTDIR: "give a path that leads through folders only, not through a file",
    errno.EEXIST: "remove the file of that name",
    errno.EISDIR: "remove the folder of that name",
    errno.ELOOP: "fix the symbolic links in its path",
    errno.ENAMETOOLONG: "use shorter names (of folders, or utterance ids)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "free some memory, or raise its limit (ulimit -v)",
    errno.EINTR: "wait a moment",
    errno.EAGAIN: "wait a moment",
    errno.EBUSY: "wait a moment",
}
_UNKNOWN = "check the disk and the folder's permissions"
_PERMIT_READING = "make it readable"
#: Errors of fsync on file systems that do not support it.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
#: How HDF5, Rust (safetensors) and torch put the number of an error into words.
_NUMBER = re.compile(r"errno = (\d+)|os error (\d+)|read-only mode: .*\((\d+)\)")
#: Attempts at a rename that signals interrupt, as they may on network disks.
_ATTEMPTS = 10


def disk_reason(error: Exception) -> str:
    """Return a disk error's reason in a few words; HDF5 raises some disk errors as RuntimeError."""
    number = _number(error)
    if isinstance(error, OSError) and error.strerror and "\n" not in error.strerror:
        # HDF5's and safetensors' own texts name the number somewhere in the middle.
        return os.strerror(number) if _NUMBER.search(error.strerror) else error.strerror
    return os.strerror(number) if number else one_line(error)


def remedy_of(error: Exception, *, reading: bool = False) -> str:
    """Return the remedy for a disk error, as an imperative: `free some space`."""
    number = _number(error)
    if reading and number in (errno.EACCES, errno.EPERM):
        return _PERMIT_READING
    return _REMEDIES.get(number, _UNKNOWN)


def cannot_be_written(path: Path | str, error: Exception, then: str = "run again") -> str:
    """Return one line that says why `path` cannot be written and what helps.

    Args:
        error: an OSError, or what HDF5 raises in place of one.
        then: what to do after the remedy.

    Example:
        >>> cannot_be_written("/data/a.h5", OSError(errno.ENOSPC, "No space left on device"))
        '/data/a.h5: cannot be written (No space left on device); free some space, then run again'
    """
    return f"{path}: cannot be written ({disk_reason(error)}); {remedy_of(error)}, then {then}"


def or_by_links(error: OSError, folder: Path, *written: str) -> str:
    """Return how to make results of a folder without write permission, as the end of a list of remedies.

    Args:
        error: the disk's error; the result is "" if it is not about permissions.
        folder: folder of a run, e.g. a colleague's or one in an archive.
        written: names of the files to be made in the folder.
    """
    if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ""
    names = " and ".join(written)
    return f"; or give a folder of your own with links to all in {folder} but {names} (docs/run-directory.md)"


def cannot_be_read(path: Path | str, error: Exception, then: str = "run again") -> str:
    """Return one line that says why `path` cannot be read and what helps; as `cannot_be_written`."""
    return f"{path}: cannot be read ({disk_reason(error)}); {remedy_of(error, reading=True)}, then {then}"


def no_memory_to_read(path: Path | str, error: Exception, then: str = "run again") -> str | None:
    """Return one line about lack of memory if that is why reading failed, else None.

    Use it only for a file that is known, or likely, to be complete: a damaged file may ask for any amount of
    memory.
    """
    if not lacks_memory(error):
        return None
    return cannot_be_read(path, OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), then)


def named_file_cannot_be_read(path: Path | str, error: OSError) -> str:
    """Return `cannot_be_read` for a file that the user names; if it is missing, the path is wrong.

    Example:
        >>> named_file_cannot_be_read("lm.arpa", OSError(errno.ENOENT, "No such file or directory"))
        'lm.arpa: cannot be read (No such file or directory); check the path'
    """
    if error.errno == errno.ENOENT:
        return f"{path}: cannot be read ({disk_reason(error)}); check the path"
    return cannot_be_read(path, error)


def refused_by_disk(line: str) -> str | None:
    """Return a process's message about a disk that accepts no more data, without advice on how to continue.

    Args:
        line: last line of the process, ours or the system's.

    Returns:
        None if the line is not about that: a missing or damaged file may be due to the process's input.

    Example:
        >>> refused_by_disk("a.h5: cannot be written (No space left on device); free some space, then go on")
        'a.h5: cannot be written (No space left on device); free some space'
        >>> refused_by_disk("rank 0: OSError: [Errno 28] No space left on device")
        'rank 0: OSError: [Errno 28] No space left on device; free some space'
    """
    number = next((number for number in _TAKES_NO_MORE if os.strerror(number) in line), None)
    if number is None:
        return None
    remedy = _REMEDIES[number]
    return line.partition(f"; {remedy}")[0] + f"; {remedy}"


#: Errors of a disk to which nothing can be written, whatever is tried.
_TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def record_cannot_be_read(path: Path | str, error: Exception, remedy: str) -> str:
    """Return one line that says why a record cannot be read: a disk error, or damaged content.

    Args:
        path: path of the record, which a program wrote.
        error: error raised in opening, parsing or examining it.
        remedy: remedy for damaged content; a disk error has its own.

    Example:
        >>> record_cannot_be_read("run/tuned.json", KeyError("options"), "tune again, or remove it")
        "run/tuned.json: cannot be read ('options' is missing); tune again, or remove it"
    """
    if is_of_disk(error):
        return cannot_be_read(path, error)
    return f"{path}: cannot be read ({damage(error)}); {remedy}"


def damage(error: Exception) -> str:
    """Return a description of the error that parsing or examining a record raised."""
    return f"{error} is missing" if isinstance(error, KeyError) else one_line(error)


def cannot_be_used(error: OSError) -> str | None:
    """Return the message for a disk error that no more specific code handles; None: it names no file.

    So an unavailable network disk, or a folder without permissions, never causes a traceback.
    """
    if not error.filename or not error.errno:
        return None
    name = os.fsdecode(error.filename)
    return f"{name}: cannot be used ({disk_reason(error)}); {remedy_of(error)}, then run again"


def listed_anew(folder: Path) -> list[str]:
    """Return the names in a folder as they are now.  Raises OSError.

    Listing makes NFS ask its server.  Otherwise NFS caches for a minute that a file or folder did not exist,
    and the content of an older file.
    """
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def see_folder_anew(folder: Path) -> None:
    """List a folder and all above it: NFS may also remember that one of these did not exist."""
    for each in reversed((folder, *folder.parents)):
        with contextlib.suppress(OSError):
            listed_anew(each)


def why_no_folder(path: Path) -> str:
    """Return what is wrong with a path that is not a folder, to complete "PATH: ..."."""
    return "is a file, not a folder" if path.exists() else "no such folder"


def _number(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if isinstance(error, FileNotFoundError):  # of safetensors, without a number
        return errno.ENOENT
    found = _NUMBER.search(str(error))
    return int(next(filter(None, found.groups()))) if found else 0


def is_of_disk(error: Exception) -> bool:
    """Return whether an error is the disk's, and not about the content of a file."""
    return _number(error) != 0  # what HDF5 finds wrong in a file is an OSError without a number


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on a clean exit sync it and rename it to `path`.

    The temporary file is removed if the block, the sync or the rename raises, so a full disk or an
    interrupted run leaves either the old file or none.  Nothing raises after the rename.

    Raises:
        OSError: the file is not written; the error names `path`.
    """
    # Not named by process id: a process on another host, or in another container, may have the same.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(3)}.tmp")
    try:
        yield temporary
        sync(temporary)
        hand_over(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        # A write error names no file, an open error the temporary file, which means nothing to the user.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise
    sync_name(path)


#: Names of temporary files: of `atomic_path`, and of the owner of a folder.
_TEMPORARY = re.compile(r"\..+\.(?:[0-9a-f]{6}|[0-9a-f]{32})\.tmp")
#: After this time without a change, no process writes a temporary file any more, s.
_LEFT_AFTER_S = 24 * 3600


def remove_left_over(written: Path) -> None:
    """Remove temporary files that killed processes have left beside a file that was just written.

    These are the ones that were last changed a day before it: others may be being written.  Errors are
    ignored: what is left takes room, and no more.
    """
    with contextlib.suppress(OSError):
        before_s = written.stat().st_mtime - _LEFT_AFTER_S  # by the clock of the disk
        for path in written.parent.glob(".*.tmp"):
            if _TEMPORARY.fullmatch(path.name) and path.lstat().st_mtime < before_s and not path.is_dir():
                path.unlink()


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, which is removed after the block.

    tempfile.TemporaryDirectory recurses without end if it may not open a folder that it has to remove.

    Raises:
        OSError: the folder cannot be made, or cannot be removed after a block without error.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # the first error is the one to report
        raise
    _remove_folder(folder)


def _remove_folder(folder: Path) -> None:
    """Remove a folder, or as much of its contents as possible.

    Raises:
        OSError: the first error; it names the whole path, of which rmtree itself gives only the last name.
    """

    errors: list[BaseException] = []

    def note(_function: object, path: str, error: tuple[Any, BaseException, Any]) -> None:
        if isinstance(error[1], OSError):
            error[1].filename = str(path)
        errors.append(error[1])

    # Not raised in `note`: from Python 3.13 on, rmtree would then name the enclosing folder instead.
    shutil.rmtree(folder, onerror=note)
    if errors:
        raise errors[0]


def check_writable(folder: Path) -> None:
    """Make a folder if it is missing and check that files can be made in it, before work that would be lost.

    Raises:
        OSError: the folder or a file cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        error.filename = str(folder)  # not the temporary file, which means nothing to the user
        raise


def may_write(directory: Path) -> bool:
    """Return whether this user may make and delete files in a folder."""
    return os.access(
        directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
    )


def write_text_atomically(path: Path, text: str) -> None:
    """Write UTF-8 `text` to `path` so that readers see the old content or all of the new."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_synced(path: Path, text: str) -> None:
    """Write UTF-8 `text` to a file that nothing reads yet, and sync it to disk.  Raises OSError."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def hand_over(temporary: Path, path: Path) -> None:
    """Rename a file or folder; afterwards it belongs to the process that waits for `path` and may remove it.

    Raises:
        OSError: the file or folder still has its old name.
    """
    before = temporary.stat()
    for attempt in range(_ATTEMPTS):
        try:
            temporary.replace(path)
        except OSError as error:
            # A network disk may refuse a request that was sent twice and that it has already carried out.
            with contextlib.suppress(OSError):
                if os.path.samestat(before, path.stat()):
                    return
            if error.errno != errno.EINTR or attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def sha256_of(path: Path) -> str:
    """Return the checksum of a file's content, read piece by piece.  Raises OSError."""
    checksum, piece = hashlib.sha256(), bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(piece):
            checksum.update(memoryview(piece)[:length])
    return checksum.hexdigest()


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's names, to disk.  Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        sync_open(fd)
    finally:
        os.close(fd)


def sync_open(fd: int, *, data_alone: bool = False) -> None:
    """Sync an open file to disk, if its file system supports that.

    Args:
        data_alone: whether to skip the file's times, as more data follows.

    Raises:
        OSError: the sync failed.
    """
    try:
        (os.fdatasync if data_alone else os.fsync)(fd)
    except OSError as error:
        # Some file systems (FUSE, SMB, mostly for folders) do not support it; nothing is lost by that.
        if error.errno not in _CANNOT_SYNC:
            raise


def sync_name(path: Path) -> None:
    """Sync the new name of `path` to disk, which a power cut might otherwise undo.

    Errors are ignored, as the content is written in any case: some disks do not support this, and the folder
    may belong to another process by now.
    """
    with contextlib.suppress(OSError):
        sync(path.parent)
