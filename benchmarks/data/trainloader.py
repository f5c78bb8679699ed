"""The IBM poster's first finding, reproduced: sorting before each generation of batches starves training.

    python benchmarks/data/trainloader.py [DATA] [--orders blocking-sort,pooled] [--ranks 1] [--epochs 2]
        [--rounds 3] [--out OUT] [--plot FILE] [--bin-s 0.2] [-- options of speechdp train]

Trains the same model on the same data with `--order blocking-sort` (the poster's trainloader: 32 batches are
read, preprocessed and sorted while training waits) and with the orders whose batches are made ready beside
training, each run a job of its own, in turn.  The timelines of the ranks say in which share of every fifth of
a second a rank computed (forward, backward, update); FILE shows it over time, a panel an order.

Making batches ready has to cost something to be seen: without DATA synthetic speech is prepared as audio, and
its features are computed while training, at varied speed and with noise.  Leave a core for it: with 2 cores
train on 1 rank.  A run's first 4 steps are left out, and with them the first wait of blocking-sort.

Last line: JSON {"blocking_sort_wait": share of step time spent waiting for data, "shuffled_wait": ...}.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from benchmarks.data.trainloader_plot import Panel, draw
from speechdp.cli.support.console import make_console
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.command import own_program
from speechdp.report.runs.timing_file import DEFAULT_WARMUP_STEPS, read_timeline

ORDERS = "blocking-sort,shuffled,pooled,laplace"
COMPUTE = ("forward", "backward", "update")
WAIT = ("data_wait",)
_ON_AUDIO = ("--speed-perturb", "--noise-snr-db", "10-30")

FloatArray = npt.NDArray[np.float64]
#: A step as it stands in a timeline.
Record = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Where the time of a run's ranks went, without their first steps.

    Attributes:
        order: of the batches.
        compute, wait: shares of the step time, mean over ranks.
        step_s: mean step, seconds.
        over_time: share computed in each bin, mean over ranks.
    """

    order: str
    compute: float
    wait: float
    step_s: float
    over_time: FloatArray


def pieces(steps: Sequence[Record], names: Sequence[str]) -> Iterator[tuple[float, float]]:
    """Yield begin and end of what the named spans took, in seconds of training since the first of `steps`.

    Steps are laid end to end: evaluations and checkpoints between them are no time of training.
    """
    before = 0.0
    for step in steps:
        for name, start, length in step["spans"]:
            if name in names:
                yield before + min(start, step["wall"]), before + min(start + length, step["wall"])
        before += step["wall"]


def over_time(steps: Sequence[Record], names: Sequence[str], bin_s: float) -> FloatArray:
    """Return which share of each whole bin of time the named spans took."""
    total = sum(step["wall"] for step in steps)
    edges = np.arange(int(total / bin_s) + 1) * bin_s
    times, taken = [0.0], [0.0]
    for begin, end in pieces(steps, names):
        times += [begin, end]
        taken += [taken[-1], taken[-1] + end - begin]
    shares: FloatArray = np.diff(np.interp(edges, times, taken)) / bin_s
    return shares


def share(steps: Sequence[Record], names: Sequence[str]) -> float:
    """Return the share of the steps' time that the named spans took."""
    taken = math.fsum(end - begin for begin, end in pieces(steps, names))
    return taken / math.fsum(step["wall"] for step in steps)


def outcome(order: str, run_dir: Path, bin_s: float) -> Outcome:
    """Read the timelines of a run's ranks."""
    paths = sorted((run_dir / "timeline").glob("rank-*.jsonl"))
    ranks = [list(read_timeline(path)[0].values())[DEFAULT_WARMUP_STEPS:] for path in paths]
    if not ranks or not all(ranks):
        raise SystemExit(f"{run_dir}: no steps in its timelines; give more --epochs or more data")
    shares = [over_time(steps, COMPUTE, bin_s) for steps in ranks]
    shortest = min(map(len, shares))
    return Outcome(
        order,
        statistics.mean(share(steps, COMPUTE) for steps in ranks),
        statistics.mean(share(steps, WAIT) for steps in ranks),
        statistics.mean(step["wall"] for steps in ranks for step in steps),
        np.mean([s[:shortest] for s in shares], axis=0),
    )


def run_orders(
    given: argparse.Namespace, data: Path, out: Path, starter: JobStarter
) -> dict[str, list[Outcome]]:
    """Train every order once a round, forwards and backwards in turn; runs that have finished are kept."""
    found: dict[str, list[Outcome]] = {order: [] for order in given.orders}
    for number in range(given.rounds):
        for order in given.orders if number % 2 == 0 else given.orders[::-1]:
            run_dir = (out / f"{order}-round{number + 1}").absolute()
            if not (run_dir / "completed.json").is_file():
                words = ["train", str(data.absolute()), str(run_dir), "--order", order, "--overwrite"]
                words += ["--epochs", str(given.epochs), *given.options]
                log = out / "logs" / f"{run_dir.name}.log"
                message = starter.run(given.ranks, words, log, folder=run_dir)
                if message is not None:
                    raise SystemExit(f"{order}: {message}")
            result = outcome(order, run_dir, given.bin_s)
            found[order].append(result)
            print(
                f"round {number + 1}/{given.rounds}: {order:<14} computing {100 * result.compute:5.1f} %, "
                f"waiting for data {100 * result.wait:5.2f} %",
                flush=True,
            )
    return found


def prepare_speech(data: Path, hours: float, starter: JobStarter, log: Path) -> None:
    """Prepare synthetic speech as audio, unless it is there."""
    if (data / "data.json").is_file():
        return
    words = ["prepare", "--synthetic", str(hours), "--store", "audio", str(data)]
    message = starter.run(1, words, log)
    if message is not None:
        raise SystemExit(f"synthetic speech cannot be prepared: {message}")


def medians(found: dict[str, list[Outcome]]) -> dict[str, Outcome]:
    """Return each order's medians over rounds; over time its first round."""
    return {
        order: Outcome(
            order,
            statistics.median(o.compute for o in rounds),
            statistics.median(o.wait for o in rounds),
            statistics.median(o.step_s for o in rounds),
            rounds[0].over_time,
        )
        for order, rounds in found.items()
    }


def show(found: dict[str, Outcome]) -> None:
    """Print the table."""
    table = Table(title="Shares of step time", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("order")
    for title in ("computing", "waiting for data", "step, ms"):
        table.add_column(title, justify="right")
    for order, row in found.items():
        shares = (f"{100 * row.compute:.1f} %", f"{100 * row.wait:.2f} %")
        table.add_row(order, *shares, f"{1e3 * row.step_s:.1f}")
    make_console().print(table)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what stands after `--` goes to `speechdp train`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--orders", type=lambda text: text.split(","), default=ORDERS.split(","))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=1.0, help="of synthetic speech")
    parser.add_argument("--bin-s", type=float, default=0.2, help="width of a bin of the picture")
    parser.add_argument("--out", type=Path, help="folder for the runs (done ones are kept); default: none")
    parser.add_argument("--plot", type=Path)
    ours = list(arguments)
    end = ours.index("--") if "--" in ours else len(ours)
    given = parser.parse_args(ours[:end])
    given.options = ours[end + 1 :]
    if given.data is None:
        given.options = [*_ON_AUDIO, *given.options]
    return given


def main() -> None:
    given = parse(sys.argv[1:])
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")  # else the model takes the loader's core
    starter = JobStarter(own_program(Path(sys.executable)), environment)
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        data = given.data or out / "data"
        if given.data is None:
            prepare_speech(data, given.hours, starter, out / "logs" / "prepare.log")
        found = medians(run_orders(given, data, out, starter))
    show(found)
    if given.plot is not None:
        draw(given.plot, [Panel(o.order, o.over_time, o.compute) for o in found.values()], given.bin_s)
    print(json.dumps({f"{order.replace('-', '_')}_wait": round(o.wait, 4) for order, o in found.items()}))


if __name__ == "__main__":
    main()
