"""What `speechdp.testing` offers authors: ours keep to it, faulty strategies and tasks are told apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import speechdp
from speechdp.data.loading.batch import Batch
from speechdp.errors import ConfigError
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.parallel.declared import Exchange, Model, Pattern
from speechdp.parallel.period import Period
from speechdp.parallel.registry import STRATEGIES, strategy_names
from speechdp.parallel.strategy import Progress
from speechdp.strategies.mechanisms.periodic import PeriodicStrategy
from speechdp.strategies.model_averaging import ModelAveraging
from speechdp.tasks.acoustic import AcousticTask, CtcTask, FullSumTask
from speechdp.tasks.base import FrameScores, LossSum, TaskData
from speechdp.tasks.registry import TASKS
from speechdp.testing import strategy_contract, task_contract
from tests.helpers.own_script import PLAIN_ON_ONE_RANK


@pytest.mark.parametrize("name", strategy_names())
def test_every_strategy_keeps_the_contract(name: str) -> None:
    strategy_contract(name, neutral=PLAIN_ON_ONE_RANK.get(name, ""), sizes=(1, 3))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the test's strategies and tasks afterwards."""
    for point in (STRATEGIES, TASKS):
        monkeypatch.setattr(point, "registered", dict(point.registered))


@dataclass(eq=False)
class _Every3(ModelAveraging):
    """Model averaging with a short period."""

    def __post_init__(self) -> None:
        self.period = type(self.period)(3)


class ForgetsItsCounter(_Every3):
    """Loads nothing of what it has saved."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "counter": 0} if "counter" in state else _zeroed(state))


def _zeroed(state: dict[str, Any]) -> dict[str, Any]:
    return {key: type(value)() if isinstance(value, int | float) else value for key, value in state.items()}


class EndsApart(_Every3):
    """Leaves every rank with its own parameters."""

    def finish(self) -> None:
        return None


class GoesHalfWay(_Every3):
    """Goes half of the way to the average, and so ends with what rank 0 has come to."""

    def exchange(self) -> None:
        own = self.replica.parameters.values.clone()
        self.average_parameters()
        self.replica.parameters.values.lerp_(own, 0.5)


class EvaluatesForGood(_Every3):
    """Goes on training from the average that was evaluated."""

    @contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        self.average_parameters()
        yield


class DoesNotMove(PeriodicStrategy):
    """Never updates."""

    def step(self, progress: Progress) -> None:
        self.replica.clear_gradients()

    def exchange(self) -> None:
        self.average_parameters()


class Doubles(PeriodicStrategy):
    """Doubles its period after every average, and does not declare that."""

    def set_up(self) -> None:
        super().set_up()
        self._rounds = 0

    @property
    def current_period(self) -> Period:
        return Period(2.0**self._rounds)

    def exchange(self) -> None:
        self.average_parameters()
        self._rounds += 1


class SaysWhatIsUnusable(PeriodicStrategy):
    """Says of its exchanges what nothing can be predicted from."""

    def exchange(self) -> None:
        self.average_parameters()

    def predicted_exchange(self, model: Model) -> Exchange:
        return Exchange(Pattern.NEIGHBOURS, model.steps_in(self.period), model.nbytes, topology="halves")


@pytest.mark.parametrize(
    ("faulty", "neutral", "words"),
    [
        (ForgetsItsCounter, "", "resumed differs from uninterrupted"),
        (EndsApart, "", "after finish: ranks hold different bits"),
        (GoesHalfWay, "", "from the model that was evaluated last"),
        (EvaluatesForGood, "", "evaluation changed the parameters"),
        (DoesNotMove, "", "plain SGD: differs"),
        (DoesNotMove, None, "the loss went from"),
        (
            SaysWhatIsUnusable,
            "",
            "topology='halves': Pattern.NEIGHBOURS has ring, random, exponential, complete",
        ),
        (Doubles, "", "its period changes from 1 to 2 during training; declare that in traits"),
    ],
)
def test_a_faulty_strategy_is_told(
    registered: None, faulty: type[PeriodicStrategy], neutral: str | None, words: str
) -> None:
    speechdp.strategy("faulty")(dataclass(eq=False)(type(faulty.__name__, (faulty,), {})))
    with pytest.raises(AssertionError, match=re.escape(words)):
        strategy_contract("faulty", neutral=neutral, sizes=(2,))


@pytest.mark.parametrize("task", ["acoustic", "synthesis"])
def test_tasks_of_ours_keep_the_contract(task: str) -> None:
    task_contract(task)


@dataclass(frozen=True)
class _Small(AcousticTask):
    """As ours, with a model of its own."""

    presets = ()
    model_options = ()
    modules = ()
    cells: int = 8

    def make_model(self, data: TaskData) -> Any:
        sizes = LstmConfig(1, self.cells, bidirectional=True, dropout=0.2)
        return LstmAcousticModel(data.feature_dim, data.dataset.num_classes, sizes)


class AveragesTheLoss(_Small):
    def loss(self, model: Any, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return replace(found, total=found.total / found.num_frames)


class CountsUtterances(_Small):
    def loss(self, model: Any, batch: Batch) -> LossSum:
        return replace(super().loss(model, batch), num_frames=len(batch.lengths))


class LooksAtPadding(_Small):
    """Is a sum over utterances, each as long as the batch."""

    def loss(self, model: Any, batch: Batch) -> LossSum:
        return LossSum(model(batch.features, batch.lengths).square().sum(), batch.num_frames)


class PaddingReachesFrames(_Small):
    """Two convolutions with nothing that masks what the first has made of padding."""

    def make_model(self, data: TaskData) -> Any:
        classes = data.dataset.num_classes
        return nn.Sequential(
            nn.Conv1d(data.feature_dim, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, classes, 3, padding=1)
        )

    def loss(self, model: Any, batch: Batch) -> LossSum:
        logits = model(batch.features.transpose(1, 2))
        total = nn.functional.cross_entropy(logits, batch.targets, ignore_index=-1, reduction="sum")
        return LossSum(total, batch.num_frames)


class PaddingCountsWhereItIsLong(_Small):
    """More than any utterance of the batch has."""

    def loss(self, model: Any, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        spare = batch.features.shape[1] - int(batch.lengths.max())
        return replace(found, total=found.total + model.output.weight.sum() * spare)


class PrefersTheFirst(_Small):
    """Counts one utterance of a batch twice, but not where it is alone."""

    def loss(self, model: Any, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        extra = 0 if len(batch.lengths) == 1 else model(batch.features[:1], batch.lengths[:1]).sum()
        return replace(found, total=found.total + extra)


class LearnsNothing(_Small):
    def loss(self, model: Any, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return replace(found, total=found.total.detach() + 0 * model.output.weight.sum())


class Climbs(_Small):
    """Has the sign wrong where it trains."""

    def loss(self, model: Any, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return replace(found, total=-found.total) if model.training else found


class HasNoNumber(_Small):
    """The gradient of a square root at 0."""

    def loss(self, model: Any, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return replace(found, total=found.total + (model.output.weight * 0).square().sum().sqrt())


class DrawsByItself(_Small):
    def make_model(self, data: TaskData) -> Any:
        model = super().make_model(data)
        with torch.no_grad():
            model.output.bias.add_(float(np.random.default_rng().random()))
        return model


class ScoresMore(_Small):
    def score(self, model: Any, batch: Batch) -> FrameScores:
        found = super().score(model, batch)
        return replace(found, sums={**found.sums, "loudness": 1.0})


class ScoresMeans(_Small):
    def score(self, model: Any, batch: Batch) -> FrameScores:
        found = super().score(model, batch)
        return replace(found, sums={key: value / found.num_frames for key, value in found.sums.items()})


class _Scaled(LstmAcousticModel):
    """Grows with every step of training, by a number that is no part of its state."""

    scale = 1.0

    def encode(self, features: Tensor, lengths: Tensor) -> Tensor:
        self.scale += 0.02 * self.training
        return super().encode(features, lengths) * self.scale


class ForgetsWhenSaved(_Small):
    def make_model(self, data: TaskData) -> nn.Module:
        sizes = LstmConfig(1, self.cells, bidirectional=True)
        return _Scaled(data.feature_dim, data.dataset.num_classes, sizes)


class ForgetsItsTeacher(_Small):
    """Is regularised towards what it was, which it keeps outside its model."""

    def make_model(self, data: TaskData) -> Any:
        model = super().make_model(data)
        model.taught = [model.output.weight.detach().clone()]
        return model

    def loss(self, model: Any, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        distance = (model.output.weight - model.taught[0]).square().sum()
        if model.training:
            model.taught[0] = model.taught[0].lerp(model.output.weight.detach(), 0.1)
        return replace(found, total=found.total + 100 * distance * found.num_frames)


class RoundsItsOptions(_Small):
    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", self.cells // 2)


@pytest.mark.parametrize(
    ("faulty", "words"),
    [
        (AveragesTheLoss, "padding alone changes nothing, so the loss is a mean (give a sum"),
        (CountsUtterances, "the loss counts 4 frames of a batch of 43"),
        (LooksAtPadding, "an utterance has another loss once it is padded: set frames behind"),
        (PaddingReachesFrames, "an utterance has another loss once it is padded: set frames behind"),
        (PaddingCountsWhereItIsLong, "more padding changes the loss: "),
        (PrefersTheFirst, "padding alone changes nothing, so the loss is a mean"),
        (LearnsNothing, "all gradients are 0"),
        (Climbs, "30 updates lead from a loss of"),
        (HasNoNumber, "the gradient of output.weight is not finite"),
        (DrawsByItself, "equal seeds give different initial weights (output.bias)"),
        (ScoresMore, "'frame_accuracy_no_silence', 'log_prob', 'loudness'] scored"),
        (ScoresMeans, "of a batch is not the sum of the utterances'"),
        (ForgetsWhenSaved, "read back from its file, the model's log_prob"),
        (ForgetsItsTeacher, "training that was interrupted goes on otherwise"),
        (RoundsItsOptions, "options are not read as they are written: faulty:cells=4 is"),
    ],
)
def test_a_faulty_task_is_told(registered: None, faulty: type[_Small], words: str) -> None:
    speechdp.task("faulty")(dataclass(frozen=True)(type(faulty.__name__, (faulty,), {})))
    with pytest.raises(AssertionError, match=re.escape(words)):
        task_contract("faulty")


@pytest.mark.parametrize(
    ("mistaken", "words"),
    [
        (lambda found: None, "None: return the loss"),
        (lambda found: found.total, "the tensor alone"),
        (lambda found: (found.total, found.num_frames), "an object of type tuple"),
        (lambda found: LossSum(found.total.item(), 1), "a LossSum of the number "),
        (lambda found: LossSum(found.total.detach(), 1), "a LossSum of a tensor that does not require grad"),
        (lambda found: LossSum(found.total.expand(8), 1), "a LossSum of a tensor of shape [8]: sum it"),
        (lambda found: LossSum(found.total, None), "a LossSum of None frames"),
    ],
)
def test_what_a_task_returns_in_place_of_a_loss_is_told(
    registered: None, mistaken: Callable[[LossSum], Any], words: str
) -> None:
    @speechdp.task("mistaken")
    @dataclass(frozen=True)
    class Mistaken(_Small):
        def loss(self, model: Any, batch: Batch) -> Any:
            return mistaken(super().loss(model, batch))

    line = (
        f"loss() of {__name__}:Mistaken must return LossSum(scalar tensor that requires grad, number of "
        f"frames); it returned {words}"
    )
    with pytest.raises(AssertionError, match=re.escape(f"mistaken: {line}")):
        task_contract("mistaken")


@pytest.mark.parametrize(
    ("mistaken", "words"),
    [
        (lambda found: None, "None"),
        (lambda found: found.sums, "an object of type dict"),
        (
            lambda found: replace(found, sums={**found.sums, "log_prob": torch.zeros(8)}),
            "FrameScores of which the sum of log_prob is an object of type Tensor: give .item() of its sum",
        ),
        (
            lambda found: replace(found, num_frames=None),
            "FrameScores of which num_frames is an object of type NoneType",
        ),
        (
            lambda found: replace(found, sums=[1.0]),
            "FrameScores of which the sums are an object of type list: give a dict",
        ),
    ],
)
def test_what_a_task_returns_in_place_of_scores_is_told(
    registered: None, mistaken: Callable[[FrameScores], Any], words: str
) -> None:
    @speechdp.task("mistaken")
    @dataclass(frozen=True)
    class Mistaken(_Small):
        def score(self, model: Any, batch: Batch) -> Any:
            return mistaken(super().score(model, batch))

    line = (
        f"score() of {__name__}:Mistaken must return FrameScores(sums by the keys of the metrics, number of "
        f"frames), all of them numbers; it returned {words}"
    )
    with pytest.raises(AssertionError, match=re.escape(f"mistaken: {line}")):
        task_contract("mistaken")


def test_a_loss_of_ones_own_keeps_the_contract_without_stages(registered: None) -> None:
    @speechdp.task("doubled")
    @dataclass(frozen=True)
    class Doubled(AcousticTask):
        def loss(self, model: Any, batch: Batch) -> LossSum:
            found = super().loss(model, batch)
            return replace(found, total=2 * found.total)

    task_contract("doubled")


@pytest.mark.parametrize("criterion", [CtcTask, FullSumTask])
def test_a_network_of_ones_own_keeps_the_contract_with_whole_transcripts(
    registered: None, criterion: type[AcousticTask]
) -> None:
    @speechdp.task("whole")
    @dataclass(frozen=True)
    class Whole(_OwnNetwork, criterion):  # type: ignore[valid-type, misc]
        pass

    task_contract("whole")


@pytest.mark.parametrize("bases", [(), (CtcTask,)])
@pytest.mark.parametrize("has_parts", [True, False])
def test_a_network_of_a_lower_rate_is_told_of_its_frames(
    registered: None, bases: tuple[type], has_parts: bool
) -> None:
    @speechdp.task("halves")
    @dataclass(frozen=True)
    class Halves(_OwnNetwork, *bases):  # type: ignore[misc]
        def make_network(self, feature_dim: int, num_classes: int) -> nn.Module:
            return (_EverySecond if has_parts else _EverySecondAlone)(feature_dim, num_classes)

    given = "for features of shape (4, 17, 6) its network returns (4, 9, "
    with pytest.raises(ConfigError, match=re.escape(given)) as error:
        task_contract("halves")
    assert "not one vector per frame, (4, 17, ...); if it works at a lower frame rate" in str(error.value)


class _EverySecond(LstmAcousticModel):
    """Works at half the rate, and leaves it at that."""

    def __init__(self, feature_dim: int, num_classes: int) -> None:
        super().__init__(feature_dim, num_classes, LstmConfig(1, 8, bidirectional=False))

    def encode(self, features: Tensor, lengths: Tensor) -> Tensor:
        return super().encode(features[:, ::2].contiguous(), (lengths + 1) // 2)


class _EverySecondAlone(nn.Module):
    """The same without parts."""

    def __init__(self, feature_dim: int, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(feature_dim, num_classes)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        logits: Tensor = self.layer(features[:, ::2])
        return logits


@dataclass(frozen=True)
class _OwnNetwork(AcousticTask):
    """Ours, as one from outside: without presets."""

    presets = ()
    model_options = ()

    def make_network(self, feature_dim: int, num_classes: int) -> nn.Module:
        return LstmAcousticModel(feature_dim, num_classes, LstmConfig(1, 8, bidirectional=False, dropout=0.2))


def test_a_file_of_another_form_is_read_by_its_task(registered: None) -> None:
    read: list[Any] = []

    @speechdp.task("other_file")
    @dataclass(frozen=True)
    class OtherFile(_Small):
        def save(self, run_dir: Any, model: nn.Module, facts: Any, counts: Any) -> None:
            safetensors.torch.save_file(model.state_dict(), run_dir / "model.safetensors")

    def load(folder: Any) -> nn.Module:
        read.append(folder)
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        model = LstmAcousticModel(6, len(weights["output.bias"]), LstmConfig(1, 8, bidirectional=True))
        model.load_state_dict(weights)
        return model

    task_contract("other_file", load=load)
    assert len(read) == 1
