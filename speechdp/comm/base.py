"""The contract every communicator back-end keeps (`serial`, `threads`, `horovod`, `mpi`, `torch`).

All methods are collective unless they say otherwise: every rank calls them, in the same order, with
tensors of the same shape and dtype.  `rank`, `size` and `local_rank` come from the back-end, never from
a guess at the environment.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from speechdp.errors import CommunicationError


class ReduceOp(Enum):
    """How an allreduce combines the ranks' values, element by element."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Work(ABC):
    """An exchange under way.  The tensor must not be touched before `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the result stands in the tensor.  Raises CommunicationError if a peer is gone."""


class CompletedWork(Work):
    """An exchange that was finished before it was handed out."""

    def wait(self) -> None:
        return None


class Communicator(ABC):
    """N equal ranks that exchange tensors.

    Attributes:
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        local_rank: index of this rank among those on the same host; selects the GPU.
    """

    backend: ClassVar[str]
    #: dtypes the back-end sums correctly; anything else is refused, because e.g. bfloat16 handed to
    #: MPI as bytes is summed wrongly without an error.
    reducible: ClassVar[frozenset[torch.dtype]] = frozenset(
        {torch.float32, torch.float64, torch.int32, torch.int64}
    )

    rank: int
    size: int
    local_rank: int

    def allreduce_async(self, x: Tensor, *, name: str, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Start combining `x` over all ranks, in place.  Collective.

        Args:
            x: contiguous tensor of a dtype in `reducible`; any shape, the same on every rank.
            name: identifies the exchange; unique among those under way at one time.
            op: how values are combined.

        Returns:
            Work to wait on before `x` is read or written.

        Raises:
            CommunicationError: the tensor cannot be reduced by this back-end.
        """
        if x.dtype not in self.reducible:
            known = ", ".join(sorted(str(d).removeprefix("torch.") for d in self.reducible))
            raise CommunicationError(
                f"the {self.backend} back-end cannot sum {str(x.dtype).removeprefix('torch.')} "
                f"(tensor {name!r}); convert it to one of: {known}"
            )
        if not x.is_contiguous():
            raise CommunicationError(f"tensor {name!r} is not contiguous; exchange a flat buffer")
        if self.size == 1 or x.numel() == 0:
            return CompletedWork()
        return self._allreduce_async(x, name, op)

    def allreduce(self, x: Tensor, *, name: str, op: ReduceOp = ReduceOp.SUM) -> Tensor:
        """Combine `x` over all ranks in place, wait, and return it.  Collective."""
        self.allreduce_async(x, name=name, op=op).wait()
        return x

    def broadcast(self, x: Tensor, *, name: str, root: int = 0) -> Tensor:
        """Overwrite `x` on every rank with `root`'s, in place, and return it.  Collective."""
        if not x.is_contiguous():
            raise CommunicationError(f"tensor {name!r} is not contiguous; broadcast a flat buffer")
        if self.size > 1 and x.numel() > 0:
            self._broadcast(x, name, root)
        return x

    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value` in rank order.  Collective.

        Values travel as JSON, not pickle: a message can never run code.  `value` must be made of
        None, bool, int, float, str, list and dict (NaN and infinity included).
        """
        encoded = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(encoded)]
        return [json.loads(part) for part in self._allgather_bytes(encoded)]

    def broadcast_object(self, value: Any, *, root: int = 0) -> Any:
        """Return `root`'s JSON-like `value` on every rank; the others' argument is ignored.  Collective."""
        return self.allgather_object(value if self.rank == root else None)[root]

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it.  Collective.  Waiting must not keep a core busy."""

    @abstractmethod
    def close(self) -> None:
        """Release the back-end's resources; join its threads.  Collective; safe to call twice."""

    def leave(self, exit_code: int) -> None:
        """End this process after `close`, where the back-end cannot survive an ordinary exit; else return."""
        return None

    @abstractmethod
    def abort(self, exit_code: int) -> NoReturn:
        """End every rank of the job at once with `exit_code`.  Called by one rank, not collective."""

    @abstractmethod
    def _allreduce_async(self, x: Tensor, name: str, op: ReduceOp) -> Work: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, name: str, root: int) -> None: ...

    @abstractmethod
    def _allgather_bytes(self, data: bytes) -> list[bytes]: ...
