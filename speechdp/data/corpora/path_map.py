"""Map paths of tables that were written on another machine: --path-map OLD=NEW."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from speechdp.errors import ConfigError


class PathMap:
    """Replaces the beginnings of paths in tables; remembers which old beginnings fitted a path.

    Args:
        pairs: old and new beginnings; they consist of whole folder names.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = sorted(pairs, key=lambda pair: -len(pair[0]))
        self._used: set[tuple[str, str]] = set()
        self._first_path: str | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> PathMap:
        """Parse any number of OLD=NEW.  Raises ConfigError."""
        pairs = []
        for text in texts:
            old, equals, new = text.partition("=")
            if not equals or not old.rstrip("/") or not new:
                raise ConfigError(
                    f"--path-map {text}: is not understood; write OLD=NEW, e.g. /export/data=/data"
                )
            pairs.append((old.rstrip("/"), new.rstrip("/")))
        return cls(pairs)

    def mapped(self, path: str) -> str:
        """Return a table's path with the longest beginning that fits replaced."""
        # Words of pipes come here, too: programs and options, which are no paths to show in messages.
        if self._first_path is None and "/" in path:
            self._first_path = path
        fitting = [(old, new) for old, new in self._pairs if path == old or path.startswith(old + "/")]
        self._used.update(fitting)
        if not fitting:
            return path
        old, new = fitting[0]
        return new + path[len(old) :]

    def leading_to(self, path: Path) -> tuple[str, str] | None:
        """Return the old and new beginning that was replaced in this mapped path, if any was."""
        ends = sorted(self._used, key=lambda pair: -len(pair[1]))
        return next(((old, new) for old, new in ends if path.is_relative_to(new or "/")), None)

    def refuse_unused(self, folder: Path) -> None:
        """Refuse a replacement that fitted no path in a folder's tables: a typo, or meant for other tables.

        Raises:
            ConfigError: there is one; names it, and the first path of the tables.
        """
        for old, new in self._pairs:
            if (old, new) not in self._used:
                first = "" if self._first_path is None else f" (the first is {self._first_path})"
                raise ConfigError(
                    f"--path-map {old}={new}: no path in the tables of {folder}{first} begins with {old}; "
                    "correct it, or leave it out"
                )
