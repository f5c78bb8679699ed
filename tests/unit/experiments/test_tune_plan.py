"""What a search rules out and how it spends its time: pure functions."""

from __future__ import annotations

import itertools
import math
import random
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechdp.cli.support.starting import JobHosts, hosts_of_jobs
from speechdp.cli.tune import TuneOptions, _strategies_for
from speechdp.comm.device import RANKS_PER_GPU
from speechdp.errors import ConfigError
from speechdp.experiments.compare.plan import checked_strategies
from speechdp.experiments.tune.curves import Curve, Finish, finishes, indistinguishable, shrinkage
from speechdp.experiments.tune.jobs import steps_of_turn
from speechdp.experiments.tune.plan import (
    NOTHING,
    STRATEGIES,
    Besides,
    Rungs,
    Setting,
    batches_of,
    halvings,
    in_two_levels,
    next_rung,
    plan_rungs,
    settings_of,
    shortest_rungs,
    too_slow,
)
from speechdp.launching.hostfile import Host, Hostfile
from speechdp.parallel import registry
from speechdp.parallel.registry import StrategyChoice
from speechdp.simulation.predict import Interval
from speechdp.strategies.model_averaging import ModelAveraging


def setting(text: str, batch_size: int = 0) -> Setting:
    return Setting(StrategyChoice(text), batch_size)


def speeds(**given: tuple[float, float, float]) -> dict[Setting, Interval]:
    """Return speeds by strategies; `model_averaging__4` is with period 4, `fp16` gradients compressed."""
    texts = {"fp16": "gradient_averaging:compression=fp16"}
    named = {texts.get(name, name.replace("__", ":period=")): speed for name, speed in given.items()}
    return {setting(text): Interval(mean, low, high) for text, (mean, low, high) in named.items()}


def ruled_out(found: dict[Setting, Interval]) -> set[str]:
    reasons = too_slow(
        list(found),
        lambda one, other: found[one].low > found[other].high,
        lambda one, other: found[one].mean / found[other].mean,
        "raced",
    )
    return {one.name for one in reasons}


@pytest.mark.parametrize(
    ("hosts", "has_nodes"),
    [("a slots=2\nb slots=2\n", True), ("a slots=1\nb slots=1\n", False), ("a slots=4\n", False)],
)
def test_averages_in_two_levels_are_tried_where_there_are_nodes(
    hosts: str, has_nodes: bool, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(hosts)
    ranks = sum(int(line.partition("=")[2]) for line in hosts.splitlines())
    tried = _strategies_for(hosts_of_jobs(tmp_path / "hosts", ""), ranks, (5, 20))
    assert tried == (f"{STRATEGIES},{in_two_levels((5, 20))}" if has_nodes else STRATEGIES)
    names = [one.name for one in settings_of(checked_strategies(tried), (5, 20))]
    assert ("model_averaging:period=5,between_nodes=20" in names) == has_nodes


def test_a_turn_has_an_average_between_nodes() -> None:
    assert steps_of_turn(setting("model_averaging:period=16,between_nodes=64"), 8) == 64
    assert steps_of_turn(setting("gradient_averaging:every=2,between_nodes=10"), 8) == 20


def test_gradient_averaging_is_always_tried_and_first() -> None:
    tried = settings_of([StrategyChoice("model_averaging"), StrategyChoice("dpsgd")], (4, 16))
    assert [one.name for one in tried] == [
        "gradient_averaging",
        "model_averaging:period=4",
        "model_averaging:period=16",
        "dpsgd",
    ]
    given = [StrategyChoice("model_averaging:period=8"), StrategyChoice("gradient_averaging")]
    assert [one.name for one in settings_of(given, (4,))] == [
        "gradient_averaging",
        "model_averaging:period=8",
    ]


def test_a_strategy_of_the_users_own_gets_the_periods_whether_or_not_it_says_what_it_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry.STRATEGIES, "registered", {})

    @registry.strategy("silent")
    @dataclass(eq=False)
    class Silent(ModelAveraging):
        pass

    tried = settings_of(checked_strategies("silent"), (4, 16))
    assert [one.name for one in tried[1:]] == ["silent:period=4", "silent:period=16"]


@pytest.mark.parametrize(
    ("strategy", "period"), [("delayed_averaging:delay=8", 4), ("model_averaging:between_nodes=16", 64)]
)
def test_a_period_that_a_strategy_cannot_have_is_refused_with_the_options(strategy: str, period: int) -> None:
    (choice,) = checked_strategies(strategy)
    with pytest.raises(ConfigError, match=f"^--strategies {strategy} with --periods {period}: "):
        settings_of([choice], (4, 16, 64))


def test_a_seed_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seeds: 1 is given twice"):
        TuneOptions(seeds="1,2,1").whole_seeds()


def test_what_is_surely_slower_than_gradient_averaging_is_ruled_out() -> None:
    found = speeds(gradient_averaging=(100, 98, 102), dpsgd=(90, 85, 97), ad_psgd=(97, 95, 99))
    assert ruled_out(found) == {"dpsgd"}


def test_a_longer_period_must_be_faster_and_so_must_compression() -> None:
    found = speeds(
        gradient_averaging=(100, 98, 102),
        fp16=(101, 99, 103),
        model_averaging__4=(120, 110, 130),
        model_averaging__16=(140, 130, 150),
        model_averaging__64=(141, 131, 151),
        bmuf__64=(141, 131, 151),
    )
    assert ruled_out(found) == {"gradient_averaging:compression=fp16", "model_averaging:period=64"}


@pytest.mark.parametrize("name", ["bmuf", "slowmo:beta=0.4", "diloco"])
def test_a_longer_period_of_an_outer_step_need_not_be_faster(name: str) -> None:
    period = ":period=" if ":" not in name else ",period="
    texts = (
        "gradient_averaging",
        f"{name}{period}4",
        f"{name}{period}16",
        f"{name}{period}4,compression=int8",
    )
    found = {setting(text): Interval(100, 90, 110) for text in texts}
    assert ruled_out(found) == {texts[3]}


def test_periods_in_other_units_are_not_compared() -> None:
    texts = (
        "gradient_averaging",
        "model_averaging:period=4",
        "model_averaging:period=10s",
        "model_averaging:period=20s",
    )
    settings = [Setting(StrategyChoice(text)) for text in texts]
    speeds = dict(zip(settings, (1.0, 1.3, 1.5, 1.5), strict=True))
    ruled_out = too_slow(
        settings, lambda one, other: speeds[one] > speeds[other], lambda a, b: speeds[a] / speeds[b], "raced"
    )
    assert {one.name: why for one, why in ruled_out.items()} == {
        texts[3]: "raced to be less than 2 % faster than model_averaging:period=10s, which exchanges more"
    }


def test_a_setting_is_compared_with_those_that_are_left_alone() -> None:
    """Period 16 falls to period 4; period 64, 3 % faster than both, must not fall to a period that is out."""
    found = speeds(
        gradient_averaging=(100, 98, 102),
        model_averaging__4=(120, 110, 130),
        model_averaging__16=(121, 111, 131),
        model_averaging__64=(123, 113, 133),
    )
    assert ruled_out(found) == {"model_averaging:period=16"}


def test_batches_are_compared_with_their_like() -> None:
    found = {
        setting("gradient_averaging"): Interval(100, 98, 102),
        setting("gradient_averaging", 8): Interval(50, 48, 52),
        setting("model_averaging:period=4", 8): Interval(40, 38, 42),
    }
    assert ruled_out(found) == {"model_averaging:period=4 batch=8"}


def test_other_batches_are_half_and_twice_the_own() -> None:
    assert batches_of(16, ()) == (8, 32)
    assert batches_of(1, ()) == (2,)
    assert batches_of(16, (16, 64)) == (64,)


@given(st.integers(1, 200))
def test_halving_ends_with_two(count: int) -> None:
    counts = halvings(count)
    assert counts[0] == count and counts[-1] == min(count, 2)
    assert all(after == max(2, math.ceil(before / 2)) for before, after in itertools.pairwise(counts))


#: What a run takes besides training, where each is a start of its own.
A_SECOND = Besides(0.0, 1.0)
BESIDES = st.builds(Besides, st.floats(0, 2), st.floats(0, 2))


@given(st.integers(2, 40), st.integers(1, 3), st.floats(500, 5_000), BESIDES)
def test_rungs_cost_the_budget(count: int, seeds: int, budget_s: float, besides: Besides) -> None:
    rungs = plan_rungs(halvings(count), seeds, budget_s, besides, longest_s=math.inf)
    assert rungs.cost_s(besides) == pytest.approx(budget_s)
    assert all(after == pytest.approx(2 * before) for before, after in itertools.pairwise(rungs.seconds))


def test_the_cost_of_rungs_by_hand() -> None:
    """Four settings for 10 s, two for 10 s more, a second seed of both for 20 s in two goes; 1 s a start."""
    rungs = plan_rungs((4, 2), 2, 40 + 20 + 40 + (4 + 2 + 2 * 2) * 1.0, A_SECOND, longest_s=100)
    assert rungs.seconds == (pytest.approx(10), pytest.approx(20))


def test_the_cost_of_rungs_whose_runs_share_a_start_by_hand() -> None:
    """As above, in three starts of 7 s: two rungs, and the second seed of the last two."""
    rungs = plan_rungs((4, 2), 2, 40 + 20 + 40 + (4 + 2 + 2 * 2) * 1.0 + 3 * 7.0, Besides(7.0, 1.0), 100)
    assert rungs.seconds == (pytest.approx(10), pytest.approx(20))


def test_the_cost_of_rungs_to_go_counts_the_starts_of_all_seed_stops_and_no_training_twice() -> None:
    """Two settings from 10 s on to 20 s, and a second seed of both for 20 s in two goes; 1 s a start."""
    budget_s = 2 * 10 + 40 + (2 + 2 * 2) * 1.0
    rungs = plan_rungs((2,), 2, budget_s, A_SECOND, math.inf, (10.0,))
    assert rungs.seconds == (pytest.approx(20),) and rungs.cost_s(A_SECOND) == pytest.approx(budget_s)


def test_runs_go_on_from_the_last_of_several_rungs() -> None:
    assert Rungs((2,), (40.0,), 1, (10.0, 20.0)).cost_s(NOTHING) == 2 * (40.0 - 20.0)
    assert plan_rungs((2,), 1, 40.0, NOTHING, math.inf, (10.0, 20.0)).seconds == (40.0,)


@given(st.integers(3, 40), st.integers(1, 3), st.floats(500, 5_000), BESIDES)
def test_what_is_left_after_the_first_rung_pays_for_the_others(
    count: int, seeds: int, budget_s: float, besides: Besides
) -> None:
    counts = halvings(count)
    first_s = plan_rungs(counts, seeds, budget_s, besides, math.inf).seconds[0]
    left_s = budget_s - count * first_s - besides.cost_s(count)
    rungs = plan_rungs(counts[1:], seeds, left_s, besides, math.inf, (first_s,))
    assert rungs.seconds[0] == pytest.approx(2 * first_s)


@pytest.mark.parametrize(
    ("left_s", "ahead"),
    [
        (4 * 11 + 2 * 21 + 2 * 43, (4, 20.0)),
        (1_000, (4, 30.0)),  # where jobs were faster than planned, a rung may be half as long again
        (4 * 6 + 2 * 16 + 2 * 33, (4, 15.0)),
        (2 * 14.5 + 2 * 25.5, (2, 23.5)),  # four settings would train until 10.8 s
        (1_000 / 8, (4, 15.3)),
        (2 * 15, (2, 24.0)),  # as if there were no second seed, with which two would train until 11 s
        (3, None),
    ],
)
def test_rungs_are_left_out_where_they_would_not_train_longer(
    left_s: float, ahead: tuple[int, float] | None
) -> None:
    found = next_rung(8, 2, left_s, A_SECOND, math.inf, [10.0])
    assert (found is None) == (ahead is None)
    if found is not None and ahead is not None:
        assert found == (ahead[0], pytest.approx(ahead[1]))


def test_runs_that_are_whole_train_no_longer() -> None:
    assert next_rung(4, 1, 1_000, A_SECOND, 15.0, [10.0]) == (2, 15.0)
    assert next_rung(4, 1, 1_000, A_SECOND, 5.0, [10.0]) == (2, 10.0)  # the slow one is left behind


def test_the_shortest_rungs_have_the_fewest_steps_or_end_with_a_whole_training() -> None:
    rungs = shortest_rungs(8, 2, least_s=10, whole_s=100)
    assert (rungs.counts, rungs.seconds, rungs.seeds) == ((8, 4, 2), (10, 20, 40), 2)
    assert shortest_rungs(8, 2, least_s=10, whole_s=20).seconds == (5, 10, 20)


def test_no_setting_trains_longer_than_a_whole_training() -> None:
    assert plan_rungs((4, 2), 2, 1e6, A_SECOND, longest_s=30).seconds == (15, 30)


def test_starting_may_use_a_budget_up() -> None:
    assert plan_rungs((4, 2), 2, 60, Besides(0.0, 10.0), 100).seconds == (0, 0)


def test_the_time_to_a_target_is_interpolated() -> None:
    curve = Curve(((10, -2.0), (20, -1.0), (30, -1.5)))
    assert curve.time_to(-1.5) == pytest.approx(15)
    assert curve.time_to(-3.0) == 10 and curve.time_to(-1.0) == 20
    assert curve.time_to(-0.5) is None
    assert (curve.best, curve.last) == (-1.0, -1.5)


def test_the_target_is_what_every_run_reached_and_the_soonest_is_first() -> None:
    fast, slow = Curve(((10, -2.0), (20, -1.0))), Curve(((10, -3.0), (30, -1.2)))
    target, ends = finishes({"slow": [slow], "fast": [fast]}, None)
    assert target == -1.2 and list(ends) == ["fast", "slow"]
    assert ends["fast"].times_s == (pytest.approx(18),) and ends["slow"].times_s == (30,)
    _, ends = finishes({"slow": [slow], "fast": [fast]}, -1.1)
    assert math.isinf(ends["slow"].mean_s) and ends["fast"].mean_s == pytest.approx(19)


def test_settings_further_apart_than_seeds_explain_are_told_apart() -> None:
    ends = {
        "a": Finish((10.0, 10.4), (-1.0, -1.01)),
        "b": Finish((12.0, 12.4), (-1.0, -1.01)),  # means of logarithms 0.18 apart; the seeds explain 0.15
        "c": Finish((10.5, 14.5), (-1.0, -1.01)),  # its seeds do not overlap those of a
        "d": Finish((20.0, None), (-1.1, -1.11)),
        "e": Finish((20.0, None), (-1.0, -1.02)),
    }
    exact = dict.fromkeys(ends, (1.0, 1.0))
    assert indistinguishable([*ends], ends, exact) == ("c", "e")
    # Times are at raced speeds, which are not known exactly either.
    assert indistinguishable([*ends], ends, {**exact, "b": (0.9, 1.2)}) == ("b", "c", "e")
    assert indistinguishable([*ends], ends, {**exact, "a": (0.8, 1.1)}) == ("b", "c", "e")


def test_one_seed_each_tells_nothing_apart() -> None:
    ends = {"a": Finish((10.0,), (-1.0,)), "b": Finish((99.0,), (-2.0,))}
    assert indistinguishable(["a", "b"], ends, dict.fromkeys(ends, (1.0, 1.0))) == ("b",)


@pytest.mark.parametrize("seeds", [2, 3])
def test_settings_that_learn_equally_fast_are_told_apart_in_5_of_100_searches(seeds: int) -> None:
    drawn, told = random.Random(seeds), 0
    for _ in range(1_000):
        found = [tuple(drawn.lognormvariate(3.0, 0.2) for _ in range(seeds)) for _ in range(2)]
        ends = [Finish(times, (-1.0,) * seeds) for times in sorted(found, key=sum)]
        told += not indistinguishable(
            ["a", "b"], dict(zip("ab", ends, strict=True)), dict.fromkeys("ab", (1.0, 1.0))
        )
    assert (
        told <= 71
    )  # the level is 50, of which 3 standard deviations are 21; by their ranges it would be 330 and 100


def test_a_run_is_expected_to_gain_less_with_each_doubling() -> None:
    steady, slowing = Curve(((1, -3.0), (2, -2.0), (4, -1.5))), Curve(((1, -2.0), (2, -1.6), (4, -1.4)))
    share = shrinkage([steady, slowing])
    assert share == pytest.approx(((0.5 + 0.2) / (1.0 + 0.4)) ** 2)
    ahead = steady.continued(8, share)
    assert ahead.points[:3] == steady.points and ahead.points[-1] == (8, pytest.approx(-1.5 + share * 0.5))
    assert ahead.at(4 * 2**0.5) == pytest.approx(-1.5 + share * 0.25)  # half a doubling
    assert steady.continued(5, share).points[-1][0] == pytest.approx(5)
    assert slowing.last - steady.last > slowing.continued(8, share).last - ahead.last


def test_gains_between_evaluations_are_those_over_log_time() -> None:
    """A score that gains 1 with each doubling, evaluated at the ends of rungs three times as long each."""
    curve = Curve(tuple((s, math.log2(s)) for s in (1, 3, 9, 27)))
    assert curve.gains() == (pytest.approx(1), pytest.approx(1)) and shrinkage([curve]) == pytest.approx(1)
    assert curve.continued(54, 1.0).last == pytest.approx(math.log2(54))


@pytest.mark.parametrize(
    ("points", "share"),
    [
        (((1, -3.0), (2, -2.0), (4, -0.5)), 1.0),  # it does not gain more and more
        (((1, -3.0), (2, -2.0), (4, -2.1)), 0.0),
        (((1, -2.0), (2, -3.0), (4, -2.0)), 0.0),
        (((2, -3.0), (4, -2.0)), 0.0),  # nobody knows what it gained first
    ],
)
def test_what_is_expected_of_runs_is_bounded(points: tuple[tuple[float, float], ...], share: float) -> None:
    curve = Curve(points)
    assert shrinkage([curve]) == share
    assert (curve.continued(8, share) is curve) == (share == 0)
    assert curve.continued(4, 1.0) is curve  # the training is over
    over = Curve(points, is_over=True)
    assert over.continued(8, 1.0) is over


@pytest.mark.parametrize(
    ("name", "steps", "stop"),
    [
        ("bmuf:period=16", 206, 208),
        ("bmuf:period=16", 250, 256),
        ("slowmo:period=64", 95, 95),  # nobody trains for a third less, or more, than the others
        ("slowmo:period=64", 20, 20),
        ("model_averaging:period=16", 206, 206),  # it is averaged for the evaluation
        ("gradient_averaging", 206, 206),
    ],
)
def test_runs_with_an_outer_optimizer_stop_at_its_steps(name: str, steps: int, stop: int) -> None:
    assert setting(name).stop(steps) == stop


@pytest.mark.parametrize(
    ("gpus", "device", "feeders", "ranks"),
    [
        (0, "auto", 0, 6),
        (0, "auto", 2, 4),
        (0, "cpu", 5, 2),
        (8, "auto", 0, 8),
        (8, "cuda", 2, 8),
        (8, "cpu", 0, 6),
    ],
)
def test_ranks_fill_the_gpus_of_this_machine_or_else_its_cores(
    gpus: int, device: str, feeders: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine_with(monkeypatch, gpus, cores=6)
    assert TuneOptions().num_ranks(JobHosts(), device=device, feeders=feeders) == ranks


@pytest.mark.parametrize(
    ("gpus", "device", "ranks"), [(2, "auto", 2), (2, "cpu", 4), (8, "auto", 4), (0, "auto", 4)]
)
def test_slots_of_a_batch_job_here_are_ranks_as_far_as_there_are_gpus(
    gpus: int, device: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grid Engine's slots are cores: on GPUs too many ranks would be refused as they begin."""
    _machine_with(monkeypatch, gpus, cores=6)
    here = JobHosts(Hostfile("PE_HOSTFILE", (Host(socket.gethostname(), 4),)))
    assert TuneOptions().num_ranks(here, device=device) == ranks
    elsewhere = JobHosts(Hostfile("PE_HOSTFILE", (Host("node1", 4),)))
    assert TuneOptions().num_ranks(elsewhere, device=device) == 4


def test_one_gpu_is_refused_unless_ranks_or_the_cpu_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine_with(monkeypatch, 1, cores=6)
    with pytest.raises(
        ConfigError, match=r"this machine has one GPU; .* to search on the CPU use --device cpu"
    ):
        TuneOptions().num_ranks(JobHosts(), device="auto")
    with pytest.raises(
        ConfigError, match="to search on the CPU give --ranks, and an empty CUDA_VISIBLE_DEVICES"
    ):
        TuneOptions().num_ranks(JobHosts())
    assert TuneOptions().num_ranks(JobHosts(), device="cpu") == 6
    assert TuneOptions(ranks=2).num_ranks(JobHosts()) == 2


def test_ranks_that_share_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine_with(monkeypatch, 1, cores=6)
    monkeypatch.setenv(RANKS_PER_GPU, "2")
    assert TuneOptions().num_ranks(JobHosts(), device="auto") == 2


def test_gpus_that_are_asked_for_and_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine_with(monkeypatch, 0, cores=6)
    with pytest.raises(ConfigError, match="torch sees no GPU on this host"):
        TuneOptions().num_ranks(JobHosts(), device="cuda")


def _machine_with(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int) -> None:
    monkeypatch.delenv(RANKS_PER_GPU, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("speechdp.launching.cores.available_cores", lambda: cores)
