"""Runs whose ranks are threads, under delays at random: what they come to must not depend on them.

    python -m tests.faults.schedules 1000 --seed 1 [--only dpsgd]     # or one: 1 --seed N

A schedule is a number: strategy, ranks, delays, and whether the run is stopped, killed, fed or realigned all
follow from it.  What must be so afterwards, however late anything was:

- training ends in bounded time, without an error on any rank;
- every epoch has one line in metrics.jsonl, and every frame was trained on once an epoch;
- the ranks end with equal replicas;
- with a strategy whose runs repeat, model and evaluations are bit for bit those of a run left in peace.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.comm.roles import assign_roles
from speechdp.comm.threads import run_threads
from speechdp.config import ModelOptions, TrainOptions
from speechdp.config_batch import BatchOptions
from speechdp.config_optimizer import OptimizerOptions
from speechdp.data.dataset import Dataset
from speechdp.data.fed_source import Feeders
from speechdp.strategies.registry import parse_strategy
from speechdp.train import build, checkpoint_writer, run, stop
from speechdp.train.feeders import open_link, serve_trainers
from speechdp.train.progress import SilentReporter
from speechdp.train.realign import train_with_realignment
from speechdp.train.session import Session
from speechdp.train.stop import StopRequest
from speechdp.train.trainer import Stopped
from tests.faults.late import LateCommunicator, Pace, late
from tests.helpers.finished_run import evaluations, model_tensors
from tests.helpers.tiny_data import TinySizes, write_tiny_data

#: Every strategy of docs/strategies.md, and what exchanges otherwise within one.
STRATEGIES = (
    "gradient_averaging",
    "gradient_averaging:every=2,bucket_mib=0.001",
    "model_averaging:period=2",
    "model_averaging:period=0.01s",
    "model_averaging:period=2,first=best,leave_out=0.05,combine=3",
    "adaptive_averaging:period=2,begin=1,interval=2",
    "bmuf:period=3",
    "slowmo:period=2",
    "diloco:period=3",
    "delayed_averaging:period=4,fragments=2,delay=1",
    "delayed_averaging:period=2,delay=2",
    "dpsgd",
    "dpsgd:topology=random",
    "dpsgd:topology=exponential",
    "dpsgd:topology=complete",
    "dpsgd:topology=ring,overlap=false",
    "ad_psgd",
    "ad_psgd:groups=2",
    "ad_psgd:topology=ring",
    "parameter_server",
    "parameter_server:mode=sync",
    "parameter_server:dedicated=true",
    "easgd:period=2",
    "easgd:period=2,mode=sync",
)
#: Those whose exchanges come when a clock says so: each run has its own.
_BY_THE_CLOCK = ("model_averaging:period=0.01s",)

Story = Literal["left alone", "stopped", "killed", "fed", "realigned"]
_STORIES: tuple[Story, ...] = ("left alone", "stopped", "stopped", "killed", "killed", "fed", "realigned")

CPU = torch.device("cpu")
_EPOCHS = 2
_OPTIONS = TrainOptions(
    ModelOptions(layers=1, cells=4, dropout=0.0),
    BatchOptions(batch_size=2),
    OptimizerOptions("adam", learning_rate=0.01),
    epochs=_EPOCHS,
    checkpoint_steps=2,
)
SIZES = TinySizes(train=18, dev=4, test=1)
#: Ranks that wait for one another longer than this hang, s.
_PATIENCE_S = 60.0
#: Seconds that a killed rank's checkpoint gets; a real one would get none.
_GRACE_S = 0.05
_torch_is_drawing = threading.RLock()


@dataclass(frozen=True)
class Schedule:
    """What one schedule does; everything follows from its seed."""

    seed: int
    strategy: str
    size: int
    story: Story
    pace: Pace

    @classmethod
    def draw(cls, seed: int, strategies: Sequence[str] = STRATEGIES) -> Schedule:
        """Return the schedule of a seed; seeds that follow one another take the strategies in turn."""
        rng = random.Random(seed)
        strategy = strategies[seed % len(strategies)]
        size = 2 if "groups=2" in strategy else rng.choice((2, 3))
        return cls(seed, strategy, size, rng.choice(_STORIES), Pace.draw(seed, size))

    @property
    def repeats(self) -> bool:
        """Whether every run of it comes to the same bits."""
        return parse_strategy(self.strategy).synchronous and self.strategy not in _BY_THE_CLOCK

    def __str__(self) -> str:
        return f"--seed {self.seed}: {self.strategy} on {self.size} ranks, {self.story}"


class _Killed(BaseException):
    """A rank is gone."""


class _At(SilentReporter):
    """Acts after so many steps of a rank."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._left, self._act = step, act

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


class Ranks(Protocol):
    """How schedules come to their ranks: threads of this process, or the processes of an MPI job."""

    def run(self, size: int, work: Callable[[Communicator], None]) -> None:
        """Have every rank do `work`."""

    def late(self, pace: Pace, folder: Path) -> AbstractContextManager[None]:
        """Return the block in which the ranks are late."""


class Threads(Ranks):
    """Ranks that are threads of this process."""

    def run(self, size: int, work: Callable[[Communicator], None]) -> None:
        run_threads(size, work, timeout_s=_PATIENCE_S)

    def late(self, pace: Pace, folder: Path) -> AbstractContextManager[None]:
        return late(pace, folder)


class Bench:
    """The data, the undisturbed runs, and a folder for those under delays.

    Args:
        folder: for all of it.
        ranks: what does the work.
        dataset: to train on; None: it is made up.
    """

    def __init__(self, folder: Path, ranks: Ranks, dataset: Dataset | None = None) -> None:
        self.folder, self._ranks = folder, ranks
        self._dataset = write_tiny_data(folder / "data", SIZES) if dataset is None else dataset
        self._references: dict[tuple[str, int, bool], Path] = {}

    @property
    def num_frames(self) -> int:
        """Frames trained on an epoch."""
        return self._dataset.num_frames("train")

    def run(self, schedule: Schedule) -> Finished:
        """Run a schedule to its end, where its story has it over an interruption."""
        reference = self._reference(schedule) if schedule.repeats else None
        run_dir = self.folder / f"run-{schedule.seed}"
        with _repeatable_in_threads() as parameters, self._ranks.late(schedule.pace, run_dir):
            if schedule.story == "fed":
                self._train_fed(schedule, run_dir)
            elif schedule.story in {"stopped", "killed"}:
                with contextlib.suppress(Stopped, _Killed):
                    self._train(schedule, run_dir, interrupted=True)
                if not (run_dir / "completed.json").exists():
                    self._train(schedule, run_dir, resume=True)
            else:
                self._train(schedule, run_dir)
        return Finished(schedule, run_dir, reference, parameters)

    def _train(
        self, schedule: Schedule, run_dir: Path, *, interrupted: bool = False, resume: bool = False
    ) -> None:
        rng = random.Random(f"{schedule.seed} interrupted")
        which, after = rng.randrange(schedule.size), rng.randint(1, 8)

        def work(comm: Communicator) -> None:
            reporter, request = SilentReporter(), StopRequest()

            def act() -> None:
                if schedule.story == "killed":
                    raise _Killed
                request.received = "SIGTERM"

            if interrupted and comm.rank == which:
                reporter = _At(after, act)
            session = Session(self._dataset, LateCommunicator(comm), CPU, reporter, request)
            options = _options(schedule)
            if options.realign:
                train_with_realignment(session, options, run_dir, resume=resume)
            else:
                run.train_run(session, options, run_dir, resume=resume)

        self._ranks.run(schedule.size, work)

    def _train_fed(self, schedule: Schedule, run_dir: Path) -> None:
        num_feeders = 1 + schedule.seed // len(STRATEGIES) % 2
        size = schedule.size + num_feeders
        roles = assign_roles(["host"] * size, num_feeders)

        def work(comm: Communicator) -> None:
            job = LateCommunicator(comm)
            is_feeder = job.rank in roles.feeders
            part = job.split(int(is_feeder))
            if is_feeder:
                serve_trainers(job, roles, Dataset.open(self._dataset.path))
                return
            with open_link(job, roles, CPU) as goodbye:
                session = Session(self._dataset, part, CPU, feeders=Feeders(goodbye.link))
                run.train_run(session, _options(schedule), run_dir)

        self._ranks.run(size, work)

    def _reference(self, schedule: Schedule) -> Path:
        """Return the run of the same strategy without delays."""
        key = (schedule.strategy, schedule.size, schedule.story == "realigned")
        if key not in self._references:
            path = self.folder / f"reference-{len(self._references)}"
            story: Story = "realigned" if schedule.story == "realigned" else "left alone"
            with _repeatable_in_threads():
                self._train(dataclasses.replace(schedule, story=story), path)
            self._references[key] = path
        return self._references[key]


@dataclass(frozen=True)
class Finished:
    """What a schedule came to.

    Attributes:
        schedule: which.
        run_dir: its run.
        reference: the same run without delays; None: none is the same.
        parameters: of every rank that is known, when the model was saved.
    """

    schedule: Schedule
    run_dir: Path
    reference: Path | None
    parameters: dict[int, Tensor]

    def differences(self, num_frames: int) -> Iterator[str]:
        """Yield what it should not have come to.

        Args:
            num_frames: of the split it was trained on.
        """
        lines = evaluations(self.run_dir)
        expected_lines = [(epoch, epoch * num_frames) for epoch in range(1, _EPOCHS + 1)]
        if [(line["epoch"], line["frames"]) for line in lines] != expected_lines:
            yield f"of {num_frames} frames metrics.jsonl has {lines}"
        if not (self.run_dir / "completed.json").is_file():
            yield "completed.json is missing"
        # What a killed rank had done since its last checkpoint stands there twice.
        too_many = _frames_trained(self.run_dir) - _EPOCHS * num_frames
        if too_many < 0 or (too_many > 0 and self.schedule.story != "killed"):
            yield f"{too_many} frames too many in the timelines"
        model = model_tensors(self.run_dir)
        if not all(bool(tensor.isfinite().all()) for tensor in model.values()):
            yield "the model is not finite"
        parameters = [self.parameters[rank] for rank in sorted(self.parameters)]
        if any(not torch.equal(parameters[0], other) for other in parameters):
            yield f"replicas of {len(parameters)} ranks differ"
        if self.reference is not None:
            expected = model_tensors(self.reference)
            different = [name for name, tensor in model.items() if not torch.equal(tensor, expected[name])]
            if different:
                yield f"another model: {different}"
            if lines != evaluations(self.reference):
                yield f"other evaluations: {lines} for {evaluations(self.reference)}"


def _keep_quiet(args: threading.ExceptHookArgs) -> None:
    """Say nothing of threads that a killed rank takes with it: what training raises is looked at."""


def _options(schedule: Schedule) -> TrainOptions:
    rounds = int(schedule.story == "realigned")
    options = dataclasses.replace(_OPTIONS, strategy=schedule.strategy)
    return dataclasses.replace(options, realign=1, realign_epochs=1) if rounds else options


def _frames_trained(run_dir: Path) -> int:
    """Return the frames in the timelines of all ranks."""
    return sum(
        json.loads(line).get("frames", 0)
        for path in (run_dir / "timeline").glob("rank-*.jsonl")
        for line in path.read_text().splitlines()
    )


@contextlib.contextmanager
def _repeatable_in_threads() -> Iterator[dict[int, Tensor]]:
    """Keep ranks that are threads out of one another's random numbers; note what each ends with."""
    parameters: dict[int, Tensor] = {}
    seed, make, save = torch.manual_seed, build.make_model, run.save_trained

    def seed_alone(number: int) -> Any:
        with _torch_is_drawing:
            return seed(number)

    def make_alone(*arguments: Any) -> Any:
        with _torch_is_drawing:
            return make(*arguments)

    def noted(session: Session, source: Any, run_dir: Path, model: torch.nn.Module, origin: Any) -> None:
        flat = torch.cat([weights.detach().flatten() for weights in model.parameters()])
        parameters[session.comm.rank] = flat
        save(session, source, run_dir, model, origin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", seed_alone)
        patch.setattr(build, "make_model", make_alone)
        patch.setattr(run, "make_model", make_alone)
        patch.setattr(run, "save_trained", noted)
        patch.setattr(stop, "_INTERVAL_S", 0.0)
        patch.setattr(checkpoint_writer, "_GRACE_S", _GRACE_S)
        patch.setattr(threading, "excepthook", _keep_quiet)
        yield parameters


def fuzz_schedules(
    num: int,
    seed: int,
    *,
    strategies: Sequence[str] = STRATEGIES,
    until_s: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[int, list[str]]:
    """Run schedules `seed` to `seed + num - 1`; return how many were run, and what is wrong with which.

    Args:
        strategies: taken in turn.
        until_s: begin none after so many seconds.
        tell: called with what is wrong as soon as it is known.
    """
    begun_s, wrong, done = time.monotonic(), [], 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="speechdp-schedules-", ignore_cleanup_errors=True) as folder:
            bench = Bench(Path(folder), Threads())
            for number in range(seed, seed + num):
                if until_s is not None and time.monotonic() - begun_s > until_s:
                    break
                done += 1
                problem = _problem(bench, Schedule.draw(number, strategies))
                if problem is not None:
                    tell(problem)
                    wrong.append(problem)
    finally:
        torch.set_num_threads(threads)
    return done, wrong


def _problem(bench: Bench, schedule: Schedule) -> str | None:
    """Run a schedule; return what is wrong with what it came to."""
    try:
        finished = bench.run(schedule)
    except (Exception, _Killed) as error:
        notes = ", ".join(getattr(error, "__notes__", []))
        return f"{schedule}: {type(error).__name__}: {error} ({notes})"
    wrong = list(finished.differences(bench.num_frames))
    shutil.rmtree(finished.run_dir)
    return f"{schedule}: {'; '.join(wrong)}" if wrong else None


def main() -> None:
    """Run schedules and say which are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("num", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="strategies whose description begins so")
    options = parser.parse_args()
    strategies = [name for name in STRATEGIES if name.startswith(options.only)]
    begun = time.monotonic()
    done, wrong = fuzz_schedules(options.num, options.seed, strategies=strategies, tell=print)
    seconds = time.monotonic() - begun
    print(json.dumps({"schedules": done, "differing": len(wrong), "seconds": round(seconds, 1)}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
