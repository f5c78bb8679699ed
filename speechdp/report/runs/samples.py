"""Read what a sampler has written (`sampler.py`) into arrays."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechdp.errors import RunError
from speechdp.jsonl import read_lines
from speechdp.report.runs.records import finite

Array = NDArray[np.float64]

#: A rank as the sampler writes it: "01" is none.
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of one host; N samples, R ranks, G GPUs; what was not read is NaN.

    Attributes:
        kind: `gpu` or `cpu`: what utilisation is of.
        hz: samples a second that were asked for.
        host: where they were taken.
        ranks: numbers of the ranks, ascending: the columns of the (N, R) arrays.
        gpus: names of the GPUs: the columns of the (N, G) arrays.
        gpu_of_rank: column of the GPU that a rank uses, where that was recorded.
        t_s: (N,) time of each sample, s, counted from the recorder's origin.
        section: (N,) which head line a sample stands under: a resumed run begins another.
        cpu_percent: (N, R) CPU use of a rank's process, all threads; 100 is one core.
        rss_bytes: (N, R) resident memory of a rank's process.
        gpu_percent: (N, G) share of time in which a kernel ran, %.
        gpu_memory_bytes: (N, G) memory in use on the GPU, by whomever.
        power_w: (N, G).
        clock_mhz: (N, G) SM clock.
        notices: what could not be read, as the sampler put it.
        num_damaged: lines that were passed over.
    """

    kind: str
    hz: float
    host: str
    ranks: tuple[int, ...]
    gpus: tuple[str, ...]
    gpu_of_rank: dict[int, int]
    t_s: Array
    section: NDArray[np.int64]
    cpu_percent: Array
    rss_bytes: Array
    gpu_percent: Array
    gpu_memory_bytes: Array
    power_w: Array
    clock_mhz: Array
    notices: tuple[str, ...] = ()
    num_damaged: int = 0

    @property
    def elapsed_s(self) -> Array:
        """(N,) `t_s`, where a section that begins before the end of the one before it is moved after it."""
        elapsed, end = self.t_s.copy(), -np.inf
        for section in np.unique(self.section):
            chosen = self.section == section
            elapsed[chosen] += max(0.0, end + 1 / self.hz - float(elapsed[chosen].min()))
            end = float(elapsed[chosen].max())
        return elapsed


def read_samples(path: Path) -> Samples:
    """Read a file of samples, passing over damaged lines.

    Raises:
        RunError: the file cannot be read, or holds no head line.
    """
    try:
        lines = read_lines(path)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be read ({error.strerror}); permit reading it, or remove it"
        ) from error
    heads = [record for record in lines.records if "kind" in record]
    if not heads:
        raise RunError(f"{path}: holds no samples (no head line); remove the file")
    sections, kept = [], []
    num_heads = 0
    for record in lines.records:
        num_heads += "kind" in record
        if num_heads and finite(record.get("t_s")) is not None:
            sections.append(num_heads - 1)
            kept.append(record)
    hz = finite(heads[-1].get("hz")) or 0.0
    ranks = sorted({rank for head in heads for rank in _numbered(head.get("ranks"))})
    names = max((_names(head.get("gpus")) for head in heads), key=len)
    of_ranks = _table(kept, "ranks", {rank: i for i, rank in enumerate(ranks)}, 2)
    of_gpus = _table(kept, "gpus", {i: i for i in range(len(names))}, 4)
    return Samples(
        kind="gpu" if names else "cpu",
        hz=hz if hz > 0 else 10.0,
        host=str(heads[-1].get("host", "")),
        ranks=tuple(ranks),
        gpus=names,
        gpu_of_rank=_gpu_of_rank(heads[-1].get("gpu_of_rank"), len(names)),
        t_s=np.array([record["t_s"] for record in kept], dtype=np.float64),
        section=np.array(sections, dtype=np.int64),
        cpu_percent=of_ranks[0],
        rss_bytes=of_ranks[1],
        gpu_percent=of_gpus[0],
        gpu_memory_bytes=of_gpus[1],
        power_w=of_gpus[2],
        clock_mhz=of_gpus[3],
        notices=tuple(str(record["notice"]) for record in lines.records if "notice" in record),
        num_damaged=lines.num_damaged,
    )


def _table(records: list[dict[str, Any]], key: str, columns: dict[int, int], depth: int) -> Array:
    """Return (depth, N, columns): the values that follow each row's number; NaN where there is none."""
    places, found = [], []
    for n, record in enumerate(records):
        rows = record.get(key)
        for row in rows if isinstance(rows, list) else []:
            whole = isinstance(row, list) and len(row) == depth + 1 and isinstance(row[0], int)
            if whole and row[0] in columns:
                places.append(n * len(columns) + columns[row[0]])
                found.append(row)
    values = np.full((len(records) * len(columns), depth), np.nan)
    if found:
        values[places] = _numbers(found)[:, 1:]
    return np.moveaxis(values.reshape(len(records), len(columns), depth), 2, 0)


def _numbers(rows: list[list[Any]]) -> Array:
    """Return the rows as numbers; NaN for what is none."""
    try:  # an hour of samples has a million
        values = np.array(rows, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        values = np.array([[finite(entry) for entry in row] for row in rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _numbered(ranks: Any) -> list[int]:
    """Return the keys of an object that are ranks: JSON has no other keys than strings."""
    return [int(key) for key in ranks if _RANK.fullmatch(key)] if isinstance(ranks, dict) else []


def _names(gpus: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in gpus) if isinstance(gpus, list) else ()


def _gpu_of_rank(used: Any, num_gpus: int) -> dict[int, int]:
    pairs = {rank: used[str(rank)] for rank in _numbered(used)}
    return {rank: gpu for rank, gpu in pairs.items() if isinstance(gpu, int) and 0 <= gpu < num_gpus}
