"""The order in which packages import one another, and that nothing imports in a circle."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import speechdp

PACKAGE = Path(speechdp.__file__).parent

#: Packages from the bottom up: each imports itself and those above it in this table, lazily or not.
#: Packages of a line know nothing of each other.  Single files stand for themselves.  docs/architecture.md
#: repeats it.
ORDER = """
chance counting exit_codes json_input remedies
errors
files extensions
jsonl
process
ownership
comm
comm/threads comm/mpi
comm/torchdist comm/horovod
comm/startup launching data/signal data/plan timing watchdog
data/shards
labels language
models
parallel data/transforms data/corpora
strategies/mechanisms
strategies
data/kaldi data/espeak data/loading
decode
tasks
testing
options feeding dealing
data/prepare
checkpoint
train
report/runs
report/kit
synthesis
trained experiments
experiments/race
experiments/compare
experiments/sweep experiments/profile
simulation
experiments/tune
report/sweep report/compare report/profile report/decoding report/simulation report/tune doctor
cli/support
cli
__main__
"""
_LEVEL = {package: level for level, line in enumerate(ORDER.split("\n")) for package in line.split()}


def _modules(package: Path) -> dict[str, Path]:
    """Return the file of each module, by its path below the package without suffix; a folder's by its own."""
    files = {path.relative_to(package).with_suffix(""): path for path in package.rglob("*.py")}
    return {
        str(name.parent if name.name == "__init__" else name): path
        for name, path in files.items()
        if name != Path("__init__")
    }


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Yield the modules of the package that a file imports anywhere in it, and the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("speechdp"):
            base = node.module.removeprefix("speechdp").strip(".").replace(".", "/")
            for alias in node.names:
                inner = f"{base}/{alias.name}".strip("/")
                if inner in modules or base:
                    yield inner if inner in modules else base, node.lineno
                elif not alias.name.startswith("__"):  # a public name, which may come from any package
                    yield f"__init__.{alias.name}", node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("speechdp."):
                    yield alias.name.removeprefix("speechdp.").replace(".", "/"), node.lineno


def _package_of(module: str) -> str:
    """Return the innermost package of the table that a module is in."""
    names = [module, *map(str, Path(module).parents)]
    return next((name for name in names if name in _LEVEL), "")


def faults_of(package: Path) -> list[str]:
    """Return what is wrong with the imports of a package that is laid out as speechdp."""
    modules = _modules(package)
    graph = {name: dict(_imported(path, modules)) for name, path in modules.items()}
    faults = [
        f"{name}: is in no package of the table"
        for name, path in modules.items()
        if not _package_of(name) and path.name != "__init__.py"
    ]
    for name, found in graph.items():
        for other, line in found.items():
            here, there = _package_of(name), _package_of(other)
            if other.startswith("__init__."):
                faults.append(f"{name}.py:{line} imports a public name: import it from where it is")
            if here and there and here != there and _LEVEL[there] >= _LEVEL[here]:
                faults.append(f"{name}.py:{line} imports {other}: {here} does not know {there}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        faults.append(f"imports in a circle: {' -> '.join(error.args[1])}")
    return faults


def test_packages_import_only_what_is_below_them_and_nothing_in_a_circle() -> None:
    assert faults_of(PACKAGE) == []


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"comm/base.py": "from speechdp.train import run", "train/run.py": ""}, "comm does not know train"),
        (
            {
                "comm/base.py": "def f():\n    from speechdp.timing.spans import x",
                "timing/spans.py": "",
            },
            "comm does not know timing",
        ),
        (
            {"decode/wer.py": "import speechdp.data.prepare.shards", "data/prepare/shards.py": ""},
            "decode does not know data/prepare",
        ),
        (
            {"comm/a.py": "import speechdp.comm.b", "comm/b.py": "from speechdp.comm import a"},
            "in a circle",
        ),
        ({"news/a.py": ""}, "in no package"),
        ({"comm/a.py": "from speechdp import DataParallel"}, "imports a public name"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, files: dict[str, str], fault: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (found,) = faults_of(tmp_path)
    assert fault in found


def test_every_package_says_what_it_is_for() -> None:
    silent = [
        str(path.parent)
        for path in PACKAGE.rglob("__init__.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_no_package_has_more_than_twenty_files() -> None:
    sizes = {str(path.parent): len(list(path.parent.glob("*.py"))) for path in PACKAGE.rglob("__init__.py")}
    assert {package: size for package, size in sizes.items() if size > 20} == {}


def test_public_names_are_imported_when_they_are_used() -> None:
    program = (
        "import sys, speechdp; assert speechdp.__version__; assert 'torch' not in sys.modules\n"
        "for name in speechdp.__all__: assert name in dir(speechdp) and getattr(speechdp, name).__doc__"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        speechdp.Nothing  # noqa: B018


@pytest.mark.parametrize("command", ["prepare", "shard", "inspect"])
def test_what_only_writes_data_is_there_without_torch(command: str) -> None:
    program = f"import sys, speechdp.cli.{command}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
