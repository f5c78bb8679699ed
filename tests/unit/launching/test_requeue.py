"""Which jobs are given back to the batch system: those that it stopped itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from speechdp.cli.main import run
from speechdp.exit_codes import FAILED, STOPPED, STOPPED_UNSAVED
from speechdp.launching.faults import Fault
from speechdp.launching.requeue import is_to_be_resumed
from speechdp.launching.supervise import JobEnd
from speechdp.process.ending import give_up_handler


@pytest.mark.parametrize(
    ("stop_signal", "exit_code", "expected"),
    [
        (signal.SIGUSR1, STOPPED, True),
        (signal.SIGUSR2, STOPPED, True),
        (signal.SIGUSR1, 128 + signal.SIGUSR1, True),  # before the ranks could answer: nothing is lost
        (None, STOPPED, True),  # the ranks were told directly
        (signal.SIGTERM, STOPPED, False),  # scancel: it must not come back
        (signal.SIGTERM, 128 + signal.SIGTERM, False),
        (signal.SIGINT, STOPPED, False),
        (None, FAILED, False),
        (None, 0, False),
        (signal.SIGUSR1, 0, False),  # it was complete by then
    ],
)
def test_which_commands_go_on(stop_signal: signal.Signals | None, exit_code: int, expected: bool) -> None:
    assert is_to_be_resumed(JobEnd(exit_code, stop_signal), exit_code) == expected


@pytest.mark.parametrize("exit_code", [STOPPED, 128 + signal.SIGUSR2])
def test_a_job_that_qdel_has_deleted_does_not_come_back(exit_code: int) -> None:
    end = JobEnd(exit_code, signal.SIGUSR2)
    assert not is_to_be_resumed(end, exit_code, "sge")
    assert is_to_be_resumed(end, exit_code, "lsf")


@pytest.mark.parametrize(
    ("stop_signal", "exit_code", "expected"),
    [
        (signal.SIGUSR1, STOPPED, True),
        (None, STOPPED, True),
        (signal.SIGUSR1, 128 + signal.SIGUSR1, False),  # it would begin anew at each time limit
        (signal.SIGUSR2, 128 + signal.SIGUSR2, False),
        (None, STOPPED_UNSAVED, False),
        (signal.SIGTERM, STOPPED, False),
        (signal.SIGUSR1, 0, False),
    ],
)
def test_what_would_begin_anew_goes_on_only_if_it_has_saved(
    stop_signal: signal.Signals | None, exit_code: int, expected: bool
) -> None:
    assert is_to_be_resumed(JobEnd(exit_code, stop_signal), exit_code, begins_anew=True) == expected


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Be in a folder, in a Slurm job whose scontrol notes that it was called.

    Where there is a file `end` it ends who has called it, and waits for that end, as PBS's qrerun does; the
    name of a signal in that file ends itself.
    """
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/ordered\ntest ! -e {tmp_path}/refuse || exit 1\n'
        f"test -e {tmp_path}/end || exit 0\n"
        f"read -r own <{tmp_path}/end && kill -$own $$\n"
        "kill -TERM $PPID\nexec sleep 60\n"
    )
    scontrol.chmod(0o700)
    facts = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2"}
    for name, value in {**facts, "PATH": f"{tmp_path}:/usr/bin:/bin"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


SCRIPT = ("python", "own.py")
TRAIN = ("train", "D", "R")
DECODE = ("decode", "R", "D")
NOT_REQUEUED = "job 7 is not requeued: the script did not save in time when it was asked to stop; "


@pytest.mark.parametrize(
    ("command", "exit_code", "stop_signal", "said"),
    [
        (
            SCRIPT,
            STOPPED,
            signal.SIGUSR1,
            "job 7 is requeued by slurm, to continue from what the script has saved",
        ),
        (SCRIPT, STOPPED_UNSAVED, signal.SIGUSR1, NOT_REQUEUED),
        (SCRIPT, STOPPED_UNSAVED, None, NOT_REQUEUED),  # the ranks were told directly
        (SCRIPT, 138, signal.SIGUSR1, NOT_REQUEUED),
        (TRAIN, STOPPED, signal.SIGUSR1, "job 7 is requeued by slurm, to continue from its checkpoint"),
        (TRAIN, 138, signal.SIGUSR1, "job 7 is requeued by slurm, to be started again"),
        # It saves nothing on the way: it would begin anew at each time limit, for ever.
        (DECODE, 138, signal.SIGUSR1, "job 7 is not requeued: decode saves no checkpoints"),
    ],
)
def test_what_becomes_of_a_job_at_its_time_limit_is_told(
    command: tuple[str, ...],
    exit_code: int,
    stop_signal: signal.Signals | None,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if exit_code == STOPPED:
        (folder / "R" / "checkpoints" / "step-00000042").mkdir(parents=True)
    end = JobEnd(exit_code, stop_signal)
    monkeypatch.setattr("speechdp.cli.launch.run_job", lambda *_arguments, **_options: end)
    is_given_back = "requeued by" in said
    assert run(["launch", "--requeue", "--", *command]) == (STOPPED if is_given_back else exit_code)
    *before, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"speechdp launch: {said}")
    assert (folder / "ordered").exists() == is_given_back
    if is_given_back:  # who started it by hand as well would have two jobs that wait for one folder
        assert "start again" not in "".join(before) and "same command" not in "".join(before)


@pytest.mark.parametrize("own", ["", "TERM\n"])
def test_what_ends_the_job_before_it_has_answered_has_accepted(
    own: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "end").write_text(own)
    end = JobEnd(STOPPED, signal.SIGUSR1)
    monkeypatch.setattr("speechdp.cli.launch.run_job", lambda *_arguments, **_options: end)
    assert run(["launch", "--requeue", "--", *TRAIN]) == STOPPED
    assert capsys.readouterr().err.endswith("job 7 is requeued by slurm, to be started again\n")
    signal.raise_signal(signal.SIGTERM)  # which may come later still


def test_the_end_of_a_job_that_comes_twice_is_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first comes just after the batch system's program has ended, and before signals are ignored."""
    end = JobEnd(STOPPED, signal.SIGUSR1)
    monkeypatch.setattr("speechdp.cli.launch.run_job", lambda *_arguments, **_options: end)
    given_up: list[signal.Signals] = []

    def give_up(signum: signal.Signals, disposition: signal.Handlers) -> None:
        given_up.append(signum)
        if len(given_up) == 1:
            signal.raise_signal(signum)
        give_up_handler(signum, disposition)

    monkeypatch.setattr("speechdp.launching.requeue.give_up_handler", give_up)
    assert run(["launch", "--requeue", "--", *TRAIN]) == STOPPED
    signal.raise_signal(signal.SIGTERM)
    assert capsys.readouterr().err.endswith("job 7 is requeued by slurm, to be started again\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (TRAIN, "job 7 is requeued by slurm, to be started again"),
        (SCRIPT, "job 7 is requeued by slurm, to be started again"),
        (DECODE, "job 7 is requeued by slurm, to be started again"),
    ],
)
def test_a_warning_before_launch_was_ready_counts(
    command: tuple[str, ...],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("speechdp.process.ending._held", [int(signal.SIGUSR1)])
    monkeypatch.setattr("speechdp.cli.launch.run_job", lambda *_arguments, **_options: pytest.fail("started"))
    assert run(["launch", "--requeue", "--", *command]) == STOPPED
    stopped = "speechdp launch: the job was stopped by SIGUSR1 before its ranks were started"
    assert capsys.readouterr().err.splitlines() == [stopped, f"speechdp launch: {said}"]
    assert (folder / "ordered").exists()


@pytest.mark.parametrize("command", [SCRIPT, TRAIN, DECODE])
@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGUSR2, STOPPED), (signal.SIGUSR1, STOPPED)])
def test_a_warning_before_launch_was_ready_is_told_without_advice_to_resume(
    command: tuple[str, ...],
    signum: signal.Signals,
    exit_code: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There may be no run yet, and a script has saved nothing."""
    monkeypatch.setattr("speechdp.process.ending._held", [int(signum)])
    monkeypatch.setattr("speechdp.cli.launch.run_job", lambda *_arguments, **_options: pytest.fail("started"))
    assert run(["launch", "--", *command]) == exit_code
    assert capsys.readouterr().err == (
        f"speechdp launch: the job was stopped by {signum.name} before its ranks were started; "
        "repeat the command\n"
    )


def test_a_script_that_a_warning_has_killed_is_not_said_to_have_been_slow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end = JobEnd(138, signal.SIGUSR1, (Fault("killed", 0, "localhost", signal=signal.SIGUSR1),))
    monkeypatch.setattr("speechdp.cli.launch.run_job", lambda *_arguments, **_options: end)
    assert run(["launch", "--requeue", "--", *SCRIPT]) == 138
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "speechdp launch: job 7 is not requeued: the script was ended by the batch system's warning "
        "signal, as it had not yet checked run.should_stop; "
    )


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (SCRIPT, "submit the job again; the same command continues from the script's last checkpoint"),
        (TRAIN, "submit the job again; with --resume it continues from its checkpoint"),
    ],
)
def test_a_refused_requeue_names_how_to_go_on(
    command: tuple[str, ...],
    remedy: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "refuse").touch()
    end = JobEnd(STOPPED, signal.SIGUSR1)
    monkeypatch.setattr("speechdp.cli.launch.run_job", lambda *_arguments, **_options: end)
    assert run(["launch", "--requeue", "--", *command]) == FAILED
    assert capsys.readouterr().err.rstrip().endswith(remedy)


def test_a_job_that_pauses_is_not_requeued_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves with 75 at its step, as one that the batch system has stopped does."""
    end = JobEnd(STOPPED, None)
    monkeypatch.setattr("speechdp.cli.launch.run_job", lambda *_arguments, **_options: end)
    for words in (["--pause-at", "100"], ["--pause_at=100"]):
        assert run(["launch", "--requeue", "--", *TRAIN, *words]) == FAILED
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("speechdp: --pause-at ends the job with exit code 75, ")
        assert run(["launch", "--", *TRAIN, *words]) == STOPPED
    monkeypatch.setenv("SPEECHDP_PAUSE_AT", "100")
    assert run(["launch", "--requeue", "--", *SCRIPT]) == FAILED
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("speechdp: SPEECHDP_PAUSE_AT=100 ends the job with exit code 75, ")
    assert run(["launch", "--", *SCRIPT]) == STOPPED
    assert not (folder / "ordered").exists()
