"""Read a corpus as the options say, and see that its audio is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from speechdp.data.corpora.corpus import Corpus
from speechdp.data.corpora.kaldi_dir import ReadingRules, left_out
from speechdp.data.corpora.missing_files import find_unusable
from speechdp.data.corpora.path_map import PathMap
from speechdp.data.corpora.pipes import PipeRunner
from speechdp.data.corpora.reader import read_corpus, reader_of
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.unreadable import without_audio
from speechdp.data.signal.audio import file_of
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError
from speechdp.options.prepare import PrepareOptions


def reading_rules(
    options: PrepareOptions, scratch: Path, progress: Progress, *, needs_text: bool = True
) -> ReadingRules:
    """Return how the files of a corpus are read; what pipes write goes to the folder `scratch`."""
    files = options.files
    return ReadingRules(
        path_map=PathMap.parse(files.path_map),
        pipes=PipeRunner(scratch, options.workers, progress) if files.allow_pipes else None,
        skip_incomplete=files.skip_incomplete,
        needs_text=needs_text,
    )


def read_whole_corpus(
    options: PrepareOptions,
    scratch: Path,
    progress: Progress,
    *,
    needs_text: bool = True,
    features: Callable[[int], FeatureConfig] | None = None,
) -> Corpus:
    """Read SOURCE.

    Args:
        features: those of audio of a sampling rate, in Hz: with --skip-incomplete audio of no frame is left
            out; None: such audio is left to the caller.

    Raises:
        ConfigError: it cannot be used, or names audio files that do not exist or are empty; options for the
            tables of a Kaldi data directory, which it is not.
    """
    rules = reading_rules(options, scratch, progress, needs_text=needs_text)
    source = options.paths[0]
    is_kaldi = reader_of(source, options.corpus) == "kaldi"
    if source.exists() and not is_kaldi:
        _refuse_options_of_tables(options, source)
    corpus = read_corpus(source, options.corpus, options.pattern, rules)
    notices = () if rules.pipes is None else rules.pipes.notices
    corpus = dataclasses.replace(corpus, notices=corpus.notices + notices)
    corpus = _with_audio(corpus, rules, is_kaldi=is_kaldi)
    if rules.skip_incomplete:
        corpus = _with_readable_audio(corpus, options.workers, progress, features)
    rules.path_map.refuse_unused(source)
    return corpus


def _refuse_options_of_tables(options: PrepareOptions, source: Path) -> None:
    given = {"--path-map": options.files.path_map, "--allow-pipes": options.files.allow_pipes}
    for option, value in given.items():
        if value:
            raise ConfigError(
                f"{source}: is not read as a Kaldi data directory, whose tables {option} is for; leave it out"
            )


def _with_audio(corpus: Corpus, rules: ReadingRules, *, is_kaldi: bool) -> Corpus:
    missing, empty = find_unusable(
        (file_of(utterance.audio) for utterance in corpus.utterances),
        str(corpus.source / "wav.scp" if is_kaldi else corpus.source),
        corpus.source if is_kaldi else None,
        may_be_left_out=rules.skip_incomplete,
        path_map=rules.path_map,
    )
    unusable = missing | empty
    if not unusable:
        return corpus
    there = tuple(u for u in corpus.utterances if file_of(u.audio) not in unusable)
    gone = {
        reason: [u.utterance_id for u in corpus.utterances if file_of(u.audio) in without]
        for reason, without in (("have no audio file", missing), ("have an empty audio file", empty))
    }
    return dataclasses.replace(corpus, utterances=there, notices=corpus.notices + left_out(gone))


def _with_readable_audio(
    corpus: Corpus,
    num_workers: int | None,
    progress: Progress,
    features: Callable[[int], FeatureConfig] | None,
) -> Corpus:
    """Leave out utterances without audio that can be read to its end, before splits and words are chosen."""
    audio = {u.utterance_id: u.audio for u in corpus.utterances}
    without = without_audio(audio, num_workers, progress, features)
    gone = {*chain.from_iterable(without.values())}
    there = tuple(u for u in corpus.utterances if u.utterance_id not in gone)
    notices = corpus.notices + left_out(without, max_named=5)
    return dataclasses.replace(corpus, utterances=there, notices=notices)
