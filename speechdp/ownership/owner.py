"""One owner per folder: a second job is refused in one line, or takes over from one that is gone.

The owner's file is made by a hard link, which only one process can succeed in, on NFS as well.  The owner
updates its modification time every few seconds.  Others look only for changes, so that hosts' clocks need not
agree.

A process that takes over from a claim first links its own claim beside it, under a name derived from the old
one.  Only one process can do so; it then replaces the owner's file by a rename.  If it dies in between, the
next process has to judge its claim.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType

from speechdp import remedies
from speechdp.errors import ConfigError, FolderInUseError, RunError
from speechdp.files import cannot_be_written, hand_over
from speechdp.json_input import parse_json
from speechdp.ownership.claimant import Claimant, ProcessState

OWNER_FILE = "owner.json"
_MOST_BYTES = 1 << 16
#: Longest wait at the end for a thread that waits for the disk, s.
_PATIENCE_S = 2.0
#: Attempts to make a folder that others may remove meanwhile.
_ATTEMPTS = 10
#: Errors of a file system without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class StopAsked(Exception):  # noqa: N818 (not an error)
    """The process was asked to stop while it waited for a folder."""


@dataclass(frozen=True)
class OwnerTiming:
    """How often an owner gives a sign of life, how long it may be silent, and how often others look, s."""

    beat_s: float = 10.0
    silence_s: float = 60.0
    poll_s: float = 1.0


def _never() -> bool:
    return False


def _clock() -> float:
    """Return the time in seconds, counting suspension of the host if it has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Surroundings:
    """What an owner needs of its process.

    Attributes:
        print_line: prints a line for the user.
        end: ends the process at once with a line; called in a thread when another has taken over the folder.
        stopped: returns whether the process was asked to stop.
        pause: sleeps for the given time, s.
        timing: how often to give signs of life, and to look for those of others.
        clock: returns the time in seconds, including suspension.
    """

    print_line: Callable[[str], None]
    end: Callable[[str], None]
    stopped: Callable[[], bool] = _never
    pause: Callable[[float], None] = time.sleep
    timing: OwnerTiming = OwnerTiming()
    clock: Callable[[], float] = _clock


@dataclass(frozen=True)
class _Sight:
    """A claim as it was seen; `key` identifies the claim, `changed_ns` its latest sign of life."""

    path: Path
    key: str
    changed_ns: int
    claimant: Claimant | None


class FolderOwner:
    """Owns a folder during its block.

    Args:
        folder: folder to own; made if it does not exist.
        claimant: this process.
        surroundings: see Surroundings.
        file: path of the owner's file if it is not in `folder`; then `folder` is not made.
        beats: whether to give signs of life.
    """

    def __init__(
        self,
        folder: Path,
        claimant: Claimant,
        surroundings: Surroundings,
        *,
        file: Path | None = None,
        beats: bool = True,
    ) -> None:
        self.folder = folder
        self.file = folder / OWNER_FILE if file is None else file
        self._claimant, self._surroundings, self._beats = claimant, surroundings, beats
        self._temporary = self.file.with_name(f".{self._name}.{claimant.nonce}.tmp")
        self._made: list[Path] = []
        self._ended = threading.Event()
        self._last_sign_s = 0.0
        #: The disk's error at the last sign of life; None if it succeeded.
        self._refused: OSError | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FolderOwner:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Become the owner; wait if it is not known whether another owner is still alive.

        Raises:
            ConfigError: another process owns the folder, or the path cannot be a folder.
            RunError: the folder cannot be written.
            StopAsked: the process was asked to stop while it waited.
        """
        try:
            self._make_and_claim()
            if self._beats:
                thread = threading.Thread(target=self._run, name="speechdp-owner", daemon=True)
                thread.start()
                self._thread = thread
        except OSError as error:
            self.release()
            raise RunError(
                cannot_be_written(self.folder, error, "try again, or choose another folder")
            ) from error
        except BaseException:
            # A signal may come once the folder is claimed, and the system may have no thread left: without
            # signs of life others would take over.
            self.release()
            raise

    def _make_and_claim(self) -> None:
        """Make the folder if it is missing, and claim it.

        Try again if it disappears in between: the process that made it removes it at its end if it is empty.
        """
        for attempt in range(_ATTEMPTS):
            try:
                self._make_folder()
                self._claim()
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1 or self.file.parent.is_dir():
                    raise
                self._made = [path for path in self._made if path.is_dir()]
            else:
                return

    def release(self) -> None:
        """Give up the folder, as far as the disk permits."""
        self._ended.set()
        try:
            if self._thread is not None:
                self._thread.join(_PATIENCE_S)
        finally:  # a signal may end the wait
            self._unlink_mine()
            self._remove_made()

    def of(self, folder: Path) -> FolderOwner:
        """Return the owner of another folder, for this process; it gives no signs of life."""
        return FolderOwner(folder, self._claimant, self._surroundings, beats=False)

    def beat(self) -> None:
        """Give a sign of life; end the process if another has taken over.  A disk error is only recorded."""
        try:
            self._beat()
            self._refused = None
        except OSError as error:
            self._refused = error

    def _beat(self) -> None:
        """Do the work of `beat`.  Raises OSError."""
        sight = _look(self.file)
        now_s = self._surroundings.clock()
        if self._ended.is_set():
            return  # the folder was given up while the disk kept this thread waiting
        if sight is None and now_s - self._last_sign_s > self._surroundings.timing.silence_s:
            self._surroundings.end(self._lost())
        elif sight is None:  # somebody has deleted it
            self._claim_again()
        elif self._is_mine(sight) or sight.claimant is None:
            os.utime(self.file, follow_symlinks=False)
            self._last_sign_s = now_s
        else:
            self._surroundings.end(
                f"{self.folder}: was taken over by {sight.claimant}; this process, presumed dead, ends "
                "without writing more"
            )

    def _lost(self) -> str:
        """Return the message on why this process may no longer be the only owner."""
        if self._refused is not None:
            refused = cannot_be_written(self.file, self._refused, remedies.resuming())
            return f"{refused}; without that file another job may write in the folder, so this process ends"
        return (
            f"{self.folder}: this process was silent for too long, and another may have written "
            "there meanwhile; it ends without writing more"
        )

    def _run(self) -> None:
        while not self._ended.wait(self._surroundings.timing.beat_s):
            self.beat()

    # --- claiming

    def _claim(self) -> None:
        try:
            self._write_temporary()
            while not self._try():
                pass
            self._last_sign_s = self._surroundings.clock()
        finally:
            _remove(self._temporary)

    def _try(self) -> bool:
        """Try to become the owner; return False if the claims have changed meanwhile."""
        chain = self._chain()
        if not chain:
            return self._link(self.file)
        return self._is_gone(chain[-1]) and self._succeed(chain[-1])

    def _chain(self) -> list[_Sight]:
        """Return the owner's claim, the claim that takes over from it, and so on; the last must be judged."""
        chain: list[_Sight] = []
        sight = _look(self.file)
        while sight is not None and sight.key not in [other.key for other in chain]:
            chain.append(sight)
            sight = _look(self._name_after(sight))
        return chain

    def _is_gone(self, sight: _Sight) -> bool:
        """Return whether this process may take over from a claim: its process is gone, or silent for long.

        Wait as long as that is unknown.  False: the claim has changed meanwhile and must be read again.

        Raises:
            ConfigError: the claimant is alive.
            StopAsked: this process was asked to stop while it waited.
        """
        other, me = sight.claimant, self._claimant
        state = ProcessState.UNKNOWN if other is None else me.state_of(other)
        in_its_place = other is not None and me.comes_after(other)
        if state is ProcessState.GONE or (in_its_place and state is ProcessState.UNKNOWN):
            return True
        if state is ProcessState.ALIVE and not in_its_place:
            raise self._refusal(sight)
        timing = self._surroundings.timing
        self._surroundings.print_line(
            f"{self.folder}: is in use by {_describe(sight)}; will be taken over if that job "
            f"{'does not end' if in_its_place else 'shows no sign of life'} within {timing.silence_s:g} s"
        )
        for _ in range(math.ceil(timing.silence_s / timing.poll_s)):
            self._surroundings.pause(timing.poll_s)
            if self._surroundings.stopped():
                raise StopAsked
            chain = self._chain()
            if not chain or chain[-1].key != sight.key:
                return False
            if other is not None and me.state_of(other) is ProcessState.GONE:
                return True
            if chain[-1].changed_ns != sight.changed_ns and not in_its_place:
                raise self._refusal(chain[-1])
        return True

    def _succeed(self, gone: _Sight) -> bool:
        """Take over from a claim; return False if another was faster, or its claimant gave a sign of life."""
        mine = self._name_after(gone)
        if not self._link(mine):
            return False
        try:
            chain = self._chain()
            if len(chain) < 2 or not self._is_mine(chain[-1]):
                return False  # `gone` is no longer a claim: another process took over, and has finished
            if chain[-2].changed_ns != gone.changed_ns and not self._comes_after(gone):
                return False
            os.utime(self._temporary)
            hand_over(self._temporary, self.file)
            for sight in chain[1:]:
                _remove(sight.path)
        finally:
            _remove(mine)
        self._surroundings.print_line(f"{self.folder}: taken over from {_describe(gone)}, which is gone")
        return True

    def _comes_after(self, sight: _Sight) -> bool:
        return sight.claimant is not None and self._claimant.comes_after(sight.claimant)

    def _claim_again(self) -> None:
        try:
            self._write_temporary()
            if self._link(self.file):
                self._last_sign_s = self._surroundings.clock()
            if self._ended.is_set():
                self._unlink_mine()  # it was given up meanwhile
        finally:
            _remove(self._temporary)

    def _unlink_mine(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_mine(_look(self.file)):
                self.file.unlink()

    def _link(self, name: Path) -> bool:
        """Link our claim to a name, unless the name exists."""
        try:
            os.link(self._temporary, name)
        except FileExistsError:
            # NFS may have lost the answer to a first request that succeeded, and repeated the request.
            return self._temporary.stat().st_nlink > 1 and self._is_mine(_look(name))
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._create(name)
        return True

    def _create(self, name: Path) -> bool:
        try:
            file = name.open("x", encoding="utf-8")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._content())
        except BaseException:  # a signal, too
            _remove(name)  # an unreadable claim, which the next process would wait for
            raise
        return True

    def _write_temporary(self) -> None:
        self._temporary.write_text(self._content(), encoding="utf-8")

    def _content(self) -> str:
        return json.dumps(self._claimant.to_json(), indent=2) + "\n"

    def _is_mine(self, sight: _Sight | None) -> bool:
        claimant = None if sight is None else sight.claimant
        return claimant is not None and claimant.nonce == self._claimant.nonce

    def _refusal(self, sight: _Sight) -> FolderInUseError:
        mine, other = self._claimant.job, None if sight.claimant is None else sight.claimant.job
        # The same task of another job means that the array was submitted again, with the same folders.
        if mine and mine.task_variable and other and other.task not in ("", mine.task):
            own = f"{self.folder}-${mine.task_variable}"
            return FolderInUseError(
                f"{self.folder}: is in use by {_describe(sight)}; "
                f"each task of a job array needs a folder of its own, such as {own} (docs/clusters.md)"
            )
        return FolderInUseError(
            f"{self.folder}: is in use by {_describe(sight)}; "
            "wait for it to end, stop it, or choose another folder"
        )

    @property
    def _name(self) -> str:
        return self.file.name.removeprefix(".")

    def _name_after(self, sight: _Sight) -> Path:
        return self.file.with_name(f".{self._name}.{sight.key}.next")

    # --- the folder

    def _make_folder(self) -> None:
        folder = self.file.parent
        if folder.is_dir():
            return
        check_no_file(folder)
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            self._made.append(path)

    def _remove_made(self) -> None:
        """Remove the folders that this process made, if they are empty."""
        with contextlib.suppress(OSError):
            while self._made:
                self._made.pop().rmdir()


def is_owned(folder: Path) -> bool:
    """Return whether a job may be writing a folder: it has an owner that is not known to have ended."""
    try:
        sight = _look(folder / OWNER_FILE)
    except OSError:
        return False
    if sight is None:
        return False
    return sight.claimant is None or Claimant.here("", {}).state_of(sight.claimant) is not ProcessState.GONE


def check_no_file(folder: Path) -> None:
    """Refuse a path that is a file, or a link that does not lead to a folder.  Raises ConfigError."""
    if folder.is_dir():
        return
    if folder.is_symlink():
        raise ConfigError(
            f"{folder}: is a symbolic link to {folder.readlink()}, where there is no folder; "
            "make one there, or remove the link"
        )
    if folder.exists():
        raise ConfigError(f"{folder}: is a file; give the name of a folder")


def is_owners(name: str) -> bool:
    """Return whether a file of this name, in an owned folder, is one of the owner's files."""
    return name == OWNER_FILE or name.startswith(f".{OWNER_FILE}.")


def _look(path: Path) -> _Sight | None:
    """Return a claim; None: there is none.  A claim that cannot be read has no claimant."""
    raw = b""
    try:
        # Opening makes NFS ask the server.  A pipe must not block us, nor a link lead elsewhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        try:
            state = path.lstat()
        except FileNotFoundError:
            return None
    else:
        try:
            state = os.fstat(descriptor)
            if stat.S_ISREG(state.st_mode):
                raw = os.read(descriptor, _MOST_BYTES)
        except OSError:
            state = path.lstat()
        finally:
            os.close(descriptor)
    try:
        claimant = Claimant.from_json(parse_json(raw))
    except (ValueError, LookupError, TypeError):
        claimant = None
    what = f"{state.st_ino} ".encode() + raw if claimant is None else claimant.nonce.encode()
    return _Sight(path, hashlib.sha256(what).hexdigest()[:16], state.st_mtime_ns, claimant)


def _describe(sight: _Sight) -> str:
    try:
        last_seen = datetime.fromtimestamp(sight.changed_ns / 1e9).astimezone().isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # the host's clock is far off: no representable date
        last_seen = "at a time that is no date"
    who = f"a job that {sight.path} does not name" if sight.claimant is None else str(sight.claimant)
    return f"{who}, last heard of {last_seen}"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
