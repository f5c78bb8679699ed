"""Commands over ranks: what is set before the ranks start, and refused once they have."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speechdp.cli import main
from speechdp.cli.support import distributed, ranks
from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import CommunicationError, ConfigError
from speechdp.options.batch import BatchOptions
from speechdp.options.faults import FaultOptions
from speechdp.options.model import ModelOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import TrainOptions


@pytest.mark.parametrize(("given", "expected"), [(None, "20"), ("3", "3")])
def test_horovod_looks_for_work_rarely_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", given or "")
    if given is None:
        monkeypatch.delenv("HOROVOD_CYCLE_TIME")
    seen: list[str] = []

    def create(_backend: str, _device: torch.device) -> Communicator:
        seen.append(os.environ["HOROVOD_CYCLE_TIME"])  # what Horovod reads as it starts
        return SerialCommunicator()

    monkeypatch.setattr(ranks, "create_communicator", create)
    assert ranks.over_ranks("serial", "cpu", lambda comm: comm.rank) == 0
    assert seen == [expected]


def test_a_training_over_gpus_and_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--device auto` gives it where one host has no GPU, or no driver for it."""
    nothing: Any = None
    request = distributed.SessionRequest(Path("D"), TrainOptions(), "run")
    kinds = {0: torch.device("cpu"), 1: torch.device("cuda", 0)}
    monkeypatch.setattr(distributed, "choose_device", lambda _name, local_rank: kinds[local_rank])
    monkeypatch.setattr(distributed, "keep_freed_memory", lambda _environ: None)

    def begin(comm: Communicator) -> str:
        comm.local_rank = comm.rank
        with pytest.raises(CommunicationError) as caught:
            distributed._session(comm, request, nothing, nothing)
        return str(caught.value)

    for said in run_threads(2, begin):
        assert said.startswith("rank 1 on ") and " and rank 0 on " in said


@pytest.mark.parametrize(
    ("others", "is_refused"), [({"--resume": False}, True), ({"--resume": True}, False), ({}, False)]
)
def test_a_run_that_begins_slows_down_no_rank_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, object], is_refused: bool
) -> None:
    """One that goes on may have lost it; jobs of other commands have as many ranks as their tables say."""
    nothing: Any = None
    request = distributed.SessionRequest(Path("D"), TrainOptions(slow_ranks="1:5"), "run", others)
    monkeypatch.setattr(distributed, "keep_freed_memory", lambda _environ: None)
    if is_refused:
        with pytest.raises(ConfigError, match="--slow-ranks 1:5: there is no rank 1"):
            distributed._session(SerialCommunicator(), request, nothing, nothing)
    else:
        distributed._session(SerialCommunicator(), request, nothing, nothing)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_run_that_begins_has_a_warm_up_if_it_is_said_where_that_starts(
    monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    nothing: Any = None
    options = TrainOptions(optimizer=OptimizerOptions(warmup_from=0.01))
    request = distributed.SessionRequest(Path("D"), options, "run", {"--resume": resumes})
    monkeypatch.setattr(distributed, "keep_freed_memory", lambda _environ: None)
    if resumes:
        distributed._session(SerialCommunicator(), request, nothing, nothing)
    else:
        with pytest.raises(ConfigError, match=r"--warmup-from 0\.01: there is no warm-up"):
            distributed._session(SerialCommunicator(), request, nothing, nothing)


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        (TrainOptions(), "24"),
        (TrainOptions(batch=BatchOptions(chunk_frames=20)), "64"),
        (TrainOptions(model=ModelOptions(preset="swb2000")), "64"),
        (TrainOptions(model=ModelOptions(preset="swb2000"), batch=BatchOptions(chunk_frames=0)), "24"),
        (TrainOptions(batch=BatchOptions(global_batch=32)), "24"),
        (TrainOptions(task="synthesis"), "64"),
    ],
)
def test_an_lstm_on_whole_utterances_keeps_the_kernels_of_a_step(
    monkeypatch: pytest.MonkeyPatch, options: TrainOptions, kernels: str
) -> None:
    """Its batches have new shapes; what those of former steps hold splits the heap into gaps."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "")  # so that the end of the test removes what the session sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(distributed, "keep_freed_memory", lambda _environ: None)
    nothing: Any = None
    request = distributed.SessionRequest(Path("D"), options, "run")
    distributed._session(SerialCommunicator(), request, nothing, nothing)
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == kernels


def test_ranks_that_differ_in_whether_they_tolerate_a_loss_are_told_apart() -> None:
    dataset: Any = SimpleNamespace(checksum="abc")
    given = (TrainOptions(faults=FaultOptions(tolerate_loss=tolerates)) for tolerates in (False, True))
    one, other = (distributed.SessionRequest(Path("D"), options, "run").facts(dataset) for options in given)
    assert {name for name in one if one[name] != other[name]} == {"--tolerate-loss"}


def test_ranks_of_a_host_share_its_cores_where_nobody_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a training do; each alone would take all of them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    shared: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", shared.append)
    monkeypatch.setattr("speechdp.launching.cores.available_cores", lambda: 8)

    class OneOfTwo(SerialCommunicator):
        def allgather_object(self, value: Any) -> list[Any]:
            return [value, value]

        def leave(self, exit_code: int) -> None:
            """Stay."""

    def create(_backend: str, _device: torch.device) -> Communicator:
        comm = OneOfTwo()
        comm.size = 2
        return comm

    monkeypatch.setattr(ranks, "create_communicator", create)
    assert ranks.over_ranks("mpi", "cpu", lambda comm: comm.rank) == 0
    assert shared == [4]


def test_a_rank_may_open_as_many_files_as_the_system_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a training: a split of more shards than the soft limit is decoded, too."""
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(ranks, "create_communicator", lambda _backend, _device: SerialCommunicator())
    seen: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    try:
        ranks.over_ranks(
            "serial", "cpu", lambda _: seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert seen == [before[1]]


@pytest.mark.parametrize(("rank", "waits"), [(None, []), ("0", []), ("1", [main._AFTER_RANK_0_S])])
def test_what_is_wrong_on_all_ranks_is_told_by_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str | None, waits: list[float]
) -> None:
    """mpirun ends the others meanwhile; where only another one is stopped, it tells later."""
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    waited: list[float] = []
    monkeypatch.setattr(environment.time, "sleep", waited.append)
    assert main.run(["train", "DATA", "RUN", "--strategy", "nope"]) == 1
    assert waited == waits
    assert capsys.readouterr().err.startswith("speechdp: unknown strategy 'nope'; there are: ")
