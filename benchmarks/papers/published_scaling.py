"""What `speechdp simulate` predicts of published trainings, beside what their authors report.

    python benchmarks/papers/published_scaling.py [--bandwidth 100gbit] [--ranks-per-node 8]

Zhang et al. 2019 (arXiv 1904.04956): an LSTM of 43,154,944 parameters on SWB2000 took about a week on one
V100 (batch 256) and 11.5 h on 32 (their hybrid of synchronous groups and AD-PSGD, batch 2,560), 14.6 times as
fast.  16 epochs of 33.9 million samples in 168 h are 1.1 ms a sample.  A rank's batch is 80 then: how much
longer a sample takes in so small a batch was not published, nor how steps differ between learners.  Both are
varied, in the range that can be: from as long a sample to as long a step as with 256, and steps that are all
alike or differ by 10 and 30 % (standard deviation).  No link was published either: it is the option, with 5
us, and inside a node NVLink's.

So this is a bracket, not a test: where the reported speed-up lies in the table says which of the unknown
figures would explain it.

Last line: JSON {"reported": 14.6, "predicted": [least, most]} over the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.console import Console
from rich.table import Table

from speechdp.parallel.registry import StrategyChoice
from speechdp.simulation.measured import PARAMETER_BYTES, MeasuredRun, StepTimes
from speechdp.simulation.quantities import bandwidth
from speechdp.simulation.simulate import GivenLink, Request, simulate

_PARAMETERS, _RANKS, _BATCH, _BATCH_ALONE = 43_154_944, 32, 80, 256
_SAMPLE_S = 168 * 3600 / (16 * 33.9e6)
_REPORTED = 168 / 11.5
#: How many times as long a sample takes as in the batch of one rank alone; the last: a step takes as long.
_LONGER = (1.0, 1.5, 2.0, _BATCH_ALONE / _BATCH)
_DEVIATIONS = (0.0, 0.1, 0.3)
_STRATEGIES = ("gradient_averaging", "ad_psgd:groups=4", "ad_psgd")
_STEPS = 400
#: Bytes/s of the links between the GPUs of a node: NVLink's of a V100, about.
_INSIDE = 100e9


def run_of(
    step_s: float, deviation: float, frames: float = _BATCH, parameters: int = _PARAMETERS
) -> MeasuredRun:
    """Return a run on two ranks whose steps take so long on average, a third of it forward.

    Args:
        deviation: of a step, as a share of its time.
        frames: of a rank and step.
        parameters: of the model.
    """
    generator = np.random.default_rng(1)
    sigma = np.sqrt(np.log1p(deviation**2))
    work = step_s * generator.lognormal(-(sigma**2) / 2, sigma, (_STEPS, 2))
    none, each = np.zeros((_STEPS, 2)), np.full((_STEPS, 2), float(frames))
    times = StepTimes(work / 3, 2 * work / 3, none, none, none, none, each)
    choice = StrategyChoice("model_averaging:period=1")
    nbytes = PARAMETER_BYTES * parameters
    return MeasuredRun("published", ("a", "b"), choice, True, nbytes, 1, times, amount="samples", on_gpu=True)


def main() -> None:
    """Predict and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", default="100gbit")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    given = parser.parse_args()
    between = bandwidth("--bandwidth", given.bandwidth)
    link, inside = GivenLink(between, 5e-6), GivenLink(max(between, _INSIDE), 5e-6)
    table = Table(title=f"times one V100, on {_RANKS}; reported: {_REPORTED:.1f}")
    for column in ("a sample takes, times", "steps differ by", *_STRATEGIES):
        table.add_column(column, justify="right")
    found: list[float] = []
    for longer in _LONGER:
        for deviation in _DEVIATIONS:
            run = run_of(longer * _SAMPLE_S * _BATCH, deviation)
            request = Request(
                (_RANKS,),
                given.ranks_per_node,
                link,
                inside,
                strategies=tuple(map(StrategyChoice, _STRATEGIES)),
                periods=(1,),
            )
            cells = []
            for one in simulate([run], request).predictions:
                speed = one.frames_per_s
                mean, low, high = (_SAMPLE_S * value for value in (speed.mean, speed.low, speed.high))
                found.append(mean)
                cells.append(f"{mean:.1f} [{low:.1f}, {high:.1f}]")
            table.add_row(f"{longer:.1f}", f"{deviation:.0%}", *cells)
    Console(width=120).print(table)
    print(
        json.dumps(
            {"reported": round(_REPORTED, 1), "predicted": [round(min(found), 1), round(max(found), 1)]}
        )
    )


if __name__ == "__main__":
    main()
