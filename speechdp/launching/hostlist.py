"""Expand Slurm's short forms: `n[01-03,7],gpu-a[1-2]-ib` and `2(x3),1`."""

from __future__ import annotations

import re
from collections.abc import Iterator

#: More hosts than any cluster has; a list with more is a mistake, and would fill the memory.
MAX_HOSTS = 100_000

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_REPEATED = re.compile(r"([1-9][0-9]{0,4})(?:\(x([1-9][0-9]{0,5})\))?", re.ASCII)


class HostListError(ValueError):
    """A list is not in Slurm's form; the message says why, and the caller adds where it came from."""


def expand_host_list(text: str) -> list[str]:
    """Return the names of `n[01-03,7],gpu-a[1-2]-ib`, in order, leading zeros kept.

    A name may have several brackets; the last varies fastest.

    Raises:
        HostListError: brackets that do not close, an empty name, a range that runs backwards, too many hosts.
    """
    names: list[str] = []
    for pattern in _split_outside_brackets(text):
        names += _expand_one(pattern, MAX_HOSTS - len(names))
    return names


def expand_task_counts(text: str) -> list[int]:
    """Return the counts of `2(x3),1`: [2, 2, 2, 1].

    Raises:
        HostListError: a word is not a count from 1 to 99999, or there are too many.
    """
    counts: list[int] = []
    for word in text.split(","):
        match = _REPEATED.fullmatch(word)
        if match is None:
            raise HostListError(f"{word[:40]!r} is not a count such as 2 or 2(x3)")
        times = int(match.group(2) or 1)
        if len(counts) + times > MAX_HOSTS:
            raise HostListError(f"more than {MAX_HOSTS} hosts")
        counts += [int(match.group(1))] * times
    return counts


def _split_outside_brackets(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for position, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
        if depth not in (0, 1):
            raise HostListError("brackets that do not match")
    if depth:
        raise HostListError("a bracket is not closed")
    yield text[begin:]


def _expand_one(pattern: str, at_most: int) -> list[str]:
    """Return the names of one pattern such as `rack[1-2]n[01-04]`."""
    if not pattern:
        raise HostListError("an empty name")
    names = [""]
    for index, part in enumerate(re.split(r"[\[\]]", pattern)):
        choices = _numbers(part, at_most) if index % 2 else [part]
        if len(names) * len(choices) > at_most:
            raise HostListError(f"more than {MAX_HOSTS} hosts")
        names = [name + choice for name in names for choice in choices]
    return names


def _numbers(text: str, at_most: int) -> list[str]:
    """Return the numbers of `01-03,7` as they are written in names."""
    numbers: list[str] = []
    for word in text.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise HostListError(f"{word[:40]!r} is not a number or a range such as 01-16")
        first, last = match.group(1), match.group(2) or match.group(1)
        num_hosts = int(last) - int(first) + 1
        if num_hosts < 1:
            raise HostListError(f"the range {word[:40]!r} runs backwards")
        if len(numbers) + num_hosts > at_most:
            raise HostListError(f"more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
