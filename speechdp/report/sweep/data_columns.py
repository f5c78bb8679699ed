"""The columns of the data path's table: what its stages do, and what it could deliver."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from speechdp.report.kit import formatting
from speechdp.report.kit.tables import Column, Value
from speechdp.report.runs.data_path import DataFigures
from speechdp.report.runs.derived import RunFigures
from speechdp.report.runs.results import DATA_STAGES
from speechdp.report.sweep.data_answer import waits_too_long

#: What a run's table calls `data.preprocess_on`.
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
    text: Callable[[DataFigures], str],
    *,
    is_number: bool = True,
) -> Column[RunFigures]:
    """Return a column (key, title, unit) of the figures that a run may have recorded or not."""
    key, title, unit = heading
    return Column(
        key,
        title,
        unit,
        meaning,
        lambda row: formatting.MISSING if row.data is None else text(row.data),
        lambda row: None if row.data is None else value(row.data),
        is_number=is_number,
    )


def _stage(stage: str) -> Column[RunFigures]:
    return _column(
        (f"data_{stage}_busy", _HEADINGS[stage], "cores"),
        "Busy seconds of this stage a second of training, all ranks, feeders and threads.",
        lambda data: data.busy.get(stage),
        lambda data: f"{data.busy[stage]:.2f}" if stage in data.busy else formatting.MISSING,
    )


def _busiest_feeder(data: DataFigures) -> float | None:
    return max((feeder.busy for feeder in data.feeders if feeder.busy is not None), default=None)


def _place(data: DataFigures) -> str:
    return _PLACES.get(data.preprocess_on, data.preprocess_on) or formatting.MISSING


def _place_and_threads(data: DataFigures) -> str:
    return _place(data) if data.threads is None else f"{_place(data)} ({data.threads})"


def _feeders(data: DataFigures) -> str:
    if not data.feeders:
        return formatting.MISSING
    busy = _busiest_feeder(data)
    return f"{len(data.feeders)} ({formatting.percent(busy)})"


def _wait(row: RunFigures) -> str:
    wait = row.data_wait
    if wait is None:
        return formatting.MISSING
    mean, largest = formatting.percent(wait.mean, 1), formatting.percent(wait.largest, 1)
    return mean if mean == largest else f"{mean} ({largest})"


#: In the main table, too.
DATA_WAIT: Column[RunFigures] = Column(
    "data_wait_share",
    "data wait",
    "% (most)",
    "Share of the step time without a batch to work on: mean over ranks (the rank that waits most).",
    _wait,
    lambda row: row.data_wait_share,
    is_notable=waits_too_long,
)

_LARGEST_WAIT: Column[RunFigures] = Column(
    "data_wait_share_max",
    "data wait, most",
    "%",
    "Share of the step time without a batch to work on, of the rank that waits most.",
    lambda row: formatting.percent(row.data_wait.largest if row.data_wait else None, 1),
    lambda row: row.data_wait.largest if row.data_wait else None,
    is_notable=waits_too_long,
)

#: What the stages do and what they could deliver.
_SPEEDS: tuple[Column[RunFigures], ...] = (
    *map(_stage, DATA_STAGES),
    _column(
        ("data_read_bytes_per_s", "read", "MB/s"),
        "Bytes read over seconds of reading.",
        lambda data: data.read_bytes_per_s,
        lambda data: formatting.megabytes(data.read_bytes_per_s),
    ),
    _column(
        ("data_deliverable_frames_per_s", "could deliver", "frames/s"),
        "Frames over the busy seconds of the slowest stage, all ranks or feeders: an estimate.",
        lambda data: data.deliverable_per_s,
        lambda data: formatting.estimate(data.deliverable_per_s),
    ),
    _column(
        ("padding_and_context_share", "padding, context", "%"),
        "Computed frames that nothing is learnt from: padding, and context before and after segments.",
        lambda data: data.padding,
        lambda data: formatting.percent(data.padding, 1),
    ),
)

_STORAGE = _column(
    ("storage", "storage", ""),
    "How the shards are stored; contiguous ones read as fast as the disk.",
    lambda data: data.storage or None,
    lambda data: data.storage or formatting.MISSING,
    is_number=False,
)

#: What the report's CSV holds of the data path beside the main table's columns.
CSV_COLUMNS: tuple[Column[RunFigures], ...] = (
    _LARGEST_WAIT,
    *_SPEEDS,
    _STORAGE,
    _column(
        ("loader_threads", "loader threads", ""),
        "Threads that preprocess, of a rank or feeder.",
        lambda data: data.threads,
        lambda data: formatting.MISSING if data.threads is None else str(data.threads),
    ),
    _column(
        ("preprocess_on", "prepro\u00adcessed on", ""),
        "Where features, deltas and augmentation are computed.",
        lambda data: data.preprocess_on or None,
        _place,
        is_number=False,
    ),
    _column(
        ("feeders", "feeders", ""),
        "Ranks that make batches ready for the others.",
        lambda data: len(data.feeders),
        lambda data: str(len(data.feeders)),
    ),
    _column(
        ("feeder_busy_share", "feeder busy", "%"),
        "Share of the training time that the slowest stage of the busiest feeder works; at 100 it is full.",
        _busiest_feeder,
        lambda data: formatting.percent(_busiest_feeder(data)),
    ),
)

_CONSUMED: Column[RunFigures] = Column(
    "frames_per_s",
    "trained on",
    "frames/s",
    "Frames of all ranks over the longest rank's step time.",
    lambda row: formatting.count(row.frames_per_s),
    lambda row: row.frames_per_s,
)

_PREPROCESSED = _column(
    ("preprocess_on", "prepro\u00adcessed on", "(threads)"),
    "Where features, deltas and augmentation are computed, and by how many threads of a rank or feeder.",
    lambda data: data.preprocess_on or data.threads,
    _place_and_threads,
    is_number=False,
)

_FEEDERS = _column(
    ("feeders", "feeders", "(busy, %)"),
    "Ranks that make batches ready for the others, and the busiest one's share of the training time.",
    lambda data: len(data.feeders) or None,
    _feeders,
)

#: The data path's table.
_TABLE = (DATA_WAIT, _CONSUMED, *_SPEEDS, _STORAGE, _PREPROCESSED, _FEEDERS)


def shown_columns(rows: Sequence[RunFigures]) -> list[Column[RunFigures]]:
    """Return the columns of the data path's table in which any of these runs has something."""
    return [column for column in _TABLE if any(column.value(row) is not None for row in rows)]
