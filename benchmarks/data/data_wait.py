"""What training waits for data, for two models at every averaging period, with and without preprocessing.

    python benchmarks/data/data_wait.py [DATA AUDIO] [--ranks 2] [--periods 1,4,16] [--steps 40] [--out OUT]

Trains `tiny` and `kaldi-4x800` for so many steps on DATA (features) and on AUDIO (the same speech, prepared
with --store audio): features computed while training, at varied speed, with noise and SpecAugment; each run a
job of its own.  Shares are those of the report: waiting for data over step time, after the first steps.
Without DATA and AUDIO synthetic speech is prepared.

Last line: JSON {"worst_wait": the largest share of all runs, as a mean over ranks, "worst_rank_wait": ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich import box
from rich.table import Table

from benchmarks.data.trainloader import WAIT, share
from speechdp.cli.support.console import make_console
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.command import own_program
from speechdp.report.runs.timing_file import DEFAULT_WARMUP_STEPS, read_timeline

#: With their batches: a step of the large model on a CPU takes a second for 10 chunks of 20 frames.
MODELS = {"tiny": (), "kaldi-4x800": ("--batch-size", "10")}
AUGMENTED = ("--speed-perturb", "--noise-snr-db", "10-30", "--spec-augment")


@dataclass(frozen=True)
class Wait:
    """What the ranks of a run waited for data: share of step time, of each rank, and the mean step, s."""

    model: str
    period: str
    stored: str
    shares: list[float]
    step_s: float

    @property
    def mean(self) -> float:
        """Mean over ranks."""
        return sum(self.shares) / len(self.shares)


def prepare(data: Path, stored: str, hours: float, starter: JobStarter) -> None:
    """Prepare synthetic speech, unless it is there."""
    if not (data / "data.json").is_file():
        words = ["prepare", "--synthetic", str(hours), "--store", stored, str(data)]
        message = starter.run(1, words, data.with_name(f"{data.name}.log"))
        if message is not None:
            raise SystemExit(f"synthetic speech cannot be prepared: {message}")


def measure(given: argparse.Namespace, case: tuple[str, str, str, Path], starter: JobStarter) -> Wait:
    """Train a model on data stored one way, averaging at one period; return what it waited."""
    model, period, stored, data = case
    run_dir = (given.out / f"{model}-{stored}-{period}").absolute()
    if not (run_dir / "completed.json").is_file():
        # The large model's steps take a hundred times as long.
        steps = given.steps * (10 if model == "tiny" else 1)
        words = [
            "train",
            str(data.absolute()),
            str(run_dir),
            "--overwrite",
            "--preset",
            model,
            *MODELS[model],
        ]
        words += ["--epochs", "100", f"--max-steps={steps}", "--strategy", f"model_averaging:period={period}"]
        words += AUGMENTED if stored == "audio" else ()
        log = given.out / "logs" / f"{run_dir.name}.log"
        message = starter.run(given.ranks, words, log, folder=run_dir)
        if message is not None:
            raise SystemExit(f"{run_dir.name}: {message}")
    shares, lengths = [], []
    for path in sorted((run_dir / "timeline").glob("rank-*.jsonl")):
        steps_of_rank = list(read_timeline(path)[0].values())[DEFAULT_WARMUP_STEPS:]
        shares.append(share(steps_of_rank, WAIT))
        lengths.append(sum(step["wall"] for step in steps_of_rank) / len(steps_of_rank))
    return Wait(model, period, stored, shares, sum(lengths) / len(lengths))


def show(waits: list[Wait]) -> None:
    """Print a table."""
    table = Table(
        "model", "stored", "period", "step, ms", "wait for data", "of the worst rank", box=box.SIMPLE
    )
    for wait in waits:
        shares = (f"{100 * wait.mean:.2f} %", f"{100 * max(wait.shares):.2f} %")
        table.add_row(wait.model, wait.stored, wait.period, f"{1e3 * wait.step_s:.1f}", *shares)
    make_console().print(table)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, nargs="*", help="DATA with features and AUDIO")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--periods", default="1,4,16")
    parser.add_argument("--steps", type=int, default=40, help="of kaldi-4x800; tiny takes ten times as many")
    parser.add_argument("--hours", type=float, default=0.2, help="of synthetic speech")
    parser.add_argument("--out", type=Path, help="folder for the runs; those that are done are kept")
    given = parser.parse_args(words)
    if len(given.data) not in (0, 2):
        parser.error("give DATA and AUDIO, or neither")
    return given


def main() -> None:
    """Run everything asked for."""
    given = parse(sys.argv[1:])
    starter = JobStarter(own_program(Path(sys.executable)), {"OMP_NUM_THREADS": "1", **os.environ})
    with tempfile.TemporaryDirectory() as temporary:
        given.out = given.out or Path(temporary)
        data = dict(zip(("features", "audio"), given.data, strict=False))
        for stored in () if data else ("features", "audio"):
            data[stored] = given.out / f"data-{stored}"
            prepare(data[stored], stored, given.hours, starter)
        waits = []
        for model in MODELS:
            for stored, folder in data.items():
                for period in given.periods.split(","):
                    waits.append(measure(given, (model, period, stored, folder), starter))
                    print(f"{model} {stored} {period}: {100 * waits[-1].mean:.2f} %", flush=True)
    show(waits)
    worst = {"worst_wait": max(w.mean for w in waits), "worst_rank_wait": max(max(w.shares) for w in waits)}
    print(json.dumps({name: round(share, 4) for name, share in worst.items()}))


if __name__ == "__main__":
    main()
