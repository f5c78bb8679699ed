"""Read a corpus according to the options, and check that its audio exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

from speechdp.data.corpora.corpus import Corpus
from speechdp.data.corpora.kaldi_dir import ReadingRules, left_out
from speechdp.data.corpora.missing_files import find_unusable
from speechdp.data.corpora.path_map import PathMap
from speechdp.data.corpora.pipes import PipeRunner
from speechdp.data.corpora.reader import read_corpus, reader_of
from speechdp.data.corpora.sources import joined
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.unreadable import without_audio
from speechdp.data.signal.audio import file_of
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError
from speechdp.options.prepare import PrepareOptions


def reading_rules(
    options: PrepareOptions, scratch: Path, progress: Progress, *, needs_text: bool = True
) -> ReadingRules:
    """Return how the files of a corpus are read; the output of pipes goes to the folder `scratch`."""
    files = options.files
    return ReadingRules(
        path_map=PathMap.parse(files.path_map),
        pipes=PipeRunner(scratch, options.workers, progress) if files.allow_pipes else None,
        skip_incomplete=files.skip_incomplete,
        needs_text=needs_text,
        channel=files.channel,
    )


def read_whole_corpus(
    options: PrepareOptions,
    scratch: Path,
    progress: Progress,
    *,
    needs_text: bool = True,
    features: Callable[[int], FeatureConfig] | None = None,
) -> Corpus:
    """Read every SOURCE, and those of --dev and --test.

    Args:
        features: returns the feature settings for a sampling rate, in Hz: with --skip-incomplete, audio that
            is shorter than a frame is left out; None: the caller handles such audio.

    Raises:
        ConfigError: a source cannot be used, or names audio files that do not exist or are empty; there are
            options for tables, but no source has such tables; or the sources do not go together.
    """
    rules = reading_rules(options, scratch, progress, needs_text=needs_text)
    readers = {
        source.path: reader_of(source.path, options.corpus, options.pattern) for source in options.sources
    }
    of_tables = [path for path, reader in readers.items() if reader in ("kaldi", "manifest")]
    _refuse_options_of_tables(options, readers)
    # Tables beside folders of audio need no --pattern, which is for the folders; alone they refuse it.
    needless = of_tables if len(of_tables) < len(readers) else []
    # Read all tables before looking for any audio: only then is it known which --path-map are used.
    read = {
        source: read_corpus(
            source.path, options.corpus, None if source.path in needless else options.pattern, rules
        )
        for source in options.sources
    }
    parts = []
    for source, corpus in read.items():
        there = _with_audio(corpus, source.path, rules, reader=readers[source.path])
        if rules.skip_incomplete:
            there = _with_readable_audio(there, options.workers, progress, features)
        parts.append((source, there))
    rules.path_map.refuse_unused(next(iter(of_tables), options.paths[0]))
    whole = joined(parts, is_ruled=options.split is not None)
    notices = () if rules.pipes is None else rules.pipes.notices
    return dataclasses.replace(whole, notices=whole.notices + notices)


def _refuse_options_of_tables(options: PrepareOptions, readers: Mapping[Path, str]) -> None:
    """Refuse options for tables if none of the sources has such tables."""
    sources = [source.path for source in options.sources]
    if not all(path.exists() for path in sources):
        return  # reading them reports that
    kinds = set(readers.values())
    files = options.files
    refused = {
        "--path-map": files.path_map and kinds.isdisjoint({"kaldi", "manifest"}),
        "--allow-pipes": files.allow_pipes and "kaldi" not in kinds,
    }
    for option, is_refused in refused.items():
        if is_refused:
            others = ", or give a manifest" if option == "--path-map" else ""
            raise ConfigError(
                f"{sources[0]}: is not read as a Kaldi data directory, whose tables {option} is for; "
                f"leave it out{others}"
            )


def _with_audio(corpus: Corpus, source: Path, rules: ReadingRules, *, reader: str) -> Corpus:
    searched = {"kaldi": source, "manifest": source.parent}.get(reader)
    missing, empty = find_unusable(
        (file_of(utterance.audio) for utterance in corpus.utterances),
        str(source / "wav.scp" if reader == "kaldi" else source),
        searched,
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
    """Leave out utterances whose audio cannot be read to its end, before splits and words are chosen."""
    audio = {u.utterance_id: u.audio for u in corpus.utterances}
    without = without_audio(audio, num_workers, progress, features)
    gone = {*chain.from_iterable(without.values())}
    there = tuple(u for u in corpus.utterances if u.utterance_id not in gone)
    notices = corpus.notices + left_out(without, max_named=5)
    return dataclasses.replace(corpus, utterances=there, notices=notices)
