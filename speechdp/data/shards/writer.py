"""Write HDF5 shards (layout versions 1 to 3: docs/data-format.md).

Legend: U utterances, F frames of the shard, T frames of an utterance, S samples of an utterance.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedReader, FileIO
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import h5py
import numpy as np
import numpy.typing as npt

from speechdp.data.shards.hdf5_file import copy_rows, create_hdf5, write_all
from speechdp.data.shards.layout import (
    STRING_NAMES,
    AudioUtterance,
    ShardHeader,
    ShardIndex,
    Utterance,
    printable,
    string_blocks,
    utterance_crc32,
)
from speechdp.data.signal.features import num_frames_of
from speechdp.errors import ConfigError, ShardError
from speechdp.files import atomic_path, cannot_be_written

_STRINGS_A_BLOCK = 4096


class ShardWriter:
    """Writes one shard, utterance by utterance; it appears under its name when the block ends without error.

    Frames and strings are first written to unnamed temporary files in the same folder, because a contiguous
    HDF5 dataset needs its size from the start.  Memory grows by 20 bytes an utterance.
    """

    def __init__(self, path: Path, header: ShardHeader) -> None:
        self.path = path
        self.header = header
        self.index_sha256 = ""
        self._frames = array("q")  # of each utterance
        self._rows = array("q")  # of the content: frames or samples
        self._symbols = array("q")  # of each utterance, if the targets are its text
        self._crc32 = array("I")
        self._widths = [1] * len(STRING_NAMES)  # of the longest string of each kind, in bytes
        self._stack = ExitStack()
        self._content: IO[bytes]
        self._targets: IO[bytes]
        self._strings: IO[bytes]

    @property
    def num_utterances(self) -> int:
        """Number of utterances added so far."""
        return len(self._frames)

    @property
    def num_frames(self) -> int:
        """Number of frames added so far."""
        return sum(self._frames)

    def __enter__(self) -> ShardWriter:
        try:
            self._content = self._stack.enter_context(_spool(self.path.parent))
            self._targets = self._stack.enter_context(_spool(self.path.parent))
            self._strings = self._stack.enter_context(_spool(self.path.parent))
        except OSError as error:
            self._stack.close()
            raise _cannot_write(self.path, error) from error
        return self

    def add(self, utterance: Utterance | AudioUtterance) -> None:
        """Append an utterance of the header's kind.

        Raises:
            ShardError: the disk is full or the file cannot be written.
            ConfigError: the utterance has values that no shard can hold.
        """
        assert isinstance(utterance, AudioUtterance) == (self.header.stored == "audio")
        with np.errstate(over="ignore"):  # _check refuses what overflowed
            content = np.ascontiguousarray(utterance.content, dtype=self.header.content_dtype)
        targets = np.ascontiguousarray(utterance.targets, dtype="<i4")
        self._check(utterance, content, targets)
        strings = [utterance.utterance_id, utterance.speaker, utterance.text]
        try:
            write_all(self._content, content.data)
            write_all(self._targets, targets.data)
            write_all(self._strings, json.dumps(strings).encode() + b"\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        if self.header.stored == "spectrograms":
            self._symbols.append(len(targets))
        self._frames.append(len(content) if self._symbols else len(targets))
        self._rows.append(len(content))
        self._crc32.append(utterance_crc32(content, targets))
        lengths = (len(text.encode()) for text in strings)
        self._widths = [max(pair) for pair in zip(self._widths, lengths, strict=True)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                self._commit()

    def _check(
        self,
        utterance: Utterance | AudioUtterance,
        content: npt.NDArray[Any],
        targets: npt.NDArray[np.int32],
    ) -> None:
        header = self.header
        where = f"{self.path}: utterance {printable(utterance.utterance_id)}"
        if content.ndim < 1 or content.shape[1:] != header.row_shape:
            expected = "(S,)" if header.stored == "audio" else f"(T, {header.feature_dim})"
            raise ConfigError(f"{where}: {header.content_name} of shape {content.shape}, not {expected}")
        num_frames = len(content)
        if header.stored == "audio":
            num_frames = num_frames_of(len(content), header.sampling_rate, header.features)
        if header.stored == "spectrograms":
            if targets.ndim != 1 or len(targets) == 0:
                raise ConfigError(f"{where}: has no text; leave it out of the corpus")
        elif targets.shape != (num_frames,):
            raise ConfigError(f"{where}: {targets.shape} targets for {num_frames} frames")
        if num_frames == 0:
            raise ConfigError(f"{where}: has no frame; leave it out of the corpus")
        if targets.min() < 0 or targets.max() >= header.num_classes:
            raise ConfigError(f"{where}: targets outside 0..{header.num_classes - 1}")
        if not np.isfinite(content).all():
            remedy = "use --dtype float32"
            if content.dtype == np.float32 or np.isnan(content).any():
                remedy = "leave it out of the corpus"
            raise ConfigError(f"{where}: features hold NaN or overflow {content.dtype.name}; {remedy}")
        for text in (utterance.utterance_id, utterance.speaker, utterance.text):
            if "\0" in text:
                raise ConfigError(f"{where}: its id, speaker or text holds a NUL character")
            if not _is_utf8(text):
                raise ConfigError(f"{where}: its id, speaker or text is not Unicode text")

    def _commit(self) -> None:
        index = ShardIndex(
            _offsets(self._frames),
            np.array(self._crc32, dtype="<u4"),
            _offsets(self._rows) if self.header.stored == "audio" else None,
            _offsets(self._symbols) if self.header.stored == "spectrograms" else None,
        )
        try:
            with atomic_path(self.path) as temporary:
                self._write_hdf5(temporary, index)
        except (OSError, RuntimeError) as error:  # HDF5 reports a failed write as either
            raise _cannot_write(self.path, error) from error

    def _write_hdf5(self, path: Path, index: ShardIndex) -> None:
        attributes = self.header.attributes()
        num_rows, num_targets = sum(self._rows), int(index.offsets[-1])
        if index.target_offsets is not None:
            num_targets = int(index.target_offsets[-1])
        present = {name: values for name, values in vars(index).items() if values is not None}
        content_shape = (num_rows, *self.header.row_shape)
        num_bytes = int(np.prod(content_shape)) * self.header.content_dtype.itemsize + 4 * num_targets
        num_bytes += sum(values.nbytes for values in present.values())
        num_bytes += self.num_utterances * sum(self._widths)
        with create_hdf5(path, num_bytes) as file:
            for name, value in attributes.items():
                file.attrs[name] = value
            for name, values in present.items():
                file[name] = values
            columns = self._write_strings(file)
            self.index_sha256 = index.sha256(attributes, map(string_blocks, columns))
            file.attrs["index_sha256"] = self.index_sha256
            content = file.create_dataset(self.header.content_name, content_shape, self.header.content_dtype)
            copy_rows(self._content, content)
            copy_rows(self._targets, file.create_dataset("targets", (num_targets,), np.dtype("<i4")))

    def _write_strings(self, file: Any) -> list[Any]:
        dtypes = [h5py.string_dtype("utf-8", width) for width in self._widths]
        columns = [
            file.create_dataset(name, (self.num_utterances,), dtype)
            for name, dtype in zip(STRING_NAMES, dtypes, strict=True)
        ]
        start = 0
        for block in _blocks_of_strings(self._strings):
            for column, dtype, texts in zip(columns, dtypes, zip(*block, strict=True), strict=True):
                column[start : start + len(block)] = np.array([text.encode() for text in texts], dtype)
            start += len(block)
        assert start == self.num_utterances, (start, self.num_utterances)
        return columns


def _blocks_of_strings(spool: IO[bytes]) -> Iterator[list[list[str]]]:
    spool.seek(0)
    lines = BufferedReader(cast(FileIO, spool), 1 << 20)
    try:
        while block := [json.loads(line) for line in islice(lines, _STRINGS_A_BLOCK)]:
            yield block
    finally:
        lines.detach()  # the owner of the spool closes it


def _offsets(lengths: array[int]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype="<i8")
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _spool(folder: Path) -> IO[bytes]:
    # Unbuffered: a buffer that cannot be flushed to a full disk would raise once more on closing.
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _cannot_write(path: Path, error: Exception) -> ShardError:
    return ShardError(cannot_be_written(path, error))
