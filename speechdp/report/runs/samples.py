"""Read the samples that a sampler (`sampler.py`) has written into arrays."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechdp.errors import RunError
from speechdp.jsonl import each_line
from speechdp.report.runs.records import finite

Array = NDArray[np.float64]

#: A rank as the sampler writes it; "01" is not a rank.
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")
#: Largest number of a rank or GPU.
_MOST = 10**9


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of one host; N samples, R ranks, G GPUs; values that were not read are NaN.

    Attributes:
        kind: `gpu` or `cpu`, to which utilisation refers.
        hz: requested samples per second; after hours a sampler takes fewer.
        host: name of the host.
        ranks: the ranks, ascending: the columns of the (N, R) arrays.
        gpus: names of the GPUs: the columns of the (N, G) arrays.
        gpu_numbers: NVML's index of each column's GPU; in older files, the number of the column.
        gpu_of_rank: column of the GPU that each rank uses, if recorded.
        t_s: (N,) time of each sample since the recorder's origin, s.
        section: (N,) number of the head line above each sample; a resumed run writes another head line.
        cpu_percent: (N, R) CPU use of a rank's process, all threads; 100 is one core.
        rss_bytes: (N, R) resident memory of a rank's process.
        gpu_percent: (N, G) share of time in which a kernel ran, %.
        gpu_memory_bytes: (N, G) memory in use on the GPU, by any process.
        power_w: (N, G) power, W.
        clock_mhz: (N, G) SM clock, MHz.
        clock_reasons: (N, G) bits of the reasons why the clock was throttled (CLOCK_LIMITS in timing/gpu.py).
        others: (N, G) number of processes on the GPU outside of the job; read about once a second.
        others_bytes: (N, G) memory that they hold.
        notices: the sampler's notes on what it could not read.
        num_damaged: number of damaged lines, which were skipped.
    """

    kind: str
    hz: float
    host: str
    ranks: tuple[int, ...]
    gpus: tuple[str, ...]
    gpu_numbers: tuple[int, ...]
    gpu_of_rank: dict[int, int]
    t_s: Array
    section: NDArray[np.int64]
    cpu_percent: Array
    rss_bytes: Array
    gpu_percent: Array
    gpu_memory_bytes: Array
    power_w: Array
    clock_mhz: Array
    clock_reasons: Array
    others: Array
    others_bytes: Array
    notices: tuple[str, ...] = ()
    num_damaged: int = 0

    @property
    def elapsed_s(self) -> Array:
        """(N,) `t_s`, with each section that begins before the previous one ends moved behind it, s."""
        elapsed, end = self.t_s.copy(), -np.inf
        for section in np.unique(self.section):
            chosen = self.section == section
            elapsed[chosen] += max(0.0, end + 1 / self.hz - float(elapsed[chosen].min()))
            end = float(elapsed[chosen].max())
        return elapsed


def read_samples(path: Path, *, grows: bool = False) -> Samples:
    """Read a file of samples, skipping damaged lines.

    Args:
        grows: whether a sampler may be writing it, as for `read_lines`.

    Raises:
        RunError: the file cannot be read, or has no head line.
    """
    lines = _Lines()
    try:
        for record in each_line(path, grows=grows):
            lines.add(record)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be read ({error.strerror}); permit reading it, or remove it"
        ) from error
    heads = lines.heads
    if not heads:
        raise RunError(f"{path}: holds no samples (no head line); remove the file")
    hz = finite(heads[-1].get("hz")) or 0.0
    ranks = sorted({rank for head in heads for rank in _numbered(head.get("ranks"))})
    names = max((_names(head.get("gpus")) for head in heads), key=len)
    of_ranks = lines.of_ranks.table(len(lines.t_s), ranks)
    of_gpus = lines.of_gpus.table(len(lines.t_s), range(len(names)))
    of_others = lines.of_others.table(len(lines.t_s), range(len(names)))
    return Samples(
        kind="gpu" if names else "cpu",
        hz=hz if hz > 0 else 10.0,
        host=str(heads[-1].get("host", "")),
        ranks=tuple(ranks),
        gpus=names,
        gpu_numbers=_gpu_numbers(heads, len(names)),
        gpu_of_rank=_gpu_of_rank(heads[-1].get("gpu_of_rank"), len(names)),
        t_s=np.array(lines.t_s),
        section=np.array(lines.sections),
        cpu_percent=of_ranks[0],
        rss_bytes=of_ranks[1],
        gpu_percent=of_gpus[0],
        gpu_memory_bytes=of_gpus[1],
        power_w=of_gpus[2],
        clock_mhz=of_gpus[3],
        clock_reasons=of_gpus[4],
        others=of_others[0],
        others_bytes=of_others[1],
        notices=tuple(lines.notices),
        num_damaged=lines.num_damaged,
    )


class _Lines:
    """Collects the lines of a file compactly, because a run of weeks has millions of samples.

    Attributes:
        heads, notices, num_damaged: head lines, notices, and number of damaged lines.
        t_s, sections: time and section of each sample.
        of_ranks, of_gpus, of_others: rows of the samples.
    """

    def __init__(self) -> None:
        self.heads: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.num_damaged = 0
        self.t_s, self.sections = array("d"), array("q")
        # Earlier versions did not read the reasons of throttling: their GPU rows have four values.
        self.of_ranks, self.of_gpus, self.of_others = _Rows(2), _Rows(5, least=4), _Rows(2)

    def add(self, record: dict[str, Any] | None) -> None:
        """Add a line; None: a damaged one."""
        if record is None:
            self.num_damaged += 1
            return
        if "kind" in record:
            self.heads.append(record)
        if "notice" in record:
            self.notices.append(str(record["notice"]))
        if self.heads and (t_s := finite(record.get("t_s"))) is not None:
            self.of_ranks.add(len(self.t_s), record.get("ranks"))
            self.of_gpus.add(len(self.t_s), record.get("gpus"))
            self.of_others.add(len(self.t_s), record.get("others"))
            self.t_s.append(t_s)
            self.sections.append(len(self.heads) - 1)


class _Rows:
    """The rows of samples: each has the number of a rank or GPU, and `least` to `depth` values."""

    def __init__(self, depth: int, *, least: int | None = None) -> None:
        self._depth = depth
        self._least = depth if least is None else least
        self._samples, self._numbers, self._values = array("q"), array("q"), array("d")

    def add(self, sample: int, rows: Any) -> None:
        """Add the rows of a sample, skipping malformed ones; a value that is not a number becomes NaN."""
        for row in rows if isinstance(rows, list) else []:
            whole = isinstance(row, list) and self._least <= len(row) - 1 <= self._depth
            if whole and isinstance(row[0], int) and 0 <= row[0] <= _MOST:
                self._samples.append(sample)
                self._numbers.append(row[0])
                values = [finite(entry) for entry in row[1:]]
                values += [None] * (self._depth - len(values))
                self._values.extend(math.nan if value is None else value for value in values)

    def table(self, num_samples: int, columns: Sequence[int]) -> Array:
        """Return the values as an array (depth, N, columns); NaN if there are none.

        Args:
            num_samples: N.
            columns: number of the rank or GPU of each column, ascending.
        """
        known, numbers = np.array(columns, dtype=np.int64), np.array(self._numbers)
        place = np.searchsorted(known, numbers)
        is_known = np.isin(numbers, known)
        table = np.full((num_samples, len(known), self._depth), np.nan)
        values = np.array(self._values).reshape(-1, self._depth)
        table[np.array(self._samples)[is_known], place[is_known]] = values[is_known]
        return np.moveaxis(table, 2, 0)


def _numbered(ranks: Any) -> list[int]:
    """Return the keys of an object that are ranks; JSON keys are always strings."""
    return [int(key) for key in ranks if _RANK.fullmatch(key)] if isinstance(ranks, dict) else []


def _names(gpus: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in gpus) if isinstance(gpus, list) else ()


def _gpu_numbers(heads: Sequence[dict[str, Any]], num_gpus: int) -> tuple[int, ...]:
    """Return the GPU index of each column, from the last head line that has one."""
    numbers = list(range(num_gpus))
    for head in heads:
        found = head.get("gpu_numbers")
        for column, number in enumerate(found[:num_gpus] if isinstance(found, list) else []):
            if isinstance(number, int) and 0 <= number <= _MOST:
                numbers[column] = number
    return tuple(numbers)


def _gpu_of_rank(used: Any, num_gpus: int) -> dict[int, int]:
    pairs = {rank: used[str(rank)] for rank in _numbered(used)}
    return {rank: gpu for rank, gpu in pairs.items() if isinstance(gpu, int) and 0 <= gpu < num_gpus}
