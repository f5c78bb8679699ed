"""Jobs that are stopped by signals and killed, and go on: bitwise the run that nobody disturbed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from speechdp.checkpoint.state import checkpoint_steps
from speechdp.comm.environment import host_name
from speechdp.data.shards.dataset import Dataset
from tests.helpers.begun_run import begin_run
from tests.helpers.finished_run import assert_equal_runs, evaluations
from tests.helpers.gates import Gates
from tests.helpers.jobs import (
    DEADLINE_S,
    Job,
    alone,
    by_launch,
    ended_within,
    our_lines,
    started,
    under_mpirun,
)
from tests.helpers.processes import is_running
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data
from tests.helpers.waiting import wait_until
from tests.parallel.test_communicator_backends import needs_horovod

#: 750 steps on two ranks, two seconds of training; jobs to be interrupted wait for it at gates.
OPTIONS = (*TINY_MODEL, "--batch-size", "1", "--epochs", "10", "--checkpoint-steps", "37")
AVERAGING = ("--strategy", "model_averaging:period=5")
STOPPED = 75
#: Steps from its first at which a job waits to be interrupted: two checkpoints behind it, and early enough
#: that ranks, which agree on a stop at ever rarer steps (at its 256th at the latest), do so before the last.
WAITS_AFTER = 100


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("resume") / "data", TinySizes(train=150))


@pytest.fixture(scope="module")
def undisturbed(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks: the sum of two numbers is the same bits on every back-end."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = ended_within(DEADLINE_S, under_mpirun(2, *train(dataset, run, "mpi")))
    assert ended.exit_code == 0, ended.output
    return run


def train(dataset: Dataset, run: Path, backend: str, *more: str) -> list[str | Path]:
    return ["train", dataset.path, run, *OPTIONS, *AVERAGING, "--backend", backend, *more]


def last_step(run: Path) -> int:
    return next(checkpoint_steps(run), 0)


def assert_not_complete(run: Path) -> None:
    for name in ("completed.json", "model.safetensors"):
        assert not (run / name).exists()


def stop(job: Job, run: Path, number: signal.Signals) -> None:
    """Ask the job to stop soon after its first checkpoint; check how it ends."""
    job.wait_until(lambda: last_step(run), "a checkpoint")
    job.signal(number)
    ended = job.finish()
    assert ended.exit_code == STOPPED, ended.output
    assert "stopped as requested; the same command with --resume continues" in ended.stdout, ended.output
    assert "Traceback" not in ended.stderr, ended.output
    assert_not_complete(run)


def gates(run: Path, begun_at: int = 0) -> Gates:
    """Return the gate of a job to be interrupted that begins at a step."""
    return Gates(run.with_name(f"gates-{begun_at}"), begun_at + WAITS_AFTER)


def kill_rank_1(job: Job, run: Path, begun_at: int) -> None:
    """Kill a rank, without warning, some steps after a checkpoint later than that the job began from."""
    job.wait_until(lambda: last_step(run) > begun_at + 37, "a later checkpoint")
    job.kill_rank(1)
    ended = job.finish()
    assert ended.exit_code == 137, ended.output
    assert_not_complete(run)
    if "speechdp launch:" in ended.stderr:
        (line,) = [line for line in our_lines(ended) if line.startswith("speechdp launch:")]
        assert line.startswith(f"speechdp launch: rank 1 on {host_name()} was killed by SIGKILL")
        assert f"{run}/checkpoints/step-" in line and line.endswith("; start again with --resume")


def test_a_job_waits_at_its_gate_until_that_is_opened(dataset: Dataset, tmp_path: Path) -> None:
    """Else the interruptions here would come too late where the machine is busy."""
    run, closed = tmp_path / "run", Gates(tmp_path / "gates", 60)
    options = [*OPTIONS[:-2], "--checkpoint-steps", "50", "--max-steps", "600"]
    with started(alone("train", dataset.path, run, *options), run, closed) as job:
        job.wait_until(lambda: last_step(run) == 50, "a checkpoint")  # which soon would not be the last
        closed.open()
        ended = job.finish()
    assert ended.exit_code == 0 and last_step(run) == 600, ended.output


def test_what_a_job_did_before_it_ended_is_seen(tmp_path: Path) -> None:
    """Though it ended between two looks."""
    go, done = tmp_path / "go", tmp_path / "done"
    wait = 'while [ ! -e "$0" ]; do sleep 0.01; done; touch "$1"'
    with started(["sh", "-c", wait, str(go), str(done)], tmp_path) as job:

        def look() -> bool:
            is_done = done.exists()
            go.touch()
            wait_until(lambda: not is_running(job.pid), "the end of the job")
            return is_done

        job.wait_until(look, "what it does")


def test_on_mpi(dataset: Dataset, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(by_launch(2, *train(dataset, run, "mpi")), run, gates(run)) as job:
        stop(job, run, signal.SIGTERM)
    saved = last_step(run)
    command = under_mpirun(2, *train(dataset, run, "mpi", "--resume"))
    with started(command, run, gates(run, saved)) as job:
        kill_rank_1(job, run, saved)
    ended = ended_within(DEADLINE_S, by_launch(2, *train(dataset, run, "mpi", "--resume")))
    assert ended.exit_code == 0, ended.output
    assert f"{run}: resuming from step " in ended.stdout, ended.output
    assert_equal_runs(run, undisturbed)


def test_a_paused_run_is_scored_there_and_goes_on_bitwise(
    dataset: Dataset, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = ended_within(DEADLINE_S, under_mpirun(2, *train(dataset, run, "mpi", "--pause-at", "130")))
    assert ended.exit_code == STOPPED, ended.output
    assert last_step(run) == 130
    paused = evaluations(run)[-1]
    assert paused["step"] == 130 and paused["epoch"] % 1 > 0
    ended = ended_within(DEADLINE_S, under_mpirun(2, *train(dataset, run, "mpi", "--resume")))
    assert ended.exit_code == 0, ended.output
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] != 130))
    assert_equal_runs(run, undisturbed)


@needs_horovod
def test_on_horovod(dataset: Dataset, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(under_mpirun(2, *train(dataset, run, "horovod")), run, gates(run)) as job:
        stop(job, run, signal.SIGUSR1)  # mpirun passes it on to every rank
    saved = last_step(run)
    command = by_launch(2, *train(dataset, run, "horovod", "--resume"))
    with started(command, run, gates(run, saved)) as job:
        kill_rank_1(job, run, saved)
    ended = ended_within(DEADLINE_S, under_mpirun(2, *train(dataset, run, "horovod", "--resume")))
    assert ended.exit_code == 0, ended.output
    assert_equal_runs(run, undisturbed)


def test_with_more_ranks_and_with_fewer(dataset: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin_run(dataset, run, (*OPTIONS, *AVERAGING, "--backend", "mpi"))  # on two ranks
    begun_at = last_step(run)
    command = by_launch(3, *train(dataset, run, "mpi", "--resume"))
    with started(command, run, gates(run, begun_at)) as job:
        job.wait_until(lambda: last_step(run) > begun_at, "a checkpoint of three ranks")
        job.signal(signal.SIGTERM)
        ended = job.finish()
    assert ended.exit_code == STOPPED, ended.output
    assert "written by 2 ranks, with 3 ranks: the next epoch begins" in " ".join(ended.stdout.split())
    ended = ended_within(DEADLINE_S, under_mpirun(2, *train(dataset, run, "mpi", "--resume")))
    assert ended.exit_code == 0, ended.output
    assert "written by 3 ranks, with 2 ranks: epoch" in " ".join(ended.stdout.split()), ended.output
    frames = [line["frames"] for line in evaluations(run)]
    assert frames[-1] - frames[-2] == frames[0] == dataset.num_frames("train")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_single_process(dataset: Dataset, tmp_path: Path, number: signal.Signals) -> None:
    options = [*OPTIONS[:-2], "--checkpoint-steps", "50", "--max-steps", "600"]
    whole = ended_within(DEADLINE_S, alone("train", dataset.path, tmp_path / "whole", *options))
    assert whole.exit_code == 0, whole.output
    run = tmp_path / "run"
    with started(alone("train", dataset.path, run, *options), run, gates(run)) as job:
        stop(job, run, number)
    ended = ended_within(DEADLINE_S, alone("train", dataset.path, run, *options, "--resume"))
    assert ended.exit_code == 0, ended.output
    assert_equal_runs(run, tmp_path / "whole")
