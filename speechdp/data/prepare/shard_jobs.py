"""Turn lists of utterances into shards, one process a shard."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Protocol

from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.prepare.worker_processes import end_with_parent, interrupts_held_back
from speechdp.data.shards.dataset import ShardEntry
from speechdp.data.shards.layout import Stored
from speechdp.data.shards.shard import AudioUtterance, ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.audio import edge_silence, read_audio, to_int16
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import num_frames_of
from speechdp.errors import ConfigError, RunError
from speechdp.labels.hmm import STATES_PER_PHONE, StateInventory, flat_alignment
from speechdp.labels.lexicon import Lexicon

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]

_STAGES: dict[Stored, str] = {"features": "computing features", "audio": "reading audio"}
_FEWEST_FOR_PROCESSES = 64
_POLL_S = 0.2


@dataclass(frozen=True)
class ShardResult:
    """A shard written: its line of data.json, and how many utterances had fewer frames than states."""

    entry: ShardEntry
    num_too_short: int


class UtterancesJob(Protocol):
    """One shard to write, in this process or in another."""

    @property
    def path(self) -> Path:
        """The shard."""
        ...

    @property
    def num_utterances(self) -> int:
        """Number of utterances of the shard."""
        ...

    @property
    def stage(self) -> str:
        """What the job does, for people."""
        ...

    def write(self, advance: Callable[[], None]) -> ShardResult:
        """Write the shard, calling `advance` after each utterance."""
        ...


@dataclass(frozen=True)
class ShardJob:
    """One shard to write from audio, with flat-start targets."""

    path: Path
    header: ShardHeader
    utterances: tuple[CorpusUtterance, ...]
    lexicon: Lexicon
    inventory: StateInventory

    @property
    def num_utterances(self) -> int:
        """Number of utterances of the shard."""
        return len(self.utterances)

    @property
    def stage(self) -> str:
        """What the job does, for people."""
        return _STAGES[self.header.stored]

    def write(self, advance: Callable[[], None]) -> ShardResult:
        """Write the shard, utterance by utterance, calling `advance` after each."""
        num_too_short = 0
        with ShardWriter(self.path, self.header) as writer:
            for utterance in self.utterances:
                ready, too_short = _make_utterance(utterance, self)
                writer.add(ready)
                num_too_short += too_short
                advance()
        return ShardResult(ShardEntry.of(writer), num_too_short)


def run_jobs(jobs: Sequence[UtterancesJob], num_workers: int | None, progress: Progress) -> list[ShardResult]:
    """Write all shards, in parallel where that pays.

    Args:
        jobs: what to write; results come in the same order.
        num_workers: processes; None means as many as there are cores.
        progress: told how many utterances are done.

    Raises:
        ConfigError, ShardError: from the first job that failed; the others are stopped.
        RunError: a process was killed.
    """
    total = sum(job.num_utterances for job in jobs)
    num_workers = min(num_workers or num_cores(), len(jobs))
    stage = jobs[0].stage
    progress(stage, 0, total)
    if num_workers > 1 and total >= _FEWEST_FOR_PROCESSES:
        return _run_in_processes(jobs, num_workers, progress)
    done = 0
    results = []

    def advance() -> None:
        nonlocal done
        done += 1
        progress(stage, done, total)

    for job in jobs:
        results.append(job.write(advance))
    return results


def num_cores() -> int:
    """Return how many cores this process may use; an allocation often gives fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def _make_utterance(utterance: CorpusUtterance, job: ShardJob) -> tuple[Utterance | AudioUtterance, bool]:
    header = job.header
    samples = read_audio(utterance.audio, header.sampling_rate)
    num_frames = num_frames_of(len(samples), header.sampling_rate, header.features)
    if num_frames == 0:
        raise ConfigError(f"{utterance.audio}: is shorter than one frame; leave it out of the corpus")
    leading, trailing = edge_silence(samples, header.sampling_rate, header.features, num_frames)
    phones = (phone for word in utterance.words for phone in job.lexicon.pronunciations[word][0])
    num_states = STATES_PER_PHONE * sum(1 for _ in phones)
    if num_frames - leading - trailing < num_states:
        leading = trailing = 0  # the words need the room
    targets = flat_alignment(utterance.words, num_frames, job.lexicon, job.inventory, leading, trailing)
    names = (utterance.utterance_id, utterance.speaker, utterance.text)
    too_short = num_frames < num_states
    if header.stored == "audio":
        return AudioUtterance(*names, to_int16(samples), targets), too_short
    features = compute_features(samples, header.sampling_rate, header.features)
    return Utterance(*names, features, targets), too_short


def _run_in_processes(
    jobs: Sequence[UtterancesJob], num_workers: int, progress: Progress
) -> list[ShardResult]:
    # Spawned, not forked: the caller may have threads, and HDF5 does not survive a fork.
    context = multiprocessing.get_context("spawn")
    shared = _SharedByJobs(context.Value("q", 0), context.Event())
    total = sum(job.num_utterances for job in jobs)
    stage = jobs[0].stage
    with ProcessPoolExecutor(num_workers, context, _keep, (shared,)) as pool:
        futures: list[Future[ShardResult]] = []
        try:
            with interrupts_held_back():
                futures += [pool.submit(_write_counted, job) for job in jobs]
            _watch(futures, lambda: progress(stage, shared.num_done.value, total))
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise RunError(
                f"{jobs[0].path.parent}: a process {stage} was killed (out of memory?); "
                "run again with fewer --workers"
            ) from error
        finally:
            shared.stop.set()  # else leaving the pool would wait for shards that nobody wants any more
            for future in futures:
                future.cancel()


def _watch(futures: Sequence[Future[ShardResult]], report: Callable[[], None]) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
        report()
        for future in done:
            future.result()  # raises what the job raised


@dataclass(frozen=True)
class _SharedByJobs:
    """What the processes share: how many utterances are done, and whether to give up."""

    num_done: Synchronized[int]
    stop: Event


# One a worker process: such things can only be handed over when the process starts.
_shared: list[_SharedByJobs] = []


def _keep(shared: _SharedByJobs) -> None:
    _shared.append(shared)
    end_with_parent()


def _write_counted(job: UtterancesJob) -> ShardResult:
    (shared,) = _shared

    def advance() -> None:
        if shared.stop.is_set():
            raise CancelledError
        with shared.num_done.get_lock():
            shared.num_done.value += 1

    return job.write(advance)
