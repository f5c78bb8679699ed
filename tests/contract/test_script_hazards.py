"""What scripts do to models, optimizers and steps: it works as in torch, or a line says what is wrong."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from speechdp import DataParallel, run_ranks
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import CommunicationError, ConfigError, RunError
from speechdp.parallel.batch_statistics import refuse_unsynchronised
from speechdp.parallel.replica import Replica
from speechdp.testing import StrategyRun, assert_bitwise_equal_over_ranks, assert_close, make_replica
from tests.helpers.own_script import SYNCHRONOUS, Script, loss_sum, make_batch, sgd, values


@contextmanager
def refused(words: str, kind: type[Exception] = RunError) -> Iterator[None]:
    with pytest.raises(kind, match=re.escape(words)) as error:
        yield
    assert "\n" not in str(error.value)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(model: nn.Module) -> nn.Module:
    """Return a model in double precision whose parameters are the same on every rank and each time."""
    with torch.no_grad():
        for number, parameter in enumerate(model.double().parameters()):
            parameter.copy_(drawn(number, *parameter.shape) / 2)
    return model


# -- steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=1"])
def test_the_loss_of_a_step_of_no_weight_has_no_gradients(strategy: str) -> None:
    """Gradient averaging added them to the others' sum, averages of parameters left them out."""

    def check(comm: Communicator) -> Tensor:
        script = Script(comm, strategy)
        with script.run, script.run.step(weight=3 - 3 * comm.rank) as step:
            loss = loss_sum(script.model, make_batch(0, 0))
            step.backward(loss if comm.rank == 0 else 1e3 * loss)
        return values(script.model).clone()

    def without(comm: Communicator) -> Tensor:
        script = Script(comm, strategy)
        with script.run, script.run.step(weight=3) as step:
            step.backward(loss_sum(script.model, make_batch(0, 0)))
        return values(script.model).clone()

    (alone,) = run_threads(1, without)
    for found in run_threads(2, check):
        assert_close(found, alone, strategy)


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
def test_a_step_of_no_weight_leaves_the_model_alone_also_where_a_gpu_has_the_count(
    max_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[type] = []
    apply = Replica.apply_gradients

    def noting(replica: Replica, frames: float | Tensor) -> None:
        given.append(type(frames))
        apply(replica, frames)

    monkeypatch.setattr(Replica, "apply_gradients", noting)
    monkeypatch.setattr(Tensor, "is_cuda", True)

    def check(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", options={"max_gradient_norm": max_norm})
        with script.run:
            script.train(0, 2)
            before = values(script.model)
            with script.run.step(weight=0):
                pass
            assert torch.equal(values(script.model), before)
            with script.run.step(weight=3 - 3 * comm.rank) as step:
                if comm.rank == 0:
                    step.backward(loss_sum(script.model, make_batch(0, 0)))
            assert not torch.equal(values(script.model), before)
        assert_bitwise_equal_over_ranks(comm, values(script.model), "gradient_averaging")

    run_threads(2, check)
    # The host has waited for the count only where it may have been 0.
    assert Counter(given) == {Tensor: 6, float: 2}


@pytest.mark.parametrize(("size", "others"), [(1, ""), (2, ", and the other ranks wait for its exchange")])
def test_a_step_that_an_error_has_left_ends_the_run(size: int, others: str, tmp_path: Path) -> None:
    error = "ValueError: out of memory, so it was only partly done"
    words = f"`with run.step()` was interrupted by {error}{others}: let such an error end the run"

    def check(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", options={"folder": tmp_path})
        run = script.run
        with refused(words), run:
            script.train(0, 1)
            with pytest.raises(ValueError, match="memory"), run.step(weight=3) as step:
                step.backward(loss_sum(script.model, make_batch(0, 0)), last=False)
                raise ValueError("out of\nmemory")
            for call in (run.step, run.state_dict, run.save_checkpoint, lambda: run.should_stop):
                with refused(words):
                    call()
            with refused(words), run.evaluating():
                pass

    run_threads(size, check)
    assert not (tmp_path / "completed.json").exists()


def test_a_step_that_lacks_its_last_pass_is_one_that_an_error_has_left() -> None:
    script = Script(SerialCommunicator(), "gradient_averaging")
    words = "`with run.step()` was interrupted by RunError: the step ended without its last backward pass"
    with refused(words), script.run:
        script.train(0, 1)
        with refused("the step ended without"), script.run.step(weight=2):
            pass


@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize("strategy", ["model_averaging:period=12f,begin=20f", "bmuf:period=2,begin=99f"])
def test_frames_are_counted_at_the_same_place_where_a_rank_only_joins(
    strategy: str, with_length: bool
) -> None:
    """Its gradients are exchanged after its step, those of the others while they compute."""

    def check(comm: Communicator) -> None:
        script = Script(comm, strategy)
        batches = [make_batch(comm.rank, step) for step in range(2 + 4 * comm.rank)]
        with script.run:
            for batch in script.run.batches(batches if with_length else (b for b in batches)):
                with script.run.step(weight=len(batch[0])) as step:
                    step.backward(loss_sum(script.model, batch))
        assert script.run.steps == 6
        assert_bitwise_equal_over_ranks(comm, values(script.model), strategy)

    run_threads(2, check)


# -- parameters -----------------------------------------------------------------------------------------


def flatten(model: nn.Module, *_: object) -> None:
    """Do as `flatten_parameters` does on a GPU: give parameters another memory, with the same values."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.set_(parameter.clone())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_parameters_that_a_forward_pass_moves_are_trained_and_exchanged(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        moving, other = Script(comm, strategy), Script(comm, strategy)
        moving.model.register_forward_pre_hook(flatten)
        for script in (moving, other):
            with script.run:
                for first in (0, 3):
                    script.train(first, first + 3)
                    with script.run.evaluating():
                        script.model(make_batch(0, 0)[0])
                    script.run.state_dict()
        assert torch.equal(values(moving.model), values(other.model)), strategy

    run_threads(2, check)


def test_so_they_are_where_the_optimizer_has_the_flat_vector() -> None:
    """As in `speechdp train`, with a task of a user's."""

    def check(comm: Communicator) -> None:
        replicas = [make_replica(), make_replica()]
        replicas[0].model.register_forward_pre_hook(flatten)
        runs = [StrategyRun(comm, "model_averaging:period=2", replica) for replica in replicas]
        for run in runs:
            run.train(comm.rank)
        assert torch.equal(runs[0].finish(), runs[1].finish())
        for replica in replicas:
            shown = torch.cat([p.detach().flatten() for p in replica.model.parameters()])
            assert sorted(shown.tolist()) == sorted(x for x in replica.parameters.values.tolist() if x)

    run_threads(2, check)


class Flattened(nn.Module):
    """An LSTM that is flattened at each use, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        out: Tensor = self.lstm(x)[0]
        return out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_lstm_that_is_flattened_in_its_forward_pass_is_trained_on_a_gpu() -> None:
    def trained(model: nn.Module) -> Tensor:
        run = DataParallel(
            model, torch.optim.SGD(model.parameters(), 0.1), SerialCommunicator(), "bmuf:period=2,eta=0.3"
        )
        device = next(model.parameters()).device
        with run:
            for number in range(4):
                with run.step(weight=3) as step:
                    step.backward(model(drawn(number, 7, 3, 4).to(device)).square().sum())
        return values(model).cpu()

    assert_close(trained(filled(Flattened()).cuda()), trained(filled(Flattened())), "flattened")


def test_what_a_script_sets_between_steps_is_trained_on() -> None:
    script = Script(SerialCommunicator(), "gradient_averaging", batch_norm=False)
    reference = Script(SerialCommunicator(), "gradient_averaging", batch_norm=False)
    with script.run, reference.run, torch.no_grad():
        for number in range(4):
            for each in (script, reference):
                with torch.enable_grad():
                    each.step(make_batch(0, number))
            for p, q in zip(script.model.parameters(), reference.model.parameters(), strict=True):
                p.data = p.data.clamp(-0.2, 0.2)
                q.clamp_(-0.2, 0.2)
        assert torch.equal(values(script.model), values(reference.model))


def test_another_memory_format_does_not_stop_training() -> None:
    """Modules move the memory of gradients with that of their parameters."""

    def trained(*, moves: bool) -> Tensor:
        model = filled(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 1)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = DataParallel(model, optimizer, SerialCommunicator(), "gradient_averaging:every=2")
        with run:
            for number in range(4):
                x = drawn(number, 3, 2, 3, 3)
                with run.step(weight=3) as step:
                    step.backward(model(x).square().sum())
                if moves:
                    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return values(model)

    assert_close(trained(moves=True), trained(moves=False), "channels last")


def test_a_model_that_is_converted_too_late_is_refused() -> None:
    script = Script(SerialCommunicator(), "gradient_averaging")
    words = (
        "the model's first.weight is now float32 of shape [6, 4] on cpu, but ranks exchange it as "
        "float64 of shape [6, 4] on cpu; change type, device and shapes"
    )
    with refused(words), script.run:
        script.train(0, 1)
        script.model.float()
        script.run.step().__enter__()
    before = Script(SerialCommunicator(), "gradient_averaging")
    before.model.float()
    with refused(words), before.run:
        pass


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(dtype)
    name = str(dtype).removeprefix("torch.")
    words = f"the model's trainable parameters are {name} on cpu, a type in which sums over ranks"
    with refused(words, ConfigError):
        DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), SerialCommunicator())
    model.requires_grad_(False)  # frozen ones may be
    whole = nn.Sequential(model, nn.Linear(2, 2))
    DataParallel(whole, torch.optim.SGD(whole.parameters(), 0.1), SerialCommunicator())


def test_a_model_that_exchanges_by_itself_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        for model, which in ((wrapped, "the model"), (nn.Sequential(wrapped), "the model's 0")):
            with refused(f"{which} is a torch DistributedDataParallel, which exchanges", ConfigError):
                DataParallel(model, sgd(model), SerialCommunicator())
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_that_would_exchange_by_itself_is_told_without_a_process_group_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match=r"^1$"):
        run_ranks(lambda comm: nn.parallel.DistributedDataParallel(nn.Linear(3, 2)), backend="serial")
    said = capsys.readouterr().err
    assert said.startswith("speechdp: the script uses a process group of torch.distributed, as Distributed")
    assert said.endswith("to speechdp.DataParallel, which replaces DistributedDataParallel\n")
    with pytest.raises(SystemExit, match=r"^70$"):  # another ValueError stays the script's own
        run_ranks(lambda comm: int("x"), backend="serial")
    assert "ended by an unexpected ValueError: invalid literal" in capsys.readouterr().err


def test_what_no_group_has_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """As with a second optimizer, which finds no gradients between the steps."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    DataParallel(model, sgd(model), SerialCommunicator())
    assert "are not trained" not in capsys.readouterr().err
    DataParallel(model, sgd(model[0]), SerialCommunicator())
    told = "does not have 1.weight, 1.bias, 2.weight and 1 more, so these parameters are not trained"
    assert told in capsys.readouterr().err


def test_normalisation_that_would_not_exchange_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's SyncBatchNorm is a BatchNorm where there is no process group, and says nothing."""

    def make(strategy: str) -> Callable[[Communicator], DataParallel]:
        def of_rank(comm: Communicator) -> DataParallel:
            layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
            model = nn.SyncBatchNorm.convert_sync_batchnorm(layers)
            return DataParallel(model, sgd(model), comm, strategy)

        return of_rank

    make("gradient_averaging")(SerialCommunicator())  # statistics of all batches there are
    words = "the model's 1 is a torch SyncBatchNorm, which works only with torch.distributed ("
    with refused(words, ConfigError):
        run_threads(2, make("gradient_averaging"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with refused("on GPUs, and if all ranks step together; use BatchNorm instead", ConfigError):
        run_threads(2, make("gradient_averaging"))


@pytest.mark.parametrize("together", [True, False])
def test_normalisation_exchanges_where_ranks_on_gpus_step_together(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    model = nn.SyncBatchNorm(2, device="meta")  # no GPU is needed to be none of the CPU's
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def look(comm: Communicator) -> None:
        refuse_unsynchronised(model, comm, together=together)

    if together:
        run_threads(2, look)
        return
    with refused("the model's only layer is a torch SyncBatchNorm", ConfigError):
        run_threads(2, look)


def test_complex_parameters_are_refused_before_training() -> None:
    """Some back-ends' sums would refuse them too, but with some strategies only after the last step."""
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with refused(
        "the model's trainable parameters are complex64 on cpu; DataParallel takes float32", ConfigError
    ):
        DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), SerialCommunicator())


def test_parameters_without_a_shape_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with refused("the model's 1.weight has no shape yet", ConfigError):
        DataParallel(model, optimizer, SerialCommunicator())
    model(torch.ones(1, 2))
    DataParallel(model, optimizer, SerialCommunicator())


# -- the optimizer --------------------------------------------------------------------------------------


def test_what_is_unfrozen_too_late_is_refused() -> None:
    script = Script(SerialCommunicator(), "gradient_averaging")  # its optimizer lists the frozen layer
    with script.run:
        script.train(0, 1)
        script.model.frozen.bias.requires_grad_(True)
        with refused("the optimizer is to train the model's frozen.bias, which was frozen or missing when"):
            script.train(1, 2)
        script.model.frozen.bias.requires_grad_(False)
        script.train(1, 2)
        script.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 3))]})
        with refused("the optimizer is to train a parameter of shape [2, 3], which was frozen or missing"):
            script.train(2, 3)


def test_a_parameter_in_the_place_of_another_is_refused() -> None:
    """As many as before: nobody would exchange it, and each rank end with one of its own."""
    script = Script(
        SerialCommunicator(), "gradient_averaging", lambda m: torch.optim.SGD(m.parameters(), 0.1)
    )
    words = "the optimizer is to train the model's last.weight, which was frozen or missing when"
    with refused(words), script.run:
        script.train(0, 1)
        listed = script.optimizer.param_groups[0]["params"]
        place = next(i for i, p in enumerate(listed) if p is script.model.last.weight)
        listed[place] = script.model.last.weight = nn.Parameter(script.model.last.weight.detach().clone())
        script.train(1, 2)


def _evaluates(script: Script) -> None:
    with script.run.evaluating():
        pass


@pytest.mark.parametrize(
    "call",
    [_evaluates, lambda script: script.run.state_dict(), lambda script: None],
    ids=["evaluating", "state_dict", "end"],
)
def test_a_parameter_that_comes_late_and_that_nobody_trains_is_refused(
    call: Callable[[Script], object],
) -> None:
    """As a new head does that is not the optimizer's: each rank would keep one of its own."""
    words = "last.weight did not exist when DataParallel was created, so ranks neither train nor exchange"
    before = Script(SerialCommunicator(), "gradient_averaging")
    before.model.last = nn.Linear(6, 3).double()
    with refused(words), before.run:
        pass
    script = Script(SerialCommunicator(), "gradient_averaging")
    with refused(words), script.run:
        script.train(0, 1)
        script.model.last = nn.Linear(6, 3).double()
        call(script)


def test_the_remedies_for_parameters_that_come_late_help() -> None:
    late = Script(SerialCommunicator(), "gradient_averaging")
    weight_norm(late.model.last)
    words = "(layers, weight_norm) before creating DataParallel, or call requires_grad_(False) on what is"
    with refused(words), late.run:
        pass
    script = Script(SerialCommunicator(), "gradient_averaging")
    script.model.copy = copy.deepcopy(script.model.last).requires_grad_(False)
    prune.l1_unstructured(script.model.last, "weight", 0.5)  # the same parameter, by another name
    with script.run:
        script.train(0, 1)


def test_what_is_frozen_may_come_late() -> None:
    script = Script(SerialCommunicator(), "gradient_averaging")
    script.model.late = nn.Linear(6, 3).double().requires_grad_(False)
    with script.run:
        script.train(0, 1)


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    model, comm = nn.Linear(2, 2), SerialCommunicator()
    with refused("the optimizer is of type list, not a torch.optim.Optimizer; give one for", ConfigError):
        DataParallel(model, [sgd(model)], comm)  # type: ignore[arg-type]
    with refused("the model is of type function, not a torch.nn.Module; give the module", ConfigError):
        DataParallel(lambda x: x, sgd(model), comm)  # type: ignore[arg-type]
    empty = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    with refused("the model's 0.weight is on the meta device, without values; give it values", ConfigError):
        DataParallel(empty, sgd(empty), comm)


@pytest.mark.parametrize("strategy", ["parameter_server", "parameter_server:mode=sync"])
def test_a_group_may_come_while_a_warm_up_stands_at_0(strategy: str) -> None:
    """Where the server goes by the proportions of learning rates, of which there are none then."""

    def check(comm: Communicator) -> None:
        script = Script(comm, strategy, lambda m: torch.optim.SGD(m.get_submodule("last").parameters(), 0.0))
        added = script.model.first.weight
        with script.run:
            script.optimizer.add_param_group({"params": [added], "lr": 0.0})
            before = added.detach().clone()
            script.train(0, 2)
            assert torch.equal(added, before)
            comm.barrier()  # what one rank learns at its own pace another would have, too
            for group in script.optimizer.param_groups:
                group["lr"] = 0.1
            script.train(2, 4)
        assert not torch.equal(added, before)

    run_threads(2, check)


@pytest.mark.parametrize("strategy", ["gradient_averaging", "parameter_server:mode=sync"])
def test_what_the_optimizer_gets_later_is_trained_from_then_on(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, strategy, lambda m: torch.optim.AdamW(m.get_submodule("last").parameters()))
        first = script.model.first.weight.detach().clone()
        with script.run:
            script.train(0, 3)
            assert torch.equal(script.model.first.weight, first)
            script.optimizer.add_param_group({"params": [script.model.first.weight], "lr": 0.01})
            script.train(3, 6)
            assert not torch.equal(script.model.first.weight, first)
        assert_bitwise_equal_over_ranks(comm, values(script.model), strategy)

    run_threads(2, check)


# -- frozen parameters and buffers ----------------------------------------------------------------------


class Furnished(nn.Module):
    """A layer, and beside it what each rank has drawn for itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.frozen = nn.Parameter(torch.full((3,), float(rank)).bfloat16(), requires_grad=False)
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("flags", torch.tensor([[rank == 0, True], [False, rank == 1]]).t())
        self.register_buffer("positions", torch.arange(3).expand(2, 3), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, -float("inf"), float(rank)]))
        self.register_buffer("same", torch.ones(2))
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("drawn", torch.full((2,), float(rank)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        return out


def furnished(comm: Communicator) -> tuple[Furnished, DataParallel]:
    model = Furnished(comm.rank)
    return model, DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), comm, "model_averaging")


def step_of(model: nn.Module, run: DataParallel) -> None:
    x = drawn(run.comm.rank, 4, 2).float() + run.comm.rank
    with run.step(weight=4) as step:
        step.backward(model(x).square().sum())


def test_all_begin_with_what_rank_0_has_beside_its_trainable_parameters() -> None:
    def check(comm: Communicator) -> None:
        model, run = furnished(comm)
        expected = Furnished(0)
        with run:
            for name in ("frozen", "count", "flags", "positions", "mask", "drawn"):
                assert torch.equal(getattr(model, name), getattr(expected, name)), name

    run_threads(3, check)


def test_a_rank_that_goes_on_keeps_its_own() -> None:
    def check(comm: Communicator) -> None:
        model, run = furnished(comm)
        with run:
            step_of(model, run)
            with torch.no_grad():
                model.count += 10 * comm.rank  # type: ignore[operator]
            own = {name: buffer.clone() for name, buffer in model.named_buffers()}
            state = copy.deepcopy(run.state_dict())
        again, goes_on = furnished(comm)
        goes_on.load_state_dict(state)
        with goes_on:
            for name, buffer in again.named_buffers():
                assert torch.equal(buffer, own[name]), name  # `drawn`, which no state has, is rank 0's again

    run_threads(2, check)


def test_ranks_whose_buffers_differ_in_shape_are_refused() -> None:
    def check(comm: Communicator) -> None:
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.zeros(3 + comm.rank))
        with refused("frozen parameters and buffers (names, shapes): ", ConfigError):
            DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), comm)

    run_threads(2, check)


@pytest.mark.parametrize("mask", ["equal", "of its own"])
def test_statistics_are_averaged_and_masks_and_tables_that_grow_are_left_alone(mask: str) -> None:
    def check(comm: Communicator) -> None:
        model, run = furnished(comm)
        with run:
            step_of(model, run)
            own = model.norm.running_mean.clone()  # type: ignore[union-attr]
            model.drawn.fill_(comm.rank)  # type: ignore[operator,union-attr]
            model.table = torch.zeros(2 + comm.rank)
            if mask == "of its own":
                model.mask[2] = comm.rank  # type: ignore[index,operator]
            expected = model.mask.tolist()  # type: ignore[operator,union-attr]
            with run.evaluating():
                shown = model.norm.running_mean.clone()  # type: ignore[union-attr]
                assert model.mask.tolist() == expected  # type: ignore[operator,union-attr]
                assert model.drawn.tolist() == [0.5, 0.5]  # type: ignore[operator,union-attr]
                model.table = torch.zeros(9)
                model.same.zero_()  # type: ignore[operator,union-attr]
            assert model.same.tolist() == [1.0, 1.0] and len(model.table) == 9  # type: ignore[operator,union-attr]
            assert model.drawn.tolist() == [comm.rank] * 2  # type: ignore[operator,union-attr]
            assert torch.equal(model.norm.running_mean, own)  # type: ignore[arg-type]
            mean = comm.allreduce(own.clone(), name="own") / comm.size
            assert torch.allclose(shown, mean) and not torch.allclose(shown, own)

    run_threads(2, check)


# -- checkpointing --------------------------------------------------------------------------------------


class Shared(nn.Module):
    """A layer that is used twice between two others, its activations computed again on the way back."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(self._run(self.middle, x))
        out: Tensor = self.last(x)
        return out


def reentrant(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=True)
    return out


def afresh(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=False)
    return out


def shared_trained(comm: Communicator, run: Callable[..., Tensor], strategy: str) -> Tensor:
    model = filled(Shared(run))
    parallel = DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), comm, strategy)
    with parallel:
        for number in range(3):
            x = drawn(10 * comm.rank + number, 3, 4)
            with parallel.step(weight=3) as step:
                step.backward(model(x).square().sum())
    return values(model)


@pytest.mark.parametrize(
    ("run", "strategy"),
    [
        (afresh, "gradient_averaging:bucket_mib=1e-6"),
        (reentrant, "gradient_averaging:bucket_mib=1e-6,overlap=false"),
        (reentrant, "gradient_averaging"),  # one bucket, which goes with the first layer's gradients
        (reentrant, "gradient_averaging:every=2"),
    ],
)
def test_a_shared_layer_under_checkpointing_is_trained_whole(
    run: Callable[..., Tensor], strategy: str
) -> None:
    def check(comm: Communicator) -> None:
        plainly = "gradient_averaging:every=2" if "every" in strategy else "gradient_averaging"
        expected = shared_trained(comm, lambda module, x: module(x), plainly)
        assert_close(shared_trained(comm, run, strategy), expected, strategy)

    run_threads(2, check)


def test_a_gradient_that_grows_after_it_has_gone_is_refused() -> None:
    def check(comm: Communicator) -> None:
        with refused("checkpoint with use_reentrant=False and call step.backward(loss) alone, or train with"):
            shared_trained(comm, reentrant, "gradient_averaging:bucket_mib=1e-6")
        script = Script(comm, "gradient_averaging", sgd)
        with refused("a gradient changed after its exchange had started"), script.run:
            for number in range(2):
                with script.run.step(weight=3) as step:
                    loss_sum(script.model, make_batch(0, number)).backward()  # type: ignore[no-untyped-call]
                    step.backward(loss_sum(script.model, make_batch(0, number)))

    run_threads(2, check)


# -- calls of one rank alone ----------------------------------------------------------------------------


def evaluates(run: DataParallel) -> None:
    with run.evaluating():
        pass


@pytest.mark.parametrize("strategy", ["gradient_averaging", "easgd"])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (evaluates, "run.evaluating()"),
        (lambda run: run.state_dict(), "run.state_dict()"),
        (lambda run: run.save_checkpoint(), "run.save_checkpoint()"),
        (lambda run: list(run.batches([1])), "run.batches()"),
    ],
)
def test_a_call_of_one_rank_alone_before_the_end_is_refused(
    call: Callable[[DataParallel], object], name: str, strategy: str, tmp_path: Path
) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, strategy, sgd, options={"folder": tmp_path / "run"})
        with script.run as run:
            script.train()
            if comm.rank == 0:
                call(run)

    with refused(f"rank 0 is at {name}, but rank 1 is at the end of `with run`; make the same collective"):
        run_threads(2, check)


def test_a_checkpoint_that_one_rank_alone_loads_is_refused(tmp_path: Path) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", sgd, options={"folder": tmp_path / "run"})
        if comm.rank == 0:
            script.run.load_checkpoint()
        with script.run:
            script.train()

    with refused("rank 0 is at run.load_checkpoint(), but rank 1 is at the beginning of `with run`; make"):
        run_threads(2, check)


def test_a_call_of_one_rank_alone_while_another_takes_a_step_is_named() -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", sgd)
        with script.run as run:
            script.train()
            if comm.rank == 0:
                evaluates(run)
            script.train()

    with pytest.raises(CommunicationError, match=r"rank 0 calls allgather at run\.evaluating\(\)[,;] "):
        run_threads(2, check)


@pytest.mark.parametrize("of_its_own", ["the script's own", 7])
def test_what_is_no_call_is_told_from_one(of_its_own: object) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", sgd)
        with script.run as run:
            if comm.rank == 0:
                evaluates(run)
            else:
                comm.allgather_object(of_its_own)
                comm.barrier()

    with refused("rank 0 is at run.evaluating(), but rank 1 is at another exchange; make the same"):
        run_threads(2, check)


def test_rank_0_alone_saves_the_model(tmp_path: Path) -> None:
    """As in scripts written for torch's DistributedDataParallel: `save` waits for nobody."""

    def check(comm: Communicator) -> None:
        script = Script(comm, "bmuf", sgd)
        with script.run as run:
            script.train()
            if comm.rank == 0:
                run.save(tmp_path / "within.pt")
            with run.evaluating():
                if comm.rank == 0:
                    run.save(tmp_path / "evaluated.pt")
            script.train()
        if comm.rank == 0:
            run.save(tmp_path / "after.pt")

    run_threads(2, check)
    assert len(list(tmp_path.iterdir())) == 3
