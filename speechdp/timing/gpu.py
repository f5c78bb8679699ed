"""GPU facts and readings from NVML: what hardware a run had, and how busy it was."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch


def gpu_facts(device: torch.device) -> dict[str, Any] | None:
    """Return name, memory (bytes), driver and power limit (W) of a CUDA device; None for a CPU.

    NVML counts all GPUs of the host, torch only those in CUDA_VISIBLE_DEVICES, so the device is looked up
    by its UUID.  Without the package nvidia-ml-py (extra `gpu`) only what torch knows is returned, and the
    key "nvml" says why.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    facts: dict[str, Any] = {"name": properties.name, "memory_bytes": properties.total_memory}
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {**facts, "nvml": "not installed; pip install 'speechdp[gpu]'"}
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
            facts["driver"] = nvml.nvmlSystemGetDriverVersion()
            facts["power_limit_w"] = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return {**facts, "nvml": str(error)}
    return facts


def gpu_uuid(device: torch.device) -> str | None:
    """Return NVML's UUID of a CUDA device, independent of CUDA_VISIBLE_DEVICES; None for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES shows this process, in torch's order."""
    if not torch.cuda.is_available():
        return []
    return [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]


class GpuReader:
    """Reads utilisation, memory, power and clock of some GPUs through NVML.  Used by one thread.

    Attributes:
        uuids, names: of the GPUs that NVML knows, in the order asked for; none where there is no NVML.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self.uuids: list[str] = []
        self.names: list[str] = []
        self._handles: list[Any] = []
        self._problems: list[str] = []
        self._nvml: Any = None
        if not uuids:
            return
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            self._problems.append("GPUs: nvidia-ml-py is not installed; pip install 'speechdp[gpu]'")
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._problems.append(f"GPUs: {error}")
            return
        self._nvml = nvml
        for uuid in uuids:
            self._open(uuid)

    def read(self, problems: list[str]) -> list[list[float | int | None]]:
        """Return [index, utilisation in %, memory in bytes, power in W, SM clock in MHz] of each GPU.

        Values that cannot be read are None, and `problems` names them.
        """
        problems += self._problems
        self._problems.clear()
        return [self._read_one(i, handle, problems) for i, handle in enumerate(self._handles)]

    def close(self) -> None:
        """Release NVML.  Safe to call twice."""
        nvml, self._nvml = self._nvml, None
        self._handles.clear()
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _open(self, uuid: str) -> None:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            name = self._nvml.nvmlDeviceGetName(handle)
        except self._nvml.NVMLError as error:
            self._problems.append(f"{uuid}: {error}")
            return
        self.uuids.append(uuid)
        self.names.append(str(name))
        self._handles.append(handle)

    def _read_one(self, index: int, handle: Any, problems: list[str]) -> list[float | int | None]:
        nvml = self._nvml
        readings: dict[str, Callable[[], float | int]] = {
            "utilisation": lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "memory": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # mW
            "clock": lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        }
        values: list[float | int | None] = [index]
        for what, read in readings.items():
            try:
                values.append(read())
            except nvml.NVMLError as error:
                problems.append(f"GPU {index}: {what}: {error}")
                values.append(None)
        return values
