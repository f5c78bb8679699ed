"""A user's script over real back-ends: it trains, its failure ends all, its folder is one of a run."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from speechdp import exit_codes
from speechdp.launching.outcome import SCRIPT_CONTINUES
from speechdp.report.runs.folders import read_run
from tests.helpers.jobs import DEADLINE_S, SPEECHDP, started
from tests.helpers.mpi import run_job, run_mpi
from tests.parallel.test_communicator_backends import needs_horovod

PROGRAMS = Path(__file__).parents[1] / "helpers" / "rank_programs"
PROGRAM, CHECKPOINTS = PROGRAMS / "own_loop.py", PROGRAMS / "own_checkpoints.py"


@pytest.mark.parametrize(
    ("backend", "strategy"),
    [
        ("mpi", "model_averaging:period=2,momentum=average"),
        ("torch", "gradient_averaging"),
        ("mpi", "easgd"),
        pytest.param("horovod", "bmuf:period=2", marks=needs_horovod),
    ],
)
def test_a_script_trains_over_ranks(backend: str, strategy: str, tmp_path: Path) -> None:
    environment = {"SPEECHDP_BACKEND": backend, "SPEECHDP_STRATEGY": strategy}
    ended = run_mpi(2, [PROGRAM, tmp_path / "run"], env=environment)
    assert ended.exit_code == 0, ended.output
    for rank in range(2):
        assert f"rank {rank} of 2 over {backend}: 6 steps" in ended.stdout, ended.output
    run = read_run(tmp_path / "run")
    assert run.problems == () and run.completed and run.size == 2
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_mistake_on_one_rank_ends_all(tmp_path: Path) -> None:
    ended = run_mpi(2, [PROGRAM, tmp_path / "run", "fails"], env={"SPEECHDP_BACKEND": "mpi"})
    assert ended.exit_code != 0
    assert "ended by an unexpected ValueError: the script has a mistake" in ended.stderr, ended.output
    assert not read_run(tmp_path / "run").completed


def test_launch_starts_a_script_and_hands_its_end_on(tmp_path: Path) -> None:
    job = [*SPEECHDP, "launch", "-np", "2", "--", "python", str(PROGRAM), str(tmp_path / "run")]
    ended = run_job(job, env={"SPEECHDP_BACKEND": "mpi"})
    assert ended.exit_code == 0 and read_run(tmp_path / "run").completed, ended.output
    assert read_run(tmp_path / "run").size == 2
    ended = run_job([*job, "fails"], env={"SPEECHDP_BACKEND": "mpi", "SPEECHDP_FOLDER": str(tmp_path / "b")})
    assert ended.exit_code != 0 and "ValueError: the script has a mistake" in ended.stderr, ended.output


def test_a_script_that_loses_a_rank_is_started_again_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = [*SPEECHDP, "launch", "-np", "2", "--max-restarts", "1", "--", "python", str(CHECKPOINTS)]
    environment = {"SPEECHDP_BACKEND": "mpi", "SPEECHDP_FOLDER": str(folder)}
    ended = run_job([*job, "9", "dies"], env=environment)
    assert ended.exit_code == 0, ended.output
    assert re.findall(r"rank 0 begins at step (\d+)", ended.stdout) == ["0", "3"], ended.output
    assert "start 2 of 2: 2 ranks" in ended.stderr
    run = read_run(folder)
    assert run.completed and [e.step for e in run.evaluations] == [3, 6, 9]


def test_a_stop_signal_ends_a_script_in_one_line(tmp_path: Path) -> None:
    environment = ("env", "SPEECHDP_BACKEND=mpi", f"SPEECHDP_FOLDER={tmp_path / 'run'}")
    job = [*environment, *SPEECHDP, "launch", "-np", "2", "--", "python", str(CHECKPOINTS), "100000"]
    with started([*job, str(tmp_path)], tmp_path) as running:
        running.wait_until((tmp_path / "run" / "metrics.jsonl").is_file, "the first evaluation")
        running.signal(signal.SIGTERM)
        ended = running.finish()
    assert ended.exit_code == 128 + signal.SIGTERM, ended.output
    (line,) = ended.stderr.splitlines()
    assert line.startswith("speechdp launch: the job was stopped by SIGTERM; last checkpoint: ")
    assert line.endswith(f"; {SCRIPT_CONTINUES}")


def test_a_script_saves_at_a_stop_signal_and_goes_on_from_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environment = {"SPEECHDP_BACKEND": "mpi", "SPEECHDP_FOLDER": str(folder)}
    words = ("env", *(f"{name}={value}" for name, value in environment.items()))
    patient = ("--max-restarts", "3", "--grace-s", f"{DEADLINE_S:g}")
    job = [*SPEECHDP, "launch", "-np", "2", *patient, "--", "python", str(CHECKPOINTS)]
    with started([*words, *job, "100000", "heeds", str(tmp_path)], tmp_path) as running:
        running.wait_until((folder / "metrics.jsonl").is_file, "the first evaluation")
        running.signal(signal.SIGTERM)
        ended = running.finish()
    assert ended.exit_code == exit_codes.STOPPED, ended.output
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        f"speechdp launch: the job was stopped by SIGTERM; last checkpoint: {folder}/checkpoints/step-"
    )
    assert line.endswith("; the script has saved: the same command continues")
    stopped = re.findall(r"rank (\d) stops after step (\d+)", ended.stdout)
    assert sorted(rank for rank, _ in stopped) == ["0", "1"] and len({step for _, step in stopped}) == 1
    assert not read_run(folder).completed
    last = int(stopped[0][1])
    ended = run_job([*job, str(last + 4), "heeds"], env=environment)
    assert ended.exit_code == 0 and read_run(folder).completed, ended.output
    assert sorted(re.findall(r"begins at step (\d+)", ended.stdout)) == [str(last)] * 2
    assert sorted(re.findall(r"has done (\d+) steps", ended.stdout)) == [str(last + 4)] * 2
