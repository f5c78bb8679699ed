"""What commands that start jobs decide before the first one."""

from __future__ import annotations

import pytest

from speechdp.cli.support.starting import threads_of_a_rank
from speechdp.errors import ConfigError


def test_jobs_that_are_added_have_the_threads_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_a_rank(None, 4, None) == 3
    assert threads_of_a_rank(None, 4, None, before=2) == 2
    assert threads_of_a_rank(2, 4, None, before=2) == 2
    with pytest.raises(
        ConfigError, match=r"--threads 4: the ranks of what is finished had 2, .* leave it out"
    ):
        threads_of_a_rank(4, 4, None, before=2)
    with pytest.raises(ConfigError, match="--threads 0: at least 1"):
        threads_of_a_rank(0, 4, None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_of_a_rank(None, 100_000, None) == 1
