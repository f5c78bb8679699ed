"""Exchanges between neighbours, as matrices."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.strategies.mechanisms.topology import Mixing


def mixing_matrix(mixings: Sequence[Mixing]) -> list[list[float]]:
    """Return the matrix W of x <- W x, from the mixings of all ranks: row i holds the weights of rank i."""
    rows = [[0.0] * len(mixings) for _ in mixings]
    for rank, mixing in enumerate(mixings):
        for source in (rank, *mixing.sources):
            rows[rank][source] = mixing.weight
    return rows
