"""Store a shard's targets from another alignment in a separate file (docs/data-format.md)."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speechdp.data.shards.contiguous import ArrayPlace, RowReader
from speechdp.data.shards.hdf5_file import create_hdf5
from speechdp.data.shards.hdf5_input import HDF5_ERRORS, open_hdf5
from speechdp.data.shards.layout import check_format, printable
from speechdp.data.shards.shard import Shard, check_targets
from speechdp.errors import ShardError, one_line
from speechdp.files import atomic_path, cannot_be_read, cannot_be_written, is_of_disk

TARGETS_FORMAT = "speechdp-targets"
TARGETS_VERSION = 1
_AGAIN = "delete it and align again"


def write_targets(
    path: Path,
    shard: Shard,
    targets: Sequence[npt.NDArray[np.int32]],
    alignment: str,
    num_classes: int | None = None,
) -> None:
    """Write new targets for every utterance of a shard, atomically.

    Args:
        path: the file to write.
        shard: the shard the targets belong to.
        targets: per utterance (T,) class indices, T as in the shard.
        alignment: source of the targets, e.g. "realigned-1".
        num_classes: number of classes; None: as in the shard's header.

    Raises:
        ShardError: the disk is full or the file cannot be written.
    """
    arrays = [np.ascontiguousarray(array, dtype="<i4") for array in targets]
    lengths = np.diff(shard.offsets)
    assert len(arrays) == shard.num_utterances, (len(arrays), shard.num_utterances)
    assert all(array.shape == (length,) for array, length in zip(arrays, lengths, strict=True))
    crc32 = np.array([zlib.crc32(array.data) for array in arrays], dtype="<u4")
    num_bytes = shard.num_frames * 4 + crc32.nbytes
    try:
        with atomic_path(path) as temporary, create_hdf5(temporary, num_bytes) as file:
            file.attrs["format"] = TARGETS_FORMAT
            file.attrs["version"] = TARGETS_VERSION
            file.attrs["shard_index_sha256"] = shard.index_sha256
            file.attrs["alignment"] = alignment
            if num_classes is not None:
                file.attrs["num_classes"] = num_classes
            file.attrs["crc32_sha256"] = _sha256(crc32, shard.index_sha256, alignment)
            file["crc32"] = crc32
            file["targets"] = np.concatenate([np.empty(0, dtype="<i4"), *arrays])
    except (OSError, RuntimeError) as error:
        raise ShardError(cannot_be_written(path, error)) from error


class TargetsFile:
    """Targets of another alignment for one shard; reading is thread-safe.

    Attributes:
        path: the file.
        alignment: source of the targets, e.g. "realigned-1".
        num_classes: number of classes.
    """

    def __init__(self, path: Path, shard: Shard) -> None:
        self.path = path
        self._shard = shard
        self.alignment, self.num_classes, self._crc32, self._place = _read_head(path, shard)
        self._reader = RowReader(path)
        self._verified = np.zeros(shard.num_utterances, dtype=bool)

    def read(self, utterance: int) -> npt.NDArray[np.int32]:
        """Read an utterance's (T,) targets.  Raises ShardError if they are damaged."""
        start, end = int(self._shard.offsets[utterance]), int(self._shard.offsets[utterance + 1])
        targets: npt.NDArray[np.int32] = self._reader.read(self._place, start, end - start)
        if zlib.crc32(targets.data) != self._crc32[utterance]:
            name = printable(self._shard.utterance_id(utterance))
            raise ShardError(f"{self.path}: targets of utterance {name} are damaged (checksum); {_AGAIN}")
        self._verified[utterance] = True
        return targets

    def verify(self, utterance: int) -> None:
        """Verify an utterance's checksum, unless that has been done.  Raises ShardError as `read`."""
        if not self._verified[utterance]:
            self.read(utterance)

    def check_targets(self) -> None:
        """Read all targets.  Raises ShardError at the first that is not a class index."""
        check_targets(self.path, self.dataset, self._shard, self.num_classes, _AGAIN)

    @property
    def dataset(self) -> tuple[RowReader, ArrayPlace]:
        """The reader of the targets and their place in the file; rows are counted over the whole shard."""
        return self._reader, self._place

    def close(self) -> None:
        """Close the file; a later read reopens it."""
        self._reader.close()


def check_alignments(directory: Path | None) -> None:
    """Refuse a directory of targets files that does not exist.  None stands for the shards' own targets.

    Raises:
        ShardError: there is no such directory, or it is a run.
    """
    if directory is not None and (directory / "run.json").is_file():
        made = sorted(str(path.parent) for path in directory.glob("alignments/*/completed.json"))
        remedy = f"give its {' or '.join(made)}" if made else "it has made none, give those of another"
        raise ShardError(f"{directory}: is a run, not an alignment directory; {remedy}")
    if directory is not None and not directory.is_dir():
        made = sorted(path.parent.name for path in directory.parent.glob("*/completed.json"))
        there = f", and {directory.parent} has {', '.join(made)}" if made else ""
        raise ShardError(
            f"{directory}: no such alignment directory{there}; make it with train --flat-start or --realign"
        )


def open_targets(path: Path, shard: Shard) -> TargetsFile:
    """Open the targets file that was written for `shard`.

    Raises:
        ShardError: damaged, of another version, or written for another shard.
    """
    return TargetsFile(path, shard)


def _read_head(path: Path, shard: Shard) -> tuple[str, int, npt.NDArray[np.uint32], ArrayPlace]:
    try:
        with open_hdf5(path) as file:
            attributes = file.attributes()
            check_format(path, attributes, TARGETS_FORMAT, TARGETS_VERSION)
            crc32: npt.NDArray[Any] = file.array("crc32")
            place = ArrayPlace.of(file.dataset("targets"))
    except FileNotFoundError as error:
        raise ShardError(cannot_be_read(path, error, "align again")) from error
    except HDF5_ERRORS as error:
        if is_of_disk(error):
            raise ShardError(cannot_be_read(path, error)) from error
        reason = one_line(error)
        raise ShardError(f"{path}: truncated or damaged ({reason}); {_AGAIN}") from error
    if attributes.get("shard_index_sha256") != shard.index_sha256:
        raise ShardError(
            f"{path}: belongs to another shard than {shard.path}; give the alignment that was made of these "
            "data, or make one of them in another run"
        )
    alignment = str(attributes.get("alignment"))
    if attributes.get("crc32_sha256") != _sha256(crc32, shard.index_sha256, alignment):
        raise ShardError(f"{path}: its index is damaged (checksum); {_AGAIN}")
    if place.shape != (shard.num_frames,) or place.dtype != np.dtype(np.int32):
        raise ShardError(f"{path}: targets have the wrong shape or type; {_AGAIN}")
    num_classes = attributes.get("num_classes", shard.header.num_classes)
    if type(num_classes) is not int or not 0 < num_classes < 1 << 31:
        raise ShardError(f"{path}: has no number of classes that could be; {_AGAIN}")
    return alignment, num_classes, crc32, place


def _sha256(crc32: npt.NDArray[np.uint32], shard_index_sha256: str, alignment: str) -> str:
    digest = hashlib.sha256(crc32.tobytes())
    digest.update(f"{shard_index_sha256} {alignment}".encode())
    return digest.hexdigest()
