"""Half precision over ranks as threads: overflows, loss scales, states, and what it is equal to."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.models.precision import Precision, PrecisionName
from speechdp.parallel.loss_scale import FIRST_SCALE, begin, hand_over, make_scaler
from speechdp.parallel.registry import parse_strategy
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Progress
from speechdp.parallel.training_step import TrainingStep
from speechdp.testing.strategies import assert_bitwise_equal_over_ranks
from speechdp.timing.timeline import Timeline

CPU = torch.device("cpu")
_GENERATOR = threading.Lock()
#: Ranks take their steps together, and hold the same bits after each.
TOGETHER = (
    "gradient_averaging",
    "gradient_averaging:every=2",
    "gradient_averaging:compression=fp16",
    "gradient_averaging:overlap=false,bucket_mib=0.0001",
    "gradient_averaging:compression=powersgd,rank=1",
    "parameter_server:mode=sync",
    "model_averaging:period=2,begin=100",
)
APART = (
    "model_averaging:period=3",
    "model_averaging:period=3,momentum=average",
    "model_averaging:period=2,compression=int8",
    "model_averaging:period=2,between_nodes=4,node_size=1",
    "gradient_averaging:between_nodes=3,node_size=1",
    "bmuf:period=2",
    "slowmo:period=2",
    "diloco:period=2",
    "delayed_averaging:period=2",
    "delayed_averaging:period=2,compression=int8",
    "dpsgd",
    "dpsgd:compression=int4",
    "easgd:mode=sync,period=2",
    "adaptive_averaging:period=2",
)
AT_THEIR_OWN_PACE = ("ad_psgd", "easgd:period=2", "parameter_server")
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, fused=True),
}


def make_model() -> nn.Sequential:
    # torch's generator is one for all threads, and here each thread is a rank.
    with _GENERATOR, torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    frames = 8 + rank
    return torch.randn(frames, 5, generator=generator), torch.randint(4, (frames,), generator=generator)


def summed_loss(model: nn.Module, data: tuple[Tensor, Tensor], precision: Precision) -> Tensor:
    with precision.computing():
        return nn.functional.cross_entropy(model(data[0]).float(), data[1], reduction="sum")


class Run:
    """A strategy at work on a small model in half precision."""

    def __init__(
        self,
        comm: Communicator,
        strategy: str,
        precision: PrecisionName = "fp16",
        optimizer: str = "sgd",
        growth_interval: int = 2000,
    ) -> None:
        self.precision = Precision(precision, CPU)
        scaler = make_scaler(CPU) if self.precision.scales_losses else None
        if scaler is not None:
            scaler.set_growth_interval(growth_interval)
        self.replica = Replica(make_model(), OPTIMIZERS[optimizer], max_gradient_norm=1.0, scaler=scaler)
        self.comm = comm
        self.timeline = Timeline(None, rank=comm.rank, device=CPU)
        self.strategy = parse_strategy(strategy).attach(self.replica, comm, self.timeline)
        self.strategy.resume()
        self.steps = 0

    @property
    def scale(self) -> float:
        assert self.replica.scaler is not None
        return self.replica.scaler.get_scale()

    def step(self, *, factor: float = 1.0) -> None:
        """Take a step; with a large `factor` its gradients overflow float16, and no float32."""
        data = batch(self.comm.rank, self.steps)
        step = TrainingStep(self.strategy, self.timeline, len(data[0]))
        step.begin()
        step.backward(summed_loss(self.replica.model, data, self.precision) * factor)
        self.steps += 1
        step.end(Progress(self.steps, 10.0 * self.steps, 0.0, self.steps / 8), number=self.steps)

    def values(self) -> Tensor:
        return self.replica.parameters.values.clone()

    def finish(self) -> Tensor:
        self.strategy.pause()
        self.strategy.finish()
        self.strategy.close()
        return self.values()

    def state(self) -> dict[str, object]:
        self.strategy.pause()
        scaler = self.replica.scaler
        state = copy.deepcopy({
            "values": self.values(),
            "optimizer": self.replica.optimizer_tensors(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "strategy": self.strategy.state_dict(),
            "steps": self.steps,
        })  # fmt: skip
        self.strategy.resume()
        return state

    def load(self, state: dict[str, object]) -> None:
        self.strategy.pause()
        self.replica.parameters.values.copy_(state["values"])  # type: ignore[arg-type]
        self.replica.load_optimizer_tensors(state["optimizer"])  # type: ignore[arg-type]
        if self.replica.scaler is not None:
            self.replica.scaler.load_state_dict(state["scaler"])  # type: ignore[arg-type]
        self.strategy.load_state_dict(state["strategy"])  # type: ignore[arg-type]
        self.steps = state["steps"]  # type: ignore[assignment]
        self.strategy.resume()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", TOGETHER)
def test_an_overflow_on_one_rank_skips_the_update_of_all(strategy: str, optimizer: str) -> None:
    def check(comm: Communicator) -> None:
        run = Run(comm, strategy, optimizer=optimizer)
        passes = 2 if "every=2" in strategy else 1
        for _ in range(2):
            run.step()
        before, state = run.values(), {k: v.clone() for k, v in run.replica.optimizer_tensors().items()}
        sent = comm.sent_bytes
        run.step(factor=1e6 if comm.rank == 1 else 1.0)
        overflow_bytes = round(comm.sent_bytes - sent)
        for _ in range(passes - 1):
            run.step()
        assert torch.equal(run.values(), before), "an update with an overflow moved the parameters"
        if strategy != "parameter_server:mode=sync":  # there the server's is the only one
            for name, tensor in run.replica.optimizer_tensors().items():
                assert torch.equal(tensor, state[name]), f"an overflow changed the optimizer's {name}"
        assert run.scale == FIRST_SCALE / 2
        sent = comm.sent_bytes
        for _ in range(passes):
            run.step()
        # Of factors the second half is not sent at all.
        assert round(comm.sent_bytes - sent) >= overflow_bytes, "an overflow costs a message"
        assert not torch.equal(run.values(), before)
        assert_bitwise_equal_over_ranks(comm, run.values(), strategy)
        run.finish()

    run_threads(3, check)


@pytest.mark.parametrize("strategy", APART + AT_THEIR_OWN_PACE)
def test_ranks_that_train_apart_skip_their_own_updates(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        run = Run(comm, strategy)
        run.step(factor=1e6 if comm.rank == 1 else 1.0)
        assert run.scale == FIRST_SCALE / (2 if comm.rank == 1 else 1)
        for _ in range(6):
            run.step()
        assert run.scale == FIRST_SCALE / (2 if comm.rank == 1 else 1)
        final = run.finish()
        assert bool(final.isfinite().all())
        assert_bitwise_equal_over_ranks(comm, final, strategy)

    run_threads(3, check)


def test_gradients_are_handed_over_without_their_scale_unless_they_have_overflowed() -> None:
    scaler, taken = make_scaler(CPU), list[Tensor]()
    begin(scaler, CPU)

    def hand(scaler: torch.amp.GradScaler | None, values: list[float]) -> None:
        gradients = torch.tensor(values)
        hand_over(scaler, gradients, lambda: taken.append(gradients.clone()))

    hand(scaler, [2 * FIRST_SCALE, -3 * FIRST_SCALE])
    hand(scaler, [1.0, math.inf])
    assert scaler.get_scale() == FIRST_SCALE / 2
    hand(scaler, [FIRST_SCALE, 0.0])
    hand(None, [5.0, 6.0])
    assert [each.tolist() for each in taken] == [[2.0, -3.0], [2.0, 0.0], [5.0, 6.0]]


def test_an_overflow_on_one_rank_skips_the_update_of_its_node_alone() -> None:
    def check(comm: Communicator) -> None:
        strategy = "gradient_averaging:between_nodes=4,node_size=2"
        run, in_its_node = Run(comm, strategy), comm.rank < 2
        run.step()
        before = run.values()
        run.step(factor=1e6 if comm.rank == 1 else 1.0)
        assert torch.equal(run.values(), before) == in_its_node
        scale = FIRST_SCALE / 2 if in_its_node else FIRST_SCALE
        assert run.scale == scale
        run.step()
        assert not torch.equal(run.values(), before)
        of_all = [torch.tensor(values) for values in comm.allgather_object(run.values().tolist())]
        assert [torch.equal(of_all[0], other) for other in of_all] == [True, True, False, False]
        assert torch.equal(of_all[2], of_all[3])
        run.step()  # and the average between nodes
        assert_bitwise_equal_over_ranks(comm, run.values(), strategy)
        assert run.scale == scale, "an average between nodes changed a scale"
        run.finish()

    run_threads(4, check)


@pytest.mark.parametrize("strategy", APART[:1])
def test_the_rank_that_skips_stays_where_it_is_and_the_others_do_not(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        run = Run(comm, strategy)
        run.step()
        before = run.values()
        run.step(factor=1e6 if comm.rank == 1 else 1.0)
        assert torch.equal(run.values(), before) == (comm.rank == 1)
        run.finish()

    run_threads(2, check)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_rank_without_a_finite_loss_is_left_out_and_begins_anew(precision: PrecisionName) -> None:
    """Its parameters are a million times too large: the average must be that of the others."""

    def check(comm: Communicator) -> None:
        run = Run(comm, "model_averaging:period=2,leave_out=1", precision)
        if comm.rank == 1:
            run.replica.parameters.values.fill_(1e6)
        for _ in range(2):
            run.step(factor=math.inf if comm.rank == 1 else 1.0)
        assert run.strategy.statistics() == {"times_left_out": int(comm.rank == 1)}
        assert float(run.values().abs().max()) < 10
        assert precision == "bf16" or run.scale == FIRST_SCALE
        run.finish()

    run_threads(3, check)


@pytest.mark.parametrize("saved_after", [1, 2])
def test_an_overflow_among_finite_losses_leaves_no_rank_out(saved_after: int) -> None:
    """Also where the loss before or after it comes from a checkpoint."""

    def check(comm: Communicator) -> None:
        run = Run(comm, "model_averaging:period=3,leave_out=1")
        for step in range(3):
            run.step(factor=math.inf if comm.rank == 1 and step == 1 else 1.0)
            if step + 1 == saved_after:
                state, run = run.state(), Run(comm, "model_averaging:period=3,leave_out=1")
                run.load(state)
        assert run.strategy.statistics() == {"times_left_out": 0}
        assert run.scale == FIRST_SCALE / (2 if comm.rank == 1 else 1)
        run.finish()

    run_threads(2, check)


def test_a_scale_that_is_reset_is_the_first_also_after_a_checkpoint() -> None:
    def check(comm: Communicator) -> None:
        strategy = "model_averaging:period=4,leave_out=1"
        first, second = Run(comm, strategy), Run(comm, strategy)
        for _ in range(2):
            first.step(factor=math.inf if comm.rank == 1 else 1.0)
        second.load(first.state())
        for _ in range(2):
            second.step(factor=math.inf if comm.rank == 1 else 1.0)
        assert second.strategy.statistics() == {"times_left_out": int(comm.rank == 1)}
        assert second.scale == FIRST_SCALE
        first.strategy.close()
        second.finish()

    run_threads(2, check)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_adaptive_rule_goes_by_finite_losses_alone(lost: int) -> None:
    def check(comm: Communicator) -> None:
        run = Run(comm, "adaptive_averaging:period=2,interval=1,halve=false")
        observer = run.strategy.observer
        assert observer is not None
        for step in range(4):
            run.strategy.before_backward(10)
            loss = math.inf if step % 2 == lost else 40.0 if step < 2 else 10.0
            observer.observe_loss(torch.tensor(loss), 10)
            run.steps += 1
            run.strategy.step(Progress(run.steps, 10.0 * run.steps, 0.0, run.steps / 8))
        assert run.strategy.statistics() == {"period": "1"}  # 2 sqrt(1/4)
        run.finish()

    run_threads(2, check)


@pytest.mark.parametrize("saved_after", [3, 4])
@pytest.mark.parametrize("strategy", TOGETHER + APART)
def test_saved_and_loaded_it_goes_on_to_the_bit(strategy: str, saved_after: int) -> None:
    """The scale falls in step 1 on rank 1, and grows every third update: loading must keep both counts."""

    def take(run: Run, first: int, last: int) -> None:
        for step in range(first, last):
            run.step(factor=1e6 if run.comm.rank == 1 and step == 1 else 1.0)

    def check(comm: Communicator) -> None:
        whole = Run(comm, strategy, growth_interval=3)
        take(whole, 0, 8)
        first = Run(comm, strategy, growth_interval=3)
        take(first, 0, saved_after)
        state = first.state()
        second = Run(comm, strategy, growth_interval=3)
        assert second.state()["scaler"] != state["scaler"]
        second.load(state)
        first.finish()
        take(second, saved_after, 8)
        assert second.state()["scaler"] == whole.state()["scaler"]
        assert torch.equal(second.finish(), whole.finish())

    run_threads(2, check)


@pytest.mark.parametrize("strategy", TOGETHER[:1] + APART)
def test_a_rank_without_frames_joins_from_the_first_step(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        run = Run(comm, strategy)
        for _ in range(4):
            if comm.rank == 0:
                run.step()
            else:
                joined = TrainingStep(run.strategy, run.timeline, 0)
                joined.begin()
                run.steps += 1
                joined.end(Progress(run.steps, 10.0 * run.steps, 0.0, run.steps / 8), number=run.steps)
        assert bool(run.finish().isfinite().all())

    run_threads(2, check)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_rank_is_plain_autocast_training(precision: PrecisionName) -> None:
    """As anybody writes it in torch: the same up to float32's rounding, and not what float32 makes."""

    def plain(kind: PrecisionName) -> Tensor:
        model, how = make_model(), Precision(kind, CPU)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, enabled=kind == "fp16")
        for step in range(8):
            x, y = batch(0, step)
            optimizer.zero_grad()
            with how.computing():
                loss = nn.functional.cross_entropy(model(x).float(), y, reduction="sum")
            scaler.scale(loss / len(x)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def check(comm: Communicator) -> None:
        run = Run(comm, "gradient_averaging", precision)
        for _ in range(8):
            run.step()
        run.finish()
        own = torch.cat([p.detach().flatten() for p in run.replica.model.parameters()])
        assert all(p.dtype == torch.float32 for p in run.replica.model.parameters())
        expected, in_float32 = plain(precision), plain("fp32")
        # Gradients of sums round a little otherwise in half precision than gradients of means.
        unlike = float((expected - in_float32).norm())
        assert unlike > 1e-5
        assert float((own - expected).norm()) < (1e-6 if precision == "bf16" else unlike)

    run_threads(1, check)
