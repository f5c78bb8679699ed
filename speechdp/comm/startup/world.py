"""Compare what the ranks, the launcher, MPI and Horovod believe about the world, before step 1.

"Every rank says it is rank 0" is the most common report about data-parallel training: N processes each train
alone, at full cost, without an error.  Different versions or data on one node come next.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from speechdp import __version__, remedies
from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.device import refuse_mixed_kinds
from speechdp.errors import CommunicationError

_SAME_INSTALLATION = "install the same version on every node"
_SAME_COMMAND = "start every rank with the same command line"
_REMEDIES = {
    "seed": _SAME_COMMAND,
    "configuration": _SAME_COMMAND,
    "data checksum": "let every rank read the same data directory, as `speechdp prepare` wrote it",
}
_LAUNCHER_REMEDIES = {
    "srun": "start with `srun --mpi=pmix`",
    "mpirun": "start with the mpirun of the MPI that mpi4py {mpi}",
    "PMI": "start with the mpiexec of the MPI that mpi4py {mpi}",
    "horovodrun": "with `horovodrun`, choose {horovod}",
    "torchrun": "with `torchrun`, choose {torch}",
}


def check_world(comm: Communicator, facts: Mapping[str, Any]) -> None:
    """Refuse a job whose ranks do not form one consistent world.  Collective.

    Args:
        comm: the communicator the run is going to use.
        facts: values that must be the same on every rank, besides the versions: `seed`, `configuration` (a
            hash), `data checksum`, ...; JSON-like.

    Raises:
        CommunicationError: the ranks differ; the message names the first difference, the ranks and hosts,
            both values and the remedy.
    """
    # First the checks that need no exchange: with a wrong size the exchange below might never end.
    _check_launcher(comm)
    _check_mpi(comm)
    _check_equal(comm, {**versions(), **facts})
    check_sum(comm)


def _check_launcher(comm: Communicator) -> None:
    launch = environment.announced()
    if launch is None or comm.backend == "threads" or (launch.rank, launch.size) == (comm.rank, comm.size):
        return
    if comm.size == 1:
        remedy = _launcher_remedy(launch.launcher)
        if comm.backend == "serial":
            remedy = f"choose {remedies.backend('auto')}"
        raise CommunicationError(
            f"{launch.launcher} started {launch.size} processes, but each is alone in the {comm.backend} "
            f"back-end's world and would train by itself; {remedy}"
        )
    raise CommunicationError(
        f"{launch.launcher} calls this process rank {launch.rank} of {launch.size}, but the {comm.backend} "
        f"back-end calls it rank {comm.rank} of {comm.size}; "
        f"{_launcher_remedy(launch.launcher)}"
    )


def _launcher_remedy(launcher: str) -> str:
    chosen = {name: remedies.backend(name) for name in ("horovod", "torch")}
    return _LAUNCHER_REMEDIES[launcher].format(mpi=_mpi_of_mpi4py(), **chosen)


def _mpi_of_mpi4py() -> str:
    """Return which MPI mpi4py loaded, and from where, as text after its name: "uses: Open MPI v4.1.8"."""
    library = versions().get("MPI library version")
    found = _mapped_libmpi()
    where = "" if found is None else f" ({found})"
    return f"and Horovod use: {sys.prefix}/bin/mpirun" if library is None else f"uses: {library}{where}"


def _mapped_libmpi() -> str | None:
    """Return the path of the MPI library in this process; None: none, or unknown."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return next((path for path in paths if Path(path).name.startswith("libmpi.so")), None)


def _check_mpi(comm: Communicator) -> None:
    mpi = _mpi_world()
    if mpi is None or comm.backend in {"serial", "threads"} or mpi == (comm.rank, comm.size):
        return
    raise CommunicationError(
        f"MPI calls this process rank {mpi[0]} of {mpi[1]}, but the {comm.backend} back-end calls it rank "
        f"{comm.rank} of {comm.size}; rebuild {comm.backend} against the MPI of mpi4py "
        f"(launch/setup does), or choose {remedies.backend('mpi')}"
    )


def _check_equal(comm: Communicator, facts: Mapping[str, Any]) -> None:
    everyone = comm.allgather_object([environment.host_name(), dict(facts)])
    first_host, first = everyone[0]
    keys = dict.fromkeys(key for _, theirs in everyone for key in theirs)
    for key in keys:
        for rank, (host, theirs) in enumerate(everyone):
            if theirs.get(key) == first.get(key):
                continue
            remedy = _SAME_INSTALLATION if key.endswith(" version") else _REMEDIES.get(key, _SAME_COMMAND)
            raise CommunicationError(
                f"ranks 0 ({first_host}) and {rank} ({host}) differ in the {key}: "
                f"{first.get(key)} and {theirs.get(key)}; {remedy}"
            )


def check_sum(comm: Communicator) -> None:
    """Sum a small vector whose result is known, so that a broken transport shows here, not in the loss.

    Collective.

    Raises:
        CommunicationError: the sum is wrong.
    """
    x = torch.tensor([comm.rank + 1.0, 1.0, -0.5])
    comm.allreduce(x, name="speechdp.world")
    n = comm.size
    expected = [n * (n + 1) / 2, float(n), -0.5 * n]
    if x.tolist() != expected:
        raise CommunicationError(
            f"the {comm.backend} back-end computes wrong sums on rank {comm.rank} "
            f"({environment.host_name()}): {x.tolist()} instead of {expected}; choose another back-end"
        )


def check_devices(comm: Communicator, device: torch.device) -> None:
    """Refuse a job in which some ranks use GPUs and others the CPU.  Collective.

    Args:
        comm: the ranks that train.
        device: device this rank computes on.

    Raises:
        CommunicationError: as for `refuse_mixed_kinds`.
    """
    refuse_mixed_kinds(comm.allgather_object([environment.host_name(), device.type]))


def versions() -> dict[str, str]:
    """Return the versions of what is installed here, with keys `... version`."""
    versions = {
        "speechdp version": __version__,
        "Python version": platform.python_version(),
        "torch version": str(torch.__version__),
    }
    for package in ("numpy", "horovod", "mpi4py"):
        try:
            versions[f"{package} version"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[f"{package} version"] = "none"
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        versions["MPI library version"] = library_version(mpi)
    return versions


def library_version(mpi: ModuleType) -> str:
    """Return the name and version of the MPI library, which begin its one- to twenty-line description.

    Args:
        mpi: the module mpi4py.MPI.

    Example:
        >>> library_version(sys.modules["mpi4py.MPI"])  # doctest: +SKIP
        'MPICH Version: 4.3.2'
    """
    first = mpi.Get_library_version().strip("\0 \n").splitlines()[0]
    return " ".join(first.split(",")[0].split())


def _mpi_world() -> tuple[int, int] | None:
    """Return this rank and the size according to MPI; None if MPI is not initialised."""
    mpi = sys.modules.get("mpi4py.MPI")  # never import it here: that would initialise MPI
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return int(mpi.COMM_WORLD.Get_rank()), int(mpi.COMM_WORLD.Get_size())
