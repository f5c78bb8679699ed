"""Choose where a rank computes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from speechdp import remedies
from speechdp.counting import counted
from speechdp.errors import CommunicationError, ConfigError

#: Ranks of a host that share a GPU, as tests of several ranks on one GPU need it; one by default.
RANKS_PER_GPU = "SPEECHDP_RANKS_PER_GPU"


def num_gpus() -> int:
    """Return how many GPUs torch sees on this host; CUDA_VISIBLE_DEVICES counts."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def ranks_per_gpu() -> int:
    """Return how many ranks of a host share a GPU.

    Raises:
        ConfigError: the environment says nonsense.
    """
    shared_by = os.environ.get(RANKS_PER_GPU) or "1"
    if not shared_by.isdecimal() or int(shared_by) < 1:
        raise ConfigError(f"{RANKS_PER_GPU}={shared_by}: give a number of ranks, at least 1")
    return int(shared_by)


def ranks_on_gpus(name: str) -> int:
    """Return how many ranks of this host compute on GPUs at most, with `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: cuda was asked for and there is none; or the environment says nonsense.
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
    """Return the kind of device that exchanges are on, before the communicator knows the local rank."""
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: cuda was asked for and this rank has none; or the environment says nonsense.
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
    """Refuse ranks of which some compute on GPUs and others on the CPU: their flat vectors differ in layout.

    Args:
        places: host and kind of device (`cuda`, `cpu`) of every rank, in order.

    Raises:
        CommunicationError: naming the first rank of either kind.
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
