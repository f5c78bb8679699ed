"""What a large corpus costs in memory and time before its first batch: opening it and planning an epoch.

    python benchmarks/data/growing.py [--utterances 1000000] [--shards 64] [--ranks 8]

Writes a data directory of that many very short utterances (in a temporary folder, deleted afterwards),
opens it, plans an epoch and reads from every shard; then plans 1,000 hours (360 M frames) from lengths alone.
Last line: JSON {"utterances":, "index_bytes_per_utterance":, "plan_s":, "open_s":, "peak_bytes":, ...}: held
by the opened split and a plan (all shards read from once), by tracemalloc; the times without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import tracemalloc
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from speechdp.data.loading.reader import SplitReader
from speechdp.data.plan.epoch_plan import (
    CorpusIndex,
    EpochPlan,
    PlanOptions,
    Segments,
    padding_share,
    plan_epoch,
)
from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig

NUM_CLASSES = 10
FEATURES = FeatureConfig(num_mel_bins=3)
#: 1,000 hours at 100 frames a second, in utterances of 3.6 s on average.
HOURS_FRAMES, HOURS_UTTERANCES = 360_000_000, 1_000_000

HOURS_PLANS = {
    "whole utterances, batches of 32": PlanOptions(32),
    "chunks of 20 frames, batches of 256": PlanOptions(256, 20),
    "whole utterances, 20,000 frames a batch": PlanOptions(0, batch_frames=20_000),
    "chunks of 20 frames, 5,120 frames a batch": PlanOptions(0, 20, batch_frames=5120),
}


@dataclass(frozen=True)
class Figures:
    """What opening and planning cost; bytes by tracemalloc, if it was on.

    Attributes:
        open_s, plan_s, read_s: seconds to open, plan and read one utterance of each shard.
        opened_bytes: held by the opened split, all shards read from.
        planned_bytes: held by that and the plan.
        peak_bytes: at most, on the way.
        rss_bytes: growth of the process in all this.
    """

    open_s: float
    plan_s: float
    read_s: float
    opened_bytes: int
    planned_bytes: int
    peak_bytes: int
    rss_bytes: int


def write_data(folder: Path, num_utterances: int, num_shards: int) -> None:
    """Write a data directory of utterances of 1 to 8 frames."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((4096, FEATURES.feature_dim)).astype(np.float16)
    targets = rng.integers(0, NUM_CLASSES, len(rows), dtype=np.int32)
    entries = []
    for shard, numbers in enumerate(np.array_split(np.arange(num_utterances), num_shards)):
        path = folder / f"train-{shard:05d}.h5"
        starts = rng.integers(0, len(rows) - 8, len(numbers))
        ends = starts + rng.integers(1, 9, len(numbers))
        with ShardWriter(path, ShardHeader(FEATURES, 8000, NUM_CLASSES, "exact", "train")) as writer:
            for number, start, end in zip(
                *(column.tolist() for column in (numbers, starts, ends)), strict=True
            ):
                names = (f"utterance-{number:09d}", f"speaker-{number % 1000:04d}", "a very short utterance")
                writer.add(Utterance(*names, rows[start:end], targets[start:end]))
        entries.append(ShardEntry(path.name, writer.num_utterances, writer.num_frames, writer.index_sha256))
    split = SplitEntry(tuple(entries), num_utterances, sum(entry.frames for entry in entries), 1000)
    Manifest(8000, FEATURES, NUM_CLASSES, "exact", "index:", {"train": split}).write(folder)


def rss_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def open_and_plan(folder: Path, options: PlanOptions, num_ranks: int) -> Figures:
    """Open the data, plan an epoch and read one utterance of each shard."""
    rss, begun = rss_bytes(), perf_counter()
    held = tracemalloc.get_traced_memory()[0]
    with closing(SplitReader(Dataset.open(folder), "train")) as reader:
        opened = perf_counter()
        shards = np.arange(int(reader.index.shard[-1]) + 1)
        zeros, ones = np.zeros_like(shards), np.ones_like(shards)
        reader.batch(Segments(shards, zeros, zeros, ones))
        read = perf_counter()
        opened_bytes = tracemalloc.get_traced_memory()[0] - held
        plan = plan_epoch(reader.index, options, 0, num_ranks)
        planned = perf_counter()
        assert int(plan.frames.sum()) == int(reader.index.num_frames.sum())
        now, peak = tracemalloc.get_traced_memory()
        return Figures(
            open_s=opened - begun,
            plan_s=planned - read,
            read_s=read - opened,
            opened_bytes=opened_bytes,
            planned_bytes=now - held,
            peak_bytes=peak - held,
            rss_bytes=rss_bytes() - rss,
        )


def measure(folder: Path, num_ranks: int) -> Figures:
    """Time it, then once more count the bytes, which takes longer."""
    timed = open_and_plan(folder, PlanOptions(32), num_ranks)
    gc.collect()
    tracemalloc.start()
    counted = open_and_plan(folder, PlanOptions(32), num_ranks)
    tracemalloc.stop()
    return Figures(
        timed.open_s,
        timed.plan_s,
        timed.read_s,
        counted.opened_bytes,
        counted.planned_bytes,
        counted.peak_bytes,
        timed.rss_bytes,
    )


def hours_index() -> CorpusIndex:
    """Return the lengths of 1,000 hours of speech: lognormal, in 64 shards."""
    lengths = np.exp(np.random.default_rng(1).normal(0.0, 0.55, HOURS_UTTERANCES))
    frames = np.maximum(1, np.round(lengths * (HOURS_FRAMES / lengths.sum()))).astype(np.int32)
    return CorpusIndex.of_lengths(np.array_split(frames, 64))


def plan_hours(num_ranks: int) -> dict[str, float]:
    """Plan 1,000 hours in several ways, print a table, and return the seconds of each."""
    index = hours_index()
    frames, utterances = int(index.num_frames.sum()), len(index)
    print(
        f"\n1,000 hours: {frames:,} frames, {utterances:,} utterances, {num_ranks} ranks; from lengths alone"
    )
    print(
        f"{'':44}{'plan':>8}{'first batch':>13}{'held':>10}{'peak':>10}{'steps':>9}{'padding':>9}{'wait':>7}"
    )
    seconds = {}
    for name, options in HOURS_PLANS.items():
        begun = perf_counter()
        plan = plan_epoch(index, options, 0, num_ranks)
        planned = perf_counter()
        plan.ranks[-1].batch(0)
        first_s = perf_counter() - planned
        seconds[name] = round(planned - begun, 3)
        held, peak = plan_bytes(index, options, num_ranks)
        print(
            f"{name:44}{planned - begun:6.2f} s{1e3 * first_s:10.1f} ms{held / utterances:6.1f} B/u"
            f"{peak / 1e6:7.1f} MB{plan.num_steps:9,}{padding_share(plan):8.1%}{waited(plan):7.1%}",
            flush=True,
        )
    return seconds


def plan_bytes(index: CorpusIndex, options: PlanOptions, num_ranks: int) -> tuple[int, int]:
    """Return the bytes that a plan holds, beside the index, and takes at most while it is made."""
    tracemalloc.start()
    plan = plan_epoch(index, options, 0, num_ranks)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.num_steps > 0
    return held, peak


def waited(plan: EpochPlan) -> float:
    """Return how much longer steps take that wait for the costliest batch than the mean batch does."""
    return float(plan.padded_frames.max(axis=0).sum() / plan.padded_frames.mean(axis=0).sum()) - 1


def print_figures(figures: Figures, num_utterances: int, num_ranks: int) -> float:
    """Print what was measured; return the bytes held for each utterance."""
    per_utterance = figures.planned_bytes / num_utterances
    print(f"  open (index checked)   {figures.open_s:8.2f} s")
    print(f"  read of every shard    {figures.read_s:8.2f} s")
    print(f"  plan for {num_ranks:2} ranks      {figures.plan_s:8.2f} s")
    print(f"  opened, held           {figures.opened_bytes / num_utterances:8.1f} bytes an utterance")
    print(f"  opened and planned     {per_utterance:8.1f} bytes an utterance")
    print(f"  peak                   {figures.peak_bytes / 1e6:8.1f} MB allocated by Python and numpy")
    print(f"  process grew by        {figures.rss_bytes / 1e6:8.1f} MB")
    return per_utterance


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--utterances", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write_data(given.write, given.utterances, given.shards)
        return
    with tempfile.TemporaryDirectory(prefix="speechdp-growing-") as folder:
        begun = perf_counter()
        # In a process of its own: what writing takes is not what opening takes.
        sizes = ("--utterances", str(given.utterances), "--shards", str(given.shards))
        subprocess.run([sys.executable, __file__, "--write", folder, *sizes], check=True)
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"{given.utterances:,} utterances in {given.shards} shards, {num_bytes / 1e6:,.0f} MB")
        print(f"  write                  {perf_counter() - begun:8.2f} s", flush=True)
        figures = measure(Path(folder), given.ranks)
    per_utterance = print_figures(figures, given.utterances, given.ranks)
    hours_s = plan_hours(given.ranks)
    result = {
        "utterances": given.utterances,
        "index_bytes_per_utterance": round(per_utterance, 1),
        "plan_s": round(figures.plan_s, 3),
        "open_s": round(figures.open_s, 3),
        "peak_bytes": figures.peak_bytes,
        "rss_bytes": figures.rss_bytes,
        "thousand_hours_plan_s": max(hours_s.values()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
