"""Choose the device that a rank computes on."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from speechdp import remedies
from speechdp.counting import counted
from speechdp.errors import CommunicationError, ConfigError

#: Variable: how many ranks of a host share a GPU (default 1), for tests of several ranks on one GPU.
RANKS_PER_GPU = "SPEECHDP_RANKS_PER_GPU"


def num_gpus() -> int:
    """Return how many GPUs torch sees on this host, given CUDA_VISIBLE_DEVICES."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def ranks_per_gpu() -> int:
    """Return how many ranks of a host share a GPU.

    Raises:
        ConfigError: the environment's value is not a positive integer.
    """
    shared_by = os.environ.get(RANKS_PER_GPU) or "1"
    if not shared_by.isdecimal() or int(shared_by) < 1:
        raise ConfigError(f"{RANKS_PER_GPU}={shared_by}: give a number of ranks, at least 1")
    return int(shared_by)


def ranks_on_gpus(name: str) -> int:
    """Return the largest number of this host's ranks that can use GPUs, with `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: cuda was requested and there is no GPU, or `ranks_per_gpu` refuses the environment.
    """
    shared_by = ranks_per_gpu()
    if name == "cpu":
        return 0
    count = num_gpus()
    if count == 0 and name == "cuda":
        raise ConfigError(
            f"{remedies.device('cuda')}: torch sees no GPU on this host; check the driver, or use "
            f"{remedies.device('cpu')}"
        )
    return count * shared_by


def exchange_device(name: str) -> torch.device:
    """Return the kind of device whose tensors are exchanged, before the local rank is known."""
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: cuda was requested and this rank has no GPU, or `ranks_per_gpu` refuses the environment.
    """
    most = ranks_on_gpus(name)
    if most == 0:
        return torch.device("cpu")
    count = num_gpus()
    if local_rank >= most:
        raise ConfigError(
            f"local rank {local_rank}: only {counted(count, 'GPU')} on this host; start at most "
            f"{counted(most, 'rank')} a host (slots= in the hostfile), or use {remedies.device('cpu')}"
        )
    device = torch.device("cuda", local_rank * count // most)
    torch.cuda.set_device(device)
    return device


def refuse_mixed_kinds(places: Sequence[tuple[str, str]]) -> None:
    """Refuse a job in which some ranks use GPUs and others the CPU: their flat vectors differ in layout.

    Args:
        places: host and kind of device (`cuda`, `cpu`) of every rank, in order.

    Raises:
        CommunicationError: the kinds differ; the message names the first rank of each.
    """
    kinds = [kind for _, kind in places]
    if len(set(kinds)) < 2:
        return
    on_gpu, on_cpu = kinds.index("cuda"), kinds.index("cpu")
    blind = places[on_cpu][0]
    raise CommunicationError(
        f"rank {on_gpu} on {places[on_gpu][0]} would compute on a GPU and rank {on_cpu} on {blind} on the "
        f"CPU, and sums over them would be wrong; check the driver on {blind} (torch sees no GPU there), or "
        f"use {remedies.device('cpu')}"
    )
