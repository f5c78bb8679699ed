"""State whether training waits for data, which stage of the data path is slow, and what to try."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.report.kit import formatting
from speechdp.report.runs.data_path import BLOCKING_ORDER, Bottleneck, DataFigures, FeederLoad
from speechdp.report.runs.derived import RunFigures
from speechdp.report.runs.results import TRAINER

#: Largest acceptable share of the step time spent waiting for data, of the rank that waits most.
DATA_WAIT_AIM = 0.02
#: Share of the training time below which the busiest stage is not what batches wait for, on average.
IDLE_BOTTLENECK = 0.5
#: Share of padding and context above which another order is worth trying.
MUCH_PADDING = 0.15

#: Names of the stages in sentences.
STAGE_TITLES = {
    "read": "reading",
    "preprocess": "preprocessing",
    "collate": "collating",
    "send": "sending",
    "h2d": "copy to GPU",
}


def waits_too_long(row: RunFigures) -> bool:
    """Return whether a rank of this run waits for data longer than aimed for."""
    return row.data_wait is not None and row.data_wait.largest > DATA_WAIT_AIM


def data_advice(row: RunFigures, label: str) -> list[str]:
    """Return sentences on what is wrong with a run's data path; none if all is well."""
    sentences: list[str] = []
    if row.run.order == BLOCKING_ORDER:
        sentences.append(standing_still(row, label))
    if waits_too_long(row):
        sentences.append(f"{_waiting(row, label)} {_cause(row)}".rstrip())
    if row.data is not None and row.data.is_slow_storage:
        sentences.append(_slow_storage(row.data, label))
    return sentences


def other_runs(rows: Sequence[RunFigures], labels: dict[str, str]) -> list[str]:
    """Return sentences on the data path of the runs other than the one named."""
    blocking = [row for row in rows if row.run.order == BLOCKING_ORDER]
    sentences = [standing_still(row, labels[row.run.name]) for row in blocking]
    return [*sentences, *filter(None, [_other_waits(rows, labels)])]


def _other_waits(rows: Sequence[RunFigures], labels: dict[str, str]) -> str:
    named = [
        f"{labels[row.run.name]} ({formatting.percent(row.data_wait.largest, 1)}\u00a0%)"
        for row in rows
        if row.data_wait is not None and waits_too_long(row)
    ]
    if not named:
        return ""
    share = f"over {_aim()} of the step time"
    return f"In these other runs a rank waits for data for {share}: {', '.join(named)}."


def path_sentences(row: RunFigures, label: str) -> list[str]:
    """Describe a run's data path: the rate it could deliver, its feeders, and what is wrong with it."""
    data = row.data
    if data is None:
        return []
    sentences: list[str] = []
    if data.deliverable_per_s is not None and row.frames_per_s is not None:
        sentences.append(
            f"The data path could deliver about {formatting.estimate(data.deliverable_per_s)} frames/s, "
            f"estimated from {_basis(row, data.bottleneck)}; training used "
            f"{formatting.count(row.frames_per_s)}."
        )
    if data.feeders:
        sentences.append(f"Feeders: {', '.join(map(_feeder, data.feeders))}.")
    return sentences + data_advice(row, label)


def _waiting(row: RunFigures, label: str) -> str:
    wait = row.data_wait
    assert wait is not None
    text = f"{formatting.capital(label)} waits for data {formatting.percent(wait.mean, 1)} % of the step time"
    if formatting.percent(wait.largest, 1) != formatting.percent(wait.mean, 1):
        text += f" (rank {wait.rank}: {formatting.percent(wait.largest, 1)} %)"
    return f"{text}, where at most {_aim()} is aimed for."


def standing_still(row: RunFigures, label: str) -> str:
    """State how the blocking order delays a run."""
    share = (
        "" if row.data_wait is None else f" ({formatting.percent(row.data_wait.mean, 1)} % of the step time)"
    )
    return (
        f"With --order {BLOCKING_ORDER} training of {label} stops while data are read{share}; every other "
        "--order reads during training."
    )


def _cause(row: RunFigures) -> str:
    """Name the stage that delays the batches, and remedies; "" for a script that has its own loader."""
    data = row.data
    if data is None or data.bottleneck is None:
        is_ours = row.run.kind is TRAINER
        return "Which stage of the data path is slow was not recorded." if is_ours else ""
    stage, busy = STAGE_TITLES[data.bottleneck.stage], data.bottleneck.busy
    if row.run.order == BLOCKING_ORDER:
        return f"Most of it is {stage}: try --order pooled."
    if busy is not None and busy < IDLE_BOTTLENECK:
        return (
            f"No stage of the data path is busy all the time (most of all {stage}, "
            f"{formatting.percent(busy)} % of it), so single batches are late or the loader's threads lack "
            f"CPU cores: try fewer compute threads per rank, or {_feeders(data)}."
        )
    share = "" if busy is None else f", busy {formatting.percent(min(busy, 1.0))} % of the training time"
    remedies = _listed(_remedies(row, data))
    text = f"The bottleneck of its data path is {stage}{share}: try {remedies}."
    if "--feeders" in remedies or "--loader-threads" in remedies:
        text += (
            f" {'Feeders' if data.apart else 'Threads and feeders'} need cores that are idle; feeders help "
            "only if their threads outnumber those of the ranks they feed."
        )
    return text


def _remedies(row: RunFigures, data: DataFigures) -> list[str]:
    assert data.bottleneck is not None
    stage = data.bottleneck.stage
    on_gpu = data.preprocess_on == "cuda"
    can_use_gpu = row.run.on_gpu and not on_gpu and not data.feeders
    remedies: list[str] = []
    if stage == "read" and data.is_slow_storage:
        remedies.append("`speechdp shard`, which writes contiguous shards")
    if stage == "preprocess" and on_gpu:
        spread = "--feeders" if data.apart else "several --loader-threads"
        remedies.append(f"--preprocess-on cpu with {spread}")
    elif stage in ("preprocess", "read") and not data.apart:
        remedies.append(f"--loader-threads {2 * (data.threads or 1)}")
    if stage in ("preprocess", "h2d") and can_use_gpu:
        remedies.append("--preprocess-on gpu")
    if stage != "h2d" and not on_gpu:
        remedies.append(_feeders(data))
    wasteful = data.padding is not None and data.padding > MUCH_PADDING
    if (wasteful or not remedies) and row.run.order != "laplace":
        padding = f" ({formatting.percent(data.padding)} % are padding and context)" if wasteful else ""
        remedies.append(f"another --order, e.g. laplace{padding}")
    return remedies or ["larger batches (--batch-size)"]


def _slow_storage(data: DataFigures, label: str) -> str:
    rate = data.read_bytes_per_s
    speed = "" if rate is None else f" and are read at {formatting.megabytes(rate)} MB/s"
    return (
        f"The shards of {label} are stored {data.storage}{speed}; `speechdp shard` rewrites them as "
        "contiguous ones, which are read as fast as the disk allows."
    )


def _feeders(data: DataFigures) -> str:
    return "more --feeders" if data.feeders else "--feeders"


def _feeder(feeder: FeederLoad) -> str:
    rank = "a rank" if feeder.rank is None else f"rank {feeder.rank}"
    host = f" on {feeder.host}" if feeder.host else ""
    busy = "not timed" if feeder.busy is None else f"{formatting.percent(feeder.busy)} % busy"
    return f"{rank}{host} {busy}"


def _listed(items: Sequence[str]) -> str:
    """Write `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, (", ".join(items[:-1]), items[-1])))


def _basis(row: RunFigures, bottleneck: Bottleneck | None) -> str:
    """State what limits the rate that could be delivered."""
    if row.run.order == BLOCKING_ORDER or (row.data is not None and row.data.apart and not row.data.feeders):
        return "its stages one after the other"
    stage = "" if bottleneck is None else f" ({STAGE_TITLES[bottleneck.stage]})"
    return f"its slowest stage{stage}"


def _aim() -> str:
    return f"{formatting.percent(DATA_WAIT_AIM)} %"
