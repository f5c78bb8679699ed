"""--average-epochs: which models the mean is of, that training does not change by it, that it resumes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.experiments.compare.plan import stretched
from speechdp.experiments.race.plan import RaceOptions
from speechdp.experiments.sweep.plan import SweepPlan
from speechdp.experiments.sweep.training import run_sweep
from speechdp.experiments.tune.parts import Part
from speechdp.options.batch import BatchOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.replica import Replica
from speechdp.process.ending import Paused
from speechdp.report.runs.folders import read_run
from speechdp.tasks.base import Task
from speechdp.tasks.metrics import LOG_PROB
from speechdp.tasks.model_file import load_model
from speechdp.train.epoch_average import EpochAverage
from speechdp.train.evaluate import Evaluator, HeldOutScores
from speechdp.train.progress import SilentReporter
from speechdp.train.realign import train_with_realignment
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import assert_equal_runs, evaluations, model_tensors
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.tiny_speech import TINY_SYNTHESIS, write_tiny_speech

CPU = torch.device("cpu")
ALONE = SerialCommunicator()
#: A projection: fp16 is computed on any CPU.  No dropout: ranks that are threads share a generator.
SIZES = ModelOptions(layers=1, cells=8, projection=6, dropout=0.0)
PLAIN = TrainOptions(SIZES, BatchOptions(batch_size=4), epochs=4)
OPTIONS = dataclasses.replace(PLAIN, average_epochs=3)
SYNTHESIS = dataclasses.replace(TINY_SYNTHESIS, epochs=4, average_epochs=3)
#: Of the 24 utterances, by the number of ranks.
STEPS_AN_EPOCH = {1: 6, 2: 4}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("average") / "data")


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_speech(tmp_path_factory.mktemp("average-speech") / "data", TinySizes(16, 4, 4))


@dataclasses.dataclass
class Scored:
    """A model that was evaluated, on one rank, and its figures."""

    rank: int
    weights: dict[str, Tensor]
    values: dict[str, float]


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[Scored]:
    """Every model that is evaluated, in order."""
    found: list[Scored] = []
    evaluate = Evaluator.evaluate

    def noting(evaluator: Evaluator, model: nn.Module, task: Task) -> HeldOutScores:
        scores = evaluate(evaluator, model, task)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found.append(Scored(evaluator._comm.rank, weights, scores.values))
        return scores

    monkeypatch.setattr(Evaluator, "evaluate", noting)
    return found


def of_rank(scored: list[Scored], rank: int = 0) -> list[Scored]:
    return [one for one in scored if one.rank == rank]


def mean_of(models: list[Scored]) -> dict[str, Tensor]:
    """Return the mean in the models' own type; of whole numbers, the last one's."""
    means = {}
    for name, last in models[-1].weights.items():
        total = torch.stack([model.weights[name].double() for model in models]).sum(0)
        means[name] = (total / len(models)).to(last) if last.is_floating_point() else last
    return means


def saved(run: Path) -> dict[str, Tensor]:
    """Return the weights in the run's model file."""
    tensors = model_tensors(run).items()
    return {name.removeprefix("model."): x for name, x in tensors if name.startswith("model.")}


def train(dataset: Dataset, run: Path, options: TrainOptions, size: int = 1, **more: Any) -> None:
    def on_rank(comm: Communicator) -> None:
        train_run(Session(dataset, comm, CPU), options, run, **more)

    run_threads(size, on_rank)


# --- what it is the mean of -------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["acoustic", "synthesis"])
def test_it_is_the_mean_to_the_bit_and_training_is_as_without(
    dataset: Dataset, speech: Dataset, tmp_path: Path, scored: list[Scored], task: str
) -> None:
    data = dataset if task == "acoustic" else speech
    averaging = OPTIONS if task == "acoustic" else SYNTHESIS
    options = dataclasses.replace(averaging, average_epochs=1)
    train_run(Session(data, ALONE, CPU), options, tmp_path / "plain")
    plain = list(scored)
    scored.clear()
    train_run(Session(data, ALONE, CPU), averaging, tmp_path / "run")
    assert len(plain) == 4 and len(scored) == 5
    for one, other in zip(plain, scored[:-1], strict=True):
        assert all(torch.equal(x, other.weights[name]) for name, x in one.weights.items())
    expected, found = mean_of(scored[1:4]), saved(tmp_path / "run")
    assert expected.keys() == found.keys()
    assert all(torch.equal(x, found[name]) for name, x in expected.items())
    assert all(torch.equal(x, scored[4].weights[name]) for name, x in expected.items())
    # Not the last model, nor a mean over other epochs.
    for other in (scored[3].weights, mean_of(scored[2:4]), mean_of(scored[:4])):
        assert not all(torch.equal(x, found[name]) for name, x in other.items())
    lines = evaluations(tmp_path / "run")
    assert lines[:-1] == evaluations(tmp_path / "plain")
    line = lines[-1]
    assert (line["epoch"], line["step"], line["averaged_epochs"]) == (4, lines[-2]["step"], 3)
    assert {f"heldout_{key}": value for key, value in scored[4].values.items()}.items() <= line.items()
    if task == "acoustic":
        used = load_model(tmp_path / "run", CPU).model.state_dict()
        assert all(torch.equal(x, expected[name]) for name, x in used.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_it_is_the_mean_of_the_weights_in_float32(
    dataset: Dataset, tmp_path: Path, scored: list[Scored], precision: Any
) -> None:
    train_run(Session(dataset, ALONE, CPU), dataclasses.replace(OPTIONS, precision=precision), tmp_path)
    expected, found = mean_of(scored[1:4]), saved(tmp_path)
    assert {x.dtype for x in found.values()} == {torch.float32}
    assert all(torch.equal(x, found[name]) for name, x in expected.items())
    assert any(not torch.equal(x, x.to(torch.bfloat16).float()) for x in found.values())


@pytest.mark.parametrize(
    "strategy",
    [
        "gradient_averaging:every=4",  # the last update comes after the last evaluation
        "model_averaging:period=4",
        "model_averaging:period=2,combine=3",
        "bmuf:period=2",
        "delayed_averaging:period=2",
        "dpsgd",
        "ad_psgd",
        "parameter_server",
        "parameter_server:dedicated=true",
        "easgd:period=2",
    ],
)
def test_two_ranks_of_any_strategy_end_with_the_mean(
    dataset: Dataset, tmp_path: Path, scored: list[Scored], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: dict[int, dict[str, Tensor]] = {}
    conclude = EpochAverage.conclude

    def noting(average: EpochAverage, replica: Any, model: nn.Module) -> int:
        ends[average._comm.rank] = {name: x.clone() for name, x in model.state_dict().items()}
        return conclude(average, replica, model)

    monkeypatch.setattr(EpochAverage, "conclude", noting)
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy))
    train(dataset, tmp_path, options, size=2)
    own = of_rank(scored)
    last = Scored(0, ends[0], {})
    expected, found = mean_of([*own[1:3], last]), saved(tmp_path)
    assert all(torch.equal(x, found[name]) for name, x in expected.items())
    for mine, other in zip(own[-1:], of_rank(scored, 1)[-1:], strict=True):
        assert mine.values == other.values
        assert all(torch.equal(x, other.weights[name]) for name, x in mine.weights.items())
        assert all(torch.equal(x, mine.weights[name]) for name, x in expected.items())
    assert [line.get("averaged_epochs") for line in evaluations(tmp_path)] == [None] * 4 + [3]


class Table(nn.Module):
    """Has what a model may have beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        for name, value in (
            ("moving", torch.zeros(2)),
            ("constant", torch.tensor([0.1, 0.3])),
            ("mask", torch.tensor([0.0, float("-inf")])),
            ("seen", torch.zeros(1)),
            ("count", torch.zeros(1, dtype=torch.long)),
        ):
            self.register_buffer(name, value)


def test_of_buffers_only_statistics_are_averaged() -> None:
    def on_rank(comm: Communicator) -> dict[str, Any]:
        model = Table()
        replica = Replica(model, lambda parameters: torch.optim.SGD(parameters, 0.1))
        average = EpochAverage(3, 3, comm)
        for epoch in (1, 2, 3):
            with torch.no_grad():
                model.weight.fill_(float(epoch))
            model.moving = torch.full((2,), 10.0 * epoch)
            model.seen = torch.full((epoch + comm.rank,), float(epoch))  # grows, and faster on one rank
            model.count = torch.tensor([epoch])
            average.note(epoch, replica, model)
            average.note(epoch - 0.5, replica, model)  # a pause within the epoch
        assert average.conclude(replica, model) == 3
        return {name: x.tolist() for name, x in model.state_dict().items()}

    for rank, found in enumerate(run_threads(2, on_rank)):
        assert found["weight"] == [2.0, 2.0] and found["moving"] == [20.0, 20.0]
        assert found["constant"] == torch.tensor([0.1, 0.3]).tolist()
        assert found["mask"] == [0.0, float("-inf")]
        assert found["seen"] == [3.0] * (3 + rank) and found["count"] == [3]


def test_a_sum_is_no_view_of_a_model_in_double_precision() -> None:
    model = Table().double()
    replica = Replica(model, lambda parameters: torch.optim.SGD(parameters, 0.1))
    average = EpochAverage(2, 2, ALONE)
    for epoch in (1, 2):
        with torch.no_grad():
            model.weight.fill_(float(epoch))
            model.moving.fill_(10.0 * epoch)
        average.note(epoch, replica, model)
    assert average.conclude(replica, model) == 2
    assert model.weight.tolist() == [1.5, 1.5] and model.moving.tolist() == [15.0, 15.0]


# --- going on ---------------------------------------------------------------------------------------------


class KilledAt(SilentReporter):
    """Fails after some steps, as a job that is killed."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyError("killed")


@pytest.mark.parametrize(
    ("task", "steps"),
    [
        *(("acoustic", steps) for steps in (5, 9, 12, 15, 21)),
        *(("synthesis", steps) for steps in (5, 10, 14)),
    ],
)
def test_a_run_that_is_killed_and_goes_on_ends_bitwise_the_same(
    dataset: Dataset, speech: Dataset, tmp_path: Path, task: str, steps: int
) -> None:
    data, options = (dataset, OPTIONS) if task == "acoustic" else (speech, SYNTHESIS)
    options = dataclasses.replace(options, checkpoint_steps=4)
    train_run(Session(data, ALONE, CPU), options, tmp_path / "whole")
    with pytest.raises(KeyError):
        train_run(Session(data, ALONE, CPU, KilledAt(steps)), options, tmp_path / "run")
    train_run(Session(data, ALONE, CPU), options, tmp_path / "run", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


def test_two_ranks_that_pause_within_epochs_and_at_their_end_go_on_bitwise(
    dataset: Dataset, tmp_path: Path
) -> None:
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice("model_averaging:period=3"))

    def go(run: Path, pause_at: int = 0) -> None:
        is_begun = run.exists()  # seen before a rank begins it

        def on_rank(comm: Communicator) -> None:
            train_run(Session(dataset, comm, CPU, pause_at=pause_at), options, run, resume=is_begun)

        run_threads(2, on_rank)

    whole, run = tmp_path / "whole", tmp_path / "run"
    go(whole)
    steps = evaluations(whole)[0]["step"]
    for place in (steps + 1, 2 * steps, 3 * steps - 1, 4 * steps - 1):
        with pytest.raises(Paused):
            go(run, place)
    go(run)
    paused = [line for line in evaluations(run) if line["epoch"] % 1 > 0]
    assert len(paused) == 3
    assert [line for line in evaluations(run) if line not in paused] == evaluations(whole)
    one, other = saved(whole), saved(run)
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_one_killed_between_its_mean_and_its_end_is_scored_once(dataset: Dataset, tmp_path: Path) -> None:
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path / "whole")
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path / "run")
    for name in ("completed.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path / "run", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


def test_one_whose_evaluations_are_gone_ends_with_the_mean_as_well(dataset: Dataset, tmp_path: Path) -> None:
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path)
    *_, expected = evaluations(tmp_path)
    weights = saved(tmp_path)
    for name in ("completed.json", "model.safetensors", "metrics.jsonl"):
        (tmp_path / name).unlink()
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path, resume=True)
    assert evaluations(tmp_path) == [expected]
    assert all(torch.equal(x, weights[name]) for name, x in saved(tmp_path).items())


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (1, 3)])
def test_another_number_of_ranks_goes_on_with_the_sums(
    dataset: Dataset, tmp_path: Path, scored: list[Scored], sizes: tuple[int, int]
) -> None:
    strategy = StrategyChoice("model_averaging:period=2")
    options = dataclasses.replace(OPTIONS, strategy=strategy, checkpoint_steps=2)
    steps = 2 * STEPS_AN_EPOCH[sizes[0]] + 1  # in the third epoch

    def begin(comm: Communicator) -> None:
        train_run(Session(dataset, comm, CPU, pause_at=steps), options, tmp_path)

    with pytest.raises(Paused):
        run_threads(sizes[0], begin)
    train(dataset, tmp_path, options, sizes[1], resume=True)
    own = of_rank(scored)  # epochs 1 and 2, the pause, epochs 3 and 4, the mean
    assert len(own) == 6 and 2 < evaluations(tmp_path)[2]["epoch"] < 3
    expected, found = mean_of([own[1], own[3], own[4]]), saved(tmp_path)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-7)
        assert float((x - own[4].weights[name]).abs().max()) > 1e-5


# --- what is refused, and what other commands do with it --------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"average_epochs": 0}, "--average-epochs 0: must be at least 1"),
        ({"average_epochs": 5}, "--average-epochs 5: the training has 4 epochs; average fewer, or give more"),
        ({"average_epochs": 2, "max_steps": 9}, "--average-epochs 2: not with --max-steps, which may end"),
    ],
)
def test_a_mean_that_cannot_be_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        dataclasses.replace(PLAIN, **changes)
    assert dataclasses.replace(PLAIN, average_epochs=4).average_epochs == 4


def test_rounds_before_the_alignment_end_with_their_last_model(dataset: Dataset, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, realign=1, realign_epochs=1)
    train_with_realignment(Session(dataset, ALONE, CPU), options, tmp_path)
    (line,) = evaluations(tmp_path / "realign" / "1")
    assert "averaged_epochs" not in line
    assert evaluations(tmp_path)[-1]["averaged_epochs"] == 3


def test_a_sweep_averages_in_its_runs_and_not_where_one_rank_is_timed(
    dataset: Dataset, tmp_path: Path
) -> None:
    plan = SweepPlan("model_averaging", ("2",), (), one_rank_steps=3, decode_split="")

    def on_rank(comm: Communicator) -> None:
        session = Session(dataset, comm, CPU)
        run_sweep(session, OPTIONS, plan, tmp_path, lambda name: SilentReporter(), RaceOptions(0))

    run_threads(2, on_rank)
    assert evaluations(tmp_path / "model_averaging-2")[-1]["averaged_epochs"] == 3
    record = json.loads((tmp_path / "one-rank" / "run.json").read_text())
    assert (record["options"]["average_epochs"], record["options"]["max_steps"]) == (1, 3)


def test_runs_of_other_lengths_average_what_they_have() -> None:
    assert stretched(OPTIONS, 2).average_epochs == 2
    assert stretched(OPTIONS, 40).average_epochs == 3
    assert Part("timed", "gradient_averaging", seed=1, max_steps=4).options(OPTIONS).average_epochs == 1
    assert Part("trained", "gradient_averaging", seed=1, pause_at=4).options(OPTIONS).average_epochs == 3


# --- what is said -----------------------------------------------------------------------------------------


def test_the_end_and_the_report_have_the_figures_of_both(dataset: Dataset, tmp_path: Path) -> None:
    said: list[str] = []

    class Kept(SilentReporter):
        def notice(self, text: str) -> None:
            said.append(text)

    train_run(Session(dataset, ALONE, CPU, Kept()), OPTIONS, tmp_path)
    *_, last, mean = evaluations(tmp_path)
    figures = [line["heldout_log_prob"] for line in (mean, last)]
    assert figures[0] != figures[1]
    # A tiny model that has just begun to learn: the mean is behind, and that is no learning by heart.
    assert LOG_PROB.is_past(figures[1], figures[0])
    assert (
        f"final model: the mean of the last 3 epochs, {figures[0]:.3f} nats/frame; "
        f"the last alone: {figures[1]:.3f} nats/frame, which is better: "
        "average fewer epochs, or train for longer"
    ) in said
    assert not any("past its best" in line for line in said)
    run = read_run(tmp_path)
    assert run.problems == () and [one.epoch for one in run.evaluations] == [1, 2, 3, 4]
    assert run.evaluations[-1].score == figures[1]
    assert run.final is not None and run.final.score == figures[0]
