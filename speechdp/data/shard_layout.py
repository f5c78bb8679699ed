"""Define what a shard holds (layout version 1: docs/data-format.md).

Legend: U utterances, F frames of the shard, T frames of an utterance, D feature dimensions.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import speechdp
from speechdp.data.features import FeatureConfig
from speechdp.errors import ShardError

SHARD_FORMAT = "speechdp-shard"
SHARD_VERSION = 1


@dataclass(frozen=True)
class Utterance:
    """One utterance, ready to be trained on: features (T, D), targets (T,) int32 class indices."""

    utterance_id: str
    speaker: str
    text: str
    features: npt.NDArray[Any]
    targets: npt.NDArray[np.int32]


@dataclass(frozen=True)
class ShardHeader:
    """What holds for a whole shard."""

    features: FeatureConfig
    sampling_rate: int
    num_classes: int
    alignment: str
    split: str

    @property
    def feature_dim(self) -> int:
        """Number of values a frame (D)."""
        return self.features.feature_dim

    def attributes(self) -> dict[str, str | int]:
        """Return the shard's root attributes, all but the checksum."""
        return {
            "format": SHARD_FORMAT,
            "version": SHARD_VERSION,
            "features": json.dumps(self.features.to_dict(), sort_keys=True),
            "sampling_rate": self.sampling_rate,
            "feature_dim": self.feature_dim,
            "num_classes": self.num_classes,
            "alignment": self.alignment,
            "split": self.split,
            "speechdp_version": speechdp.__version__,
        }


@dataclass(frozen=True)
class ShardIndex:
    """Who owns which frames: offsets (U+1,) int64, crc32 (U,) uint32, and U strings of each kind."""

    offsets: npt.NDArray[np.int64]
    crc32: npt.NDArray[np.uint32]
    utterance_ids: tuple[str, ...]
    speakers: tuple[str, ...]
    texts: tuple[str, ...]

    def sha256(self, attributes: dict[str, Any]) -> str:
        """Return the checksum over the index and the shard's attributes, as docs/data-format.md gives it."""
        digest = hashlib.sha256()
        digest.update(json.dumps(attributes, sort_keys=True).encode())
        digest.update(np.ascontiguousarray(self.offsets, dtype="<i8").tobytes())
        digest.update(np.ascontiguousarray(self.crc32, dtype="<u4").tobytes())
        for strings in (self.utterance_ids, self.speakers, self.texts):
            digest.update(json.dumps(strings).encode())
        return digest.hexdigest()


def utterance_crc32(features: npt.NDArray[Any], targets: npt.NDArray[np.int32]) -> int:
    """Return the CRC-32 of the feature bytes followed by the target bytes (both little-endian)."""
    return zlib.crc32(targets.data, zlib.crc32(features.data)) if len(targets) else 0


def check_format(path: Path, attributes: dict[str, Any], format_name: str, version: int) -> None:
    """Refuse a file of another format, or of a layout version this speechdp does not read."""
    if attributes.get("format") != format_name:
        raise ShardError(f"{path}: is not a {format_name} file; make it with speechdp prepare")
    if attributes.get("version") != version:
        raise ShardError(
            f"{path}: has layout version {attributes.get('version')}, this speechdp reads version {version}; "
            "prepare the data again or use the speechdp that wrote it"
        )
