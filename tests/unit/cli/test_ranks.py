"""Commands that use a trained model over ranks: what they set before the ranks start."""

from __future__ import annotations

import os

import pytest
import torch

from speechdp.cli.support import ranks
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator


@pytest.mark.parametrize(("given", "expected"), [(None, "20"), ("3", "3")])
def test_horovod_looks_for_work_rarely_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", given or "")
    if given is None:
        monkeypatch.delenv("HOROVOD_CYCLE_TIME")
    seen: list[str] = []

    def create(_backend: str, _device: torch.device) -> Communicator:
        seen.append(os.environ["HOROVOD_CYCLE_TIME"])  # what Horovod reads as it starts
        return SerialCommunicator()

    monkeypatch.setattr(ranks, "create_communicator", create)
    assert ranks.over_ranks("serial", "cpu", lambda comm: comm.rank) == 0
    assert seen == [expected]
