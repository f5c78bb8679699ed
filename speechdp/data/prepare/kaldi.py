"""Make a data directory from a Kaldi data directory and the alignment of a Kaldi system."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.kaldi_dir import read_table, read_wav_scp
from speechdp.data.corpora.splits import choose_rule, deal, split_corpus
from speechdp.data.kaldi.alignments import AlignmentSource, alignment_source
from speechdp.data.kaldi.matrix import MatrixPlace, read_scp
from speechdp.data.prepare.jobs import Progress, run_jobs
from speechdp.data.prepare.kaldi_jobs import AlignedUtterance, KaldiShardJob
from speechdp.data.prepare.kaldi_settings import KaldiOptions, feature_settings
from speechdp.data.prepare.kaldi_unaligned import Unaligned, manifest_like, with_frames
from speechdp.data.prepare.recognition import shards_of_split
from speechdp.data.shards.data_dir import check_target, new_data_dir
from speechdp.data.shards.dataset import Dataset, Manifest, SplitEntry
from speechdp.errors import ConfigError, ShardError
from speechdp.files import cannot_be_written
from speechdp.labels.kaldi_pdfs import KaldiPdfs

ALIGNMENT = "kaldi"
_PDFS_NAME = "pdfs.tmp"
_ALIGNMENT_STAGE = "reading alignments"


@dataclass(frozen=True)
class KaldiPrepared:
    """What came of it; `notices` say what was left out."""

    dataset: Dataset
    notices: tuple[str, ...]


def prepare_kaldi(options: KaldiOptions, progress: Progress) -> KaldiPrepared:
    """Write a data directory whose targets are the pdfs of a Kaldi system, whole or not at all.

    Raises:
        ConfigError: a file of Kaldi's is missing, damaged or does not fit the others.
        ShardError: the disk is full or cannot be written.
    """
    check_target(options.data, options.overwrite)
    if options.like is not None:
        return _prepare_unaligned(options, Dataset.open(options.like), progress)
    sources = _read_sources(options)
    speakers = read_table(options.kaldi_dir / "utt2spk")
    texts = _read_texts(options.kaldi_dir)
    alignments = alignment_source(options.ali_dir, options.ali_pdf)
    with new_data_dir(options.data, options.overwrite) as directory:
        wanted = {u for u in speakers if u in sources}
        places = _gather_pdfs(alignments, wanted, directory / _PDFS_NAME, progress)
        utterances = [
            AlignedUtterance(
                u, speakers[u], texts.get(u, ""), sources[u], place.first_frame, place.num_frames
            )
            for u, place in sorted(places.of.items())
        ]
        if not utterances:
            raise ConfigError(f"{options.kaldi_dir}: none of its utterances has an alignment; check --ali")
        config, sampling_rate = feature_settings(options, utterances, progress)
        manifest = Manifest(
            sampling_rate=sampling_rate,
            features=config,
            num_classes=alignments.num_pdfs or places.max_pdf + 1,
            alignment=ALIGNMENT,
            split="",
            splits={},
            stored=options.stored,
        )
        spec, splits = _divide(options, utterances)
        corpus = _Corpus(directory, dataclasses.replace(manifest, split=spec), splits)
        _write(options, corpus, progress)
    notices = _left_out(options, sources, speakers, places)
    if alignments.num_pdfs is None:
        notices += (
            f"{manifest.num_classes} pdfs, by the largest in {options.ali_pdf}; --ali would count them",
        )
    return KaldiPrepared(Dataset.open(options.data, just_written=True), notices)


def _prepare_unaligned(options: KaldiOptions, like: Dataset, progress: Progress) -> KaldiPrepared:
    """Write data to be scored only, all in the split `test`, made as `like` was."""
    options = dataclasses.replace(options, use_feats=like.features.kind == "kaldi")
    manifest = manifest_like(like, options.stored)
    sources = _read_sources(options)
    speakers = read_table(options.kaldi_dir / "utt2spk")
    texts = _read_texts(options.kaldi_dir)
    wanted = [Unaligned(u, speakers[u], texts.get(u, ""), sources[u]) for u in speakers if u in sources]
    places = _Places()
    with new_data_dir(options.data, options.overwrite) as directory:
        utterances = list(with_frames(wanted, manifest, progress))
        if not utterances:
            raise ConfigError(f"{options.kaldi_dir}: has no utterance to score; check feats.scp or wav.scp")
        places.of.update({u.utterance_id: _FramePlace(u.first_frame, u.num_frames) for u in utterances})
        _write(options, _Corpus(directory, manifest, {"test": utterances}), progress)
    return KaldiPrepared(
        Dataset.open(options.data, just_written=True), _left_out(options, sources, speakers, places)
    )


@dataclass(frozen=True)
class _FramePlace:
    first_frame: int
    num_frames: int


@dataclass
class _Places:
    """Where the utterances' pdfs stand, and what was found beside them."""

    of: dict[str, _FramePlace] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    max_pdf: int = 0


@dataclass(frozen=True)
class _Corpus:
    directory: Path
    manifest: Manifest
    splits: dict[str, list[AlignedUtterance]]


def _read_sources(options: KaldiOptions) -> dict[str, Path | MatrixPlace]:
    folder = options.kaldi_dir
    if options.use_feats:
        return dict(read_scp(folder / "feats.scp"))
    if (folder / "segments").exists():
        raise ConfigError(
            f"{folder / 'segments'}: segments are not cut out of audio; take Kaldi's features with --feats"
        )
    return dict(read_wav_scp(folder))


def _read_texts(folder: Path) -> dict[str, str]:
    path = folder / "text"
    return read_table(path, may_be_empty=True) if path.exists() else {}


def _gather_pdfs(alignments: AlignmentSource, wanted: set[str], path: Path, progress: Progress) -> _Places:
    """Write the pdfs of all utterances into one file, so that processes find them without holding them."""
    places, num_frames = _Places(), 0
    try:
        with path.open("wb") as file:
            for utterance, pdfs in alignments.pdfs():
                if utterance not in wanted:
                    places.unknown.append(utterance)
                elif len(pdfs):
                    file.write(np.ascontiguousarray(pdfs, dtype="<i4").data)
                    places.of[utterance] = _FramePlace(num_frames, len(pdfs))
                    places.max_pdf = max(places.max_pdf, int(pdfs.max()))
                    num_frames += len(pdfs)
                    progress(_ALIGNMENT_STAGE, len(places.of), len(wanted))
    except OSError as error:
        raise ShardError(cannot_be_written(path, error)) from error
    return places


def _divide(
    options: KaldiOptions, utterances: list[AlignedUtterance]
) -> tuple[str, dict[str, list[AlignedUtterance]]]:
    """Return the rule that divides the utterances, as data.json has it, and the splits."""
    rows = {u.utterance_id: u for u in utterances}
    plain = (CorpusUtterance(u.utterance_id, u.speaker, u.text, options.kaldi_dir) for u in utterances)
    corpus = Corpus(options.kaldi_dir, tuple(plain))
    rule = choose_rule(corpus, options.split, options.held_out_speaker, options.seed)
    parts = split_corpus(corpus, rule)
    return rule.spec, {name: [rows[u.utterance_id] for u in part] for name, part in parts.items()}


def _write(options: KaldiOptions, corpus: _Corpus, progress: Progress) -> None:
    splits = corpus.splits
    jobs = {name: _jobs(options, corpus, name, utterances) for name, utterances in splits.items()}
    all_jobs = [job for part in jobs.values() for job in part]
    entries = run_jobs(all_jobs, "writing shards", options.num_workers, progress)
    parts: dict[str, SplitEntry] = {}
    for name, utterances in splits.items():
        own, entries = entries[: len(jobs[name])], entries[len(jobs[name]) :]
        parts[name] = SplitEntry.of(own, (utterance.speaker for utterance in utterances))
    (corpus.directory / _PDFS_NAME).unlink(missing_ok=True)
    manifest = dataclasses.replace(corpus.manifest, splits=parts)
    KaldiPdfs(manifest.num_classes).save(corpus.directory / "classes.txt")
    manifest.write(corpus.directory)


def _jobs(
    options: KaldiOptions, corpus: _Corpus, name: str, utterances: list[AlignedUtterance]
) -> list[KaldiShardJob]:
    manifest = corpus.manifest
    header = manifest.header(name)
    sizes = [utterance.num_frames for utterance in utterances]
    dealt = deal(utterances, sizes, shards_of_split(name, options.num_shards), f"{options.seed} {name}")
    by_speaker = manifest.features.cmvn == "speaker"
    return [
        KaldiShardJob(
            path=corpus.directory / f"{name}-{number:05d}.h5",
            header=header,
            utterances=tuple(part),
            pdfs=corpus.directory / _PDFS_NAME,
            cmvn=options.kaldi_dir / "cmvn.scp" if by_speaker else None,
        )
        for number, part in enumerate(dealt)
    ]


def _left_out(
    options: KaldiOptions,
    sources: dict[str, Path | MatrixPlace],
    speakers: dict[str, str],
    places: _Places,
) -> tuple[str, ...]:
    table = "feats.scp" if options.use_feats else "wav.scp"
    lacking = "have no frame" if options.like else "have no alignment"
    reasons = {
        f"are not in {table}": [u for u in speakers if u not in sources],
        "are not in utt2spk": [u for u in sources if u not in speakers],
        lacking: [u for u in speakers if u in sources and u not in places.of],
        f"are aligned, but not in {options.kaldi_dir}": [
            u for u in places.unknown if u not in sources and u not in speakers
        ],
    }
    return tuple(
        f"left out: {len(names)} utterances that {reason}, first {names[0]}"
        for reason, names in reasons.items()
        if names
    )
