"""Rarer things that scripts do with gradients, optimizers, buffers and batches: as in torch, or refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from speechdp import DataParallel
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError, DivergedError
from speechdp.parallel.training_step import DivergenceWatch
from speechdp.strategies.mechanisms.window_loss import WindowLoss
from speechdp.testing import assert_bitwise_equal_over_ranks, assert_close
from tests.contract.test_script_hazards import drawn, filled, refused
from tests.helpers.own_script import (
    NUM_STEPS,
    Script,
    batches_of,
    loss_sum,
    make_batch,
    make_model,
    plain,
    values,
)


def linear(inputs: int = 4, outputs: int = 1) -> nn.Module:
    return filled(nn.Linear(inputs, outputs)).float()


def sgd(model: nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("compression", ["none", "bf16", "fp16"])
def test_a_compressed_sum_may_be_larger_than_half_precision_holds(
    compression: str, steps_before: int
) -> None:
    """Of 100,000 examples on each rank, whose mean gradient is -1 for the weight and for the bias."""

    def check(comm: Communicator) -> None:
        model = linear()
        before = values(model).clone()
        strategy = f"gradient_averaging:compression={compression}"
        run = DataParallel(model, sgd(model, 0.25), comm, strategy)
        with run:
            for _ in range(steps_before):  # of no weight: they do not tell how large sums are
                with run.step(weight=0):
                    pass
            with run.step(weight=100_000) as step:
                step.backward(-model(torch.ones(100_000, 4)).sum())
        assert torch.allclose(values(model) - before, torch.full_like(before, 0.25), rtol=1e-2)

    run_threads(2, check)


def test_losses_of_a_window_go_on_where_the_model_is_after_a_resume() -> None:
    """A checkpoint's sums are on the host, those of a model on a GPU are not: here another device."""
    before, after = WindowLoss(), WindowLoss()
    before.add(torch.tensor(3.0), 2)
    after.load_state_dict(before.state_dict())
    after.add(torch.ones((), device="meta"), 2)
    assert after._sums.device.type == "meta" and after.frames == 4


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=1"])
def test_parameters_that_no_group_has_do_not_count_where_the_norm_is_clipped(
    strategy: str, poison: float
) -> None:
    """Without the second layer's gradients the norm is 2 (of four ones), clipped to 1."""
    model = nn.ModuleList([linear(3, 1), linear(3, 1)])
    before = values(model[0]).clone()
    run = DataParallel(model, sgd(model[0]), SerialCommunicator(), strategy, max_gradient_norm=1.0)
    with run, run.step(weight=1) as step:
        ones = torch.ones(1, 3)
        other = 1000.0 * model[1](ones).sum()
        other.register_hook(lambda gradient: gradient + poison)  # a loss that is none would be refused
        step.backward(-model[0](ones).sum() + other)
    assert torch.allclose(values(model[0]) - before, torch.full_like(before, 0.5), rtol=1e-4)


@pytest.mark.parametrize("poison", [0.0, math.nan])
def test_factors_owe_nothing_to_parameters_that_no_group_has_yet(poison: float) -> None:
    """Of the gradients before a layer is unfrozen nothing is applied after it, and they spoil no others."""

    def check(comm: Communicator) -> None:
        model = nn.ModuleList([linear(12, 12), linear(12, 12)])
        optimizer = sgd(model[0], 0.01)
        run = DataParallel(model, optimizer, comm, "gradient_averaging:compression=powersgd,rank=1")
        begun = values(model[0]).clone()
        with run:
            for number in range(3):
                inputs = drawn(10 * comm.rank + number, 4, 12).float()
                with run.step(weight=4) as step:
                    losses = [layer(inputs).square().sum() for layer in model]
                    losses[1].register_hook(lambda gradient: gradient + poison)
                    step.backward(losses[0] + losses[1])
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 1.0})
            late = values(model[1]).clone()
            with run.step(weight=4) as step:
                step.backward(model[0](inputs).square().sum())
        assert torch.equal(values(model[1]), late)
        moved = values(model[0]) - begun
        assert bool(moved.isfinite().all()) and bool(moved.any())

    run_threads(2, check)


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=2", "delayed_averaging"])
def test_zero_grad_at_the_beginning_of_a_step_loses_nothing(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        def trained(*, zeroes: bool) -> Tensor:
            script = Script(comm, strategy)
            with script.run:
                for number in range(NUM_STEPS):
                    x, y = make_batch(comm.rank, number)
                    with script.run.step(weight=len(x)) as step:
                        if zeroes:
                            script.optimizer.zero_grad()
                        step.backward(script.loss(script.model, (x, y)))
                    script.scheduler.step()
            return values(script.model)

        assert torch.equal(trained(zeroes=True), trained(zeroes=False))
        assert_bitwise_equal_over_ranks(comm, trained(zeroes=True), strategy)

    run_threads(2, check)


@pytest.mark.parametrize("strategy", ["gradient_averaging", "gradient_averaging:every=3", "dpsgd", "bmuf"])
def test_gradients_that_come_outside_of_steps_do_not_count(strategy: str) -> None:
    """Such as those of another model's loss that goes through this one: plain loops clear them."""

    def check(comm: Communicator) -> None:
        def trained(*, adds: bool) -> Tensor:
            script = Script(comm, strategy, batch_norm=False)  # its statistics would count

            def add() -> None:
                if adds:
                    (1000.0 * loss_sum(script.model, make_batch(comm.rank, 0))).backward()  # type: ignore[no-untyped-call]

            add()
            with script.run:
                add()
                for number in range(NUM_STEPS):
                    script.step(make_batch(comm.rank, number))
                    add()
                    if number == 3:
                        with script.run.evaluating():
                            add()
            return values(script.model)

        assert torch.equal(trained(adds=True), trained(adds=False))

    run_threads(2, check)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_may_take_steps_of_their_own_while_one_run_lets_them(order: tuple[int, int]) -> None:
    """As the watchdog must know, whichever run was made last."""

    def check(comm: Communicator) -> None:
        strategies = ["gradient_averaging", "model_averaging:period=2"]
        models = [linear(), linear()]
        runs = [DataParallel(models[i], sgd(models[i]), comm, strategies[i]) for i in order]
        assert comm.calls is not None and comm.calls.together
        with runs[0], runs[1]:
            assert not comm.calls.together
        assert comm.calls.together
        model, group = linear(), comm.split(comm.rank)
        with DataParallel(model, sgd(model), group):
            assert not comm.calls.together, "the other ranks are no part of these steps"

    run_threads(2, check)


def test_zero_grad_after_the_backward_pass_is_refused() -> None:
    script = Script(SerialCommunicator(), "gradient_averaging")
    x, y = make_batch(0, 0)
    words = "do not call optimizer.zero_grad(), the step clears the gradients itself"
    with refused(words), script.run, script.run.step(weight=len(x)) as step:
        step.backward(script.loss(script.model, (x, y)))
        script.optimizer.zero_grad()


def _clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _scaled(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5


def _passed_again(model: nn.Module) -> None:
    loss_sum(model, make_batch(0, 1)).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("change", [_clipped, _scaled, _passed_again])
@pytest.mark.parametrize("strategy", ["gradient_averaging:overlap=false", "model_averaging:period=2"])
def test_gradients_that_are_changed_after_the_backward_pass_are_refused(
    strategy: str, change: Callable[[nn.Module], None]
) -> None:
    """They are sums over a rank's examples, in part exchanged: the script means the mean of all ranks."""
    script = Script(SerialCommunicator(), strategy)
    x, y = make_batch(0, 0)
    words = "gradients were changed inside the step, after its backward pass"
    with refused(words), script.run:
        script.train(0, 1)
        with script.run.step(weight=len(x)) as step:
            step.backward(script.loss(script.model, (x, y)) / 2, last=False)
            _scaled(script.model)  # no pass is the last one yet
            step.backward(script.loss(script.model, (x, y)) / 2)
            change(script.model)


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=2", "dpsgd"])
def test_an_exchange_under_way_is_no_change_by_the_script(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, strategy)
        x, y = make_batch(comm.rank, 0)
        with script.run:
            for _ in range(3):
                with script.run.step(weight=len(x)) as step:
                    step.backward(script.loss(script.model, (x, y)))
                    comm.barrier()  # what is exchanged during the backward pass has come

    run_threads(3, check)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_backward_pass_outside_of_its_step_is_refused(is_over: bool) -> None:
    """Nothing would be exchanged or updated, and training would end as if it had learnt."""
    script = Script(SerialCommunicator(), "gradient_averaging")
    x, y = make_batch(0, 0)
    with refused("step.backward() is called outside of `with run.step() as step:`"), script.run:
        step = script.run.step(weight=len(x))
        if is_over:
            with step:
                step.backward(script.loss(script.model, (x, y)))
        step.backward(script.loss(script.model, (x, y)))


def _clamped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.clamp_(-1e-6, 1e-6)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks_are_refused_where_a_server_moves_its_own_parameters(register: str) -> None:
    def check(comm: Communicator) -> None:
        model = linear()
        optimizer = sgd(model)
        getattr(optimizer, register)(_clamped)
        run = DataParallel(model, optimizer, comm, "parameter_server")
        words = "parameter_server: the optimizer has step hooks, which would see the model"
        if comm.rank == 0:
            with refused(words, ConfigError), run, run.step(weight=1) as step:
                step.backward(model(torch.ones(1, 4)).sum())

    run_threads(1, check)


class Boosted(torch.optim.SGD):
    """With an attribute of its own, as a class of a user's may have."""

    def __init__(self, parameters: Any, boost: float) -> None:
        super().__init__(parameters, 0.1, momentum=0.9)
        self.boost = boost

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.boost)
        super().step(closure)


@pytest.mark.parametrize("strategy", ["parameter_server", "model_averaging:period=2,momentum=average"])
def test_an_optimizer_may_have_attributes_of_its_own(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        model = linear()
        before = values(model).clone()
        run = DataParallel(model, Boosted(model.parameters(), 2.0), comm, strategy)
        with run:
            for _ in range(2):
                with run.step(weight=1) as step:
                    step.backward(model(torch.ones(1, 4)).sum())
        assert values(model).isfinite().all() and not torch.equal(values(model), before)

    run_threads(2, check)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_that_does_not_count_leaves_no_trace_where_the_loop_saves_and_evaluates(
    momentum: float | None,
) -> None:
    """Rank 1 has two batches, rank 0 four."""

    def check(comm: Communicator) -> None:
        model = nn.Sequential(nn.BatchNorm1d(2, momentum=momentum), nn.Linear(2, 1))
        norm = model[0]
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
        run = DataParallel(model, sgd(model, 0.0), comm, "gradient_averaging")
        loader = [torch.full((3, 2), float(n + 1)) for n in range(4 - 2 * comm.rank)]
        own: list[Tensor] = []
        with run:
            for x in run.batches(loader):
                with run.step(weight=len(x)) as step:
                    step.backward(model(x).sum())
                state = run.state_dict()["model"]
                own.append(state["0.running_mean"].clone())
                assert int(state["0.num_batches_tracked"]) == min(len(own), len(loader))
        assert len(own) == 4
        if comm.rank == 1:
            assert torch.equal(own[1], own[2]) and torch.equal(own[1], own[3])

    run_threads(2, check)


def test_an_error_that_leaves_an_evaluation_is_named_and_the_statistics_are_the_ranks_own() -> None:
    script = Script(SerialCommunicator(), "gradient_averaging")
    words = "`with run.evaluating()` was interrupted by ValueError: no file, so it was only partly done"
    with refused(words), script.run:
        script.train(0, 1)
        before = {name: buffer.clone() for name, buffer in script.model.named_buffers()}
        with pytest.raises(ValueError, match="no file"), script.run.evaluating():
            for buffer in script.model.buffers():
                buffer.zero_()
            raise ValueError("no file")
        after = {name: b for name, b in script.model.named_buffers() if b.is_floating_point()}
        assert after and all(torch.equal(before[name], buffer) for name, buffer in after.items())
        with refused(words):
            script.run.step()


def test_sparse_adam_is_refused_with_what_to_use() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    with refused("SparseAdam needs sparse gradients, but ranks exchange dense ones; use Adam", ConfigError):
        DataParallel(model, torch.optim.SparseAdam(model.parameters()), SerialCommunicator())


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=2,begin=3", "ad_psgd"])
def test_a_layer_may_be_frozen_before_training_and_trained_later(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        model = nn.Sequential(linear(4, 4), linear(4, 1))
        run = DataParallel(model, sgd(model, 0.1), comm, strategy)
        model[0].requires_grad_(False)
        before = values(model[0]).clone()
        with run:
            for number in range(4):
                if number == 2:
                    # A rank at its own pace may have the layer's average with one that trains it already.
                    assert strategy == "ad_psgd" or torch.equal(values(model[0]), before)
                    model[0].requires_grad_(True)
                with run.step(weight=1) as step:
                    step.backward(model(torch.ones(1, 4)).sum())
        assert not torch.equal(values(model[0]), before)

    run_threads(2, check)


def test_a_mask_that_is_expanded_from_fewer_numbers_is_left_alone() -> None:
    def check(comm: Communicator) -> None:
        model = linear()
        model.register_buffer("mask", torch.ones(1, 5).expand(3, 5))
        run = DataParallel(model, sgd(model), comm, "gradient_averaging")
        with run:
            for x in run.batches([torch.ones(1, 4)] * (2 - comm.rank)):
                with run.step(weight=1) as step:
                    step.backward(model(x).sum())
            with run.evaluating():
                pass

    run_threads(2, check)


@pytest.mark.parametrize("first", [True, False])
def test_a_scaler_may_be_turned_on_or_off_between_two_starts(first: bool, tmp_path: Path) -> None:
    def train(*, enabled: bool, resumes: bool) -> None:
        model = linear()
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        run = DataParallel(model, sgd(model), SerialCommunicator(), folder=tmp_path, scaler=scaler)
        assert (run.load_checkpoint() is not None) == resumes
        with run:
            with run.step(weight=1) as step:
                step.backward(model(torch.ones(1, 4)).sum())
            run.save_checkpoint()
            raise KeyboardInterrupt

    for enabled, resumes in ((first, False), (not first, True)):
        with pytest.raises(KeyboardInterrupt):
            train(enabled=enabled, resumes=resumes)


def test_gradients_set_to_none_between_steps_are_still_found() -> None:
    script = Script(SerialCommunicator(), "gradient_averaging")
    with script.run:
        for number in range(NUM_STEPS):
            script.model.zero_grad(set_to_none=True)
            script.step(make_batch(0, number))
    assert_close(values(script.model), plain(batches_of(1)), "zero_grad")


@pytest.mark.parametrize(
    ("mistaken", "words"),
    [
        (lambda loss: None, "None: return the loss"),
        (lambda loss: loss.item(), "the number 2.5: give the tensor, without .item()"),
        (lambda loss: loss.detach(), "a tensor that does not require grad: compute it without detach()"),
        (lambda loss: loss.expand(3), "a tensor of shape [3]: sum it"),
        (lambda loss: (loss, 1), "an object of type tuple"),
    ],
)
def test_what_is_no_loss_is_refused(mistaken: Callable[[Tensor], Any], words: str) -> None:
    model = linear()
    nn.init.constant_(model.weight, 0.5), nn.init.constant_(model.bias, 0.5)
    run = DataParallel(model, sgd(model), SerialCommunicator())
    asked = f"step.backward(loss) takes a scalar tensor that requires grad, and was given {words}"
    with refused(asked, ConfigError), run, run.step() as step:
        step.backward(mistaken(model(torch.ones(1, 4)).sum()))


# -- what is not finite ---------------------------------------------------------------------------------


def spoilt(comm: Communicator, step: int, *, at: int) -> float:
    """Return what a loss is multiplied by: one is NaN, on the last rank."""
    return math.nan if comm.rank == comm.size - 1 and step == at else 1.0


def is_complete(folder: Path) -> bool:
    assert (folder / "run.json").is_file()
    return (folder / "completed.json").exists()


@pytest.mark.parametrize(
    "strategy", ["gradient_averaging", "model_averaging:period=4", "parameter_server:mode=sync"]
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_is_not_finite_ends_all_ranks(strategy: str, size: int, tmp_path: Path) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, strategy, sgd, options={"folder": tmp_path})
        script.loss = lambda model, batch: loss_sum(model, batch) * spoilt(comm, script.run.steps, at=5)
        with script.run:
            script.train(last=2)
            script.run.save_checkpoint()
            script.train(first=2)

    with refused(
        f"the loss is nan at step 6 on rank {size - 1}: lower the learning rate, clip gradients by a lower "
        f"max_gradient_norm= of DataParallel, or inspect the data; last checkpoint: {tmp_path}/checkpoints/",
        DivergedError,
    ):
        run_threads(size, check)
    assert not is_complete(tmp_path)


def test_a_rank_that_the_strategy_leaves_out_goes_on(tmp_path: Path) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, "model_averaging:period=3,leave_out=1", sgd, options={"folder": tmp_path})
        script.loss = lambda model, batch: loss_sum(model, batch) * spoilt(comm, script.run.steps, at=4)
        with script.run:
            script.train(last=5)
            assert bool(values(script.model).isfinite().all()) == (comm.rank == 0)
            script.run.save_checkpoint()
            script.train(first=5)
        assert bool(values(script.model).isfinite().all())

    run_threads(2, check)
    assert is_complete(tmp_path)


def scaled(comm: Communicator, *, at: Callable[[int], bool], enabled: bool = True) -> Tensor:
    """Train with a scaler and a loss that is not finite at some steps; return the parameters."""
    model = linear()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    run = DataParallel(model, sgd(model, 0.01), comm, scaler=scaler)
    with run:
        for number in range(20):
            with run.step(weight=1) as step:
                step.backward(model(torch.ones(1, 4)).sum() * (math.nan if at(number) else 1.0))
    return values(model)


def test_an_overflow_that_a_scaler_leaves_out_does_not_end_the_run() -> None:
    assert bool(scaled(SerialCommunicator(), at=lambda number: number % 2 == 0).isfinite().all())


def test_updates_between_which_others_are_taken_may_bring_the_scale_down_as_well() -> None:
    with refused("have reduced the scale of the GradScaler to 0.00195312 at step 16", DivergedError):
        scaled(SerialCommunicator(), at=lambda number: number % 3 != 2)


def test_a_scale_at_which_nothing_is_a_number_does() -> None:
    with refused(
        "non-finite gradients have reduced the scale of the GradScaler to "
        "0.00195312 at step 11 on rank 0: compute in bfloat16 or float32, lower the learning rate",
        DivergedError,
    ):
        scaled(SerialCommunicator(), at=lambda number: number >= 0)


def test_a_scaler_that_is_not_enabled_leaves_nothing_out() -> None:
    with refused("the loss is nan at step 4 on rank 0", DivergedError):
        scaled(SerialCommunicator(), at=lambda number: number == 3, enabled=False)


@pytest.mark.parametrize("ends", ["evaluating", "save_checkpoint", "the block", "step 21"])
def test_on_a_gpu_losses_are_looked_at_together(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for them where it looks.  The gradients here are finite: the loss alone is not."""
    begin = DivergenceWatch.__init__

    def waiting(watch: DivergenceWatch, *given: Any) -> None:
        begin(watch, *given)
        watch._waits = True

    monkeypatch.setattr(DivergenceWatch, "__init__", waiting)
    model = linear()
    run = DataParallel(model, sgd(model, 0.01), SerialCommunicator(), folder=tmp_path)
    seen_at = 21 if ends == "step 21" else 5
    with refused(f"the loss is nan at step {seen_at} on rank 0", DivergedError), run:
        for number in range(seen_at):
            assert number == run.steps
            with run.step(weight=1) as step:
                step.backward(model(torch.ones(1, 4)).sum() + (math.nan if number == 2 else 0.0))
        if ends == "evaluating":
            with run.evaluating():
                raise AssertionError("it is evaluated")
        if ends == "save_checkpoint":
            run.save_checkpoint()
    assert not is_complete(tmp_path) and not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.parametrize("saves", ["", "save", "save_checkpoint", "state_dict"])
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_that_are_not_finite_are_neither_saved_nor_final(
    size: int, saves: str, tmp_path: Path
) -> None:
    """The loss was finite to the last: the update was not."""
    file = tmp_path / "model.pt"

    def check(comm: Communicator) -> None:
        model = linear()
        run = DataParallel(model, sgd(model, math.inf), comm, folder=tmp_path / "run")
        with run:
            with run.step(weight=1) as step:
                step.backward(model(torch.ones(1, 4)).sum())
            if saves == "save":
                run.save(file)
            elif saves:
                getattr(run, saves)()

    words = {
        "": "a parameter of the final model is not finite after step 1 on rank ",
        "save": f"{file} is not written: the model's weight is not finite after step 1 on rank 0: lower",
    }
    with refused(words.get(saves, "a parameter is not finite after step 1 on rank "), DivergedError):
        run_threads(size, check)
    assert not is_complete(tmp_path / "run") and not file.exists()


@pytest.mark.parametrize(
    "strategy", ["model_averaging:period=3", "delayed_averaging:period=2", "bmuf:period=3"]
)
@pytest.mark.parametrize("saved_after", [None, 2])
def test_a_script_ends_with_the_mean_of_its_last_models(strategy: str, saved_after: int | None) -> None:
    """As docs/api.md says how: by torch's AveragedModel, of what evaluations show and of the final model."""
    num_epochs, of_epoch = 4, 2

    def trained(comm: Communicator) -> tuple[Tensor, Tensor]:
        script, state, epochs = Script(comm, strategy), None, range(num_epochs)
        averaged, shown = AveragedModel(script.model, use_buffers=True), []
        for part in [epochs] if saved_after is None else [epochs[:saved_after], epochs[saved_after:]]:
            if state is not None:
                script = Script(comm, strategy)
                averaged = AveragedModel(script.model, use_buffers=True)
                script.run.load_state_dict(state["run"])
                script.scheduler.load_state_dict(state["scheduler"])
                averaged.load_state_dict(state["averaged"])
            with script.run:
                for epoch in part:
                    script.train(of_epoch * epoch, of_epoch * (epoch + 1))
                    if 1 <= epoch < num_epochs - 1:  # the last three, of which the very last comes after all
                        with script.run.evaluating():
                            averaged.update_parameters(script.model)
                            shown.append(values(script.model))
                kept = {"run": script.run.state_dict(), "scheduler": script.scheduler.state_dict()}
                state = copy.deepcopy({**kept, "averaged": averaged.state_dict()})
        averaged.update_parameters(script.model)
        shown.append(values(script.model))
        script.model.load_state_dict(averaged.module.state_dict())
        assert_bitwise_equal_over_ranks(comm, values(script.model), strategy)
        return values(script.model), torch.stack(shown).mean(0)

    for mean, expected in run_threads(2, trained):
        assert_close(mean, expected, strategy)


@pytest.mark.parametrize("period", [1, 2])
def test_weight_decay_of_neighbours_is_of_the_averaged_parameters(period: int) -> None:
    """x_i = (mean x_j) - update of the gradient at x_i, and of that mean by weight decay (strategies.md)."""

    def decayed(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9, weight_decay=0.3
        )

    models = [make_model(batch_norm=False) for _ in range(2)]
    optimizers = [decayed(model) for model in models]
    for step in range(NUM_STEPS):
        for rank, model in enumerate(models):
            batch = make_batch(rank, step)
            model.zero_grad()
            (loss_sum(model, batch) / len(batch[0])).backward()  # type: ignore[no-untyped-call]
        if step > 0 and step % period == 0:
            with torch.no_grad():
                for one, other in zip(*(model.parameters() for model in models), strict=True):
                    mean = (one + other) / 2
                    one.copy_(mean)
                    other.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:  # the script's scheduler
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** ((step + 1) // 3)
    expected = (values(models[0]) + values(models[1])) / 2

    def trained(comm: Communicator) -> Tensor:
        return Script(comm, f"dpsgd:period={period}", decayed, batch_norm=False).trained()

    for found in run_threads(2, trained):
        assert_close(found, expected, f"period {period}")
