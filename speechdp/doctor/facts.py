"""What a rank can find out about its node on its own; nothing here is collective."""

from __future__ import annotations

import hashlib
import importlib
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

import speechdp
from speechdp.comm import environment, network
from speechdp.comm.device import num_gpus
from speechdp.comm.startup.world import versions
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ShardError
from speechdp.launching.cores import available_cores
from speechdp.timing.gpu import gpu_facts


def _machine() -> str:
    """Return an id of this machine or container, unique until it restarts; "": unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [str(Path("/proc/self/ns", name).readlink()) for name in ("uts", "net")]
    except OSError:
        return ""
    return " ".join([boot, *spaces])


def node_facts() -> dict[str, Any]:
    """Return the node's software and hardware facts, as JSON."""
    return {
        "host": environment.host_name(),
        "machine": _machine(),
        "python": sys.executable,
        "versions": {**versions(), "speechdp code": _code_checksum()},
        "cores": available_cores(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "gpus": _gpus(),
        "interfaces": _interfaces(),
        "infiniband": network.has_infiniband(),
        "memlock_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "file_locking": os.environ.get("HDF5_USE_FILE_LOCKING", ""),
    }


def data_facts(data: Path, *, verify: bool) -> dict[str, Any]:
    """Return the checksum of a data directory as this node sees it, or under "error" why there is none.

    Args:
        data: data directory.
        verify: whether to read every utterance and compare its checksum.
    """
    try:
        dataset = Dataset.open(data)
        paths = [path for split in dataset.splits for path in dataset.shard_paths(split)]
        facts = {
            "checksum": dataset.checksum,
            "shards": len(paths),
            "missing": [path.name for path in paths if not path.is_file()],
            "verified": False,
        }
        if verify:
            dataset.verify()
            facts["verified"] = True
    except ShardError as error:
        return {"error": str(error)}
    return facts


def _code_checksum() -> str:
    """Return a checksum of speechdp's own files: two checkouts of one version may differ."""
    root = Path(speechdp.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _gpus() -> dict[str, Any]:
    return {
        "torch_cuda": torch.version.cuda or "",
        "devices": [gpu_facts(torch.device("cuda", index)) for index in range(num_gpus())],
        **_nvml_facts(),
    }


def _nvml_facts() -> dict[str, Any]:
    """Return the number of GPUs that the driver knows, whatever torch can use; -1: unknown."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {"nvml_gpus": -1, "driver": ""}
    try:
        nvml.nvmlInit()
        try:
            return {"nvml_gpus": nvml.nvmlDeviceGetCount(), "driver": str(nvml.nvmlSystemGetDriverVersion())}
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return {"nvml_gpus": -1, "driver": ""}  # no driver


def _interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of every interface that is up, except loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        ipv4 = [a.address for a in addresses if a.family == socket.AF_INET]
        ipv4 = [address for address in ipv4 if not address.startswith("127.")]
        if name in up and ipv4:
            found[name] = ipv4
    return found


def _limit(which: int) -> int:
    """Return a hard limit, to which speechdp raises its own limit; -1: none."""
    return resource.getrlimit(which)[1]
