"""Cut long recordings at quiet places, into pieces short enough for a model trained on sentences.

Legend: S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BLOCK_S = 0.01
#: Length of the pauses to cut in: shorter ones are closures of stops.
_PAUSE_S = 0.2


@dataclass(frozen=True)
class Piece:
    """Samples [first, end) of a recording."""

    first: int
    end: int


def cut_at_pauses(samples: npt.NDArray[np.float32], sampling_rate: int, longest_s: float) -> list[Piece]:
    """Cut a recording at its quietest places.

    Every piece is at most `longest_s` long.  If a recording continues for longer, it is cut in the middle of
    the quietest fifth of a second between half that length and all of it, but at least a quarter of it is
    left for the last piece: pieces of some tenths of a second, normalised by themselves, can be recognised as
    words.

    Args:
        samples: (S,) float32.
        sampling_rate: in Hz.
        longest_s: in seconds, more than 0.4.

    Returns:
        The pieces, in order, without gaps; none if there are no samples.

    Example:
        >>> cut_at_pauses(np.zeros(16_000, np.float32), 16_000, 30.0)
        [Piece(first=0, end=16000)]
    """
    assert longest_s > 2 * _PAUSE_S
    longest = int(longest_s * sampling_rate)
    block = max(1, int(_BLOCK_S * sampling_rate))
    longest_pause = round(_PAUSE_S / _BLOCK_S)
    pieces, first = [], 0
    while len(samples) - first > longest:
        # Pauses to cut in: their middles lie between half the length and the latest cut.
        latest = min(longest, len(samples) - first - longest // 4)
        window = samples[first + longest // 2 : first + latest]  # in recordings of hours, only these seconds
        pause = min(longest_pause, len(window) // block)  # shorter pauses, too, in pieces below 0.8 s
        energy = np.concatenate([[0.0], np.cumsum(np.square(window, dtype=np.float64))])
        starts = np.arange(0, len(window) - pause * block + 1, block)
        loudness = energy[starts + pause * block] - energy[starts]
        # Among equally quiet pauses take the last: longer pieces, fewer cuts.
        best = int(starts[len(starts) - 1 - int(np.argmin(loudness[::-1]))])
        end = first + longest // 2 + best + pause * block // 2
        pieces.append(Piece(first, end))
        first = end
    return [*pieces, Piece(first, len(samples))] if len(samples) else []
