"""Time stamps from the accelerator's own clock, taken without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch


class DeviceEvent(Protocol):
    """A point in a device's queue of work; the part of `torch.cuda.Event` that the timeline uses."""

    def query(self) -> bool:
        """Return whether the device has passed this point."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this point to `end_event`; both must have been passed."""
        ...


class DeviceEvents(Protocol):
    """A source and pool of recorded events.  Tests replace it by a simulated device."""

    def record(self) -> DeviceEvent:
        """Record an event after all work queued so far and return it; never waits."""
        ...

    def recycle(self, events: Iterable[DeviceEvent]) -> None:
        """Return events that will no longer be read to the pool."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        ...


class CudaEvents:
    """CUDA events on the current stream of one device, from a pool (creating one costs several µs)."""

    def __init__(self, device: torch.device) -> None:
        """Args: device: the CUDA device whose current stream is marked."""
        assert device.type == "cuda", device
        self._device = device
        self._free: list[Any] = []

    def record(self) -> DeviceEvent:
        """Mark the current stream; never waits."""
        event = self._free.pop() if self._free else _new_event()
        event.record(torch.cuda.current_stream(self._device))
        timed: DeviceEvent = event
        return timed

    def recycle(self, events: Iterable[DeviceEvent]) -> None:
        """Return events to the pool."""
        self._free.extend(events)

    def synchronize(self) -> None:
        """Wait for all streams of the device, because work may be queued on others than the current one."""
        torch.cuda.synchronize(self._device)


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
