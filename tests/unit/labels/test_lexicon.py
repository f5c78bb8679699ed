from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from speechdp.errors import ConfigError
from speechdp.labels.lexicon import (
    Lexicon,
    command_words,
    digit_words,
    grapheme_lexicon,
    has_plain_letters,
    lexicon_for,
    own_lexicon,
    refuse_unknown,
)
from speechdp.labels.text_normalise import normalise, plain_transcript

ARPABET = frozenset(
    re.findall(
        r"\w+",
        "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z "
        "ZH",
    )
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_own_lexicon_is_arpabet_without_stress_and_holds_digits_and_commands() -> None:
    lexicon = own_lexicon()
    assert set(lexicon.phones) <= ARPABET
    assert digit_words()[3] == "three" and digit_words()[-1] == "oh"
    assert set(digit_words()) | set(command_words()) == set(lexicon.words)
    assert not set(digit_words()) & set(command_words())
    assert {"yes", "no", "up", "down", "forward"} <= set(command_words())
    assert len(command_words()) >= 30


def test_ten_digits_need_nineteen_phones() -> None:
    assert len(lexicon_for(digit_words()[:10]).phones) == 19


def test_load_keeps_variants_in_order_and_skips_silence_and_unknown(tmp_path: Path) -> None:
    path = write(
        tmp_path / "lexicon.txt",
        "<SIL> SIL\n!SIL SIL\n<unk> SPN\nzero z ih r ow\n\nzero z iy r ow\nzero z ih r ow\nyes\tY  E S\n",
    )
    lexicon = Lexicon.load(path)
    assert lexicon.pronunciations == {
        "zero": (("z", "ih", "r", "ow"), ("z", "iy", "r", "ow")),
        "yes": (("Y", "E", "S"),),
    }
    assert "SPN" not in lexicon.phones and "SIL" not in lexicon.phones


def test_save_and_load_give_the_same_lexicon(tmp_path: Path) -> None:
    lexicon = Lexicon({"größe": (("g", "r"),), "a": (("x",), ("y", "SIL"))})
    lexicon.save(tmp_path / "lexicon.txt")
    assert Lexicon.load(tmp_path / "lexicon.txt") == lexicon


def test_probabilities_of_lexiconp_are_kept_and_order_the_variants(tmp_path: Path) -> None:
    path = write(
        tmp_path / "lexiconp.txt",
        "<unk> 1.0 SPN\nzero 0.25 z iy r ow\nzero 1.0 z ih r ow\nyes 1 Y E S\nzero 0.5 z iy r ow\n",
    )
    lexicon = Lexicon.load(path)
    assert lexicon.pronunciations["zero"] == (("z", "ih", "r", "ow"), ("z", "iy", "r", "ow"))
    assert lexicon.probabilities == {"zero": (1.0, 0.5), "yes": (1.0,)}
    lexicon.save(tmp_path / "lexicon.txt")
    assert Lexicon.load(tmp_path / "lexicon.txt") == lexicon
    only = lexicon.restrict(["yes"])
    assert only.probabilities == {"yes": (1.0,)}


@pytest.mark.parametrize(
    ("text", "line", "about"),
    [
        ("yes Y EH S\nno\n", 2, "'no' has no phones"),
        (
            "yes Y EH S\nno 0.9 N OW\n",
            2,
            "'0.9' after the word 'no' looks like a probability",
        ),
        ("yes 0.9 Y EH S\nno N OW\n", 2, "'N' after the word 'no' is no probability"),
        ("yes 0.9 Y EH S\nno 0.9\n", 2, "'no' has no phones"),
        ("yes 0.9 0.1 0.2 0.3 Y EH S\n", 1, "'0.1' after the word 'yes' is no phone"),
        ("yes 7 Y EH S\n", 1, "'7' after the word 'yes' is no phone"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, text: str, line: int, about: str) -> None:
    path = write(tmp_path / "lexicon.txt", text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}:{line}:")) as caught:
        Lexicon.load(path)
    assert about in str(caught.value) and "\n" not in str(caught.value)


def test_a_lexicon_as_cmudict_has_it(tmp_path: Path) -> None:
    text = "\ufeff;;; # CMUdict\nread R EH1 D # past\nread(2) R IY1 D\n(x) EH K S\n"
    lexicon = Lexicon.load(write(tmp_path / "cmudict.dict", text))
    assert lexicon.pronunciations == {
        "read": (("R", "EH1", "D"), ("R", "IY1", "D")),
        "(x)": (("EH", "K", "S"),),
    }


@pytest.mark.parametrize("probability", ["", "0.5 "])
def test_disambiguation_symbols_are_no_phones(tmp_path: Path, probability: str) -> None:
    lines = ("read R EH D #1", "red R EH D #2", "red R EH D")
    text = "".join(line.replace(" ", f" {probability}", 1) + "\n" for line in lines)
    lexicon = Lexicon.load(write(tmp_path / "lexicon_disambig.txt", text))
    assert lexicon.pronunciations == {"read": (("R", "EH", "D"),), "red": (("R", "EH", "D"),)}


def test_words_are_found_however_their_signs_are_encoded() -> None:
    lexicon = Lexicon({"don\u2019t": (("D",),), "cafe\u0301": (("K",),), "Caf\u00e9": (("C",),)})
    assert lexicon.spelling_of("DON'T") == "don\u2019t" and lexicon.spelling_of("caf\u00e9") == "cafe\u0301"
    assert lexicon.spelling_of("Caf\u00e9") == "Caf\u00e9" and lexicon.spelling_of("cafe") is None


def test_a_dotted_capital_i_is_the_letter_i() -> None:
    """str.lower makes two characters of it, of which no other text has the second."""
    word = "\u0130stanbul"
    assert Lexicon({"istanbul": (("A",),)}).spelling_of(word) == "istanbul"
    assert plain_transcript(word) == plain_transcript("I\u0307stanbul") == "istanbul"
    assert normalise(word) == "istanbul"
    assert grapheme_lexicon([word]).pronunciations[word] == (tuple("istanbul"),)


def test_marks_that_no_lexicon_can_hold_are_to_be_taken_out() -> None:
    with pytest.raises(
        ConfigError, match="one; <noise> is a mark of no word: take such out of the transcripts; add"
    ):
        refuse_unknown(["<noise>", "one"], "add them to L")


def test_missing_empty_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Lexicon.load(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="no word"):
        Lexicon.load(write(tmp_path / "empty.txt", "<unk> SPN\n"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Lexicon.load(tmp_path / "binary.txt")


def test_own_lexicon_ignores_case_and_keeps_the_spelling() -> None:
    assert lexicon_for(["Yes", "NO"]).words == ("NO", "Yes")


def test_unknown_words_are_listed_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmudict", None)  # as if it were not installed
    words = [f"word{i:02}" for i in range(25)]
    with pytest.raises(ConfigError) as caught:
        lexicon_for(["yes", *words])
    message = str(caught.value)
    assert message.startswith("25 words without a pronunciation: word00 ")
    assert "word19 and 5 more" in message and "word20" not in message
    assert "--lexicon" in message and "cmudict" in message and "\n" not in message


def test_cmudict_serves_the_rest_without_stress(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("cmudict")
    entries = {"hello": [["HH", "AH0", "L", "OW1"], ["HH", "EH0", "L", "OW1"], ["HH", "AH1", "L", "OW0"]]}
    fake.dict = lambda: entries  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cmudict", fake)
    lexicon = lexicon_for(["Hello", "yes"])
    assert lexicon.pronunciations["Hello"] == (("HH", "AH", "L", "OW"), ("HH", "EH", "L", "OW"))
    assert lexicon.pronunciations["yes"] == (("Y", "EH", "S"),)
    with pytest.raises(ConfigError, match=r"1 word.*: qwerty; give a Kaldi"):
        lexicon_for(["qwerty"])


def test_words_are_found_in_another_case() -> None:
    lexicon = Lexicon({"Read": (("A",),), "READ": (("B",),), "two": (("C",),)})
    assert [lexicon.spelling_of(word) for word in ("READ", "read", "TWO", "three")] == [
        "READ",
        "Read",
        "two",
        None,
    ]


def test_words_in_capitals_do_not_hide_those_in_lower_case() -> None:
    lexicon = Lexicon({"IT": (("AY", "T", "IY"),), "it": (("IH", "T"),), "US": (("Y", "UW"),)})
    spelt = {word: lexicon.spelling_of(word) for word in ("It", "it", "IT", "us", "Us")}
    assert spelt == {"It": "it", "it": "it", "IT": "IT", "us": "US", "Us": "US"}


@pytest.mark.parametrize("line", ["SIL SIL", "SIL sil", "sil SIL", "Sil 1.0 sil"])
def test_silence_is_no_word(line: str) -> None:
    probability = "0.5 " * line.count("1.0")
    text = f"{line}\none {probability}W AH N\nsilly {probability}S IH L\nSIL {probability}S IH L\n"
    lexicon = Lexicon.parse(text, "lexicon.txt")
    assert lexicon.pronunciations == {
        "one": (("W", "AH", "N"),), "silly": (("S", "IH", "L"),), "SIL": (("S", "IH", "L"),)
    }  # fmt: skip
    with pytest.raises(ConfigError, match="pronunciation: sil; sil is a mark of no word: take such out of"):
        refuse_unknown(["sil"], "add them to lexicon.txt")


def test_words_that_are_not_in_the_lexicon_become_unk_where_it_has_it(tmp_path: Path) -> None:
    lexicon = Lexicon({"one": (("A",),)})
    assert lexicon.pronounceable(["one", "two", "one"]) == ["one", "one"]
    with_unknown = lexicon.with_unknown()
    assert with_unknown.pronounceable(["one", "two"]) == ["one", "<unk>"]
    assert with_unknown.words == ("one", "<unk>") and with_unknown.recognised_words == ("one",)
    with_unknown.save(tmp_path / "lexicon.txt")
    assert Lexicon.load(tmp_path / "lexicon.txt") == with_unknown


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Hello,  WORLD!", "hello world"),
        ("it\u2019s (a) well-known \u201cword\u201d", "it's a well-known word"),
        ("yes\u2014no\u2026 \u00bfqu\u00e9?", "yes no qu\u00e9"),
        ("e\u0301te\u0301 \u4f60\u597d\u3002", "\u00e9t\u00e9 \u4f60\u597d"),
        (" . - ", ""),
        ("as -- it were - half\u2010cock", "as it were half-cock"),
        (
            "Yes,no... [laughter] well\u2026I 10:30 3.5 O.K. [aside, too]",
            "yes no [laughter] well i 1030 35 ok aside too",
        ),
        ("\ufeffco\u00adop\u200b", "coop"),
        ("\u200f\u05db\u05df\u200f \u0645\u0640\u0640\u0646\u06d4", "\u05db\u05df \u0645\u0646"),
        ("\uff08\u597d\uff09\u300c\u4f60\u300d\uff1a\u597d", "\u597d \u4f60 \u597d"),
        (
            "\u0915\u094d\u200d\u0937 \u0645\u06cc\u200c\u06a9",
            "\u0915\u094d\u200d\u0937 \u0645\u06cc\u200c\u06a9",
        ),
        ("Well, !SIL ! <Noise> THAT!", "well !SIL <Noise> that"),
    ],
)
def test_transcripts_are_plain_words(text: str, plain: str) -> None:
    assert plain_transcript(text) == plain


def test_marks_are_not_spelled() -> None:
    assert grapheme_lexicon(["<noise>", "<unk>", "!SIL", "yes"]).words == ("yes",)


def test_digits_and_letters_of_all_shapes_are_spelled_alike() -> None:
    for word, letters in (
        ("35", "d3 d5"),
        ("3,5", "d3 d5"),  # as in transcripts, where it is the word 35
        ("\u0663\u0665", "d3 d5"),  # Arabic
        ("\u0969\uff15", "d3 d5"),  # Devanagari, full width
        ("x\u00b2", "x d2"),
        ("\ufb01n\uff21", "f i n a"),  # ligature, full width
        ("\ufef5", "\u0644 \u0622"),  # lam with alef, as it is drawn
        ("\u0e19\u0e49\u0e33", "\u0e19\u0e49 \u0e33"),  # Thai: not the letter before with a mark
        ("\ud55c\uad6d", "\ud55c \uad6d"),
        ("\uff76\uff9e\uff77", "\u30ac \u30ad"),  # Katakana of half width, the first voiced
    ):
        assert grapheme_lexicon([word]).pronunciations[word] == (tuple(letters.split()),)
        assert has_plain_letters(word) == (word in ("35", "3,5", "\u0e19\u0e49\u0e33", "\ud55c\uad6d"))
