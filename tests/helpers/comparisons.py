"""Write a comparison's folder with made-up figures, in the formats of docs/compare.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechdp.experiments.compare.plan import PlannedRun
from speechdp.parallel.registry import StrategyChoice
from tests.helpers.runs import MadeUpRun, write_run

EPOCHS = 12


@dataclass(frozen=True)
class MadeUpStrategy:
    """A strategy to make runs up of: on 2 ranks; more ranks are faster and a little less accurate.

    Attributes:
        frames_per_s: of a rank.
        sent: bytes a rank sends in a second of training; None: not counted.
        ages: exchanges by age of one rank; empty for a synchronous strategy.
    """

    text: str
    frames_per_s: float = 9_000.0
    log_prob: float = -0.40
    wer: float = 0.02
    sent: float | None = 2e6
    ages: Sequence[int] = ()
    distance: float = 0.0


def realistic_strategies() -> list[MadeUpStrategy]:
    """Return strategies of which bmuf is the one to choose; easgd fails to learn."""
    return [
        MadeUpStrategy("gradient_averaging", 7_800, -0.392, 0.017, 61e6),
        MadeUpStrategy(
            "model_averaging:period=16,momentum=reset", 9_100, -0.409, 0.020, 4.4e6, distance=0.012
        ),
        MadeUpStrategy("bmuf:period=16", 9_150, -0.401, 0.018, 4.4e6, distance=0.014),
        MadeUpStrategy("ad_psgd", 9_400, -0.428, 0.035, 22e6, (40, 310, 180, 60, 12, 3, 1), 0.041),
        MadeUpStrategy(
            "parameter_server:mode=async", 8_300, -0.51, 0.08, 80e6, [5, 30, 90, 160] + [20] * 14, 0.02
        ),
        MadeUpStrategy("easgd:period=8", 9_200, -2.9, 0.61, 8e6, (400, 30), 0.38),
    ]


def write_comparison(
    out: Path,
    strategies: Sequence[MadeUpStrategy],
    ranks: Sequence[int] = (1, 2, 4),
    seeds: Sequence[int] = (1, 2, 3),
    modes: Sequence[str] = ("frames", "time"),
) -> Path:
    """Write OUT/compare.json and a run for each entry; return OUT."""
    entries = []
    for mode in modes:
        for seed in seeds:
            for size in ranks:
                sequential = MadeUpStrategy("gradient_averaging", 11_000, -0.385, 0.016, 0.0)
                for strategy in strategies if size > 1 else [sequential]:
                    entries.append(_write_entry(out, strategy, size, seed, mode))
    write_record(out, entries)
    return out


def write_record(out: Path, entries: Sequence[dict[str, Any]], **changes: Any) -> None:
    """Write OUT/compare.json with these runs."""
    content = {
        "format": "speechdp-compare",
        "version": 1,
        "settings": {"data": "9f2c", "decode_split": "test", "epochs": EPOCHS, "batch": {"global_batch": 32}},
        "runs": list(entries),
        "completed": True,
        **changes,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.json").write_text(json.dumps(content), encoding="utf-8")


def entry_of(run: PlannedRun, **changes: Any) -> dict[str, Any]:
    """Return a finished run's entry of compare.json."""
    fields = {name: getattr(run, name) for name in ("ranks", "seed", "mode", "epochs", "folder")}
    state = {"state": "complete", "message": "", "wall_s": 60.0}
    return {"strategy": run.strategy.text, **fields, **state, **changes}


def _write_entry(out: Path, strategy: MadeUpStrategy, size: int, seed: int, mode: str) -> dict[str, Any]:
    epochs = EPOCHS if mode == "frames" else round(EPOCHS * strategy.frames_per_s / 7_800)
    planned = PlannedRun(StrategyChoice(strategy.text), size, seed, mode, epochs)
    chance = (0.0, 0.004, -0.006)[seed % 3]
    gain = 0.01 if mode == "time" else 0.0
    run = MadeUpRun(
        planned.folder,
        strategy.text.partition(":")[0],
        size=size,
        frames_per_s=strategy.frames_per_s * size * (1 - 0.03 * size) * (1 + chance),
        final_log_prob=strategy.log_prob - 0.012 * (size - 1) + chance + gain,
        wer=(strategy.wer + chance / 2, strategy.wer / 2, strategy.wer * 1.6),
        num_evaluations=epochs,
    )
    path = write_run(run, out)
    _add_traffic(path, strategy)
    _add_distances(path, strategy.distance)
    return entry_of(planned)


def _add_traffic(run_dir: Path, strategy: MadeUpStrategy) -> None:
    path = run_dir / "timing.json"
    timing = json.loads(path.read_text())
    for rank in timing["ranks"]:
        if strategy.sent is not None:
            rank.update(sent_bytes=int(strategy.sent * 64), trained_s=64.0)
        rank["statistics"] = {"staleness": list(strategy.ages), "exchanges": 12} if strategy.ages else {}
    path.write_text(json.dumps(timing))


def _add_distances(run_dir: Path, largest: float) -> None:
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["replica_distance"] = largest * (1 - number / len(lines))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def failed(entry: dict[str, Any], message: str) -> dict[str, Any]:
    """Return an entry as that of a run that failed."""
    return {**entry, "state": "failed", "message": message, "wall_s": 3.0}
