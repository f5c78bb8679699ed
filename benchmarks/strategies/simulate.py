"""What `speechdp simulate` predicts beside what is measured: ranks that sleep, on nodes of one machine.

    sudo python benchmarks/strategies/simulate.py OUT [--stride 2] [--seed 1]

Runs of two strategies on 1, 2 and 4 ranks are all that predictions are made from; these are written to
OUT/predictions.json before anything else is run, and are not changed afterwards.  Every strategy and period
is then measured on 2 to 16 ranks, with other steps.  Exchanges are real and go over links of the given
bandwidth and latency; computing is sleeping, for times played back from real steps that are recorded first
(OUT/steps.json).

The same command goes on where it was stopped.  Writes OUT/cells.csv.  Last line: JSON {"median_error",
"p90_error", "coverage"} of frames/s, over all cells.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.comm.namespaces import ended_by_signals
from benchmarks.comm.switch import SwitchedNodes, why_not
from benchmarks.strategies.paired import REPOSITORY
from benchmarks.strategies.sleeping_ranks import ENDS, Job, Recording, Work
from speechdp.data.loading.batch import Batch
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.parallel.registry import StrategyChoice
from speechdp.simulation.measured import read_measured
from speechdp.simulation.simulate import Request, simulate
from speechdp.tasks.acoustic import AcousticTask

#: Gradients in pieces that backward hides in part; of the usual size there would be one.
_PIECES = "bucket_mib=0.06"
FIT_STRATEGIES = (f"gradient_averaging:{_PIECES}", "model_averaging:period=1")
FIT_RANKS = (1, 2, 4)
#: `{}` stands for the period.  AdaComm's rule would change the period after `interval` steps.
STRATEGIES = (
    f"gradient_averaging:every={{}},{_PIECES}",
    "model_averaging:period={}",
    "adaptive_averaging:period={},interval=100000",
    "bmuf:period={}",
    "slowmo:period={}",
    "diloco:period={}",
    "easgd:period={}",
    "easgd:period={},mode=sync",
    "delayed_averaging:period={},delay=1",
    "dpsgd:period={}",
    "dpsgd:period={},topology=random",
    "ad_psgd:period={}",
    "parameter_server",
    "parameter_server:mode=sync",
)
#: Steps before anything counts, at least; whole periods.
_WARM_UP = 8
#: Whole periods, and steps, that count, at least.
_LEAST_PERIODS, _LEAST_STEPS = 3, 24
#: Of the mean time that a rank sleeps, what the fastest one does in a run, about.
_FASTEST = 0.95
_FIT_STEPS = 250
_RECORDED_STEPS = 500


@dataclass(frozen=True)
class Cell:
    """What is predicted and measured.

    Attributes:
        strategy: with its options and period.
        name: of the strategy, without options.
        period: 1 for strategies without one.
    """

    strategy: str
    period: int
    ranks: int

    @property
    def name(self) -> str:
        return self.strategy.partition(":")[0]

    @property
    def key(self) -> str:
        """What names its folder, and it in predictions.json."""
        options = self.strategy.replace(":", "-").replace(",", "-").replace("=", "_")
        return f"{options}-ranks_{self.ranks}"


@dataclass(frozen=True)
class Compared:
    """A cell, its prediction with the interval, and what was measured, frames/s."""

    cell: Cell
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        """Relative; above 0: predicted too fast."""
        return self.predicted / self.measured - 1

    @property
    def is_covered(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low <= self.measured <= self.high


def cells(ranks: Sequence[int], periods: Sequence[int], stride: int) -> list[Cell]:
    """Return every `stride`-th cell, so that each strategy, period and number of ranks is among them."""
    found = []
    for number, strategy in enumerate(STRATEGIES):
        own = periods if "{}" in strategy else (1,)
        for (i, size), (j, period) in itertools.product(enumerate(ranks), enumerate(own)):
            if (number + i + j) % stride == 0:
                found.append(Cell(strategy.format(period), period, size))
    return found


def num_steps(period: int, step_s: float, seconds: float, own_s: float | None = None) -> tuple[int, int]:
    """Return the steps before those that count, and these: whole periods both.

    Args:
        step_s: predicted, mean of all ranks.
        own_s: where ranks go at their own pace, a step of one that waits for nobody: it takes as many as
            the others, and has to last until these have counted for some time.
    """
    warm_up = period * -(-_WARM_UP // period)
    steps = round(seconds / step_s)
    if own_s is not None and own_s < step_s:
        steps = round((warm_up * step_s + seconds) / own_s)
    periods = max(_LEAST_PERIODS, -(-_LEAST_STEPS // period), round(steps / period))
    return warm_up, period * periods


def rate_of(ranks: Sequence[Mapping[str, Sequence[float]]], warm_up: int) -> float:
    """Return the frames/s of all ranks while all were at steps that count.

    Args:
        ranks: frames and end of each step, of each rank.
        warm_up: steps of each rank before those that count.
    """
    begin = max(rank["ends"][warm_up - 1] for rank in ranks)
    end = min(rank["ends"][-1] for rank in ranks)
    total = 0.0
    for rank in ranks:
        # Steps that lie across the beginning or the end count by their share in between.
        done = np.concatenate([[0.0], np.cumsum(rank["frames"][1:])])
        total += float(np.interp(end, rank["ends"], done) - np.interp(begin, rank["ends"], done))
    return total / (end - begin)


def summary(compared: Sequence[Compared]) -> dict[str, float]:
    """Return what the last line says."""
    errors = np.abs([one.error for one in compared])
    return {
        "median_error": round(float(np.median(errors)), 4),
        "p90_error": round(float(np.quantile(errors, 0.9)), 4),
        "coverage": round(float(np.mean([one.is_covered for one in compared])), 4),
    }


def table(compared: Sequence[Compared]) -> str:
    """Return the median error of each strategy by number of ranks, with the mean of its errors, %."""
    sizes = sorted({one.cell.ranks for one in compared})
    lines = ["median |error| (mean error), %".ljust(34) + "".join(f"{size:>14} ranks" for size in sizes)]
    for name in [*dict.fromkeys(one.cell.name for one in compared), "all"]:
        line = name.ljust(34)
        for size in sizes:
            errors = [
                100 * c.error for c in compared if c.cell.ranks == size and name in (c.cell.name, "all")
            ]
            text = f"{np.median(np.abs(errors)):.1f} ({np.mean(errors):+.1f})" if errors else ""
            line += f"{text:>20}"
        lines.append(line)
    return "\n".join(lines)


def write_cells(compared: Sequence[Compared], path: Path) -> None:
    """Write one line a cell."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "period", "ranks", "predicted", "low", "high", "measured", "error"])
        for one in compared:
            figures = [f"{value:.1f}" for value in (one.predicted, one.low, one.high, one.measured)]
            writer.writerow(
                [one.cell.strategy, one.cell.period, one.cell.ranks, *figures, f"{one.error:+.4f}"]
            )


def record_steps() -> Recording:
    """Train a small model on batches of random lengths on this machine, and note what its steps take."""
    torch.set_num_threads(1)
    generator, task = torch.Generator().manual_seed(1), AcousticTask()
    model = LstmAcousticModel(40, 60, task.sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    frames, seconds = [], []
    for _ in range(_RECORDED_STEPS):
        length = int(torch.randint(20, 80, (), generator=generator))
        batch = Batch(
            torch.randn(8, length, 40, generator=generator),
            torch.randint(60, (8, length), generator=generator),
            torch.full((8,), length),
            8 * length,
        )
        begun_s = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model, batch).total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - begun_s)
        frames.append(float(batch.num_frames))
    return Recording(tuple(frames[20:]), tuple(seconds[20:]))


def predict(out: Path, wanted: Sequence[Cell], ranks_per_node: int) -> dict[str, dict[str, float]]:
    """Return the prediction of each cell, from the runs in OUT/fit."""
    runs = read_measured(out / "fit").runs
    found: dict[str, dict[str, float]] = {}
    for size in dict.fromkeys(cell.ranks for cell in wanted):
        here = {cell.strategy: cell for cell in wanted if cell.ranks == size}
        strategies = tuple(map(StrategyChoice, here))
        request = Request((size,), ranks_per_node, strategies=strategies, periods=(1,))
        for one in simulate(runs, request).predictions:
            rate = one.frames_per_s
            found[here[one.strategy.text].key] = {
                "frames_per_s": rate.mean,
                "low": rate.low,
                "high": rate.high,
                "step_s": one.step_s.mean,
            }
    return found


class Cluster:
    """Nodes, and the runs on them; a context manager."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        size = -(-max(*arguments.ranks, *FIT_RANKS) // arguments.ranks_per_node)
        self._nodes = SwitchedNodes(size, arguments.mbit / 8 * 1e6, arguments.latency_ms / 1e3)
        self._ranks_per_node = arguments.ranks_per_node
        self._out = arguments.out
        self._work = Work(arguments.parameters, arguments.step_ms / 1e3, str(arguments.out / "steps.json"))

    def __enter__(self) -> Cluster:
        self._nodes.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._nodes.__exit__(*exception)

    def run(self, ranks: int, jobs: Sequence[Job]) -> None:
        """Run what has not been run yet, one job after another on the same processes."""
        left = [job for job in jobs if not Path(job.folder, ENDS).is_file()]
        if not left:
            return
        for job in left:  # what a stopped benchmark has left half done
            shutil.rmtree(job.folder, ignore_errors=True)
        given = self._out / f"jobs-{ranks}.json"
        given.write_text(json.dumps({"work": asdict(self._work), "jobs": [asdict(job) for job in left]}))
        program = [sys.executable, str(Path(__file__).with_name("sleeping_ranks.py")), str(given)]
        command = self._nodes.mpirun(program, ranks=ranks, ranks_per_node=self._ranks_per_node)
        environment = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }
        print(f"{ranks} ranks: {len(left)} runs", flush=True)
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            self._nodes.kill()
            raise SystemExit(f"simulate: the runs on {ranks} ranks ended with {done.returncode}: see above")


def fit_jobs(out: Path, ranks: int, seed: int) -> list[Job]:
    """Return the runs that predictions are made from."""
    return [
        Job(strategy, str(out / "fit" / Cell(strategy, 1, ranks).key), _FIT_STEPS, 1000 * seed + number)
        for number, strategy in enumerate(FIT_STRATEGIES)
    ]


def measure(
    cluster: Cluster, arguments: argparse.Namespace, predictions: Mapping[str, Any]
) -> list[Compared]:
    """Run every cell; return each beside its prediction."""
    wanted = cells(arguments.ranks, arguments.periods, arguments.stride)
    folder = arguments.out / "runs"
    own_s = _FASTEST * arguments.step_ms / 1e3
    plan = {
        cell: num_steps(
            cell.period,
            predictions[cell.key]["step_s"],
            arguments.seconds,
            None if StrategyChoice(cell.strategy).parsed.traits.synchronous else own_s,
        )
        for cell in wanted
    }
    for ranks in arguments.ranks:
        jobs = [
            Job(cell.strategy, str(folder / cell.key), sum(plan[cell]), 1000 * arguments.seed + 100 + number)
            for number, cell in enumerate(wanted)
            if cell.ranks == ranks
        ]
        cluster.run(ranks, jobs)
    compared = []
    for cell in wanted:
        ends = json.loads((folder / cell.key / ENDS).read_text())
        figures = predictions[cell.key]
        measured = rate_of(ends["ranks"], plan[cell][0])
        compared.append(Compared(cell, figures["frames_per_s"], figures["low"], figures["high"], measured))
    return compared


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--stride", type=int, default=1, help="measure every so many-th cell only")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a cell, about, that count")
    parser.add_argument("--mbit", type=float, default=50.0, help="of a node's link, each direction, Mbit/s")
    parser.add_argument("--latency-ms", type=float, default=0.5, help="of a message between nodes")
    parser.add_argument("--parameters", type=int, default=32_000)
    parser.add_argument("--step-ms", type=float, default=60.0, help="that a rank sleeps in a step, mean")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


def main() -> None:
    arguments = parse()
    reason = why_not()
    if reason is not None:
        sys.exit(f"simulate: {reason}")
    out = arguments.out
    (out / "fit").mkdir(parents=True, exist_ok=True)
    if not (out / "steps.json").is_file():
        (out / "steps.json").write_text(json.dumps(asdict(record_steps())))
    with ended_by_signals(), Cluster(arguments) as cluster:
        for ranks in FIT_RANKS:
            cluster.run(ranks, fit_jobs(out, ranks, arguments.seed))
        file = out / "predictions.json"
        if not file.is_file():
            wanted = cells(arguments.ranks, arguments.periods, 1)
            with file.open("x") as stream:
                json.dump(predict(out, wanted, arguments.ranks_per_node), stream, indent=1)
        compared = measure(cluster, arguments, json.loads(file.read_text()))
    write_cells(compared, out / "cells.csv")
    print(table(compared))
    print(json.dumps(summary(compared)))


if __name__ == "__main__":
    main()
