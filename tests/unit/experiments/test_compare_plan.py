"""What a comparison trains: strategies from a word, runs in order, epochs at equal time, command lines."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import tyro

from speechdp.data.transforms.preprocess import AugmentOptions, InputOptions
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.arguments import train_arguments
from speechdp.experiments.compare.plan import (
    ComparePlan,
    PlannedRun,
    checked_strategies,
    equal_time_epochs,
    rates,
    split_strategies,
    stretched,
    whole_numbers,
)
from speechdp.experiments.compare.record import CompareRecord, RunRecord, read_record, write_record
from speechdp.experiments.compare.run import estimate_left_s, plan_time_runs
from speechdp.experiments.compare.script_training import UserScript
from speechdp.experiments.jobs import JobStarter, what_went_wrong
from speechdp.experiments.record import COMPLETE, FAILED, PENDING, refuse_others
from speechdp.launching.supervise import JobEnd
from speechdp.options.batch import BatchOptions, LoadingOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.registry import StrategyChoice
from tests.helpers.comparisons import MadeUpStrategy, write_comparison
from tests.helpers.comparisons import write_record as write_made_up


@pytest.mark.parametrize(
    ("text", "strategies"),
    [
        ("a", ("a",)),
        ("a,b:period=16,c", ("a", "b:period=16", "c")),
        ("a,b:period=16,momentum=reset,c", ("a", "b:period=16,momentum=reset", "c")),
        ("b:x=1,y=2,b:x=2", ("b:x=1,y=2", "b:x=2")),
        (" a , b:period=600kf , ", ("a", "b:period=600kf")),
        ("a:map=0:2,of=1:3,b", ("a:map=0:2,of=1:3", "b")),
        ("", ()),
    ],
)
def test_strategies_are_told_from_their_options(text: str, strategies: tuple[str, ...]) -> None:
    assert split_strategies(text) == strategies


@pytest.mark.parametrize("text", ["period=4", "a,period=4"])
def test_an_option_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="'period=4' follows no strategy with options; write NAME:period=4"):
        split_strategies(text)


def test_runs_are_called_as_the_table_calls_them() -> None:
    asked = (StrategyChoice("gradient_averaging"), StrategyChoice("bmuf:period=4,momentum=reset"))
    assert [run.title for run in ComparePlan(asked, (1, 2), (3,), ("frames",), 6).runs()] == [
        "equal frames, one rank, seed 3",
        "equal frames, 2 ranks, gradient averaging, seed 3",
        "equal frames, 2 ranks, bmuf (period=4, momentum=reset), seed 3",
    ]
    assert PlannedRun(asked[1], 1, 3, "frames", None).title == "one rank, seed 3"  # of a script


def test_strategies_are_read_once_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = checked_strategies("bmuf:period=4,easgd")
    assert chosen == (StrategyChoice("bmuf:period=4"), StrategyChoice("easgd"))

    def read_again(text: str) -> None:
        raise AssertionError(f"{text} is read a second time")

    monkeypatch.setattr("speechdp.parallel.registry.parse_strategy", read_again)
    runs = ComparePlan(chosen, (2, 4), (1, 2), ("frames",), 6).runs()
    assert {RunRecord.of(run).planned.strategy.parsed.name for run in runs} == {"bmuf", "easgd"}
    assert checked_strategies("of_a_script:x=1", others=True) == (StrategyChoice("of_a_script:x=1"),)
    with pytest.raises(AssertionError, match="bmuf is read"):  # a choice that nobody has read before
        checked_strategies("bmuf")


@pytest.mark.parametrize("text", [",", " , "])
def test_strategies_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--strategies .*names no strategy"):
        checked_strategies(text)


def test_the_same_strategies_in_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="model_averaging and model_averaging:period=16 are the same"):
        checked_strategies("model_averaging,model_averaging:period=16")
    with pytest.raises(ConfigError, match="unknown strategy 'of_a_script'"):
        checked_strategies("of_a_script")


def test_numbers_are_read_or_refused() -> None:
    assert whole_numbers("ranks", "1, 2,8", least=1) == (1, 2, 8)
    for text in ("", "0", "1,x", "-1", "1.5", "²"):
        with pytest.raises(ConfigError, match="--ranks"):
            whole_numbers("ranks", text, least=1)


def test_learning_rates_are_read_or_refused() -> None:
    assert rates("0.001, 2e-3") == (0.001, 0.002) and rates(None) == ()
    for text in ("", ",", "x", "0.1,0", "-1,1", "nan,1", "1,inf"):
        with pytest.raises(ConfigError, match="write numbers above 0"):
            rates(text)
    with pytest.raises(
        ConfigError, match=r"a single rate leaves nothing to choose.*for example 0\.001,0\.002,0\.004"
    ):
        rates("2e-3")
    with pytest.raises(ConfigError, match=r"--learning-rates: 0\.1 is given twice"):
        rates("0.1,0.2,1e-1")


def test_rates_that_differ_little_are_different_runs_and_are_written_out() -> None:
    plan = ComparePlan((StrategyChoice("a"),), (2,), (1,), ("frames",), 6, (0.0012345678, 0.0012345679))
    first, second = plan.trials()
    assert (first.title, second.title) == (
        "2 ranks, a, learning rate 0.0012345678", "2 ranks, a, learning rate 0.0012345679"
    )  # fmt: skip
    assert first.folder != second.folder
    script = UserScript(Path("train.py"), ("--lr={learning_rate}",))
    assert script.words(RunRecord.of(second)) == ["train.py", "--lr=0.0012345679"]
    assert script.words(RunRecord.of(dataclasses.replace(second, learning_rate=1.0)))[1] == "--lr=1"


def test_each_learning_rate_is_tried_once_with_a_seed_of_its_own() -> None:
    chosen = (StrategyChoice("a"), StrategyChoice("b:period=4"))
    plan = ComparePlan(chosen, (2, 1), (1, 1000), ("frames", "time"), 6, (0.2, 0.1))
    trials = plan.trials()
    assert [(r.strategy.text, r.ranks, r.learning_rate) for r in trials] == [
        ("gradient_averaging", 1, 0.1), ("gradient_averaging", 1, 0.2),
        ("a", 2, 0.1), ("a", 2, 0.2), ("b:period=4", 2, 0.1), ("b:period=4", 2, 0.2),
    ]  # fmt: skip
    assert {(r.seed, r.epochs) for r in trials} == {(1001, 6)}
    assert trials[-1].title == "2 ranks, b (period=4), learning rate 0.2"
    assert trials[-1].folder == "rates-2x-b-period=4-seed1001-6ep-rate0.2"
    of_script = dataclasses.replace(trials[-1], epochs=None)
    assert of_script.folder == "rates-2x-b-period=4-seed1001-rate0.2"
    with_rate = dataclasses.replace(plan.runs()[0], learning_rate=0.2)
    assert with_rate.folder == plan.runs()[0].folder + "-rate0.2"
    assert with_rate.title == "equal frames, one rank, seed 1, learning rate 0.2"
    assert {run.learning_rate for run in plan.runs()} == {None}
    assert ComparePlan(chosen, (2,), (1,), ("frames",), 6).trials() == []


def test_one_rank_is_trained_once_a_seed_and_strategies_alternate() -> None:
    chosen = (StrategyChoice("a"), StrategyChoice("b:period=4"))
    runs = ComparePlan(chosen, (2, 1), (1, 2), ("time", "frames"), 6).runs()
    of_frames = [(r.strategy.text, r.ranks, r.seed, r.epochs) for r in runs if r.mode == "frames"]
    assert of_frames == [
        ("gradient_averaging", 1, 1, 6), ("a", 2, 1, 6), ("b:period=4", 2, 1, 6),
        ("gradient_averaging", 1, 2, 6), ("b:period=4", 2, 2, 6), ("a", 2, 2, 6),
    ]  # fmt: skip
    assert [r.mode for r in runs] == ["frames"] * 6 + ["time"] * 6
    assert {r.epochs for r in runs if r.mode == "time"} == {None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategies": ()}, "--strategies: name at least one"),
        ({"strategies": (StrategyChoice("a"), StrategyChoice("a"))}, "--strategies: a is given twice"),
        ({"ranks": (2, 2)}, "--ranks: 2 is given twice"),
        ({"seeds": (1, 1)}, "--seeds: 1 is given twice"),
        ({"seeds": (1, 2**32)}, "--seeds 4294967296: must lie in 0"),
        ({"modes": ("time",)}, "--modes: write frames, or frames,time"),
        ({"modes": ("frames", "x")}, "--modes: write frames, or frames,time"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    one = (StrategyChoice("a"),)
    given = {"strategies": one, "ranks": (1, 2), "seeds": (1,), "modes": ("frames",), "epochs": 3}
    with pytest.raises(ConfigError, match=message):
        ComparePlan(**{**given, **changes})  # type: ignore[arg-type]


def test_seeds_of_a_script_may_be_any() -> None:
    assert ComparePlan((StrategyChoice("a"),), (2,), (2**40,), ("frames",), None).seeds == (2**40,)


def test_folders_are_plain_names_of_their_own() -> None:
    runs = [
        PlannedRun(StrategyChoice(strategy), ranks, seed, mode, epochs)
        for strategy in ("a", "a:x=1,y=2")
        for ranks in (2, 4)
        for seed in (1, 2)
        for mode in ("frames", "time")
        for epochs in (3, 4)
    ]
    folders = {run.folder for run in runs}
    assert len(folders) == len(runs)
    assert all(Path(folder).name == folder and " " not in folder for folder in folders)


@pytest.mark.parametrize(
    ("epochs", "own_s", "reference_s", "expected"),
    [
        (12, 60.0, 60.0, 12),
        (12, 40.0, 60.0, 18),
        (3, 10.0, 15.0, 5),
        (10, 59.0, 60.0, 10),
        (1, 60.0, 10.0, 1),
    ],
)
def test_epochs_at_equal_time(epochs: int, own_s: float, reference_s: float, expected: int) -> None:
    assert equal_time_epochs(epochs, own_s, reference_s) == expected


@pytest.mark.parametrize(
    "optimizer",
    [OptimizerOptions(), OptimizerOptions(warmup_epochs=2.0, anneal_from=6, anneal_factor=0.5)],
    ids=["default", "given"],
)
def test_the_schedule_stretches_with_the_epochs(optimizer: OptimizerOptions) -> None:
    short = TrainOptions(epochs=12, optimizer=optimizer)
    long = stretched(short, 24)
    assert long.epochs == 24
    for share in (0.0, 0.1, 0.4):
        assert long.schedule().at(24 * share) == pytest.approx(short.schedule().at(12 * share))
    # Two annealings there are one here; at the ends of epochs both have come equally far.
    assert long.schedule().at(23.9) == pytest.approx(short.schedule().at(11.9))
    assert stretched(short, 12) == short


def test_runs_at_equal_time_follow_the_slowest_of_their_ranks_and_seed(tmp_path: Path) -> None:
    fast, slow = MadeUpStrategy("fast:period=4", frames_per_s=9000), MadeUpStrategy("slow", frames_per_s=6000)
    write_comparison(tmp_path, [fast, slow], ranks=(1, 2), seeds=(1,), modes=("frames",))
    frames = read_record(tmp_path).runs
    times = [dataclasses.replace(r, mode="time", epochs=None, folder=None, state=PENDING) for r in frames]
    record = plan_time_runs(CompareRecord({}, (*frames, *times)), tmp_path)
    planned = {(r.strategy.text, r.ranks): r for r in record.runs if r.mode == "time"}
    assert planned["fast:period=4", 2].epochs == 18  # 12 * 9000 / 6000
    assert planned["fast:period=4", 2].state == PENDING
    for key in (("slow", 2), ("gradient_averaging", 1)):  # the reference itself is not trained again
        assert planned[key].state == COMPLETE
        assert planned[key].folder == next(r.folder for r in frames if (r.strategy.text, r.ranks) == key)


def test_a_run_that_failed_has_no_run_at_equal_time_and_is_no_reference(tmp_path: Path) -> None:
    fast, slow = MadeUpStrategy("fast", frames_per_s=9000), MadeUpStrategy("slow", frames_per_s=6000)
    write_comparison(tmp_path, [fast, slow], ranks=(2,), seeds=(1,), modes=("frames",))
    frames = [
        dataclasses.replace(r, state=FAILED if r.strategy.text == "slow" else r.state)
        for r in read_record(tmp_path).runs
    ]
    times = [dataclasses.replace(r, mode="time", epochs=None, folder=None, state=PENDING) for r in frames]
    record = plan_time_runs(CompareRecord({}, (*frames, *times)), tmp_path)
    planned = {r.strategy.text: r for r in record.runs if r.mode == "time"}
    assert planned["slow"].state == FAILED and "has no training time" in planned["slow"].message
    assert (planned["fast"].epochs, planned["fast"].state) == (12, COMPLETE)


def test_the_time_left_is_that_of_runs_with_as_many_ranks() -> None:
    def run(ranks: int, state: str, wall_s: float | None = None) -> RunRecord:
        return RunRecord(StrategyChoice("a"), ranks, 1, "frames", 3, "x", state, "", wall_s)

    assert estimate_left_s([run(1, PENDING)]) is None
    ended = [run(1, COMPLETE, 10.0), run(2, COMPLETE, 30.0), run(2, FAILED, 1.0)]
    assert estimate_left_s([*ended, run(1, PENDING), run(2, PENDING)]) == 40.0
    assert estimate_left_s([*ended, run(4, PENDING)]) == 20.0


@pytest.mark.parametrize(
    "options",
    [
        TrainOptions(),
        TrainOptions(
            model=ModelOptions(preset="kaldi-4x800", bidirectional=True, layers=1, dropout=0.0),
            batch=BatchOptions(batch_size=3, right_context=2, order="laplace"),
            augment=AugmentOptions(spec_augment=True, noise_snr_db="10-30"),
            inputs=InputOptions(deltas=2),
            loading=LoadingOptions(feeders=1),
            optimizer=OptimizerOptions(
                optimizer="sgd", anneal_from=-1, warmup_epochs=1.5, learning_rate=1e-5
            ),
            strategy=StrategyChoice("model_averaging:period=16,momentum=reset"),
            alignments=Path("/a b/c"),
            initial_model=Path("/a b/d"),
            realign="auto",
            realign_from="scratch",
            epochs=7,
            seed=3,
            slow_ranks="0:2.5",
        ),
    ],
    ids=["default", "many"],
)
def test_options_come_through_the_command_line_unchanged(options: TrainOptions) -> None:
    words = train_arguments(options)
    prefixes = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    assert tyro.cli(TrainOptions, args=words, config=prefixes) == options
    if options == TrainOptions():
        assert words == []


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunRecord(StrategyChoice("a:b=1"), 2, 1, "time", None, None, FAILED, "why", 2.5)
    record = CompareRecord({"epochs": 3}, (run,), True)
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    (written,) = json.loads((tmp_path / "compare.json").read_text())["runs"]
    assert written == {
        "strategy": "a:b=1", "ranks": 2, "seed": 1, "mode": "time", "epochs": None, "folder": None,
        "state": FAILED, "message": "why", "wall_s": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize("folder", ["../x", "/etc", "a/b", "..", "", 3])
def test_a_record_that_names_a_folder_elsewhere_is_refused(tmp_path: Path, folder: object) -> None:
    run = {"strategy": "a", "ranks": 2, "seed": 1, "mode": "frames", "epochs": 3, "folder": folder}
    write_made_up(tmp_path, [run])
    with pytest.raises(ConfigError, match="is not the name of a folder beside it"):
        read_record(tmp_path)


def test_a_number_that_no_integer_holds_is_damage(tmp_path: Path) -> None:
    write_made_up(tmp_path, [])
    path = tmp_path / "compare.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "threads": 0}).replace('"threads": 0', '"threads": 1e999')
    )
    with pytest.raises(ConfigError, match=r"compare.json: cannot be read \(cannot convert float infinity"):
        read_record(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": [], "completed": true}', '{"runs": [3]}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "compare.json").write_text(text)
    with pytest.raises(ConfigError, match=r"compare.json: cannot be read"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("exit_code", "printed", "expected"),
    [
        (0, "speechdp: rank 1 on a: wrong", None),
        (1, "x\nspeechdp: rank 1 on a: first\nspeechdp launch: the job ended", "rank 1 on a: first"),
        (
            1,
            "Traceback ...\nModuleNotFoundError: No module named 'x'\nspeechdp launch: the job ended",
            "ModuleNotFoundError: No module named 'x'",
        ),
        (137, "noise\nspeechdp launch: a rank was killed\n", "a rank was killed"),
        (139, "noise\n\nsegmentation fault \n", "exit code 139: segmentation fault"),
        (1, "", "exit code 1: it printed nothing"),
        (1, "speechdp: warning: it begins again\nspeechdp: no such file\n", "no such file"),
        (1, "speechdp: warning: it begins again\nValueError: wrong\n", "ValueError: wrong"),
        (76, "speechdp: warning: saved nothing\n", "exit code 76: speechdp: warning: saved nothing"),
    ],
)
def test_what_went_wrong_is_one_line(exit_code: int, printed: str, expected: str | None) -> None:
    assert what_went_wrong(JobEnd(exit_code, None), printed) == expected


FULL = "a.h5: cannot be written (No space left on device on rank 0); free some space"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (f"speechdp: {FULL}, then continue with --resume; there is no earlier checkpoint", FULL),
        (
            "speechdp: rank 1 on vm: unexpected OSError: [Errno 28] No space left on device",
            "rank 1 on vm: unexpected OSError: [Errno 28] No space left on device; free some space",
        ),
        (
            "speechdp: x: cannot be used (Read-only file system); have the disk mounted read-write, then",
            "x: cannot be used (Read-only file system); have the disk mounted read-write",
        ),
    ],
)
def test_a_full_disk_is_no_fault_of_what_was_tried(said: str, expected: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    starter = JobStarter(("/bin/sh", "-c", f"echo '{said}' >&2; exit 1"), dict(os.environ))
    with pytest.raises(RunError) as failed:
        starter.run(1, [], log)
    assert str(failed.value) == f"{expected}, then give the same command again (its output is in {log})"


@pytest.mark.parametrize(
    "said",
    [
        "a.txt: cannot be used (No such file or directory); see that nothing moves it, then run again",
        "no checkpoint can be used: a: cannot be read (Expecting value); delete a, then run again",
        "a.h5: cannot be read (Interrupted system call); wait a moment, then run again",
    ],
)
def test_other_faults_of_files_may_be_those_of_what_was_tried(said: str, tmp_path: Path) -> None:
    starter = JobStarter(("/bin/sh", "-c", f"echo 'speechdp: {said}' >&2; exit 1"), dict(os.environ))
    assert starter.run(1, [], tmp_path / "a.log") == said


def test_lists_of_settings_that_differ_are_told_by_what_is_new_and_gone(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"other options \(strategies: now without b and with c, d\); choose"
    ):
        refuse_others(tmp_path, {"strategies": ["a", "b"]}, {"strategies": ["a", "c", "d"]})
    with pytest.raises(ConfigError, match=r"other options \(strategies: now in another order\)"):
        refuse_others(tmp_path, {"strategies": ["a", "b"]}, {"strategies": ["b", "a"]})


def test_settings_that_an_earlier_version_did_not_have_count_as_their_defaults(tmp_path: Path) -> None:
    defaults, before = TrainOptions().to_json(), TrainOptions().to_json()
    del before["flat_start"], before["model"]["criterion"]
    refuse_others(tmp_path, before, TrainOptions().to_json(), defaults=defaults)
    flat_start, ctc = TrainOptions(flat_start=True), TrainOptions(ModelOptions(criterion="ctc"))
    for options, name in (
        (flat_start, "flat start was False, is True"),
        (ctc, "--criterion was not given, is ctc"),
    ):
        with pytest.raises(ConfigError, match=rf"was started with other options \({name}\)"):
            refuse_others(tmp_path, before, options.to_json(), defaults=defaults)


def test_settings_survive_json(tmp_path: Path) -> None:
    settings = {"options": TrainOptions(alignments=Path("a")).to_json()}
    assert json.loads(json.dumps(settings)) == settings
