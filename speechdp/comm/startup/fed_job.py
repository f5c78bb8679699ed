"""A job of which some ranks feed the others: all its ranks over MPI, and those that train over any back-end.

Imported by `comm/startup/create.py` only: it initialises MPI.
"""

from __future__ import annotations

import torch

from speechdp.comm import environment
from speechdp.comm.base import Communicator
from speechdp.comm.mpi.communicator import MpiCommunicator
from speechdp.comm.startup.feeder_roles import assign_roles


class FedJob(MpiCommunicator):
    """All ranks of the job, for the feeding and the checks of the world.

    Attributes:
        roles: who trains and who feeds.
        is_feeder: what this rank does.
        part: the communicator of the ranks that do the same; training runs over the trainers'.

    Args:
        backend: `mpi`, `horovod` or `torch`: what the trainers exchange over.
        num_feeders: of each host.
        device: where the trainers' tensors live.

    Raises:
        ConfigError: no rank of a host would train.
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
