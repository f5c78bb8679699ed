"""Whose libmpi a module asks for, and a Horovod of another MPI than mpi4py's."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechdp.comm.mpi.abi import abi_of_file
from speechdp.comm.startup import create
from speechdp.comm.startup.create import choose_backend, create_communicator
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
    monkeypatch.setattr(create.importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(create, "abi_of_mpi4py", lambda: "mpich")
    monkeypatch.setattr(create, "abi_of_horovod", lambda: "openmpi")
    why = "this Horovod was built for Open MPI, and mpi4py finds MPICH or Intel MPI"
    choice = choose_backend("auto")
    assert (choice.name, choice.notice) == ("mpi", f"back-end mpi instead of horovod: {why}")
    with pytest.raises(CommunicationError, match=f"the horovod back-end cannot start: {why}; choose"):
        create_communicator("horovod")
