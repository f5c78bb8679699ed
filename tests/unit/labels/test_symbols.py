"""Texts become symbols: normalised, numbered, and refused by name where that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speechdp.errors import ConfigError
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.symbols import SymbolInventory
from speechdp.labels.text_normalise import normalise, number_in_words

_LEXICON = Lexicon({"NO": (("N", "OW"),), "one": (("W", "AH", "N"), ("W", "AA", "N"))})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 5 7", "three five seven"),
        ("  Three\tFIVE\nseven ", "three five seven"),
        ("007", "zero zero seven"),
        ("Room 342, please!", "room three hundred forty two, please!"),
        ("1,000 or 12.05", "one thousand or twelve point zero five"),
        ("It\u2019s \u201cwell-known\u201d \u2013 (yes) ; no .", "it's well known, yes, no."),
        ("b2b", "b two b"),
        ("Yes,no. Well...no\u2026never; o.k.?", "yes, no. well... no... never, o.k.?"),
        ("-5 or (\u22123), 7-8, well-4 - 2", "minus five or minus three, seven eight, well four two"),
        ("\uff13 \u00e9t\u00e9", "three \u00e9t\u00e9"),
        ("100\u2013200", "one hundred, two hundred"),
        ("1:100; 10:30;200", "one, one hundred, ten, thirty, two hundred"),
        ("5\u2014500 yes\u2014no", "five, five hundred yes, no"),
        ("1,2345", "one, two thousand three hundred forty five"),
        ("12,345 people", "twelve thousand three hundred forty five people"),
        ("1914\u20131918", "one thousand nine hundred fourteen, one thousand nine hundred eighteen"),
        ("1st 2ND 3rd-hand 5th 12th!", "first second third hand fifth twelfth!"),
        ("20th 21st 30th 1,000th", "twentieth twenty first thirtieth one thousandth"),
        ("the 1990s, 1910's, 1900s", "the nineteen nineties, nineteen tens, nineteen hundreds"),
        ("10s, \u201880s and 2000s", "tens, eighties and two thousands"),
    ],
)
def test_texts_are_normalised(text: str, expected: str) -> None:
    assert normalise(text) == expected
    assert normalise(expected) == expected


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (10, "ten"),
        (19, "nineteen"),
        (20, "twenty"),
        (99, "ninety nine"),
        (100, "one hundred"),
        (315, "three hundred fifteen"),
        (999_999, "nine hundred ninety nine thousand nine hundred ninety nine"),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert number_in_words(number) == words


def test_large_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="1000000 cannot be converted to words"):
        normalise("1000000")
    with pytest.raises(ConfigError, match=r"number 111111111111\.\.\. \(5000 digits\) cannot be") as raised:
        normalise("1" * 5000)
    assert len(str(raised.value)) < 120
    assert normalise("0" * 5000).split() == ["zero"] * 5000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5km", "five km"),
        ("7am", "seven am"),
        ("1995s", "one thousand nine hundred ninety five s"),
        ("3.5x", "three point five x"),
        ("2's", "two's"),
        ("1.5th", "one point five th"),
        ("12\u00e9", "twelve \u00e9"),
        ("100\u2013200km", "one hundred, two hundred km"),
    ],
)
def test_other_letters_behind_a_number_are_a_word_of_their_own(text: str, words: str) -> None:
    assert normalise(f"so {text}, please") == f"so {words}, please"


def test_characters() -> None:
    symbols = SymbolInventory.of_kind("characters")
    assert symbols.num_symbols == 33
    classes = symbols.encode("Is it 2?")
    assert classes.dtype == "int32"
    assert symbols.decode(classes) == (*"is", "<space>", *"it", "<space>", *"two", "?", "<end>")


def test_phones() -> None:
    symbols = SymbolInventory.of_kind("phones", _LEXICON)
    assert symbols.decode(symbols.encode("No, 1")) == ("N", "OW", ",", "<space>", "W", "AH", "N", "<end>")
    assert "AA" not in symbols.names  # only first variants are spoken
    with pytest.raises(ConfigError, match="words outside the lexicon: 'three' 'two'; use words of"):
        symbols.encode("one two three")


def test_other_words_are_said_by_a_lexicon_in_the_phones_there_are() -> None:
    symbols = SymbolInventory.of_kind("phones", _LEXICON)
    more = Lexicon({"KNOWN": (("N", "OW", "N"),), "one": (("OW", "N"),), "Thin": (("TH", "N"),)})
    added = symbols.with_words_of(["Known one", "no"], more)
    said = "N OW N <space> OW N <space> N OW <end>"
    assert added.decode(added.encode("Known one no")) == tuple(said.split()) and added.names == symbols.names
    with pytest.raises(
        ConfigError, match="--lexicon: 'thin' has the phone TH, which the model does not have; use its"
    ):
        symbols.with_words_of(["thin"], more)
    with pytest.raises(ConfigError, match="--lexicon goes with a model of phones"):
        SymbolInventory.of_kind("characters").with_words_of(["one"], more)


@pytest.mark.parametrize("text", ["", "  ", "?!", "..."])
def test_texts_without_a_word_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has no words; give some"):
        SymbolInventory.of_kind("characters").encode(text)


def test_unknown_characters_are_named() -> None:
    with pytest.raises(ConfigError, match="characters outside the inventory of symbols: '%' '\u00e9'; write"):
        SymbolInventory.of_kind("characters").encode("caf\u00e9 5 % %")
    with pytest.raises(ConfigError, match="character outside the inventory of symbols: '%'; write it as a w"):
        SymbolInventory.of_kind("characters").encode("5 % %")


@pytest.mark.parametrize("kind", ["characters", "phones"])
def test_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    symbols = SymbolInventory.of_kind(kind, _LEXICON)  # type: ignore[arg-type]
    symbols.save(tmp_path / "symbols.json")
    loaded = SymbolInventory.load(tmp_path / "symbols.json")
    assert loaded == symbols
    assert loaded.encode("no one").tolist() == symbols.encode("no one").tolist()
    symbols.save_classes(tmp_path / "classes.txt")
    lines = (tmp_path / "classes.txt").read_text().splitlines()
    assert lines[:2] == ["0 <end>", "1 <space>"] and len(lines) == symbols.num_symbols


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "is not a speechdp-symbols file"),
        ({"version": 2}, "has version 2"),
        ({"names": ["a", "a"]}, "must differ"),
        ({"names": None}, "damaged"),
        ({"kind": "glyphs"}, "'glyphs' are not known"),
        ({"pronunciations": {"a": ["Q"]}}, "'Q' of the pronunciations"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "symbols.json"
    SymbolInventory.of_kind("characters").save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as caught:
        SymbolInventory.load(path)
    assert str(path) in str(caught.value)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prepare the data with --task synthesis"):
        SymbolInventory.load(tmp_path / "symbols.json")
    with pytest.raises(ConfigError, match="need a lexicon"):
        SymbolInventory.of_kind("phones")
