"""Choose the words that can be recognised: from training transcripts and the lexicon, never from test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speechdp.counting import counted
from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.errors import ConfigError
from speechdp.labels.g2p import guess_pronunciations, parts_of
from speechdp.labels.lexicon import (
    ARPABET,
    UNKNOWN_WORD,
    Lexicon,
    Pronunciation,
    built_in_pronunciations,
    grapheme_lexicon,
    is_mark,
    lower_case,
    own_lexicon,
    refuse_unknown,
)
from speechdp.labels.text_normalise import without_punctuation
from speechdp.language.ngram import UNKNOWN_NAMES
from speechdp.options.prepare import GRAPHEMES, PrepareOptions

Splits = Mapping[str, Sequence[CorpusUtterance]]

_MAX_NAMED = 5
_AROUND_WORDS = ',;:!?()[]"\u201c\u201d\u201e\u00ab\u00bb\u2026'


@dataclass(frozen=True)
class Vocabulary:
    """Pronunciations, the utterances that use them, and messages for the user."""

    lexicon: Lexicon
    splits: dict[str, list[CorpusUtterance]]
    notices: tuple[str, ...]


def given_lexicon(path: Path | None) -> Lexicon | None:
    """Read the lexicon file given by the user, if any.  Raises ConfigError."""
    return None if path in (None, GRAPHEMES) else Lexicon.load(path)


def plainly_spelt(corpus: Corpus, given: Lexicon | None, *, needs_text: bool = True) -> Corpus:
    """Normalise the transcripts of any corpus: words get the lexicon's spelling, whatever their case.

    Other words are in lower case and without punctuation.  Marks such as `!SIL` stay as they are.

    Raises:
        ConfigError: a transcript is only punctuation, and texts are needed.
    """
    lexicon = Lexicon({}) if given is None else given
    spelling = {word: _plain_spelling(word, lexicon) for word in corpus.words}
    return corpus.respelled(spelling, needs_text=needs_text)


def _plain_spelling(word: str, lexicon: Lexicon) -> str:
    """Return the normalised form of a transcript's word: several words if a dash joins them, or none."""
    plain = without_punctuation(word, keeps_case=True)
    if plain and is_mark(word) and word not in lexicon:
        return word
    # Strip surrounding signs before the word's own: "(U.S.)," is U.S., which may be another word than "us".
    for form in (word, word.strip(_AROUND_WORDS), plain):
        if (spelling := lexicon.spelling_of(form)) is not None:
            return spelling
    return " ".join(lexicon.spelling_of(part) or lower_case(part) for part in plain.split())


def choose_vocabulary(
    splits: Splits, options: PrepareOptions, given: Lexicon | None, of_model: Collection[str] = ()
) -> Vocabulary:
    """Find pronunciations: all of a given lexicon, else those of the training words.

    Args:
        splits: the divided corpus.
        options: the lexicon, and how to treat training words without pronunciation.
        given: the user's lexicon, if it is a file.
        of_model: words of a language model; if letters are phones, these can be recognised, too.

    Raises:
        ConfigError: there are such words, and the options refuse them; or no utterance is left to train on.
    """
    policy, training = options.unknown_words, splits.get("train", ())
    found = find_pronunciations({word for u in training for word in u.words}, options, given)
    lexicon, unknown = found.lexicon, found.unknown
    chosen = {name: list(utterances) for name, utterances in splits.items()}
    notices: tuple[str, ...] = ()
    if unknown and policy in ("refuse", "g2p"):
        refuse_unknown(unknown, f"{found.remedy}; or train without them by --unknown-words unk or skip")
    elif unknown and policy == "unk":
        lexicon = lexicon.with_unknown()
        notices = (f"{_shown(unknown)} without a pronunciation in train: {UNKNOWN_WORD}",)
    elif unknown:
        chosen["train"] = [u for u in training if all(word in lexicon for word in u.words)]
        left_out = counted(len(training) - len(chosen["train"]), "utterance")
        notices = (f"left out of train: {left_out} with {_shown(unknown)} without a pronunciation",)
        if not chosen["train"]:
            raise ConfigError(f"every utterance of train has words without a pronunciation; {found.remedy}")
    if options.lexicon == GRAPHEMES:
        lexicon, added = with_words_of_model(lexicon, of_model)
        notices += added
    return Vocabulary(lexicon, chosen, (*found.notices, *notices, *_out_of_vocabulary(chosen, lexicon)))


def with_words_of_model(lexicon: Lexicon, words: Collection[str]) -> tuple[Lexicon, tuple[str, ...]]:
    """Spell words that occur only in a language model by their letters.

    Args:
        lexicon: a lexicon of letters; words with other letters are left out because nothing can be learnt of
            them.
        words: all words of the model.

    Returns:
        The lexicon with these words, and messages for the user.
    """
    lacking = [word for word in words if lexicon.spelling_of(word) is None and word not in UNKNOWN_NAMES]
    spelt = {word: _plain_spelling(word, lexicon) for word in lacking}
    found = grapheme_lexicon(plain for plain in spelt.values() if len(plain.split()) == 1)
    # The model's words are looked up unchanged: a word with punctuation is not the word without.
    usable = {plain for word, plain in spelt.items() if plain in found and found.spelling_of(word) == plain}
    phones = set(lexicon.phones)
    variants = {word: found.pronunciations[word][0] for word in sorted(usable)}
    added = {word: letters for word, letters in variants.items() if phones.issuperset(letters)}
    strange = [word for word in variants if word not in added]
    notices = []
    if added:
        notices.append(f"spelt by their letters: {_shown(list(added))} that only the language model has")
    if strange:
        notices.append(
            f"left out of the language model: {_shown(strange)} with letters that no word of train has"
        )
    return lexicon.with_words(added), tuple(notices)


@dataclass(frozen=True)
class Pronounced:
    """Pronunciations of words.

    Attributes:
        lexicon: the whole given lexicon, else the pronunciations found for the words.
        unknown: words without a pronunciation, sorted.
        remedy: what to do about these.
        notices: messages about guessed words, and about the origin of the others.
    """

    lexicon: Lexicon
    unknown: list[str]
    remedy: str
    notices: tuple[str, ...] = ()


def find_pronunciations(words: set[str], options: PrepareOptions, given: Lexicon | None) -> Pronounced:
    """Look words up in the given lexicon, else in ours and CMUdict; guess the others if requested.

    Raises:
        ConfigError: g2p cannot be used.
    """
    if given is not None:
        lexicon, remedy = given, f"add them to {options.lexicon}"
    elif options.lexicon == GRAPHEMES:
        lexicon, remedy = grapheme_lexicon(words), "they have no letters: take them out"
    else:
        lexicon, remedy = built_in_pronunciations(words)
    sources = _sources(lexicon) if options.lexicon is None else ()
    unknown = sorted(words - lexicon.pronunciations.keys())
    if unknown and given is None and options.lexicon is None:
        remedy = _nearer_remedy(unknown, options) or remedy
    if not unknown or options.unknown_words != "g2p":
        return Pronounced(lexicon, unknown, remedy, sources)
    known, phones = lexicon, frozenset[str]()
    if given is None:
        parts = {part for word in unknown for part in parts_of(word)}
        known = Lexicon({**built_in_pronunciations(parts)[0].pronunciations, **lexicon.pronunciations})
        phones = ARPABET
    guessed = guess_pronunciations(unknown, known, options.g2p_model, phones)
    unknown = [word for word in unknown if word not in guessed]
    remedy = f"g2p knows none either; {remedy}"
    return Pronounced(lexicon.with_words(guessed), unknown, remedy, (*_guesses(guessed), *sources))


def _nearer_remedy(unknown: Sequence[str], options: PrepareOptions) -> str:
    """Return the remedy that the corpus suggests for words without a pronunciation; "": none."""
    if options.pattern and all(len(word) == 1 and word.isdecimal() for word in unknown):
        return f"write {{digit}} for {{word}} in --pattern '{options.pattern}', which reads 0 to 9 as words"
    beside = [source.path / "lexicon.txt" for source in options.sources]
    found = next(filter(Path.is_file, beside), None)
    return "" if found is None else f"give the lexicon that stands there: --lexicon {found}"


def _sources(lexicon: Lexicon) -> tuple[str, ...]:
    """Report the origin of the pronunciations that the user did not give, if not all are our own."""
    own = own_lexicon()
    ours = sum(word.lower() in own for word in lexicon.words)
    cmudict = counted(len(lexicon.words) - ours, "word")
    if ours == len(lexicon.words):
        return ()
    return (f"pronunciations: CMUdict's for {cmudict}, built in for {ours:,}; --lexicon takes yours",)


def _guesses(found: Mapping[str, Pronunciation]) -> tuple[str, ...]:
    if not found:
        return ()
    shown = [f"{word} = {' '.join(phones)}" for word, phones in list(found.items())[:_MAX_NAMED]]
    more = ", ..." if len(found) > _MAX_NAMED else ""
    return (
        f"pronunciations guessed (g2p) for {counted(len(found), 'word')}: {', '.join(shown)}{more}; "
        "lexicon.txt has all",
    )


def _out_of_vocabulary(splits: Splits, lexicon: Lexicon) -> tuple[str, ...]:
    """Report for each held-out split how many of its words cannot be recognised."""
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
