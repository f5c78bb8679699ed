"""The staged step: the plain step's mathematics, every function noted, one module alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.experiments.profile.steps import SingleModule, StageClock, StagedStep
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.models.precision import Precision
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.model import Tacotron
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.base import Task
from speechdp.tasks.synthesis import SynthesisTask

TOLERANCE = 1e-6
LENGTHS = [11, 7, 8]
CPU = torch.device("cpu")
FP32 = Precision("fp32", CPU)
SYNTHESIS = ["encoder", "decoder", "postproc", "loss"]
Case = tuple[Task, nn.Module, Batch]


def acoustic_case() -> Case:
    torch.manual_seed(0)
    model = LstmAcousticModel(5, 7, LstmConfig(2, 6, True, bottleneck=4, dropout=0.3))
    targets = torch.randint(7, (3, 11))
    for row, length in enumerate(LENGTHS):
        targets[row, length:] = IGNORED_TARGET
    targets[0, :2] = IGNORED_TARGET  # context
    batch = Batch(torch.randn(3, 11, 5), targets, torch.tensor(LENGTHS), int((targets >= 0).sum()))
    return AcousticTask(), model, batch


def synthesis_case(decoder: str, guided_attention: float = 0.7) -> Case:
    torch.manual_seed(0)
    sizes = dict.fromkeys(("embedding_dim", "prenet_hidden", "prenet_dim", "width", "attention_dim"), 6)
    config = TacotronConfig(
        **sizes, encoder_bank=2, postproc_bank=2, postproc_projection=5, highways=1, decoder_dim=6,
        reduction=3, decoder="loop" if decoder == "loop" else "fast",
    )  # fmt: skip
    model = Tacotron(9, 4, 5, config)
    symbols = torch.randint(9, (3, 6))
    symbols[1, 4:] = symbols[2, 5:] = IGNORED_TARGET
    features = torch.rand(3, 11, 9)
    for row, length in enumerate(LENGTHS):
        features[row, length:] = 0
    batch = Batch(features, symbols, torch.tensor(LENGTHS), sum(LENGTHS))
    return SynthesisTask(guided_attention), model, batch


CASES: dict[str, Callable[[], Case]] = {
    "acoustic": acoustic_case,
    "fast decoder": lambda: synthesis_case("fast"),
    "plain decoder": lambda: synthesis_case("loop"),
    "no guide": lambda: synthesis_case("fast", 0.0),
}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters()]
    assert all(g is not None for g in found)
    return [g.clone() for g in found if g is not None]


@pytest.mark.parametrize("name", CASES)
def test_its_gradients_are_those_of_the_plain_step(name: str) -> None:
    task, model, batch = CASES[name]()
    torch.manual_seed(5)  # dropout draws the same masks
    plain = task.loss(model, batch)
    plain.total.backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    staged = StagedStep(task.stages(model), StageClock(CPU), FP32)
    loss = staged.forward(batch)
    staged.backward(torch.ones(()))
    torch.testing.assert_close(loss, plain.total.detach(), rtol=TOLERANCE, atol=0)
    scale = max(float(g.abs().max()) for g in expected)
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert float((found - wanted).abs().max()) <= TOLERANCE * scale
    assert scale > 0


def test_every_function_is_noted_forward_then_backward() -> None:
    task, model, batch = synthesis_case("fast")
    clock = StageClock(CPU)
    staged = StagedStep(task.stages(model), clock, FP32)
    begin_s = clock.now()
    staged.forward(batch)
    staged.backward(torch.ones(()))
    end_s = clock.now()
    noted = clock.take()
    assert [(f.name, f.phase) for f in noted] == [
        *((name, "forward") for name in SYNTHESIS),
        *((name, "backward") for name in reversed(SYNTHESIS)),
    ]
    edges = [begin_s, *(edge for f in noted for edge in (f.start_s, f.start_s + f.duration_s)), end_s]
    assert edges == sorted(edges)
    assert clock.take() == ()


def test_a_function_inside_another_counts_as_part_of_it() -> None:
    clock = StageClock(CPU)
    with clock.timed("exchange", ""), clock.timed("update", ""):
        pass
    assert [f.name for f in clock.take()] == ["exchange"]


def test_times_count_from_the_common_start() -> None:
    clock = StageClock(CPU)
    with clock.timed("encoder", "forward"):
        pass
    clock.begin(1e6)
    assert clock.take() == () and clock.now() < -1e5


@pytest.mark.parametrize("module", ["encoder", "decoder", "postproc"])
def test_a_module_alone_touches_its_own_parameters_only(module: str) -> None:
    task, model, batch = synthesis_case("fast")
    clock = StageClock(CPU)
    single = SingleModule(task.stages(model), module, batch, clock, FP32)
    model.zero_grad(set_to_none=True)
    clock.take()
    single.step()
    assert [(f.name, f.phase) for f in clock.take()] == [(module, "forward"), (module, "backward")]
    with_gradient = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {module}
    assert all(p.grad is not None for p in getattr(model, module).parameters())


def test_a_module_alone_does_the_same_work_at_every_step() -> None:
    task, model, batch = acoustic_case()
    model.eval()  # no dropout: the same masks at every step
    single = SingleModule(task.stages(model), "encoder", batch, StageClock(CPU), FP32)
    found = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        single.step()
        found.append(model.get_parameter("lstm.weight_ih_l0").grad)
    assert found[0] is not None and found[1] is not None
    assert torch.equal(found[0], found[1]) and float(found[0].abs().sum()) > 0


def test_outputs_the_loss_does_not_reach_are_not_driven() -> None:
    task, model, batch = synthesis_case("fast", guided_attention=0.0)
    single = SingleModule(task.stages(model), "decoder", batch, StageClock(CPU), FP32)
    assert set(single._gradients) == {"mel", "stop"}


def test_the_stages_of_an_acoustic_model() -> None:
    task, model, _ = acoustic_case()
    assert [stage.name for stage in task.stages(model)] == ["encoder", "output", "loss"]
