"""N-best lists: the word sequences of least cost, their second language model, the files of a decoding."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.decode import nbest as nbest_module
from speechdp.decode.graphs.graph import Grammar, LexiconTransducer, build_graph, transcript
from speechdp.decode.language_model import save_language_model
from speechdp.decode.nbest import Candidate, NBestSearcher, Rescorer, joined, nbest_lines, ngram_cost
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.results import DecodingResult
from speechdp.decode.search import Searcher, SearchOptions
from speechdp.decode.split import decode_split
from speechdp.decode.tuning import earlier_tuning, tune
from speechdp.errors import ConfigError
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.language.arpa import write_arpa
from speechdp.language.kneser_ney import estimate
from tests.helpers.grammars import write_grammar
from tests.helpers.oracle import Oracle, OracleModel, Spoken, oracle, write_dataset

LEXICON = Lexicon({"to": (("A", "B"),), "two": (("A", "B"), ("A",)), "see": (("C",),), "tool": (("A", "C"),)})
INVENTORY = StateInventory(LEXICON.phones)
TRANSDUCER = LexiconTransducer(LEXICON, INVENTORY, np.linspace(0.2, 0.8, INVENTORY.num_classes), 0.3)
MODEL = estimate([text.split() for text in ("two to see", "to see", "two two tool", "see")], 2)
WIDE = SearchOptions(beam=1e3, acoustic_scale=0.5)


def scores(num_frames: int, seed: int) -> FloatArray:
    shape = num_frames, INVENTORY.num_classes
    return np.random.default_rng(seed).normal(0, 4, shape).astype(np.float32)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lists_are_the_cheapest_sequences_of_all(seed: int) -> None:
    graph = build_graph(TRANSDUCER, Grammar.WORD_LOOP, insertion_log_prob=-0.5)
    frames = scores(14, seed)
    found = NBestSearcher(graph, WIDE, 12, 1e3).search_nbest(frames)
    costs = {}
    for length in range(5):  # 14 frames hold four words at most
        for words in itertools.product(LEXICON.words, repeat=length):
            ids = [TRANSDUCER.word_ids[word] for word in words]
            path = Searcher(TRANSDUCER.compose(transcript(ids)), WIDE).search(frames)
            if path is not None:
                costs[words] = path.cost + length * (math.log(4) + 0.5)
    cheapest = sorted(costs.items(), key=lambda item: item[1])[:12]
    assert [each.words for each in found] == [words for words, _ in cheapest]
    assert [each.cost for each in found] == pytest.approx([cost for _, cost in cheapest], abs=0.02)


def test_lists_grow_with_the_lattice_beam_and_are_never_longer_than_asked_for() -> None:
    graph = build_graph(TRANSDUCER, Grammar.NGRAM, language_model=MODEL)
    frames = scores(20, 3)
    best = Searcher(graph, WIDE).search(frames)
    near = NBestSearcher(graph, WIDE, 1000, 4.0).search_nbest(frames)
    assert best is not None and near[0].words == best.words
    assert near[0].cost == pytest.approx(best.cost, abs=0.02)
    narrow, wide = (NBestSearcher(graph, WIDE, 1000, beam).search_nbest(frames) for beam in (1.0, 16.0))
    assert len(narrow) < len(near) < len(wide)
    assert len({each.words for each in near}) == len(near)
    few = NBestSearcher(graph, WIDE, 3, 4.0).search_nbest(frames)
    assert [each.cost for each in few] == [each.cost for each in near[:3]]


def test_without_a_path_the_beam_is_widened_and_then_nothing_found() -> None:
    graph = build_graph(TRANSDUCER, Grammar.WORD)
    searcher = NBestSearcher(graph, SearchOptions(beam=8.0), 5, 4.0)
    assert searcher.search_nbest(scores(2, 0)) == [] and searcher.search_nbest(scores(0, 0)) == []
    assert (searcher.num_retried, searcher.num_failed) == (1, 2)


def test_a_graph_without_any_path_gives_no_list() -> None:
    graph = TRANSDUCER.compose(kaldifst.StdVectorFst())
    searcher = NBestSearcher(graph, WIDE, 5, 4.0)
    assert searcher.search_nbest(scores(5, 0)) == [] and searcher.num_failed == 1


def test_a_wider_beam_finds_what_a_narrow_one_has_lost() -> None:
    graph = build_graph(TRANSDUCER, Grammar.WORD)
    frames, narrow = scores(14, 0), SearchOptions(beam=0.01)
    lost = NBestSearcher(graph, replace(narrow, max_beam_doublings=0), 5, 4.0)
    assert lost.search_nbest(frames) == [] and lost.num_failed == 1
    searcher = NBestSearcher(graph, replace(narrow, max_beam_doublings=16), 5, 4.0)
    assert searcher.search_nbest(frames) and (searcher.num_retried, searcher.num_failed) == (1, 0)


def test_a_lattice_too_large_is_made_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build_graph(TRANSDUCER, Grammar.WORD_LOOP)
    frames = scores(40, 5)
    whole = NBestSearcher(graph, WIDE, 50, 64.0).search_nbest(frames)
    monkeypatch.setattr(nbest_module, "_MAX_STATES", 40)
    some = NBestSearcher(graph, WIDE, 50, 64.0).search_nbest(frames)
    assert some[0].words == whole[0].words and 1 < len(some) <= len(whole)
    monkeypatch.setattr(nbest_module, "_MAX_STATES", 1)
    (best,) = NBestSearcher(graph, WIDE, 50, 64.0).search_nbest(frames)
    assert best.cost == pytest.approx(whole[0].cost, abs=0.02)


def test_scores_that_tell_nothing_do_not_keep_the_search_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model's: determinising took minutes an utterance, in which no signal was heard."""
    states: list[int] = []
    determinise = nbest_module.determinise_within

    def bounded(words: Any, max_states: int) -> bool:
        states.append(max_states)
        return determinise(words, max_states)

    monkeypatch.setattr(nbest_module, "determinise_within", bounded)
    graph = build_graph(TRANSDUCER, Grammar.WORD_LOOP)
    frames = np.random.default_rng(1).normal(0, 0.01, (300, INVENTORY.num_classes)).astype(np.float32)
    found = NBestSearcher(graph, SearchOptions(), 10, 10.0).search_nbest(frames)
    best = Searcher(graph, SearchOptions()).search(frames)
    assert best is not None and found[0].cost == pytest.approx(best.cost, abs=0.05)
    assert states and max(states) <= 20_000


def test_what_words_cost_is_in_nats() -> None:
    assert math.exp(-ngram_cost(MODEL)(["two", "see"])) == pytest.approx(
        10 ** MODEL.log10_sentence(["two", "see"])
    )


def test_rescoring_exchanges_the_costs_of_the_language_models() -> None:
    graph = build_graph(TRANSDUCER, Grammar.NGRAM, language_model=MODEL, lm_scale=2.0)
    found = NBestSearcher(graph, WIDE, 30, 1e3).search_nbest(scores(20, 3))
    first, scale = ngram_cost(MODEL), 2.0
    same = Rescorer(first, scale, first, scale, 1.0).rescored(found)
    assert [each.words for each in same] == [each.words for each in found]
    assert [each.cost for each in same] == pytest.approx([each.cost for each in found])
    other = estimate([["tool", "tool", "see"], ["see", "tool"]], 3, LEXICON.words)
    new = Rescorer(first, scale, ngram_cost(other), 1.5, 1.0).rescored(found)
    acoustic = {each.words: each.cost - scale * first(each.words) for each in found}
    for each in new:
        assert each.cost == pytest.approx(acoustic[each.words] + 1.5 * ngram_cost(other)(each.words))
        assert each.lm_cost == first(each.words) and each.rescored_lm_cost == ngram_cost(other)(each.words)
    assert sorted(new, key=lambda each: each.cost) == new
    none = Rescorer(first, scale, ngram_cost(other), 1.5, 0.0).rescored(found)
    assert [each.words for each in none] == [each.words for each in found]


def test_a_word_that_a_language_model_lacks_is_as_good_as_impossible() -> None:
    assert ngram_cost(MODEL)(["two", "what", "to"]) > ngram_cost(MODEL)(["two", "to"]) + 200


candidates = st.dictionaries(st.text("ab", max_size=2), st.floats(0, 9), max_size=6).map(
    lambda costs: sorted(
        (Candidate(tuple(words), cost, 2 * cost) for words, cost in costs.items()), key=lambda each: each.cost
    )
)


@settings(max_examples=200, deadline=None)
@given(first=candidates, second=candidates, size=st.sampled_from([1, 2, 5, 36]))
def test_the_best_of_two_pieces_together(first: list[Candidate], second: list[Candidate], size: int) -> None:
    found = joined(first, second, size)
    if not first or not second:
        assert found == (first or second)
        return
    costs: dict[tuple[str, ...], float] = {}
    for a, b in itertools.product(first, second):
        words = a.words + b.words
        costs[words] = min(costs.get(words, math.inf), a.cost + b.cost)
    assert found[0].cost == min(costs.values()) and len(found) <= size
    assert all(each.cost >= costs[each.words] for each in found)
    if size == 36:  # all of them
        assert {each.words: each.cost for each in found} == costs
    assert len({each.words for each in found}) == len(found)
    assert all(each.lm_cost == pytest.approx(2 * each.cost) for each in found)


def test_lines_name_utterance_rank_and_costs() -> None:
    each = [Candidate(("a", "b"), 1.5, 0.25, 2.0), Candidate((), 2.0)]
    assert nbest_lines("u", each) == "u-1 1.500 0.250 2.000 a b\nu-2 2.000 - -\n"


SHARDS = [
    [Spoken("c1", "one two", "one two"), Spoken("a1", "three", "four", 25)],
    [Spoken("b1", "four", "four", 22), Spoken("d1", "two", "two", 2), Spoken("a2", "one", "one one", 50)],
]
TEXTS = [["one"], ["two"], ["three"], ["one", "two"], ["four"]]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    dataset = write_dataset(tmp_path / "data", SHARDS)
    save_language_model(estimate(TEXTS, 2), dataset.path)
    return dataset


def unsure(num_classes: int) -> Oracle:
    sure = oracle(num_classes)
    return Oracle(OracleModel(num_classes, 1.0), sure.class_log_prior, sure.self_loop, sure.config)


def decode(dataset: Dataset, run_dir: Path, options: DecodingOptions) -> DecodingResult:
    return decode_split(unsure(dataset.num_classes), dataset, "test", run_dir, options, SerialCommunicator())


def test_a_decoding_writes_its_lists_and_judges_them(dataset: Dataset, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = DecodingOptions(nbest=7, lattice_beam=30.0, beam=60.0)
    result = decode(dataset, run_dir, options)
    lines = [line.split() for line in (run_dir / "hypotheses" / "test.nbest").read_text().splitlines()]
    best = {name[:-2]: words for name, _, _, _, *words in lines if name.endswith("-1")}
    text = [line.split() for line in (run_dir / "hypotheses" / "test.txt").read_text().splitlines()]
    assert best == {name: words for name, *words in text if name != "d1"}  # in which no path ends
    assert all(rescored == "-" and float(lm) > 0 for _, _, lm, rescored, *_ in lines)
    assert result.nbest is not None and result.nbest.oracle.wer < result.wer.wer
    assert result.nbest.mean == len(lines) / 5
    values = json.loads((run_dir / "wer-test.json").read_text())
    assert values["nbest"]["oracle_wer"] == result.nbest.oracle.wer
    assert values["nbest"]["path"] == "hypotheses/test.nbest" and values["options"]["nbest"] == 7
    assert "oracle WER" in result.nbest.summary()
    together = tmp_path / "together"
    run_threads(
        3,
        lambda comm: decode_split(unsure(dataset.num_classes), dataset, "test", together, options, comm),
    )
    for name in ("wer-test.json", "hypotheses/test.nbest", "hypotheses/test.txt"):
        assert (together / name).read_bytes() == (run_dir / name).read_bytes()
    decode(dataset, run_dir, DecodingOptions())
    assert not (run_dir / "hypotheses" / "test.nbest").exists()  # it would be another decoding's


def test_rescoring_changes_what_is_recognised(dataset: Dataset, tmp_path: Path) -> None:
    larger = tmp_path / "larger.arpa"
    write_arpa(estimate([["two", "two"], ["TWO", "two"]], 3, ["one", "three", "four"]), larger)
    options = DecodingOptions(nbest=50, lattice_beam=40.0, beam=80.0, acoustic_scale=0.05)
    plain = decode(dataset, tmp_path / "plain", options)
    again = DecodingOptions(**{**vars(options), "rescore_lm": larger})
    decode(dataset, tmp_path / "rescored", again)
    values = json.loads((tmp_path / "rescored" / "wer-test.json").read_text())
    assert values["options"]["rescore_lm"] == str(larger) and values["options"]["rescore_weight"] == 1.0
    text = (tmp_path / "rescored" / "hypotheses" / "test.txt").read_text()
    assert text.count("two") > plain.hypotheses.read_text().count("two")
    lines = (tmp_path / "rescored" / "hypotheses" / "test.nbest").read_text().splitlines()
    assert all("-" not in line.split()[1:4] for line in lines)


@pytest.mark.parametrize("grammar", [None, Grammar.DIGIT_LOOP])
def test_the_weight_is_tuned_with_the_others(
    dataset: Dataset, tmp_path: Path, grammar: Grammar | None
) -> None:
    larger, run_dir = tmp_path / "larger.arpa", tmp_path / "run"
    write_arpa(estimate([["one", "two"], ["three"], ["four"], ["one"]] * 5, 3, ["two"]), larger)
    start = DecodingOptions(grammar=grammar, rescore_lm=larger)
    comm, model = SerialCommunicator(), unsure(dataset.num_classes)
    tuned = tune(model, dataset, "test", start, comm)
    weights = [trial for trial in tuned.record["trials"] if "rescore_weight" in trial]
    assert len(weights) == 11 and weights[0]["rescore_weight"] == 0.0
    assert tuned.record["errors"] == min(trial["errors"] for trial in weights)
    assert tuned.options.rescore_weight == tuned.record["chosen"]["rescore_weight"]
    assert "rescore-weight" in tuned.summary()
    result = decode_split(model, dataset, "test", run_dir, tuned.options, comm, tuning=tuned.record)
    errors = result.wer.insertions + result.wer.deletions + result.wer.substitutions
    assert errors == tuned.record["errors"]
    parts = run_threads(2, lambda each: tune(unsure(dataset.num_classes), dataset, "test", start, each))
    assert all(part == tuned for part in parts)
    earlier = earlier_tuning(run_dir, larger)
    assert earlier is not None and earlier.weights["rescore_weight"] == tuned.options.rescore_weight
    earlier = earlier_tuning(run_dir)  # without it its weight says nothing
    assert earlier is not None and "rescore_weight" not in {**earlier.weights, **earlier.chosen}


@pytest.mark.parametrize("unknown", ["", "-1\t<unk>\n"])
def test_words_that_the_model_to_rescore_with_lacks_are_told(
    dataset: Dataset, tmp_path: Path, unknown: str
) -> None:
    arpa = tmp_path / "small.arpa"
    unigrams = f"{unknown}-1\ttwo\n-99\t<s>\n-1\t</s>\n"
    arpa.write_text(f"\\data\\\nngram 1={unigrams.count('-1') + 1}\n\n\\1-grams:\n{unigrams}\n\\end\\\n")
    result = decode(dataset, tmp_path / "run", DecodingOptions(rescore_lm=arpa))
    lacks = "" if unknown else "small.arpa lacks 3 words of the lexicon and has no <unk>: rescoring puts"
    assert result.rescoring_remark.startswith(lacks) and bool(result.rescoring_remark) == bool(lacks)


def test_models_that_cannot_rescore_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    grammar, strange, arpa = write_grammar(tmp_path), tmp_path / "strange.arpa", tmp_path / "lm.arpa"
    write_arpa(estimate([["elsewhere"]], 1), strange)
    write_arpa(estimate(TEXTS, 2), arpa)
    for file, options, message in (
        (strange, {}, "none of its words is in the lexicon"),
        (grammar, {}, "G.fst: has no n-grams; give an ARPA file"),
        (tmp_path / "no.arpa", {}, "no.arpa: cannot be read"),
        (arpa, {"grammar": Grammar.TRANSCRIPT_SET}, "the grammar transcript-set has no n-grams"),
    ):
        with pytest.raises(ConfigError, match=message):
            decode(dataset, tmp_path / "run", DecodingOptions(rescore_lm=file, **options))  # type: ignore[arg-type]
