"""JSON lines that survive a killed process: buffered appending, and reading that counts damaged lines."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from speechdp import remedies
from speechdp.errors import RunError
from speechdp.files import cannot_be_written
from speechdp.json_input import parse_json

FLUSH_INTERVAL_NS = 1_000_000_000


class LineFile:
    """A JSONL file that is appended to and flushed about once a second, or after every line."""

    def __init__(self, path: Path, *, flush_interval_ns: int = FLUSH_INTERVAL_NS) -> None:
        """Open the file.

        Args:
            path: file to append to; its folder is made.
            flush_interval_ns: how long lines may wait for the next one, ns; 0: each is flushed at once.

        Raises:
            RunError: the file cannot be written.
        """
        self._path = path
        self._flush_interval_ns = flush_interval_ns
        self._last_flush_ns = perf_counter_ns()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and _ends_torn(path)
            self._file = path.open("a", encoding="utf-8")
            if torn:  # keep the next record off the half line
                self._file.write("\n")
        except OSError as error:
            raise self._failure(error) from error

    def write(self, line: str) -> None:
        """Append one line."""
        try:
            self._file.write(line + "\n")
            now = perf_counter_ns()
            if now - self._last_flush_ns >= self._flush_interval_ns:
                self._file.flush()
                self._last_flush_ns = now
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Write buffered lines and close the file."""
        try:
            self._file.close()
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> RunError:
        return RunError(cannot_be_written(self._path, error, remedies.resuming()))


@dataclass(frozen=True)
class Lines:
    """The contents of a JSONL file.

    Attributes:
        records: the JSON objects, one per line, in the file's order.
        num_damaged: number of lines that hold none (a process killed while writing leaves one).
    """

    records: list[dict[str, Any]]
    num_damaged: int


def read_lines(path: Path, last_bytes: int | None = None, *, grows: bool = False) -> Lines:
    """Read a JSONL file, skipping damaged lines.

    Args:
        last_bytes: read only the whole lines within this many bytes at the file's end; None: all lines.
        grows: a process may be writing the file: a part of a line at its end is skipped, and is not damage.

    Raises:
        OSError: the file cannot be read.
    """
    found = list(each_line(path, last_bytes, grows=grows))
    records = [record for record in found if record is not None]
    return Lines(records, len(found) - len(records))


def each_line(
    path: Path, last_bytes: int | None = None, *, grows: bool = False
) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON object of each line of a file, which may be large; None for a damaged line.

    Args:
        last_bytes, grows: as for `read_lines`.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if last_bytes is not None and (size := file.seek(0, os.SEEK_END)) > last_bytes:
            file.seek(size - last_bytes - 1)
            file.readline()  # the rest of a line, or the end of the one before
        else:
            file.seek(0)
        with io.TextIOWrapper(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    record = parse_json(line)
                except ValueError:
                    if line.strip() and not (grows and not line.endswith("\n")):
                        yield None
                    continue
                yield record if isinstance(record, dict) else None


def _ends_torn(path: Path) -> bool:
    """Return whether the file ends inside a line, as a killed process leaves it."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
