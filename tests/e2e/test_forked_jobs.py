"""Processes whose work the tests' fork server does (tests/helpers/fork_server.py): as if they did it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.fork_server import ADDRESS, BY_ITSELF, forks_with
from tests.helpers.jobs import started
from tests.helpers.mpi import REPOSITORY, Ended, job_environment, run_job
from tests.helpers.waiting import wait_until


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def run_script(script: Path, source: str, *arguments: str, env: Mapping[str, str] | None = None) -> Ended:
    script.write_text(textwrap.dedent(source))
    return run_job([sys.executable, str(script), *arguments], env=env, cwd=script.parent)


WHO = """
import os, sys
print(os.getsid(0) == os.getpid(), "torch" in sys.modules)
"""


def test_it_is_a_fork_unless_that_would_not_be_the_same(script: Path) -> None:
    assert run_script(script, WHO).stdout == "True True\n"
    for different in (BY_ITSELF, {"PYTHONHASHSEED": "0"}, {"OMP_NUM_THREADS": "3"}, {"LC_ALL": "C"}):
        assert "torch" not in run_script(script, WHO, env=different).stderr
        assert run_script(script, WHO, env=different).stdout.split()[1] == "False", different


def test_it_finds_what_a_process_of_its_own_would_find(script: Path) -> None:
    source = """
        import os, pathlib, random, sys
        import numpy as np, torch
        print(sys.argv, sys.path[0], __name__, __file__, sys.modules["__main__"].__dict__ is globals())
        print(os.getcwd(), os.environ["GIVEN"], os.umask(0o22), sorted(os.sched_getaffinity(0)))
        print(sys.stdin.read(), sorted(os.listdir("/proc/self/fd"))[:3], sys.stdout.encoding)
        print(len({random.random(), float(np.random.rand()), float(torch.rand(1))}), file=sys.stderr)
    """
    forked, own = (
        run_script(script, source, "a", "b c", env={"GIVEN": "x", **more}) for more in ({}, BY_ITSELF)
    )
    assert forked == own and forked.exit_code == 0, forked.output


def test_no_two_draw_the_same_numbers(script: Path) -> None:
    source = """
        import random
        import numpy as np, torch
        print(random.random(), np.random.rand(), float(torch.rand(1)))
    """
    one, other = (run_script(script, source).stdout.split() for _ in range(2))
    assert len({*one, *other}) == 6


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("pass", (0, "")),
        ("sys.exit(7)", (7, "")),
        ("sys.exit('why')", (1, "why\n")),
        ("os.kill(os.getpid(), signal.SIGKILL)", (-signal.SIGKILL, "")),
        ("os.abort()", (-signal.SIGABRT, None)),
        ("os._exit(3)", (3, "")),
    ],
)
def test_it_ends_as_the_work_does(script: Path, end: str, expected: tuple[int, str | None]) -> None:
    source = f"""
        import atexit, os, signal, sys, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        {end}
    """
    ended = run_script(script, source)
    assert ended.exit_code == expected[0], ended.output
    assert expected[1] in {None, ended.stderr}, ended.output
    is_orderly = not any(sudden in end for sudden in ("kill", "abort", "_exit"))
    assert ended.stdout == ("thread\nat exit\n" if is_orderly else ""), ended.output


def test_at_its_end_it_finalizes_what_is_its_own(script: Path) -> None:
    """And nothing that it shares: torch's operators, taken apart, would be copied first."""
    source = """
        import sys, tempfile, weakref
        print([one for one in weakref.finalize._registry if one.atexit])
        kept = tempfile.TemporaryDirectory()
        print(kept.name, file=sys.stderr)
    """
    ended = run_script(script, source)
    assert (ended.exit_code, ended.stdout) == (0, "[]\n"), ended.output
    kept = ended.stderr.splitlines()[-1]
    assert kept.startswith(tempfile.gettempdir()) and not Path(kept).exists(), ended.output


def test_it_ignores_no_signal_because_the_server_was_started_so() -> None:
    """As under `nohup pytest &`, whose ranks mpirun has heed all signals."""
    source = """
        import signal
        from tests.helpers.fork_server import ignore_only
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        ignore_only([signal.SIGUSR1, signal.SIGUSR2])
        handlers = map(signal.getsignal, (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))
        assert [*handlers] == [signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], cwd=REPOSITORY, check=True)


def test_an_error_is_shown(script: Path) -> None:
    ended = run_script(script, "def f():\n    raise ValueError('wrong')\nf()\n")
    assert ended.exit_code == 1 and ended.stderr.startswith("Traceback (most recent call last)")
    assert ended.stderr.endswith(
        f"  File \"{script}\", line 2, in f\n    raise ValueError('wrong')\nValueError: wrong\n"
    )


WAITING = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: (folder / "told").touch())
(folder / "pid.new").write_text(str(os.getpid()))
(folder / "pid.new").rename(folder / "pid")
while True:
    time.sleep(0.01)
"""


def test_signals_reach_the_work_and_it_dies_with_who_stands_for_it(script: Path, tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir()
        script.write_text(WAITING)
        with started([sys.executable, str(script), str(folder)], folder) as job:
            job.wait_until((folder / "pid").exists, "the fork")
            worker = int((folder / "pid").read_text())
            assert worker != job.pid
            job.signal(signal.SIGUSR1)
            job.wait_until((folder / "told").exists, "the signal")
            job.signal(number)
            assert job.finish().exit_code == -number
            wait_until(lambda pid=worker: not Path(f"/proc/{pid}").exists(), "the end of the fork")


#: Asks for a fork that runs a script, and is gone before the answer comes.
GONE = """
import json, socket, sys
from tests.helpers.startup.handing_over import _request
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [b"."], [0, 1, 2])
    connection.sendall(json.dumps(_request([sys.argv[0]])).encode() + b"\\n")
"""


def test_who_is_killed_before_the_answer_comes_leaves_the_server_to_others(
    script: Path, tmp_path: Path
) -> None:
    with forks_with(job_environment(), tmp_path) as ours:
        gone = run_script(script, GONE, ours[ADDRESS], env={**ours, **BY_ITSELF})
        assert gone.exit_code == 0, gone.output
        assert run_script(script, WHO, env=ours).stdout == "True True\n"


def test_a_closed_stream_stays_closed(script: Path) -> None:
    script.write_text("import sys\nprint(sys.stdin, 'torch' in sys.modules)\n")
    command = ["sh", "-c", f"exec {sys.executable} {script} <&-"]
    ended = subprocess.run(command, env=job_environment(), capture_output=True, text=True, check=True)
    assert ended.stdout == "None False\n"
    assert os.environ.keys() & BY_ITSELF.keys() == set()
