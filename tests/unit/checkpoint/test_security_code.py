"""Nothing in the package unpickles, evaluates text, asks a shell or uses a name others can guess."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import speechdp
from speechdp.checkpoint.state import load_checkpoint
from speechdp.comm.serial import SerialCommunicator
from speechdp.errors import RunError
from speechdp.parallel.script_folder import ScriptFolder
from speechdp.tasks.model_file import load_model

PACKAGE = Path(speechdp.__file__).parent
#: Calls by the last parts of their name, and what is wrong with them.
FORBIDDEN_CALLS = {
    "eval": "evaluates text", "exec": "evaluates text", "compile": "evaluates text",
    "__import__": "imports by text", "torch.load": "unpickles", "pickle.load": "unpickles",
    "pickle.loads": "unpickles", "read_pickle": "unpickles", "yaml.load": "makes any object",
    "os.system": "asks a shell", "os.popen": "asks a shell", "getoutput": "asks a shell",
    "getstatusoutput": "asks a shell", "create_subprocess_shell": "asks a shell",
    "tempfile.mktemp": "is guessable",
}  # fmt: skip
#: safetensors holds numbers and text only.
HARMLESS_CALLS = {"safetensors.torch.load"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
FORBIDDEN_ARGUMENTS = {"shell": True, "allow_pickle": True, "weights_only": False}
#: mpi4py's methods in lower case pickle.
PICKLING_METHODS = {"send", "recv", "bcast", "gather", "allgather", "scatter", "allreduce", "sendrecv"}


def findings(source: str, name: str) -> Iterator[str]:
    """Yield `file:line: what` of all that is forbidden in a source."""
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            if module.split(".")[0] in FORBIDDEN_MODULES:
                yield f"{name}:{node.lineno}: imports {module}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            called = _dotted(node.func)
            for forbidden, why in FORBIDDEN_CALLS.items():
                is_it = called == forbidden or ("." in forbidden and called.endswith("." + forbidden))
                if is_it and called not in HARMLESS_CALLS and not _restricts_torch(called, node):
                    yield f"{name}:{node.lineno}: {called} {why}"
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                if keyword.arg in FORBIDDEN_ARGUMENTS and value is FORBIDDEN_ARGUMENTS[keyword.arg]:
                    yield f"{name}:{node.lineno}: {keyword.arg}={value}"


def _restricts_torch(called: str, call: ast.Call) -> bool:
    """Tell whether a call reads tensors and plain values only, out of a file that torch has written."""
    options = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
    return called == "torch.load" and options.get("weights_only") is True


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` of a name; what comes before a call or an index is left out."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_package_runs_no_code_from_files_and_asks_no_shell() -> None:
    found = [
        finding
        for path in sorted(PACKAGE.rglob("*.py"))
        for finding in findings(path.read_text(), str(path.relative_to(PACKAGE.parent)))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "eval(x)", "torch.load(f)",
        "torch.load(f, weights_only=restricted)",
        "numpy.load(f, allow_pickle=True)",
        "subprocess.run(c, shell=True)", "os.system(c)", "tempfile.mktemp()", "yaml.load(f)",
    ],
)  # fmt: skip
def test_what_is_forbidden_is_found(source: str) -> None:
    assert len(list(findings(f"\n{source}\n", "a.py"))) == 1
    assert next(findings(f"\n{source}\n", "a.py")).startswith("a.py:2: ")


def test_mpi_objects_are_never_pickled() -> None:
    """Only mpi4py's methods with a capital letter are called: the others unpickle what arrives."""
    for path in sorted((PACKAGE / "comm").glob("mpi*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = _dotted(node.func.value)
                is_mpi = "COMM_WORLD" in owner or owner.endswith(("._comm", "mpi", "intracomm"))
                assert not (is_mpi and node.func.attr in PICKLING_METHODS), f"{path}:{node.lineno}"


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_under_another_name_is_refused_and_not_run(tmp_path: Path, kind: str) -> None:
    mark, run = tmp_path / "mark", tmp_path / "run"
    folder = run / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    if kind == "pickle":
        hostile = pickle.dumps(Hostile(mark))
    else:
        torch.save(Hostile(mark), tmp_path / "saved")
        hostile = (tmp_path / "saved").read_bytes()
    names = ("model.safetensors", "checkpoints/step-00000001/checkpoint.json")
    of_script = "checkpoints/step-00000001/rank-0000.pt"
    for name in (*names, "checkpoints/step-00000001/rank-0000.safetensors", of_script):
        (run / name).write_bytes(hostile)
    with pytest.raises(RunError, match=r"model\.safetensors: damaged"):
        load_model(run, torch.device("cpu"))
    with pytest.raises(RunError, match="no checkpoint can be used"):
        load_checkpoint(run, SerialCommunicator(), [])
    script_folder = ScriptFolder(run, SerialCommunicator())
    with pytest.raises(RunError, match=r"rank-0000\.pt: is damaged"):
        script_folder.read_checkpoint()
    script_folder.release()
    assert not mark.exists()
