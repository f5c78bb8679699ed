"""What races, in which order, how long a turn is, and when a race that was held will do."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from speechdp.errors import ConfigError, RunError
from speechdp.experiments.compare.own_training import CompareRequest
from speechdp.experiments.compare.plan import ComparePlan, checked_strategies
from speechdp.experiments.compare.record import RunRecord, read_record, threads_before
from speechdp.experiments.compare.run import Comparer
from speechdp.experiments.compare.training import ComparedTraining
from speechdp.experiments.race.plan import (
    MOST_STEPS,
    RaceOptions,
    RacePlan,
    RaceSetting,
    order_of_rounds,
    turn_steps,
    why_left_out,
)
from speechdp.experiments.race.record import find_race, is_of, race_path, read_race, write_race
from speechdp.experiments.race.shown import read_races
from speechdp.experiments.record import COMPLETE, PENDING
from speechdp.options.run import TrainOptions
from speechdp.parallel.period import Period
from speechdp.parallel.registry import StrategyChoice, parse_strategy
from tests.helpers.comparisons import EPOCHS, MadeUpStrategy, failed, write_comparison, write_record
from tests.helpers.races import made_up_race

AVERAGING = RaceSetting("gradient_averaging", StrategyChoice("gradient_averaging"))
PERIOD_4 = RaceSetting("period 4", StrategyChoice("model_averaging:period=4"))
BMUF = RaceSetting("bmuf", StrategyChoice("bmuf"))


def plan_of(*settings: RaceSetting, **changes: Any) -> RacePlan:
    plan = RaceOptions(3, 8).plan(2, 5, settings, {"data": "9f2c"})
    return dataclasses.replace(plan, **changes)


def test_every_setting_has_one_turn_a_round_in_an_order_that_the_seed_decides() -> None:
    order = order_of_rounds(5, 40, seed=3)
    assert len(order) == 41 and all(sorted(turns) == list(range(5)) for turns in order)
    assert order == order_of_rounds(5, 40, seed=3) != order_of_rounds(5, 40, seed=4)
    first = Counter(turns[0] for turns in order)
    assert set(first) == set(range(5)) and max(first.values()) < 20  # nobody is always first


@pytest.mark.parametrize(
    ("period", "steps"),
    [
        (None, 32), ("1", 32), ("16", 32), ("3", 33), ("64", 64), ("5", 35), ("1000", 1000),
        ("1kf", 40),  # of 10 steps: 4 of them
        ("150f", 33),  # of one step and a half: 22 of them
        ("5kf", 50), ("20kf", 200), ("2s", 80), ("10s", 100),
    ],
)  # fmt: skip
def test_a_turn_has_whole_periods(period: str | None, steps: int) -> None:
    parsed = None if period is None else Period.parse(period)
    found = turn_steps(parsed, 32, frames_a_step=100.0, step_s=0.1)
    assert found == pytest.approx(steps, abs=1)
    if period is not None and period.isdigit():
        assert found % int(period) == 0


def test_a_period_in_seconds_waits_for_the_pace() -> None:
    assert turn_steps(Period.parse("60s"), 32, frames_a_step=100.0, step_s=None) == 32
    assert turn_steps(Period.parse("60s"), 32, frames_a_step=100.0, step_s=0.01) > MOST_STEPS


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("gradient_averaging", ""),
        ("model_averaging:period=16", ""),
        ("ad_psgd", ""),
        ("easgd:period=4", ""),
        ("adaptive_averaging", "changes during training"),
        ("model_averaging:period=16,begin=100", "changes during training"),
        ("model_averaging:period=2000", "longer than the 1024 steps"),
        ("easgd:period=5s", "do not agree on the number of steps"),
        ("model_averaging:period=5s", ""),
    ],
)
def test_what_some_steps_cannot_tell_is_left_out(strategy: str, reason: str) -> None:
    found = why_left_out(parse_strategy(strategy))
    assert reason in found and bool(reason) == bool(found)


def test_the_baseline_is_gradient_averaging_else_the_first() -> None:
    alone = RaceSetting("one-rank", StrategyChoice("gradient_averaging"), alone=True)
    assert plan_of(alone, PERIOD_4, AVERAGING).baseline == "gradient_averaging"
    assert plan_of(alone, PERIOD_4, BMUF).baseline == "period 4"


def test_two_settings_that_train_on_all_ranks_make_a_race() -> None:
    alone = RaceSetting("one-rank", StrategyChoice("gradient_averaging"), alone=True)
    adaptive = RaceSetting("adaptive", StrategyChoice("adaptive_averaging"))
    assert plan_of(AVERAGING, PERIOD_4).is_race
    assert not plan_of(AVERAGING, PERIOD_4, rounds=0).is_race
    assert not plan_of(alone, AVERAGING).is_race
    assert not plan_of(AVERAGING, adaptive).is_race
    assert list(plan_of(AVERAGING, adaptive).left_out) == ["adaptive"]


@pytest.mark.parametrize(
    ("rounds", "steps", "message"),
    [(-1, 32, "--race -1"), (3, 0, "--race-steps 0"), (3, 5000, "--race-steps 5000")],
)
def test_numbers_that_make_no_race_are_refused(rounds: int, steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaceOptions(rounds, steps)


def test_a_comparison_races_its_strategies_and_one_rank(tmp_path: Path) -> None:
    strategies = checked_strategies("gradient_averaging,bmuf:period=4")
    for ranks, names in (((1, 2), ["one-rank", "gradient_averaging", "bmuf:period=4"]),
                         ((2,), ["gradient_averaging", "bmuf:period=4"])):  # fmt: skip
        plan = ComparePlan(strategies, ranks, (7,), ("frames",), 3)
        request = CompareRequest(tmp_path, "9f2c", tmp_path, TrainOptions(), plan, "", race=RaceOptions(4))
        race = request.race_on(2, strategies, request.options)
        assert [setting.name for setting in race.settings] == names
        assert (race.rounds, race.seed, race.ranks) == (4, 7, 2)
        assert race.training["data"] == "9f2c" and "strategy" not in race.training["options"]


def test_a_race_that_was_held_will_do_for_the_same_settings_or_fewer() -> None:
    held = made_up_race({"gradient_averaging": 1.0, "period 4": 1.2})
    plan = held.plan
    assert is_of(held, plan)
    two_of_three = dataclasses.replace(made_up_race({"gradient_averaging": 1.0, "b": 1.1, "period 4": 1.2}))
    assert is_of(two_of_three, plan)
    added = dataclasses.replace(plan, settings=(*plan.settings, BMUF))
    assert not is_of(held, added)
    unfit = dataclasses.replace(held, plan=dataclasses.replace(plan, left_out={"bmuf": "its period is long"}))
    assert is_of(unfit, added)
    first_is_unfit = dataclasses.replace(plan, settings=(BMUF, *plan.settings[1:]))
    unfit = dataclasses.replace(held, plan=dataclasses.replace(unfit.plan, settings=plan.settings[1:]))
    assert is_of(unfit, first_is_unfit)  # another setting had to be the baseline
    for change in ({"rounds": 9}, {"least_steps": 9}, {"seed": 9}, {"ranks": 3}, {"training": {"data": "0"}}):
        assert not is_of(held, dataclasses.replace(plan, **change))


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    race = made_up_race({"one-rank": 0.6, "gradient_averaging": 1.0, "period 4": 1.2})
    path = race_path(tmp_path, 2)
    assert find_race(tmp_path, 2) is None
    write_race(path, race)
    assert find_race(tmp_path, 2) == race == read_race(path)
    speeds = read_race(path).speeds()
    assert speeds["gradient_averaging"].ratios == (1.0,) * 12
    assert speeds["period 4"].ratio == pytest.approx(1.2, rel=0.05)
    assert race.frames_per_s("period 4") == pytest.approx(
        1.2 * race.frames_per_s("gradient_averaging"), rel=0.05
    )


def test_the_warm_up_does_not_count(tmp_path: Path) -> None:
    race = made_up_race({"gradient_averaging": 1.0, "period 4": 1.2})
    slow = tuple(
        dataclasses.replace(turn, seconds=(1e6, 1e6)) if turn.round == 0 else turn for turn in race.turns
    )
    assert dataclasses.replace(race, turns=slow).speeds() == race.speeds()


def test_rounds_are_compared_in_whatever_order_their_turns_are_recorded() -> None:
    race = made_up_race({"gradient_averaging": 1.0, "a": 1.2, "b": 1.3})
    turns = tuple(sorted(race.turns, key=lambda turn: (turn.setting, -turn.round)))
    assert dataclasses.replace(race, turns=turns).speeds() == race.speeds()


def test_the_slowest_rank_decides() -> None:
    race = made_up_race({"gradient_averaging": 1.0, "period 4": 1.2})
    turn = dataclasses.replace(race.turns[0], frames=(100, 300), seconds=(2.0, 4.0))
    assert turn.frames_per_s == 100.0


def test_work_elsewhere_is_that_of_the_busiest_host() -> None:
    race = made_up_race({"gradient_averaging": 1.0, "period 4": 1.2})
    load = ({"own": 0.9, "host": 2.5, "stolen": 0.1}, {"own": 0.8, "host": 2.5, "stolen": 0.1})
    together = dataclasses.replace(race, load=load).outside
    assert (together.others, together.stolen) == (pytest.approx(0.8), 0.1)
    two = dataclasses.replace(race, load=load, hosts=("a", "b"))
    assert two.outside.total == pytest.approx(1.8)
    assert dataclasses.replace(race, load=({}, {})).outside.total == 0.0


def _without(key: str) -> Any:
    return lambda content: content.pop(key)


@pytest.mark.parametrize(
    "damage",
    [
        _without("plan"), _without("turns"), _without("hosts"), _without("load"), _without("format"),
        lambda content: content["turns"].pop(),
        lambda content: content["turns"].append(content["turns"][0]),
        lambda content: content["turns"][0].update(seconds=[0.1]),
        lambda content: content["turns"][0].update(seconds=["x", 0.1]),
        lambda content: content["turns"][0].update(frames=[-1, 5]),
        lambda content: content["turns"][0].update(frames=[0, 0]),
        lambda content: content["turns"][0].update(frames=7),
        lambda content: content["turns"][0].update(setting="other"),
        lambda content: content["turns"][0].update(round=99),
        lambda content: content["plan"].update(rounds="3"),
        lambda content: content["plan"].update(settings=[]),
        lambda content: content["plan"].update(left_out=[1]),
        lambda content: content["plan"]["settings"].append(content["plan"]["settings"][0]),
        lambda content: content["plan"]["settings"][0].update(strategy=3),
        lambda content: content["plan"]["settings"][0].update(alone="yes"),
        lambda content: content.update(load=[{}]),
        lambda content: content.update(load=[{"own": 1}, {"own": 1}]),
        lambda content: content.update(version=2),
        lambda content: content.update(wall_s="long"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_refused_in_one_line(tmp_path: Path, damage: Any) -> None:
    path = race_path(tmp_path, 2)
    write_race(path, made_up_race({"gradient_averaging": 1.0, "period 4": 1.2}))
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RunError) as raised:
        read_race(path)
    text = str(raised.value)
    assert text.startswith(str(path)) and "delete it to hold the race again" in text and "\n" not in text
    assert read_races(tmp_path).races == {} and str(path) in read_races(tmp_path).problems[0]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_what_is_no_record_is_refused_too(tmp_path: Path, text: str) -> None:
    path = race_path(tmp_path, 2)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RunError, match=r"ranks-2.json"):
        read_race(path)


class TrainedAlready(ComparedTraining):
    """Runs that are all there, and races with an end of their own."""

    def __init__(self, *messages: str | None) -> None:
        self.messages, self.raced = list(messages), []  # type: ignore[var-annotated]

    def settings(self) -> dict[str, Any]:
        return {"epochs": EPOCHS}

    def is_done(self, run: RunRecord, run_dir: Path) -> bool:
        return True

    def run(self, run: RunRecord, run_dir: Path) -> str | None:
        raise AssertionError("it is done")

    def race(self, ranks: int, runs: Sequence[RunRecord]) -> str | None:
        self.raced.append((ranks, [run.strategy.text for run in runs if run.ranks == ranks]))
        return self.messages.pop(0)


def test_a_race_that_fails_leaves_the_runs_and_is_tried_again(tmp_path: Path) -> None:
    texts = ("gradient_averaging", "bmuf:period=4")
    write_comparison(tmp_path, [MadeUpStrategy(text) for text in texts], (1, 2, 4), (1,), ("frames",))
    (tmp_path / "compare.json").unlink()
    plan = ComparePlan(checked_strategies(",".join(texts)), (1, 2, 4), (1,), ("frames",), EPOCHS)
    training = TrainedAlready(None, "rank 1: the loss is nan", None, None)
    record = Comparer(tmp_path, plan, training, lambda line: None).run()
    assert record.failed_races == {"4": "rank 1: the loss is nan"} and not record.completed
    assert {run.state for run in record.runs} == {COMPLETE}
    assert read_record(tmp_path) == record
    again = Comparer(tmp_path, plan, training, lambda line: None).run()
    assert again.failed_races == {} and again.completed
    assert training.raced == [(ranks, list(texts)) for ranks in (2, 4, 2, 4)]


def test_finished_runs_stay_in_the_record_while_others_are_trained_again(tmp_path: Path) -> None:
    texts = ("gradient_averaging", "bmuf:period=4")
    write_comparison(tmp_path, [MadeUpStrategy(text) for text in texts], (2,), (1,), ("frames",))
    entries = json.loads((tmp_path / "compare.json").read_text())["runs"]
    write_record(tmp_path, [failed(entries[0], "a disk"), entries[1]], settings={"epochs": EPOCHS}, threads=2)
    plan = ComparePlan(checked_strategies(",".join(texts)), (2,), (1,), ("frames",), EPOCHS)
    seen: list[tuple[str, ...]] = []

    class FirstAnew(TrainedAlready):
        def is_done(self, run: RunRecord, run_dir: Path) -> bool:
            return "bmuf" in run_dir.name

        def run(self, run: RunRecord, run_dir: Path) -> str | None:
            seen.append(tuple(one.state for one in read_record(tmp_path).runs))
            return None

    said: list[str] = []
    record = Comparer(tmp_path, plan, FirstAnew(None), said.append, threads=2).run()
    assert seen == [(PENDING, COMPLETE)]
    assert [run.state for run in record.runs] == [COMPLETE, COMPLETE]
    assert record.runs[1].wall_s == 60.0 and any(line.endswith("kept") for line in said)
    assert threads_before(tmp_path) == 2

    fewer = ComparePlan(checked_strategies(texts[0]), (2,), (1,), ("frames",), EPOCHS)
    said.clear()
    Comparer(tmp_path, fewer, TrainedAlready(None), said.append).run()
    assert any("1 finished run of" in line and "first equal frames, 2 ranks, bmuf" in line for line in said)


def test_equal_time_follows_equal_frames_however_they_are_named(tmp_path: Path) -> None:
    texts = ("gradient_averaging", "bmuf:period=4")
    write_comparison(tmp_path, [MadeUpStrategy(text) for text in texts], (2,), (1,), ("frames", "time"))
    (tmp_path / "compare.json").unlink()
    plan = ComparePlan(checked_strategies(",".join(texts)), (2,), (1,), ("time", "frames"), EPOCHS)
    record = Comparer(tmp_path, plan, TrainedAlready(None), lambda line: None).run()
    assert {run.state for run in record.runs} == {COMPLETE}
