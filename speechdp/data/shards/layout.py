"""Define what a shard holds (layout versions 1 to 3: docs/data-format.md).

Legend: U utterances, F frames of the shard, T frames of an utterance, S samples (or symbols) of an utterance,
D feature dimensions.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import speechdp
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ShardError

#: What a shard stores beside the targets: computed features, the samples to compute them from, or
#: spectrograms to be learnt from texts, whose targets are the symbols of each utterance, not one per frame.
Stored = Literal["features", "audio", "spectrograms"]

SHARD_FORMAT = "speechdp-shard"
#: The layout version of each kind of shard; readers know all of them.
VERSION_OF: dict[Stored, int] = {"features": 1, "audio": 2, "spectrograms": 3}
SHARD_VERSIONS = tuple(VERSION_OF.values())
STRING_NAMES = ("utterance_id", "speaker", "text")

_STRINGS_A_BLOCK = 16384


@dataclass(frozen=True)
class Utterance:
    """One utterance, ready for training: features (T, D), targets (T,) int32 class indices.

    In a shard of spectrograms the targets are its symbols, (S,) int32.
    """

    utterance_id: str
    speaker: str
    text: str
    features: npt.NDArray[Any]
    targets: npt.NDArray[np.int32]

    @property
    def content(self) -> npt.NDArray[Any]:
        """The array that a shard stores beside the targets."""
        return self.features


@dataclass(frozen=True)
class AudioUtterance:
    """One utterance whose features are not computed yet: samples (S,) int16, targets (T,) int32."""

    utterance_id: str
    speaker: str
    text: str
    samples: npt.NDArray[np.int16]
    targets: npt.NDArray[np.int32]

    @property
    def content(self) -> npt.NDArray[Any]:
        """The array that a shard stores beside the targets."""
        return self.samples


@dataclass(frozen=True)
class ShardHeader:
    """Values for a whole shard; in an audio shard, `features` says what is computed from the samples."""

    features: FeatureConfig
    sampling_rate: int
    num_classes: int
    alignment: str
    split: str
    stored: Stored = "features"

    @property
    def feature_dim(self) -> int:
        """Number of values per frame (D)."""
        return self.features.feature_dim

    @property
    def content_name(self) -> str:
        """Name of the dataset beside the targets."""
        return "samples" if self.stored == "audio" else "features"

    @property
    def content_dtype(self) -> np.dtype[Any]:
        """Type of the values of that dataset."""
        return np.dtype("<i2") if self.stored == "audio" else np.dtype(self.features.dtype).newbyteorder("<")

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row of that dataset: a sample or a frame."""
        return () if self.stored == "audio" else (self.feature_dim,)

    def attributes(self) -> dict[str, str | int]:
        """Return the shard's root attributes without the checksum."""
        values: dict[str, str | int] = {
            "format": SHARD_FORMAT,
            "version": VERSION_OF[self.stored],
            "features": json.dumps(self.features.to_dict(), sort_keys=True),
            "sampling_rate": self.sampling_rate,
            "feature_dim": self.feature_dim,
            "num_classes": self.num_classes,
            "alignment": self.alignment,
            "split": self.split,
            "speechdp_version": speechdp.__version__,
        }
        return values if self.stored == "features" else values | {"stored": self.stored}

    @classmethod
    def from_attributes(cls, attributes: dict[str, Any]) -> ShardHeader:
        """Read the result of `attributes`.  Raises KeyError, ValueError or ConfigError on anything else."""
        stored = stored_in(attributes)
        return cls(
            features=FeatureConfig.from_dict(json.loads(attributes["features"])),
            sampling_rate=attributes["sampling_rate"],
            num_classes=attributes["num_classes"],
            alignment=attributes["alignment"],
            split=attributes["split"],
            stored=stored,
        )


@dataclass(frozen=True)
class ShardIndex:
    """The rows of each utterance: offsets (U+1,) int64 of frames; and checksums: crc32 (U,) uint32.

    For audio also sample_offsets (U+1,) int64; for spectrograms target_offsets (U+1,) int64.
    """

    offsets: npt.NDArray[np.int64]
    crc32: npt.NDArray[np.uint32]
    sample_offsets: npt.NDArray[np.int64] | None = None
    target_offsets: npt.NDArray[np.int64] | None = None

    def sha256(self, attributes: dict[str, Any], columns: Iterable[Iterable[list[str]]]) -> str:
        """Return the checksum over the index and the shard's attributes, as defined in docs/data-format.md.

        Args:
            attributes: all root attributes except the checksum.
            columns: for each of STRING_NAMES, its strings in blocks.  They are hashed as one JSON list, but
                never all held in memory.
        """
        digest = hashlib.sha256(json.dumps(attributes, sort_keys=True).encode())
        digest.update(np.ascontiguousarray(self.offsets, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.crc32, dtype="<u4").data)
        for offsets in (self.sample_offsets, self.target_offsets):
            if offsets is not None:
                digest.update(np.ascontiguousarray(offsets, dtype="<i8").data)
        for blocks in columns:
            separator = "["
            for block in blocks:
                digest.update((separator + json.dumps(block)[1:-1]).encode())
                separator = ", "
            digest.update(b"[]" if separator == "[" else b"]")
        return digest.hexdigest()


def string_blocks(dataset: Any) -> Iterator[list[str]]:
    """Yield the strings of an open h5py dataset, some thousands at a time.

    Raises:
        UnicodeDecodeError: a string is damaged.
    """
    for start in range(0, dataset.shape[0], _STRINGS_A_BLOCK):
        yield [text.decode() for text in dataset[start : start + _STRINGS_A_BLOCK].tolist()]


def stored_in(attributes: dict[str, Any]) -> Stored:
    """Return what a shard (or data.json) with these attributes stores.

    Raises:
        ValueError: the layout version does not match.
        KeyError: there is no version, or the kind of content is unknown.
    """
    stored: Stored = attributes.get("stored", "features")
    if VERSION_OF[stored] != attributes["version"]:
        raise ValueError(f"version {attributes['version']} does not store {stored}")
    return stored


def printable(utterance_id: str) -> str:
    """Return an utterance's id in a form that fits a message of one line."""
    return utterance_id if utterance_id.isprintable() else ascii(utterance_id)


def utterance_crc32(content: npt.NDArray[Any], targets: npt.NDArray[np.int32]) -> int:
    """Return the CRC-32 of the feature (or sample) bytes, then the target bytes, both little-endian."""
    return zlib.crc32(targets.data, zlib.crc32(content.data)) if len(targets) and len(content) else 0


def check_format(path: Path, attributes: dict[str, Any], format_name: str, *versions: int) -> None:
    """Refuse a file of another format, or of a layout version that this speechdp does not read."""
    if attributes.get("format") != format_name:
        raise ShardError(f"{path}: is not a {format_name} file; make it with speechdp prepare")
    if attributes.get("version") not in versions:
        known = ", ".join(map(str, versions))
        raise ShardError(
            f"{path}: has layout version {attributes.get('version')}, this speechdp reads version {known}; "
            "prepare the data again or use the speechdp that wrote it"
        )
