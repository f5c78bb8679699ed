"""Frames/s of strategies and periods over links of limited rate, on network namespaces of this machine.

    sudo python benchmarks/comm/slow_link.py [--rates free 10gbit 1gbit 100mbit] [--nodes 2] \
        [--ranks-per-node 1] [--batch-size 4]

One core a rank.  With several ranks a node also averages inside nodes, and less often between them.  Only
whole periods are timed, after steps that are not.  Writes docs/images/slow_link.csv and .png.

Last line: JSON of ratios of frames/s at the same rate (free, 10g, 1g, 100m), where both were measured:

    {"dpsgd_vs_gradient_1g": ..., "dpsgd_int8_vs_gradient_1g": ..., "int8_vs_none_1g": ...,
     "int8_vs_fp32_100m": ..., "model_averaging_16_nodes_64_vs_model_averaging_16_1g": ...}

NAME_vs_gradient_RATE: each contender beside gradient averaging on the back-end where that is fastest;
int8_vs_none_RATE, int4_...: compressed averages with a period of 16 beside no exchange at all;
int8_vs_fp32_RATE, int4_...: beside the same averages in full precision;
NAME_nodes_K_vs_NAME_RATE: averages in two levels beside those in one.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.comm.namespaces import Nodes, ended_by_signals, why_not
from benchmarks.comm.slow_link_plot import Result, draw
from benchmarks.strategies.contenders import (
    missing_strategy,
    options_with,
    period_of,
    print_rate,
    strategy_loop,
    timed_steps,
)
from benchmarks.strategies.paired import REPOSITORY, run_job
from speechdp.comm.base import Communicator
from speechdp.comm.environment import expect_rare_exchanges
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.data.loading.batch import Batch
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import ModelOptions
from speechdp.parallel.registry import parse_strategy
from speechdp.tasks.acoustic import AcousticTask


@dataclass(frozen=True)
class Size:
    """A model, its input and output, and how it is fed."""

    model: ModelOptions
    feature_dim: int
    num_classes: int
    chunk_frames: int


#: swb2000: 43 M parameters, 165 MiB a message; small: 5 M, for quick runs.
SIZES = {
    "swb2000": Size(ModelOptions(preset="swb2000", dropout=0.0), 260, 32_000, 21),
    "small": Size(ModelOptions(layers=2, cells=256, bidirectional=True, dropout=0.0), 260, 4_000, 21),
}

#: Steps before the clock starts.
_WARMUP_STEPS = 3
#: Fewest steps timed; more where the period asks for it.
_LEAST_STEPS = 8
_NO_EXCHANGE = "no exchange"
#: What compressed averages are held against, and those.
_IN_FULL = "model_averaging_16"
_COMPRESSIONS = ("int8", "int4")


@dataclass(frozen=True)
class Contender:
    """A strategy with its options on a back-end, under the name by which results call it."""

    name: str
    strategy: str
    backend: str = "mpi"

    @property
    def cycle(self) -> int | None:
        """Steps after which it does the same again; None: every step, or never."""
        between = parse_strategy(self.strategy).traits.between_nodes
        return period_of(self.strategy) if between is None else int(between)


CONTENDERS = (
    # Never due: what the ranks compute without each other.
    Contender(_NO_EXCHANGE, "model_averaging:period=1000000"),
    Contender("gradient_averaging", "gradient_averaging"),
    Contender("gradient_averaging on torch", "gradient_averaging", "torch"),
    Contender("gradient_averaging on horovod", "gradient_averaging", "horovod"),
    *(
        Contender(f"gradient_averaging_fp16 on {b}", "gradient_averaging:compression=fp16", b)
        for b in ("torch", "horovod")
    ),
    Contender("gradient_averaging_powersgd", "gradient_averaging:compression=powersgd"),
    *(Contender(f"model_averaging_{k}", f"model_averaging:period={k}") for k in (1, 4, 16, 64)),
    *(Contender(f"{_IN_FULL}_{c}", f"model_averaging:period=16,compression={c}") for c in _COMPRESSIONS),
    Contender("model_averaging_16 on torch", "model_averaging:period=16", "torch"),
    # 8 steps hide an exchange of up to 8 times a step; a longer delay gains nothing where that is enough.
    Contender("delayed_averaging", "delayed_averaging:period=16,delay=8"),
    Contender("delayed_averaging_int8", "delayed_averaging:period=16,delay=8,compression=int8"),
    Contender("delayed_averaging on torch", "delayed_averaging:period=16,delay=8", "torch"),
    Contender("dpsgd", "dpsgd"),
    Contender("dpsgd_int8", "dpsgd:compression=int8"),
    Contender("ad_psgd", "ad_psgd"),
)
#: Averages in two levels, where nodes have several ranks.
IN_TWO_LEVELS = (
    Contender(f"{_IN_FULL}_nodes_16", "model_averaging:period=16,between_nodes=16"),
    Contender(f"{_IN_FULL}_nodes_64", "model_averaging:period=16,between_nodes=64"),
    Contender(f"{_IN_FULL}_nodes_64_int8", "model_averaging:period=16,between_nodes=64,compression=int8"),
    Contender("gradient_averaging_nodes_16", "gradient_averaging:between_nodes=16"),
)


def num_steps(period: int | None) -> int:
    """Return how many steps are timed: whole periods, and not too few.

    A window of whole periods holds the same exchanges wherever it begins.
    """
    if period is None or period > 1000:
        return _LEAST_STEPS
    return period * -(-_LEAST_STEPS // period)


def batches(size: Size, batch_size: int, rank: int) -> Iterator[Batch]:
    """Return batches of random features without end, in memory: reading is not what is timed."""
    generator = torch.Generator().manual_seed(rank)
    shape = (batch_size, size.chunk_frames)
    return cycle(
        [
            Batch(
                torch.randn(*shape, size.feature_dim, generator=generator),
                torch.randint(size.num_classes, shape, generator=generator),
                torch.full((batch_size,), size.chunk_frames),
                batch_size * size.chunk_frames,
            )
            for _ in range(4)
        ]
    )


def on_rank(comm: Communicator, contender: Contender, size: Size, batch_size: int) -> None:
    """Measure one contender; rank 0 prints the rate of the job."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    # Plain SGD: no optimizer state to be broadcast over the slow link before the first step.
    optimizer = OptimizerOptions(optimizer="sgd", momentum=0.0)
    options = options_with(contender.strategy, size.model, optimizer)
    task = options.make_task()
    assert isinstance(task, AcousticTask)
    model = LstmAcousticModel(size.feature_dim, size.num_classes, task.sizes)
    with strategy_loop(comm, model, options, batches(size, batch_size, comm.rank), finish=False) as advance:
        for _ in range(_WARMUP_STEPS):
            advance()
        frames, wall_s = timed_steps(comm, advance, num_steps(contender.cycle))
    print_rate(comm, frames, wall_s)


def run_rank(arguments: argparse.Namespace) -> int:
    """Be a rank; return its exit code."""
    contender = next(c for c in (*CONTENDERS, *IN_TWO_LEVELS) if c.name == arguments.rank_of)
    if not parse_strategy(contender.strategy).traits.exchanges_every_step:
        expect_rare_exchanges()  # as `speechdp train` does
    return guard(
        lambda: create_communicator(contender.backend),
        lambda comm: on_rank(comm, contender, SIZES[arguments.model], arguments.batch_size),
    )


def measure_all(arguments: argparse.Namespace, contenders: Sequence[Contender]) -> list[Result]:
    """Run every contender at every rate; print each figure."""
    results = []
    with ended_by_signals(), Nodes(arguments.nodes) as nodes:
        for rate in arguments.rates:
            nodes.limit(rate)
            for contender in contenders:
                program = [sys.executable, __file__, "--rank-of", contender.name, "--model", arguments.model]
                command = nodes.mpirun(
                    [*program, "--batch-size", str(arguments.batch_size)],
                    ranks_per_node=arguments.ranks_per_node,
                )
                frames_per_s = median_rate(command, arguments.rounds)
                if frames_per_s is None:  # the others' minutes are not thrown away
                    nodes.kill()
                    continue
                period = period_of(contender.strategy)
                results.append(
                    Result(rate, contender.name, contender.strategy, contender.backend, period, frames_per_s)
                )
                print(f"{rate:>8}: {contender.name:<32} {frames_per_s:>10,.1f} frames/s", flush=True)
    return results


def median_rate(command: Sequence[str], rounds: int) -> float | None:
    """Run a job several times; return the median of its frames/s, None with its last words if it fails."""
    try:
        return statistics.median(run_job(command)["rate"] for _ in range(rounds))
    except SystemExit as error:
        if not isinstance(error.code, str):  # a signal to this process
            raise
        print(error.code, file=sys.stderr, flush=True)
        return None


def _short(rate: str) -> str:
    """Return a rate as the names of ratios have it: 1g for 1gbit."""
    return rate.removesuffix("bit")


def compare(results: Sequence[Result]) -> dict[str, float]:
    """Return each contender's frames/s over those of the fastest gradient averaging at the same rate."""
    ratios = {}
    for rate in dict.fromkeys(r.rate for r in results):
        here = [r for r in results if r.rate == rate]
        peers = [r.frames_per_s for r in here if r.strategy == "gradient_averaging"]
        for result in here:
            if peers and result.strategy != "gradient_averaging":
                name = f"{result.name.replace(' ', '_')}_vs_gradient_{_short(rate)}"
                ratios[name] = round(result.frames_per_s / max(peers), 3)
    return ratios


def compare_compressed(results: Sequence[Result]) -> dict[str, float]:
    """Return compressed averages' frames/s over no exchange and over full precision, where measured."""
    found = {(r.rate, r.name): r.frames_per_s for r in results}
    ratios = {}
    for rate in dict.fromkeys(r.rate for r in results):
        for compression in _COMPRESSIONS:
            ours = found.get((rate, f"{_IN_FULL}_{compression}"))
            for word, name in (("none", _NO_EXCHANGE), ("fp32", _IN_FULL)):
                other = found.get((rate, name))
                if ours is not None and other is not None:
                    ratios[f"{compression}_vs_{word}_{_short(rate)}"] = round(ours / other, 3)
    return ratios


def compare_levels(results: Sequence[Result]) -> dict[str, float]:
    """Return the frames/s of averages in two levels over those of the same in one, where measured."""
    found = {(r.rate, r.name): r.frames_per_s for r in results}
    ratios = {}
    for (rate, name), frames_per_s in found.items():
        one, is_in_two, rest = name.partition("_nodes_")
        one += rest.lstrip("0123456789")  # compressed averages beside compressed ones
        if is_in_two and (rate, one) in found:
            ratios[f"{name}_vs_{one}_{_short(rate)}"] = round(frames_per_s / found[rate, one], 3)
    return ratios


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """Return all ratios, as the last line has them."""
    return compare(results) | compare_compressed(results) | compare_levels(results)


def write_csv(results: Sequence[Result], path: Path) -> None:
    """Write one line a measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["rate", "strategy", "backend", "period", "frames_per_s"])
        for r in results:
            writer.writerow([r.rate, r.strategy, r.backend, r.period or "", f"{r.frames_per_s:.1f}"])


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", nargs="+", default=["free", "10gbit", "1gbit", "100mbit"], help="as tc, or free"
    )
    parser.add_argument("--nodes", type=int, default=2, help="of --ranks-per-node ranks each")
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--model", choices=SIZES, default="swb2000")
    parser.add_argument("--batch-size", type=int, default=4, help="segments of 21 frames per rank and step")
    parser.add_argument("--rounds", type=int, default=1, help="the median counts")
    parser.add_argument("--only", default="", help="contenders with this in their name")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "images" / "slow_link")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    arguments = parse()
    if arguments.rank_of:
        sys.exit(run_rank(arguments))
    reason = why_not()
    if reason is not None:
        sys.exit(f"slow_link: {reason}")
    contenders = []
    possible = CONTENDERS + (IN_TWO_LEVELS if arguments.ranks_per_node > 1 else ())
    for contender in (c for c in possible if arguments.only in c.name):
        missing = missing_strategy(contender.strategy)
        if missing is None:
            contenders.append(contender)
        else:
            print(f"left out: {contender.name} ({missing})", flush=True)
    results = measure_all(arguments, contenders)
    if not results:
        sys.exit("slow_link: no contender could be measured")
    write_csv(results, arguments.output.with_suffix(".csv"))
    draw(results, arguments.output.with_suffix(".png"))
    print(json.dumps(ratios(results)))
    if len(results) < len(contenders) * len(arguments.rates):
        sys.exit("slow_link: not every contender could be measured")


if __name__ == "__main__":
    main()
