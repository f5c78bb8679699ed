"""The columns of the data path's table: what its stages do, and what it could deliver."""

from __future__ import annotations

from collections.abc import Callable

from speechdp.timing import wording
from speechdp.timing.data_answer import STAGE_TITLES, waits_too_long
from speechdp.timing.data_path import DataFigures
from speechdp.timing.derived import RunFigures
from speechdp.timing.results import DATA_STAGES
from speechdp.timing.tables import Column, Value

#: What a run's table calls `data.preprocess_on`.
_PLACES = {"cpu": "CPU", "cuda": "GPU"}

PADDING_TITLE = "padding, context"


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
        lambda row: wording.MISSING if row.data is None else text(row.data),
        lambda row: None if row.data is None else value(row.data),
        is_number=is_number,
    )


def _stage(stage: str) -> Column[RunFigures]:
    return _column(
        (f"data_{stage}_busy", STAGE_TITLES[stage], "cores"),
        "Busy seconds of this stage a second of training, all ranks, feeders and threads.",
        lambda data: data.busy.get(stage),
        lambda data: f"{data.busy[stage]:.2f}" if stage in data.busy else wording.MISSING,
    )


def _busiest_feeder(data: DataFigures) -> float | None:
    return max((feeder.busy for feeder in data.feeders if feeder.busy is not None), default=None)


def _place(data: DataFigures) -> str:
    return _PLACES.get(data.preprocess_on, data.preprocess_on) or wording.MISSING


#: The worst rank's wait; the mean over ranks is a column of the main table.
LARGEST_WAIT: Column[RunFigures] = Column(
    "data_wait_share_max",
    "data wait, most",
    "%",
    "Share of the step time without a batch to work on, of the rank that waits most.",
    lambda row: wording.percent(row.data_wait.largest if row.data_wait else None, 1),
    lambda row: row.data_wait.largest if row.data_wait else None,
    is_notable=waits_too_long,
)

_CONSUMED: Column[RunFigures] = Column(
    "frames_per_s",
    "trained on",
    "frames/s",
    "Frames of all ranks over the longest rank's step time.",
    lambda row: wording.count(row.frames_per_s),
    lambda row: row.frames_per_s,
)

_WAIT: Column[RunFigures] = Column(
    "data_wait_share",
    "data wait, mean",
    "%",
    "Share of the step time without a batch to work on, mean over ranks.",
    lambda row: wording.percent(row.data_wait_share, 1),
    lambda row: row.data_wait_share,
    is_notable=waits_too_long,
)

#: What the report's CSV holds of the data path beside the main table's columns.
CSV_COLUMNS: tuple[Column[RunFigures], ...] = (
    LARGEST_WAIT,
    *map(_stage, DATA_STAGES),
    _column(
        ("data_read_bytes_per_s", "read", "MB/s"),
        "Bytes read over seconds of reading.",
        lambda data: data.read_bytes_per_s,
        lambda data: wording.megabytes(data.read_bytes_per_s),
    ),
    _column(
        ("data_deliverable_frames_per_s", "could deliver", "frames/s"),
        "Frames over the busy seconds of the slowest stage, all ranks or feeders: an estimate.",
        lambda data: data.deliverable_per_s,
        lambda data: wording.count(data.deliverable_per_s),
    ),
    _column(
        ("padding_and_context_share", PADDING_TITLE, "%"),
        "Computed frames that nothing is learnt from: padding, and context before and after segments.",
        lambda data: data.padding,
        lambda data: wording.percent(data.padding, 1),
    ),
    _column(
        ("storage", "storage", ""),
        "How the shards are stored; contiguous ones read as fast as the disk.",
        lambda data: data.storage or None,
        lambda data: data.storage or wording.MISSING,
        is_number=False,
    ),
    _column(
        ("loader_threads", "threads", ""),
        "Threads that preprocess, of a rank or feeder.",
        lambda data: data.threads,
        lambda data: wording.MISSING if data.threads is None else str(data.threads),
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
        lambda data: wording.percent(_busiest_feeder(data)),
    ),
)

#: The data path's table.
DATA_COLUMNS = (
    _WAIT,
    *CSV_COLUMNS[: 1 + len(DATA_STAGES) + 2],
    _CONSUMED,
    *CSV_COLUMNS[3 + len(DATA_STAGES) :],
)
