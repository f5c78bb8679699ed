"""A command ends without taking the interpreter down, but does all that is to be done at the end."""

from __future__ import annotations

import subprocess
import sys

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


def test_mpi_is_ended() -> None:
    """Else mpirun takes a rank that leaves for one that has failed."""
    fake = (
        "import sys, types\n"
        "mpi = types.ModuleType('mpi4py.MPI')\n"
        "mpi.Is_initialized, mpi.Is_finalized = lambda: True, lambda: False\n"
        "mpi.Finalize = lambda: print('finalised')\n"
        "sys.modules['mpi4py.MPI'] = mpi\n"
    )
    assert ended(fake, 0) == (0, "finalised\n")
