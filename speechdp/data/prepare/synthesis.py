"""Make a data directory for synthesis: audio and transcripts in, spectrograms and symbols out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.joining import (
    EDGE_S,
    PAUSE_S,
    JoinedUtterance,
    JoinRule,
    Splits,
    plan_joins,
    unjoined,
)
from speechdp.data.corpora.splits import choose_rule, deal, split_corpus
from speechdp.data.prepare.jobs import Progress, run_jobs
from speechdp.data.prepare.recognition import open_corpus, probe_corpus, shards_of_split
from speechdp.data.prepare.recordings import list_recordings
from speechdp.data.prepare.shard_jobs import ShardResult
from speechdp.data.prepare.spectrogram_jobs import SpectrogramJob
from speechdp.data.shards.data_dir import check_target, new_data_dir
from speechdp.data.shards.dataset import SYMBOLS_NAME, Dataset, Manifest, SplitEntry
from speechdp.data.signal.audio import common_sampling_rate
from speechdp.data.signal.features import FeatureConfig, num_frames_of
from speechdp.data.signal.spectrogram import FRAME_LENGTH_MS, FRAME_SHIFT_MS, NUM_MEL_BINS, spectrogram_config
from speechdp.errors import ConfigError
from speechdp.labels.lexicon import Lexicon, lexicon_for
from speechdp.labels.symbols import SymbolInventory, SymbolKind
from speechdp.labels.text_normalise import normalise, plain_words

_MAX_LISTED = 20


@dataclass(frozen=True)
class SpectrogramOptions:
    """Settings of spectrograms; num_fft None takes the usual number of points (spectrogram.py)."""

    num_mel_bins: int = NUM_MEL_BINS
    frame_length_ms: float = FRAME_LENGTH_MS
    frame_shift_ms: float = FRAME_SHIFT_MS
    num_fft: int | None = None
    dtype: Literal["float16", "float32"] = "float16"

    def config(self, sampling_rate: int) -> FeatureConfig:
        """Return the settings at a sampling rate in Hz.  Raises ConfigError where they do not fit."""
        return spectrogram_config(
            sampling_rate,
            num_mel_bins=self.num_mel_bins,
            frame_length_ms=self.frame_length_ms,
            frame_shift_ms=self.frame_shift_ms,
            num_fft=self.num_fft,
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class PrepareSynthesisOptions:
    """What `speechdp prepare SOURCE DATA --task synthesis` was asked for.

    Attributes:
        source: a Kaldi data directory or a folder of audio.
        data: the data directory to make.
        input: what texts are written in.
        speakers: who is taken; none named: all.
        join: how recordings are joined into longer utterances; None: not at all.
        spectrogram: settings of the spectrograms.
        keep_train: keep the recordings of train beside those of dev and test.
        split, held_out_speaker, num_shards, resample_hz, lexicon, seed, pattern, overwrite, num_workers: as
            in prepare.PrepareOptions.
    """

    source: Path
    data: Path
    input: SymbolKind = "characters"
    speakers: tuple[str, ...] = ()
    join: JoinRule | None = None
    spectrogram: SpectrogramOptions = field(default_factory=SpectrogramOptions)
    keep_train: bool = False
    split: str | None = None
    held_out_speaker: str | None = None
    num_shards: int = 8
    resample_hz: int | None = None
    lexicon: Path | None = None
    seed: int = 1
    pattern: str | None = None
    overwrite: bool = False
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"--shards {self.num_shards}: give at least 1")
        if self.lexicon is not None and self.input == "characters":
            raise ConfigError("--lexicon goes with --input phones; characters need none")


@dataclass(frozen=True)
class PreparedSynthesis:
    """What came of it, and what to tell the user."""

    dataset: Dataset
    notices: tuple[str, ...]


def prepare_synthesis(options: PrepareSynthesisOptions, progress: Progress) -> PreparedSynthesis:
    """Read a corpus and write a data directory of spectrograms, whole or not at all.

    Args:
        options: see SynthesisOptions.
        progress: told the stage, how much is done, and of how much.

    Raises:
        ConfigError: the corpus, its audio, texts, lexicon, the split or the target cannot be used.
        ShardError: the disk is full or cannot be written.
    """
    check_target(options.data, options.overwrite)
    corpus = _chosen(open_corpus(options.source, options.pattern), options.speakers)
    corpus = _normalised(corpus)
    lexicon = _lexicon(corpus, options.lexicon) if options.input == "phones" else None
    symbols = SymbolInventory.of_kind(options.input, lexicon)
    _check_texts(corpus, symbols)
    rule = choose_rule(corpus, options.split, options.held_out_speaker, options.seed)
    divided = split_corpus(corpus, rule)
    join = options.join
    splits = unjoined(divided) if join is None else plan_joins(divided, join, options.seed)
    infos = probe_corpus(corpus, progress)
    sampling_rate = common_sampling_rate(infos, options.resample_hz)
    speakers = f"speakers={'+'.join(options.speakers)}" if options.speakers else ""
    manifest = Manifest(
        sampling_rate=sampling_rate,
        features=options.spectrogram.config(sampling_rate),
        num_classes=symbols.num_symbols,
        alignment="text",
        split=";".join(filter(None, (rule.spec, speakers, join.spec if join else ""))),
        splits={},
        stored="spectrograms",
    )
    seconds = {info.path: info.num_samples / info.sampling_rate for info in infos}
    with new_data_dir(options.data, options.overwrite) as directory:
        work = _Work(directory, manifest, symbols, seconds, options)
        jobs = [job for name, utterances in splits.items() for job in work.jobs(name, utterances)]
        results = run_jobs(jobs, "computing spectrograms", options.num_workers, progress)
        entries = {name: _entry(name, splits[name], jobs, results) for name in splits}
        list_recordings(directory, splits)
        finish_synthesis(directory, dataclasses.replace(manifest, splits=entries), symbols, lexicon)
    return PreparedSynthesis(
        Dataset.open(options.data, just_written=True), (*_joined(divided, splits, join), *new_texts(splits))
    )


def finish_synthesis(
    directory: Path, manifest: Manifest, symbols: SymbolInventory, lexicon: Lexicon | None
) -> None:
    """Write lexicon, symbols and, last, data.json, whose presence says that the directory is whole."""
    if lexicon is not None:
        lexicon.save(directory / "lexicon.txt")
    symbols.save(directory / SYMBOLS_NAME)
    symbols.save_classes(directory / "classes.txt")
    manifest.write(directory)


class _Spoken(Protocol):
    @property
    def text(self) -> str: ...


def new_texts(splits: Mapping[str, Sequence[_Spoken]]) -> tuple[str, ...]:
    """Say how many held-out texts do not occur in train: one line, or none without held-out splits."""
    known = {utterance.text for utterance in splits["train"]}
    counts = [
        f"{sum(u.text not in known for u in utterances)} of {len(utterances)} in {name}"
        for name, utterances in splits.items()
        if name != "train"
    ]
    return (f"texts that do not occur in train: {', '.join(counts)}",) if counts else ()


def _joined(
    divided: dict[str, list[CorpusUtterance]], splits: Splits, join: JoinRule | None
) -> tuple[str, ...]:
    if join is None:
        return ()
    num_recordings = sum(len(recordings) for recordings in divided.values())
    num_utterances = sum(len(utterances) for utterances in splits.values())
    times = f", each used {join.times} times," if join.times > 1 else ""
    most = f"{join.fewest} to {join.most}" if join.most > join.fewest else str(join.most)
    return (f"joined {num_recordings} recordings{times} into {num_utterances} utterances of {most}",)


@dataclass(frozen=True)
class _Work:
    directory: Path
    manifest: Manifest
    symbols: SymbolInventory
    seconds: dict[Path, float]
    options: PrepareSynthesisOptions

    def jobs(self, name: str, utterances: list[JoinedUtterance]) -> list[SpectrogramJob]:
        """Deal a split's utterances out to its shards."""
        options = self.options
        sizes = [self._num_frames(utterance) for utterance in utterances]
        num_shards = shards_of_split(name, options.num_shards)
        dealt = deal(utterances, sizes, num_shards, f"{options.seed} {name}")
        return [
            SpectrogramJob(
                path=self.directory / f"{name}-{number:05d}.h5",
                header=self.manifest.header(name),
                utterances=tuple(part),
                symbols=self.symbols,
                joined=options.join is not None,
                seed=options.seed,
                keep_train=options.keep_train,
            )
            for number, part in enumerate(dealt)
        ]

    def _num_frames(self, utterance: JoinedUtterance) -> int:
        """Return about how many frames an utterance will have: pauses are drawn later."""
        seconds = sum(self.seconds[path] for path in utterance.recordings)
        if self.options.join is not None:
            seconds += 2 * EDGE_S + sum(PAUSE_S) / 2 * (len(utterance.recordings) - 1)
        rate = self.manifest.sampling_rate
        return num_frames_of(round(seconds * rate), rate, self.manifest.features)


def _entry(
    name: str,
    utterances: list[JoinedUtterance],
    jobs: Sequence[SpectrogramJob],
    results: Sequence[ShardResult],
) -> SplitEntry:
    entries = [r.entry for job, r in zip(jobs, results, strict=True) if job.header.split == name]
    return SplitEntry.of(entries, (utterance.speaker for utterance in utterances))


def _chosen(corpus: Corpus, speakers: tuple[str, ...]) -> Corpus:
    unknown = [name for name in speakers if name not in corpus.speakers]
    if unknown:
        known = ", ".join(corpus.speakers[:_MAX_LISTED])
        raise ConfigError(
            f"{corpus.source}: --speakers: has no speaker {unknown[0]!r}; its speakers are {known}"
        )
    if not speakers:
        return corpus
    return Corpus.of(corpus.source, (u for u in corpus.utterances if u.speaker in speakers))


def _normalised(corpus: Corpus) -> Corpus:
    """Bring all texts to the form they are spelled in.  Raises ConfigError naming the utterance."""
    utterances = []
    for utterance in corpus.utterances:
        try:
            text = normalise(utterance.text)
        except ConfigError as error:
            raise ConfigError(f"{utterance.audio}: utterance {utterance.utterance_id}: {error}") from error
        utterances.append(dataclasses.replace(utterance, text=text))
    return Corpus(corpus.source, tuple(utterances))


def _lexicon(corpus: Corpus, path: Path | None) -> Lexicon:
    """Find the pronunciations of the corpus' words; a lexicon in upper case serves as well."""
    words = sorted({word for utterance in corpus.utterances for word in plain_words(utterance.text)})
    if path is None:
        return lexicon_for(words)
    lexicon = Lexicon.load(path)
    spelled = {word: word if word in lexicon else word.upper() for word in words}
    found = lexicon_for(spelled.values(), path)
    return Lexicon({word: found.pronunciations[spelled[word]] for word in words})


def _check_texts(corpus: Corpus, symbols: SymbolInventory) -> None:
    """Refuse what cannot be spelled before any audio is read.  Raises ConfigError naming the utterance."""
    for utterance in corpus.utterances:
        try:
            symbols.encode(utterance.text)
        except ConfigError as error:
            raise ConfigError(f"{utterance.audio}: utterance {utterance.utterance_id}: {error}") from error
