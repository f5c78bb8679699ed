"""A split whose batches other ranks make: the trainer's end of the feeding."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.comm.packets import Packet
from speechdp.data.loading.batch import Batch
from speechdp.data.loading.left_out import LeftOut
from speechdp.data.loading.source import SplitSource
from speechdp.data.loading.source_request import SourceRequest
from speechdp.data.loading.stage_times import StageTimes
from speechdp.data.plan.assignment import PlanPosition
from speechdp.data.plan.epoch_plan import CorpusIndex, Segments
from speechdp.feeding.feeder_link import DEPTH, FeederLink
from speechdp.labels.transcript_hmm import TranscriptHmms


class Feeders:
    """Opens sources on the feeders of this rank.

    Args:
        link: to the feeders; its creator closes it.
    """

    def __init__(self, link: FeederLink) -> None:
        self._link = link
        self._numbers = itertools.count()

    def open(self, request: SourceRequest) -> FedSource:
        """Open a source on all feeders of this rank.

        Raises:
            ConfigError, ShardError: as `open_local_source`, with the feeder's rank.
        """
        return FedSource(self._link, next(self._numbers), request)


class FedSource(SplitSource):
    """A split that the feeders of this rank have opened; this rank opens no shard.

    Attributes:
        read_ahead: batches to be under way so that every feeder has work.

    Args:
        link: to the feeders.
        number: of the source; unique within this link.
        request: what its batches hold.
    """

    def __init__(self, link: FeederLink, number: int, request: SourceRequest) -> None:
        self._link, self._number = link, number
        self._closed = False
        self.read_ahead = DEPTH * len(link.feeders)
        self.times = StageTimes()
        self._made_by = dict.fromkeys(map(str, link.feeders), 0)
        self.times.facts["batches_of_feeders"] = self._made_by
        words = {"op": "open", "request": request.to_json()}
        answers = [
            self._ask(feeder, {**words, "with_index": feeder == link.feeders[0]}) for feeder in link.feeders
        ]
        replies = [answer.result() for answer in answers]
        self.feature_dim = int(replies[0].head["feature_dim"])
        shard, utterance, num_frames = (tensor.numpy() for tensor in replies[0].tensors)
        self.index = CorpusIndex(shard, utterance, num_frames)
        self.left_out = LeftOut(self.index)

    def start(self, segments: Segments, place: PlanPosition | None = None) -> FedBatch:
        head = {
            "op": "batch",
            "source": self._number,
            "place": None if place is None else [place.epoch, place.part, place.index],
        }
        return FedBatch(self, segments, self._link.ask_for_batch(head, [pack_segments(segments)]))

    def count_classes(self, num_classes: int, share: int, num_shares: int) -> npt.NDArray[np.int64]:
        # One request per shard, in turn among the feeders: each answer is a sign of progress.
        num_shards = int(self.index.shard.max(initial=-1)) + 1
        answers = [
            self._ask(feeder, {
                "op": "count", "num_classes": num_classes, "share": shard, "num_shares": num_shards,
            })
            for shard, feeder in zip(
                range(share, num_shards, num_shares), itertools.cycle(self._link.feeders)
            )
        ]  # fmt: skip
        counts = np.zeros((2, num_classes), dtype=np.int64)
        for answer in answers:
            counts += answer.result().tensors[0].numpy()
            self.beat()
        return counts

    def feeder_times(self) -> list[dict[str, Any]]:
        """Return each feeder's times for this source so far, summed over all trainers that it feeds."""
        answers = [self._ask(feeder, {"op": "times"}) for feeder in self._link.feeders]
        return [answer.result().head["times"] for answer in answers]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._link.forget(self._number)
        for feeder in self._link.feeders if self._link.is_open else ():
            self._ask(feeder, {"op": "close"})

    def arrived(self, packet: Packet, segments: Segments) -> Batch:
        """Return the batch of `segments` that `packet` holds, and count it."""
        features, targets, lengths, *hmms = packet.tensors
        transcripts = TranscriptHmms(*(tensor.numpy() for tensor in hmms)) if hmms else None
        num_frames = int(packet.head["num_frames"])
        batch = Batch(features, targets, lengths, num_frames, transcripts=transcripts)
        if transcripts is not None:
            self.left_out.fits(segments.shard, segments.utterance, lengths.numpy(), transcripts)
        self._made_by[str(packet.source)] += 1
        self.times.count(batch.num_frames, features.shape[0] * features.shape[1])
        return batch

    def _ask(self, feeder: int, head: dict[str, Any]) -> Future[Packet]:
        return self._link.ask(feeder, {**head, "source": self._number})


class FedBatch:
    """A batch that a feeder has been asked for, or will be once one has room."""

    def __init__(self, source: FedSource, segments: Segments, answer: Future[Packet]) -> None:
        self._source, self._segments, self._answer = source, segments, answer
        self._batch: Batch | None = None

    def result(self) -> Batch:
        """Wait for the batch.  Raises the error that occurred on the feeder, with its rank."""
        if self._batch is None:
            self._batch = self._source.arrived(self._answer.result(), self._segments)
        return self._batch


def gather_feeder_times(source: SplitSource, comm: Communicator) -> list[dict[str, Any]]:
    """Return what every feeder has done for a source, by rank; empty where ranks read the data themselves.

    Collective.

    Args:
        source: this rank's source.
        comm: the ranks that train.

    Returns:
        The list `feeders` of timing.json: rank in the job, host, and as `data` the summary of the stages.
    """
    comm.barrier()  # all batches have been made
    own = source.feeder_times() if isinstance(source, FedSource) else []
    by_rank = {entry["rank"]: entry for entries in comm.allgather_object(own) for entry in entries}
    return [by_rank[rank] for rank in sorted(by_rank)]


def pack_segments(segments: Segments) -> Tensor:
    """Return segments as one (5, S) int64 tensor."""
    return torch.from_numpy(np.stack([column.astype(np.int64) for column in vars(segments).values()]))


def transcript_tensors(hmms: TranscriptHmms | None) -> list[Tensor]:
    """Return the arrays of a batch's HMMs, in the order of their fields; empty if it has none."""
    return [] if hmms is None else [torch.from_numpy(array) for array in vars(hmms).values()]


def unpack_segments(packed: Tensor) -> Segments:
    """Return what `pack_segments` packed."""
    return Segments(*packed.numpy())
