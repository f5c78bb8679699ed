"""Runs of all ranks under delays: how they are made, interrupted and resumed, and what they must come to."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
import torch
from torch import Tensor

from speechdp.checkpoint import writer as checkpoint_writer
from speechdp.comm.base import Communicator
from speechdp.comm.startup.feeder_roles import assign_roles
from speechdp.comm.threads.communicator import ThreadsCommunicator, run_threads
from speechdp.comm.threads.job import Vanished
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import SpeechDPError
from speechdp.feeding.fed_source import Feeders
from speechdp.feeding.feeders import open_link, serve_trainers
from speechdp.files import cannot_be_written
from speechdp.options.batch import BatchOptions
from speechdp.options.faults import FaultOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel import stop
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.stop import StopRequest
from speechdp.train import build, run
from speechdp.train.progress import SilentReporter
from speechdp.train.realign import train_with_realignment
from speechdp.train.session import Session
from speechdp.train.trainer import Stopped
from tests.faults.late import Fault, Killed, Lateness, Pace, late, rank_of_job
from tests.faults.late_communicator import LateCommunicator
from tests.helpers.finished_run import evaluations, model_tensors
from tests.helpers.tiny_data import TinySizes, write_tiny_data

#: What comes between: a stop as asked; the end of a rank, and with it of the job; a disk that fails from some
#: write on, on one rank; a rank that is lost, which the others go on without.
Interruption = Literal["undisturbed", "stopped", "killed", "failing", "lost"]

CPU = torch.device("cpu")
EPOCHS = 2
#: The watchdogs of ranks that are threads would end the tests' own process; ranks that hang are found below.
_FAULTS = FaultOptions(hang_timeout=1e6)
_OPTIONS = TrainOptions(
    ModelOptions(layers=1, cells=4, dropout=0.0),
    BatchOptions(batch_size=2),
    OptimizerOptions("adam", learning_rate=0.01),
    faults=_FAULTS,
    epochs=EPOCHS,
    checkpoint_steps=2,
)
SIZES = TinySizes(train=18, dev=4, test=1)
#: Ranks that wait for one another longer than this hang, s.
PATIENCE_S = 240.0
#: Seconds that a killed rank's checkpoint gets; a real one would get none.
_GRACE_S = 0.05
#: Longest pause between two looks of rank 0 for the others' files, s: the sooner it takes them, the worse.
_PAUSE_S = 0.004
_ERRORS = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS)
_torch_is_drawing = threading.RLock()


@dataclass(frozen=True)
class Story:
    """What a run goes through.

    Attributes:
        strategy: as --strategy has it.
        size: ranks that train.
        interruption: once; the run is resumed.
        num_feeders: ranks that feed them; 0: they read for themselves.
        realigns: it begins with a round of realignment.
        repeats: every such run comes to the same bits.
    """

    strategy: str
    size: int
    interruption: Interruption = "undisturbed"
    num_feeders: int = 0
    realigns: bool = False
    repeats: bool = True

    def __str__(self) -> str:
        more = [self.interruption]
        more += [f"with {self.num_feeders} feeders"] if self.num_feeders else []
        more += ["realigned"] if self.realigns else []
        return f"{self.strategy} on {self.size} ranks, {', '.join(more)}"

    @property
    def options(self) -> TrainOptions:
        """Options of the run."""
        options = dataclasses.replace(_OPTIONS, strategy=StrategyChoice(self.strategy))
        if self.interruption == "lost":
            options = dataclasses.replace(options, faults=dataclasses.replace(_FAULTS, tolerate_loss=True))
        return dataclasses.replace(options, realign=1, realign_epochs=1) if self.realigns else options

    @property
    def uninterrupted(self) -> Story:
        """The story of the run it must equal."""
        return dataclasses.replace(self, interruption="undisturbed", num_feeders=0)


class _At(SilentReporter):
    """Acts after so many steps of a rank."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._left, self._act = step, act

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


class Ranks(Protocol):
    """How runs come to their ranks: threads of this process, or the processes of an MPI job."""

    def run(self, size: int, work: Callable[[Communicator], None]) -> None:
        """Have every rank do `work`."""

    def late(self, pace: Pace, folder: Path) -> AbstractContextManager[Lateness]:
        """Return the block in which the ranks are late."""


class Threads(Ranks):
    """Ranks that are threads of this process."""

    def run(self, size: int, work: Callable[[Communicator], None]) -> None:
        def begin(comm: Communicator) -> None:
            assert isinstance(comm, ThreadsCommunicator)
            job = comm._shared.job
            with rank_of_job(lambda error: job.fail(comm.rank, error)):
                work(comm)

        try:
            run_threads(size, begin, timeout_s=PATIENCE_S)
        except BaseException as error:  # also where a rank was to fail the others must end
            hanging = [note for note in getattr(error, "__notes__", []) if "did not end" in note]
            assert not hanging, hanging
            raise

    def late(self, pace: Pace, folder: Path) -> AbstractContextManager[Lateness]:
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
        self._references: dict[Story, Path] = {}
        self._num_dirs = 0

    def run(self, story: Story, pace: Pace) -> Finished:
        """Have a story happen, however late anything is.

        Raises:
            AssertionError: what ended a run on a failing disk is not one line that names the remedy.
        """
        reference = self._reference(story.uninterrupted) if story.repeats else None
        run_dir = self._next_dir("run")
        with _repeatable_in_threads(run_dir) as parameters, self._ranks.late(pace, run_dir) as lateness:
            if story.interruption != "undisturbed":
                self._run_interrupted(story, run_dir, lateness, random.Random(f"{pace.seed} interrupted"))
            is_begun = (run_dir / "run.json").exists() or (run_dir / "realign").exists()
            if not (run_dir / "completed.json").exists():
                self._train(story, run_dir, SilentReporter, resume=is_begun)
        return Finished(story, run_dir, reference, parameters, self._dataset.num_frames("train"))

    def _run_interrupted(self, story: Story, run_dir: Path, lateness: Lateness, rng: random.Random) -> None:
        """Train until the interruption, or to the end where it comes too late."""
        rank, step = rng.randrange(story.size), rng.randint(1, 8)
        if story.interruption == "killed":
            lateness.fault = Fault(rank, rng.randint(1, 400))
        elif story.interruption == "failing":
            lateness.fault = Fault(rank, rng.randint(1, 40), rng.choice(_ERRORS))
        elif story.interruption == "lost":
            rank = rng.randrange(1, story.size)

        def reporter(comm: Communicator, request: StopRequest) -> SilentReporter:
            def act() -> None:
                if story.interruption == "lost":
                    raise Vanished
                if story.interruption == "stopped":
                    request.received = "SIGTERM"

            return _At(step if comm.rank == rank else 0, act)

        try:
            self._train(story, run_dir, reporter)
        except (Stopped, Killed):
            pass
        except SpeechDPError as error:
            self._check_message(error, lateness.fault)
        finally:
            lateness.fault = None
            if story.interruption != "stopped":
                lateness.end_all()

    def _check_message(self, error: SpeechDPError, fault: Fault | None) -> None:
        assert fault is not None, error
        reason = OSError(fault.number, "")
        remedy = cannot_be_written("", reason).partition("; ")[2].partition(", then")[0]
        assert remedy in str(error) and "\n" not in str(error), f"errno {fault.number}: {error}"

    def _train(
        self,
        story: Story,
        run_dir: Path,
        reporter: Callable[..., SilentReporter],
        *,
        resume: bool = False,
    ) -> None:
        options = story.options
        size = story.size + story.num_feeders
        roles = assign_roles(["host"] * size, story.num_feeders) if story.num_feeders else None

        def train(comm: Communicator, feeders: Feeders | None = None) -> None:
            request = StopRequest()
            told = reporter(comm, request) if reporter is not SilentReporter else SilentReporter()
            session = Session(self._dataset, comm, CPU, told, request, feeders=feeders)
            if options.realign:
                train_with_realignment(session, options, run_dir, resume=resume)
            else:
                run.train_run(session, options, run_dir, resume=resume)

        def work(comm: Communicator) -> None:
            job = LateCommunicator(comm)
            if roles is None:
                train(job)
                return
            is_feeder = job.rank in roles.feeders
            part = job.split(int(is_feeder))
            if is_feeder:
                serve_trainers(job, roles, Dataset.open(self._dataset.path))
                return
            with open_link(job, roles, CPU) as connection:
                train(part, Feeders(connection.link))

        self._ranks.run(size, work)

    def _reference(self, story: Story) -> Path:
        """Return the run of a story without delays."""
        if story not in self._references:
            path = self._next_dir("reference")  # not that of one that has failed
            with _repeatable_in_threads(path):
                self._train(story, path, SilentReporter)
            self._references[story] = path
        return self._references[story]

    def _next_dir(self, what: str) -> Path:
        self._num_dirs += 1
        return self.folder / f"{what}-{self._num_dirs}"


@dataclass(frozen=True)
class Finished:
    """What a story came to.

    Attributes:
        story: which.
        run_dir: its run.
        reference: the same run without delays; None: none is the same.
        parameters: of every rank that is known, when the model was saved.
        num_frames: an epoch's.
    """

    story: Story
    run_dir: Path
    reference: Path | None
    parameters: dict[int, Tensor]
    num_frames: int

    def differences(self) -> Iterator[str]:
        """Yield what it should not have come to."""
        if not (self.run_dir / "completed.json").is_file():
            yield "completed.json is missing"
        yield from self._wrong_lines()
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
            if evaluations(self.run_dir) != evaluations(self.reference):
                yield f"evaluations other than {evaluations(self.reference)}: {evaluations(self.run_dir)}"

    def _wrong_lines(self) -> Iterator[str]:
        lines, is_lossy = evaluations(self.run_dir), self.story.interruption == "lost"
        wanted = [(epoch, epoch * self.num_frames) for epoch in range(1, EPOCHS + 1)]
        found = [(line["epoch"], line["frames"]) for line in lines]
        if [epoch for epoch, _ in found] != [epoch for epoch, _ in wanted]:
            yield f"metrics.jsonl has {lines}"
        elif found != wanted and not is_lossy:
            yield f"of {self.num_frames} frames an epoch metrics.jsonl has {lines}"
        trained = sum(
            json.loads(line).get("frames", 0)
            for path in (self.run_dir / "timeline").glob("rank-*.jsonl")
            for line in path.read_text().splitlines()
        )
        # Where a rank ended suddenly, steps are missing, or stand there twice.
        if trained != EPOCHS * self.num_frames and self.story.interruption in {"undisturbed", "stopped"}:
            yield f"the timelines have {trained} frames instead of {EPOCHS * self.num_frames}"


@contextlib.contextmanager
def _repeatable_in_threads(run_dir: Path) -> Iterator[dict[int, Tensor]]:
    """Keep ranks that are threads out of one another's random numbers; note what each ends the run with."""
    parameters: dict[int, Tensor] = {}
    seed, make, save = torch.manual_seed, build.make_model, run.save_trained

    def seed_alone(number: int) -> Any:
        with _torch_is_drawing:
            return seed(number)

    def make_alone(*arguments: Any) -> Any:
        with _torch_is_drawing:
            return make(*arguments)

    def noted(
        session: Session, options: Any, source: Any, folder: Path, model: torch.nn.Module, origin: Any
    ) -> None:
        if folder == run_dir:  # not a round of realignment
            flat = torch.cat([weights.detach().flatten() for weights in model.parameters()])
            parameters[session.comm.rank] = flat
        save(session, options, source, folder, model, origin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", seed_alone)
        patch.setattr(build, "make_model", make_alone)
        patch.setattr(run, "save_trained", noted)
        patch.setattr(stop, "_INTERVAL_S", 0.0)
        patch.setattr(checkpoint_writer, "_GRACE_S", _GRACE_S)
        patch.setattr(checkpoint_writer, "_LONGEST_PAUSE_S", _PAUSE_S)
        yield parameters
