"""Jobs of a real Slurm: submitted, stopped, put back into the queue, failing, and on nodes that are lost."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from speechdp.data.shards.dataset import Dataset
from tests.cluster.batch import GATE, OPTIONS, BatchJob, hosts_of, in_folder, submit_train
from tests.cluster.lab import Lab
from tests.cluster.slurm import Slurm, why_not
from tests.helpers.finished_run import assert_equal_runs
from tests.helpers.gates import Gates
from tests.helpers.killed import last_step
from tests.helpers.mpi import REPOSITORY
from tests.helpers.tiny_data import TINY_MODEL


@dataclass(frozen=True)
class Site:
    """A Slurm, the folder its users work in, and data there."""

    slurm: Slurm
    folder: Path
    data: Path

    def submit(self, name: str, *options: str, gates: Gates | None = None) -> tuple[str, Path]:
        """Submit the training of OPTIONS over two nodes, which waits at its gates; return job id and run."""
        run = self.folder / name
        env = None if gates is None else gates.env
        return self.slurm.submit(submit_train("slurm", self.data, run, *options), env), run


@pytest.fixture(scope="module")
def site(shared_lab: Lab, dataset: Dataset) -> Iterator[Site]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Slurm(shared_lab) as slurm:
        yield Site(slurm, shared_lab.folder, dataset.path)


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to, its job, and what that printed.

    The sum of two numbers is the same bits whatever carries it, so every run of OPTIONS equals it.
    """

    run: Path
    job: BatchJob
    output: str


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Undisturbed:
    job_id, run = site.submit("undisturbed")
    job = site.slurm.wait(job_id)
    return Undisturbed(run, job, site.slurm.output(job_id))


def assert_same(site: Site, job: BatchJob, run: Path, undisturbed: Undisturbed) -> None:
    assert (job.state, job.exit_code) == ("COMPLETED", 0), site.slurm.output(job.job_id)
    assert_equal_runs(run, undisturbed.run)


def test_a_submitted_job_trains_over_its_nodes(undisturbed: Undisturbed) -> None:
    job = undisturbed.job
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 0), undisturbed.output
    assert (undisturbed.run / "completed.json").is_file(), undisturbed.output
    assert (undisturbed.run / "model.safetensors").is_file(), undisturbed.output
    assert hosts_of(undisturbed.run) == ["n2", "n3"]


def test_the_script_in_launch_runs_a_command(site: Site) -> None:
    run = site.folder / "by-hand"
    script = [str(REPOSITORY / "launch" / "slurm.sbatch"), "train", str(site.data), str(run)]
    command = ["sbatch", "--ntasks-per-node=1", "--time=10", *script, *OPTIONS, "--max-steps", "3"]
    job_id = site.slurm.submit(in_folder(site.folder, *command), {"SPEECHDP_PYTHON": sys.executable})
    job = site.slurm.wait(job_id)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), site.slurm.output(job_id)
    assert (run / "completed.json").is_file()
    assert hosts_of(run) == ["n2", "n3"]


@pytest.mark.parametrize("launcher", ["--launcher horovodrun --controller gloo", "--launcher srun"])
def test_other_launchers_find_the_allocation(site: Site, undisturbed: Undisturbed, launcher: str) -> None:
    job_id, run = site.submit(launcher.split()[1], f"--launch-args={launcher}")
    assert_same(site, site.slurm.wait(job_id), run, undisturbed)
    assert hosts_of(run) == ["n2", "n3"]


def test_compare_in_the_shell_of_salloc_runs_on_the_hosts_of_the_job(site: Site) -> None:
    out = site.folder / "compared"
    asked = ["salloc", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "speechdp"]
    words = ["compare", site.data, out, *TINY_MODEL, "--epochs", "1", "--modes", "frames", "--race", "0"]
    command = [*asked, *words, "--strategies", "gradient_averaging", "--decode-split", ""]
    ended = site.slurm.command(*in_folder(site.folder, *command))
    assert ended.exit_code == 0, ended.output
    hosts = sorted(hosts_of(record.parent) for record in out.glob("frames-*/run.json"))
    assert hosts == [["n2"], ["n2", "n3"]]  # and not n1, where the shell is
    too_many = site.slurm.command(*in_folder(site.folder, *command, "--ranks", "1,4", "--overwrite"))
    assert too_many.exit_code == 1, too_many.output
    assert "4 ranks wanted, but it has only 2 slots; lower --ranks" in too_many.stderr


def test_srun_starts_as_many_ranks_on_a_host_as_the_job_has_cores_there(site: Site) -> None:
    def launch(slots: int, name: str, *launcher: str) -> str:
        hosts = site.folder / f"hosts-{name}"
        hosts.write_text(f"{name} slots={slots}\n")
        asked = ["salloc", "--nodes=2", "--ntasks=2", "--exclusive", sys.executable, "-m", "speechdp"]
        train = ["train", site.data, site.folder / f"cores-{slots}", *TINY_MODEL, "--max-steps", "2"]
        words = [*asked, "launch", "--hostfile", hosts, *launcher, "--", *train]
        ended = site.slurm.command(*in_folder(site.folder, *words))
        return f"{ended.exit_code}: {ended.stderr}"

    srun = ("--launcher", "srun")
    assert launch(2, "n2", *srun).startswith("0: ")
    assert hosts_of(site.folder / "cores-2") == ["n2", "n2"]
    refused = launch(3, "n2", *srun)
    assert "3 ranks of 1 core on n2, where the batch job has only 2 cores, the most that srun uses" in refused
    assert "2 ranks on n2, where the batch job has only 1 slot, the most that mpirun starts" in launch(
        2, "n2"
    )
    assert "n1 is not one of the hosts of Slurm job" in launch(1, "n1")


def test_launch_started_by_srun_says_what_it_is_to_be_started_by(site: Site) -> None:
    asked = ["salloc", "--nodes=2", "--ntasks-per-node=1", "srun", sys.executable, "-m", "speechdp"]
    words = [*asked, "launch", "--", "train", site.data, site.folder / "by-srun"]
    ended = site.slurm.command(*in_folder(site.folder, *words))
    assert ended.exit_code == 1
    assert "srun has started speechdp launch 2 times, and each would start a whole job" in ended.stderr


def test_srun_without_pmix_is_refused_on_every_rank(site: Site) -> None:
    run = site.folder / "unconnected"
    line = f"srun {sys.executable} -m speechdp train {site.data} {run} --layers 1 --cells 8"
    submit = in_folder(site.folder, "sbatch", "--nodes=2", "--ntasks-per-node=1", "--wrap", line)
    job = site.slurm.wait(site.slurm.submit(submit))
    output = site.slurm.output(job.job_id)
    assert job.state == "FAILED", output
    for rank, host in enumerate(("n2", "n3")):
        assert f"speechdp: rank {rank} on {host}: srun started 2 processes without PMIx" in output
    assert "MPI_ERRORS_ARE_FATAL" not in output
    assert not run.exists()


def test_a_preempted_job_ends_with_the_same_model(site: Site, undisturbed: Undisturbed) -> None:
    gates = Gates(site.folder / "gates-preempted", GATE)
    job_id, run = site.submit("preempted", gates=gates)
    site.slurm.wait_until(job_id, lambda _: last_step(run), "a checkpoint")
    site.slurm.signal_script(job_id, "USR1")  # what --signal=B:USR1@TIME sends
    site.slurm.start_now(job_id)
    gates.open()
    job = site.slurm.wait(job_id)
    assert_same(site, job, run, undisturbed)
    output = site.slurm.output(job_id)
    assert job.restarts == 1, output
    assert "stopped as requested" in output
    assert f"{run}: resuming from step " in output


def test_a_job_is_stopped_and_requeued_before_its_time_limit(site: Site) -> None:
    run = site.folder / "out-of-time"
    command = submit_train("slurm", site.data, run, "--time", "0:02:00", "--signal-s", "80")
    job_id = site.slurm.submit([*command, "--epochs", "100000"])
    site.slurm.wait_until(job_id, lambda job: job.restarts == 1, "the requeue before the time limit")
    output = site.slurm.output(job_id)
    site.slurm.command("scancel", job_id)
    assert "speechdp launch: the job was stopped by SIGUSR1" in output
    assert "DUE TO TIME LIMIT" not in output


def test_a_job_without_the_environment_of_its_submission(site: Site, undisturbed: Undisturbed) -> None:
    # As --export=NONE, but for where this speechdp is.
    job_id, run = site.submit("no-environment", "--scheduler-args=--export=PYTHONPATH")
    assert_same(site, site.slurm.wait(job_id), run, undisturbed)


def test_a_failing_job_says_why_and_holds_back_what_depends_on_it(site: Site) -> None:
    run = site.folder / "failing"
    job_id = site.slurm.submit(submit_train("slurm", site.folder / "no-data", run))
    after = site.slurm.submit(["sbatch", f"--dependency=afterok:{job_id}", "--wrap", "true"])
    job = site.slurm.wait(job_id)
    output = site.slurm.output(job_id)
    assert (job.state, job.exit_code) == ("FAILED", 1), output
    ours = [line for line in output.splitlines() if re.match(r"speechdp: rank 0 on n\d: ", line)]
    assert ours and "no-data" in ours[0], output
    never = "DependencyNeverSatisfied"
    site.slurm.wait_until(after, lambda _: site.slurm.reason(after) == never, "the dependency to fail")
    site.slurm.command("scancel", after)


def test_a_hostile_folder_is_but_a_name(site: Site) -> None:
    folder = site.folder / 'it\'s "mine" $(touch pwned) `touch pwned`; touch pwned & $HOME'
    folder.mkdir()
    command = submit_train("slurm", site.data, folder / "#SBATCH 100%j \\ <run>")
    job = site.slurm.wait(site.slurm.submit([*command, "--max-steps", "3"]))
    assert (job.state, job.exit_code) == ("COMPLETED", 0), site.slurm.output(job.job_id)
    assert (folder / "#SBATCH 100%j \\ <run>" / "completed.json").is_file()
    assert not list(site.folder.rglob("pwned"))


def test_a_job_goes_on_elsewhere_when_its_first_node_is_lost(site: Site, undisturbed: Undisturbed) -> None:
    gates = Gates(site.folder / "gates-node-lost", GATE)
    job_id, run = site.submit("node-lost", gates=gates)
    site.slurm.wait_until(job_id, lambda _: last_step(run), "a checkpoint")
    site.slurm.lab.kill_node("n2")  # with the job's script and launcher on it
    try:
        site.slurm.start_now(job_id)
        gates.open()
        job = site.slurm.wait(job_id)
        assert_same(site, job, run, undisturbed)
        assert job.hosts == "n[1,3]"
    finally:
        site.slurm.lab.revive("n2")
        site.slurm.join("n2")


def test_ranks_start_again_without_a_node_before_slurm_knows_that_it_is_lost(site: Site) -> None:
    gates, run = Gates(site.folder / "gates-without", GATE), site.folder / "without"
    launch = "--launch-args=--max-restarts 1 --min-ranks 2"
    command = [*submit_train("slurm", site.data, run, launch), "--max-steps", str(GATE + 20)]
    command[command.index("--nodes") + 1] = "3"
    job_id = site.slurm.submit(command, gates.env)
    site.slurm.wait_until(job_id, lambda _: last_step(run), "a checkpoint")
    site.slurm.lab.kill_node("n3")  # n1, the first of three, has the job's script
    try:
        gates.open()
        job = site.slurm.wait(job_id)
        output = site.slurm.output(job_id)
        assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 0), output
        assert "speechdp launch: host n3 was lost" in output
        assert "speechdp launch: start 2 of 2: 2 ranks on n1 (1), n2 (1); without n3" in output
        assert (run / "completed.json").is_file(), output
    finally:
        site.slurm.lab.revive("n3")
        site.slurm.join("n3")
