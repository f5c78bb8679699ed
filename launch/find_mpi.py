"""Print an MPI's folder, its library and its version, a line each; the way launch/setup --mpi finds it.

usage: find_mpi.py system|PREFIX    system: the MPI of the mpirun on PATH
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

#: Open MPI's from 1.10 to 5, then what MPICH, Intel MPI and their relatives have: mpi4py's wheels know both.
LIBRARIES = ("libmpi.so.40", "libmpi.so.12")
FOLDERS = ("lib", "lib64", "lib/release", "lib/*-linux-gnu")


def find_prefix(wanted: str) -> Path:
    """Return the folder of an MPI.  Raises SystemExit with one line where there is none."""
    if wanted != "system":
        return Path(wanted).absolute()
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        sys.exit("setup: --mpi system: no mpirun on PATH; load the MPI's module first, or give its folder")
    return Path(mpirun).resolve().parent.parent


def find_library(prefix: Path) -> Path:
    """Return the MPI library below a folder.  Raises SystemExit with one line where there is none."""
    for name in LIBRARIES:
        for folder in FOLDERS:
            for library in sorted(prefix.glob(f"{folder}/{name}")):
                return library
    names = " or ".join(LIBRARIES)
    sys.exit(f"setup: --mpi: no {names} in {prefix}/lib; give the folder that holds bin/mpirun and lib")


def ask_version(library: Path) -> str:
    """Load the library and return what it calls itself, e.g. `Open MPI v4.1.8`.  Raises SystemExit."""
    try:
        loaded = ctypes.CDLL(str(library))
        text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
        loaded.MPI_Get_library_version(text, ctypes.byref(length))  # may be asked before MPI_Init
    except (OSError, AttributeError) as error:
        sys.exit(f"setup: --mpi: {library} cannot be loaded ({error}); load its module first")
    first_line = text.value.decode(errors="replace").partition("\n")[0].partition(",")[0]
    return " ".join(first_line.split())


def main() -> int:
    prefix = find_prefix(sys.argv[1])
    library = find_library(prefix)
    print(prefix, library, ask_version(library), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
