"""What the strategy and timing machinery costs, beside bare PyTorch loops over the same shards and model.

    python benchmarks/overhead.py [--rounds 5] [--seconds 8]

Two ranks on this machine, each contender in processes of its own, in turn.
Last line: JSON {"model_averaging_vs_loop": ..., "gradient_averaging_vs_ddp": ..., ...}; 1 means equal speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.paired import compare, launch_ranks, run_rounds
from speechdp.comm.base import Communicator
from speechdp.comm.create import create_communicator
from speechdp.comm.environment import expect_rare_exchanges
from speechdp.comm.failure import guard
from speechdp.config import ModelOptions, OptimizerOptions, TrainOptions
from speechdp.data.assignment import planned
from speechdp.data.batch import Batch
from speechdp.data.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.features import FeatureConfig
from speechdp.data.loader import Loader, SplitReader
from speechdp.data.plan import plan_epoch
from speechdp.data.shards import ShardHeader, ShardWriter, Utterance
from speechdp.train.build import build_trainer, make_model
from speechdp.train.session import Session
from speechdp.train.stop import StopAgreement, StopRequest

NUM_CLASSES = 60
WARMUP_STEPS = 10
# The model of the word-by-word comparison with DDP: 4 x 320 LSTM; of the other: the tiny preset.
LSTM_4X320 = ModelOptions(layers=4, cells=320, bidirectional=False, dropout=0.0)
TINY = ModelOptions(dropout=0.0)

LOOP, AVERAGING = "bare loop", "model_averaging:period=1000000"
DDP = "torch DDP (gloo)"
GRADIENT = {b: f"gradient_averaging on {b}" for b in ("horovod", "mpi", "torch")}


def make_data(folder: Path) -> None:
    """Write shards of random features, lengths as of spoken digits (0.2 to 0.8 s)."""
    rng = np.random.default_rng(1)
    features = FeatureConfig()
    entries = []
    for shard in range(2):
        path = folder / f"train-{shard:05d}.h5"
        header = ShardHeader(features, 8000, NUM_CLASSES, "exact", "train")
        with ShardWriter(path, header) as writer:
            for number in range(1000):
                length = int(rng.integers(20, 80))
                writer.add(
                    Utterance(
                        f"{shard}-{number}",
                        "random",
                        "zero",
                        rng.standard_normal((length, features.feature_dim), dtype=np.float32),
                        rng.integers(0, NUM_CLASSES, length, dtype=np.int32),
                    )
                )
        entries.append(ShardEntry(path.name, writer.num_utterances, writer.num_frames, writer.index_sha256))
    split = SplitEntry(tuple(entries), 2000, sum(e.frames for e in entries), 1)
    splits = {"train": split, "dev": split}
    Manifest(8000, features, NUM_CLASSES, "exact", "index:", splits).write(folder)


def options_for(contender: str) -> TrainOptions:
    """Return the options of a contender; the peers use those of the contender they are compared with."""
    model = TINY if contender in (LOOP, AVERAGING) else LSTM_4X320
    strategy = AVERAGING if contender in (LOOP, AVERAGING) else "gradient_averaging"
    return TrainOptions(model=model, optimizer=OptimizerOptions(), strategy=strategy, epochs=1000)


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
    model: nn.Module = make_model(dataset, options)
    if contender == DDP:
        model = nn.parallel.DistributedDataParallel(model)
    step = peer_step(model, options)
    reader = SplitReader(dataset, "train")
    plan = plan_epoch(reader.index, options.plan(), 0, comm.size)
    mine = plan.ranks[comm.rank]
    number = 0

    def advance() -> int:
        nonlocal number
        batch = reader.batch(mine.batch(number % (plan.num_steps - 1)))
        number += 1
        step(batch)
        return batch.num_frames

    return timed(comm, advance, seconds)


def measure_ours(comm: Communicator, dataset: Dataset, contender: str, seconds: float) -> tuple[int, float]:
    """Return frames of this rank and wall seconds of our training loop, everything switched on."""
    options = options_for(contender)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        session = Session(dataset, comm, torch.device("cpu"), stop=stack.enter_context(StopRequest()))
        trainer, reader = build_trainer(session, options, folder, stack)
        loader = stack.enter_context(
            Loader(
                reader,
                planned(lambda e: plan_epoch(reader.index, options.plan(), e, comm.size), comm.rank, 1000),
            )
        )
        trainer.parts.model.train()
        stop = StopAgreement(session.stop, comm)

        def advance() -> int:
            step = trainer.advance(loader)
            stop.reached()
            assert step is not None
            return step.batch.num_frames

        result = timed(comm, advance, seconds)
        stop.drain()
    return result


def timed(comm: Communicator, advance: Callable[[], int], seconds: float) -> tuple[int, float]:
    """Warm up, then time as many steps as fill `seconds`, the same number on every rank."""
    for _ in range(WARMUP_STEPS):
        advance()
    comm.barrier()
    start = time.perf_counter()
    for _ in range(WARMUP_STEPS):
        advance()
    pace_s = comm.allgather_object((time.perf_counter() - start) / WARMUP_STEPS)[0]
    steps = max(WARMUP_STEPS, round(seconds / pace_s))
    comm.barrier()
    start = time.perf_counter()
    frames = sum(advance() for _ in range(steps))
    return frames, time.perf_counter() - start


def on_rank(comm: Communicator, folder: Path, contender: str, seconds: float) -> None:
    """Measure one contender; rank 0 prints the rate of the job."""
    torch.set_num_threads(1)
    measure = measure_peer if contender in (LOOP, DDP) else measure_ours
    frames, wall_s = measure(comm, Dataset.open(folder), contender, seconds)
    parts = comm.allgather_object([frames, wall_s])
    if comm.rank == 0:
        print(json.dumps({"rate": sum(f for f, _ in parts) / max(w for _, w in parts)}), flush=True)


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
