"""Tasks from outside the package: registered in a script, named as MODULE:CLASS, or offered by a package."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import speechdp
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading.batch import Batch
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.inputs import InputOptions
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.profile.plan import ProfilePlan
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.options.batch import BatchOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.period import Period
from speechdp.parallel.registry import StrategyChoice
from speechdp.process.ending import Stopped
from speechdp.report.runs.folders import read_run
from speechdp.report.sweep.report import write_report
from speechdp.tasks.acoustic import AcousticTask, CtcTask, FullSumTask
from speechdp.tasks.base import FrameScores, LossSum, Task, TaskData
from speechdp.tasks.metrics import FRAME_ACCURACY, LOG_PROB
from speechdp.tasks.model_file import load_model
from speechdp.tasks.registry import TASKS, task_class, task_options
from speechdp.tasks.synthesis import SynthesisTask
from speechdp.train.models import check_task, make_model
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import evaluations, model_tensors
from tests.helpers.mpi import REPOSITORY
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.tiny_speech import write_tiny_speech

CPU = torch.device("cpu")
OWN = "predictive_coding:PredictiveCoding"


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TASKS, "registered", {})
    monkeypatch.delitem(sys.modules, "predictive_coding", raising=False)  # with the name a test has given
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "own_task")


@dataclasses.dataclass(frozen=True)
class Outside(AcousticTask):
    """As ours, with an option of its own and no presets."""

    presets = ()
    model_options = ()
    smoothing: float = 0.0


@dataclasses.dataclass(frozen=True)
class Unjudged(AcousticTask):
    """Declares no metrics."""

    metrics = ()


@dataclasses.dataclass(frozen=True)
class Ambiguous(AcousticTask):
    """Declares two metrics under one key."""

    metrics = (LOG_PROB, dataclasses.replace(FRAME_ACCURACY, key="log_prob"))


@dataclasses.dataclass(frozen=True)
class Single(AcousticTask):
    """Has forgotten a comma."""

    metrics = LOG_PROB  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Counting(AcousticTask):
    """Has a metric under the name of what is recorded besides."""

    metrics = (dataclasses.replace(LOG_PROB, key="frames"),)


@dataclasses.dataclass(frozen=True)
class Cutting(AcousticTask):
    """Would learn parts of utterances of which only the whole text is known."""

    trains_on = ("spectrograms",)


@dataclasses.dataclass(frozen=True)
class Inheriting(AcousticTask):
    """Keeps presets, which would make another model than its own."""

    width: int = 8


@dataclasses.dataclass(frozen=True)
class OwnNet(Outside):
    """Has a network of its own."""

    def make_model(self, data: TaskData) -> Any:
        return nn.Linear(data.feature_dim, data.num_classes)


@dataclasses.dataclass(frozen=True)
class Halved(Task):
    """Leaves out what a task has to do."""

    metrics = (LOG_PROB,)


def test_a_registered_class_is_used_by_its_name_with_its_options() -> None:
    assert speechdp.task("outside")(Outside) is Outside
    assert TASKS.names() == ["acoustic", "outside", "synthesis"]
    task = TrainOptions(task="outside:smoothing=0.5").make_task()
    assert task == Outside(smoothing=0.5) and task.name == "outside"
    assert TrainOptions(task="outside").preset_name == "outside"
    with pytest.raises(ConfigError, match="outside:smoothing: has no value; write smoothing="):
        task_options("outside:smoothing")


@pytest.mark.parametrize("name", ["acoustic", "taken", "not a name", ""])
def test_a_name_that_is_taken_or_none_is_refused(name: str) -> None:
    speechdp.task("taken")(dataclasses.make_dataclass("Taken", [], bases=(Outside,), frozen=True))
    with pytest.raises(ConfigError, match=f"task {name!r}"):
        speechdp.task(name)(Outside)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (int, "is not a dataclass derived from speechdp.tasks.base.Task"),
        (AcousticTask, "AcousticTask has a name already; derive a class from it"),
        (Unjudged, "Unjudged has no metrics"),
        (Halved, "Halved has no loss, no make_model, no score"),
        (Cutting, "texts belong to whole utterances; declare whole_utterances"),
        (Ambiguous, "keys of metrics are different words, not 'log_prob', 'log_prob'"),
        (Single, r"metrics of Single is a tuple; write metrics = \(Metric\(...\),\)"),
        (Counting, "a metric's key 'frames' has a meaning in reports; choose another word"),
    ],
)
def test_a_class_that_is_no_task_is_refused(cls: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"task 'other': .*{message}"):
        speechdp.task("other")(cls)
    assert "other" not in TASKS.names()


def test_an_installed_package_offers_one(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = metadata.EntryPoint("coding", OWN, TASKS.group)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [offered] if group == TASKS.group else [])
    assert "coding" in TASKS.names()
    assert task_class("coding").name == "coding" and task_options("coding:ahead=2") == {"ahead": 2}


def test_a_module_of_the_folder_worked_in_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "from dataclasses import dataclass",
        "from speechdp.tasks.acoustic import AcousticTask",
        "@dataclass(frozen=True)",
        "class Mine(AcousticTask):",
        "    pass",
    )
    (tmp_path / "beside.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [str(REPOSITORY)])
    monkeypatch.chdir(tmp_path)
    options = TrainOptions(ModelOptions(cells=7), task="beside:Mine")
    assert options.task_class.name == "beside:Mine" and options.preset_name == "tiny"
    assert options.make_task().sizes.cells == 7  # type: ignore[attr-defined]
    sys.modules.pop("beside")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("import speechdp\nwidth: int =\n", "line 2: SyntaxError: "),
        ("\n\nwidth = size\n", "line 3: NameError: name 'size' is not defined"),
        ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_module_that_fails_is_named_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, reason: str
) -> None:
    (tmp_path / "failing.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    message = f"--task failing:Mine: cannot be imported ({tmp_path / 'failing.py'}, {reason}"
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        TrainOptions(task="failing:Mine")
    assert "\n" not in str(caught.value) and str(caught.value).endswith("; fix the module")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "unknown task 'nothing'; there are: acoustic, synthesis"),
        ("no_such_module:Task", "--task no_such_module:Task: cannot be imported (No module named"),
        (
            "predictive_coding:Nothing",
            "predictive_coding has no class Nothing",
        ),
        (
            "predictive_coding:PredictiveCodin",
            "has no class PredictiveCodin; did you mean PredictiveCoding?",
        ),
        ("predictive_coding:Predictor", "is not a dataclass derived from speechdp.tasks.base.Task"),
        (f"{OWN}:depth=3", f"task {OWN} has no option 'depth'; it has: ahead, width"),
        (f"{OWN}:ahead=x", f"{OWN}:ahead='x': write a whole number"),
        (f"{OWN}:ahead=0", "ahead and width are at least 1"),
        (
            "./my_task.py:MyTask",
            "./my_task.py is not the name of a module; write MODULE:CLASS, e.g. my_task:MyTask",
        ),
        (".my_task:MyTask", ".my_task is not the name of a module; write MODULE:CLASS, e.g. my_task:MyTask"),
        ("synthesis:reduction=3", "write --task synthesis, and its options as --preset and so on"),
    ],
)
def test_what_is_no_task_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainOptions(task=text)


def test_the_file_of_a_module_is_not_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tdnn.py").touch()
    message = "--task tdnn.py:Tdnn: tdnn.py is the file of a module; write tdnn:Tdnn"
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainOptions(task="tdnn.py:Tdnn")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelOptions(layers=2)}, f"--layers goes with --task acoustic, not with --task {OWN}"),
        ({"model": ModelOptions("tiny")}, f"--preset tiny: --task {OWN} has no presets; leave it out"),
        ({"realign": 1}, f"--realign: not with --task {OWN}, whose models cannot align"),
    ],
)
def test_options_of_other_tasks_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainOptions(task=OWN, **changes)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("own") / "data", TinySizes(train=24, dev=6))


def test_the_example_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "test_predictive_coding", raising=False)
    importlib.import_module("test_predictive_coding").test_contract()


def test_an_own_task_is_trained_judged_saved_and_reported(dataset: Dataset, tmp_path: Path) -> None:
    options = TrainOptions(
        batch=BatchOptions(batch_size=4),
        task=f"{OWN}:width=8",
        strategy=StrategyChoice("model_averaging:period=2"),
        epochs=3,
    )
    run_dir = tmp_path / "run"
    run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, run_dir))

    settings = json.loads((run_dir / "run.json").read_text())
    assert (settings["task"], settings["preset"], settings["decodes"]) == (OWN, OWN, False)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    errors = [line["heldout_prediction_error"] for line in lines]
    assert len(errors) == 3 and errors[2] < errors[0]
    assert all(0 < line["heldout_close_share"] < 1 and "heldout_log_prob" not in line for line in lines)
    num_frames = dataset.num_frames("dev") - 3 * dataset.num_utterances("dev")
    assert {line["heldout_frames"] for line in lines} == {num_frames}

    evaluation = read_run(run_dir).evaluations[-1]
    assert evaluation.score == -errors[2] and evaluation.values["prediction_error"] == errors[2]
    report = write_report(run_dir, target=errors[1])
    assert "prediction error" in report.html.read_text()
    assert "heldout_prediction_error" in report.csv.read_text().splitlines()[0]

    weights = safetensors.torch.load_file(run_dir / "model.safetensors")
    assert weights["model.output.weight"].shape == (dataset.feature_dim, 8)
    with safetensors.safe_open(str(run_dir / "model.safetensors"), framework="pt") as file:
        head = json.loads(file.metadata()["speechdp"])
    assert (head["task"], head["options"]) == (OWN, "ahead=3,width=8")
    assert head["data_checksum"] == dataset.checksum
    with pytest.raises(RunError, match=f"is a model of --task {OWN}"):
        load_model(run_dir, CPU)


@dataclasses.dataclass(frozen=True)
class Teaching(Task):
    """Has a teacher that follows the model, counts its steps, and looks at numbers as its model is made."""

    metrics = (dataclasses.replace(LOG_PROB, key="likeness"),)

    def make_model(self, data: TaskData) -> nn.Module:
        window = torch.hann_window(8).numpy()
        scale = float(torch.linspace(0.5, 1.0, 3)[-1]) / torch.ones(2).sum().item()
        model = nn.Module()
        model.input = nn.Linear(data.feature_dim, 4)
        model.output = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 4))
        model.teacher = nn.Linear(data.feature_dim, 4).requires_grad_(False)
        nn.init.constant_(model.input.bias, scale * float(window.max()))
        model.register_buffer("steps", torch.tensor(0))
        model.register_buffer("turn", torch.ones(4, dtype=torch.complex64), persistent=False)
        return model

    def _differences(self, model: Any, batch: Batch) -> torch.Tensor:
        taught = model.teacher(batch.features) * model.turn.real / (1 + 0.01 * model.steps)
        inside = torch.arange(batch.features.shape[1]) < batch.lengths.unsqueeze(1)
        return (model.output(model.input(batch.features)) - taught).square().mean(2)[inside]

    def loss(self, model: Any, batch: Batch) -> LossSum:
        if model.training:
            with torch.no_grad():
                model.teacher.weight.lerp_(model.input.weight, 0.1)
                model.steps += 1
                model.turn *= 0.99 + 0.1j
        return LossSum(self._differences(model, batch).sum(), batch.num_frames)

    def score(self, model: Any, batch: Batch) -> FrameScores:
        return FrameScores({"likeness": -self._differences(model, batch).sum().item()}, batch.num_frames)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_is_made_by_numbers_just_computed_is_trained(
    dataset: Dataset, tmp_path: Path, precision: Any
) -> None:
    speechdp.task("teaching")(Teaching)
    options = TrainOptions(task="teaching", epochs=1, precision=precision)
    train_run(Session(dataset, SerialCommunicator(), CPU), options, tmp_path)
    trained = make_model(dataset, options)
    settings = json.loads((tmp_path / "run.json").read_text())
    assert isinstance(settings["num_classes"], int)
    assert settings["num_parameters"] == sum(p.numel() for p in trained.parameters())
    assert safetensors.torch.load_file(tmp_path / "model.safetensors")["model.steps"] > 0


@dataclasses.dataclass(frozen=True)
class Synchronised(Outside):
    """Has a normalisation that exchanges by itself, on GPUs."""

    def make_network(self, feature_dim: int, num_classes: int) -> nn.Module:
        network = LstmAcousticModel(feature_dim, num_classes, LstmConfig(1, 4, bidirectional=False))
        network.norm = nn.SyncBatchNorm(4)
        return network


def test_a_normalisation_that_would_not_exchange_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    speechdp.task("synchronised")(Synchronised)
    options = TrainOptions(task="synchronised", epochs=1)
    with pytest.raises(ConfigError, match="the model's norm is a torch SyncBatchNorm, which works only with"):
        run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path / "run"))


def test_what_a_model_has_beside_its_parameters_goes_on_too(dataset: Dataset, tmp_path: Path) -> None:
    speechdp.task("teaching")(Teaching)
    options = TrainOptions(batch=BatchOptions(batch_size=4), task="teaching", epochs=2)

    def train(name: str, *, pause_at: int = 0, resume: bool = False) -> None:
        session = Session(dataset, SerialCommunicator(), CPU, pause_at=pause_at)
        train_run(session, options, tmp_path / name, resume=resume)

    train("at once")
    with pytest.raises(Stopped):
        train("paused", pause_at=4)
    train("paused", resume=True)
    expected, found = model_tensors(tmp_path / "at once"), model_tensors(tmp_path / "paused")
    assert found["model.steps"] == 12 and all(torch.equal(found[name], x) for name, x in expected.items())
    assert evaluations(tmp_path / "paused")[1:] == evaluations(tmp_path / "at once")


def test_data_of_another_kind_are_refused(tmp_path: Path) -> None:
    speech = write_tiny_speech(tmp_path / "data", TinySizes(4, 2, 2))
    options = TrainOptions(task=OWN)
    with pytest.raises(ConfigError, match=f"holds spectrograms, and --task {OWN} is trained on features"):
        run_threads(1, lambda comm: train_run(Session(speech, comm, CPU), options, tmp_path / "run"))


@dataclasses.dataclass(frozen=True)
class OfFeatures(Outside):
    """Takes features as they are stored, and says of them what no file can hold."""

    trains_on = ("features",)

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        return {"mean": np.float32(1)}


def test_a_network_of_its_own_is_not_said_to_be_decoded(dataset: Dataset, tmp_path: Path) -> None:
    speechdp.task("net")(OwnNet)
    with pytest.raises(ConfigError, match=r"--task net: its model is a Linear, .* declare decodes = False"):
        make_model(dataset, TrainOptions(task="net"))
    own = dataclasses.make_dataclass(
        "OwnNetAlone", [], bases=(OwnNet,), frozen=True, namespace={"decodes": False}
    )
    speechdp.task("alone")(own)
    model = make_model(dataset, TrainOptions(task="alone"))
    own(smoothing=0.5).save(tmp_path, model, {}, None)
    assert "model.weight" in safetensors.torch.load_file(tmp_path / "model.safetensors")
    with safetensors.safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        assert json.loads(file.metadata()["speechdp"])["options"] == "smoothing=0.5"
    with pytest.raises(RunError, match="is a model of --task alone; load it with safetensors"):
        load_model(tmp_path, CPU)


def test_options_beside_inherited_presets_are_refused_with_what_to_declare() -> None:
    speechdp.task("inheriting")(Inheriting)
    assert isinstance(TrainOptions(task="inheriting").make_task(), Inheriting)
    with pytest.raises(
        ConfigError, match=r"--task inheriting:width=3: .* Inheriting declares presets = \(\) and"
    ):
        task_options("inheriting:width=3")


def test_another_criterion_is_not_put_in_the_place_of_a_task_from_outside() -> None:
    cls = dataclasses.make_dataclass("OwnLoss", [], bases=(AcousticTask,), frozen=True)
    speechdp.task("own_loss")(cls)
    assert isinstance(TrainOptions(task="own_loss").make_task(), cls)
    with pytest.raises(
        ConfigError, match="--criterion ctc: --task own_loss has a loss of its own; leave it out"
    ):
        TrainOptions(ModelOptions(criterion="ctc"), task="own_loss").make_task()


class OwnLossMixin:
    """Weighs the loss of another task."""

    def loss(self, model: Any, batch: Batch) -> LossSum:
        found: LossSum = super().loss(model, batch)  # type: ignore[misc]
        return LossSum(2 * found.total, found.num_frames)


class Weighed(OwnLossMixin, AcousticTask):
    """Has a loss of its own."""


class Staged(Weighed):
    """Says how its model is taken apart."""

    modules = ("encoder", "output")


class Unchanged(AcousticTask):
    """Has the model and the loss of ours."""


@pytest.mark.parametrize(
    ("cls", "modules"),
    [
        (Unchanged, ("encoder", "output")),
        (FullSumTask, ("encoder", "output")),
        (CtcTask, ("encoder", "output")),
        (SynthesisTask, ("encoder", "decoder", "postproc")),
        (OwnNet, ()),
        (Weighed, ()),
        (Staged, ("encoder", "output")),
    ],
)
def test_a_class_with_another_model_or_loss_has_no_modules_of_its_base(
    cls: type[Task], modules: tuple[str, ...]
) -> None:
    assert cls.modules == modules


def test_a_profile_refuses_a_task_without_modules() -> None:
    speechdp.task("weighed")(dataclasses.dataclass(frozen=True)(Weighed))
    with pytest.raises(
        ConfigError,
        match=r"--task weighed: declares no modules that profile could time; give .*`modules` and `stages`",
    ):
        ProfilePlan((1,)).jobs(TrainOptions(task="weighed"))


def test_data_and_task_that_do_not_fit_are_told_with_a_remedy(dataset: Dataset) -> None:
    speechdp.task("of_features")(OfFeatures)
    audio = Dataset.open(dataset.path)
    audio.stored = "audio"
    message = "holds audio, and --task of_features is trained on features; prepare them without --store audio"
    with pytest.raises(ConfigError, match=message):
        check_task(audio, TrainOptions(task="of_features"))


def test_what_no_model_file_can_hold_is_refused_before_training(dataset: Dataset, tmp_path: Path) -> None:
    speechdp.task("of_features")(OfFeatures)
    run_dir = tmp_path / "run"
    options = TrainOptions(task="of_features", epochs=1)
    with pytest.raises(ConfigError, match=r"describe_data\(\) returns what a model file cannot hold"):
        run_threads(1, lambda comm: train_run(Session(dataset, comm, CPU), options, run_dir))
    assert not (run_dir / "run.json").exists()


@dataclasses.dataclass(frozen=True)
class Transposed(Task):
    """Has options of types that JSON does not know, and weights that are not contiguous."""

    metrics = (LOG_PROB,)
    table: Path = Path("a")
    every: Period | None = None

    def make_model(self, data: TaskData) -> nn.Module:
        layer = nn.Linear(2, 3)
        layer.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        return layer

    def loss(self, model: Any, batch: Batch) -> LossSum:
        raise NotImplementedError

    def score(self, model: Any, batch: Batch) -> FrameScores:
        raise NotImplementedError


def test_any_options_and_weights_are_saved(dataset: Dataset, tmp_path: Path) -> None:
    speechdp.task("transposed")(Transposed)
    task = TrainOptions(task="transposed:every=600kf").make_task()
    model = task.make_model(TaskData(dataset, InputOptions()))
    task.save(tmp_path, model, {}, None)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["model.weight"], model.weight)  # type: ignore[arg-type]
    with safetensors.safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        head = json.loads(file.metadata()["speechdp"])
    assert head["options"] == "table=a,every=600kf"
    assert TrainOptions(task=f"transposed:{head['options']}").make_task() == task


def test_a_run_that_can_score_nothing_ends_in_a_line(dataset: Dataset, tmp_path: Path) -> None:
    options = TrainOptions(task=f"{OWN}:ahead=10000,width=2", epochs=1)
    with pytest.raises(RunError, match="no frame of the held-out split was scored"):
        run_threads(1, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path / "run"))


def test_ours_are_made_of_their_presets() -> None:
    assert TrainOptions().make_task() == AcousticTask(LstmConfig(2, 128, True, dropout=0.4))
