"""What the strategy and timing machinery costs, beside bare PyTorch loops over the same shards and model.

    python benchmarks/strategies/overhead.py [--rounds 5] [--seconds 8]

Two ranks on this machine, each contender in processes of its own, in turn.
Last line: JSON {"model_averaging_vs_loop": ..., "gradient_averaging_vs_ddp": ..., ...}; 1 means equal speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.models.acoustic import make_acoustic_model
from benchmarks.strategies.contenders import (
    LSTM_4X320,
    TINY,
    full_steps,
    make_data,
    options_with,
    print_rate,
    timed,
    trainer_loop,
)
from benchmarks.strategies.paired import compare, launch_ranks, run_rounds
from speechdp.comm.base import Communicator
from speechdp.comm.environment import expect_rare_exchanges
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.data.loading.batch import Batch
from speechdp.data.loading.reader import SplitReader
from speechdp.data.shards.dataset import Dataset
from speechdp.options.run import TrainOptions

LOOP, AVERAGING = "bare loop", "model_averaging:period=1000000"
DDP = "torch DDP (gloo)"
GRADIENT = {b: f"gradient_averaging on {b}" for b in ("horovod", "mpi", "torch")}


def options_for(contender: str) -> TrainOptions:
    """Return the options of a contender; the peers use those of the contender they are compared with."""
    if contender in (LOOP, AVERAGING):
        return options_with(AVERAGING, TINY)
    return options_with("gradient_averaging", LSTM_4X320)


def peer_step(model: nn.Module, options: TrainOptions) -> Callable[[Batch], None]:
    """Return one step of a bare PyTorch loop: what anybody would write, with the same loss and optimizer."""
    learning_rate = options.schedule().learning_rate
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        logits = model(batch.features, batch.lengths)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.optimizer.max_gradient_norm)
        optimizer.step()

    return step


def measure_peer(comm: Communicator, dataset: Dataset, contender: str, seconds: float) -> tuple[int, float]:
    """Return frames of this rank and wall seconds of a bare loop, with or without DDP."""
    options = options_for(contender)
    model: nn.Module = make_acoustic_model(dataset, options)
    if contender == DDP:
        model = nn.parallel.DistributedDataParallel(model)
    step = peer_step(model, options)
    reader = SplitReader(dataset, "train")
    assignments = full_steps(reader, options, comm.rank, comm.size)

    def advance() -> int:
        batch = reader.batch(next(assignments).segments)
        step(batch)
        return batch.num_frames

    return timed(comm, advance, seconds)


def measure_ours(comm: Communicator, dataset: Dataset, contender: str, seconds: float) -> tuple[int, float]:
    """Return frames of this rank and wall seconds of our training loop, everything switched on."""
    with trainer_loop(comm, dataset, options_for(contender)) as advance:
        return timed(comm, advance, seconds)


def on_rank(comm: Communicator, folder: Path, contender: str, seconds: float) -> None:
    """Measure one contender; rank 0 prints the rate of the job."""
    torch.set_num_threads(1)
    measure = measure_peer if contender in (LOOP, DDP) else measure_ours
    frames, wall_s = measure(comm, Dataset.open(folder), contender, seconds)
    print_rate(comm, frames, wall_s)


def backend_of(contender: str) -> str:
    """Return the communicator a contender runs on; DDP's own process group is the torch back-end's."""
    if contender == DDP:
        return "torch"
    if contender in GRADIENT.values():
        return contender.rsplit(" ", 1)[1]
    return os.environ.get("SPEECHDP_BENCHMARK_BACKEND", "horovod") if contender == AVERAGING else "mpi"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", default="", help="contenders with this in their name, for experiments")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        contender = arguments.rank_of
        if contender == AVERAGING:
            expect_rare_exchanges()  # as `speechdp train` does for this strategy
        sys.exit(
            guard(
                lambda: create_communicator(backend_of(contender)),
                lambda comm: on_rank(comm, arguments.data, contender, arguments.seconds),
            )
        )
    contenders = [c for c in (LOOP, AVERAGING, DDP, *GRADIENT.values()) if arguments.only in c]
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))

        def measure(contender: str) -> float:
            program = [
                __file__,
                "--rank-of",
                contender,
                "--data",
                folder,
                "--seconds",
                str(arguments.seconds),
            ]
            return launch_ranks(2, program)["rate"]

        rates = run_rounds(contenders, measure, arguments.rounds, "frames/s on 2 ranks")
    if arguments.only:
        return
    result = {
        "model_averaging_vs_loop": compare(rates, AVERAGING, LOOP),
        "gradient_averaging_vs_ddp": compare(rates, GRADIENT["horovod"], DDP),
        "gradient_averaging_mpi_vs_ddp": compare(rates, GRADIENT["mpi"], DDP),
        "gradient_averaging_torch_vs_ddp": compare(rates, GRADIENT["torch"], DDP),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
