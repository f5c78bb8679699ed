"""Write the shards of a corpus that Kaldi has aligned, one process a shard."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.kaldi.cmvn import SpeakerCmvn
from speechdp.data.kaldi.matrix import MatrixPlace, read_matrix
from speechdp.data.prepare.shard_jobs import Progress, num_cores
from speechdp.data.prepare.worker_processes import (
    end_with_parent,
    interrupts_held_back,
    workers_ended_on_failure,
)
from speechdp.data.shards.dataset import ShardEntry
from speechdp.data.shards.shard import AudioUtterance, ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.audio import read_audio, to_int16
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import normalise, num_frames_of
from speechdp.errors import ConfigError, RunError

_STAGE = "writing shards"
_FEWEST_FRAMES_FOR_PROCESSES = 200_000
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


def run_kaldi_jobs(
    jobs: Sequence[KaldiShardJob], num_workers: int | None, progress: Progress
) -> list[ShardEntry]:
    """Write all shards, in parallel where that pays; results come in the jobs' order.

    Raises:
        ConfigError, ShardError: from the first job that failed.
        RunError: a process was killed.
    """
    total = sum(len(job.utterances) for job in jobs)
    num_frames = sum(u.num_frames for job in jobs for u in job.utterances)
    num_workers = min(num_workers or num_cores(), len(jobs))
    progress(_STAGE, 0, total)
    if num_workers > 1 and num_frames >= _FEWEST_FRAMES_FOR_PROCESSES:
        return _run_in_processes(jobs, num_workers, progress)
    entries, done = [], 0
    for job in jobs:
        entries.append(write_kaldi_shard(job))
        done += len(job.utterances)
        progress(_STAGE, done, total)
    return entries


def write_kaldi_shard(job: KaldiShardJob) -> ShardEntry:
    """Write one shard.  Raises ConfigError (features, audio) or ShardError (disk)."""
    with ShardWriter(job.path, job.header) as writer:
        for utterance in _ready(job):
            writer.add(utterance)
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


def _run_in_processes(
    jobs: Sequence[KaldiShardJob], num_workers: int, progress: Progress
) -> list[ShardEntry]:
    # Spawned, not forked: the caller may have threads, and HDF5 does not survive a fork.
    context = multiprocessing.get_context("spawn")
    total, done = sum(len(job.utterances) for job in jobs), 0
    with ProcessPoolExecutor(num_workers, context, end_with_parent) as pool, workers_ended_on_failure():
        with interrupts_held_back():
            futures = {pool.submit(write_kaldi_shard, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                future.result()  # raises what the job raised
                done += len(futures[future].utterances)
                progress(_STAGE, done, total)
        except BrokenProcessPool as error:
            raise RunError(
                f"{jobs[0].path.parent}: a process writing shards was killed (out of memory?); "
                "run again with fewer --workers"
            ) from error
        finally:
            for future in futures:
                future.cancel()
        return [future.result() for future in futures]
