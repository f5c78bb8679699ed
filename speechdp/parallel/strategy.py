"""The base class of strategies: a strategy alone decides what ranks exchange, with whom, and when to update.

One file per strategy; the file's name is the strategy's name on the command line.  A strategy is a dataclass
whose fields are its options: `--strategy model_averaging:period=16,momentum=average`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast, final, runtime_checkable

from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model, Roster

if TYPE_CHECKING:  # code that only reads options need not import torch
    from torch import Tensor

    from speechdp.comm.base import Communicator, PeerCommunicator
    from speechdp.parallel.replica import Replica
    from speechdp.timing.timeline import Timeline

_Strategy = TypeVar("_Strategy", bound="Strategy")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Progress:
    """Where training stands after a backward pass.

    With a synchronous strategy, everything but `time_s` is the same on every rank and known without an
    exchange, because it follows from the epoch plan.  With an asynchronous one it is what this rank knows.

    Attributes:
        step: backward passes so far, this one included.
        frames_per_rank: frames so far, averaged over ranks.
        time_s: training time on this rank.
        epoch: epochs so far, including the fraction of the current one.
        num_epochs: epochs of the whole run.
    """

    step: int
    frames_per_rank: float
    time_s: float
    epoch: float = 0.0
    num_epochs: int = 1


@dataclass(frozen=True)
class Traits:
    """What other code must know about a strategy before and while it trains; follows from its options alone.

    Attributes:
        synchronous: every rank makes the same exchanges at the same steps; such runs resume bitwise.
        replicas_equal: all replicas hold the same parameters and optimizer state after every step.
        period: how often the strategy exchanges, as its option is written: `16`, `600kf`, `2.5s`; None: it
            has no period.
        between_nodes: the longer period of averages between nodes, written likewise; None: there is no
            separate average between nodes.
        has_outer_step: an outer optimizer takes one step per period.  Another period is then another
            optimizer, which may learn better with fewer exchanges.
        exchanges_every_step: there is an exchange at every step or nearly so; otherwise back-ends may accept
            a higher latency to cost less while idle.
        needs_peers: the strategy sends messages between pairs of ranks: `attach` opens a channel, `peers`, or
            refuses the back-end.
        partners_follow_size: who exchanges with whom follows from the number of ranks alone.
        counts_frames: `Progress.frames_per_rank` must be the same on every rank.
        counts_epochs: the strategy depends on the number of epochs done, which a user's own loop does not
            report.
        changes_over_time: what the strategy exchanges, or how often, changes during training, so the speed of
            some steps does not give the speed of the whole training.
        period_changes: the period changes during training, `period` being the first one; this includes
            `changes_over_time`.
        follows_whole_run: the strategy depends on the fraction of the whole training that is done.
        survives_divergence: a rank's loss or parameters may become NaN or infinite if there are other ranks:
            the next exchange repairs them.
        survives_loss: training continues when ranks other than 0 are lost, if the communicator tolerates
            that.
        offers_models: the final model is the best on held-out data of those the strategy kept
            (`OffersModels`).
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
    period_changes: bool = False
    follows_whole_run: bool = False
    survives_divergence: bool = False
    survives_loss: bool = False
    offers_models: bool = False

    def __post_init__(self) -> None:
        if self.period_changes:
            object.__setattr__(self, "changes_over_time", True)

    @property
    def whole_period(self) -> str | None:
        """The time in which every kind of exchange happens once; None: there is no period."""
        return self.between_nodes or self.period

    @property
    def resumes_with_other_size(self) -> bool:
        """Whether a run may resume with another number of ranks: rank r takes the state of r modulo R.

        R is the number of ranks that saved.  False where ranks have roles: servers, or partners that know
        each other.
        """
        return self.synchronous and (self.partners_follow_size or not self.needs_peers)


class Strategy(ABC):
    """Turn the gradients of this rank into the next parameters of this rank.

    A new strategy object holds only its options, and may serve many runs; `attach` returns a second object
    that works on a replica and holds state.  The life of the attached one: `resume`, any number of steps,
    `pause`, again and again; `finish` and `close` at the end.  A step is `before_backward`, the forward pass,
    the backward pass, `step`.

    With a synchronous strategy, all ranks take each step at the same time, and pause and resume do nothing.
    A rank whose part of the epoch is shorter keeps joining, with steps without frames.  An asynchronous
    strategy exchanges in a thread of its own between `resume` and `pause`, while every rank steps at its own
    pace; evaluation, checkpoints and `finish` happen while paused.

    What subclasses write; methods that are not abstract only where the default does not fit:

    - the strategy's properties, from its options alone: `traits`, `roster`, `check_options`, `check_ranks`;
    - its start: `set_up`, which creates its state;
    - training: `before_backward`, `step` (abstract); asynchronous ones `resume` and `pause`;
    - what others see of it: `evaluation_parameters`, `finish` (abstract), `statistics`;
    - its state: `state_dict`, `load_state_dict` (both abstract), `begin_as_copy`.

    Some also have a method that only some strategies need: `PredictsExchange`, `ObservesLoss`,
    `OffersModels`, `BeginsTogether`.

    Attributes:
        name: name on the command line: that of its file, or the one it is registered under.
        replica: the replica it updates.
        comm: the ranks.
        timeline: where exchanges and updates are recorded.
        peers: the channel for messages between two ranks, with `traits.needs_peers`.
        channels: `peers` and all that `set_up` opens: `close` closes them, `peer_bytes` counts their bytes.
    """

    name: ClassVar[str] = ""

    replica: Replica
    comm: Communicator
    timeline: Timeline
    peers: PeerCommunicator
    channels: list[PeerCommunicator | Communicator]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name a class after its own file, not after that of its base class."""
        super().__init_subclass__(**kwargs)
        cls.name = cls.__module__.rpartition(".")[2]

    # -- properties -------------------------------------------------------------------------------------

    @final
    @property
    def observer(self) -> ObservesLoss | None:
        """The strategy itself if it uses the training loss, else None."""
        # Read at every step: isinstance with a protocol takes 20 us on Python 3.11.
        return cast("ObservesLoss", self) if hasattr(self, "observe_loss") else None

    @property
    def traits(self) -> Traits:
        """What other code must know about the strategy."""
        return Traits()

    def roster(self, size: int) -> Roster:
        """Return which part of the data each of `size` ranks trains on, and which ranks step together."""
        return Roster(list(range(size)), list(range(size)))

    def check_options(self) -> None:
        """Raise ConfigError for unusable option values; called when options are parsed."""
        return None

    def check_ranks(self, comm: Communicator) -> None:
        """Refuse ranks, or a back-end, with which this strategy cannot train.  Collective.

        Called before a run starts, and by `attach`.

        Raises:
            ConfigError: the options are not possible with these ranks or their back-end.
        """
        if self.traits.needs_peers and not comm.has_peers:
            comm.peers()  # raises, and says what to do instead

    # -- start and end ----------------------------------------------------------------------------------

    @final
    def attach(self: _Strategy, replica: Replica, comm: Communicator, timeline: Timeline) -> _Strategy:
        """Return a copy of this strategy at work on `replica`, which gets rank 0's parameters.  Collective.

        If it raises, even on this rank alone, it leaves nothing open on this rank.

        Raises:
            ConfigError: the options are not possible with these ranks or their back-end.
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
        """Create the state of a new run; replica, ranks and channels are ready.  Collective.

        Append each channel to `channels` as soon as it is open: if `set_up` raises, those are abandoned.
        """
        return None

    def resume(self) -> None:
        """Start exchanging; no earlier message is in flight."""
        return None

    def pause(self) -> None:
        """End all exchanges: on return no thread of the strategy runs.

        Collective, but ranks need not call it at the same time.

        Keeps serving ranks that still train until they pause as well.  Raises instead of waiting for a rank
        that ended with an error.
        """
        return None

    @final
    def close(self) -> None:
        """Release what `attach` acquired.  Collective, while paused."""
        for channel in self.channels:
            channel.close()

    @final
    def abandon(self) -> None:
        """Release what `attach` acquired after an error, while paused.  Waits for no other rank."""
        for channel in self.channels:
            channel.abandon()

    # -- training ---------------------------------------------------------------------------------------

    def before_backward(self, frames: int) -> None:
        """Note that a backward pass over `frames` frames of this rank starts (0: this rank has none)."""
        self.replica.frames += frames

    @abstractmethod
    def step(self, progress: Progress) -> None:
        """Exchange and update after a backward pass.  Collective."""

    # -- what others see --------------------------------------------------------------------------------

    @abstractmethod
    def finish(self) -> None:
        """Bring all replicas to the same parameters, bitwise.  Collective."""

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        """Put the parameters to be evaluated into the replica inside the block.  Collective.

        Strategies whose replicas differ put in their average.  Training continues afterwards as if there had
        been no evaluation.
        """
        yield

    def statistics(self) -> dict[str, Any]:
        """Return figures of this rank for the report, e.g. `staleness`: counts by age.

        A strategy whose period changes returns the current one as `period`, which evaluations record
        (`PeriodicStrategy` does so).
        """
        return {}

    @final
    @property
    def peer_bytes(self) -> int:
        """Bytes this rank has sent over the strategy's own channels."""
        return round(sum(channel.sent_bytes for channel in self.channels))

    # -- state ------------------------------------------------------------------------------------------

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in addition to replica and optimizer: JSON-like values and tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, possibly on another number of ranks.

        Collective, while paused.
        """

    def begin_as_copy(self) -> None:
        """Reset what has accumulated since the last exchange, because another rank keeps the same state."""
        self.replica.clear_gradients()


@runtime_checkable
class PredictsExchange(Protocol):
    """A strategy whose speed `simulate` and `tune` predict."""

    def predicted_exchange(self, model: Model) -> Exchange | None:
        """Return what ranks send and whom they wait for; None: not predictable with these options.

        Read it through the function `predicted_exchange`, which checks it.

        A strategy of another package must define this itself.  An inherited prediction is ignored; to use it,
        override the method and call `super`.

        Example::

            def predicted_exchange(self, model):  # all ranks average all parameters once per period
                return Exchange(Pattern.TOGETHER, model.steps_in(self.period), model.nbytes)
        """


class ObservesLoss(Protocol):
    """A strategy that uses the training loss."""

    def observe_loss(self, total: Tensor, frames: int) -> None:
        """Record this rank's loss, a sum over `frames` frames.  It may be on a GPU: do not wait for it.

        With the replica's `scaler` set, a loss that is not finite may be an overflow whose update is skipped.
        """


@runtime_checkable
class OffersModels(Protocol):
    """A strategy with more than one final model to choose from."""

    def final_models(self) -> list[Tensor]:
        """Return flat parameter vectors, from which the best on held-out data becomes the final model.

        Called on every rank after `finish`.  The vectors are the same on all ranks; the replica's own is not
        among them.
        """


@runtime_checkable
class BeginsTogether(Protocol):
    """A strategy whose ranks may average gradients at the start of training."""

    @property
    def trains_together(self) -> bool:
        """Whether the ranks average gradients now."""


def trains_together(strategy: Strategy) -> bool:
    """Return whether ranks that will train apart later still average gradients now.

    A NaN on one rank then makes the sum NaN on all ranks, and no rank can repair it.
    """
    return isinstance(strategy, BeginsTogether) and strategy.trains_together


def predicted_exchange(strategy: Strategy, model: Model) -> Exchange | None:
    """Return what a strategy says that it exchanges; None: it does not say it.

    Raises:
        ConfigError: what it says cannot be used.
    """
    if not isinstance(strategy, PredictsExchange):
        return None
    where = f"{type(strategy).__name__}.predicted_exchange"
    try:
        found: Any = strategy.predicted_exchange(model)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if found is not None and not isinstance(found, Exchange):
        raise ConfigError(
            f"{where} returns {found!r}; return an Exchange of speechdp.parallel.declared, or None"
        )
    return found


def final_models(strategy: Strategy) -> list[Tensor]:
    """Return the models a strategy offers beside the replica's own; usually none."""
    return strategy.final_models() if isinstance(strategy, OffersModels) else []


def part_of(prefix: str, state: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the values of a state whose names begin with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
