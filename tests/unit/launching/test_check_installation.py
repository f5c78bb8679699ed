"""launch/check_installation.py over stand-ins of all it imports: which libmpi they load decides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PARTS = ("h5py", "kaldi_native_fbank", "kaldifst", "kaldi_decoder", "soundfile", "jiwer", "tyro")
TORCH = "from types import SimpleNamespace\ndef zeros(n): return SimpleNamespace(numpy=lambda: n)\n"
#: As mpi4py's wheels do: a module for each kind of MPI, of which its name tells.
MPI4PY = """
import importlib.util, sys
from pathlib import Path
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "mpi4py.MPI":
            return importlib.util.spec_from_file_location(name, Path(__file__).with_name("MPI.openmpi.py"))
sys.meta_path.insert(0, Finder)
"""


class Environment:
    """An environment in a path with a blank: stand-ins of packages, and two MPIs, its own and another.

    Args:
        folder: for all of it.
    """

    def __init__(self, folder: Path) -> None:
        self.prefix = folder / "an environment"
        self.own = self.prefix / "lib" / "libmpi.so.40"
        self.other = folder / "another MPI" / "lib" / "libmpi.so.12"
        for library in (self.own, self.other):
            _compile_library(library)
        self.packages = dict.fromkeys(PARTS, "") | {"torch": TORCH, "mpi4py": MPI4PY}
        for name, text in self.packages.items():
            self.write(f"{name}/__init__.py", text)
        self.write("mpi4py/MPI.openmpi.py", f"import ctypes\nctypes.CDLL({str(self.own)!r})\n")
        # Python reads it as it starts; what is installed where this runs is not there.
        self.write(
            "sitecustomize.py",
            f"import sys\nsys.prefix = {str(self.prefix)!r}\n"
            "sys.path[:] = [path for path in sys.path if not path.endswith('site-packages')]\n",
        )

    def write(self, name: str, text: str, folder: Path | None = None) -> None:
        path = (folder or self.prefix) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def add_horovod(self, folder: Path, *, tells_its_mpi: bool) -> None:
        """Write a Horovod that loads the other MPI, and whose module does or does not tell so."""
        self.write("horovod/__init__.py", "", folder)
        self.write("horovod/torch/__init__.py", f"import ctypes\nctypes.CDLL({str(self.other)!r})\n", folder)
        self.write("horovod/torch/mpi_lib.so", f"\0libmpi.so.{'12' if tells_its_mpi else '0'}\0", folder)

    def check(self, *words: str, also: Path | None = None) -> subprocess.CompletedProcess[str]:
        folders = [self.prefix, *([] if also is None else [also]), REPOSITORY]
        return subprocess.run(
            [sys.executable, str(REPOSITORY / "launch" / "check_installation.py"), *words],
            env={"PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(map(str, folders))},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def _compile_library(path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for libraries that stand for an MPI's")
    path.parent.mkdir(parents=True)
    command = [compiler, "-shared", "-x", "c", "/dev/null", "-o", str(path)]
    subprocess.run(command, check=True, timeout=60)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def test_one_mpi_for_all_is_right(environment: Environment) -> None:
    done = environment.check()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert environment.check(str(environment.own)).returncode == 0
    chosen = environment.check(str(environment.other))  # mpi4py loads its own instead
    assert chosen.returncode == 1
    assert (
        f"another MPI than that of {environment.other.parent} is loaded: {environment.own}" in chosen.stderr
    )


def test_a_horovod_of_another_mpi_below_is_left_out_with_a_line(
    environment: Environment, tmp_path: Path
) -> None:
    environment.add_horovod(tmp_path / "base", tells_its_mpi=True)
    done = environment.check(also=tmp_path / "base")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert line.startswith(
        f"setup: {tmp_path}/base/horovod/__init__.py of --on-top-of is not used, training uses "
    )
    assert "this Horovod was built for MPICH or Intel MPI, and mpi4py finds Open MPI; to have" in line


def test_a_horovod_that_training_would_take_with_another_mpi_ends_with_3(
    environment: Environment, tmp_path: Path
) -> None:
    environment.add_horovod(tmp_path / "base", tells_its_mpi=False)
    done = environment.check(also=tmp_path / "base")
    assert done.returncode == 3
    assert f"loads another MPI than that of {environment.own.parent}: {environment.other}; " in done.stderr
    assert f"give --mpi {environment.other.parent.parent}, or let" in done.stderr


@pytest.mark.parametrize("tells_its_mpi", [False, True])
def test_a_horovod_of_its_own_with_another_mpi_ends_with_1(
    environment: Environment, tells_its_mpi: bool
) -> None:
    environment.add_horovod(environment.prefix, tells_its_mpi=tells_its_mpi)
    done = environment.check()
    assert done.returncode == 1
    assert f"another MPI than that of {environment.own.parent} is loaded: {environment.other}" in done.stderr
