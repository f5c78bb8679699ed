"""Read planned segments of a split from its shards, straight into the memory of a padded batch.

Legend: B segments of a batch, T frames of the longest, F feature dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.data.loading.buffers import BufferPool
from speechdp.data.loading.left_out import LeftOut
from speechdp.data.loading.source import Ready, SplitSource
from speechdp.data.loading.source_request import Context
from speechdp.data.loading.split_files import SplitFiles
from speechdp.data.loading.stage_times import StageTimes
from speechdp.data.plan.assignment import PlanPosition
from speechdp.data.plan.epoch_plan import CorpusIndex, Segments
from speechdp.data.plan.segments import size_at_speed
from speechdp.data.shards.alignment_file import check_alignments
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.extents import Extents
from speechdp.labels.hmm import StateInventory, count_frames_and_runs
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.state_tying import tying_in
from speechdp.labels.transcript_hmm import TranscriptHmms, TranscriptOptions, make_compiler

IntArray = npt.NDArray[np.int64]
#: Reads slower than this many bytes a second come from a disk or a network, not from the page cache ...
_MEMORY_RATE = 1e9
#: ... if they are large enough for their rate to tell.
_TELLING_BYTES = 1 << 20
#: Targets counted at a time, as whole utterances: 4 MiB.
_TARGETS_COUNTED = 1 << 20


@dataclass(frozen=True)
class Rows:
    """The contents of a batch's rows: frames begin:begin+length of an utterance.  Each column is (B,) int64.

    Attributes:
        shard, utterance: the utterance, by its place in its shard.
        position: of the utterance in the index.
        begin, length: frames, counted at the row's speed.
        first, learnt: frames first:first+learnt of the row are to be learnt.
        speed: percent.
    """

    shard: IntArray
    utterance: IntArray
    position: IntArray
    begin: IntArray
    length: IntArray
    first: IntArray
    learnt: IntArray
    speed: IntArray

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def longest(self) -> int:
        """Frames of the longest row; 0 without rows."""
        return int(self.length.max(initial=0))


class SplitReader(SplitSource):
    """A split's shards, opened read-only, with the targets of the shards or of an alignment directory.

    A shard is opened at the first read from it.  An utterance's checksum is verified when it is first read;
    later reads go straight into the batch's memory.  Thread-safe.

    Args:
        dataset: the data directory.
        split: e.g. "train".
        alignments: directory with one targets file a shard (same file names), or None for the shards' own.
        context: frames around each segment.
        comm: ranks that share the reading of the shards' indices (collective then); None: this rank reads
            all.
        pin: make batches in page-locked memory.
        transcripts: adds the HMMs of the transcripts to batches, with these probabilities and the classes of
            the targets.  Segments are whole utterances then; if one does not fit its transcript, its frames
            are not learnt.

    Raises:
        ConfigError: HMMs are requested, and the lexicon or the class list cannot be used.
        ShardError: damaged shards, or no such alignment directory.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        alignments: Path | None = None,
        context: Context | None = None,
        *,
        comm: Communicator | None = None,
        pin: bool = False,
        transcripts: TranscriptOptions | None = None,
    ) -> None:
        check_alignments(alignments)
        self.feature_dim = dataset.feature_dim
        self.times = StageTimes()
        self.pool = BufferPool(pin=pin)
        self._files = SplitFiles(dataset, split, alignments)
        self._context = context or Context()
        self._compiler = None
        if transcripts is not None:
            lexicon = Lexicon.load(dataset.lexicon_path)
            inventory = StateInventory.load(dataset.classes_path)
            self._compiler = make_compiler(lexicon, inventory, transcripts, tying_in(alignments))
        lengths = self._files.lengths(comm)
        self.times.facts |= {"stored": dataset.stored, "storage": self._files.storage}
        self.index = CorpusIndex.of_lengths(lengths)
        self.left_out = LeftOut(self.index)
        self._has_texts = dataset.has_texts
        self._verified = np.zeros(len(self.index.num_frames), dtype=bool)
        self._is_disk_slow = False
        # Where each utterance begins, counted over all shards, and the first utterance of each shard.
        self._starts = np.concatenate([[0], np.cumsum(self.index.num_frames, dtype=np.int64)])
        self._first = np.cumsum([0, *map(len, lengths)])

    def start(self, segments: Segments, place: PlanPosition | None = None) -> Ready:
        begun = perf_counter()
        rows = self.rows(segments)
        features = self._features(rows)
        targets = self._symbols(rows) if self._has_texts else self.targets(rows)
        transcripts = self.transcripts(rows)
        read = perf_counter()
        batch = Batch(
            self.converted(features, torch.float32),
            self.converted(targets, torch.int64),
            torch.from_numpy(rows.length),
            self.num_learnt(rows, transcripts),
            transcripts=transcripts,
        )
        self.times.add("read", read - begun, features.nbytes + targets.nbytes)
        self.times.add("collate", perf_counter() - read)
        self.times.count(batch.num_frames, len(rows) * rows.longest)
        return Ready(batch)

    def rows(self, segments: Segments) -> Rows:
        """Return the rows of the batch of these segments."""
        position = self._first[segments.shard] + segments.utterance
        recorded = self._starts[position + 1] - self._starts[position]
        lengths = size_at_speed(recorded, segments.speed)
        begin = np.maximum(0, segments.start - self._context.left)
        end = np.minimum(lengths, segments.start + segments.num_frames + self._context.right)
        return Rows(
            shard=segments.shard,
            utterance=segments.utterance,
            position=position,
            begin=begin,
            length=end - begin,
            first=segments.start - begin,
            learnt=segments.num_frames,
            speed=segments.speed,
        )

    def samples(self, shard: int, utterance: int) -> npt.NDArray[np.int16]:
        """Read an utterance's samples (S,) from an audio shard; verify the checksum at the first read."""
        position = self._first[shard] + utterance
        if self._verified[position]:
            return self._files.open(shard).samples(utterance)
        samples, _ = self._files.open(shard).read_samples(utterance, verify=True)
        self._verified[position] = True
        return samples

    def utterance_targets(self, shard: int, utterance: int) -> npt.NDArray[np.int32]:
        """Read an utterance's targets (T,), or for spectrograms its symbols (S,)."""
        return self._files.targets(shard, utterance, utterance + 1)

    def targets(self, rows: Rows) -> Tensor:
        """Read the targets of frames to be learnt into a (B, T) int32 tensor; IGNORED_TARGET elsewhere.

        All rows must be at the recorded speed.
        """
        longest = rows.longest
        targets = self.pool.take((len(rows), longest), torch.int32)
        targets.fill_(IGNORED_TARGET)
        if targets.numel() == 0:
            return targets
        begin = (np.arange(0, len(rows) * longest, longest) + rows.first) * 4
        start = self._frames_in_shard(rows) + rows.first
        extents = Extents(rows.shard.tolist(), start.tolist(), rows.learnt.tolist(), begin.tolist())
        self._files.read_targets(rows.utterance, extents, targets.numpy().reshape(-1).view(np.uint8).data)
        return targets

    def transcripts(self, rows: Rows) -> TranscriptHmms | None:
        """Make the HMMs of the rows' transcripts; None if they are not requested."""
        if self._compiler is None or len(rows) == 0:
            return None
        places = zip(rows.shard.tolist(), rows.utterance.tolist(), strict=True)
        texts = [self._files.open(shard).text(utterance) for shard, utterance in places]
        return TranscriptHmms.of([self._compiler.compile(text.split()) for text in texts])

    def num_learnt(self, rows: Rows, transcripts: TranscriptHmms | None) -> int:
        """Count the frames to be learnt, without utterances that do not fit their transcripts."""
        if transcripts is None:
            return int(rows.learnt.sum())
        fits = self.left_out.fits(rows.shard, rows.utterance, rows.length, transcripts)
        return int(rows.learnt[fits].sum())

    def _symbols(self, rows: Rows) -> Tensor:
        """Read the rows' texts into a (B, S) int32 tensor; IGNORED_TARGET past each end."""
        places = zip(rows.shard.tolist(), rows.utterance.tolist(), strict=True)
        spans = [self._files.open(shard).target_offsets[u : u + 2].tolist() for shard, u in places]
        numbers = [end - begin for begin, end in spans]
        longest = max(numbers, default=0)
        symbols = self.pool.take((len(rows), longest), torch.int32)
        symbols.fill_(IGNORED_TARGET)
        if symbols.numel() == 0:
            return symbols
        into = list(range(0, symbols.numel() * 4, longest * 4))
        extents = Extents(rows.shard.tolist(), [begin for begin, _ in spans], numbers, into)
        self._files.read_targets(rows.utterance, extents, symbols.numpy().reshape(-1).view(np.uint8).data)
        return symbols

    def count_classes(self, num_classes: int, share: int, num_shares: int) -> npt.NDArray[np.int64]:
        counts = np.zeros((2, num_classes), dtype=np.int64)
        for shard in range(share, len(self._first) - 1, num_shares):
            offsets = self._files.open(shard).target_offsets
            for first, last in _blocks(offsets):
                targets = self._files.targets(shard, first, last)
                begins = offsets[first:last] - offsets[first]
                counts += np.stack(count_frames_and_runs(targets, num_classes, begins))
                self.beat()
        return counts

    def converted(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `x` in another dtype, in the pool's memory."""
        return x if x.dtype == dtype else self.pool.take(x.shape, dtype).copy_(x)

    def close(self) -> None:
        self._files.close()

    def _frames_in_shard(self, rows: Rows) -> IntArray:
        """Return the first frame of each row, counted over its shard."""
        starts: IntArray = self._starts[rows.position] - self._starts[self._first[rows.shard]] + rows.begin
        return starts

    def _features(self, rows: Rows) -> Tensor:
        """Read the rows' features: (B, T, F) in the shards' dtype, zero past each row's end."""
        longest = rows.longest
        features = self.pool.take((len(rows), longest, self.feature_dim), self._files.dtype)
        if features.numel() == 0:
            return features
        self._verify(rows)
        frame_bytes = self.feature_dim * features.itemsize
        flat = features.numpy().reshape(-1).view(np.uint8)
        begins = range(0, flat.size, longest * frame_bytes)
        lengths = rows.length.tolist()
        begun = perf_counter()
        extents = Extents(rows.shard.tolist(), self._frames_in_shard(rows).tolist(), lengths, list(begins))
        self._files.features.read(extents, frame_bytes, flat.data, announce=self._is_disk_slow)
        if flat.size > _TELLING_BYTES:
            self._is_disk_slow = flat.size < _MEMORY_RATE * (perf_counter() - begun)
        for begin, length in zip(begins, lengths, strict=True):
            if length < longest:
                flat[begin + length * frame_bytes : begin + longest * frame_bytes] = 0
        return features

    def _verify(self, rows: Rows) -> None:
        """Verify the checksums of utterances that are read for the first time."""
        verified = self._verified[rows.position]
        if verified.all():
            return
        for row in np.flatnonzero(~verified).tolist():
            self._files.open(int(rows.shard[row])).read(int(rows.utterance[row]), verify=True)
            self._verified[rows.position[row]] = True


def _blocks(offsets: IntArray) -> Iterator[tuple[int, int]]:
    """Yield the first utterance and the end (excluded) of blocks of a shard, to be counted one at a time.

    Args:
        offsets: (U + 1,) where the targets of each utterance begin, and where the last ones end.
    """
    first, num_utterances = 0, len(offsets) - 1
    while first < num_utterances:
        end = np.searchsorted(offsets, offsets[first] + _TARGETS_COUNTED, side="right")
        last = max(first + 1, int(end) - 1)
        yield first, last
        first = last
