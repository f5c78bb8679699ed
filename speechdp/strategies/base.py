"""What a strategy is: it alone decides what ranks exchange, with whom, and when the optimizer moves.

One file a strategy; the file's name is the strategy's name on the command line.  A strategy is a dataclass
whose fields are its options: `--strategy model_averaging:period=16,momentum=average`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from speechdp.comm.base import Communicator
from speechdp.timing.timeline import Timeline
from speechdp.train.replica import Replica


@dataclass(frozen=True)
class Progress:
    """Where training stands after a backward pass; the same on every rank, known without an exchange.

    Attributes:
        step: backward passes so far, this one included.
        frames_per_rank: frames so far, averaged over ranks (from the epoch plan, which every rank has).
        time_s: training time on this rank; the one value here that differs between ranks.
    """

    step: int
    frames_per_rank: float
    time_s: float


class Strategy(ABC):
    """Turns the gradients of this rank into the next parameters of this rank.

    Life: `attach` once, `step` after every backward pass (also one without frames: a rank whose part of
    the epoch is shorter keeps joining), `finish` at the end.
    """

    #: Every rank makes the same exchanges at the same steps; such runs resume bitwise.
    synchronous: ClassVar[bool]
    #: All replicas hold the same parameters and optimizer state after every step.
    replicas_equal: ClassVar[bool]

    #: Whether there is an exchange at every step or nearly so; back-ends may trade latency for idle cost.
    exchanges_every_step: bool = True

    replica: Replica
    comm: Communicator
    timeline: Timeline

    def attach(self, replica: Replica, comm: Communicator, timeline: Timeline) -> None:
        """Take charge of `replica`: give every rank rank 0's parameters.  Collective.

        Raises:
            ConfigError: options that cannot go together, or that this back-end cannot carry.
        """
        self.replica, self.comm, self.timeline = replica, comm, timeline
        self.check_backend()
        comm.broadcast(replica.parameters.whole, name="parameters")
        for name, tensor in replica.optimizer_tensors().items():
            comm.broadcast(tensor, name=f"optimizer.{name}")

    def check_options(self) -> None:
        """Raise ConfigError for option values that cannot be used; called when options are parsed."""
        return None

    def check_backend(self) -> None:
        """Raise ConfigError for options this back-end cannot carry; called by `attach`, before step 1."""
        return None

    def before_backward(self, frames: int) -> None:
        """Note that a backward pass over `frames` frames of this rank begins (0: there is none)."""
        self.replica.frames += frames

    @abstractmethod
    def step(self, progress: Progress) -> None:
        """Exchange and update as this strategy does after a backward pass.  Collective."""

    @abstractmethod
    def finish(self) -> None:
        """Bring all replicas to the same parameters, bitwise.  Collective."""

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        """Let the replica hold, inside the block, the parameters to be evaluated.  Collective.

        Strategies whose replicas differ show their average; training goes on afterwards as if nothing
        had been evaluated.
        """
        yield

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved beside replica and optimizer: JSON-like values and tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that `state_dict` returned."""
