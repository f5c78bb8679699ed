"""Determine the feature settings of a Kaldi data directory, and its frames if there is no alignment."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from speechdp.data.kaldi.cmvn import CmvnOptions
from speechdp.data.kaldi.matrix import MatrixPlace, num_rows, read_matrix
from speechdp.data.prepare.divided_corpus import channels_read, probe_all
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.kaldi_shards import KaldiUtterance, frames_differ
from speechdp.data.shards.dataset import UNALIGNED, Dataset, Manifest
from speechdp.data.shards.layout import Stored
from speechdp.data.signal.audio import AudioInfo, AudioSource, common_sampling_rate, probe
from speechdp.data.signal.features import FeatureConfig, check_mel_bins, num_frames_of
from speechdp.errors import ConfigError
from speechdp.labels.kaldi_pdfs import KaldiPdfs, load_classes
from speechdp.options.prepare import KaldiOptions, PrepareOptions


def feature_settings(
    options: PrepareOptions, utterances: Sequence[KaldiUtterance], progress: Progress
) -> tuple[FeatureConfig, int, tuple[str, ...]]:
    """Return the feature settings, the sampling rate in Hz, and messages about channels.

    The rate is 0 if only Kaldi knows it.

    Raises:
        ConfigError: audio or features cannot be read, or do not fit the alignment's frames.
    """
    if options.from_kaldi.feats:
        return _features_of_kaldi(options.from_kaldi, options.feature_config(), utterances[0]), 0, ()
    infos = probe_all([u.source for u in utterances if not isinstance(u.source, MatrixPlace)], progress)
    sampling_rate = common_sampling_rate(infos, None)
    config = options.feature_config(sampling_rate)
    check_mel_bins(sampling_rate, config)
    num_samples = [info.num_samples for info in infos]
    config = _with_edges(config, sampling_rate, utterances, num_samples)
    return config, sampling_rate, channels_read(infos, options.files.channel)


def _features_of_kaldi(kaldi: KaldiOptions, config: FeatureConfig, first: KaldiUtterance) -> FeatureConfig:
    assert isinstance(first.source, MatrixPlace) and kaldi.kaldi is not None
    by_speaker = kaldi.cmvn == "kaldi" or (kaldi.cmvn is None and (kaldi.kaldi / "cmvn.scp").exists())
    feature_dim = read_matrix(first.source, first.utterance_id).shape[1]
    if feature_dim == 0:
        raise ConfigError(
            f"{first.source.path}: utterance {first.utterance_id} has no features; leave it out of feats.scp"
        )
    path = cmvn_opts_of(kaldi)
    done = CmvnOptions(norm_means=True, norm_vars=True)  # unless Kaldi's file says otherwise
    if by_speaker and path is not None:
        done = CmvnOptions.read(path)
    return dataclasses.replace(
        config,
        kind="kaldi",
        kaldi_dim=feature_dim,
        frame_shift_ms=frame_shift_ms(kaldi.kaldi, config),
        cmvn="speaker" if by_speaker else "utterance",
        mean_normalise=config.mean_normalise and done.norm_means,
        variance_normalise=config.variance_normalise and done.norm_vars,
    )


def cmvn_opts_of(kaldi: KaldiOptions) -> Path | None:
    """Return the file that says what the aligning system normalised; None if there is none."""
    path = None if kaldi.ali is None else kaldi.ali / "cmvn_opts"
    return path if path is not None and path.is_file() else None


def frame_shift_ms(folder: Path, config: FeatureConfig) -> float:
    """Return the time between Kaldi's frames: from its file `frame_shift` if there is one, else `config`."""
    path = folder / "frame_shift"
    if not path.exists():
        return config.frame_shift_ms
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        shift_ms = round(1000.0 * float(text), 6)
    except ValueError as error:
        raise ConfigError(f"{path}: {text[:40]!r} is not a number of seconds; write e.g. 0.01") from error
    if not 0.0 < shift_ms < math.inf:
        raise ConfigError(f"{path}: {text[:40]!r} is no time between frames; write e.g. 0.01 seconds")
    return shift_ms


def check_frame_shift(folder: Path, options: PrepareOptions, config: FeatureConfig) -> None:
    """Refuse Kaldi's features if their frame shift differs from the options, or from the model of --like.

    Args:
        folder: the data directory; without a file `frame_shift`, its shift is taken to be right.
        config: feature settings: those of the model of --like if it is given, else those of the options.

    Raises:
        ConfigError: the file has a different shift, or is damaged.
    """
    asked_ms = options.frame_shift_ms if options.like is None else config.frame_shift_ms
    found_ms = frame_shift_ms(folder, config)
    if asked_ms is None or math.isclose(asked_ms, found_ms, rel_tol=1e-6):
        return
    asked, remedy = f"--frame-shift-ms is {asked_ms:g}", "leave the option out, or correct the file"
    if options.like is not None:
        asked = f"the model of --like {options.like} has {asked_ms:g}"
        remedy = "give features of that frame shift"
    raise ConfigError(f"{folder / 'frame_shift'}: has {found_ms:g} ms between frames, {asked}; {remedy}")


def _with_edges(
    config: FeatureConfig,
    sampling_rate: int,
    utterances: Sequence[KaldiUtterance],
    num_samples: Sequence[int],
) -> FeatureConfig:
    """Determine from the frames of the alignment whether Kaldi ran with snip_edges, its default.

    Raises:
        ConfigError: neither setting explains the frames of all utterances; names the first that does not fit.
    """
    misfits: list[tuple[int, int, int]] = []  # number of misfits, index of the first, its frames
    for snip_edges in (True, False):
        candidate = dataclasses.replace(config, snip_edges=snip_edges)
        frames = [num_frames_of(num, sampling_rate, candidate) for num in num_samples]
        wrong = [i for i, u in enumerate(utterances) if u.num_frames != frames[i]]
        if not wrong:
            return candidate
        misfits.append((len(wrong), wrong[0], frames[wrong[0]]))
    _, first, num_frames = min(misfits)
    raise frames_differ(utterances[first], num_frames)


def snipped_frames(config: FeatureConfig) -> int:
    """Return how many frames `extract-feature-segments --snip-edges=true` takes off each utterance's end."""
    return max(0, math.ceil((config.frame_length_ms - config.frame_shift_ms) / config.frame_shift_ms))


def manifest_like(like: Dataset, stored: Stored) -> Manifest:
    """Return the manifest of data to be scored with a model that was trained on `like`.

    Raises:
        ConfigError: the classes of `like` are not Kaldi's pdfs, or audio is to be stored although the
            features of `like` cannot be computed from it.
    """
    if not isinstance(load_classes(like.classes_path), KaldiPdfs):
        raise ConfigError(f"--like {like.path}: its targets are not Kaldi's pdfs; give the data trained on")
    if like.features.kind == "kaldi" and stored == "audio":
        raise ConfigError(
            "--store audio: the model of --like was trained on Kaldi's features (--feats), which are not "
            "computed from audio here; leave it out"
        )
    return Manifest(like.sampling_rate, like.features, like.num_classes, UNALIGNED, "all:test", {}, stored)


def count_frames(
    utterances: Sequence[KaldiUtterance], manifest: Manifest, progress: Progress
) -> tuple[list[KaldiUtterance], tuple[str, ...]]:
    """Count the frames of each utterance from the headers of features or audio; leave out those without any.

    Returns:
        The remaining utterances, and messages about channels.

    Raises:
        ConfigError: unreadable features or audio, or another sampling rate.
    """
    counted, infos = [], []
    for number, utterance in enumerate(utterances, 1):
        if isinstance(utterance.source, MatrixPlace):
            num_frames = num_rows(utterance.source, utterance.utterance_id)
        else:
            infos.append(info := _probed(utterance.source, manifest))
            num_frames = num_frames_of(info.num_samples, info.sampling_rate, manifest.features)
        counted.append(dataclasses.replace(utterance, num_frames=num_frames))
        progress("counting frames", number, len(utterances))
    return [utterance for utterance in counted if utterance.num_frames > 0], channels_read(infos, None)


def _probed(audio: AudioSource, manifest: Manifest) -> AudioInfo:
    info = probe(audio)
    if info.sampling_rate != manifest.sampling_rate:
        raise ConfigError(
            f"{info.source}: has {info.sampling_rate} Hz, the data of --like have {manifest.sampling_rate} "
            "Hz; resample it first, e.g. with sox"
        )
    return info
