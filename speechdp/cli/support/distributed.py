"""Start-up of commands that train over ranks: communicator, world check, device, signals, feeders."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import speechdp
from speechdp.cli.support.console import make_console
from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.device import choose_device, exchange_device
from speechdp.comm.startup.create import choose_backend, create_communicator, create_fed_job
from speechdp.comm.startup.failure import guard
from speechdp.comm.startup.feeder_roles import Roles
from speechdp.comm.startup.start_guard import StartGuard
from speechdp.comm.startup.world import check_devices, check_sum, check_world, versions
from speechdp.counting import counted
from speechdp.data.shards.dataset import Dataset
from speechdp.launching.cores import share_cores
from speechdp.models.lstm_config import LstmConfig
from speechdp.options.run import TrainOptions
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import heed_put_off, ignore_signals
from speechdp.process.file_limit import raise_file_limit
from speechdp.process.garbage import look_for_garbage_as_usual
from speechdp.process.heap import keep_few_kernels, keep_freed_memory
from speechdp.timing.gpu import gpu_facts
from speechdp.train.origin import git_state
from speechdp.train.progress import ConsoleReporter, Reporter, SilentReporter
from speechdp.train.session import Session

if TYPE_CHECKING:
    from speechdp.comm.startup.fed_job import FedJob


@dataclass(frozen=True)
class SessionRequest:
    """Settings with which a training command starts its ranks.

    Attributes:
        data: the data directory.
        options: options of the training.
        label: name of the run in the progress.
        others: the command's other arguments by name; ranks that differ in one would wait for each other.
        git: state of the checkout that speechdp runs from; on rank 0.
        saves_on_interrupt: with one rank, treat Ctrl-C as a stop request, which saves a checkpoint.
    """

    data: Path
    options: TrainOptions
    label: str
    others: Mapping[str, object] = field(default_factory=dict)
    git: dict[str, Any] | None = None
    saves_on_interrupt: bool = False

    def facts(self, dataset: Dataset) -> dict[str, Any]:
        """Return the facts that must be the same on every rank."""
        return {
            "seed": self.options.seed,
            "data checksum": dataset.checksum,
            "configuration": self.options.fingerprint(),
            "options of loading": str(self.options.loading),
            "--tolerate-loss": str(self.options.faults.tolerate_loss),
            **{name: str(value) for name, value in self.others.items()},
        }


def train_over_ranks(request: SessionRequest, function: Callable[[Session], int]) -> int:
    """Run `function` with a session on every training rank, while the others feed; return the exit code.

    Refuses ranks that differ in world, versions, seed, data or options.  If a rank fails, all ranks end.
    """
    look_for_garbage_as_usual()
    heed_put_off()
    options = request.options
    num_feeders = options.loading.feeders
    launch = environment.announced()
    if launch is None or launch.rank == 0 or num_feeders > 0:
        # Before MPI is initialised, because no process may be forked afterwards.
        request = dataclasses.replace(request, git=git_state(Path(speechdp.__file__).parent))
    device = exchange_device(options.device)
    start = StartGuard(options.faults.hang_timeout)
    if num_feeders == 0:
        return guard(
            lambda: start.waiting_for_all_ranks(lambda: create_communicator(options.backend, device)),
            lambda comm: _train(comm, request, start, function),
        )
    return guard(
        lambda: start.waiting_for_all_ranks(lambda: create_fed_job(options.backend, num_feeders, device)),
        lambda comm: _train_or_feed(cast("FedJob", comm), request, start, function),
    )


def _train(
    comm: Communicator, request: SessionRequest, start: StartGuard, function: Callable[[Session], int]
) -> int:
    dataset = Dataset.open(request.data)
    check_world(comm, request.facts(dataset))
    raise_file_limit()
    share_cores(comm.allgather_object(environment.host_name()), environment.host_name())
    with _stop_request(by_interrupt=request.saves_on_interrupt and comm.size == 1) as stop:
        session = _session(comm, request, dataset, stop)
        start.over()
        return function(session)


@contextmanager
def _stop_request(*, by_interrupt: bool = False) -> Iterator[StopRequest]:
    """Turn signals into stop requests; ignore them once the work is done and ranks are leaving."""
    try:
        with StopRequest(by_interrupt=by_interrupt) as stop:
            yield stop
    finally:
        ignore_signals()


def _train_or_feed(
    job: FedJob, request: SessionRequest, start: StartGuard, function: Callable[[Session], int]
) -> int:
    """Train or feed on this rank of a job with feeders; return the exit code that all ranks agreed on."""
    from speechdp.feeding.fed_source import Feeders  # noqa: PLC0415 - few jobs have feeders
    from speechdp.feeding.feeders import open_link, serve_trainers  # noqa: PLC0415

    dataset = Dataset.open(request.data)
    check_world(job, request.facts(dataset))
    raise_file_limit()
    share_cores(job.roles.hosts, environment.host_name())
    # A feeder also receives stop requests, but keeps serving until the training ranks have ended.
    with _stop_request() as stop:
        if job.is_feeder:
            start.over()
            return serve_trainers(job, job.roles, dataset, request.options.loading.loader_threads)
        device = choose_device(request.options.device, job.part.local_rank)
        with open_link(job, job.roles, device) as connection:
            check_sum(job.part)
            session = _session(job.part, request, dataset, stop, job.roles)
            start.over()
            connection.exit_code = function(dataclasses.replace(session, feeders=Feeders(connection.link)))
        return connection.exit_code


def _session(
    comm: Communicator,
    request: SessionRequest,
    dataset: Dataset,
    stop: StopRequest,
    roles: Roles | None = None,
) -> Session:
    """Return a session for training over the ranks of `comm`.  Collective.

    Args:
        comm: communicator of the training ranks.
        roles: roles of all ranks of the job, if some of them feed.
    """
    keep_few_kernels(os.environ, new_shapes=_has_new_shapes(request.options))
    keep_freed_memory(os.environ)  # training steps would return it to the system; feeders take no steps
    options = request.options
    if request.others.get("--resume") is False:
        # A resumed run may have fewer ranks, or be from a version that refused less.  Runs of a comparison
        # are started with --resume, too, and other commands choose the number of ranks of their jobs.
        options.check_slow_ranks(comm.size)
        options.check_warmup()
    device = choose_device(options.device, comm.local_rank)
    check_devices(comm, device)
    reporter = reporter_maker(comm)(request.label)
    notice = choose_backend(options.backend, device).notice
    if notice:
        reporter.notice(notice)
    hosts = comm.allgather_object(environment.host_name())
    num_feeders = 0 if roles is None else len(roles.feeders)
    reporter.notice(_welcome(comm, device, hosts, num_feeders))
    launch = environment.announced()
    facts: dict[str, Any] = {
        "hosts": hosts,
        "command": ["speechdp", *sys.argv[1:]],
        "versions": versions(),
        "git": request.git,
        "machine": f"{platform.system()} {platform.machine()}",
        "launcher": None if launch is None else launch.launcher,
        "gpus": comm.allgather_object(gpu_facts(device)),
    }
    if roles is not None:
        facts["feeders"] = {
            "ranks": list(roles.feeders),
            "hosts": [roles.hosts[rank] for rank in roles.feeders],
        }
    return Session(dataset, comm, device, reporter, stop, facts)


def _has_new_shapes(options: TrainOptions) -> bool:
    """Return whether the model is an LSTM on whole utterances: nearly every batch has a length of its own."""
    preset = options.preset
    return isinstance(preset.model, LstmConfig) and options.batch.chunk_frames_with(preset) == 0


def reporter_maker(comm: Communicator) -> Callable[[str], Reporter]:
    """Return a function that makes the reporter of a named run; only rank 0's print, all on one console."""
    if comm.rank > 0:
        return lambda name: SilentReporter()
    console = make_console()
    return lambda name: ConsoleReporter(console, name)


def _welcome(comm: Communicator, device: torch.device, hosts: list[str], num_feeders: int) -> str:
    unique = list(dict.fromkeys(hosts))
    where = unique[0]
    if len(unique) > 1:
        where = f"{len(unique)} hosts ({', '.join(unique[:4])}{', ...' if len(unique) > 4 else ''})"
    compute = "CPU (torch sees no GPU)"
    if device.type == "cuda":
        compute = torch.cuda.get_device_name(device)
    elif torch.cuda.is_available():
        compute = "CPU (as asked for)"
    ranks = counted(comm.size, "rank")
    if num_feeders:
        ranks += f" and {counted(num_feeders, 'feeder')}"
    return f"speechdp {speechdp.__version__}: {ranks} on {where}, back-end {comm.backend}, {compute}"
