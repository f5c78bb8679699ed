"""Read a run's timing.json; if a run has not written it, sum its timelines."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.data.loading.stage_times import STAGES
from speechdp.jsonl import each_line, read_lines
from speechdp.report.runs.records import (
    amount,
    files_of,
    finite,
    note_damaged_lines,
    number,
    read_object,
    whole_amount,
    words,
)
from speechdp.report.runs.results import (
    DataTimes,
    Feeder,
    GpuConditions,
    HostLoad,
    RankMemory,
    RankTiming,
    RunTiming,
)
from speechdp.timing.gpu import CLOCK_LIMITS
from speechdp.timing.steps import MEETING

DEFAULT_WARMUP_STEPS = 4
#: Events between steps.
_EVENTS = ("eval", "checkpoint", MEETING)


def read_timing(run_dir: Path, problems: list[str], *, grows: bool = False) -> RunTiming | None:
    """Return every rank's totals, and note problems of the files; None if nothing was timed.

    Args:
        grows: whether a job may be writing its timelines, as for `read_lines`.
    """
    path = run_dir / "timing.json"
    if path.is_file():
        record = read_object(path, problems)
        timing = None if record is None else _timing(record)
        if timing is not None:
            return timing
        if record is not None:
            problems.append("timing.json: ranks missing or incomplete")
    timing = _timing_from_timelines(run_dir, problems, grows)
    source = (
        f"summed timeline/ of {counted(len(timing.ranks), 'rank')} instead"
        if timing
        else "no timeline/ either"
    )
    problems.append(
        f"timing.json: not usable; {source}" if path.is_file() else f"timing.json: missing; {source}"
    )
    return timing


def read_timeline(
    path: Path, last_bytes: int | None = None
) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]], int]:
    """Read one rank's timeline.

    Args:
        last_bytes: read only this many bytes at the end of the file; None: all of it.

    Returns:
        Steps by number (the last record of a step that a resumed run repeated), the evaluations and
        checkpoints, and the number of damaged lines.

    Raises:
        OSError: the file cannot be read.
    """
    lines = read_lines(path, last_bytes)
    steps = {r["step"]: r for r in lines.records if isinstance(r.get("step"), int)}
    events = [r for r in lines.records if "event" in r]
    return dict(sorted(steps.items())), events, lines.num_damaged


def _timing(record: dict[str, Any]) -> RunTiming | None:
    """Return the content of timing.json, or None if a rank's totals are missing or incomplete."""
    entries = record.get("ranks")
    if not isinstance(entries, list) or not entries:
        return None
    ranks = [_rank_timing(entry) for entry in entries]
    kept = tuple(rank for rank in ranks if rank is not None)
    if len(kept) < len(ranks):
        return None
    warmup = record.get("warmup_steps")
    lost = record.get("lost_ranks")
    return RunTiming(
        warmup if isinstance(warmup, int) else 0,
        kept,
        number(record, "exchange_s"),
        _feeders(record),
        tuple(rank for rank in lost if isinstance(rank, int)) if isinstance(lost, list) else (),
    )


def _rank_timing(entry: Any) -> RankTiming | None:
    """Return a rank's totals, or None if the entry lacks one."""
    if not isinstance(entry, dict) or not isinstance(entry.get("spans_s"), dict):
        return None
    numbers = {key: number(entry, key) for key in ("rank", "steps", "frames", "wall_s")}
    spans = {str(name): number(entry["spans_s"], name) for name in entry["spans_s"]}
    if None in numbers.values() or None in spans.values():
        return None
    return RankTiming(
        rank=int(numbers["rank"] or 0),
        host=str(entry.get("host", "")),
        steps=int(numbers["steps"] or 0),
        frames=int(numbers["frames"] or 0),
        wall_s=numbers["wall_s"] or 0.0,
        spans_s={name: seconds or 0.0 for name, seconds in spans.items()},
        eval_s=number(entry, "eval_s") or 0.0,
        checkpoint_s=number(entry, "checkpoint_s") or 0.0,
        meeting_s=number(entry, f"{MEETING}_s") or 0.0,
        first_step=whole_amount(entry, "first_step"),
        last_step=whole_amount(entry, "last_step"),
        sent_bytes=number(entry, "sent_bytes"),
        trained_s=number(entry, "trained_s"),
        statistics=entry["statistics"] if isinstance(entry.get("statistics"), dict) else {},
        data=_data_times(entry.get("data")),
        memory=_memory(entry.get("memory")),
        load=_load(entry.get("load")),
        gpu=_gpu(entry.get("gpu")),
    )


def _memory(entry: Any) -> RankMemory:
    if not isinstance(entry, dict):
        return RankMemory()
    names = ("peak_rss_bytes", "gpu_peak_bytes", "live_rss_bytes")
    return RankMemory(*(amount(entry, name) for name in names))


def _load(entry: Any) -> HostLoad | None:
    """Return the load of a rank's host; None if not recorded."""
    if not isinstance(entry, dict):
        return None
    cores = [amount(entry, name) for name in ("own", "host", "stolen")]
    return None if None in cores else HostLoad(*(number or 0.0 for number in cores))


def _gpu(entry: Any) -> GpuConditions | None:
    """Return the conditions of a rank's GPU; None if not recorded."""
    if not isinstance(entry, dict) or (index := whole_amount(entry, "index")) is None:
        return None
    found = entry.get("limits")
    limits = None  # not read, which differs from no limits
    if isinstance(found, dict):
        limits = {name: share for name in CLOCK_LIMITS if (share := amount(found, name))}
    return GpuConditions(
        index,
        clock_mhz=amount(entry, "clock_mhz"),
        lowest_clock_mhz=amount(entry, "lowest_clock_mhz"),
        limits=limits,
        others=amount(entry, "others"),
        most_others=whole_amount(entry, "most_others"),
        others_bytes=amount(entry, "others_bytes"),
    )


def _data_times(entry: Any) -> DataTimes | None:
    """Return the totals of a rank's data path; None if none of them can be read."""
    if not isinstance(entry, dict):
        return None
    stages = entry.get("stages_s")
    seconds = {name: amount(stages, name) for name in STAGES} if isinstance(stages, dict) else {}
    times = DataTimes(
        stages_s={name: s for name, s in seconds.items() if s},
        read_bytes=amount(entry, "read_bytes"),
        frames=amount(entry, "frames"),
        computed_frames=amount(entry, "computed_frames"),
        threads=whole_amount(entry, "threads") or None,
        preprocess_on=words(entry.get("preprocess_on")),
        storage=words(entry.get("storage")),
    )
    return None if times == DataTimes() else times


def _feeders(record: dict[str, Any]) -> tuple[Feeder, ...]:
    entries = record.get("feeders")
    feeders = []
    for entry in entries if isinstance(entries, list) else []:
        times = _data_times(entry.get("data")) if isinstance(entry, dict) else None
        if times is not None:
            feeders.append(Feeder(whole_amount(entry, "rank"), words(entry.get("host")), times))
    return tuple(feeders)


def _timing_from_timelines(run_dir: Path, problems: list[str], grows: bool) -> RunTiming | None:
    num_ranks, begin = _last_size(run_dir)
    timing = _sum_of_timelines(run_dir, problems, num_ranks, begin, grows=grows)
    if timing is None and num_ranks is not None:
        # It has taken no step since its last start.
        return _sum_of_timelines(run_dir, [], None, 0, grows=grows)
    if timing is not None and num_ranks is not None:
        problems.append(
            f"timeline/: summed after step {begin} alone, since it had another number of ranks before"
        )
    return timing


def _last_size(run_dir: Path) -> tuple[int | None, int]:
    """Return a run's last number of ranks, and the step after which it applies; (None, 0): it never changed.

    Steps with another number of ranks have other shares of the batches and cannot be added to these.  With
    this number, training continued from a checkpoint at the returned step; former steps beyond it do not
    count.
    """
    try:
        starts = read_lines(run_dir / "starts.jsonl").records
    except OSError:
        return None, 0
    known = [(amount(start, "size"), amount(start, "step")) for start in starts]
    whole = [(int(size), int(step)) for size, step in known if size and step is not None]
    before = next((n for n in range(len(whole), 0, -1) if whole[n - 1][0] != whole[-1][0]), 0)
    return whole[before] if before else (None, 0)


def _sum_of_timelines(
    run_dir: Path, problems: list[str], num_ranks: int | None, begin: int, *, grows: bool
) -> RunTiming | None:
    """Sum the steps after `begin` of the first `num_ranks` ranks; None: of all."""
    ranks: list[RankTiming] = []
    warmup_used = DEFAULT_WARMUP_STEPS
    for path in files_of(run_dir / "timeline", "rank-*.jsonl", problems):
        rank = int(path.stem.removeprefix("rank-")) if path.stem[5:].isdigit() else len(ranks)
        if num_ranks is not None and rank >= num_ranks:
            continue
        sums = _Sums()
        try:
            for record in each_line(path, grows=grows):
                sums.add(record)
        except OSError as error:
            problems.append(f"timeline/{path.name}: cannot be read ({error.strerror})")
            continue
        note_damaged_lines(f"timeline/{path.name}", sums.num_damaged, problems)
        of_rank, has_warmed_up = sums.result(rank, begin)
        if not has_warmed_up:
            warmup_used = 0
        ranks.append(of_rank)
    ranks = [rank for rank in ranks if rank.steps > 0]
    return RunTiming(warmup_used, tuple(ranks)) if ranks else None


class _Sums:
    """Collects the lines of one rank's timeline compactly, because a long run has hundreds of thousands.

    Attributes:
        num_damaged: number of lines without a record.
    """

    def __init__(self) -> None:
        self.num_damaged = 0
        #: Evaluations, checkpoints and meetings: the preceding step, name, seconds.
        self._events: list[tuple[float, str, float]] = []
        #: Columns with one row for each line of a step, and for each of its spans.
        self._step, self._frames, self._wall_s = array("d"), array("d"), array("d")
        self._span_line, self._span_name, self._span_s = array("q"), array("q"), array("d")
        self._names: dict[str, int] = {}

    def add(self, record: dict[str, Any] | None) -> None:
        """Add a line; None: a damaged one."""
        if record is None:
            self.num_damaged += 1
            return
        event = words(record.get("event"))
        if event in _EVENTS:
            self._events.append((self._step[-1] if self._step else 0, event, number(record, "wall") or 0.0))
        step = number(record, "step")
        if step is None or not isinstance(record["step"], int):
            return
        if self._step and step <= self._step[-1]:
            # Restarted from a checkpoint: events after the checkpoint do not count, like its steps.
            self._events = [one for one in self._events if one[0] < step]
        for name, seconds in _span_pieces(record):
            self._span_line.append(len(self._step))
            self._span_name.append(self._names.setdefault(name, len(self._names)))
            self._span_s.append(seconds)
        self._step.append(step)
        self._frames.append(number(record, "frames") or 0.0)
        self._wall_s.append(number(record, "wall") or 0.0)

    def result(self, rank: int, begin: int) -> tuple[RankTiming, bool]:
        """Return the totals after step `begin`, and whether the first steps were left out as warm-up."""
        # Use the last line of a step that a resumed run repeated.
        lines = {step: line for line, step in enumerate(self._step)}
        ordered = [lines[step] for step in sorted(lines) if step > begin]
        kept = ordered[DEFAULT_WARMUP_STEPS:] or ordered
        counts, names = set(kept), list(self._names)
        spans_s: dict[str, float] = {}
        for line, name, seconds in zip(self._span_line, self._span_name, self._span_s, strict=True):
            if line in counts:
                spans_s[names[name]] = spans_s.get(names[name], 0.0) + seconds
        timing = RankTiming(
            rank=rank,
            host="",
            steps=len(kept),
            frames=sum(int(self._frames[line]) for line in kept),
            wall_s=math.fsum(self._wall_s[line] for line in kept),
            spans_s=spans_s,
            eval_s=self._event_s("eval", begin),
            checkpoint_s=self._event_s("checkpoint", begin),
            meeting_s=self._event_s(MEETING, int(self._step[kept[0]]) - 1, begun=True) if kept else 0.0,
            # Known only if earlier steps are left out, so that these are not all steps of the run.
            first_step=int(self._step[kept[0]]) if begin and kept else None,
            last_step=int(self._step[kept[-1]]) if begin and kept else None,
        )
        return timing, len(ordered) > DEFAULT_WARMUP_STEPS

    def _event_s(self, name: str, begin: int, *, begun: bool = False) -> float:
        """Return the total time of the events of one kind that follow a step after `begin`, s.

        With `begin` 0, events before the first step also count.

        Args:
            begun: exclude events before the first step.
        """
        counted_from = begin + 1 if begin or begun else 0
        return math.fsum(s for step, event, s in self._events if event == name and step >= counted_from)


def _span_pieces(step: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (span, seconds) of a step's well-formed pieces."""
    pieces = step.get("spans")
    if not isinstance(pieces, list):
        return []
    return [(str(p[0]), finite(p[2]) or 0.0) for p in pieces if isinstance(p, list) and len(p) == 3]
