"""Packets between ranks that are threads of one process."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from speechdp.comm.packets import Allocate, Packet, PacketChannel, Sent, describe, make_room
from speechdp.comm.threads.job import ThreadJob
from speechdp.errors import CommunicationError


class PacketBoxes:
    """Packets of one channel that have not yet been received, in one box per rank.

    Args:
        job: its condition guards the boxes.
        members: rank in the job of every rank of the channel.
    """

    def __init__(self, job: ThreadJob, members: Sequence[int]) -> None:
        self.job, self.members = job, members
        self.boxes: list[deque[tuple[int, str, list[Tensor]]]] = [deque() for _ in members]


class ThreadPackets(PacketChannel):
    """One rank's end of a channel between threads.

    Args:
        rank: this rank in the channel.
        boxes: the channel's boxes, shared by its ranks.
        allocate: returns memory for arriving tensors.
        meet: returns once every rank of the channel has called it.
    """

    def __init__(self, rank: int, boxes: PacketBoxes, allocate: Allocate, meet: Callable[[], None]) -> None:
        self.rank, self.size = rank, len(boxes.members)
        self._boxes, self._allocate, self._meet = boxes, allocate, meet
        self._sent: deque[tuple[Sent, float]] = deque()
        self._closed = False

    def send(
        self, dest: int, head: dict[str, Any], tensors: Sequence[Tensor] = (), sent: Sent | None = None
    ) -> None:
        self.check(dest, tensors)
        begun_s = time.monotonic()
        copies = [tensor.clone() for tensor in tensors]
        with self._boxes.job.changed:
            self._boxes.boxes[dest].append((self.rank, json.dumps(head), copies))
            self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        if sent is not None:
            self._sent.append((sent, time.monotonic() - begun_s))

    def receive(self) -> Packet | None:
        while self._sent:
            sent, seconds = self._sent.popleft()
            sent(seconds)
        job, box = self._boxes.job, self._boxes.boxes[self.rank]
        with job.changed:
            if box:
                source, head, copies = box.popleft()
            else:
                self._check_job(job)
                return None
        tensors = make_room(describe(copies), self._allocate)
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        return Packet(source, json.loads(head), tensors)

    @property
    def is_moving(self) -> bool:
        return bool(self._sent)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._meet()

    def _check_job(self, job: ThreadJob) -> None:
        """Raise CommunicationError if waiting is in vain."""
        rank = self._boxes.members[self.rank]
        if job.failure is not None:
            failed, error = job.failure
            raise CommunicationError(
                f"rank {failed} failed ({type(error).__name__}); rank {rank} waits for a packet"
            )
        if time.monotonic() >= job.deadline:
            raise CommunicationError(f"rank {rank} timed out waiting for a packet")
