"""The file of a rank's part of a checkpoint: safetensors, written piece by piece.

safetensors' own writer copies everything once more and holds the GIL meanwhile.  Here a thread writes and
hashes directly from the tensors' memory, while training continues.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from speechdp.checkpoint.state import RankState
from speechdp.files import sync_open

_PIECE_BYTES = 4 * 2**20
#: Bytes per fsync: a single fsync of the whole file would take too long without a beat.
_SYNCED_BYTES = 64 * 2**20
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class GivenUpError(Exception):
    """The file is no longer wanted."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of a rank's state in host memory, which further training does not change.

    Attributes:
        values: values as JSON text.
        tensors: contiguous tensors on the CPU, by name.
    """

    values: str = "{}"
    tensors: dict[str, Tensor] = field(default_factory=dict)


def take_snapshot(state: RankState, past: Snapshot) -> Snapshot:
    """Copy a state.

    Args:
        state: state to copy, on any device.
        past: a snapshot no longer needed; its memory is reused for tensors of the same shape.
    """
    tensors = {}
    devices = set()
    for name, tensor in state.tensors.items():
        source, room = tensor.detach(), past.tensors.get(name)
        if room is None or room.shape != source.shape or room.dtype != source.dtype:
            room = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        tensors[name] = room.copy_(source, non_blocking=source.is_cuda)
        if source.is_cuda:
            devices.add(source.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return Snapshot(json.dumps(state.values), tensors)


def write_rank_file(
    path: Path, snapshot: Snapshot, given_up: threading.Event, beat: Callable[[], None]
) -> tuple[str, int]:
    """Write a snapshot to disk; return the file's sha256 and bytes.

    Args:
        given_up: set when the file is no longer wanted.
        beat: called whenever another part is on disk.

    Raises:
        OSError: the file cannot be written.
        GivenUpError: `given_up` was set during writing.
    """
    checksum, num_bytes, num_synced = hashlib.sha256(), 0, 0
    with path.open("wb") as file:
        for piece in _pieces(snapshot):
            if given_up.is_set():
                raise GivenUpError
            checksum.update(piece)
            file.write(piece)
            num_bytes += len(piece)
            if num_bytes - num_synced >= _SYNCED_BYTES:
                file.flush()
                sync_open(file.fileno(), data_alone=True)
                num_synced = num_bytes
            beat()
        file.flush()
        sync_open(file.fileno())
    return checksum.hexdigest(), num_bytes


def _pieces(snapshot: Snapshot) -> Iterator[bytes | memoryview]:
    # Wide types first, so that every tensor begins at a multiple of its element size.
    names = sorted(snapshot.tensors, key=lambda name: (-snapshot.tensors[name].element_size(), name))
    yield _header(snapshot, names)
    for name in names:
        memory = snapshot.tensors[name].reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(memory), _PIECE_BYTES):
            yield memory[begin : begin + _PIECE_BYTES]


def _header(snapshot: Snapshot, names: list[str]) -> bytes:
    """Return the file's header.  Source: the format's description in safetensors' README."""
    entries: dict[str, object] = {"__metadata__": {"state": snapshot.values}}
    begin = 0
    for name in names:
        tensor = snapshot.tensors[name]
        end = begin + tensor.numel() * tensor.element_size()
        place = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        entries[name], begin = place, end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
