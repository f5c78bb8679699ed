"""Train many small models on ranks of this machine, one job after the other for all of equally many ranks.

Starting a rank costs more than a second of a core, so a job trains all its trials.  A benchmark starts itself
again on the ranks with `--on-ranks N`; there `train_trials` prints a line of JSON for each trial, which
`run_job` reads in the process that started them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard
from speechdp.data.shards.dataset import Dataset
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.split import decode_split
from speechdp.launching.command import child_environment
from speechdp.launching.hostfile import local_hosts
from speechdp.launching.mpi.job import LaunchJob
from speechdp.launching.programs import find_mpirun
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.tasks.model_file import load_model
from speechdp.train.realign import make_alignments, train_or_resume
from speechdp.train.session import Session

REPOSITORY = Path(__file__).resolve().parents[2]
#: Before the trials: targets to train on, from rounds of training and alignment with the default options.
_REALIGN = TrainOptions(realign=2, realign_epochs=4)


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        name: of what is compared; trials that differ in the seed only share it.
        options: of the training, its seed among them.
    """

    name: str
    options: TrainOptions


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        name: the trial's.
        ranks: ranks it was trained on.
        seed: the trial's.
        log_prob: held-out log-probability, nats a frame, at the end.
        frame_accuracy: share of held-out frames, at the end.
        steps: of a rank.
        frames: trained on, all ranks together.
        time_s: of training.
        wer: word error rate in per cent; None where nothing was decoded.
    """

    name: str
    ranks: int
    seed: int
    log_prob: float
    frame_accuracy: float
    steps: int
    frames: int
    time_s: float
    wer: float | None = None


def add_arguments(
    parser: argparse.ArgumentParser, *, seeds: str = "1,2,3", backend: str = "auto", cells: int = 64
) -> None:
    """Add what all such benchmarks take; `seeds`, `backend` and `cells` are defaults."""
    parser.add_argument("data", type=Path, metavar="DATA", help="directory that `speechdp prepare` wrote")
    parser.add_argument(
        "--alignments", type=Path, help="targets to train on; default: made by two rounds of realignment"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the runs (done ones are kept); default: none kept"
    )
    parser.add_argument("--seeds", default=seeds, help="one training each")
    parser.add_argument("--backend", default=backend, help="communicator")
    parser.add_argument("--cells", type=int, default=cells, help="cells a layer and direction of the BLSTM")
    parser.add_argument("--layers", type=int, default=2, help="layers of the BLSTM")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--scan", default="", help="only find the learning rate: these, separated by commas")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="a job that takes longer is ended")
    parser.add_argument("--on-ranks", type=int, default=0, help=argparse.SUPPRESS)


def base_options(arguments: argparse.Namespace) -> TrainOptions:
    """Return the options that all trials share."""
    model = ModelOptions(layers=arguments.layers, cells=arguments.cells, dropout=arguments.dropout)
    return TrainOptions(model=model, backend=arguments.backend, device="cpu", epochs=arguments.epochs)


def seeds(arguments: argparse.Namespace) -> list[int]:
    """Return the seeds asked for."""
    return [int(seed) for seed in arguments.seeds.split(",")]


def scan_trials(name: str, options: TrainOptions, rates: str) -> list[Trial]:
    """Return a trial for each of these learning rates, separated by commas."""
    return [
        Trial(f"{name}, learning rate {rate:g}", _with_rate(options, rate))
        for rate in map(float, rates.split(","))
    ]


def _with_rate(options: TrainOptions, rate: float) -> TrainOptions:
    return dataclasses.replace(options, optimizer=dataclasses.replace(options.optimizer, learning_rate=rate))


@contextmanager
def output_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder for the runs: the one given, else one that is gone afterwards."""
    if arguments.out is not None:
        yield arguments.out
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def on_ranks(
    arguments: argparse.Namespace, trials: Callable[[Path], list[Trial]], *, decode_split: str = ""
) -> int:
    """Train on this rank; return the exit code.

    Args:
        arguments: `backend`, `data`, `alignments` and `out` of them are used.
        trials: makes the trials from the folder of the targets.
        decode_split: split whose words are recognised after each trial; empty for none.
    """
    torch.set_num_threads(1)

    def train(comm: Communicator) -> int:
        session = Session(Dataset.open(arguments.data), comm, torch.device("cpu"))
        targets = arguments.alignments
        if targets is None:
            options = dataclasses.replace(_REALIGN, backend=arguments.backend, device="cpu")
            targets = make_alignments(session, options, arguments.out)
        train_trials(session, trials(targets), arguments.out, decode_split)
        return 0

    return guard(lambda: create_communicator(arguments.backend), train)


def train_trials(session: Session, trials: Sequence[Trial], out: Path, split: str) -> None:
    """Train each trial in a folder of its own; rank 0 prints each outcome.  Collective."""
    comm = session.comm
    for trial in trials:
        name = f"{trial.name}-{comm.size}-{trial.options.seed}"
        run_dir = out / re.sub(r"[^\w.-]+", "-", name)
        train_or_resume(session, trial.options, run_dir)
        wer = None
        if split:
            trained = load_model(run_dir, session.device)
            decoded = decode_split(trained, session.dataset, split, run_dir, DecodingOptions(), comm)
            wer = 100 * decoded.wer.wer
        if comm.rank != 0:
            continue
        last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        outcome = Outcome(
            name=trial.name,
            ranks=comm.size,
            seed=trial.options.seed,
            log_prob=last["heldout_log_prob"],
            frame_accuracy=last["heldout_frame_accuracy"],
            steps=last["step"],
            frames=last["frames"],
            time_s=last["time_s"],
            wer=wer,
        )
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


def run_job(size: int, arguments: Sequence[str], timeout_s: float) -> list[Outcome]:
    """Run this program again on `size` ranks; print and return each trial's outcome as it comes."""
    mpi = find_mpirun(Path(sys.prefix), os.environ.get("PATH", ""))
    program = (sys.executable, str(Path(sys.argv[0]).resolve()))
    job = LaunchJob(local_hosts(size).allocate(size), program, (*arguments, "--on-ranks", str(size)))
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environment = child_environment(job, mpi, environ, is_root=os.geteuid() == 0, cores=1)
    print(f"{size} {'rank' if size == 1 else 'ranks'}:", flush=True)
    outcomes = []
    with subprocess.Popen(
        mpi.command(job, environment), env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        alarm = threading.Timer(timeout_s, process.terminate)  # mpirun ends its ranks
        alarm.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                outcomes.append(Outcome(**json.loads(line)))
                print(describe(outcomes[-1]), flush=True)
        code = process.wait()
        alarm.cancel()
    if code != 0:
        raise SystemExit(f"the job on {size} ranks ended with {code}")
    return outcomes


def describe(outcome: Outcome) -> str:
    """Return a line about one trial."""
    wer = "" if outcome.wer is None else f", WER {outcome.wer:.2f} %"
    return (
        f"  {outcome.name:<44} seed {outcome.seed}: log-prob {outcome.log_prob:.4f}, "
        f"frames right {100 * outcome.frame_accuracy:.2f} %{wer}, {outcome.steps} steps, "
        f"{outcome.time_s:.0f} s"
    )


def mean_and_range(values: Sequence[float], digits: int = 4) -> str:
    """Return the mean and how far single values are from each other."""
    mean, low, high = (f"{v:.{digits}f}" for v in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a row for each configuration: mean and range over seeds."""
    width = max(len(outcome.name) for outcome in outcomes)
    with_wer = any(outcome.wer is not None for outcome in outcomes)
    head = f"{'configuration':<{width}}  ranks  {'held-out log-prob':<29}  {'frames right, %':<24}   steps"
    rows = [head + ("  WER, %" if with_wer else "")]
    for (name, ranks), same in grouped(outcomes).items():
        row = (
            f"{name:<{width}}  {ranks:>5}  {mean_and_range([o.log_prob for o in same]):<29}  "
            f"{mean_and_range([100 * o.frame_accuracy for o in same], 2):<24}  {same[0].steps:>6}"
        )
        wers = [o.wer for o in same if o.wer is not None]
        rows.append(row + (f"  {mean_and_range(wers, 2)}" if wers else ""))
    return "\n".join(rows)


def grouped(outcomes: Sequence[Outcome]) -> dict[tuple[str, int], list[Outcome]]:
    """Return the outcomes by name and number of ranks, in the order they came."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.name, outcome.ranks), []).append(outcome)
    return groups


def figures(same: Sequence[Outcome]) -> dict[str, float]:
    """Return the means over the seeds of one configuration, for the last line."""
    result = {
        "log_prob": round(statistics.mean(o.log_prob for o in same), 4),
        "frame_accuracy": round(statistics.mean(o.frame_accuracy for o in same), 4),
        "steps": same[0].steps,
        "seeds": len(same),
    }
    wers = [o.wer for o in same if o.wer is not None]
    return {**result, "wer": round(statistics.mean(wers), 2)} if wers else result
