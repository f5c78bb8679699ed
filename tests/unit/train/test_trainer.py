"""The training loop: what it refuses, when it saves, and that it trains on everything once."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from speechdp.checkpoint.state import RankState, checkpoint_steps, load_checkpoint
from speechdp.checkpoint.writer import CheckpointWriter
from speechdp.comm.base import Communicator, ReduceOp, Work
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import ThreadsCommunicator, run_threads
from speechdp.data.loading.loader import Loader
from speechdp.data.plan.assignment import planned
from speechdp.data.plan.epoch_plan import plan_epoch
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError, DivergedError, RunError
from speechdp.experiments.race.plan import RaceOptions
from speechdp.experiments.sweep.plan import SweepPlan
from speechdp.experiments.sweep.training import run_sweep
from speechdp.models.captured import Graphs
from speechdp.models.lstm_am import LstmAcousticModel, unless_even
from speechdp.options.batch import BatchOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.ownership.overwrite import RUN, check_overwrite
from speechdp.parallel import stop
from speechdp.parallel.loss_scale import LEAST_SCALE
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.run_files import Metrics
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Paused, Stopped
from speechdp.report.runs.folders import read_run
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.base import FrameScores, LossSum, TaskData
from speechdp.tasks.metrics import Metric
from speechdp.testing import make_replica
from speechdp.timing.timeline import Timeline
from speechdp.train import build, trainer
from speechdp.train.build import build_trainer, open_loader
from speechdp.train.evaluate import HeldOutScores, choose_final_model
from speechdp.train.models import count_classes, make_model
from speechdp.train.progress import ConsoleReporter, SilentReporter
from speechdp.train.run import _describe_recipe, train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import evaluations, model_tensors
from tests.helpers.options import options_with
from tests.helpers.repeats import Repeats
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.waiting import LIMIT_S

CPU = torch.device("cpu")
ALONE = SerialCommunicator()
OPTIONS = TrainOptions(ModelOptions(layers=1, cells=4), BatchOptions(batch_size=4), epochs=2)
#: 24 utterances in batches of 4.
STEPS_AN_EPOCH = 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("trainer") / "data")


def test_the_speed_of_an_evaluation_is_that_since_the_one_before(dataset: Dataset, tmp_path: Path) -> None:
    seen: list[Metrics] = []

    class Watching(SilentReporter):
        def evaluated(self, metrics: Metrics, held_out: Sequence[Metric]) -> None:
            seen.append(metrics)

    session = Session(dataset, ALONE, CPU, Watching())
    options = dataclasses.replace(OPTIONS, epochs=4)
    with pytest.raises(Paused):  # the next start counts from its checkpoint
        paused = dataclasses.replace(session, pause_at=2 * STEPS_AN_EPOCH)
        train_run(paused, options, tmp_path / "run")
    train_run(session, options, tmp_path / "run", resume=True)
    before = [(0, 0.0), *((one.frames, one.time_s) for one in seen[:-1])]
    counted = [
        one.frames_per_s * (one.time_s - time_s) / (one.frames - frames)
        for one, (frames, time_s) in zip(seen, before, strict=True)
    ]
    assert len(seen) == 4 and [counted[place] for place in (0, 1, 3)] == pytest.approx([1.0] * 3)
    assert counted[2] >= 1.0  # what passed between the evaluation and the checkpoint does not count
    assert "frames_per_s" not in evaluations(tmp_path / "run")[-1]  # it differs from run to run


def test_ranks_meet_before_an_evaluation_and_when_rank_0_has_written_it(
    dataset: Dataset, tmp_path: Path
) -> None:
    """What slower ranks still train is training time; what rank 0 writes is no exchange of others' steps."""
    timeline = Timeline(None, rank=0, device=CPU)
    told: list[str] = []

    class Meeting(SerialCommunicator):
        def barrier(self) -> None:
            if (doing := timeline.open_span()) is not None:
                told.append(doing[0])

    class Watching(SilentReporter):
        def evaluated(self, metrics: Metrics, held_out: Sequence[Metric]) -> None:
            told.append("written")

    with ExitStack() as stack:
        session = Session(dataset, Meeting(), CPU, Watching())
        mine, sources = build_trainer(session, OPTIONS, tmp_path, stack, timeline)
        plan = plan_epoch(sources.training.index, OPTIONS.plan(), 0, 1)
        loader = stack.enter_context(Loader(sources.training, planned(lambda e: plan, 0, 2)))
        mine.run(loader, stop.StopAgreement(None, session.comm))
    assert told == ["meeting", "written", "eval"] * OPTIONS.num_epochs


def test_an_epoch_that_was_paused_is_told_to_a_hundredth() -> None:
    text = io.StringIO()
    reporter = ConsoleReporter(Console(file=text), "run")
    reporter.begin(2, 0)
    reporter.evaluated(Metrics(20 / 27, 20, 9000, 1.0, 2.0, 0.001, {}, 77, frames_per_s=9000.0), [])
    assert text.getvalue().startswith("run: epoch 0.74/2, 9,000 frames/s")


class AtStep(SilentReporter):
    """Acts after some step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.at_step, self.act = step, act
        self.num_steps = self.num_ends = 0

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        self.num_steps += 1
        if self.num_steps == self.at_step:
            self.act()

    def end(self) -> None:
        self.num_ends += 1


def asked_after(step: int) -> tuple[AtStep, StopRequest]:
    request = StopRequest()
    return AtStep(step, lambda: setattr(request, "received", "SIGTERM")), request


@pytest.fixture
def agree_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_INTERVAL_S", 0.0)


# --- a run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 26])
@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=2"])
def test_all_frames_are_trained_on_once_an_epoch(
    dataset: Dataset, tmp_path: Path, size: int, strategy: str
) -> None:
    """Also with more ranks than utterances: those without any join with 0 frames."""
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy))
    run_threads(size, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path))
    num_frames = dataset.num_frames("train")
    assert [line["frames"] for line in evaluations(tmp_path)] == [num_frames, 2 * num_frames]
    assert {line["heldout_frames"] for line in evaluations(tmp_path)} == {dataset.num_frames("dev")}
    assert int(model_tensors(tmp_path)["class_frames"].sum()) == num_frames
    frames = [
        json.loads(line)["frames"]
        for path in (tmp_path / "timeline").glob("rank-*.jsonl")
        for line in path.read_text().splitlines()
        if "step" in json.loads(line)
    ]
    assert sum(frames) == 2 * num_frames


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=2"])
def test_graphs_are_captured_between_steps_and_change_nothing(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """As on a GPU: after step 4, and after each epoch; a run that is stopped and resumed is the same, too."""
    recorders: list[Repeats] = []

    def graphs(model: nn.Module, _device: torch.device, options: TrainOptions) -> Graphs:
        if options.cuda_graphs == "off":
            return Graphs([], CPU)
        assert isinstance(model, LstmAcousticModel)
        monkeypatch.setattr(LstmAcousticModel, "_recur", recur)
        recorders.append(Repeats())
        return Graphs.of(model, CPU, lambda: recorders[-1])

    def recur(model: LstmAcousticModel, features: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return of_cpu(model, features, lengths)
        return model._train_on_gpu(features, unless_even(lengths, features.shape[1]))

    of_cpu = LstmAcousticModel._recur
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy), epochs=4)
    options = dataclasses.replace(options, batch=BatchOptions(batch_size=4, chunk_frames=8))
    train_run(Session(dataset, ALONE, CPU), dataclasses.replace(options, cuda_graphs="off"), tmp_path / "off")
    monkeypatch.setattr(build, "_graphs", graphs)
    train_run(Session(dataset, ALONE, CPU), options, tmp_path / "whole")
    assert recorders[0].num_replayed > 2 * recorders[0].num_recorded > 0
    lines = [json.loads(line) for line in (tmp_path / "whole/timeline/rank-0000.jsonl").open()]
    names = [line.get("event", "step") for line in lines]
    assert names.index("capture") == 4
    first = model_tensors(tmp_path / "off")
    for name, tensor in model_tensors(tmp_path / "whole").items():
        assert (tensor - first[name]).abs().max() < 1e-5
    reporter, request = asked_after(5)
    stopped = Session(dataset, ALONE, CPU, reporter=reporter, stop=request)
    with pytest.raises(Stopped):
        train_run(stopped, options, tmp_path / "stopped")
    off = dataclasses.replace(options, cuda_graphs="off")  # as for lack of memory
    train_run(Session(dataset, ALONE, CPU), off, tmp_path / "stopped", resume=True)
    for name, tensor in model_tensors(tmp_path / "whole").items():
        assert torch.equal(tensor, model_tensors(tmp_path / "stopped")[name])


def test_memory_is_given_back_while_a_step_has_its_activations(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Alive(torch.autograd.Function):
        """An identity that notes when the pass backward comes to it."""

        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            order.append("forward")
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            order.append("backward")
            return grad

    class Noting:
        def before_backward(self) -> None:
            order.append("given back")

    def loss(task: AcousticTask, model: nn.Module, batch: Any) -> LossSum:
        found = own_loss(task, model, batch)
        return dataclasses.replace(found, total=Alive.apply(found.total))  # type: ignore[no-untyped-call]

    order: list[str] = []
    own_loss = AcousticTask.loss
    monkeypatch.setattr(AcousticTask, "loss", loss)
    monkeypatch.setattr(trainer, "HeapTrimmer", Noting)
    train_run(
        Session(dataset, ALONE, CPU, SilentReporter()), dataclasses.replace(OPTIONS, epochs=1), tmp_path / "r"
    )
    assert order == ["forward", "given back", "backward"] * STEPS_AN_EPOCH


@pytest.mark.parametrize(
    ("rule", "changes", "evaluated"),
    [
        # (0.2/0.1)^2 = 4; from epoch 1 on, after step 6, (0.2/0.05)^2 = 16.
        ("rule=qsr,alpha=0.2", [(0, 2), (2, 4), (6, 16)], ["4", "16"]),
        ("rule=stages,stages=3@1ep", [(0, 2), (6, 3)], ["3", "3"]),
        ("rule=stages,stages=1@25%+3@75%", [(0, 2), (4, 1), (9, 3)], ["1", "3"]),
    ],
)
def test_the_period_in_force_is_recorded(
    dataset: Dataset, tmp_path: Path, rule: str, changes: list[tuple[int, int]], evaluated: list[str]
) -> None:
    strategy = StrategyChoice(f"adaptive_averaging:{rule},period=2")
    optimizer = OptimizerOptions("sgd", learning_rate=0.1, anneal_from=1, anneal_factor=0.5)
    options = dataclasses.replace(OPTIONS, strategy=strategy, optimizer=optimizer)
    train_run(Session(dataset, ALONE, CPU), options, tmp_path)
    run = read_run(tmp_path)
    assert run.problems == ()
    assert [(change.step, change.period.value) for change in run.periods] == changes
    assert [line["period"] for line in evaluations(tmp_path)] == evaluated


def test_the_marker_of_completion_comes_last(dataset: Dataset, tmp_path: Path) -> None:
    def look() -> None:
        assert not (tmp_path / "completed.json").exists()
        assert (tmp_path / "run.json").exists()

    reporter = AtStep(2 * STEPS_AN_EPOCH, look)
    train_run(Session(dataset, ALONE, CPU, reporter), OPTIONS, tmp_path)
    assert reporter.num_steps == 2 * STEPS_AN_EPOCH
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in ("model.safetensors", "timing.json")}
    assert (tmp_path / "completed.json").stat().st_mtime_ns >= max(times.values())


def moved(model: nn.Module) -> None:
    """Do as a user's model that calls `flatten_parameters` in its forward pass, on a GPU."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.set_(parameter.clone())  # type: ignore[call-overload]


def test_a_model_that_moves_its_parameters_is_trained_as_others(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelOptions(layers=1, cells=4, dropout=0.0)
    options = dataclasses.replace(OPTIONS, model=model, strategy=StrategyChoice("model_averaging:period=3"))
    # torch's generator is one for all threads, and here each thread is a rank.
    made = make_model(dataset, options)
    monkeypatch.setattr(build, "make_model", lambda *_: copy.deepcopy(made))

    def train(name: str) -> dict[str, torch.Tensor]:
        run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path / name))
        return model_tensors(tmp_path / name)

    encode = LstmAcousticModel.encode
    expected = train("as ever")

    def moving(model: LstmAcousticModel, *inputs: torch.Tensor) -> torch.Tensor:
        moved(model)
        return encode(model, *inputs)

    monkeypatch.setattr(LstmAcousticModel, "encode", moving)
    found = train("moving")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_weights_depend_on_the_seed_alone_where_ranks_are_threads(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_slowly(task: AcousticTask, data: TaskData) -> LstmAcousticModel:
        model = made(task, data)
        time.sleep(0.2)  # the other rank begins, and seeds and draws from the generator of all threads
        nn.init.normal_(model.output.weight)
        return model

    made = AcousticTask.make_model
    monkeypatch.setattr(AcousticTask, "make_model", make_slowly)
    alone = make_model(dataset, OPTIONS).state_dict()

    def make_apart(comm: Communicator) -> dict[str, torch.Tensor]:
        time.sleep(0.1 * comm.rank)
        return make_model(dataset, OPTIONS).state_dict()

    for weights in run_threads(2, make_apart):
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=0)


def test_the_best_model_is_chosen_also_where_models_move_their_parameters() -> None:
    replica = make_replica()
    values = replica.parameters.values
    candidates = [torch.full_like(values, x) for x in (1.0, 3.0, 2.0)]

    def score() -> HeldOutScores:
        moved(replica.model)
        mean = nn.utils.parameters_to_vector(replica.model.parameters()).mean().item()
        return HeldOutScores({"score": mean}, 1, mean)

    assert choose_final_model(candidates, replica, score) == 2
    assert all(bool((parameter == 3.0).all()) for parameter in replica.model.parameters())


def test_a_run_to_resume_that_is_not_there_is_said_to_be_new(dataset: Dataset, tmp_path: Path) -> None:
    said: list[str] = []

    class Kept(SilentReporter):
        def notice(self, text: str) -> None:
            said.append(text)

    options = dataclasses.replace(OPTIONS, max_steps=1)
    train_run(Session(dataset, ALONE, CPU, Kept()), options, tmp_path / "run", resume=True)
    assert f"{tmp_path / 'run'}: holds no run to resume, starting a new one" in said
    assert not any("going on" in line for line in said)


def test_a_run_keeps_what_describes_its_data(dataset: Dataset, tmp_path: Path) -> None:
    train_run(Session(dataset, ALONE, CPU), dataclasses.replace(OPTIONS, max_steps=1), tmp_path)
    kept = Dataset.open(tmp_path / "trained_on")
    assert kept.checksum == dataset.checksum
    for name in ("classes.txt", "lexicon.txt"):
        assert (kept.path / name).read_bytes() == (dataset.path / name).read_bytes()


def test_a_complete_run_is_left_as_it_is(dataset: Dataset, tmp_path: Path) -> None:
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    marker = (tmp_path / "completed.json").stat().st_ino
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path, resume=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert (tmp_path / "completed.json").stat().st_ino != marker  # renewed, for the launcher
    with pytest.raises(ConfigError, match="already holds a run; continue with --resume, or --overwrite it"):
        train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path)
    with pytest.raises(ConfigError, match="begun with other options"):
        train_run(Session(dataset, ALONE, CPU), dataclasses.replace(OPTIONS, seed=2), tmp_path, resume=True)


def test_a_run_is_resumed_that_was_begun_before_there_were_options_for_alignment_from_nothing(
    dataset: Dataset, tmp_path: Path
) -> None:
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path)
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    begun = OPTIONS.to_json(1)
    for options in (begun, begun["resolved"], record["options"], record["options"]["resolved"]):
        added = (
            "flat_start",
            "realign_criterion",
            "realign_from",
            "initial_model",
            "context",
            "tied_states",
            "precision",
            "cuda_graphs",
            "average_epochs",
        )
        for name in added:
            del options[name]
        for name in ("criterion", "prior_scale", "subsampling"):
            del options["model"][name]
    fingerprint = hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()[:16]
    path.write_text(json.dumps({**record, "fingerprint": fingerprint}))
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"begun with other options \(--flat-start was False, is True\)"):
        flat_start = dataclasses.replace(OPTIONS, flat_start=True)
        train_run(Session(dataset, ALONE, CPU), flat_start, tmp_path, resume=True)


def test_a_run_that_has_no_checkpoint_yet_begins_anew(dataset: Dataset, tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("killed")

    with pytest.raises(KeyError):
        train_run(Session(dataset, ALONE, CPU, AtStep(3, fail)), OPTIONS, tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path)
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path, resume=True)
    assert len(evaluations(tmp_path)) == 2


def test_checkpoints_without_a_record_are_not_resumed(dataset: Dataset, tmp_path: Path) -> None:
    """Nothing would tell whether options and data are those they were made with."""
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path)
    for name in ("run.json", "completed.json"):
        (tmp_path / name).unlink()
    with pytest.raises(RunError, match=r"has checkpoints, but no run\.json .*; put it back, or start"):
        train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path, resume=True)
    assert not (tmp_path / "run.json").exists()
    check_overwrite(tmp_path, RUN)  # as the line advises


def test_it_ends_after_max_steps_also_when_resumed_there(dataset: Dataset, tmp_path: Path) -> None:
    """The checkpoint at the end of an epoch may be the last step wanted."""
    options = dataclasses.replace(OPTIONS, max_steps=STEPS_AN_EPOCH)
    train_run(Session(dataset, ALONE, CPU), options, tmp_path)
    assert json.loads((tmp_path / "completed.json").read_text())["step"] == STEPS_AN_EPOCH
    expected = model_tensors(tmp_path)
    for name in ("completed.json", "model.safetensors"):
        (tmp_path / name).unlink()  # killed between the checkpoint and the end
    train_run(Session(dataset, ALONE, CPU), options, tmp_path, resume=True)
    assert json.loads((tmp_path / "completed.json").read_text())["step"] == STEPS_AN_EPOCH
    assert all(torch.equal(t, expected[n]) for n, t in model_tensors(tmp_path).items())


def test_a_run_resumed_at_its_very_end_is_timed_by_its_timeline(dataset: Dataset, tmp_path: Path) -> None:
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path)
    for name in ("completed.json", "model.safetensors", "timing.json"):
        (tmp_path / name).unlink()  # killed between the last checkpoint and the end
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path, resume=True)
    timing = read_run(tmp_path).timing
    assert timing is not None and timing.ranks[0].steps == 2 * STEPS_AN_EPOCH - 4  # without warm-up


def test_data_that_are_not_those_of_the_run_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path / "run")
    other = write_tiny_data(tmp_path / "other", TinySizes(train=9))
    with pytest.raises(ConfigError, match="begun on other data"):
        train_run(Session(other, ALONE, CPU), OPTIONS, tmp_path / "run", resume=True)


def test_missing_splits_and_class_lists_are_found_before_training(tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / "data")
    with pytest.raises(Exception, match=r"has no split 'eval', only train, dev, test"):
        train_run(Session(data, ALONE, CPU), dataclasses.replace(OPTIONS, held_out="eval"), tmp_path / "run")
    data.classes_path.unlink()
    reporter = AtStep(1, lambda: pytest.fail("a step was taken"))
    with pytest.raises(ConfigError, match=r"classes\.txt"):
        train_run(Session(data, ALONE, CPU, reporter), OPTIONS, tmp_path / "run-2")


@pytest.mark.parametrize("pause_at", [STEPS_AN_EPOCH, STEPS_AN_EPOCH - 2])
@pytest.mark.parametrize("strategy", ["gradient_averaging", "ad_psgd"])
def test_a_run_that_is_paused_where_it_stands_stays_as_it_is(
    dataset: Dataset, tmp_path: Path, strategy: str, pause_at: int
) -> None:
    """It stands at the end of an epoch, with nothing learnt since, or in the middle of one."""
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy))
    session = Session(dataset, ALONE, CPU, pause_at=pause_at)
    with pytest.raises(Paused):
        train_run(session, options, tmp_path)
    (evaluation,) = evaluations(tmp_path)
    assert evaluation["step"] == next(checkpoint_steps(tmp_path)) == pause_at
    for _ in range(2):
        with pytest.raises(Paused):
            train_run(session, options, tmp_path, resume=True)
        assert evaluations(tmp_path) == [evaluation] and next(checkpoint_steps(tmp_path)) == pause_at
    train_run(Session(dataset, ALONE, CPU), options, tmp_path, resume=True)
    assert [line["step"] for line in evaluations(tmp_path)] == sorted({pause_at, 6, 12})


def test_a_run_that_was_saved_without_evaluation_is_evaluated_where_it_pauses(
    dataset: Dataset, tmp_path: Path
) -> None:
    options = dataclasses.replace(OPTIONS, checkpoint_steps=4)

    def fail() -> None:
        raise KeyError("killed")

    with pytest.raises(KeyError):
        train_run(Session(dataset, ALONE, CPU, AtStep(5, fail)), options, tmp_path)
    with pytest.raises(Paused):
        train_run(Session(dataset, ALONE, CPU, pause_at=4), options, tmp_path, resume=True)
    assert [line["step"] for line in evaluations(tmp_path)] == [4]


# --- stopping and saving ------------------------------------------------------------------------------


def count_saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    original = CheckpointWriter.start

    def start(writer: CheckpointWriter, step: int, state: RankState) -> Path:
        steps.append(step)
        return original(writer, step, state)

    monkeypatch.setattr(CheckpointWriter, "start", start)
    return steps


def test_checkpoints_come_after_each_epoch_and_every_so_many_steps(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count_saves(monkeypatch)
    options = dataclasses.replace(OPTIONS, checkpoint_steps=3)
    train_run(Session(dataset, ALONE, CPU), options, tmp_path)
    assert steps == [3, 6, 9, 12]  # 6 and 12 end an epoch: saved once


@pytest.mark.usefixtures("agree_at_every_step")
def test_a_stop_at_the_end_of_an_epoch_saves_once(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second save would take the first away before it stands in its place."""
    steps = count_saves(monkeypatch)
    reporter, request = asked_after(STEPS_AN_EPOCH - 1)  # known to all one step later
    with pytest.raises(Stopped):
        train_run(Session(dataset, ALONE, CPU, reporter, request), OPTIONS, tmp_path)
    assert steps == [STEPS_AN_EPOCH]
    assert reporter.num_ends >= 1  # the bar has given the cursor back


@pytest.mark.usefixtures("agree_at_every_step")
def test_a_stop_in_the_middle_of_an_epoch_saves_there(dataset: Dataset, tmp_path: Path) -> None:
    reporter, request = asked_after(2)
    with pytest.raises(Stopped):
        train_run(Session(dataset, ALONE, CPU, reporter, request), OPTIONS, tmp_path)
    (step,) = checkpoint_steps(tmp_path)
    assert 2 < step <= 4
    state = load_checkpoint(tmp_path, ALONE, [])
    assert state is not None
    assert state.values["counters"]["epoch"] == 0 and state.values["counters"]["step_in_epoch"] == step


@pytest.mark.usefixtures("agree_at_every_step")
def test_a_stop_in_a_sweeps_run_on_one_rank_reaches_the_ranks_that_wait(
    dataset: Dataset, tmp_path: Path
) -> None:
    def sweep(comm: Communicator) -> None:
        reporter, request = asked_after(2)
        session = Session(dataset, comm, CPU, SilentReporter(), request if comm.rank == 0 else None)
        plan = SweepPlan("model_averaging", ("2",), (), one_rank_steps=12, decode_split="")
        with pytest.raises(Stopped):
            run_sweep(session, OPTIONS, plan, tmp_path, lambda name: reporter, RaceOptions(0))
        comm.barrier()

    run_threads(2, sweep, timeout_s=LIMIT_S)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["one-rank"]
    assert json.loads((tmp_path / "sweep.json").read_text())["completed"] is False


@pytest.mark.parametrize(
    ("given", "rise"),
    [
        ({}, "from 0.1 over 10 epochs"),
        ({"warmup_from": 2.0}, "from 2 over 10 epochs"),
        ({"warmup_epochs": 0.0}, "no warm-up"),
        ({"base_batch": 8, "base_learning_rate": 0.2}, "from 0.2 over 10 epochs"),
        ({"base_batch": 2560}, "no warm-up: the batch is not larger than --base-batch"),
        ({"base_batch": 4000}, "no warm-up: the batch is not larger than --base-batch"),
        ({"base_batch": 2560, "warmup_from": 0.1}, "no warm-up"),
    ],
)
def test_what_a_recipe_comes_to_is_said(given: dict[str, Any], rise: str) -> None:
    options = options_with(recipe="adpsgd-asr", **given)
    line = _describe_recipe(options, options.resolve(4))
    assert line.startswith("recipe adpsgd-asr: 640 segments per rank and step, learning rate ")
    assert line.endswith(f" ({rise}), strategy gradient_averaging")


# --- what is not finite -------------------------------------------------------------------------------


class NanLoss(AcousticTask):
    """Gives NaN on one rank at one step."""

    def __init__(self, at_step: int) -> None:
        self.num_steps, self.at_step = 0, at_step

    def loss(self, model: Any, batch: Any) -> LossSum:
        self.num_steps += 1
        loss = super().loss(model, batch)
        return LossSum(loss.total * float("nan"), loss.num_frames) if self.num_steps == self.at_step else loss


class Mistaken(AcousticTask):
    """Gives the loss per frame as a number."""

    def loss(self, model: Any, batch: Any) -> LossSum:
        loss = super().loss(model, batch)
        return LossSum(loss.total.item() / loss.num_frames, loss.num_frames)  # type: ignore[arg-type]


def test_a_loss_that_is_none_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    line = (
        rf"loss\(\) of {__name__}:Mistaken must return LossSum\(scalar tensor that requires grad, number of "
        r"frames\); it returned a LossSum of the number \d.*: give the tensor"
    )
    with pytest.raises(ConfigError, match=line):
        run_threads(2, lambda comm: advance(dataset, comm, OPTIONS, tmp_path, Mistaken()))


class Noting(ThreadsCommunicator):
    """Notes the exchanges this rank starts."""

    def note(self) -> list[str]:
        names: list[str] = []
        original = self.allreduce_async

        def noting(x: torch.Tensor, *, name: str, op: ReduceOp = ReduceOp.SUM) -> Work:
            names.append(name)
            return original(x, name=name, op=op)

        self.allreduce_async = noting  # type: ignore[method-assign]
        return names


def advance(
    dataset: Dataset, comm: Communicator, options: TrainOptions, run: Path, task: AcousticTask
) -> None:
    """Train epoch after epoch with another task."""
    with ExitStack() as stack:
        mine, sources = build_trainer(Session(dataset, comm, CPU), options, run, stack)
        mine.parts = dataclasses.replace(mine.parts, task=task)
        source, plan = sources.training, options.plan()
        loader = Loader(
            source,
            planned(lambda e: plan_epoch(source.index, plan, e, comm.size), comm.rank, options.num_epochs),
        )
        mine.run(stack.enter_context(loader), stop.StopAgreement(None, comm))


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("gradient_averaging", "gradients.0"),
        ("model_averaging:period=1", "parameters"),
        # Nobody is left out while gradients are averaged: the sum would be no number on any rank.
        ("model_averaging:period=2,leave_out=1.0,begin=50", "gradients.0"),
    ],
)
def test_a_nan_is_refused_before_it_is_exchanged(
    dataset: Dataset, tmp_path: Path, strategy: str, kind: str
) -> None:
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice(strategy))
    exchanges: dict[int, list[str]] = {}

    def train(comm: Communicator) -> None:
        exchanges[comm.rank] = Noting.note(comm)  # type: ignore[arg-type]
        advance(dataset, comm, options, tmp_path, NanLoss(3 if comm.rank == 1 else 0))

    with pytest.raises(
        RunError, match=r"the loss is nan at step 3 \(epoch 1\) on rank 1: lower --learning-rate"
    ):
        run_threads(2, train)
    assert exchanges[1].count(kind) == 2  # those of the two steps before


def test_a_rank_that_diverges_is_left_out_where_that_is_asked_for(dataset: Dataset, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, strategy=StrategyChoice("model_averaging:period=2,leave_out=1.0"))
    run_threads(
        2, lambda comm: advance(dataset, comm, options, tmp_path, NanLoss(3 if comm.rank == 1 else 0))
    )
    lines = evaluations(tmp_path)
    assert len(lines) == 2 and all(-3 < line["heldout_log_prob"] < 0 for line in lines), lines


class NanLossFrom(NanLoss):
    """Gives NaN from one step on; 0: never."""

    def loss(self, model: Any, batch: Any) -> LossSum:
        loss = super().loss(model, batch)
        is_nan = 0 < self.at_step <= self.num_steps
        self.noted = [*getattr(self, "noted", []), (loss.total.item(), 0 if is_nan else loss.num_frames)]
        return LossSum(loss.total * float("nan"), loss.num_frames) if is_nan else loss


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_rank_that_others_mend_does_not_end_the_run_by_its_scale(
    dataset: Dataset, tmp_path: Path, precision: Any
) -> None:
    """More overflows than the scale has room for; their frames do not count in the mean loss either."""
    options = dataclasses.replace(
        OPTIONS,
        model=dataclasses.replace(OPTIONS.model, projection=3),  # without oneDNN, which has no float16
        batch=dataclasses.replace(OPTIONS.batch, batch_size=1),
        strategy=StrategyChoice("model_averaging:period=100,leave_out=1.0"),
        precision=precision,
        epochs=1,
    )
    tasks = [NanLossFrom(0), NanLossFrom(2)]
    scales: list[float] = []

    def train(comm: Communicator) -> None:
        with ExitStack() as stack:
            session = Session(dataset, comm, CPU)
            mine, sources = build_trainer(session, options, tmp_path, stack)
            if mine.parts.replica.scaler is not None and comm.rank == 1:
                mine.parts.replica.scaler.update(LEAST_SCALE)
            mine.parts = dataclasses.replace(mine.parts, task=tasks[comm.rank])
            loader, _ = open_loader(session, options.resolve(2), mine, sources.training, stack)
            mine.parts.strategy.resume()
            while (step := mine.advance(loader)) is not None and not step.ends_epoch:
                if mine.parts.replica.scaler is not None and comm.rank == 1:
                    scales.append(mine.parts.replica.scaler.get_scale())
            mine.parts.strategy.pause()
            found = mine._state.epoch_loss.tolist()
            noted = [(x, n) for x, n in tasks[comm.rank].noted if n > 0]
            assert found[0] == pytest.approx(sum(x for x, _ in noted), rel=1e-6)
            assert found[1] == sum(n for _, n in noted)
            assert comm.rank == 0 or (mine._shown_loss is None and found[2] > found[1] > 0)
            mine.parts.strategy.close()

    run_threads(2, train)
    assert precision == "bf16" or set(scales[1:]) == {LEAST_SCALE}


class BadScores(AcousticTask):
    """Gives a held-out log-probability that is no number."""

    def score(self, model: Any, batch: Any) -> FrameScores:
        scores = super().score(model, batch)
        return dataclasses.replace(scores, sums={key: float("nan") for key in scores.sums})


def test_held_out_figures_that_are_no_number_end_the_run_before_anything_is_recorded(
    dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"after step 6 the training loss is [\d.]+ and the held-out .* nan"):
        advance(dataset, ALONE, OPTIONS, tmp_path, BadScores())
    assert not (tmp_path / "metrics.jsonl").exists() and list(checkpoint_steps(tmp_path)) == []


def test_counting_classes_at_the_end_gives_signs_of_progress(dataset: Dataset, tmp_path: Path) -> None:
    """It may take longer than --hang-timeout where there are millions of utterances."""
    with ExitStack() as stack:
        mine, sources = build_trainer(Session(dataset, ALONE, CPU), OPTIONS, tmp_path, stack)
        before = mine.parts.pulse.beats
        count_classes(sources.training, Session(dataset, ALONE, CPU), dataset.num_classes)
        assert mine.parts.pulse.beats >= before + len(dataset.shard_paths("train"))


def test_parameters_that_are_not_finite_are_never_saved(dataset: Dataset, tmp_path: Path) -> None:
    with ExitStack() as stack:
        mine, _ = build_trainer(Session(dataset, ALONE, CPU), OPTIONS, tmp_path, stack)
        mine.save()
        mine.counters.step = 5
        mine.parts.replica.parameters.values[3] = float("inf")
        with pytest.raises(
            RunError, match=r"a parameter is not finite after step 5 .*last checkpoint: .*00000000"
        ):
            mine.save()
    assert list(checkpoint_steps(tmp_path)) == [0]


class NanGradient(NanLoss):
    """Gives a loss that is a number, and whose gradient is none, at one step."""

    def loss(self, model: Any, batch: Any) -> LossSum:
        loss = AcousticTask.loss(self, model, batch)
        self.num_steps += 1
        if self.num_steps != self.at_step:
            return loss
        return LossSum(loss.total + (0 * next(model.parameters())).sqrt().sum(), loss.num_frames)


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=2"])
def test_a_final_model_that_nobody_has_evaluated_is_refused_where_it_is_not_finite(
    dataset: Dataset, tmp_path: Path, strategy: str
) -> None:
    options = dataclasses.replace(OPTIONS, max_steps=3, strategy=StrategyChoice(strategy))
    refused = []

    def train(comm: Communicator) -> None:
        task = NanGradient(3 if comm.rank == 1 else 0)
        with pytest.raises(DivergedError, match="a parameter of the final model is not finite after step 3"):
            advance(dataset, comm, options, tmp_path, task)
        refused.append(comm.rank)

    run_threads(2, train)
    assert sorted(refused) == [0, 1]


def test_checkpoints_of_an_earlier_version_and_of_another_model_s_buffers(
    dataset: Dataset, tmp_path: Path
) -> None:
    """Earlier versions saved statistics, which are floating-point buffers, and no others."""
    options = dataclasses.replace(OPTIONS, model=ModelOptions(layers=1, cells=4, criterion="full-sum"))
    with ExitStack() as stack:
        mine, _ = build_trainer(Session(dataset, ALONE, CPU), options, tmp_path, stack)
        model: Any = mine.parts.model
        saved = model.class_prior.add_(0.5).clone()
        mine.save()
        mine.flush()
        state = load_checkpoint(tmp_path, ALONE, [])
        assert state is not None
        for name in ("statistics.class_prior", "untrained.class_prior"):
            state.tensors[name] = state.tensors.pop("untrained.class_prior")
            model.class_prior.zero_()
            model.register_buffer("steps", torch.tensor(7))
            mine.restore(state)
            assert torch.equal(model.class_prior, saved) and model.steps == 7
            state.tensors["untrained.class_prior"] = state.tensors.pop(name)
        state.tensors["untrained.class_prior"] = torch.zeros(3)
        with pytest.raises(
            RunError, match=r"the checkpoint has class_prior with the shape \[3\], but the model's is \["
        ):
            mine.restore(state)


def test_a_checkpoint_of_another_kind_of_device_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    """cuDNN's weights lie in another order in the flat vector; their sizes may happen to fit."""
    with ExitStack() as stack:
        mine, _ = build_trainer(Session(dataset, ALONE, CPU), OPTIONS, tmp_path, stack)
        mine.save()
        mine.flush()
        state = load_checkpoint(tmp_path, ALONE, [])
        assert state is not None and state.values["device"] == "cpu"
        state.values["device"] = "cuda"
        with pytest.raises(
            RunError, match="started on cuda and cannot continue on cpu; resume it with --device cuda"
        ):
            mine.restore(state)
