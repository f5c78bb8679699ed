"""Ranks over torch.distributed: gloo on CPUs, NCCL on GPUs.

mpirun is enough to start the ranks, which meet over MPI (`meeting.py`).  Under torchrun they use its own
rendezvous and need no MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from speechdp import remedies
from speechdp.comm import environment
from speechdp.comm.base import Communicator, PeerCommunicator, ReduceOp, Work
from speechdp.comm.device import choose_device
from speechdp.comm.staging import as_bytes
from speechdp.comm.sums import REDUCIBLE
from speechdp.comm.torchdist.meeting import TIMEOUT, Rendezvous, checked, meet
from speechdp.comm.torchdist.peers import TorchPeers
from speechdp.errors import ConfigError
from speechdp.process.ending import end_finalised

_OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.MAX: dist.ReduceOp.MAX, ReduceOp.MIN: dist.ReduceOp.MIN}


class _TorchWork(Work):
    def __init__(self, work: Any, name: str) -> None:
        self._work, self._name = work, name

    def wait(self) -> None:
        checked(f"allreduce of {self._name!r}", self._work.wait)


class TorchGroup(Communicator):
    """The ranks of one process group: all or some of the job's ranks.

    Args:
        meeting: where all ranks of the job met.
        group: process group of torch.distributed; None for the group of all ranks.
        ranks: rank in the job of every rank of the group.
        scope: name of this group in the store, unique among groups.
    """

    backend: ClassVar[str] = "torch"
    reducible: ClassVar[frozenset[torch.dtype]] = REDUCIBLE["torch"]

    def __init__(self, meeting: Rendezvous, group: Any, ranks: Sequence[int], scope: str) -> None:
        self._meeting, self._group, self._ranks, self._scope = meeting, group, ranks, scope
        self.rank, self.size = ranks.index(meeting.rank), len(ranks)
        self.local_rank = meeting.local_rank
        self._num_channels = 0
        self._closed = False

    def peers(self) -> PeerCommunicator:
        name = f"{self._scope}/peers-{self._num_channels}"
        self._num_channels += 1
        with self._meeting.connecting():
            return TorchPeers(PrefixStore(name, self._meeting.store), self.rank, self.size)

    def _split(self, color: int) -> Communicator:
        # torch.distributed makes a group only if all ranks of the job take part, or else names it after its
        # members.  Made, released and made again, such a group would find the old one's keys in the store.
        raise ConfigError(
            "the torch back-end cannot split a group once more; split the communicator of all ranks, "
            f"or choose {remedies.backend('mpi')}"
        )

    def barrier(self) -> None:
        # On the CPU, since gloo waits in poll() and does not spin.
        checked("barrier", lambda: dist.all_reduce(torch.zeros(1), group=self._group))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.barrier()
        dist.destroy_process_group(self._group)

    def abandon(self) -> None:
        if not self._closed:
            self._closed = True
            dist.destroy_process_group(self._group)

    def abort(self, exit_code: int) -> NoReturn:
        if self._meeting.over_mpi:
            from speechdp.comm.mpi.library import abort_world  # noqa: PLC0415

            abort_world(exit_code)
        environment.end_process(exit_code or 1)

    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work:
        def start() -> Any:
            return dist.all_reduce(x.detach(), op=_OPS[op], group=self._group, async_op=True)

        return _TorchWork(checked(f"allreduce of {name!r}", start), name)

    def _broadcast(self, x: Tensor, name: str, root: int) -> None:
        source = self._ranks[root]
        checked(f"broadcast of {name!r}", lambda: dist.broadcast(as_bytes(x), src=source, group=self._group))

    def _allgather_bytes(self, data: bytes) -> list[bytes]:
        part = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
        sizes = [int(s) for s in self._allgather(torch.tensor([part.numel()]))]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: part.numel()] = part
        gathered = self._allgather(padded)
        return [g[:n].numpy().tobytes() for g, n in zip(gathered, sizes, strict=True)]

    def _allgather(self, x: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(x) for _ in range(self.size)]
        checked("allgather", lambda: dist.all_gather(gathered, x, group=self._group))
        return gathered


class TorchCommunicator(TorchGroup):
    """All ranks of the job, or some of them.

    Args:
        device: device of the tensors; CUDA selects NCCL.
        part: communicator over MPI of the ranks to join, if these are not all of the job's.

    Raises:
        CommunicationError: the ranks cannot meet, or some would compute on GPUs and others on the CPU.
        ConfigError: this host has more ranks than its GPUs serve.
    """

    def __init__(self, device: torch.device, part: Communicator | None = None) -> None:
        on_gpu = device.type == "cuda"
        # NCCL connects two ranks only when they first exchange; gloo does so if configured.
        meeting = meet(part, device, connects_later=on_gpu or environment.gloo_connects_later())
        super().__init__(meeting, None, range(meeting.size), "speechdp")
        self._num_splits = 0
        if device.type == "cuda" and device.index is None:
            # This rank's GPU is known only now that the ranks of this host have been counted.
            device = choose_device("cuda", self.local_rank)
        options: dict[str, Any] = {"device_id": device} if on_gpu else {}
        with meeting.connecting():
            checked(
                "init_process_group",
                lambda: dist.init_process_group(
                    # Counters and objects are on the CPU, whatever the model's device.
                    "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                    store=meeting.store,
                    rank=self.rank,
                    world_size=self.size,
                    timeout=TIMEOUT,
                    **options,
                ),
            )

    def _split(self, color: int) -> Communicator:
        colors: list[int] = self.allgather_object(color)
        self._num_splits += 1
        members = {c: [r for r, other in enumerate(colors) if other == c] for c in sorted(set(colors))}
        # Every rank makes every group: torch.distributed waits for all of them.
        with self._meeting.connecting():
            groups = checked(
                "split", lambda: {c: dist.new_group(m, timeout=TIMEOUT) for c, m in members.items()}
            )
        scope = f"{self._scope}/split-{self._num_splits}-{color}"
        return TorchGroup(self._meeting, groups[color], members[color], scope)

    def leave(self, exit_code: int) -> None:
        # Occasionally torch.distributed ends a process that exits normally with "terminate called without an
        # active exception": one of its own threads has not been joined by then.
        if self._meeting.over_mpi:
            from speechdp.comm.mpi.library import finalise  # noqa: PLC0415

            finalise()
            environment.flush_output()
            end_finalised(exit_code)
        environment.end_process(exit_code)
