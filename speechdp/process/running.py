"""The programs that several threads run at a time, to end them together."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any


class RunningPrograms:
    """The running programs of all threads, to kill them together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program.  Raises OSError, ValueError, and CancelledError after `kill_all`.

        Args:
            options: as for subprocess.Popen.
        """
        with self._lock:
            if self._is_over:
                raise CancelledError
            child = subprocess.Popen(command, **options)
            self._children.add(child)
            return child

    def end(self, child: subprocess.Popen[bytes]) -> None:
        """Make sure that a program has ended; kill it if necessary."""
        if child.poll() is None:
            child.kill()
            child.wait()
        with self._lock:
            self._children.discard(child)

    def kill_all(self) -> None:
        """Kill all running programs, and let none start any more."""
        with self._lock:
            self._is_over = True
            for child in self._children:
                child.kill()
