"""The verdict on a job's end: exit code, completion marker, and what the launcher printed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from speechdp.errors import ConfigError
from speechdp.launching.faults import Fault, ends_job
from speechdp.launching.outcome import (
    SCRIPT_CONTINUES,
    Target,
    Verdict,
    find_target,
    how_a_script_resumes,
    last_checkpoint,
    verdict,
)
from speechdp.launching.supervise import JobEnd
from tests.helpers.network_disk import remember_as_missing


def test_the_run_is_found_behind_the_subcommand(tmp_path: Path) -> None:
    target = find_target(["train", "DATA", str(tmp_path), "--epochs", "3"])
    assert target == Target("train", tmp_path, None)
    assert find_target(["inspect", "DATA"]) is None
    assert find_target(["train", "--help"]) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to launch"),
        (["--strategy", "x"], "nothing to launch"),
        (["launch", "-np", "2"], "cannot start launch"),
        (["train", "DATA"], "train DATA RUN"),
        (["sweep", "--periods", "1", "DATA", "OUT"], "sweep DATA OUT"),
    ],
)
def test_commands_that_cannot_be_watched_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_target(arguments)


def run_folder(folder: Path, *steps: int) -> Target:
    for step in steps:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000999.partial").mkdir(parents=True)
    return Target("train", folder, None)


def test_a_killed_rank_names_the_last_whole_checkpoint(tmp_path: Path) -> None:
    target = run_folder(tmp_path, 10, 20)
    newest = tmp_path / "checkpoints" / "step-00000020"
    os.utime(newest.with_name("step-00000010"), (1, 1))
    assert last_checkpoint(target) == newest
    assert verdict(JobEnd(137, None), target) == Verdict(
        137,
        f"the job ended with exit code 137 (a rank was killed by signal 9); last checkpoint: {newest}",
        "; start again with --resume",
    )


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_minded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = run_folder(tmp_path, 10, 20)
    (tmp_path / "checkpoints" / "step-00000030").symlink_to("nowhere", target_is_directory=True)
    walk = os.walk

    def walk_beside_another(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walk(top):
            if found[0].endswith("checkpoints"):
                (tmp_path / "checkpoints" / "step-00000020").rmdir()
            yield found

    monkeypatch.setattr(os, "walk", walk_beside_another)
    assert last_checkpoint(target) == tmp_path / "checkpoints" / "step-00000010"


def test_a_folder_in_use_is_not_to_be_gone_on_with(tmp_path: Path) -> None:
    result = verdict(JobEnd(73, None, (Fault("reported", 0, "n1"),)), run_folder(tmp_path, 10))
    assert (result.exit_code, result.advice) == (73, "")


def test_what_the_launcher_tells_names_rank_and_host(tmp_path: Path) -> None:
    target = run_folder(tmp_path, 10)
    noticed = Fault("reported", 0, "n1")
    killed = Fault("killed", 3, "n2", signal=9)
    reason = verdict(JobEnd(137, None, (noticed, killed)), target).reason
    assert reason is not None and reason.startswith("rank 3 on n2 was killed by SIGKILL, by a user or by")
    assert "(exit code 137); last checkpoint: " in reason
    lost = Fault("host lost", host="n3")
    reason = verdict(JobEnd(205, None, (lost,)), target).reason
    assert reason is not None and reason.startswith("host n3 was lost: it is down, or its link is cut")
    # Open MPI 5 returns 0 then.
    result = verdict(JobEnd(0, None, (lost,)), target)
    assert result.exit_code == 1 and "no completion marker" in str(result.reason)
    assert "host n3 was lost" in str(result.reason)


@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [
        (Fault("killed", 1, signal=9), 137),
        (Fault("exited", 1, exit_code=75), 75),
        (Fault("reported", 1, "n1"), 1),
    ],
)
def test_horovodruns_exit_code_is_the_ranks(fault: Fault, exit_code: int, tmp_path: Path) -> None:
    assert verdict(JobEnd(1, None, (fault,)), run_folder(tmp_path, 1)).exit_code == exit_code


def test_where_losses_are_tolerated_only_the_marker_counts(tmp_path: Path) -> None:
    command = ["train", "DATA", str(tmp_path), "--tolerate-loss"]
    target = find_target(command)
    assert verdict(JobEnd(137, None), target).exit_code == 137
    (tmp_path / "completed.json").write_text("{}")
    assert verdict(JobEnd(137, None), target) == Verdict(0)


def test_without_a_checkpoint_it_says_so(tmp_path: Path) -> None:
    result = verdict(JobEnd(137, None), Target("train", tmp_path, None))
    assert result.exit_code == 137
    assert str(result.reason).endswith(f"no checkpoint in {tmp_path} yet")
    assert result.advice == "; give the same command again, with --resume"  # alone it would take defaults
    (tmp_path / "run.json").write_text("{}")
    assert verdict(JobEnd(137, None), Target("train", tmp_path, None)).advice == "; start again with --resume"


@pytest.mark.parametrize("exit_code", [1, 2])
def test_a_refused_command_is_not_to_be_given_again(exit_code: int, tmp_path: Path) -> None:
    end = JobEnd(exit_code, None, (Fault("reported", 0, "n1"),))
    result = verdict(end, Target("train", tmp_path, None))
    assert result.exit_code == exit_code and result.advice == ""
    assert result.reason == f"rank 0 on n1 failed, its message is above (exit code {exit_code})"


def test_where_no_rank_failed_none_is_said_to_have(tmp_path: Path) -> None:
    ended = JobEnd(1, None)  # mpirun, of a SIGTERM from outside
    not_begun = verdict(ended, Target("train", tmp_path, None))
    assert not_begun.exit_code == 1 and not_begun.advice == ""
    assert "(no rank failed first: the launcher was ended from outside, or failed" in str(not_begun.reason)
    assert verdict(ended, run_folder(tmp_path / "b", 7)).advice == "; start again with --resume"
    killed = verdict(JobEnd(137, None, killed_by=9), Target("train", tmp_path / "c", None))
    assert str(killed.reason).startswith("the launcher itself was killed by SIGKILL; no checkpoint")
    no_folder = JobEnd(1, None, (Fault("no folder", detail="/proc/x (No such file or directory)"),))
    result = verdict(no_folder, Target("train", tmp_path, None))
    assert str(result.reason).startswith(
        "mpirun cannot create its folder /proc/x (No such file or directory);"
    )
    assert result.advice == ""


def test_a_full_disk_of_the_launcher_is_the_cause_only_where_ranks_fail_of_it(tmp_path: Path) -> None:
    no_room = Fault("no room", host="n2")
    assert not ends_job(no_room)  # it may do without: nothing is ended for it
    result = verdict(
        JobEnd(1, None, (no_room, Fault("exited", 1, exit_code=1))), Target("train", tmp_path, None)
    )
    assert str(result.reason).startswith("mpirun has no space for its files on n2; free some space in TMPDIR")
    assert result.advice == ""
    said = verdict(JobEnd(1, None, (no_room, Fault("reported", 0, "n1"))), Target("train", tmp_path, None))
    assert str(said.reason).startswith("rank 0 on n1 failed, its message is above")


def test_a_small_shared_memory_is_named_with_its_remedy(tmp_path: Path) -> None:
    end = JobEnd(1, None, (Fault("no shared memory", host="n2"), Fault("exited", 1, exit_code=1)))
    result = verdict(end, Target("train", tmp_path, None))
    assert str(result.reason).startswith("ranks on n2 exchange data through /dev/shm, which is full")
    assert result.advice == ""


def test_exit_code_0_needs_a_fresh_marker(tmp_path: Path) -> None:
    command = ["train", "DATA", str(tmp_path)]
    target = find_target(command)
    assert target is not None
    result = verdict(JobEnd(0, None), target)
    assert result.exit_code == 1 and "no completion marker" in str(result.reason)
    marker = tmp_path / "completed.json"
    marker.write_text("{}")
    assert verdict(JobEnd(0, None), target) == Verdict(0)
    stale = find_target(command)
    assert verdict(JobEnd(0, None), stale).exit_code == 1
    marker.unlink()
    marker.write_text("{}")
    assert verdict(JobEnd(0, None), stale) == Verdict(0)


def test_a_sweep_is_complete_when_its_list_says_so_anew(tmp_path: Path) -> None:
    target = Target("sweep", tmp_path, None)
    for content in ("", "[]", json.dumps({"completed": False})):
        (tmp_path / "sweep.json").write_text(content)
        assert verdict(JobEnd(0, None), target).exit_code == 1
    (tmp_path / "sweep.json").write_text(json.dumps({"completed": True}))
    assert verdict(JobEnd(0, None), target) == Verdict(0)
    stale = find_target(["sweep", "DATA", str(tmp_path)])
    assert verdict(JobEnd(0, None), stale).exit_code == 1


def test_a_rank_that_fails_over_a_stop_is_told_as_a_failure(tmp_path: Path) -> None:
    full_disk = Fault("reported", 0, "n1")
    result = verdict(JobEnd(1, 10, (full_disk,)), run_folder(tmp_path, 7))
    assert result.exit_code == 1
    assert "stopped by SIGUSR1, and rank 0 on n1 failed, its message is above" in str(result.reason)


@pytest.mark.parametrize("option", ["--tolerate-loss", "--tolerate_loss"])
def test_options_count_however_they_are_spelt(option: str, tmp_path: Path) -> None:
    target = find_target(["train", "DATA", str(tmp_path), option])
    assert target is not None and target.tolerates_loss


def test_a_stop_on_request_is_told_as_one(tmp_path: Path) -> None:
    result = verdict(JobEnd(0, 15), run_folder(tmp_path, 7))
    assert result.exit_code == 143
    assert str(result.reason).startswith("the job was stopped by SIGTERM; last checkpoint:")
    assert verdict(JobEnd(0, 15), None) == Verdict(0)
    # The codes by which the ranks say whether they saved are passed on: schedulers requeue on one of them.
    assert verdict(JobEnd(75, 15), run_folder(tmp_path / "other", 7)).exit_code == 75
    assert verdict(JobEnd(76, 10), None) == Verdict(76, "the job was stopped by SIGUSR1")
    assert verdict(JobEnd(75, None), None) == Verdict(
        75,
        "the job ended with exit code 75 (the ranks were asked to stop, and saved)",
    )


def test_a_script_that_was_stopped_is_told_how_it_goes_on(tmp_path: Path) -> None:
    killed, saved = JobEnd(143, 15), JobEnd(75, 2)
    itself = f"; {SCRIPT_CONTINUES}"
    here = "; the script has saved: the same command continues"
    assert how_a_script_resumes(killed, 143, None) == itself
    assert how_a_script_resumes(saved, 75, None) == here
    assert how_a_script_resumes(killed, 143, tmp_path) == f"; no checkpoint in {tmp_path} yet{itself}"
    last = tmp_path / "checkpoints" / "step-00000009-2"
    last.mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000010.1a2b.tmp").mkdir()
    assert how_a_script_resumes(saved, 75, tmp_path) == f"; last checkpoint: {last}{here}"
    # It has said so itself; nobody has stopped it.
    assert how_a_script_resumes(JobEnd(76, 15), 76, tmp_path) == ""
    assert how_a_script_resumes(JobEnd(1, None), 1, tmp_path) == ""


def test_a_script_that_lost_a_rank_is_told_how_it_goes_on(tmp_path: Path) -> None:
    killed = JobEnd(137, None, (Fault("killed", 1, "n2", signal=9),))
    itself = f"; {SCRIPT_CONTINUES}"
    assert how_a_script_resumes(killed, 137, None) == itself
    assert how_a_script_resumes(killed, 137, tmp_path) == f"; no checkpoint in {tmp_path} yet{itself}"
    last = tmp_path / "checkpoints" / "step-00000009"
    last.mkdir(parents=True)
    assert how_a_script_resumes(killed, 137, tmp_path) == f"; last checkpoint: {last}{itself}"
    assert how_a_script_resumes(JobEnd(124, None), 124, None) == itself
    # A run of an experiment begins anew in its folder as it is.
    anew = how_a_script_resumes(killed, 137, None, may_begin_anew=True)
    assert anew.endswith("starts over") and itself.startswith(anew)
    # What is wrong has to be mended first; nothing has failed.
    unreached = JobEnd(255, None, (Fault("not reached", None, "n2"),))
    for end in (unreached, JobEnd(73, None), JobEnd(75, None), JobEnd(0, None)):
        assert how_a_script_resumes(end, end.exit_code, tmp_path) == ""


@pytest.mark.parametrize(("command", "marker"), [("train", "completed.json"), ("sweep", "sweep.json")])
def test_a_marker_that_another_host_writes_is_seen(
    command: str, marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which knows from before the job that there was no such file, until its folder is listed."""
    out = tmp_path / "out"
    target = find_target([command, "DATA", str(out)])
    out.mkdir()
    (out / marker).write_text('{"completed": true}')
    remember_as_missing(monkeypatch, [out, out / marker])
    assert verdict(JobEnd(0, None), target) == Verdict(0)
