"""Where ranks compute, with the GPUs of a host made up."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speechdp.comm.device import RANKS_PER_GPU, choose_device
from speechdp.comm.torchdist import communicator as torchdist
from speechdp.errors import ConfigError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANKS_PER_GPU, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_each_rank_has_a_gpu_of_its_own(two_gpus: None) -> None:
    assert [choose_device("auto", rank).index for rank in range(2)] == [0, 1]
    with pytest.raises(ConfigError, match="local rank 2: only 2 GPUs on this host; start at most 2 ranks"):
        choose_device("cuda", 2)
    assert choose_device("cpu", 2).type == "cpu"


def test_ranks_share_gpus_where_they_are_told_to(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_GPU, "2")
    assert [choose_device("cuda", rank).index for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="local rank 4: only 2 GPUs on this host; start at most 4 ranks"):
        choose_device("cuda", 4)
    for nonsense in ("0", "-1", "two"):
        monkeypatch.setenv(RANKS_PER_GPU, nonsense)
        with pytest.raises(ConfigError, match=f"SPEECHDP_RANKS_PER_GPU={nonsense}: give a number of ranks"):
            choose_device("cuda", 0)


def test_nccl_is_begun_on_the_gpu_that_the_rank_computes_on(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[torch.device] = []

    def init(backend: str, *, device_id: torch.device, **options: Any) -> None:
        begun.append(device_id)

    def connect(local_rank: int) -> None:
        meeting = SimpleNamespace(
            rank=local_rank, size=4, local_rank=local_rank, store=None, connecting=contextlib.nullcontext
        )
        monkeypatch.setattr(torchdist, "meet", lambda part, device, connects_later: meeting)
        torchdist.TorchCommunicator(torch.device("cuda"))

    monkeypatch.setattr(torchdist.dist, "init_process_group", init)
    monkeypatch.setenv(RANKS_PER_GPU, "2")
    for local_rank in range(4):
        connect(local_rank)
    assert begun == [choose_device("cuda", rank) for rank in range(4)]
    monkeypatch.delenv(RANKS_PER_GPU)
    with pytest.raises(ConfigError, match="local rank 2: only 2 GPUs on this host"):
        connect(2)
