"""Write the shards of a corpus that Kaldi has aligned, one process a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.kaldi.cmvn import SpeakerCmvn
from speechdp.data.kaldi.matrix import MatrixPlace, read_matrix
from speechdp.data.shards.dataset import ShardEntry
from speechdp.data.shards.shard import AudioUtterance, ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.audio import read_audio, to_int16
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import normalise, num_frames_of
from speechdp.errors import ConfigError

_TARGET_BYTES = 4
#: Place of the pdfs of an utterance that has none; its targets are 0 and mean nothing.
NOT_ALIGNED = -1


@dataclass(frozen=True)
class AlignedUtterance:
    """One utterance with the place of its pdfs.

    Attributes:
        source: an audio file, or the place of the features.
        first_frame: where its pdfs start in the file of all pdfs, in frames; NOT_ALIGNED: nowhere.
        num_frames: number of frames, and of pdfs (T).
    """

    utterance_id: str
    speaker: str
    text: str
    source: Path | MatrixPlace
    first_frame: int
    num_frames: int


@dataclass(frozen=True)
class KaldiShardJob:
    """One shard to write.

    Attributes:
        path: the shard.
        header: what holds for all of it.
        utterances: in the shard's order.
        pdfs: the file of all pdfs, int32 one after the other.
        cmvn: statistics of the speakers; None: each utterance's own, as the header says.
    """

    path: Path
    header: ShardHeader
    utterances: tuple[AlignedUtterance, ...]
    pdfs: Path
    cmvn: Path | None

    @property
    def num_utterances(self) -> int:
        """Number of utterances of the shard."""
        return len(self.utterances)

    def run(self, advance: Callable[[], None]) -> ShardEntry:
        """Write the shard.  Raises ConfigError (features, audio) or ShardError (disk)."""
        with ShardWriter(self.path, self.header) as writer:
            for utterance in _ready(self):
                writer.add(utterance)
                advance()
        return ShardEntry.of(writer)


def _ready(job: KaldiShardJob) -> Iterator[Utterance | AudioUtterance]:
    cmvn = None if job.cmvn is None else SpeakerCmvn(job.cmvn)
    header = job.header
    for utterance in job.utterances:
        names = (utterance.utterance_id, utterance.speaker, utterance.text)
        targets = _targets(utterance, job.pdfs)
        if header.stored == "audio":
            assert isinstance(utterance.source, Path)
            samples = to_int16(read_audio(utterance.source, header.sampling_rate))
            _check_frames(utterance, num_frames_of(len(samples), header.sampling_rate, header.features))
            yield AudioUtterance(*names, samples, targets)
        else:
            yield Utterance(*names, _features(utterance, header, cmvn), targets)


def _targets(utterance: AlignedUtterance, pdfs: Path) -> npt.NDArray[np.int32]:
    if utterance.first_frame == NOT_ALIGNED:
        return np.zeros(utterance.num_frames, dtype=np.int32)
    start = _TARGET_BYTES * utterance.first_frame
    return np.fromfile(pdfs, "<i4", count=utterance.num_frames, offset=start)


def _check_frames(utterance: AlignedUtterance, num_frames: int) -> None:
    if num_frames != utterance.num_frames:
        raise frames_differ(utterance.utterance_id, num_frames, utterance.num_frames)


def _features(
    utterance: AlignedUtterance, header: ShardHeader, cmvn: SpeakerCmvn | None
) -> npt.NDArray[np.float32]:
    config = header.features
    if isinstance(utterance.source, Path):
        samples = read_audio(utterance.source, header.sampling_rate)
        _check_frames(utterance, num_frames_of(len(samples), header.sampling_rate, config))
        return compute_features(samples, header.sampling_rate, config)
    with np.errstate(over="ignore"):  # the shard refuses what overflowed
        features = read_matrix(utterance.source, utterance.utterance_id).astype(np.float32)
    _check_frames(utterance, len(features))
    if features.shape[1] != config.feature_dim:
        raise ConfigError(
            f"{utterance.source.path}: utterance {utterance.utterance_id} has {features.shape[1]} values a "
            f"frame, the first one has {config.feature_dim}; leave one kind out of feats.scp"
        )
    if cmvn is None:
        return normalise(features, config)
    return cmvn.of(utterance.speaker, config.feature_dim).apply(features, config)


def frames_differ(utterance_id: str, num_frames: int, num_aligned: int) -> ConfigError:
    """Return the error for features and an alignment of different lengths."""
    return ConfigError(
        f"utterance {utterance_id}: {num_frames} frames of features, {num_aligned} in its alignment; "
        "give the features (and frame length and shift) that Kaldi aligned"
    )
