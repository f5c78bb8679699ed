"""The columns of the data path's table: how busy its stages are, and what it could deliver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from speechdp.data.loading.stage_times import STAGES
from speechdp.report.kit import formatting
from speechdp.report.kit.columns import FigureColumn
from speechdp.report.kit.tables import Column, Value, with_figures
from speechdp.report.runs.data_path import DataFigures
from speechdp.report.runs.derived import RunFigures
from speechdp.report.sweep.data_answer import waits_too_long

#: Words for the values of `data.preprocess_on` in the table.
_PLACES = {"cpu": "CPU", "cuda": "GPU"}

_HEADINGS = {
    "read": "reading",
    "preprocess": "prepro\u00adcessing",
    "collate": "collating",
    "send": "sending",
    "h2d": "copy to GPU",
}


def _column(
    heading: tuple[str, str, str],
    meaning: str,
    value: Callable[[DataFigures], Value],
    number: Callable[[Any], str] = str,
    cell: Callable[[DataFigures], str] | None = None,
    *,
    is_number: bool = True,
) -> FigureColumn:
    """Return a column of data path figures, which a run may not have recorded.

    Args:
        heading: key, title and unit.
    """

    def written(row: RunFigures) -> str:
        return formatting.MISSING if row.data is None or cell is None else cell(row.data)

    return Column(
        *heading,
        meaning,
        lambda row: None if row.data is None else value(row.data),
        number,
        None if cell is None else written,
        is_number,
    )


def _stage(stage: str) -> FigureColumn:
    return _column(
        (f"data_{stage}_busy", _HEADINGS[stage], "cores"),
        "Busy seconds of this stage per second of training, summed over all ranks, feeders and threads.",
        lambda data: data.busy.get(stage),
        "{:.2f}".format,
    )


def _busiest_feeder(data: DataFigures) -> float | None:
    return max((feeder.busy for feeder in data.feeders if feeder.busy is not None), default=None)


def _place_and_threads(data: DataFigures) -> str:
    place = _PLACES.get(data.preprocess_on, data.preprocess_on) or formatting.MISSING
    return place if data.threads is None else f"{place} ({data.threads})"


def _feeders(data: DataFigures) -> str:
    if not data.feeders:
        return formatting.MISSING
    return f"{len(data.feeders)} ({formatting.percent(_busiest_feeder(data))})"


def _wait(row: RunFigures) -> str:
    wait = row.data_wait
    if wait is None:
        return formatting.MISSING
    mean, largest = formatting.percent(wait.mean, 1), formatting.percent(wait.largest, 1)
    return mean if mean == largest else f"{mean} ({largest})"


#: Also in the main table.
DATA_WAIT = FigureColumn(
    "data_wait_share",
    "data wait",
    "% (most)",
    "Share of the step time without a batch to work on: mean over ranks (the rank that waits most).",
    lambda row: row.data_wait_share,
    cell=_wait,
    is_notable=waits_too_long,
)

_LARGEST_WAIT = FigureColumn(
    "data_wait_share_max",
    "data wait, most",
    "%",
    "Share of the step time without a batch to work on, of the rank that waits most.",
    lambda row: row.data_wait.largest if row.data_wait else None,
)

#: How busy the stages are, and what they could deliver.
_SPEEDS: tuple[FigureColumn, ...] = (
    *map(_stage, STAGES),
    _column(
        ("data_read_bytes_per_s", "read", "MB/s"),
        "Bytes read divided by the seconds spent reading.",
        lambda data: data.read_bytes_per_s,
        formatting.megabytes,
    ),
    _column(
        ("data_deliverable_frames_per_s", "could deliver", "frames/s"),
        "Frames divided by the busy seconds of the slowest stage, over all ranks or feeders: an estimate.",
        lambda data: data.deliverable_per_s,
        formatting.estimate,
    ),
    _column(
        ("padding_and_context_share", "padding, context", "%"),
        "Frames that are computed but not trained on: padding, and context before and after segments.",
        lambda data: data.padding,
        lambda share: formatting.percent(share, 1),
    ),
)

_STORAGE = _column(
    ("storage", "storage", ""),
    "How the shards are stored; contiguous ones read as fast as the disk.",
    lambda data: data.storage or None,
    is_number=False,
)

#: Columns of the data path in the report's CSV, besides those of the main table.
CSV_COLUMNS: tuple[FigureColumn, ...] = (
    _LARGEST_WAIT,
    *_SPEEDS,
    _STORAGE,
    _column(
        ("loader_threads", "loader threads", ""),
        "Preprocessing threads of a rank or feeder.",
        lambda data: data.threads,
    ),
    _column(
        ("preprocess_on", "prepro\u00adcessed on", ""),
        "Where features, deltas and augmentation are computed.",
        lambda data: data.preprocess_on or None,
    ),
    _column(
        ("feeders", "feeders", ""),
        "Ranks that prepare batches for the others.",
        lambda data: len(data.feeders),
    ),
    _column(
        ("feeder_busy_share", "feeder busy", "%"),
        "Share of the training time for which the slowest stage of the busiest feeder is busy; at 100 it "
        "cannot do more.",
        _busiest_feeder,
    ),
)

#: Columns of the data path's table.
_TABLE: tuple[FigureColumn, ...] = (
    DATA_WAIT,
    FigureColumn(
        "frames_per_s",
        "trained on",
        "frames/s",
        "Frames of all ranks divided by the longest training time of a rank.",
        lambda row: row.frames_per_s,
        formatting.count,
    ),
    *_SPEEDS,
    _STORAGE,
    _column(
        ("preprocess_on", "prepro\u00adcessed on", "(threads)"),
        "Where features, deltas and augmentation are computed, and by how many threads of a rank or feeder.",
        lambda data: data.preprocess_on or data.threads,
        cell=_place_and_threads,
        is_number=False,
    ),
    _column(
        ("feeders", "feeders", "(busy, %)"),
        "Ranks that prepare batches for the others, and the busiest one's share of the training time.",
        lambda data: len(data.feeders) or None,
        cell=_feeders,
    ),
)


def shown_columns(rows: Sequence[RunFigures]) -> tuple[FigureColumn, ...]:
    """Return the columns of the data path's table in which any of these runs has a value."""
    return with_figures(_TABLE, rows)
