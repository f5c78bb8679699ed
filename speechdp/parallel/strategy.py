"""The base class of strategies: a strategy alone decides what ranks exchange, with whom, and when to update.

One file per strategy; the file's name is the strategy's name on the command line.  A strategy is a dataclass
whose fields are its options: `--strategy model_averaging:period=16,momentum=average`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from speechdp.comm.base import Communicator, PeerCommunicator
from speechdp.parallel.replica import Replica
from speechdp.timing.timeline import Timeline


@dataclass(frozen=True)
class Progress:
    """Where training stands after a backward pass.

    With a synchronous strategy the same on every rank, `time_s` apart, and known without an exchange: it
    follows from the epoch plan.  With an asynchronous one it is what this rank knows.

    Attributes:
        step: backward passes so far, this one included.
        frames_per_rank: frames so far, averaged over ranks.
        time_s: training time on this rank.
        epoch: epochs so far, with fraction.
        num_epochs: epochs of the whole run.
    """

    step: int
    frames_per_rank: float
    time_s: float
    epoch: float = 0.0
    num_epochs: int = 1


class Strategy(ABC):
    """Turns the gradients of this rank into the next parameters of this rank.

    Life: `attach` once; `resume`, any number of steps, `pause`, again and again; `finish` and `close` at the
    end.  A step is `before_backward`, the forward pass, `observe_loss`, the backward pass, `step`.

    Synchronous strategies have a step on every rank at the same time (also one without frames: a rank whose
    part of the epoch is shorter keeps joining) and need nothing for pause and resume.  Asynchronous ones
    exchange between `resume` and `pause` in a thread of their own while every rank steps at its own pace;
    evaluation, checkpoints and `finish` happen while paused.
    """

    #: Every rank makes the same exchanges at the same steps; such runs resume bitwise.
    synchronous: bool = True
    #: All replicas hold the same parameters and optimizer state after every step.
    replicas_equal: ClassVar[bool]
    #: Messages between two ranks are needed: `attach` opens a channel, `self.peers`, or refuses the back-end.
    needs_peers: ClassVar[bool] = False

    #: Whether there is an exchange at every step or nearly so; back-ends may trade latency for idle cost.
    exchanges_every_step: bool = True
    #: A rank's loss or parameters may stop being numbers: the strategy mends that at its next exchange.
    survives_divergence: bool = False
    #: Training goes on where ranks other than 0 are gone, if the communicator tolerates that.
    survives_loss: bool = False
    #: Gradients are applied on another rank than the one that computed them.
    updates_elsewhere: ClassVar[bool] = False
    #: Periods count frames: `Progress.frames_per_rank` must be the same on every rank.
    counts_frames: bool = False
    #: What it does depends on the share of the whole training that is done.
    follows_whole_run: bool = False
    #: The schedule's learning rate is multiplied by this at every step.
    learning_rate_factor: float = 1.0

    @property
    def resumes_with_other_size(self) -> bool:
        """Whether a run may go on with another number of ranks: rank r of them takes the state of r modulo R.

        Not where ranks have parts of their own to play: servers, or partners who know of one another.
        """
        return self.synchronous and not self.needs_peers

    @property
    def exchange_period(self) -> str | None:
        """How often it exchanges, as its option is written: `16`, `600kf`, `2.5s`; None: it has none.

        That is the option `period` of those that have one.
        """
        period = getattr(self, "period", None)
        return None if period is None else str(period)

    #: Its name on the command line: its file's, or that under which it is registered.
    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a class the name of its file, not that of the class it is derived from."""
        super().__init_subclass__(**kwargs)
        cls.name = cls.__module__.rpartition(".")[2]

    replica: Replica
    comm: Communicator
    timeline: Timeline
    peers: PeerCommunicator

    def attach(self, replica: Replica, comm: Communicator, timeline: Timeline) -> None:
        """Attach to `replica` and broadcast rank 0's parameters.  Collective.

        Raises:
            ConfigError: options that cannot go together, or that this back-end cannot carry.
        """
        self.replica, self.comm, self.timeline = replica, comm, timeline
        self.check_backend()
        if self.needs_peers:
            self.peers = comm.peers()
        comm.broadcast(replica.parameters.whole, name="parameters")
        for name, tensor in replica.optimizer_tensors().items():
            comm.broadcast(tensor, name=f"optimizer.{name}")

    def check_options(self) -> None:
        """Raise ConfigError for option values that cannot be used; called when options are parsed."""
        return None

    def check_backend(self) -> None:
        """Raise ConfigError for options this back-end cannot carry; called by `attach`, before step 1."""
        return None

    def check_ranks(self, comm: Communicator) -> None:
        """Refuse ranks that this strategy cannot train on; `attach` would too, but later.  Collective.

        Raises:
            ConfigError: options that these ranks, or their back-end, cannot carry.
        """
        self.comm = comm
        self.check_backend()
        if self.needs_peers and not comm.has_peers:
            comm.peers()  # says what to do instead

    def shard(self, rank: int, size: int) -> tuple[int | None, int]:
        """Return which part of the data this rank trains on and how many parts there are.

        None instead of an index: this rank trains on nothing (a server); its steps have no frames.
        """
        return rank, size

    def teams(self, size: int) -> list[int]:
        """Return the team of each rank.  Ranks of a team take their steps together; teams at their own pace.

        Only asynchronous strategies are asked.  Teams are numbered from 0, all of the same size.
        """
        return list(range(size))

    def resume(self) -> None:
        """Start exchanging; no message from before is in flight."""
        return None

    def pause(self) -> None:
        """End all exchanges: on return no thread of the strategy runs.  Collective, not at the same time.

        Ranks that are still training are served until they pause as well; it never waits for a rank that
        has ended by an error without raising.
        """
        return None

    def before_backward(self, frames: int) -> None:
        """Note that a backward pass over `frames` frames of this rank begins (0: there is none)."""
        self.replica.frames += frames

    def observe_loss(self, total: Tensor, frames: int) -> None:
        """Record this rank's loss, a sum over `frames` frames; it may be on a GPU: do not wait for it."""
        return None

    @abstractmethod
    def step(self, progress: Progress) -> None:
        """Exchange and update after a backward pass.  Collective."""

    @abstractmethod
    def finish(self) -> None:
        """Bring all replicas to the same parameters, bitwise.  Collective."""

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        """Put the parameters to be evaluated into the replica inside the block.  Collective.

        Strategies whose replicas differ show their average; training goes on afterwards as if nothing
        had been evaluated.
        """
        yield

    def final_models(self) -> list[Tensor]:
        """Return flat parameter vectors from which the best on held-out data becomes the final model.

        Called on every rank after `finish`; the same vectors everywhere, the replica's own not among them.
        """
        return []

    def statistics(self) -> dict[str, Any]:
        """Return figures of this rank for the report, e.g. `staleness`: counts by age."""
        return {}

    @property
    def peer_bytes(self) -> int:
        """Bytes this rank has sent in messages between two ranks."""
        return self.peers.sent_bytes if self.needs_peers else 0

    def close(self) -> None:
        """Release what `attach` acquired.  Collective, while paused."""
        if self.needs_peers:
            self.peers.close()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in addition to replica and optimizer: JSON-like values and tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, possibly on another number of ranks."""

    def begin_as_copy(self) -> None:
        """Reset what has accumulated since the last exchange: another rank keeps the same state."""
        self.replica.clear_gradients()
