"""The simulation against what is known in closed form, and how it moves with what it is given."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speechdp.cli.support.command_line import parse
from speechdp.errors import ConfigError
from speechdp.experiments.compare.plan import RATES, PlannedRun
from speechdp.experiments.tune.jobs import Measurement
from speechdp.experiments.tune.plan import Setting
from speechdp.parallel import registry
from speechdp.parallel.declared import Exchange, Model, Pattern
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.strategy import Traits
from speechdp.simulation import fit
from speechdp.simulation.events import mixed_share, serve
from speechdp.simulation.exchanges import exchange_of, is_known, known_strategies
from speechdp.simulation.fit import fit_link, model_of, observe
from speechdp.simulation.gains import gains_of
from speechdp.simulation.links import Cluster, LinkSpeed
from speechdp.simulation.measured import MeasuredRun, read_measured
from speechdp.simulation.predict import Interval, Prediction, Scenario, predict
from speechdp.simulation.simulate import GivenLink, Request, scenario_of, simulate
from speechdp.simulation.steps import Draws, MeasuredWork
from speechdp.simulation.waiting import exposed_s, slowest
from speechdp.strategies.model_averaging import ModelAveraging
from tests.helpers.comparisons import EPOCHS, entry_of, write_record
from tests.helpers.measured_runs import FRAMES, MadeUpSteps

MB = 1e6
NETWORK = LinkSpeed.of(1e-4, 1e8)
FREE = LinkSpeed.of(0.0, 1e15)
#: Every pattern of exchange.
STRATEGIES = (
    "gradient_averaging",
    "gradient_averaging:overlap=false,every=2",
    "model_averaging:period=4",
    "model_averaging:period=4,between_nodes=8,node_size=4",
    "gradient_averaging:between_nodes=4,node_size=2",
    "bmuf:period=4,momentum=average",
    "delayed_averaging:period=4,delay=2",
    "dpsgd:topology=ring",
    "dpsgd:topology=random",
    "dpsgd:topology=exponential",
    "dpsgd:topology=complete",
    "ad_psgd",
    "ad_psgd:groups=2",
    "parameter_server",
    "parameter_server:mode=sync",
    "easgd:period=4",
    "easgd:mode=sync,period=4",
)
ASYNCHRONOUS = ("ad_psgd", "parameter_server", "easgd:period=4")


def _cluster(
    between: LinkSpeed = NETWORK, within: LinkSpeed = FREE, per_node: int = 1, **others: Any
) -> Cluster:
    return Cluster(per_node, within, between, **others)


def _scenario(steps: MadeUpSteps, cluster: Cluster, **others: Any) -> Scenario:
    run = steps.measured()
    work = MeasuredWork.of([run])
    return Scenario(work, model_of([run], work), cluster, **others)


def _predicted(scenario: Scenario, ranks: int, strategy: str) -> Prediction:
    choice = StrategyChoice(strategy)
    (found,) = predict(scenario, ranks, [(choice, exchange_of(choice, scenario.model))])
    return found


def _noisy(ranks: int = 2, steps: int = 400) -> MadeUpSteps:
    generator = np.random.default_rng(7)
    return MadeUpSteps(["a"] * ranks, work_s=0.1 * generator.gamma(30, 1 / 30, (steps, ranks)))


# --- links and allreduces -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "seconds"),
    [
        # 2 (N - 1) (alpha + n / (N B))
        (Cluster.ring_s, 14 * (1e-4 + 8 * MB / 8 / 1e8)),
        # 2 log2(N) alpha + 2 n / B
        (Cluster.tree_s, 6 * 1e-4 + 2 * 8 * MB / 1e8),
    ],
)
def test_flat_allreduces(form: Callable[..., Any], seconds: float) -> None:
    assert form(_cluster(), 8 * MB, 8)[0] == pytest.approx(seconds)


def test_a_hierarchical_allreduce_is_rings_inside_between_and_inside() -> None:
    within = LinkSpeed.of(1e-6, 1e9)
    cluster = _cluster(within=within, per_node=4)
    inside = 6 * (1e-6 + 2 * MB / 1e9)
    # 4 rings of 2 MB over 2 nodes share the link.
    between = 2 * (1e-4 + 4 * (1 * MB) / 1e8)
    assert cluster.hierarchical_s(8 * MB, 8)[0] == pytest.approx(inside + between)


def test_small_vectors_are_summed_in_the_fewest_messages() -> None:
    assert _cluster().allreduce_s(1000, 8)[0] == pytest.approx(3 * (1e-4 + 1000 / 1e8))
    # The ranks of a node send theirs over its link at the same time.
    shared = _cluster(within=LinkSpeed.of(1e-6, 1e9), per_node=4)
    assert shared.allreduce_s(1000, 8)[0] == pytest.approx(3 * (1e-4 + 4 * 1000 / 1e8))
    assert shared.allreduce_s(40_000, 8)[0] == pytest.approx(shared.ring_s(40_000, 8)[0])


def test_auto_is_the_fastest_form() -> None:
    cluster = _cluster(per_node=4, algorithm="auto")
    for nbytes, ranks in ((10.0, 64), (100 * MB, 64), (100 * MB, 2)):
        forms = [form(nbytes, ranks)[0] for form in (cluster.ring_s, cluster.tree_s, cluster.hierarchical_s)]
        assert cluster.allreduce_s(nbytes, ranks)[0] == pytest.approx(min(forms))


def test_inside_a_node_the_network_does_not_matter() -> None:
    within = LinkSpeed.of(1e-6, 1e9)
    near, far = (_cluster(between, within, per_node=8) for between in (NETWORK, FREE))
    assert near.allreduce_s(MB, 8)[0] == far.allreduce_s(MB, 8)[0]
    assert near.allreduce_s(MB, 9)[0] > far.allreduce_s(MB, 9)[0]


def _two_sizes(link: LinkSpeed) -> list[MeasuredRun]:
    """Return runs on 2 and 4 ranks over a link, with exchanges of 4 MB."""
    return [
        MadeUpSteps(
            [str(rank) for rank in range(ranks)],
            exchange_s=float(_cluster(link).ring_s(4 * MB, ranks)[0]),
        ).measured()
        for ranks in (2, 4)
    ]


def test_latency_and_bandwidth_are_fitted_from_two_numbers_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "_USUAL_SPREAD", 0.0)
    runs = _two_sizes(LinkSpeed.of(3e-4, 2e8))
    fitted = fit_link(runs, model_of(runs, MeasuredWork.of(runs[:1])), crosses=True)
    assert fitted is not None
    assert fitted.latency_s.mean() == pytest.approx(3e-4, rel=1e-3)
    assert fitted.bytes_per_s == pytest.approx(2e8, rel=1e-3)


def test_what_differs_between_runs_counts_for_more_the_further_it_is_carried() -> None:
    link = LinkSpeed.of(3e-4, 2e8)
    runs = _two_sizes(link)
    fitted = fit_link(runs, model_of(runs, MeasuredWork.of(runs[:1])), crosses=True)
    assert fitted is not None
    assert fitted.latency_s.mean() == pytest.approx(3e-4, rel=0.25)
    assert fitted.bytes_per_s == pytest.approx(2e8, rel=0.02)
    # What one run has more than another by chance counts for more, the further away it is carried.
    seconds = {ranks: _cluster(fitted).ring_s(4 * MB, ranks) for ranks in (2, 4, 16)}
    for ranks, found in seconds.items():
        assert found.mean() == pytest.approx(_cluster(link).ring_s(4 * MB, ranks)[0], rel=0.04), ranks
    assert seconds[2].std() / seconds[2].mean() == pytest.approx(0.03, rel=0.3)
    assert seconds[16].std() / seconds[16].mean() > 0.1


def test_a_hiccup_is_not_taken_for_the_exchange() -> None:
    run = MadeUpSteps(["a", "b"], "model_averaging:period=1", exchange_s=0.02).measured()
    comm = run.times.comm.copy()
    comm[10] += 1.0
    seen = observe(
        run := replace(run, times=replace(run.times, comm=comm)), model_of([run], MeasuredWork.of([run]))
    )
    assert seen is not None
    assert len(seen.seconds) == 100


def test_a_latency_that_is_assumed_is_less_than_what_was_seen_behind_backward() -> None:
    # 20 us seen of 14 messages: 5 us each, as is assumed elsewhere, would be more than that.
    run = MadeUpSteps(["a"] * 8, exchange_s=2e-5, nbytes=100 * MB).measured()
    link = fit_link([run], model_of([run], MeasuredWork.of([run])), crosses=False)
    assert link is not None
    assert link.bytes_per_s < 1e13
    assert 14 * float(link.latency_s.mean()) <= 2e-5 / 2


def test_exchanges_that_were_measured_are_predicted_again() -> None:
    run = MadeUpSteps(["a", "b"], exchange_s=0.05).measured()
    work = MeasuredWork.of([run])
    link = fit_link([run], model_of([run], work), crosses=True)
    assert link is not None
    assert float(_cluster(link).ring_s(run.nbytes, 2).mean()) == pytest.approx(0.05, rel=1e-3)


# --- steps and the slowest of them ----------------------------------------------------------------------


def test_the_slowest_of_many_ranks_is_the_expected_maximum() -> None:
    # Of N independent exponential times the largest has the mean 1 + 1/2 + ... + 1/N.
    generator = np.random.default_rng(3)
    work = MeasuredWork.of([MadeUpSteps(["a"], work_s=generator.exponential(1.0, 4000)).measured()])
    means = [slowest(drawn, 1) for _, drawn in Draws(work, 16).together(600)]
    harmonic = sum(1 / n for n in range(1, 17))
    assert float(np.concatenate(means).mean()) == pytest.approx(harmonic, rel=0.05)


def test_ranks_that_are_slow_together_are_drawn_together() -> None:
    generator = np.random.default_rng(3)
    common = 0.1 * generator.gamma(4, 1 / 4, 500)
    work = MeasuredWork.of([MadeUpSteps(["a", "a"], work_s=common).measured()])
    assert work.alike == pytest.approx(1.0)
    means = [slowest(drawn, 1) for _, drawn in Draws(work, 64).together(300)]
    assert float(np.concatenate(means).mean()) == pytest.approx(work.step_s, rel=0.05)


def test_drawn_ranks_are_slow_together_as_often_as_measured_ones() -> None:
    generator = np.random.default_rng(3)
    shared, own = generator.gamma(30, 1 / 30, (4000, 1)), generator.gamma(30, 1 / 30, (4000, 2))
    steps = 0.1 * (0.5 * shared + 0.5 * own)
    work = MeasuredWork.of([MadeUpSteps(["a", "a"], work_s=steps).measured()])
    measured = np.corrcoef(steps.T)[0, 1]
    assert measured == pytest.approx(0.5, abs=0.05)
    for ranks in ((0, 1), (0, 2)):  # like different measured ranks, and like the same
        found = [
            np.corrcoef(drawn[0][:, ranks].T)[0, 1]
            for _, drawn in Draws(work, 3, replicates=1).together(40_000)
        ]
        assert found == [pytest.approx(measured, abs=0.06)]


def test_batches_that_differ_between_the_ranks_of_a_step_are_waited_for() -> None:
    run = MadeUpSteps(["a", "a"], "model_averaging:period=1", exchange_s=1e-6).measured()
    frames = FRAMES * np.random.default_rng(3).uniform(0.5, 1.5, (100, 2))
    times = replace(run.times, frames=frames, forward=run.times.forward * frames / FRAMES)
    run = replace(run, times=times)
    found = _predicted(
        Scenario(work := MeasuredWork.of([run]), model_of([run], work), _cluster(FREE)), 2, "bmuf"
    )
    assert found.efficiency.mean == pytest.approx(1.0, abs=0.1)  # once in 16 steps
    found = _predicted(Scenario(work, model_of([run], work), _cluster(FREE)), 2, run.strategy.text)
    assert found.step_s.mean == pytest.approx(times.work().max(axis=1).mean(), rel=0.03)


@pytest.mark.parametrize("strategy", ["delayed_averaging:period=1", "dpsgd"])
def test_a_rare_long_step_makes_nobody_faster_than_alone(strategy: str) -> None:
    work = np.full((50, 2), 0.1)
    work[20] = 3.0
    found = _predicted(_scenario(MadeUpSteps(["a", "a"], work_s=work), _cluster(FREE)), 8, strategy)
    assert found.efficiency.mean <= 1.03


def test_few_steps_of_many_ranks_have_the_measured_mean() -> None:
    generator = np.random.default_rng(3)
    work = MeasuredWork.of([MadeUpSteps(["a", "a"], work_s=0.1 * generator.exponential(1.0, 300)).measured()])
    draws = Draws(work, 64)
    for part, drawn in draws.together(8):
        np.testing.assert_allclose(drawn.mean(axis=(1, 2)), draws.alone_s[part], rtol=1e-4)


def test_longer_batches_are_no_noise() -> None:
    steps = MadeUpSteps(["a"]).measured()
    frames = np.linspace(100, 900, 100)[:, None]
    times = replace(steps.times, frames=frames, forward=steps.times.forward * frames / FRAMES)
    work = MeasuredWork.of([replace(steps, times=times)])
    assert work.own.std() < 1e-9
    assert work.common.std() > 0.01


@pytest.mark.parametrize("samples", [[0.1] * 3, [0.0] * 99 + [1e6]])
def test_an_interval_holds_its_mean(samples: list[float]) -> None:
    interval = Interval.of(samples)
    assert interval.low <= interval.mean <= interval.high


def test_draws_are_the_same_for_the_same_seed() -> None:
    work = MeasuredWork.of([_noisy().measured()])
    first, again = ([d for _, d in Draws(work, 4).together(20)] for _ in range(2))
    assert np.array_equal(np.concatenate(first), np.concatenate(again))
    other = [d for _, d in Draws(work, 4, seed=2).together(20)]
    assert not np.array_equal(np.concatenate(first), np.concatenate(other))


# --- strategies -----------------------------------------------------------------------------------------


def test_what_a_strategy_from_outside_inherits_is_not_taken_for_its_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry.STRATEGIES, "registered", {})

    @registry.strategy("inheriting")
    @dataclass(eq=False)
    class Inheriting(ModelAveraging):
        pass

    @registry.strategy("telling")
    @dataclass(eq=False)
    class Telling(ModelAveraging):
        def predicted_exchange(self, model: Model) -> Exchange:
            return Exchange(Pattern.GOSSIP, model.steps_in(self.period), model.nbytes / 2)

    assert not is_known(StrategyChoice("inheriting")) and not is_known(StrategyChoice("not_installed"))
    found = exchange_of(StrategyChoice("telling:period=7"), Model(4 * MB, 2, FRAMES, 0.1))
    assert (found.pattern, found.period, found.nbytes) == (Pattern.GOSSIP, 7, 2 * MB)
    assert "telling" not in known_strategies()  # simulated where it is named


def test_what_is_not_predicted_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.STRATEGIES, "registered", {})

    @registry.strategy("inheriting")
    @dataclass(eq=False)
    class Inheriting(ModelAveraging):
        pass

    @registry.strategy("keeping_quiet")
    @dataclass(eq=False)
    class KeepingQuiet(ModelAveraging):
        def predicted_exchange(self, model: Model) -> Exchange | None:
            return None

    for text, says in (
        ("inheriting", r"inheriting: Inheriting has no predicted_exchange of its own; .* \(docs/api\.md, A "),
        (
            "keeping_quiet",
            r"keeping_quiet: KeepingQuiet\.predicted_exchange returns None; return there what ",
        ),
        ("inheriting:perod=7", r"inheriting has no option 'perod'"),
        ("not_installed", r"unknown strategy 'not_installed'"),
    ):
        with pytest.raises(ConfigError, match=says):
            exchange_of(StrategyChoice(text), Model(4 * MB, 2, FRAMES, 0.1))


@pytest.mark.parametrize(
    ("says", "refusal"),
    [
        (lambda own, model: {"period": 4}, r" returns {'period': 4}; return an Exchange of speechdp\.par"),
        (
            lambda own, model: Exchange("together", 4, model.nbytes),
            r": Exchange: pattern='together': give a ",
        ),
        (lambda own, model: Exchange(Pattern.TOGETHER, 0, 4.0), r": Exchange: period=0: give a number of "),
        (lambda own, model: Exchange(Pattern.TOGETHER, own.period, 4.0), r"period=Period.*steps_in\(self\."),
        (lambda own, model: Exchange(Pattern.TOGETHER, 4, -1.0), r": Exchange: bytes must not be negative"),
        (lambda own, model: Exchange(Pattern.DELAYED, 4, 4.0, delay=9), r"delay=9: .* at most the period, 4"),
        (lambda own, model: Exchange(Pattern.GOSSIP, 4, 4.0, topology="none"), r"GOSSIP has ring, all, exp"),
    ],
)
def test_what_a_strategy_says_of_its_exchanges_must_be_usable(
    monkeypatch: pytest.MonkeyPatch, says: Callable[[Any, Model], Any], refusal: str
) -> None:
    monkeypatch.setattr(registry.STRATEGIES, "registered", {})

    @registry.strategy("saying")
    @dataclass(eq=False)
    class Saying(ModelAveraging):
        def predicted_exchange(self, model: Model) -> Any:
            return says(self, model)

    with pytest.raises(ConfigError, match=r"^Saying\.predicted_exchange.*" + refusal):
        exchange_of(StrategyChoice("saying"), Model(4 * MB, 2, FRAMES, 0.1))


def test_the_strategy_of_a_script_is_not_taken_for_a_misspelling() -> None:
    measured = MadeUpSteps(["a", "b"], "model_averaging:period=4", exchange_s=0.1).measured()
    runs = [replace(measured, strategy=StrategyChoice("of_a_script:period=4"))]
    # The command does not refuse it before the runs are read.
    request = parse("simulate", ["RUN", "--strategies", "of_a_script:period=16"])._request()
    refusal = r"^--strategies of_a_script:period=16: the run was trained with it, .* only a script registers "
    with pytest.raises(ConfigError, match=refusal):
        simulate(runs, request)


def test_the_first_period_of_a_strategy_that_changes_it_is_not_taken_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One from outside is refused; ours is predicted with its first period, and a line says so."""
    monkeypatch.setattr(registry.STRATEGIES, "registered", {})

    @registry.strategy("doubling")
    @dataclass(eq=False)
    class Doubling(ModelAveraging):
        @property
        def traits(self) -> Traits:
            return replace(super().traits, period_changes=True)

        def predicted_exchange(self, model: Model) -> Exchange | None:
            return super().predicted_exchange(model)

    @registry.strategy("doubling_silently")
    @dataclass(eq=False)
    class DoublingSilently(Doubling):
        pass

    for strategy in ("doubling:period=1", "adaptive_averaging:period=1", "model_averaging:period=1,begin=50"):
        assert gains_of(MadeUpSteps(["a", "b"], strategy, exchange_s=0.1).measured()) == []
    runs = [MadeUpSteps(["a", "b"], "model_averaging:period=1", exchange_s=0.1).measured()]
    for text in ("doubling:period=1", "doubling", "doubling_silently"):
        refused = rf"^--strategies {text}: its period changes during training, .*; leave it out, and give "
        with pytest.raises(ConfigError, match=refused):
            simulate(runs, Request((2,), strategies=(StrategyChoice(text),)))
    names = "model_averaging", "adaptive_averaging"
    for count, says in ((1, 0), (2, 1)):
        found = simulate(runs, Request((2,), strategies=tuple(map(StrategyChoice, names[:count]))))
        said = [one for one in found.assumptions if "changes its period" in one]
        assert len(said) == says and all(one.startswith("Adaptive averaging changes its ") for one in said)
    # What changes its exchange is left to the race, which says why it cannot tell the speed.
    settings = [Setting(StrategyChoice(f"{name}:period=4")) for name in ("doubling", *names)]
    settings.append(Setting(StrategyChoice("model_averaging:period=4,begin=100")))
    assert list(Measurement(tuple(runs), None).predict(2, settings)) == [settings[1]]


def test_what_waits_alike_is_shown_together_the_most_frequent_exchange_first() -> None:
    names = known_strategies()
    assert names[0] == "gradient_averaging" and names[-2:] == ["parameter_server", "easgd"]
    patterns = [exchange_of(StrategyChoice(n), Model(4 * MB, 2, FRAMES, 0.1)).pattern for n in names]
    assert [pattern for pattern, _ in itertools.groupby(patterns)] == list(Pattern)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if "groups" not in s])
def test_one_rank_exchanges_nothing(strategy: str) -> None:
    found = _predicted(_scenario(_noisy(), _cluster()), 1, strategy)
    # The server's own worker still updates through it, and sends nothing.
    assert found.exchange == pytest.approx(0.0, abs=0.16 if "server" in strategy else 1e-9)
    assert found.efficiency.mean == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_ranks_without_a_cost_of_exchange_scale_perfectly(strategy: str) -> None:
    if strategy == "parameter_server":  # its server updates for one worker after another
        return
    found = _predicted(_scenario(MadeUpSteps(), _cluster(FREE)), 8, strategy)
    assert found.efficiency.mean == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("per_node", [1, 4])
def test_shares_of_a_step_are_shares(strategy: str, per_node: int) -> None:
    found = _predicted(_scenario(_noisy(), _cluster(per_node=per_node)), 8, strategy)
    shares = (found.computing, found.data_wait, found.exchange, found.waiting)
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0
    assert 0 < found.efficiency.low <= found.efficiency.mean <= found.efficiency.high <= 1.02


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_bandwidth_is_never_slower(strategy: str) -> None:
    rates = [
        _predicted(
            _scenario(_noisy(), _cluster(LinkSpeed.of(1e-5, 1e6 * 4**k))), 8, strategy
        ).frames_per_s.mean
        for k in range(7)
    ]
    # Who comes first at a server may change: that is worth less than a hundredth.
    slack = 0.99 if strategy in ASYNCHRONOUS else 1 - 1e-9
    assert all(faster >= slack * slower for slower, faster in itertools.pairwise(rates)), rates


@pytest.mark.parametrize(
    "family",
    ["model_averaging:period={}", "dpsgd:period={}", "easgd:period={}", "delayed_averaging:period={}"],
)
def test_a_longer_period_costs_less_exchange(family: str) -> None:
    scenario = _scenario(MadeUpSteps(), _cluster(LinkSpeed.of(1e-4, 1e7)))
    rates = [_predicted(scenario, 8, family.format(p)).frames_per_s.mean for p in (1, 4, 16, 64)]
    assert rates == sorted(rates)
    assert rates[-1] > 1.2 * rates[0]


NODES = "model_averaging:period=4,between_nodes=16"


def test_averages_inside_nodes_cost_what_the_nodes_links_cost() -> None:
    within = LinkSpeed.of(1e-5, 1e9)
    cluster = _cluster(within=within, per_node=4)
    found = _predicted(_scenario(MadeUpSteps(), cluster), 8, NODES)
    ring_inside = 6 * (1e-5 + 1 * MB / 1e9)
    ring_of_leaders = 2 * (1e-4 + 2 * MB / 1e8)
    handed_on = 1e-5 + 4 * MB / 1e9
    assert found.step_s.mean == pytest.approx(0.1 + ring_inside / 4 + (ring_of_leaders + handed_on) / 16)
    compressed = _predicted(_scenario(MadeUpSteps(), cluster), 8, f"{NODES},compression=int8")
    saved = 2 * (1 - 260 / 1024) * 2 * MB / 1e8
    assert compressed.step_s.mean == pytest.approx(found.step_s.mean - saved / 16, rel=1e-4)


def test_gradients_inside_nodes_are_hidden_as_backward_goes() -> None:
    cluster = _cluster(within=LinkSpeed.of(1e-5, 1e9), per_node=4)
    scenario = _scenario(MadeUpSteps(), cluster)
    inside = _predicted(_scenario(MadeUpSteps(), cluster), 4, "gradient_averaging").step_s.mean
    found = _predicted(scenario, 8, "gradient_averaging:between_nodes=10").step_s.mean
    between = 2 * (1e-4 + 2 * MB / 1e8) + 1e-5 + 4 * MB / 1e9
    assert found == pytest.approx(inside + between / 10)


def test_ranks_of_other_nodes_are_waited_for_less_often() -> None:
    steps = _noisy(ranks=8)
    cluster = _cluster(FREE, per_node=4)
    seldom, at_once, often = (
        _predicted(_scenario(steps, cluster), 8, text).efficiency.mean
        for text in ("model_averaging:period=16", NODES, "model_averaging:period=4")
    )
    assert often < at_once < seldom


@pytest.mark.parametrize("strategy", [NODES, "gradient_averaging:between_nodes=4"])
def test_ranks_on_one_node_have_no_average_between_nodes(strategy: str) -> None:
    request = Request((4, 8), 4, GivenLink(1e9, 1e-5), strategies=(StrategyChoice(strategy),), periods=(4,))
    assert [one.ranks for one in simulate([MadeUpSteps().measured()], request).predictions] == [8]


def test_links_are_not_fitted_to_exchanges_in_two_levels() -> None:
    run = MadeUpSteps(strategy="model_averaging:period=1,between_nodes=2,node_size=1").measured()
    assert observe(run, model_of([run], MeasuredWork.of([run]))) is None


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=16", "dpsgd"])
def test_a_slow_rank_holds_back_those_who_wait_for_it(strategy: str) -> None:
    scenario = _scenario(MadeUpSteps(), _cluster(FREE), factors={1: 2.0})
    assert _predicted(scenario, 8, strategy).efficiency.mean == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("strategy", ["ad_psgd", "easgd:period=16"])
def test_a_slow_rank_does_not_hold_back_asynchronous_ranks(strategy: str) -> None:
    scenario = _scenario(MadeUpSteps(), _cluster(FREE), factors={1: 2.0})
    # Seven ranks of full speed and one of half.
    assert _predicted(scenario, 8, strategy).efficiency.mean == pytest.approx(7.5 / 8, rel=0.02)


def test_a_saturated_server_is_as_fast_as_its_link() -> None:
    link = LinkSpeed.of(1e-3, 1e7)
    scenario = _scenario(MadeUpSteps(), _cluster(link))
    scenario = replace(scenario, work=replace(scenario.work, update=0.0))
    found = _predicted(scenario, 64, "parameter_server")
    # 4 MB there and back for each step, but for what passes each other in the sockets; rank 0 sends nothing.
    service_s = 4 * 1e-3 + (8 * MB - 448 * 1024) / 1e7
    own = 1 / 0.1  # steps of rank 0 in a second, if it waited for nobody
    steps_per_s = found.frames_per_s.mean / FRAMES
    assert 1 / service_s * 0.98 <= steps_per_s <= 1 / service_s + own


def test_a_server_that_is_hardly_used_costs_its_service_alone() -> None:
    served = serve(np.full((200, 1), 1.0), [0.25], [0.15])
    assert served.windows_per_s == pytest.approx(1 / 1.4)
    assert served.waited_s == 0.0 and served.service_s == pytest.approx(0.4)
    busy = serve(np.full((200, 16), 1.0), [0.25] * 16, [0.15] * 16)
    assert busy.windows_per_s == pytest.approx(4.0, rel=0.01)
    # 16 workers share 4 windows a second: 4 s a window, of which 1 is work and 0.4 service.
    assert busy.waited_s == pytest.approx(2.6, rel=0.02)


def test_small_vectors_pass_a_server_both_ways_at_once() -> None:
    scenario = _scenario(MadeUpSteps(nbytes=0.1 * MB), _cluster(LinkSpeed.of(0.0, 1e7)))
    scenario = replace(scenario, work=replace(scenario.work, update=0.0))
    found = _predicted(scenario, 64, "parameter_server")
    # 10 ms each way: 100 in a second, not 50, of which rank 0 is one of 64.
    assert found.frames_per_s.mean / FRAMES == pytest.approx(100 * 64 / 63, rel=0.02)


def test_mixings_are_skipped_where_links_cannot_carry_them() -> None:
    windows = np.ones((100, 8)) + np.random.default_rng(1).random((100, 8)) * 0.1
    assert mixed_share(windows, [0.01, 0.01], "all", 1) == 1.0
    # An exchange takes two windows: every second request of a single pair is met.
    assert mixed_share(windows[:, :2], [2.1, 2.1], "all", 1) == pytest.approx(0.5, abs=0.03)
    # Among more learners some ask one that is taken, and one link for all of a node is less still.
    among_many = mixed_share(windows, [2.1, 2.1], "all", 1)
    assert mixed_share(windows, [2.1, 2.1], "all", 4) < among_many < 0.5


def test_exchange_during_backward_is_hidden_as_far_as_backward_goes() -> None:
    work = MeasuredWork.of([MadeUpSteps().measured()])
    cluster = _cluster(LinkSpeed.of(0.0, 1e9))
    pieces = Exchange(Pattern.TOGETHER, 1, 10 * MB, (5 * MB, 5 * MB))
    each = float(cluster.allreduce_s(5 * MB, 4)[0])
    assert float(exposed_s(pieces, work, 4, cluster)[0]) == pytest.approx(each)
    assert float(exposed_s(pieces, work, 4, cluster, progress=0.0)[0]) == pytest.approx(2 * each)
    slow = _cluster(LinkSpeed.of(0.0, 1e7))
    half = work.backward * work.step_s / 2
    each = float(slow.allreduce_s(5 * MB, 4)[0])
    assert each > half
    assert float(exposed_s(pieces, work, 4, slow)[0]) == pytest.approx(half + 2 * each - 2 * half)


def test_a_delayed_sum_is_hidden_by_the_steps_in_between() -> None:
    seconds = float(_cluster().ring_s(4 * MB, 8)[0])
    assert 0.05 < seconds < 0.1  # less than a step
    found = _predicted(_scenario(MadeUpSteps(), _cluster()), 8, "delayed_averaging:period=4,delay=1")
    assert found.efficiency.mean == pytest.approx(1.0, rel=0.01)
    found = _predicted(_scenario(MadeUpSteps(), _cluster()), 8, "delayed_averaging:period=4,delay=0")
    assert found.step_s.mean == pytest.approx(0.1 + seconds / 4, rel=0.01)


def test_periods_in_frames_and_seconds_are_steps() -> None:
    model = Model(4 * MB, 2, FRAMES, 0.1)
    for text in ("model_averaging:period=16", "model_averaging:period=8kf", "model_averaging:period=1.6s"):
        assert exchange_of(StrategyChoice(text), model).period == 16


@pytest.mark.parametrize(("compression", "share"), [("int8", 260 / 1024), ("int4", 132 / 1024)])
@pytest.mark.parametrize(
    "strategy",
    [
        "model_averaging:period=4",
        "diloco:period=4",
        "delayed_averaging:fragments=2",
        "bmuf:period=9",
        "easgd:period=4",
        "easgd:mode=sync,period=4",
        "dpsgd:period=2",
    ],
)
def test_compressed_averages_are_as_many_bytes_as_travel(
    strategy: str, compression: str, share: float
) -> None:
    model = Model(4 * MB, 2, FRAMES, 0.1)
    in_full, compressed = (
        exchange_of(StrategyChoice(f"{strategy},compression={c}"), model) for c in ("none", compression)
    )
    assert compressed.nbytes == pytest.approx(share * in_full.nbytes, rel=1e-4)
    assert replace(compressed, nbytes=in_full.nbytes) == in_full


def test_factors_are_refused_whose_size_nobody_knows_here() -> None:
    choice = StrategyChoice("gradient_averaging:compression=powersgd")
    assert not is_known(choice) and is_known(StrategyChoice("gradient_averaging:compression=fp16"))
    with pytest.raises(ConfigError, match=r"powersgd: what it sends.* is not known here"):
        exchange_of(choice, Model(4 * MB, 2, FRAMES, 0.1))


def test_computing_faster_leaves_loading_as_it_is() -> None:
    run = MadeUpSteps(data_wait_s=0.01).measured()
    fast = MeasuredWork.of([run], speedup=20)
    # 95 of 100 ms are computing.
    assert fast.step_s == pytest.approx(0.095 / 20 + 0.005 + 0.01)
    assert fast.data_wait == pytest.approx(0.01 / fast.step_s)
    slow_loader = replace(run, deliverable_per_s=2 * FRAMES / 0.05)
    work = MeasuredWork.of([slow_loader], speedup=20)
    found = _predicted(Scenario(work, model_of([run], work), _cluster(FREE)), 4, "gradient_averaging")
    assert found.step_s.mean == pytest.approx(0.05)
    assert found.data_wait > 0.5


# --- what would help ------------------------------------------------------------------------------------


def test_gains_name_what_holds_a_run_back() -> None:
    run = MadeUpSteps(["a", "b"], "model_averaging:period=1", exchange_s=0.1).measured()
    gains = {gain.change: gain.times for gain in gains_of(run)}
    assert gains["with period 4"].mean == pytest.approx(0.2 / 0.125, rel=0.01)
    assert gains["without differences between the ranks"].mean == pytest.approx(1.0, rel=0.01)
    (link,) = [change for change in gains if change.startswith("at ")]
    assert link == "at 1 Gbit/s"
    assert 1 < gains[link].mean < 2
    assert all(times.low <= times.mean <= times.high for times in gains.values())
    # What predictions of other exchanges err by: 5 % to either side, at 90 %.
    for change in (link, "with period 4"):
        assert gains[change].low < gains[change].mean / 1.05 < 1.05 * gains[change].mean < gains[change].high


def test_gains_from_even_ranks_and_from_loading() -> None:
    work = np.full((100, 2), 0.1)
    work[:, 1] = 0.2
    run = MadeUpSteps(work_s=work, exchange_s=1e-4, data_wait_s=0.05).measured()
    gains = {gain.change: gain.times.mean for gain in gains_of(run)}
    assert gains["without differences between the ranks"] == pytest.approx(0.25 / 0.2, rel=0.02)
    assert gains["without waiting for data"] == pytest.approx(0.25 / 0.2, rel=0.02)


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a")])
def test_no_gain_is_named_where_nothing_was_measured_of_the_links(hosts: tuple[str, ...]) -> None:
    assert gains_of(MadeUpSteps(hosts, "easgd:period=1", exchange_s=0.1).measured()) == []


def test_even_ranks_are_no_slower_than_they_are_on_average() -> None:
    work = np.full((100, 2), 0.1)
    work[7] = 5.0  # both: evening them out gains nothing
    run = MadeUpSteps(work_s=work, exchange_s=1e-4).measured()
    gains = {gain.change: gain.times for gain in gains_of(run)}
    assert gains["without differences between the ranks"].low == pytest.approx(1.0, abs=0.01)
    assert gains["without differences between the ranks"].high == pytest.approx(1.0, abs=0.01)


def test_a_period_without_end_is_not_followed() -> None:
    run = MadeUpSteps(strategy="model_averaging:period=1000000000").measured()
    assert gains_of(run) == []
    with pytest.raises(ConfigError, match="are too many to follow; shorten the period"):
        simulate([run], Request((2,), strategies=(run.strategy,)))


# --- whole simulations ----------------------------------------------------------------------------------


def test_1024_ranks_all_strategies_ten_periods() -> None:
    request = Request((8, 1024), 8, GivenLink(100e9 / 8, 5e-6), periods=tuple(2**k for k in range(10)))
    found = simulate([_noisy().measured()], request).predictions
    assert len(found) == 2 * (2 + 9 * 10)
    assert all(math.isfinite(one.frames_per_s.mean) for one in found)


def test_what_was_measured_is_predicted_again() -> None:
    steps = MadeUpSteps(["a", "b"], "model_averaging:period=1", exchange_s=0.05)
    request = Request((2,), strategies=(StrategyChoice(steps.strategy),))
    (found,) = simulate([steps.measured()], request).predictions
    assert found.step_s.mean == pytest.approx(0.15, rel=0.01)
    assert found.exchange == pytest.approx(1 / 3, rel=0.02)


def test_a_link_that_nobody_knows_is_asked_for() -> None:
    with pytest.raises(
        ConfigError,
        match=r"on one host; give --bandwidth \(and --latency, where it is not about 50 µs\), e\.g\.",
    ):
        simulate([MadeUpSteps().measured()], Request((8,)))
    with pytest.raises(ConfigError, match=r"give --bandwidth, e\.g\. --bandwidth 25gbit$"):
        simulate([MadeUpSteps().measured()], Request((8,), between=GivenLink(latency_s=1e-5)))
    with pytest.raises(ConfigError, match="the runs' exchanges do not show its speed"):
        simulate([MadeUpSteps(["a", "b"], "ad_psgd").measured()], Request((8,)))


def test_what_is_assumed_inside_a_node_is_what_was_not_given() -> None:
    run = MadeUpSteps(["a"]).measured()
    for given, words in (
        (GivenLink(), "5 GB/s and 5 µs are assumed (--intra-bandwidth, --intra-latency)."),
        (GivenLink(bytes_per_s=1e10), ": 5 µs are assumed (--intra-latency)."),
        (GivenLink(latency_s=1e-6), ": 5 GB/s are assumed (--intra-bandwidth)."),
    ):
        said, *_ = simulate([run], Request((2,), 2, within=given)).assumptions
        assert said.endswith(words)
    given = GivenLink(1e10, 1e-6)
    assert not any("assumed" in said for said in simulate([run], Request((2,), 2, within=given)).assumptions)


def test_what_goes_beyond_the_measured_is_said_with_both_numbers() -> None:
    strategies, known = (StrategyChoice("gradient_averaging"),), GivenLink(1e9, 1e-5)

    def said(hosts: list[str], ranks: int, per_node: int) -> tuple[str, ...]:
        run = MadeUpSteps(hosts).measured()
        return simulate([run], Request((2, ranks), per_node, known, known, strategies=strategies)).assumptions

    assert said(["a", "a"], 32, 2) == ()
    assert said(["a", "a", "b", "b"], 64, 2) == ()
    (node,) = said(["a", "a"], 8, 4)
    assert node.startswith("Steps were measured with 2 ranks a node and are predicted with 4: ")
    assert said(["a", "a", "b"], 2, 4) == ()  # two ranks make no node of four
    (many,) = said(["a", "a"], 34, 2)
    beyond = "beyond that range the prediction rests on the model alone."
    assert many == f"34 ranks are 17 times as many as were measured (2): {beyond}"
    (alone,) = said(["a"], 8, 1)
    assert alone.startswith("Steps were measured on 1 rank and are predicted for 8: ")
    assert len(said(["a"], 1024, 8)) == 3


def test_a_bandwidth_that_has_no_effect_for_want_of_one_inside_is_told() -> None:
    run = MadeUpSteps(["a", "a"], "model_averaging:period=1").measured()
    request = Request((4,), 2, GivenLink(1e12, 1e-6), strategies=(run.strategy,))
    (said,) = simulate([run], request).assumptions
    assert "give --intra-bandwidth" in said
    assert simulate([run], replace(request, within=GivenLink(1e13))).assumptions == ()


def test_gradients_in_one_piece_explain_two_rows_that_are_alike() -> None:
    run = MadeUpSteps(["a", "a"], "model_averaging:period=1").measured()

    def said(*texts: str, periods: tuple[int, ...] = (1, 4)) -> bool:
        request = Request((2,), strategies=tuple(map(StrategyChoice, texts)), periods=periods)
        return any("fit into one bucket" in one for one in simulate([run], request).assumptions)

    assert said("gradient_averaging", "model_averaging")
    assert not said("gradient_averaging", "model_averaging", periods=(4,))
    assert not said("gradient_averaging") and not said("model_averaging")
    assert not said(f"gradient_averaging:bucket_mib={run.nbytes / 3 / 2**20}", "model_averaging")


def test_a_period_that_a_strategy_cannot_use_is_named() -> None:
    request = Request((4,), 4, strategies=(StrategyChoice("delayed_averaging:delay=4"),))
    with pytest.raises(ConfigError, match="--strategies delayed_averaging:delay=4 with --periods 1: "):
        simulate([MadeUpSteps().measured()], request)


def test_a_server_that_does_not_train_is_not_waited_for() -> None:
    scenario = _scenario(MadeUpSteps(), _cluster(FREE), factors={0: 3.0})
    found = _predicted(scenario, 4, "parameter_server:mode=sync,dedicated=true")
    assert found.step_s.mean == pytest.approx(0.1, rel=0.01)


def test_groups_that_do_not_fit_are_left_out() -> None:
    request = Request((3, 4), 4, strategies=(StrategyChoice("ad_psgd:groups=2,period=1"),))
    assert [one.ranks for one in simulate([MadeUpSteps().measured()], request).predictions] == [4]


def test_options_that_a_run_would_refuse_are_left_out() -> None:
    request = Request((2, 3), 3, strategies=(StrategyChoice("easgd:dedicated=true,period=1"),))
    assert [one.ranks for one in simulate([MadeUpSteps().measured()], request).predictions] == [3]


def test_where_no_strategy_can_be_used_the_first_says_why() -> None:
    averaging = StrategyChoice("model_averaging:period=16,between_nodes=64")
    request = Request((4, 8), 8, strategies=(averaging,))
    with pytest.raises(
        ConfigError, match=r"^--strategies: nothing can be predicted for these --ranks .* are on one node; "
    ):
        simulate([MadeUpSteps().measured()], request)
    known = GivenLink(1e9, 1e-5)
    both = simulate([MadeUpSteps().measured()], replace(request, ranks=(4, 16), between=known, within=known))
    assert [one.ranks for one in both.predictions] == [16] and both.refusals == ()
    groups = replace(request, strategies=(StrategyChoice("ad_psgd:groups=2,period=1"),), ranks=(4, 7))
    (said,) = simulate([MadeUpSteps().measured()], groups).refusals
    assert "7 ranks cannot be divided into groups" in said


def test_long_steps_that_are_rare_hold_up_workers_of_a_server() -> None:
    windows = np.where(np.random.default_rng(3).random((40, 64)) < 0.02, 3.0, 0.1)
    expected = (1 / windows.mean(axis=0)).sum()  # of workers whom nobody holds up
    assert serve(windows, [0.0] * 64, [0.0] * 64).windows_per_s == pytest.approx(expected, rel=0.02)


def test_the_chance_of_few_windows_makes_no_worker_fast() -> None:
    work = np.full((1000, 2), 0.1)
    work[::50] = 3.0
    scenario = _scenario(MadeUpSteps(work_s=work), _cluster(FREE))
    found = _predicted(scenario, 64, "easgd:period=1")
    assert found.efficiency.mean == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("strategy", ["ad_psgd", "easgd:period=1", "gradient_averaging"])
def test_ranks_of_unlike_speed_do_no_more_than_each_by_itself(strategy: str) -> None:
    scenario = _scenario(MadeUpSteps(work_s=np.tile([0.1, 0.3], (200, 1))), _cluster(FREE))
    found = _predicted(scenario, 8, strategy)
    alone = 0.5 * (1 / 0.1 + 1 / 0.3)
    assert found.efficiency.mean == pytest.approx(1 / found.step_s.mean / alone, rel=1e-3)
    assert found.efficiency.mean < 1.005


def test_a_damaged_run_among_others_is_left_out_and_named(tmp_path: Path) -> None:
    for name in ("good", "torn"):
        MadeUpSteps(["a", "a"]).write(tmp_path, name)
    (tmp_path / "torn" / "timeline" / "rank-0001.jsonl").write_text("{")
    found = read_measured(tmp_path)
    assert [run.name for run in found.runs] == ["good"]
    (said,) = found.notes
    assert "torn/timeline/rank-0001.jsonl: damaged" in said
    assert simulate(found.runs, Request((2,)), found.notes).assumptions[0] == said
    (tmp_path / "good" / "timeline" / "rank-0000.jsonl").unlink()
    with pytest.raises(ConfigError, match="timeline"):
        read_measured(tmp_path)


def test_runs_that_tried_learning_rates_are_none_of_a_comparison(tmp_path: Path) -> None:
    frames = PlannedRun(StrategyChoice("gradient_averaging"), 2, 1, "frames", EPOCHS, 0.002)
    trial = replace(frames, mode=RATES, seed=1000)
    entries = [entry_of(run, learning_rate=0.002) for run in (frames, trial)]
    for run in (frames, trial):
        MadeUpSteps(["a", "a"]).write(tmp_path, run.folder)
    write_record(tmp_path, entries[:1], trials=entries[1:])
    assert [run.name for run in read_measured(tmp_path).runs] == [frames.folder]
    # The comparison itself has not begun.
    write_record(tmp_path, [{**entries[0], "folder": None, "state": "pending"}], trials=entries[1:])
    with pytest.raises(ConfigError, match="none of its runs has finished; give the command that made it"):
        read_measured(tmp_path)


@pytest.mark.parametrize("strategy", ["parameter_server:mode=sync,dedicated=true", "easgd:dedicated=true"])
def test_a_rank_that_only_serves_is_no_measured_rank(strategy: str, tmp_path: Path) -> None:
    path = MadeUpSteps(["node-a"] * 3, strategy).write(tmp_path)
    file = path / "timeline" / "rank-0000.jsonl"
    file.write_text(file.read_text().replace(f'"frames": {FRAMES}', '"frames": 0'))
    timing = json.loads((path / "timing.json").read_text())
    timing["ranks"][0]["frames"] = 0
    (path / "timing.json").write_text(json.dumps(timing))
    (run,) = read_measured(path).runs
    assert (run.ranks, run.trainers) == (3, 2)
    (found,) = simulate([run], Request((3,), strategies=(StrategyChoice("gradient_averaging"),))).predictions
    assert found.computing > 0
    assert all(math.isfinite(gain.times.mean) for gain in gains_of(run))


def test_a_run_of_a_strategy_from_outside_is_simulated(tmp_path: Path) -> None:
    (run,) = read_measured(MadeUpSteps(["node-a"] * 2).write(tmp_path)).runs
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(settings | {"strategy": "lazy_averaging:period=8"}))
    (outside,) = read_measured(tmp_path / "run").runs
    assert outside.times.work().mean() == pytest.approx(run.times.work().mean())
    (found,) = simulate(
        [outside], Request((2,), strategies=(StrategyChoice("bmuf"),), periods=(4,))
    ).predictions
    assert math.isfinite(found.frames_per_s.mean)
    assert gains_of(outside) == []


def test_hosts_are_those_of_the_runs_record_where_nothing_usable_was_timed(tmp_path: Path) -> None:
    path = MadeUpSteps(["node-a", "node-b"]).write(tmp_path)
    settings = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**settings, "hosts": ["node-a", "node-b"]}))
    (path / "timing.json").write_text("{")
    (run,) = read_measured(path).runs
    assert run.hosts == ("node-a", "node-b") and run.crosses and run.ranks_per_node == 1
    for hosts in (None, ["node-a"], "node-a"):
        (path / "run.json").write_text(json.dumps({**settings, "hosts": hosts}))
        with pytest.raises(ConfigError, match=r"timing.json: missing or damaged; train it again"):
            read_measured(path)


def _with_bounds(path: Path, bounds: list[tuple[int, int]]) -> Path:
    """Record in a run's timing which steps of each rank it sums; return the run."""
    file = path / "timing.json"
    timing = json.loads(file.read_text())
    for rank, (first, last) in zip(timing["ranks"], bounds, strict=True):
        rank |= {"first_step": first, "last_step": last}
    file.write_text(json.dumps(timing))
    return path


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        ("gradient_averaging", (range(64, 90), range(64, 90))),  # those that both ranks have
        ("easgd:period=4", (range(60, 90), range(64, 94))),
    ],
)
def test_of_a_resumed_run_the_steps_of_its_last_start_count(
    strategy: str, rows: tuple[range, range], tmp_path: Path
) -> None:
    work = 0.1 + 0.001 * np.arange(100)
    steps = MadeUpSteps(["node-a"] * 2, strategy, work_s=work)
    path = _with_bounds(steps.write(tmp_path), [(61, 90), (65, 94)])
    (run,) = read_measured(path).runs
    for rank in (0, 1):
        np.testing.assert_allclose(run.times.forward[:, rank], 0.3 * work[list(rows[rank])], atol=1e-9)


def test_a_run_that_was_resumed_just_before_its_end_is_refused(tmp_path: Path) -> None:
    path = _with_bounds(MadeUpSteps(["node-a"] * 2).write(tmp_path), [(96, 100)] * 2)
    with pytest.raises(ConfigError, match="has 5 steps after the warm-up of its last start, too few"):
        read_measured(path)


def test_a_run_is_read_as_it_was_measured(tmp_path: Path) -> None:
    steps = MadeUpSteps(["node-a"] * 2, exchange_s=0.03)
    (run,) = read_measured(steps.write(tmp_path)).runs
    made = steps.measured()
    for part in ("forward", "backward", "update", "others", "data_wait", "comm", "frames"):
        read, wanted = getattr(run.times, part), getattr(made.times, part)
        np.testing.assert_allclose(read, wanted[4:], atol=1e-12)  # without the warm-up
    assert (run.nbytes, run.hosts) == (steps.nbytes, ("node-a", "node-a"))


@pytest.mark.parametrize("algorithm", ["tree", "hierarchical"])
def test_how_far_exchanges_went_on_is_told_by_the_form_that_links_are_fitted_with(algorithm: str) -> None:
    """Whatever form is to be predicted, the runs summed in rings."""
    run = MadeUpSteps(["a"] * 4 + ["b"] * 4, exchange_s=0.03, nbytes=100 * MB).measured()
    plain = MadeUpSteps(["a"] * 4 + ["b"] * 4, "model_averaging:period=1", exchange_s=0.04, nbytes=100 * MB)
    runs, known = [run, plain.measured()], GivenLink(1e9, 1e-5)
    ring, other = (
        scenario_of(runs, Request((8,), 4, known, known, algorithm=asked))[0] for asked in ("ring", algorithm)
    )
    assert 0 < ring.progress < 1
    assert other.progress == ring.progress
