"""Keep failures of standard output and error from ending a command: drop the output, and report it elsewhere.

A full disk under a log, a closed terminal or a reader that is gone (`| head`) is no reason to lose a run.  So
printing never raises, including Python's own last flush.  A run reports lost output in RUN/notices.txt; a
command without a run ends with a line about it (`cli/main.py`).
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from speechdp.process.notices import FILE_NAME, add_notice

STDOUT, STDERR = 1, 2
_NAMES = {STDOUT: "standard output", STDERR: "standard error"}


@dataclass
class _Loss:
    """Lost output: the error, and the folders whose notices report it."""

    error: OSError
    noted_in: set[Path] = field(default_factory=set)

    def describe(self, descriptor: int) -> str:
        if self.error.errno == errno.EPIPE:
            return f"{_NAMES[descriptor]}: its reader has exited, the lines since then are lost"
        reason = self.error.strerror or str(self.error)
        return f"{_NAMES[descriptor]}: cannot be written ({reason}), lines are lost"


_losses: dict[int, _Loss] = {}
_folders: list[Path] = []
#: Descriptors whose reader did not read in time.
_unread: set[int] = set()
_lock = threading.RLock()  # a signal handler may print while it is held


def keep_standard_streams() -> None:
    """Make standard output and error streams on which printing never raises; call it once, early.

    A closed stream (`>&-`) becomes /dev/null; otherwise the next file to be opened would get its descriptor
    and be printed into.  Streams that are not files (in tests) stay as they are.
    """
    for descriptor in (0, STDOUT, STDERR):
        _open_if_closed(descriptor)
    sys.stdout = _kept(sys.stdout, STDOUT)
    sys.stderr = _kept(sys.stderr, STDERR)


def write_standard(descriptor: int, data: bytes) -> int:
    """Write to standard output or error what is possible at once; return the bytes written or dropped.

    Raises:
        BlockingIOError: nothing can be written now.
    """
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        raise
    except OSError as error:
        _note(descriptor, error)
        return len(data)


def is_read(descriptor: int, patience_s: float = 60.0) -> bool:
    """Return whether standard output or error accepts data within some time; if not, give it up.

    A stream that was given up before gets only a second.
    """
    if select.select([], [descriptor], [], min(patience_s, 1.0) if descriptor in _unread else patience_s)[1]:
        return True
    give_up(descriptor)
    return False


def give_up(descriptor: int) -> None:
    """Record that output is lost because nobody reads standard output or error."""
    _unread.add(descriptor)
    _note(descriptor, OSError(errno.ETIMEDOUT, "nobody reads it"))


def lost_output() -> tuple[str, bool] | None:
    """Return a description of lost standard output, and whether the cause is only that its reader is gone.

    None: everything was written, or a run's notices report the loss.
    """
    loss = _losses.get(STDOUT)
    if loss is None:
        return None
    has_gone = loss.error.errno == errno.EPIPE
    return None if loss.noted_in and not has_gone else (loss.describe(STDOUT), has_gone)


@contextmanager
def losses_noted_in(run_dir: Path) -> Iterator[None]:
    """Report in RUN/notices.txt output that is lost before and during the block.

    Losses are reported at once, or at the block's end if the run had not begun yet.
    """
    with _lock:
        _folders.append(run_dir)
        _note_losses()
    try:
        yield
    finally:
        with _lock:
            _note_losses()
            _folders.remove(run_dir)


def _note(descriptor: int, error: OSError) -> None:
    with _lock:
        if descriptor not in _losses:
            _losses[descriptor] = _Loss(error)
            _note_losses()


def _note_losses() -> None:
    for descriptor, loss in _losses.items():
        for folder in _folders:
            # Overwriting a run deletes the notice.  Not by pathlib, which raises on a stale network disk.
            stands_there = folder in loss.noted_in and os.path.exists(folder / FILE_NAME)  # noqa: PTH110
            if not stands_there and add_notice(folder, loss.describe(descriptor)):
                loss.noted_in.add(folder)


class _KeptFile(io.RawIOBase):
    """A file whose writes never fail; output that cannot be written is recorded as lost."""

    def __init__(self, standard: int, descriptor: int) -> None:
        super().__init__()
        self._standard = standard
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process sharing the terminal or pipe has made it non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                _note(self._standard, error)
                break
        return size


def _kept(stream: TextIO | None, standard: int) -> TextIO:
    if stream is None:  # was closed
        encoding, errors, at_each_line = "utf-8", "backslashreplace", False
        descriptor = standard
    else:
        try:
            stream.flush()
        except OSError as error:
            _note(standard, error)
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # io.UnsupportedOperation is both
            return stream
        if not isinstance(stream, io.TextIOWrapper):
            return stream
        encoding, at_each_line = stream.encoding, stream.line_buffering or stream.write_through
        errors = stream.errors if stream.errors not in (None, "strict") else "backslashreplace"
    file = io.BufferedWriter(_KeptFile(standard, descriptor))
    return io.TextIOWrapper(file, encoding, errors, line_buffering=at_each_line)


def _open_if_closed(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        os.set_inheritable(descriptor, True)
