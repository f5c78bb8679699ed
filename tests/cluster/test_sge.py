"""Jobs of a real Grid Engine: over two nodes, suspended with a warning and started again, failing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from speechdp import exit_codes
from speechdp.data.shards.dataset import Dataset
from tests.cluster.batch import GATE, OPTIONS, handed_on, hosts_of, in_folder, submit_train
from tests.cluster.lab import Lab
from tests.cluster.sge import GridEngine, why_not
from tests.helpers.finished_run import assert_equal_runs
from tests.helpers.gates import Gates
from tests.helpers.killed import last_step
from tests.helpers.mpi import REPOSITORY

#: Submitted from here; Grid Engine itself replaces $NAME in the path of a job's folder.
FOLDER = 'it\'s "mine" `touch pwned`; touch pwned & 100%'
UNDISTURBED = "#$ -S csh $HOME $(touch pwned) <run>"


@dataclass(frozen=True)
class Site:
    """A Grid Engine, the folder its users work in, and data."""

    engine: GridEngine
    folder: Path
    data: Path

    def submit(self, name: str, *more: str, gates: Gates | None = None) -> tuple[str, Path, Path]:
        """Submit the training of OPTIONS over two nodes, which waits at its gates.

        Returns:
            Job id, run and output of the job.
        """
        run = self.folder / name
        options = ["--name", "job", *handed_on(gates)]
        job_id = self.engine.submit([*submit_train("sge", self.data, run, *options), *more])
        return job_id, run, self.folder / f"speechdp-job.{job_id}.out"


@pytest.fixture(scope="module")
def site(shared_lab: Lab, dataset: Dataset) -> Iterator[Site]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = shared_lab.folder / FOLDER
    folder.mkdir()
    with GridEngine(shared_lab) as engine:
        yield Site(engine, folder, dataset.path)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Path:
    """A run that nothing happens to, in a folder with a hostile name."""
    job_id, run, output = site.submit(UNDISTURBED)
    job = site.engine.wait(job_id, output)
    assert (job.exit_code, job.restarts) == (0, 0), output.read_text()
    return run


def test_a_submitted_job_trains_over_its_nodes(site: Site, undisturbed: Path) -> None:
    assert (undisturbed / "completed.json").is_file()
    assert len(set(hosts_of(undisturbed))) == 2  # a bare mpirun of Open MPI 4.1.8 takes the first only
    assert not list(site.folder.parent.rglob("pwned"))


def test_a_suspended_job_starts_again_and_ends_with_the_same_model(site: Site, undisturbed: Path) -> None:
    gates = Gates(site.folder.parent / "gates-sge-suspended", GATE)
    job_id, run, output = site.submit("suspended", gates=gates)
    site.engine.wait_until(job_id, output, lambda _: last_step(run), "a checkpoint")
    site.engine.suspend(job_id)
    has_stopped = "stopped as requested"
    site.engine.wait_until(job_id, output, lambda _: has_stopped in output.read_text(), "the stop")
    gates.open()
    job = site.engine.wait(job_id, output)
    said = output.read_text()
    assert (job.exit_code, job.restarts) == (0, 1), said
    assert has_stopped in said and f"{run}: resuming from step " in said
    assert_equal_runs(run, undisturbed)


def test_a_deleted_job_saves_and_is_not_said_to_start_again(site: Site) -> None:
    gates = Gates(site.folder.parent / "gates-sge-deleted", GATE)
    job_id, run, output = site.submit("deleted", gates=gates)
    site.engine.wait_until(job_id, output, lambda _: last_step(run), "a checkpoint")
    site.engine.command("qdel", job_id)  # on whose signal, which comes a while later, the gate opens
    job = site.engine.wait(job_id, output)
    said = output.read_text()
    assert (job.exit_code, job.restarts) == (exit_codes.STOPPED, 0), said
    assert "speechdp launch: the job was stopped by SIGUSR2; last checkpoint: " in said
    assert "start again with --resume" in said and "is requeued" not in said


def test_the_script_in_launch_runs_a_command(site: Site) -> None:
    run = site.folder / "by-hand"
    options = ["-terse", "-v", f"SPEECHDP_PYTHON={sys.executable}", "-pe", "orte", "2"]
    script = [str(REPOSITORY / "launch" / "sge.qsub"), "train", str(site.data), str(run)]
    command = ["qsub", *options, *script, *OPTIONS, "--max-steps", "3"]
    job_id = site.engine.submit(in_folder(site.folder, *command))
    output = site.folder / f"speechdp-train.{job_id}.out"
    job = site.engine.wait(job_id, output)
    assert job.exit_code == 0, output.read_text()
    assert (run / "completed.json").is_file()
    assert len(set(hosts_of(run))) == 2


def test_a_failing_job_says_why_and_is_not_started_again(site: Site) -> None:
    job_id, _, output = site.submit("failing", "--held-out", "nothing")
    job = site.engine.wait(job_id, output)
    said = output.read_text()
    assert (job.exit_code, job.restarts) == (1, 0), said
    assert [line for line in said.splitlines() if line.startswith("speechdp: ") and "nothing" in line], said
