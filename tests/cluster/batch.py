"""What the batch systems of the lab have in common: a job as they show it, and how to wait for one."""

from __future__ import annotations

import json
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.lab import Lab
from tests.helpers.gates import Gates
from tests.helpers.tiny_data import TINY_MODEL

#: Long: everything on the nodes shares the few cores of one machine.
WAIT_S = 240.0
_POLL_S = 0.2
#: Some hundred steps on two ranks, and a checkpoint soon after the start.
OPTIONS = (
    *TINY_MODEL, "--batch-size", "1", "--epochs", "10", "--checkpoint-steps", "37",
    "--strategy", "model_averaging:period=5",
)  # fmt: skip
#: The step at which a job of these waits to be interrupted: behind a checkpoint, and early enough that ranks,
#: which agree on a stop at ever rarer steps, do so before the last.
GATE = 100


@dataclass(frozen=True)
class BatchJob:
    """A job as its batch system shows it.

    Attributes:
        job_id: as the batch system's commands take it.
        state: in the batch system's words.
        exit_code: of its script; None: it has not ended, or nobody kept it.
        restarts: how often it was started again.
        hosts: where it runs or ran, as the batch system writes it.
    """

    job_id: str
    state: str
    exit_code: int | None = None
    restarts: int = 0
    hosts: str = ""


class WaitsForJobs(ABC):
    """A batch system whose jobs write to a file that is known beforehand."""

    @abstractmethod
    def show(self, job_id: str) -> BatchJob:
        """Return what the batch system says of a job."""

    @abstractmethod
    def _cancel(self, job_id: str) -> str:
        """End a job at once; return what the batch system had to say of it."""

    def wait(self, job_id: str, output: Path) -> BatchJob:
        """Wait for the end of a job; on a time-out delete it and fail with what it wrote to `output`."""
        self.wait_until(job_id, output, lambda job: job.exit_code is not None, "the end")
        return self.show(job_id)

    def wait_until(
        self, job_id: str, output: Path, condition: Callable[[BatchJob], object], what: str
    ) -> None:
        """Wait until a condition, given the job, has come true; on a time-out delete the job and fail."""

        def explain() -> str:
            job = self.show(job_id)
            said = output.read_text(errors="replace") if output.is_file() else "(no output)"
            return f"{job}\n{said}\n{self._cancel(job_id)}"

        wait_until(lambda: condition(self.show(job_id)), f"{what} of job {job_id}", explain)


def submitted(lab: Lab, argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
    """Run a command that submits, on the first node; return the job id it prints."""
    ended = lab.on(lab.names[0], argv, env=env)
    found = re.search(r"\b[Jj]ob (\d+)\b", ended.stdout) or re.fullmatch(r"(\d+)(\.\S+)?\n", ended.stdout)
    assert ended.exit_code == 0 and found, ended.output
    return found[1]


def wait_until(condition: Callable[[], object], what: str, explain: Callable[[], str]) -> None:
    """Wait until something has come true; on a time-out fail with what `explain` returns."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for {what}\n{explain()}")
        time.sleep(_POLL_S)


def in_folder(folder: Path, *argv: str | Path) -> list[str]:
    """Return the command that runs `argv` in a folder, as a user who stands there."""
    return ["env", f"--chdir={folder}", *map(str, argv)]


def submit_train(scheduler: str, data: Path, run: Path, *options: str) -> list[str]:
    """Return the command that submits a training of OPTIONS over two nodes, from the folder of `run`."""
    asked = ["--scheduler", scheduler, "--nodes", "2", "--ranks-per-node", "1"]
    if "--time" not in options:
        asked += ["--time", "0:10:00"]
    program = [sys.executable, "-m", "speechdp", "submit", *asked, *options]
    return in_folder(run.parent, *program, "--", "train", data, run, *OPTIONS)


def handed_on(gates: Gates | None) -> list[str]:
    """Return the options of submit by which a job gets the variables of its gates.

    PBS and Grid Engine hand it none that they are not told of.
    """
    told = ",".join(f"{name}={value}" for name, value in ({} if gates is None else gates.env).items())
    return [f"--scheduler-args=-v {told}"] if told else []


def hosts_of(run: Path) -> list[str]:
    """Return the hosts of a run's ranks, as the run noted them."""
    hosts: list[str] = json.loads((run / "run.json").read_text())["hosts"]
    return hosts
