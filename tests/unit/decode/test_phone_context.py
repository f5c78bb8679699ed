"""Graphs of states in context: exactly the paths that explicit sequences of phones have, at their cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from speechdp.decode.align import Aligner
from speechdp.decode.graphs import graph as graph_module
from speechdp.decode.graphs.graph import (
    CtcTransducer,
    DecodingGraph,
    Grammar,
    LexiconTransducer,
    build_graph,
    transcript,
    word_loop,
)
from speechdp.decode.graphs.ngram_grammar import ngram_acceptor
from speechdp.decode.search import Searcher, SearchOptions
from speechdp.errors import ConfigError
from speechdp.labels.hmm import FloatArray, StateInventory, states_of
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.state_tying import Context, StateTying
from speechdp.labels.transcript_hmm import num_ctc_classes
from speechdp.language.kneser_ney import estimate
from speechdp.language.ngram import END, START, NgramModel
from tests.helpers.tyings import random_tying, separate_tying
from tests.helpers.viterbi import best_cost

#: Words of one phone (both neighbours are other words'), homophones, beginnings, variants, silence within.
LEXICON = Lexicon(
    {
        "a": (("A",),),
        "to": (("A", "B"),),
        "two": (("A", "B"), ("A",)),
        "tool": (("A", "B", "C"),),
        "hm": (("SIL", "C"),),
        "see": (("C", "C"),),
    }
)
INVENTORY = StateInventory(LEXICON.phones)
PAUSE = 0.3
EXACT = SearchOptions(beam=1e4)
CONTEXTS: list[Context] = ["left", "both"]


def transducer(tying: StateTying) -> LexiconTransducer:
    stay = np.linspace(0.2, 0.8, tying.num_classes)
    return LexiconTransducer(LEXICON, INVENTORY, stay, PAUSE, tying)


def spoken(words: tuple[str, ...]) -> Iterator[tuple[list[str], int]]:
    """Yield every sequence of phones that may stand for words, and how many pauses are in it."""
    for variants in itertools.product(*(LEXICON.pronunciations[word] for word in words)):
        for pauses in itertools.product((False, True), repeat=len(words) + 1):
            phones = ["SIL"] * pauses[0]
            for variant, pause in zip(variants, pauses[1:], strict=True):
                phones += [*variant, *["SIL"] * pause]
            yield phones, sum(pauses)


def certain(classes: list[int], num_classes: int) -> FloatArray:
    scores = np.full((len(classes), num_classes), -1e4, np.float32)
    scores[np.arange(len(classes)), classes] = 0
    return scores


def scores(tying: StateTying, num_frames: int, seed: int) -> FloatArray:
    return np.random.default_rng(seed).normal(0, 4, (num_frames, tying.num_classes)).astype(np.float32)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("words", [("a",), ("two", "a"), ("see", "hm", "to"), ("a", "a", "tool")])
def test_paths_of_a_transcript_are_those_of_its_phones_with_their_neighbours(
    context: Context, words: tuple[str, ...]
) -> None:
    tying = separate_tying(INVENTORY, context)  # so that a wrong neighbour is a wrong class
    hl = transducer(tying)
    stay = np.linspace(0.2, 0.8, tying.num_classes)
    graph = hl.compose(transcript([hl.word_ids[word] for word in words]))
    for phones, pauses in spoken(words):
        classes = tying.tied(np.repeat(states_of(phones, INVENTORY), 2).astype(np.int32)).tolist()
        expected = -np.log(stay[classes[::2]]).sum() - np.log1p(-stay[classes[::2]]).sum()
        expected -= pauses * np.log(PAUSE) + (len(words) + 1 - pauses) * np.log1p(-PAUSE)
        assert best_cost(graph.fst, certain(classes, tying.num_classes)) == pytest.approx(expected, rel=1e-4)
    for frames in (scores(tying, 40, seed) for seed in range(5)):
        path = Searcher(graph, EXACT).search(frames)
        assert path is not None and path.words == words
        # No others: the classes found are those of the phones found.
        states = tying.states[path.classes].astype(np.int32)
        np.testing.assert_array_equal(tying.tied(states), path.classes)
        visited = [s for s, _ in itertools.groupby(states.tolist())]
        assert visited in [states_of(phones, INVENTORY) for phones, _ in spoken(words)]


@pytest.mark.parametrize("max_states", [10, 1_000_000])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("grammar", [Grammar.WORD_LOOP, Grammar.WORD, Grammar.TRANSCRIPT_SET, Grammar.NGRAM])
def test_graphs_whose_words_share_have_the_same_best_paths(
    context: Context, grammar: Grammar, max_states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_module, "_MAX_DETERMINISED_STATES", max_states)
    tying = random_tying(INVENTORY, context, seed=3)
    hl, simple = transducer(tying), transducer(tying)
    texts = [text.split() for text in ("two to see", "to see hm a", "a a two tool", "see", "to tool hm see")]
    model = estimate(texts, 2, LEXICON.words)
    graph = build_graph(hl, grammar, texts, -0.7, model, 1.3)
    simple.compose_shared = simple.compose  # type: ignore[method-assign]
    expected_graph = build_graph(simple, grammar, texts, -0.7, model, 1.3)
    assert graph.is_determinised == (max_states > 10) and not expected_graph.is_determinised
    for seed in range(8):
        frames = scores(tying, 20 + seed, seed)
        found, expected = (Searcher(each, EXACT).search(frames) for each in (graph, expected_graph))
        assert found is not None and expected is not None
        assert found.cost == pytest.approx(expected.cost, abs=0.1)  # minimisation rounds costs
        np.testing.assert_array_equal(found.classes, expected.classes)
        np.testing.assert_array_equal(tying.tied(tying.states[found.classes]), found.classes)


def smallest(graph: DecodingGraph) -> tuple[int, int]:
    return graph.num_states, graph.num_arcs


@pytest.mark.parametrize("context", CONTEXTS)
def test_neighbours_that_make_no_difference_make_no_states(context: Context) -> None:
    plain = StateTying(INVENTORY, context, [], list(range(INVENTORY.num_classes)))
    stay = np.linspace(0.2, 0.8, INVENTORY.num_classes)
    without = LexiconTransducer(LEXICON, INVENTORY, stay, PAUSE)
    texts = [
        ["two", "to", "see"],
        ["a", "tool", "to", "hm"],
    ]  # "two" sounds like "to": less probable
    model = estimate(texts, 2, LEXICON.words)
    graph = build_graph(transducer(plain), Grammar.NGRAM, language_model=model)
    expected = build_graph(without, Grammar.NGRAM, language_model=model)
    assert smallest(graph)[0] <= 2 * smallest(expected)[0]
    for seed in range(5):
        frames = scores(plain, 25, seed)
        found, other = (Searcher(each, EXACT).search(frames) for each in (graph, expected))
        assert found is not None and other is not None
        assert found.words == other.words and found.cost == pytest.approx(other.cost, abs=0.1)


@pytest.mark.parametrize("context", CONTEXTS)
def test_alignment(context: Context) -> None:
    tying = separate_tying(INVENTORY, context)
    states = np.repeat(states_of(["SIL", "A", "B", "A", "SIL", "C", "C"], INVENTORY), 3).astype(np.int32)
    classes = tying.tied(states)
    found = Aligner(transducer(tying)).align(["to", "a", "see"], certain(classes.tolist(), tying.num_classes))
    np.testing.assert_array_equal(found, classes)
    aligner = Aligner(transducer(tying))
    assert aligner.align(["see"], scores(tying, 5, 1)) is None and aligner.num_too_short == 1


def test_a_model_of_other_classes_is_refused() -> None:
    tying = separate_tying(INVENTORY, "left")
    with pytest.raises(ConfigError, match="48"):
        LexiconTransducer(LEXICON, INVENTORY, np.full(12, 0.5), tying=tying)


def test_backing_off_before_and_behind_the_first_phone_is_told_apart() -> None:
    """ "a bc" backs off behind "a", whose phone still waits then, and "abc" before it."""
    lexicon = Lexicon({"a": (("A",),), "bc": (("B", "C"),), "abc": (("A", "B", "C"),)})
    inventory = StateInventory(lexicon.phones)
    tying = random_tying(inventory, "both", seed=1)
    hl = LexiconTransducer(lexicon, inventory, np.full(tying.num_classes, 0.5), PAUSE, tying)
    model = NgramModel(
        {("a",): -1.0, ("bc",): -1.0, ("abc",): -2.0, (END,): -1.0, (START, "a"): -0.5}, {("a",): -0.25}
    )
    graph = build_graph(hl, Grammar.NGRAM, language_model=model)
    simple = hl.compose(ngram_acceptor(model, hl.word_ids))
    assert graph.is_determinised
    for seed in range(5):
        frames = scores(tying, 15, seed)
        assert best_cost(graph.fst, frames) == pytest.approx(best_cost(simple.fst, frames), abs=0.05)


#: Words that sound like others with pauses: (words, texts of a language model).
LIKE_PAUSES = [
    ({"c": (("C",),), "ca": (("C", "A"),), "hm": (("SIL", "C"),)}, ["c ca hm", "hm c"]),
    ({"w": (("A", "B"),), "v": (("A", "SIL", "B"),)}, ["w v", "v w w"]),
    ({"a": (("A", "SIL"),), "b": (("B",),), "w": (("A", "B"),)}, ["a b w", "w a b"]),
    ({"um": (("SIL",),), "uhm": (("SIL", "SIL", "C"),), "hm": (("SIL", "C"),)}, ["um hm uhm", "hm uhm"]),
]


@pytest.mark.parametrize("kind", ["states", "left", "both", "ctc"])
@pytest.mark.parametrize("grammar", [Grammar.WORD_LOOP, Grammar.NGRAM])
@pytest.mark.parametrize(("words", "texts"), LIKE_PAUSES)
def test_words_that_sound_like_others_with_pauses_are_told_apart(
    kind: str, grammar: Grammar, words: dict[str, tuple[tuple[str, ...], ...]], texts: list[str]
) -> None:
    lexicon = Lexicon(words)
    inventory = StateInventory(lexicon.phones)
    if kind == "ctc":
        hl: LexiconTransducer = CtcTransducer(lexicon, inventory)
        num_classes = num_ctc_classes(inventory.num_classes)
    else:
        tying = None if kind == "states" else random_tying(inventory, kind, seed=2)  # type: ignore[arg-type]
        num_classes = inventory.num_classes if tying is None else tying.num_classes
        hl = LexiconTransducer(lexicon, inventory, np.full(num_classes, 0.5), PAUSE, tying)
    model = estimate([text.split() for text in texts], 2, lexicon.words)
    graph = build_graph(hl, grammar, language_model=model)
    assert graph.is_determinised
    acceptor = ngram_acceptor(model, hl.word_ids) if grammar is Grammar.NGRAM else None
    simple = hl.compose(word_loop(list(hl.word_ids.values())) if acceptor is None else acceptor)
    for seed in range(4):
        frames = np.random.default_rng(seed).normal(0, 4, (16, num_classes)).astype(np.float32)
        assert best_cost(graph.fst, frames) == pytest.approx(best_cost(simple.fst, frames), abs=0.05)
