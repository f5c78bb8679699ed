"""Whose libmpi a module asks for, and a Horovod of another MPI than mpi4py's."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from speechdp.comm.device import RANKS_PER_GPU
from speechdp.comm.mpi import abi
from speechdp.comm.mpi.abi import abi_of_file, abi_of_launcher
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.startup import create
from speechdp.comm.startup.create import choose_backend, create_communicator, create_fed_job
from speechdp.errors import CommunicationError


@pytest.mark.parametrize(
    ("content", "wanted"),
    [(b"\0libmpi.so.40\0", "openmpi"), (b"\0libmpi.so.12\0", "mpich"), (b"libm.so.6\0", None), (b"", None)],
)
def test_a_module_names_its_library(tmp_path: Path, content: bytes, wanted: str | None) -> None:
    path = tmp_path / "m.so"
    path.write_bytes(content)
    assert abi_of_file(path) == wanted
    assert abi_of_file(tmp_path / "missing.so") is None


def test_horovod_of_another_mpi_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(abi, "abi_of_mpi4py", lambda: "mpich")
    monkeypatch.setattr(abi, "abi_of_horovod", lambda: "openmpi")
    why = "this Horovod was built for Open MPI, and mpi4py finds MPICH or Intel MPI"
    choice = choose_backend("auto")
    assert (choice.name, choice.notice) == ("mpi", f"back-end mpi instead of horovod: {why}")
    refused = f"the horovod back-end cannot start: {why}; choose"
    with pytest.raises(CommunicationError, match=refused):
        create_communicator("horovod")
    with pytest.raises(CommunicationError, match=refused):
        create_fed_job("horovod", 1)


@pytest.mark.parametrize("ranks_per_gpu", ["1", "2"])
def test_auto_asks_once_which_mpi_horovod_was_built_for(
    monkeypatch: pytest.MonkeyPatch, ranks_per_gpu: str
) -> None:
    for name, value in {**_OPEN_MPI, RANKS_PER_GPU: ranks_per_gpu}.items():
        monkeypatch.setenv(name, value)
    horovod = SimpleNamespace(
        mpi_built=lambda: True, nccl_built=lambda: False, HorovodCommunicator=SerialCommunicator
    )
    monkeypatch.setattr(importlib, "import_module", lambda _name: horovod)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    for module in (abi, create):
        monkeypatch.setattr(module, "abi_of_mpi4py", lambda: "openmpi")
    asked = []
    monkeypatch.setattr(abi, "abi_of_horovod", lambda: asked.append("horovod") or "openmpi")
    assert isinstance(create_communicator("auto", torch.device("cuda")), SerialCommunicator)
    assert asked == ["horovod"]


_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
_PMI = {"PMI_RANK": "0", "PMI_SIZE": "2"}
_HYDRA = {**_PMI, "MPI_LOCALRANKID": "0"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        (_OPEN_MPI, "openmpi"),
        ({**_OPEN_MPI, "PMIX_RANK": "0"}, "openmpi"),
        (_HYDRA, "mpich"),
        (_PMI, None),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, None),
        ({}, None),
    ],
)
def test_launchers_are_told_by_their_variables(environ: dict[str, str], wanted: str | None) -> None:
    assert abi_of_launcher(environ) == wanted


@pytest.mark.parametrize(
    ("environ", "loaded", "message"),
    [
        (_OPEN_MPI, "mpich", "mpirun of Open MPI started 2 .* the library of MPICH or Intel MPI, which"),
        (
            _HYDRA,
            "openmpi",
            "mpirun of MPICH or Intel MPI started 2 .* with the mpirun of Open MPI, or",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_the_mpirun_of_another_mpi_is_refused_before_mpi_starts(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], loaded: str, message: str, backend: str
) -> None:
    for name in (*_OPEN_MPI, *_HYDRA):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(create, "abi_of_mpi4py", lambda: loaded)
    with pytest.raises(CommunicationError, match=message):
        create_communicator(backend)
    with pytest.raises(CommunicationError, match=message):
        create_fed_job(backend, 1)
