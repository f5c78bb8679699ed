"""HDF5 made to do harm: links and values in other files, sizes that are not there, damaged heaps."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from speechdp.data.shards.shard import Shard
from speechdp.errors import ShardError
from tests.helpers.corpora import write_shard


def _replace(name: str, **options: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, **options)

    return change


def _link(name: str, link: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = link

    return change


CASES: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "link to another file": (_link("offsets", h5py.ExternalLink("/etc/passwd", "/x")), "is a link"),
    "link in the file": (_link("offsets", h5py.SoftLink("/crc32")), "is a link"),
    "values in another file": (
        _replace("offsets", shape=(3,), dtype="i8", external=[("/etc/passwd", 0, 24)]),
        "in other files",
    ),
    "never written": (_replace("offsets", shape=(1 << 50,), dtype="i8"), "larger than"),
    "empty chunks": (_replace("crc32", shape=(1 << 50,), dtype="u4", chunks=(1 << 16,)), "larger than"),
    "endless text": (_replace("text", shape=(1 << 40,), dtype="S9", chunks=(1 << 10,)), "larger than"),
    "compound": (_replace("crc32", data=np.zeros(2, [("a", "i4"), ("b", "S3")])), "neither numbers nor text"),
    "list of attributes": (lambda file: file.attrs.__setitem__("split", ["a", "b"]), "no number and no text"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_structures_that_reach_out_or_lie_are_refused(tmp_path: Path, case: str) -> None:
    change, message = CASES[case]
    path = write_shard(tmp_path / "a.h5").path
    with h5py.File(path, "r+") as file:
        change(file)
    tracemalloc.start()
    with pytest.raises(ShardError, match=message):
        Shard(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("size_bytes", [0, 1 << 20, (1 << 64) - 16, (1 << 64) - 1])
def test_a_heap_of_strings_hdf5_would_never_get_through_is_refused(tmp_path: Path, size_bytes: int) -> None:
    path = write_shard(tmp_path / "a.h5").path
    content = bytearray(path.read_bytes())
    heap = content.find(b"GCOL")
    for index in (0, 1):
        changed = content.copy()
        changed[heap + 16 : heap + 32] = struct.pack("<HH4xQ", index, 1, size_bytes)
        path.write_bytes(changed)
        with pytest.raises(ShardError, match=r"the string at byte \d+ is damaged|not where it should be"):
            Shard(path)


def test_a_pointer_of_another_length_than_its_string_is_refused(tmp_path: Path) -> None:
    """HDF5 would copy the string into memory of the pointer's length; early files have no checksum there."""
    path = tmp_path / "early.h5"
    with (
        h5py.File(write_shard(tmp_path / "a.h5").path) as file,
        h5py.File(path, "w", libver=("earliest", "v108")) as early,
    ):
        early.attrs.update(file.attrs)
        for name in file:
            file.copy(name, early)
    Shard(path).verify()
    content = path.read_bytes()
    heap = content.find(b"GCOL")
    text = struct.pack("<IQ", len("speechdp-shard"), heap)
    assert content.count(text) == 1
    path.write_bytes(content.replace(text, struct.pack("<IQ", 3, heap)))
    with pytest.raises(ShardError, match="a string of 3 bytes is not where it should be"):
        Shard(path)
