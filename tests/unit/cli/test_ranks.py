"""Commands that use a trained model over ranks: what they set before the ranks start."""

from __future__ import annotations

import os

import pytest

from speechdp.cli.support.ranks import over_ranks
from speechdp.comm.base import Communicator


@pytest.mark.parametrize(("given", "expected"), [(None, "20"), ("3", "3")])
def test_horovod_looks_for_work_rarely_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", given or "")
    if given is None:
        monkeypatch.delenv("HOROVOD_CYCLE_TIME")
    seen: list[str] = []

    def on_rank(comm: Communicator) -> int:
        seen.append(os.environ["HOROVOD_CYCLE_TIME"])
        return comm.rank

    assert over_ranks("serial", "cpu", on_rank) == 0
    assert seen == [expected]
