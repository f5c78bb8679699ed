from __future__ import annotations

import numpy as np
import pytest

from speechdp.decode.graphs.graph import Grammar, LexiconTransducer, build_graph
from speechdp.decode.search import Searcher, SearchOptions
from speechdp.errors import RunError
from speechdp.labels.hmm import FloatArray, StateInventory, flat_alignment
from speechdp.labels.lexicon import digit_words, lexicon_for
from tests.helpers.viterbi import best_cost

LEXICON = lexicon_for(digit_words()[:10])
INVENTORY = StateInventory(LEXICON.phones)
STAY = np.random.default_rng(1).uniform(0.1, 0.9, INVENTORY.num_classes)
TRANSDUCER = LexiconTransducer(LEXICON, INVENTORY, STAY, 0.3)
TRANSCRIPTS = [["one", "two"], ["one", "three", "zero"], ["nine"]]


def random_scores(seed: int, num_frames: int) -> FloatArray:
    posteriors = np.random.default_rng(seed).dirichlet(np.full(INVENTORY.num_classes, 0.3), num_frames)
    return np.log(posteriors + 1e-5).astype(np.float32)


def scores_of(words: list[str], num_frames: int) -> FloatArray:
    scores = np.full((num_frames, INVENTORY.num_classes), -6.0, np.float32)
    classes = flat_alignment(words, num_frames, LEXICON, INVENTORY, 4, 4)
    scores[np.arange(num_frames), classes] = -0.1
    return scores


@pytest.mark.parametrize("grammar", [Grammar.WORD_LOOP, Grammar.WORD, Grammar.TRANSCRIPT_SET])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_best_cost_is_that_of_a_plain_viterbi(grammar: Grammar, scale: float) -> None:
    graph = build_graph(TRANSDUCER, grammar, TRANSCRIPTS, insertion_log_prob=-1.3)
    searcher = Searcher(graph, SearchOptions(beam=1e4, acoustic_scale=scale))
    for seed, num_frames in enumerate((30, 45)):
        scores = random_scores(seed, num_frames)
        path = searcher.search(scores)
        assert path is not None
        assert path.cost == pytest.approx(best_cost(graph.fst, scale * scores), abs=2e-3)
        # and the path it names has that acoustic part: the rest is the graph's, which is not negative
        acoustic = -scale * float(scores[np.arange(num_frames), path.classes].sum())
        assert path.classes.dtype == np.int32 and acoustic <= path.cost


@pytest.mark.parametrize("words", [["seven"], ["one", "two", "three"], []])
def test_words_and_classes_are_found(words: list[str]) -> None:
    path = Searcher(build_graph(TRANSDUCER, Grammar.WORD_LOOP)).search(scores_of(words, 60))
    assert path is not None
    assert list(path.words) == words
    expected = flat_alignment(words, 60, LEXICON, INVENTORY, 4, 4)
    assert path.classes.tolist() == expected.tolist()


def test_insertion_log_prob_moves_the_number_of_words() -> None:
    scores = random_scores(5, 80)
    lengths = []
    for insertion in (-30.0, 0.0, 30.0):
        path = Searcher(build_graph(TRANSDUCER, Grammar.WORD_LOOP, insertion_log_prob=insertion)).search(
            scores
        )
        assert path is not None
        lengths.append(len(path.words))
    assert lengths[0] < lengths[1] < lengths[2]


def test_too_few_frames_give_none_and_are_counted() -> None:
    searcher = Searcher(build_graph(TRANSDUCER, Grammar.WORD))
    assert searcher.search(random_scores(0, 5)) is None  # "two" and "eight" need six
    assert searcher.search(random_scores(0, 0)) is None
    assert searcher.search(random_scores(0, 6)) is not None
    assert (searcher.num_retried, searcher.num_failed) == (1, 2)


def test_narrow_beam_is_doubled_and_counted() -> None:
    graph = build_graph(TRANSDUCER, Grammar.TRANSCRIPT_SET, [["seven"]])
    scores = scores_of(["one"], 40)  # nothing fits, so a narrow beam loses the way to the end
    narrow = Searcher(graph, SearchOptions(beam=0.02, max_active=2, max_beam_doublings=0))
    assert narrow.search(scores) is None
    assert (narrow.num_retried, narrow.num_failed) == (0, 1)
    widened = Searcher(graph, SearchOptions(beam=0.02, max_active=2, max_beam_doublings=20))
    assert widened.search(scores) is not None
    assert (widened.num_retried, widened.num_failed) == (1, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_are_refused(value: float) -> None:
    scores = random_scores(0, 20)
    scores[3, 4] = value
    with pytest.raises(RunError, match=r"NaN or infinite; train it again with a smaller learning rate$"):
        Searcher(build_graph(TRANSDUCER, Grammar.WORD)).search(scores)
