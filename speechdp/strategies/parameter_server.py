"""A parameter server: rank 0 keeps the parameters, workers send gradients and get parameters back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model, Pattern, Roster
from speechdp.parallel.replica import Replica
from speechdp.parallel.strategy import Progress, Strategy, Traits
from speechdp.strategies.mechanisms.server import (
    SERVER,
    Kind,
    Link,
    Rounding,
    Server,
    ServerRequest,
    Wire,
    refuse_too_few,
    worker_roster,
)
from speechdp.timing.timeline import Span

_GRADIENTS, _PARAMETERS = 0, 1  # tags of mode=sync


class _Master(Server):
    """The parameters in a vector of their own, because rank 0's worker computes on the replica meanwhile.

    Args:
        replica: rank 0's; its optimizer updates the vector, and holds the master's state.
        staleness_aware: divide the learning rate by the gradient's age.
        alone: this rank has no worker, so nothing changes the vector while an answer is sent.
    """

    def __init__(self, replica: Replica, *, staleness_aware: bool, alone: bool) -> None:
        super().__init__(replica.parameters.values.clone())
        self._replica, self._staleness_aware, self._alone = replica, staleness_aware, alone

    def serve(
        self, request: ServerRequest, given: Tensor, answer: Tensor, rounding: Rounding | None
    ) -> Tensor:
        if request.kind is Kind.GIVE:
            age = self.version - request.version if self._staleness_aware else 1
            rate = request.learning_rate / max(1, age)
            self._replica.update(self.vector, given, request.frames, rate)
            self.version += 1
        return self.vector if self._alone else answer.copy_(self.vector)


@dataclass(eq=False)
class ParameterServer(Strategy):
    """Update the parameters on rank 0 with each worker's gradient on arrival, or with all of a step together.

    Update rule: mode=async: worker i computes g_i, the mean gradient of its frames, on the w of version v_i;
    the server does one optimizer step w <- w - lr * g_i at once, whatever its current version v (the age of
    the gradient is v - v_i), increments v, and answers with w.  With staleness_aware the step uses
    lr / max(1, v - v_i).  mode=sync: the server waits for the gradients of all workers and does one step with
    (sum_i sum_frames dL/dw) / (sum_i frames_i), the same as gradient averaging.

    Exchange: a worker sends its gradient (P bytes) and gets the parameters (P bytes) at every step, and waits
    for them; rank 0 sends and receives that for every other rank.  With dedicated=false rank 0 is also a
    worker, and calls the server without a message.

    Guarantee: mode=sync: replicas are bitwise equal after every update.  mode=async: each answer is a state
    that the server was in; one worker is plain SGD; replicas are bitwise equal only after finish.

    Source: Downpour SGD, Dean et al. 2012 (NIPS), with a push and a fetch at every step; ages: Zhang et al.
    2016 (arXiv 1511.05950).  Both recalled, not looked up.  Deviations: any optimizer on the server (there:
    SGD or Adagrad), one server for all parameters (there: shards), gradients in the order of arrival.
    """

    #: Apply each gradient on arrival, or wait for all gradients of a step.
    mode: Literal["async", "sync"] = "async"
    #: Divide the learning rate by the gradient's age.
    staleness_aware: bool = False
    #: Rank 0 only serves and does not train.
    dedicated: bool = False

    @property
    def traits(self) -> Traits:
        together = self.mode == "sync"
        return Traits(synchronous=together, replicas_equal=together, needs_peers=True)

    def roster(self, size: int) -> Roster:
        return worker_roster(size, dedicated=self.dedicated)

    def predicted_exchange(self, model: Model) -> Exchange | None:
        pattern = Pattern.TOGETHER if self.mode == "sync" else Pattern.SERVER
        return Exchange(pattern, 1, model.nbytes, dedicated=self.dedicated, at_server=True)

    def check_options(self) -> None:
        if self.staleness_aware and self.mode == "sync":
            raise ConfigError(
                "parameter_server:staleness_aware=true,mode=sync: no gradient is stale; leave one of them out"
            )

    def check_ranks(self, comm: Communicator) -> None:
        if self.dedicated:
            refuse_too_few("parameter_server", comm.size, 2)
        super().check_ranks(comm)

    def set_up(self) -> None:
        self._master: _Master | None = None
        if self.mode == "async":
            if self.comm.rank == SERVER:
                aware, alone = self.staleness_aware, self.dedicated
                self._master = _Master(self.replica, staleness_aware=aware, alone=alone)
            self._link = Link(self.peers, self._master, Wire())
        elif self.comm.rank == SERVER and self.comm.size > 1:
            self._received = torch.empty_like(self.replica.gradients.whole)

    def resume(self) -> None:
        if self.mode == "sync":
            return
        # While paused, rank 0's replica is the master, and it may have been loaded from a checkpoint.
        if self._master is not None:
            self._master.vector.copy_(self.replica.parameters.values)
        self._link.open()
        self._link.fetch(self.replica.parameters.values)

    def pause(self) -> None:
        if self.mode == "sync":
            return
        self._link.close()
        if self._master is not None:
            self.replica.parameters.values.copy_(self._master.vector)

    def step(self, progress: Progress) -> None:
        if self.mode == "sync":
            self._step_together()
            return
        self._link.check()
        replica = self.replica
        if replica.frames == 0:
            return
        # Only the first group's learning rate is sent; the server derives the others from it.
        replica.update_rule.check_rates(self.name)
        replica.update_rule.check_hooks(self.name)
        with self.timeline.span(Span.COMM):
            replica.hand_over_gradients(
                lambda: self._link.give(
                    replica.gradients.values,
                    replica.parameters.values,
                    frames=replica.frames,
                    learning_rate=replica.learning_rate,
                )
            )

    def _step_together(self) -> None:
        replica = self.replica
        gradients = replica.gradients
        gradients.extra[0] = replica.frames
        if self.comm.rank != SERVER:
            with self.timeline.span(Span.COMM):
                self.peers.send(gradients.whole, SERVER, tag=_GRADIENTS)
                self.peers.recv(replica.parameters.whole, SERVER, tag=_PARAMETERS)
            replica.take_loss_scale()
            replica.clear_gradients()
            return
        with self.timeline.span(Span.COMM):
            # By rank, not by arrival, so that the sum is bitwise the same.
            for worker in range(1, self.comm.size):
                self.peers.recv(self._received, worker, tag=_GRADIENTS)
                gradients.whole.add_(self._received)
        with self.timeline.span(Span.UPDATE):
            replica.apply_gradients(float(gradients.extra[0]))
        replica.give_loss_scale()
        with self.timeline.span(Span.COMM):
            for worker in range(1, self.comm.size):
                self.peers.send(replica.parameters.whole, worker, tag=_PARAMETERS)

    def finish(self) -> None:
        self._share_master()

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        # Nothing to restore: `resume` makes every worker fetch the master anyway.
        self._share_master()
        yield

    def _share_master(self) -> None:
        if self.mode == "async":  # in mode=sync every replica is the master
            self.comm.broadcast(self.replica.parameters.values, name="master")

    def statistics(self) -> dict[str, Any]:
        return {"staleness": list(self._link.ages)} if self.mode == "async" else {}

    def state_dict(self) -> dict[str, Any]:
        # The master itself is rank 0's replica while paused.
        return self.statistics()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.mode == "async":
            self._link.ages = list(state["staleness"])
