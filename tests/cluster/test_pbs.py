"""Jobs of a real PBS: over two nodes, stopped before the time limit and started again, deleted, failing."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.cluster.batch import GATE, OPTIONS, handed_on, hosts_of, in_folder, submit_train
from tests.cluster.lab import Lab
from tests.cluster.pbs import Pbs, why_not
from tests.helpers.finished_run import assert_equal_runs
from tests.helpers.gates import Gates
from tests.helpers.killed import last_step
from tests.helpers.mpi import REPOSITORY


@dataclass(frozen=True)
class Site:
    """A PBS, the folder its users work in, and data."""

    pbs: Pbs
    folder: Path
    data: Path

    def submit(
        self, name: str, *more: str, limit: Sequence[str] = (), gates: Gates | None = None
    ) -> tuple[str, Path, Path]:
        """Submit the training of OPTIONS, and `more`, over two nodes, which waits at its gates.

        Returns:
            Job id, run and output of the job.
        """
        run = self.folder / name
        options = ["--name", "job", *limit, *handed_on(gates)]
        job_id = self.pbs.submit([*submit_train("pbs", self.data, run, *options), *more])
        return job_id, run, self.folder / f"job.o{job_id}"


@pytest.fixture(scope="module")
def site(shared_lab: Lab, dataset: Dataset) -> Iterator[Site]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = shared_lab.folder / "of a user's"
    folder.mkdir()
    with Pbs(shared_lab) as pbs:
        yield Site(pbs, folder, dataset.path)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Path:
    """A run that nothing happens to, in a folder with a hostile name."""
    job_id, run, output = site.submit("$HOME $(touch pwned) <run>")
    job = site.pbs.wait(job_id, output)
    assert (job.exit_code, job.restarts) == (0, 0), output.read_text()
    return run


def test_a_submitted_job_trains_over_its_nodes(site: Site, undisturbed: Path) -> None:
    assert (undisturbed / "completed.json").is_file()
    assert len(set(hosts_of(undisturbed))) == 2
    assert not list(site.folder.parent.rglob("pwned"))


def test_a_job_saves_before_its_time_limit_and_starts_again(site: Site, undisturbed: Path) -> None:
    gates = Gates(site.folder.parent / "gates-pbs-limit", GATE)
    # A minute after its start it has come to its gate, and is warned: the script does that, not PBS.
    limit = ["--time", "0:11:00", "--signal-s", "600"]
    job_id, run, output = site.submit("limit", limit=limit, gates=gates)
    site.pbs.wait_until(job_id, output, lambda job: job.restarts > 0, "the second start")
    gates.open()
    job = site.pbs.wait(job_id, output)
    said = output.read_text()
    assert job.exit_code == 0, said
    assert f"job {job_id}.n1 is requeued by pbs, to continue from its checkpoint" in said
    assert "ended by SIGTERM" not in said  # by which qrerun ends what has called it
    assert f"{run}: resuming from step " in said
    assert_equal_runs(run, undisturbed)


def test_a_deleted_job_saves_and_is_not_said_to_start_again(site: Site) -> None:
    gates = Gates(site.folder.parent / "gates-pbs-deleted", GATE)
    job_id, run, output = site.submit("deleted", gates=gates)
    site.pbs.wait_until(job_id, output, lambda _: last_step(run), "a checkpoint")
    # On its signal, which comes a while later, the gate opens.
    assert site.pbs.command("qdel", job_id).exit_code == 0
    job = site.pbs.wait(job_id, output)
    said = output.read_text()
    assert job.restarts == 0, said
    assert "speechdp launch: the job was stopped by SIGTERM; last checkpoint: " in said
    assert "start again with --resume" in said and "is requeued" not in said


def test_the_script_in_launch_runs_the_command_edited_into_it(site: Site) -> None:
    run, script = site.folder / "by-hand", site.folder / "pbs.qsub"
    command = shlex.join(["train", str(site.data), str(run), *OPTIONS, "--max-steps", "3"])
    text = (REPOSITORY / "launch" / "pbs.qsub").read_text()
    assert text.count("train data runs/first --resume") == 1
    script.write_text(text.replace("train data runs/first --resume", command))
    asked = ["-l", "select=2:ncpus=1:mpiprocs=1", "-v", f"SPEECHDP_PYTHON={sys.executable}"]
    job_id = site.pbs.submit(in_folder(site.folder, "qsub", *asked, script))
    output = site.folder / f"train.o{job_id}"
    job = site.pbs.wait(job_id, output)
    assert job.exit_code == 0, output.read_text()
    assert len(set(hosts_of(run))) == 2


def test_a_failing_job_says_why_and_is_not_started_again(site: Site) -> None:
    job_id, _, output = site.submit("failing", "--held-out", "nothing")
    job = site.pbs.wait(job_id, output)
    said = output.read_text()
    assert (job.exit_code, job.restarts) == (1, 0), said
    assert [line for line in said.splitlines() if line.startswith("speechdp: ") and "nothing" in line], said
