"""Pronunciations guessed by Phonetisaurus, and what is said where it cannot."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from speechdp.errors import ConfigError
from speechdp.labels.g2p import guess_pronunciations
from speechdp.labels.lexicon import Lexicon

needs_phonetisaurus = pytest.mark.skipif(
    importlib.util.find_spec("phonetisaurus") is None, reason="phonetisaurus is not installed: speechdp[g2p]"
)
#: Each letter is one phone but c, which is two, and q, which is silent; phones have reserved signs.
SOUNDS = {"a": ("A|",), "b": ("B_",), "c": ("K", "S}"), "d": ("D",), "e": ("E",), "q": ()}


def sounds_of(word: str) -> tuple[str, ...]:
    return tuple(phone for letter in word.lower() for phone in SOUNDS[letter])


def spelt_lexicon() -> Lexicon:
    pairs = [a + b for a in "abcdeq" for b in "abcdeq" if a + b != "qq"]
    words = [first + second for first in pairs for second in pairs[::5]]
    return Lexicon({word.upper(): (sounds_of(word),) for word in dict.fromkeys(words)})


@needs_phonetisaurus
def test_regular_spelling_is_learnt() -> None:
    lexicon = spelt_lexicon()
    words = ["badeca", "decade", "Cab", "<noise>", "ab_c", "zebra", "b\u00e9b\u00e9"]
    found = guess_pronunciations(words, lexicon)
    assert found == {word: sounds_of(word) for word in ("badeca", "decade", "Cab")}
    assert guess_pronunciations(["zz"], lexicon) == {}
    joined = guess_pronunciations(["Cab-badeca", "cab-zz", "cabbab-"], lexicon)
    assert joined == {"Cab-badeca": sounds_of("cabbadeca"), "cabbab-": sounds_of("cabbab")}


def test_words_joined_by_hyphens_are_said_as_the_lexicon_says_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phonetisaurus", None)  # nothing is left to guess
    lexicon = Lexicon({"WOLF": (("W", "L"), ("F",)), "dog": (("D", "G"),)})
    words = ["wolf-dog", "dog-wolf-", "<x-y>"]
    assert guess_pronunciations(words, lexicon) == {
        "wolf-dog": tuple("WLDG"),
        "dog-wolf-": tuple("DGWL"),
    }


@needs_phonetisaurus
def test_what_cannot_be_learnt_or_read_is_one_line(tmp_path: Path) -> None:
    few = Lexicon({"one": (("A", "B", "C"),), "two": (("D", "E"),)})
    assert guess_pronunciations(["one"], few) == {"one": ("A", "B", "C")}
    for lexicon in (Lexicon({}), Lexicon({"w": (tuple("ABCDEF"),)})):
        with pytest.raises(ConfigError, match="no pronunciation to learn from"):
            guess_pronunciations(["w"], lexicon)
    with pytest.raises(ConfigError, match="no such file"):
        guess_pronunciations(["one"], few, tmp_path / "m.fst")
    (tmp_path / "m.fst").write_text("no model")
    with pytest.raises(ConfigError, match="give a --g2p-model that phonetisaurus-train wrote"):
        guess_pronunciations(["one"], few, tmp_path / "m.fst")


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phonetisaurus", None)
    with pytest.raises(ConfigError, match=r"pip install 'speechdp\[g2p\]'"):
        guess_pronunciations(["one"], Lexicon({"two": (("A",),)}))
