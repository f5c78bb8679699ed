from __future__ import annotations

import dataclasses
from itertools import count

import numpy as np
import pytest

from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import SILENCE, Lexicon
from speechdp.labels.state_tying import Context, Node, Side, Split, StateTying
from speechdp.labels.transcript_hmm import (
    LOG_ZERO,
    NO_PATH,
    CtcCompiler,
    TranscriptCompiler,
    TranscriptHmm,
    TranscriptHmms,
)

# Classes: silence 0-2, A 3-5, B 6-8, C 9-11.
LEXICON = Lexicon({"ab": (("A", "B"),), "c": (("C",), ("A",))})
INVENTORY = StateInventory(("A", "B", "C"))


def compiler(silence: float = 0.2, scale: float = 1.0) -> TranscriptCompiler:
    return TranscriptCompiler(LEXICON, INVENTORY, 0.6, silence, scale)


def paths_of(hmm: TranscriptHmm) -> dict[tuple[int, ...], float]:
    """Return the probability of every class sequence that stays in no state for longer than a frame."""
    found: dict[tuple[int, ...], float] = {}

    def follow(state: int, classes: tuple[int, ...], log_prob: float) -> None:
        classes = (*classes, int(hmm.classes[state]))
        if hmm.final[state] > LOG_ZERO:
            assert classes not in found
            found[classes] = float(np.exp(log_prob + hmm.final[state]))
        for target in range(state + 1, len(hmm.classes)):
            for source, arc in zip(hmm.predecessors[target, 1:], hmm.log_probs[target, 1:], strict=True):
                if source == state and arc > LOG_ZERO:
                    follow(target, classes, log_prob + arc)

    for state in np.flatnonzero(hmm.initial > LOG_ZERO).tolist():
        follow(state, (), float(hmm.initial[state]))
    return found


SIL, A, B, C = (0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)


def test_pronunciations_stand_side_by_side_and_silence_is_optional() -> None:
    found = paths_of(compiler().compile(["c"]))
    left = 0.4**3
    assert found == {
        first + word + last: pytest.approx(
            left * (0.2 * left if first else 0.8) * (0.2 * left if last else 0.8)
        )
        for first in ((), SIL)
        for word in (C, A)
        for last in ((), SIL)
    }


def test_pronunciations_have_the_probabilities_of_the_lexicon() -> None:
    rated = Lexicon(LEXICON.pronunciations, {"ab": (0.9,), "c": (1.0, 0.25)})
    for scale in (1.0, 0.3):
        plain = paths_of(compiler(scale=scale).compile(["c", "ab", "c"]))
        found = paths_of(TranscriptCompiler(rated, INVENTORY, 0.6, 0.2, scale).compile(["c", "ab", "c"]))
        for path, probability in plain.items():
            spoken = [phone for phone in path[::3] if phone != SIL[0]]  # C or A, A B, C or A
            of_words = 0.9 * 0.25 ** ((spoken[0] == A[0]) + (spoken[-1] == A[0]))
            assert found[path] == pytest.approx(probability * of_words**scale)


def test_words_follow_each_other_with_and_without_a_pause() -> None:
    found = paths_of(compiler().compile(["ab", "c"]))
    assert len(found) == 2**3 * 2
    assert found[A + B + C] == pytest.approx(0.4**9 * 0.8**3)
    assert found[A + B + SIL + A] == pytest.approx(0.4**12 * 0.8**2 * 0.2)


def test_without_silence_only_the_words_remain() -> None:
    hmm = compiler(silence=0.0).compile(["ab", "c"])
    assert set(paths_of(hmm)) == {A + B + C, A + B + A}
    assert hmm.classes.tolist() == [*A, *B, *C, *A]


def test_an_empty_transcript_is_silence() -> None:
    hmm = compiler().compile([])
    assert paths_of(hmm) == {SIL: pytest.approx(0.2 * 0.4**3)}
    assert hmm.min_frames == 3
    with pytest.raises(ConfigError, match="without words"):
        compiler(silence=0.0).compile([])


def test_the_shortest_path_has_min_frames() -> None:
    for words in ([], ["c"], ["ab", "c", "c"]):
        hmm = compiler().compile(words)
        assert hmm.min_frames == min(map(len, paths_of(hmm)))


def test_transition_scale_raises_every_probability_to_a_power() -> None:
    plain, scaled = paths_of(compiler().compile(["ab"])), paths_of(compiler(scale=0.3).compile(["ab"]))
    assert scaled == {path: pytest.approx(probability**0.3) for path, probability in plain.items()}


QUESTIONS = ((SILENCE,), ("A",), ("B", "C"), (SILENCE, "C"))


def random_tying(context: Context, seed: int, most_questions: int) -> StateTying:
    """Return trees that ask up to so many questions, one below the other, about each state but silence's."""
    random, leaves = np.random.default_rng(seed), count()
    sides: list[Side] = ["left"] if context == "left" else ["left", "right"]

    def grow(questions: int) -> Node:
        if questions == 0:
            return next(leaves)
        side, number = sides[random.integers(len(sides))], int(random.integers(len(QUESTIONS)))
        return Split(side, number, grow(questions - 1), grow(int(random.integers(questions))))

    depths = [0 if state < 3 else int(random.integers(most_questions + 1)) for state in range(12)]
    return StateTying(INVENTORY, context, QUESTIONS, [grow(depth) for depth in depths])


@pytest.mark.parametrize("words", [[], ["c"], ["c", "c"], ["ab", "c", "ab"], ["c", "ab", "c", "c"]])
@pytest.mark.parametrize("context", ["left", "both"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_classes_in_context_are_those_of_each_path(context: Context, seed: int, words: list[str]) -> None:
    stay = np.linspace(0.1, 0.9, 12)
    tying = random_tying(context, seed, most_questions=3)
    plain = TranscriptCompiler(LEXICON, INVENTORY, stay, 0.2).compile(words)
    hmm = TranscriptCompiler(LEXICON, INVENTORY, stay, 0.2, tying=tying).compile(words)
    expected = {
        tuple(tying.tied(np.array(path, np.int32)).tolist()): pytest.approx(probability)
        for path, probability in paths_of(plain).items()
    }
    assert paths_of(hmm) == expected
    assert hmm.min_frames == plain.min_frames
    assert np.allclose(hmm.log_probs[:, 0], np.log(stay[tying.states[hmm.classes]]))
    before = np.where(hmm.log_probs > LOG_ZERO, hmm.predecessors, -1)[:, 1:]
    assert (before < np.arange(len(hmm.classes))[:, np.newaxis]).all()  # in order


@pytest.mark.parametrize("context", ["left", "both"])
def test_neighbours_that_make_no_difference_ask_for_no_copies(context: Context) -> None:
    words = ["c", "ab", "c"]
    alike = TranscriptCompiler(LEXICON, INVENTORY, 0.6, tying=random_tying(context, 1, 0)).compile(words)
    assert len(alike.classes) == len(TranscriptCompiler(LEXICON, INVENTORY, 0.6).compile(words).classes)
    # The first state of C is another one after A, with which the word before it may end.
    trees: list[Node] = [*range(9), Split("left", 1, 9, 10), 11, 12]
    of_c = StateTying(INVENTORY, context, QUESTIONS, trees)
    hmm = TranscriptCompiler(LEXICON, INVENTORY, 0.6, tying=of_c).compile(["c", "c"])
    assert len(hmm.classes) == 3 * (3 + 2 + 1 + 2)  # pauses; the first word; the second


def test_self_loops_are_those_of_the_classes() -> None:
    stay = np.linspace(0.1, 0.9, 12)
    hmm = TranscriptCompiler(LEXICON, INVENTORY, stay).compile(["ab", "c"])
    assert hmm.predecessors[:, 0].tolist() == list(range(len(hmm.classes)))
    assert np.exp(hmm.log_probs[:, 0]) == pytest.approx(stay[hmm.classes])


def test_predecessors_do_not_grow_with_both_words_pronunciations() -> None:
    many = Lexicon({"w": (("A",), ("B",), ("C",), ("A", "B"))})
    hmm = TranscriptCompiler(many, INVENTORY, 0.6).compile(["w"] * 5)
    assert hmm.predecessors.shape[1] == 1 + 4 + 1  # itself, the ends of the word before, the pause


@pytest.mark.parametrize("kind", [TranscriptCompiler, CtcCompiler])
def test_a_word_that_is_unknown_is_unk_or_leaves_no_path(
    kind: type[TranscriptCompiler] | type[CtcCompiler],
) -> None:
    options = (0.6,) if kind is TranscriptCompiler else ()
    known = kind(LEXICON.with_unknown(), StateInventory(("<unk>", "A", "B", "C")), *options)
    as_unk, named = known.compile(["ab", "x"]), known.compile(["ab", "<unk>"])
    for name, array in vars(named).items():
        np.testing.assert_array_equal(getattr(as_unk, name), array)
    without = kind(LEXICON, INVENTORY, *options).compile(["ab", "x"])
    assert without.min_frames == NO_PATH and paths_of(without) == {}


def test_padding_cannot_be_reached() -> None:
    hmms = [compiler().compile(words) for words in (["ab", "c", "c"], [], ["ab"])]
    padded = TranscriptHmms.of(hmms)
    assert len(padded) == 3 and padded.min_frames.tolist() == [12, 3, 6]
    for row, hmm in enumerate(hmms):
        columns = {field.name: getattr(padded, field.name)[row] for field in dataclasses.fields(padded)}
        assert paths_of(TranscriptHmm(**columns)) == paths_of(hmm)
        assert (padded.log_probs[row, len(hmm.classes) :] == LOG_ZERO).all()
