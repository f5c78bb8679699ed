"""`compare --script` and `sweep --script`: what a script is told, what is kept, and what a failure says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from speechdp.cli.main import run
from speechdp.cli.support.command_line import parse
from speechdp.errors import ConfigError
from speechdp.experiments.compare import script_training
from speechdp.experiments.compare.record import read_record, write_record
from speechdp.experiments.jobs import JobStarter, JobStopped
from speechdp.experiments.race.plan import CHANGES
from speechdp.experiments.race.record import read_race
from speechdp.experiments.sweep.plan import SweepPlan, SweepRecord, refuse_other_sweep, write_sweep
from speechdp.experiments.sweep.script import ScriptSweep
from speechdp.experiments.tune.record import read_tune, write_tune
from speechdp.parallel.registry import parse_strategy
from speechdp.parallel.run_files import RunDirectory
from speechdp.report.compare.report import write_comparison
from speechdp.report.runs.folders import read_run, read_sweep
from tests.helpers.runs import MadeUpRun, write_run
from tests.helpers.terminal import on_terminal

Call = tuple[int, list[str], dict[str, str]]


class FakeRanks:
    """Stands for the script's processes: writes the folder that it is told to write."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.failing: dict[str, str] = {}
        self.writes = ("run.json", "completed.json")
        self.logs: dict[str, float] = {}
        self.fails_at_its_end = False
        #: Of each call, whether there was a completed.json.
        self.found: list[bool] = []
        #: Turns of races, which are no calls: strategy, ranks, and the step with which each is cut off.
        self.turns: list[tuple[str, int, int]] = []
        #: Strategies of which a turn fails, by how many turns of theirs have not.
        self.failing_in: dict[str, int] = {}
        #: Steps of a run, where it is timed.
        self.steps = 0
        #: Strategies whose runs record that their period changed.
        self.changing: tuple[str, ...] = ()
        #: Strategies whose runs record that they declare changes.
        self.declaring: tuple[str, ...] = ()

    def run_script(
        self,
        num_ranks: int,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        folder: Path,
        may_pause: bool = False,
    ) -> str | None:
        told = {k.removeprefix("SPEECHDP_"): v for k, v in environment.items()}
        assert folder == Path(told["FOLDER"])
        if "PAUSE_AT" in told:
            assert may_pause
            return self._turn(num_ranks, told)
        self.calls.append((num_ranks, list(words), told))
        if told["STRATEGY"] in self.failing:
            return self.failing[told["STRATEGY"]]
        self.found.append((folder / "completed.json").exists())
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"script": "train.py", "strategy": told["STRATEGY"], "size": num_ranks}
        settings["changes_over_time"] = told["STRATEGY"] in self.declaring
        for name in self.writes:
            (folder / name).write_text(json.dumps(self.logs if name == "metrics.jsonl" else settings))
        if told["STRATEGY"] in self.changing:
            (folder / "timeline").mkdir(exist_ok=True)
            records = ({"step": period - 1, "period": str(period)} for period in (1, 2, 4))
            (folder / "timeline" / "periods.jsonl").write_text("\n".join(map(json.dumps, records)))
        if self.steps:
            self._time(folder, num_ranks, self.steps)
        return "the final evaluation failed" if self.fails_at_its_end else None

    def train_for(self, steps: int) -> None:
        """Let runs be timed and judged."""
        self.steps, self.writes = steps, (*self.writes, "metrics.jsonl")
        self.logs = {"step": steps, "valid_loss": 0.5}

    def _turn(self, num_ranks: int, told: Mapping[str, str]) -> str | None:
        kind, _, step = told["PAUSE_AT"].partition(":")
        assert kind == "cut"
        strategy, folder = told["STRATEGY"], Path(told["FOLDER"])
        taken = sum(name == strategy for name, *_ in self.turns)
        if self.failing_in.get(strategy, taken + 1) <= taken:
            return "rank 1 on vm: no memory"
        self.turns.append((strategy, num_ranks, int(step)))
        folder.mkdir(parents=True, exist_ok=True)
        assert not list(folder.iterdir()), "something was left of the turn before"
        (folder / "run.json").write_text(json.dumps({"strategy": strategy, "size": num_ranks}))
        self._time(folder, num_ranks, int(step) - 4)
        return None

    def _time(self, folder: Path, num_ranks: int, steps: int) -> None:
        load = {"own": 0.9, "host": 2.0, "stolen": 0.0}
        ranks = [
            {"rank": rank, "host": "vm", "steps": steps, "frames": 8 * steps, "wall_s": 0.01 * steps,
             "spans_s": {}, "first_step": 5, "last_step": steps + 4, "load": load}
            for rank in range(num_ranks)
        ]  # fmt: skip
        (folder / "timing.json").write_text(json.dumps({"warmup_steps": 4, "ranks": ranks}))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    fake = FakeRanks()
    monkeypatch.setattr(JobStarter, "run_script", lambda self, *job, **named: fake.run_script(*job, **named))
    return fake


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("a script")
    return path


def compare(script: Path, *more: str) -> int:
    return run(["compare", "--script", str(script), str(script.parent / "out"), *more])


def test_a_script_is_told_by_its_environment(ranks: FakeRanks, script: Path) -> None:
    options = (
        "--strategies",
        "gradient_averaging,bmuf:period=4,eta=0.5",
        "--ranks",
        "1,2",
        "--backend",
        "mpi",
    )
    assert compare(script, *options, "--seeds", "7", "--", "--epochs", "3", "--seed={seed}") == 0
    words = [str(script), "--epochs", "3", "--seed=7"]
    assert [call[:2] for call in ranks.calls] == [(1, words), (2, words), (2, words)]
    told = [call[2] for call in ranks.calls]
    assert [one["STRATEGY"] for one in told] == [
        "gradient_averaging", "gradient_averaging", "bmuf:period=4,eta=0.5"
    ]  # fmt: skip
    assert [one["BACKEND"] for one in told] == ["auto", "mpi", "mpi"]
    assert {one["SEED"] for one in told} == {"7"} and {one["RESUME"] for one in told} == {"1"}
    assert [Path(one["FOLDER"]).name for one in told] == [
        "1x-gradient_averaging-seed7", "2x-gradient_averaging-seed7", "2x-bmuf-period=4-eta=0.5-seed7"
    ]  # fmt: skip
    assert all(Path(one["FOLDER"]).is_absolute() for one in told)


def test_a_script_is_told_each_learning_rate_and_then_the_best(ranks: FakeRanks, script: Path) -> None:
    ranks.writes, ranks.logs = (*ranks.writes, "metrics.jsonl"), {"step": 1, "valid_acc": 0.5}
    ranks.failing["bmuf"] = "the loss is nan"
    options = ["--strategies", "bmuf,easgd", "--ranks", "2", "--race", "0", "--learning-rates", "0.1,0.2"]
    assert compare(script, *options, "--", "--lr={learning_rate}", "--seed={seed}") == 1
    told = [(call[2]["STRATEGY"], *call[1][1:]) for call in ranks.calls]
    tried = [(name, f"--lr={rate}", "--seed=1000") for name in ("bmuf", "easgd") for rate in ("0.1", "0.2")]
    assert told == [*tried, ("easgd", "--lr=0.1", "--seed=1")]  # of rates that are as good, the lower
    record = read_record(script.parent / "out")
    assert [(run.state, run.learning_rate) for run in record.trials] == [
        ("failed", 0.1), ("failed", 0.2), ("complete", 0.1), ("complete", 0.2)
    ]  # fmt: skip
    assert [(run.state, run.learning_rate) for run in record.runs] == [("failed", None), ("complete", 0.1)]
    assert record.runs[0].message == "none of the learning rates that were tried for it has led to a score"


def test_runs_after_trials_of_learning_rates_have_as_many_threads(
    ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--strategies", "bmuf", "--ranks", "2", "--race", "0", "--learning-rates", "0.1,0.2"]
    ends = ["--", "--lr={learning_rate}"]
    # No trial has a score, so none of the runs begins.
    assert compare(script, *options, "--threads", "3", *ends) == 1
    assert [run.state for run in read_record(script.parent / "out").trials] == ["complete", "complete"]
    assert compare(script, *options, "--threads", "2", *ends) == 1
    assert "--threads 2: finished runs had 3" in capsys.readouterr().err


def test_with_threads_one_process_has_all_ranks(ranks: FakeRanks, script: Path) -> None:
    assert compare(script, "--ranks", "4", "--backend", "threads", "--strategies", "bmuf") == 0
    ((num_processes, _, told),) = ranks.calls
    assert num_processes == 1 and told["BACKEND"] == "threads:4"


def test_a_failure_is_a_line_and_is_tried_again(
    ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.failing["bmuf"] = "rank 1 on vm: there is a mistake"
    options = ("--ranks", "2", "--strategies", "bmuf,gradient_averaging")
    assert compare(script, *options) == 1
    printed = capsys.readouterr()
    assert "[1/2] 2 ranks, bmuf, seed 1: failed: rank 1 on vm: there is a mistake" in printed.out
    assert "1 of 2 runs failed" in printed.err
    ranks.failing.clear()
    # More of them may be added; what is finished is kept, also when it is to be judged by something else.
    assert compare(script, *options, "--seeds", "1,2", "--metric", "valid_loss") == 0
    assert [call[2]["STRATEGY"] for call in ranks.calls[2:]] == ["bmuf", "gradient_averaging", "bmuf"]
    record = read_record(script.parent / "out")
    assert record.completed and record.metric == "valid_loss" and len(record.runs) == 4
    assert compare(script, *options, "--", "--epochs", "3") == 1
    assert (
        "was started with other options (command line was not given, is --epochs 3)"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("writes", "words"),
    [((), "trained nothing with speechdp.DataParallel"), (("run.json",), "left no completed.json")],
)
def test_a_script_that_records_nothing_has_failed(
    writes: tuple[str, ...], words: str, ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.writes = writes
    assert compare(script, "--ranks", "2", "--strategies", "bmuf") == 1
    assert f"failed: train.py exited with code 0 but {words}" in capsys.readouterr().out


def test_a_script_that_fails_after_its_training_is_not_done(ranks: FakeRanks, script: Path) -> None:
    ranks.fails_at_its_end = True
    command = ("--ranks", "2", "--strategies", "bmuf")
    assert compare(script, *command) == 1
    (folder,) = (script.parent / "out").glob("2x-bmuf*")
    assert (folder / "completed.json").is_file()
    assert compare(script, *command) == 1 and len(ranks.calls) == 2
    assert ranks.found == [False, False]  # DataParallel begins nothing anew where a run has ended
    ranks.fails_at_its_end = False
    assert compare(script, *command) == 0 and compare(script, *command) == 0 and len(ranks.calls) == 3


def test_a_strategy_of_the_scripts_own_is_left_to_it(ranks: FakeRanks, script: Path) -> None:
    assert compare(script, "--ranks", "2", "--strategies", "mine:period=3,bmuf") == 0
    assert [call[2]["STRATEGY"] for call in ranks.calls] == ["mine:period=3", "bmuf"]


def test_the_period_of_a_strategy_of_the_scripts_own_is_swept(ranks: FakeRanks, script: Path) -> None:
    command = ["sweep", "--script", str(script), str(script.parent / "out"), "--no-one-rank"]
    assert run([*command, "--swept", "mine:eta=2", "--periods", "4,5s", "--reference", "yours"]) == 0
    told = [call[2]["STRATEGY"] for call in ranks.calls]
    assert told == ["yours", "mine:period=4,eta=2", "mine:period=5s,eta=2"]
    with pytest.raises(ConfigError, match="mine"):
        SweepPlan("mine", ("4",)).runs()  # of ours it would have to be known


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--strategies", "bmuf:size=3"], "strategy bmuf has no option 'size'"),
        (["--strategies", "bmuf,bmuf"], "are the same"),
        (["--ranks", "0"], "write whole numbers from 1 on"),
        (["--metric", "loss:less"], "write NAME, NAME:min"),
        (["--script", "no.py"], "--script no.py: no such file"),
        (["--learning-rates", ",", "--", "--lr", "{learning_rate}"], "write numbers above 0"),
        (["--learning-rates", "0.1,0.2"], "write {learning_rate} in the script's arguments"),
        (["--", "--lr", "{learning_rate}"], "{learning_rate} in the script's arguments stands for one of"),
    ],
)
def test_what_no_run_could_use_is_refused_before_the_first(
    more: list[str], words: str, ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(script, *more) == 1
    assert words in capsys.readouterr().err and not ranks.calls
    assert not (script.parent / "out").exists()


def test_a_sweep_runs_a_script_with_every_period(
    ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.failing["bmuf:period=4,eta=0.5"] = "there is a mistake"
    out = script.parent / "out"
    command = ["sweep", "--script", str(script), str(out), "--swept", "bmuf:eta=0.5", "--periods", "4,16"]
    assert run([*command, "--metric", "acc", "--", "{seed}"]) == 1
    assert "[3/4] bmuf-4: failed: there is a mistake" in capsys.readouterr().out
    assert [(call[0], call[1][1], call[2]["STRATEGY"]) for call in ranks.calls] == [
        (1, "1", "gradient_averaging"), (2, "1", "gradient_averaging"), (2, "1", "bmuf:period=4,eta=0.5"),
        (2, "1", "bmuf:period=16,eta=0.5"),
    ]  # fmt: skip
    names = ["one-rank", "gradient_averaging", "bmuf-4", "bmuf-16"]
    record = json.loads((out / "sweep.json").read_text())
    assert (record["runs"], record["completed"], record["metric"]) == (names, False, "acc")
    ranks.failing.clear()
    assert run([*command, "--", "{seed}"]) == 0 and len(ranks.calls) == 5
    assert json.loads((out / "sweep.json").read_text())["completed"] is True
    assert run([*command, "--no-one-rank"]) == 1
    assert "holds a sweep over other runs" in capsys.readouterr().err


def test_a_sweeps_report_does_not_count_a_script_that_failed_after_its_training(
    ranks: FakeRanks, script: Path
) -> None:
    out = script.parent / "out"
    command = ["sweep", "--script", str(script), str(out), "--periods", "4", "--reference", ""]
    ranks.fails_at_its_end = True
    assert run(command) == 1
    runs = read_sweep(out).runs
    assert [one.status for one in runs] == ["unfinished", "unfinished"]
    assert "script-ended.json: missing, so the script failed" in runs[1].problems[-1]
    assert read_run(runs[1].path).completed  # by itself a run ends with its training
    ranks.fails_at_its_end = False
    assert run(command) == 0
    for path in out.glob("*/script-ended.json"):  # which older sweeps do not have
        path.unlink()
    assert [one.status for one in read_sweep(out).runs] == ["complete", "complete"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--ranks", "3"], "number of ranks was 2, is 3"),
        (["--seed", "2"], "seed was 1, is 2"),
        (["--backend", "mpi"], "backend was auto, is mpi"),
        (["--script", "b.py"], "script was "),
        (["--swept", "bmuf:eta=0.5"], "--swept was bmuf, is bmuf:eta=0.5"),
        (["--", "--epochs", "3"], "command line was not given, is --epochs 3"),
    ],
)
def test_runs_of_another_sweep_are_not_taken_for_its_own(
    more: list[str], words: str, ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(script.parent)
    Path("b.py").write_text("another script")
    command = ["sweep", "out", "--script", str(script), "--swept", "bmuf", "--periods", "4"]
    assert run(command) == 0
    assert run([*command, *more]) == 1
    assert f"out/sweep.json: was started with other options ({words}" in (error := capsys.readouterr().err)
    assert "; choose another folder, or --overwrite" in error
    assert run(command) == 0 and len(ranks.calls) == 3


def test_a_sweep_of_ours_and_one_of_a_script_are_told_apart(tmp_path: Path) -> None:
    ours = SweepRecord(("bmuf-4",), completed=True)
    write_sweep(tmp_path, ours)
    assert refuse_other_sweep(tmp_path, SweepRecord(("bmuf-8",))) == ours  # each run checks its own options
    with pytest.raises(
        ConfigError, match=r"was started with other options \(script was not given, is train\.py\)"
    ):
        refuse_other_sweep(tmp_path, SweepRecord(("bmuf-4",), settings={"script": "train.py"}))


def test_a_sweep_that_goes_on_keeps_the_number_of_threads(
    ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = script.parent / "out"
    command = ["sweep", str(out), "--script", str(script), "--swept", "bmuf", "--periods", "4"]
    assert run([*command, "--threads", "3"]) == 0
    assert json.loads((out / "sweep.json").read_text())["threads"] == 3
    assert run(command) == 0 and json.loads((out / "sweep.json").read_text())["threads"] == 3
    assert run([*command, "--threads", "2"]) == 1
    assert "--threads 2: finished runs had 3" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_a_metric_that_nobody_logs_is_refused_after_the_first_run_and_where_it_is_recorded(
    command: str, ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.writes = ("run.json", "completed.json", "metrics.jsonl")
    ranks.logs = {"step": 1, "valid_loss": 0.5}
    out = script.parent / "out"
    words = [command, str(out), "--script", str(script), "--metric", "valid_los"]
    assert run(words) == 1 and len(ranks.calls) == 1
    shown = capsys.readouterr()
    assert "--metric valid_los: no run logged it; they logged valid_loss" in shown.err
    assert "/s, valid_los was not logged" in shown.out and "no metric" not in shown.out
    assert run(["report", str(out)]) == 1
    message = f"{out / command}.json: --metric valid_los: no run logged it; they logged valid_loss; give the"
    assert message in capsys.readouterr().err
    assert run([*words[:-1], "valid_loss"]) == 0


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_a_target_that_is_no_number_is_refused_before_the_first_run(
    command: str, ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = script.parent / "out"
    assert run([command, str(out), "--script", str(script), "--target", "nan"]) == 1
    assert "--target nan: give a number" in capsys.readouterr().err and not ranks.calls


def test_a_period_that_the_strategy_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="--swept parameter_server: has no period"):
        ScriptSweep(Path("out"), SweepPlan("parameter_server", ("4",)), 2, 1).runs()
    with pytest.raises(ConfigError, match="--periods 5s: gradient_averaging counts its period in steps"):
        ScriptSweep(Path("out"), SweepPlan("gradient_averaging", ("5s",)), 2, 1).runs()
    # It would be trained with in every run, whatever the runs are called.
    with pytest.raises(ConfigError, match=r"--swept bmuf:eta=0.5,period=8: --periods sets the period; leave"):
        SweepPlan("bmuf:eta=0.5,period=8", ("1", "4")).runs()
    with pytest.raises(ConfigError, match=r"strategy bmuf:period=4,period=8: period is given twice"):
        parse_strategy("bmuf:period=4,period=8")


def sweep_of(script: Path, *more: str) -> int:
    command = ["sweep", "--script", str(script), str(script.parent / "out"), "--swept", "bmuf"]
    return run([*command, "--periods", "4,64", *more])


def test_the_settings_of_a_script_race_and_the_report_ranks_by_it(
    ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.train_for(200)
    assert sweep_of(script) == 0
    said = capsys.readouterr().out
    wanted = (
        "race on 2 ranks: 4 settings in turn, 6 rounds: 24 starts of train.py, each of 36 to 68 steps; about"
    )
    assert wanted in said and "; --race 0 leaves it out" in said and "race on 2 ranks: done in " in said
    once = {("gradient_averaging", 1, 36), ("gradient_averaging", 2, 36), ("bmuf:period=4", 2, 36)}
    assert set(ranks.turns) == {*once, ("bmuf:period=64", 2, 68)}
    assert all(ranks.turns.count(turn) == 6 for turn in set(ranks.turns))
    out = script.parent / "out"
    race = read_race(out / "race" / "ranks-2.json")
    assert race.plan.own_starts and race.plan.baseline == "gradient_averaging"
    assert {name: speed.interval for name, speed in race.speeds().items()} == {
        "one-rank": (0.5, 0.5), **dict.fromkeys(("gradient_averaging", "bmuf-4", "bmuf-64"), (1.0, 1.0))
    }  # fmt: skip
    assert race.outside.others == pytest.approx(0.2) and race.hosts == ("vm", "vm")
    assert [path.name for path in (out / "race").iterdir()].count("begun-2.json") == 0
    page = (out / "report" / "report.html").read_text().replace("\u00a0", " ")
    assert "raced speed" in page and "a turn of 32 to 64 steps, a start of the script." in page
    # It is kept; more rounds are added to it, of other turns it is another.
    assert sweep_of(script) == 0 and len(ranks.turns) == 24
    assert sweep_of(script, "--race", "7") == 0 and len(ranks.turns) == 28
    assert sweep_of(script, "--race-steps", "8") == 0 and len(ranks.turns) == 28 + 24


def test_a_comparison_of_a_script_has_a_race_a_number_of_ranks(ranks: FakeRanks, script: Path) -> None:
    ranks.steps = 200
    assert compare(script, "--strategies", "mine:period=40,bmuf", "--ranks", "1,2,3", "--race", "1") == 0
    assert {turn for turn in ranks.turns if turn[0] == "mine:period=40"} == {
        ("mine:period=40", 2, 44), ("mine:period=40", 3, 44)
    }  # fmt: skip
    for num_ranks in (2, 3):
        race = read_race(script.parent / "out" / "race" / f"ranks-{num_ranks}.json")
        assert set(race.speeds()) == {"one-rank", "mine:period=40", "bmuf"}


def test_a_strategy_of_the_scripts_own_whose_period_changed_does_not_race(
    ranks: FakeRanks, script: Path
) -> None:
    """Only its runs tell: the command that holds the race does not know the strategy."""
    ranks.steps, ranks.changing = 200, ("mine:period=1",)
    assert compare(script, "--strategies", "mine:period=1,bmuf,slowmo", "--ranks", "2", "--race", "1") == 0
    assert {turn[0] for turn in ranks.turns} == {"bmuf", "slowmo"}
    race = read_race(script.parent / "out" / "race" / "ranks-2.json")
    assert race.plan.left_out == {"mine:period=1": CHANGES}


def test_a_strategy_of_the_scripts_own_that_declares_changes_does_not_race(
    ranks: FakeRanks, script: Path
) -> None:
    """Its period need not have changed yet."""
    ranks.steps, ranks.declaring = 200, ("mine:begin=400",)
    assert compare(script, "--strategies", "mine:begin=400,bmuf,slowmo", "--ranks", "2", "--race", "1") == 0
    race = read_race(script.parent / "out" / "race" / "ranks-2.json")
    assert race.plan.left_out == {"mine:begin=400": CHANGES}


def test_a_script_that_is_too_short_to_race_is_told_what_to_do(
    ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.train_for(20)
    assert sweep_of(script) == 0 and not ranks.turns
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("race on")]
    assert line == (
        "race on 2 ranks: skipped, because fewer than two settings can take part: one-rank: train.py trains "
        "for 24 steps only, and a turn has 36, 4 of them to warm up; let it train for more steps, or give "
        "--race-steps 20"
    )
    page = (script.parent / "out" / "report" / "report.html").read_text().replace("\u00a0", " ")
    assert "bmuf:period=64 took no part in the race on 2 ranks: train.py trains for 24 steps" in page
    # The remedy is one, but for what has longer periods.
    assert sweep_of(script, "--race-steps", "20") == 0
    assert {turn[0] for turn in ranks.turns} == {"gradient_averaging", "bmuf:period=4"}
    race = read_race(script.parent / "out" / "race" / "ranks-2.json")
    assert race.plan.left_out["bmuf-64"].endswith(
        "a turn has 68, 4 of them to warm up; let it train for more steps"
    )


def test_fewer_steps_of_a_turn_are_advised_only_where_whole_periods_fit(
    ranks: FakeRanks, script: Path
) -> None:
    """--race-steps 20 would help neither: a period of 32 does not fit, and two of 16 do not."""
    ranks.train_for(20)
    assert compare(script, "--strategies", "bmuf:period=32,bmuf:period=16", "--ranks", "2") == 0
    page = (script.parent / "out" / "compare" / "compare.html").read_text().replace("\u00a0", " ")
    page = re.sub("<[^>]+>", "", page)
    said = re.findall(r"(period=\d+)\) took no part.*?more steps(?:, or give (--race-steps \d+))?", page)
    assert dict(said) == {"period=32": "", "period=16": "--race-steps 16"}


def test_a_setting_that_fails_in_the_race_is_left_out(
    ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.steps, ranks.failing_in = 200, {"bmuf:period=4": 2}
    assert sweep_of(script, "--race", "3") == 0
    said = capsys.readouterr().out
    assert "race on 2 ranks: bmuf-4 failed and is left out: rank 1 on vm: no memory" in said
    race = read_race(script.parent / "out" / "race" / "ranks-2.json")
    assert race.plan.left_out == {"bmuf-4": "it failed: rank 1 on vm: no memory"}
    assert set(race.speeds()) == {"one-rank", "gradient_averaging", "bmuf-64"}
    assert sweep_of(script, "--race", "3") == 0 and len(ranks.turns) == 11


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_a_race_that_fails_altogether_is_tried_again(
    command: str, ranks: FakeRanks, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.steps, ranks.failing_in = 200, {"gradient_averaging": 0, "bmuf:period=4": 0}
    words = [command, "--script", str(script), str(script.parent / "out")]
    words += [
        "--ranks",
        "2",
        *(["--strategies", "gradient_averaging,bmuf:period=4"] * (command == "compare")),
    ]
    words += ["--swept", "bmuf", "--periods", "4"] * (command == "sweep")
    assert run(words) == 1
    assert "race on 2 ranks: failed: " in capsys.readouterr().out
    assert not list((script.parent / "out" / "race").glob("ranks-*.json"))
    ranks.failing_in = {}
    assert run(words) == 0 and len(set(ranks.turns)) == (2 if command == "compare" else 3)


def test_a_race_goes_on_after_its_last_whole_round(
    ranks: FakeRanks, script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.steps = 200
    out, turn = script.parent / "out", FakeRanks._turn

    def stopped(self: FakeRanks, num_ranks: int, told: Mapping[str, str]) -> str | None:
        if len(self.turns) == 10:
            left = Path(told["FOLDER"]) / "run.json"
            left.parent.mkdir(parents=True)
            left.write_text("{}")
            raise JobStopped
        return turn(self, num_ranks, told)

    monkeypatch.setattr(FakeRanks, "_turn", stopped)
    assert sweep_of(script) == 75
    assert read_race(out / "race" / "begun-2.json").plan.rounds == 2
    capsys.readouterr()
    monkeypatch.setattr(FakeRanks, "_turn", turn)
    assert sweep_of(script) == 0
    assert "race on 2 ranks: 4 settings in turn, 4 rounds: 16 starts" in capsys.readouterr().out
    assert len(ranks.turns) == 10 + 16
    race = read_race(out / "race" / "ranks-2.json")
    assert race.plan.rounds == 6 and len(race.turns) == 24
    (out / "race" / "ranks-2.json").write_text("{}")
    assert sweep_of(script, "--race", "1") == 0
    assert "ranks-2.json cannot be read, so it is held again" in capsys.readouterr().out


def test_whole_rounds_that_were_held_are_the_race_where_fewer_are_wanted_now(
    ranks: FakeRanks, script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.steps = 200
    out, turn = script.parent / "out", FakeRanks._turn
    words = ["--ranks", "1,2", "--strategies", "gradient_averaging,model_averaging:period=8"]

    def stopped(self: FakeRanks, num_ranks: int, told: Mapping[str, str]) -> str | None:
        if len(self.turns) == 7:
            raise JobStopped
        return turn(self, num_ranks, told)

    monkeypatch.setattr(FakeRanks, "_turn", stopped)
    assert compare(script, *words) == 75
    assert read_race(out / "race" / "begun-2.json").plan.rounds == 2
    capsys.readouterr()
    assert compare(script, *words, "--race", "1") == 0 and len(ranks.turns) == 7
    said = capsys.readouterr().out
    assert "race on 2 ranks: 2 rounds were done before and are enough; none is added\n" in said
    race = read_race(out / "race" / "ranks-2.json")
    assert race.plan.rounds == 2 and len(race.turns) == 6
    assert not (out / "race" / "begun-2.json").exists()
    assert "raced speed" in (out / "compare" / "compare.html").read_text(encoding="utf-8")
    # From then on it is one that is over, to which rounds are added.
    assert compare(script, *words, "--race", "2") == 0
    assert "were done before" not in capsys.readouterr().out
    monkeypatch.setattr(FakeRanks, "_turn", turn)
    assert compare(script, *words, "--race", "3") == 0 and len(ranks.turns) == 7 + 3


def test_no_race_is_held_where_none_is_wanted(ranks: FakeRanks, script: Path) -> None:
    ranks.steps = 200
    assert sweep_of(script, "--race", "0") == 0 and not ranks.turns
    assert not (script.parent / "out" / "race").exists()
    assert sweep_of(script, "--race", "-1") == 1


@pytest.mark.parametrize(
    ("record", "advised", "not_advised"),
    [
        ('{"step": 3}', "let it train for more steps than 3", "should_stop"),
        ('{"step": 200}', "let it look at run.should_stop after each step and save", "more steps"),
    ],
)
def test_a_script_that_did_not_pause_is_told_what_it_lacks(
    record: str,
    advised: str,
    not_advised: str,
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that looks at `should_stop` may end before it is to pause."""

    def trains_to_its_end(
        self: JobStarter, ranks: int, words: Sequence[str], log: Path, told: Mapping[str, str], **_: object
    ) -> None:
        folder = Path(told["SPEECHDP_FOLDER"])
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"run.json": "{}", "timing.json": "{}", "completed.json": record}.items():
            (folder / name).write_text(text)

    monkeypatch.setattr(JobStarter, "run_script", trains_to_its_end)
    out = script.parent / "out"
    words = ["tune", "--script", str(script), str(out), "--ranks", "2", "--backend", "threads"]
    assert run([*words, "--metric", "f1"]) == 1
    said = capsys.readouterr().err
    assert f"trained to its end and did not pause at step 48: {advised}" in said and not_advised not in said


def test_a_search_that_has_measured_nothing_may_be_begun_with_other_settings(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, found = script.parent / "out", list[tuple[str, bool]]()

    def trains_to_its_end(
        self: JobStarter, ranks: int, words: Sequence[str], log: Path, told: Mapping[str, str], **_: object
    ) -> None:
        folder = Path(told["SPEECHDP_FOLDER"])
        found.append((words[-1], any((out / "measure").rglob("timing.json"))))
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("run.json", "timing.json", "completed.json"):
            (folder / name).write_text("{}")

    def search(epochs: str) -> tuple[int, str, str]:
        code = run([*words, "--", "--epochs", epochs])
        return code, *capsys.readouterr()

    monkeypatch.setattr(JobStarter, "run_script", trains_to_its_end)
    words = ["tune", "--script", str(script), str(out), "--ranks", "2", "--backend", "threads"]
    words += ["--metric", "f1"]
    code, _, err = search("2")
    assert code == 1 and "trained to its end and did not pause" in err and found == [("2", False)]
    # What failed would be taken for a run of these settings.
    code, said, err = search("8")
    assert code == 1 and "did not pause" in err and found[1:] == [("8", False)]
    assert "an earlier search with other options measured nothing; it is replaced" in said
    record = read_tune(out)
    assert record.settings["command line"] == "--epochs 8"
    assert run(["report", str(out)]) == 0
    assert "Nothing is measured yet: the same command tries again" in capsys.readouterr().out
    page = (out / "tune" / "tune.html").read_text(encoding="utf-8")
    assert ">f1<" in page and "log-probability" not in page
    for has_measured in (False, True):
        if has_measured:
            (out / "alignment").rmdir()
            write_tune(out, replace(record, backends=(replace(record.backends[0], why="", start_s=1.0),)))
        else:
            (out / "alignment").mkdir()  # hours of work
        code, said, err = search("9")
        assert code == 1 and len(found) == 2
        told = "was started with other options (command line was --epochs 8, is --epochs 9)"
        assert f"{told}; choose another folder" in err


def test_what_follows_the_dashes_is_the_scripts() -> None:
    command = parse("compare", ["--script=train.py", "OUT", "--", "--help", "--", "--script"])
    assert command.script_arguments == ("--help", "--", "--script")
    assert not hasattr(parse("compare", ["DATA", "OUT"]), "script_arguments")


def test_the_report_of_trials_alone_has_the_scripts_terms(ranks: FakeRanks, script: Path) -> None:
    ranks.writes, ranks.logs = (*ranks.writes, "metrics.jsonl"), {"step": 1, "valid_acc": 0.5}
    options = ["--strategies", "bmuf", "--ranks", "2", "--race", "0", "--learning-rates", "0.1,0.2"]
    assert compare(script, *options, "--", "--lr={learning_rate}") == 0
    out = script.parent / "out"
    record = read_record(out)
    waiting = tuple(replace(run, folder=None, state="pending", learning_rate=None) for run in record.runs)
    write_record(out, replace(record, runs=waiting))
    written = write_comparison(out, target=0.4)  # of log-probabilities, which are none, it would be refused
    assert "To target: until valid_acc 0.4 on held-out data." in on_terminal(written.table, 160)


def test_what_a_script_does_besides_its_steps_is_its_job_without_all_that_was_timed(tmp_path: Path) -> None:
    path = write_run(MadeUpRun("run", wer=None), tmp_path)
    shown = script_training._Shown.of(path)
    assert shown is not None and shown.besides_s is None
    RunDirectory(path).mark_script_ended(80.0)
    shown = script_training._Shown.of(path)
    assert shown is not None and shown.besides_s == pytest.approx(80.0 - (60.0 + 4.2 + 0.8))
