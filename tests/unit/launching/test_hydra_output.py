"""What Hydra and the parents of its ranks say, and what follows from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from speechdp.launching.faults import Fault, first_cause
from speechdp.launching.launcher_output import LauncherOutput
from speechdp.launching.mpi import rank_process

_RULE = "=" * 83
_OF_MPICH = f"""
{_RULE}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 22662 RUNNING AT node01
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
{_RULE}
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
_OF_INTEL = f"""
{_RULE}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 0 PID 22662 RUNNING AT node01
=   KILLED BY SIGNAL: 9 (Killed)
{_RULE}
"""


def heard(text: str) -> tuple[list[Fault], str]:
    output = LauncherOutput()
    shown = output.feed(text.encode()) + output.end()
    return output.faults, shown.decode().strip()


@pytest.mark.parametrize("banner", [_OF_MPICH, _OF_INTEL])
@pytest.mark.parametrize("tag", ["", "[2] "])
def test_the_parent_of_a_rank_tells_which_died_first(banner: str, tag: str) -> None:
    faults, shown = heard(f"{tag}speechdp: rank 2 on node02: killed by signal 11\n{banner}")
    assert faults == [Fault("killed", 2, "node02", signal=11)]
    assert shown == ""


@pytest.mark.parametrize("banner", [_OF_MPICH, _OF_INTEL])
def test_without_it_no_rank_is_blamed(banner: str) -> None:
    faults, _ = heard(banner)
    assert faults == [Fault("killed", signal=9)]


def test_a_rank_that_says_why_comes_first() -> None:
    said = "speechdp: rank 1 on node01: shards are damaged"
    abort = (
        "Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1"
    )
    faults, shown = heard(f"{said}\n{abort}\nspeechdp: rank 1 on node01: left with exit code 1\n")
    assert [fault.kind for fault in faults] == ["reported", "aborted", "exited"]
    assert first_cause(faults) == faults[0] and shown == said


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            "[mpiexec@a] control_cb (/m/pmiserv_cb.c:280): assert (!closed) failed",
            Fault("host lost", exit_code=205),
        ),
        (
            "[mpiexec@a] Error: Downstream from host nodeb exited abnormally",
            Fault("host lost", host="nodeb", exit_code=205),
        ),
        ("[mpiexec@a] ui_cmd_cb (/m/pmiserv_pmci.c:51): Launch proxy failed.", Fault("not reached")),
        (
            "[mpiexec@a] Error: Unable to run bstrap_proxy on nodea (pid 27032, exit code 65280)",
            Fault("not reached", host="nodea"),
        ),
        (
            "[proxy:1@nodeb] HYDU_create_process (/m/launch.c:73): execvp error on file /v/python (No file)",
            Fault("no program", host="nodeb"),
        ),
    ],
)
def test_what_hydra_says_of_hosts(line: str, fault: Fault) -> None:
    more = "[mpiexec@a] main (/m/mpiexec.c:270): process manager error waiting for completion"
    assert heard(f"{line}\n{more}\n") == ([fault], "")
    assert heard(f"{more}\n") == ([], more)  # by itself it is shown


def test_a_lost_host_without_a_name() -> None:
    assert Fault("host lost").describe() == "a host was lost: it is down, or its link is cut"


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("kill -9 $$", 137, "killed by signal 9"),
        ("exit 3", 3, "left with exit code 3"),
        ("exit 0", 0, ""),
        # It goes to the whole group, and is the rank's.
        ("trap 'exit 75' USR1; kill -USR1 0; sleep 5", 75, "left with exit code 75"),
    ],
)
def test_the_parent_of_a_rank(command: str, code: int, said: str) -> None:
    program = [sys.executable, "-IS", str(Path(rank_process.__file__)), "sh", "-c", command]
    ended = subprocess.run(
        program, env={"PMI_RANK": "4", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        start_new_session=True, check=False,
    )  # fmt: skip
    assert ended.returncode == code
    assert ended.stderr == "" if not said else ended.stderr.endswith(f": {said}\n")
    assert ended.stderr.startswith("speechdp: rank 4 on ") or not said


def test_a_rank_knows_that_its_parent_tells_and_what_it_starts_has_none() -> None:
    asked = "from speechdp.comm.environment import has_parent_that_reports; print(has_parent_that_reports())"
    for between, answer in (([], "True"), (["sh", "-c", '"$@"; exit $?', "sh"], "False")):
        program = [sys.executable, "-IS", str(Path(rank_process.__file__)), *between]
        ended = subprocess.run(
            [*program, sys.executable, "-c", asked], capture_output=True, text=True, check=True
        )
        assert ended.stdout.strip() == answer


def test_a_rank_whose_program_is_missing() -> None:
    program = [sys.executable, "-IS", str(Path(rank_process.__file__)), "/nowhere/python"]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.returncode == 127 and "/nowhere/python cannot be started: No such file" in ended.stderr
