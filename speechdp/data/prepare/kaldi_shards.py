"""Contents of the shards of a Kaldi data directory: Kaldi's features or those of the audio, and pdfs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.kaldi.cmvn import SpeakerCmvn
from speechdp.data.kaldi.matrix import MatrixPlace, read_matrix
from speechdp.data.shards.layout import AudioUtterance, ShardHeader, Utterance
from speechdp.data.signal.audio import AudioSource, file_of, read_audio, to_int16
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import normalise, num_frames_of
from speechdp.errors import ConfigError

_TARGET_BYTES = 4
#: Place of the pdfs of an utterance without alignment; its targets are 0 and mean nothing.
NOT_ALIGNED = -1


@dataclass(frozen=True)
class KaldiUtterance:
    """One utterance with the place of its pdfs.

    Attributes:
        source: the audio, or the place of the features.
        first_frame: beginning of its pdfs in the file of all pdfs, in frames; NOT_ALIGNED: it has none.
        num_frames: number of frames, and of pdfs (T); 0: not known yet.
    """

    utterance_id: str
    speaker: str
    text: str
    source: AudioSource | MatrixPlace
    first_frame: int = NOT_ALIGNED
    num_frames: int = 0


@dataclass(frozen=True)
class KaldiShard:
    """The utterances of one shard.

    Attributes:
        utterances: in the shard's order.
        pdfs: the file with all pdfs, int32, concatenated.
        cmvn: statistics of the speakers; None: normalise by each utterance's own, according to the header.
    """

    utterances: tuple[KaldiUtterance, ...]
    pdfs: Path
    cmvn: SpeakerCmvn | None

    def ready(self, _path: Path, header: ShardHeader) -> Iterator[Utterance | AudioUtterance]:
        """Yield each utterance with its features (or samples) and pdfs.  Raises ConfigError."""
        for utterance in self.utterances:
            names = (utterance.utterance_id, utterance.speaker, utterance.text)
            targets = _targets(utterance, self.pdfs)
            if header.stored == "audio":
                yield AudioUtterance(*names, to_int16(_samples(utterance, header)), targets)
            else:
                yield Utterance(*names, _features(utterance, header, self.cmvn), targets)


def _targets(utterance: KaldiUtterance, pdfs: Path) -> npt.NDArray[np.int32]:
    if utterance.first_frame == NOT_ALIGNED:
        return np.zeros(utterance.num_frames, dtype=np.int32)
    start = _TARGET_BYTES * utterance.first_frame
    return np.fromfile(pdfs, "<i4", count=utterance.num_frames, offset=start)


def _check_frames(utterance: KaldiUtterance, num_frames: int) -> None:
    if num_frames != utterance.num_frames:
        raise frames_differ(utterance, num_frames)


def _samples(utterance: KaldiUtterance, header: ShardHeader) -> npt.NDArray[np.float32]:
    assert not isinstance(utterance.source, MatrixPlace)
    samples = read_audio(utterance.source, header.sampling_rate)
    _check_frames(utterance, num_frames_of(len(samples), header.sampling_rate, header.features))
    return samples


def _features(
    utterance: KaldiUtterance, header: ShardHeader, cmvn: SpeakerCmvn | None
) -> npt.NDArray[np.float32]:
    config = header.features
    if not isinstance(utterance.source, MatrixPlace):
        return compute_features(_samples(utterance, header), header.sampling_rate, config)
    with np.errstate(over="ignore"):  # values that overflow are refused below
        features = read_matrix(utterance.source, utterance.utterance_id).astype(np.float32)
    _check_frames(utterance, len(features))
    if features.shape[1] != config.feature_dim:
        raise ConfigError(
            f"{utterance.source.path}: utterance {utterance.utterance_id} has {features.shape[1]} values a "
            f"frame, the first one has {config.feature_dim}; leave one kind out of feats.scp"
        )
    if not np.isfinite(features).all():
        frame, value = np.argwhere(~np.isfinite(features))[0]
        raise ConfigError(
            f"{utterance.source.path}: utterance {utterance.utterance_id}: value {value} of frame {frame} is "
            "NaN or infinite; compute its features again, or leave it out of feats.scp"
        )
    if cmvn is None:
        return normalise(features, config)
    return cmvn.of(utterance.speaker, config.feature_dim).apply(features, config)


def frames_differ(utterance: KaldiUtterance, num_frames: int) -> ConfigError:
    """Return the error for features and an alignment of different lengths."""
    source = utterance.source
    file = source.path if isinstance(source, MatrixPlace) else file_of(source)
    return ConfigError(
        f"{file}: utterance {utterance.utterance_id}: {num_frames} frames of features, "
        f"{utterance.num_frames} in its alignment; give the features (and frame length and shift) that Kaldi "
        "aligned"
    )
