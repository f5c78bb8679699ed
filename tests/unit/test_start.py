"""What a command has imported once it can begin: what nobody asked for costs each start seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from speechdp.cli.support.subcommands import SUBCOMMANDS
from tests.helpers.runs import MadeUpRun, write_run
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.tiny_speech import write_tiny_speech
from tests.helpers.untrained_speech import write_untrained_run

#: Slow to import, and wanted by few commands, late.
_HEAVY = (
    "scipy",
    "matplotlib",
    "tensorboard",
    "numba",
    "librosa",
    "sklearn",
    "sympy",
    "pandas",
    "torch._dynamo",
)
#: Found by the program below after the command has ended, or where it says.
_PRINT_MODULES = "import json, sys; print('MODULES', json.dumps(sorted(sys.modules)))"


def modules_after(program: str) -> set[str]:
    """Return what a Python program has imported when it runs _PRINT_MODULES."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    assert lines, done.stdout + done.stderr
    return set(json.loads(lines[0].removeprefix("MODULES ")))


def running(commands: list[list[str]]) -> str:
    """Return a program that runs command lines, and prints what they have imported."""
    return (
        "from speechdp.cli.main import run\n"
        f"for words in {commands!r}:\n"
        "    try:\n"
        "        run(words)\n"
        "    except SystemExit:\n"
        "        pass\n"
        f"{_PRINT_MODULES}"
    )


def test_help_imports_nothing_slow() -> None:
    scripts = [[name, "--script", "--help"] for name, c in SUBCOMMANDS.items() if c.script_class_name]
    found = modules_after(running([*([name, "--help"] for name in SUBCOMMANDS), *scripts]))
    assert "speechdp.cli.train" in found  # something has been looked at
    assert found & {"torch", "jinja2", *_HEAVY} == set()


def test_the_launcher_checks_a_command_without_torch(tmp_path: Path) -> None:
    words = ["train", str(tmp_path / "data"), str(tmp_path / "run"), "--preset", "swb2000", "--realign", "1"]
    words += ["--strategy", "model_averaging:period=16", "--spec-augment", "--seed", "3"]
    others = [["sweep", "data", "out", "--periods", "4,16"], ["decode", "run", "data", "--graph", "HCLG.fst"]]
    launch = ["launch", "-np", "2", "--dry-run", "--"]
    found = modules_after(running([[*launch, *command] for command in (words, *others)]))
    assert "speechdp.launching.command" in found
    assert found & {"torch", "h5py", "jinja2", *_HEAVY} == set()


def test_a_run_and_data_are_looked_at_without_torch(tmp_path: Path) -> None:
    """What would make a finished run faster, by the times of its steps, is told with torch alone."""
    data = write_tiny_data(tmp_path / "data", TinySizes(4, 2, 1, shards=1)).path
    finished = write_run(MadeUpRun("finished"), tmp_path)
    stopped = write_run(MadeUpRun("stopped", completed=False), tmp_path)
    words = [["inspect", str(data)], ["report", str(finished)], ["report", str(stopped)]]
    found = modules_after(running(words))
    assert (finished / "report").is_dir() and (stopped / "report").is_dir()
    assert {"speechdp.cli.inspect", "speechdp.report.sweep.report"} <= found
    assert found & {"torch", "numba", "librosa", "sklearn", "sympy", "pandas", "tensorboard"} == set()


def test_a_rank_takes_its_steps_with_what_they_need(tmp_path: Path) -> None:
    """Until it evaluates for the first time, which writes TensorBoard's file."""
    write_tiny_data(tmp_path / "data", TinySizes(4, 2, 1, shards=1))
    words = ["train", str(tmp_path / "data"), str(tmp_path / "run"), "--max-steps", "1", "--device", "cpu"]
    program = (
        "from speechdp.train import scalars\n"
        "def stop(*_):\n"
        f"    {_PRINT_MODULES}\n"
        "    sys.stdout.flush()\n"
        "    import os; os._exit(0)\n"
        "scalars.Scalars.add = stop\n" + running([words])
    )
    found = modules_after(program)
    assert {"torch", "speechdp.train.trainer"} <= found
    aligning = {f"speechdp.decode.{name}" for name in ("align", "graph", "recognise")}
    feeding = {"speechdp.feeding.feeder", "speechdp.feeding.feeders"}
    assert found & {*_HEAVY, "kaldifst", "kaldi_decoder", "jiwer", "soundfile", *aligning, *feeding} == set()


def test_garbage_is_seldom_looked_for_while_a_command_imports(tmp_path: Path) -> None:
    """With Python's own thresholds it is more than 300 times."""
    program = (
        "import atexit, gc, sys\n"
        "usual = gc.get_threshold()\n"
        "from speechdp.cli.main import main\n"
        "def tell():\n"
        "    times = sum(each['collections'] for each in gc.get_stats())\n"
        "    print('torch' in sys.modules, times, gc.get_threshold() == usual)\n"
        "atexit.register(tell)\n"
        f"sys.argv = ['speechdp', 'train', {str(tmp_path / 'none')!r}, {str(tmp_path / 'run')!r}]\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert "is not a complete data directory" in done.stderr
    has_torch, times, is_as_usual = done.stdout.split()
    assert has_torch == "True"
    assert int(times) < 150
    assert is_as_usual == "True"  # cycles of references in a user's network may hold tensors


def test_a_synthesis_model_is_loaded_without_the_compiler(tmp_path: Path) -> None:
    dataset = write_tiny_speech(tmp_path / "data", TinySizes(1, 1, 1, shards=1))
    run = write_untrained_run(tmp_path / "run", dataset)
    words = ["synthesize", str(run), "one", "-o", str(tmp_path / "out.wav"), "--max-seconds", "0.3"]
    found = modules_after(running([words]))
    assert (tmp_path / "out.wav").is_file()
    assert found & {*_HEAVY, "speechdp.train.trainer"} == set()


def test_an_update_with_a_scaled_loss_imports_no_compiler() -> None:
    program = (
        "import sys, torch\n"
        "from speechdp.parallel.loss_scale import begin, make_scaler\n"
        "from speechdp.parallel.updates import FlatUpdate\n"
        "cpu = torch.device('cpu')\n"
        "values, gradients, scaler = torch.zeros(3), torch.full((3,), 256.0), make_scaler(cpu)\n"
        "begin(scaler, cpu)\n"
        "update = FlatUpdate(values, gradients, lambda p: torch.optim.SGD(p, 0.5))\n"
        "scaler.unscale_(update.optimizer)\n"
        "update.move(values, gradients, 0.5, scaler)\n"
        "assert values.tolist() == [-0.5] * 3\n"
        f"{_PRINT_MODULES}"
    )
    assert modules_after(program) & set(_HEAVY) == set()


def test_capturing_graphs_imports_nothing_slow() -> None:
    program = (
        "import torch\n"
        "from speechdp.models.captured import CapturedFunction\n"
        "from tests.helpers.repeats import Repeats\n"
        "recorder, weight = Repeats(), torch.ones(2, 3, requires_grad=True)\n"
        "make = CapturedFunction(lambda x, w: (torch.tanh(x @ w),), recorder)\n"
        "for _ in range(3):\n"
        "    make([torch.ones(4, 2)], [weight])[0].sum().backward()\n"
        "    make.capture()\n"
        "assert recorder.num_replayed == 2\n"
        f"{_PRINT_MODULES}"
    )
    assert modules_after(program) & set(_HEAVY) == set()
