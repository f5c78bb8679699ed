"""Asynchronous decentralised SGD: every rank trains at its own pace and averages with one partner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model, Pattern, Roster, buckets_of
from speechdp.parallel.strategy import Progress, Strategy, Traits
from speechdp.strategies.mechanisms.bucketed_gradients import BucketedGradients
from speechdp.strategies.mechanisms.gossip import Gossip, Role
from speechdp.strategies.mechanisms.pending_correction import EffectiveParameters
from speechdp.strategies.mechanisms.super_learner import SuperLearner
from speechdp.strategies.mechanisms.topology import BipartiteKind
from speechdp.timing.timeline import Span


@dataclass(eq=False)
class AdPsgd(Strategy):
    """Train at each rank's own pace while averaging parameters with one partner at a time.

    A learner is a rank or, with groups=G, a group of G consecutive ranks that averages its gradients at every
    step and is represented by its first rank.  Even learners start exchanges, odd ones answer, so learners
    cannot wait for each other in a cycle.

    Update rule: at its own steps x_i <- x_i - lr * g_i(x_i), then x_i <- x_i + c_i and c_i <- 0, with g_i the
    mean gradient of its own (its group's) frames and c_i the correction from mixings since its last step.
    Independently, a mixing of learners i and j, where the effective parameters are x + c:
        c_i <- c_i + (s_j - s_i) / 2,  c_j <- c_j + (s_i - s_j) / 2,
    s_i and s_j snapshots of x_i + c_i and x_j + c_j.  If no step falls between snapshot and sum, both then
    have (s_i + s_j) / 2; if one does, its whole update is kept in addition.

    Exchange: an active learner requests one every `period` of its steps, and skips the request while an
    earlier one has not started: the parameters' bytes each way, both at once.  A group exchanges internally,
    at every step, what gradient averaging does, and the correction once at steps that have one.

    Guarantee: no update, nor a part of one, is lost or counted twice; mixings keep the mean over learners.
    Training waits for no other learner's step and for no exchange.  After a pause no message is under way and
    c is empty.  Members of a group are bitwise equal after every step, all replicas after finish.  Not
    guaranteed: that runs repeat, since who mixes when depends on speed; a bound on staleness, or on the
    replicas' distance if exchanges take much longer than steps; that learners count equally (fast ones train
    on more of the data).

    Staleness of a gradient: the number of mixings that entered x_i + c_i between the end of the learner's
    last step, which set the parameters that the gradient is computed at, and the gradient's application.

    Source: AD-PSGD, Lian et al. 2018 (arXiv 1710.06952), the rule as recalled; for speech Zhang et al. 2019
    (arXiv 1904.04956); groups as in H-ADPSGD, Zhang et al. 2019 (arXiv 1907.05701).  Deviations: a mixing is
    a correction, applied at the learner's next step, where Lian's computes at a copy and mixes the parameters
    at once, and in the published code the exchange's process owns parameters and optimizer; both partners
    send at once; gradients are those of parameters up to one step old, as there; momentum is the learner's
    own and no mixing changes it; Zhang's ring (topology=ring) has fixed neighbours, here one of the two is
    drawn at random.
    """

    #: Who exchanges with whom: any active with any passive learner, or neighbours, or 1, 3, 5, 9, ... apart.
    topology: BipartiteKind = "all"
    #: Steps between the exchanges that an active learner starts.
    period: int = 1
    #: Ranks per learner: above 1, groups of this many consecutive ranks average gradients at every step.
    groups: int = 1

    @property
    def traits(self) -> Traits:
        return Traits(
            synchronous=False,
            period=str(self.period),
            exchanges_every_step=self.groups > 1,
            needs_peers=True,
            survives_loss=self.groups == 1,
        )

    def roster(self, size: int) -> Roster:
        return Roster(list(range(size)), [rank // self.groups for rank in range(size)])

    def predicted_exchange(self, model: Model) -> Exchange | None:
        buckets = buckets_of(model.nbytes, BucketedGradients().bucket_mib) if self.groups > 1 else ()
        return Exchange(
            Pattern.GOSSIP,
            self.period,
            model.nbytes,
            buckets,
            topology=self.topology,
            group_size=self.groups,
        )

    def check_options(self) -> None:
        if self.period < 1:
            raise ConfigError(f"ad_psgd:period={self.period}: at least 1 step between exchanges")
        if self.groups < 1:
            raise ConfigError(f"ad_psgd:groups={self.groups}: at least 1 rank in a group")

    def check_ranks(self, comm: Communicator) -> None:
        if comm.size % self.groups != 0:
            raise ConfigError(
                f"ad_psgd:groups={self.groups}: {comm.size} ranks cannot be divided into groups of that "
                "size; choose a divisor of the number of ranks"
            )
        super().check_ranks(comm)

    def set_up(self) -> None:
        self._alive = self.comm.alive
        role, ranks = self._role()
        values = self.replica.parameters.values
        self._effective = EffectiveParameters(values, exchanging=bool(role.partners))
        self._gossip = Gossip(self.peers, role, ranks, self._effective, self.timeline)
        group = self.comm.split(role.learner) if self.groups > 1 else SerialCommunicator()
        self.channels.append(group)
        self._learner = SuperLearner(effective=self._effective).attach(self.replica, group, self.timeline)
        self._steps = 0  # since the last request for an exchange
        self._staleness: list[int] = []  # number of gradients of each staleness

    def _role(self) -> tuple[Role, list[int]]:
        """Return this rank's role among the remaining learners, and the first rank of each learner."""
        ranks = list(self._alive[:: self.groups])
        learner, member = divmod(self._alive.index(self.comm.rank), self.groups)
        if member > 0:
            return Role(learner, is_active=False, partners=()), ranks
        return Role.of(learner, len(ranks), self.topology), ranks

    def resume(self) -> None:
        if self.comm.alive != self._alive:
            self._alive = self.comm.alive
            self._gossip.take_role(*self._role())
        with self._effective.update():  # order changes made while paused before the exchanges
            pass
        self._gossip.start()

    def before_backward(self, frames: int) -> None:
        self._learner.before_backward(frames)

    def step(self, progress: Progress) -> None:
        self._learner.step(progress)
        with self.timeline.span(Span.UPDATE):
            num_mixings = self._learner.take_correction()
        if self._learner.num_frames > 0:
            self._note_staleness(num_mixings)
        self._steps += 1
        if self._steps >= self.period:
            self._steps = 0
            self._gossip.request()

    def _note_staleness(self, num_mixings: int) -> None:
        self._staleness += [0] * (num_mixings + 1 - len(self._staleness))
        self._staleness[num_mixings] += 1

    def pause(self) -> None:
        self._gossip.stop()
        self._learner.announce()
        self._learner.take_correction()

    def finish(self) -> None:
        self._average()
        # Bitwise, whatever the back-end's order of summation.
        self.comm.broadcast(self.replica.parameters.whole, name="parameters")

    def _average(self) -> None:
        num_ranks = len(self.comm.alive)
        if num_ranks > self.groups:  # averaging equal replicas would only round them
            values = self.replica.parameters.values
            self.comm.allreduce(values.mul_(1.0 / num_ranks), name="parameters")
            if len(self.comm.alive) != num_ranks:  # a rank was lost in the allreduce
                values.mul_(num_ranks / len(self.comm.alive))

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        with self.replica.restored():
            self._average()
            yield

    def statistics(self) -> dict[str, Any]:
        """Return this rank's gradients by staleness, mixings and skipped exchanges."""
        return {
            "staleness": list(self._staleness),
            "exchanges": self._effective.num_mixings,
            "skipped": self._gossip.num_skipped,
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self.statistics(), "begun": self._gossip.num_begun, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._staleness, self._steps = list(state["staleness"]), state["steps"]
        self._effective.num_mixings = state["exchanges"]
        self._gossip.num_skipped, self._gossip.num_begun = state["skipped"], state["begun"]

    def begin_as_copy(self) -> None:
        super().begin_as_copy()
        self._staleness = []
        self._effective.num_mixings = self._gossip.num_skipped = 0
