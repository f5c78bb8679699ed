"""The benchmark of tune's choice: what its regret and its cost are, and where its commands run."""

from __future__ import annotations

import dataclasses
import math
import subprocess
from pathlib import Path

import pytest

from benchmarks.comm.namespaces import Nodes
from benchmarks.strategies import tune
from benchmarks.strategies.tune import (
    SLOW_RANK,
    Cluster,
    budget_for,
    by_batch,
    cluster_of,
    cost_s,
    judge,
    parse,
    show,
    summary,
    tried_in,
)
from speechdp import exit_codes
from speechdp.experiments.compare.record import RunRecord
from speechdp.experiments.jobs import JobStarter, JobStopped
from speechdp.experiments.record import COMPLETE, FAILED
from speechdp.experiments.tune.plan import Setting
from speechdp.experiments.tune.record import SettingRecord, TuneRecord
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.compare.groups import ComparedRun
from speechdp.report.runs.results import Evaluation, RankTiming, RunResult, RunTiming
from tests.helpers.races import made_up_race

PLAIN = Setting(StrategyChoice("gradient_averaging"))
RARE = Setting(StrategyChoice("model_averaging:period=4"))
LARGE = Setting(StrategyChoice("gradient_averaging"), 32)
TIMING = RunTiming(
    2,
    (
        RankTiming(0, "a", 90, 9_000, 20.0, {}, eval_s=3.0),
        RankTiming(1, "a", 90, 9_000, 21.0, {}),
    ),
)

#: Held-out scores by step; model averaging has twice the speed and needs half as many steps again.
SLOW_CURVE = ((100, -1.0), (200, -0.5))
FAST_CURVE = ((150, -1.0), (300, -0.5))


def compared(
    setting: Setting,
    points: tuple[tuple[int, float], ...],
    *,
    seed: int = 1,
    wall_s: float | None = 30.0,
    state: str = COMPLETE,
) -> ComparedRun:
    evaluations = tuple(Evaluation(step, None, None, None, score, None) for step, score in points)
    record = RunRecord(setting.strategy, 2, seed, "frames", 4, "run", state, wall_s=wall_s)
    result = RunResult("run", Path("run"), {}, evaluations, TIMING, None, True, True, ())
    return ComparedRun(record, result)


def runs() -> dict[Setting, list[ComparedRun]]:
    return {
        PLAIN: [compared(PLAIN, SLOW_CURVE, seed=seed) for seed in (1, 2)],
        RARE: [compared(RARE, FAST_CURVE, seed=seed) for seed in (1, 2)],
        LARGE: [compared(LARGE, SLOW_CURVE, seed=seed, state=FAILED) for seed in (1, 2)],
    }


RACE = made_up_race({PLAIN.name: 1.0, RARE.name: 2.0, LARGE.name: 1.0}, noise=0.0)


def tuned(chosen: Setting = PLAIN, target: float = -1.0) -> TuneRecord:
    tried = tuple(SettingRecord(one.name, one.strategy.text, one.batch_size) for one in (PLAIN, RARE, LARGE))
    return TuneRecord({}, spent_s=18.0, start_s=5.0, tried=tried, target=target, chosen=chosen.name)


def test_regret_is_in_time_at_raced_speed() -> None:
    verdict = judge("free", tuned(PLAIN), runs(), RACE)
    # 200 steps at speed 1 against 300 at speed 2, although the run of 300 steps was no shorter itself.
    assert verdict.best == RARE.name and verdict.regret == pytest.approx(200 / 150 - 1)
    assert verdict.own_regret == pytest.approx(100 / 75 - 1)
    assert judge("free", tuned(RARE), runs(), RACE).regret == 0.0


def test_the_target_is_that_of_whole_runs_and_not_tunes() -> None:
    found = runs()
    # It is ahead early, as tune sees it, and is overtaken.
    found[PLAIN] = [compared(PLAIN, ((10, -1.0), (600, -0.5)), seed=seed) for seed in (1, 2)]
    verdict = judge("free", tuned(PLAIN), found, RACE)
    assert verdict.own_regret == 0.0 and verdict.regret == pytest.approx(600 / 150 - 1)


def test_what_was_chosen_and_did_not_reach_the_target_has_no_regret_in_figures() -> None:
    found = runs()
    found[PLAIN][1] = compared(PLAIN, ((100, -1.0), (200, -0.9)), seed=2)
    never = judge("free", tuned(PLAIN), found, RACE)
    assert math.isinf(never.regret)
    assert summary([never])["regret_max"] is None
    assert math.isinf(judge("free", tuned(LARGE), runs(), RACE).regret)  # its runs failed


def test_chance_counts_all_that_was_tried() -> None:
    assert judge("free", tuned(), runs(), RACE).luck == pytest.approx(1 / 3)


def test_a_target_that_nothing_reached_with_all_seeds_is_refused() -> None:
    short = ((100, -2.0),)
    found = {PLAIN: [compared(PLAIN, short if seed == 2 else SLOW_CURVE, seed=seed) for seed in range(1, 6)]}
    with pytest.raises(SystemExit, match="no setting reached the comparison's target"):
        judge("free", tuned(), found, RACE)


def test_tune_may_expect_more_than_whole_runs_come_to() -> None:
    verdict = judge("free", tuned(target=-0.1), runs(), RACE)
    assert math.isinf(verdict.own_regret) and verdict.regret == pytest.approx(200 / 150 - 1)


def test_the_cost_is_that_of_all_runs_those_that_failed_too() -> None:
    verdict = judge("free", tuned(), runs(), RACE)
    assert verdict.full_s == 6 * 30.0 and verdict.cost_share == pytest.approx(0.1)


def test_a_run_whose_time_is_not_recorded_costs_its_training_and_a_start() -> None:
    assert cost_s(compared(PLAIN, SLOW_CURVE, wall_s=None), start_s=5.0) == 5.0 + 20.0 + 3.0


def test_the_last_line_has_the_worst_cluster() -> None:
    one = judge("free", tuned(RARE), runs(), RACE)
    other = dataclasses.replace(one, regret=0.031, tune_s=9.0)
    assert summary([one, other]) == {"regret_max": 0.031, "cost_share_max": 0.1}


def test_all_settings_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    record = tuned(PLAIN).with_setting(RARE.name, out_in="race")
    show(judge("free", record, runs(), RACE), record)
    printed = " ".join(capsys.readouterr().out.split())
    assert "33.3 % later than the best" in printed
    assert "out: race" in printed and "batch=32" in printed and "failed" in printed


def test_settings_are_compared_by_batch_but_for_those_that_are_refused() -> None:
    assert by_batch(tried_in(tuned())) == {0: [PLAIN, RARE], 32: [LARGE]}
    assert tried_in(tuned().with_setting(RARE.name, out_in="measure")) == [PLAIN, LARGE]
    assert tried_in(tuned().with_setting(RARE.name, out_in="predict")) == [PLAIN, RARE, LARGE]


def test_budgets_are_one_for_all_clusters_or_one_for_each() -> None:
    given = parse(["--clusters", "slow-rank,free", "--budget", "8m,215s"])
    assert (budget_for("slow-rank", given), budget_for("free", given)) == ("8m", "215s")
    given = parse(["--clusters", "slow-rank,free", "--budget", "6m"])
    assert budget_for("free", given) == "6m"
    for words in (
        ["--budget", "1m,2m"],
        ["--budget-share", "1.5"],
        ["--budget", "1m", "--budget-share", "0.2"],
    ):
        with pytest.raises(SystemExit):
            parse(words)


def test_a_share_of_the_comparison_is_the_budget_and_what_tune_adds_is_compared_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, object]] = []
    added = Setting(RARE.strategy, 32)

    def compare(
        cluster: Cluster, data: Path, out: Path, settings: list[Setting], given: object
    ) -> dict[Setting, list[ComparedRun]]:
        done.append((out.name, [one.name for one in settings]))
        return {one: [compared(one, SLOW_CURVE, seed=seed) for seed in (1, 2)] for one in settings}

    def search(cluster: Cluster, data: Path, out: Path, budget: str, given: object) -> TuneRecord:
        done.append((out.name, budget))
        record = tuned(RARE)
        more = SettingRecord(added.name, added.strategy.text, added.batch_size)
        return dataclasses.replace(record, tried=(*record.tried, more))

    race = made_up_race({one.name: 1.0 for one in (PLAIN, RARE, LARGE, added)}, noise=0.0)
    monkeypatch.setattr(tune, "compare", compare)
    monkeypatch.setattr(tune, "tune", search)
    monkeypatch.setattr(tune, "hold_race", lambda *_: race)
    strategies = "gradient_averaging:compression=fp16,model_averaging"
    words = ["--clusters=free", f"--strategies={strategies}", "--periods=4", "--batch-sizes=32"]
    verdict = tune.measure("free", tmp_path, tmp_path, parse([*words, "--budget-share=0.2"]))
    # 6 runs of 30 s; float16 is nothing that MPI sums.
    before = [PLAIN.name, RARE.name, LARGE.name]
    assert done == [("full", before), ("tune", "36s"), ("added", [added.name])]
    assert verdict.full_s == 8 * 30.0
    done.clear()
    tune.measure("free", tmp_path, tmp_path, parse([*words, "--budget=50s"]))
    assert done == [("tune", "50s"), ("full", [*before, added.name])]


def test_launch_options_are_one_word_for_a_command_that_starts_jobs() -> None:
    cluster = Cluster("slow-link", JobStarter(("python",), {}), ("--mpi-args=--mca plm_rsh_agent /a b",))
    assert cluster.forwarded == ("--launch-args='--mpi-args=--mca plm_rsh_agent /a b'",)


def test_the_slow_rank_is_an_option_of_every_training(tmp_path: Path) -> None:
    with cluster_of(SLOW_RANK, tmp_path, ["--epochs=4"]) as cluster:
        assert cluster.options == ("--epochs=4", "--slow-ranks=1:3") and not cluster.launch_options


def test_unknown_clusters_are_refused_and_what_stands_behind_two_dashes_is_trained() -> None:
    given = parse(["--clusters", "free", "--", "--layers", "2"])
    assert given.clusters == ("free",) and given.options == ["--layers", "2"]
    with pytest.raises(SystemExit):
        parse(["--clusters", "fast"])


def test_a_stop_is_told_by_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise JobStopped

    monkeypatch.setattr(tune, "prepare_synthetic", lambda *_: None)
    monkeypatch.setattr(tune, "measure", stopped)
    monkeypatch.setattr("sys.argv", ["tune.py", "--clusters", "free", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        tune.main()
    assert ended.value.code == exit_codes.STOPPED


def test_a_command_on_a_node_keeps_its_words(tmp_path: Path) -> None:
    tools = {"ip": 'shift 3; exec "$@"', "unshare": 'shift; exec "$@"', "hostname": 'echo "as $1"'}
    for name, script in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    words = ["printf", "<%s>", 'a  "b"', "$HOME [1]"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@"', "sh", *Nodes(2).on("n2"), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == 'as n2\n<a  "b"><$HOME [1]>'
