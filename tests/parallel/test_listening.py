"""What a job's processes listen on: the ranks only on the one address they use, never on all interfaces."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from speechdp.data.dataset import Dataset
from tests.helpers.jobs import Job, by_launch, started
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

ALL_INTERFACES = {"0.0.0.0", "::", "::ffff:0.0.0.0"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("listening") / "data", TinySizes(train=200))


@pytest.mark.parametrize("backend", ["mpi", "horovod", "torch"])
def test_ranks_of_one_host_listen_on_loopback_at_most(dataset: Dataset, tmp_path: Path, backend: str) -> None:
    run = tmp_path / "run"
    options = (*TINY_MODEL, "--batch-size", "1", "--epochs", "40", "--backend", backend)
    seen: set[str] = set()

    def trained() -> bool:
        seen.update(_addresses(job, run))
        return (run / "metrics.jsonl").is_file()

    with started(by_launch(2, "train", dataset.path, run, *options), run) as job:
        job.wait_until(trained, "an evaluation")
    assert not seen & ALL_INTERFACES and seen <= {"127.0.0.1", "::1"}, seen
    assert bool(seen) == (backend != "mpi")  # that sockets are seen at all


def _addresses(job: Job, run: Path) -> set[str]:
    """Return the addresses that the job's ranks, not the launchers, listen on."""
    found: set[str] = set()
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            words = process.cmdline()
            is_rank = "train" in words and "launch" not in words and "python" in Path(words[0]).name
            connections = process.net_connections("inet") if is_rank and str(run) in words else []
        except psutil.Error:
            continue
        found.update(c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN)
    return found
