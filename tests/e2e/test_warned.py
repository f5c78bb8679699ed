"""A batch system's warning (SIGUSR1, SIGUSR2) where nothing is saved yet: nothing is lost or left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from speechdp.cli.main import run as speechdp
from tests.helpers.jobs import started
from tests.helpers.mpi import BIN, REPOSITORY
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

WARNINGS = [signal.SIGUSR1, signal.SIGUSR2]
#: Runs `python -m speechdp ARGUMENTS` and warns it while it imports a module.
WARNED = """
import os, runpy, signal, sys

class Warn:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)

number, module = int(sys.argv[1]), sys.argv[2]
sys.argv[1:] = sys.argv[3:]
sys.meta_path.insert(0, Warn())
runpy.run_module("speechdp", run_name="__main__", alter_sys=True)
"""
#: Runs `speechdp ARGUMENTS` and warns it as it calls a function.
WARNED_IN = """
import importlib, os, sys
from speechdp.__main__ import main

number, module, path = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(".")
sys.argv[1:] = sys.argv[4:]
holder = importlib.import_module(module)
for name in path[:-1]:
    holder = getattr(holder, name)
function = getattr(holder, path[-1])

def warned(*arguments, **options):
    os.kill(os.getpid(), number)
    return function(*arguments, **options)

setattr(holder, path[-1], warned)
main()
"""


def warned_at(module: str, number: signal.Signals, *words: str | Path) -> tuple[int, str]:
    """Return exit code and stderr of a command that is warned as it imports a module."""
    return _run(WARNED, number, module, *words)


def _run(program: str, number: signal.Signals, *words: str | Path) -> tuple[int, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMIX"))}
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(number)), *map(str, words)],
        cwd=REPOSITORY,
        env={**ours, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", WARNINGS)
@pytest.mark.parametrize("module", ["speechdp.cli.main", "tyro", "speechdp.cli.{}", "torch"])
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_warning_during_imports_stops_what_goes_on_with_the_same_command(
    command: str, module: str, number: signal.Signals, tmp_path: Path
) -> None:
    data = write_tiny_data(tmp_path / "data", TinySizes(4, 2, 2, shards=1)).path
    ended = warned_at(module.format(command), number, command, data, tmp_path / "out")
    assert ended == (75, "speechdp: stopped as requested before it began; repeat the command\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("speechdp.comm.serial", "SerialCommunicator.close"),
        ("speechdp.cli.main", "_report_lost_output"),
        ("speechdp.cli.main", "leave"),
    ],
)
@pytest.mark.parametrize("number", [*WARNINGS, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_when_all_is_done_is_no_stop(
    module: str, function: str, number: signal.Signals, tmp_path: Path
) -> None:
    data = write_tiny_data(tmp_path / "data", TinySizes(4, 2, 2, shards=1)).path
    run = tmp_path / "run"
    words = ("train", data, run, *TINY_MODEL, "--epochs", "1", "--backend", "serial")
    assert _run(WARNED_IN, number, module, function, *words) == (0, "")
    assert (run / "completed.json").exists()


@pytest.mark.parametrize(
    ("number", "ended"),
    [
        (signal.SIGUSR1, (138, "speechdp: ended by SIGUSR1\n")),
        (signal.SIGTERM, (143, "speechdp: ended by SIGTERM\n")),
        (signal.SIGINT, (130, "speechdp: interrupted\n")),
    ],
)
def test_a_signal_while_something_is_told_is_one_line(
    number: signal.Signals, ended: tuple[int, str], tmp_path: Path
) -> None:
    words = ("speechdp.cli.main", "_let_rank_0_report", "inspect", tmp_path / "nothing")
    assert _run(WARNED_IN, number, *words) == ended


def test_a_signal_that_comes_as_soon_as_signals_raise_is_one_line() -> None:
    words = ("speechdp.process.ending", "_lose_none", "--version")
    assert _run(WARNED_IN, signal.SIGTERM, *words) == (143, "speechdp: ended by SIGTERM\n")


def test_ctrl_c_during_the_first_imports_is_silent(tmp_path: Path) -> None:
    assert warned_at("speechdp.cli.main", signal.SIGINT, "inspect", tmp_path) == (-signal.SIGINT, "")
    assert warned_at("speechdp.cli.inspect", signal.SIGINT, "inspect", tmp_path) == (
        130,
        "speechdp: interrupted\n",
    )


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_an_import_ends_before_a_signal_does(number: signal.Signals, tmp_path: Path) -> None:
    """What is raised amid the initialisation of a library in C++ would abort: 80 lines of its stack."""
    program = _importing(tmp_path, f"import os\nos.kill(os.getpid(), {int(number)})\nDONE = 1\n")
    assert _run(program, number) == (128 + number, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_import_that_does_not_end_is_ended_by_the_second_signal(
    number: signal.Signals, tmp_path: Path
) -> None:
    kill = f"os.kill(os.getpid(), {int(number)})\n"
    program = _importing(tmp_path, f"import os, time\n{kill}{kill}time.sleep(60)\nDONE = 1\n")
    assert _run(program, number) == (1, "the import was cut off\n")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", ["weakref.finalize(thing, warn)", "thing.finalizer = Finalizer()"])
def test_a_signal_in_a_finaliser_ends_as_elsewhere(place: str, number: signal.Signals) -> None:
    """Python drops what is raised there: a traceback was printed, and the command went on."""
    program = f"""
import signal, sys, time, weakref
from speechdp.process.ending import Ended, describe_end, end_by_exception, interrupts_raise
end_by_exception()
interrupts_raise()

def warn():
    signal.raise_signal({int(number)})
    time.sleep(0.01)

class Finalizer:
    def __del__(self):
        warn()

class Thing:
    pass

try:
    thing = Thing()
    {place}
    del thing
    time.sleep(60)
except (Ended, KeyboardInterrupt) as end:
    sys.exit(describe_end(end)[1])
"""
    assert _run(program, number) == (128 + number, "")


@pytest.mark.parametrize(
    "first",
    [
        "thing = Thing(); del thing",  # dropped in a finaliser, so that it comes again a little later
        "import warned_module",  # put off amid an import
    ],
)
def test_ctrl_c_twice_leaves_the_cleaning_up_whole(first: str, tmp_path: Path) -> None:
    """The first, which was to come again, came into the cleaning up after the second."""
    (tmp_path / "warned_module.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    program = f"""
import signal, sys, time
from speechdp.process.ending import interrupts_raise
interrupts_raise()
sys.path.insert(0, {str(tmp_path)!r})

class Thing:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

try:
    {first}
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    time.sleep(0.5)
    sys.exit("cleaned up")
"""
    assert _run(program, signal.SIGINT) == (1, "cleaned up\n")


def test_what_no_signal_has_raised_in_a_finaliser_is_printed_as_ever() -> None:
    program = """
from speechdp.process.ending import interrupts_raise
interrupts_raise()

class Thing:
    def __del__(self):
        raise ValueError("no signal")

Thing()
"""
    code, said = _run(program, signal.SIGINT)
    assert code == 0 and "Exception ignored in" in said and "ValueError: no signal" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_done_before_a_signal_comes_again_ends_as_it_would(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The alarm by which it comes again killed the process as it left."""
    (tmp_path / "warned_module.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    program = f"""
import os, signal, sys
from speechdp.process import ending
ending._AGAIN_S = 600.0
ending.end_by_exception()
ending.interrupts_raise()
sys.path.insert(0, {str(tmp_path)!r})
import warned_module

class Late:  # what is still there is taken down last of all, when Python heeds no signal any more
    def __del__(self, rings_in=signal.getitimer, timer=signal.ITIMER_REAL, leave=os._exit):
        if rings_in(timer)[0] > 0:
            leave(3)

sys.kept = Late()
assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
ending.ignore_signals()
"""
    assert _run(program, number) == (0, "")


def _importing(folder: Path, module: str) -> str:
    """Return a program that imports a module, and ends by a signal with its exit code if that is whole."""
    (folder / "warned_module.py").write_text(module)
    return f"""
import sys, time
from speechdp.process.ending import Ended, describe_end, end_by_exception, interrupts_raise
end_by_exception()
interrupts_raise()
sys.path.insert(0, {str(folder)!r})
try:
    import warned_module
    time.sleep(60)
except (Ended, KeyboardInterrupt) as end:
    is_whole = hasattr(sys.modules.get("warned_module"), "DONE")
    sys.exit(describe_end(end)[1] if is_whole else "the import was cut off")
"""


def test_a_warning_during_imports_ends_what_saves_nothing(tmp_path: Path) -> None:
    assert warned_at("tyro", signal.SIGUSR1, "inspect", tmp_path) == (138, "speechdp: ended by SIGUSR1\n")


@pytest.mark.parametrize("module", ["speechdp.cli.main", "tyro", "speechdp.cli.launch"])
def test_launch_that_is_warned_during_imports_starts_no_rank(module: str, tmp_path: Path) -> None:
    words = ("launch", "-np", "2", "--", "train", tmp_path / "no-data", tmp_path / "run")
    code, said = warned_at(module, signal.SIGUSR1, *words)
    assert code == 75, said
    assert said == (
        "speechdp launch: the job was stopped by SIGUSR1 before its ranks were started; repeat the command\n"
    )


@pytest.mark.parametrize(
    ("number", "exit_code", "said"),
    [
        (signal.SIGUSR1, 138, "ended by SIGUSR1"),  # mpirun hands it on to all of them
        (
            signal.SIGINT,  # mpirun sends them SIGTERM, and ends with 1 whatever they do
            1,
            "ended by SIGTERM, which mpirun sends its ranks when it is interrupted or one of them has failed",
        ),
    ],
)
def test_ranks_that_are_ended_remove_what_is_not_complete(
    number: signal.Signals, exit_code: int, said: str, tmp_path: Path
) -> None:
    data = write_tiny_data(tmp_path / "data", TinySizes(4, 2, 2, shards=1)).path
    run, folder = tmp_path / "run", tmp_path / "written"
    folder.mkdir()
    assert speechdp(["train", str(data), str(run), *TINY_MODEL, "--epochs", "1", "--backend", "serial"]) == 0
    program = REPOSITORY / "tests/helpers/rank_programs/writing.py"
    command = [str(BIN / "mpirun"), "--oversubscribe", "-n", "2", sys.executable, str(program), str(folder)]
    # A second after SIGTERM it would kill ranks that have got no core.
    patient = {"OMPI_MCA_odls_base_sigkill_timeout": "10"}
    with started([*command, "decode", str(run), str(data), "--backend", "mpi"], folder, env=patient) as job:
        job.wait_until(lambda: len(list(folder.iterdir())) == 2, "files of both ranks")
        job.signal(number)
        ended = job.finish()
    assert ended.exit_code == exit_code, ended.output
    assert list(folder.iterdir()) == []
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("speechdp: ")]
    assert line.startswith("speechdp: rank 0 on ") and line.endswith(f": {said}"), ended.output
