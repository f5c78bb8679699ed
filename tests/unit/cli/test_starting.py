"""What commands that start jobs decide before the first one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from speechdp.cli.compare import CompareCommand
from speechdp.cli.support.script_options import ScriptOptions
from speechdp.cli.support.starting import JobHosts, hosts_of_jobs, make_starter, threads_of_a_rank
from speechdp.cli.tune import TuneOptions
from speechdp.errors import ConfigError
from tests.helpers.tiny_data import TinySizes, write_tiny_data

HERE = JobHosts()
#: Of a Slurm job, but for its hosts.
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"}


@pytest.fixture(autouse=True)
def no_threads_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def _in_job(monkeypatch: pytest.MonkeyPatch, nodes: str, ranks_of_each: str) -> None:
    for name, value in {**JOB, "SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": ranks_of_each}.items():
        monkeypatch.setenv(name, value)


def test_jobs_that_are_added_have_the_threads_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_a_rank(None, 4, HERE) == 3
    assert threads_of_a_rank(None, 4, HERE, before=2) == 2
    assert threads_of_a_rank(2, 4, HERE, before=2) == 2
    with pytest.raises(ConfigError, match=r"--threads 4: finished runs had 2, .* leave it out"):
        threads_of_a_rank(4, 4, HERE, before=2)
    with pytest.raises(ConfigError, match="--threads 0: at least 1"):
        threads_of_a_rank(0, 4, HERE)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_of_a_rank(None, 100_000, HERE) == 1


def test_where_jobs_start_is_known_for_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def here(launch_args: str = "", hostfile: Path | None = None) -> bool:
        hosts = hosts_of_jobs(hostfile, launch_args)
        return make_starter("compare", launch_args, hosts, 1).starts_here

    (tmp_path / "hosts").write_text("somewhere-else slots=2\n", encoding="utf-8")
    assert here() and here("--launcher horovodrun")
    assert not here("--hostfile hosts") and not here("--hostfile=hosts")
    assert not here(hostfile=tmp_path / "hosts")
    _in_job(monkeypatch, socket.gethostname(), "2")
    assert here()
    _in_job(monkeypatch, "somewhere-else", "2")
    assert not here()
    _in_job(monkeypatch, "[broken", "2")
    with pytest.raises(ConfigError, match=r"SLURM_JOB_NODELIST=.*start the job with --hostfile FILE"):
        here()
    assert not here("--hostfile hosts")


def test_a_batch_job_with_too_few_slots_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _in_job(monkeypatch, socket.gethostname(), "1")
    hosts = hosts_of_jobs(None, "")
    with pytest.raises(
        ConfigError, match="SLURM_JOB_NODELIST: 2 ranks wanted, but it has only 1 slot; lower --ranks"
    ):
        threads_of_a_rank(4, 2, hosts)
    assert threads_of_a_rank(None, 2, hosts, before=3) == 3  # what is finished may be looked at anywhere
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST: has 1 slot, and a search needs 2 ranks"):
        TuneOptions().num_ranks(hosts)
    script = ScriptOptions(Path("train.py"), backend="threads")
    assert script.starter("compare", 2).starts_here  # in one process


def test_jobs_of_a_command_share_the_slots_and_cores_of_its_batch_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _in_job(monkeypatch, "somewhere-else[1-2]", "4(x2)")
    hosts = hosts_of_jobs(None, "")
    assert not hosts.are_counted_here
    assert TuneOptions().num_ranks(hosts) == 8
    assert threads_of_a_rank(None, 2, hosts) == 4  # both on the first of two hosts, of 8 cores each
    assert threads_of_a_rank(None, 8, hosts) == 2
    names = [setting.name for setting in TuneOptions().tried(hosts, 8)]
    assert any("between_nodes" in name for name in names)


def test_a_rank_of_a_race_looks_for_no_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has its place, and started by srun from the shell of salloc it would be told to leave that."""
    _in_job(monkeypatch, "n[1-2]", "1(x2)")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PTY_PORT", "40000")
    data = write_tiny_data(tmp_path / "data", TinySizes(train=4, dev=2, test=2, shards=1)).path
    rank = CompareCommand(data, tmp_path / "out", decode_split="", job="race-2")
    assert rank._request(rank._plan()).most_decoding_ranks is None
