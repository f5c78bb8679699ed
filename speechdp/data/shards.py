"""Write and read HDF5 shards (layout version 1: docs/data-format.md).

Legend: U utterances, F frames of the shard, T frames of an utterance, D feature dimensions.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import h5py
import numpy as np
import numpy.typing as npt

from speechdp.atomic_file import atomic_path
from speechdp.data.contiguous import ArrayPlace, RowReader
from speechdp.data.features import FeatureConfig
from speechdp.data.hdf5_file import copy_rows, create_hdf5, write_all
from speechdp.data.shard_layout import (
    SHARD_FORMAT,
    SHARD_VERSION,
    ShardHeader,
    ShardIndex,
    Utterance,
    check_format,
    utterance_crc32,
)
from speechdp.errors import ConfigError, ShardError

__all__ = ["Shard", "ShardHeader", "ShardIndex", "ShardWriter", "Utterance"]

_AGAIN = "prepare the data again or copy the file anew"


class ShardWriter:
    """Write one shard, utterance by utterance; it appears under its name when the block ends well.

    Frames go to unnamed temporary files in the same folder first, because a contiguous HDF5 dataset
    needs its size from the start; memory does not grow with the shard.
    """

    def __init__(self, path: Path, header: ShardHeader) -> None:
        self.path = path
        self.header = header
        self.index_sha256 = ""
        self._dtype = np.dtype(header.features.dtype).newbyteorder("<")
        self._lengths: list[int] = []
        self._crc32: list[int] = []
        self._strings: list[tuple[str, str, str]] = []
        self._stack = ExitStack()
        self._features: IO[bytes]
        self._targets: IO[bytes]

    @property
    def num_utterances(self) -> int:
        """Number of utterances added so far."""
        return len(self._lengths)

    @property
    def num_frames(self) -> int:
        """Number of frames added so far."""
        return sum(self._lengths)

    def __enter__(self) -> ShardWriter:
        try:
            self._features = self._stack.enter_context(_spool(self.path.parent))
            self._targets = self._stack.enter_context(_spool(self.path.parent))
        except OSError as error:
            self._stack.close()
            raise _cannot_write(self.path, error) from error
        return self

    def add(self, utterance: Utterance) -> None:
        """Append an utterance.  Raises ShardError (disk) or ConfigError (values no shard can hold)."""
        with np.errstate(over="ignore"):  # _check refuses what overflowed
            features = np.ascontiguousarray(utterance.features, dtype=self._dtype)
        targets = np.ascontiguousarray(utterance.targets, dtype="<i4")
        self._check(utterance, features, targets)
        try:
            write_all(self._features, features.data)
            write_all(self._targets, targets.data)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._lengths.append(len(targets))
        self._crc32.append(utterance_crc32(features, targets))
        self._strings.append((utterance.utterance_id, utterance.speaker, utterance.text))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                self._commit()

    def _check(
        self, utterance: Utterance, features: npt.NDArray[Any], targets: npt.NDArray[np.int32]
    ) -> None:
        where = f"{self.path}: utterance {utterance.utterance_id}"
        if features.ndim != 2 or features.shape[1] != self.header.feature_dim:
            raise ConfigError(
                f"{where}: features of shape {features.shape}, not (T, {self.header.feature_dim})"
            )
        if targets.shape != (features.shape[0],):
            raise ConfigError(f"{where}: {targets.shape} targets for {features.shape[0]} frames")
        if len(targets) == 0:
            raise ConfigError(f"{where}: has no frame; leave it out of the corpus")
        if targets.min() < 0 or targets.max() >= self.header.num_classes:
            raise ConfigError(f"{where}: targets outside 0..{self.header.num_classes - 1}")
        if not np.isfinite(features).all():
            raise ConfigError(
                f"{where}: features hold NaN or overflow {self._dtype.name}; use --dtype float32"
            )
        if any("\0" in text for text in (utterance.utterance_id, utterance.speaker, utterance.text)):
            raise ConfigError(f"{where}: its id, speaker or text holds a NUL character")

    def _commit(self) -> None:
        strings = list(zip(*self._strings, strict=True)) if self._strings else [(), (), ()]
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]).astype("<i8")
        index = ShardIndex(offsets, np.array(self._crc32, dtype="<u4"), *map(tuple, strings))
        try:
            with atomic_path(self.path) as temporary:
                self._write_hdf5(temporary, index)
        except (OSError, RuntimeError) as error:  # HDF5 reports a failed write as either
            raise _cannot_write(self.path, error) from error

    def _write_hdf5(self, path: Path, index: ShardIndex) -> None:
        attributes = self.header.attributes()
        self.index_sha256 = index.sha256(attributes)
        num_frames = int(index.offsets[-1])
        columns = _string_columns(index)
        num_bytes = num_frames * (self._dtype.itemsize * self.header.feature_dim + 4)
        num_bytes += index.offsets.nbytes + index.crc32.nbytes
        num_bytes += sum(strings.nbytes for strings in columns.values())
        with create_hdf5(path, num_bytes) as file:
            for name, value in attributes.items():
                file.attrs[name] = value
            file.attrs["index_sha256"] = self.index_sha256
            file["offsets"] = index.offsets
            file["crc32"] = index.crc32
            for name, strings in columns.items():
                file[name] = strings
            features = file.create_dataset("features", (num_frames, self.header.feature_dim), self._dtype)
            copy_rows(self._features, features)
            copy_rows(self._targets, file.create_dataset("targets", (num_frames,), np.dtype("<i4")))


class Shard:
    """A shard opened for reading; safe from several threads.

    Opening reads the index and checks it (format, version, checksum) and leaves no HDF5 handle open;
    frames are read straight from the file.

    Attributes:
        path: the file.
        header: what holds for the whole shard.
        offsets: (U+1,) int64; utterance u owns frames offsets[u]:offsets[u+1].
        crc32: (U,) uint32, of each utterance's feature bytes and target bytes.
        utterance_ids, speakers, texts: U strings each.
        index_sha256: identifies the shard.

    Raises:
        ShardError: not a shard, of another version, truncated or damaged; names file and remedy.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header, index, self.index_sha256, places = _read_index(path)
        self.offsets = index.offsets
        self.crc32 = index.crc32
        self.utterance_ids = index.utterance_ids
        self.speakers = index.speakers
        self.texts = index.texts
        self._features, self._targets = places
        self._starts: list[int] = index.offsets.tolist()  # Python ints: no numpy scalars on the read path
        self._reader = RowReader(path)

    @property
    def num_utterances(self) -> int:
        """Number of utterances (U)."""
        return len(self._starts) - 1

    @property
    def num_frames(self) -> int:
        """Number of frames (F)."""
        return self._starts[-1]

    def read(self, utterance: int, *, verify: bool = True) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Read an utterance: features (T, D) in the shard's dtype, targets (T,) int32.

        Raises:
            ShardError: the file ends too early, or (with `verify`) the checksum does not match.
        """
        start = self._starts[utterance]
        num = self._starts[utterance + 1] - start
        features = self._reader.read(self._features, start, num)
        targets = self._reader.read(self._targets, start, num)
        if verify and utterance_crc32(features, targets) != self.crc32[utterance]:
            raise ShardError(
                f"{self.path}: utterance {self.utterance_ids[utterance]} is damaged (checksum); {_AGAIN}"
            )
        return features, targets

    def read_frames(
        self, utterance: int, start: int, num: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Read `num` frames of an utterance from its frame `start` on; no checksum can cover a part."""
        first = self._starts[utterance] + start
        assert start >= 0 and num >= 0 and first + num <= self._starts[utterance + 1], (start, num)
        return self._reader.read(self._features, first, num), self._reader.read(self._targets, first, num)

    def verify(self) -> None:
        """Read every utterance and compare its checksum.  Raises ShardError on the first mismatch."""
        for utterance in range(self.num_utterances):
            self.read(utterance)

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        self._reader.close()

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _read_index(path: Path) -> tuple[ShardHeader, ShardIndex, str, tuple[ArrayPlace, ArrayPlace]]:
    try:
        with h5py.File(path, "r", locking=False) as file:
            attributes = {name: _plain(value) for name, value in file.attrs.items()}
            check_format(path, attributes, SHARD_FORMAT, SHARD_VERSION)
            strings = [tuple(text.decode() for text in file[name][:].tolist()) for name in _STRING_NAMES]
            index = ShardIndex(file["offsets"][:], file["crc32"][:], *strings)
            places = (ArrayPlace.of(file["features"]), ArrayPlace.of(file["targets"]))
    except FileNotFoundError as error:
        raise ShardError(f"{path}: no such shard; {_AGAIN}") from error
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        # What HDF5 and h5py raise on a damaged file depends on which byte it was.
        reason = " ".join(str(error).split())
        raise ShardError(f"{path}: truncated, damaged or not HDF5 ({reason}); {_AGAIN}") from error
    expected = attributes.pop("index_sha256", "")
    if index.sha256(attributes) != expected:
        raise ShardError(f"{path}: its index is damaged (checksum); {_AGAIN}")
    header = ShardHeader(
        features=FeatureConfig.from_dict(json.loads(attributes["features"])),
        sampling_rate=attributes["sampling_rate"],
        num_classes=attributes["num_classes"],
        alignment=attributes["alignment"],
        split=attributes["split"],
    )
    _check_places(path, header, int(index.offsets[-1]), places)
    return header, index, expected, places


def _check_places(
    path: Path, header: ShardHeader, num_frames: int, places: tuple[ArrayPlace, ArrayPlace]
) -> None:
    features, targets = places
    dtype = np.dtype(header.features.dtype)
    if (features.shape, features.dtype) != ((num_frames, header.feature_dim), dtype) or (
        targets.shape,
        targets.dtype,
    ) != ((num_frames,), np.dtype(np.int32)):
        raise ShardError(f"{path}: features or targets have the wrong shape or type; {_AGAIN}")
    size_bytes = path.stat().st_size
    for place in places:
        num_bytes = int(np.prod(place.shape)) * place.dtype.itemsize
        if place.offset_bytes is not None and place.offset_bytes + num_bytes > size_bytes:
            raise ShardError(f"{path}: {place.name} is truncated; {_AGAIN}")


_STRING_NAMES = ("utterance_id", "speaker", "text")


def _string_columns(index: ShardIndex) -> dict[str, npt.NDArray[Any]]:
    columns = (index.utterance_ids, index.speakers, index.texts)
    return {name: _fixed_strings(strings) for name, strings in zip(_STRING_NAMES, columns, strict=True)}


def _fixed_strings(strings: tuple[str, ...]) -> npt.NDArray[Any]:
    encoded = [text.encode() for text in strings]
    width = max([1, *map(len, encoded)])
    return np.array(encoded, dtype=h5py.string_dtype("utf-8", width))


def _spool(folder: Path) -> IO[bytes]:
    # Unbuffered: a buffer that a full disk keeps from being flushed would raise once more on closing.
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _cannot_write(path: Path, error: Exception) -> ShardError:
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return ShardError(
        f"{path}: cannot be written ({' '.join(reason.split())}); free some space and run again"
    )
