"""Prepare a Kaldi data directory, with the alignment of a Kaldi system or, for scoring only, without."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.kaldi_dir import (
    ReadingRules,
    Segment,
    left_out,
    read_audio_table,
    read_segments,
    read_speakers,
    read_table,
)
from speechdp.data.corpora.missing_files import find_unusable
from speechdp.data.corpora.splits import choose_rule, split_corpus
from speechdp.data.kaldi.alignments import AlignmentSource, alignment_source
from speechdp.data.kaldi.cmvn import SpeakerCmvn
from speechdp.data.kaldi.matrix import MatrixPlace, read_scp, rows_of_segments
from speechdp.data.prepare.contents import Contents, deal_splits
from speechdp.data.prepare.divided_corpus import warn_of_same_sound, warn_of_splits
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.kaldi_settings import (
    check_frame_shift,
    cmvn_opts_of,
    count_frames,
    feature_settings,
    frame_shift_ms,
    manifest_like,
    snipped_frames,
)
from speechdp.data.prepare.kaldi_shards import KaldiShard, KaldiUtterance
from speechdp.data.prepare.like import open_like
from speechdp.data.prepare.reading import reading_rules
from speechdp.data.prepare.unreadable import without_audio
from speechdp.data.shards.dataset import Manifest
from speechdp.data.signal.audio import AudioSource, file_of
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError, ShardError
from speechdp.files import cannot_be_written
from speechdp.labels.kaldi_pdfs import KaldiPdfs
from speechdp.options.prepare import PrepareOptions

_Splits = Mapping[str, Sequence[KaldiUtterance]]


def read_kaldi(options: PrepareOptions, scratch: Path, progress: Progress) -> Contents:
    """Read a Kaldi data directory; targets are the pdfs of its alignment.

    Raises:
        ConfigError: a file of Kaldi's is missing, damaged or does not fit the others.
        ShardError: the disk is full or cannot be written.
    """
    folder = options.from_kaldi.kaldi
    assert folder is not None
    pdfs = scratch / "pdfs.tmp"
    rules = reading_rules(options, scratch, progress)
    if options.like is None:
        config = options.feature_config()
        if options.from_kaldi.feats:
            check_frame_shift(folder, options, config)
        listed = _Listed.read(folder, rules, config, feats=options.from_kaldi.feats)
        listed = listed.with_readable_audio(options, progress)
        manifest, splits, notices = _align(listed, options, pdfs, progress)
    else:
        manifest = manifest_like(open_like(options.like), options.store)
        if options.from_kaldi.feats and manifest.features.kind != "kaldi":
            raise ConfigError(
                f"--feats: the model of --like {options.like} was trained on features computed from audio; "
                "leave --feats out"
            )
        if manifest.features.kind == "kaldi":
            if options.files.channel is not None:
                raise ConfigError(
                    f"--channel: the model of --like {options.like} was trained on Kaldi's features, not on "
                    "audio; leave it out"
                )
            check_frame_shift(folder, options, manifest.features)
        listed = _Listed.read(folder, rules, manifest.features, feats=manifest.features.kind == "kaldi")
        listed = listed.with_readable_audio(options, progress)
        utterances, channels = count_frames(listed.utterances, manifest, progress)
        if not utterances:
            raise ConfigError(f"{folder}: has no utterance to score; check feats.scp or wav.scp")
        splits, notices = {"test": utterances}, listed.left_out(utterances, "have no frame") + channels
    cmvn = SpeakerCmvn(folder / "cmvn.scp", rules) if manifest.features.cmvn == "speaker" else None
    rules.path_map.refuse_unused(folder)
    dealt = deal_splits(splits, lambda utterance: utterance.num_frames, options.shards, options.seed)
    return Contents(
        manifest=manifest,
        shards={name: [KaldiShard(part, pdfs, cmvn) for part in parts] for name, parts in dealt.items()},
        stage="writing shards",
        save=lambda directory: KaldiPdfs(manifest.num_classes).save(directory / "classes.txt"),
        notices=notices + (() if rules.pipes is None else rules.pipes.notices),
    )


@dataclass(frozen=True)
class _Listed:
    """The entries of a data directory: features or audio and the speaker of each utterance."""

    folder: Path
    table: str
    sources: Mapping[str, AudioSource | MatrixPlace]
    speakers: Mapping[str, str]
    utterances: list[KaldiUtterance]
    gone: Sequence[str]  # in the table, but the file does not exist or is empty
    #: In the table, but without usable audio; by the reason, as messages state it.
    without_audio: Mapping[str, Sequence[str]] = field(default_factory=dict)
    cut: _CutFeatures | None = None  # the features are those of whole recordings

    @classmethod
    def read(cls, folder: Path, rules: ReadingRules, config: FeatureConfig, *, feats: bool) -> _Listed:
        """Read feats.scp or wav.scp, segments, utt2spk and, if it exists, text.  Raises ConfigError."""
        table = "feats.scp" if feats else "wav.scp"
        # Utterances in segments but not in the table are left out and reported, as with features.
        lenient = replace(rules, skip_incomplete=True)
        cut = _CutFeatures.read(folder, rules, config) if feats else None
        read = read_audio_table(folder, lenient) if cut is None else cut.places(snip_edges=config.snip_edges)
        sources = _with_files(folder, table, read, rules)
        gone = [utterance for utterance in read if utterance not in sources]
        speakers = read_speakers(folder)
        path = folder / "text"
        texts = read_table(path, may_be_empty=True) if path.exists() else {}
        utterances = [
            KaldiUtterance(u, speaker, texts.get(u, ""), sources[u])
            for u, speaker in speakers.items()
            if u in sources
        ]
        return cls(folder, table, sources, speakers, utterances, gone, cut=cut)

    def with_readable_audio(self, options: PrepareOptions, progress: Progress) -> _Listed:
        """Leave out utterances whose audio cannot be read to its end, if incomplete ones may be left out."""
        audio = {u: source for u, source in self.sources.items() if not isinstance(source, MatrixPlace)}
        if not (options.files.skip_incomplete and audio):
            return self
        found = without_audio(audio, options.workers, progress)
        without = {*chain.from_iterable(found.values())}
        return replace(
            self,
            sources={u: source for u, source in self.sources.items() if u not in without},
            utterances=[u for u in self.utterances if u.utterance_id not in without],
            without_audio=found,
        )

    def left_out(
        self, taken: Sequence[KaldiUtterance], lacking: str, aligned: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Report which utterances are not `taken`, and why; those `aligned` are not listed completely."""
        ids = {utterance.utterance_id for utterance in taken}
        listed = {*self.sources, *self.gone, *chain.from_iterable(self.without_audio.values())}
        reasons = {
            f"are in {self.table} with a file that does not exist or is empty": self.gone,
            f"are not in {self.table}": [u for u in self.speakers if u not in listed],
            "are not in utt2spk": [u for u in self.sources if u not in self.speakers],
            lacking: [u.utterance_id for u in self.utterances if u.utterance_id not in ids],
            f"are aligned, but not in {self.folder}": [
                u for u in aligned if u not in listed and u not in self.speakers
            ],
        }
        return left_out(reasons) + left_out(self.without_audio, max_named=5)


@dataclass(frozen=True)
class _CutFeatures:
    """Features of utterances: the entries of feats.scp, or stretches of them that segments defines.

    Attributes:
        table: entries of feats.scp.
        segments: entries of segments; None: there is no such file.
        path: the file segments.
        frame_shift_s: time between two frames.
        snipped: frames that snip_edges takes off the ends of utterances.
    """

    table: Mapping[str, MatrixPlace]
    segments: Mapping[str, Segment] | None
    path: Path
    frame_shift_s: float
    snipped: int

    @classmethod
    def read(cls, folder: Path, rules: ReadingRules, config: FeatureConfig) -> _CutFeatures:
        """Read feats.scp and segments.  Raises ConfigError."""
        path, shift_ms = folder / "segments", frame_shift_ms(folder, config)
        return cls(
            read_scp(folder / "feats.scp", rules),
            read_segments(path) if path.is_file() else None,
            path,
            shift_ms / 1000.0,
            snipped_frames(replace(config, frame_shift_ms=shift_ms)),
        )

    def places(self, *, snip_edges: bool) -> Mapping[str, MatrixPlace]:
        """Return the place of each utterance's features.  Raises ConfigError."""
        if self.segments is None:
            return self.table
        snipped = self.snipped if snip_edges else 0
        return rows_of_segments(self.table, self.segments, self.frame_shift_s, self.path, snipped=snipped)

    def snipped_to_fit(self, utterances: Sequence[KaldiUtterance]) -> list[KaldiUtterance] | None:
        """Return the utterances cut by snip_edges if only then all fit their alignments, else None."""
        if self.segments is None or not self.table.keys().isdisjoint(self.segments) or _fit(utterances):
            return None
        aligned = {u.utterance_id: self.segments[u.utterance_id] for u in utterances}
        try:
            places = replace(self, segments=aligned).places(snip_edges=True)
        except ConfigError:  # an utterance has fewer frames than would be taken off
            return None
        cut = [replace(u, source=places[u.utterance_id]) for u in utterances]
        return cut if _fit(cut) else None


def _fit(utterances: Sequence[KaldiUtterance]) -> bool:
    """Return whether all have as many rows of features as frames in their alignments."""
    places = [u.source for u in utterances if isinstance(u.source, MatrixPlace)]
    rows = [place.rows for place in places]
    return [u.num_frames for u in utterances] == [r[1] - r[0] + 1 for r in rows if r is not None]


def _with_files(
    folder: Path, table: str, sources: Mapping[str, AudioSource | MatrixPlace], rules: ReadingRules
) -> Mapping[str, AudioSource | MatrixPlace]:
    """Refuse, or leave out, utterances whose file does not exist or is empty.  Raises ConfigError."""
    files = {
        key: place.path if isinstance(place, MatrixPlace) else file_of(place)
        for key, place in sources.items()
    }
    missing, empty = find_unusable(
        files.values(),
        str(folder / table),
        folder,
        may_be_left_out=rules.skip_incomplete,
        path_map=rules.path_map,
    )
    unusable = missing | empty
    return {key: place for key, place in sources.items() if files[key] not in unusable}


def _align(
    listed: _Listed, options: PrepareOptions, pdfs: Path, progress: Progress
) -> tuple[Manifest, _Splits, tuple[str, ...]]:
    """Return the manifest, the aligned utterances of each split, and messages for the user."""
    alignments = alignment_source(options.from_kaldi.ali, options.from_kaldi.ali_pdf)
    found = _gather_pdfs(alignments, listed.utterances, pdfs, progress)
    if not found.aligned:
        raise ConfigError(f"{listed.folder}: none of its utterances has an alignment; check --ali")
    utterances = sorted(found.aligned, key=lambda utterance: utterance.utterance_id)
    snipped = None if listed.cut is None else listed.cut.snipped_to_fit(utterances)
    utterances = utterances if snipped is None else snipped
    config, sampling_rate, channels = feature_settings(options, utterances, progress)
    if snipped is not None:
        config = replace(config, snip_edges=True)
    num_classes = alignments.num_pdfs or found.max_pdf + 1
    rule, splits, unseparated = _divide(listed.folder, options, utterances)
    manifest = Manifest(sampling_rate, config, num_classes, "kaldi", rule, {}, options.store)
    left_out = listed.left_out(utterances, "have no alignment", found.unknown)
    notices = (*alignments.notices, *left_out, *channels)
    if alignments.num_pdfs is None:
        largest = f"by the largest in {options.from_kaldi.ali_pdf}"
        notices += (f"{num_classes} pdfs, {largest}; --ali would count them",)
    return manifest, splits, notices + unseparated + _cmvn_opts_notice(options, config)


def _cmvn_opts_notice(options: PrepareOptions, config: FeatureConfig) -> tuple[str, ...]:
    path = cmvn_opts_of(options.from_kaldi)
    if path is None or config.cmvn != "speaker":
        return ()
    means, variances = (
        "normalised" if done else "as they are" for done in (config.mean_normalise, config.variance_normalise)
    )
    return (
        f"normalised as {path} says: means {means}, deviations {variances} (--cmvn utterance: each utterance "
        "by itself)",
    )


@dataclass
class _Found:
    """Contents of an alignment: listed utterances, ids of other utterances, and the largest pdf."""

    aligned: list[KaldiUtterance] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    max_pdf: int = 0


def _gather_pdfs(
    alignments: AlignmentSource, wanted: Sequence[KaldiUtterance], path: Path, progress: Progress
) -> _Found:
    """Write the pdfs of all utterances to one file, so that processes can read them without holding all."""
    by_id = {utterance.utterance_id: utterance for utterance in wanted}
    found, num_frames = _Found(), 0
    try:
        with path.open("wb") as file:
            for name, pdfs in alignments.pdfs():
                if name not in by_id:
                    found.unknown.append(name)
                elif len(pdfs):
                    file.write(np.ascontiguousarray(pdfs, dtype="<i4").data)
                    placed = dataclasses.replace(by_id[name], first_frame=num_frames, num_frames=len(pdfs))
                    found.aligned.append(placed)
                    found.max_pdf = max(found.max_pdf, int(pdfs.max()))
                    num_frames += len(pdfs)
                    progress("reading alignments", len(found.aligned), len(wanted))
    except OSError as error:
        raise ShardError(cannot_be_written(path, error)) from error
    return found


def _divide(
    folder: Path, options: PrepareOptions, utterances: Sequence[KaldiUtterance]
) -> tuple[str, _Splits, tuple[str, ...]]:
    """Return the rule that divides the utterances, as written in data.json, the splits, and notices."""
    rows = {u.utterance_id: u for u in utterances}
    corpus = Corpus(
        folder, tuple(CorpusUtterance(u.utterance_id, u.speaker, u.text, folder) for u in utterances)
    )
    rule = choose_rule(corpus, options.split, options.held_out_speaker, options.seed)
    parts = split_corpus(corpus, rule)
    splits = {name: [rows[u.utterance_id] for u in part] for name, part in parts.items()}
    sounds = {
        name: [(u.utterance_id, u.source) for u in part if not isinstance(u.source, MatrixPlace)]
        for name, part in splits.items()
    }
    return rule.spec, splits, warn_of_splits(parts) + warn_of_same_sound(sounds)
