"""What commands that start jobs decide before the first one."""

from __future__ import annotations

import socket

import pytest

from speechdp.cli.support.starting import starts_here, threads_of_a_rank
from speechdp.errors import ConfigError
from speechdp.experiments.jobs import JobStarter


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


def test_where_jobs_start_is_known_for_this_machine_alone() -> None:
    def here(environ: dict[str, str], *options: str) -> bool:
        return starts_here(JobStarter(("python",), environ, options))

    job = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2"}
    assert here({}) and here({}, "--launcher", "horovodrun")
    assert not here({}, "--hostfile", "hosts") and not here({}, "--hostfile=hosts")
    assert here({**job, "SLURM_JOB_NODELIST": socket.gethostname()})
    assert not here({**job, "SLURM_JOB_NODELIST": "somewhere-else"})
    assert not here({**job, "SLURM_JOB_NODELIST": "[broken"})
