"""The weighted mean of the ranks' vectors from quantised differences, with error feedback."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from speechdp.comm.background import JobThread
from speechdp.comm.base import PeerCommunicator
from speechdp.strategies.mechanisms.number_formats import BITS, BLOCK, Compression, message_bytes
from speechdp.strategies.mechanisms.quantisation import Message, Quantiser, stretches

#: Tags of messages to a piece's owner, and of those from it.
_TO_OWNER, _FROM_OWNER = 0, 1


class Outbox:
    """Send messages one after another, in a separate thread.

    Ranks that send to each other before they receive would wait for each other.

    Args:
        peers: a channel that nothing else uses.
    """

    def __init__(self, peers: PeerCommunicator) -> None:
        self.peers = peers
        self._messages: queue.SimpleQueue[tuple[Tensor, int, int, _Written | None]]
        self._messages = queue.SimpleQueue()
        self._thread: JobThread | None = None
        self._num_posted = 0

    def open(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._thread = JobThread(f"averages of rank {self.peers.rank}, sending", self._send)

    def close(self) -> None:
        """Stop the thread; no message is in flight."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def post(self, x: Tensor, dest: int, tag: int) -> None:
        """Send `x`, which must not be written before `flush`."""
        assert self._thread is not None, "the outbox is closed"
        self._messages.put((x, dest, tag, _Written(x.device) if x.is_cuda else None))
        self._num_posted += 1
        self._thread.start()

    def flush(self) -> None:
        """Wait until all messages are sent; raise the thread's error, if any."""
        assert self._thread is not None, "the outbox is closed"
        for _ in range(self._num_posted):
            self._thread.wait()
        self._num_posted = 0

    def _send(self) -> None:
        x, dest, tag, ready = self._messages.get()
        if ready is not None:
            ready.event.synchronize()
        # The copy to the host is ordered after the stream that wrote the message: this thread's default
        # stream is training's, whose steps the copy would wait for.
        with torch.cuda.stream(ready.stream if ready is not None else None):
            self.peers.send(x, dest, tag=tag)


class _Written:
    """The current stream's position on a GPU: the stream, and an event after all work queued so far."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device)
        # `blocking` lets the waiting thread sleep instead of spin.
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(self.stream)


class QuantisedMean:
    """Replace vectors x_i by their weighted mean over ranks, sent as quantised differences to a reference.

    Update rule: with a the reference, p_i = n_i / (sum_j n_j) the weights' shares and Q quantisation,
        rank i:   d_i = (x_i - a) + e_i / s_i;   e_i <- e_i + p_i ((x_i - a) - Q(d_i))
        owner:    m = (sum_i p_i Q(d_i)) + f;    f <- m - Q(m)
        all:      mean <- a + Q(m).
    e_i is what rank i has not contributed to the means so far, and f what a piece's owner has not
    distributed, both in the mean's own units: all distributed means, the e_i and f add up to the exact means,
    whatever the weights.  s_i is the largest share that rank i has had so far, at least 1/N: it determines
    how fast e_i is contributed, not whether.  If it were repeatedly smaller than p_i, more than e_i would be
    contributed each time, and e_i would grow.

    Exchange: the vector is cut into N pieces, one owned by each rank.  Every rank sends each owner its piece,
    the weight and the scales in one message, and gets the mean of the piece back: 2 (N-1)/N times the
    vector's quantised bytes sent by each rank, as in a ring.  An owner's own part is not quantised.

    Guarantee: the mean is bitwise the same on every rank if the reference is.  A rank of weight 0 contributes
    nothing, whatever its vector holds.

    Source: error feedback on both sides of a mean as in DoubleSqueeze (Tang et al. 2019, arXiv 1905.05957);
    quantised differences to a common model: FedPAQ (Reisizadeh et al. 2020, arXiv 1909.13014); both recalled.
    Deviations: a piece's owner instead of a server, weights by frames, errors kept in the mean's units so
    that unequal weights lose nothing.

    Args:
        outbox: open while vectors are averaged.
        like: a vector of the length, type and device of those to be averaged.
        compression: number format of the differences.
    """

    def __init__(self, outbox: Outbox, like: Tensor, compression: Compression) -> None:
        self._outbox, self._peers = outbox, outbox.peers
        self._rank, self._size = self._peers.rank, self._peers.size
        self._quantiser = Quantiser(BITS[compression], like)
        length = like.numel()
        piece = -(-length // (self._size * BLOCK)) * BLOCK
        self._borders = [min(piece * rank, length) for rank in range(self._size + 1)]
        num_bytes = message_bytes(piece, BITS[compression])
        memory = torch.zeros(self._size, num_bytes, dtype=torch.uint8, device=like.device)
        self._outgoing = [self._message(row, owner) for owner, row in enumerate(memory)]
        self._incoming = memory.new_zeros(num_bytes)
        self._mean = like.new_zeros(self._length(self._rank))
        #: e_i and f, and s_i.
        self._error = torch.zeros_like(like)
        self._owner_error = torch.zeros_like(self._mean)
        self._largest_share = 1 / self._size

    def average(self, own: Tensor, reference: Tensor, weight: float, out: Tensor) -> None:
        """Set `out` to the mean.  Collective.

        Args:
            own: this rank's vector x_i.  (n,)
            reference: a, the same on every rank.  (n,)
            weight: n_i; not 0 on all ranks.
            out: may be `own`.  (n,)
        """
        for owner in self._others():
            self._write_part(owner, own, reference, weight)
            self._outbox.post(self._outgoing[owner].whole, owner, _TO_OWNER)
        total, share = self._gather(own, reference, weight)
        reply = self._write_mean(total)
        for rank in self._others():
            self._outbox.post(reply.whole, rank, _FROM_OWNER)
        self._keep_errors(own, reference, share)
        self._apply(reply, self._rank, reference, out)
        for owner in self._sources():
            self._apply(self._receive(owner, owner, _FROM_OWNER), owner, reference, out)
        self._outbox.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            "error": self._error,
            "owner_error": self._owner_error,
            "largest_share": self._largest_share,
            "size": self._size,
            "rank": self._rank,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; with other pieces (number of ranks, this rank's place), errors start at 0."""
        if (state["size"], state.get("rank", self._rank)) == (self._size, self._rank):
            self._error.copy_(state["error"])
            self._owner_error.copy_(state["owner_error"])
            self._largest_share = state["largest_share"]

    def _length(self, owner: int) -> int:
        return self._borders[owner + 1] - self._borders[owner]

    def _message(self, memory: Tensor, owner: int) -> Message:
        return self._quantiser.message(memory, self._length(owner))

    def _others(self) -> list[int]:
        """Return the ranks to send to; while all send to their k-th, each receives from its k-th source."""
        return [(self._rank + k) % self._size for k in range(1, self._size)]

    def _sources(self) -> list[int]:
        return [(self._rank - k) % self._size for k in range(1, self._size)]

    def _stretches(self, owner: int) -> Iterator[tuple[int, int, slice]]:
        """Yield start and length of each stretch within a piece, and its place in the vector."""
        first = self._borders[owner]
        for start, end in stretches(self._length(owner)):
            yield start, end - start, slice(first + start, first + end)

    def _difference(self, own: Tensor, reference: Tensor, place: slice) -> Tensor:
        """Return a stretch of (x_i - a) + e_i / s_i in the quantiser's buffer."""
        values = self._quantiser.values[: place.stop - place.start]
        torch.sub(own[place], reference[place], out=values)
        return values.add_(self._error[place], alpha=1 / self._largest_share)

    def _write_part(self, owner: int, own: Tensor, reference: Tensor, weight: float) -> None:
        message = self._outgoing[owner]
        message.weight.fill_(weight)
        if weight == 0:  # the vector may hold anything, and no owner reads the codes
            return
        for start, length, place in self._stretches(owner):
            self._difference(own, reference, place)
            self._quantiser.write(message, start, length)

    def _gather(self, own: Tensor, reference: Tensor, weight: float) -> tuple[float, float]:
        """Sum this rank's piece over ranks with weights; return the sum of weights and this rank's share."""
        weights = {self._rank: weight}
        self._mean.zero_()
        if weight > 0:
            for start, length, place in self._stretches(self._rank):
                part = self._difference(own, reference, place)
                torch.mul(part, weight, out=self._mean[start : start + length])
        for source in self._sources():
            message = self._receive(source, self._rank, _TO_OWNER)
            weights[source] = message.weight.item()
            if weights[source] > 0:
                for start, length, _ in self._stretches(self._rank):
                    part = self._quantiser.read(message, start, length)
                    self._mean[start : start + length].add_(part, alpha=weights[source])
        total = sum(weights[rank] for rank in range(self._size))
        return total, weight / total

    def _write_mean(self, total: float) -> Message:
        """Quantise the mean of this rank's piece; return the message for all ranks."""
        # Reuses the message that this rank would have sent to itself.
        reply = self._outgoing[self._rank]
        for start, length, _ in self._stretches(self._rank):
            mean, error = (x[start : start + length] for x in (self._mean, self._owner_error))
            torch.add(error, mean, alpha=1 / total, out=error)
            self._quantiser.values[:length].copy_(error)
            self._quantiser.write(reply, start, length)
            error.sub_(self._quantiser.read(reply, start, length))
        return reply

    def _keep_errors(self, own: Tensor, reference: Tensor, share: float) -> None:
        """Add to the errors what the means lack of this rank's differences; its own piece lacks nothing."""
        if share == 0:
            return
        for owner in self._others():
            message = self._outgoing[owner]
            for start, length, place in self._stretches(owner):
                values = torch.sub(own[place], reference[place], out=self._quantiser.values[:length])
                values.sub_(self._quantiser.read(message, start, length))
                self._error[place].add_(values, alpha=share)
        self._largest_share = max(share, self._largest_share)

    def _apply(self, message: Message, owner: int, reference: Tensor, out: Tensor) -> None:
        for start, length, place in self._stretches(owner):
            torch.add(reference[place], self._quantiser.read(message, start, length), out=out[place])

    def _receive(self, source: int, owner: int, tag: int) -> Message:
        message = self._message(self._incoming, owner)
        self._peers.recv(message.whole, source, tag=tag)
        return message
