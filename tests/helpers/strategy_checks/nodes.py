"""Identities of averages in two levels: inside nodes, and less often between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.testing import (
    NUM_STEPS,
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    assert_resumes,
    batches_of_all,
    make_batch,
    make_replica,
    plain_sgd,
)
from tests.helpers.apart import Apart, drive, simulate
from tests.helpers.strategy_checks.outer import Cbm

NEEDS_PEERS = True
SGD = Sgd(momentum=0.9)


def node_size(comm: Communicator) -> int:
    """Return the size of nodes of which there are two, the second one smaller where ranks are odd."""
    return (comm.size + 1) // 2


def averages_in_two_levels_are_those_in_one(comm: Communicator) -> None:
    """Where every average is over all ranks."""
    for options in ("momentum=keep", "momentum=average"):
        both = (f"{options}", f"{options},between_nodes=3,node_size={node_size(comm)}")
        flat, levels = (_trained(comm, f"model_averaging:period=3,{text}") for text in both)
        assert_close(levels, flat, f"between_nodes=3, {options}")


def averages_inside_nodes_follow_the_equation(comm: Communicator) -> None:
    size = node_size(comm)
    # 7 steps end inside a window; 6 right after an average inside the nodes.
    for momentum, steps in (("keep", NUM_STEPS), ("average", NUM_STEPS), ("reset", NUM_STEPS), ("keep", 6)):
        nodes = Apart(comm.size, 2, sgd=SGD, node_size=size, rounds=2)
        apart = replace(nodes, momentum=momentum, has_frames=_unequal, steps=steps)
        text = f"model_averaging:period=2,between_nodes=4,node_size={size},momentum={momentum}"
        run = StrategyRun(comm, text, make_replica(SGD))
        drive(run, apart)
        assert_close(run.finish(), simulate(comm, apart), f"{text}, {steps} steps")


def outer_steps_are_taken_between_nodes(comm: Communicator) -> None:
    size = node_size(comm)
    for steps in (NUM_STEPS, 4):
        apart = Apart(comm.size, 1, Cbm(), sgd=SGD, momentum="keep", steps=steps, node_size=size, rounds=2)
        text = f"bmuf:period=1,eta=0.6,zeta=0.8,momentum=keep,between_nodes=2,node_size={size}"
        run = StrategyRun(comm, text, make_replica(SGD))
        drive(run, apart)
        assert_close(run.finish(), simulate(comm, apart), f"{text}, {steps} steps")


def gradients_inside_nodes_are_averages_at_every_step(comm: Communicator) -> None:
    """With plain SGD."""
    nodes = f"between_nodes=3,node_size={node_size(comm)}"
    expected = _trained(comm, f"model_averaging:period=1,{nodes}", Sgd())
    for options in ("", ",bucket_mib=0.0005", ",overlap=false"):
        text = f"gradient_averaging:{nodes}{options}"
        assert_close(_trained(comm, text, Sgd()), expected, text)
    apart = Apart(comm.size, 1, sgd=Sgd(), has_frames=_unequal)  # nodes without a frame in some steps
    found = []
    for text in (f"model_averaging:period=1,{nodes}", f"gradient_averaging:{nodes}"):
        run = StrategyRun(comm, text, make_replica(apart.sgd))
        drive(run, apart)
        found.append(run.finish())
    assert_close(found[1], found[0], "nodes without frames")
    if comm.size == 1:
        assert_close(expected, plain_sgd(batches_of_all(1)), "one rank")


def replicas_agree_where_they_should(comm: Communicator) -> None:
    size = node_size(comm)
    node = comm.split(comm.rank // size)
    for text in (
        f"model_averaging:period=1,between_nodes=3,node_size={size}",
        f"model_averaging:period=1,between_nodes=3,node_size={size},compression=int8",
        f"diloco:period=1,between_nodes=3,node_size={size},compression=int4",
        f"gradient_averaging:between_nodes=3,node_size={size}",
    ):
        run = StrategyRun(comm, text, make_replica(SGD))
        for step in range(NUM_STEPS):
            run.step([make_batch(comm.rank, step)])
            assert_bitwise_equal_over_ranks(node, run.parameters(), f"{text}, on a node")
            if step % 3 == 2:
                assert_bitwise_equal_over_ranks(comm, run.parameters(), f"{text}, on all nodes")
            elif comm.size > 1:
                first = comm.broadcast(run.parameters().clone(), name="first")
                own = run.parameters()
                assert (first == own).all() == (comm.rank < size), f"{text}: nodes have met early"
        assert_bitwise_equal_over_ranks(comm, run.finish(), text)
    node.close()


def rounded_means_go_between_nodes_alone(comm: Communicator) -> None:
    size = node_size(comm)
    nodes = f"period=2,between_nodes=4,node_size={size}"
    run = StrategyRun(comm, f"model_averaging:{nodes},compression=int8", make_replica(SGD))
    run.train(comm.rank)
    final = run.finish()
    error = float((_trained(comm, f"model_averaging:{nodes}") - final).abs().max())
    assert error < 0.02 and (error > 0) == (comm.size > 1), f"int8 between nodes: differs by {error:g}"


def what_is_shown_is_the_mean_of_all(comm: Communicator) -> None:
    """At every step, and training goes on as if nothing had been shown."""
    nodes = f"between_nodes=4,node_size={node_size(comm)}"
    for text in (f"model_averaging:period=2,{nodes}", f"gradient_averaging:{nodes}"):
        for steps in (1, 2, 3, 5):
            shown, ended = (StrategyRun(comm, text, make_replica(SGD)) for _ in range(2))
            for run in (shown, ended):
                run.train(comm.rank, 0, steps)
            with shown.strategy.evaluation_parameters():
                seen = shown.parameters().clone()
            assert_close(seen, ended.finish(), f"{text}, shown after {steps} steps")
            shown.train(comm.rank, steps)
            assert_close(shown.finish(), _trained(comm, text), f"{text}, gone on after {steps} steps")


def averages_in_two_levels_resume_bitwise(comm: Communicator) -> None:
    nodes = f"node_size={node_size(comm)}"
    for text in (
        f"model_averaging:period=2,between_nodes=4,{nodes}",
        f"model_averaging:period=2,between_nodes=4,{nodes},compression=int8",
        f"slowmo:period=2,beta=0.4,between_nodes=4,{nodes},compression=int4",
        f"gradient_averaging:between_nodes=4,{nodes}",
        f"gradient_averaging:every=2,between_nodes=2,{nodes}",
    ):
        for saved_after in (3, 6):
            assert_resumes(comm, text, saved_after)


def _unequal(rank: int, step: int) -> bool:
    """Rank 0 has frames in every step, the others not in every third one."""
    return rank == 0 or step % 3 != rank % 3


def _trained(comm: Communicator, strategy: str, sgd: Sgd = SGD) -> Tensor:
    run = StrategyRun(comm, strategy, make_replica(sgd))
    run.train(comm.rank)
    return run.finish()


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    averages_in_two_levels_are_those_in_one,
    averages_inside_nodes_follow_the_equation,
    outer_steps_are_taken_between_nodes,
    gradients_inside_nodes_are_averages_at_every_step,
    replicas_agree_where_they_should,
    rounded_means_go_between_nodes_alone,
    what_is_shown_is_the_mean_of_all,
    averages_in_two_levels_resume_bitwise,
)
