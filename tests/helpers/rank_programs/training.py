"""One rank of a job that interrupts and resumes runs and compares: `training.py BACKEND SIZE DATA OUT`."""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import torch

from speechdp.checkpoint.state import checkpoint_steps
from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.data.loading.reader import SplitReader
from speechdp.data.plan.epoch_plan import plan_epoch
from speechdp.data.shards.dataset import Dataset
from speechdp.options.run import TrainOptions
from speechdp.parallel import stop
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Stopped
from speechdp.train.progress import SilentReporter
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import assert_equal_runs
from tests.helpers.fork_server import ADDRESS
from tests.helpers.training_cases import CASES, CHECKPOINT_STEPS, SYNTHESIS_CASES

_COMPILER = "torch._dynamo"
_IMPORTED = "training imports torch's compiler"


class Interruption(SilentReporter):
    """Calls `act` once after step `at_step`."""

    def __init__(self, at_step: int, act: Callable[[], None]) -> None:
        self.at_step, self.act = at_step, act
        self.num_steps = 0

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        self.num_steps += 1
        if self.num_steps == self.at_step:
            self.act()


class KilledError(Exception):
    """Stands for a process that is gone."""


def kill() -> None:
    raise KilledError


def check(comm: Communicator, dataset: Dataset, options: TrainOptions, out: Path) -> None:
    """Train one run undisturbed and one that is asked to stop, is killed, and is resumed each time."""
    cpu = torch.device("cpu")
    epoch_ends = steps_at_epoch_ends(comm, dataset, options)
    train_run(Session(dataset, comm, cpu), options, out / "whole")
    run = out / "in-parts"

    request = StopRequest()
    only_here = comm.rank == comm.size - 1  # one rank is asked, all stop
    ask = Interruption(5, lambda: setattr(request, "received", "SIGTERM" if only_here else None))
    stopped_at = interrupted(Session(dataset, comm, cpu, ask, request), options, run, Stopped, resume=False)
    assert 5 < stopped_at < epoch_ends[0], stopped_at

    # Two steps after a checkpoint in the middle of the second epoch.
    last_saved = CHECKPOINT_STEPS * ((epoch_ends[0] + 1) // CHECKPOINT_STEPS + 1)
    assert epoch_ends[0] + 1 < last_saved < epoch_ends[1] - 2
    died = Interruption(last_saved + 2 - stopped_at, kill)
    died_at = interrupted(Session(dataset, comm, cpu, died), options, run, KilledError, resume=True)
    assert died_at == last_saved, died_at

    train_run(Session(dataset, comm, cpu), options, run, resume=True)
    if comm.rank == 0:
        assert_equal_runs(run, out / "whole")
    comm.barrier()


def steps_at_epoch_ends(comm: Communicator, dataset: Dataset, options: TrainOptions) -> list[int]:
    with closing(SplitReader(dataset, "train")) as reader:
        plans = [plan_epoch(reader.index, options.plan(), e, comm.size) for e in range(options.num_epochs)]
    return list(accumulate(plan.num_steps for plan in plans))


def interrupted(
    session: Session, options: TrainOptions, run: Path, ending: type[Exception], *, resume: bool
) -> int:
    """Train until the interruption; return the step of the last checkpoint."""
    try:
        train_run(session, options, run, resume=resume)
    except ending:
        pass
    else:
        raise AssertionError(f"the run ended without {ending.__name__}")
    session.comm.barrier()
    for name in ("completed.json", "model.safetensors", "timing.json"):
        assert not (run / name).exists(), name
    return next(checkpoint_steps(run))


class CompilerRefused(importlib.abc.MetaPathFinder):
    """Refuses an import of torch's compiler where it happens, and notes it: who imports might go on without.

    A rank's start would take a second more (parallel/uncompiled.py).
    """

    def __init__(self) -> None:
        self.is_asked_for = False
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == _COMPILER:
            self.is_asked_for = True
            raise AssertionError(_IMPORTED)


def forget_compiler() -> None:
    """Have an import of torch's compiler, or of a part of it, begin anew: it could not be imported again."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{_COMPILER}.")]:
        del sys.modules[name]
    vars(torch).pop("_dynamo", None)


def main(comm: Communicator) -> None:
    assert comm.size == int(sys.argv[2])
    stop._INTERVAL_S = 0.0  # agree at every step
    dataset = Dataset.open(sys.argv[3])
    cases = CASES if dataset.task == "acoustic" else SYNTHESIS_CASES
    for name, options in cases.items():
        try:
            check(comm, dataset, options, Path(sys.argv[4]) / name)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert not compiler.is_asked_for, _IMPORTED
    if comm.rank == 0:
        print(f"{len(cases)} runs resumed bitwise on {comm.size} ranks")


if os.environ.get(ADDRESS):  # a fork of a process that has imported all
    forget_compiler()
assert _COMPILER not in sys.modules, _IMPORTED
compiler = CompilerRefused()
sys.exit(guard(lambda: create_communicator(sys.argv[1]), main))
