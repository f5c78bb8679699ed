"""The identities of every strategy with ranks as threads, and what the command line accepts."""

from __future__ import annotations

import re

import pytest

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError
from speechdp.parallel.registry import describe, parse_strategy, strategy_names
from speechdp.strategies.mechanisms.nodes import node_numbers
from speechdp.testing import (
    Sgd,
    StrategyRun,
    assert_bitwise_equal_over_ranks,
    assert_close,
    batches_of_all,
    make_batch,
    make_replica,
    plain_sgd,
    resumed_run,
)
from tests.helpers.jobs import DEADLINE_S
from tests.helpers.own_script import PLAIN_ON_ONE_RANK
from tests.helpers.strategy_checks import CHECKS, PEER_CHECKS


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS + PEER_CHECKS, ids=lambda check: check.__name__)
def test_identity(check: object, size: int) -> None:
    run_threads(size, check, DEADLINE_S)


@pytest.mark.parametrize("strategy", strategy_names())
def test_one_rank_is_plain_sgd(strategy: str) -> None:
    options = PLAIN_ON_ONE_RANK.get(strategy, "")
    run = StrategyRun(
        SerialCommunicator(),
        f"{strategy}:{options}" if options else strategy,
        make_replica(Sgd(momentum=0.9)),
    )
    run.train(0)
    what = f"{strategy}, with the options that PLAIN_ON_ONE_RANK (tests/helpers/own_script.py) has for it"
    assert_close(run.finish(), plain_sgd(batches_of_all(1), Sgd(momentum=0.9)), what)


#: The options of averages in two levels, off by default.
NO_NODES = "between_nodes=0,node_size=0,"
#: The options of model_averaging that are off by default.
KALDI_OFF = ",first=average,leave_out=0.0,max_change=0.0,combine=0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model_averaging",
            f"model_averaging:period=16,begin=0,compression=none,{NO_NODES}momentum=keep{KALDI_OFF}",
        ),
        (
            "model_averaging:period=600kf,momentum=reset",
            f"model_averaging:period=600kf,begin=0,compression=none,{NO_NODES}momentum=reset{KALDI_OFF}",
        ),
        (
            "model_averaging:period=2.5s,begin=100",
            f"model_averaging:period=2.5s,begin=100,compression=none,{NO_NODES}momentum=keep{KALDI_OFF}",
        ),
        (
            "adaptive_averaging:interval=60s,combine=5",
            f"adaptive_averaging:period=16,begin=0,compression=none,{NO_NODES}momentum=keep,first=average,leave_out=0.0,max_change=0.0,"
            "combine=5,rule=adacomm,alpha=0.0,stages=none,interval=60s,halve=true,growth=4.0,learning_rate=keep",
        ),
        (
            "adaptive_averaging:rule=stages,period=200kf,stages=600kf@0.5epochs+1.2mf@2.5ep",
            f"adaptive_averaging:period=200kf,begin=0,compression=none,{NO_NODES}momentum=keep{KALDI_OFF},rule=stages,alpha=0.0,"
            "stages=600kf@0.5ep+1200kf@2.5ep,interval=256,halve=true,growth=4.0,learning_rate=keep",
        ),
        (
            "adaptive_averaging:rule=stages,stages=32@33.5%+64@60%",
            f"adaptive_averaging:period=16,begin=0,compression=none,{NO_NODES}momentum=keep{KALDI_OFF},rule=stages,alpha=0.0,"
            "stages=32@33.5%+64@60%,interval=256,halve=true,growth=4.0,learning_rate=keep",
        ),
        (
            "bmuf:begin=1.2mf",
            f"bmuf:period=50,begin=1200kf,compression=none,{NO_NODES}eta=-1.0,zeta=1.0,nesterov=false,momentum=reset",
        ),
        (
            "slowmo",
            f"slowmo:period=48,begin=0,compression=none,{NO_NODES}beta=-1.0,alpha=1.0,momentum=keep",
        ),
        (
            "diloco",
            f"diloco:period=500,begin=0,compression=none,{NO_NODES}outer_learning_rate=0.7,outer_momentum=0.9",
        ),
        (
            "delayed_averaging:compression=int4",
            "delayed_averaging:period=16,begin=0,compression=int4,delay=1,fragments=1,mix=1.0",
        ),
        (
            "gradient_averaging:every=4,overlap=no",
            "gradient_averaging:every=4,compression=none,rank=4,bucket_mib=25.0,overlap=false,"
            "between_nodes=0,node_size=0",
        ),
        (
            "gradient_averaging:compression=powersgd",
            "gradient_averaging:every=1,compression=powersgd,rank=4,bucket_mib=25.0,overlap=false,"
            "between_nodes=0,node_size=0",
        ),
    ],
)
def test_options_are_read_and_described(text: str, expected: str) -> None:
    assert describe(parse_strategy(text)) == expected
    assert describe(parse_strategy(expected)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no_such", "unknown strategy 'no_such'; there are: ad"),
        (
            "model_averaging:perod=4",
            "has no option 'perod'; it has: period, begin, compression, between_nodes",
        ),
        ("model_averaging:period", "model_averaging:period: has no value; write period=..."),
        ("model_averaging:period=0", "is not a period"),
        ("model_averaging:period=1.5", "not a whole number of steps"),
        (
            "model_averaging:period=16k",
            "model_averaging:period: '16k' is not a period; write 16 (steps), 600kf",
        ),
        ("model_averaging:begin=later", "model_averaging:begin: 'later' is not a period; write"),
        ("model_averaging:begin=-1", "is not a period"),
        ("model_averaging:leave_out=-1", "must be 0 (off) or positive"),
        ("model_averaging:max_change=nan", "must be 0 (off) or positive"),
        ("model_averaging:combine=1", "must be 0 (off) or at least 2 models"),
        ("model_averaging:first=worst", "choose one of average, best"),
        ("adaptive_averaging:combine=-2", "adaptive_averaging:combine=-2: must be 0 (off) or at least 2"),
        ("adaptive_averaging:growth=0.5", "must be at least 1"),
        ("adaptive_averaging:growth=nan", "must be at least 1"),
        ("adaptive_averaging:interval=0", "is not a period"),
        ("adaptive_averaging:learning_rate=scale,period=5s", "needs a period in steps"),
        ("adaptive_averaging:rule=fast", "choose one of adacomm, qsr, stages"),
        ("adaptive_averaging:rule=qsr", "adaptive_averaging:rule=qsr: needs alpha=, more than 0"),
        ("adaptive_averaging:rule=qsr,alpha=nan", "needs alpha=, more than 0"),
        ("adaptive_averaging:rule=qsr,alpha=1,period=9kf", "rule=qsr,period=9kf: needs a period in steps"),
        ("adaptive_averaging:alpha=1", "alpha: an option of rule=qsr, not of rule=adacomm; leave it out or"),
        (
            "adaptive_averaging:rule=qsr,alpha=1,halve=false",
            "halve: an option of rule=adacomm, not of rule=qs",
        ),
        ("adaptive_averaging:rule=stages", "rule=stages: needs stages=, e.g. stages=32@30%+64@60%"),
        ("adaptive_averaging:stages=32@30%", "stages: an option of rule=stages, not of rule=adacomm"),
        ("adaptive_averaging:rule=stages,stages=32", "stage '32' is not understood; write PERIOD@POINT"),
        ("adaptive_averaging:rule=stages,stages=0@5", "adaptive_averaging:stages='0@5': '0' is not a period"),
        ("adaptive_averaging:rule=stages,stages=32@soon", "point 'soon' is no point of training"),
        ("adaptive_averaging:rule=stages,stages=32@60s", "point '60s' is no point of training"),
        ("adaptive_averaging:rule=stages,stages=32@100%", "point '100%' is not within training"),
        ("adaptive_averaging:rule=stages,stages=32@0ep", "point '0ep' is not within training"),
        ("adaptive_averaging:rule=stages,stages=32@60%+64@30%", "30% is not after 60%; put them in order"),
        ("adaptive_averaging:rule=stages,stages=32@30%+64@5ep", "mix units"),
        ("adaptive_averaging:rule=stages,stages=32@1ep+5s@2ep", "mix units"),
        ("adaptive_averaging:rule=stages,stages=5s@1ep", "its periods must be in steps, as period=16 is"),
        ("bmuf:eta=1", "below 1, or -1 for 1 - 1/N"),
        ("bmuf:eta=-0.5", "below 1, or -1 for 1 - 1/N"),
        ("bmuf:zeta=0", "must be positive"),
        ("bmuf:nesterov=true,eta=0", "nothing to look ahead to; give eta > 0"),
        ("slowmo:beta=1", "below 1, or -1 for its default"),
        ("slowmo:alpha=inf", "must be positive"),
        ("diloco:outer_momentum=-1", "at least 0 and below 1"),
        ("diloco:outer_learning_rate=0", "must be positive"),
        ("model_averaging:momentum=lose", "choose one of keep, average, reset"),
        ("model_averaging:compression=fp16", "choose one of none, int8, int4"),
        (
            "model_averaging:compression=int8,momentum=average",
            "model_averaging:compression=int8,momentum=average: the optimizer's vectors would be sent in "
            "full precision; give momentum=keep or reset, or leave compression out",
        ),
        ("adaptive_averaging:compression=int4,momentum=average", "give momentum=keep or reset"),
        ("bmuf:compression=int8,momentum=average", "bmuf:compression=int8,momentum=average: the optimizer's"),
        ("slowmo:compression=int8,momentum=average", "give momentum=keep or reset"),
        ("model_averaging:period=16,between_nodes=40", "between_nodes=40: must be a multiple of the period"),
        ("model_averaging:period=0.1s,between_nodes=0.35s", "must be a multiple of the period, in its unit"),
        ("model_averaging:period=16,between_nodes=8", "must be a multiple of the period, in its unit"),
        ("bmuf:period=5s,between_nodes=64", "bmuf:period=5s,between_nodes=64: must be a multiple"),
        ("model_averaging:between_nodes=64,leave_out=1", "leave them out, or between_nodes"),
        ("adaptive_averaging:between_nodes=64,first=best", "leave them out, or between_nodes"),
        ("slowmo:node_size=2", "slowmo:node_size=2: give between_nodes as well, or leave it out"),
        ("slowmo:node_size=-2", "must be at least 1, or 0: the ranks of a host"),
        ("gradient_averaging:node_size=2", "give between_nodes as well, or leave it out"),
        ("gradient_averaging:between_nodes=-1", "must be 0 (off) or a number of updates"),
        ("delayed_averaging:between_nodes=64", "delayed_averaging has no option 'between_nodes'"),
        ("easgd:begin=100", "easgd:begin=100: the centre starts with the workers"),
        ("easgd:begin=5s,mode=sync", "leave it out"),
        (
            "dpsgd:topology=random,compression=int8",
            "dpsgd:topology=random,compression=int8: compression sends differences, which needs "
            "neighbours that stay the same; use topology=ring, or leave compression out",
        ),
        ("dpsgd:topology=exponential,compression=int4", "use topology=ring, or leave compression out"),
        (
            "dpsgd:topology=complete,compression=int4",
            "use delayed_averaging:period=1,delay=1,compression=int4, or leave compression out",
        ),
        ("ad_psgd:compression=int8", "ad_psgd has no option 'compression'"),
        ("gradient_averaging:every=0", "at least 1"),
        ("gradient_averaging:every=x", "write a whole number"),
        ("gradient_averaging:overlap=maybe", "write true or false"),
        ("gradient_averaging:bucket_mib=0", "must be positive"),
        ("gradient_averaging:bucket_mib=inf", "must be positive"),
        ("gradient_averaging:bucket_mib=nan", "must be positive"),
        ("gradient_averaging:compression=powersgd,rank=0", "rank=0: factors have at least 1 column"),
        (
            "gradient_averaging:rank=2",
            "gradient_averaging:rank: an option of compression=powersgd, not of compression=none; leave it "
            "out or give compression=powersgd",
        ),
        (
            "gradient_averaging:compression=powersgd,overlap=true",
            "overlap: with compression=powersgd gradien",
        ),
        ("gradient_averaging:compression=powersgd,bucket_mib=4", "in no buckets; leave it out"),
        (
            "gradient_averaging:compression=powersgd,between_nodes=16",
            "compression=powersgd,between_nodes=16: gradients stay inside nodes then, where links are fast",
        ),
        ("slowmo:compression=powersgd", "choose one of none, int8, int4"),
        ("delayed_averaging:delay=-1", "at least 0 steps"),
        ("delayed_averaging:period=3,delay=4", "longer than the 3 steps from one exchange to the next"),
        ("delayed_averaging:period=6,fragments=3,delay=3", "longer than the 2 steps from one"),
        ("delayed_averaging:period=7,fragments=3", "a multiple of their number"),
        ("delayed_averaging:period=6s,fragments=3", "need a period in steps"),
        ("delayed_averaging:fragments=0", "at least 1"),
        ("delayed_averaging:mix=0", "more than 0 and at most 1"),
        ("delayed_averaging:mix=1.5", "more than 0 and at most 1"),
        ("dpsgd:topology=star", "choose one of ring, random, exponential, complete"),
    ],
)
def test_bad_options_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_strategy(text)


def test_half_precision_the_backend_cannot_sum_is_refused_before_step_1() -> None:
    class WithoutHalf(SerialCommunicator):
        reducible = frozenset()

    with pytest.raises(ConfigError, match="cannot sum that type"):
        StrategyRun(WithoutHalf(), "gradient_averaging:compression=bf16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "between_nodes=64",
            "all 2 ranks are on one node; start them on several hosts (a resumed",
        ),
        ("between_nodes=64,node_size=2", "node_size=2: all 2 ranks make one node; make it smaller"),
    ],
)
@pytest.mark.parametrize("strategy", ["model_averaging", "gradient_averaging"])
def test_ranks_of_one_node_have_nothing_to_average_between(strategy: str, options: str, words: str) -> None:
    def attach(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=re.escape(words)):
            StrategyRun(comm, f"{strategy}:{options}")

    run_threads(2, attach)


@pytest.mark.parametrize(("period", "between"), [("0.1s", "0.3s"), ("0.7s", "2.1s"), ("5kf", "15kf")])
def test_a_multiple_is_one_whatever_floats_make_of_it(period: str, between: str) -> None:
    parse_strategy(f"model_averaging:period={period},between_nodes={between}")


def test_ranks_that_come_to_share_a_node_go_on_from_the_same() -> None:
    """Nodes of one rank each become one of two, with fp16 gradients scaled by their frames."""
    text = "gradient_averaging:between_nodes=50,node_size={},compression=fp16"

    def goes_on(comm: Communicator) -> None:
        first = StrategyRun(comm, text.format(1), make_replica(Sgd(momentum=0.9)))
        for step in range(3):
            first.step([make_batch(comm.rank, step)] * (1 + comm.rank))
        run, node = resumed_run(comm, text.format(2), first), comm.split(comm.rank // 2)
        for step in range(3, 6):
            run.step([make_batch(comm.rank, step)])
            assert_bitwise_equal_over_ranks(node, run.parameters(), "a node")

    run_threads(4, goes_on)


def test_nodes_are_hosts_unless_their_size_is_given() -> None:
    hosts = ["b", "a", "b", "c"]

    def numbers(comm: Communicator) -> tuple[list[int], list[int]]:
        comm.allgather_object = lambda _: hosts  # type: ignore[method-assign]
        return node_numbers(comm, 0), node_numbers(comm, 3)

    assert run_threads(4, numbers)[0] == ([0, 1, 0, 2], [0, 0, 0, 1])


def test_a_failing_check_fails_on_threads() -> None:
    """Guard the guards."""

    def fail_on_one(comm: Communicator) -> None:
        assert comm.rank != 1

    with pytest.raises(AssertionError):
        run_threads(2, fail_on_one)
