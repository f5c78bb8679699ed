"""How the probe's ranks report to `speechdp doctor`: lines on stdout, which every launcher forwards.

They use no file, as it is not known yet whether the hosts share folders, and no connection of their own.
Launchers put tags before lines, and may cut a line where another rank's begins.  So a report travels in short
numbered pieces with checksums, and an incomplete report is ignored.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PIECE_CHARACTERS = 600
_LINE = re.compile(r"@speechdp-doctor (\d+) (\d+) (\d+)/(\d+) ([0-9a-f]{8}) (.*)@")
#: Facts of all ranks, reported again by rank 0 while the others are silent.
ALL = "all"


@dataclass(frozen=True)
class Report:
    """A report of one rank.

    Attributes:
        rank: the rank it is about, in the launcher's numbering.
        phase: part of the probe.
        is_end: whether the phase has ended (else it begins).
        limit_s: longest time until the next report of the same rank, s.
        facts: what the rank found out in this phase, JSON-like.
    """

    rank: int
    phase: str
    is_end: bool
    limit_s: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


class ReportWriter:
    """Writes this rank's reports to stdout."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._count = 0

    def write(self, report: Report) -> None:
        """Write a report, line by line."""
        for line in to_lines(report, self.rank, self._count):
            sys.stdout.write(line)
            sys.stdout.flush()
        self._count += 1


def to_lines(report: Report, sender: int, count: int) -> list[str]:
    """Return a report as lines.

    Args:
        sender: rank that reports.
        count: number of its earlier reports.
    """
    text = json.dumps([report.rank, report.phase, report.is_end, report.limit_s, dict(report.facts)])
    pieces = [text[i : i + _PIECE_CHARACTERS] for i in range(0, len(text), _PIECE_CHARACTERS)]
    return [
        f"@speechdp-doctor {sender} {count} {i}/{len(pieces)} {_checksum(piece)} {piece}@\n"
        for i, piece in enumerate(pieces)
    ]


class ReportListener:
    """Puts reports together from the lines of a job's output."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int], dict[int, str]] = {}

    def read(self, line: str) -> Report | None:
        """Return the report that a line completes, if it does."""
        match = _LINE.search(line)
        if match is None or _checksum(match.group(6)) != match.group(5):
            return None
        sender, count, index, total = (int(match.group(i)) for i in range(1, 5))
        pieces = self._pieces.setdefault((sender, count), {})
        pieces[index] = match.group(6)
        if len(pieces) < total:
            return None
        del self._pieces[sender, count]
        return _parse("".join(pieces[i] for i in sorted(pieces)))


def _parse(text: str) -> Report | None:
    try:
        rank, phase, is_end, limit_s, facts = json.loads(text)
        return Report(int(rank), str(phase), bool(is_end), float(limit_s), dict(facts))
    except (ValueError, TypeError):
        return None  # a line of something else: the checksums of our own pieces have been compared


def _checksum(piece: str) -> str:
    return f"{zlib.crc32(piece.encode()):08x}"
