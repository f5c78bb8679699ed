"""Parse a user's description of a cluster: `100gbit`, `5us`, `8,16,...,1024`, `1:2`."""

from __future__ import annotations

import math
import re

from speechdp.errors import ConfigError

#: Bytes per second by unit; bits for network cards, bytes for disks and buses.
_BYTES_PER_S = {
    **{f"{prefix}bit": factor / 8 for prefix, factor in (("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12))},
    **{f"{prefix}B/s": factor for prefix, factor in (("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12))},
}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_COUNTS = {"": 1.0, "kf": 1e3, "mf": 1e6, "f": 1.0}
#: Most digits of a number that is parsed, if only to report it as too large.
_MOST_DIGITS = 100
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-zµ/]*)", re.IGNORECASE)
#: Larger numbers of ranks, or of steps in a period, are taken for a mistake.
MOST_RANKS, MOST_STEPS = 65_536, 4_096
#: Likewise for a link's latency, s (`5m` is five minutes), the factor of a slow rank, and frames.
MOST_LATENCY_S, MOST_FACTOR, MOST_FRAMES = 10.0, 1e6, 1e18


def bandwidth(option: str, text: str) -> float:
    """Read a bandwidth: `1gbit`, `100gbit/s`, `25GB/s`.  Returns bytes per second.

    Raises:
        ConfigError: anything else, or 0; the message names `option`.
    """
    # Case matters only for the letter b: 25Gb/s are bits, an eighth of 25GB/s.
    number, unit = _split(text)
    unit = "".join(letter if letter == "B" else letter.lower() for letter in unit)
    unit = unit.removesuffix("/s") if unit.endswith("bit/s") else unit
    if unit not in _BYTES_PER_S or number <= 0:
        raise ConfigError(f"{option} {text}: is no bandwidth; write 1gbit, 100gbit or 25GB/s")
    return number * _BYTES_PER_S[unit]


def duration(option: str, text: str, example: str = "5us, 0.1ms or 0s") -> float:
    """Read a duration: `5us`, `0.1ms`, `20m`.  Returns seconds.

    Raises:
        ConfigError: anything else; the message names `option`.
    """
    number, unit = _split(text.lower())
    if unit not in _SECONDS or number < 0:
        raise ConfigError(f"{option} {text}: is no time; write {example}")
    return number * _SECONDS[unit]


def latency(option: str, text: str) -> float:
    """Read the latency of a link: `5us`, `0.1ms`.  Returns seconds.

    Raises:
        ConfigError: not a duration, or longer than any link's latency; the message names `option`.
    """
    seconds = duration(option, text)
    if seconds > MOST_LATENCY_S:
        raise ConfigError(
            f"{option} {text}: is {seconds:,.6g} s, longer than a message takes; write 5us, 0.1ms or 0s"
        )
    return seconds


def frame_count(option: str, text: str) -> float:
    """Read a number of frames: `1e9`, `600mf`.

    Raises:
        ConfigError: anything else, less than one, or above `MOST_FRAMES`; the message names `option`.
    """
    number, unit = _split(text.lower().replace(",", ""))
    if unit not in _COUNTS or number * _COUNTS[unit] < 1:
        raise ConfigError(f"{option} {text}: is no number of frames; write 1e9 or 600mf")
    if number * _COUNTS[unit] > MOST_FRAMES:
        raise ConfigError(f"{option} {text}: is too many frames, at most {MOST_FRAMES:g}; write 1e9 or 600mf")
    return number * _COUNTS[unit]


def numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """Read positive integers: `4,16`; `8,16,...,1024` continues with the ratio of the two before the dots.

    Returns:
        The numbers in ascending order, each once.

    Raises:
        ConfigError: anything else, or one above `most`; the message names `option`.
    """
    found: list[int] = []
    words = [word.strip() for word in text.split(",")]
    for place, word in enumerate(words):
        if word == "..." and 1 < place == len(words) - 2 and _is_number(words[-1]):
            found += _between(option, text, found[-2:], int(words[-1]))
        elif _is_number(word) and int(word) >= 1:
            found.append(int(word))
        else:
            raise ConfigError(
                f"{option} {text}: {word!r} is no whole number from 1; write 4,16,64 or 8,16,...,1024"
            )
    if max(found) > most:
        raise ConfigError(f"{option} {text}: {max(found):,} is too many; at most {most:,}")
    return tuple(sorted(set(found)))


def slow_ranks(option: str, text: str) -> dict[int, float]:
    """Read `RANK:FACTOR,...`: ranks whose own work takes that many times as long; "" for none.

    Raises:
        ConfigError: anything else, a rank twice, or a factor that is not positive or beyond `MOST_FACTOR`;
            the message names `option`.
    """
    found = {}
    for word in filter(None, text.split(",")):
        rank, _, factor = word.partition(":")
        if not _is_number(rank) or not re.fullmatch(r"\d+(\.\d+)?", factor) or float(factor) <= 0:
            raise ConfigError(
                f"{option} {text}: {word!r} is not RANK:FACTOR; 1:2 has rank 1 take twice as long"
            )
        if not 1 / MOST_FACTOR < float(factor) < MOST_FACTOR:
            raise ConfigError(
                f"{option} {text}: a factor must be above {1 / MOST_FACTOR:g} and below a million, e.g. 1:2"
            )
        if int(rank) in found:
            raise ConfigError(f"{option} {text}: rank {int(rank)} is there twice")
        found[int(rank)] = float(factor)
    return found


def _split(text: str) -> tuple[float, str]:
    """Return number and unit; (-1, "") if it is not a quantity."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or not math.isfinite(float(match[1])):
        return -1.0, ""
    return float(match[1]), match[2]


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS


def _between(option: str, text: str, last: list[int], end: int) -> list[int]:
    """Return the numbers that the dots stand for: those after `last`, by its ratio, below `end`."""
    first, second = last
    if second <= first or second % first != 0 or end <= second:
        raise ConfigError(f"{option} {text}: unclear what the dots stand for; write 8,16,...,1024")
    found = []
    while (following := second * second // first) < end:
        found.append(following)
        first, second = second, following
    return found
