"""What is told of a data directory's own targets before a training learns them."""

from __future__ import annotations

from collections.abc import Callable

from speechdp.data.shards.dataset import FLAT, Dataset
from speechdp.options.run import TrainOptions

_SPREAD = (
    "the targets in {data} only spread each transcript evenly over its frames, and training uses them "
    "as they are; --flat-start or --realign 1 aligns them first, which lowers word errors"
)


def tell_of_spread_targets(
    options: TrainOptions, open_data: Callable[[], Dataset], say: Callable[[str], None]
) -> None:
    """Say where options learn each frame's class from data whose alignment is none.

    Args:
        open_data: returns the data; not called where options do not trust their alignment.
        say: takes the line.
    """
    if options.trusts_alignment and (dataset := open_data()).alignment == FLAT:
        say(_SPREAD.format(data=dataset.path))
