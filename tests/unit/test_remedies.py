"""What messages advise fits who gets them: a script's user is told of no option of a speechdp command."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import speechdp
from speechdp import remedies
from speechdp.cli.main import _options_of, run
from speechdp.cli.support.command_line import parse
from speechdp.comm import environment
from speechdp.comm.device import choose_device
from speechdp.comm.startup import start_guard
from speechdp.comm.startup.create import _remedy
from speechdp.comm.startup.start_guard import StartGuard
from speechdp.errors import ConfigError, RunError
from speechdp.jsonl import LineFile
from speechdp.parallel.run_files import RunDirectory
from speechdp.timing.gather import write_timing

PACKAGE = Path(speechdp.__file__).parent
OPTIONS = re.compile(r"--(resume|overwrite|hang-timeout|backend|device|max-steps)\b")
#: Imported by scripts, too, but what names options there happens in commands alone.
OF_COMMANDS = {
    "remedies.py": {"resuming", "starting_over", "resuming_as_begun", "backend", "device", "longer_wait"},
    "parallel/run_files.py": {"check_same"},
    "comm/base.py": {"packets", "check_loss_tolerance"},
    "comm/loss_tolerance.py": {"__init__", "leader_lost", "broadcast"},
    "comm/mpi/communicator.py": {"peers"},
    "comm/startup/create.py": {"create_fed_job"},
}


def _disk_remedy(folder: Path) -> list[str]:
    """Return what is advised where three writers of a run's files find that the disk refuses."""
    (folder / "file").write_text("")
    below = folder / "file" / "run"
    said = []
    for write in (
        lambda: LineFile(below / "rank-0000.jsonl"),
        lambda: write_timing(below, {}),
        lambda: RunDirectory(below).complete({}),
    ):
        with pytest.raises(RunError) as raised:
            write()
        said.append(str(raised.value).rpartition("; ")[2].partition(", then ")[2])
    return said


def test_a_full_disk_is_gone_on_from_as_the_users_command_can(tmp_path: Path) -> None:
    assert _disk_remedy(tmp_path) == ["run again"] * 3
    with remedies.of_command({"resume"}):
        assert _disk_remedy(tmp_path) == ["continue with --resume"] * 3
    with remedies.of_command({"out"}):
        assert _disk_remedy(tmp_path) == ["run again"] * 3
    assert _disk_remedy(tmp_path) == ["run again"] * 3


def test_a_run_that_is_a_part_of_a_command_is_begun_anew_by_itself() -> None:
    run, other = Path("OUT/a"), Path("OUT")
    assert remedies.starting_over(run) == "delete OUT/a, then run again"
    assert remedies.resuming_as_begun() == "repeat its command (recorded in run.json)"
    with remedies.of_command({"resume", "overwrite"}):
        assert remedies.resuming_as_begun() == "give only --resume, which uses the run's own options"
        with remedies.of_part(run):
            assert remedies.starting_over(run) == "delete OUT/a, then continue with --resume"
            assert remedies.starting_over(other) == "start over with --overwrite"
        assert remedies.starting_over(run) == "start over with --overwrite"


def test_back_end_and_device_are_chosen_where_the_user_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r'run_ranks\(device="cuda"\): .* use run_ranks\(device="cpu"\)'):
        choose_device("cuda", 0)
    assert _remedy("horovod").endswith("or choose SPEECHDP_BACKEND=mpi")
    with remedies.of_command(()):
        assert _remedy("horovod").endswith("or choose --backend mpi")
        with pytest.raises(ConfigError, match=r"--device cuda: .*, or use --device cpu"):
            choose_device("cuda", 0)


def test_only_a_command_with_the_option_is_told_to_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for name, value in (("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "end_process_with", lambda text, exit_code: said.append(text))
    monkeypatch.setattr(start_guard, "_LEAST_S", 100.0)
    StartGuard(100.0)._end()
    with remedies.of_command({"hang_timeout"}):
        StartGuard(100.0)._end()
    assert said[0].endswith("sees the same disks\n")
    assert said[1].endswith("sees the same disks, or raise --hang-timeout if a disk is merely slow\n")


def test_a_commands_remedies_are_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"resume", "hang_timeout", "backend", "device"} <= _options_of(parse("train", ["DATA", "RUN"]))
    assert "resume" not in _options_of(parse("sweep", ["DATA", "OUT"]))

    def fails(_command: object) -> int:
        raise RunError(f"a; {remedies.resuming()}")

    for name, arguments, said in (
        ("train", ["DATA", "RUN"], "continue with --resume"),
        ("inspect", ["DATA"], "run again"),
    ):
        monkeypatch.setattr(type(parse(name, arguments)), "run", fails)
        assert run([name, *arguments]) == 1
        assert capsys.readouterr().err == f"speechdp: a; {said}\n"
    assert remedies.backend("mpi") == "SPEECHDP_BACKEND=mpi"


def _said(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the function and the text of each string of a file that is no docstring."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                yield function, child.value
            yield from visit(child, function)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


def test_nothing_that_a_script_loads_names_an_option_of_ours() -> None:
    program = (
        "import sys, pkgutil, importlib, speechdp, speechdp.strategies as s; speechdp.DataParallel; "
        "speechdp.run_ranks; [importlib.import_module(f'{s.__name__}.{m.name}') "
        "for m in pkgutil.iter_modules(s.__path__)]; "
        "print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('speechdp.')])"
    )
    # Not coverage's or pytest's own paths: just ours.
    environ = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    loaded = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True, timeout=300
    ).stdout.split()
    back_ends = [str(path) for path in (PACKAGE / "comm").rglob("*.py")]
    files = {Path(path).relative_to(PACKAGE).as_posix() for path in (*loaded, *back_ends)}
    assert {"jsonl.py", "timing/gather.py", "parallel/run_files.py", "strategies/bmuf.py"} <= files
    found = {
        f"{name}: {text}"
        for name in files
        if not name.startswith("launching/")  # options of `speechdp launch`, which starts scripts
        for function, text in _said(PACKAGE / name)
        if OPTIONS.search(text) and function not in OF_COMMANDS.get(name, set())
    }
    assert not found
