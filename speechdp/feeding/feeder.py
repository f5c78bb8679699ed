"""A feeder: makes and sends the batches that trainers ask for, until all trainers have finished."""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechdp.comm import environment
from speechdp.comm.packets import Pacing, Packet, PacketChannel
from speechdp.data.loading.source import Pending, SplitSource
from speechdp.data.loading.source_options import SourceOptions, open_local_source
from speechdp.data.loading.source_request import SourceRequest
from speechdp.data.plan.assignment import PlanPosition
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import SpeechDPError
from speechdp.feeding.fed_source import transcript_tensors, unpack_segments
from speechdp.feeding.feeder_link import TRAVELLING


def feed(channel: PacketChannel, trainers: Sequence[int], dataset: Dataset, options: SourceOptions) -> int:
    """Serve trainers until the last one has finished; return the exit code they have agreed on.

    A second thread makes batches in the order in which they are requested.  Meanwhile this thread sends and
    receives packets, so that a batch leaves while the next one is made.

    Args:
        channel: packets between this feeder and its trainers; nobody else on this rank receives from it.
        trainers: ranks in the channel.
        dataset: the data.
        options: how batches are made on this rank.

    Raises:
        CommunicationError: the transport has failed.
        Exception: a defect in making a batch.  Errors of damaged data are sent to the trainer that asked,
            which raises them.
    """
    maker = _Maker(channel, dataset, options)
    exit_codes: dict[int, int] = {}
    pacing = Pacing()
    try:
        while len(exit_codes) < len(trainers) or channel.is_moving:
            maker.check()
            packet = channel.receive()
            if packet is None:
                pacing.sleep(moving=channel.is_moving)
                continue
            pacing.reset()
            if packet.head["op"] == "bye":
                exit_codes[packet.source] = int(packet.head["exit_code"])
            else:
                maker.take(packet)
    finally:
        maker.close()
    maker.check()
    return max(exit_codes.values())


@dataclass
class _OpenedSource:
    """A source that trainers have opened with the same request, and how many of them use it."""

    source: SplitSource
    key: str
    num_users: int = 0


@dataclass(frozen=True)
class _Begun:
    """A batch being made."""

    asked: Packet
    opened: _OpenedSource
    pending: Pending


class _Maker:
    """Makes batches in a thread and answers the trainers' other requests about sources.

    Args: as `feed`'s.
    """

    def __init__(self, channel: PacketChannel, dataset: Dataset, options: SourceOptions) -> None:
        self._channel, self._dataset, self._options = channel, dataset, options
        self._sources: dict[tuple[int, int], _OpenedSource] = {}
        self._shared: dict[str, _OpenedSource] = {}
        self._packets: queue.SimpleQueue[Packet | None] = queue.SimpleQueue()
        self._begun: deque[_Begun] = deque()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="speechdp-feeder", daemon=True)
        self._thread.start()

    def take(self, packet: Packet) -> None:
        """Do what a packet asks for, after all packets before it."""
        self._packets.put(packet)

    def check(self) -> None:
        """Raise the error that has ended the thread, if there is one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Finish all requests, join the thread and close all sources."""
        self._packets.put(None)
        self._thread.join()
        for opened in self._shared.values():
            opened.source.close()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # the main thread raises it
            self._error = error

    def _step(self) -> bool:
        """Start a batch, finish one, or answer another request; return False at the end."""
        # Keep as many batches in work as there are preprocessing threads, and one more that is being read.
        if self._begun and (len(self._begun) > self._options.num_threads or self._packets.empty()):
            self._finish(self._begun.popleft())
            return True
        packet = self._packets.get()
        if packet is not None and packet.head["op"] == "batch":
            self._begin(packet)
            return True
        while self._begun:
            self._finish(self._begun.popleft())
        if packet is not None:
            self._answer(packet)
        return packet is not None

    def _begin(self, asked: Packet) -> None:
        try:
            opened = self._sources[asked.source, asked.head["source"]]
            place = asked.head["place"]
            segments = unpack_segments(asked.tensors[0])
            pending = opened.source.start(segments, None if place is None else PlanPosition(*place))
        except SpeechDPError as error:
            self._refuse(asked, error)
        else:
            self._begun.append(_Begun(asked, opened, pending))

    def _finish(self, begun: _Begun) -> None:
        try:
            batch = begun.pending.result()
        except SpeechDPError as error:
            self._refuse(begun.asked, error)
            return
        times = begun.opened.source.times
        tensors = [batch.features, batch.targets, batch.lengths, *transcript_tensors(batch.transcripts)]
        self._channel.send(
            begun.asked.source,
            {"number": begun.asked.head["number"], "op": "batch", "num_frames": batch.num_frames},
            [tensor.contiguous() for tensor in tensors],
            sent=lambda seconds: times.add("send", seconds),
        )

    def _answer(self, asked: Packet) -> None:
        try:
            head, tensors = getattr(self, f"_{asked.head['op']}")(asked)
        except SpeechDPError as error:
            self._refuse(asked, error)
        else:
            self._channel.send(asked.source, {**head, "number": asked.head["number"]}, tensors)

    def _refuse(self, asked: Packet, error: SpeechDPError) -> None:
        name = type(error).__name__
        head = {"number": asked.head["number"], "op": asked.head["op"]}
        self._channel.send(
            asked.source, {**head, "error": [name if name in TRAVELLING else "RunError", str(error)]}
        )

    def _open(self, asked: Packet) -> tuple[dict[str, Any], list[Tensor]]:
        key = json.dumps(asked.head["request"], sort_keys=True)
        opened = self._shared.get(key)
        if opened is None:
            request = SourceRequest.from_json(asked.head["request"])
            opened = _OpenedSource(open_local_source(self._dataset, request, self._options), key)
            self._shared[key] = opened
        opened.num_users += 1
        self._sources[asked.source, asked.head["source"]] = opened
        index = opened.source.index
        columns = (index.shard, index.utterance, index.num_frames) if asked.head["with_index"] else ()
        return {"feature_dim": opened.source.feature_dim}, [torch.from_numpy(column) for column in columns]

    def _count(self, asked: Packet) -> tuple[dict[str, Any], list[Tensor]]:
        source = self._sources[asked.source, asked.head["source"]].source
        words = asked.head
        counts = source.count_classes(words["num_classes"], words["share"], words["num_shares"])
        return {}, [torch.from_numpy(counts)]

    def _times(self, asked: Packet) -> tuple[dict[str, Any], list[Tensor]]:
        source = self._sources[asked.source, asked.head["source"]].source
        place = {"rank": self._channel.rank, "host": environment.host_name()}
        return {"times": {**place, "data": source.times.summary()}}, []

    def _close(self, asked: Packet) -> tuple[dict[str, Any], list[Tensor]]:
        opened = self._sources.pop((asked.source, asked.head["source"]), None)
        if opened is not None:
            opened.num_users -= 1
            if opened.num_users == 0:
                del self._shared[opened.key]
                opened.source.close()
        return {}, []
