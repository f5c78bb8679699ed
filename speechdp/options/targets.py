"""A notice about a data directory's own targets before a run trains on them."""

from __future__ import annotations

from collections.abc import Callable

from speechdp.data.shards.dataset import FLAT, Dataset
from speechdp.options.run import TrainOptions

_SPREAD = (
    "the targets in {data} only spread each transcript evenly over its frames, and training uses them "
    "as they are; --flat-start or --realign 1 aligns them first, which lowers word errors"
)


def warn_of_spread_targets(
    options: TrainOptions, open_data: Callable[[], Dataset], print_line: Callable[[str], None]
) -> None:
    """Print a notice if the run will train on targets that only spread each transcript evenly.

    Args:
        open_data: returns the data; not called if the options do not use the data's own alignment.
        print_line: prints the line.
    """
    if options.trusts_alignment and (dataset := open_data()).alignment == FLAT:
        print_line(_SPREAD.format(data=dataset.path))
