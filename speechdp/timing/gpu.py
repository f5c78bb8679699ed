"""What NVML says of a rank's GPU; recorded with a run, so that its figures can be placed."""

from __future__ import annotations

import importlib
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
