"""What a search starts, and what it makes of the folders that its jobs leave, with ranks that are made up."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from speechdp.cli.support.command_line import parse
from speechdp.data.shards.dataset import FLAT, Dataset
from speechdp.experiments.compare.own_training import CompareRequest
from speechdp.experiments.compare.plan import FRAMES, SEQUENTIAL, ComparePlan
from speechdp.experiments.compare.script_training import UserScript
from speechdp.experiments.race.plan import CHANGES, RaceOptions
from speechdp.experiments.race.record import (
    FailedSetting,
    RaceRecord,
    Turn,
    failure_path,
    find_failure,
    race_path,
    write_failure,
    write_race,
)
from speechdp.experiments.record import write_record_file
from speechdp.experiments.tune import training
from speechdp.experiments.tune.jobs import MEASURED_STRATEGIES, Measurement, RacedSettings, Stretch
from speechdp.experiments.tune.parts import TOOK, Part, Parts
from speechdp.experiments.tune.plan import ExpectedTimes, Setting
from speechdp.experiments.tune.script import TunedScript
from speechdp.experiments.tune.search import TunedTarget, TuneRequest
from speechdp.experiments.tune.training import TunedTraining, race_of, racing_text, settings_in
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.script_metric import script_task
from speechdp.simulation.measured import MeasuredRun
from tests.helpers.measured_runs import MadeUpSteps
from tests.helpers.options import options_with
from tests.helpers.tiny_data import write_tiny_data

GRADIENTS, RARE, RARER = "gradient_averaging", "model_averaging:period=4", "model_averaging:period=16"
SETTINGS = tuple(Setting(StrategyChoice(text)) for text in (GRADIENTS, RARE, RARER))
#: Of these, and of one that cannot race.
PACE = ExpectedTimes(1.0, dict.fromkeys((*SETTINGS, Setting(StrategyChoice("adaptive_averaging"))), 0.01))


@dataclasses.dataclass
class Ranks:
    """In place of `JobStarter`: writes what ranks would leave.

    Attributes:
        request: of the search.
        failing: settings that end the race, and the message of each; "": of a rank that was lost.
        started: words of every job.
        waits_for: somebody who is told of a part before the next one begins.
    """

    request: CompareRequest
    failing: dict[str, str] = dataclasses.field(default_factory=dict)
    started: list[list[str]] = dataclasses.field(default_factory=list)
    waits_for: threading.Event | None = None
    launch_options: tuple[str, ...] = ()

    def run(self, num_ranks: int, words: Sequence[str], log: Path, *, folder: Path) -> str | None:
        assert folder == Path(words[2])
        self.started.append(list(words))
        told = {k: v for k, _, v in (word.partition("=") for word in words)}
        if told["--job"] == "race":
            return self._race(told)
        root, took_s = Path(words[2]) / told["--job"], []
        for part in Parts.of(told["--parts"]).parts:
            if part.strategy in self.failing:
                return f"rank 1 on node-a: {self.failing[part.strategy]}"
            if self.waits_for is not None and took_s:
                assert self.waits_for.wait(300), "nobody was told of the part before, while the job went on"
            shutil.rmtree(root / part.folder, ignore_errors=True)
            MadeUpSteps(["node-a"] * num_ranks, part.strategy).write(root, part.folder)
            took_s.append(1000.0)
            write_record_file(root / TOOK, "parts", {"took_s": took_s})
        return None

    def _race(self, told: Mapping[str, str]) -> str | None:
        given = settings_in(told["--racing"])
        for one, why in given.items():
            if not why and one.name in self.failing:
                if self.failing[one.name]:
                    failure = FailedSetting(one.name, self.failing[one.name])
                    write_failure(failure_path(self.request.out, 2), failure)
                return f"rank 1 on node-a: {one.name}"
        length = RaceOptions(int(told["--race"]), int(told["--race-steps"]))
        options = dataclasses.replace(self.request.options, backend="mpi", seed=1)
        plan = race_of(dataclasses.replace(self.request, race=length), given, 2, options)
        turns = tuple(
            Turn(number, one.name, 8, (50, 50), (1.0, 1.0))
            for number in range(plan.rounds + 1)
            for one in plan.settings
        )
        write_race(race_path(self.request.out, 2), RaceRecord(plan, turns, ("a", "a"), ({}, {}), "", 1.0))
        return None


def request_in(out: Path, data: Path = Path("data")) -> CompareRequest:
    plan = ComparePlan((SEQUENTIAL,), (2,), (1,), (FRAMES,), 4)
    return CompareRequest(data, "9f2c", out, options_with(), plan, decode_split="", race=RaceOptions(6, 8))


def training_of(ranks: Ranks, said: list[str] | None = None) -> TunedTraining:
    return TunedTraining(ranks.request, ranks, [].append if said is None else said.append)  # type: ignore[arg-type]


def trained_in(words: Sequence[str]) -> list[str]:
    """Return the folders of the runs that a job trains."""
    (text,) = (word.removeprefix("--parts=") for word in words if word.startswith("--parts="))
    return [part.folder for part in Parts.of(text).parts]


def test_a_measuring_run_that_was_cut_short_is_started_over(tmp_path: Path) -> None:
    ranks = Ranks(request_in(tmp_path))
    cut = MadeUpSteps(["node-a"] * 2).write(tmp_path / "measure", "mpi-gradient_averaging", completed=False)
    (cut / "timing.json").unlink()
    found = training_of(ranks).measure("mpi", knows_start=False)
    assert isinstance(found, Measurement) and found.besides is not None and found.besides.run_s > 900.0
    (words,) = ranks.started  # all in one start
    assert trained_in(words) == ["mpi-model_averaging", "mpi-delayed_averaging", "mpi-gradient_averaging"]
    # What is timed is left as it is, unless nobody knows what a start takes.
    ranks.started.clear()
    found = training_of(ranks).measure("mpi", knows_start=True)
    assert isinstance(found, Measurement) and found.besides is None and not ranks.started
    found = training_of(ranks).measure("mpi", knows_start=False)
    assert isinstance(found, Measurement) and found.besides is not None
    (words,) = ranks.started  # all: they may be of another search, whose record was deleted
    assert len(trained_in(words)) == len(MEASURED_STRATEGIES)


def test_a_job_tells_what_it_has_trained_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, seen = Ranks(request_in(tmp_path), failing={RARER: "the loss is nan"}), list[int]()
    stretches, told = [Stretch(one, 1, 40) for one in SETTINGS], threading.Event()
    monkeypatch.setattr(training, "_LOOK_S", 0.01)
    ranks.waits_for = told

    def see(done: int) -> None:
        seen.append(done)
        told.set()

    found = training_of(ranks).train_together(stretches, "mpi", 0.0, see)
    assert found.took_s == (1000.0, 1000.0) and found.message == "rank 1 on node-a: the loss is nan"
    assert seen[-1] == 2 and seen == sorted(set(seen))
    # Of the next job nothing is known before it has begun.
    ranks.failing = {GRADIENTS: "the loss is nan"}
    again = training_of(ranks).train_together(stretches, "mpi", 0.0, seen.append)
    assert again.took_s == () and again.message and seen[-1] == 2


def test_parts_go_to_the_ranks_in_one_word() -> None:
    parts = [
        Part("a-seed2", GRADIENTS, 8, 2, pause_at=40, learning_rate=0.004),
        Part("mpi-b", 'own:name="x y"', max_steps=48),
    ]
    job = Parts(tuple(parts), 30.5)
    assert Parts.of(job.text) == job
    options = parts[0].options(options_with(batch_size=4))
    assert (options.seed, options.batch.batch_size, options.max_steps) == (2, 8, 0)
    assert options.optimizer.learning_rate == 0.004
    assert parts[1].options(options_with(learning_rate=0.5)).optimizer.learning_rate == 0.5


#: A strategy that a script registers, and that changes its period.
OWN = "mine:period=4"


class ScriptRanks:
    """In place of `JobStarter` for a script: notes what lies in the run's folder, and leaves a timed run."""

    launch_options = ()

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self.words: dict[str, list[str]] = {}

    def run_script(
        self, num_ranks: int, words: Sequence[str], log: Path, environment: Mapping[str, str], **_: Any
    ) -> str | None:
        folder = Path(environment["SPEECHDP_FOLDER"])
        self.words[folder.name] = list(words)
        self.found[folder.name] = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        shutil.rmtree(folder, ignore_errors=True)
        is_own = environment["SPEECHDP_STRATEGY"] == OWN
        strategy = RARE if is_own else environment["SPEECHDP_STRATEGY"]
        MadeUpSteps(["node-a"] * 2, strategy).write(folder.parent, folder.name, completed=False)
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**record, "changes_over_time": is_own}))
        return None


def test_a_scripts_short_runs_that_were_cut_short_are_started_over(tmp_path: Path) -> None:
    ranks, task = ScriptRanks(), script_task("")
    request = TuneRequest(
        tmp_path, 2, SETTINGS, ("mpi",), (), 600.0, TunedTarget(None, task), (1,), RaceOptions(1, 8), {}
    )
    script = TunedScript(request, UserScript(tmp_path / "own.py"), ranks, "", [].append)  # type: ignore[arg-type]
    for folder, name in (("measure", "mpi-gradient_averaging"), ("race/ranks-2", "gradient_averaging")):
        cut = MadeUpSteps(["node-a"] * 2).write(tmp_path / folder, name, completed=False)
        (cut / "timing.json").unlink()
        (cut / "checkpoints" / "step-00000037").mkdir(parents=True)
    assert isinstance(script.measure("mpi", knows_start=False), Measurement)
    changing = Setting(StrategyChoice("adaptive_averaging"))
    steps = (4 + 8) + (4 + 8) + (4 + 16)
    expected_s = script.expected_race_s((*SETTINGS, changing), "mpi", 60.0, PACE)
    assert expected_s == pytest.approx(3 * 1.0 + steps * 0.01)
    raced = script.hold_race((*SETTINGS, changing), "mpi", 60.0, PACE)
    assert script.expected_race_s((*SETTINGS, changing), "mpi", 60.0, PACE) == 0.0
    assert isinstance(raced, RacedSettings) and set(raced.speeds) == {one.name for one in SETTINGS}
    assert "changes during training" in raced.left_out[changing.name]  # and was not started
    assert len(ranks.found) == len(MEASURED_STRATEGIES) + len(SETTINGS) and not any(ranks.found.values())


@pytest.mark.parametrize("others", [SETTINGS, SETTINGS[:1]])
def test_a_strategy_of_a_scripts_own_whose_period_changes_is_left_out_by_its_first_turn(
    tmp_path: Path, others: Sequence[Setting]
) -> None:
    """The period need not have changed within a turn; and what is left need not be a race."""
    ranks, said = ScriptRanks(), list[str]()
    target, own = TunedTarget(None, script_task("")), Setting(StrategyChoice(OWN))
    settings = (*others, own)
    request = TuneRequest(tmp_path, 2, settings, ("mpi",), (), 600.0, target, (1,), RaceOptions(2, 8), {})
    script = TunedScript(request, UserScript(tmp_path / "own.py"), ranks, "", said.append)  # type: ignore[arg-type]
    pace = ExpectedTimes(1.0, dict.fromkeys(settings, 0.01))
    raced = script.hold_race(settings, "mpi", 600.0, pace)
    assert isinstance(raced, RacedSettings) and raced.left_out == {OWN: CHANGES}
    assert set(raced.speeds) == ({one.name for one in others} if len(others) > 1 else set())
    assert said.count(f"race on 2 ranks: {OWN} is left out: {CHANGES}") == 1
    # The record says the same, without another start.
    ranks.found.clear()
    assert script.hold_race(settings, "mpi", 600.0, pace) == raced and not ranks.found


def test_a_search_of_a_script_takes_strategies_that_the_script_registers(tmp_path: Path) -> None:
    """Their periods are those that they are given; settings that differ in them are of one family."""
    (tmp_path / "own.py").write_text("a script")
    words = ["--script", str(tmp_path / "own.py"), str(tmp_path / "out"), "--ranks", "2", "--periods", "4,16"]
    words += ["--strategies", "mine:period=4,mine:period=16,theirs,bmuf"]
    command = parse("tune", words)
    tried = command._request(command.script.user_script(()), 2).tried
    assert [one.name for one in tried] == [
        GRADIENTS, "mine:period=4", "mine:period=16", "theirs", "bmuf:period=4", "bmuf:period=16"
    ]  # fmt: skip
    _, often, rarely, unknown, *_ = tried
    assert often.family == rarely.family != unknown.family and often.looseness < rarely.looseness
    assert [one.period_steps for one in (often, rarely, unknown)] == [4, 16, 1]
    assert rarely.stop(17) == 17


def test_a_script_is_told_the_learning_rate_of_each_run_and_the_lowest_elsewhere(tmp_path: Path) -> None:
    ranks, target = ScriptRanks(), TunedTarget(None, script_task(""))
    request = TuneRequest(
        *(tmp_path, 2, SETTINGS, ("mpi",), (), 600.0, target, (1,), RaceOptions(1, 8), {}),
        learning_rates=(0.4, 0.1),
    )
    own = UserScript(tmp_path / "own.py", ("--lr", "{learning_rate}", "--seed", "{seed}"))
    script = TunedScript(request, own, ranks, "", [].append)  # type: ignore[arg-type]
    assert isinstance(script.measure("mpi", knows_start=False), Measurement)
    assert isinstance(script.hold_race(SETTINGS, "mpi", 60.0, PACE), RacedSettings)
    assert {words[2] for words in ranks.words.values()} == {"0.1"}
    setting = dataclasses.replace(SETTINGS[1], learning_rate=0.4)
    script.train_to(setting, "mpi", 7, 40)
    folder = script.run_dir(setting, 7).name
    assert folder.endswith("-rate0.4-seed7") and ranks.words[folder][1:] == ["--lr", "0.4", "--seed", "7"]
    assert script.command(setting, "mpi").endswith("own.py --lr 0.4 --seed 1")


def test_a_race_is_held_again_without_a_setting_that_fails(tmp_path: Path) -> None:
    said: list[str] = []
    ranks = Ranks(request_in(tmp_path), failing={RARE: "the loss is nan at step 3"})
    raced = training_of(ranks, said).hold_race(SETTINGS, "mpi", 60.0, PACE)
    assert isinstance(raced, RacedSettings)
    assert raced.left_out == {RARE: "it failed: the loss is nan at step 3"}
    assert set(raced.speeds) == {GRADIENTS, RARER} and len(ranks.started) == 2
    assert f"race: {RARE} failed and is left out: the loss is nan at step 3" in said
    assert find_failure(failure_path(tmp_path, 2)) is None
    # The record says so: a search that goes on does not try it again.
    again = training_of(ranks).hold_race(SETTINGS, "mpi", 60.0, PACE)
    assert again == raced and len(ranks.started) == 2


def test_a_search_of_a_version_that_measured_less_is_not_measured_again(tmp_path: Path) -> None:
    ranks = Ranks(request_in(tmp_path))
    jobs = training_of(ranks)
    assert isinstance(jobs.measure("mpi", knows_start=False), Measurement)
    shutil.rmtree(tmp_path / "measure" / "mpi-delayed_averaging")
    ranks.started.clear()
    found = jobs.measure("mpi", knows_start=True)
    assert isinstance(found, Measurement) and found.besides is None and not ranks.started
    assert [run.strategy.name for run in found.runs] == ["model_averaging", "gradient_averaging"]
    assert jobs.step_s("mpi") > 0
    # One that was cut short is measured whole.
    assert isinstance(jobs.measure("mpi", knows_start=False), Measurement) and len(ranks.started) == 1


def test_how_long_a_race_takes_is_told_before_it_is_held(tmp_path: Path) -> None:
    said: list[str] = []
    ranks = Ranks(request_in(tmp_path))
    jobs = training_of(ranks, said)
    assert isinstance(jobs.measure("mpi", knows_start=False), Measurement)
    ranks.started.clear()
    # 7 rounds of turns of 8, 8 and 16 steps; however little time there is, it is not shorter.
    shortest_s = 1.0 + 7 * (8 + 8 + 16) * 0.01
    assert jobs.expected_race_s(SETTINGS, "mpi", 0.001, PACE) == pytest.approx(shortest_s)
    changing = Setting(StrategyChoice("adaptive_averaging"))  # cannot race
    assert jobs.expected_race_s((*SETTINGS, changing), "mpi", 0.001, PACE) == pytest.approx(shortest_s)
    # Each setting at its own pace.
    slow = ExpectedTimes(1.0, {one: 1.0 if one == SETTINGS[2] else 0.01 for one in SETTINGS})
    assert jobs.expected_race_s(SETTINGS, "mpi", 0.001, slow) == pytest.approx(1.0 + 7 * (0.16 + 16.0))
    assert not ranks.started and not said
    assert isinstance(jobs.hold_race(SETTINGS, "mpi", 0.001, PACE), RacedSettings)
    log = tmp_path / "logs" / "race.log"
    started = f"race: 3 settings in turn, 6 rounds, started; {log} shows the time left"
    assert "longer than its share of the budget" in said[0] and said[1:] == [started]
    assert jobs.expected_race_s(SETTINGS, "mpi", 0.001, PACE) == 0.0  # it was held


def test_that_a_damaged_race_is_held_again_is_said(tmp_path: Path) -> None:
    """It was raced again in silence: its output is in a log."""
    said: list[str] = []
    ranks = Ranks(request_in(tmp_path))
    raced = training_of(ranks).hold_race(SETTINGS, "mpi", 60.0, PACE)
    path = race_path(tmp_path, 2)
    path.write_text("{", encoding="utf-8")
    jobs = training_of(ranks, said)
    assert jobs.expected_race_s(SETTINGS, "mpi", 60.0, PACE) > 0 and not said
    assert jobs.hold_race(SETTINGS, "mpi", 60.0, PACE) == raced and len(ranks.started) == 2
    log = tmp_path / "logs" / "race.log"
    assert said == [
        f"race: {path} cannot be read, so it is held again",
        f"race: 3 settings in turn, 6 rounds, started; {log} shows the time left",
    ]


def test_what_an_exchange_takes_is_fitted_to_whole_and_small_ones() -> None:
    """5 ms of latency and 1 GB/s, between 2 ranks on 2 hosts: 2 messages of half of the vector."""

    def run(strategy: str, nbytes: float) -> MeasuredRun:
        exchange_s = 2 * (0.005 + nbytes / 2 / 1e9)
        return MadeUpSteps(["a", "b"], strategy, exchange_s=exchange_s, nbytes=9.6e6).measured()

    whole, part, gradients = MEASURED_STRATEGIES
    runs = (run(whole, 9.6e6), run(part, 0.2e6), run(gradients, 9.6e6))
    link = Measurement(runs, None).link
    assert link is not None and link.crosses and link.knows_latency
    assert link.latency_s == pytest.approx(0.005, rel=0.05) and link.bytes_per_s is not None
    assert link.latency_low < link.latency_s < link.latency_high
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.1)
    found = Measurement(runs, None).exchanges
    assert [(one.strategy, one.nbytes, one.pieces) for one in found] == [
        (whole, 9.6e6, 1),
        (part, 0.2e6, 1),
        (gradients, 9.6e6, 1),
    ]
    assert found[0].seconds == pytest.approx(0.0196)
    # Of one size the latency is assumed, and the record says so.
    alone = Measurement(runs[:1], None).link
    assert alone is not None and not alone.knows_latency and alone.latency_s == pytest.approx(50e-6)


def test_what_a_back_end_or_so_many_ranks_refuse_is_known_without_a_start() -> None:
    run = MadeUpSteps(["a", "a"]).measured()
    half, server = "gradient_averaging:compression=fp16", "ad_psgd:groups=3"
    tried = [Setting(StrategyChoice(text)) for text in (GRADIENTS, half, server)]
    refused = Measurement((dataclasses.replace(run, backend="mpi"),), None).refused(tried)
    assert "the mpi back-end cannot sum that type" in refused[tried[1]] and tried[0] not in refused
    assert "groups" in refused[tried[2]]
    for backend in ("horovod", "torch", "threads", ""):
        found = Measurement((dataclasses.replace(run, backend=backend),), None).refused(tried)
        assert set(found) == {tried[2]}


def test_a_race_of_which_one_setting_is_left_is_none(tmp_path: Path) -> None:
    ranks = Ranks(request_in(tmp_path), failing={RARE: "the loss is nan", RARER: "OutOfMemoryError: CUDA"})
    raced = training_of(ranks).hold_race(SETTINGS, "mpi", 60.0, PACE)
    assert isinstance(raced, RacedSettings) and raced.speeds == {}
    assert raced.left_out == {RARE: "it failed: the loss is nan", RARER: "it failed: OutOfMemoryError: CUDA"}


def test_a_race_that_ends_by_no_setting_is_not_held_again(tmp_path: Path) -> None:
    ranks = Ranks(request_in(tmp_path), failing={RARE: ""})
    write_failure(failure_path(tmp_path, 2), FailedSetting(RARER, "of an earlier command"))
    assert training_of(ranks).hold_race(SETTINGS, "mpi", 60.0, PACE) == f"rank 1 on node-a: {RARE}"
    assert len(ranks.started) == 1


def test_what_races_and_what_does_not_goes_to_the_ranks_in_one_word() -> None:
    given = {SETTINGS[0]: "", SETTINGS[1]: 'it failed: "nan"', Setting(StrategyChoice(RARER), 8): ""}
    assert settings_in(racing_text(given)) == given


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"format": "speechdp-race", "version": 1})])
def test_a_damaged_note_of_a_failure_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "failure").write_text(text)
    assert find_failure(tmp_path / "failure") is None


@pytest.mark.parametrize(("alignment", "is_said"), [(FLAT, True), ("exact", False)])
def test_targets_that_are_only_spread_are_told_of_once(
    tmp_path: Path, alignment: str, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    dataset.alignment = alignment
    monkeypatch.setattr(Dataset, "open", lambda path: dataset)
    said: list[str] = []
    training_of(Ranks(request_in(tmp_path / "out", tmp_path / "data")), said).begin()
    assert len(said) == is_said
    assert all("only spread each transcript evenly" in line and "--flat-start" in line for line in said)
