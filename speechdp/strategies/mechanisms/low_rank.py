"""Sums of gradients over ranks whose matrices travel as two factors of low rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.parallel.flat_buffer import FlatBuffer

#: Factors are sent in the place of a matrix that has this many times their elements, or more.
_LEAST_GAIN = 2
#: Of the first Q: any, but the same on all ranks.
_SEED = 0


class LowRankSum:
    """Sums gradients over ranks: matrices as two factors of low rank, everything else in full.

    Update rule: for each matrix, G_i its gradient on rank i, r the rank of its factors, orth(X) an
    orthonormal basis of X's columns,
        M_i = G_i + E_i;   P = orth(sum_i M_i Q);   Q_i = M_i^T P;   E_i <- M_i - P Q_i^T
        sum <- P (sum_i Q_i)^T;   Q <- orth(sum_i Q_i).
    E_i is what of rank i's gradients has not been applied so far: the sum of all sums handed out and of the
    E_i is the sum of the exact ones.  Q begins at random, the same on all ranks.  A tensor of more than two
    dimensions is the matrix of its first by all others.

    Exchange: two, after backward: all P and in the same vector all that is sent in full; then all Q_i, while
    E_i is made.  A matrix of m by n goes as factors where they have at most half of its elements:
    (m + n) r values in the place of m n.

    Guarantee: the sums are bitwise the same on all ranks, on processors of one kind and with as many threads
    on each.  An update that moves nothing, as a gradient has overflowed or no rank has frames, leaves E_i and
    Q as they were.

    Source: PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727, recalled; torch's `powerSGD_hook`).
    Deviations: sums over frames in the place of means; E_i lacks what rank i itself has brought into the sum,
    P Q_i^T, not the mean of what all have.  The E_i add up to the same, and those of a rank with
    fewer frames than the others, or none, do not grow with time.  QR in the place of Gram-Schmidt,
    also of Q: columns that vanish, as those of a gradient that is 0, are replaced.

    Args:
        gradients: summed in place; their layout is what factors follow.
        group: the ranks.
        rank: of the factors.

    Attributes:
        largest_rank: with which some matrix has factors that are small enough; 0: none has any.  With a
            larger one all would be sent in full.
    """

    def __init__(self, gradients: FlatBuffer, group: Communicator, rank: int) -> None:
        self._gradients, self._group = gradients, group
        values = gradients.values
        self._error = torch.zeros_like(values)
        chosen = [i for i, p in enumerate(gradients.places) if rank <= _largest_rank(p.shape)]
        self.largest_rank = max(_largest_rank(place.shape) for place in gradients.places)
        self._matrices, self._errors = (
            [views[i].flatten(1) for i in chosen] for views in map(gradients.views_of, (values, self._error))
        )
        places = [(gradients.places[i].offset, gradients.places[i].num_elements) for i in chosen]
        others = [gradients.whole[piece] for piece in _rest(places, gradients.whole.numel())]
        shapes = [matrix.shape for matrix in self._matrices]
        num_in_full = sum(other.numel() for other in others)
        self._left = values.new_zeros(rank * sum(m for m, _ in shapes) + num_in_full)
        self._right = values.new_zeros(rank * sum(n for _, n in shapes))
        self._ps = _factors(self._left, [m for m, _ in shapes], rank)
        parts = self._left[self._left.numel() - num_in_full :].split_with_sizes([o.numel() for o in others])
        #: Where it stands in the gradients, and where in the message.
        self._in_full = list(zip(others, parts, strict=True))
        self._qs = _factors(self._right, [n for _, n in shapes], rank)
        self._own = torch.zeros_like(self._right)
        self._own_qs = _factors(self._own, [n for _, n in shapes], rank)
        self._loss_scale = 1.0
        generator = torch.Generator().manual_seed(_SEED)
        self._right.copy_(torch.randn(self._right.numel(), generator=generator))
        for q in self._qs:
            _orthonormalise(q)

    def sum(self, loss_scale: float = 1.0) -> None:
        """Replace the gradients, and the frame count behind them, by their sums over ranks.  Collective.

        The host waits for a device: an update that is going to be left out must leave no trace here.  Where
        the gradient of a rank is not finite, all of them become NaN on all ranks.

        Args:
            loss_scale: which the gradients are multiplied by; the same on all ranks.
        """
        if loss_scale != self._loss_scale:
            self._error.mul_(loss_scale / self._loss_scale)
            self._loss_scale = loss_scale
        for matrix, error, p, q in zip(self._matrices, self._errors, self._ps, self._qs, strict=True):
            torch.mm(q, matrix.add_(error).T, out=p)
        for gradient, part in self._in_full:
            part.copy_(gradient)
        self._group.allreduce(self._left, name="gradients.left")
        for gradient, part in self._in_full:
            gradient.copy_(part)
        # What is not finite in a matrix is not finite in its P.
        if not bool(self._left.isfinite().all()):
            self._gradients.values.fill_(math.nan)
        elif self._gradients.extra[0].item() > 0:
            self._sum_matrices()

    def _sum_matrices(self) -> None:
        """Make sums of the matrices, whose left factors have been summed.  Collective."""
        for matrix, p, own_q in zip(self._matrices, self._ps, self._own_qs, strict=True):
            _orthonormalise(p)
            torch.mm(p, matrix, out=own_q)
        self._right.copy_(self._own)
        work = self._group.allreduce_async(self._right, name="gradients.right")
        for matrix, error, p, own_q in zip(self._matrices, self._errors, self._ps, self._own_qs, strict=True):
            torch.addmm(matrix, p.T, own_q, alpha=-1, out=error)
        work.wait()
        for matrix, p, q in zip(self._matrices, self._ps, self._qs, strict=True):
            torch.mm(p.T, q, out=matrix)
            _orthonormalise(q)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            "error": self._error,
            "basis": self._right,
            "loss_scale": self._loss_scale,
            "size": self._group.size,
            "rank": self._group.rank,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; on another number of ranks nothing is owed."""
        self._right.copy_(state["basis"])
        if (state["size"], state["rank"]) == (self._group.size, self._group.rank):
            self._error.copy_(state["error"])
            self._loss_scale = state["loss_scale"]
        else:
            self._error.zero_()


def _largest_rank(shape: Sequence[int]) -> int:
    """Return the largest rank of which a tensor's factors are small enough; 0: none."""
    if len(shape) < 2:
        return 0
    m, n = shape[0], math.prod(shape[1:])
    return m * n // (_LEAST_GAIN * (m + n)) if m + n > 0 else 0


def _rest(places: Sequence[tuple[int, int]], end: int) -> list[slice]:
    """Return the pieces of a vector that are in none of `places`, pairs of offset and length."""
    borders = [(0, 0), *sorted((start, start + length) for start, length in places), (end, end)]
    return [slice(first, last) for (_, first), (last, _) in pairwise(borders) if first < last]


def _factors(vector: Tensor, lengths: Sequence[int], rank: int) -> list[Tensor]:
    """Return the factors that stand at the beginning of a vector one after another.  (rank, length) each

    Their columns are rows here: products with matrices are several times as fast.
    """
    ends = [rank * sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [vector[end - rank * n : end].view(rank, n) for end, n in zip(ends, lengths, strict=True)]


def _orthonormalise(factor: Tensor) -> None:
    """Replace the rows by an orthonormal basis of what they span, filled up where they span less."""
    factor.copy_(torch.linalg.qr(factor.T).Q.T)
