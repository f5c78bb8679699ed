"""Does a sweep rank settings as they are on a quiet machine, while others use the machine half of the time?

    python benchmarks/strategies/drift.py [--tries 10] [--rounds 24] [--quiet-rounds 48] [--steps 8]
        [--epochs 4] [--hours 0.1] [--periods 1,4,16,64] [--ranks 2] [--out OUT]
        [-- options of speechdp sweep]

One quiet sweep is the truth: each setting's frames/s over gradient averaging's, by a race of more rounds, so
that its own intervals are narrow.  In each try the same sweep runs again while two busy loops are switched on
and off at random, for half of the time.  By its race, and by its runs, which follow one another, it is asked

- whether settings stand in the order of the quiet sweep: every two that the quiet race tells apart;
- whether the intervals of the race hold the quiet ratios.

Start it on a machine on which nothing else runs.  Synthetic speech is prepared first.  OUT keeps what is
done.

Last line: JSON {"same_ranking": share of the tries by their races, "coverage": share of the intervals,
"same_ranking_of_runs": share of the tries by their runs}.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich import box
from rich.table import Table

from benchmarks.strategies.straggler import prepare_synthetic
from speechdp.cli.support.console import make_console
from speechdp.experiments.jobs import JobStarter
from speechdp.experiments.race.record import find_race
from speechdp.launching.command import own_program
from speechdp.launching.cores import available_cores
from speechdp.report.kit import formatting
from speechdp.report.kit.speeds import ratio_text
from speechdp.report.runs.derived import frames_per_s
from speechdp.report.runs.folders import read_sweep
from speechdp.report.runs.raced import RacedSpeed

#: Seconds for which the busy loops stay as they are, drawn anew each time.
_SHORTEST_S, _LONGEST_S = 2.0, 20.0


@dataclass(frozen=True)
class Speeds:
    """What a sweep found, by the names of its settings on all ranks.

    Attributes:
        raced: by its race.
        of_runs: frames/s of its runs over the baseline's run.
    """

    raced: Mapping[str, RacedSpeed]
    of_runs: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """How a try compares with the quiet sweep.

    Attributes:
        race_is_right, runs_are_right: settings stand in the quiet order.
        covered: whether each setting's interval holds the quiet ratio.
    """

    race_is_right: bool
    runs_are_right: bool
    covered: Mapping[str, bool]


def read_speeds(out: Path, ranks: int) -> Speeds:
    """Read a sweep's speeds.  Raises SystemExit where it has none."""
    race = find_race(out, ranks)
    if race is None:
        raise SystemExit(f"{out}: holds no race on {ranks} ranks")
    together = {setting.name for setting in race.plan.settings if not setting.alone}
    raced = {name: speed for name, speed in race.speeds().items() if name in together}
    rates = {run.name: frames_per_s(run.timing) for run in read_sweep(out).runs if run.timing is not None}
    baseline = rates.get(race.plan.baseline)
    return Speeds(
        raced, {name: rate / baseline for name, rate in rates.items() if rate and baseline and name in raced}
    )


def pairs_apart(quiet: Mapping[str, RacedSpeed]) -> list[tuple[str, str]]:
    """Return the pairs (slower, faster) that the quiet race tells apart."""
    return [
        (slow, fast)
        for slow, fast in itertools.permutations(quiet, 2)
        if quiet[fast].is_faster_than(quiet[slow])
    ]


def judge(quiet: Speeds, found: Speeds) -> Verdict:
    """Compare a try with the quiet sweep."""
    pairs = pairs_apart(quiet.raced)
    covered = {
        name: speed.interval is not None and speed.interval[0] <= truth.ratio <= speed.interval[1]
        for name, truth in quiet.raced.items()
        if (speed := found.raced[name]).baseline != name
    }
    return Verdict(
        all(found.raced[fast].over(found.raced[slow]).ratio > 1 for slow, fast in pairs),
        all(found.of_runs[slow] < found.of_runs[fast] for slow, fast in pairs),
        covered,
    )


@contextmanager
def disturbed(loops: int, seed: int) -> Iterator[None]:
    """Switch busy loops on and off at random while the block runs: on for half of the time."""
    over = threading.Event()
    drawn = random.Random(seed)

    def disturb() -> None:
        while not over.is_set():
            busy = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in range(loops if drawn.random() < 0.5 else 0)
            ]
            try:
                over.wait(drawn.uniform(_SHORTEST_S, _LONGEST_S))
            finally:
                for process in busy:
                    process.kill()
                    process.wait()

    thread = threading.Thread(target=disturb, name="busy loops")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def sweep(data: Path, out: Path, starter: JobStarter, given: argparse.Namespace, rounds: int) -> None:
    """Run a sweep whose race has so many rounds, or go on with it; one that is complete is kept."""
    words = ["sweep", str(data.absolute()), str(out.absolute()), "--periods", given.periods]
    words += ["--epochs", str(given.epochs), "--race", str(rounds), "--race-steps", str(given.steps)]
    words += ["--decode-split", "", "--one-rank-steps", "0", *given.options]
    message = starter.run(given.ranks, words, out.with_name(f"{out.name}.log"))
    if message is not None:
        raise SystemExit(f"{out}: the sweep failed: {message}")


def show(quiet: Speeds, tries: Sequence[tuple[Speeds, Verdict]]) -> None:
    """Print the ratios of every try, by race and by runs, and whether they stand in the quiet order."""
    table = Table(title="Speed over gradient averaging's: race [95 %] / runs", title_justify="left",
                  box=box.SIMPLE_HEAD)  # fmt: skip
    table.add_column("setting")
    table.add_column("quiet", justify="right")
    for number in range(len(tries)):
        table.add_column(f"try {number + 1}", justify="right")
    for name in quiet.raced:
        cells = [
            f"{ratio_text(speeds.raced[name])} / {formatting.times(speeds.of_runs.get(name))}"
            for speeds in (quiet, *(found for found, _ in tries))
        ]
        table.add_row(name, *cells)
    right = [
        f"{'yes' if verdict.race_is_right else 'no'} / {'yes' if verdict.runs_are_right else 'no'}"
        for _, verdict in tries
    ]
    table.add_row("quiet order", "", *right)
    make_console().print(table)


def summary(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the figures of the last line."""
    cells = [held for verdict in verdicts for held in verdict.covered.values()]
    return {
        "same_ranking": round(sum(v.race_is_right for v in verdicts) / len(verdicts), 3),
        "coverage": round(sum(cells) / len(cells), 3),
        "same_ranking_of_runs": round(sum(v.runs_are_right for v in verdicts) / len(verdicts), 3),
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what stands after `--` goes to `speechdp sweep`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--quiet-rounds", type=int, default=48, help="of the quiet sweep's race")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hours", type=float, default=0.1, help="of synthetic speech")
    parser.add_argument("--periods", default="1,4,16,64")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--loops", type=int, default=2, help="busy loops")
    parser.add_argument("--seed", type=int, default=1, help="of the disturbance")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="after --: of `speechdp sweep`")
    given = parser.parse_args(arguments)
    if given.tries < 1 or min(given.rounds, given.quiet_rounds) < 6:
        parser.error("--tries: at least 1, --rounds: at least 6, or there are no intervals")
    return given


def main() -> None:
    given = parse(sys.argv[1:])
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // given.ranks)))
    starter = JobStarter(own_program(Path(sys.executable)), environment)
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        prepare_synthetic(out / "data", starter, out / "prepare.log", given.hours)
        sweep(out / "data", out / "quiet", starter, given, given.quiet_rounds)
        quiet = read_speeds(out / "quiet", given.ranks)
        tries = []
        for number in range(1, given.tries + 1):
            with disturbed(given.loops, given.seed * 1_000 + number):
                sweep(out / "data", out / f"try-{number}", starter, given, given.rounds)
            found = read_speeds(out / f"try-{number}", given.ranks)
            tries.append((found, judge(quiet, found)))
            print(f"try {number}/{given.tries}: {tries[-1][1]}", flush=True)
    show(quiet, tries)
    print(json.dumps(summary([verdict for _, verdict in tries])))


if __name__ == "__main__":
    main()
