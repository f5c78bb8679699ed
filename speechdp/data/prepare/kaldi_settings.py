"""What `speechdp prepare --kaldi` was asked for, and what that makes of the features."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from speechdp.data.kaldi.matrix import MatrixPlace, read_matrix
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.kaldi_jobs import AlignedUtterance, frames_differ
from speechdp.data.shards.layout import Stored
from speechdp.data.signal.audio import common_sampling_rate, probe
from speechdp.data.signal.features import FeatureConfig, check_mel_bins, num_frames_of, usual_mel_bins
from speechdp.errors import ConfigError

Cmvn = Literal["kaldi", "utterance", "none"]

_AUDIO_STAGE = "reading headers"


@dataclass(frozen=True)
class KaldiOptions:
    """What `speechdp prepare --kaldi KALDI_DIR ... DATA` was asked for.

    Attributes:
        kaldi_dir: Kaldi's data directory.
        data: the data directory to make.
        ali_dir, ali_pdf: see kaldi_ali.alignment_source.
        like: instead of an alignment, the data directory a model was trained on: settings are as there.
        use_feats: take the features of feats.scp instead of computing some from wav.scp.
        cmvn: by which statistics features of feats.scp are normalised; None: kaldi where there is a
            cmvn.scp, else utterance.
        split, held_out_speaker, num_shards, seed, overwrite, num_workers: as for other corpora.
        features: what to compute; of feats.scp only how they are normalised and stored.
        stored: features, or the audio to make them from while training.
        fit_mel_bins: take the usual number of mel filters for the sampling rate.
    """

    kaldi_dir: Path
    data: Path
    ali_dir: Path | None = None
    ali_pdf: Path | None = None
    like: Path | None = None
    use_feats: bool = False
    cmvn: Cmvn | None = None
    split: str | None = None
    held_out_speaker: str | None = None
    num_shards: int = 8
    features: FeatureConfig = field(default_factory=FeatureConfig)
    stored: Stored = "features"
    fit_mel_bins: bool = False
    seed: int = 1
    overwrite: bool = False
    num_workers: int | None = None

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"--shards {self.num_shards}: give at least 1")
        is_aligned = self.ali_dir is not None or self.ali_pdf is not None
        if is_aligned == (self.like is not None):
            raise ConfigError(
                "--kaldi needs the alignment: --ali ALI_DIR (ali.*.gz, final.mdl), or --ali-pdf FILE; "
                "or, to score data that have none, --like DATA alone"
            )
        if self.stored == "audio" and self.use_feats:
            raise ConfigError(
                "--feats takes Kaldi's features, --store audio makes others; leave one of them out"
            )
        if self.cmvn == "kaldi" and not self.use_feats:
            raise ConfigError("--cmvn kaldi is for features of Kaldi's: add --feats, or leave --cmvn out")


def feature_settings(
    options: KaldiOptions, utterances: Sequence[AlignedUtterance], progress: Progress
) -> tuple[FeatureConfig, int]:
    """Return how the features are made and their sampling rate in Hz, 0 where only Kaldi knows it.

    Raises:
        ConfigError: audio or features cannot be read, or do not fit the alignment's frames.
    """
    config = options.features
    if options.cmvn == "none":
        config = dataclasses.replace(config, mean_normalise=False, variance_normalise=False)
    if options.use_feats:
        return _features_of_kaldi(options, config, utterances[0]), 0
    infos = []
    for number, utterance in enumerate(utterances, 1):
        assert isinstance(utterance.source, Path)
        infos.append(probe(utterance.source))
        progress(_AUDIO_STAGE, number, len(utterances))
    sampling_rate = common_sampling_rate(infos, None)
    if options.fit_mel_bins:
        config = dataclasses.replace(config, num_mel_bins=usual_mel_bins(sampling_rate))
    check_mel_bins(sampling_rate, config)
    num_samples = [info.num_samples for info in infos]
    return _with_edges(config, sampling_rate, utterances, num_samples), sampling_rate


def _features_of_kaldi(
    options: KaldiOptions, config: FeatureConfig, first: AlignedUtterance
) -> FeatureConfig:
    assert isinstance(first.source, MatrixPlace)
    by_speaker = options.cmvn == "kaldi" or (
        options.cmvn is None and (options.kaldi_dir / "cmvn.scp").exists()
    )
    feature_dim = read_matrix(first.source, first.utterance_id).shape[1]
    if feature_dim == 0:
        raise ConfigError(
            f"{first.source.path}: utterance {first.utterance_id} has no features; leave it out of feats.scp"
        )
    return dataclasses.replace(
        config,
        kind="kaldi",
        kaldi_dim=feature_dim,
        frame_shift_ms=_frame_shift_ms(options.kaldi_dir, config.frame_shift_ms),
        cmvn="speaker" if by_speaker else "utterance",
    )


def _frame_shift_ms(folder: Path, default_ms: float) -> float:
    path = folder / "frame_shift"
    if not path.exists():
        return default_ms
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        return round(1000.0 * float(text), 6)
    except ValueError as error:
        raise ConfigError(f"{path}: {text[:40]!r} is no number of seconds; write e.g. 0.01") from error


def _with_edges(
    config: FeatureConfig,
    sampling_rate: int,
    utterances: Sequence[AlignedUtterance],
    num_samples: Sequence[int],
) -> FeatureConfig:
    """Find out by the frames of the alignment whether Kaldi ran with snip_edges, its default.

    Raises:
        ConfigError: neither explains the frames of every utterance; names the first that does not fit.
    """
    misfits: list[tuple[int, int, int]] = []  # number of them, which is the first, its frames
    for snip_edges in (True, False):
        candidate = dataclasses.replace(config, snip_edges=snip_edges)
        frames = [num_frames_of(num, sampling_rate, candidate) for num in num_samples]
        wrong = [i for i, u in enumerate(utterances) if u.num_frames != frames[i]]
        if not wrong:
            return candidate
        misfits.append((len(wrong), wrong[0], frames[wrong[0]]))
    _, first, num_frames = min(misfits)
    raise frames_differ(utterances[first].utterance_id, num_frames, utterances[first].num_frames)
