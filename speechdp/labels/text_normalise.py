"""Normalise texts: transcripts to plain words; texts for synthesis to the form that is spoken."""

from __future__ import annotations

import re
import unicodedata

from speechdp.errors import ConfigError
from speechdp.labels.lexicon import SIGNS_IN_WORDS, is_mark, lower_case

#: Signs that are kept because they are heard as pauses or intonation; an apostrophe belongs to its word.
PUNCTUATION = ("!", ",", ".", "?")
_ALL_PUNCTUATION = "".join(PUNCTUATION)

# fmt: off
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
# fmt: on
_TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_MAX_NUMBER = 999_999
_MAX_DIGITS = len(str(_MAX_NUMBER))
_SHOWN_DIGITS = 12
_LETTERS = r"[^\W\d_]"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
#: A number, and the letters directly after it: "3rd", "1990's", "'80s"; not within names such as "b2b".
_NUMBER = re.compile(rf"(?<!{_LETTERS})'?(?P<counted>{_DIGITS})(?P<letters>'?{_LETTERS}+)|{_DIGITS}")
_ORDINAL = ("st", "nd", "rd", "th")
_IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u02bc", "'"),
        **dict.fromkeys('\u201c\u201d\u00ab\u00bb"()[]', " "),
        **dict.fromkeys("-\u2010\u2011", " "),
        **dict.fromkeys(":;\u2013\u2014", ", "),  # the blank keeps "1:100" from being read as "1,100"
    }
)
#: A hyphen or minus sign before a number, if no word or number is before it: "-5" is not "well-known".
_MINUS = re.compile(r"(?<![^\s(\[\"\u201c\u00ab])[-\u2010\u2212](?=[0-9])")
_SPACE_BEFORE_SIGN = re.compile(r"\s+([!,.?])")


#: Punctuation of transcripts; apostrophes and hyphens belong to their words.
_OF_TRANSCRIPTS = (
    str.maketrans(
        {
            **dict.fromkeys(
                '.,;:!?"()[]\u201c\u201d\u201e\u201f\u00ab\u00bb\u2039\u203a\u2026\u00bf\u00a1', ""
            ),
            **dict.fromkeys("\u2013\u2014", " "),
            **dict.fromkeys("\u3001\u3002\uff0c\uff01\uff1f\u0964\u061f\u060c\u061b", " "),
            # Full stops: Indic, Urdu, Armenian, Hebrew, Ethiopic, Burmese, Khmer.
            **dict.fromkeys("\u0965\u06d4\u0589\u05c3\u104a\u104b\u17d4\u17d5", " "),
            **dict.fromkeys(map(chr, range(0x1361, 0x1369)), " "),
            # Brackets, quotation marks, dots and colons, of the width of Chinese characters.
            **dict.fromkeys([*map(chr, range(0x3008, 0x3012)), *map(chr, range(0x3014, 0x301C))], " "),
            **dict.fromkeys("\u30fb\uff08\uff09\uff0e\uff1a\uff1b\uff61\uff62\uff63\uff64\uff65", " "),
            **dict.fromkeys("\ufeff\u200b\u2060\u00ad", ""),  # invisible: byte order mark, soft hyphen
            # Writing direction marks, and the sign that elongates Arabic letters (tatweel).
            **dict.fromkeys("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e", ""),
            **dict.fromkeys("\u2066\u2067\u2068\u2069\u0640", ""),
        }
    )
    | SIGNS_IN_WORDS
)
#: Signs that separate words without a blank: "yes,no", "well...no"; but "3.5" and "o.k." are one word.
_BETWEEN_LETTERS = re.compile(r"(?<=[^\W\d_])(?:[,;:!?\u2026]|\.{2,})+(?=[^\W\d_])")
#: Signs that belong to words, but are punctuation by themselves: "well -- no".
_IN_WORDS = "'-"


def plain_transcript(text: str) -> str:
    """Return a transcript in lower case, without punctuation, with single spaces; marks are unchanged.

    Example:
        >>> plain_transcript("Well, !SIL it's <noise> ME!")
        "well !SIL it's <noise> me"
    """
    words = ((word, without_punctuation(word)) for word in text.split())
    return " ".join(filter(None, (word if plain and is_mark(word) else plain for word, plain in words)))


def without_punctuation(text: str, *, keeps_case: bool = False) -> str:
    """Return a text without punctuation and with single spaces: "!SIL" -> "sil", "--" -> "".

    Args:
        text: any.
        keeps_case: keep the case; else the text is converted to lower case.
    """
    composed = unicodedata.normalize("NFC", text) if keeps_case else lower_case(text)
    apart = _BETWEEN_LETTERS.sub(" ", composed)
    words = apart.translate(_OF_TRANSCRIPTS).split()
    return " ".join(word for word in words if word.strip(_IN_WORDS))


def normalise(text: str) -> str:
    """Return a text in lower case, with numbers in words and single spaces: "3 5 7" -> "three five seven".

    Brackets and quotation marks are dropped.  Hyphens separate words, as do other signs between letters;
    before a number that begins a word, a hyphen is "minus".  Colons and dashes become commas.  Ordinals and
    decades are spoken ("3rd", "1990s"); other letters after a number are a separate word ("7am").  Characters
    that have no meaning here are kept, so that the inventory refuses them by name.

    Raises:
        ConfigError: a number above 999,999.
    """
    lower = lower_case(unicodedata.normalize("NFKC", text))
    plain = _MINUS.sub("minus ", lower).translate(_SIGNS)
    apart = _BETWEEN_LETTERS.sub(r"\g<0> ", plain)  # "yes,no" is two words
    words = _NUMBER.sub(lambda match: f" {_in_words(match)} ", apart)
    return _SPACE_BEFORE_SIGN.sub(r"\1", " ".join(words.split()))


def plain_words(text: str) -> list[str]:
    """Return the words of a normalised text without their punctuation."""
    stripped = (word.rstrip(_ALL_PUNCTUATION) for word in text.split())
    return [word for word in stripped if word]


def number_in_words(number: int) -> str:
    """Return a number of 0 to 999,999 in English words, as spoken: 342 -> three hundred forty two.

    Raises:
        ConfigError: the number is outside this range.
    """
    if not 0 <= number <= _MAX_NUMBER:
        raise _not_spoken(str(number))
    if number < len(_ONES):
        return _ONES[number]
    for unit, name in ((1000, "thousand"), (100, "hundred")):
        if number >= unit:
            more = f" {number_in_words(number % unit)}" if number % unit else ""
            return f"{number_in_words(number // unit)} {name}{more}"
    ones = f" {_ONES[number % 10]}" if number % 10 else ""
    return f"{_TENS[number // 10]}{ones}"


def _in_words(match: re.Match[str]) -> str:
    """Return the words of a number and of the letters after it.  Raises ConfigError."""
    digits, letters = match["counted"], match["letters"]
    if digits is None:
        return _spoken(match.group())
    if "." not in digits and letters in _ORDINAL:
        return _ordinal(_spoken(digits))
    if "." not in digits and letters.removeprefix("'") == "s" and digits[-1] == "0":
        return _decade(digits.replace(",", ""))
    # Do not refuse: one abbreviation must not stop the preparation of hundreds of hours.
    between = "" if letters[0] == "'" else " "
    return f"{_spoken(digits)}{between}{letters}"


def _ordinal(words: str) -> str:
    """Return the ordinal of a number in words: "twenty one" -> "twenty first"."""
    before, blank, last = words.rpartition(" ")
    regular = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return f"{before}{blank}{_IRREGULAR_ORDINALS.get(last, regular)}"


def _decade(digits: str) -> str:
    """Return the words of a decade; from 1100 on as years are spoken: "1990" -> "nineteen nineties"."""
    century, year = digits[:-2], digits[-2:]
    if len(digits) == len("1990") and century[0] != "0" and (century[1] != "0" or year != "00"):
        words = f"{_spoken(century)} {'hundred' if year == '00' else _spoken(year)}"
    else:
        words = _spoken(digits)
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _spoken(digits: str) -> str:
    """Return the words of a written number; one that begins with zero is read digit by digit.

    Raises:
        ConfigError: the number is too large.
    """
    whole, point, fraction = digits.replace(",", "").partition(".")
    leading_zero = len(whole) > 1 and whole[0] == "0"
    if not leading_zero and len(whole) > _MAX_DIGITS:  # checked first: int refuses thousands of digits
        raise _not_spoken(whole)
    words = _one_by_one(whole) if leading_zero else number_in_words(int(whole))
    return f"{words} point {_one_by_one(fraction)}" if point else words


def _not_spoken(number: str) -> ConfigError:
    shown = number
    if len(number) > _SHOWN_DIGITS:
        shown = f"{number[:_SHOWN_DIGITS]}... ({len(number)} digits)"
    return ConfigError(
        f"the number {shown} cannot be converted to words (0 to {_MAX_NUMBER}); write it as words"
    )


def _one_by_one(digits: str) -> str:
    return " ".join(_ONES[int(digit)] for digit in digits)
