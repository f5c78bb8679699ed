"""prepare: which words can be recognised, and which are probable."""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from speechdp.cli import main
from speechdp.data.corpora.kaldi_dir import read_kaldi_dir
from speechdp.data.prepare import vocabulary
from speechdp.data.prepare.pipeline import Prepared, prepare
from speechdp.data.prepare.vocabulary import plainly_spelt
from speechdp.data.shards.dataset import Dataset
from speechdp.decode.language_model import GrammarFst
from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import ARPABET, Lexicon
from speechdp.language.arpa import write_arpa
from speechdp.language.kneser_ney import estimate
from speechdp.language.ngram import NgramModel
from speechdp.options.prepare import GRAPHEMES, LanguageModelOptions, PrepareOptions
from tests.helpers.corpora import kaldi_folder, no_progress, write_tone
from tests.helpers.grammars import language_model_in, write_grammar

SPLIT = "speaker:test=spk1"  # every other one


def corpus(folder: Path, *texts: str) -> Path:
    kaldi_folder(folder, len(texts))
    (folder / "text").write_text("".join(f"utt{n} {text}\n" for n, text in enumerate(texts)))
    return folder


def make(source: Path, data: Path, lm: LanguageModelOptions | None = None, **options: object) -> Prepared:
    model = lm or LanguageModelOptions()
    values = {"split": SPLIT, "shards": 1, "workers": 1, "for_language_model": model, **options}
    return prepare(PrepareOptions((source, data), **values), no_progress)  # type: ignore[arg-type]


def lexicon_of(dataset: Dataset) -> Lexicon:
    return Lexicon.load(dataset.lexicon_path)


def targets_of(dataset: Dataset, split: str) -> dict[str, tuple[str, np.ndarray]]:
    with dataset.open_shard(split, 0) as shard:
        return {shard.utterance_id(u): (shard.text(u), shard.read(u)[1]) for u in range(shard.num_utterances)}


def test_words_of_test_are_not_in_the_vocabulary(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "one two", "three xyzzy", "two", "one xyzzy xyzzy two")
    prepared = make(source, tmp_path / "data")
    assert lexicon_of(prepared.dataset).words == ("one", "two")
    assert prepared.notices[0] == (
        "test: 4 of 6 words (66.7 %) are not in the vocabulary and will be errors: 2 words (xyzzy, three)"
    )
    (unknown, targets), (known, _) = targets_of(prepared.dataset, "test").values()
    if known == "three xyzzy":
        (known, _), (unknown, targets) = targets_of(prepared.dataset, "test").values()
    assert unknown == "three xyzzy" and set(targets.tolist()) <= {0, 1, 2}  # nothing to spread: silence
    prepared.dataset.verify()


def test_all_of_a_given_lexicon_is_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text("ONE A\nTWO B\nTHREE C\nelsewhere Z\n")
    source = corpus(tmp_path / "in", "one two", "three", "two", "two")
    prepared = make(source, tmp_path / "data", lexicon=tmp_path / "lexicon.txt")
    assert lexicon_of(prepared.dataset).words == ("ONE", "TWO", "THREE", "elsewhere")
    assert StateInventory.load(prepared.dataset.classes_path).phones == ("A", "B", "C", "Z")
    assert prepared.notices == ()


def test_case_and_punctuation_are_the_same_for_kaldi_directories_and_folders(tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text(
        "One A\nTWO B\nit's C\no.k. D\nU.S. Y\nUS E S\nus A S\nIT I\nit T\n"
    )
    texts = ("ONE -- two! US, (U.S.)? us.", "It\u2019s - O.K. US It IT", "\u201cTwo\u201d . one us U.S.")
    source = corpus(tmp_path / "in", *texts)
    kaldi = make(source, tmp_path / "kaldi", lexicon=tmp_path / "lexicon.txt").dataset
    (source / "wav.scp").unlink()
    folder = make(source, tmp_path / "folder", lexicon=tmp_path / "lexicon.txt").dataset
    for split in ("train", "test"):
        mine, other = (targets_of(dataset, split) for dataset in (kaldi, folder))
        assert {name: text for name, (text, _) in mine.items()} == {
            name: text for name, (text, _) in other.items()
        }
        for name, (_, targets) in mine.items():
            np.testing.assert_array_equal(targets, other[name][1])
    texts_of = {
        name: text for split in ("train", "test") for name, (text, _) in targets_of(kaldi, split).items()
    }
    assert texts_of == {"utt0": "One TWO US U.S. us", "utt1": "it's o.k. US it IT", "utt2": "TWO One us U.S."}


@pytest.mark.parametrize("choice", [None, "lexicon.txt"])
def test_unknown_words_of_train_are_refused(tmp_path: Path, choice: str | None) -> None:
    (tmp_path / "lexicon.txt").write_text("one A\ntwo B\n")
    source = corpus(tmp_path / "in", "one xyzzy", "two", "two")
    path = tmp_path / choice if choice else None
    with pytest.raises(
        ConfigError, match=r"1 word.* without a pronunciation: xyzzy; .*--unknown-words unk or skip"
    ):
        make(source, tmp_path / "data", lexicon=path)


def test_a_lexicon_that_stands_beside_the_transcripts_is_named(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "one xyzzy", "two", "two")
    (source / "lexicon.txt").write_text("one A\ntwo B\nxyzzy C\n")
    with pytest.raises(ConfigError, match=rf"xyzzy; give the .* there: --lexicon {source}/lexicon\.txt"):
        make(source, tmp_path / "data")
    make(source, tmp_path / "data", lexicon=source / "lexicon.txt")


def test_numbers_in_file_names_are_read_as_words_by_the_field_for_digits(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in ("1_ann_0", "2_ann_1", "2_bob_0", "1_bob_1"):
        write_tone(source / f"{name}.wav", seconds=0.5)
    with pytest.raises(ConfigError, match=r"1 2; write \{digit\} for \{word\} in --pattern '\{word\}_"):
        make(source, tmp_path / "data", pattern="{word}_{speaker}_{index}", split="speaker:test=bob")
    make(source, tmp_path / "data", pattern="{digit}_{speaker}_{index}", split="speaker:test=bob")


def test_unknown_words_of_train_become_unk(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "one xyzzy", "three", "two")
    prepared = make(source, tmp_path / "data", LanguageModelOptions(lm_order=2), unknown_words="unk")
    assert prepared.notices[0] == "1 word (xyzzy) without a pronunciation in train: <unk>"
    lexicon, inventory = lexicon_of(prepared.dataset), StateInventory.load(prepared.dataset.classes_path)
    assert lexicon.pronunciations["<unk>"] == (("<unk>",),) and lexicon.recognised_words == ("one", "two")
    text, targets = targets_of(prepared.dataset, "train")["utt0"]
    assert text == "one xyzzy" and set(inventory.classes_of("<unk>")) <= set(targets.tolist())
    _, test = targets_of(prepared.dataset, "test")["utt1"]
    assert set(inventory.classes_of("<unk>")) <= set(test.tolist())
    model = language_model_in(prepared.dataset.path)
    assert isinstance(model, NgramModel) and ("one", "<unk>") in model.log10_probs


def test_utterances_with_unknown_words_are_skipped(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "one xyzzy", "three", "two")
    prepared = make(source, tmp_path / "data", unknown_words="skip")
    assert prepared.dataset.splits["train"].utterances == 1
    assert prepared.notices[0] == (
        "left out of train: 1 utterance with 1 word (xyzzy) without a pronunciation"
    )
    only = corpus(tmp_path / "only", "xyzzy", "one", "xyzzy")
    with pytest.raises(ConfigError, match="every utterance of train"):
        make(only, tmp_path / "other", unknown_words="skip")


class Guesser:
    """In place of Phonetisaurus: it knows words of the letters x and y."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models: list[Path | None] = []
        self.lexicons: list[Lexicon] = []
        self.phones: list[Collection[str]] = []
        monkeypatch.setattr(vocabulary, "guess_pronunciations", self)

    def __call__(
        self, words: list[str], lexicon: Lexicon, model: Path | None, phones: Collection[str]
    ) -> dict[str, tuple[str, ...]]:
        self.models.append(model)
        self.lexicons.append(lexicon)
        self.phones.append(phones)
        return {word: ("A", *word.upper()) for word in words if set(word) <= set("xy")}


def test_pronunciations_of_words_of_train_are_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guesser = Guesser(monkeypatch)
    (tmp_path / "lexicon.txt").write_text("one 0.5 A\none 1.0 X\ntwo 1.0 Y\n")
    source = corpus(tmp_path / "in", "one xy", "yyx two", "two x")
    values: dict[str, Any] = {"lexicon": tmp_path / "lexicon.txt", "unknown_words": "g2p"}
    prepared = make(source, tmp_path / "data", **values)
    lexicon = lexicon_of(prepared.dataset)
    assert lexicon.words == ("one", "two", "x", "xy") and lexicon.pronunciations["xy"] == (("A", "X", "Y"),)
    assert lexicon.probabilities["xy"] == (1.0,)
    assert prepared.notices[0] == (
        "pronunciations guessed (g2p) for 2 words: x = A X, xy = A X Y; lexicon.txt has all"
    )
    assert "yyx" in prepared.notices[1]  # of test: it is an error
    strange = corpus(tmp_path / "strange", "one xy", "two", "two zz")
    with pytest.raises(ConfigError, match=r"1 word without a pronunciation: zz; g2p knows none either"):
        make(strange, tmp_path / "other", g2p_model=tmp_path / "m.fst", **values)
    assert guesser.models == [None, tmp_path / "m.fst"] and guesser.phones == [frozenset()] * 2


def test_parts_of_words_are_looked_up_in_the_lexicon_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guesser = Guesser(monkeypatch)
    source = corpus(tmp_path / "in", "one six-seven", "two", "two xy")
    with pytest.raises(ConfigError, match=r"1 word without a pronunciation: six-seven; g2p knows none"):
        make(source, tmp_path / "data", g2p_model=tmp_path / "m.fst", unknown_words="g2p")
    assert {"one", "two", "six", "seven"} == set(guesser.lexicons[0].pronunciations)
    assert guesser.phones == [ARPABET] and set(guesser.lexicons[0].phones) < ARPABET


def test_letters_serve_as_phones_in_any_language(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "Größe d'été", "nie gehört", "\u0928\u092e\u0938\u094d\u0924\u0947 42")
    prepared = make(source, tmp_path / "data", lexicon=GRAPHEMES)
    lexicon = lexicon_of(prepared.dataset)
    assert lexicon.pronunciations["größe"] == (("g", "r", "ö", "ß", "e"),)
    assert lexicon.pronunciations["d'été"] == (("d", "é", "t", "é"),)
    assert lexicon.pronunciations["42"] == (("d4", "d2"),)
    assert lexicon.pronunciations["\u0928\u092e\u0938\u094d\u0924\u0947"] == (
        ("\u0928", "\u092e", "\u0938\u094d", "\u0924\u0947"),
    )
    assert "gehört" not in lexicon
    with pytest.raises(ConfigError, match="have no letters"):
        make(corpus(tmp_path / "signs", "one &", "one", "one"), tmp_path / "other", lexicon=GRAPHEMES)


def test_marks_are_words_without_pronunciation(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "one !SIL <noise>", "one", "two!")
    with pytest.raises(ConfigError, match="!SIL <noise>; !SIL is a mark of no word: take"):
        make(source, tmp_path / "data", lexicon=GRAPHEMES)
    prepared = make(source, tmp_path / "data", lexicon=GRAPHEMES, unknown_words="unk")
    assert lexicon_of(prepared.dataset).words == ("one", "two", "<unk>")


def test_marks_in_a_folder_of_audio_are_no_words_either(tmp_path: Path) -> None:
    for number, text in enumerate(("One !SIL <noise>", "one, two!", "two")):
        write_tone(tmp_path / "in" / f"{number}.wav", seed=number)
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    values: dict[str, Any] = {"split": "random:dev=0,test=0", "lexicon": GRAPHEMES}
    with pytest.raises(ConfigError, match="!SIL <noise>; !SIL is a mark of no word: take"):
        make(tmp_path / "in", tmp_path / "data", **values)
    prepared = make(tmp_path / "in", tmp_path / "data", unknown_words="unk", **values)
    assert lexicon_of(prepared.dataset).words == ("one", "two", "<unk>")


def test_words_that_a_dash_joins_are_spelt_one_by_one(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "well\u2014known")
    spelt = plainly_spelt(read_kaldi_dir(source), Lexicon({"WELL": (("A",),)}))
    assert [u.text for u in spelt.utterances] == ["WELL known"]


def test_language_model_of_train_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lexicon.txt").write_text("one A\ntwo B\nthree C\n")
    source = corpus(tmp_path / "in", "one two", "three three", "two one two", "four one")
    paths = [str(source), str(tmp_path / "data")]
    options = [
        "--split",
        SPLIT,
        "--lexicon",
        str(tmp_path / "lexicon.txt"),
        "--shards",
        "1",
        "--lm-order",
        "2",
    ]
    assert main.run(["prepare", *paths, *options]) == 0
    expected = estimate([["one", "two"], ["two", "one", "two"]], 2, ["three"])
    model = language_model_in(tmp_path / "data")
    assert isinstance(model, NgramModel)
    assert model.log10_probs == pytest.approx(dict(expected.log10_probs), abs=1e-6)
    fit = expected.fit([["three", "three"], ["four", "one"]])
    said = [
        f"language model: order 2, 5 1-grams, {expected.num_ngrams[1]} 2-grams, estimated on train",
        f"test: 25.0 % of 4 words unknown (OOV), perplexity {fit.perplexity:.1f} without these",
    ]
    assert main.run(["inspect", paths[1], "--no-verify"]) == 0
    out = capsys.readouterr().out
    for line in said:
        assert out.count(line) == 2
    assert main.run(["shard", paths[1], str(tmp_path / "other"), "--split", "train", "--shards", "2"]) == 0
    assert (tmp_path / "other" / "lm.arpa.gz").read_bytes() == (tmp_path / "data" / "lm.arpa.gz").read_bytes()
    (tmp_path / "other" / "lm.arpa.gz").unlink()
    assert main.run(["inspect", str(tmp_path / "other")]) != 0
    assert "lm.arpa.gz: is missing; copy the directory again or prepare" in capsys.readouterr().err
    (tmp_path / "other" / "files.json").unlink()  # as in data of earlier versions
    assert main.run(["inspect", str(tmp_path / "other")]) != 0
    assert "other: lm.json tells of a language model, but neither" in capsys.readouterr().err
    (tmp_path / "data" / "lm.json").write_text("{}")
    assert main.run(["inspect", paths[1]]) != 0
    assert "lm.json: was changed (2 bytes, " in capsys.readouterr().err
    (tmp_path / "data" / "files.json").unlink()
    assert main.run(["inspect", paths[1]]) != 0
    assert "lm.json: cannot be read (" in capsys.readouterr().err


def test_copies_of_an_utterance_are_one_text_of_the_language_model(tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text("one A\ntwo B\n")
    source = corpus(tmp_path / "in", "one two", "two", "two", "one one", "two two")
    for name in ("wav.scp", "text", "utt2spk"):
        lines = dict(line.split(maxsplit=1) for line in (source / name).read_text().splitlines())
        lines |= {f"{copy}-utt2": lines["utt2"] for copy in ("sp0.9", "sp1.1", "rev1-sp0.9")}
        (source / name).write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
    options = LanguageModelOptions(lm_order=2)
    model = language_model_in(
        make(source, tmp_path / "data", options, lexicon=tmp_path / "lexicon.txt").dataset.path
    )
    expected = estimate([["one", "two"], ["two"], ["two", "two"]], 2, ["one", "two"])
    assert isinstance(model, NgramModel)
    assert model.log10_probs == pytest.approx(dict(expected.log10_probs), abs=1e-6)


@pytest.mark.parametrize("has_unknown", [False, True])
def test_users_ngrams_are_taken_over(tmp_path: Path, has_unknown: bool) -> None:
    (tmp_path / "lexicon.txt").write_text("one A\ntwo B\nthree C\nfour D\n")
    texts = [["ONE", "TWO"], ["TWO", "ELSEWHERE", "ONE"], *([["<unk>"]] * has_unknown)]
    given = estimate(texts, 2)
    write_arpa(given, tmp_path / "my.arpa.gz")
    source = corpus(tmp_path / "in", "one two", "four", "two three")
    options = LanguageModelOptions(lm=tmp_path / "my.arpa.gz")
    dataset = make(source, tmp_path / "data", options, lexicon=tmp_path / "lexicon.txt").dataset
    model = language_model_in(dataset.path)
    assert isinstance(model, NgramModel)
    assert model.log10_probs["one", "two"] == pytest.approx(given.log10_probs["ONE", "TWO"], abs=1e-6)
    record = json.loads((dataset.path / "lm.json").read_text())
    assert (record["source"], record["left_out"]) == ("my.arpa.gz", 1)
    assert record["without_entry"] == (0 if has_unknown else 2)
    if has_unknown:
        share = given.log10_probs["<unk>",] - np.log10(2)
        assert model.log10_probs["four",] == pytest.approx(share, abs=1e-6)
    assert model.words == ({"one", "two", "three", "four"} if has_unknown else {"one", "two"})
    assert record["splits"]["test"]["unknown"] == (0 if has_unknown else 1)


def test_letters_spell_the_words_of_the_users_ngrams(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "one two", "net Tenor", "not eon", "wet")
    write_arpa(estimate([["NET", "Tenor", "note,", "<unk>"], ["two", "tax", "ten"]], 2), tmp_path / "my.arpa")
    options = LanguageModelOptions(lm=tmp_path / "my.arpa")
    prepared = make(source, tmp_path / "data", options, lexicon=GRAPHEMES)
    lexicon = lexicon_of(prepared.dataset)
    # Train has the letters e, n, o, t, w; tenor and tax have others, and "note," is as it stands no word.
    assert lexicon.words == ("eon", "not", "one", "two", "net", "ten")
    assert lexicon.pronunciations["net"] == (("n", "e", "t"),)
    assert StateInventory.load(prepared.dataset.classes_path).phones == ("e", "n", "o", "t", "w")
    assert prepared.notices[:3] == (
        "spelt by their letters: 2 words (net, ten) that only the language model has",
        "left out of the language model: 2 words (tax, tenor) with letters that no word of train has",
        "test: 2 of 3 words (66.7 %) are not in the vocabulary and will be errors: 2 words (tenor, wet)",
    )
    model = language_model_in(prepared.dataset.path)
    assert isinstance(model, NgramModel) and {"net", "ten", "two"} < model.words
    assert json.loads((prepared.dataset.path / "lm.json").read_text())["left_out"] == 3
    assert lexicon_of(make(source, tmp_path / "plain", lexicon=GRAPHEMES).dataset).words == lexicon.words[:4]


def test_letters_of_a_model_spell_the_words_of_another_language_model(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "one two", "two one", "not eon", "one")
    trained = make(source, tmp_path / "trained", lexicon=GRAPHEMES).dataset
    write_arpa(estimate([["net", "one", "tax"]], 2), tmp_path / "my.arpa")
    options = LanguageModelOptions(lm=tmp_path / "my.arpa")
    given = {"split": None, "like": trained.path, "lexicon": GRAPHEMES}
    prepared = make(corpus(tmp_path / "new", "net one", "tax"), tmp_path / "test", options, **given)
    assert lexicon_of(prepared.dataset).words == ("eon", "not", "one", "two", "net")
    assert prepared.dataset.num_classes == trained.num_classes
    assert prepared.notices[:2] == (
        "spelt by their letters: 1 word (net) that only the language model has",
        "left out of the language model: 1 word (tax) with letters that no word of train has",
    )
    phones = make(source, tmp_path / "phones", lexicon=None, unknown_words="skip").dataset
    with pytest.raises(ConfigError, match=r"^--lexicon graphemes: the phones of .*phones are no letters"):
        make(source, tmp_path / "test", options, overwrite=True, **{**given, "like": phones.path})


def test_a_model_whose_ligatures_are_letters_still_spells(tmp_path: Path) -> None:
    """Earlier versions took a ligature for a letter of its own, as one that lower case leaves alone."""
    source = corpus(tmp_path / "in", "one two", "two one", "net \ufb01n", "one")
    with mock.patch("speechdp.labels.lexicon._plain_letter", str):
        trained = make(source, tmp_path / "trained", lexicon=GRAPHEMES).dataset
    assert lexicon_of(trained).pronunciations["\ufb01n"] == (("\ufb01", "n"),)
    write_arpa(estimate([["net", "one", "ten"]], 2), tmp_path / "my.arpa")
    options = LanguageModelOptions(lm=tmp_path / "my.arpa")
    given = {"split": None, "like": trained.path, "lexicon": GRAPHEMES}
    prepared = make(corpus(tmp_path / "new", "ten \ufb01n"), tmp_path / "test", options, **given)
    assert lexicon_of(prepared.dataset).pronunciations == {
        **lexicon_of(trained).pronunciations,
        "ten": (("t", "e", "n"),),
    }


def test_users_grammar_is_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lexicon.txt").write_text("TO A\nSEE B\nONE C\n")
    (tmp_path / "lm").mkdir()
    options = LanguageModelOptions(lm=write_grammar(tmp_path / "lm"))
    source = corpus(tmp_path / "in", "to see", "see one", "see")
    dataset = make(source, tmp_path / "data", options, lexicon=tmp_path / "lexicon.txt").dataset
    model = language_model_in(dataset.path)
    assert isinstance(model, GrammarFst) and model.words == {"TO", "SEE"}
    assert main.run(["inspect", str(dataset.path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "language model: fst, from G.fst; left out: 1 word that the lexicon lacks; 1 word of" in out
    assert (
        "that it lacks cannot be recognised: prepare with a --lm FILE that has them, or with --lm-order"
        in out
    )
    assert "test: 50.0 % of 2 words unknown (OOV)" in out and "perplexity" not in out


def test_a_grammar_without_a_sentence_of_the_lexicon_is_refused(tmp_path: Path) -> None:
    """It was taken over, and nothing was recognised with it."""
    (tmp_path / "lexicon.txt").write_text("TO A\nONE C\n")
    (tmp_path / "lm").mkdir()
    options = LanguageModelOptions(lm=write_grammar(tmp_path / "lm"))  # "to see"
    source = corpus(tmp_path / "in", "to one", "one", "to")
    with pytest.raises(ConfigError, match=r"G\.fst: none of its sentences has only words of the lexicon"):
        make(source, tmp_path / "data", options, lexicon=tmp_path / "lexicon.txt")


def test_language_models_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    source = corpus(tmp_path / "in", "one two", "two", "one")
    (tmp_path / "cut.arpa.gz").write_bytes(gzip.compress(b"\\data\\\nngram 1=2\n\\1-grams:\n-1 one\n"))
    with pytest.raises(ConfigError, match=r"cut\.arpa\.gz:4: is cut off"):
        make(source, tmp_path / "data", LanguageModelOptions(lm=tmp_path / "cut.arpa.gz"))
    write_arpa(estimate([["hello"]], 1), tmp_path / "other.arpa")
    with pytest.raises(ConfigError, match=r"other\.arpa: none of its words is in the lexicon"):
        make(source, tmp_path / "data", LanguageModelOptions(lm=tmp_path / "other.arpa"))
    (tmp_path / "endless.arpa").write_text("\\data\\\nngram 1=1\n\n\\1-grams:\n-0.3 one\n\n\\end\\\n")
    with pytest.raises(ConfigError, match=r"endless\.arpa: has no 1-gram </s>"):
        make(source, tmp_path / "data", LanguageModelOptions(lm=tmp_path / "endless.arpa"))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "out", "--lm-order", "0"], "--lm-order 0: must be 1 to 10"),
        (["in", "out", "--lm-order", "3", "--lm", "x.arpa"], "leave one of them out"),
        (
            ["in", "out", "--task", "synthesis", "--lm-order", "3"],
            "--lm or --lm-order does not go with --task",
        ),
        (
            ["in", "out", "--task", "synthesis", "--unknown-words", "unk"],
            "--unknown-words unk does not go with",
        ),
        (["in", "out", "--unknown-words", "g2p"], "add --lexicon FILE or --g2p-model"),
        (
            ["in", "out", "--unknown-words", "g2p", "--lexicon", "graphemes"],
            "does not go with --lexicon graph",
        ),
        (["in", "out", "--g2p-model", "m.fst"], "--g2p-model goes with --unknown-words g2p"),
        (["out", "--kaldi", "d", "--ali", "a", "--lm-order", "3"], "do not go with --kaldi"),
        (["out", "--synthetic", "1", "--unknown-words", "unk"], "--unknown-words does not go with --synth"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main.run(["prepare", *arguments]) != 0
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
