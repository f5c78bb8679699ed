"""Find sound that occurs twice: the same file under another path, a copy of it, or overlapping parts."""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from speechdp.data.signal.audio import AudioPart, AudioSource, file_of, named_channel, num_channels
from speechdp.data.signal.channel import Channel
from speechdp.errors import ConfigError

#: Segments are cut with some tenths of a second around them.  So parts of a recording count as having sound
#: in common only from this many seconds on, or from half of the shorter part on.
_LEAST_SHARED_S = 1.0
_PIECE_BYTES = 1 << 14
_READ_BYTES = 1 << 20

_Item = TypeVar("_Item")


class SameFiles:
    """Identifies files that are the same: reached by different paths or links, or copies of the same bytes.

    Each file is looked up on the disk only once.  Copies are searched among files of the same size, first by
    a piece from their middle, and only between different sides.  Headers are read if tables specify a file's
    channel in several ways.
    """

    def __init__(
        self, audio: Iterable[tuple[AudioSource, Hashable]], earlier: SameFiles | None = None
    ) -> None:
        """Examine files.

        Args:
            audio: all audio to be looked up, and the side of each: copies are not searched within a side.
            earlier: what was looked up on the disk for these is reused.
        """
        self._disk: _Disk = _Disk() if earlier is None else earlier._disk
        sides: defaultdict[str, set[Hashable]] = defaultdict(set)
        named: dict[str, Channel | None] = {}
        in_several_ways: set[str] = set()
        for source, side in audio:
            real, channel = self._disk.real_path(file_of(source)), named_channel(source)
            sides[real].add(side)
            if named.setdefault(real, channel) != channel:
                in_several_ways.add(real)
        self._first_of_copies = _copies(sides, self._disk)
        for copy, first in self._first_of_copies.items():
            if copy in in_several_ways or named[copy] != named[first]:
                in_several_ways.add(first)
        self._of_one_channel = set(filter(_is_mono, in_several_ways))

    def of(self, audio: AudioSource) -> Hashable:
        """Return a key that is equal for the same channel of the same file, however tables name it."""
        real = self._disk.real_path(file_of(audio))
        first = self._first_of_copies.get(real, real)
        return first, None if first in self._of_one_channel else named_channel(audio)


class _Disk:
    """Properties of files and folders, each looked up only once."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}
        self._files: dict[Path, str] = {}
        self._marks: dict[tuple[Callable[[str], Hashable], str], Hashable] = {}

    def real_path(self, file: Path) -> str:
        if file not in self._files:
            folder, name = os.path.split(os.path.realpath(file) if file.is_symlink() else file)
            if folder not in self._folders:
                self._folders[folder] = os.path.realpath(folder)
            self._files[file] = f"{self._folders[folder]}{os.sep}{name}"
        return self._files[file]

    def mark(self, told_by: Callable[[str], Hashable], path: str) -> Hashable:
        """Return the mark of a file; None if it cannot be read, which other code reports."""
        asked = told_by, path
        if asked not in self._marks:
            try:
                self._marks[asked] = told_by(path)
            except OSError:
                self._marks[asked] = None
        return self._marks[asked]


def _copies(sides: Mapping[str, Collection[Hashable]], disk: _Disk) -> dict[str, str]:
    """Map each file that has copies on another side to the first file with the same bytes."""
    groups = [list(sides)]
    for told_by in (_size, _middle, _whole):
        groups = [
            same
            for group in groups
            for same in _grouped(group, partial(disk.mark, told_by))
            if len({side for path in same for side in sides[path]}) > 1
        ]
    return {path: group[0] for group in groups for path in group}


def _is_mono(path: str) -> bool:
    """Return whether a file has one channel; other code reports files that cannot be read."""
    try:
        return num_channels(Path(path)) == 1
    except ConfigError:
        return False


def _grouped(paths: Iterable[str], told_by: Callable[[str], Hashable]) -> list[list[str]]:
    """Group files with equal marks; a file without a mark equals no other."""
    groups: defaultdict[Hashable, list[str]] = defaultdict(list)
    for path in paths:
        if (mark := told_by(path)) is not None:
            groups[mark].append(path)
    return [group for group in groups.values() if len(group) > 1]


def _size(path: str) -> int | None:
    """Return the size of a non-empty regular file; None for anything else."""
    found = Path(path).stat()
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_size else None


def _middle(path: str) -> bytes:
    with Path(path).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _PIECE_BYTES) // 2)
        return hashlib.sha256(file.read(_PIECE_BYTES)).digest()


def _whole(path: str) -> bytes:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.digest()


@dataclass(frozen=True)
class _Stretches(Generic[_Item]):
    """Stretches of one file, sorted by their beginnings.

    Attributes:
        parts: beginning and end, seconds, and the item of each.
        reach_s: the latest end among the stretches up to each.
    """

    parts: list[tuple[float, float, _Item]]
    reach_s: list[float]

    @classmethod
    def of(cls, parts: Iterable[tuple[float, float, _Item]]) -> _Stretches[_Item]:
        """Sort stretches."""
        in_order = sorted(parts, key=lambda part: part[:2])
        return cls(in_order, list(itertools.accumulate((end for _, end, _ in in_order), max)))


class SoundIndex(Generic[_Item]):
    """Finds stretches of files, each with an item, that have sound in common with given audio."""

    def __init__(self, files: SameFiles, sounds: Iterable[tuple[AudioSource, _Item]]) -> None:
        """Collect stretches.

        Args:
            files: knows which files are the same.
            sounds: the audio and the item of each stretch.
        """
        self._files = files
        stretches: defaultdict[Hashable, list[tuple[float, float, _Item]]] = defaultdict(list)
        for audio, item in sounds:
            stretches[files.of(audio)].append((*times_of(audio), item))
        self._stretches = {place: _Stretches.of(parts) for place, parts in stretches.items()}

    def find(self, audio: AudioSource) -> _Item | None:
        """Return the item of a stretch that has enough sound in common with this; None: there is none."""
        there = self._stretches.get(self._files.of(audio))
        if there is None:
            return None
        start, end = times_of(audio)
        # Overlaps need not be added up: if stretches that follow each other without a gap share enough with
        # this together, one of them does so alone.
        for number in range(bisect_right(there.reach_s, start), len(there.parts)):
            other_start, other_end, item = there.parts[number]
            if other_start >= end:
                break
            common = min(end, other_end) - max(start, other_start)
            if common >= min(_LEAST_SHARED_S, (end - start) / 2, (other_end - other_start) / 2):
                return item
        return None


def times_of(audio: AudioSource) -> tuple[float, float]:
    """Return where audio begins and ends in its file, seconds; infinity: at the end of the file."""
    if not isinstance(audio, AudioPart):
        return 0.0, float("inf")
    return audio.start_s, float("inf") if audio.end_s is None else audio.end_s
