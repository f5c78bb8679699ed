"""Decoding graphs of CTC's classes: the paths that training sums over, and words from a trained model."""

from __future__ import annotations

import numpy as np
import pytest

from speechdp.decode.align import Aligner
from speechdp.decode.graphs import graph as graph_module
from speechdp.decode.graphs.graph import CtcTransducer, Grammar, build_graph, transcript
from speechdp.decode.graphs.ngram_grammar import ngram_acceptor
from speechdp.decode.search import Searcher, SearchOptions
from speechdp.decode.word_times import WordSpan, ctc_word_spans
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.transcript_hmm import CtcCompiler, TranscriptHmm, num_ctc_classes
from speechdp.language.kneser_ney import estimate
from tests.helpers.viterbi import best_cost

#: The same phone twice, homophones, a beginning of another word, variants.
LEXICON = Lexicon(
    {
        "to": (("A", "B"),),
        "two": (("A", "B"), ("A",)),
        "tool": (("A", "B", "C"),),
        "been": (("B", "B", "C"),),
        "see": (("C", "A"), ("D",)),
    }
)
INVENTORY = StateInventory(LEXICON.phones)
NUM_CLASSES = num_ctc_classes(INVENTORY.num_classes)
EXACT = SearchOptions(beam=1e4)


def scores(num_frames: int, seed: int) -> FloatArray:
    logits = np.random.default_rng(seed).normal(0, 3, (num_frames, NUM_CLASSES))
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def best_of(hmm: TranscriptHmm, log_probs: FloatArray) -> float:
    """Return the log-probability of the best path, over all states at every frame."""
    best = hmm.initial + log_probs[0, hmm.classes]
    for frame in log_probs[1:]:
        best = (best[hmm.predecessors] + hmm.log_probs).max(axis=1) + frame[hmm.classes]
    return float((best + hmm.final).max())


@pytest.mark.parametrize("words", ["to", "been", "two", "to see", "see been", "tool two see"])
@pytest.mark.parametrize("num_frames", [9, 20])
def test_the_best_path_of_a_transcript_is_the_best_that_training_has(words: str, num_frames: int) -> None:
    hl = CtcTransducer(LEXICON, INVENTORY)
    graph = hl.compose(transcript([hl.word_ids[word] for word in words.split()]))
    hmm = CtcCompiler(LEXICON, INVENTORY).compile(words.split())
    for seed in range(5):
        log_probs = scores(num_frames, seed)
        path = Searcher(graph, EXACT).search(log_probs)
        assert path is not None and path.words == tuple(words.split())
        assert -path.cost == pytest.approx(best_of(hmm, log_probs), abs=1e-3)


def test_words_may_share_frames_of_the_phone_that_ends_one_and_begins_the_next() -> None:
    hl = CtcTransducer(LEXICON, INVENTORY)
    graph = hl.compose(transcript([hl.word_ids["to"], hl.word_ids["been"]]))
    hmm = CtcCompiler(LEXICON, INVENTORY).compile(["to", "been"])
    better = 0
    for seed in range(20):
        log_probs = scores(9, seed)
        path = Searcher(graph, EXACT).search(log_probs)
        assert path is not None
        assert -path.cost >= best_of(hmm, log_probs) - 1e-3  # with a blank between, as training asks for
        better += -path.cost > best_of(hmm, log_probs) + 1e-3
    assert better > 0


def test_a_phone_twice_needs_a_blank_between_its_two() -> None:
    hl = CtcTransducer(LEXICON, INVENTORY)
    graph = hl.compose(transcript([hl.word_ids["been"]]))
    log_probs = np.full((3, NUM_CLASSES), -50.0, np.float32)
    of = {phone: INVENTORY.classes_of(phone)[0] // 3 for phone in "BC"}
    for frame, phone in enumerate("BBC"):
        log_probs[frame, of[phone]] = 0.0
    path = Searcher(graph, EXACT).search(log_probs)
    assert path is None  # three frames do not hold B, blank, B, C
    longer = np.insert(log_probs, 1, np.full(NUM_CLASSES, -50.0), axis=0)
    longer[1, 0] = 0.0
    path = Searcher(graph, EXACT).search(longer)
    assert path is not None and path.cost == pytest.approx(0.0, abs=1e-4)
    assert hl.min_frames(["been"]) == 3


@pytest.mark.parametrize("max_states", [10, 1_000_000])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_graphs_whose_words_share_have_the_same_best_paths(
    order: int, max_states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_module, "_MAX_DETERMINISED_STATES", max_states)
    texts = [text.split() for text in ("two to see", "to see tool", "two two tool been", "see", "been to")]
    model = estimate(texts, order, LEXICON.words)
    hl = CtcTransducer(LEXICON, INVENTORY)
    graph = build_graph(hl, Grammar.NGRAM, language_model=model, lm_scale=1.3)
    assert graph.is_determinised == (max_states > 10)
    simple = hl.compose(ngram_acceptor(model, hl.word_ids, scale=1.3))
    for seed in range(10):
        log_probs = scores(15, seed)
        assert best_cost(graph.fst, log_probs) == pytest.approx(best_cost(simple.fst, log_probs), abs=0.01)


def spans_of(words: str, classes: str) -> list[WordSpan]:
    """Find words in an alignment that is written by the names of phones and `-`."""
    numbers = [0 if name == "-" else INVENTORY.classes_of(name)[0] // 3 for name in classes]
    return ctc_word_spans(words.split(), np.array(numbers, np.int32), LEXICON, INVENTORY)


def test_a_word_lasts_from_its_first_phone_to_its_last() -> None:
    assert spans_of("to see", "-AA-B--CCA-") == [WordSpan("to", 1, 5), WordSpan("see", 7, 10)]
    assert spans_of("been", "BB-BC") == [WordSpan("been", 0, 5)]
    assert spans_of("two two", "A-AB") == [WordSpan("two", 0, 1), WordSpan("two", 2, 4)]
    assert spans_of("", "---") == []


def test_frames_of_a_phone_that_two_words_share_are_divided() -> None:
    assert spans_of("to been", "ABBBB-BC") == [WordSpan("to", 0, 3), WordSpan("been", 3, 8)]
    assert spans_of("see two two", "CAAA") == [
        WordSpan("see", 0, 2),
        WordSpan("two", 2, 3),
        WordSpan("two", 3, 4),
    ]
    with pytest.raises(AssertionError, match="not one of this transcript"):
        spans_of("to", "A-C")


def test_every_alignment_has_the_words_that_it_was_made_for() -> None:
    aligner = Aligner(CtcTransducer(LEXICON, INVENTORY))
    rng = np.random.default_rng(3)
    for seed in range(60):
        words = list(rng.choice(LEXICON.words, 4))
        classes = aligner.align(words, scores(16, seed))
        assert classes is not None
        spans = ctc_word_spans(words, classes, LEXICON, INVENTORY)
        assert [span.word for span in spans] == words
        edges = [edge for span in spans for edge in (span.first, span.end)]
        assert edges == sorted(edges) and edges[0] >= 0 and edges[-1] <= 16
