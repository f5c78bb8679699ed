"""Memory of each rank where one is the master, as replica 0 of nn.DataParallel is, and where all are equal.

    python benchmarks/papers/poster_master.py [--ranks 2] [--steps 3] [--batch 150] [--preset tacotron-tiny]

Trains the poster's model on random batches in processes, in two jobs of equally many ranks:

    master  the flow of nn.DataParallel: rank 0 holds the batch of all ranks, sends parameters and parts of
            the batch to the others, gathers their outputs, computes the loss and its gradient on all of
            them, sends that back, adds the gradients up, and alone has the optimizer
    equal   ours: each rank holds its batch, its outputs, its loss and its optimizer; gradients are averaged

A rank's working memory is its peak resident memory over the steps less what the process held before it made
its model (Python, PyTorch, MPI); on a GPU what PyTorch allocated at most.  The balance is the most over the
least of the ranks: of working memory, and of whole processes.

Last line: JSON {"master": {"working_mb": [...], "peak_mb": [...], "working_balance": ..., "peak_balance":
..., "only_master_mb": {what: MB}}, "equal": {...}}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich import box
from rich.table import Table

from benchmarks.papers import poster_model
from benchmarks.papers.poster_model import CONFIGS
from benchmarks.papers.poster_schemes import EqualRanks, Job, OneMaster, Scheme
from benchmarks.strategies.paired import launch_ranks
from speechdp.cli.support.console import make_console
from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_communicator
from speechdp.comm.startup.failure import guard

SCHEMES = ("master", "equal")
#: What the C library frees goes back to the system: else resident memory is what was used at some time.
_MEASURABLE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
_MB = 1e6


def status_bytes(name: str, status: str | None = None) -> int:
    """Return a figure of /proc/self/status, e.g. VmRSS (resident memory) or VmHWM (its peak), in bytes."""
    text = Path("/proc/self/status").read_text() if status is None else status
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def on_rank(comm: Communicator, given: argparse.Namespace) -> int:
    """Train in one scheme on this rank; rank 0 prints every rank's memory."""
    torch.set_num_threads(1)
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", comm.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    sizes = dataclasses.replace(poster_model.sizes_of(given.preset), batch=given.batch)
    job = Job(comm, comm.peers(), poster_model.config_of(given.preset), sizes, device)
    before = status_bytes("VmRSS")
    trained: Scheme = OneMaster(job) if given.scheme == "master" else EqualRanks(job)
    for _ in range(given.steps):
        trained.step()
    comm.barrier()
    peak = status_bytes("VmHWM")
    working = peak - before
    if device.type == "cuda":
        peak = working = torch.cuda.max_memory_allocated(device)
    figures = comm.allgather_object([working / _MB, peak / _MB])
    job.peers.close()
    if comm.rank == 0:
        print(json.dumps(summary(figures, trained.only_here)))
    return 0


def summary(figures: Sequence[Sequence[float]], only_master: dict[str, float]) -> dict[str, Any]:
    """Return a scheme's part of the last line, from every rank's working and peak memory in MB."""
    working, peak = ([round(value, 1) for value in column] for column in zip(*figures, strict=True))
    return {
        "working_mb": working,
        "peak_mb": peak,
        "working_balance": round(max(working) / min(working), 3),
        "peak_balance": round(max(peak) / min(peak), 3),
        "only_master_mb": {name: round(value, 1) for name, value in only_master.items()},
    }


def show(result: dict[str, Any]) -> None:
    """Print the table, and what the master alone holds."""
    table = Table(title="Memory of each rank, MB", title_justify="left", box=box.SIMPLE_HEAD)
    for title in ("scheme", "working, by rank", "most / least", "whole process, by rank", "most / least"):
        table.add_column(title)
    for scheme in SCHEMES:
        row = result[scheme]
        working, peak = (" ".join(f"{mb:.0f}" for mb in row[key]) for key in ("working_mb", "peak_mb"))
        table.add_row(scheme, working, f"{row['working_balance']:.2f}", peak, f"{row['peak_balance']:.2f}")
    make_console().print(table)
    held = result["master"]["only_master_mb"]
    print("held by the master alone: " + ", ".join(f"{name} {mb:.1f} MB" for name, mb in held.items()))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=150, help="of a rank; the poster's by default")
    parser.add_argument("--preset", choices=list(CONFIGS), default="tacotron-tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scheme", choices=SCHEMES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    given = parse(sys.argv[1:])
    if given.scheme:
        sys.exit(guard(lambda: create_communicator("mpi"), lambda comm: on_rank(comm, given)))
    result: dict[str, Any] = {}
    for scheme in SCHEMES:
        program = [__file__, *sys.argv[1:], "--scheme", scheme]
        result[scheme] = launch_ranks(given.ranks, program, env=_MEASURABLE)
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
