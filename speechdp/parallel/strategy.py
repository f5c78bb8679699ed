"""The base class of strategies: a strategy alone decides what ranks exchange, with whom, and when to update.

One file per strategy; the file's name is the strategy's name on the command line.  A strategy is a dataclass
whose fields are its options: `--strategy model_averaging:period=16,momentum=average`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast, final, runtime_checkable

from speechdp.parallel.declared import Exchange, Model, Roster

if TYPE_CHECKING:  # who only reads options does without torch
    from torch import Tensor

    from speechdp.comm.base import Communicator, PeerCommunicator
    from speechdp.parallel.replica import Replica
    from speechdp.timing.timeline import Timeline

_Strategy = TypeVar("_Strategy", bound="Strategy")


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


@dataclass(frozen=True)
class Traits:
    """What others have to know of a strategy before and while it trains; follows from its options alone.

    Attributes:
        synchronous: every rank makes the same exchanges at the same steps; such runs resume bitwise.
        replicas_equal: all replicas hold the same parameters and optimizer state after every step.
        period: how often it exchanges, as its option is written: `16`, `600kf`, `2.5s`; None: it has none.
        between_nodes: the longer period of averages between nodes, likewise; None: there are none apart.
        has_outer_step: an optimizer of its own steps once a period, so that with another period it is another
            optimizer, and may learn better with fewer exchanges.
        exchanges_every_step: there is an exchange at every step or nearly so; back-ends may trade latency
            for idle cost.
        needs_peers: messages between two ranks are needed: `attach` opens a channel, `peers`, or refuses
            the back-end.
        partners_follow_size: who exchanges with whom follows from the number of ranks alone.
        counts_frames: `Progress.frames_per_rank` must be the same on every rank.
        counts_epochs: what it does depends on the epochs done, which a user's own loop does not tell.
        changes_over_time: what it exchanges, or how often, is not the same in all of training: some steps of
            it do not tell how fast the whole is.
        follows_whole_run: what it does depends on the share of the whole training that is done.
        survives_divergence: a rank's loss or parameters may stop being numbers, if there are others: the
            strategy mends that at its next exchange.
        survives_loss: training goes on where ranks other than 0 are gone, if the communicator tolerates that.
        offers_models: the final model is chosen on held-out data among those it has kept (`OffersModels`).
    """

    synchronous: bool = True
    replicas_equal: bool = False
    period: str | None = None
    between_nodes: str | None = None
    has_outer_step: bool = False
    exchanges_every_step: bool = True
    needs_peers: bool = False
    partners_follow_size: bool = False
    counts_frames: bool = False
    counts_epochs: bool = False
    changes_over_time: bool = False
    follows_whole_run: bool = False
    survives_divergence: bool = False
    survives_loss: bool = False
    offers_models: bool = False

    @property
    def whole_period(self) -> str | None:
        """The time in which every kind of exchange happens once; None: there is no period."""
        return self.between_nodes or self.period

    @property
    def resumes_with_other_size(self) -> bool:
        """Whether a run may go on with another number of ranks: rank r of them takes the state of r modulo R.

        Not where ranks have parts of their own to play: servers, or partners who know of one another.
        """
        return self.synchronous and (self.partners_follow_size or not self.needs_peers)


class Strategy(ABC):
    """Turns the gradients of this rank into the next parameters of this rank.

    A strategy as it is made holds its options only, and may serve many runs; `attach` returns one at work on
    a replica, with its state.  Life of that one: `resume`, any number of steps, `pause`, again and again;
    `finish` and `close` at the end.  A step is `before_backward`, the forward pass, the backward pass,
    `step`.

    Synchronous strategies have a step on every rank at the same time (also one without frames: a rank whose
    part of the epoch is shorter keeps joining) and need nothing for pause and resume.  Asynchronous ones
    exchange between `resume` and `pause` in a thread of their own while every rank steps at its own pace;
    evaluation, checkpoints and `finish` happen while paused.

    What subclasses write, all but the abstract ones where they differ from the rest:

    - what it is, from its options alone: `traits`, `roster`, `check_options`, `check_ranks`;
    - its beginning: `set_up`, which makes its state;
    - training: `before_backward`, `step` (abstract); asynchronous ones `resume` and `pause`;
    - what is shown: `evaluation_parameters`, `finish` (abstract), `statistics`;
    - its state: `state_dict`, `load_state_dict` (both abstract), `begin_as_copy`.

    Some also have a method that not all need: `PredictsExchange`, `ObservesLoss`, `OffersModels`,
    `BeginsTogether`.

    Attributes:
        name: on the command line: its file's, or that under which it is registered.
        replica: what it moves.
        comm: the ranks.
        timeline: where exchanges and updates are recorded.
        peers: the channel between two ranks, with `traits.needs_peers`.
        channels: that one, and what `set_up` opens besides: `close` closes them, `peer_bytes` counts.
    """

    name: ClassVar[str] = ""

    replica: Replica
    comm: Communicator
    timeline: Timeline
    peers: PeerCommunicator
    channels: list[PeerCommunicator | Communicator]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a class the name of its file, not that of the class it is derived from."""
        super().__init_subclass__(**kwargs)
        cls.name = cls.__module__.rpartition(".")[2]

    # -- what it is -------------------------------------------------------------------------------------

    @final
    @property
    def observer(self) -> ObservesLoss | None:
        """Itself where it goes by the training loss, else None."""
        # Asked at every step: isinstance of a protocol takes 20 us on Python 3.11.
        return cast("ObservesLoss", self) if hasattr(self, "observe_loss") else None

    @property
    def traits(self) -> Traits:
        """What others have to know of it."""
        return Traits()

    def roster(self, size: int) -> Roster:
        """Return who of `size` ranks trains on which part of the data, and who takes steps with whom."""
        return Roster(list(range(size)), list(range(size)))

    def check_options(self) -> None:
        """Raise ConfigError for option values that cannot be used; called when options are parsed."""
        return None

    def check_ranks(self, comm: Communicator) -> None:
        """Refuse ranks, or a back-end, that this strategy cannot train on.  Collective.

        Called before a run is begun, and by `attach`.

        Raises:
            ConfigError: options that these ranks, or their back-end, cannot carry.
        """
        if self.traits.needs_peers and not comm.has_peers:
            comm.peers()  # says what to do instead

    # -- its beginning and end --------------------------------------------------------------------------

    @final
    def attach(self: _Strategy, replica: Replica, comm: Communicator, timeline: Timeline) -> _Strategy:
        """Return this strategy at work on `replica`, whose parameters become rank 0's.  Collective.

        Where it raises, also on this rank alone, nothing stays open here.

        Raises:
            ConfigError: options that these ranks, or their back-end, cannot carry.
        """
        made: _Strategy = dataclasses.replace(self)  # type: ignore[type-var]
        made.replica, made.comm, made.timeline = replica, comm, timeline
        made.check_ranks(comm)
        made.channels = []
        try:
            if made.traits.needs_peers:
                made.peers = comm.peers()
                made.channels.append(made.peers)
            comm.broadcast(replica.parameters.whole, name="parameters")
            for name, tensor in replica.optimizer_tensors().items():
                comm.broadcast(tensor, name=f"optimizer.{name}")
            made.set_up()
        except BaseException:
            made.abandon()
            raise
        return made

    def set_up(self) -> None:
        """Make the state of a run that begins; replica, ranks and channels are there.  Collective.

        What it opens it appends to `channels` at once: if it raises, those are given up.
        """
        return None

    def resume(self) -> None:
        """Start exchanging; no message from before is in flight."""
        return None

    def pause(self) -> None:
        """End all exchanges: on return no thread of the strategy runs.  Collective, not at the same time.

        Ranks that are still training are served until they pause as well; it never waits for a rank that
        has ended by an error without raising.
        """
        return None

    @final
    def close(self) -> None:
        """Release what `attach` acquired.  Collective, while paused."""
        for channel in self.channels:
            channel.close()

    @final
    def abandon(self) -> None:
        """Release what `attach` acquired after an error, while paused.  Waits for nobody."""
        for channel in self.channels:
            channel.abandon()

    # -- training ---------------------------------------------------------------------------------------

    def before_backward(self, frames: int) -> None:
        """Note that a backward pass over `frames` frames of this rank begins (0: there is none)."""
        self.replica.frames += frames

    @abstractmethod
    def step(self, progress: Progress) -> None:
        """Exchange and update after a backward pass.  Collective."""

    # -- what is shown ----------------------------------------------------------------------------------

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

    def statistics(self) -> dict[str, Any]:
        """Return figures of this rank for the report, e.g. `staleness`: counts by age.

        A strategy whose period changes gives that in force as `period`, which evaluations record.
        """
        return {}

    @final
    @property
    def peer_bytes(self) -> int:
        """Bytes this rank has sent over the strategy's own channels."""
        return round(sum(channel.sent_bytes for channel in self.channels))

    # -- its state --------------------------------------------------------------------------------------

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in addition to replica and optimizer: JSON-like values and tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, possibly on another number of ranks.

        Collective, while paused.
        """

    def begin_as_copy(self) -> None:
        """Reset what has accumulated since the last exchange: another rank keeps the same state."""
        self.replica.clear_gradients()


@runtime_checkable
class PredictsExchange(Protocol):
    """A strategy whose speed `simulate` and `tune` predict."""

    def predicted_exchange(self, model: Model) -> Exchange | None:
        """Return what ranks send and whom they wait for; None: it is not predicted with these options.

        A strategy from outside says it itself: what it inherits is not taken, unless it says so by a method
        of its own that calls `super`.

        Example::

            def predicted_exchange(self, model):  # all ranks average all parameters once per period
                return Exchange(Pattern.TOGETHER, model.steps_in(self.period), model.nbytes)
        """


class ObservesLoss(Protocol):
    """A strategy that goes by the training loss."""

    def observe_loss(self, total: Tensor, frames: int) -> None:
        """Record this rank's loss, a sum over `frames` frames; it may be on a GPU: do not wait for it.

        With the replica's `scaler` set, one that is not finite may be an overflow whose update is skipped.
        """


@runtime_checkable
class OffersModels(Protocol):
    """A strategy with more than one final model to choose from."""

    def final_models(self) -> list[Tensor]:
        """Return flat parameter vectors from which the best on held-out data becomes the final model.

        Called on every rank after `finish`; the same vectors everywhere, the replica's own not among them.
        """


@runtime_checkable
class BeginsTogether(Protocol):
    """A strategy whose ranks may average gradients at first."""

    @property
    def trains_together(self) -> bool:
        """Whether they do so now."""


def trains_together(strategy: Strategy) -> bool:
    """Return whether ranks average gradients now that will train apart later.

    What is no number on one rank is then none in the sum, and on all: nobody mends it.
    """
    return isinstance(strategy, BeginsTogether) and strategy.trains_together


def final_models(strategy: Strategy) -> list[Tensor]:
    """Return the models a strategy offers beside the replica's own; mostly none."""
    return strategy.final_models() if isinstance(strategy, OffersModels) else []
