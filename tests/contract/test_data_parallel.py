"""`DataParallel` over a user's own model, optimizer and loop; test_identities.py has the equations."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from speechdp import DataParallel, run_ranks
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError, RunError
from speechdp.parallel import script_folder
from speechdp.parallel.data_parallel import ScriptStep
from speechdp.parallel.replica import Replica
from speechdp.report.runs.folders import read_run
from speechdp.testing import StrategyRun, assert_bitwise_equal_over_ranks, assert_close
from speechdp.testing import make_batch as lstm_batch
from speechdp.testing import make_model as make_lstm
from tests.helpers.own_script import (
    NUM_STEPS,
    SYNCHRONOUS,
    Batch,
    MakeOptimizer,
    Script,
    adamw,
    batches_of,
    first_group_stands,
    groups,
    loss_sum,
    make_batch,
    make_model,
    plain,
    sgd,
    values,
)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda m: torch.optim.SGD(groups(m), momentum=0.9, dampening=0.3, nesterov=False),
        lambda m: torch.optim.NAdam(groups(m)),
        lambda m: torch.optim.Adagrad(groups(m), initial_accumulator_value=0.2),
        lambda m: torch.optim.RMSprop(groups(m), momentum=0.5, centered=True),
        pytest.param(
            lambda m: torch.optim.Adafactor([p for p in m.parameters() if p.requires_grad], lr=0.01),
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="torch before 2.5"),
        ),
        lambda m: torch.optim.AdamW(groups(m), amsgrad=True, foreach=True),
    ],
    ids=["sgd", "nadam", "adagrad", "rmsprop", "adafactor", "amsgrad"],
)
@pytest.mark.parametrize("strategy", ["gradient_averaging", "parameter_server"])
def test_any_optimizer_of_torch_starts_and_goes_on_as_by_itself(
    strategy: str, make_optimizer: MakeOptimizer
) -> None:
    # Without batch norm: a bias before it has no gradient but rounding errors, which Adafactor divides by.
    trained = Script(SerialCommunicator(), strategy, make_optimizer, batch_norm=False).trained()
    expected = plain(batches_of(1), make_optimizer=make_optimizer, batch_norm=False)
    assert_close(trained, expected, strategy)


@pytest.mark.parametrize(
    "strategy", [*SYNCHRONOUS, "bmuf:period=2,momentum=average", "slowmo:period=2,momentum=reset"]
)
def test_an_optimizer_over_parameters_is_treated_as_one_over_the_flat_vector(strategy: str) -> None:
    """Also its state: averaged, forgotten, or missing on a rank that has had no batch yet."""

    def check(comm: Communicator) -> None:
        model = make_lstm()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        mine = StrategyRun(comm, strategy, Replica(model, optimizer))
        flat = StrategyRun(
            comm,
            strategy,
            Replica(make_lstm(), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
        )
        for run in (mine, flat):
            for number in range(7):
                is_there = comm.rank == 0 or number > 2
                run.step([lstm_batch(comm.rank, number)] if is_there else [])
        assert_close(mine.finish(), flat.finish(), strategy)

    run_threads(2, check)


@pytest.mark.parametrize("strategy", ["parameter_server", "easgd:period=2", "ad_psgd"])
def test_asynchronous_state_is_saved_while_nothing_is_under_way(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        first, second = Script(comm, strategy), Script(comm, strategy)
        with first.run:
            first.train(0, 4)
            state = copy.deepcopy(first.run.state_dict())
            first.train(4)
        second.run.load_state_dict(state)
        with second.run:
            second.train(4)
        assert second.run.steps == NUM_STEPS
        assert_bitwise_equal_over_ranks(comm, values(second.model), strategy)

    run_threads(2, check)


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, "ad_psgd"])
def test_evaluation_shows_the_same_model_everywhere_and_leaves_no_trace(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        script, other = Script(comm, strategy), Script(comm, strategy)
        with script.run:
            script.train(0, 5)
            own = values(script.model)
            with script.run.evaluating():
                assert_bitwise_equal_over_ranks(comm, values(script.model), strategy)
                assert not script.model.norm.training
            assert script.model.norm.training
            if script.run.strategy.traits.synchronous:
                assert torch.equal(values(script.model), own), f"{strategy}: evaluation left a trace"
            script.train(5)
        if script.run.strategy.traits.synchronous and script.run.strategy.name != "parameter_server":
            assert torch.equal(values(script.model), other.trained()), f"{strategy}: evaluation left a trace"

    run_threads(2, check)


class Merging(nn.Linear):
    """Adds a correction to its weights while it evaluates, as adapters of low rank do."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self._in_place, self._trained = in_place, torch.empty(0)
        self.is_merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.is_merged != mode:
            return self
        self.is_merged = not mode
        with torch.no_grad():
            if self._in_place:
                self.weight += -1.0 if mode else 1.0
            elif mode:
                self.weight.data = self._trained
            else:
                self._trained, self.weight.data = self.weight.data, self.weight + 1.0
        return self


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "in other memory"])
@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=100"])
def test_weights_that_are_merged_for_an_evaluation_are_apart_again_after_it(
    strategy: str, in_place: bool
) -> None:
    def check(comm: Communicator) -> None:
        model = Merging(in_place=in_place)
        run = DataParallel(model, torch.optim.SGD(model.parameters(), 0.5), comm, strategy)
        with run:
            for _ in range(2):
                with run.step(weight=1) as step:
                    step.backward(model.weight.sum() * (comm.rank + 1.0))
                own = values(model)
                average = comm.allreduce(own.clone(), name="average") / comm.size
                with run.evaluating():
                    assert model.is_merged
                    assert_close(model.weight.detach().flatten() - 1.0, average[:12], strategy)
                assert model.training and not model.is_merged
                assert_close(values(model), own, strategy)

    run_threads(2, check)


def test_waiting_for_others_is_training_before_an_evaluation_and_evaluation_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []

    def check(comm: Communicator) -> None:
        script = Script(comm, "model_averaging:period=100")

        def noted(call: Callable[..., Any]) -> Callable[..., Any]:
            def noting(*args: Any) -> Any:
                seen.append((script.run.timeline.open_span() or (None, 0.0))[0])
                return call(*args)

            return noting

        with script.run:
            script.train(0, 2)
            if comm.rank == 0:
                monkeypatch.setattr(comm, "allgather_object", noted(comm.allgather_object))
                monkeypatch.setattr(comm, "barrier", noted(comm.barrier))
            with script.run.evaluating():
                pass
            if comm.rank == 0:
                monkeypatch.undo()
            script.train(2)

    run_threads(2, check)
    assert seen[0] == "meeting" and seen[-1] == "eval"


class WithoutLength(IterableDataset[Batch]):
    """Batches that come as they come."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def stream(batches: list[Batch]) -> DataLoader[Batch]:
    """Return torch's loader of them, which has a `__len__` that raises."""
    return DataLoader(WithoutLength(batches), batch_size=None)


class RefusesLength(WithoutLength):
    """Such batches of a class that says by an error of its own that there is no length."""

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("make_loader", [list, WithoutLength, stream, RefusesLength])
@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=2", "dpsgd"])
def test_ranks_that_run_out_only_join(
    strategy: str, make_loader: Callable[[list[Batch]], Iterable[Batch]]
) -> None:
    """The update is of the others' batches alone, all evaluate equally often, statistics stand still."""

    def check(comm: Communicator) -> None:
        script = Script(comm, strategy, batch_norm=False)
        batches = [make_batch(comm.rank, step) for step in range(3 + 2 * comm.rank)]
        weights, evaluated = [], 0
        with script.run:
            for batch in script.run.batches(make_loader(batches)):
                with script.run.step(weight=len(batch[0])) as step:
                    step.backward(loss_sum(script.model, batch))
                weights.append(step.weight)
                script.scheduler.step()
                with script.run.evaluating():
                    evaluated += 1
        assert evaluated == 5 and weights == [*(len(x) for x, _ in batches), *[0] * (2 - 2 * comm.rank)]
        if strategy == "gradient_averaging":
            expected = [[make_batch(r, step) for r in range(2) if step < 3 + 2 * r] for step in range(5)]
            assert_close(values(script.model), plain(expected, batch_norm=False), strategy)
        assert_bitwise_equal_over_ranks(comm, values(script.model), strategy)

    run_threads(2, check)


def test_ranks_at_their_own_pace_need_a_length() -> None:
    script = Script(SerialCommunicator(), "parameter_server")
    words = (
        "give it something with a length, such as a list, or a torch DataLoader of a dataset with a length"
    )
    with script.run, _refused(words):
        next(script.run.batches(stream([make_batch(0, 0)])))


def test_a_joining_ranks_batch_leaves_no_trace_in_its_running_statistics() -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, "model_averaging:period=4")
        seen = []
        with script.run:
            for batch in script.run.batches([make_batch(comm.rank, 0)] * (1 + comm.rank)):
                with script.run.step(weight=len(batch[0])) as step:
                    step.backward(loss_sum(script.model, batch))
            seen = [script.model.norm.running_mean.clone()]  # type: ignore[union-attr,operator]
        once = make_model()
        for _ in range(1 + comm.rank):
            once(make_batch(comm.rank, 0)[0])
            if comm.rank == 0:
                assert torch.equal(seen[0], once.norm.running_mean)  # type: ignore[arg-type]

    run_threads(2, check)


@pytest.mark.parametrize(
    "strategy", ["gradient_averaging", "gradient_averaging:overlap=false", "bmuf:begin=99"]
)
def test_several_backward_passes_in_a_step_are_one_with_their_sum(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, strategy, batch_norm=False)
        with script.run:
            for number in range(NUM_STEPS):
                x, y = make_batch(comm.rank, number)
                with script.run.step(weight=len(x)) as step:
                    step.backward(loss_sum(script.model, (x[:2], y[:2])), last=False)
                    step.backward(loss_sum(script.model, (x[2:], y[2:])))
                script.scheduler.step()
        assert_close(values(script.model), plain(batches_of(2), batch_norm=False), strategy)

    run_threads(2, check)


def test_means_of_equal_batches_need_no_weight() -> None:
    batches = [[make_batch(2 * rank, step) for rank in range(2)] for step in (0, 4)]

    def check(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", batch_norm=False)
        with script.run:
            for step_batches in batches:
                with script.run.step() as step:
                    x, y = step_batches[comm.rank]
                    step.backward(nn.functional.cross_entropy(script.model(x), y))
                script.scheduler.step()
        assert_close(values(script.model), plain(batches, batch_norm=False), "means")

    run_threads(2, check)


def test_a_hook_before_the_optimizer_sees_the_averaged_gradient() -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, "gradient_averaging", sgd, batch_norm=False)
        seen = []
        script.optimizer.register_step_pre_hook(
            lambda *_: seen.append(script.model.first.weight.grad.clone())  # type: ignore[union-attr]
        )
        with script.run:
            script.train(0, 1)
        model = make_model(batch_norm=False)
        batches = [make_batch(rank, 0) for rank in range(2)]
        total = torch.stack([loss_sum(model, batch) for batch in batches]).sum()
        (total / sum(len(x) for x, _ in batches)).backward()  # type: ignore[no-untyped-call]
        assert_close(seen[0], model.first.weight.grad, "gradient")  # type: ignore[arg-type]

    run_threads(2, check)


@pytest.mark.parametrize(
    "strategy", ["gradient_averaging", "model_averaging:period=3", "parameter_server:mode=sync"]
)
def test_scaled_losses_train_as_others_and_an_overflow_is_left_out(strategy: str) -> None:
    def check(comm: Communicator) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaled = Script(comm, strategy, options={"scaler": scaler, "max_gradient_norm": 0.1})
        other = Script(comm, strategy, options={"max_gradient_norm": 0.1})
        with scaled.run, other.run:
            for script in (scaled, other):
                script.train()
            assert_close(values(scaled.model), values(other.model), strategy)
            before = values(scaled.model)
            x, y = make_batch(comm.rank, 0)
            with scaled.run.step(weight=len(x)) as step:
                step.backward(loss_sum(scaled.model, (x, y)) * float("inf"))
            if strategy != "model_averaging:period=3":
                first = [p for p in scaled.model.parameters() if p.requires_grad]
                count = sum(p.numel() for p in first)
                assert torch.equal(values(scaled.model)[:count], before[:count])
            assert scaler.get_scale() == 512.0

    run_threads(2, check)


def test_a_run_folder_is_one_that_report_reads(tmp_path: Path) -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, "model_averaging:period=3", options={"folder": tmp_path / "run"})
        with script.run:
            script.train()
            with script.run.evaluating():
                script.run.log(valid_loss=torch.tensor(0.5), epoch=1)
        script.run.save(tmp_path / "model.pt")
        script.run.save(tmp_path / "model.safetensors")

    run_threads(2, check)
    run = read_run(tmp_path / "run")
    assert run.problems == () and run.completed and run.timing is not None
    assert (run.strategy, run.period, run.size) == ("model_averaging", "3", 2)
    assert [rank.steps for rank in run.timing.ranks] == [NUM_STEPS - 4] * 2
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    frames = sum(len(x) for batches in batches_of(2) for x, _ in batches)
    assert json.loads(line) | {"time_s": 0} == {
        "step": NUM_STEPS, "time_s": 0, "learning_rate": 0.005, "frames": frames, "valid_loss": 0.5,
        "epoch": 1,
    }  # fmt: skip
    model = make_model()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    with pytest.raises(ConfigError, match="already holds a run"):
        run_threads(1, lambda comm: Script(comm, "bmuf", options={"folder": tmp_path / "run"}).trained())


def _train_and_evaluate(comm: Communicator, folder: Path, evaluations: int) -> None:
    script = Script(comm, "model_averaging:period=3", options={"folder": folder})
    with script.run:
        script.train()
        for _ in range(evaluations):
            with script.run.evaluating():
                pass


def test_what_is_sent_beside_training_does_not_count(tmp_path: Path) -> None:
    """Neither evaluations nor beginning and end: as with `speechdp train`."""
    model = make_model()
    vector_bytes = Replica(model, adamw(model)).parameters.whole.nbytes
    for evaluations in (0, 3):
        folder = tmp_path / str(evaluations)
        run_threads(2, partial(_train_and_evaluate, folder=folder, evaluations=evaluations))
        timing = read_run(folder).timing
        assert timing is not None
        assert [rank.sent_bytes for rank in timing.ranks] == [NUM_STEPS // 3 * vector_bytes] * 2


def test_the_training_time_of_a_process_is_that_of_its_own_steps(tmp_path: Path) -> None:
    comm, earlier_s = SerialCommunicator(), 1e6
    first = Script(comm, "gradient_averaging")
    with first.run:
        first.train(0, 2)
        state = first.run.state_dict()
    again = Script(comm, "gradient_averaging", options={"folder": tmp_path / "run"})
    again.run.load_state_dict({**state, "time_s": earlier_s})
    with again.run:
        again.train(2)
    timing = read_run(tmp_path / "run").timing
    assert timing is not None and timing.ranks[0].trained_s is not None
    assert timing.ranks[0].trained_s < earlier_s


def test_values_of_any_kind_of_number_are_logged(tmp_path: Path) -> None:
    with Script(SerialCommunicator(), "bmuf", options={"folder": tmp_path / "run"}).run as run:
        run.log(a=np.float32(0.5), b=np.int64(3), c=torch.tensor(2), d=Fraction(1, 4), e="text", f=None)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = {name: value for name, value in json.loads(line).items() if len(name) == 1}
    assert logged == {"a": 0.5, "b": 3, "c": 2, "d": 0.25, "e": "text", "f": None}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"step": 3},
            r"run\.log\(step=\.\.\.\): every logged line already has a field step; choose another name",
        ),
        ({"time_s": 3.0}, "every logged line already has a field time_s; "),
        ({"frames": 3}, "every logged line already has a field frames; "),
        ({"loss": torch.zeros(2)}, r"run\.log\(loss=\.\.\.\): float\(\) cannot convert the value \("),
        (
            {"loss": [1.0]},
            r"run\.log\(loss=\.\.\.\): float\(\) cannot convert the value .*; give a number or a text",
        ),
    ],
)
def test_what_cannot_be_logged_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    script = Script(SerialCommunicator(), "bmuf", options={"folder": tmp_path / "run"})
    with pytest.raises(ConfigError, match=message), script.run as run:
        run.log(**values)


def test_the_environment_wins_over_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECHDP_STRATEGY", "slowmo:period=2")
    monkeypatch.setenv("SPEECHDP_FOLDER", str(tmp_path / "other"))
    monkeypatch.setenv("SPEECHDP_BACKEND", "threads:3")

    def main(comm: Communicator) -> int:
        Script(comm, "gradient_averaging", options={"folder": tmp_path / "one"}).trained()
        return comm.size

    assert run_ranks(main, backend="serial") == 3
    assert read_run(tmp_path / "other").strategy == "slowmo" and not (tmp_path / "one").exists()


@pytest.mark.parametrize("seconds", ["soon", "-1", "inf"])
def test_a_limit_of_waiting_that_is_none_is_refused_in_a_line(
    seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit: Any = None if seconds == "soon" else float(seconds)
    with pytest.raises(SystemExit, match="1"):
        run_ranks(lambda comm: None, backend="serial", hang_timeout=limit)
    told = f"speechdp: hang_timeout={limit}: write a number of seconds, 0 for no limit\n"
    assert capsys.readouterr().err == told
    monkeypatch.setenv("SPEECHDP_HANG_TIMEOUT", seconds)
    with pytest.raises(SystemExit, match="1"):
        run_ranks(lambda comm: None, backend="serial")
    assert capsys.readouterr().err.startswith(f"speechdp: SPEECHDP_HANG_TIMEOUT={seconds}: write a number of")


def test_a_script_that_is_started_again_begins_an_unfinished_run_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def trains(comm: Communicator, *, dies_at: int = NUM_STEPS + 1) -> None:
        script = Script(comm, "bmuf", options={"folder": folder})
        assert script.run.folder == folder
        with script.run:
            for number, batches in enumerate(batches_of(comm.size), start=1):
                if number == dies_at:
                    raise ValueError("died")
                script.step(batches[comm.rank])
            script.run.log(valid_loss=1.0)
        script.run.log(test_loss=2.0)

    with pytest.raises(ValueError, match="died"):
        run_threads(2, lambda comm: trains(comm, dies_at=4))
    (folder / "checkpoint.pt").write_text("the script's own")
    with pytest.raises(ConfigError, match="already holds a run"):
        run_threads(2, trains)
    monkeypatch.setenv("SPEECHDP_RESUME", "1")
    run_threads(2, trains)
    run = read_run(folder)
    assert run.completed and run.problems == () and (folder / "checkpoint.pt").is_file()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    frames = sum(len(x) for batches in batches_of(2) for x, _ in batches)
    assert [line.get("frames") for line in lines] == [None, frames]
    # A finished run is not begun anew.
    with pytest.raises(ConfigError, match="already holds a run"):
        run_threads(2, trains)


def test_a_job_begins_anew_what_its_earlier_start_has_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trains(comm: Communicator) -> None:
        Script(comm, "bmuf", options={"folder": tmp_path}).trained()

    monkeypatch.setenv("SPEECHDP_START", "job:1")
    run_threads(2, trains)
    (tmp_path / "metrics.jsonl").write_text("of the start that failed after its training")
    monkeypatch.setattr(script_folder, "_begun_here", set())  # as in another process
    monkeypatch.setenv("SPEECHDP_START", "job:2")
    monkeypatch.setenv("SPEECHDP_RESUME", "1")
    run_threads(2, trains)
    assert (tmp_path / "completed.json").is_file() and not (tmp_path / "metrics.jsonl").exists()
    # Another job finds a finished run.
    monkeypatch.setattr(script_folder, "_begun_here", set())
    monkeypatch.setenv("SPEECHDP_START", "other:2")
    with pytest.raises(ConfigError, match="already holds a run, without checkpoints; choose another folder"):
        run_threads(2, trains)


def test_two_runs_of_a_script_do_not_share_the_folder_that_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEECHDP_FOLDER", str(tmp_path))
    monkeypatch.setenv("SPEECHDP_RESUME", "1")
    comm = SerialCommunicator()
    first, second = (Script(comm, "bmuf", options={"folder": f"own-{n}"}) for n in range(2))
    with first.run, _refused("SPEECHDP_FOLDER names the folder of one run"), second.run:
        raise AssertionError("its folder is that of the first")
    third = Script(comm, "bmuf")
    with _refused("this script trains with a second DataParallel; make that a script of its own"), third.run:
        raise AssertionError("its folder is that of the first")
    assert read_run(tmp_path).completed
    # Of another process it is a run like any other.
    monkeypatch.setattr(script_folder, "_begun_here", set())
    with (
        _refused("already holds a run, without checkpoints; name another in SPEECHDP_FOLDER"),
        Script(comm, "bmuf").run,
    ):
        raise AssertionError("it holds a finished run")


@contextmanager
def _refused(words: str, kind: type[Exception] = ConfigError) -> Iterator[None]:
    with pytest.raises(kind, match=re.escape(words)):
        yield


def test_what_cannot_be_is_refused_in_a_line() -> None:
    comm = SerialCommunicator()
    model = make_model()
    with _refused("not the model's"):
        DataParallel(model, adamw(make_model()), comm)
    with _refused("no trainable parameter"):
        DataParallel(model.frozen, torch.optim.SGD(model.frozen.parameters(), 0.1), comm)
    with _refused("one type on one device"):
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        DataParallel(mixed, torch.optim.SGD(mixed.parameters(), 0.1), comm)
    with _refused("num_steps="):
        Script(comm, "adaptive_averaging:learning_rate=scale")
    with _refused("num_steps="):
        Script(comm, "adaptive_averaging:rule=stages,stages=32@50%")
    with _refused("does not say where its epochs end; write points in steps, or in % with num_steps="):
        Script(comm, "adaptive_averaging:rule=stages,stages=32@2ep", options={"num_steps": 9})
    with _refused("leave out combine="):
        Script(comm, "model_averaging:combine=3")
    for norm in (-1.0, math.nan, None):
        with _refused(f"max_gradient_norm={norm}: give a number that is positive, or 0"):
            Script(comm, "gradient_averaging", options={"max_gradient_norm": norm})
    script = Script(comm, "gradient_averaging")
    with _refused("is called before `with run`", RunError):
        script.run.step()
    with script.run:
        for weight in (-1, 2.5, math.nan, math.inf, None, torch.ones(2)):
            with _refused("give a whole number of frames or examples, 0 or more"):
                script.run.step(weight=weight)  # type: ignore[arg-type]
        with script.run.step(weight=0):
            pass
        with _refused("the script called optimizer.step(); remove the call", RunError):
            script.optimizer.step()
    with _refused("is called after `with run`", RunError):
        script.run.step()
    script.optimizer.step()  # now it is the script's again
    other = Script(comm, "gradient_averaging")
    with other.run, other.run.evaluating(), _refused("inside `with run.evaluating()`", RunError):
        other.run.state_dict()


def _backward(script: Script, step: ScriptStep, **options: bool) -> None:
    step.backward(loss_sum(script.model, make_batch(0, 0)), **options)


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (
            "call step.backward(loss), not loss.backward()",
            lambda script, step: loss_sum(script.model, make_batch(0, 0)).backward(),
        ),
        ("without its last backward pass", lambda script, step: _backward(script, step, last=False)),
        ("after the last pass", lambda script, step: [_backward(script, step) for _ in range(2)]),
        *(
            (
                f"run.{call.__name__}() is called inside `with run.step()`; call it after that block",
                lambda script, step, call=call: call(script.run),
            )
            for call in (DataParallel.step, DataParallel.state_dict, DataParallel.save_checkpoint)
        ),
    ],
)
def test_steps_that_cannot_be_are_refused_in_a_line(
    words: str, body: Callable[[Script, ScriptStep], object]
) -> None:
    script = Script(SerialCommunicator(), "gradient_averaging")
    with _refused(words, RunError), script.run, script.run.step(weight=2) as step:
        body(script, step)


def test_rates_that_the_first_groups_does_not_tell_are_refused() -> None:
    words = "sets the learning rates of all parameter groups by the first one's, which is 0 while others"
    script = Script(SerialCommunicator(), "parameter_server", first_group_stands)
    with _refused(f"parameter_server: {words}"), script.run:
        script.train()

    def check(comm: Communicator) -> None:
        scaled = Script(
            comm,
            "adaptive_averaging:period=1,learning_rate=scale",
            first_group_stands,
            options={"num_steps": NUM_STEPS},
        )
        with _refused(f"adaptive_averaging:learning_rate=scale: {words}"), scaled.run:
            scaled.train()

    run_threads(2, check)


def test_weights_tied_by_their_data_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)  # type: ignore[operator,union-attr]
    with _refused("share memory ([5, 3] and [5, 3])"):
        DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), SerialCommunicator())
    model[1].weight = model[0].weight
    DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), SerialCommunicator())


class Vocabulary(nn.Linear):
    """A layer with state that is no tensor."""

    words: tuple[str, ...] = ("a", "b")

    def get_extra_state(self) -> dict[str, object]:
        return {"words": list(self.words), "counts": torch.arange(2)}

    def set_extra_state(self, state: dict[str, object]) -> None:
        assert isinstance(state["words"], list)
        self.words = tuple(state["words"])


def test_a_model_with_state_that_is_no_tensor_is_saved(tmp_path: Path) -> None:
    model = nn.Sequential(Vocabulary(2, 2))
    run = DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), SerialCommunicator())
    run.save(tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    other = nn.Sequential(Vocabulary(2, 2))
    model[0].words = ()  # type: ignore[assignment]
    other.load_state_dict(state)
    assert other[0].words == ("a", "b") and torch.equal(other[0].weight, model[0].weight)  # type: ignore[arg-type]
    words = "holds tensors only, and 0._extra_state is of type dict; give another ending, e.g. model.pt"
    with _refused(words):
        run.save(tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_safetensors_hold_what_is_not_contiguous(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("basis", torch.arange(6.0).view(2, 3).t())
    DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), SerialCommunicator()).save(
        tmp_path / "model.safetensors"
    )
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(state["basis"], model.basis)  # type: ignore[arg-type]


def test_ranks_with_other_models_are_refused_before_they_exchange() -> None:
    def check(comm: Communicator) -> None:
        model = nn.Linear(2, 2 + comm.rank)
        with _refused("number of trainable parameters: 6 on rank 0, but 9 on rank 1"):
            DataParallel(model, torch.optim.SGD(model.parameters(), 0.1), comm)

    run_threads(2, check)


def test_an_optimizer_whose_state_one_rank_alone_has_is_to_be_made_anew() -> None:
    def check(comm: Communicator) -> None:
        script = Script(comm, "parameter_server:mode=sync", batch_norm=False)
        script.trained()
        words = (
            "exp_avg, exp_avg_sq, step on rank 0, but none on rank 1; create a new optimizer on every rank"
        )
        with _refused(words):
            DataParallel(script.model, script.optimizer, comm)
        DataParallel(script.model, adamw(script.model), comm)

    run_threads(2, check)


def test_gradients_that_the_script_set_to_none_are_found_again() -> None:
    script = Script(SerialCommunicator(), "gradient_averaging")
    with script.run:
        for number in range(NUM_STEPS):
            script.optimizer.zero_grad(set_to_none=True)
            script.step(make_batch(0, number))
    assert_close(values(script.model), plain(batches_of(1)), "zero_grad")
