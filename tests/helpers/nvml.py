"""A stand-in for NVML's package, pynvml."""

from __future__ import annotations

import os
from types import SimpleNamespace

NAMES = {"GPU-a": "H200", "GPU-b": "L4"}
#: NVML's numbers of them: CUDA_VISIBLE_DEVICES may leave out others.
NUMBERS = {"GPU-a": 2, "GPU-b": 3}


class NvmlError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """Two GPUs in NVML's units; `refused` maps (reading, handle) to the number of readings that succeed."""

    NVMLError = NvmlError
    NVML_CLOCK_SM = 1
    nvmlMemory_v2 = 2  # noqa: N815 (NVML's name)

    def __init__(self, **refused: int) -> None:
        listed = {gpu: {os.getpid(): 2**29} for gpu in NAMES}
        super().__init__(refused=refused, running=0, num_reads=0, listed=listed, clock=1980, reasons=0)

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's name)
        self._read("init")
        self.running += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.running -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in NAMES:
            raise NvmlError("Not Found")
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return NAMES[handle]

    def nvmlDeviceGetIndex(self, handle: str) -> int:  # noqa: N802
        return NUMBERS[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        self._read("utilisation")
        return SimpleNamespace(gpu=93 if handle == "GPU-a" else 7, memory=50)

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 0) -> SimpleNamespace:  # noqa: N802
        """Return 3 GiB of which the first version counts one that the driver reserves."""
        return SimpleNamespace(used=(2 if version else 3) * 2**30, total=139 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        self._read("power")
        return 412_500  # mW

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:  # noqa: N802
        assert clock == self.NVML_CLOCK_SM
        return self.clock

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:  # noqa: N802
        self._read("event_reasons")  # refuse it for a driver before 535
        return self.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        self._read("throttle_reasons")
        return self.reasons

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        self._read("processes")
        listed = self.listed.get(handle, {})
        pairs = listed.items() if isinstance(listed, dict) else listed
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in pairs]

    def _read(self, what: str) -> None:
        if what in self.refused:
            self.refused[what] -= 1
            if self.refused[what] < 0:
                missing = "Function Not Found" if what.endswith("reasons") else "GPU is lost"
                raise NvmlError("Not Supported" if what in ("power", "processes") else missing)
