"""Frames of words in an alignment, and confidences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechdp.decode.word_times import WordSpan, confidences, ctc_word_spans, word_spans
from speechdp.labels.hmm import StateInventory, states_of
from speechdp.labels.lexicon import SILENCE, Lexicon
from speechdp.labels.transcript_hmm import BLANK

LEXICON = Lexicon(
    {"ab": (("A", "B"),), "a": (("A",), ("A", "B")), "b": (("B",),), "bb": (("B", "B"), ("B", "B", "A"))}
)
INVENTORY = StateInventory(("A", "B"))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_words_are_found_where_they_were_put(data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from(sorted(LEXICON.pronunciations)), max_size=6))
    classes: list[int] = []
    spans = []

    def say(phones: tuple[str, ...]) -> None:
        for state in states_of(phones, INVENTORY):
            classes.extend([state] * data.draw(st.integers(1, 3)))

    for word in words:
        if data.draw(st.booleans()):
            say((SILENCE,))
        first = len(classes)
        say(data.draw(st.sampled_from(LEXICON.pronunciations[word])))
        spans.append(WordSpan(word, first, len(classes)))
    if data.draw(st.booleans()):
        say((SILENCE,))
    found = word_spans(words, np.array(classes, np.int32), LEXICON, INVENTORY)
    assert [span.word for span in found] == words
    # "a" said as A B and then "b" may be "a" said as A and ... only what is said in all is certain.
    assert all(earlier.end <= later.first for earlier, later in itertools.pairwise(found))
    silence = set(INVENTORY.classes_of(SILENCE))
    covered = {frame for span in found for frame in range(span.first, span.end)}
    assert covered == {frame for frame, c in enumerate(classes) if c not in silence}
    if not {"a", "bb"} & set(words):  # with one pronunciation each there is one answer
        assert found == spans


def test_a_word_may_begin_and_end_with_silence() -> None:
    lexicon = Lexicon({"hm": ((SILENCE, "A", SILENCE),), "a": (("A",),)})
    inventory = StateInventory(("A",))
    classes = np.array([*range(3), *range(3, 6), *range(3), *range(3, 6)], np.int32)
    found = word_spans(["hm", "a"], classes, lexicon, inventory)
    assert found == [WordSpan("hm", 0, 9), WordSpan("a", 9, 12)]


def test_silence_before_a_word_that_begins_with_silence() -> None:
    lexicon, inventory = Lexicon({"a": ((SILENCE, "A"),), "b": (("A", SILENCE),)}), StateInventory(("A",))
    silence, phone = range(3), range(3, 6)
    found = word_spans(["a"], np.array([*silence, *silence, *phone], np.int32), lexicon, inventory)
    assert found in ([WordSpan("a", 0, 9)], [WordSpan("a", 3, 9)])
    classes = np.array([*phone, *silence, *silence, *phone], np.int32)
    assert [span.word for span in word_spans(["b", "a"], classes, lexicon, inventory)] == ["b", "a"]


@pytest.mark.timeout(60)  # looking at all of the 10 ** 16 ways would never end
@pytest.mark.parametrize(
    ("find", "said"), [(word_spans, range(3, 6)), (ctc_word_spans, (1, BLANK))], ids=["hmm", "ctc"]
)
def test_words_that_may_be_said_in_many_ways_are_placed_at_once(
    find: Callable[..., list[WordSpan]], said: Sequence[int]
) -> None:
    lexicon, inventory = Lexicon({"a": (("A",), ("A", "A"))}), StateInventory(("A",))
    found = find(["a"] * 60, np.array([*said] * 90, np.int32), lexicon, inventory)
    assert len(found) == 60 and (found[0].first, found[-1].end) in {(0, 270), (0, 179)}


def test_another_transcripts_alignment_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not one of this transcript"):
        word_spans(["b"], np.array([3, 4, 5], np.int32), LEXICON, INVENTORY)


def test_confidence_is_the_share_of_the_phone() -> None:
    classes = np.array([3, 4, 5, 6], np.int32)
    scores = np.full((4, 9), -50.0, np.float32)
    scores[:, 3:6] = np.log(0.2)  # phone A has 0.6 of each frame
    scores[:, 0] = np.log(0.4)
    spans = [WordSpan("a", 0, 3), WordSpan("b", 3, 4)]
    phones = np.arange(scores.shape[1]) // 3
    assert confidences(spans, classes, scores, phones) == pytest.approx([0.6, 0.0], abs=1e-6)
    # A constant of the frame, such as its probability, changes nothing.
    assert confidences(spans, classes, scores + 7, phones) == pytest.approx([0.6, 0.0], abs=1e-6)
