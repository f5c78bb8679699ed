"""Read HDF5 shards (layout versions 1 to 3: docs/data-format.md).

Legend: U utterances, F frames of the shard, T frames of an utterance, S samples of an utterance,
D feature dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speechdp.data.shards.contiguous import ArrayPlace, OpenFiles, RowReader, cannot_be_opened
from speechdp.data.shards.hdf5_input import HDF5_ERRORS, open_hdf5
from speechdp.data.shards.layout import (
    SHARD_FORMAT,
    SHARD_VERSIONS,
    STRING_NAMES,
    AudioUtterance,
    ShardHeader,
    ShardIndex,
    Utterance,
    check_format,
    printable,
    string_blocks,
    utterance_crc32,
)
from speechdp.data.shards.writer import ShardWriter
from speechdp.data.signal.features import num_frames_of
from speechdp.errors import ShardError, one_line
from speechdp.files import is_of_disk

__all__ = ["AudioUtterance", "Shard", "ShardHeader", "ShardIndex", "ShardWriter", "Utterance"]

_AGAIN = "prepare the data again or copy the file again"
#: Targets read and checked at a time.
_ROWS_A_READ = 1 << 20


class Shard:
    """A shard opened for reading; thread-safe.

    Opening reads the index and checks it (format, version, checksum), leaves no HDF5 handle open and keeps
    20 bytes an utterance.  Frames and strings are read from the file when they are requested.

    Attributes:
        path: the file.
        header: values for the whole shard.
        offsets: (U+1,) int64; utterance u owns frames offsets[u]:offsets[u+1].
        sample_offsets: (U+1,) int64, the same for samples; None unless audio is stored.
        target_offsets: (U+1,) int64, the same for targets: of spectrograms the symbols, else the frames.
        crc32: (U,) uint32, checksum of each utterance's feature (or sample) bytes and target bytes.
        index_sha256: identifies the shard.
        reader: reads rows of the places below.
        targets_place: location of the targets, int32: (F,), or for spectrograms as many as symbols.
        storage: layout of the file: "contiguous", which reads fastest, "chunked", "chunked gzip", ...

    Args:
        path: the file.
        open_files: as for RowReader.

    Raises:
        ShardError: not a shard, of another version, truncated or damaged; names file and remedy.
    """

    def __init__(self, path: Path, open_files: OpenFiles | None = None) -> None:
        self.path = path
        opened = _open(path)
        self.header = opened.header
        self.offsets = opened.index.offsets
        self.sample_offsets = opened.index.sample_offsets
        symbols = opened.index.target_offsets
        self.target_offsets = self.offsets if symbols is None else symbols
        self.crc32 = opened.index.crc32
        self.index_sha256 = opened.index_sha256
        self.targets_place = opened.places["targets"]
        self._content = opened.places[self.header.content_name]
        self._strings = [opened.places[name] for name in STRING_NAMES]
        slow = {self._content.storage, self.targets_place.storage} - {"contiguous"}
        self.storage = max(slow, key=len, default="contiguous")  # a compressed array costs the most
        self.reader = RowReader(path, open_files)
        rows = self.offsets if self.sample_offsets is None else self.sample_offsets
        self._rows: npt.NDArray[np.int64] = rows

    @property
    def num_utterances(self) -> int:
        """Number of utterances (U)."""
        return len(self.offsets) - 1

    @property
    def num_frames(self) -> int:
        """Number of frames (F)."""
        return int(self.offsets[-1])

    @property
    def features_place(self) -> ArrayPlace:
        """Location of the features (F, D).  Raises ShardError in a shard of audio."""
        self._refuse_audio()
        return self._content

    @property
    def utterance_ids(self) -> tuple[str, ...]:
        """All ids; every access reads them from the file.  `utterance_id` reads one."""
        return self._all_strings(0)

    @property
    def speakers(self) -> tuple[str, ...]:
        """All speakers; every access reads them from the file."""
        return self._all_strings(1)

    @property
    def texts(self) -> tuple[str, ...]:
        """All transcripts; every access reads them from the file.  `text` reads one."""
        return self._all_strings(2)

    def utterance_id(self, utterance: int) -> str:
        """Read the id of an utterance."""
        return self._string(0, utterance)

    def speaker(self, utterance: int) -> str:
        """Read the speaker of an utterance."""
        return self._string(1, utterance)

    def text(self, utterance: int) -> str:
        """Read the transcript of an utterance."""
        return self._string(2, utterance)

    def read(self, utterance: int, *, verify: bool = True) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Read an utterance: features (T, D) in the shard's dtype, targets (T,) int32.

        Raises:
            ShardError: the file ends too early, (with `verify`) the checksum does not match, or the shard
                stores audio.
        """
        self._refuse_audio()
        return self._read(utterance, verify)

    def read_samples(
        self, utterance: int, *, verify: bool = True
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32]]:
        """Read an utterance of audio: samples (S,) int16, targets (T,) int32, T as given by num_frames_of.

        Raises:
            ShardError: as `read`, or the shard stores features.
        """
        self._require_audio()
        return self._read(utterance, verify)

    def samples(self, utterance: int) -> npt.NDArray[np.int16]:
        """Read only an utterance's samples (S,), unverified.  Raises ShardError."""
        self._require_audio()
        first, end = int(self._rows[utterance]), int(self._rows[utterance + 1])
        samples: npt.NDArray[np.int16] = self.reader.read(self._content, first, end - first)
        return samples

    def read_utterance(self, utterance: int) -> Utterance | AudioUtterance:
        """Read an utterance with its strings; verify its checksum.  Raises ShardError."""
        kind = AudioUtterance if self.header.stored == "audio" else Utterance
        content, targets = self._read(utterance, verify=True)
        names = (self.utterance_id(utterance), self.speaker(utterance), self.text(utterance))
        return kind(*names, content, targets)

    def verify(self) -> None:
        """Check every utterance's checksum, and all targets.  Raises ShardError at the first error."""
        for utterance in range(self.num_utterances):
            self._read(utterance, verify=True)
        self.check_targets()

    def check_targets(self) -> None:
        """Read all targets.  Raises ShardError at the first that is not a class index."""
        check_targets(self.path, (self.reader, self.targets_place), self, self.header.num_classes, _AGAIN)

    def damaged(self, utterance: int) -> ShardError:
        """Return the error to raise when an utterance's checksum does not match."""
        name = printable(self.utterance_id(utterance))
        return ShardError(f"{self.path}: utterance {name} is damaged (checksum); {_AGAIN}")

    def close(self) -> None:
        """Close the file; a later read reopens it."""
        self.reader.close()

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, utterance: int, verify: bool) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        first, end = int(self._rows[utterance]), int(self._rows[utterance + 1])
        content = self.reader.read(self._content, first, end - first)
        first, end = int(self.target_offsets[utterance]), int(self.target_offsets[utterance + 1])
        targets = self.reader.read(self.targets_place, first, end - first)
        if verify and utterance_crc32(content, targets) != self.crc32[utterance]:
            raise self.damaged(utterance)
        return content, targets

    def _require_audio(self) -> None:
        if self.header.stored != "audio":
            raise ShardError(
                f"{self.path}: stores {self.header.stored}, not audio; prepare the data with --store audio"
            )

    def _refuse_audio(self) -> None:
        if self.header.stored == "audio":
            raise ShardError(
                f"{self.path}: stores audio, not features; prepare the data with --store features"
            )

    def _string(self, column: int, utterance: int) -> str:
        (text,) = self.reader.read(self._strings[column], utterance, 1).tolist()
        return _decoded(self.path, text)

    def _all_strings(self, column: int) -> tuple[str, ...]:
        rows = self.reader.read(self._strings[column], 0, self.num_utterances)
        return tuple(_decoded(self.path, text) for text in rows.tolist())


def _decoded(path: Path, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:  # the file was changed after its index was checked
        raise ShardError(f"{path}: its index is damaged ({error.reason}); {_AGAIN}") from error


@dataclass(frozen=True)
class _Opened:
    header: ShardHeader
    index: ShardIndex
    index_sha256: str
    places: dict[str, ArrayPlace]


def _open(path: Path) -> _Opened:
    try:
        with open_hdf5(path) as file:
            attributes = file.attributes()
            check_format(path, attributes, SHARD_FORMAT, *SHARD_VERSIONS)
            expected = attributes.pop("index_sha256", "")
            samples, symbols = (
                file.array(name) if name in file else None for name in ("sample_offsets", "target_offsets")
            )
            index = ShardIndex(file.array("offsets"), file.array("crc32"), samples, symbols)
            columns = (string_blocks(file.dataset(name)) for name in STRING_NAMES)
            if index.sha256(attributes, columns) != expected:
                raise ShardError(f"{path}: its index is damaged (checksum); {_AGAIN}")
            header = ShardHeader.from_attributes(attributes)
            names = (header.content_name, "targets", *STRING_NAMES)
            places = {name: ArrayPlace.of(file.dataset(name)) for name in names}
    except FileNotFoundError as error:
        raise ShardError(f"{path}: no such shard; {_AGAIN}") from error
    except HDF5_ERRORS as error:
        if is_of_disk(error):
            raise ShardError(cannot_be_opened(path, error)) from error
        reason = one_line(error)
        raise ShardError(f"{path}: truncated, damaged or not HDF5 ({reason}); {_AGAIN}") from error
    _check_index(path, header, index)
    _check_places(path, header, index, places)
    return _Opened(header, index, expected, places)


def _check_index(path: Path, header: ShardHeader, index: ShardIndex) -> None:
    """Refuse an index that no `ShardWriter` wrote: another program may have written it, checksum included."""
    audio = header.stored == "audio"
    optional = (index.sample_offsets, index.target_offsets)
    offsets = [index.offsets, *(array for array in optional if array is not None)]
    sizes = {(len(index.crc32) + 1,)}
    expected_ones = [audio, header.stored == "spectrograms"]
    if [array is not None for array in optional] != expected_ones or {a.shape for a in offsets} != sizes:
        raise ShardError(f"{path}: its index has the wrong shape; {_AGAIN}")
    if any(array[0] != 0 or (np.diff(array) < 0).any() for array in offsets):
        raise ShardError(f"{path}: its offsets do not increase from 0; {_AGAIN}")
    if audio:
        num_samples: Any = np.diff(offsets[1])
        expected: Any = num_frames_of(num_samples, header.sampling_rate, header.features)
        if (np.diff(index.offsets) != expected).any():
            raise ShardError(f"{path}: its targets and samples differ in length; {_AGAIN}")


def _check_places(path: Path, header: ShardHeader, index: ShardIndex, places: dict[str, ArrayPlace]) -> None:
    num_frames = int(index.offsets[-1])
    num_rows = num_frames if index.sample_offsets is None else int(index.sample_offsets[-1])
    num_targets = num_frames if index.target_offsets is None else int(index.target_offsets[-1])
    content, targets = places[header.content_name], places["targets"]
    if not _is(content, (num_rows, *header.row_shape), header.content_dtype) or not _is(
        targets, (num_targets,), np.dtype(np.int32)
    ):
        raise ShardError(f"{path}: {content.name} or targets have the wrong shape or type; {_AGAIN}")
    if any(places[name].shape != (len(index.crc32),) for name in STRING_NAMES):
        raise ShardError(f"{path}: its strings have the wrong shape; {_AGAIN}")
    size_bytes = path.stat().st_size
    for place in places.values():
        if place.end_bytes > size_bytes:
            raise ShardError(f"{path}: {place.name} is truncated; {_AGAIN}")


def _is(place: ArrayPlace, shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
    return (place.shape, place.dtype) == (tuple(shape), dtype)


def check_targets(
    path: Path, targets: tuple[RowReader, ArrayPlace], shard: Shard, num_classes: int, remedy: str
) -> None:
    """Read all targets of a shard once, some megabytes at a time, and check that they are class indices.

    Args:
        path: the file that holds the targets: the shard, or a targets file for it.
        targets: their reader and their location.
        shard: the shard that they belong to.
        num_classes: number of classes.
        remedy: what to do about a wrong target.

    Raises:
        ShardError: names the first utterance with a target outside the classes.
    """
    reader, place = targets
    num_rows = place.shape[0]
    buffer = np.empty(min(num_rows, _ROWS_A_READ), dtype=np.int32)
    for start in range(0, num_rows, _ROWS_A_READ):
        read = buffer[: num_rows - start]
        reader.read_into(place, start, len(read), read.data)
        unsigned = read.view(np.uint32)  # makes negative targets larger than any class: one pass finds both
        if unsigned.max() < num_classes:
            continue
        row = int(np.argmax(unsigned >= num_classes))
        utterance = int(np.searchsorted(shard.target_offsets, start + row, side="right")) - 1
        raise ShardError(
            f"{path}: utterance {printable(shard.utterance_id(utterance))} has target {read[row]}, "
            f"outside the classes 0..{num_classes - 1}; {remedy}"
        )
