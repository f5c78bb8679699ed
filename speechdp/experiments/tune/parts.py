"""Train parts of the runs of a search one after another within one start of the ranks.

A start takes seconds (imports, MPI, opening the data), often longer than a part of a run in an early rung.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from speechdp.experiments.arguments import train_arguments
from speechdp.experiments.checked import checked_fields
from speechdp.experiments.record import delete_file, write_record_file
from speechdp.files import listed_anew
from speechdp.json_input import parse_json
from speechdp.options.run import TrainOptions
from speechdp.ownership.overwrite import RUN, empty
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.run_files import RunDirectory
from speechdp.process.ending import Paused, Stopped
from speechdp.report.runs.records import finite
from speechdp.train.ownership import owned
from speechdp.train.progress import Reporter
from speechdp.train.realign import train_or_resume
from speechdp.train.session import Session

#: File with the times of a job's parts; it is beside their runs.
TOOK = "took.json"


@dataclass(frozen=True)
class Part:
    """A part of a run.

    Attributes:
        folder: name of the run's folder.
        strategy, batch_size, learning_rate: as in Setting.
        pause_at: step at which the run is evaluated and pauses; 0: train to the end.
        max_steps: step after which the run ends; 0: train all epochs.
        anew: delete what an earlier start left; otherwise continue from it.
    """

    folder: str
    strategy: str
    batch_size: int = 0
    seed: int = 0
    pause_at: int = 0
    max_steps: int = 0
    anew: bool = False
    learning_rate: float | None = None

    def options(self, shared: TrainOptions) -> TrainOptions:
        """Return the options of the run.

        Args:
            shared: options that all runs of the search share.
        """
        own = shared.with_setting(StrategyChoice(self.strategy), self.batch_size, self.learning_rate)
        average = 1 if self.max_steps else own.average_epochs
        return dataclasses.replace(own, seed=self.seed, max_steps=self.max_steps, average_epochs=average)


@dataclass(frozen=True)
class Parts:
    """The parts that a job trains.

    Attributes:
        parts: in order.
        longest_s: time after which no further part begins, s; 0: train all.
    """

    parts: tuple[Part, ...]
    longest_s: float = 0.0

    @property
    def text(self) -> str:
        """The parts as one command-line word for the ranks."""
        return json.dumps({"longest_s": self.longest_s, "parts": [vars(part) for part in self.parts]})

    @classmethod
    def of(cls, text: str) -> Parts:
        """Return the parts encoded in `text`."""
        found = json.loads(text)
        return cls(tuple(Part(**checked_fields(Part, one)) for one in found["parts"]), found["longest_s"])


def train_parts(
    session: Session,
    shared: TrainOptions,
    job: Parts,
    root: Path,
    reporter_for: Callable[[str], Reporter],
) -> None:
    """Train parts of runs in order, and record the time of each in ROOT/took.json.  Collective.

    Args:
        shared: options that all runs share.
        root: folder of the runs.
        reporter_for: makes the reporter of a run from its name.

    Raises:
        as `train_run`.
    """
    took_s: list[float] = []
    begin_s = time.monotonic()
    for part in job.parts:
        part_s = time.monotonic()
        is_late = 0 < job.longest_s < part_s - begin_s
        answers = session.comm.allgather_object([is_late, session.is_asked_to_stop()])
        if any(is_asked for _, is_asked in answers):
            raise Stopped
        if answers[0][0]:
            return
        _train(dataclasses.replace(session, reporter=reporter_for(part.folder)), shared, part, root)
        # Model, optimizer and their tensors are in reference cycles, and the next run needs their memory.
        gc.collect()
        took_s.append(time.monotonic() - part_s)
        if session.comm.rank == 0:
            write_record_file(root / TOOK, "parts", {"took_s": [round(one, 3) for one in took_s]})


def _train(session: Session, shared: TrainOptions, part: Part, root: Path) -> None:
    """Train a part; run.json has the command that would train the run by itself.  Collective."""
    run_dir, options = root / part.folder, part.options(shared)
    command = ["speechdp", "train", str(session.dataset.path), str(run_dir), *train_arguments(options)]
    facts = {**session.facts, "command": command}
    with owned(session, run_dir, "tune") as owner:
        if part.anew and owner is not None and RunDirectory(run_dir).is_begun:
            empty(owner, RUN)
        session.comm.barrier()
        with suppress(Paused):
            own = dataclasses.replace(session, facts=facts, pause_at=part.pause_at)
            train_or_resume(own, options, run_dir)


def forget_took(root: Path) -> None:
    """Delete the times of an earlier job.  Raises RunError on failure."""
    delete_file(root / TOOK)


def read_took(root: Path, *, is_over: bool = False) -> list[float]:
    """Return the times of the finished parts of the last job, in order, s.

    Args:
        is_over: the job has ended, so its last record must be visible.
    """
    if is_over:
        with suppress(OSError):
            listed_anew(root)
    try:
        found = [finite(one) for one in parse_json((root / TOOK).read_text(encoding="utf-8"))["took_s"]]
    except (OSError, ValueError, TypeError, KeyError):  # the job has not begun
        return []
    return [one for one in found if one is not None]
