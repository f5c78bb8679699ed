"""Ranks of MPICH: the same training as over Open MPI, a rank's death, and the mpirun of another MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from speechdp.checkpoint.state import checkpoint_steps
from speechdp.comm.environment import host_name
from speechdp.data.shards.dataset import Dataset
from speechdp.launching.processes import descendants, program_name
from tests.helpers.finished_run import assert_equal_runs
from tests.helpers.gates import Gates
from tests.helpers.jobs import DEADLINE_S, ended_within, our_lines, started, under_mpirun
from tests.helpers.mpi import BIN
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

WHEEL = "SPEECHDP_TEST_MPICH"
OPTIONS = (*TINY_MODEL, "--batch-size", "1", "--epochs", "4", "--checkpoint-steps", "37", "--backend", "mpi")


@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with MPICH, which has all else from this one."""
    wheels = sorted(Path(os.environ.get(WHEEL, "")).glob("mpich-*.whl"))
    if not wheels:
        pytest.skip(f"{WHEEL} names no folder with MPICH: `pip download --no-deps --dest FOLDER mpich`")
    environment = tmp_path_factory.mktemp("mpich") / "venv"
    venv.create(environment, symlinks=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*install, "--prefix", str(environment), str(wheels[-1])], check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    shared = sysconfig.get_path("purelib")
    Path(own, "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    return environment / "bin"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("mpich-data") / "data", TinySizes(train=60))


def launched(mpich: Path, *arguments: str | Path, num_ranks: int = 2) -> list[str]:
    """Return the command line of `speechdp launch -np N -- ARGUMENTS` in the environment with MPICH."""
    launch = [str(mpich / "python"), "-m", "speechdp", "launch", "-np", str(num_ranks), "--"]
    return [*launch, *map(str, arguments)]


def test_training_is_that_of_open_mpi_bit_by_bit(mpich: Path, dataset: Dataset, tmp_path: Path) -> None:
    """The sum of two numbers is the same bits whoever adds them."""
    for command, name in (
        (launched(mpich, "train", dataset.path, tmp_path / "mpich", *OPTIONS), "mpich"),
        (under_mpirun(2, "train", dataset.path, tmp_path / "open-mpi", *OPTIONS), "open-mpi"),
    ):
        ended = ended_within(DEADLINE_S, command)
        assert ended.exit_code == 0, f"{name}: {ended.output}"
    assert_equal_runs(tmp_path / "mpich", tmp_path / "open-mpi")


def test_launch_names_the_rank_that_was_killed(mpich: Path, dataset: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    waiting = Gates(tmp_path / "gates", 50)
    with started(launched(mpich, "train", dataset.path, run, *OPTIONS), run, waiting) as job:
        job.wait_until(lambda: next(checkpoint_steps(run), 0), "a checkpoint")
        job.kill_rank(1)
        ended = job.finish()
    assert ended.exit_code == 137, ended.output
    (line,) = [line for line in our_lines(ended) if line.startswith("speechdp launch:")]
    assert line.startswith(f"speechdp launch: rank 1 on {host_name()} was killed by SIGKILL"), ended.output
    assert line.endswith("; start again with --resume") and not (run / "completed.json").exists()


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_four_ranks_end_well(mpich: Path, dataset: Dataset, tmp_path: Path, backend: str) -> None:
    """Of two, both had left before Hydra could kill the other for it."""
    train = ("train", dataset.path, tmp_path / "run", *OPTIONS, "--epochs", "1", "--backend", backend)
    ended = ended_within(DEADLINE_S, launched(mpich, *train, num_ranks=4))
    assert ended.exit_code == 0 and "BAD TERMINATION" not in ended.output, ended.output


_SAYS_WHY = """
import sys, time
from pathlib import Path
from speechdp import run_ranks

def main(comm):
    if comm.rank == 1:
        comm.barrier()
    folder = Path(sys.argv[1])
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    sys.exit("why the job ends")

run_ranks(main, backend="mpi")
"""


@pytest.mark.parametrize("starter", ["launch", "mpiexec"])
def test_what_a_rank_says_is_heard_by_an_mpiexec_that_gets_no_core_meanwhile(
    mpich: Path, tmp_path: Path, starter: str
) -> None:
    """It heard of the abort as well then, and read no more of what ranks had written before."""
    script = tmp_path / "script.py"
    script.write_text(_SAYS_WHY)
    plain = [str(mpich / "mpiexec"), "-n", "2", str(mpich / "python"), str(script), str(tmp_path)]
    command = plain if starter == "mpiexec" else launched(mpich, "python", script, tmp_path)
    with started(command, script) as job:
        job.wait_until((tmp_path / "ready").exists, "rank 0")
        pids = [job.pid, *descendants(job.pid)]
        (mpiexec,) = [pid for pid in pids if program_name(pid).startswith("mpiexec")]
        rank = job.rank_pid(0)
        job.signal(signal.SIGSTOP, mpiexec)
        (tmp_path / "go").touch()
        job.wait_until(lambda: rank not in descendants(job.pid), "the end of rank 0")
        time.sleep(1.0)  # in which Hydra's proxy tells it of both, the line and the end
        job.signal(signal.SIGCONT, mpiexec)
        ended = job.finish()
    assert ended.exit_code == 1, ended.output
    said = our_lines(ended)
    assert said[0] == f"speechdp: rank 0 on {host_name()}: why the job ends", ended.output
    of_launch = [line.startswith(f"speechdp launch: rank 0 on {host_name()} failed") for line in said[1:]]
    assert of_launch == ([] if starter == "mpiexec" else [True]), ended.output


def test_the_mpirun_of_another_mpi_is_refused_before_training(
    mpich: Path, dataset: Dataset, tmp_path: Path
) -> None:
    """Either way round: else each rank were the only one of a world of its own."""
    of_speechdp = ("-m", "speechdp", "train", str(dataset.path), str(tmp_path / "run"), *OPTIONS)
    for command in (
        [str(BIN / "mpirun"), "--oversubscribe", "-n", "2", str(mpich / "python"), *of_speechdp],
        [str(mpich / "mpiexec"), "-n", "2", sys.executable, *of_speechdp],
    ):
        ended = ended_within(DEADLINE_S, command)
        assert ended.exit_code == 1, ended.output
        told = [line for line in our_lines(ended) if "MPICH or Intel MPI" in line and "Open MPI" in line]
        assert told, ended.output
        assert not (tmp_path / "run").exists()
