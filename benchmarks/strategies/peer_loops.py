"""The peers' training loops, each written as its makers' documents have it, and run bare.

No communicator of ours is made: MPI, Horovod and gloo come up with their own settings.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from benchmarks.models.acoustic import make_acoustic_model
from benchmarks.strategies.contenders import loss_of, open_loader, print_rate, timed
from speechdp.comm import environment
from speechdp.data.loading.batch import Batch
from speechdp.data.loading.reader import SplitReader
from speechdp.data.shards.dataset import Dataset
from speechdp.options.run import TrainOptions
from speechdp.parallel.flat_buffer import FlatBuffer


class Ranks:
    """All ranks of MPI, for the clock."""

    def __init__(self) -> None:
        from mpi4py import MPI  # noqa: PLC0415  initialises MPI

        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()

    def barrier(self) -> None:
        self.world.Barrier()

    def allgather_object(self, value: Any) -> list[Any]:
        everyone: list[Any] = self.world.allgather(value)
        return everyone

    def finalise(self) -> None:
        """End MPI: without it mpirun takes a process that leaves for one that has failed."""
        from mpi4py import MPI  # noqa: PLC0415

        MPI.Finalize()


class Lossy(nn.Module):
    """A model whose forward pass ends in the loss, so that DDP's wrapper sees the whole of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return loss_of(self.model, batch)


@dataclass(frozen=True)
class Setting:
    """What every peer starts from."""

    ranks: Ranks
    model: Lossy
    learning_rate: float
    max_norm: float
    period: int

    def adam(self) -> torch.optim.Optimizer:
        """Return the optimizer ours has, over the model's own tensors."""
        return torch.optim.Adam(self.model.parameters(), self.learning_rate, fused=True)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)


#: Trains on one batch.
Step = Callable[[Batch], None]


def local_step(model: nn.Module, optimizer: Any, setting: Setting) -> Step:
    """Return a step as one writes it for one process."""

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        model(batch).backward()
        setting.clip()
        optimizer.step()

    return step


@contextlib.contextmanager
def horovod(setting: Setting, *, gloo: bool) -> Iterator[Step]:
    """Give Horovod's DistributedOptimizer, over MPI or over Gloo as horovodrun --gloo has it."""
    with _horovod_over_gloo() if gloo else contextlib.nullcontext():
        import horovod.torch as hvd  # noqa: PLC0415

        hvd.init()
    model = setting.model
    optimizer = hvd.DistributedOptimizer(setting.adam(), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.synchronize()
        setting.clip()
        with optimizer.skip_synchronize():
            optimizer.step()

    yield step
    setting.ranks.barrier()
    hvd.shutdown()


@contextlib.contextmanager
def _horovod_over_gloo() -> Iterator[None]:
    """Say to `hvd.init`, which the block calls, where the ranks meet."""
    from speechdp.comm.horovod.gloo import GlooMeeting  # noqa: PLC0415
    from speechdp.comm.mpi.communicator import MpiCommunicator  # noqa: PLC0415

    mpi = MpiCommunicator()  # carries the meeting only
    meeting = GlooMeeting(mpi)
    with environment.set_meanwhile(meeting.settings):
        yield
    mpi.close()


@contextlib.contextmanager
def process_group(ranks: Ranks) -> Iterator[Any]:
    """Give torch.distributed over gloo."""
    import torch.distributed as dist  # noqa: PLC0415

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = (
        dist.TCPStore("127.0.0.1", 0, ranks.size, is_master=True, wait_for_workers=False)
        if not ranks.rank
        else None
    )
    port = ranks.allgather_object(store.port if store else 0)[0]
    store = store or dist.TCPStore("127.0.0.1", port, ranks.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size)
    yield dist
    ranks.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def ddp(setting: Setting) -> Iterator[Step]:
    """Give DistributedDataParallel."""
    with process_group(setting.ranks):
        model = nn.parallel.DistributedDataParallel(setting.model, gradient_as_bucket_view=True)
        yield local_step(model, setting.adam(), setting)


@contextlib.contextmanager
def post_local_sgd(setting: Setting) -> Iterator[Step]:
    """Give DDP whose gradients stay local and a PeriodicModelAverager, from the first step on."""
    with process_group(setting.ranks) as dist:
        model = nn.parallel.DistributedDataParallel(setting.model, gradient_as_bucket_view=True)
        optimizer = post_local_sgd_of(model, setting.adam(), dist, setting.period)
        yield local_step(model, optimizer, setting)


def post_local_sgd_of(
    model: nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer, dist: Any, period: int
) -> Any:
    """Return torch's PostLocalSGDOptimizer over an optimizer of a model in DDP, from the first step on."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook  # noqa: PLC0415
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager  # noqa: PLC0415
    from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415

    # No all-reduce inside the node: both ranks of the node are replicas of their own.
    state = hook.PostLocalSGDState(None, dist.group.WORLD, 0, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, hook.post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=period, warmup_steps=0))


@contextlib.contextmanager
def accelerate_local_sgd(setting: Setting) -> Iterator[Step]:
    """Give accelerate's LocalSGD."""
    import accelerate  # noqa: PLC0415
    from accelerate.local_sgd import LocalSGD  # noqa: PLC0415

    with process_group(setting.ranks):
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(setting.model, setting.adam())
        assert accelerator.num_processes == setting.ranks.size, "accelerate did not find the ranks"
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=setting.period) as local_sgd:

            def step(batch: Batch) -> None:
                optimizer.zero_grad()
                accelerator.backward(model(batch))
                accelerator.clip_grad_norm_(model.parameters(), setting.max_norm)
                optimizer.step()
                local_sgd.step()

            yield step


@contextlib.contextmanager
def mpi4py_gradients(setting: Setting) -> Iterator[Step]:
    """Give a hand-written loop: gradients live in one vector, one Allreduce a step."""
    from mpi4py import MPI  # noqa: PLC0415

    world, model = setting.ranks.world, setting.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = FlatBuffer([torch.zeros_like(p) for p in parameters])
    for parameter, view in zip(parameters, gradients.views, strict=True):
        parameter.grad = view
    optimizer, flat = setting.adam(), gradients.whole.numpy()

    def step(batch: Batch) -> None:
        gradients.whole.zero_()
        model(batch).backward()
        world.Allreduce(MPI.IN_PLACE, flat)
        gradients.whole.div_(world.size)
        setting.clip()
        optimizer.step()

    yield step


@contextlib.contextmanager
def mpi4py_parameters(setting: Setting) -> Iterator[Step]:
    """Give a hand-written loop: parameters live in one vector, one Allreduce a period."""
    from mpi4py import MPI  # noqa: PLC0415

    world, model = setting.ranks.world, setting.model
    parameters = [p for p in model.parameters() if p.requires_grad]
    values = FlatBuffer([p.detach() for p in parameters])
    for parameter, view in zip(parameters, values.views, strict=True):
        parameter.data = view
    train, flat, number = local_step(model, setting.adam(), setting), values.whole.numpy(), 0

    def step(batch: Batch) -> None:
        nonlocal number
        train(batch)
        number += 1
        if number % setting.period == 0:
            world.Allreduce(MPI.IN_PLACE, flat)
            values.whole.div_(world.size)

    yield step


PEER_LOOPS: dict[str, Callable[[Setting], contextlib.AbstractContextManager[Step]]] = {
    "Horovod over MPI": partial(horovod, gloo=False),
    "Horovod over Gloo": partial(horovod, gloo=True),
    "torch DDP": ddp,
    "mpi4py gradients": mpi4py_gradients,
    "torch PostLocalSGD": post_local_sgd,
    "accelerate LocalSGD": accelerate_local_sgd,
    "mpi4py parameters": mpi4py_parameters,
}


@dataclass(frozen=True)
class Run:
    """What is measured: a peer, over which data, for how long.

    Attributes:
        name: of PEER_LOOPS.
        data: data directory.
        seconds: to fill with steps.
        period: steps between averages of parameters.
    """

    name: str
    data: Path
    seconds: float
    period: int


def run_peer(run: Run, options: TrainOptions) -> NoReturn:
    """Be a rank of a peer: measure it, let rank 0 print the rate, and leave."""
    torch.set_num_threads(1)
    ranks = Ranks()
    try:
        _measure(ranks, run, options)
        ranks.finalise()
    except BaseException:  # every way out of a rank must end the others
        traceback.print_exc()
        ranks.world.Abort(1)
    # torch.distributed aborts now and then in an ordinary exit.
    environment.end_process(0)


def _measure(ranks: Ranks, run: Run, options: TrainOptions) -> None:
    dataset = Dataset.open(run.data)
    setting = Setting(
        ranks,
        Lossy(make_acoustic_model(dataset, options)),
        options.schedule().learning_rate,
        options.optimizer.max_gradient_norm,
        run.period,
    )
    with ExitStack() as stack:
        reader = SplitReader(dataset, "train")
        stack.callback(reader.close)
        loader = stack.enter_context(open_loader(reader, options, ranks.rank, ranks.size))
        step = stack.enter_context(PEER_LOOPS[run.name](setting))

        def advance() -> int:
            batch = next(loader).batch
            step(batch)
            return batch.num_frames

        print_rate(ranks, *timed(ranks, advance, run.seconds, whole=run.period))
