"""A collective call that one rank of a script makes alone ends the job in a line that says where all are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speechdp import exit_codes
from speechdp.comm.environment import host_name
from tests.helpers.mpi import Ended, run_mpi
from tests.parallel.test_communicator_backends import needs_horovod

PROGRAM = Path(__file__).parents[1] / "helpers" / "rank_programs" / "lone_calls.py"
HOST = re.escape(host_name())
#: Seconds: a rank that shares few cores with much else may do nothing for some, and does not hang.
HANG_TIMEOUT = "12"


def ended_by(what: str, backend: str, folder: Path) -> tuple[Ended, str]:
    """Return how the job ended, and the one line that it said."""
    environment = {"SPEECHDP_BACKEND": backend, "SPEECHDP_HANG_TIMEOUT": HANG_TIMEOUT}
    ended = run_mpi(2, [PROGRAM, folder, what], env=environment)
    (line,) = re.findall(r"speechdp: rank \d .*", ended.stderr)
    return ended, line


@pytest.mark.parametrize(
    ("what", "backend", "at"),
    [
        ("checkpoint", "mpi", r"at run\.save_checkpoint\(\)"),
        ("checkpoint", "torch", r"at run\.save_checkpoint\(\)"),
        pytest.param("checkpoint", "horovod", r"at run\.save_checkpoint\(\)", marks=needs_horovod),
        ("dawdle", "mpi", r"in the script's own code, after step 4,"),
        ("group-checkpoint", "mpi", r"at run\.save_checkpoint\(\)"),
    ],
)
def test_while_others_take_a_step(what: str, backend: str, at: str, tmp_path: Path) -> None:
    ended, line = ended_by(what, backend, tmp_path)
    assert ended.exit_code == exit_codes.HUNG, ended.output
    first = rf"rank 0 on {HOST}: hung for \d+ s {at}, waiting for other ranks; rank 1 on {HOST} \(at step 5 "
    second = rf"rank 1 on {HOST}: hung for \d+ s at step 5, waiting for other ranks; rank 0 on {HOST} \({at} "
    assert re.match(f"speechdp: ({first}|{second})for ", line), ended.output
    assert (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("what", "backend", "rank_0", "rank_1"),
    [
        ("load", "mpi", "run.load_checkpoint()", "the beginning of `with run`"),
        ("make", "mpi", "DataParallel(...)", "the end of main"),
        ("evaluate", "torch", "run.evaluating()", "the end of `with run`"),
        pytest.param("evaluate", "horovod", "run.evaluating()", "the end of `with run`", marks=needs_horovod),
    ],
)
def test_while_others_make_another(what: str, backend: str, rank_0: str, rank_1: str, tmp_path: Path) -> None:
    ended, line = ended_by(what, backend, tmp_path)
    assert ended.exit_code == exit_codes.FAILED, ended.output
    assert f": rank 0 is at {rank_0}, but rank 1 is at {rank_1}; make the same collective calls" in line
