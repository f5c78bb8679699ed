"""Whether a job is started again, over which hosts, with which command line."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from speechdp.cli.launch import LaunchCommand, check_options
from speechdp.cli.main import run
from speechdp.errors import ConfigError
from speechdp.launching.faults import Fault
from speechdp.launching.hostfile import Host, Hostfile
from speechdp.launching.outcome import Target, newest_checkpoint
from speechdp.launching.restarts import RestartPolicy, Restarts, find_reachable
from speechdp.launching.supervise import JobEnd
from tests.helpers.network_disk import remember_as_missing
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until

HOSTS = (Host("n1", 2), Host("n2", 2), Host("n3", 2))
KILLED = JobEnd(137, None, (Fault("killed", 2, "n2", signal=9),))


def restarts(
    folder: Path, num_ranks: int = 4, policy: RestartPolicy | None = None, gone: Sequence[str] = ()
) -> Restarts:
    def reachable(hosts: Sequence[Host]) -> list[Host]:
        return [host for host in hosts if host.name not in gone]

    result = Restarts(
        policy or RestartPolicy(2), Hostfile("F", HOSTS), num_ranks, Target("train", folder, None), reachable
    )
    result.begin()
    return result


def save(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_a_killed_rank_is_started_again_on_the_same_hosts(tmp_path: Path) -> None:
    job = restarts(tmp_path)
    assert job.why_not(KILLED, 137) is None
    assert job.next_hosts(KILLED.faults) == (Host("n1", 2), Host("n2", 2))


def test_hosts_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    job = restarts(tmp_path, gone=["n2"])
    assert job.next_hosts([Fault("host lost", host="n2")]) == (Host("n1", 2), Host("n3", 2))
    assert job.left_out == ("n2",)


def test_a_host_on_which_ranks_died_twice_is_left_out_where_others_have_room(tmp_path: Path) -> None:
    job = restarts(tmp_path, policy=RestartPolicy(5))
    assert job.next_hosts(KILLED.faults)[1].name == "n2"
    assert [host.name for host in job.next_hosts(KILLED.faults)] == ["n1", "n3"]
    crowded = restarts(tmp_path, num_ranks=6, policy=RestartPolicy(5))
    crowded.next_hosts(KILLED.faults)
    assert len(crowded.next_hosts(KILLED.faults)) == 3 and crowded.left_out == ()
    fewer = restarts(tmp_path, num_ranks=6, policy=RestartPolicy(5, min_ranks=4))
    assert len(fewer.next_hosts(KILLED.faults)) == 3
    assert fewer.next_hosts(KILLED.faults) == (HOSTS[0], HOSTS[2]) and fewer.left_out == ("n2",)


def test_too_few_hosts_end_it_unless_fewer_ranks_will_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"6 ranks need .* hosts that respond have 4 \(no response: n3\)"):
        restarts(tmp_path, num_ranks=6, gone=["n3"]).next_hosts([])
    fewer = restarts(tmp_path, num_ranks=6, policy=RestartPolicy(1, min_ranks=3), gone=["n3"])
    assert fewer.next_hosts([]) == HOSTS[:2]


def test_a_sweep_that_is_over_is_not_started_again_for_the_runs_that_have_failed(tmp_path: Path) -> None:
    job = replace(restarts(tmp_path), target=Target("sweep", tmp_path, None))
    said = JobEnd(1, None, (Fault("reported", 0, "n1"),))
    (tmp_path / "sweep.json").write_text('{"runs": ["a", "b"], "failed": {"a": "the loss is nan"}}')
    save(tmp_path / "b", 10)
    assert job.why_not(said, 1) is None  # b was under way: its disk may have been full
    (tmp_path / "b" / "completed.json").write_text("{}")
    assert job.why_not(said, 1) == ""
    assert job.why_not(KILLED, 137) is None  # in the race


def test_what_would_fail_again_is_not_started_again(tmp_path: Path) -> None:
    job = restarts(tmp_path)
    refused = JobEnd(1, None, (Fault("reported", 0, "n1"),))
    assert "it would fail in the same way" in str(job.why_not(refused, 1))
    save(tmp_path, 10)  # it had gone on: the disk may have been full for a while
    assert job.why_not(refused, 1) is None
    assert job.why_not(JobEnd(0, None), 1) is None  # Open MPI 5 after the loss of a host
    assert job.why_not(JobEnd(2, None), 2) == ""
    assert job.why_not(JobEnd(76, None), 76) == ""  # a script that was asked to stop, and saved nothing
    assert job.why_not(JobEnd(73, None, (Fault("reported", 0, "n1"),)), 73) == ""  # another job's checkpoint
    assert job.why_not(JobEnd(143, 15), 143) == ""
    assert job.why_not(JobEnd(0, None), 0) == ""


def test_restarts_are_counted(tmp_path: Path) -> None:
    job = restarts(tmp_path, policy=RestartPolicy(1))
    job.next_hosts([])
    assert "--max-restarts 1 is reached" in str(job.why_not(KILLED, 137))
    assert restarts(tmp_path, policy=RestartPolicy()).why_not(KILLED, 137) == ""


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    train = Target("train", tmp_path, None)
    for policy, target, said in (
        (RestartPolicy(-1), train, "at least 0"),
        (RestartPolicy(1), None, "only train, sweep and Python scripts"),
        (RestartPolicy(1, min_ranks=5), train, "from 1 to the number of ranks, 4"),
        (RestartPolicy(0, min_ranks=2), train, "give --max-restarts as well"),
        # It would be refused by the sweep itself once a host is lost, after hours.
        (
            RestartPolicy(1, min_ranks=2),
            Target("sweep", tmp_path, None),
            "a sweep compares runs on the same number",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            policy.check(4, target)
    RestartPolicy(1, min_ranks=4).check(4, train)


@pytest.mark.parametrize("strategy", ["ad_psgd", "parameter_server", "parameter_server:mode=sync", "easgd"])
def test_fewer_ranks_are_refused_for_a_strategy_that_needs_all_of_them(strategy: str) -> None:
    command = ("train", "D", "R", "--strategy", strategy)
    few = LaunchCommand(command, max_restarts=1, min_ranks=2)
    with pytest.raises(ConfigError, match=f"--min-ranks 2: {strategy} cannot continue with fewer ranks"):
        check_options(few, 4, None, is_script=False)
    check_options(replace(few, min_ranks=4), 4, None, is_script=False)


@pytest.mark.parametrize("strategy", ["easgd:mode=sync", "model_averaging:period=4", "dpsgd"])
def test_fewer_ranks_are_allowed_where_a_run_goes_on_with_them(strategy: str) -> None:
    command = ("train", "D", "R", "--strategy", strategy)
    policy = check_options(LaunchCommand(command, max_restarts=1, min_ranks=2), 4, None, is_script=False)
    assert policy.min_ranks == 2


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "min_ranks", "refused"),
    [
        ((4, 4, 4), 12, 4, "loss of hosts may leave 8 ranks, and --global-batch 36: is not divisible by 8"),
        ((4, 2), 6, 1, None),  # 4 or 2, never 5
        ((4, 4, 4), 12, 12, None),
        ((4, 4, 4), 4, 2, None),  # with hosts to spare
        ((), 12, 4, None),  # which hosts a job gets is not known yet
    ],
)
def test_a_global_batch_has_to_divide_by_the_ranks_that_may_be_left(
    hosts: tuple[int, ...], num_ranks: int, min_ranks: int, refused: str | None
) -> None:
    """It was noticed by the restart, hours later."""
    command = ("train", "D", "R", "--global-batch", "36")
    options = LaunchCommand(command, max_restarts=1, min_ranks=min_ranks)
    at = tuple(Host(f"n{number}", slots) for number, slots in enumerate(hosts))
    with nullcontext() if refused is None else pytest.raises(ConfigError, match=refused):
        check_options(options, num_ranks, None, is_script=False, hosts=at)


def test_the_same_run_goes_on(tmp_path: Path) -> None:
    job = restarts(tmp_path)
    (tmp_path / "run.json").write_text("{}")  # the run has begun
    for given in (["--overwrite"], ["--resume"], ["--over_write", "--overwrite"]):
        kept = [word for word in given if word == "--over_write"]
        assert job.resume_arguments(["train", "D", "R", *given]) == ("train", "D", "R", *kept, "--resume")
    sweep = Restarts(RestartPolicy(1), Hostfile("F", HOSTS), 2, Target("sweep", tmp_path, None), list)
    sweep.begin()
    (tmp_path / "sweep.json").write_text("{}")
    assert sweep.resume_arguments(["sweep", "D", "O", "--overwrite"]) == ("sweep", "D", "O")


def test_a_run_that_was_to_be_overwritten_and_is_still_there_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    save(tmp_path, 100)
    job = restarts(tmp_path)
    command = ["train", "D", "R", "--overwrite"]
    assert job.resume_arguments(command) == tuple(command)
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").write_text("{ }")
    assert job.resume_arguments(command) == ("train", "D", "R", "--resume")


def test_a_run_that_another_host_has_begun_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, which knows from before the job that there was no folder, until the one above is listed."""
    run = tmp_path / "new" / "run"
    job = restarts(run)
    save(run, 100)
    (run / "run.json").write_text("{}")
    remembered = [run.parent, run, run / "run.json", run / "checkpoints"]
    for look in (
        lambda: job.resume_arguments(["train", "D", "R", "--overwrite"]) == ("train", "D", "R", "--resume"),
        lambda: job.why_not(JobEnd(1, None, (Fault("reported", 0, "n1"),)), 1) is None,
        lambda: newest_checkpoint(run) == run / "checkpoints" / "step-00000100",
    ):
        remember_as_missing(monkeypatch, remembered)
        assert look()
        monkeypatch.undo()


def test_a_checkpoint_that_was_only_deleted_is_no_progress(tmp_path: Path) -> None:
    save(tmp_path, 100)
    job = restarts(tmp_path)
    refused = JobEnd(1, None, (Fault("reported", 0, "n1"),))
    shutil.rmtree(tmp_path / "checkpoints")
    assert "it would fail in the same way" in str(job.why_not(refused, 1))
    save(tmp_path, 100)  # written anew, at the same step
    assert job.why_not(refused, 1) is None


def test_a_checkpoint_by_a_clock_that_was_set_back_is_progress(tmp_path: Path) -> None:
    save(tmp_path, 100)
    job = restarts(tmp_path)
    save(tmp_path, 200)
    os.utime(tmp_path / "checkpoints" / "step-00000200", (1, 1))
    assert job.why_not(JobEnd(1, None, (Fault("reported", 0, "n1"),)), 1) is None
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000200"
    save(tmp_path / "realign" / "1", 9)  # of another run, a later one
    assert newest_checkpoint(tmp_path) == tmp_path / "realign" / "1" / "checkpoints" / "step-00000009"


def test_hosts_that_cannot_be_reached_are_no_refusal(tmp_path: Path) -> None:
    job = restarts(tmp_path)
    assert job.why_not(JobEnd(1, None, (Fault("not reached"),)), 1) is None
    assert job.why_not(JobEnd(1, None, (Fault("no program", host="n2"),)), 1) is None


@pytest.mark.parametrize("faults", [(), (Fault("no folder", detail="/proc/x"),)])
def test_a_launcher_that_ends_by_itself_is_no_refusal(faults: tuple[Fault, ...], tmp_path: Path) -> None:
    """mpirun returns 1 where it is ended by SIGTERM, and where it can make no folder for itself."""
    job = restarts(tmp_path)
    assert job.why_not(JobEnd(1, None, faults), 1) is None
    assert job.next_hosts(faults) == (Host("n1", 2), Host("n2", 2))


def test_only_the_host_at_which_it_began_is_blamed(tmp_path: Path) -> None:
    job = restarts(tmp_path, num_ranks=4, policy=RestartPolicy(5))
    ended_with_it = [Fault("killed", 0, "n1", signal=9), Fault("killed", 3, "n2", signal=15)]
    for _ in range(2):
        hosts = job.next_hosts([Fault("killed", 2, "n2", signal=9), *ended_with_it])
    assert [host.name for host in hosts] == ["n1", "n3"]


@pytest.mark.parametrize("at_once", [1, 2, 32])
def test_hosts_are_tried_by_starting_a_process_there(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("speechdp.launching.restarts._PROBE_S", 300.0)  # this machine may be slow
    monkeypatch.setattr("speechdp.launching.restarts._PROBES_AT_ONCE", at_once)

    def probe(host: Host) -> list[str]:
        return [sys.executable, "-c", f"raise SystemExit({int(host.name == 'n2')})"]

    found = find_reachable([Host("localhost", 1), *HOSTS], probe, {})
    assert [host.name for host in found] == ["localhost", "n1", "n3"]


def test_a_stop_ends_the_waiting_for_hosts() -> None:
    def probe(host: Host) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(60)"]

    assert find_reachable(HOSTS, probe, {}, stopped=lambda: True) == []


def test_after_a_stop_no_more_hosts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speechdp.launching.restarts._PROBES_AT_ONCE", 1)
    tried = []

    def probe(host: Host) -> list[str]:
        tried.append(host.name)
        return [sys.executable, "-c", "import time; time.sleep(60)"]

    assert find_reachable(HOSTS, probe, {}, stopped=lambda: bool(tried)) == []
    assert tried == ["n1"]


#: As mpirun: has a folder until it is asked to end, and starts ssh, here a `sleep`, in a group of its own.
_PROBE = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
signal.signal(signal.SIGTERM, lambda *_: (folder.rmdir(), os._exit(1)))
ssh = subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)
folder.with_suffix(".new").write_text(str(ssh.pid))
folder.with_suffix(".new").rename(folder.with_suffix(".ssh"))
while True:  # a signal that comes just before a sleep begins is handled only after it
    time.sleep(0.1)
"""


def test_a_host_that_does_not_answer_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the login that hangs nor the folder of mpirun's session."""
    for name in ("_PROBE_S", "_PROBE_END_S"):
        monkeypatch.setattr(f"speechdp.launching.restarts.{name}", 300.0)  # this machine may be slow
    told = [tmp_path / f"{host.name}.ssh" for host in HOSTS]

    def probe(host: Host) -> list[str]:
        return [sys.executable, "-c", _PROBE, str(tmp_path / host.name)]

    assert find_reachable(HOSTS, probe, os.environ, stopped=lambda: all(file.exists() for file in told)) == []
    logins = [int(file.read_text()) for file in told]
    try:
        wait_until(lambda: not any(map(is_running, logins)), "the end of the logins")
        assert sorted(tmp_path.iterdir()) == told
    finally:
        for pid in filter(is_running, logins):
            os.kill(pid, signal.SIGKILL)


def test_a_probe_that_does_not_end_when_asked_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speechdp.launching.restarts._PROBE_S", 300.0)
    monkeypatch.setattr("speechdp.launching.restarts._PROBE_END_S", 0.1)
    begun, over = tmp_path / "begun", tmp_path / "over"
    hanging = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(begun)!r}).touch(); time.sleep(600); pathlib.Path({str(over)!r}).touch()"
    )

    def probe(host: Host) -> list[str]:
        return [sys.executable, "-c", hanging]

    assert find_reachable(HOSTS[:1], probe, os.environ, stopped=begun.exists) == []
    assert not over.exists()


def test_a_script_is_started_again_as_it_is_whatever_it_failed_with() -> None:
    RestartPolicy(1).check(4, None, is_script=True)
    with pytest.raises(ConfigError, match="only train, sweep and Python scripts can be restarted"):
        RestartPolicy(1).check(4, None)
    script = Restarts(RestartPolicy(1), Hostfile("F", HOSTS), 4, None, list, is_script=True)
    script.begin()
    failed = JobEnd(1, None, (Fault("exited", 0, "n1", exit_code=1),))
    assert script.why_not(failed, 1) is None
    assert script.why_not(JobEnd(143, 15), 143) == ""
    script.next_hosts(failed.faults)
    assert script.resume_arguments(["train.py", "--overwrite"]) == ("train.py", "--overwrite")
    assert "--max-restarts 1 is reached" in (script.why_not(failed, 1) or "")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Take what `launch` starts for done; return the argv of each."""
    jobs: list[Sequence[str]] = []

    def run_job(argv: Sequence[str], *_: object, **__: object) -> JobEnd:
        jobs.append(argv)
        return JobEnd(0, None)

    monkeypatch.setattr("speechdp.cli.launch.run_job", run_job)
    return jobs


@pytest.mark.parametrize(
    ("over_it", "without", "said"),
    [
        (("n1", "n2", "n3"), (), ""),
        (
            ("n1", "n3"),
            ("n2",),
            "--interface lo: mpirun cannot start ranks on n2 over it, but can without it",
        ),
        (("n1", "n3"), (), ""),  # down, say, of which the start itself tells
    ],
)
def test_an_interface_that_leads_nowhere_is_told_before_the_start(
    over_it: tuple[str, ...],
    without: tuple[str, ...],
    said: str,
    started: list[Sequence[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """mpirun spoke of a firewall, and launch of what ssh says, which said nothing."""

    def reachable(self: object, hosts: Sequence[Host], *, by_interface: bool = True) -> list[Host]:
        return [host for host in hosts if host.name in (over_it if by_interface else without)]

    monkeypatch.setattr("speechdp.cli.launch._Starter.reachable", reachable)
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{host.name} slots=1\n" for host in HOSTS))
    words = ["launch", "--hostfile", str(hosts), "--interface", "lo", "--", "python", "script.py"]
    assert run(words) == (1 if said else 0)
    assert said in capsys.readouterr().err and len(started) == (not said)


def test_an_interface_of_one_machine_is_taken(
    started: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no other host to ask."""
    assert run(["launch", "-np", "1", "--interface", "lo", "--", "python", "script.py"]) == 0
    assert len(started) == 1, capsys.readouterr().err
