"""What one slow rank costs each strategy: throughput and time to target against its own unslowed run.

    python benchmarks/strategies/straggler.py [DATA] [--strategies a,b:period=16] [--ranks 2] [--slow 2,5]
        [--seeds 1,2,3] [--epochs 4] [--steps N] [--out OUT] [--plot FILE] [-- options of speechdp train]

Every strategy is trained unslowed and with its last rank slowed (speechdp train --slow-ranks), each run a job
of its own; the order is turned round with every seed.  Without DATA synthetic speech is prepared.  OUT keeps
finished runs.  A slow rank's share of the work can at best be left to the others: then the job keeps the sum
of the ranks' own speeds, ((N - 1) + 1 / factor) / N of its unslowed throughput with N ranks that train.

Last line: JSON {"ad_psgd_5x": share of that sum, ...}; a strategy that waits for the slowest rank has less.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich import box
from rich.table import Table

from benchmarks.strategies.straggler_plot import Bar, draw
from speechdp.cli.support.console import make_console
from speechdp.experiments.compare.plan import split_strategies, whole_numbers
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.command import own_program
from speechdp.launching.cores import available_cores
from speechdp.parallel.registry import parse_strategy
from speechdp.report.kit import formatting
from speechdp.report.runs.derived import best_score, frames_per_s, time_to_target
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.results import RunResult

STRATEGIES = "gradient_averaging,model_averaging:period=16,bmuf:period=16,delayed_averaging,dpsgd,ad_psgd"
SYNTHETIC_HOURS = 0.25


@dataclass(frozen=True)
class Case:
    """One run: factor 1 is the unslowed one."""

    strategy: str
    factor: int
    seed: int

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"{self.strategy.replace(':', '-').replace(',', '-')}-{self.factor}x-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What a strategy keeps with a rank slowed by `factor`: medians over seeds.

    Attributes:
        of_own: throughput over that of the unslowed run.
        of_sum: throughput over the sum of the ranks' own speeds.
        target_of_own: the unslowed run's time to target over that of this one; None: not reached.
    """

    strategy: str
    factor: int
    frames_per_s: float
    of_own: float
    of_sum: float
    target_of_own: float | None


def cases_in_order(strategies: Sequence[str], factors: Sequence[int], seeds: Sequence[int]) -> list[Case]:
    """Return all runs; with every other seed in the opposite order, since machines drift."""
    result = []
    for number, seed in enumerate(seeds):
        cases = [Case(strategy, factor, seed) for strategy in strategies for factor in (1, *factors)]
        result += cases if number % 2 == 0 else cases[::-1]
    return result


def sum_of_speeds(num_ranks: int, factor: float) -> float:
    """Return the throughput of ranks that never wait, one of them slowed, over that of unslowed ones."""
    return (num_ranks - 1 + 1 / factor) / num_ranks


def outcomes(runs: dict[Case, RunResult], ranks: int) -> Iterator[Outcome]:
    """Compare every slowed run with the unslowed one of its strategy and seed."""
    pairs = dict.fromkeys((case.strategy, case.factor) for case in runs if case.factor > 1)
    for strategy, factor in pairs:
        workers = parse_strategy(strategy).roster(ranks).num_parts
        rates, kept, targets = [], [], []
        for seed in sorted({case.seed for case in runs}):
            slowed, plain = runs.get(Case(strategy, factor, seed)), runs.get(Case(strategy, 1, seed))
            if slowed is None or plain is None or slowed.timing is None or plain.timing is None:
                continue
            rate, own = frames_per_s(slowed.timing) or 0.0, frames_per_s(plain.timing)
            if own:
                rates.append(rate)
                kept.append(rate / own)
                targets.append(_time_share(plain, slowed))
        if kept:
            known = [share for share in targets if share is not None]
            of_own = statistics.median(kept)
            yield Outcome(
                strategy,
                factor,
                statistics.median(rates),
                of_own,
                of_own / sum_of_speeds(workers, factor),
                statistics.median(known) if known else None,
            )


def _time_share(plain: RunResult, slowed: RunResult) -> float | None:
    """Return the unslowed run's time to the target both reached over the slowed run's."""
    best = [best_score(run.evaluations) for run in (plain, slowed)]
    if best[0] is None or best[1] is None:
        return None
    target = min(best[0], best[1])
    own_s, slowed_s = (time_to_target(run.evaluations, target) for run in (plain, slowed))
    return own_s / slowed_s if own_s and slowed_s else None


def train(
    cases: Sequence[Case], data: Path, out: Path, starter: JobStarter, given: argparse.Namespace
) -> None:
    """Run the jobs that have not finished yet; print a line each."""
    for number, case in enumerate(cases, start=1):
        run_dir = (out / case.folder).absolute()
        place = f"[{number}/{len(cases)}] {case.strategy}, {case.factor}x, seed {case.seed}"
        message = None
        if not (run_dir / "completed.json").is_file():
            words = ["train", str(data.absolute()), str(run_dir), "--strategy", case.strategy]
            words += ["--seed", str(case.seed), *given.length, *given.options, "--resume"]
            if case.factor > 1:
                words.append(f"--slow-ranks={given.ranks - 1}:{case.factor}")
            log = out / "logs" / f"{case.folder}.log"
            message = starter.run(given.ranks, words, log, folder=run_dir)
        timing = read_run(run_dir).timing
        rate = formatting.count(frames_per_s(timing) if timing else None)
        print(f"{place}: {message or f'{rate} frames/s'}", flush=True)


def prepare_synthetic(data: Path, starter: JobStarter, log: Path, hours: float = SYNTHETIC_HOURS) -> None:
    """Prepare synthetic speech, unless it is there."""
    if (data / "data.json").is_file():
        return
    message = starter.run(1, ["prepare", "--synthetic", str(hours), str(data)], log)
    if message is not None:
        raise SystemExit(f"synthetic speech cannot be prepared: {message}")


def show(found: Sequence[Outcome], ranks: int) -> None:
    """Print the table."""
    table = Table(title=f"One of {ranks} ranks slowed", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("strategy")
    for title in ("slowed", "frames/s", "of own unslowed", "of the sum of speeds", "time to target, of own"):
        table.add_column(title, justify="right")
    for row in found:
        shares = (row.of_own, row.of_sum, row.target_of_own)
        table.add_row(
            row.strategy, f"{row.factor}x", formatting.count(row.frames_per_s), *map(formatting.times, shares)
        )
    make_console().print(table)


def write_csv(path: Path, found: Sequence[Outcome]) -> None:
    """Write the table."""
    names = ("strategy", "factor", "frames_per_s", "of_own", "of_sum", "target_of_own")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in found)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what stands after `--` goes to `speechdp train`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slow", default="2,5")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="end runs after so many steps: throughput only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    ours = list(arguments)
    end = ours.index("--") if "--" in ours else len(ours)
    given = parser.parse_args(ours[:end])
    given.options = ours[end + 1 :]
    given.length = ["--epochs", str(given.epochs)]
    if given.steps:
        given.length += ["--max-steps", str(given.steps)]
    return given


def main() -> None:
    given = parse(sys.argv[1:])
    factors = whole_numbers("slow", given.slow, least=2)
    strategies = split_strategies(given.strategies)
    seeds = whole_numbers("seeds", given.seeds, least=0)
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // given.ranks)))
    starter = JobStarter(own_program(Path(sys.executable)), environment)
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        data = given.data or out / "data"
        if given.data is None:
            prepare_synthetic(data, starter, out / "logs" / "prepare.log")
        cases = cases_in_order(strategies, factors, seeds)
        train(cases, data, out, starter, given)
        runs = {case: read_run(out / case.folder) for case in cases}
        found = list(outcomes({case: run for case, run in runs.items() if run.completed}, given.ranks))
        write_csv(out / "straggler.csv", found)
    show(found, given.ranks)
    if given.plot is not None and found:
        marks = {factor: sum_of_speeds(given.ranks, factor) for factor in factors}
        draw(given.plot, [Bar(row.strategy, row.factor, row.of_own) for row in found], marks, given.ranks)
    print(json.dumps({f"{row.strategy}_{row.factor}x": round(row.of_sum, 3) for row in found}))


if __name__ == "__main__":
    main()
