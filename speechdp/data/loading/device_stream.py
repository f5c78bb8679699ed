"""Copy batches to the GPU on a separate stream, while the kernels of the previous step run."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from typing import Any

import torch

from speechdp.data.loading.batch import Batch
from speechdp.data.loading.stage_times import StageTimes


class DeviceStream:
    """Copies batches to one GPU; thread-safe.

    Keeps a reference to the host memory until its copy has ended: memory without a reference returns to its
    pool and is filled with another batch.

    Args:
        device: the GPU.
        times: receives how long each copy kept its stream, read when a later copy finds it ended.
    """

    def __init__(self, device: torch.device, times: StageTimes) -> None:
        self._device = device
        self._times = times
        self._stream: Any = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._under_way: deque[tuple[Batch, Any, Any]] = deque()
        self._lock = threading.Lock()

    def move(self, batch: Batch) -> Batch:
        """Start copying a batch; the first user of the result calls its `to`, which waits for the copy."""
        if batch.features.is_cuda:
            return batch
        with self._lock, torch.cuda.stream(self._stream):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            started.record(self._stream)
            moved = dataclasses.replace(
                batch,
                features=batch.features.to(self._device, non_blocking=True),
                targets=batch.targets.to(self._device, non_blocking=True),
                ready=ended,
            )
            ended.record(self._stream)
            self._under_way.append((batch, started, ended))
            self._release()
        return moved

    def _release(self) -> None:
        while self._under_way and self._under_way[0][2].query():
            _, started, ended = self._under_way.popleft()
            self._times.add("h2d", started.elapsed_time(ended) / 1e3)
