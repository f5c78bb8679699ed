from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechdp.errors import ConfigError
from speechdp.labels.hmm import (
    UNSEEN_LOG_LIKELIHOOD,
    StateInventory,
    alignment_from_phone_times,
    count_frames_and_runs,
    flat_alignment,
    log_priors,
    scaled_log_likelihoods,
    self_loop_probabilities,
)
from speechdp.labels.lexicon import Lexicon

LEXICON = Lexicon({"ab": (("A", "B"), ("B",)), "c": (("C",),)})
INVENTORY = StateInventory(("A", "B", "C"))


def test_silence_has_the_first_three_classes() -> None:
    assert INVENTORY.num_classes == 12
    assert INVENTORY.classes_of("SIL") == (0, 1, 2)
    assert INVENTORY.classes_of("B") == (6, 7, 8)
    assert INVENTORY.class_names()[2:5] == ("SIL_2", "A_0", "A_1")
    with pytest.raises(ConfigError, match="'X'"):
        INVENTORY.classes_of("X")


def test_class_list_is_read_back_and_damage_refused(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    inventory = StateInventory(("A_x", "B"))  # an underscore in a phone's name
    inventory.save(path)
    assert path.read_text().splitlines()[3] == "3 A_x_0"
    assert StateInventory.load(path) == inventory
    for text in ("", "0 SIL_0\n", path.read_text().replace("4 ", "5 "), "0 A_0\n1 A_1\n2 A_2\n", "\n\n\n"):
        path.write_text(text)
        with pytest.raises(
            ConfigError, match=r"classes\.txt: not a class list of speechdp; copy it from the data"
        ):
            StateInventory.load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"classes\.txt: cannot be read \(.*\); copy it from the data that"):
        StateInventory.load(path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"classes\.txt: is missing; copy it from the data"):
        StateInventory.load(path)


def test_flat_alignment_spreads_frames_evenly_between_the_silences() -> None:
    targets = flat_alignment(["ab", "c"], 24, LEXICON, INVENTORY, leading_silence=3, trailing_silence=3)
    assert targets.dtype == np.int32
    assert targets.tolist() == [0, 1, 2, *np.repeat([3, 4, 5, 6, 7, 8, 9, 10, 11], 2), 0, 1, 2]


def test_flat_alignment_edge_cases() -> None:
    assert flat_alignment(["ab"], 3, LEXICON, INVENTORY).tolist() == [3, 5, 7]  # fewer frames than states
    assert flat_alignment([], 6, LEXICON, INVENTORY).tolist() == [0, 0, 1, 1, 2, 2]
    assert flat_alignment(["c"], 3, LEXICON, INVENTORY, 2, 2).tolist() == [9, 10, 11]
    assert flat_alignment(["c"], 0, LEXICON, INVENTORY).shape == (0,)
    with pytest.raises(ConfigError, match="'x' has no pronunciation"):
        flat_alignment(["c", "x"], 5, LEXICON, INVENTORY)


@given(st.lists(st.sampled_from(["ab", "c"]), min_size=1, max_size=5), st.integers(1, 60))
def test_flat_alignment_visits_states_in_order_and_evenly(words: list[str], num_frames: int) -> None:
    states = [s for w in words for p in LEXICON.pronunciations[w][0] for s in INVENTORY.classes_of(p)]
    targets = flat_alignment(words, num_frames, LEXICON, INVENTORY).tolist()
    assert len(targets) == num_frames
    position = 0
    for target in targets:  # a subsequence of the states, each repeated
        position = states.index(target, position)
    if num_frames >= len(states):
        runs = count_frames_and_runs(np.array(targets, np.int32), 12)[1]
        assert runs.sum() == len(states)


def test_phone_times_are_cut_into_thirds_at_frame_centres() -> None:
    phones = [("A", 0.03, 0.09), ("SIL", 0.09, 0.10), ("C", 0.12, 0.15)]
    targets = alignment_from_phone_times(phones, 18, 0.01, INVENTORY)
    assert targets.tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 5, 0, 1, 2, 9, 10, 11, 0, 1, 2]


def test_phone_shorter_than_a_frame_may_have_none_and_late_phones_are_cut() -> None:
    targets = alignment_from_phone_times([("A", 0.006, 0.009), ("B", 0.02, 0.08)], 4, 0.01, INVENTORY)
    assert targets.tolist() == [0, 1, 6, 6]


def test_counts_priors_and_self_loops() -> None:
    frames, runs = count_frames_and_runs(np.array([0, 0, 0, 1, 0, 2], np.int32), 4)
    assert frames.tolist() == [4, 1, 1, 0] and runs.tolist() == [2, 1, 1, 0]
    assert count_frames_and_runs(np.zeros(0, np.int32), 2)[1].tolist() == [0, 0]
    together = np.array([0, 1, 1, 1, 2], np.int32)  # of utterances of 3, 0, 2 and 0 frames
    frames_of_all, runs_of_all = count_frames_and_runs(together, 3, np.array([0, 3, 3, 5]))
    assert frames_of_all.tolist() == [1, 3, 1] and runs_of_all.tolist() == [1, 2, 1]
    assert self_loop_probabilities(frames, runs).tolist() == [0.5, 0.05, 0.05, 0.5]
    assert self_loop_probabilities(np.array([1000]), np.array([1])).tolist() == [0.98]


def test_rare_class_is_floored_and_unseen_class_can_never_win() -> None:
    prior = log_priors(np.array([10**6, 1, 0]))
    assert np.isfinite(prior).all()
    assert prior[1] == pytest.approx(np.log(0.01 / 3))
    posteriors = np.log(np.array([[0.5, 0.1, 0.4]], np.float32))
    for scale in (0.0, 0.5, 1.0):
        likelihoods = scaled_log_likelihoods(posteriors, prior, scale)
        assert likelihoods[0, 2] == UNSEEN_LOG_LIKELIHOOD
        assert likelihoods[0, 1] == pytest.approx(posteriors[0, 1] - scale * prior[1], rel=1e-6)
        assert likelihoods.dtype == np.float32 and likelihoods.flags["C_CONTIGUOUS"]
    # Whoever merely subtracts the prior gets the same decision.
    assert (posteriors - prior)[0].argmin() == 2
