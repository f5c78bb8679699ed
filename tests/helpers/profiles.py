"""Write profiles with made-up figures, in the format of docs/profile.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from speechdp.experiments.profile.measured import FACTS_NAME, MEMORY_NAME, MeasuredMemory, Memory, rank_path
from speechdp.experiments.profile.record import (
    BLOCKING,
    POOLED,
    STRONG,
    WEAK,
    JobEntry,
    ProfileRecord,
    Settings,
    write_record,
)
from speechdp.experiments.record import write_json

#: Times of each function on one rank, s: forward and backward, or one number for functions without phases.
SYNTHESIS_S: dict[str, tuple[float, ...]] = {
    "trainloader": (0.004,),
    "h2d": (0.0,),
    "encoder": (0.030, 0.060),
    "decoder": (0.090, 0.170),
    "postproc": (0.050, 0.095),
    "loss": (0.002, 0.004),
    "exchange": (0.0,),
    "update": (0.008,),
}
_WARM_UP_FACTORS = (6.0, 2.5, 1.3)


@dataclass
class MadeUpProfile:
    """A profile to write.

    Attributes:
        growth: share by which a function's time grows with each additional rank.
        exchange_s: time of the exchange in a step on 2 or more ranks, s.
        blocking_s: time of a blocking trainloader in every fourth step, s.
        loader_steps: steps of the jobs that compare trainloaders.
    """

    ranks: Sequence[int] = (1, 2, 4)
    steps: int = 8
    warmup_steps: int = 3
    functions: dict[str, tuple[float, ...]] = field(default_factory=lambda: dict(SYNTHESIS_S))
    growth: dict[str, float] = field(default_factory=lambda: {"decoder": 0.02, "postproc": 0.06})
    exchange_s: float = 0.02
    blocking_s: float = 0.5
    loader_steps: int = 67
    cores: int = 2
    samples: bool = True


def write_profile(out: Path, made_up: MadeUpProfile | None = None, **settings: Any) -> Path:
    """Write OUT/profile.json and every job's folder; return OUT."""
    made_up = made_up or MadeUpProfile()
    most = max(made_up.ranks)
    entries = [_entry(WEAK, n, made_up) for n in made_up.ranks]
    entries += [_entry(STRONG, n, made_up) for n in made_up.ranks]
    modules = [name for name in ("encoder", "decoder", "postproc", "output") if name in made_up.functions]
    entries += [_entry(module, n, made_up) for module in modules for n in made_up.ranks]
    entries += [_entry(BLOCKING, most, made_up), _entry(POOLED, most, made_up)]
    for entry in entries:
        write_job(out / entry.folder, entry, made_up)
    write_record(out, ProfileRecord(_settings(made_up, settings), tuple(entries)))
    return out


def _settings(made_up: MadeUpProfile, changes: dict[str, Any]) -> Settings:
    values: dict[str, Any] = {
        "task": "synthesis",
        "preset": "tacotron-tiny",
        "decoder": "fast",
        "batch_size": 32,
        "reduction": 5,
        "steps": made_up.steps,
        "warmup_steps": made_up.warmup_steps,
        "device": "CPU",
        "machine": "Linux x86_64",
        "cores": made_up.cores,
        "command": ("speechdp", "profile", "data", "out", "--ranks", "1,2,4"),
    }
    return Settings(**{**values, **changes})


def _entry(kind: str, ranks: int, made_up: MadeUpProfile) -> JobEntry:
    batch = 32 // ranks if kind == STRONG else 32
    loaders = {BLOCKING: "blocking-sort", "encoder": "none", "decoder": "none", "postproc": "none"}
    name = f"{kind}-{ranks}"
    steps = made_up.loader_steps if kind in (BLOCKING, POOLED) else made_up.steps
    return JobEntry(name, kind, ranks, batch, loaders.get(kind, "pooled"), name, steps, wall_s=9.0)


def write_job(folder: Path, entry: JobEntry, made_up: MadeUpProfile) -> None:
    """Write the files of a job's ranks."""
    folder.mkdir(parents=True)
    for rank in range(entry.ranks):
        head = {"rank": rank, "host": "node-a", "pid": 4000 + rank, "clock_offset_s": 0.0}
        lines = [head, *_steps(entry, rank, made_up)]
        rank_path(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    ranks = tuple(
        MeasuredMemory(rank, (400 + 3 * rank) << 20, (400 + 3 * rank) << 20, 50 << 20, 50 << 20)
        for rank in range(entry.ranks)
    )
    write_json(folder / MEMORY_NAME, asdict(Memory("rss", ranks)))
    write_json(folder / FACTS_NAME, {"device": "CPU", "hosts": ["node-a"] * entry.ranks, "threads": 1})
    if made_up.samples:
        _write_samples(folder, entry)


def _steps(entry: JobEntry, rank: int, made_up: MadeUpProfile) -> list[dict[str, Any]]:
    lines, now_s = [], 0.01
    for step in range(1, entry.steps + 1):
        slow = _WARM_UP_FACTORS[step - 1] if step <= len(_WARM_UP_FACTORS) else 1.0
        start_s, functions = now_s, []
        for name, phase, seconds in _functions(entry, step, made_up):
            duration_s = seconds * slow * (1 + 0.01 * ((3 * step + rank) % 4))
            functions.append([name, phase, round(now_s, 6), round(duration_s, 6)])
            now_s += duration_s
        frames = 40 * entry.batch_size
        lines.append({
            "step": step, "start_s": start_s, "wall_s": now_s - start_s, "frames": frames,
            "functions": functions,
        })  # fmt: skip
        now_s += 0.0002
    return lines


def _functions(entry: JobEntry, step: int, made_up: MadeUpProfile) -> list[tuple[str, str, float]]:
    """Return (name, phase, seconds): forward in the order of the model, then backward, then the rest."""
    share = 1 / entry.ranks if entry.kind == STRONG else 1.0
    if entry.kind in made_up.functions:
        forward, backward = made_up.functions[entry.kind]
        return [(entry.kind, "forward", forward), (entry.kind, "backward", backward)]
    chosen: list[tuple[str, str, float]] = []
    backwards: list[tuple[str, str, float]] = []
    for name, times in made_up.functions.items():
        scale = share * (1 + made_up.growth.get(name, 0.0) * (entry.ranks - 1))
        if len(times) == 2:
            chosen.append((name, "forward", scale * times[0]))
            backwards.insert(0, (name, "backward", scale * times[1]))
            continue
        seconds = times[0] * scale
        if name == "trainloader" and entry.kind == BLOCKING:
            seconds = made_up.blocking_s if step % 4 == 1 else 0.0
        if name == "exchange":
            seconds = made_up.exchange_s if entry.ranks > 1 else 0.0
        (backwards if name in ("exchange", "update") else chosen).append((name, "", seconds))
    return chosen + backwards


def _write_samples(folder: Path, entry: JobEntry) -> None:
    """Write the sampler's file for one host without a GPU."""
    ranks = {str(rank): 4000 + rank for rank in range(entry.ranks)}
    lines: list[Any] = [{"kind": "cpu", "hz": 10.0, "host": "node-a", "ranks": ranks, "gpus": []}]
    for number in range(40):
        idle = entry.kind == BLOCKING and number % 16 < 4
        values = [
            [r, 8.0 if idle else 96.0 + (number + r) % 5, (380 + number) << 20] for r in range(entry.ranks)
        ]
        lines.append({"t_s": number / 10, "ranks": values, "gpus": []})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "samples-node-a.jsonl").write_text(text, encoding="utf-8")
