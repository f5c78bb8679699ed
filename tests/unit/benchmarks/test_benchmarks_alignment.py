"""How the alignment benchmark counts boundaries."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.models.alignment import Phone, count_within, phones_of

#: Silence, A, A, B, silence: states 0 to 2 are silence's, 3 to 5 of A, 6 to 8 of B.
STATES = [0, 0, 3, 4, 4, 5, 3, 3, 5, 6, 7, 8, 2]
PHONES = [(1, 2, 6), (1, 6, 9), (2, 9, 12)]


def test_phones_are_found_in_states() -> None:
    assert phones_of(np.array(STATES, np.int32)) == PHONES
    assert phones_of(np.zeros(4, np.int32)) == []


@pytest.mark.parametrize(
    ("found", "within"),
    [
        (PHONES, 4),  # three begins, and the end before silence
        ([(1, 4, 8), (1, 8, 11), (2, 11, 14)], 4),
        ([(1, 5, 8), (1, 8, 11), (2, 11, 15)], 2),
        ([(1, 2, 9), (2, 9, 12)], 2),  # both A in one
        ([(3, 2, 6), (2, 9, 12)], 2),  # another phone in its place
        ([], 0),
    ],
)
def test_boundaries_near_the_exact_ones_are_counted(found: list[Phone], within: int) -> None:
    assert count_within(PHONES, found, 2) == (within, 4)
