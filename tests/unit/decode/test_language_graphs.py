"""Graphs of language models: the same best paths as without determinisation, with fewer states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kaldifst
import numpy as np
import pytest

from speechdp.decode.graphs import graph as graph_module
from speechdp.decode.graphs.graph import DecodingGraph, Grammar, LexiconTransducer, build_graph
from speechdp.decode.graphs.ngram_grammar import ngram_acceptor
from speechdp.decode.language_model import (
    GrammarFst,
    read_language_model,
    respelled_model,
    save_language_model,
)
from speechdp.decode.search import Searcher, SearchOptions
from speechdp.errors import ConfigError
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.language.kneser_ney import estimate
from speechdp.language.ngram import END, START, NgramModel
from tests.helpers.grammars import language_model_in, write_grammar
from tests.helpers.viterbi import best_cost

#: Homophones, a beginning of another word, variants, and silence within a word.
LEXICON = Lexicon(
    {
        "to": (("A", "B"),),
        "two": (("A", "B"), ("A",)),
        "tool": (("A", "B", "C"),),
        "hm": (("SIL", "C"),),
        "see": (("C",), ("SIL",)),
        "unheard": (("B",),),
    }
)
TEXTS = [text.split() for text in ("two to see", "to see hm", "two two tool", "see", "to tool hm see two")]
INVENTORY = StateInventory(LEXICON.phones)
STAY = np.linspace(0.2, 0.8, INVENTORY.num_classes)
EXACT = SearchOptions(beam=1e4)


def transducer() -> LexiconTransducer:
    return LexiconTransducer(LEXICON, INVENTORY, STAY, 0.3)


def scores(num_frames: int, seed: int) -> FloatArray:
    shape = num_frames, INVENTORY.num_classes
    return np.random.default_rng(seed).normal(0, 4, shape).astype(np.float32)


def simple_graph(model: NgramModel, scale: float = 1.0, insertion: float = 0.0) -> DecodingGraph:
    hl = transducer()
    grammar = ngram_acceptor(model, hl.word_ids, scale=scale)
    for state in range(grammar.num_states):
        arcs = [(a.ilabel, a.weight.value, a.nextstate) for a in kaldifst.ArcIterator(grammar, state)]
        grammar.delete_arcs(state, len(arcs))
        for word, cost, target in arcs:
            grammar.add_arc(state, kaldifst.StdArc(word, word, cost - (insertion if word else 0.0), target))
    return hl.compose(grammar)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_determinised_graph_has_the_same_best_paths(order: int) -> None:
    model = estimate(TEXTS, order, LEXICON.words)
    weights = {"insertion_log_prob": -0.7, "lm_scale": 1.3}
    graph = build_graph(transducer(), Grammar.NGRAM, language_model=model, **weights)  # type: ignore[arg-type]
    simple = simple_graph(model, 1.3, -0.7)
    assert graph.is_determinised and not simple.is_determinised
    for seed in range(12):
        frames = scores(12 + seed, seed)
        found, expected = (Searcher(each, EXACT).search(frames) for each in (graph, simple))
        assert found is not None and expected is not None
        assert found.cost == pytest.approx(expected.cost, abs=0.1)  # minimisation rounds costs to 1/1024
        assert best_cost(graph.fst, frames) == pytest.approx(best_cost(simple.fst, frames), abs=0.1)
        np.testing.assert_array_equal(found.classes, expected.classes)


def test_insertion_scores_can_be_changed_as_often_as_one_likes() -> None:
    """Each time the graph is, to the bit, the one that is built with that score."""
    model = estimate(TEXTS, 3, LEXICON.words)
    graph = build_graph(transducer(), Grammar.NGRAM, language_model=model)
    for insertion in (0.3, -4.1, 0.0, 2.7, 0.3):
        graph.set_insertion(insertion)
        fresh = build_graph(transducer(), Grammar.NGRAM, language_model=model, insertion_log_prob=insertion)
        assert str(graph.fst) == str(fresh.fst)


def test_words_share_what_they_begin_with() -> None:
    words = {
        f"word{n}": (("A", "B", "C", "A", "B", *("ABC"[n // 3**k % 3] for k in range(3))),) for n in range(27)
    }
    lexicon = Lexicon(words)
    hl = LexiconTransducer(lexicon, StateInventory(lexicon.phones), np.full(12, 0.5))
    model = estimate([[word] for word in words], 1)
    graph = build_graph(hl, Grammar.NGRAM, language_model=model)
    assert 4 * graph.num_states < hl.compose(ngram_acceptor(model, hl.word_ids)).num_states


def test_a_cost_of_a_path_is_that_of_its_ngrams() -> None:
    lexicon = Lexicon({"a": (("A",),), "b": (("B",),)})
    inventory = StateInventory(lexicon.phones)
    hl = LexiconTransducer(lexicon, inventory, np.full(9, 0.5), 0.0)
    model = estimate([["a", "b"], ["a"], ["b", "b", "a"]], 3)
    graph = build_graph(hl, Grammar.NGRAM, language_model=model, lm_scale=2.0, insertion_log_prob=-0.25)
    classes = [*inventory.classes_of("A"), *inventory.classes_of("B")]
    frames = np.full((6, 9), -1e4, np.float32)
    frames[np.arange(6), classes] = 0
    words = [("a", (START,)), ("b", (START, "a")), (END, ("a", "b"))]
    expected = -2.0 * np.log(10) * sum(model.log10_prob(*each) for each in words) + 2 * 0.25 + 6 * np.log(2)
    assert best_cost(graph.fst, frames) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("grammar", [Grammar.WORD, Grammar.NGRAM])
def test_a_rare_pronunciation_costs_its_log_probability(grammar: Grammar) -> None:
    variants = {"either": (("A",), ("B",)), "or": (("C",),)}
    inventory = StateInventory(("A", "B", "C"))
    model = estimate([["either"], ["or"]], 1)
    costs = {}
    for name, probabilities in (("none", {}), ("some", {"either": (1.0, 0.25), "or": (0.5,)})):
        hl = LexiconTransducer(Lexicon(variants, probabilities), inventory, np.full(12, 0.5), 0.2)
        graph = build_graph(hl, grammar, language_model=model)
        for phone in "ABC":
            frames = np.full((6, 12), -50.0, np.float32)
            frames[np.arange(6), np.repeat(inventory.classes_of(phone), 2)] = 0.0
            costs[name, phone] = best_cost(graph.fst, frames)
    for phone, probability in (("A", 1.0), ("B", 0.25), ("C", 0.5)):
        expected = costs["none", phone] - np.log(probability)
        assert costs["some", phone] == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_graph_that_would_be_too_large_is_not_determinised(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_module, "_MAX_DETERMINISED_STATES", 10)
    model = estimate(TEXTS, order, LEXICON.words)
    weights = {"insertion_log_prob": -0.7, "lm_scale": 1.3}
    graph = build_graph(transducer(), Grammar.NGRAM, language_model=model, **weights)  # type: ignore[arg-type]
    simple = simple_graph(model, 1.3, -0.7)
    assert not graph.is_determinised
    for seed in range(12):
        frames = scores(12 + seed, seed)
        found, expected = (Searcher(each, EXACT).search(frames) for each in (graph, simple))
        assert found is not None and expected is not None
        assert found.cost == pytest.approx(expected.cost, abs=1e-4)
        np.testing.assert_array_equal(found.classes, expected.classes)


def test_words_that_one_of_them_lacks_are_left_out() -> None:
    model = estimate([["to", "elsewhere", "see"], ["to", "see"]], 2)
    graph = build_graph(transducer(), Grammar.NGRAM, language_model=model)
    searcher = Searcher(graph, EXACT)
    heard = {word for seed in range(20) for word in searcher.search(scores(20, seed)).words}  # type: ignore[union-attr]
    assert heard == {"to", "see"}


@pytest.mark.parametrize("sentence", ["a", "c", "a c", "c a a"])
def test_backing_off_costs_as_much_after_words_before_unknown_ones(sentence: str) -> None:
    """Of what may follow "a", and begin a sentence, only words without an id are listed."""
    unigrams = {("a",): -0.5, ("c",): -0.6, ("x",): -0.7, (END,): -0.8}
    backoffs = {("a",): -1.5, (START,): -0.25}
    model = NgramModel({**unigrams, ("a", "x"): -0.01, (START, "x"): -0.3}, backoffs)
    words = sentence.split()
    ids = {"a": 1, "c": 2}
    chain = kaldifst.StdVectorFst()
    states = [chain.add_state() for _ in range(len(words) + 1)]
    chain.start = states[0]
    chain.set_final(states[-1], 0.0)
    for state, word in zip(states, words, strict=False):
        chain.add_arc(state, kaldifst.StdArc(ids[word], ids[word], 0.0, state + 1))
    found = kaldifst.compose(chain, ngram_acceptor(model, ids))
    cost = kaldifst.get_linear_symbol_sequence(kaldifst.shortest_path(found))[-1].value
    assert cost == pytest.approx(-np.log(10) * model.log10_sentence(words), rel=1e-5)


def test_models_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="prepare the data with --lm"):
        build_graph(transducer(), Grammar.NGRAM)
    with pytest.raises(ConfigError, match="no word of the language model is in the lexicon"):
        build_graph(transducer(), Grammar.NGRAM, language_model=estimate([["other"]], 1))
    model = NgramModel({("to",): -1.0}, {})
    with pytest.raises(ConfigError, match="has no </s>"):
        build_graph(transducer(), Grammar.NGRAM, language_model=model)


@pytest.mark.parametrize(("max_states", "bound"), [(0, 1e-3), (1_000_000, 0.02)])  # minimisation rounds
def test_grammars_of_kaldi_are_used_with_our_words(
    tmp_path: Path, max_states: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_module, "_MAX_DETERMINISED_STATES", max_states)
    grammar = read_language_model(write_grammar(tmp_path))
    assert isinstance(grammar, GrammarFst) and grammar.words == {"to", "see", "other"}
    graph = build_graph(
        transducer(), Grammar.NGRAM, language_model=grammar, lm_scale=2, insertion_log_prob=-1
    )
    path = Searcher(graph, EXACT).search(scores(20, 0))
    assert path is not None and path.words == ("to", "see")
    free = transducer().compose(grammar.acceptor(transducer().word_ids, scale=0))
    found = Searcher(free, EXACT).search(scores(20, 0))
    assert found is not None and path.cost - found.cost == pytest.approx(2 * 1.75 + 2, abs=bound)
    (tmp_path / "copy").mkdir()
    save_language_model(grammar.respelled(lambda word: None if word == "other" else word), tmp_path / "copy")
    again = language_model_in(tmp_path / "copy")
    assert isinstance(again, GrammarFst) and again.words == {"to", "see"}


def test_a_grammar_that_backs_off_to_several_states_is_determinised() -> None:
    """From its first state it goes on to two others unheard, where "to" and "two" sound alike."""
    hl = transducer()
    words = [hl.word_ids[word] for word in ("to", "two", "see")]

    def grammar() -> Any:
        text = f"0 1 0 0\n0 2 0 0\n1 3 {words[0]} {words[0]} 0.5\n2 3 {words[1]} {words[1]}\n"
        return kaldifst.compile(f"{text}3 4 {words[2]} {words[2]}\n4", acceptor=False)

    graph = hl.compose_shared(grammar())
    assert graph.is_determinised
    for seed in range(8):
        frames = scores(14, seed)
        found, expected = (Searcher(each, EXACT).search(frames) for each in (graph, hl.compose(grammar())))
        assert found is not None and expected is not None
        assert found.cost == pytest.approx(expected.cost, abs=0.1) and found.words == expected.words


def test_ends_of_sentences_in_a_grammar_are_not_spoken(tmp_path: Path) -> None:
    """arpa2fst without --disambig-symbol writes them as words; with them no sentence was recognised."""
    arcs = ("0 1 4 4 0.1", "1 2 1 1 1.0", "2 3 2 2 0.5", "3 4 5 5 0.25", "4")
    kaldifst.compile("\n".join(arcs), acceptor=False).write(str(tmp_path / "G.fst"))
    (tmp_path / "words.txt").write_text("<eps> 0\nto 1\nsee 2\n<s> 4\n</s> 5\n")
    grammar = read_language_model(tmp_path / "G.fst")
    assert isinstance(grammar, GrammarFst) and grammar.words == {"to", "see"}
    found = respelled_model(grammar, transducer().lexicon)
    assert found is not None and found.left_out == 0
    path = Searcher(build_graph(transducer(), Grammar.NGRAM, language_model=found.model), EXACT).search(
        scores(20, 0)
    )
    assert path is not None and path.words == ("to", "see")


def test_what_costs_infinitely_much_in_a_grammar_is_not_in_it(tmp_path: Path) -> None:
    """Graphs with it warned of invalid values, and nobody was told of words that are never recognised."""
    arcs = ("0 1 1 1 0.5", "0 1 2 2 Infinity", "0 1 5 5 0.5", "1")
    (tmp_path / "words.txt").write_text("<eps> 0\nto 1\nsee 2\ntwo 5\n")
    kaldifst.compile("\n".join(arcs), acceptor=False).write(str(tmp_path / "G.fst"))
    found = respelled_model(read_language_model(tmp_path / "G.fst"), transducer().lexicon)
    assert found is not None and found.model.words == {"to", "two"} and found.without_entry == 4
    graph = build_graph(transducer(), Grammar.NGRAM, language_model=found.model)
    assert Searcher(graph, EXACT).search(scores(20, 0)) is not None


@pytest.mark.parametrize("cost", ["NaN", "-Infinity"])
@pytest.mark.parametrize("line", ["0 1 2 2 {}\n1", "0 1 2 2 1\n1 {}"])
def test_a_grammar_of_impossible_costs_is_refused(tmp_path: Path, line: str, cost: str) -> None:
    (tmp_path / "words.txt").write_text("<eps> 0\nto 1\nsee 2\n")
    kaldifst.compile(line.format(cost), acceptor=False).write(str(tmp_path / "G.fst"))
    with pytest.raises(ConfigError, match=r"G\.fst: has costs that are no number or minus infinity; make it"):
        read_language_model(tmp_path / "G.fst")


def test_words_of_a_grammar_that_no_sentence_has_cannot_be_recognised(tmp_path: Path) -> None:
    grammar = read_language_model(write_grammar(tmp_path))
    rest = grammar.respelled(lambda word: None if word == "see" else word)
    assert rest.words == {"other"}
    assert not grammar.respelled(lambda word: word if word == "to" else None).words


def test_ngrams_are_read_back(tmp_path: Path) -> None:
    assert language_model_in(tmp_path) is None
    save_language_model(estimate(TEXTS, 2), tmp_path)
    again = language_model_in(tmp_path)
    assert isinstance(again, NgramModel) and again.order == 2


def test_a_language_model_that_is_gone_is_not_done_without(tmp_path: Path) -> None:
    save_language_model(estimate(TEXTS, 2), tmp_path)
    (tmp_path / "lm.json").write_text("{}")
    (tmp_path / "lm.arpa.gz").unlink()
    with pytest.raises(
        ConfigError, match=r"lm\.json tells of a language model, but .* copy the file again, or"
    ):
        language_model_in(tmp_path)
    (tmp_path / "lm.json").unlink()
    assert language_model_in(tmp_path) is None


def test_damaged_grammars_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"G\.fst: cannot be read .*; check the path$"):
        read_language_model(tmp_path / "G.fst")
    with pytest.raises(ConfigError, match=r"lm\.bin: give a name that ends in \.arpa"):
        read_language_model(tmp_path / "lm.bin")
    path = write_grammar(tmp_path, "to 1\nsee 2\n#0 3\n")
    with pytest.raises(ConfigError, match=r"label 4 is not in words\.txt"):
        read_language_model(path)
    for words, about in (
        ("to\n", "txt:1: 'to' is not"),
        ("to 1\nsee 1\n", "txt:2: 1 is listed a second time"),
    ):
        (tmp_path / "words.txt").write_text(words)
        with pytest.raises(ConfigError, match=about):
            read_language_model(path)
    (tmp_path / "words.txt").unlink()
    with pytest.raises(ConfigError, match=r"words\.txt: cannot be read .*; check the path$"):
        read_language_model(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"G\.fst: is no FST of OpenFst"):
        read_language_model(path)
    capfd.readouterr()  # OpenFst says it, too
