"""Find transcripts that are probably wrong: exchanged, or not divided into words."""

from __future__ import annotations

import statistics
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speechdp.counting import counted, counted_clause

#: An utterance is implausible if its phones are this many times as long (or short) as the corpus's median ...
_TOO_SLOW = 4.0
_TOO_FAST = 4.0
#: ... beyond pauses of this length, which may make up most of short utterances.
_PAUSES_S = 2.0
#: With fewer utterances the median is not reliable.
_FEWEST = 10
#: Scripts written without blanks, by the beginning of their letters' Unicode names, ...
_WITHOUT_BLANKS = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
#: ... and the largest plausible mean number of letters in their words: two to five are usual.
_MOST_LETTERS = 8
_MOST_SHOWN = 20


@dataclass(frozen=True)
class SpokenLength:
    """Length of an utterance, and how much is said in it."""

    utterance_id: str
    seconds: float
    num_frames: int
    num_words: int
    num_phones: int
    num_states: int


def warn_of_lengths(lengths: Sequence[SpokenLength]) -> tuple[str, ...]:
    """Return a line for each way in which texts do not fit the lengths: number of cases, and the worst."""
    spoken = [length for length in lengths if length.num_phones > 0]
    return _too_few_frames(spoken) + _implausible(spoken)


def _too_few_frames(lengths: Sequence[SpokenLength]) -> tuple[str, ...]:
    short = [length for length in lengths if length.num_frames < length.num_states]
    if not short:
        return ()
    worst = min(short, key=lambda length: length.num_frames / length.num_states)
    utterances = counted_clause(len(short), "utterance", "have fewer frames than the transcript has states")
    return (
        f"warning: {utterances}, worst {worst.utterance_id} ({counted(worst.num_frames, 'frame')}, "
        f"{counted(worst.num_states, 'state')}); their flat alignment skips states",
    )


def _implausible(lengths: Sequence[SpokenLength]) -> tuple[str, ...]:
    if len(lengths) < _FEWEST:
        return ()
    usual = statistics.median(length.seconds / length.num_phones for length in lengths)

    def rate(length: SpokenLength) -> float:
        return length.seconds / length.num_phones

    slow = [n for n in lengths if n.seconds > _PAUSES_S + _TOO_SLOW * usual * n.num_phones]
    fast = [n for n in lengths if n.seconds < usual * n.num_phones / _TOO_FAST]
    found = (
        ("long", slow, max(slow, key=rate, default=None)),
        ("short", fast, min(fast, key=rate, default=None)),
    )
    return tuple(
        f"warning: {counted_clause(len(some), 'utterance', f'are implausibly {kind} for the text')}, worst "
        f"{worst.utterance_id} ({worst.seconds:.2f} s for {counted(worst.num_words, 'word')}); check the "
        "transcripts"
        for kind, some, worst in found
        if worst is not None
    )


def warn_of_undivided(words: Iterable[str]) -> tuple[str, ...]:
    """Warn of whole sentences written as one word, in scripts without blanks.

    Args:
        words: words of all transcripts.
    """
    lengths, first = [], ""
    for word in words:
        letters = [sign for sign in word if sign.isalpha()]
        if num := sum(unicodedata.name(letter, "").startswith(_WITHOUT_BLANKS) for letter in letters):
            lengths.append(num)
            first = first or word
    if not lengths or statistics.mean(lengths) <= _MOST_LETTERS:
        return ()
    shown = first if len(first) <= _MOST_SHOWN else f"{first[:_MOST_SHOWN]}..."
    return (
        f"warning: words have {statistics.mean(lengths):.1f} letters on average, first {shown}: whole "
        "sentences, it seems; divide texts that are written without blanks into words, and prepare again",
    )
