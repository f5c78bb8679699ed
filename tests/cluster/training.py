"""Small trainings over the nodes of a lab: start them, break them, look at what they said and left."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from speechdp.data.shards.dataset import Dataset
from tests.cluster.lab import Lab, NodeJob
from tests.helpers.gates import Gates
from tests.helpers.jobs import DEADLINE_S, SPEECHDP
from tests.helpers.killed import last_step
from tests.helpers.mpi import Ended
from tests.helpers.tiny_data import TINY_MODEL

MPIRUN: tuple[str, ...] = ()
HOROVODRUN_MPI = ("--launcher", "horovodrun")
HOROVODRUN_GLOO = ("--launcher", "horovodrun", "--controller", "gloo")

#: One epoch: what counts is that it comes to its end.
SHORT = ("--batch-size", "2", "--epochs", "1")
#: Seconds of training with many checkpoints, to be broken in the middle and to end all the same.
NUM_EPOCHS = 5
LONG = ("--batch-size", "1", "--epochs", str(NUM_EPOCHS), "--checkpoint-steps", "13")
#: Training that ends only when something is wrong.
ENDLESS = ("--batch-size", "1", "--epochs", "100000", "--checkpoint-steps", "13")


@dataclass(frozen=True)
class Training:
    """A training over nodes of a lab, started on n1.

    Attributes:
        lab: the nodes.
        dataset: on a folder that they share.
        hosts: of the hostfile, in this order; none: all nodes.
        slots: of each host.
        launch: options of `speechdp launch`.
        train: options of `speechdp train`.
        backend: what the ranks exchange over.
    """

    lab: Lab
    dataset: Dataset
    hosts: tuple[str, ...] = ()
    slots: int = 1
    launch: tuple[str, ...] = MPIRUN
    train: tuple[str, ...] = SHORT
    backend: str = "mpi"

    def command(self, run: Path) -> list[str]:
        """Return the command line of n1."""
        hostfile = self.lab.hostfile(self.slots, self.hosts)
        train = ["train", self.dataset.path, run, *TINY_MODEL, *self.train, "--backend", self.backend]
        return [*SPEECHDP, "launch", "--hostfile", str(hostfile), *self.launch, "--", *map(str, train)]

    def to_the_end(self, run: Path) -> Path:
        """Train; return the folder of the run, which is complete."""
        ended = self.lab.on("n1", self.command(run), timeout_s=DEADLINE_S)
        assert ended.exit_code == 0, ended.output
        assert (run / "completed.json").exists(), ended.output
        return run

    @contextmanager
    def begun(self, run: Path, gates: Gates | None = None) -> Iterator[NodeJob]:
        """Train in the background from the first checkpoint on; nothing is left of it after the block."""
        job = self.lab.start("n1", self.command(run), mark=run, gates=gates)
        try:
            job.wait_until(lambda: last_step(run), "a checkpoint")
            yield job
        finally:
            job.kill()


def on_one_node(lab: Lab, dataset: Dataset, size: int, train: tuple[str, ...] = SHORT) -> Path:
    """Return a complete run of `size` ranks on n1 alone, over MPI; made once."""
    run = lab.folder / f"alone-{size}-{'-'.join(train).replace('--', '')}"
    if not run.exists():
        Training(lab, dataset, ("n1",), size, train=train).to_the_end(run)
    return run


def assert_same_model(run: Path, other: Path) -> None:
    """Check that two runs have come to the same parameters, bit for bit."""
    assert (run / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def assert_close_model(run: Path, other: Path) -> None:
    """Check that two runs differ by no more than the order of summation explains."""
    model, expected = (load_file(folder / "model.safetensors") for folder in (run, other))
    assert model.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(model[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def last_word(ended: Ended, run: Path) -> str:
    """Return launch's one line about a job that failed, having checked the rest of what was said.

    The line names the last checkpoint, the exit code is a failure's, and nothing is on stderr besides but
    what speechdp has said.
    """
    assert ended.exit_code != 0, ended.output
    assert not (run / "completed.json").exists(), ended.output
    lines = ended.stderr.splitlines()
    (line,) = [line for line in lines if line.startswith("speechdp launch: ")]
    assert f"; last checkpoint: {run}/checkpoints/step-" in line, ended.output
    ours = re.compile(r"(\[\d+\]<stderr>:)?speechdp")  # horovodrun puts the rank before each line
    assert [line for line in lines if not ours.match(line)] == [], ended.output
    return line


def assert_nothing_left(lab: Lab, names: Sequence[str] = (), within_s: float = 60.0) -> None:
    """Check that soon after a job's end nothing of it runs on the nodes any more.

    Sessions of sshd do not count: behind a cut link they wait for their client, with nothing to do.
    """
    deadline = time.monotonic() + within_s
    for name in names or lab.names:
        while left := [line for line in map(_command_line, lab.pids(name)) if not line.startswith("sshd:")]:
            assert time.monotonic() < deadline, f"left on {name}: {left}"
            time.sleep(0.05)


def _command_line(pid: int) -> str:
    """Return the command line of a process; that of one that has just ended is counted until it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return f"process {pid}"
