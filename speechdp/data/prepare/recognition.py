"""Make a data directory from a corpus: audio and transcripts in, shards out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from speechdp.data.corpora.audio_folder import read_audio_folder
from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.kaldi_dir import is_kaldi_dir, read_kaldi_dir
from speechdp.data.corpora.splits import choose_rule, deal, split_corpus
from speechdp.data.prepare.jobs import Progress, run_jobs
from speechdp.data.prepare.shard_jobs import STAGES, ShardJob, ShardResult
from speechdp.data.shards.data_dir import check_target, new_data_dir
from speechdp.data.shards.dataset import Dataset, Manifest, SplitEntry
from speechdp.data.shards.layout import Stored
from speechdp.data.signal.audio import AudioInfo, common_sampling_rate, probe
from speechdp.data.signal.features import FeatureConfig, check_mel_bins, num_frames_of, usual_mel_bins
from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon, lexicon_for

_PROBE_STAGE = "reading headers"


@dataclass(frozen=True)
class PrepareOptions:
    """What `speechdp prepare SOURCE DATA` was asked for.

    Attributes:
        source: a Kaldi data directory or a folder of audio.
        data: the data directory to make.
        split: how to divide the corpus (splits.py); None chooses by the corpus.
        held_out_speaker: this speaker becomes the test part.
        num_shards: of the training part; dev and test get a quarter as many.
        features: what to compute.
        fit_mel_bins: take the usual number of mel filters for the sampling rate instead of `features`' own.
        resample_hz: bring all audio to this rate; None keeps the files' own.
        lexicon: the user's lexicon.txt, or None.
        seed: of the shuffling and of the random split.
        pattern: of labels in file names (audio_folder.py).
        overwrite: replace a data directory that exists.
        num_workers: processes; None means one a core.
        stored: features, or the audio to make them from while training.
    """

    source: Path
    data: Path
    split: str | None = None
    held_out_speaker: str | None = None
    num_shards: int = 8
    features: FeatureConfig = field(default_factory=FeatureConfig)
    fit_mel_bins: bool = False
    resample_hz: int | None = None
    lexicon: Path | None = None
    seed: int = 1
    pattern: str | None = None
    overwrite: bool = False
    num_workers: int | None = None
    stored: Stored = "features"

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"--shards {self.num_shards}: give at least 1")


@dataclass(frozen=True)
class Prepared:
    """What came of it; `num_too_short` utterances have fewer frames than their transcript has states."""

    dataset: Dataset
    num_too_short: int


def prepare(options: PrepareOptions, progress: Progress) -> Prepared:
    """Read a corpus and write a data directory, whole or not at all.

    Args:
        options: see PrepareOptions.
        progress: told the stage, how much is done, and of how much.

    Raises:
        ConfigError: the corpus, its audio, the lexicon, the split or the target cannot be used.
        ShardError: the disk is full or cannot be written.
    """
    check_target(options.data, options.overwrite)
    corpus = open_corpus(options.source, options.pattern)
    corpus = corpus.respelled(_spelling(corpus, options.lexicon))
    lexicon = lexicon_for(corpus.words, options.lexicon)
    rule = choose_rule(corpus, options.split, options.held_out_speaker, options.seed)
    splits = split_corpus(corpus, rule)
    infos = probe_corpus(corpus, progress)
    sampling_rate = common_sampling_rate(infos, options.resample_hz)
    features = options.features
    if options.fit_mel_bins:
        features = dataclasses.replace(features, num_mel_bins=usual_mel_bins(sampling_rate))
    check_mel_bins(sampling_rate, features)
    manifest = Manifest(
        sampling_rate=sampling_rate,
        features=features,
        num_classes=StateInventory(lexicon.phones).num_classes,
        alignment="flat",
        split=rule.spec,
        splits={},
        stored=options.stored,
    )
    seconds = {info.path: info.num_samples / info.sampling_rate for info in infos}
    with new_data_dir(options.data, options.overwrite) as directory:
        jobs = [
            job
            for name, utterances in splits.items()
            for job in _jobs(_Part(name, utterances, directory), manifest, lexicon, seconds, options)
        ]
        results = run_jobs(jobs, STAGES[options.stored], options.num_workers, progress)
        entries = {name: _entry(name, splits[name], jobs, results) for name in splits}
        finish(directory, manifest, entries, lexicon)
    return Prepared(
        Dataset.open(options.data, just_written=True), sum(result.num_too_short for result in results)
    )


def open_corpus(source: Path, pattern: str | None) -> Corpus:
    """Read a Kaldi data directory or a folder of audio, whichever it is.  Raises ConfigError."""
    if is_kaldi_dir(source):
        if pattern is not None:
            raise ConfigError(
                f"{source}: is a Kaldi data directory, which has transcripts; leave --pattern out"
            )
        return read_kaldi_dir(source)
    return read_audio_folder(source, pattern)


def probe_corpus(corpus: Corpus, progress: Progress) -> list[AudioInfo]:
    """Read the headers of all audio.  Raises ConfigError on what is no audio of one channel."""
    total = len(corpus.utterances)
    infos = []
    for number, utterance in enumerate(corpus.utterances, 1):
        infos.append(probe(utterance.audio))
        if number % 100 == 0 or number == total:
            progress(_PROBE_STAGE, number, total)
    return infos


def finish(directory: Path, manifest: Manifest, splits: dict[str, SplitEntry], lexicon: Lexicon) -> None:
    """Write lexicon, classes and, last, data.json, whose presence says that the directory is whole."""
    lexicon.save(directory / "lexicon.txt")
    StateInventory(lexicon.phones).save(directory / "classes.txt")
    dataclasses.replace(manifest, splits=splits).write(directory)


def shards_of_split(name: str, num_shards: int) -> int:
    """Return how many shards a split gets: dev and test a quarter of train's, for they are small."""
    return num_shards if name == "train" else max(1, num_shards // 4)


@dataclass(frozen=True)
class _Part:
    name: str
    utterances: list[CorpusUtterance]
    directory: Path


def _jobs(
    part: _Part, manifest: Manifest, lexicon: Lexicon, seconds: dict[Path, float], options: PrepareOptions
) -> list[ShardJob]:
    header = manifest.header(part.name)
    rate = manifest.sampling_rate
    sizes = [num_frames_of(round(seconds[u.audio] * rate), rate, manifest.features) for u in part.utterances]
    short = [u.audio for u, size in zip(part.utterances, sizes, strict=True) if size == 0]
    if short:
        others = f", as are {len(short) - 1} others of {part.name}" if len(short) > 1 else ""
        raise ConfigError(f"{short[0]}: is shorter than one frame{others}; leave it out of the corpus")
    inventory = StateInventory(lexicon.phones)  # of the whole corpus, not of one shard's words
    num_shards = shards_of_split(part.name, options.num_shards)
    dealt = deal(part.utterances, sizes, num_shards, f"{options.seed} {part.name}")
    return [
        ShardJob(
            part.directory / f"{part.name}-{number:05d}.h5",
            header,
            tuple(utterances),
            lexicon.restrict({word for utterance in utterances for word in utterance.words}),
            inventory,
        )
        for number, utterances in enumerate(dealt)
    ]


def _entry(
    name: str, utterances: list[CorpusUtterance], jobs: Sequence[ShardJob], results: Sequence[ShardResult]
) -> SplitEntry:
    entries = tuple(r.entry for job, r in zip(jobs, results, strict=True) if job.header.split == name)
    return SplitEntry.of(entries, (utterance.speaker for utterance in utterances))


def _spelling(corpus: Corpus, user_lexicon: Path | None) -> dict[str, str]:
    """Map words the user's lexicon has in upper case only; many Kaldi lexicons are written so."""
    if user_lexicon is None:
        return {}
    known = Lexicon.load(user_lexicon)
    return {word: word.upper() for word in corpus.words if word not in known and word.upper() in known}
