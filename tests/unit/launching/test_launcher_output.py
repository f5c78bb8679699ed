"""What is learnt from a launcher's output, and what of it is shown; the texts are those of real launchers."""

from __future__ import annotations

import signal

import pytest

from speechdp import exit_codes
from speechdp.launching.faults import Fault, first_cause, located
from speechdp.launching.hostfile import Host
from speechdp.launching.launcher_output import LauncherOutput
from speechdp.launching.outcome import Verdict, verdict
from speechdp.launching.supervise import JobEnd
from speechdp.process.ending import Ended, describe_end

RULE = "-" * 74 + "\n"
PRIMARY = (
    RULE + "Primary job  terminated normally, but 1 process returned\n"
    "a non-zero exit code. Per user-direction, the job has been aborted.\n" + RULE
)
KILLED = (
    PRIMARY
    + RULE
    + "mpirun noticed that process rank 1 with PID 0 on node n2 exited on signal 9 (Killed).\n"
    + RULE
)
EXITED = (
    PRIMARY
    + RULE
    + "mpirun detected that one or more processes exited with non-zero status, thus causing\n"
    + "the job to be terminated. The first process to do so was:\n\n"
    + "  Process name: [[4238,1],1]\n  Exit code:    124\n"
    + RULE
)
LOST = (
    "Connection to n3 closed by remote host.\r\n"
    + RULE
    + "ORTE has lost communication with a remote daemon.\n\n"
    "  HNP daemon   : [[6445,0],0] on node n1\n  Remote daemon: [[6445,0],2] on node n3\n\n"
    "This is usually due to either a failure of the TCP network\n" + RULE
)
ABORTED = RULE + "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n" + RULE
NOT_REACHED = (
    RULE + "ORTE was unable to reliably start one or more daemons.\nThis usually is caused by:\n" + RULE
)
TRACE_OF_SSH = (
    'Traceback (most recent call last):\n  File "/venv/bin/horovodrun", line 8, in <module>\n'
    "RuntimeError: could not connect to some hosts via ssh\n"
)
NO_PROGRAM = (
    RULE + "mpirun was unable to launch the specified application as it could not access\nor execute an "
    "executable:\n\nExecutable: /no/such/python\nNode: n2\n\nwhile attempting to start process rank 0.\n"
    + RULE
)
NO_FOLDER = (
    RULE + "A call to mkdir was unable to create the desired directory:\n\n"
    "  Directory: /proc/ompi.n1.0\n  Error:     No such file or directory\n\n"
    "Please check to ensure you have adequate permissions to perform\nthe desired operation.\n"
    + RULE
    + "[n1:41] [[2,0],0] ORTE_ERROR_LOG: Error in file /openmpi-4.1.8/orte/util/session_dir.c at line 107\n"
    + RULE
    + "It looks like orte_init failed for some reason; your parallel process is\nlikely to abort.\n\n"
    "  orte_session_dir failed\n  --> Returned value Error (-1) instead of ORTE_SUCCESS\n" + RULE
)
#: Of a daemon and a rank, with TMPDIR on a full disk.
_PMIX = "/openmpi-4.1.8/opal/mca/pmix/pmix3x/pmix/src/mca"
NO_ROOM = (
    f"[n2:41] PMIX ERROR: OUT-OF-RESOURCE in file {_PMIX}/common/dstore/dstore_segment.c at line 207\n"
    f"[n2:41] PMIX ERROR: ERROR in file {_PMIX}/common/dstore/dstore_base.c at line 2436\n"
    f"[n2:43] PMIX ERROR: ERROR in file {_PMIX}/gds/ds12/gds_ds12_lock_pthread.c at line 168\n"
)
#: Of ranks in a container with a /dev/shm of 1 MiB.
NO_SHARED_MEMORY = f"""{"-" * 74}
At least one pair of MPI processes are unable to reach each other for
MPI communications.  This means that no Open MPI device has indicated
that it can be used to communicate between these processes.  This is
an error; Open MPI requires that all MPI processes be able to reach
each other.  This error can sometimes be the result of forgetting to
specify the "self" BTL.

  Process 1 ([[30694,1],0]) is on host: n2
  Process 2 ([[30694,1],1]) is on host: n2
  BTLs attempted: self

Your MPI job is now going to abort; sorry.
{"-" * 74}
"""
#: Of a daemon whose ranks have gone.
UNREACHABLE = (
    "[n2:00360] PMIX ERROR: UNREACHABLE in file "
    "/openmpi-4.1.8/opal/mca/pmix/pmix3x/pmix/src/server/pmix_server.c at line 2198\n"
)
HOROVODRUN = (
    "Traceback (most recent call last):\n"
    '  File "/venv/bin/horovodrun", line 8, in <module>\n    sys.exit(run_commandline())\n'
    "RuntimeError: Horovod detected that one or more processes exited with non-zero status, thus causing the "
    "job to be terminated. The first process to do so was:\nProcess name: 1\nExit code: 137\n\n"
)


def read(text: str, piece: int | None = None) -> tuple[str, list[Fault]]:
    """Feed a text in pieces of so many bytes; return what is shown and what was learnt."""
    output, data = LauncherOutput(), text.encode()
    step = piece or len(data) + 1
    shown = b"".join(output.feed(data[i : i + step]) for i in range(0, len(data), step))
    return (shown + output.end()).decode(), output.faults


@pytest.mark.parametrize("piece", [None, 1, 7])
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (KILLED, Fault("killed", 1, "n2", signal=9)),
        (EXITED, Fault("exited", 1, exit_code=124)),
        (UNREACHABLE + EXITED, Fault("exited", 1, exit_code=124)),
        (LOST, Fault("host lost", host="n3")),
        (ABORTED, Fault("aborted", 2)),
        (TRACE_OF_SSH, Fault("not reached")),
        (NOT_REACHED, Fault("not reached")),
        (NO_PROGRAM, Fault("no program", host="n2")),
        (NO_FOLDER, Fault("no folder", detail="/proc/ompi.n1.0 (No such file or directory)")),
        (NO_ROOM, Fault("no room", host="n2")),
        (NO_SHARED_MEMORY, Fault("no shared memory", host="n2")),
        ("Timeout (0:05:05.015625)!\n", Fault("start hung", exit_code=124)),
        (HOROVODRUN, Fault("killed", 1, signal=9)),
        ("srun: error: n2: task 1: Killed\n", Fault("killed", 1, "n2", signal=9)),
        ("srun: error: n2: tasks 1-2: Exited with exit code 70\n", Fault("exited", 1, "n2", exit_code=70)),
        ("srun: error: Node failure on n3\n", Fault("host lost", host="n3")),
        ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n", Fault("step aborted")),
        ("srun: error: Timed out waiting for job step to complete\n", Fault("step timed out")),
    ],
)
def test_a_known_text_is_a_fault_and_not_shown(text: str, fault: Fault, piece: int | None) -> None:
    shown, faults = read("before\n" + text + "after\n", piece)
    assert shown == "before\nafter\n"
    assert faults[0] == fault


@pytest.mark.parametrize("piece", [None, 1, 7])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Timeout (0:01:00)!\nThread 0x00007f (most recent call first):\n",  # a script's own, now and then
        "no line break",
        "warning: something\n\x1b[31mred\x1b[0m\n",
        RULE + "There are not enough slots available in the system\n" + RULE + "next\n",
        RULE + "never closed\n",
        'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: x\nnext\n',
        "Traceback (most recent call last):\n  cut off",
        RULE * 3,
        RULE + "line\n" * 200,
        "bar 10 %\rbar 20 %\r",
    ],
)
def test_anything_else_is_passed_on_as_it_is(text: str, piece: int | None) -> None:
    assert read(text, piece) == (text, [])


@pytest.mark.parametrize("piece", [None, 1, 7])
@pytest.mark.parametrize(
    "text",
    [
        "slurmstepd: error: *** STEP 8.0 ON n1 CANCELLED AT 2026-11-28T16:45:34 ***\n",
        "slurmstepd-n1: error: *** STEP 8.0 ON n1 CANCELLED AT 2026-11-28T16:45:34 ***\n",  # Debian's
        "srun: cluster configuration lacks support for cpu binding\n",
    ],
)
def test_what_srun_says_besides_is_not_shown(text: str, piece: int | None) -> None:
    assert read("before\n" + text + "after\n", piece) == ("before\nafter\n", [])


#: Of srun, when n3 is lost: rank 1 has noticed it, and rank 0 is killed for that.
ABORTED_BY_SRUN = (
    "speechdp: rank 1 on n2: allreduce of 'parameters' failed\n"
    "slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-28T22:06:49 ***\n"
    "srun: Job step aborted: Waiting up to 4 seconds for job step to finish.\n"
    "srun: error: n1: task 0: Killed\n"
    "srun: error: n2: task 1: Exited with exit code 70\n"
)
KILLED_BEFORE = "srun: error: n3: task 2: Killed\n"
TIMED_OUT = "srun: error: Timed out waiting for job step to complete\n"


@pytest.mark.parametrize(
    ("text", "was_killed", "cause"),
    [
        (ABORTED_BY_SRUN + TIMED_OUT, False, Fault("host lost", host="n3.cluster")),
        (ABORTED_BY_SRUN, True, Fault("host lost", host="n3.cluster")),  # KillWait is 30 s by default
        # It has ended by itself: the ranks on n3 as well, with exit code 0.
        (ABORTED_BY_SRUN, False, Fault("killed", 0, "n1", signal=9)),
        # One that was killed before the others were ended is the cause.
        (
            "srun: error: n3: task 2: Killed\n" + ABORTED_BY_SRUN,
            True,
            Fault("killed", 2, "n3.cluster", signal=9),
        ),
    ],
)
def test_the_host_that_srun_waits_for_is_the_lost_one(text: str, was_killed: bool, cause: Fault) -> None:
    """The rank that was killed for that was said to have failed, and restarts left out its host."""
    hosts = [Host("n1", 1), Host("n2", 1), Host("n3.cluster", 1)]
    faults = located(read(text)[1], hosts, was_killed=was_killed)
    assert first_cause(faults) == cause
    assert not [fault for fault in faults if fault.kind.startswith("step ")]


def test_hosts_are_called_as_in_the_hostfile() -> None:
    hosts = [Host("10.0.0.1", 2), Host("n2.example.org", 1)]
    faults = [
        Fault("exited", 2, exit_code=255),
        Fault("killed", 0, "n1", signal=9),
        Fault("killed", 2, "n2", signal=9),
        Fault("host lost", host="n9"),
        Fault("exited", 7),
        Fault("reported", 0, "n7"),
    ]
    names = ["n2.example.org", "10.0.0.1", "n2.example.org", "n9", None, "n7"]
    assert [fault.host for fault in located(faults, hosts)] == names
    (here,) = located([Fault("killed", 0, "n1", signal=9)], [Host("localhost", 2)])
    assert here.host == "n1"


def test_what_ssh_returns_is_no_signal() -> None:
    shown, faults = read("[0]<stderr>:Terminated\n" + HOROVODRUN.replace("137", "255"))
    assert (shown, faults) == ("", [Fault("exited", 1, exit_code=255)])


def test_a_message_that_comes_in_two_pieces_is_noted() -> None:
    output = LauncherOutput()
    text = b"speechdp: unknown strategy 'model_avg'"
    shown = output.feed(text) + output.feed(b"\n") + output.end()
    assert shown == text + b"\n" and output.faults == [Fault("reported")]


@pytest.mark.parametrize("piece", [None, 7])
def test_horovodruns_end_is_read_behind_half_a_line_of_a_thread_of_its_own(piece: int | None) -> None:
    shown, faults = read("Exception in thread " + HOROVODRUN, piece)
    assert (shown, faults) == ("", [Fault("killed", 1, signal=9)])
    text = "Exception in thread Thread-5:\n"
    assert read(text, piece) == (text, [])


def test_a_rule_behind_half_a_line_begins_a_banner_all_the_same() -> None:
    shown, faults = read("[1,0]<stderr>:half a line" + KILLED + "rest\n")
    assert shown == "[1,0]<stderr>:half a line\nrest\n"
    assert faults == [Fault("killed", 1, "n2", signal=9)]
    horovods = (
        "[2026-11-22 02:12:41.300750: E " + KILLED + "/x/operations.cc:697] [0]: Horovod background loop "
    )
    assert read(horovods + "uncaught exception: reset by peer\n")[0] == ""


@pytest.mark.parametrize("text", ["epoch 1 30 %\r", "30 %", " 3: epoch", "12:3", "1:x", "7 speechdp: "])
def test_a_bar_without_a_line_break_is_shown_at_once(text: str) -> None:
    assert LauncherOutput().feed(text.encode()) == text.encode()


@pytest.mark.parametrize("piece", [None, 1, 7])
@pytest.mark.parametrize("tag", ["", "[1,2]<stderr>:", "[2]<stderr>:", "2: ", " 2: "])
def test_a_ranks_own_line_is_shown_and_noted(tag: str, piece: int | None) -> None:
    line = f"{tag}speechdp: rank 2 (feeder) on n3: train-00001.h5 is truncated; prepare again\n"
    for before in (RULE, ""):
        shown, faults = read(before + line + "rest\n", piece)
        assert shown == before + line + "rest\n"
        assert faults == [Fault("reported", 2, "n3")]


def test_a_rank_that_does_not_know_its_number_is_noted() -> None:
    shown, faults = read("speechdp: DATA/data.json: is not there; prepare the data first\n" + EXITED)
    assert shown == "speechdp: DATA/data.json: is not there; prepare the data first\n"
    assert faults[0] == Fault("reported") and first_cause(faults) == faults[0]
    assert faults[0].describe() == "a rank failed, its message is above"


def test_a_rank_that_a_signal_has_ended_has_not_failed() -> None:
    line = f"speechdp: {describe_end(Ended(signal.SIGUSR1))[0]}\n"
    shown, faults = read(line)
    assert shown == line and faults == [Fault("killed", signal=signal.SIGUSR1)]
    stopped = verdict(JobEnd(1, signal.SIGTERM, tuple(faults)), None)  # horovodrun's own is 1
    assert stopped == Verdict(143, "the job was stopped by SIGTERM")


def test_a_hung_ranks_line_names_the_hosts_that_gave_no_sign_of_life() -> None:
    line = (
        "speechdp: rank 0 on n1: no step ended for 60 s (step 7, in comm for 60 s); late: rank 2 on n3 "
        "(no sign of life for 70 s), rank 1 on n2 (in data_wait for 61 s)\n"
    )
    (fault,) = read(line)[1]
    assert fault == Fault("reported", 0, "n1", exit_code=exit_codes.HUNG, silent_hosts=("n3",))
    assert fault.describe().startswith("the job hung; the message of rank 0 on n1 above names")


def test_a_script_whose_ranks_wait_in_vain_hangs() -> None:
    line = (
        "speechdp: rank 1 on n1: hung for 60 s at step 6, waiting for other ranks; rank 0 on n1 (at "
        "run.save_checkpoint() for 61 s), rank 2 on n1 (no sign of life for 70 s); make the same calls\n"
    )
    (fault,) = read(line)[1]
    assert fault == Fault("reported", 1, "n1", exit_code=exit_codes.HUNG, silent_hosts=("n1",))


def test_the_cause_is_what_was_killed_before_who_noticed() -> None:
    said, killed = Fault("reported", 0, "n1"), Fault("killed", 3, "n2", signal=9)
    asked_to_end = Fault("killed", 1, "n1", signal=15)
    assert first_cause([said, killed]) == killed
    assert first_cause([asked_to_end, said]) == said
    behind_ssh = Fault("exited", 1, "n2", exit_code=255)
    assert first_cause([said, behind_ssh]) == behind_ssh
    assert first_cause([said, Fault("exited", 0, exit_code=255)]) == said
    assert first_cause([Fault("exited", 1, exit_code=3)]) == Fault("exited", 1, exit_code=3)
    assert first_cause([]) is None
