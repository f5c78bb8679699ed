"""Jobs in processes of their own: what they return, raise, and how the others end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from speechdp.data.prepare.jobs import run_jobs
from speechdp.errors import ConfigError, RunError, SpeechDPError


@dataclass(frozen=True)
class _Job:
    path: Path
    fate: str = "ends well"
    num_utterances: int = 2

    def run(self, advance: Callable[[], None]) -> tuple[str, int]:
        if self.fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fate == "refused":
            raise ConfigError("the job: is wrong")
        if self.fate == "a mistake":
            raise IndexError(self.fate)
        if self.fate == "disk":
            raise OSError(errno.ENOSPC, "No space left on device", "there")
        if self.fate == "is silent":  # in one long utterance
            time.sleep(5000)
        while self.fate == "never ends":
            advance()
            time.sleep(0.01)
        for _ in range(self.num_utterances):
            advance()
        return self.path.name, os.getpid()


def test_each_job_has_a_process_of_its_own() -> None:
    seen: list[tuple[str, int, int]] = []
    jobs = [_Job(Path(name)) for name in "abcd"]
    results = run_jobs(jobs, "testing", 2, lambda *report: seen.append(report), always_apart=True)
    assert [name for name, _ in results] == list("abcd")
    assert len({os.getpid(), *(pid for _, pid in results)}) == 5
    assert seen == [("testing", done, 8) for done in range(9)]


def test_processes_share_the_jobs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speechdp.data.prepare.jobs._FEWEST_FOR_PROCESSES", 0)
    jobs = [_Job(Path(name)) for name in "abcdef"]
    results = run_jobs(jobs, "testing", 2, lambda *_: None)
    assert [name for name, _ in results] == list("abcdef")
    pids = {pid for _, pid in results}
    assert os.getpid() not in pids and len(pids) <= 2


def test_little_is_done_in_this_process() -> None:
    assert run_jobs([_Job(Path("a"))], "testing", None, lambda *_: None) == [("a", os.getpid())]


@pytest.mark.parametrize("other", ["never ends", "is silent"])
@pytest.mark.parametrize(
    ("fate", "error", "message"),
    [
        ("killed", RunError, r"b: its process, testing, was killed \(out of memory\?\); run again"),
        ("a mistake", RunError, r"b: its process, testing, has failed; what is printed above says why"),
        ("refused", ConfigError, "the job: is wrong"),
        ("disk", OSError, "No space left on device: 'there'"),
    ],
)
def test_what_a_job_raises_is_raised_here_and_ends_the_others(
    fate: str, error: type[SpeechDPError | OSError], message: str, other: str
) -> None:
    jobs = [_Job(Path("a"), other), _Job(Path("b"), fate), _Job(Path("c"))]
    with pytest.raises(error, match=message):
        run_jobs(jobs, "testing", 2, lambda *_: None, always_apart=True)


def test_a_thread_that_the_system_refuses_ends_what_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a signal that comes while the threads are started."""
    submit, refused = ThreadPoolExecutor.submit, list[bool]()

    def refuse_the_second(pool: ThreadPoolExecutor, *call: Any) -> Future[None]:
        if refused:
            raise RuntimeError("can't start new thread")
        refused.append(True)
        return submit(pool, *call)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse_the_second)
    with pytest.raises(RuntimeError, match="start new thread"):
        run_jobs(
            [_Job(Path(name), "is silent") for name in "ab"], "testing", 2, lambda *_: None, always_apart=True
        )


def test_a_process_whose_starter_is_gone_ends_without_a_word() -> None:
    ours, theirs = Pipe()
    # The thread that waits for jobs finds out too late: the job itself is the first to miss its starter.
    program = (
        f"import sys, time; sys.path[:] = {sys.path}\n"
        "from speechdp.data.prepare import jobs; take = jobs._take_jobs\n"
        "class Late:\n"
        "    def __init__(self, given): self.given = given\n"
        "    def recv(self):\n"
        "        try: return self.given.recv()\n"
        "        except EOFError: time.sleep(600)\n"
        "jobs._take_jobs = lambda connection, queue: take(Late(connection), queue)\n"
        f"jobs.work({theirs.fileno()})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        theirs.close()
        ours.send(_Job(Path("a"), "never ends"))
        ours.recv()
        ours.close()
        assert process.communicate(timeout=300)[1] == ""
    assert process.returncode == 1
