"""Prepare a corpus for synthesis: spectrograms and texts of its recordings, which may be joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from speechdp.counting import counted, counted_clause
from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.joining import (
    EDGE_S,
    PAUSE_S,
    JoinedUtterance,
    JoinRule,
    Splits,
    join_recordings,
    plan_joins,
    unjoined,
)
from speechdp.data.prepare.contents import Contents, deal_splits
from speechdp.data.prepare.divided_corpus import DividedCorpus
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.reading import read_whole_corpus
from speechdp.data.prepare.spectrograms import SynthesisLabels
from speechdp.data.prepare.vocabulary import find_pronunciations, given_lexicon
from speechdp.data.signal.audio import read_audio
from speechdp.data.signal.features import num_frames_of
from speechdp.errors import ConfigError
from speechdp.labels.lexicon import Lexicon, is_mark, refuse_unknown
from speechdp.labels.symbols import SymbolInventory
from speechdp.labels.text_normalise import normalise, plain_words
from speechdp.options.prepare import PrepareOptions

_MAX_LISTED = 20
_Made = TypeVar("_Made")


def read_corpus_for_synthesis(options: PrepareOptions, scratch: Path, progress: Progress) -> Contents:
    """Read the recordings of a corpus; each is an utterance, or they are joined according to the options.

    Raises:
        ConfigError: the corpus, its audio, texts, lexicon or the split cannot be used.
    """
    wanted, join = options.for_synthesis, options.for_synthesis.join_rule
    speakers = wanted.named_speakers
    corpus = _normalised(_chosen(read_whole_corpus(options, scratch, progress), speakers))
    lexicon, guessed = _lexicon(corpus, options) if wanted.input == "phones" else (None, ())
    symbols = SymbolInventory.of_kind(wanted.input, lexicon)
    _check_texts(corpus, symbols)
    divided = DividedCorpus.of(corpus, options, progress)
    splits = unjoined(divided.splits) if join is None else plan_joins(divided.splits, join, options.seed)
    rate = divided.sampling_rate
    labels = SynthesisLabels(symbols, lexicon, options.spectrogram_config(rate), rate)

    def num_frames(utterance: JoinedUtterance) -> int:
        """Estimate how many frames an utterance will have: the pauses are drawn later."""
        seconds = sum(divided.seconds[path] for path in utterance.recordings)
        if join is not None:
            seconds += 2 * EDGE_S + sum(PAUSE_S) / 2 * (len(utterance.recordings) - 1)
        return num_frames_of(round(seconds * rate), rate, labels.features)

    dealt = deal_splits(splits, num_frames, options.shards, options.seed)
    named = f"speakers={'+'.join(speakers)}" if speakers else ""
    return labels.contents(
        ";".join(filter(None, (divided.rule, named, join.spec if join else ""))),
        {
            name: [Recordings(part, join is not None, options.seed) for part in parts]
            for name, parts in dealt.items()
        },
        keep_train=wanted.keep_recordings == "all",
        notices=guessed + divided.notices + _joined(divided.splits, splits, join),
    )


@dataclass(frozen=True)
class Recordings:
    """Recorded utterances of a shard.

    Attributes:
        utterances: all utterances, in the shard's order.
        joined: whether recordings are scaled to one level and joined with pauses; else each is unchanged.
        seed: of the pauses.
    """

    utterances: tuple[JoinedUtterance, ...]
    joined: bool
    seed: int

    def samples(self, sampling_rate: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the samples (S,) in [-1, 1] of each utterance.  Raises ConfigError."""
        for utterance in self.utterances:
            recordings = [read_audio(path, sampling_rate) for path in utterance.recordings]
            if self.joined:
                rng = np.random.default_rng([self.seed, *utterance.utterance_id.encode()])
                yield join_recordings(recordings, sampling_rate, rng)
            else:
                (samples,) = recordings
                yield samples


def _joined(
    divided: dict[str, list[CorpusUtterance]], splits: Splits, join: JoinRule | None
) -> tuple[str, ...]:
    if join is None:
        return ()
    num_recordings = sum(len(recordings) for recordings in divided.values())
    num_utterances = sum(len(utterances) for utterances in splits.values())
    times = f", each used {join.times} times," if join.times > 1 else ""
    most = f"{join.fewest} to {join.most}" if join.most > join.fewest else str(join.most)
    into = counted(num_utterances, "utterance")
    return (f"joined {counted(num_recordings, 'recording')}{times} into {into} of {most}",)


def _chosen(corpus: Corpus, speakers: tuple[str, ...]) -> Corpus:
    unknown = [name for name in speakers if name not in corpus.speakers]
    if unknown:
        known = ", ".join(corpus.speakers[:_MAX_LISTED])
        raise ConfigError(
            f"{corpus.source}: --speakers: has no speaker {unknown[0]!r}; its speakers are {known}"
        )
    if not speakers:
        return corpus
    chosen = tuple(u for u in corpus.utterances if u.speaker in speakers)
    return dataclasses.replace(corpus, utterances=chosen)


def _normalised(corpus: Corpus) -> Corpus:
    """Normalise all texts to the form that is spelled.  Raises ConfigError naming the utterances."""
    texts = _of_each_text(corpus, normalise)
    utterances = (dataclasses.replace(u, text=text) for u, text in zip(corpus.utterances, texts, strict=True))
    return dataclasses.replace(corpus, utterances=tuple(utterances))


def _lexicon(corpus: Corpus, options: PrepareOptions) -> tuple[Lexicon, tuple[str, ...]]:
    """Find the pronunciations of the corpus's words, in lower case; return them with notices.

    Raises:
        ConfigError: some words have none.
    """
    words = {word for utterance in corpus.utterances for word in plain_words(utterance.text)}
    given = given_lexicon(options.lexicon)
    found = find_pronunciations(words, options, None if given is None else given.in_lower_case())
    marks = sorted(filter(is_mark, found.unknown))
    if marks:
        raise ConfigError(
            f"{corpus.source}: transcripts have {counted(len(marks), 'mark')} that cannot be spoken, first "
            f"{marks[0]}; take them out"
        )
    can_guess = given is not None and options.unknown_words != "g2p"
    guess = ", or have them guessed by --unknown-words g2p" if can_guess else ""
    refuse_unknown(found.unknown, f"{found.remedy}{guess}")
    return found.lexicon.restrict(words), found.notices


def _check_texts(corpus: Corpus, symbols: SymbolInventory) -> None:
    """Refuse texts that cannot be spelled before audio is read.  Raises ConfigError that names utterances."""
    _of_each_text(corpus, symbols.encode)


def _of_each_text(corpus: Corpus, make: Callable[[str], _Made]) -> list[_Made]:
    """Apply `make` to each text.  Raises ConfigError naming the utterances if some are refused."""
    made: list[_Made] = []
    refused: list[tuple[CorpusUtterance, ConfigError]] = []
    for utterance in corpus.utterances:
        try:
            made.append(make(utterance.text))
        except ConfigError as error:
            refused.append((utterance, error))
    if refused:
        (first, fault), *others = refused
        named = ", ".join(utterance.utterance_id for utterance, _ in others[:_MAX_LISTED])
        more = ", ..." if len(others) > _MAX_LISTED else ""
        also = (
            f"; {counted_clause(len(others), 'more text', 'are')} refused, of {named}{more}" if others else ""
        )
        raise ConfigError(f"{first.audio}: utterance {first.utterance_id}: {fault}{also}") from fault
    return made
