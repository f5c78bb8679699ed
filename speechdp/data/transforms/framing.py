"""Cut the samples of several utterances into overlapping windows: one matrix, no padding to the longest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Framing:
    """Windows of `window` samples, `hop` apart; an utterance's first window begins at its sample `first`.

    Utterances are laid end to end in steps of `hop`, so that one strided view holds the windows of all of
    them.  Between two utterances there are `spare` windows that touch both and belong to neither.

    Attributes:
        window, hop: in samples.
        first: in samples; negative if the first window begins before the utterance.
    """

    window: int
    hop: int
    first: int

    @property
    def _before(self) -> int:
        """Samples in the layout before an utterance's own samples."""
        return max(0, -self.first)

    @property
    def spare(self) -> int:
        """Number of windows between two utterances that belong to neither."""
        return max(0, -(-(self.window - self.hop + max(0, self.first)) // self.hop))

    def starts(self, num_rows: Sequence[int]) -> list[int]:
        """Return the row at which each utterance begins, then the number of rows, spare rows included."""
        return list(itertools.accumulate((rows + self.spare for rows in num_rows), initial=0))

    def lay_out(self, waves: Sequence[Tensor], num_rows: Sequence[int], *, reflect: bool) -> Tensor:
        """Lay utterances (S,) of one device end to end, with room for `num_rows` windows each, at least 1.

        Args:
            reflect: mirror the samples at both ends, repeating the outermost, as Kaldi does; else add zeros.
        """
        totals = [(rows + self.spare) * self.hop for rows in num_rows]
        behind = [max(0, n - self._before - len(x)) for n, x in zip(totals, waves, strict=True)]
        zeros = waves[0].new_zeros(max(self._before, *behind, 0))
        pieces = []
        for wave, total, rest in zip(waves, totals, behind, strict=True):
            pieces += [zeros[: self._before], wave[: total - self._before], zeros[:rest]]
        flat = torch.cat(pieces)
        if reflect:
            bases = (np.cumsum([0, *totals[:-1]]) + self._before).tolist()
            ends = [self.first + (rows - 1) * self.hop + self.window for rows in num_rows]
            edges = [_mirror(len(x), self.first, end) for x, end in zip(waves, ends, strict=True)]
            to, source = np.concatenate([e + base for e, base in zip(edges, bases, strict=True)], axis=1)
            flat[torch.from_numpy(to).to(flat.device)] = flat[torch.from_numpy(source).to(flat.device)]
        return flat

    def rows(self, flat: Tensor) -> Tensor:
        """Return the windows of a layout, a view (R, window)."""
        return flat[max(0, self.first) :].unfold(0, self.window, self.hop)


def multiply(x: Tensor, weights: Tensor) -> Tensor:
    """Return the product of (R, K) float32 and (K, D) float64 weights, rounded to float32.

    The sum is in double precision: the order in which a library adds depends on its threads and on R, and in
    single precision that would change the result.
    """
    return (x.double() @ weights).float()


def _mirror(size: int, first: int, end: int) -> npt.NDArray[np.int64]:
    """Return the positions in first:end outside of 0:size, and the inside positions they mirror: (2, E)."""
    places = np.concatenate([np.arange(first, 0), np.arange(size, max(end, size))])
    phase = places % (2 * size)
    return np.stack([places, np.minimum(phase, 2 * size - 1 - phase)])
