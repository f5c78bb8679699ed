"""Quantise what workers and the server exchange: differences to what the server knows, and answers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from speechdp.comm.base import PeerCommunicator
from speechdp.strategies.mechanisms.number_formats import BITS, Compression, message_bytes
from speechdp.strategies.mechanisms.quantisation import Quantiser, stretches
from speechdp.strategies.mechanisms.server import ANSWER_TAG, GIVEN_TAG, SERVER, Wire


class QuantisedWire(Wire):
    """Send vectors and answers quantised in blocks.  Only for GIVE: the answer to a FETCH is not rounded.

    Update rule: with x a worker's vector, r what the server knows of it and Q quantisation,
        worker:  c = Q(x - r);   r <- r + c          server:  r <- r + c, the vector that it is given
        server:  d <- Q(d), which it applies         worker:  reads the same d
    The rounding error of x is part of the next difference, since r lacks it; the server has to keep the
    rounding error of d.

    Args:
        known: r by the rank at the other end, where it is the same; changed in place.  (n,) each
        compression: number format of differences and answers.
        like: a vector of their length, type and device.
    """

    def __init__(self, known: Mapping[int, Tensor], compression: Compression, like: Tensor) -> None:
        self._known = known
        self._quantiser = Quantiser(BITS[compression], like)
        self._length = like.numel()
        num_bytes = message_bytes(self._length, BITS[compression])
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=like.device)
        self._message = self._quantiser.message(memory, self._length)
        self._has_answer = False  # whether the message holds an answer

    def give(self, peers: PeerCommunicator, x: Tensor) -> None:
        self._quantiser.write_difference(self._message, x, self._known[SERVER])
        peers.send(self._message.whole, SERVER, tag=GIVEN_TAG)

    def take(self, peers: PeerCommunicator, worker: int, out: Tensor) -> None:
        peers.recv(self._message.whole, worker, tag=GIVEN_TAG)
        self._quantiser.add_difference(self._message, self._known[worker])
        out.copy_(self._known[worker])

    def round(self, answer: Tensor) -> None:
        for start, end in stretches(self._length):
            self._quantiser.values[: end - start].copy_(answer[start:end])
            self._quantiser.write(self._message, start, end - start)
            answer[start:end].copy_(self._quantiser.read(self._message, start, end - start))
        self._has_answer = True

    def reply(self, peers: PeerCommunicator, worker: int, answer: Tensor) -> None:
        assert self._has_answer, "an answer that was not rounded"
        self._has_answer = False
        peers.send(self._message.whole, worker, tag=ANSWER_TAG)

    def hear(self, peers: PeerCommunicator, out: Tensor) -> None:
        peers.recv(self._message.whole, SERVER, tag=ANSWER_TAG)
        for start, end in stretches(self._length):
            out[start:end].copy_(self._quantiser.read(self._message, start, end - start))
