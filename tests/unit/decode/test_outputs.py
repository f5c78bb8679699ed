"""What a network's outputs say of how much it has learnt."""

from __future__ import annotations

import numpy as np
import pytest

from speechdp.comm.serial import SerialCommunicator
from speechdp.decode.scoring import Outputs


def remark(*rows: list[float]) -> str:
    """Judge posteriors, an utterance each of 50 frames."""
    outputs = Outputs()
    for row in rows:
        with np.errstate(divide="ignore"):
            outputs.note(np.log(np.tile(np.float32(row), (50, 1))))
    return outputs.remark(len(rows[0]) if rows else 3, SerialCommunicator())


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        ([[0.9, 0.05, 0.05]] * 2, "0.0 %"),
        ([[0.9, 0.08, 0.02], [0.9, 0.02, 0.08]], "4.9 %"),  # as CTC begins: blanks alone, and a guess
        ([[0.34, 0.33, 0.33], [0.33, 0.34, 0.33]], "0.0 %"),
        ([[1.0, 0.0, 0.0]] * 2, "0.0 %"),
    ],
)
def test_outputs_that_are_nearly_the_same_everywhere_are_told(rows: list[list[float]], share: str) -> None:
    assert remark(*rows).startswith(f"the model has learnt little: {share} of what its outputs say depends")


@pytest.mark.parametrize(
    "rows",
    [
        [[0.9, 0.1, 0.0], [0.5, 0.0, 0.5]],  # blanks are the likeliest everywhere, but the phones are known
        [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3]],  # not sure, but it tells them apart
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
        [[1.0]],
        [],
    ],
)
def test_others_are_not(rows: list[list[float]]) -> None:
    assert remark(*rows) == ""


def test_what_is_no_number_is_left_to_the_search() -> None:
    outputs = Outputs()
    outputs.note(np.full((3, 2), np.nan, np.float32))
    assert outputs.remark(2, SerialCommunicator()) == ""
