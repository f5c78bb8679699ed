"""Choose the words that can be recognised: from training transcripts and the lexicon, never from test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speechdp.counting import counted
from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.errors import ConfigError
from speechdp.labels.g2p import guess_pronunciations
from speechdp.labels.lexicon import (
    UNKNOWN_WORD,
    Lexicon,
    built_in_pronunciations,
    grapheme_lexicon,
    is_mark,
    refuse_unknown,
)
from speechdp.labels.text_normalise import without_punctuation
from speechdp.options.prepare import GRAPHEMES, PrepareOptions

Splits = Mapping[str, Sequence[CorpusUtterance]]

_MAX_NAMED = 5


@dataclass(frozen=True)
class Vocabulary:
    """Pronunciations, the utterances that they serve, and what to tell the user."""

    lexicon: Lexicon
    splits: dict[str, list[CorpusUtterance]]
    notices: tuple[str, ...]


def given_lexicon(path: Path | None) -> Lexicon | None:
    """Read the lexicon that the user gives as a file, if any.  Raises ConfigError."""
    return None if path in (None, GRAPHEMES) else Lexicon.load(path)


def plainly_spelt(corpus: Corpus, given: Lexicon | None) -> Corpus:
    """Bring transcripts of any corpus to one form: words as the lexicon spells them, in whatever case.

    Other words are in lower case and without punctuation.  Marks such as `!SIL` stay as they are.

    Raises:
        ConfigError: a transcript is nothing but punctuation.
    """
    lexicon = Lexicon({}) if given is None else given
    return corpus.respelled({word: _plain_spelling(word, lexicon) for word in corpus.words})


def _plain_spelling(word: str, lexicon: Lexicon) -> str:
    """Return the words that stand for one of a transcript: several where a dash joins them, or none."""
    plain = without_punctuation(word)
    whole = lexicon.spelling_of(word) or lexicon.spelling_of(plain)
    if whole is not None:
        return whole
    if plain and is_mark(word):
        return word
    return " ".join(lexicon.spelling_of(part) or part for part in plain.split())


def choose_vocabulary(splits: Splits, options: PrepareOptions, given: Lexicon | None) -> Vocabulary:
    """Find pronunciations: all of a lexicon that is given, else those of the training words.

    Args:
        splits: the corpus, divided.
        options: the lexicon, and what becomes of training words without pronunciation.
        given: the lexicon in the file that the user gives, if it is one.

    Raises:
        ConfigError: there are such words, and they are to be refused; or nothing is left to train on.
    """
    choice, policy = options.lexicon, options.unknown_words
    training = splits.get("train", ())
    words = {word for utterance in training for word in utterance.words}
    if given is not None:
        lexicon, remedy = given, f"add them to {choice}"
    elif choice == GRAPHEMES:
        lexicon, remedy = grapheme_lexicon(words), "they have no letters, or are marks: take them out"
    else:
        lexicon, remedy = built_in_pronunciations(words)
    unknown = sorted(words - lexicon.pronunciations.keys())
    guessed: tuple[str, ...] = ()
    if unknown and policy == "g2p":
        lexicon, guessed = with_guesses(unknown, lexicon, options.g2p_model)
        unknown = [word for word in unknown if word not in lexicon]
        remedy = f"g2p knows none either; {remedy}"
    chosen = {name: list(utterances) for name, utterances in splits.items()}
    notices: tuple[str, ...] = ()
    if unknown and policy in ("refuse", "g2p"):
        refuse_unknown(unknown, f"{remedy}; or train without them by --unknown-words unk or skip")
    elif unknown and policy == "unk":
        lexicon = lexicon.with_unknown()
        notices = (f"{_shown(unknown)} without a pronunciation in train: {UNKNOWN_WORD}",)
    elif unknown:
        chosen["train"] = [u for u in training if all(word in lexicon for word in u.words)]
        left_out = counted(len(training) - len(chosen["train"]), "utterance")
        notices = (f"left out of train: {left_out} with {_shown(unknown)} without a pronunciation",)
        if not chosen["train"]:
            raise ConfigError(f"every utterance of train has words without a pronunciation; {remedy}")
    return Vocabulary(lexicon, chosen, (*guessed, *notices, *_out_of_vocabulary(chosen, lexicon)))


def with_guesses(
    words: Sequence[str], lexicon: Lexicon, model: Path | None
) -> tuple[Lexicon, tuple[str, ...]]:
    """Add the pronunciations that g2p finds to a lexicon; return what to tell the user of them, too.

    Raises:
        ConfigError: as `guess_pronunciations`.
    """
    found = guess_pronunciations(words, lexicon, model)
    if not found:
        return lexicon, ()
    shown = [f"{word} = {' '.join(phones)}" for word, phones in list(found.items())[:_MAX_NAMED]]
    more = ", ..." if len(found) > _MAX_NAMED else ""
    return lexicon.with_words(found), (
        f"pronunciations guessed (g2p) for {counted(len(found), 'word')}: {', '.join(shown)}{more}; "
        "lexicon.txt has all",
    )


def _out_of_vocabulary(splits: Splits, lexicon: Lexicon) -> tuple[str, ...]:
    """Say of each held-out split how many of its words cannot be recognised."""
    notices = []
    for name, utterances in splits.items():
        if name == "train":
            continue
        counts = Counter(word for utterance in utterances for word in utterance.words)
        unknown = [word for word, _ in counts.most_common() if word not in lexicon]
        if unknown:
            lost, total = sum(counts[word] for word in unknown), counts.total()
            notices.append(
                f"{name}: {lost} of {total} words ({100 * lost / total:.1f} %) are not in the vocabulary and "
                f"will be errors: {_shown(unknown)}"
            )
    return tuple(notices)


def _shown(words: Sequence[str]) -> str:
    more = ", ..." if len(words) > _MAX_NAMED else ""
    return f"{counted(len(words), 'word')} ({', '.join(words[:_MAX_NAMED])}{more})"
