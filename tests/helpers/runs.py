"""Write run and sweep directories with made-up figures, in the formats of docs/run-directory.md."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPANS = ("data_wait", "h2d", "forward", "backward", "comm", "update")


@dataclass
class MadeUpRun:
    """A run to write.  Shares are of each rank's step time; `rank_spans` overrides `spans` by rank.

    `data` is every rank's entry of the data path, `feeders` those of the feeders; None leaves them out.
    `others` is how many cores of the host work for others, `stolen` how many it lacks; None: not recorded.
    `gpu` is the entry of every rank's GPU, which the ranks share.
    `together`: its ranks take their steps together, as is known of runs with a data path.
    `last_gain` is by how much the last evaluation is above the one before, nats/frame.
    """

    name: str
    strategy_name: str = "model_averaging"
    period: str | None = "16"
    size: int = 2
    frames_per_s: float = 20_000.0
    spans: Sequence[float] = (0.01, 0.0, 0.28, 0.56, 0.08, 0.05)
    rank_spans: dict[int, Sequence[float]] = field(default_factory=dict)
    final_log_prob: float = -0.40
    wer: tuple[float, float, float] | None = (0.013, 0.003, 0.027)
    num_evaluations: int = 12
    completed: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    data: Any = None
    feeders: Any = None
    others: float | None = 0.1
    stolen: float = 0.0
    gpu: Any = None
    together: bool = True
    last_gain: float | None = None


def write_run(run: MadeUpRun, parent: Path) -> Path:
    """Write RUN/run.json, metrics.jsonl, timing.json, wer-test.json and completed.json; return RUN."""
    path = parent / run.name
    path.mkdir(parents=True)
    strategy = (
        f"{run.strategy_name}:every=1" if run.period is None else f"{run.strategy_name}:period={run.period}"
    )
    _write(path / "run.json", {
        "format": "speechdp-run", "version": 1, "strategy": strategy, "strategy_name": run.strategy_name,
        "period": run.period or "1", "backend": "horovod", "size": run.size, "hosts": ["node-a"] * run.size,
        "device": "cpu", "seed": 1, "preset": "tiny", "num_parameters": 1_234_567, "batch_size": 16,
        "command": ["speechdp", "train", "data", str(path), "--strategy", strategy],
        "versions": {"python": "3.11.2", "torch": "2.13.0", "horovod": "0.28.1", "Open MPI": "4.1.8"},
        "data": {"path": "/data/fsdd", "checksum": "9f2c" * 16}, "started": "2026-11-20T15:42:10",
        **run.settings,
    })  # fmt: skip
    if run.num_evaluations:
        lines = [json.dumps(_evaluation(run, i)) for i in range(1, run.num_evaluations + 1)]
        (path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    ranks = [_rank(run, rank) for rank in range(run.size)]
    fed = {} if run.feeders is None else {"feeders": run.feeders}
    if run.together and (run.data is not None or run.feeders is not None):
        fed["exchange_s"] = min(60 * run.rank_spans.get(rank, run.spans)[4] for rank in range(run.size))
    _write(path / "timing.json", {"warmup_steps": 4, "ranks": ranks, **fed})
    if run.wer is not None:
        rate, low, high = run.wer
        _write(path / "wer-test.json", {
            "split": "test", "grammar": "word-loop", "words": 300, "wer": rate, "wer_low": low,
            "wer_high": high, "insertions": 1, "deletions": 1, "substitutions": round(300 * rate) - 2,
            "hypotheses": "hypotheses/test.txt",
        })  # fmt: skip
    if run.completed:
        _write(path / "completed.json", {"completed": True})
    return path


def add_utterance_errors(run: Path, errors: Sequence[int], words: int = 10) -> None:
    """Give a run errors by utterance, of so many words each, and a wer-test.json that goes with them."""
    path, name = run / "wer-test.json", "hypotheses/test.errors"
    rate = sum(errors) / (words * len(errors))
    found = json.loads(path.read_text()) | {
        "words": words * len(errors), "wer": rate, "wer_low": 0.8 * rate, "wer_high": 1.2 * rate,
        "errors": name, "insertions": 0, "deletions": 0, "substitutions": sum(errors),
    }  # fmt: skip
    _write(path, found)
    (run / name).parent.mkdir(exist_ok=True)
    lines = (f"u{place} 0 0 {number} {words}\n" for place, number in enumerate(errors))
    (run / name).write_text("".join(lines), encoding="utf-8")


def disturb(run: Path, *, forward: float, others: float) -> None:
    """Multiply the time of a run's forward passes, while more cores are busy with other work."""
    path = run / "timing.json"
    timing = json.loads(path.read_text())
    for rank in timing["ranks"]:
        rank["spans_s"]["forward"] *= forward
        rank["load"]["host"] += others
    _write(path, timing)


def write_sweep(out: Path, runs: Sequence[MadeUpRun], missing: Sequence[str] = ()) -> Path:
    """Write OUT/sweep.json and its runs; `missing` are listed without a folder.  Return OUT."""
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        write_run(run, out)
    names = [run.name for run in runs] + list(missing)
    _write(out / "sweep.json", {"format": "speechdp-sweep", "version": 1, "runs": names})
    return out


def add_newer_figures(run: Path) -> None:
    """Add the figures that older runs lack: frame accuracy without silence and sentence error rate."""
    metrics, errors = run / "metrics.jsonl", run / "wer-test.json"
    if metrics.is_file():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        lines = [{**line, "heldout_frame_accuracy_no_silence": 0.625} for line in lines]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if errors.is_file():
        _write(errors, {**json.loads(errors.read_text()), "ser": 0.25, "ser_low": 0.2, "ser_high": 0.3})


def realistic_sweep() -> list[MadeUpRun]:
    """Return a sweep as two CPU ranks might give it: period 16 is the one to choose."""
    return [
        MadeUpRun("one-rank", "gradient_averaging", None, 1, 12_470.0,
                  (0.012, 0.0, 0.30, 0.62, 0.0, 0.06), wer=None, num_evaluations=0),
        MadeUpRun("gradient_averaging", "gradient_averaging", None, 2, 17_900.0,
                  (0.010, 0.0, 0.225, 0.47, 0.225, 0.05), {1: (0.010, 0.0, 0.24, 0.50, 0.18, 0.05)},
                  -0.392, (0.010, 0.0, 0.0233)),
        MadeUpRun("model_averaging-1", period="1", frames_per_s=15_300.0,
                  spans=(0.009, 0.0, 0.19, 0.41, 0.33, 0.05),
                  final_log_prob=-0.394, wer=(0.0133, 0.003, 0.0267)),
        MadeUpRun("model_averaging-4", period="4", frames_per_s=19_800.0,
                  spans=(0.011, 0.0, 0.25, 0.54, 0.13, 0.055),
                  final_log_prob=-0.398, wer=(0.0133, 0.003, 0.0267)),
        MadeUpRun("model_averaging-16", period="16", frames_per_s=21_650.0,
                  spans=(0.012, 0.0, 0.28, 0.58, 0.055, 0.06),
                  rank_spans={1: (0.012, 0.0, 0.30, 0.60, 0.015, 0.06)},
                  final_log_prob=-0.407, wer=(0.0167, 0.0033, 0.0333)),
        MadeUpRun("model_averaging-64", period="64", frames_per_s=22_140.0,
                  spans=(0.012, 0.0, 0.29, 0.60, 0.022, 0.06),
                  final_log_prob=-0.446, wer=(0.0433, 0.02, 0.07)),
    ]  # fmt: skip


def _evaluation(run: MadeUpRun, index: int) -> dict[str, Any]:
    """Return the evaluation after `index` epochs of 98,000 frames: a curve that ends at the final value."""
    progress = index / run.num_evaluations
    gap = 1.9 * (math.exp(-4.2 * progress) - math.exp(-4.2))
    if run.last_gain is not None and index == run.num_evaluations - 1:
        gap = run.last_gain
    log_prob = run.final_log_prob - gap
    frames = 98_000 * index
    return {
        "epoch": float(index), "step": 60 * index, "frames": frames, "time_s": frames / run.frames_per_s,
        "train_loss": -log_prob - 0.03, "learning_rate": 0.001, "heldout_log_prob": log_prob,
        "heldout_frame_accuracy": math.exp(0.42 * log_prob), "heldout_frames": 11_000,
    }  # fmt: skip


def _rank(run: MadeUpRun, rank: int) -> dict[str, Any]:
    """Return a rank's entry of timing.json for one minute of steps."""
    shares = run.rank_spans.get(rank, run.spans)
    data = {} if run.data is None else {"data": run.data}
    busy = None if run.others is None else {"own": 0.9, "host": run.others + 0.9 * run.size}
    if busy is not None:
        busy["stolen"] = run.stolen
    gpu = {} if run.gpu is None else {"gpu": run.gpu}
    load = {} if busy is None else {"load": busy}
    return {
        "rank": rank, "host": "node-a", "steps": 600, "frames": int(60 * run.frames_per_s / run.size),
        "wall_s": 60.0, "spans_s": {name: 60 * s for name, s in zip(SPANS, shares, strict=True)},
        "eval_s": 4.2, "checkpoint_s": 0.8, **data, **load, **gpu,
    }  # fmt: skip


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
