"""Frames/s of our strategies beside what else there is for the same, over the same shards and model.

    pip install accelerate          # one of the peers; left out, and said so, where it is missing
    python benchmarks/strategies/peers.py [--rounds 6] [--seconds 8] [--ranks 2] [--period 8]

Each contender in processes of its own, in turn; ratios within a round, medians over rounds.  Peers run as
their makers ship them: Open MPI, Horovod, gloo and the C library's heap with their own settings.  All share
loss, clipping, the fused optimizer and the reading thread, so that only the exchange differs, and the heap,
which ours lets keep what is freed; with --keep-heap the peers' do as well.
Last line: JSON {"gradient_averaging_horovod_vs_horovod": ..., ...}; 1 means equal speed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.models.acoustic import make_acoustic_model
from benchmarks.strategies.contenders import (
    LSTM_4X320,
    make_data,
    missing_strategy,
    open_loader,
    options_with,
    print_rate,
    strategy_loop,
    timed,
    trainer_loop,
)
from benchmarks.strategies.paired import Rates, compare, launch_ranks, run_rounds
from benchmarks.strategies.peer_loops import PEER_LOOPS, Run, run_peer
from speechdp.comm.base import Communicator
from speechdp.comm.environment import expect_rare_exchanges
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.data.loading.batch import Batch
from speechdp.data.loading.loader import Loader
from speechdp.data.loading.reader import SplitReader
from speechdp.data.shards.dataset import Dataset
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.registry import parse_strategy
from speechdp.process.heap import LARGEST_IN_HEAP, MOST_FREE, keep_few_kernels, keep_freed_memory

#: What is compared with what: peers of the kind, and strategies of ours that do the same.
GRADIENTS, PARAMETERS, OVERLAPPED = "gradients at every step", "parameters once a period", "overlapped"
BACKENDS = ("horovod", "torch", "mpi")
#: What `keep_freed_memory` sets, for glibc in a process that does not call it.
KEEPING_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(MOST_FREE), "MALLOC_MMAP_THRESHOLD_": str(LARGEST_IN_HEAP)}


@dataclass(frozen=True)
class Ours:
    """A strategy of ours on a back-end."""

    kind: str
    strategy: str
    backend: str

    @property
    def name(self) -> str:
        return f"{self.strategy.partition(':')[0]} on {self.backend}"


@dataclass(frozen=True)
class Peer:
    """A loop of peer_loops.py.

    Attributes:
        kind: what it is compared with.
        name: in results.
        key: in the last line's JSON.
        counterpart: the back-end of ours that is carried by the same library.
        needs: module that must be installed.
    """

    kind: str
    name: str
    key: str
    counterpart: str
    needs: str = "torch"


PEERS = (
    Peer(GRADIENTS, "Horovod over MPI", "horovod", "horovod", "horovod"),
    Peer(GRADIENTS, "Horovod over Gloo", "horovod_gloo", "horovod", "horovod"),
    Peer(GRADIENTS, "torch DDP", "ddp", "torch"),
    Peer(GRADIENTS, "mpi4py gradients", "mpi4py", "mpi", "mpi4py"),
    Peer(PARAMETERS, "torch PostLocalSGD", "post_local_sgd", "torch"),
    Peer(PARAMETERS, "accelerate LocalSGD", "accelerate_local_sgd", "torch", "accelerate"),
    Peer(PARAMETERS, "mpi4py parameters", "mpi4py", "mpi", "mpi4py"),
)
INSTALL = {
    "accelerate": "pip install accelerate",
    "horovod": "launch/build_horovod",
    "mpi4py": "pip install mpi4py",
}


def our_contenders(period: int) -> tuple[Ours, ...]:
    """Return ours, at the period the peers use too."""
    delay = max(1, period // 4)
    return (
        *(Ours(GRADIENTS, "gradient_averaging", backend) for backend in BACKENDS),
        *(Ours(PARAMETERS, f"model_averaging:period={period}", backend) for backend in BACKENDS),
        Ours(OVERLAPPED, f"delayed_averaging:period={period},delay={delay}", "mpi"),
        Ours(OVERLAPPED, "dpsgd", "mpi"),
        Ours(OVERLAPPED, "ad_psgd", "mpi"),
    )


def on_rank(comm: Communicator, ours: Ours, options: TrainOptions, arguments: argparse.Namespace) -> None:
    """Measure one strategy; rank 0 prints the rate of the job."""
    torch.set_num_threads(1)
    dataset = Dataset.open(arguments.data)
    with ExitStack() as stack:
        if options.strategy.parsed.traits.synchronous:
            advance = stack.enter_context(trainer_loop(comm, dataset, options))
        else:  # each rank at its own pace over its own batches, as the peers have theirs
            reader = SplitReader(dataset, "train")
            stack.callback(reader.close)
            loader = stack.enter_context(open_loader(reader, options, comm.rank, comm.size))
            model = make_acoustic_model(dataset, options)
            advance = stack.enter_context(strategy_loop(comm, model, options, batches(loader)))
        frames, wall_s = timed(comm, advance, arguments.seconds, whole=arguments.period)
    print_rate(comm, frames, wall_s)


def batches(loader: Loader) -> Iterator[Batch]:
    """Return the batches of a loader's steps."""
    return (step.batch for step in loader)


def run_rank(arguments: argparse.Namespace) -> int:
    """Be a rank of a contender; return its exit code."""
    name, model = arguments.rank_of, model_of(arguments.preset)
    if name in PEER_LOOPS:
        options = options_with("gradient_averaging", model)
        run_peer(Run(name, arguments.data, arguments.seconds, arguments.period), options)
    ours = next(o for o in our_contenders(arguments.period) if o.name == name)
    # As `speechdp train` does:
    keep_few_kernels(os.environ)
    keep_freed_memory(os.environ)
    if not parse_strategy(ours.strategy).traits.exchanges_every_step:
        expect_rare_exchanges()
    return guard(
        lambda: create_communicator(ours.backend),
        lambda comm: on_rank(comm, ours, options_with(ours.strategy, model), arguments),
    )


def model_of(preset: str) -> ModelOptions:
    """Return the model: the 4 x 320 LSTM, or a preset without dropout."""
    return LSTM_4X320 if preset == "lstm-4x320" else ModelOptions(preset=preset, dropout=0.0)  # type: ignore[arg-type]


def available(period: int) -> tuple[list[Ours], list[Peer]]:
    """Return the contenders that can run here; say which cannot, and what would help."""
    ours, peers = [], []
    for candidate in our_contenders(period):
        reason = missing_strategy(candidate.strategy)
        if reason is None:
            ours.append(candidate)
        else:
            print(f"left out: {candidate.name} ({reason})", flush=True)
    for peer in PEERS:
        if importlib.util.find_spec(peer.needs) is not None:
            peers.append(peer)
        else:
            print(f"left out: {peer.name} ({peer.needs} is not installed: {INSTALL[peer.needs]})", flush=True)
    return ours, peers


def summarise(rates: Rates, ours: Sequence[Ours], peers: Sequence[Peer]) -> dict[str, float]:
    """Print and return the ratios: ours over the peer carried by the same, and over the best of its kind."""
    result = {}
    for mine in ours:
        for peer in peers:
            if peer.kind == mine.kind and peer.counterpart == mine.backend:
                key = f"{mine.name.replace(' on ', '_')}_vs_{peer.key}"
                result[key] = compare(rates, mine.name, peer.name)
    for strategy in dict.fromkeys(o.strategy for o in ours):
        same = [o for o in ours if o.strategy == strategy]
        rivals = [p for p in peers if same[0].kind in (p.kind, OVERLAPPED)]
        if rivals:
            key = f"{strategy.partition(':')[0]}_vs_best_peer"
            result[key] = compare(
                rates, _best(rates, [o.name for o in same]), _best(rates, [p.name for p in rivals])
            )
    return result


def _best(rates: Rates, names: Sequence[str]) -> str:
    return max(names, key=lambda name: statistics.median(rates[name]))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--period", type=int, default=8, help="steps between averages of parameters")
    parser.add_argument(
        "--preset", choices=["lstm-4x320", "tiny", "kaldi-4x800", "swb2000"], default="lstm-4x320"
    )
    parser.add_argument("--keep-heap", action="store_true", help="let the peers' heaps be as ours")
    parser.add_argument("--only", default="", help="contenders with this in their name, for experiments")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    arguments = parse()
    if arguments.rank_of:
        sys.exit(run_rank(arguments))
    ours, peers = available(arguments.period)
    ours = [o for o in ours if arguments.only in o.name]
    peers = [p for p in peers if arguments.only in p.name]
    heap = KEEPING_HEAP if arguments.keep_heap else {}
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))

        def measure(contender: str) -> float:
            program = [__file__, "--rank-of", contender, "--data", folder]
            for option in ("seconds", "period", "preset"):
                program += [f"--{option}", str(getattr(arguments, option))]
            return launch_ranks(arguments.ranks, program, env=heap)["rate"]

        names = [c.name for c in (*ours, *peers)]
        rates = run_rounds(names, measure, arguments.rounds, f"frames/s on {arguments.ranks} ranks")
    print(json.dumps(summarise(rates, ours, peers)))


if __name__ == "__main__":
    main()
