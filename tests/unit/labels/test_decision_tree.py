"""Decision trees: they find the neighbours that matter, and stop where frames are few."""

from __future__ import annotations

import numpy as np
import pytest

from speechdp.errors import ConfigError
from speechdp.labels.decision_tree import ContextStatistics, grow
from speechdp.labels.hmm import FloatArray, IntArray, StateInventory, states_of
from speechdp.labels.state_tying import Context, StateTying, contexts_of

PHONES = ("A", "E", "B", "D", "S")
INVENTORY = StateInventory(tuple(sorted(PHONES)))
VOWELS = {1 + INVENTORY.phones.index(p) for p in "AE"}
DIM = 4


def spoken(num_phones: int, seed: int = 0) -> IntArray:
    rng = np.random.default_rng(seed)
    phones = ["SIL", *rng.choice(PHONES, num_phones), "SIL"]
    states = states_of(phones, INVENTORY)
    return np.repeat(states, rng.integers(1, 6, len(states))).astype(np.int32)


def features(states: IntArray, seed: int = 0) -> FloatArray:
    """Let vowels sound alike; S_0 depends on a vowel before it, S_2 on one behind it."""
    rng = np.random.default_rng(seed)
    at = contexts_of(states)
    is_s = at.phone == 1 + INVENTORY.phones.index("S")
    x = np.zeros((len(states), DIM))
    x[:, 0] = np.where(np.isin(at.phone, list(VOWELS)), 4.0, -4.0)
    x[:, 1] = 0.3 * states
    x[:, 2] = 3.0 * (is_s & (at.state == 0) & np.isin(at.left, list(VOWELS)))
    x[:, 3] = 3.0 * (is_s & (at.state == 2) & np.isin(at.right, list(VOWELS)))
    return (x + rng.normal(0, 1, x.shape)).astype(np.float32)


def grown(context: Context, max_classes: int = 100, min_frames: float = 100) -> StateTying:
    statistics, states = ContextStatistics(INVENTORY, context), spoken(3000)
    statistics.add(features(states), states)
    codes = sorted(statistics.sums)
    return grow(statistics, codes, statistics.matrix(codes, DIM), max_classes, min_frames)


def leaves_of(tying: StateTying, name: str) -> int:
    return int((tying.states == INVENTORY.class_names().index(name)).sum())


def test_the_neighbours_that_matter_are_found() -> None:
    both, left = grown("both"), grown("left")
    assert leaves_of(both, "S_0") == leaves_of(both, "S_2") == leaves_of(left, "S_0") == 2
    assert both.num_classes == INVENTORY.num_classes + 2 and left.num_classes == INVENTORY.num_classes + 1
    classes = {
        p: both.tied(np.array(states_of(p, INVENTORY), np.int32))[3:6].tolist()
        for p in (("A", "S", "B"), ("E", "S", "D"), ("B", "S", "E"), ("SIL", "S", "A"), ("B", "S", "B"))
    }
    assert classes["A", "S", "B"] == classes["E", "S", "D"]
    assert classes["B", "S", "E"] == classes["SIL", "S", "A"]
    assert classes["A", "S", "B"][0] != classes["B", "S", "B"][0]
    assert classes["A", "S", "B"][2] == classes["B", "S", "B"][2] != classes["B", "S", "E"][2]
    assert len({tuple(c[1:2]) for c in classes.values()}) == 1


def test_vowels_are_one_question() -> None:
    assert {"A", "E"} in [set(question) for question in grown("left").questions]


def test_the_split_that_gains_most_comes_first_and_there_are_not_more_than_asked_for() -> None:
    one = grown("both", max_classes=INVENTORY.num_classes + 1)
    assert one.num_classes == INVENTORY.num_classes + 1
    assert {leaves_of(one, "S_0"), leaves_of(one, "S_2")} == {1, 2}
    assert grown("both", max_classes=INVENTORY.num_classes).num_classes == INVENTORY.num_classes
    with pytest.raises(ConfigError, match=r"--tied-states 3: .* 18 "):
        grown("both", max_classes=3)


def test_no_state_has_fewer_frames_than_it_needs() -> None:
    states = spoken(3000)
    for least in (100, 400):
        tying = grown("both", min_frames=least)
        counts = np.bincount(tying.tied(states), minlength=tying.num_classes)
        split = np.bincount(tying.states)[tying.states] > 1
        assert (counts[split] >= least).all()
    assert grown("both", min_frames=10_000).num_classes == INVENTORY.num_classes


def test_parts_add_up_to_the_whole() -> None:
    """Ranks count their own utterances; what one has not seen counts nothing."""
    parts = [spoken(40, seed) for seed in range(3)]
    whole = ContextStatistics(INVENTORY, "both")
    separate = [ContextStatistics(INVENTORY, "both") for _ in parts]
    for seed, (states, own) in enumerate(zip(parts, separate, strict=True)):
        whole.add(features(states, seed), states)
        own.add(features(states, seed), states)
    codes = sorted(whole.sums)
    total = sum(own.matrix(codes, DIM) for own in separate)
    np.testing.assert_allclose(total, whole.matrix(codes, DIM))
    frames = sum(int((states >= 3).sum()) for states in parts)
    assert whole.matrix(codes, DIM)[:, 0].sum() == frames


def test_phones_that_do_not_occur_keep_their_states() -> None:
    statistics = ContextStatistics(INVENTORY, "both")
    tying = grow(statistics, [], statistics.matrix([], DIM), 100)
    np.testing.assert_array_equal(tying.states, np.arange(INVENTORY.num_classes))
