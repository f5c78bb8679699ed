"""Tied states: contexts of an alignment, what each has as its class, and the file that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory, states_of
from speechdp.labels.state_tying import TYING_NAME, Context, Split, StateTying, contexts_of, tying_in
from tests.helpers.tyings import random_tying, separate_tying

INVENTORY = StateInventory(("A", "B", "C"))
CONTEXTS: list[Context] = ["left", "both"]


def alignment(*phones: str, frames: int = 2) -> Any:
    return np.repeat(states_of(phones, INVENTORY), frames).astype(np.int32)


def test_phones_and_their_neighbours() -> None:
    found = contexts_of(alignment("A", "A", "B", frames=1))
    assert found.phone.tolist() == [1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert found.left.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert found.right.tolist() == [1, 1, 1, 2, 2, 2, 0, 0, 0]
    assert found.state.tolist() == [0, 1, 2] * 3
    nothing = contexts_of(np.empty(0, np.int32))
    assert len(nothing.left) == len(nothing.right) == 0


def test_states_that_an_utterance_is_too_short_for_do_not_hide_a_phone() -> None:
    found = contexts_of(np.array([4, 5, 3, 8, 0], np.int32))  # A without its first state, A_0, B_2, SIL_0
    assert found.left.tolist() == [0, 0, 1, 1, 2] and found.right.tolist() == [1, 1, 2, 0, 0]


@pytest.mark.parametrize("context", CONTEXTS)
def test_each_class_belongs_to_a_state_without_context(context: Context) -> None:
    tying = random_tying(INVENTORY, context)
    states = alignment("SIL", "A", "C", "SIL", "B", "B", "A")
    np.testing.assert_array_equal(tying.states[tying.tied(states)], states)
    assert tying.num_classes == 3 + 9 * 4 and tying.tied(states[:0]).shape == (0,)


def test_each_context_has_the_class_that_the_questions_lead_to() -> None:
    trees = [*range(3), Split("left", 0, 3, Split("right", 1, 4, 5)), *range(6, 14)]
    tying = StateTying(INVENTORY, "both", [("A", "SIL"), ("C",)], trees)
    first = {(p[0], p[2]): int(tying.tied(alignment(*p, frames=1))[3]) for p in ("AAC", "BAC", "CAB", "BAA")}
    assert first == {("A", "C"): 3, ("B", "C"): 4, ("C", "B"): 5, ("B", "A"): 5}
    assert tying.tied(alignment("A"))[0] == 3  # silence is what an utterance begins after


@pytest.mark.parametrize("context", CONTEXTS)
def test_it_is_read_as_it_was_written(context: Context, tmp_path: Path) -> None:
    tying = random_tying(INVENTORY, context)
    tying.save(tmp_path)
    found = tying_in(tmp_path)
    assert found is not None and found.to_json() == tying.to_json()
    np.testing.assert_array_equal(found.table, tying.table)
    assert tying_in(tmp_path / "other") is None and tying_in(None) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("trees"),
        lambda values: values.update(context="right"),
        lambda values: values["trees"].update(A_0=7),
        lambda values: values["trees"].update(A_0="3"),
        lambda values: values["trees"].update(A_0={"left": 99, "yes": 3, "no": 4}),
        lambda values: values["trees"].update(A_0={"left": 0, "yes": 3}),
        lambda values: values["questions"][0].append("Z"),
        lambda values: values["phones"].append("Z"),
        lambda values: values.update(phones=["A", "A", "B"]),
    ],
)
def test_a_damaged_file_is_one_line(change: Any, tmp_path: Path) -> None:
    values = random_tying(INVENTORY, "left", depth=1).to_json()
    change(values)
    (tmp_path / TYING_NAME).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="damaged") as error:
        tying_in(tmp_path)
    assert "\n" not in str(error.value)


def test_left_context_asks_for_nothing_to_the_right() -> None:
    trees = [Split("right", 0, 0, 1), *range(2, 13)]
    with pytest.raises(ValueError, match="right"):
        StateTying(INVENTORY, "left", [("A",)], trees)


def test_too_many_phones_are_refused() -> None:
    many = StateInventory(tuple(f"p{n:03}" for n in range(300)))
    trees = list(range(many.num_classes))
    assert StateTying(many, "left", [], trees).num_classes == many.num_classes
    with pytest.raises(ConfigError, match="--context both: 301 phones are too many for it; give left"):
        StateTying(many, "both", [], trees)


def test_left_neighbours_of_the_same_effect() -> None:
    tying = StateTying(INVENTORY, "left", [("A", "C")], [*range(3), Split("left", 0, 3, 4), *range(5, 13)])
    assert tying.same_left == [[0, 1, 0, 1]]  # SIL and B, A and C
    assert separate_tying(INVENTORY, "both").same_left == [[0, 1, 2, 3]] * 4
