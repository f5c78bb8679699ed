from __future__ import annotations

import itertools

import numpy as np
import pytest

from speechdp.decode.graphs import graph as graph_module
from speechdp.decode.graphs.graph import (
    DecodingGraph,
    Grammar,
    LexiconTransducer,
    build_graph,
    choose_grammar,
    transcript,
)
from speechdp.errors import ConfigError
from speechdp.labels.hmm import FloatArray, StateInventory, states_of
from speechdp.labels.lexicon import Lexicon
from tests.helpers.viterbi import best_cost

LEXICON = Lexicon({"one": (("A",), ("B",)), "two": (("B", "C"),), "red": (("C", "C"),)})
INVENTORY = StateInventory(("A", "B", "C"))
STAY = np.linspace(0.2, 0.8, 12)


def transducer(silence: float = 0.25) -> LexiconTransducer:
    return LexiconTransducer(LEXICON, INVENTORY, STAY, silence)


def certain(classes: list[int]) -> FloatArray:
    """Log-likelihoods 0 for one class a frame, impossible for the others: only one path is left."""
    scores = np.full((len(classes), 12), -1e4, np.float32)
    scores[np.arange(len(classes)), classes] = 0
    return scores


def path_cost(classes: list[int]) -> float:
    """Return what one visit to each run of `classes` costs in transitions."""
    cost = 0.0
    for c, run in itertools.groupby(classes):
        cost -= (len(list(run)) - 1) * np.log(STAY[c]) + np.log(1 - STAY[c])
    return cost


@pytest.fixture(params=[0, 1_000_000])
def bound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How exact costs are: of a graph that is not minimised, and of one that is, whose costs are rounded."""
    monkeypatch.setattr(graph_module, "_MAX_DETERMINISED_STATES", request.param)
    return {"abs": 0.02} if request.param else {"rel": 1e-5}


def test_cost_of_a_path_is_that_of_its_transitions_silences_and_words(bound: dict[str, float]) -> None:
    graph = build_graph(transducer(), Grammar.WORD_LOOP, insertion_log_prob=-0.7)
    sil, a, b = [0, 0, 1, 2], [3, 4, 4, 4, 5], [6, 7, 8]
    words = 2 * (np.log(3) + 0.7)  # two words of three
    both_ends = certain([*sil, *a, *b, *sil])  # one, one: no pause between them
    expected = path_cost(sil) * 2 + path_cost(a) + path_cost(b) + words - 2 * np.log(0.25) - np.log(0.75)
    assert best_cost(graph.fst, both_ends) == pytest.approx(expected, **bound)
    between = certain([*a, *sil, *b])
    expected = path_cost(sil) + path_cost(a) + path_cost(b) + words - np.log(0.25) - 2 * np.log(0.75)
    assert best_cost(graph.fst, between) == pytest.approx(expected, **bound)


def test_no_silence_where_its_probability_is_zero(bound: dict[str, float]) -> None:
    graph = build_graph(transducer(0.0), Grammar.WORD)
    assert best_cost(graph.fst, certain([3, 4, 5])) == pytest.approx(
        path_cost([3, 4, 5]) + np.log(3), **bound
    )
    assert best_cost(graph.fst, certain([0, 1, 2, 3, 4, 5])) > 1e4


def accepted(graph: DecodingGraph) -> set[tuple[str, ...]]:
    """List the sequences of up to two words that a graph accepts."""
    sequences = [s for n in range(3) for s in itertools.product(LEXICON.words, repeat=n)]
    return {s for s in sequences if best_cost(graph.fst, certain(states(s))) < 1e4}


def states(words: tuple[str, ...]) -> list[int]:
    """Return one frame a state; silence if there is no word."""
    return states_of([p for w in words for p in LEXICON.pronunciations[w][0]] or ["SIL"], INVENTORY)


def test_each_grammar_accepts_its_word_sequences_only() -> None:
    hl = transducer()
    words = {("one",), ("two",), ("red",)}
    assert accepted(build_graph(hl, Grammar.WORD)) == words
    # Those that cannot be said, and recordings that nobody has transcribed, are no answers.
    transcripts = [["one", "two"], ["one"], ["one", "blue"], [], ["one", "red"], ["one"]]
    graph = build_graph(hl, Grammar.TRANSCRIPT_SET, transcripts)
    assert accepted(graph) == {("one", "two"), ("one",), ("one", "red")}
    loop = set(itertools.product(LEXICON.words, repeat=2)) | words | {()}
    assert accepted(build_graph(hl, Grammar.WORD_LOOP)) == loop
    digits = accepted(build_graph(hl, Grammar.DIGIT_LOOP))
    assert digits == {sequence for sequence in loop if "red" not in sequence}


def test_graph_is_trimmed() -> None:
    # boundary, hub and silence twice over, and the variants A and B of "one"
    graph = transducer().compose(transcript([1]))
    assert graph.fst.num_states == 2 * (2 + 3) + 2 * 3
    assert graph.fst.is_ilabel_sorted


def test_fewest_frames_of_a_transcript() -> None:
    assert transducer().min_frames(["one", "two"]) == 9


def test_grammar_is_chosen_by_the_words() -> None:
    assert choose_grammar([["one", "TWO"], []]) is Grammar.DIGIT_LOOP
    assert choose_grammar([["one"], ["red"]]) is Grammar.WORD_LOOP
    assert choose_grammar([[]]) is Grammar.WORD_LOOP


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="12"):
        LexiconTransducer(LEXICON, INVENTORY, STAY[:-1])
    red = LexiconTransducer(Lexicon({"red": (("A",),)}), INVENTORY, STAY)
    with pytest.raises(ConfigError, match="digit-loop"):
        build_graph(red, Grammar.DIGIT_LOOP)
    with pytest.raises(ConfigError, match="transcript-set needs a transcript whose words are all"):
        build_graph(red, Grammar.TRANSCRIPT_SET, [["blue"], []])
