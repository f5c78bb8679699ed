"""Kaldi data without an alignment: only to be scored, with the features a model was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from speechdp.data.kaldi.matrix import MatrixPlace, num_rows
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.kaldi_jobs import NOT_ALIGNED, AlignedUtterance
from speechdp.data.shards.dataset import Dataset, Manifest
from speechdp.data.shards.layout import Stored
from speechdp.data.signal.audio import probe
from speechdp.data.signal.features import num_frames_of
from speechdp.errors import ConfigError
from speechdp.labels.kaldi_pdfs import KaldiPdfs, load_classes

#: What data.json says of the alignment where there is none; such data are not trained on.
UNALIGNED = "none"
_STAGE = "counting frames"


@dataclass(frozen=True)
class Unaligned:
    """An utterance as Kaldi's data directory has it."""

    utterance_id: str
    speaker: str
    text: str
    source: Path | MatrixPlace


def manifest_like(like: Dataset, stored: Stored) -> Manifest:
    """Return what holds for data to be scored with a model that was trained on `like`.

    Raises:
        ConfigError: the classes of `like` are not Kaldi's pdfs.
    """
    if not isinstance(load_classes(like.classes_path), KaldiPdfs):
        raise ConfigError(f"--like {like.path}: its targets are not Kaldi's pdfs; give the data trained on")
    return Manifest(like.sampling_rate, like.features, like.num_classes, UNALIGNED, "all:test", {}, stored)


def with_frames(
    utterances: Sequence[Unaligned], manifest: Manifest, progress: Progress
) -> Iterator[AlignedUtterance]:
    """Count the frames of each utterance, by the headers of features or audio; leave out those without any.

    Raises:
        ConfigError: unreadable features or audio, or another sampling rate.
    """
    for number, utterance in enumerate(utterances, 1):
        num_frames = _num_frames(utterance, manifest)
        progress(_STAGE, number, len(utterances))
        if num_frames > 0:
            yield AlignedUtterance(
                utterance.utterance_id,
                utterance.speaker,
                utterance.text,
                utterance.source,
                NOT_ALIGNED,
                num_frames,
            )


def _num_frames(utterance: Unaligned, manifest: Manifest) -> int:
    if isinstance(utterance.source, MatrixPlace):
        return num_rows(utterance.source, utterance.utterance_id)
    info = probe(utterance.source)
    if info.sampling_rate != manifest.sampling_rate:
        raise ConfigError(
            f"{info.path}: has {info.sampling_rate} Hz, the data of --like have {manifest.sampling_rate} Hz; "
            "resample it first, e.g. with sox"
        )
    return num_frames_of(info.num_samples, info.sampling_rate, manifest.features)
