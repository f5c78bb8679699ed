"""Preprocess batches between reading and training: features from audio, deltas, augmentation.

Reading stays in the caller's thread.  Preprocessing runs in its own threads, several batches at a time; the
values do not depend on the number of threads.

Legend: B segments of a batch, T frames of the longest, F feature dimensions, S samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.data.loading.loader_threads import keep_to_one_thread
from speechdp.data.loading.reader import Rows, SplitReader
from speechdp.data.loading.source import Pending, SplitSource
from speechdp.data.plan.assignment import PlanPosition
from speechdp.data.plan.epoch_plan import Segments
from speechdp.data.plan.segments import AS_RECORDED
from speechdp.data.transforms.perturb import perturbed_targets
from speechdp.data.transforms.preprocess import Preprocessor, UtteranceKey


class PreprocessingSource(SplitSource):
    """A reader followed by a preprocessor.

    Args:
        reader: of the split; this source closes it.
        preprocessor: what is done to every batch.
        num_threads: batches preprocessed at a time.
        device: where batches are preprocessed; a GPU's batches stay there, each with the event that says when
            it is ready.
    """

    def __init__(
        self, reader: SplitReader, preprocessor: Preprocessor, *, num_threads: int, device: torch.device
    ) -> None:
        self._reader, self._preprocessor, self._device = reader, preprocessor, device
        self.index, self.times, self.left_out = reader.index, reader.times, reader.left_out
        self.feature_dim = preprocessor.output_dim
        self.times.facts |= {"threads": num_threads, "preprocess_on": device.type}
        # One thread for a GPU: its kernels are queued one after the other anyway.
        self.read_ahead = num_threads + 1
        self._threads = ThreadPoolExecutor(
            1 if device.type == "cuda" else num_threads,
            thread_name_prefix="speechdp-preprocess",
            initializer=keep_to_one_thread,
        )
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def start(self, segments: Segments, place: PlanPosition | None = None) -> Pending:
        if self._preprocessor.stored == "audio":
            audio = self._read_audio(segments)
            return self._threads.submit(self._from_audio, audio, place)
        batch = self._reader.start(segments).result()
        return self._threads.submit(self._from_features, batch, place)

    def count_classes(self, num_classes: int, share: int, num_shares: int) -> npt.NDArray[np.int64]:
        self._reader.beat = self.beat
        return self._reader.count_classes(num_classes, share, num_shares)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def _read_audio(self, segments: Segments) -> _Audio:
        with self.times.stage("read"):
            rows = self._reader.rows(segments)
            columns = (rows.shard.tolist(), rows.utterance.tolist(), rows.speed.tolist())
            owners = list(zip(*columns, strict=True))
            utterances = list(dict.fromkeys(owners))
            samples = [self._reader.samples(shard, utterance) for shard, utterance, _ in utterances]
            numbers = {utterance: number for number, utterance in enumerate(utterances)}
            if all(speed == AS_RECORDED for *_, speed in utterances):
                targets = self._reader.targets(rows)
            else:
                targets = self._perturbed_targets(rows)
        self.times.add("read", 0.0, sum(s.nbytes for s in samples) + targets.nbytes)
        return _Audio(rows, utterances, samples, [numbers[owner] for owner in owners], targets)

    def _perturbed_targets(self, rows: Rows) -> Tensor:
        longest = rows.longest
        targets = self._reader.pool.take((len(rows), longest), torch.int32).fill_(IGNORED_TARGET)
        array = targets.numpy()
        for number in range(len(rows)):
            shard, utterance = int(rows.shard[number]), int(rows.utterance[number])
            first, learnt = int(rows.first[number]), int(rows.learnt[number])
            recorded = self._reader.utterance_targets(shard, utterance)
            array[number, first : first + learnt] = perturbed_targets(
                recorded, int(rows.speed[number]), int(rows.begin[number]) + first, learnt
            )
        return targets

    def _from_features(self, batch: Batch, place: PlanPosition | None) -> Batch:
        with self._on_device(), self.times.stage("preprocess"):
            moved = batch.to(self._device)
            features = self._preprocessor.finish(moved.features, moved.lengths, place)
            return self._finished(dataclasses.replace(moved, features=features))

    def _from_audio(self, audio: _Audio, place: PlanPosition | None) -> Batch:
        epoch = None if place is None else place.epoch
        keys = [UtteranceKey(epoch, *utterance) for utterance in audio.utterances]
        rows = audio.rows
        with self._on_device():
            with self.times.stage("preprocess"):
                whole = self._preprocessor.features_of(audio.samples, keys, self._device)
            with self.times.stage("collate"):
                features = self._padded(whole, audio)
                targets = self._reader.converted(audio.targets, torch.int64).to(self._device)
                transcripts = self._reader.transcripts(rows)
            num_frames = self._reader.num_learnt(rows, transcripts)
            self.times.count(num_frames, len(rows) * rows.longest)
            with self.times.stage("preprocess"):
                lengths = torch.from_numpy(rows.length)
                features = self._preprocessor.finish(features, lengths, place)
                return self._finished(Batch(features, targets, lengths, num_frames, transcripts=transcripts))

    def _padded(self, whole: Sequence[Tensor], audio: _Audio) -> Tensor:
        """Cut each row out of its utterance's features: (B, T, F), zero past each row's end."""
        rows = audio.rows
        shape = (len(rows), rows.longest, self._preprocessor.base_dim)
        if self._stream is None:
            features = self._reader.pool.take(shape, torch.float32).zero_()
        else:
            features = torch.zeros(shape, device=self._device)
        begins, lengths = rows.begin.tolist(), rows.length.tolist()
        for row, (owner, begin, length) in enumerate(zip(audio.owners, begins, lengths, strict=True)):
            features[row, :length] = whole[owner][begin : begin + length]
        return features

    def _on_device(self) -> Any:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _finished(self, batch: Batch) -> Batch:
        if self._stream is None:
            return batch
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(self._stream)
        ready.synchronize()  # counts as this stage's time, and nobody else waits meanwhile
        return dataclasses.replace(batch, ready=ready)


@dataclass(frozen=True)
class _Audio:
    """The audio that a batch is made from.

    Attributes:
        rows: rows of the batch.
        utterances: (shard, utterance, speed) of each different utterance.
        samples: samples of each of these, (S,) int16.
        owners: for each row, the index of its utterance in `utterances`.
        targets: (B, T) int32.
    """

    rows: Rows
    utterances: list[tuple[int, int, int]]
    samples: list[npt.NDArray[np.int16]]
    owners: list[int]
    targets: Tensor
