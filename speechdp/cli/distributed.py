"""What commands that run over ranks do first: communicator, world check, device, signals."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

import speechdp
from speechdp.cli.console import make_console
from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.create import choose_backend, create_communicator
from speechdp.comm.failure import guard
from speechdp.comm.world import check_world, versions
from speechdp.config import TrainOptions
from speechdp.data.dataset import Dataset
from speechdp.launching.cores import available_cores
from speechdp.timing.gpu import gpu_facts
from speechdp.train.device import choose_device
from speechdp.train.progress import ConsoleReporter, Reporter, SilentReporter
from speechdp.train.session import Session
from speechdp.train.stop import StopRequest


def over_ranks(backend: str, device: str, function: Callable[[Communicator], int | None]) -> int:
    """Run `function` on this rank, so that its failure ends all ranks; return the exit code."""
    # The device decides about NCCL, so it is needed before the communicator knows the local rank.
    wants_gpu = device != "cpu" and torch.cuda.is_available()
    return guard(
        lambda: create_communicator(backend, torch.device("cuda" if wants_gpu else "cpu")),
        function,
    )


@contextlib.contextmanager
def open_session(
    comm: Communicator, data: Path, options: TrainOptions, label: str, others: Mapping[str, object]
) -> Iterator[Session]:
    """Yield a session for training over the ranks of `comm`.  Collective.

    Args:
        comm: the ranks.
        data: the data directory.
        options: of the training.
        label: what the progress calls the run.
        others: the command's other arguments by name: ranks that differ in one would wait for each other.

    Raises:
        CommunicationError: ranks differ in world, versions, seed, data or options.
        ConfigError, ShardError: options or data that cannot be used.
    """
    dataset = Dataset.open(data)
    facts = {
        "seed": options.seed,
        "data checksum": dataset.checksum,
        "configuration": options.fingerprint(),
        **{name: str(value) for name, value in others.items()},
    }
    check_world(comm, facts)
    device = choose_device(options.device, comm.local_rank)
    reporter: Reporter = SilentReporter()
    if comm.rank == 0:
        reporter = ConsoleReporter(make_console(), label)
    notice = choose_backend(options.backend).notice
    if notice:
        reporter.notice(notice)
    hosts = comm.allgather_object(environment.host_name())
    if "OMP_NUM_THREADS" not in os.environ:
        # As `speechdp launch` has it: the ranks of a host share its cores instead of each taking all.
        torch.set_num_threads(max(1, available_cores() // hosts.count(environment.host_name())))
    reporter.notice(_welcome(comm, device, hosts))
    launch = environment.announced()
    run_facts = {
        "hosts": hosts,
        "command": ["speechdp", *sys.argv[1:]],
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}",
        "launcher": None if launch is None else launch.launcher,
        "gpus": comm.allgather_object(gpu_facts(device)),
    }
    with StopRequest() as stop:
        yield Session(dataset, comm, device, reporter, stop, run_facts)


def _welcome(comm: Communicator, device: torch.device, hosts: list[str]) -> str:
    unique = list(dict.fromkeys(hosts))
    where = unique[0]
    if len(unique) > 1:
        where = f"{len(unique)} hosts ({', '.join(unique[:4])}{', ...' if len(unique) > 4 else ''})"
    compute = "CPU (torch sees no GPU)"
    if device.type == "cuda":
        compute = torch.cuda.get_device_name(device)
    elif torch.cuda.is_available():
        compute = "CPU (as asked for)"
    ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
    return f"speechdp {speechdp.__version__}: {ranks} on {where}, back-end {comm.backend}, {compute}"
