"""What the ranks of a profile's job do: the steps of training, one module alone, and what they record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading.batch import Batch
from speechdp.data.plan.epoch_plan import EpochPlan
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.profile import ranks
from speechdp.experiments.profile.common_start import CommonStart, begin_together
from speechdp.experiments.profile.ranks import JobRequest, profile_rank
from speechdp.experiments.profile.record import JobEntry, ProfileJob, read_job
from speechdp.experiments.profile.steps import StageClock, StagedStep
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.strategies.model_averaging import ModelAveraging
from speechdp.train.build import build_trainer, epoch_planner, open_loader
from speechdp.train.session import Session
from speechdp.train.trainer_state import TrainingParts
from tests.helpers.half_precision import needs_bf16_lstm
from tests.helpers.options import options_with
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.tiny_speech import TINY_SYNTHESIS, write_tiny_speech
from tests.helpers.waiting import no_thread_left

CPU = torch.device("cpu")
STEPS = 4
ACOUSTIC = options_with(layers=1, cells=8, dropout=0.2, batch_size=4)
#: Without dropout of decoder and pre-nets the passes would still draw: plain and staged step draw alike.
OPTIONS = {"acoustic": ACOUSTIC, "synthesis": TINY_SYNTHESIS}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    path = tmp_path_factory.mktemp("profile")
    return {
        "acoustic": write_tiny_data(path / "acoustic", TinySizes(train=24)),
        "synthesis": write_tiny_speech(path / "speech", TinySizes(train=24)),
    }


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let all of this process's threads compute in one thread.

    A rank that is a thread has one where a loader was at work before, the main thread one a core.  Then sums
    have another order, and a few steps make more than rounding errors of that.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def profiled(
    dataset: Dataset, options: TrainOptions, folder: Path, module: str = "", size: int = 1
) -> ProfileJob:
    request = JobRequest(folder, module, STEPS, sample_hz=0.0)
    run_threads(size, lambda comm: profile_rank(Session(dataset, comm, CPU), options, request))
    return read_job(JobEntry("job", module or "weak", size, 4, "pooled", folder.name, STEPS), folder)


def trained(dataset: Dataset, options: TrainOptions, folder: Path) -> Tensor:
    """Return the parameters after as many ordinary training steps on one rank."""
    session = Session(dataset, SerialCommunicator(), CPU)
    with ExitStack() as stack:
        trainer, sources = build_trainer(session, options, folder, stack)
        trainer.parts.model.train()
        loader, _ = open_loader(session, options.resolve(1), trainer, sources.training, stack)
        for _ in range(STEPS):
            assert trainer.advance(loader) is not None
        return trainer.parts.replica.parameters.values.clone()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("task", "precision"),
    [
        ("acoustic", "fp32"),
        pytest.param("acoustic", "bf16", marks=needs_bf16_lstm),
        ("synthesis", "fp32"),
        ("synthesis", "fp16"),
    ],
)
def test_its_steps_are_those_of_training(
    task: str, precision: Any, datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = StrategyChoice("gradient_averaging:overlap=false")
    options = dataclasses.replace(OPTIONS[task], strategy=strategy, precision=precision)
    found: list[Tensor] = []

    def keep(session: Session, folder: Path, parts: TrainingParts) -> None:
        found.append(parts.replica.parameters.values.clone())

    monkeypatch.setattr(ranks, "write_facts", keep)
    profiled(datasets[task], options, tmp_path / "job")
    torch.testing.assert_close(found[0], trained(datasets[task], options, tmp_path), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("task", "modules"),
    [("acoustic", ["encoder", "output"]), ("synthesis", ["encoder", "decoder", "postproc"])],
)
def test_what_two_ranks_record(
    task: str, modules: list[str], datasets: dict[str, Dataset], tmp_path: Path
) -> None:
    options = dataclasses.replace(OPTIONS[task], strategy=StrategyChoice("gradient_averaging:overlap=false"))
    job = profiled(datasets[task], options, tmp_path / "job", size=2)
    order = [
        ("trainloader", ""), ("h2d", ""), *((m, "forward") for m in modules), ("loss", "forward"),
        ("loss", "backward"), *((m, "backward") for m in reversed(modules)), ("exchange", ""), ("update", ""),
    ]  # fmt: skip
    assert [record.rank for record in job.rank_records] == [0, 1]
    for steps in job.steps:
        assert [step.step for step in steps] == [1, 2, 3, 4]
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            assert [(f.name, f.phase) for f in step.functions] == order
            assert sum(f.duration_s for f in step.functions) <= step.wall_s + 1e-5
            assert step.frames > 0 and step.start_s > 0
            assert after is None or after.start_s >= step.start_s + step.wall_s - 1e-6
    assert job.memory is not None and job.memory.unit == "rss"
    assert all(r.peak_bytes == r.rss_bytes > r.parameters_bytes > 0 for r in job.memory.ranks)
    assert job.facts is not None and len(job.facts["cpus"]) == 2 and " core" in job.facts["cpus"][0]
    assert job.facts["device"] == "CPU" and job.facts["num_parameters"] > 100


def test_steps_without_a_whole_batch_on_every_rank_are_passed_over(
    datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    forward = StagedStep.forward

    def count(self: StagedStep, batch: Batch) -> Tensor:
        sizes.append(len(batch.lengths))
        return forward(self, batch)

    monkeypatch.setattr(StagedStep, "forward", count)
    options = dataclasses.replace(ACOUSTIC, batch=dataclasses.replace(ACOUSTIC.batch, batch_size=5))
    job = profiled(datasets["acoustic"], options, tmp_path / "job", size=2)
    assert sizes == [5] * 2 * STEPS and [len(steps) for steps in job.steps] == [STEPS, STEPS]


@pytest.mark.parametrize("module", ["", "encoder"])
def test_a_batch_that_no_rank_can_fill_is_refused(
    module: str, datasets: dict[str, Dataset], tmp_path: Path
) -> None:
    options = dataclasses.replace(ACOUSTIC, batch=dataclasses.replace(ACOUSTIC.batch, batch_size=25))
    with pytest.raises(ConfigError, match="whole batch of 25 segments; give a smaller --batch-size"):
        profiled(datasets["acoustic"], options, tmp_path / "job", module)


def test_more_steps_than_an_epoch_has(datasets: dict[str, Dataset], tmp_path: Path) -> None:
    options = dataclasses.replace(
        ACOUSTIC, batch=dataclasses.replace(ACOUSTIC.batch, batch_size=12), epochs=1
    )
    job = profiled(datasets["acoustic"], options, tmp_path / "job")
    assert len(job.steps[0]) == STEPS  # an epoch has 2


def test_no_epoch_is_planned_a_second_time_while_steps_are_timed(
    datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int | str] = []

    def counted(*given: Any) -> Callable[[int], EpochPlan]:
        plan = epoch_planner(*given)
        return lambda epoch: done.append(epoch) or plan(epoch)  # type: ignore[func-returns-value]

    def begin(comm: Communicator) -> CommonStart:
        done.append("begun")
        return begin_together(comm)

    monkeypatch.setattr(ranks, "epoch_planner", counted)  # the loader's own planner is another
    monkeypatch.setattr(ranks, "begin_together", begin)
    options = dataclasses.replace(ACOUSTIC, batch=dataclasses.replace(ACOUSTIC.batch, batch_size=12))
    profiled(datasets["acoustic"], options, tmp_path / "job")
    assert done == [0, 1, "begun"]


def test_a_module_alone_computes_the_same_on_every_rank(datasets: dict[str, Dataset], tmp_path: Path) -> None:
    alone = profiled(datasets["synthesis"], TINY_SYNTHESIS, tmp_path / "1", "decoder")
    jobs = profiled(datasets["synthesis"], TINY_SYNTHESIS, tmp_path / "2", "decoder", size=2)
    frames = {step.frames for job in (alone, jobs) for steps in job.steps for step in steps}
    assert len(frames) == 1  # one batch for all, or times on 1 and 2 ranks could not be compared
    for step in jobs.steps[1]:
        assert [(f.name, f.phase) for f in step.functions] == [
            ("decoder", "forward"),
            ("decoder", "backward"),
        ]


def test_a_module_the_model_has_not(datasets: dict[str, Dataset], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no decoder; it has: encoder, output"):
        profiled(datasets["acoustic"], ACOUSTIC, tmp_path / "job", "decoder")


def test_a_loss_that_is_no_number_is_refused(datasets: dict[str, Dataset], tmp_path: Path) -> None:
    options = options_with(layers=1, cells=8, batch_size=4, learning_rate=1e38, optimizer="sgd")
    with pytest.raises(RunError, match=r"the loss is (nan|inf) at step \d on rank 0: lower --learning-rate"):
        profiled(datasets["acoustic"], options, tmp_path / "job")


def test_a_loss_that_overflows_in_fp16_is_a_step_like_others(
    datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = StagedStep.forward
    monkeypatch.setattr(StagedStep, "forward", lambda self, batch: forward(self, batch) * float("inf"))
    options = dataclasses.replace(TINY_SYNTHESIS, precision="fp16")
    job = profiled(datasets["synthesis"], options, tmp_path / "job")
    assert len(job.steps[0]) == STEPS


@pytest.mark.parametrize("module", ["", "encoder"])
def test_exchanges_are_over_before_the_end(
    module: str, datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of a compressed strategy would outlive it."""
    calls: list[str] = []
    for name in ("pause", "finish"):
        method = getattr(ModelAveraging, name)
        monkeypatch.setattr(
            ModelAveraging, name, lambda self, name=name, method=method: calls.append(name) or method(self)
        )
    options = dataclasses.replace(
        ACOUSTIC, strategy=StrategyChoice("model_averaging:period=2,compression=int8")
    )
    with no_thread_left():
        profiled(datasets["acoustic"], options, tmp_path / "job", module, size=2)
    assert sorted(calls[:2]) == ["pause", "pause"] or calls.index("pause") < calls.index("finish")
    assert calls.count("pause") == 2


def test_a_full_disk_is_named(datasets: dict[str, Dataset], tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file is in the way")
    with pytest.raises(RunError, match=r"rank-0000\.jsonl: cannot be written"):
        profiled(datasets["acoustic"], ACOUSTIC, tmp_path / "job")


def test_a_gpu_is_waited_for_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    clock = StageClock(torch.device("cuda", 0))
    with clock.timed("encoder", "forward"):
        assert len(waits) == 1
    assert len(waits) == 2
