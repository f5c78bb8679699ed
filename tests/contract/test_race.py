"""A race leaves each setting's training as it is alone, whatever races beside it."""

from __future__ import annotations

import dataclasses
import re
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import RunError
from speechdp.experiments.race import racer
from speechdp.experiments.race import run as race_run
from speechdp.experiments.race.plan import RaceOptions, RaceSetting, why_left_out
from speechdp.experiments.race.racer import Racer
from speechdp.experiments.race.record import (
    FailedSetting,
    RaceRecord,
    failure_path,
    find_failure,
    find_race,
    is_of,
    race_path,
)
from speechdp.experiments.race.run import hold_race
from speechdp.options.run import TrainOptions
from speechdp.parallel import stop
from speechdp.parallel.registry import StrategyChoice, own_strategy_names, parse_strategy
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Stopped
from speechdp.train import build, models
from speechdp.train.build import build_trainer, open_loader
from speechdp.train.progress import SilentReporter
from speechdp.train.session import Session
from speechdp.train.trainer import Trainer
from tests.helpers.options import options_with
from tests.helpers.tiny_data import TinySizes, write_tiny_data

CPU = torch.device("cpu")
OPTIONS = options_with(layers=1, cells=6, dropout=0.0, batch_size=2)
#: An epoch of 41 utterances has a dozen steps: turns end within epochs.
SIZES = TinySizes(train=41)
ROUNDS, STEPS = 2, 5
#: Steps of a turn that would last for a while, and the setting of rank 0 alone.
LONG_TURN, ALONE = 200, "one-rank"
#: What adapts to training does not race.
RACING = [name for name in own_strategy_names() if not why_left_out(parse_strategy(name))]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("race") / "data", SIZES)


@pytest.fixture(autouse=True)
def same_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all models begin alike: ranks that are threads share the numbers torch draws initial weights of."""

    def make_model(dataset: Dataset, options: TrainOptions) -> nn.Module:
        model, drawn = models.make_model(dataset, options), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=drawn))
        return model

    monkeypatch.setattr(build, "make_model", make_model)


def raced(
    dataset: Dataset,
    out: Path,
    settings: list[RaceSetting],
    monkeypatch: pytest.MonkeyPatch,
    size: int = 2,
    options: TrainOptions = OPTIONS,
) -> tuple[RaceRecord, dict[tuple[int, str], Tensor]]:
    """Hold a race; return its record, and every rank's parameters of every strategy when it ends."""
    found: dict[tuple[int, str], Tensor] = {}
    close = Racer.close

    def keep(self: Racer) -> None:
        parts = self.trainer.parts
        found[parts.comm.rank, parts.strategy.name] = parts.replica.parameters.values.clone()
        close(self)

    monkeypatch.setattr(Racer, "close", keep)
    plan = RaceOptions(ROUNDS, STEPS).plan(size, 3, settings, {})
    run_threads(size, lambda comm: hold_race(Session(dataset, comm, CPU), options, plan, out), 300.0)
    race = find_race(out, size)
    assert race is not None
    return race, found


def trained_alone(
    dataset: Dataset,
    comm: Communicator,
    strategy: str,
    steps: int,
    folder: Path,
    options: TrainOptions = OPTIONS,
) -> Tensor:
    """Return this rank's parameters after so many ordinary steps."""
    options = dataclasses.replace(options, strategy=StrategyChoice(strategy), epochs=1_000_000)
    session = Session(dataset, comm, CPU)
    with ExitStack() as stack:
        trainer, sources = build_trainer(session, options, folder, stack)
        trainer.parts.model.train()
        resolved = options.resolve(options.strategy.parsed.roster(comm.size).num_parts)
        loader, _ = open_loader(session, resolved, trainer, sources.training, stack)
        trainer.parts.strategy.resume()
        for _ in range(steps):
            assert trainer.advance(loader) is not None
        trainer.parts.strategy.pause()
        parameters = trainer.parts.replica.parameters.values.clone()
        trainer.parts.strategy.close()
    return parameters


@pytest.mark.parametrize("strategy", RACING)
def test_a_race_leaves_training_as_it_is(
    dataset: Dataset, tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "model_averaging:period=3" if strategy != "model_averaging" else "gradient_averaging"
    settings = [RaceSetting(text, StrategyChoice(text)) for text in (strategy, other, "ad_psgd:period=2")]
    settings = list({setting.strategy.name: setting for setting in settings}.values())
    race, found = raced(dataset, tmp_path / "out", settings, monkeypatch)
    turns = [turn for turn in race.turns if turn.setting == settings[0].name]
    assert len(turns) == ROUNDS + 1
    assert all(sum(turn.frames) > 0 and min(turn.seconds) > 0 for turn in turns)
    if not StrategyChoice(strategy).parsed.traits.synchronous:
        assert all(bool(values.isfinite().all()) for values in found.values())
        return
    steps = sum(turn.steps for turn in turns)
    alone = run_threads(
        2, lambda comm: trained_alone(dataset, comm, strategy, steps, tmp_path / "alone"), 300.0
    )
    for rank, expected in enumerate(alone):
        assert torch.equal(found[rank, strategy.partition(":")[0]], expected)


def test_what_is_read_ahead_counts_once(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous setting trains on every batch that it is dealt, over several epochs."""
    settings = [RaceSetting(text, StrategyChoice(text)) for text in ("ad_psgd", "gradient_averaging")]
    race, _ = raced(dataset, tmp_path, settings, monkeypatch)
    of_both = {
        name: sum(sum(turn.frames) for turn in race.turns if turn.setting == name)
        for name in ("ad_psgd", "gradient_averaging")
    }
    assert of_both["ad_psgd"] == pytest.approx(of_both["gradient_averaging"], rel=0.25)


def test_one_rank_alone_races_beside_all(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaging = StrategyChoice("gradient_averaging")
    settings = [
        RaceSetting(ALONE, averaging, alone=True, batch_of=2),
        RaceSetting("gradient_averaging", averaging),
        RaceSetting("period 4", StrategyChoice("model_averaging:period=4")),
    ]
    race, _ = raced(dataset, tmp_path, settings, monkeypatch)
    assert race.plan.baseline == "gradient_averaging"
    assert all(turn.frames[1] == 0 for turn in race.turns if turn.setting == ALONE)
    assert set(race.speeds()) == {ALONE, "gradient_averaging", "period 4"}
    assert {turn.steps for turn in race.turns if turn.setting == "period 4"} == {8}


@pytest.mark.parametrize("period", ["150f", "0.001s", "4"])
def test_periods_of_every_unit_race(
    dataset: Dataset, tmp_path: Path, period: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ("gradient_averaging", f"model_averaging:period={period}")
    settings = [RaceSetting(text, StrategyChoice(text)) for text in texts]
    race, _ = raced(dataset, tmp_path, settings, monkeypatch)
    steps = {turn.steps for turn in race.turns if turn.setting == texts[1] and turn.round}
    assert len(steps) == 1 and min(steps) > 0


def test_a_period_in_seconds_counts_its_own_turns_alone(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ("gradient_averaging", "model_averaging:period=0.05s")
    settings = [RaceSetting(text, StrategyChoice(text)) for text in texts]
    trained_s: dict[int, float] = {}
    close = Racer.close

    def keep(self: Racer) -> None:
        if self.trainer.parts.strategy.name == "model_averaging":
            trained_s[self.trainer.parts.comm.rank] = self.trainer.parts.timeline.training_time_s
        close(self)

    monkeypatch.setattr(Racer, "close", keep)
    race, _ = raced(dataset, tmp_path, settings, monkeypatch)
    for rank, seconds in trained_s.items():
        own_s = sum(turn.seconds[rank] for turn in race.turns if turn.setting == texts[1])
        assert 0 < seconds <= own_s


def test_random_numbers_of_a_setting_are_its_own(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank: others that are threads would draw from the same numbers."""
    options = options_with(layers=1, cells=6, dropout=0.4, batch_size=2)
    texts = ("gradient_averaging", "model_averaging:period=3", "bmuf:period=2")
    settings = [RaceSetting(text, StrategyChoice(text)) for text in texts]
    race, found = raced(dataset, tmp_path / "out", settings, monkeypatch, 1, options)
    for text in texts:
        steps = sum(turn.steps for turn in race.turns if turn.setting == text)
        alone = run_threads(
            1,
            lambda comm, text=text, steps=steps: trained_alone(
                dataset, comm, text, steps, tmp_path / text.partition(":")[0], options
            ),
        )
        assert torch.equal(found[0, text.partition(":")[0]], alone[0])


def test_a_period_that_no_turn_can_hold_is_left_out(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["gradient_averaging", "bmuf:period=2", "model_averaging:period=3600s", "bmuf:period=9mf"]
    settings = [RaceSetting(text, StrategyChoice(text)) for text in texts]
    race, _ = raced(dataset, tmp_path, settings, monkeypatch)
    assert [setting.name for setting in race.plan.settings] == ["gradient_averaging", "bmuf:period=2"]
    assert sorted(race.plan.left_out) == sorted(texts[2:])
    assert all("longer than" in reason for reason in race.plan.left_out.values())


def test_too_few_settings_that_fit_are_recorded_and_not_tried_again(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["bmuf:period=9mf", "gradient_averaging"]
    settings = [RaceSetting(text, StrategyChoice(text)) for text in texts]
    race, _ = raced(dataset, tmp_path, settings, monkeypatch)
    assert "longer than" in race.plan.left_out[texts[0]] and race.speeds() == {}
    assert is_of(race, RaceOptions(ROUNDS, STEPS).plan(2, 3, settings, {}))
    before = race_path(tmp_path, 2).stat().st_mtime_ns
    raced(dataset, tmp_path, settings, monkeypatch)
    assert race_path(tmp_path, 2).stat().st_mtime_ns == before


def test_a_race_that_was_held_is_not_held_again(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [RaceSetting(text, StrategyChoice(text)) for text in ("gradient_averaging", "bmuf:period=2")]
    first, _ = raced(dataset, tmp_path, settings, monkeypatch)
    path = tmp_path / "race" / "ranks-2.json"
    before = path.stat().st_mtime_ns
    raced(dataset, tmp_path, settings, monkeypatch)
    raced(dataset, tmp_path, settings[:1] + settings[1:], monkeypatch)
    assert path.stat().st_mtime_ns == before
    added = RaceSetting("slowmo:period=2", StrategyChoice("slowmo:period=2"))
    again, _ = raced(dataset, tmp_path, [*settings, added], monkeypatch)
    assert len(again.plan.settings) == 3 and len(first.plan.settings) == 2
    path.write_text("{", encoding="utf-8")
    assert raced(dataset, tmp_path, settings, monkeypatch)[0].plan == first.plan


class Kept(SilentReporter):
    """Keeps what is printed."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def notice(self, text: str) -> None:
        self.said.append(text)


def test_how_far_it_is_is_told_from_the_first_turn_on(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many settings on a busy machine, minutes passed before the first round was over, and told of."""
    monkeypatch.setattr(race_run, "_NEWS_S", -1.0)
    settings = [RaceSetting(text, StrategyChoice(text)) for text in ("gradient_averaging", "bmuf:period=2")]
    reporter = Kept()
    session = Session(dataset, SerialCommunicator(), CPU, reporter=reporter)
    hold_race(session, OPTIONS, RaceOptions(2, 1).plan(1, 3, settings, {}), tmp_path)
    assert reporter.said[1:5] == [
        "race: warming up, setting 1 of 2",
        "race: warming up, setting 2 of 2",
        "race: round 1 of 2, setting 1 of 2",
        "race: round 1 of 2, setting 2 of 2",
    ]
    assert all(re.fullmatch(r"race: round 2 of 2, about .* left", line) for line in reporter.said[5:7])
    assert len(reporter.said) == 8 and reporter.said[7].startswith("race: done in")


def test_a_damaged_record_is_not_to_be_deleted_by_hand(dataset: Dataset, tmp_path: Path) -> None:
    reporter = Kept()
    settings = [RaceSetting(text, StrategyChoice(text)) for text in ("gradient_averaging", "bmuf:period=2")]
    path = race_path(tmp_path, 1)
    path.parent.mkdir()
    path.write_text("{", encoding="utf-8")
    session = Session(dataset, SerialCommunicator(), CPU, reporter=reporter)
    hold_race(session, OPTIONS, RaceOptions(1, 1).plan(1, 3, settings, {}), tmp_path)
    assert reporter.said[0] == f"race: {path} cannot be read, so it is held again"
    assert find_race(tmp_path, 1) is not None


def test_a_failure_is_said_in_one_line_and_leaves_no_record(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [RaceSetting(text, StrategyChoice(text)) for text in ("gradient_averaging", "bmuf:period=2")]

    def fail(self: Racer) -> int:
        raise RunError("the loss is nan at step 3")

    monkeypatch.setattr(Racer, "run", fail)
    with pytest.raises(RunError) as raised:
        raced(dataset, tmp_path, settings, monkeypatch)
    why = "gradient_averaging: the loss is nan at step 3"
    message = f"the race of the settings failed: {why}; --race 0 leaves the race out"
    assert str(raised.value) == message
    assert find_race(tmp_path, 2) is None


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RunError("the loss is nan at step 3"), "the loss is nan at step 3"),
        (torch.cuda.OutOfMemoryError("CUDA is full.\nTried 2 GiB"), "OutOfMemoryError: CUDA is full."),
    ],
)
def test_the_setting_that_fails_is_named_by_the_rank_that_saw_it(
    dataset: Dataset, tmp_path: Path, error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [RaceSetting(text, StrategyChoice(text)) for text in ("gradient_averaging", "bmuf:period=2")]
    run = Racer.run

    def fail_on_one(self: Racer) -> int:
        parts = self.trainer.parts
        if parts.strategy.name == "bmuf" and parts.comm.rank == 1:
            raise error
        return run(self)

    monkeypatch.setattr(Racer, "run", fail_on_one)
    with pytest.raises(type(error)):
        raced(dataset, tmp_path, settings, monkeypatch)
    assert find_failure(failure_path(tmp_path, 2)) == FailedSetting("bmuf:period=2", why)
    assert find_race(tmp_path, 2) is None


def test_a_rank_that_is_lost_in_a_turn_ends_the_race(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of the ranks that are left would be no race on all of them."""
    settings = [RaceSetting(text, StrategyChoice(text)) for text in ("gradient_averaging", "bmuf:period=2")]
    run, has_run = Racer.run, threading.Event()

    def run_and_lose(self: Racer) -> int:
        frames = run(self)
        has_run.set()
        return frames

    monkeypatch.setattr(Racer, "run", run_and_lose)
    monkeypatch.setattr(race_run, "lost_ranks", lambda comm: [1] if has_run.is_set() else [])
    with pytest.raises(RunError, match=r"^the race of the settings failed: rank 1 was lost; --race 0 leaves"):
        raced(dataset, tmp_path, settings, monkeypatch)
    assert find_race(tmp_path, 2) is None
    assert find_failure(failure_path(tmp_path, 2)) is None  # it is no fault of the setting


def steps_after_a_request(
    dataset: Dataset,
    folder: Path,
    settings: list[RaceSetting],
    turn: tuple[int, str],
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """Ask rank 1 of a race to stop in a long turn, hold the race, which ends; return what `rank` still does.

    Args:
        turn: the round and the setting's name.
        rank: whose steps of that turn are counted, from the one before which rank 1 is asked.
    """
    plan = RaceOptions(ROUNDS, LONG_TURN).plan(2, 1, settings, {})
    stops = [StopRequest(), StopRequest()]
    take_turn, advance = race_run._Race._turn, Trainer.advance
    monkeypatch.setattr(racer, "_LONG_TURN_S", 0.0)  # the first turn counts as long in any case
    due: list[str] = []
    after = 0

    def note(self: race_run._Race, of_round: int, name: str) -> object:
        if self._session.comm.rank == rank and (of_round, name) == turn:
            due.append(name)
        return take_turn(self, of_round, name)

    def ask(self: Trainer, loader: Any) -> object:
        nonlocal after
        if due and self.parts.comm.rank == rank:
            assert self.parts.comm.size == (1 if turn[1] == ALONE else 2)
            stops[1].received = "SIGTERM"
            after += 1
        return advance(self, loader)

    monkeypatch.setattr(race_run._Race, "_turn", note)
    monkeypatch.setattr(Trainer, "advance", ask)

    def race(comm: Communicator) -> None:
        hold_race(Session(dataset, comm, CPU, stop=stops[comm.rank]), OPTIONS, plan, folder)

    with pytest.raises(Stopped):
        run_threads(2, race, 300.0)
    assert find_race(folder, 2) is None
    return after


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("strategy", ["gradient_averaging", "delayed_averaging:period=2", "easgd:period=2"])
def test_a_request_to_stop_ends_a_long_turn_early(
    dataset: Dataset, tmp_path: Path, strategy: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was noticed between turns, of which one can last for longer than a launcher waits."""
    others = [text for text in ("gradient_averaging", "model_averaging:period=2") if text != strategy]
    settings = [RaceSetting(text, StrategyChoice(text)) for text in (strategy, others[0])]
    after = steps_after_a_request(dataset, tmp_path, settings, (number, strategy), 1, monkeypatch)
    assert 0 < after < LONG_TURN / 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_request_to_a_rank_that_waits_ends_a_long_turn_of_rank_0_alone(
    dataset: Dataset, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was noticed when that turn was over."""
    averaging = StrategyChoice("gradient_averaging")
    settings = [RaceSetting(text, StrategyChoice(text)) for text in ("gradient_averaging", "bmuf:period=2")]
    settings.append(RaceSetting(ALONE, averaging, alone=True, batch_of=2))
    monkeypatch.setattr(stop, "_INTERVAL_S", 0.0)
    after = steps_after_a_request(dataset, tmp_path, settings, (number, ALONE), 0, monkeypatch)
    assert 0 < after < LONG_TURN / 2


@pytest.mark.parametrize("asynchronous", ["ad_psgd", "easgd:period=2"])
def test_a_request_to_stop_ends_all_ranks_and_leaves_no_record(
    dataset: Dataset, tmp_path: Path, asynchronous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [RaceSetting(text, StrategyChoice(text)) for text in ("gradient_averaging", asynchronous)]
    plan = RaceOptions(ROUNDS, STEPS).plan(2, 1, settings, {})
    turn = race_run._Race._turn

    def ask(self: race_run._Race, number: int, name: str) -> object:
        request = self._session.stop
        if number == 1 and self._session.comm.rank == 1:
            assert isinstance(request, StopRequest)
            request.received = "SIGTERM"
        return turn(self, number, name)

    monkeypatch.setattr(race_run._Race, "_turn", ask)

    def race(comm: Communicator) -> None:
        hold_race(Session(dataset, comm, CPU, stop=StopRequest()), OPTIONS, plan, tmp_path)

    with pytest.raises(Stopped):
        run_threads(2, race, 300.0)
    assert find_race(tmp_path, 2) is None
