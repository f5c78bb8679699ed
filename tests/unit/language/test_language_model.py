"""N-gram models: estimation, perplexities, ARPA files."""

from __future__ import annotations

import gzip
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechdp.errors import ConfigError
from speechdp.language.arpa import read_arpa, write_arpa
from speechdp.language.kneser_ney import discounts_of, estimate
from speechdp.language.ngram import END, NEVER, START, NgramModel, TextFit
from tests.helpers.corpora import shared_data

TEXTS = [line.split() for line in ("a b a c", "a b", "b a b a", "c", "a b a b c a", "d a b")]


def sums_of_contexts(model: NgramModel) -> list[float]:
    """Return the sum of all words' probabilities in every context that the model lists."""
    contexts = {gram[:-1] for gram in model.log10_probs} | set(model.log10_backoffs)
    return [sum(10 ** model.log10_prob(w, h) for w in model.words | {END}) for h in contexts if END not in h]


@pytest.mark.parametrize("order", [1, 2, 3, 4, 7])
def test_probabilities_sum_to_one_in_every_context(order: int) -> None:
    model = estimate(TEXTS, order, ["never", "heard"])
    assert model.order == order
    assert sums_of_contexts(model) == pytest.approx([1.0] * len(sums_of_contexts(model)), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from("abcdefg"), max_size=9), min_size=1, max_size=30),
    order=st.integers(1, 5),
    vocabulary=st.sets(st.sampled_from("abxyz")),
)
def test_probabilities_of_any_text_sum_to_one(
    texts: list[list[str]], order: int, vocabulary: set[str]
) -> None:
    model = estimate(texts, order, vocabulary)
    assert all(abs(total - 1) < 1e-9 for total in sums_of_contexts(model))
    assert model.words == set().union(*texts) | vocabulary
    assert math.isfinite(model.fit(texts).log10_prob)


def test_bigrams_are_as_computed_by_hand() -> None:
    # Bigrams: <s>a 2, ab 2, b</s> 1, bc 1, c</s> 1; too few for estimates: discounts 0.5, 1, 1.5
    model = estimate([["a", "b"], ["a", "b", "c"]], 2, ["d"])
    # Unigrams by the number of words before them: a 1, b 1, c 1, </s> 2; 5 in all, 2.5 of it taken off
    uniform = (0.5 * 3 + 1) / 5 / 5
    unigram = {"a": 0.5 / 5 + uniform, "c": 0.5 / 5 + uniform, "</s>": 1 / 5 + uniform, "d": uniform}
    for word, prob in unigram.items():
        assert 10 ** model.log10_prob(word, ()) == pytest.approx(prob)
    assert 10 ** model.log10_prob("c", ("b",)) == pytest.approx(0.5 / 2 + 0.5 * unigram["c"])
    assert 10 ** model.log10_prob("a", (START,)) == pytest.approx(1 / 2 + 0.5 * unigram["a"])
    assert 10 ** model.log10_prob("d", ("b",)) == pytest.approx(0.5 * unigram["d"])  # backed off
    assert model.log10_probs[START,] == NEVER and model.num_ngrams == (6, 5)


def test_discounts_are_estimated_from_counts_of_counts() -> None:
    counts = [1] * 40 + [2] * 20 + [3] * 10 + [4] * 5 + [9]
    y = 40 / 80
    assert discounts_of(counts) == pytest.approx(
        (1 - 2 * y * 20 / 40, 2 - 3 * y * 10 / 20, 3 - 4 * y * 5 / 10)
    )
    assert discounts_of([1, 2, 3]) == (0.5, 1.0, 1.5)  # nothing was seen four times
    assert discounts_of(Counter({1: 9, 2: 9, 3: 9, 4: 90}).elements()) == (0.5, 1.0, 1.5)  # negative


def test_perplexity_counts_unknown_words_apart() -> None:
    model = estimate([["a"], ["b"]], 1)
    # The three unigrams: a 1, b 1, </s> 2 of 4, 0.5, 0.5 and 1 of it taken off
    a, end = 0.5 / 4 + 2 / 4 / 3, 1 / 4 + 2 / 4 / 3
    fit = model.fit([["a", "what", "a"], []])
    assert (fit.sentences, fit.words, fit.unknown) == (2, 3, 1)
    assert fit.perplexity == pytest.approx((a * a * end * end) ** -0.25)
    assert math.isnan(model.fit([]).perplexity)
    assert TextFit(sentences=1, words=1, unknown=0, log10_prob=-620.0).perplexity == math.inf


def test_an4_has_the_perplexity_that_is_known() -> None:
    folder = shared_data("an4")
    held_out = (folder / "split").read_text().split("=")[1].strip().split("+")
    speakers = dict(line.split() for line in (folder / "utt2spk").read_text().splitlines())
    rows = [line.split() for line in (folder / "text").read_text().splitlines()]
    train = [row[1:] for row in rows if speakers[row[0]] not in held_out]
    model = estimate(train, 3)
    fit = model.fit(row[1:] for row in rows if speakers[row[0]] in held_out)
    assert (fit.words, fit.unknown) == (773, 2) and 16 < fit.perplexity < 18
    assert max(abs(total - 1) for total in sums_of_contexts(model)) < 1e-9


@pytest.mark.parametrize("name", ["lm.arpa", "lm.arpa.gz"])
def test_arpa_files_are_read_as_they_were_written(tmp_path: Path, name: str) -> None:
    model = estimate(TEXTS, 3, ["größe"])
    write_arpa(model, tmp_path / name)
    first = (tmp_path / name).read_bytes()
    read = read_arpa(tmp_path / name)
    assert read.num_ngrams == model.num_ngrams and read.words == model.words
    assert read.log10_probs == pytest.approx(dict(model.log10_probs), abs=1e-6)
    assert read.log10_backoffs == pytest.approx(dict(model.log10_backoffs), abs=1e-6)
    write_arpa(model, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


ARPA = """made by hand

\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-99\t<s>\t-0.3
-1\t</s>
-0.5\ta\t-0.2
-0.7\tb

\\2-grams:
-0.1\t<s> a
-0.4\ta b

\\end\\
"""


def test_arpa_of_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "lm.arpa"
    path.write_text(ARPA.replace("\t", " ").replace("\n", "\r\n"))
    model = read_arpa(path)
    assert (model.order, model.num_ngrams, model.words) == (2, (4, 2), {"a", "b"})
    assert model.log10_prob("b", ("a",)) == -0.4
    assert model.log10_prob("a", ("a",)) == pytest.approx(-0.7)
    assert model.log10_prob("a", ("b",)) == -0.5  # b has no weight
    path.write_text(ARPA.replace("b", "10\u00a0000"))  # only ASCII's blanks part fields
    assert read_arpa(path).words == {"a", "10\u00a0000"}


@pytest.mark.parametrize(
    ("old", "new", "line", "about"),
    [
        ("\\end\\\n", "", 16, "is cut off"),
        ("-0.7\tb\n", "", 12, "3 1-grams end here, \\data\\ announces 4"),
        ("-0.7\tb", "x\tb", 11, "'x' is no log10"),
        ("-0.7\tb", "nan\tb", 11, "'nan' is no log10"),
        ("-0.7\tb", "0.7\tb", 11, "'0.7' is no log10"),
        ("-0.7\tb", "-0.7\ta", 11, "second time"),
        ("-0.7\tb", "-0.7\tb c d", 11, "has 4 fields"),
        ("ngram 2=2", "ngram 3=2", 5, "is not 'ngram 2=COUNT'"),
        ("\\2-grams:", "\\3-grams:", 13, "does not belong here"),
        ("\\data\\", "data", 17, "has no \\data\\ section"),
        (ARPA[ARPA.index("\\2-grams") : ARPA.index("\\end")], "", 13, "there are no 2-grams"),
    ],
)
def test_damaged_arpa_is_one_line_that_names_the_place(
    tmp_path: Path, old: str, new: str, line: int, about: str
) -> None:
    path = tmp_path / "lm.arpa"
    assert old in ARPA
    path.write_text(ARPA.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(f"{path}:{line}: ")) as caught:
        read_arpa(path)
    assert about in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "lm.arpa.gz"
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\); check the path$"):
        read_arpa(path)
    path.write_text(ARPA)
    with pytest.raises(ConfigError, match="no gzip file"):
        read_arpa(path)
    path.write_bytes(gzip.compress(ARPA.encode())[:-20])
    with pytest.raises(ConfigError, match="cut off"):
        read_arpa(path)
    (tmp_path / "lm.arpa").write_bytes(b"\\data\\\n\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_arpa(tmp_path / "lm.arpa")


def test_words_of_another_spelling_keep_their_ngrams_and_others_are_left_out() -> None:
    model = estimate([["A", "b"], ["a", "C"]], 2)
    spelt = model.respelled({"A": "a", "a": "a", "b": "B"}.get)
    assert spelt.words == {"a", "B"}
    assert spelt.log10_probs[START, "a"] == model.log10_probs[START, "a"]  # a itself, not A
    assert ("a", "B") not in spelt.log10_probs  # of A
    assert spelt.log10_probs["B", END] == model.log10_probs["b", END]


@pytest.mark.parametrize("texts", [[], [[START]], [["a", END]]])
def test_texts_of_nothing_or_of_marks_are_refused(texts: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"; (give|leave)"):
        estimate(texts, 3)
