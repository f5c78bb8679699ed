"""A training run and its sampler: one a host, the timeline's times, nothing changed in what is learnt."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from speechdp import jsonl
from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.options.batch import LoadingOptions
from speechdp.report.runs.folders import read_sweep
from speechdp.report.runs.samples import read_samples
from speechdp.timing.timeline import Timeline
from speechdp.train import sampling
from speechdp.train.progress import SilentReporter
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.begun_run import SIZE, begin_run
from tests.helpers.finished_run import model_tensors
from tests.helpers.nvml import FakeNvml
from tests.helpers.options import options_with
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.waiting import wait_until

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("sampling") / "data", TinySizes(train=60))


class Notices(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def notice(self, text: str) -> None:
        self.lines.append(text)


def train(
    dataset: Dataset,
    run: Path,
    hz: float,
    *,
    resume: bool = False,
    size: int = SIZE,
    reporter: Notices | None = None,
) -> Notices:
    """Train over ranks; return what rank 0 said."""
    reporter = reporter or Notices()
    options = options_with(layers=1, cells=4, dropout=0.0, batch_size=2, epochs=2, sample_hz=hz)

    def on_rank(comm: Communicator) -> None:
        session = Session(dataset, comm, CPU, reporter if comm.rank == 0 else SilentReporter())
        train_run(session, options, run, resume=resume)

    run_threads(size, on_rank)
    return reporter


class Sampled(Notices):
    """Trains on only when there is a sample: on a busy machine the sampler may be late."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._run = run

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        wait_until(self._is_sampled, "a sample")

    def _is_sampled(self) -> bool:
        return any('"t_s"' in path.read_text() for path in (self._run / "timeline").glob("samples-*.jsonl"))


def test_a_run_leaves_samples_and_each_ranks_memory(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "FLUSH_INTERVAL_NS", 0)
    begun_s = time.perf_counter()
    train(dataset, tmp_path / "run", 100, reporter=Sampled(tmp_path / "run"))
    took_s = time.perf_counter() - begun_s
    (path,) = (tmp_path / "run" / "timeline").glob("samples-*.jsonl")
    samples = read_samples(path)
    assert samples.ranks == (0, 1) and samples.kind == "cpu" and len(samples.t_s) >= 1
    assert 0 <= samples.t_s[0] <= samples.t_s[-1] <= took_s
    (run,) = read_sweep(tmp_path / "run").runs
    assert len(run.samples) == 1 and run.problems == () and run.timing is not None
    assert all((rank.memory.rss or 0) > 50e6 and rank.memory.gpu is None for rank in run.timing.ranks)


def test_conditions_of_a_gpu_stand_with_each_rank_that_used_it(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    nvml.listed = {"GPU-b": {os.getpid(): 2**29, 2**30: 2**29}}
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(sampling, "gpu_uuid", lambda device: "GPU-b")
    monkeypatch.setattr(jsonl, "FLUSH_INTERVAL_NS", 0)
    train(dataset, tmp_path / "run", 100, reporter=Sampled(tmp_path / "run"))
    ranks = json.loads((tmp_path / "run" / "timing.json").read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1] and "of_ranks" not in ranks[0]
    assert ranks[0]["gpu"] == ranks[1]["gpu"] == {
        "index": 3, "clock_mhz": 1980, "lowest_clock_mhz": 1980, "limits": {},
        "others": 1.0, "most_others": 1, "others_bytes": 3 * 2**29,
    }  # fmt: skip


def test_a_gpu_that_ranks_of_other_hosts_name_too_is_not_judged(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers on one machine, each with a name of its own."""
    host, made = threading.local(), {}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(sampling, "host_name", lambda: host.name)
    monkeypatch.setattr(sampling, "gpu_uuid", lambda device: host.gpu)

    def on_rank(comm: Communicator) -> None:
        host.name, host.gpu = f"n{min(comm.rank, 1)}", ("GPU-a", "GPU-a", "GPU-b")[comm.rank]
        with sampling.sampled(Session(dataset, comm, CPU), 10, tmp_path, 0.0) as sampler:
            made[comm.rank] = sampler
            if sampler is not None:
                wait_until(lambda: "clock_mhz" in str(sampler.gpu_summaries()), "a sample")

    run_threads(3, on_rank)
    assert made[2] is None
    found = {**made[0].gpu_summaries(), **made[1].gpu_summaries()}
    assert {rank: "others" in gpu for rank, gpu in found.items()} == {0: False, 1: False, 2: True}


def test_sampling_changes_nothing_learnt_and_can_be_left_out(dataset: Dataset, tmp_path: Path) -> None:
    # One rank: ranks that are threads share torch's random numbers, so that first weights may differ.
    train(dataset, tmp_path / "with", 50, size=1)
    train(dataset, tmp_path / "without", 0, size=1)
    assert not list((tmp_path / "without" / "timeline").glob("samples-*"))
    mine, theirs = model_tensors(tmp_path / "with"), model_tensors(tmp_path / "without")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert options_with(sample_hz=7).fingerprint() == options_with(sample_hz=0).fingerprint()
    for hz in (-1, 101):
        with pytest.raises(ConfigError, match="--sample-hz"):
            LoadingOptions(sample_hz=hz)


def test_a_resumed_run_goes_on_in_the_same_file(dataset: Dataset, tmp_path: Path) -> None:
    arguments = ["--layers", "1", "--cells", "4", "--dropout", "0", "--batch-size", "2", "--epochs", "2"]
    begin_run(dataset, tmp_path / "run", [*arguments, "--sample-hz", "100"])
    train(dataset, tmp_path / "run", 20, resume=True)
    (path,) = (tmp_path / "run" / "timeline").glob("samples-*.jsonl")
    samples = read_samples(path)
    assert path.read_text().count('"kind"') == 2 and samples.hz == 20
    assert (samples.elapsed_s[1:] > samples.elapsed_s[:-1]).all()


def test_a_sampler_that_cannot_write_lets_the_run_end_well(dataset: Dataset, tmp_path: Path) -> None:
    host = sampling.host_name()
    (tmp_path / "run" / "timeline" / f"samples-{host}.jsonl").mkdir(parents=True)  # a folder in its way
    notices = train(dataset, tmp_path / "run", 10).lines
    assert (tmp_path / "run" / "completed.json").is_file()
    assert [line for line in notices if "training continues" in line and f"samples-{host}" in line]


def test_the_first_rank_of_each_host_samples_the_ranks_there(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = threading.local()
    monkeypatch.setattr(sampling, "host_name", lambda: host.name)

    def on_rank(comm: Communicator) -> None:
        host.name = f"n{comm.rank % 2}"
        session = Session(dataset, comm, CPU)
        with sampling.sampled(session, 10, tmp_path / "timeline", time.perf_counter()):
            comm.barrier()

    run_threads(4, on_rank)
    found = {path.name: read_samples(path) for path in (tmp_path / "timeline").iterdir()}
    assert {name: samples.ranks for name, samples in found.items()} == {
        "samples-n0.jsonl": (0, 2),
        "samples-n1.jsonl": (1, 3),
    }
    head = json.loads((tmp_path / "timeline" / "samples-n1.jsonl").read_text().splitlines()[0])
    assert head["ranks"] == {"1": os.getpid(), "3": os.getpid()}


def test_a_host_without_rank_0_says_what_failed_also_when_stopped(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = threading.local()
    monkeypatch.setattr(sampling, "host_name", lambda: host.name)
    (tmp_path / "samples-n1.jsonl").mkdir()  # a folder in its way
    reporter = Notices()

    def on_rank(comm: Communicator) -> None:
        host.name = f"n{comm.rank}"
        session = Session(dataset, comm, CPU, reporter if comm.rank == 0 else SilentReporter())
        with pytest.raises(KeyError), sampling.sampled(session, 10, tmp_path, 0.0):
            raise KeyError

    run_threads(2, on_rank)
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("speechdp: warning: rank 1: ")
        and "samples-n1.jsonl: utilisation is no longer recorded" in line
    )
    assert reporter.lines == []


def test_samples_count_time_as_the_timeline_does() -> None:
    timeline = Timeline(None, rank=0, device=CPU)
    fresh = timeline.origin_s
    timeline.resume_at(100.0)
    assert timeline.origin_s == pytest.approx(fresh - 100)
