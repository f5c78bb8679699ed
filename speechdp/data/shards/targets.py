"""Refuse targets outside the classes: training would end only at its end, or come to nonsense by them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from speechdp.data.shards.contiguous import ArrayPlace, RowReader
from speechdp.data.shards.layout import printable
from speechdp.errors import ShardError

if TYPE_CHECKING:
    from speechdp.data.shards.shard import Shard

_ROWS_A_READ = 1 << 20


def check_targets(path: Path, targets: tuple[RowReader, ArrayPlace], shard: Shard, remedy: str) -> None:
    """Read all targets of a shard once, some megabytes at a time, and compare them with its classes.

    Args:
        path: the file they stand in: the shard, or one made for it.
        targets: what reads them, and where they are.
        shard: whose they are.
        remedy: what to do about a wrong one.

    Raises:
        ShardError: names the first utterance with a target outside the classes.
    """
    reader, place = targets
    num_rows, num_classes = place.shape[0], shard.header.num_classes
    buffer = np.empty(min(num_rows, _ROWS_A_READ), dtype=np.int32)
    for start in range(0, num_rows, _ROWS_A_READ):
        read = buffer[: num_rows - start]
        reader.read_into(place, start, len(read), read.data)
        unsigned = read.view(np.uint32)  # negative ones are larger than any class: one pass finds both
        if unsigned.max() < num_classes:
            continue
        row = int(np.argmax(unsigned >= num_classes))
        utterance = int(np.searchsorted(shard.target_offsets, start + row, side="right")) - 1
        raise ShardError(
            f"{path}: utterance {printable(shard.utterance_id(utterance))} has target {read[row]}, "
            f"outside the classes 0..{num_classes - 1}; {remedy}"
        )
