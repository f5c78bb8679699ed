"""Averages in two levels: inside each node, and between the nodes at a longer period."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.errors import ConfigError
from speechdp.parallel.declared import Exchange, Model, Pattern
from speechdp.parallel.period import Beginning, rounds_between
from speechdp.parallel.strategy import Traits
from speechdp.strategies.mechanisms.averaging import AveragingStrategy
from speechdp.strategies.mechanisms.number_formats import share_of_bytes
from speechdp.strategies.mechanisms.periodic import MomentumRule, weighted_mean
from speechdp.strategies.mechanisms.quantised_mean import QuantisedMean
from speechdp.timing.timeline import Span


class Nodes:
    """The ranks grouped by node, and the first rank of every node, its leader.

    A sum over all ranks is computed inside the nodes, then by the leaders alone, then passed on inside: a
    node sends and receives 2 (M-1)/M times the vector for M nodes, however many ranks it has.

    Attributes:
        inside: the ranks of this node.
        leaders: the leaders; not for use on other ranks.
        is_leader: whether this rank is a leader.
    """

    def __init__(self, inside: Communicator, leaders: Communicator) -> None:
        self.inside, self.leaders = inside, leaders
        self.is_leader = inside.rank == 0

    @classmethod
    def of(cls, comm: Communicator, node_size: int, channels: list[Any]) -> Nodes:
        """Group the ranks by node.  Collective.

        Args:
            node_size: consecutive ranks that form a node; 0: those on the same host.
            channels: opened channels are appended to this list.
        """
        node = node_numbers(comm, node_size)[comm.rank]
        inside = comm.split(node)
        channels.append(inside)
        leaders = comm.split(int(inside.rank > 0))
        channels.append(leaders)
        return cls(inside, leaders)

    def mean_inside(self, whole: Tensor, weight: float, name: str) -> None:
        """Replace `whole[:-1]` by the node's weighted mean, and `whole[-1]` by the sum of its weights.

        Args:
            weight: weight of this rank, not 0.
        """
        if self.inside.size == 1:
            whole[-1] = weight
        else:
            weighted_mean(self.inside, whole, weight, f"{name}.inside")

    def mean_between(self, whole: Tensor, name: str) -> None:
        """Replace `whole[:-1]`, equal on all ranks of a node, by the nodes' mean with weights `whole[-1]`."""
        if self.is_leader:
            whole[:-1].mul_(whole[-1])
            self.leaders.allreduce(whole, name=f"{name}.between")
            torch.div(whole[:-1], whole[-1], out=whole[:-1])
        self.hand_on(whole, name)

    def hand_on(self, x: Tensor, name: str) -> None:
        """Send the leader's values to all ranks of a node."""
        self.inside.broadcast(x, name=f"{name}.inside")

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave bytes sent in the block out of `sent_bytes`, which counts only training."""
        before = self.inside.sent_bytes, self.leaders.sent_bytes
        yield
        self.inside.sent_bytes, self.leaders.sent_bytes = before


def node_numbers(comm: Communicator, node_size: int) -> list[int]:
    """Return the node of each rank, numbered in the order of their first ranks.  Collective."""
    if node_size > 0:
        return [rank // node_size for rank in range(comm.size)]
    hosts = comm.allgather_object(socket.gethostname())
    order = list(dict.fromkeys(hosts))
    return [order.index(host) for host in hosts]


def check_nodes(strategy: str, comm: Communicator, node_size: int) -> None:
    """Refuse ranks that are all on one node, and back-ends without groups.  Collective.

    Raises:
        ConfigError: there is nothing to average between, or the back-end cannot.
    """
    if comm.size == 1:
        return
    if not comm.has_peers:
        comm.split(0)  # says what to do instead
    if len(set(node_numbers(comm, node_size))) > 1:
        return
    if node_size > 0:
        raise ConfigError(
            f"{strategy}:node_size={node_size}: all {comm.size} ranks make one node; make it smaller, or "
            "leave between_nodes out"
        )
    raise ConfigError(
        f"{strategy}:between_nodes: all {comm.size} ranks are on one node; start them on several hosts (a "
        "resumed run may also have one rank), leave it out, or give node_size=N to treat every N ranks as a "
        "node"
    )


def check_node_size(strategy: str, node_size: int, *, averages_between: bool) -> None:
    """Refuse an unusable node size.

    Raises:
        ConfigError: the node size cannot be used.
    """
    if node_size < 0:
        raise ConfigError(f"{strategy}:node_size={node_size}: must be at least 1, or 0: the ranks of a host")
    if node_size > 0 and not averages_between:
        raise ConfigError(f"{strategy}:node_size={node_size}: give between_nodes as well, or leave it out")


@dataclass(eq=False)
class NodewiseStrategy(AveragingStrategy):
    """A strategy whose averages may be computed inside each node, and less often over all ranks.

    With `between_nodes` a window still ends once per period.  Most windows end with the mean over the node's
    ranks, weighted by n_j, the frames of rank j in the window.  Every (between_nodes / period)th one ends
    with an `exchange`, whose means are over all ranks: the nodes' means, weighted by the frames of all ranks
    of a node since the last exchange.  Only messages between nodes are compressed.
    """

    #: Time between averages over all ranks, written as `period` and a multiple of it; the others are inside
    #: each node. 0: all averages are over all ranks.
    between_nodes: Beginning = field(default_factory=Beginning)
    #: Consecutive ranks that form a node; 0: those on the same host.
    node_size: int = 0

    @property
    def traits(self) -> Traits:
        between = str(self.between_nodes) if self.between_nodes.value > 0 else None
        return replace(super().traits, between_nodes=between)

    def predicted_exchange(self, model: Model) -> Exchange | None:
        with_state = getattr(self, "momentum", "") == "average"
        nbytes = (1 + (model.optimizer_vectors if with_state else 0)) * model.nbytes
        period, travelling = model.steps_in(self.period), nbytes * share_of_bytes(self.compression)
        if self.between_nodes.value == 0:
            return Exchange(Pattern.TOGETHER, period, travelling)
        return Exchange(
            Pattern.TOGETHER,
            period,
            nbytes,
            rounds=rounds_between(self.between_nodes, self.period),
            node_size=self.node_size,
            nbytes_between=travelling,
        )

    def check_options(self) -> None:
        super().check_options()
        check_node_size(self.name, self.node_size, averages_between=self.between_nodes.value > 0)
        if self.between_nodes.value > 0 and rounds_between(self.between_nodes, self.period) == 0:
            raise ConfigError(
                f"{self.name}:period={self.period},between_nodes={self.between_nodes}: must be a multiple of "
                "the period, in its unit"
            )

    def check_ranks(self, comm: Communicator) -> None:
        super().check_ranks(comm)
        if self.between_nodes.value > 0:
            check_nodes(self.name, comm, self.node_size)

    def set_up(self) -> None:
        self._nodes: Nodes | None = None
        if self.between_nodes.value > 0 and self.comm.size > 1:
            self._nodes = Nodes.of(self.comm, self.node_size, self.channels)
        #: Number of windows from one exchange to the next.
        self._windows_between = max(1, rounds_between(self.between_nodes, self.period))
        self._round = 0  # averages inside nodes since the last one over all ranks
        self._only_inside = False  # whether the current average is inside the node alone
        #: Frames of all ranks of this node since the last average over all ranks, without those of the
        #: current window.
        self._node_frames = self.replica.parameters.whole.new_zeros(())
        super().set_up()

    def make_means(self) -> list[QuantisedMean]:
        if self._nodes is None:
            return super().make_means()
        if not self._nodes.is_leader:
            return []
        self.peers = self._nodes.leaders.peers()
        self.channels.append(self.peers)
        return super().make_means()

    @property
    def opens_peers(self) -> bool:
        return super().opens_peers and self.between_nodes.value == 0

    @property
    def is_apart(self) -> bool:
        return super().is_apart or self._round > 0

    def end_window(self) -> None:
        if self._round + 1 >= self._windows_between:
            super().end_window()
            self._all_together()
            return
        self._only_inside = True
        with self.timeline.span(Span.COMM):
            self.average_parameters()
            self._node_frames += self.weight() if self.comm.size == 1 else self.replica.parameters.whole[-1]
            rule: MomentumRule = getattr(self, "momentum", "keep")
            self.settle_momentum(rule)
        self._only_inside = False
        self._round += 1

    def _all_together(self) -> None:
        """Note that all ranks now hold the same average."""
        self._round = 0
        self._node_frames.zero_()

    def forget_window(self) -> None:
        super().forget_window()
        self._all_together()

    def average_tensor(self, whole: Tensor, name: str, result: Tensor | None = None) -> None:
        if self._nodes is None:
            super().average_tensor(whole, name, result)
            return
        with self._nodes.uncounted() if not self._is_training else contextlib.nullcontext():
            self._nodes.mean_inside(whole, self.weight(), name)
            if not self._only_inside:
                whole[-1] += self._node_frames
                self._nodes.mean_between(whole, name)
        if result is not None:
            result.copy_(whole[:-1])

    def average_compressed(self) -> None:
        if self._nodes is None:
            super().average_compressed()
            return
        whole, values = self.replica.parameters.whole, self.replica.parameters.values
        self._nodes.mean_inside(whole, self.weight(), "parameters")
        if self._nodes.is_leader:
            self.move_to_means(float(whole[-1] + self._node_frames))
        self._nodes.hand_on(values, "parameters")

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.between_nodes.value > 0:
            state |= {"round": self._round, "node_frames": self._node_frames.item()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.between_nodes.value > 0:
            self._round = state["round"]
            self._node_frames.fill_(state["node_frames"])

    def begin_as_copy(self) -> None:
        super().begin_as_copy()
        self._node_frames.zero_()
