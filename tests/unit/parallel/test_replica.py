"""One flat parameter under the optimizer equals the update tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from speechdp.data.signal.features import FeatureConfig
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import TrainOptions
from speechdp.parallel.replica import Replica
from speechdp.train.build import make_replica

TOLERANCE = 1e-9
NUM_STEPS = 6
LEARNING_RATES = [0.3, 0.05, 0.2, 0.1, 0.1, 0.02]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "momentum and decay": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, weight_decay=0.03),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adam and decay": lambda p: torch.optim.Adam(p, 0.1, betas=(0.8, 0.999), weight_decay=0.03),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2),
    "adam fused": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.03, fused=True),
    "momentum fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.03, fused=True),
}


def small_model() -> nn.Module:
    """Return tensors of awkward sizes: a scalar, an empty one, a matrix and an LSTM's."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 2), "linear": nn.Linear(2, 5)})
    model.register_parameter("scalar", nn.Parameter(torch.tensor(0.7)))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    model.register_parameter("fixed", nn.Parameter(torch.ones(3), requires_grad=False))
    return model.double()


def gradients_of_step(step: int, parameters: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = 10.0 ** (step - 3)  # from far below to far above the norm to clip to
    return [scale * torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]


def frames_of_step(step: int) -> int:
    return 3 + 2 * step


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_equals_torch_tensor_by_tensor(name: str, max_norm: float) -> None:
    plain = small_model()
    parameters = [p for p in plain.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[name](parameters)
    replica = Replica(small_model(), OPTIMIZERS[name], max_gradient_norm=max_norm)
    for step in range(NUM_STEPS):
        frames = frames_of_step(step)
        for p, gradient in zip(parameters, gradients_of_step(step, parameters), strict=True):
            p.grad = gradient / frames
        if max_norm:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATES[step]
        optimizer.step()

        sums = gradients_of_step(step, replica.model_parameters)
        for p, gradient in zip(replica.model_parameters, sums, strict=True):
            assert p.grad is not None
            p.grad.add_(gradient)  # as backward accumulates: a sum over frames
        replica.set_learning_rate(LEARNING_RATES[step])
        # A tensor gives the same as a number: on a GPU the count stays on the device.
        replica.apply_gradients(torch.tensor(float(frames)).double() if step % 2 else frames)
        for mine, theirs in zip(replica.model_parameters, parameters, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=TOLERANCE)
        assert not replica.gradients.whole.any()


def test_the_model_computes_with_the_flat_vector_and_backward_fills_it() -> None:
    model = nn.Linear(3, 2).double()
    before = [p.detach().clone() for p in model.parameters()]
    replica = Replica(model, OPTIMIZERS["sgd"])
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    x = torch.randn(4, 3, dtype=torch.float64)
    model(x).sum().backward()
    weight, bias = replica.gradients.views
    assert torch.allclose(weight, x.sum(0).expand(2, 3)) and bias.tolist() == [4.0, 4.0]
    replica.parameters.values.zero_()
    assert not model(x).any()
    assert replica.gradients.extra.numel() == replica.parameters.extra.numel() == 1


def test_padding_stays_zero_so_that_norms_and_averages_are_those_of_the_tensors() -> None:
    replica = Replica(small_model(), OPTIMIZERS["adam and decay"])
    occupied = torch.zeros_like(replica.parameters.values)
    for place in replica.parameters.places:
        occupied[place.offset : place.offset + place.num_elements] = 1
    replica.gradients.values.copy_(occupied)
    replica.apply_gradients(2)
    assert not replica.parameters.values[occupied == 0].any()
    assert replica.parameters.values[occupied == 1].all()


def test_no_frames_change_nothing() -> None:
    replica = Replica(small_model(), OPTIMIZERS["momentum and decay"])
    before = replica.parameters.whole.clone()
    replica.gradients.values.fill_(1.0)
    replica.frames = 7
    replica.apply_gradients(0)
    assert torch.equal(replica.parameters.whole, before)
    assert not replica.gradients.whole.any() and replica.frames == 0
    assert not any(tensor.any() for tensor in replica.optimizer_tensors().values())


def test_the_optimizers_state_exists_from_the_start_and_comes_back() -> None:
    replica = Replica(small_model(), OPTIMIZERS["adam"])
    assert set(replica.optimizer_tensors()) == {"exp_avg", "exp_avg_sq", "step"}
    assert not any(tensor.any() for tensor in replica.optimizer_tensors().values())
    replica.gradients.values.fill_(1.0)
    replica.apply_gradients(1)
    saved = {name: tensor.clone() for name, tensor in replica.optimizer_tensors().items()}
    assert saved["step"] == 1 and saved["exp_avg"].any()
    replica.reset_optimizer()
    assert not any(tensor.any() for tensor in replica.optimizer_tensors().values())
    replica.load_optimizer_tensors(saved)
    assert all(torch.equal(t, saved[n]) for n, t in replica.optimizer_tensors().items())
    with pytest.raises(AssertionError, match="another optimizer"):
        replica.load_optimizer_tensors({"momentum_buffer": saved["exp_avg"]})


def test_plain_sgd_has_no_state() -> None:
    assert Replica(small_model(), OPTIMIZERS["sgd"]).optimizer_tensors() == {}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            OptimizerOptions("sgd", learning_rate=0.5, momentum=0.7, weight_decay=0.1),
            {"lr": 0.5, "momentum": 0.7},
        ),
        (OptimizerOptions("adam", momentum=0.8, weight_decay=0.1), {"lr": 0.002, "betas": (0.8, 0.999)}),
        (OptimizerOptions("adamw", weight_decay=0.1), {"lr": 0.002, "betas": (0.9, 0.999)}),
    ],
)
def test_options_reach_the_optimizer(options: OptimizerOptions, expected: dict[str, object]) -> None:
    model = LstmAcousticModel(FeatureConfig().feature_dim, 6, LstmConfig(1, 4, False))
    replica = make_replica(model, TrainOptions(optimizer=options))
    (group,) = replica.optimizer.param_groups
    assert {name: group[name] for name in expected} == expected
    assert group["weight_decay"] == 0.1 and group["fused"] is True
    names = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    assert type(replica.optimizer) is names[options.optimizer]
    assert replica.max_gradient_norm == 1.0
