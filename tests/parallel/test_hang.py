"""A job that hangs is ended by the watchdog of its ranks, which says where each is and who is late."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from speechdp import exit_codes
from speechdp.comm.environment import host_name
from speechdp.data.shards.dataset import Dataset
from tests.helpers.fork_server import BY_ITSELF
from tests.helpers.jobs import started, under_mpirun
from tests.helpers.mpi import Ended, run_mpi
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

OPTIONS = (*TINY_MODEL, "--batch-size", "1", "--epochs", "5000", "--backend", "mpi")
HOST = re.escape(host_name())
#: Seconds: a rank that shares few cores with much else may do nothing for some, and does not hang.
HANG_TIMEOUT = "15"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("hang") / "data", TinySizes(train=40, dev=40))


def the_line(ended: Ended) -> str:
    """Return the one line about the hang; every rank that could has shown its stacks before."""
    assert ended.exit_code == exit_codes.HUNG, ended.output
    before, line = re.findall(rf"([\s\S]*)(speechdp: rank \d on {HOST}: .*)", ended.stderr)[0]
    assert "speechdp: rank" not in before, ended.output
    assert re.search(rf"Stacks of rank 0 on {HOST}, no step ended for ", before), ended.output
    assert "Thread MainThread (most recent call first):" in before, ended.output
    return str(line)


def test_a_rank_that_is_frozen(dataset: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = (*OPTIONS, "--hang-timeout", HANG_TIMEOUT)
    with started(under_mpirun(2, "train", dataset.path, run, *options), run, env=BY_ITSELF) as job:
        job.wait_until((run / "status" / "rank-0001.json").exists, "a status")
        job.wait_until((run / "metrics.jsonl").exists, "an evaluation")
        job.signal(signal.SIGSTOP, job.rank_pid(1))
        ended = job.finish()
    line = the_line(ended)
    where = rf"speechdp: rank 0 on {HOST}: no step ended for \d+ s \(step \d+, .*\)"
    assert re.fullmatch(rf"{where}; late: rank 1 on {HOST} \(no sign of life for \d+ s\)", line), ended.output
    assert not (run / "completed.json").exists()


def test_a_rank_that_waits_for_its_disk_after_an_evaluation_longer_than_the_timeout(
    dataset: Dataset, tmp_path: Path
) -> None:
    """Rank 0 waits for the 20 s of rank 1's evaluation, longer than the timeout, and sees that it gets on."""
    run = tmp_path / "run"
    program = ("-m", "tests.helpers.rank_programs.hang")
    arguments = ("train", dataset.path, run, *OPTIONS, "--hang-timeout", HANG_TIMEOUT)
    ended = run_mpi(2, [*program, *arguments], env={"HANG_AFTER": "5"})
    line = re.sub(r"^\[\d,\d\]<stderr>:", "", the_line(ended))
    assert re.search(rf"; late: rank 1 on {HOST} \(in data_wait for \d+ s\)$", line), ended.output
    assert "hanging_read" in ended.stderr, ended.output
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
