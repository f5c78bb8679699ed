"""Tell which MPI a compiled module was made for, without loading it: two in one process know nothing of each
other."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from speechdp.comm import environment

Abi = Literal["openmpi", "mpich"]

#: A module contains the name of the library that it needs; MPICH, MVAPICH, Intel's and Cray's MPI share one.
_LIBRARIES: dict[bytes, Abi] = {b"libmpi.so.40": "openmpi", b"libmpi.so.12": "mpich"}
_IN_NAME = re.compile(r"\.(openmpi|mpich)\.")
#: Set by Hydra, which numbers the ranks of each host.  Slurm sets PMI_RANK as well, but not this variable.
_OF_HYDRA = "MPI_LOCALRANKID"
PRODUCTS: dict[Abi, str] = {"openmpi": "Open MPI", "mpich": "MPICH or Intel MPI"}


def abi_of_launcher(environ: Mapping[str, str] | None = None) -> Abi | None:
    """Return the kind of MPI whose mpirun started this process; None: no mpirun, or one for any MPI.

    Example:
        >>> abi_of_launcher({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"})
        'mpich'
    """
    environ = os.environ if environ is None else environ
    launch = environment.announced(environ)
    if launch is None:
        return None
    if launch.launcher == "mpirun":
        return "openmpi"
    return "mpich" if launch.launcher == "PMI" and _OF_HYDRA in environ else None


def abi_of_mpi4py() -> Abi | None:
    """Return the kind of MPI that mpi4py is going to load, without loading it; None: unknown.

    Wheels have a module for each kind, and mpi4py chooses by the library that it finds.

    Example:
        >>> abi_of_mpi4py()  # doctest: +SKIP
        'openmpi'
    """
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")
    except (ImportError, RuntimeError):  # no mpi4py, or no MPI: importing it gives a better message
        return None
    if spec is None or spec.origin is None:
        return None
    named = _IN_NAME.search(Path(spec.origin).name)
    if named is not None:
        return "openmpi" if named[1] == "openmpi" else "mpich"
    return abi_of_file(Path(spec.origin))


def abi_of_horovod() -> Abi | None:
    """Return the kind of MPI that Horovod was built for; None: none, or unknown."""
    spec = importlib.util.find_spec("horovod")
    folders = [] if spec is None else spec.submodule_search_locations or []
    modules = [path for folder in folders for path in sorted(Path(folder).glob("torch/mpi_lib*.so"))]
    return next((abi for path in modules if (abi := abi_of_file(path)) is not None), None)


def other_mpi_of_horovod() -> str | None:
    """Describe the mismatch if Horovod, built for another MPI than mpi4py's, cannot use its launcher.

    Returns:
        A clause for a message; None if both use the same MPI, or if that is unknown.

    Example:
        >>> other_mpi_of_horovod()  # doctest: +SKIP
        'this Horovod was built for Open MPI, and mpi4py finds MPICH or Intel MPI'
    """
    own, horovods = abi_of_mpi4py(), abi_of_horovod()
    if own is None or horovods is None or own == horovods:
        return None
    return f"this Horovod was built for {PRODUCTS[horovods]}, and mpi4py finds {PRODUCTS[own]}"


def abi_of_file(path: Path) -> Abi | None:
    """Return the kind of MPI that a shared library needs; None: neither, or it cannot be read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return next((abi for name, abi in _LIBRARIES.items() if content.find(name + b"\0") >= 0), None)
    except (OSError, ValueError):  # ValueError: an empty file
        return None
