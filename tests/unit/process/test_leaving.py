"""A command ends without taking the interpreter down, but does all that is to be done at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from speechdp import exit_codes

_REGISTERED = "import atexit, sys; atexit.register(print, 'at the end'); sys.stdout.write('said, ')\n"
_THREAD = (
    "import threading, time\n"
    "def work(): time.sleep(0.5); print('worked', end=', ', flush=True)\n"
    "threading.Thread(target=work).start()\n"
)


def ended(program: str, exit_code: int) -> tuple[int, str]:
    program += f"from speechdp.process.ending import leave; leave({exit_code})\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("exit_code", [0, exit_codes.STOPPED])
def test_what_is_registered_is_done_once_and_output_is_not_lost(exit_code: int) -> None:
    assert ended(_REGISTERED, exit_code) == (exit_code, "said, at the end\n")


def test_the_interpreter_is_not_taken_down() -> None:
    kept = "class Kept:\n    def __del__(self): print('taken down')\nkept = Kept()\n"
    assert ended(kept, 0) == (0, "")


def test_threads_are_waited_for() -> None:
    assert ended(_THREAD + _REGISTERED, 0) == (0, "said, worked, at the end\n")


def test_what_a_library_has_printed_is_not_lost() -> None:
    assert ended("import ctypes\nctypes.CDLL(None).printf(b'of a library\\n')\n", 0) == (0, "of a library\n")


def test_mpich_can_tell_its_launcher_that_a_rank_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so in an exit handler of C's; Hydra killed the other ranks of trainings that had gone well."""
    handler = (
        "import ctypes, os\n"
        "told = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(lambda *_: os.write(1, b'told'))\n"
        "ctypes.CDLL(None).on_exit(told, None)\n"
        "class Kept:\n    def __del__(self): print('taken down')\nkept = Kept()\n"
    )
    monkeypatch.delenv("PMI_RANK", raising=False)
    assert ended(handler, exit_codes.STOPPED) == (exit_codes.STOPPED, "")
    monkeypatch.setenv("PMI_RANK", "1")
    assert ended(handler, exit_codes.STOPPED) == (exit_codes.STOPPED, "told")


def test_a_profiler_gets_its_end(tmp_path: Path) -> None:
    program, profile = tmp_path / "program.py", tmp_path / "profile"
    program.write_text("from speechdp.process.ending import leave; leave(0)\n")
    subprocess.run([sys.executable, "-m", "cProfile", "-o", profile, program], check=True)
    assert profile.stat().st_size > 0


def test_mpi_is_ended() -> None:
    """Else mpirun takes a rank that leaves for one that has failed."""
    fake = (
        "import sys, types\n"
        "library = types.ModuleType('speechdp.comm.mpi.library')\n"
        "library.finalise = lambda: print('finalised')\n"
        "sys.modules['speechdp.comm.mpi.library'] = library\n"
    )
    assert ended(fake, 0) == (0, "finalised\n")


@pytest.mark.parametrize(("disposition", "exit_code"), [("SIG_IGN", 0), ("SIG_DFL", -signal.SIGUSR2)])
def test_a_signal_that_is_left_to_the_system_is_its_alone(disposition: str, exit_code: int) -> None:
    program = (
        "import os, signal\n"
        "from speechdp.process.ending import give_up_handler\n"
        "signal.signal(signal.SIGUSR2, lambda *_: print('heard', flush=True))\n"
        f"give_up_handler(signal.SIGUSR2, signal.{disposition})\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
    )
    assert ended(program, 0) == (exit_code, "")
