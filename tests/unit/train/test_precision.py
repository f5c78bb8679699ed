"""Runs in half precision: what is computed in which format, what is refused, that they resume to the bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speechdp.checkpoint.state import load_checkpoint
from speechdp.cli.main import run as speechdp
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading.batch import Batch
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.jobs import JobStarter
from speechdp.models.precision import Precision, has_amx
from speechdp.options.batch import BatchOptions
from speechdp.options.model import ModelOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import TrainOptions
from speechdp.parallel import stop
from speechdp.parallel.loss_scale import LEAST_SCALE
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Stopped
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.base import FrameScores, LossSum
from speechdp.train import build
from speechdp.train.epoch_end import measure_epoch
from speechdp.train.models import make_model
from speechdp.train.progress import SilentReporter
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import assert_equal_runs, evaluations, model_tensors
from tests.helpers.half_precision import computes_lstms_in, needs_bf16_lstm
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.tiny_speech import TINY_SYNTHESIS, write_tiny_speech

CPU = torch.device("cpu")
ALONE = SerialCommunicator()
#: LSTMs with a projection are computed without oneDNN, which has no float16 ones on most CPUs.
SIZES = ModelOptions(layers=1, cells=8, projection=6)
ACOUSTIC = TrainOptions(SIZES, BatchOptions(batch_size=4), epochs=2)
SYNTHESIS = TINY_SYNTHESIS
OPTIONS = {"acoustic": ACOUSTIC, "synthesis": SYNTHESIS}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    folder = tmp_path_factory.mktemp("precision")
    return {
        "acoustic": write_tiny_data(folder / "acoustic"),
        "synthesis": write_tiny_speech(folder / "synthesis", TinySizes(16, 4, 4)),
    }


def train(dataset: Dataset, run: Path, options: TrainOptions, **changes: Any) -> list[str]:
    """Train alone; return what was said."""
    said: list[str] = []

    class Listening(SilentReporter):
        def notice(self, text: str) -> None:
            said.append(text)

    train_run(Session(dataset, ALONE, CPU, Listening()), dataclasses.replace(options, **changes), run)
    return said


@pytest.fixture
def falling_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales begin so high that the first gradients overflow, and grow soon."""
    monkeypatch.setattr(
        build,
        "make_scaler",
        lambda device: torch.amp.GradScaler(device.type, init_scale=2.0**22, growth_interval=3),
    )


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=2", "ad_psgd"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("task", OPTIONS)
def test_both_tasks_train(
    datasets: dict[str, Dataset], tmp_path: Path, task: str, precision: Any, strategy: str
) -> None:
    options = dataclasses.replace(
        OPTIONS[task], precision=precision, strategy=StrategyChoice(strategy), epochs=3
    )
    run_threads(2, lambda comm: train_run(Session(datasets[task], comm, CPU), options, tmp_path))
    losses = [line["train_loss"] for line in evaluations(tmp_path)]
    assert min(losses[1:]) < losses[0]
    half = {torch.float16, torch.bfloat16}
    assert all(x.dtype not in half for x in model_tensors(tmp_path).values())
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["precision"], facts["evaluation_precision"]) == (precision, precision)
    assert facts["options"]["precision"] == precision


@pytest.mark.parametrize("task", OPTIONS)
def test_a_run_stopped_while_the_scale_moves_resumes_to_the_bit(
    datasets: dict[str, Dataset],
    tmp_path: Path,
    task: str,
    falling_scale: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop, "_INTERVAL_S", 0.0)  # ranks agree at every step
    options = dataclasses.replace(OPTIONS[task], precision="fp16", checkpoint_steps=1)
    train(datasets[task], tmp_path / "whole", options)
    request = StopRequest()

    class Stopping(SilentReporter):
        steps = 0

        def step(self, epoch: float, frames: int, loss: float | None) -> None:
            self.steps += 1
            if self.steps == 5:
                request.received = "SIGTERM"

    with pytest.raises(Stopped):
        train_run(Session(datasets[task], ALONE, CPU, Stopping(), request), options, tmp_path / "cut")
    state = load_checkpoint(tmp_path / "cut", ALONE, [])
    assert state is not None and 0 < state.values["loss_scale"]["scale"] < 2.0**22
    train_run(Session(datasets[task], ALONE, CPU), options, tmp_path / "cut", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


@needs_bf16_lstm
def test_one_rank_in_bf16_is_plain_autocast_training(
    datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches of a run, trained on as anybody writes it in torch, give the run's parameters."""
    dataset, batches, formats = datasets["acoustic"], list[Batch](), set[object]()
    options = dataclasses.replace(
        ACOUSTIC,
        model=ModelOptions(layers=2, cells=8, dropout=0.0),  # oneDNN's LSTM
        precision="bf16",
        optimizer=OptimizerOptions("sgd", learning_rate=0.05, momentum=0.9, max_gradient_norm=0.0),
    )
    loss, score = AcousticTask.loss, AcousticTask.score

    def noted(task: AcousticTask, model: Any, batch: Batch) -> LossSum:
        kept = {"features": batch.features.clone(), "targets": batch.targets.clone()}
        batches.append(dataclasses.replace(batch, **kept))
        formats.add((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        found = loss(task, model, batch)
        assert found.total.dtype == torch.float32
        return found

    def noted_score(task: AcousticTask, model: Any, batch: Batch) -> FrameScores:
        formats.add((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return score(task, model, batch)

    with monkeypatch.context() as patched:
        patched.setattr(AcousticTask, "loss", noted)
        patched.setattr(AcousticTask, "score", noted_score)
        train(dataset, tmp_path, options)
    assert formats == {(True, torch.bfloat16)}

    def plain(dtype: torch.dtype | None) -> dict[str, Tensor]:
        model = make_model(dataset, options)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        schedule, steps = options.schedule(), len(batches) // 2
        for number, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = schedule.at(number / steps)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                total = options.make_task().loss(model, batch).total
            total.backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.div_(batch.num_frames)
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    saved = {name.removeprefix("model."): x for name, x in model_tensors(tmp_path).items()}
    in_bf16, in_fp32 = plain(torch.bfloat16), plain(None)
    for name, expected in in_bf16.items():
        torch.testing.assert_close(saved[name], expected, rtol=1e-5, atol=1e-6)
    assert any(float((in_bf16[n] - in_fp32[n]).abs().max()) > 1e-4 for n in in_bf16)


def _nan_from(step: int) -> Callable[[AcousticTask, Any, Batch], LossSum]:
    loss, steps = AcousticTask.loss, 0

    def broken(task: AcousticTask, model: Any, batch: Batch) -> LossSum:
        nonlocal steps
        steps += 1
        found = loss(task, model, batch)
        return LossSum(found.total * float("nan"), found.num_frames) if steps >= step else found

    return broken


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_nan_ends_the_run_at_once(
    datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(AcousticTask, "loss", _nan_from(3))
    with pytest.raises(RunError, match=r"the loss is nan at step 3 \(epoch 1\) on rank 0: lower --learning"):
        train(datasets["acoustic"], tmp_path, ACOUSTIC, precision=precision)


@pytest.mark.parametrize("size", [1, 2])
def test_a_nan_that_stays_ends_a_run_in_fp16_by_its_scale(
    datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(AcousticTask, "loss", _nan_from(3 if size == 1 else 5))
    options = dataclasses.replace(ACOUSTIC, batch=BatchOptions(batch_size=1), precision="fp16")
    message = (
        r"--precision fp16: non-finite gradients have reduced the loss scale "
        rf"to {LEAST_SCALE / 2:g} at step 19 \(epoch \d+\) on rank \d: train with --precision bf16"
    )
    with pytest.raises(RunError, match=message):
        run_threads(size, lambda comm: train_run(Session(datasets["acoustic"], comm, CPU), options, tmp_path))


def test_a_loss_that_is_once_not_finite_in_fp16_is_left_out_of_the_mean(
    datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, totals = AcousticTask.loss, list[tuple[float, int]]()

    def infinite_once(task: AcousticTask, model: Any, batch: Batch) -> LossSum:
        found = loss(task, model, batch)
        if len(totals) == 2:
            found = LossSum(found.total * float("inf"), found.num_frames)
        totals.append((found.total.item(), found.num_frames))
        return found

    monkeypatch.setattr(AcousticTask, "loss", infinite_once)
    train(datasets["acoustic"], tmp_path, ACOUSTIC, precision="fp16", epochs=1)
    finite = [pair for number, pair in enumerate(totals) if number != 2]
    mean = sum(total for total, _ in finite) / sum(frames for _, frames in finite)
    assert evaluations(tmp_path)[0]["train_loss"] == pytest.approx(mean, rel=1e-9)


def test_what_torch_cannot_compute_is_refused_before_there_is_a_run(
    datasets: dict[str, Dataset], tmp_path: Path
) -> None:
    if computes_lstms_in(torch.float16):
        pytest.skip("this CPU computes LSTMs in float16")
    others = "bf16 or fp32" if computes_lstms_in(torch.bfloat16) else "fp32"
    message = (
        rf"--precision fp16: torch \S+ cannot compute this model's LSTM in it on this CPU; use {others}$"
    )
    with pytest.raises(ConfigError, match=message):
        train(
            datasets["acoustic"],
            tmp_path / "run",
            ACOUSTIC,
            model=ModelOptions(layers=1, cells=4),
            precision="fp16",
        )
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("command", ["compare", "profile", "tune"])
def test_commands_that_start_jobs_refuse_what_no_rank_could_compute(
    datasets: dict[str, Dataset],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """As `train` does, with the same words; each of their jobs would fail by it, and again if repeated."""

    def no_kernel(self: Precision, module: torch.nn.RNNBase) -> None:
        raise RuntimeError("no kernel")

    def started(*_: object, **__: object) -> str:
        raise AssertionError("a job was started")

    monkeypatch.setattr(Precision, "_try", no_kernel)
    monkeypatch.setattr(JobStarter, "run", started)
    words = [command, str(datasets["acoustic"].path), str(tmp_path / "out"), "--ranks=2", "--precision=fp16"]
    words += ["--layers=1", "--cells=4"]
    assert speechdp(words) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "--precision fp16: torch" in said and "cannot compute this model's LSTM in it" in said
    assert "use fp32" in said and "tries them again" not in said
    assert not (tmp_path / "out").exists()
    # Ranks on other hosts may have GPUs, of which nothing is known here.
    hosts = tmp_path / "hosts"
    hosts.write_text("somewhere-else slots=2\n")
    with pytest.raises(AssertionError, match="a job was started"):
        speechdp([*words, f"--hostfile={hosts}"])


@pytest.mark.parametrize("works", ["bf16", "fp32"])
def test_another_format_is_offered_only_where_it_has_been_tried(
    monkeypatch: pytest.MonkeyPatch, works: str
) -> None:
    def try_it(self: Precision, module: torch.nn.RNNBase) -> None:
        if self.name != works:
            raise RuntimeError("no kernel")

    monkeypatch.setattr(Precision, "_try", try_it)
    remedy = "bf16 or fp32" if works == "bf16" else "fp32"
    with pytest.raises(ConfigError, match=f"this model's LSTM in it on this CPU; use {remedy}$"):
        Precision("fp16", CPU).check(torch.nn.LSTM(4, 4))


@pytest.mark.parametrize(
    "base", [pytest.param(torch.nn.LSTM, marks=needs_bf16_lstm), torch.nn.GRU, torch.nn.RNN]
)
def test_a_layer_derived_from_torch_s_is_tried_as_the_one_it_is(base: Any) -> None:
    class Own(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(4, 4)

    Precision("bf16", CPU).check(Own())


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize(
    ("learnt", "message"),
    [(0, "^no frame of the training split was learnt"), (9, "the loss was finite in no step of the epoch")],
)
def test_an_epoch_that_taught_nothing_says_why(
    datasets: dict[str, Dataset], tmp_path: Path, precision: Any, learnt: int, message: str
) -> None:
    options = dataclasses.replace(ACOUSTIC, precision=precision)
    with ExitStack() as stack:
        mine, _ = build.build_trainer(Session(datasets["acoustic"], ALONE, CPU), options, tmp_path, stack)
        mine._state.epoch_loss[2] = learnt
        with pytest.raises(RunError, match=message) as caught:
            measure_epoch(mine.parts, mine._state, 1.0, 0.0, 0.0)
    assert ("fp16" in str(caught.value)) == (precision == "fp16" and learnt > 0)


def test_a_gpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(
        ConfigError, match="--precision bf16: Tesla V100 cannot compute in it; use fp16 or fp32"
    ):
        Precision("bf16", torch.device("cuda", 0)).check(torch.nn.Linear(2, 2))


def test_another_precision_is_another_run_and_the_default_is_not(
    datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speechdp.train.run.has_amx", lambda: False)
    said = train(datasets["acoustic"], tmp_path, ACOUSTIC, precision="bf16", epochs=1)
    assert "precision: bf16 (autocast) in training and evaluation, weights in float32" in said
    session = Session(datasets["acoustic"], ALONE, CPU)
    with pytest.raises(ConfigError, match="precision"):
        train_run(session, dataclasses.replace(ACOUSTIC, epochs=1), tmp_path, resume=True)
    options = ACOUSTIC.to_json()
    del options["precision"]
    assert not [
        line for line in train(datasets["acoustic"], tmp_path / "32", ACOUSTIC) if "precision" in line
    ]


def test_a_cpu_with_bf16_units_is_told_of_once_they_would_be_idle(
    datasets: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speechdp.train.run.has_amx", lambda: True)
    advice = "--precision bf16 on this CPU, which has AMX"
    assert advice in " ".join(train(datasets["acoustic"], tmp_path / "32", ACOUSTIC, epochs=1))
    said = train(datasets["acoustic"], tmp_path / "16", ACOUSTIC, epochs=1, precision="bf16")
    assert advice not in " ".join(said)


def test_amx_is_found_among_the_flags_of_the_cpu(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not has_amx(cpuinfo)
    cpuinfo.write_text("model name\t: Xeon\nflags\t\t: fpu avx512_bf16 amx_int8\n", encoding="utf-8")
    assert not has_amx(cpuinfo)
    cpuinfo.write_text("model name\t: Xeon\nflags\t\t: fpu amx_bf16 amx_int8\n", encoding="utf-8")
    assert has_amx(cpuinfo)
