"""Synchronous SGD: gradients of all ranks are summed by a ring-allreduce, overlapped with backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model, Pattern, buckets_of
from speechdp.parallel.strategy import Progress, Traits
from speechdp.strategies.mechanisms.bucketed_gradients import BucketedGradients
from speechdp.strategies.mechanisms.nodes import Nodes, check_node_size, check_nodes
from speechdp.strategies.mechanisms.periodic import NO_FRAMES
from speechdp.timing.timeline import Span


@dataclass(eq=False)
class GradientAveraging(BucketedGradients):
    """Average gradients over all ranks at every update; or gradients inside nodes, parameters between them.

    Update rule: g = (sum_i sum_frames dL/dw) / (sum_i frames_i), then one optimizer step with g on every
    rank.  One rank with the union of the batches computes the same, also with unequal frame counts.  With
    between_nodes = K the sums are over the ranks of a node, and after every K updates
    w <- (sum_m n_m w_m) / (sum_m n_m), n_m the frames of node m since the previous such average.

    Exchange: the flat gradient, bucket by bucket, each as soon as backward has filled it (hooks on the
    parameters); the frame count is appended to the gradients in the same vector.  2 (N-1)/N times the
    gradient's bytes sent by each rank per update (ring).  With between_nodes this happens only inside nodes;
    between M nodes, the leader of each sends 2 (M-1)/M times the parameters' bytes once in K updates, and
    sends the mean to the ranks of its node.  With compression=powersgd the exchange follows backward, with
    matrices as two factors of low rank (`LowRankSum`).

    Guarantee: replicas are bitwise equal after every update; with between_nodes those of a node are, and all
    after an average between nodes.

    Source: ring-allreduce SGD as in Horovod (Sergeev & Del Balso 2018, arXiv 1802.05799); between_nodes:
    hierarchical local SGD of Lin et al. (arXiv 1808.07217, recalled), with gradients averaged at every step
    inside.  Deviations there: weights by frames; each node keeps its own optimizer state.
    """

    #: Updates between averages of the parameters over nodes; 0: gradients are averaged over all ranks.
    between_nodes: int = 0
    #: Consecutive ranks that form a node; 0: those on the same host.
    node_size: int = 0

    @property
    def traits(self) -> Traits:
        steps = self.every * self.between_nodes
        return replace(
            super().traits, replicas_equal=steps == 0, between_nodes=str(steps) if steps > 0 else None
        )

    def predicted_exchange(self, model: Model) -> Exchange | None:
        if self.compression == "powersgd":  # the size of the factors depends on the model's matrices
            return None
        share = 1.0 if self.compression == "none" else 0.5
        buckets = tuple(share * b for b in buckets_of(model.nbytes, self.bucket_mib))
        return Exchange(
            Pattern.TOGETHER,
            self.every,
            share * model.nbytes,
            buckets if self.overlap else (),
            rounds=self.between_nodes,
            node_size=self.node_size,
            nbytes_between=model.nbytes,
        )

    def check_options(self) -> None:
        super().check_options()
        check_node_size(self.name, self.node_size, averages_between=self.between_nodes > 0)
        if self.between_nodes < 0:
            raise ConfigError(
                f"{self.name}:between_nodes={self.between_nodes}: must be 0 (off) or a number of updates"
            )
        if self.between_nodes > 0 and self.compression == "powersgd":
            raise ConfigError(
                f"{self.name}:compression=powersgd,between_nodes={self.between_nodes}: gradients stay inside "
                "nodes then, where links are fast; leave one of them out"
            )

    def check_ranks(self, comm: Communicator) -> None:
        super().check_ranks(comm)
        if self.between_nodes > 0:
            check_nodes(self.name, comm, self.node_size)

    @property
    def group(self) -> Communicator:
        return self.comm if self._nodes is None else self._nodes.inside

    def set_up(self) -> None:
        self._nodes: Nodes | None = None
        if self.between_nodes > 0 and self.comm.size > 1:
            self._nodes = Nodes.of(self.comm, self.node_size, self.channels)
            self.check_compression(self._nodes.inside)
        self._updates = 0  # since the last average between nodes
        #: Frames of this node's ranks since that average.
        self._node_frames = 0.0
        super().set_up()

    def apply(self, frames: float | Tensor) -> None:
        if self._nodes is None:
            super().apply(frames)
            return
        # The host waits for the device here, because a node may have no frames while others have some.  A
        # tensor would be part of the gradients, and cleared with them.
        count = float(frames)
        super().apply(count)
        self._node_frames += count
        self._updates += 1

    def step(self, progress: Progress) -> None:
        super().step(progress)
        if self._nodes is not None and self._updates >= self.between_nodes:
            self._average_nodes()
            self._forget_updates()

    def _average_nodes(self) -> None:
        """Replace the parameters by the mean over nodes.  Collective."""
        if self._nodes is None:
            return
        whole = self.replica.parameters.whole
        with self.timeline.span(Span.COMM):
            whole[-1] = self._node_frames + NO_FRAMES
            self._nodes.mean_between(whole, "parameters")

    def _forget_updates(self) -> None:
        self._updates = 0
        self._node_frames = 0.0

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        """Put the mean over nodes into the replica."""
        if self._nodes is None:
            yield
            return
        with self.replica.restored():
            with self._nodes.uncounted():
                self._average_nodes()
            yield

    def finish(self) -> None:
        super().finish()
        if self._nodes is not None:
            with self._nodes.uncounted():
                self._average_nodes()
            self._forget_updates()
            self.comm.broadcast(self.replica.parameters.whole, name="parameters")

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._nodes is not None:
            state |= {"updates": self._updates, "node_frames": self._node_frames}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.  Collective with between_nodes."""
        super().load_state_dict(state)
        if self._nodes is None:
            return
        self._updates = state.get("updates", 0)  # a single rank saved none
        self._node_frames = state.get("node_frames", 0.0)
        # On other nodes or more ranks than before, the ranks of a node may have loaded different ranks'
        # states.
        self.replica.give_loss_scale()
        self._nodes.hand_on(self.replica.parameters.whole, "parameters")
        self.replica.take_loss_scale()
        for name, vector in self.replica.optimizer_vectors().items():
            self._nodes.hand_on(vector, f"optimizer.{name}")

    def begin_as_copy(self) -> None:
        super().begin_as_copy()
        self._node_frames = 0.0
