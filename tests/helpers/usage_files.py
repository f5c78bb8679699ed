"""Write what a run records of utilisation and memory, with made-up figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GB = 10**9


def write_samples(
    run: Path, host: str, columns: Sequence[Sequence[float]], *, gpus: bool = False, hz: float = 10.0
) -> Path:
    """Write a sampler's file of ranks, or of GPUs a rank each, whose per cent are the columns; return it."""
    ranks = range(len(columns))
    head = {
        "kind": "gpu" if gpus else "cpu", "hz": hz, "host": host, "ranks": {str(r): 100 + r for r in ranks},
        "gpus": ["H200" for _ in ranks] if gpus else [], "gpu_of_rank": {str(r): r for r in ranks if gpus},
    }  # fmt: skip
    lines: list[dict[str, Any]] = [head]
    for n, percents in enumerate(zip(*columns, strict=True)):
        line: dict[str, Any] = {
            "t_s": n / hz,
            "ranks": [[r, 3.0 if gpus else p, GB] for r, p in enumerate(percents)],
        }
        if gpus:
            line["gpus"] = [[r, p, 2 * GB, 400.0, 1980] for r, p in enumerate(percents)]
        lines.append(line)
    path = run / "timeline" / f"samples-{host}.jsonl"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def add_memory(run: Path, rss: Sequence[float], gpu: Sequence[float] | None = None) -> None:
    """Put each rank's memory into a run's timing.json."""
    path = run / "timing.json"
    timing = json.loads(path.read_text())
    for i, entry in enumerate(timing["ranks"]):
        entry["memory"] = {"peak_rss_bytes": rss[i], **({"gpu_peak_bytes": gpu[i]} if gpu else {})}
    path.write_text(json.dumps(timing))
