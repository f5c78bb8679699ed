"""Elastic averaging: workers train locally; they and a common centre are pulled towards each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model, Pattern, Roster
from speechdp.parallel.period import PeriodUnit
from speechdp.parallel.strategy import Progress, Traits
from speechdp.strategies.mechanisms.averaging import AveragingStrategy
from speechdp.strategies.mechanisms.number_formats import share_of_bytes
from speechdp.strategies.mechanisms.quantised_mean import QuantisedMean
from speechdp.strategies.mechanisms.quantised_wire import QuantisedWire
from speechdp.strategies.mechanisms.server import (
    BEFORE_TAG,
    SERVER,
    Link,
    Rounding,
    Server,
    ServerRequest,
    Wire,
    refuse_too_few,
    worker_roster,
)
from speechdp.timing.timeline import Span

#: alpha times the number of workers, if alpha is not given.
_DEFAULT_BETA = 0.9


class _Centre(Server):
    """The centre x~; it receives a worker's x and answers a (x - x~).

    Args:
        rounds: answers are rounded, and the rounding error is added to the answer to the next worker.
            Otherwise, parameters that move little compared with others would not move at all.

    Attributes:
        owed: accumulated rounding error; None if nothing is rounded.
    """

    def __init__(self, vector: Tensor, alpha: float, *, rounds: bool) -> None:
        super().__init__(vector)
        self._alpha = alpha
        self.owed = torch.zeros_like(vector) if rounds else None

    def serve(
        self, request: ServerRequest, given: Tensor, answer: Tensor, rounding: Rounding | None
    ) -> Tensor:
        torch.sub(given, self.vector, out=answer).mul_(self._alpha)
        if rounding is not None and self.owed is not None:
            answer.add_(self.owed)
            self.owed.copy_(answer)
            rounding(answer)
            self.owed.sub_(answer)
        self.vector.add_(answer)
        self.version += 1
        return answer


@dataclass(eq=False)
class Easgd(AveragingStrategy):
    """Pull each worker and a centre towards each other once per period; the centre is the model.

    Update rule: K times x_i <- x_i - lr * g_i(x_i) on worker i; then, with d = alpha (x_i - x~) computed
    before either moves, x_i <- x_i - d and x~ <- x~ + d.  mode=async: each worker when its own period is
    over, on the x~ that other workers have moved by then.  mode=sync: all at the same step,
    x~ <- x~ + sum_i d_i.  A single worker is plain SGD.

    Exchange: mode=async: a worker sends x_i (P bytes) to rank 0 and gets d (P bytes) once per period, and
    waits for it; rank 0 sends and receives that for every other rank.  mode=sync: one allreduce of x.  With
    compression, the worker sends its difference to what rank 0 knows of x_i, d is computed from what rank 0
    then knows, both move by d as it is sent, and its rounding error is added to the next d; rank 0's own
    worker sends nothing and has no rounding.  On resume the workers send rank 0 what it knew (P from each
    other worker).  With mode=sync and compression, the mean of x as in model_averaging.

    Guarantee: an exchange keeps x_i + x~ (elastic symmetry), in mode=async also with compression; in
    mode=sync with compression the sum over workers is kept over time.  The evaluated and final model is x~,
    bitwise equal on all ranks after finish.

    Source: Zhang, Choromanska & LeCun 2015 (arXiv 1412.6651), algorithms 1 (async) and section 2 (sync), and
    its alpha = 0.9 / p; recalled, not looked up.  Deviations: d is sent instead of x~, which needs no copy of
    the centre; momentum is the optimizer's, and exchanges do not change it (EAMSGD has its own Nesterov
    step).
    """

    #: Each worker at its own pace through a server, or all at once by allreduce.
    mode: Literal["async", "sync"] = "async"
    #: Fraction of the distance that both move at an exchange; 0: 0.9 / workers.
    alpha: float = 0.0
    #: Rank 0 only serves and does not train (mode=async).
    dedicated: bool = False

    @property
    def traits(self) -> Traits:
        together, traits = self.mode == "sync", super().traits
        return replace(traits, synchronous=together, needs_peers=not together or traits.needs_peers)

    def roster(self, size: int) -> Roster:
        return worker_roster(size, dedicated=self.dedicated)

    def predicted_exchange(self, model: Model) -> Exchange | None:
        period, nbytes = model.steps_in(self.period), model.nbytes * share_of_bytes(self.compression)
        if self.mode == "sync":
            return Exchange(Pattern.TOGETHER, period, nbytes)
        return Exchange(Pattern.SERVER, period, nbytes, dedicated=self.dedicated)

    def check_options(self) -> None:
        super().check_options()
        if self.begin.value > 0:
            raise ConfigError(
                f"easgd:begin={self.begin}: the centre starts with the workers, and these never average "
                "gradients; leave it out"
            )
        if not 0 <= self.alpha < 1:
            raise ConfigError(f"easgd:alpha={self.alpha}: choose 0 < alpha < 1, or 0 for 0.9 / workers")
        if self.dedicated and self.mode == "sync":
            raise ConfigError("easgd:dedicated=true,mode=sync: there is no server; leave one of them out")

    def check_ranks(self, comm: Communicator) -> None:
        if self.dedicated:
            refuse_too_few("easgd", comm.size, 3)
        if self.mode == "sync" and self.alpha * comm.size > 1:
            raise ConfigError(
                f"easgd:alpha={self.alpha},mode=sync: with {comm.size} ranks the centre would overshoot "
                f"their mean; use alpha <= {1 / comm.size:.4g}"
            )
        super().check_ranks(comm)

    def set_up(self) -> None:
        super().set_up()
        self._num_workers = self.comm.size - self.dedicated
        self._alpha = self.alpha or _DEFAULT_BETA / self._num_workers
        #: The centre: on rank 0, with mode=sync on every rank; None elsewhere and with a single worker.
        self._centre: Tensor | None = None
        self._server: _Centre | None = None
        self._link: Link | None = None
        if self._num_workers == 1:
            return
        if self.comm.rank == SERVER or self.mode == "sync":
            self._centre = self.replica.parameters.values.clone()
        if self.mode == "async":
            if self._centre is not None:
                self._server = _Centre(self._centre, self._alpha, rounds=self.compression != "none")
            self._link = Link(self.peers, self._server, self._make_wire())

    def keeps_reference(self) -> bool:
        # The worker beside the server sends nothing.
        return super().keeps_reference() and (self.mode == "sync" or self.comm.rank != SERVER)

    def make_means(self) -> list[QuantisedMean]:
        return super().make_means() if self.mode == "sync" else []

    def _make_wire(self) -> Wire:
        """Return the wire for vectors, and record on rank 0 what it knows of each worker's parameters."""
        #: Known parameters, by the rank at the other end of the wire.
        self._known: dict[int, Tensor] = {}
        if self.compression == "none":
            return Wire()
        values = self.replica.parameters.values
        if self.comm.rank == SERVER:
            self._known = {worker: values.clone() for worker in range(1, self.comm.size)}
        else:
            self._known = {SERVER: self.reference}
        return QuantisedWire(self._known, self.compression, values)

    def resume(self) -> None:
        super().resume()
        if self._link is not None:
            self._link.open()

    def pause(self) -> None:
        if self._link is not None:
            self._link.close()
        super().pause()

    def step(self, progress: Progress) -> None:
        if self._link is not None:
            self._link.check()
        super().step(progress)

    def is_due(self, progress: Progress) -> bool:
        if self.mode == "sync" or self.period.unit is PeriodUnit.STEPS:
            return super().is_due(progress)
        if self.period.unit is PeriodUnit.FRAMES:
            return self._window_frames >= self.period.value
        return progress.time_s - self._last_time_s >= self.period.value

    def _start_window(self, progress: Progress) -> None:
        if self.mode == "sync":
            super()._start_window(progress)
            return
        # Every worker has its own clock, so there is nothing to agree on.
        self._window_frames = self._window_steps = 0
        self._last_time_s = progress.time_s

    def exchange(self) -> None:
        if self._num_workers == 1:
            return
        with self.timeline.span(Span.COMM):
            # The gradients have been used and are zero, so their vector can receive the answer.
            scratch, own = self.replica.gradients.values, self.replica.parameters.values
            if self._link is not None:
                self._link.give(own, scratch)
                own.sub_(scratch)
            else:
                self._exchange_together(own, scratch)
            self.replica.clear_gradients()

    def _exchange_together(self, own: Tensor, scratch: Tensor) -> None:
        assert self._centre is not None
        if self.means:
            self.means[0].average(own, self.reference, 1.0, out=scratch)
            self.reference.copy_(scratch)
            total = scratch.mul_(self._num_workers)
        else:
            total = self.comm.allreduce(scratch.copy_(own), name="parameters")
        own.lerp_(self._centre, self._alpha)
        self._centre.mul_(1 - self._num_workers * self._alpha).add_(total, alpha=self._alpha)

    def finish(self) -> None:
        self._show_centre()

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        with self.replica.restored():
            self._show_centre()
            yield

    def _show_centre(self) -> None:
        """Copy the centre to every replica."""
        if self._num_workers == 1:
            return
        values = self.replica.parameters.values
        if self._centre is not None:
            values.copy_(self._centre)
        self.comm.broadcast(values, name="centre")

    def statistics(self) -> dict[str, Any]:
        return {} if self._link is None else {"staleness": list(self._link.ages)}

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), **self.statistics()}
        if self._centre is not None:
            state["centre"] = self._centre
        if self._link is not None:
            state["version"] = self._link.version
        if self._server is not None:
            state["centre_version"] = self._server.version
            if self._server.owed is not None:
                state["owed"] = self._server.owed
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._centre is not None:
            # A single rank saved no centre: it is where the parameters are.
            self._centre.copy_(state.get("centre", self.replica.parameters.values))
        elif self._num_workers == 1 and "centre" in state:
            # The state is the centre of several workers, of which only this one remains.
            self.replica.parameters.values.copy_(state["centre"])
        if self._link is not None:
            self._link.ages, self._link.version = list(state["staleness"]), state["version"]
            self._send_known_ages()
        if self._server is not None:
            self._server.version = state["centre_version"]
            if self._server.owed is not None:
                self._server.owed.copy_(state["owed"])

    def _send_known_ages(self) -> None:
        """Send rank 0 what it knew of the other workers, from their checkpoints.  Collective."""
        for other, known in self._known.items():
            if self.comm.rank == SERVER:
                self.peers.recv(known, other, tag=BEFORE_TAG)
            else:
                self.peers.send(known, other, tag=BEFORE_TAG)
