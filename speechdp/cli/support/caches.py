"""Folders for libraries that insist on keeping something, where the user has no cache that can be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NUMBA = "NUMBA_CACHE_DIR"


@contextmanager
def compiled_code_kept() -> Iterator[None]:
    """Let librosa be imported in the block by anybody: by another user than who installed, without a home.

    Its compiler, numba, refuses to do without a folder to keep its work in.
    """
    if _NUMBA in os.environ or _can_be_made(_user_cache()):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="speechdp-numba-") as folder:
        os.environ[_NUMBA] = folder
        try:
            yield
        finally:
            del os.environ[_NUMBA]


def _user_cache() -> Path:
    home = os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises where nobody has a home
    return Path(os.environ.get("XDG_CACHE_HOME") or home)


def _can_be_made(folder: Path) -> bool:
    # Not exists(), which raises where the folder above may not be looked into.
    there = next((path for path in (folder, *folder.parents) if os.access(path, os.F_OK)), None)
    return folder.is_absolute() and there is not None and os.access(there, os.W_OK | os.X_OK)
