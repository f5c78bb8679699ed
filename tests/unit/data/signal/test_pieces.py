"""Recordings are cut at pauses, into pieces without gaps."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speechdp.data.signal.pieces import Piece, cut_at_pauses

RATE = 8000


@example(24881, 0.5, 0)
@given(st.integers(0, 40 * RATE), st.floats(0.5, 10.0), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_pieces_cover_everything_and_none_is_too_long(size: int, longest_s: float, seed: int) -> None:
    samples = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    pieces = cut_at_pauses(samples, RATE, longest_s)
    assert [p.first for p in pieces] == [0, *(p.end for p in pieces)][: len(pieces)]
    assert (pieces[-1].end if pieces else 0) == size
    assert all(0 < p.end - p.first <= longest_s * RATE for p in pieces)
    assert all(p.end - p.first >= longest_s * RATE / 2 - 1 for p in pieces[:-1])
    assert len(pieces) < 2 or pieces[-1].end - pieces[-1].first >= longest_s * RATE / 4 - 1


def test_the_cut_is_in_the_middle_of_the_pause() -> None:
    samples = np.random.default_rng(0).normal(size=16 * RATE).astype(np.float32)
    samples[7 * RATE : 7 * RATE + RATE // 2] = 0  # half a second, after 7 s
    first, second = cut_at_pauses(samples, RATE, 10.0)
    assert 7.09 < first.end / RATE < 7.41
    assert second == Piece(first.end, 16 * RATE)


def test_a_short_recording_stays_whole() -> None:
    assert cut_at_pauses(np.ones(RATE, np.float32), RATE, 30.0) == [Piece(0, RATE)]
    assert cut_at_pauses(np.empty(0, np.float32), RATE, 30.0) == []
