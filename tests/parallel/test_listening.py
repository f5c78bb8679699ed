"""What a job's processes listen on, and whom they let in, is what docs/security.md says."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from speechdp.data.shards.dataset import Dataset
from tests.helpers.fork_server import BY_ITSELF
from tests.helpers.jobs import SPEECHDP, Job, started
from tests.helpers.listening import is_let_in, listening
from tests.helpers.mpi import REPOSITORY
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

WORDS = {"nothing": set(), "127.0.0.1": {"127.0.0.1"}, "all interfaces": {"0.0.0.0"}}
LOOPBACK = {"127.0.0.1", "::1"}
ROW = re.compile(r"\| (ranks|launcher), `([a-z -]+)` \| ([^|]+) \| [^|]+ \| ([^|]+) \|")
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed; launch/setup builds it"
)
GLOO_RUN = ("--launcher", "horovodrun", "--controller", "gloo")


@dataclass
class Seen:
    """Addresses and ports that the processes of a job listen on."""

    ranks: set[tuple[str, int]] = field(default_factory=set)
    launcher: set[tuple[str, int]] = field(default_factory=set)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("listening") / "data", TinySizes(train=40))


@pytest.mark.parametrize(
    ("backend", "launcher", "options"),
    [
        ("mpi", "mpirun", ()),
        ("torch", "mpirun", ()),
        pytest.param("horovod", "mpirun", (), marks=needs_horovod),
        pytest.param("horovod", "horovodrun --gloo", GLOO_RUN, marks=needs_horovod),
    ],
)
def test_who_listens_and_lets_in_whom(
    dataset: Dataset, tmp_path: Path, backend: str, launcher: str, options: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    training = (*TINY_MODEL, "--batch-size", "1", "--epochs", "20000", "--backend", backend)
    job_of_two = [*SPEECHDP, "launch", "-np", "2", *options, "--", "train"]
    documented = dict(_table())
    with started([*job_of_two, str(dataset.path), str(run), *training], run, env=BY_ITSELF) as job:
        job.wait_until((run / "metrics.jsonl").is_file, "an evaluation")
        seen = _seen(job)
        let_in = {is_let_in(address) for address in seen.ranks}
    addresses, strangers = documented["ranks", backend]
    assert {host for host, _ in seen.ranks} == WORDS[addresses], seen
    assert let_in == ({strangers == "yes"} if seen.ranks else set())
    addresses, _ = documented["launcher", launcher]
    hosts = {"0.0.0.0" if host == "::" else host for host, _ in seen.launcher}
    assert hosts - LOOPBACK == WORDS[addresses], seen


def _table() -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Return, by process and its kind, where it listens on one host and whether it lets strangers in."""
    text = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
    return [((who, what), (addresses, strangers)) for who, what, addresses, strangers in ROW.findall(text)]


def _seen(job: Job) -> Seen:
    seen = Seen()
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        is_rank = words[1:4] == ["-m", "speechdp", "train"]
        (seen.ranks if is_rank else seen.launcher).update(listening(process))
    return seen
