"""One owner a folder: who is refused, who takes over, who notices; no real waiting."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speechdp.errors import ConfigError, RunError
from speechdp.ownership import claimant, owner
from speechdp.ownership.batch_job import SchedulerJob, find_batch_job
from speechdp.ownership.claimant import Claimant, ProcessState, process_state
from speechdp.ownership.owner import (
    OWNER_FILE,
    FolderOwner,
    OwnerTiming,
    StopAsked,
    Surroundings,
    is_owned,
)
from tests.helpers.mpi import REPOSITORY

POLLS = 60
SLURM = SchedulerJob("slurm", "17")


class Host:
    """A process on a host of its own, whose pauses are counted instead of waited for."""

    def __init__(self, folder: Path, name: str = "here", **changes: object) -> None:
        self.said: list[str] = []
        self.ends: list[str] = []
        self.pauses = 0
        self.now_s = 0.0
        self.meanwhile: Callable[[int], object] = lambda number: None
        self.asked_to_stop = False
        claimant = Claimant.here("train", {})
        if name != "here":
            claimant = replace(claimant, host=name, boot=f"boot of {name}", machine=f"disk of {name}")
        claimant = replace(claimant, **changes)  # type: ignore[arg-type]
        surroundings = Surroundings(
            self.said.append,
            self.ends.append,
            lambda: self.asked_to_stop,
            self._pause,
            OwnerTiming(),
            lambda: self.now_s,
        )
        self.owner = FolderOwner(folder, claimant, surroundings, beats=False)

    def _pause(self, seconds: float) -> None:
        self.pauses += 1
        self.meanwhile(self.pauses)


@pytest.fixture(autouse=True)
def a_clock_that_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two signs of life have two times, on disks whose clock ticks every few milliseconds, too."""
    touch = os.utime

    def later(path: Path, times: None = None, *, follow_symlinks: bool = True) -> None:
        before_ns = path.lstat().st_mtime_ns
        touch(path, times, follow_symlinks=follow_symlinks)
        if path.lstat().st_mtime_ns == before_ns:
            touch(path, ns=(before_ns + 1, before_ns + 1), follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "utime", later)


def owner_in(folder: Path) -> str:
    return str(json.loads((folder / OWNER_FILE).read_text())["host"])


def test_a_second_one_is_refused_in_a_line_that_names_the_first(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    with Host(run, job=SLURM).owner:
        with pytest.raises(ConfigError) as refused:
            Host(run).owner.acquire()
        for part in (
            f"{run}: is in use by speechdp train",
            f"process {os.getpid()}",
            "slurm job 17",
            "since ",
        ):
            assert part in str(refused.value)
        assert os.listdir(run) == [OWNER_FILE]  # noqa: PTH208
    assert list(tmp_path.iterdir()) == []
    run.mkdir(parents=True)
    with Host(run).owner:
        (run / "file").touch()
    assert os.listdir(run) == ["file"]  # noqa: PTH208


def test_one_that_was_killed_is_followed_at_once(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with contextlib.suppress(OSError):
        os.kill(ended.pid, 0)
    Host(tmp_path, pid=ended.pid).owner.acquire()
    second = Host(tmp_path)
    second.owner.acquire()
    assert second.pauses == 0 and len(second.said) == 1 and "taken over from" in second.said[0]
    # The number may be another process's by now.
    assert (
        process_state(os.getpid(), 1) is ProcessState.GONE
        and process_state(ended.pid, 1) is ProcessState.GONE
    )
    assert sorted(os.listdir(tmp_path)) == [OWNER_FILE]  # noqa: PTH208


def test_a_folder_is_owned_unless_its_owner_has_certainly_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert not is_owned(run)
    with Host(run).owner:
        assert is_owned(run)
    assert not is_owned(run)
    for name, changes, may_be_written in (
        ("here", {"pid": 2**30}, False),  # killed
        ("elsewhere", {}, True),  # nothing is known of it from here
    ):
        Host(run, name, **changes).owner.acquire()
        assert is_owned(run) is may_be_written
        (run / OWNER_FILE).unlink()
    (run / OWNER_FILE).write_text("{")
    assert is_owned(run)


def test_a_killed_process_that_nobody_has_waited_for_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert process_state(process.pid, start) is ProcessState.ALIVE
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(process.pid, start) is ProcessState.GONE
    process.communicate()


def test_a_process_that_ends_while_it_is_looked_at_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for one of which nothing is known, and a sign of life was waited for."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = claimant._stat

    def late(pid: int) -> tuple[str, int] | None:
        process.communicate(b"\n")
        return stat(pid)

    monkeypatch.setattr(claimant, "_stat", late)
    assert process_state(process.pid, 1) is ProcessState.GONE


def test_what_is_known_of_a_host_that_was_started_anew_and_of_containers() -> None:
    me = replace(Claimant.here("train", {}), machine="disk", pid_namespace="pid:[4026531836]")
    assert me.state_of(replace(me, boot="an earlier one")) is ProcessState.GONE
    assert me.state_of(replace(me, boot="an earlier one", host="another")) is ProcessState.UNKNOWN
    assert me.state_of(replace(me, boot="an earlier one", machine="another")) is ProcessState.UNKNOWN
    assert me.state_of(replace(me, pid_namespace="pid:[1]", pid=1 << 22)) is ProcessState.UNKNOWN
    assert me.state_of(replace(me, boot="", pid=1 << 22)) is ProcessState.UNKNOWN
    # Containers on two hosts may have one name, and the id of their image, or none.
    for alike in ({"machine": ""}, {"pid_namespace": "pid:[4026532000]"}, {"pid_namespace": ""}):
        here = replace(me, **alike)  # type: ignore[arg-type]
        assert here.state_of(replace(here, boot="of another host")) is ProcessState.UNKNOWN


def test_silence_is_waited_for_and_then_the_folder_is_taken_over(tmp_path: Path) -> None:
    Host(tmp_path, "n1").owner.acquire()
    newcomer = Host(tmp_path, "n2")
    newcomer.owner.acquire()
    assert newcomer.pauses == POLLS and owner_in(tmp_path) == "n2"
    assert "will be taken over if that job shows no sign of life within 60 s" in newcomer.said[0]


def test_a_sign_of_life_refuses(tmp_path: Path) -> None:
    first, newcomer = Host(tmp_path, "n1"), Host(tmp_path, "n2")
    first.owner.acquire()
    newcomer.meanwhile = lambda number: first.owner.beat() if number == 7 else None
    with pytest.raises(ConfigError, match=r"process [0-9]+ on n1"):
        newcomer.owner.acquire()
    assert newcomer.pauses == 7 and owner_in(tmp_path) == "n1"
    assert os.listdir(tmp_path) == [OWNER_FILE]  # noqa: PTH208


def test_signs_of_life_come_by_themselves(tmp_path: Path) -> None:
    host = Host(tmp_path)
    surroundings = Surroundings(host.said.append, host.ends.append, timing=OwnerTiming(beat_s=0.01))
    with FolderOwner(tmp_path, Claimant.here("train", {}), surroundings):
        before = (tmp_path / OWNER_FILE).stat().st_mtime_ns
        deadline = time.monotonic() + 240
        while (tmp_path / OWNER_FILE).stat().st_mtime_ns == before and time.monotonic() < deadline:
            time.sleep(0.005)
        assert (tmp_path / OWNER_FILE).stat().st_mtime_ns != before
    assert host.ends == [] and os.listdir(tmp_path) == []  # noqa: PTH208


def test_one_that_was_frozen_notices_that_it_was_overtaken(tmp_path: Path) -> None:
    frozen, newcomer = Host(tmp_path, "n1"), Host(tmp_path, "n2")
    frozen.owner.acquire()
    newcomer.owner.acquire()
    frozen.owner.beat()
    assert len(frozen.ends) == 1 and "was taken over by speechdp train" in frozen.ends[0]
    assert "on n2" in frozen.ends[0] and "\n" not in frozen.ends[0]
    frozen.owner.release()
    assert owner_in(tmp_path) == "n2"
    newcomer.owner.beat()
    assert newcomer.ends == []


def test_one_that_was_frozen_until_its_successor_had_ended_ends_as_well(tmp_path: Path) -> None:
    frozen, newcomer = Host(tmp_path / "run", "n1"), Host(tmp_path / "run", "n2")
    frozen.owner.acquire()
    newcomer.owner.acquire()
    (tmp_path / "run" / "results").touch()
    newcomer.owner.release()
    frozen.now_s += 61
    frozen.owner.beat()
    assert (
        len(frozen.ends) == 1 and "was silent for too long" in frozen.ends[0] and "\n" not in frozen.ends[0]
    )
    assert os.listdir(tmp_path / "run") == ["results"]  # noqa: PTH208


def test_one_that_cannot_claim_again_ends_with_what_the_disk_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path / "run")
    host.owner.acquire()
    host.owner.file.unlink()

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "write_text", refuse)
    host.owner.beat()
    assert host.ends == []
    host.now_s += 61
    host.owner.beat()
    assert len(host.ends) == 1 and "Input/output error" in host.ends[0] and "\n" not in host.ends[0]
    assert str(host.owner.file) in host.ends[0] and "check the disk" in host.ends[0]


def test_a_file_that_somebody_has_deleted_is_made_anew_while_signs_were_given(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.now_s = 1000.0
    host.owner.acquire()
    for _ in range(3):
        host.now_s += 40
        host.owner.beat()
        (tmp_path / OWNER_FILE).unlink()
        host.now_s += 40
        host.owner.beat()
        assert host.ends == [] and (tmp_path / OWNER_FILE).is_file()


def test_a_sign_of_life_that_the_disk_held_up_comes_to_nothing_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end waits only a while for the thread that gives them."""
    host = Host(tmp_path)
    host.owner.acquire()
    (tmp_path / OWNER_FILE).unlink()
    link = os.link

    def held_up(source: Path, target: Path) -> None:
        host.owner.release()
        link(source, target)

    monkeypatch.setattr(os, "link", held_up)
    host.owner.beat()
    assert os.listdir(tmp_path) == []  # noqa: PTH208
    host.now_s += 61
    host.owner.beat()
    assert host.ends == [] and os.listdir(tmp_path) == []  # noqa: PTH208


@pytest.mark.parametrize(
    ("error", "seen"),
    [(OSError(5, "Input/output error"), RunError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_what_could_not_be_owned_leaves_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, seen: type[BaseException]
) -> None:
    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(seen):
        Host(tmp_path / "deep" / "run").owner.acquire()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["link", "replace"])
def test_a_signal_that_comes_once_the_folder_is_claimed_leaves_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A process on another host would wait a minute for it."""
    if step == "replace":
        Host(tmp_path, pid=2**30).owner.acquire()
        module, name = Path, "replace"
    else:
        module, name = os, "link"  # type: ignore[assignment]
    real = getattr(module, name)

    def interrupted(*args: object) -> None:
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(module, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            Host(tmp_path).owner.acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_signal_while_the_end_waits_for_the_thread_leaves_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = FolderOwner(tmp_path / "run", Claimant.here("train", {}), Host(tmp_path).owner._surroundings)
    owner.acquire()

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        owner.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "seen"),
    [(OSError(errno.ENOSPC, "No space left on device"), RunError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_what_cannot_be_written_without_hard_links_leaves_no_claim_of_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, seen: type[BaseException]
) -> None:
    """The same command, later, waited a minute for a job that owner.json did not name."""
    written, asked = FolderOwner._content, list[FolderOwner]()

    def content(owner: FolderOwner) -> str:
        asked.append(owner)
        if len(asked) > 1:  # first comes the temporary file
            raise error
        return written(owner)

    def no_links(*args: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with monkeypatch.context() as patches:
        patches.setattr(FolderOwner, "_content", content)
        with pytest.raises(seen, match="No space left on device" if seen is RunError else None):
            Host(tmp_path).owner.acquire()
    assert len(asked) == 2 and list(tmp_path.iterdir()) == []
    host = Host(tmp_path)
    host.owner.acquire()
    assert (tmp_path / OWNER_FILE).is_file()
    host.owner.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_looked", [True, False])
def test_a_folder_that_its_owner_removes_at_its_end_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_looked: bool
) -> None:
    """The newcomer has seen it, or the one around it, and said that the folder is removed by somebody."""
    first, newcomer = Host(tmp_path / "deep" / "run"), Host(tmp_path / "deep" / "run")
    first.owner.acquire()
    name, step = ("_claim", newcomer.owner._claim) if has_looked else ("mkdir", Path.mkdir)

    def late(*arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        first.owner.release()
        step(*arguments, **options)

    if has_looked:
        monkeypatch.setattr(newcomer.owner, name, late)
    else:
        newcomer = Host(tmp_path / "deep" / "other")
        monkeypatch.setattr(Path, name, late)
    newcomer.owner.acquire()
    assert newcomer.owner.file.is_file() and newcomer.said == []
    newcomer.owner.release()
    assert list(tmp_path.iterdir()) == []


def test_what_was_made_around_a_folder_that_went_meanwhile_goes_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer = Host(tmp_path / "deep" / "run").owner
    claim = newcomer._claim

    def late() -> None:
        monkeypatch.undo()
        newcomer.folder.rmdir()  # by another that has made this one alone, and is at its end
        claim()

    monkeypatch.setattr(newcomer, "_claim", late)
    newcomer.acquire()
    newcomer.release()
    assert list(tmp_path.iterdir()) == []


def test_what_the_disk_refuses_a_sign_of_life_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path / "run")
    host.owner.acquire()

    def refuse(*args: object, **keywords: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(os, "utime", refuse)
        host.owner.beat()
        disk.setattr(os, "link", refuse)
        (tmp_path / "run" / OWNER_FILE).unlink()
        host.owner.beat()
    assert host.ends == [] and not (tmp_path / "run" / OWNER_FILE).exists()
    host.owner.beat()  # it claims anew what somebody has deleted
    assert owner_in(tmp_path / "run") == host.owner._claimant.host


@pytest.mark.parametrize("changes", [{"job": replace(SLURM, restarts=1)}, {"launch": "x", "launch_start": 2}])
def test_a_requeued_job_and_a_further_start_take_over_at_once(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    Host(tmp_path, "n1", job=SLURM, launch="x", launch_start=1).owner.acquire()
    again = Host(tmp_path, "n2", **changes)
    again.owner.acquire()
    assert again.pauses == 0 and owner_in(tmp_path) == "n2"


def test_one_in_whose_place_this_came_is_given_time_to_end(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    Host(tmp_path, job=SLURM, pid=process.pid, process_start=start).owner.acquire()
    again = Host(tmp_path, job=replace(SLURM, restarts=1))

    def end(number: int) -> None:
        if number == 3:
            process.communicate(b"\n")

    again.meanwhile = end
    again.owner.acquire()
    assert again.pauses == 3


def test_the_same_start_of_a_job_or_launch_is_refused(tmp_path: Path) -> None:
    first = Host(tmp_path, "n1", job=SLURM, launch="x", launch_start=1)
    first.owner.acquire()
    again = Host(tmp_path, "n2", job=SLURM, launch="x", launch_start=1)
    again.meanwhile = lambda number: first.owner.beat()
    with pytest.raises(ConfigError, match="is in use by"):
        again.owner.acquire()


@pytest.mark.parametrize(
    ("first", "second", "own"),
    [
        (
            {"SLURM_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "0"},
            {"SLURM_JOB_ID": "18", "SLURM_ARRAY_TASK_ID": "1"},
            "-$SLURM_ARRAY_TASK_ID",
        ),
        (
            {"PBS_JOBID": "3[1].server", "PBS_ARRAY_INDEX": "1"},
            {"PBS_JOBID": "3[2].server", "PBS_ARRAY_INDEX": "2"},
            "-$PBS_ARRAY_INDEX",
        ),
        ({"LSB_JOBID": "3", "LSB_JOBINDEX": "1"}, {"LSB_JOBID": "3", "LSB_JOBINDEX": "2"}, "-$LSB_JOBINDEX"),
        ({"JOB_ID": "3", "SGE_TASK_ID": "1"}, {"JOB_ID": "3", "SGE_TASK_ID": "2"}, "-$SGE_TASK_ID"),
        # The array once more: each of its tasks has a folder, and another suffix would begin a new run.
        (
            {"SLURM_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"},
            {"SLURM_JOB_ID": "28", "SLURM_ARRAY_TASK_ID": "1"},
            "",
        ),
        # The other is of no array: it ends.
        ({"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "18", "SLURM_ARRAY_TASK_ID": "1"}, ""),
        ({"JOB_ID": "3", "SGE_TASK_ID": "undefined"}, {"JOB_ID": "4", "SGE_TASK_ID": "undefined"}, ""),
    ],
)
def test_tasks_of_an_array_are_told_to_have_a_folder_each(
    tmp_path: Path, first: dict[str, str], second: dict[str, str], own: str
) -> None:
    run = tmp_path / "run"
    with Host(run, job=find_batch_job(first)).owner, pytest.raises(ConfigError) as refused:
        Host(run, job=find_batch_job(second)).owner.acquire()
    said = f"each task of a job array needs a folder of its own, such as {run}{own} (docs/clusters.md)"
    assert str(refused.value).endswith(
        f"; {said if own else 'wait for it to end, stop it, or choose another folder'}"
    )


def test_one_that_is_asked_to_stop_waits_no_longer(tmp_path: Path) -> None:
    Host(tmp_path, "n1").owner.acquire()
    newcomer = Host(tmp_path, "n2")
    newcomer.meanwhile = lambda number: setattr(newcomer, "asked_to_stop", number == 2)
    with pytest.raises(StopAsked):
        newcomer.owner.acquire()
    assert newcomer.pauses == 2 and os.listdir(tmp_path) == [OWNER_FILE]  # noqa: PTH208


@pytest.mark.parametrize("content", [b"", b'{"format": "spee', b"\xff\xfe", b'{"format": "x"}', None])
def test_a_file_that_cannot_be_read_is_that_of_a_silent_owner(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        (tmp_path / OWNER_FILE).symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / OWNER_FILE).write_bytes(content)
    newcomer = Host(tmp_path)
    newcomer.owner.acquire()
    assert (
        newcomer.pauses == POLLS and f"a job that {tmp_path / OWNER_FILE} does not name" in newcomer.said[0]
    )
    assert os.listdir(tmp_path) == [OWNER_FILE]  # noqa: PTH208


def test_a_newcomer_that_died_while_it_took_over_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim is linked beside the owner's, which it did not replace any more."""
    Host(tmp_path, "n1").owner.acquire()
    second = Host(tmp_path, "n2")
    with monkeypatch.context() as dying:
        dying.setattr("speechdp.ownership.owner._remove", lambda path: None)
        dying.setattr("speechdp.ownership.owner.hand_over", lambda source, target: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            second.owner.acquire()
    assert owner_in(tmp_path) == "n1" and len(list(tmp_path.glob(".owner.json.*.next"))) == 1
    third = Host(tmp_path, "n3")
    third.owner.acquire()
    assert third.pauses == POLLS and "on n2" in third.said[0] and owner_in(tmp_path) == "n3"
    assert list(tmp_path.glob(".owner.json.*.next")) == []


def test_one_that_comes_too_late_takes_nothing_from_the_one_that_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another takes over between its judgement and its claim."""
    first, faster, late = (Host(tmp_path, name) for name in ("n1", "n2", "n3"))
    first.owner.acquire()
    succeed = late.owner._succeed

    def held_up(sight: object) -> bool:
        monkeypatch.undo()
        faster.owner.acquire()
        late.meanwhile = lambda number: faster.owner.beat()
        return succeed(sight)  # type: ignore[arg-type]

    monkeypatch.setattr(late.owner, "_succeed", held_up)
    with pytest.raises(ConfigError, match="on n2"):
        late.owner.acquire()
    assert owner_in(tmp_path) == "n2" and os.listdir(tmp_path) == [OWNER_FILE]  # noqa: PTH208


def test_a_sign_of_life_at_the_last_moment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, late = Host(tmp_path, "n1"), Host(tmp_path, "n2")
    first.owner.acquire()
    succeed = late.owner._succeed

    def held_up(sight: object) -> bool:
        first.owner.beat()
        late.meanwhile = lambda number: first.owner.beat()
        return succeed(sight)  # type: ignore[arg-type]

    monkeypatch.setattr(late.owner, "_succeed", held_up)
    with pytest.raises(ConfigError, match="on n1"):
        late.owner.acquire()
    assert os.listdir(tmp_path) == [OWNER_FILE]  # noqa: PTH208


class Simulation:
    """Time that passes only while every thread waits; whoever has won gives a sign of life each time."""

    def __init__(self, num_threads: int) -> None:
        self.won: list[Host] = []
        self._moving, self._waiting, self._time = num_threads, 0, 0
        self._changed = threading.Condition()

    def rest(self, *, ended: bool = False) -> None:
        with self._changed:
            self._moving -= 1
            self._waiting += not ended
            now = self._time
            if self._moving == 0:
                for host in self.won:
                    host.owner.beat()
                self._time += 1
                self._moving, self._waiting = self._waiting, 0
                self._changed.notify_all()
            while not ended and self._time == now:
                self._changed.wait()


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("has_owner", [True, False])
def test_of_many_that_come_at_once_exactly_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool, has_owner: bool
) -> None:
    if not has_links:

        def no_links(*args: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(10):
            run = tmp_path / str(number)
            if has_owner:
                Host(run, "gone").owner.acquire()
            won = claim_at_once(run)
            assert len(won) == 1 and owner_in(run) == won[0].owner._claimant.host
            assert won[0].ends == [] and os.listdir(run) == [OWNER_FILE]  # noqa: PTH208
    finally:
        sys.setswitchinterval(former)


def claim_at_once(run: Path) -> list[Host]:
    hosts = [Host(run, f"n{number}") for number in range(6)]
    simulation = Simulation(len(hosts))

    def claim(host: Host) -> None:
        host.meanwhile = lambda number: simulation.rest()
        try:
            host.owner.acquire()
            simulation.won.append(host)
        except ConfigError:
            pass
        finally:
            simulation.rest(ended=True)

    threads = [threading.Thread(target=claim, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return simulation.won


def test_places_that_cannot_be_owned_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"is a symbolic link to .*nothing, where there is no folder"):
        Host(tmp_path / "link").owner.acquire()
    (tmp_path / "nothing").mkdir()
    with Host(tmp_path / "link").owner:
        assert (tmp_path / "nothing" / OWNER_FILE).is_file()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        Host(tmp_path / "file").owner.acquire()
    with pytest.raises(RunError, match="cannot be written"):
        Host(tmp_path / "file" / "run").owner.acquire()
    with pytest.raises(RunError, match=r"cannot be written"):
        Host(Path("/proc/self/run")).owner.acquire()


def test_batch_jobs_are_told_apart() -> None:
    slurm = find_batch_job({"SLURM_JOB_ID": "3", "SLURM_RESTART_COUNT": "2"})
    assert slurm == SchedulerJob("slurm", "3", restarts=2)
    lsf = find_batch_job({"LSB_JOBID": "3", "LSB_JOBINDEX": "4", "LSB_RESTART": "Y"})
    assert lsf == SchedulerJob("lsf", "3", "4", 1) and str(lsf) == "lsf job 3[4]"
    sge = find_batch_job({"JOB_ID": "3", "SGE_TASK_ID": "undefined", "RESTARTED": "1"})
    assert sge == SchedulerJob("sge", "3", "", 1)
    assert find_batch_job({"PBS_JOBID": "3.server"}) == SchedulerJob("pbs", "3.server")
    assert find_batch_job({"LSB_JOBID": "3", "LSB_JOBINDEX": "0"}) == SchedulerJob("lsf", "3")
    # Of these each task has a number of its own; the first may be 0.
    task = find_batch_job({"SLURM_JOB_ID": "18", "SLURM_ARRAY_TASK_ID": "0"})
    assert task == SchedulerJob("slurm", "18", "0") and str(task) == "slurm job 18"
    task = find_batch_job({"PBS_JOBID": "3[1].server", "PBS_ARRAY_INDEX": "1"})
    assert task == SchedulerJob("pbs", "3[1].server", "1") and str(task) == "pbs job 3[1].server"
    assert lsf.is_later_start_of(replace(lsf, restarts=0)) and not lsf.is_later_start_of(lsf)
    assert not lsf.is_later_start_of(SchedulerJob("lsf", "3", "5")) and not lsf.is_later_start_of(sge)


def test_a_claim_is_read_as_it_was_written() -> None:
    claimant = Claimant.here("sweep", {"SLURM_JOB_ID": "3", "SPEECHDP_START": "abc:2"})
    assert claimant.launch_start == 2 and claimant.job == SchedulerJob("slurm", "3")
    assert Claimant.from_json(json.loads(json.dumps(claimant.to_json()))) == claimant
    assert Claimant.here("sweep", {"SPEECHDP_START": "abc:x"}).launch == ""


def test_a_claim_that_another_has_made_up_steers_no_terminal() -> None:
    assert "\\x1b[2J" in str(replace(Claimant.here("train", {}), host="\x1b[2J"))


def test_two_processes_and_one_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from speechdp.comm.startup.folder_owner import owner_of\n"
        "with owner_of(Path(sys.argv[1]), 'train', print): print('mine', flush=True); time.sleep(300)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"mine\n"
            with pytest.raises(ConfigError, match=f"process {process.pid} on "):
                Host(tmp_path).owner.acquire()
        finally:
            process.kill()
    newcomer = Host(tmp_path)
    newcomer.owner.acquire()
    assert newcomer.pauses == 0


def test_a_folder_whose_owner_could_give_no_signs_of_life_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = FolderOwner(tmp_path / "run", Claimant.here("train", {}), Host(tmp_path).owner._surroundings)

    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with pytest.raises(RuntimeError, match="start new thread"):
        owner.acquire()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changed_s", [10**12, -(10**12), 10**18])
def test_a_time_of_change_that_is_no_date_is_told_without_one(changed_s: int, tmp_path: Path) -> None:
    """As a host with a mad clock may set it, on file systems that take it."""
    sight = owner._Sight(tmp_path / "owner.json", "key", changed_s * 10**9, None)
    assert owner._describe(sight).endswith(", last heard of at a time that is no date")
