"""Runs under delays at random: what they come to must not depend on how late anything is.

    python -m tests.faults.schedules 1000 --seed 1 [--only dpsgd]     # or one: 1 --seed N

A schedule is a number: strategy, ranks, delays, and how the run is interrupted, all follow from it.  Ranks
are threads here; late_ranks.py runs the same over MPI, torch and Horovod.  What must be so afterwards:

- training ends in bounded time and without an error; on a disk that fails in one line, with the remedy;
- every epoch has one line in metrics.jsonl, and every frame was trained on once an epoch;
- the ranks end with equal replicas;
- with a strategy whose runs repeat, model and evaluations are bit for bit those of a run left in peace.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from speechdp.parallel.registry import parse_strategy
from tests.faults.late import Killed, Pace
from tests.faults.late_runs import Bench, Interruption, Story, Threads
from tests.helpers.own_script import named_nowhere

#: What exchanges otherwise within a strategy.
_CASES = (
    "gradient_averaging",
    "gradient_averaging:every=2,bucket_mib=0.001",
    "gradient_averaging:compression=powersgd,rank=1",
    "gradient_averaging:between_nodes=2,node_size=2",
    "model_averaging:period=2",
    "model_averaging:period=0.01s",
    "model_averaging:period=2,first=best,leave_out=0.05,combine=3",
    "model_averaging:period=2,compression=int8",
    "model_averaging:period=2,between_nodes=4,node_size=2",
    "adaptive_averaging:period=2,begin=1,interval=2",
    "bmuf:period=3",
    "slowmo:period=2",
    "diloco:period=3",
    "delayed_averaging:period=4,fragments=2,delay=1",
    "delayed_averaging:period=2,delay=2",
    "dpsgd",
    "dpsgd:topology=random",
    "dpsgd:topology=exponential",
    "dpsgd:topology=complete",
    "dpsgd:topology=ring,overlap=false",
    "dpsgd:compression=int8",
    "ad_psgd",
    "ad_psgd:groups=2",
    "ad_psgd:topology=ring",
    "parameter_server",
    "parameter_server:mode=sync",
    "parameter_server:dedicated=true",
    "easgd:period=2",
    "easgd:period=2,mode=sync",
)
#: These, and every strategy that none of them names.
STRATEGIES = (*_CASES, *named_nowhere(_CASES))
#: Those whose exchanges come when a clock says so: each run has its own.
_BY_THE_CLOCK = ("model_averaging:period=0.01s",)

_INTERRUPTIONS: tuple[Interruption, ...] = ("undisturbed", "stopped", "killed", "killed", "failing", "lost")


@dataclass(frozen=True)
class Schedule:
    """What one schedule does; everything follows from its seed."""

    seed: int
    story: Story
    pace: Pace

    @classmethod
    def draw(cls, seed: int, strategies: Sequence[str] = STRATEGIES) -> Schedule:
        """Return the schedule of a seed; seeds that follow one another take the strategies in turn."""
        rng = random.Random(seed)
        strategy = strategies[seed % len(strategies)]
        size = rng.choice((2, 3))
        size = 2 if "groups=2" in strategy else 3 if "node_size=2" in strategy else size
        made = parse_strategy(strategy)
        interruption = rng.choice(_INTERRUPTIONS)
        may_lose = made.traits.survives_loss and "groups=2" not in strategy
        if interruption == "lost" and not may_lose:
            interruption = "stopped"
        story = Story(
            strategy,
            size,
            interruption,
            num_feeders=0 if interruption == "lost" else rng.choice((0, 0, 0, 1, 2)),
            realigns=rng.random() < 0.15,
            repeats=made.traits.synchronous and strategy not in _BY_THE_CLOCK,
        )
        return cls(seed, story, Pace.draw(seed, size))

    def __str__(self) -> str:
        return f"--seed {self.seed}: {self.story}"


def fuzz_schedules(
    num: int,
    seed: int,
    *,
    strategies: Sequence[str] = STRATEGIES,
    print_line: Callable[[str], None] = lambda line: None,
) -> tuple[int, list[str]]:
    """Run schedules `seed` to `seed + num - 1`; return how many were run, and what is wrong with which.

    Args:
        strategies: taken in turn.
        print_line: prints what is wrong as soon as it is known.
    """
    wrong = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="speechdp-schedules-", ignore_cleanup_errors=True) as folder:
            bench = Bench(Path(folder), Threads())
            for number in range(seed, seed + num):
                problem = _problem(bench, Schedule.draw(number, strategies))
                if problem is not None:
                    print_line(problem)
                    wrong.append(problem)
    finally:
        torch.set_num_threads(threads)
    return num, wrong


def _problem(bench: Bench, schedule: Schedule) -> str | None:
    """Run a schedule; return what is wrong with what it came to."""
    try:
        finished = bench.run(schedule.story, schedule.pace)
    except (Exception, Killed) as error:
        notes = ", ".join(getattr(error, "__notes__", []))
        return f"{schedule}: {type(error).__name__}: {error} ({notes})"
    wrong = list(finished.differences())
    shutil.rmtree(finished.run_dir)
    return f"{schedule}: {'; '.join(wrong)}" if wrong else None


def main() -> None:
    """Run schedules and say which are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("num", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="strategies whose description begins so")
    options = parser.parse_args()
    strategies = [name for name in STRATEGIES if name.startswith(options.only)]
    begun = time.monotonic()
    done, wrong = fuzz_schedules(options.num, options.seed, strategies=strategies, print_line=print)
    seconds = time.monotonic() - begun
    print(json.dumps({"schedules": done, "differing": len(wrong), "seconds": round(seconds, 1)}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
