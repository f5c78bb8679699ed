"""One rank of a job with feeders: `feeding.py BACKEND NUM_FEEDERS DATA OUT`.

Checks packets over all ranks; then the trainers train by themselves and, once they can open no shard any
more, fed by the others, to the same bits.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from speechdp.comm.base import Communicator
from speechdp.comm.startup.create import create_fed_job
from speechdp.comm.startup.failure import guard
from speechdp.comm.startup.fed_job import FedJob
from speechdp.data.loading.source_options import SourceOptions, open_local_source
from speechdp.data.loading.source_request import SourceRequest
from speechdp.data.plan.epoch_plan import PlanOptions, plan_epoch
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import AugmentOptions
from speechdp.feeding.fed_source import Feeders
from speechdp.feeding.feeders import open_link, serve_trainers
from speechdp.options.batch import BatchOptions, LoadingOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.feeding import assert_same_batch
from tests.helpers.finished_run import assert_equal_runs
from tests.helpers.packet_checks import CHECKS
from tests.helpers.waiting import no_thread_left

OPTIONS = TrainOptions(
    ModelOptions(layers=1, cells=8, dropout=0.2),
    BatchOptions(batch_size=64, chunk_frames=16, left_context=3),
    augment=AugmentOptions(spec_augment=True),
    epochs=1,
)
#: Whole utterances, all of them at once: larger than what MPI sends without asking the receiver.
LARGE = PlanOptions(batch_size=10_000)


def no_shard(*args: object) -> NoReturn:
    raise AssertionError("a trainer opens a shard")


def train(job: FedJob, dataset: Dataset, out: Path) -> None:
    comm, cpu = job.part, torch.device("cpu")
    wanted = SourceRequest("train")
    with closing(open_local_source(dataset, wanted, SourceOptions())) as local:
        segments = plan_epoch(local.index, LARGE, 0, 1).ranks[0].batch(0)
        expected = local.batch(segments)
    assert expected.features.nbytes > 1 << 20, expected.features.nbytes
    session = Session(dataset, comm, cpu)
    train_run(session, OPTIONS, out / "local")
    with open_link(job, job.roles, cpu) as goodbye:
        goodbye.exit_code = 75
        Dataset.open_shard = no_shard  # type: ignore[assignment]
        feeders = Feeders(goodbye.link)
        with closing(feeders.open(wanted)) as source:
            for pending in [source.start(segments) for _ in range(7)]:
                assert_same_batch(pending.result(), expected)
        fed_options = dataclasses.replace(OPTIONS, loading=LoadingOptions(feeders=1))
        train_run(dataclasses.replace(session, feeders=feeders), fed_options, out / "fed")
    if comm.rank == 0:
        assert_equal_runs(out / "fed", out / "local")
        print(f"{comm.size} trainers over {comm.backend}, fed by {job.size - comm.size}: the same bits")


def main(comm: Communicator) -> None:
    job = cast(Any, comm)
    for check in CHECKS:
        check(job)
    dataset = Dataset.open(sys.argv[3])
    if job.is_feeder:
        assert serve_trainers(job, job.roles, dataset) == 75
    else:
        train(job, dataset, Path(sys.argv[4]))


with no_thread_left():
    exit_code = guard(lambda: create_fed_job(sys.argv[1], int(sys.argv[2])), main)
sys.exit(exit_code)
