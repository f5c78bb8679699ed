"""Compute the figures of the data path from the records of ranks and feeders; formulas in docs/timing.md.

Seconds of the data path cover a process's whole training including warm-up, as `trained_s` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from speechdp.data.loading.stage_times import STAGES
from speechdp.report.runs.results import DataTimes, RunTiming

#: The order whose loader reads only while training waits (speechdp/data/loading/loader.py).
BLOCKING_ORDER = "blocking-sort"
#: Words that name a storage whose rows must be gathered or decompressed before use.
_SLOW_STORAGE = ("chunk", "compress", "gzip", "lzf", "szip")


@dataclass(frozen=True)
class DataWait:
    """Share of the step time without a batch, 0 to 1: mean over ranks, and the rank with the largest."""

    mean: float
    largest: float
    rank: int


@dataclass(frozen=True)
class FeederLoad:
    """How busy a feeder's slowest stage was, as a share of the training time, 0 to 1; 1: saturated."""

    rank: int | None
    host: str
    busy: float | None


@dataclass(frozen=True)
class Bottleneck:
    """The busiest stage, and its share of the training time, 0 to 1."""

    stage: str
    busy: float | None


@dataclass(frozen=True)
class DataFigures:
    """Figures of a run's data path; None or empty: not recorded.

    Attributes:
        busy: busy seconds of each stage per second of training (cores in use), all ranks and feeders.
        read_bytes_per_s: bytes read per second of reading.
        deliverable_per_s: estimated frames/s of all ranks if only the slowest stage limited them.
        padding: share of the computed frames that nothing is learnt from: padding and context.
        threads: number of preprocessing threads of a rank or feeder.
        is_slow_storage: shards are chunked or compressed.
        apart: the ranks are asynchronous and read only one batch ahead, so more threads do not help them.
    """

    busy: dict[str, float]
    read_bytes_per_s: float | None
    deliverable_per_s: float | None
    padding: float | None
    storage: str
    is_slow_storage: bool
    threads: int | None
    preprocess_on: str
    feeders: tuple[FeederLoad, ...]
    bottleneck: Bottleneck | None
    apart: bool


def data_wait(timing: RunTiming) -> DataWait | None:
    """Return the share of time that ranks wait for data; None if no step was timed."""
    shares = [(rank.data_wait_s / rank.training_s, rank.rank) for rank in timing.ranks if rank.wall_s > 0]
    if not shares:
        return None
    largest, worst = max(shares)
    return DataWait(fmean(share for share, _ in shares), largest, worst)


def data_figures(timing: RunTiming, order: str = "") -> DataFigures | None:
    """Return the figures of a run's data path, or None if it recorded none."""
    own = [rank.data for rank in timing.ranks if rank.data is not None]
    fed = [feeder.data for feeder in timing.feeders]
    everyone = own + fed
    if not everyone:
        return None
    # Ranks may count batches from feeders again on arrival, so do not add both.
    makers = fed or own
    training_s = max(rank.trained_s or rank.training_s for rank in timing.ranks)
    blocking = order == BLOCKING_ORDER
    apart = timing.exchange_s is None  # known only if the ranks take their steps together
    ways = [*((times, blocking or apart) for times in own), *((times, blocking) for times in fed)]
    storages = dict.fromkeys(times.storage for times in everyone if times.storage)
    loads = (FeederLoad(f.rank, f.host, _busy(f.data, training_s, blocking)) for f in timing.feeders)
    return DataFigures(
        busy=_busy_of_stages(everyone, training_s),
        read_bytes_per_s=_ratio(
            sum(times.read_bytes or 0.0 for times in everyone),
            sum(times.stages_s.get("read", 0.0) for times in everyone),
        ),
        # The lower of the rates of all ranks together and of all feeders together.
        deliverable_per_s=_least(_rate(own, blocking or apart), _rate(fed, blocking)),
        padding=_padding(makers),
        storage=", ".join(storages),
        is_slow_storage=any(word in name.lower() for name in storages for word in _SLOW_STORAGE),
        threads=max((times.threads for times in makers if times.threads), default=None),
        preprocess_on=", ".join(dict.fromkeys(t.preprocess_on for t in makers if t.preprocess_on)),
        feeders=tuple(loads),
        bottleneck=_bottleneck([_lanes(times, in_turn) for times, in_turn in ways], training_s),
        apart=apart,
    )


def _lanes(times: DataTimes, in_turn: bool) -> dict[str, float]:
    """Return the seconds of each lane of stages, by the lane's longest stage; lanes work in parallel.

    One thread reads and collates; preprocessing is divided among its own threads.

    Args:
        in_turn: there is only one lane, because every stage waits for the one before: in the blocking order,
            or if only one batch is made at a time.
    """
    seconds = times.stages_s
    threads = 1 if times.preprocess_on == "cuda" else times.threads or 1
    lanes = [("read", "collate"), ("preprocess",), ("send",), ("h2d",)]
    if in_turn:
        lanes, threads = [STAGES], 1
    found: dict[str, float] = {}
    for stages in lanes:
        total_s = sum(seconds.get(stage, 0.0) for stage in stages)
        if total_s > 0:
            longest = max(stages, key=lambda stage: seconds.get(stage, 0.0))
            found[longest] = total_s / (threads if stages == ("preprocess",) else 1)
    return found


def _busy(times: DataTimes, training_s: float, in_turn: bool) -> float | None:
    return _ratio(max(_lanes(times, in_turn).values(), default=0.0), training_s)


def _busy_of_stages(everyone: Sequence[DataTimes], training_s: float) -> dict[str, float]:
    if training_s <= 0:
        return {}
    sums = {stage: sum(times.stages_s.get(stage, 0.0) for times in everyone) for stage in STAGES}
    return {stage: seconds / training_s for stage, seconds in sums.items() if seconds > 0}


def _bottleneck(everyone: Sequence[dict[str, float]], training_s: float) -> Bottleneck | None:
    """Return the longest lane of all ranks and feeders."""
    lanes = [lane for lanes in everyone for lane in lanes.items()]
    if not lanes:
        return None
    stage, seconds = max(lanes, key=lambda lane: lane[1])
    return Bottleneck(stage, _ratio(seconds, training_s))


def _least(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)


def _rate(group: Sequence[DataTimes], in_turn: bool) -> float | None:
    """Return the frames/s of a group working in parallel; None unless the rate of each member is known."""
    rates = [_ratio(t.frames or 0.0, max(_lanes(t, in_turn).values(), default=0.0)) for t in group]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(rates) else None


def _padding(makers: Sequence[DataTimes]) -> float | None:
    counted = [t for t in makers if t.frames is not None and t.computed_frames]
    computed = sum(t.computed_frames or 0.0 for t in counted)
    learnt = sum(t.frames or 0.0 for t in counted)
    return min(max(1 - learnt / computed, 0.0), 1.0) if computed > 0 else None


def _ratio(amount: float, over: float) -> float | None:
    """Return amount / over, or None if either is 0, i.e. was not recorded."""
    return amount / over if amount > 0 and over > 0 else None
