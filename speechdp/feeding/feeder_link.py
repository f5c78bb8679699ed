"""A trainer's link to its feeders: requests go to whichever is free, replies come as they are ready."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from speechdp.comm.packets import Pacing, Packet, PacketChannel
from speechdp.errors import CommunicationError, ConfigError, RunError, ShardError, SpeechDPError

#: Most batches outstanding per feeder: one is on its way while the feeder makes the next.  With more, batches
#: would wait for a slow feeder although a faster one could make them.
DEPTH = 2
#: Errors that are sent from a feeder to a trainer, by name.
TRAVELLING: dict[str, type[SpeechDPError]] = {
    error.__name__: error for error in (ConfigError, ShardError, RunError, CommunicationError)
}


@dataclass(frozen=True)
class _Question:
    """A request for a batch that has not been sent yet."""

    head: dict[str, Any]
    tensors: tuple[Tensor, ...]
    answer: Future[Packet] = field(default_factory=Future)


class FeederLink:
    """One trainer's link to its feeders; thread-safe.

    One thread receives; it sleeps while nothing is expected.  Requests beyond `DEPTH` per feeder wait here
    and go to the next feeder that answers, so faster feeders make more batches.

    Args:
        channel: packets between this trainer and its feeders; nobody else on this rank receives from it.
        feeders: ranks in the channel, in the order in which they are asked first.
    """

    def __init__(self, channel: PacketChannel, feeders: Sequence[int]) -> None:
        self.feeders = tuple(feeders)
        self._channel = channel
        self._changed = threading.Condition()
        self._waiting: deque[_Question] = deque()
        self._expected: dict[int, tuple[int, Future[Packet]]] = {}
        self._num_asked = 0
        self._batches = dict.fromkeys(self.feeders, 0)
        self._turn = 0
        self._ending = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._receive, name="speechdp-fed", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether questions can still be asked."""
        return self._error is None and not self._ending

    def ask(self, feeder: int, head: dict[str, Any], tensors: Sequence[Tensor] = ()) -> Future[Packet]:
        """Send a request to this feeder.  The future raises the error that occurred there."""
        answer: Future[Packet] = Future()
        with self._changed:
            self._check()
            self._send(feeder, head, tensors, answer)
        return answer

    def ask_for_batch(self, head: dict[str, Any], tensors: Sequence[Tensor]) -> Future[Packet]:
        """Request a batch from the feeder with the fewest outstanding, as soon as one has room."""
        question = _Question(head, tuple(tensors))
        with self._changed:
            self._check()
            self._waiting.append(question)
            self._deal()
        return question.answer

    def forget(self, source: int) -> None:
        """Drop a source's requests that have not been sent yet."""
        with self._changed:
            dropped = [question for question in self._waiting if question.head["source"] == source]
            self._waiting = deque(q for q in self._waiting if q.head["source"] != source)
        for question in dropped:
            question.answer.cancel()

    def close(self, exit_code: int = 0) -> None:
        """Wait for outstanding answers, send the feeders the exit code, join the thread; safe to call twice.

        Args:
            exit_code: the exit code that this job's ranks have agreed on; the feeders exit with it.
        """
        with self._changed:
            self._waiting.clear()
            while self._expected and self._error is None:
                self._changed.wait()
            if self._error is None and not self._ending:
                for feeder in self.feeders:
                    self._channel.send(feeder, {"op": "bye", "exit_code": exit_code})
        self.abandon()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Join the thread without a goodbye to the feeders: the job is ending."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ending:
            raise CommunicationError("the link to the feeders is closed")

    def _deal(self) -> None:
        while self._waiting and (feeder := self._free_feeder()) is not None:
            question = self._waiting.popleft()
            self._batches[feeder] += 1
            self._send(feeder, question.head, question.tensors, question.answer)

    def _free_feeder(self) -> int | None:
        """Return the feeder with the fewest batches to make, in turn among equals; None: none has room."""
        in_turn = self.feeders[self._turn :] + self.feeders[: self._turn]
        feeder = min(in_turn, key=self._batches.__getitem__)
        if self._batches[feeder] >= DEPTH:
            return None
        self._turn = (self.feeders.index(feeder) + 1) % len(self.feeders)
        return feeder

    def _send(
        self, feeder: int, head: dict[str, Any], tensors: Sequence[Tensor], answer: Future[Packet]
    ) -> None:
        number = self._num_asked
        self._num_asked += 1
        self._expected[number] = (feeder, answer)
        self._channel.send(feeder, {**head, "number": number}, tensors)
        self._changed.notify_all()

    def _receive(self) -> None:
        pacing = Pacing()
        try:
            while self._wait_for_need(pacing):
                if self._take_one():
                    pacing.reset()
                else:
                    pacing.sleep(moving=self._channel.is_moving)
        except BaseException as error:  # those who wait for answers raise it
            self._fail(error)
            if not isinstance(error, SpeechDPError):
                raise

    def _wait_for_need(self, pacing: Pacing) -> bool:
        """Sleep until there is something to receive or to send; return False at the end."""
        with self._changed:
            while not self._expected and not self._channel.is_moving:
                if self._ending:
                    return False
                self._changed.wait()
                pacing.reset()
            return not (self._ending and self._expected)

    def _take_one(self) -> bool:
        """Hand over a packet to whoever waits for it, if one has come; return whether one had.

        This thread keeps no reference to the packet: it may sleep for long, and the batch's memory must be
        freed as soon as its user is done.
        """
        packet = self._channel.receive()
        if packet is None:
            return False
        with self._changed:
            number = packet.head["number"]
            feeder, answer = self._expected[number]
            if packet.head.get("op") == "batch":
                self._batches[feeder] -= 1
                self._deal()  # may fail: then whoever waits for this packet gets the error, too
            del self._expected[number]
            self._changed.notify_all()
        error = packet.head.get("error")
        if error is None:
            answer.set_result(packet)
        else:
            name, text = error
            answer.set_exception(TRAVELLING[name](f"feeder rank {feeder}: {text}"))
        return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            unanswered = [answer for _, answer in self._expected.values()]
            unanswered += [question.answer for question in self._waiting]
            self._expected.clear()
            self._waiting.clear()
            self._changed.notify_all()
        for answer in unanswered:
            answer.set_exception(error)
