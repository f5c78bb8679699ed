"""Checks that every packet channel must pass, with ranks as threads or as processes.

Each function is collective and takes this rank's communicator; `CHECKS` lists them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from speechdp.comm.base import Communicator
from speechdp.comm.packets import Pacing, Packet, PacketChannel
from speechdp.errors import CommunicationError


def received(channel: PacketChannel, num: int) -> list[Packet]:
    """Wait for so many packets."""
    packets: list[Packet] = []
    pacing = Pacing()
    while len(packets) < num:
        packet = channel.receive()
        if packet is None:
            pacing.sleep(moving=channel.is_moving)
        else:
            packets.append(packet)
    return packets


def drained(channel: PacketChannel) -> None:
    """Wait until everything has left."""
    while channel.is_moving:
        assert channel.receive() is None
        time.sleep(1e-4)


def packets_arrive_whole_and_in_order(comm: Communicator) -> None:
    # From nothing to well beyond what MPI sends at once; odd shapes and every kind of number.
    shapes = [(0, 3), (5,), (2, 3, 4), (200, 300, 40), (1, 7), (100_000,)]
    dtypes = [torch.float32, torch.int64, torch.int32, torch.float32, torch.int16, torch.float64]
    with closing(comm.packets()) as channel:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            for dest in others:
                value = 100 * comm.rank + number
                tensors = [torch.full(shape, value, dtype=dtype), torch.tensor([value, number])]
                channel.send(dest, {"number": number, "text": "ß" * number * 1000}, tensors)
        packets = received(channel, len(shapes) * len(others))
        for source in others:
            theirs = [packet for packet in packets if packet.source == source]
            assert [packet.head["number"] for packet in theirs] == list(range(len(shapes)))
            for number, packet in enumerate(theirs):
                first, second = packet.tensors
                assert (first.shape, first.dtype) == (shapes[number], dtypes[number])
                assert torch.all(first == 100 * source + number)
                assert second.tolist() == [100 * source + number, number]
                assert packet.head["text"] == "ß" * number * 1000
        drained(channel)


def sending_returns_before_anybody_receives(comm: Communicator) -> None:
    """Both ends send megabytes first: were sending to wait, neither would come to receive."""
    times: list[float] = []
    with closing(comm.packets()) as channel:
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        for dest in others:
            channel.send(dest, {}, [torch.ones(1_000_000)], sent=times.append)
        comm.barrier()
        assert all(torch.all(packet.tensors[0] == 1) for packet in received(channel, len(others)))
        drained(channel)
        assert len(times) == len(others) and min(times, default=0.0) >= 0
        assert channel.sent_bytes >= 4_000_000 * len(others)


def tensors_arrive_in_the_memory_given_for_them(comm: Communicator) -> None:
    given: list[torch.Tensor] = []

    def allocate(shape: object, dtype: torch.dtype) -> torch.Tensor:
        given.append(torch.empty(shape, dtype=dtype))  # type: ignore[call-overload]
        return given[-1]

    with closing(comm.packets(allocate)) as channel:
        if comm.rank > 0:
            channel.send(0, {}, [torch.full((3, 4), comm.rank)])
        else:
            packets = received(channel, comm.size - 1)
            assert {p.tensors[0].data_ptr() for p in packets} == {x.data_ptr() for x in given}
        drained(channel)


def channels_do_not_take_each_others_packets(comm: Communicator) -> None:
    with closing(comm.packets()) as first, closing(comm.packets()) as second:
        if comm.rank > 0:
            second.send(0, {"on": "second"})
            first.send(0, {"on": "first"})
        else:
            for channel, name in ((first, "first"), (second, "second")):
                heads = [packet.head for packet in received(channel, comm.size - 1)]
                assert heads == [{"on": name}] * (comm.size - 1)
        drained(first)
        drained(second)


def what_cannot_be_sent_is_refused(comm: Communicator) -> None:
    with closing(comm.packets()) as channel:
        for dest in (comm.rank, comm.size, -1):
            with pytest.raises(CommunicationError, match="not one of the other ranks"):
                channel.send(dest, {})
        if comm.size > 1:
            with pytest.raises(CommunicationError, match="contiguous"):
                channel.send((comm.rank + 1) % comm.size, {}, [torch.ones(3, 3)[:, 1]])
        assert channel.receive() is None


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    packets_arrive_whole_and_in_order,
    sending_returns_before_anybody_receives,
    tensors_arrive_in_the_memory_given_for_them,
    channels_do_not_take_each_others_packets,
    what_cannot_be_sent_is_refused,
)
