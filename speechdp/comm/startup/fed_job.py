"""A job in which some ranks feed the others: all ranks use MPI; those that train may use any back-end.

Imported by `comm/startup/create.py` only: it initialises MPI.
"""

from __future__ import annotations

import torch

from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.mpi.communicator import MpiCommunicator
from speechdp.comm.startup.feeder_roles import assign_roles


class FedJob(MpiCommunicator):
    """All ranks of the job, for feeding and for the world check.

    Attributes:
        roles: which ranks train and which feed.
        is_feeder: whether this rank feeds.
        part: communicator of the ranks with this rank's role; training uses the trainers'.

    Args:
        backend: back-end of the trainers: `mpi`, `horovod` or `torch`.
        num_feeders: number of feeders on each host.
        device: device of the trainers' tensors.

    Raises:
        ConfigError: a host would have no rank that trains.
    """

    def __init__(self, backend: str, num_feeders: int, device: torch.device) -> None:
        super().__init__()
        self.roles = assign_roles(self.allgather_object(environment.host_name()), num_feeders)
        self.is_feeder = self.rank in self.roles.feeders
        self.role = "feeder" if self.is_feeder else ""
        self._mpi_part = self.split(int(self.is_feeder))
        self.part = self._mpi_part if self.is_feeder else _trainers_over(backend, self._mpi_part, device)

    def close(self) -> None:
        self.part.close()
        self._mpi_part.close()
        super().close()

    def leave(self, exit_code: int) -> None:
        self.part.leave(exit_code)


def _trainers_over(backend: str, part: Communicator, device: torch.device) -> Communicator:
    if backend == "horovod":
        from speechdp.comm.horovod.communicator import HorovodCommunicator  # noqa: PLC0415  only where it is wanted

        return HorovodCommunicator(part)
    if backend == "torch":
        from speechdp.comm.torchdist.communicator import TorchCommunicator  # noqa: PLC0415

        return TorchCommunicator(device, part)
    return part
