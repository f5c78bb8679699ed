"""Batches copied to the GPU beside computing: the same values, however the host's memory is used anew."""

from __future__ import annotations

from contextlib import closing
from itertools import repeat

import pytest
import torch

from speechdp.data.loading.batch import Batch
from speechdp.data.loading.buffers import BufferPool
from speechdp.data.loading.loader import Loader
from speechdp.data.loading.source import Pending, Ready
from speechdp.data.loading.stage_times import StageTimes
from speechdp.data.plan.assignment import Assignment, PlanPosition
from speechdp.data.plan.epoch_plan import Segments

NUM = 40
SHAPE = (16, 300, 80)


class Filling:
    """Makes batches of one value each, in the memory of a pool."""

    def __init__(self, *, pin: bool) -> None:
        self.pool = BufferPool(pin=pin)
        self.made = 0

    def start(self, segments: Segments, place: PlanPosition) -> Pending:
        features = self.pool.take(SHAPE, torch.float32).fill_(place.index)
        targets = self.pool.take(SHAPE[:2], torch.int64).fill_(place.index)
        self.made += 1
        return Ready(Batch(features, targets, torch.full((SHAPE[0],), SHAPE[1]), SHAPE[0] * SHAPE[1]))


def assignments() -> list[Assignment]:
    places = (PlanPosition(0, 0, index) for index in range(NUM))
    return [
        Assignment(s, p, p.index, NUM, 1.0, 1) for s, p in zip(repeat(Segments.none()), places, strict=False)
    ]


@pytest.mark.parametrize("read_ahead", [1, 4])
def test_a_second_thread_moves_batches_in_order(read_ahead: int) -> None:
    moved = []

    def move(batch: Batch) -> Batch:
        moved.append(int(batch.targets[0, 0]))
        return Batch(batch.features + 0.5, batch.targets, batch.lengths, batch.num_frames)

    source = Filling(pin=False)
    with closing(Loader(source, iter(assignments()), read_ahead=read_ahead, to_device=move)) as loader:  # type: ignore[arg-type]
        values = [(int(s.batch.targets[0, 0]), float(s.batch.features[0, 0, 0])) for s in loader]
    assert values == [(index, index + 0.5) for index in range(NUM)]
    assert moved == list(range(NUM))


def test_an_error_in_moving_is_raised_at_its_batch() -> None:
    def move(batch: Batch) -> Batch:
        if int(batch.targets[0, 0]) == 3:
            raise RuntimeError("out of memory")
        return batch

    with closing(Loader(Filling(pin=False), iter(assignments()), to_device=move)) as loader:  # type: ignore[arg-type]
        assert [next(loader).at.index for _ in range(3)] == [0, 1, 2]
        with pytest.raises(RuntimeError, match="out of memory"):
            next(loader)
        with pytest.raises(StopIteration):
            next(loader)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_arrives_on_the_gpu_is_what_was_read() -> None:
    from speechdp.data.loading.device_stream import DeviceStream  # noqa: PLC0415

    device = torch.device("cuda", torch.cuda.current_device())
    times = StageTimes()
    stream = DeviceStream(device, times)
    busy = torch.randn(4096, 4096, device=device)
    source = Filling(pin=True)
    with closing(Loader(source, iter(assignments()), to_device=stream.move)) as loader:  # type: ignore[arg-type]
        for index, step in enumerate(loader):
            for _ in range(4):
                busy = torch.tanh(busy @ busy)  # keeps the computing stream behind the copying one
            batch = step.batch.to(device)
            assert batch.features.is_cuda and batch.ready is None
            wrong = (batch.features != index).sum() + (batch.targets != index).sum()
            assert int(wrong) == 0
    assert times.summary()["stages_s"]["h2d"] > 0
