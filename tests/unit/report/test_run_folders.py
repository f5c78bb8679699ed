"""Reading runs back, and the report's figures against numbers worked out by hand."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speechdp.comm.base import Communicator, ReduceOp
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import ConfigError, RunError
from speechdp.ownership.claimant import Claimant
from speechdp.ownership.owner import OWNER_FILE
from speechdp.report.kit.choice import lacks_scores
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.runs import derived
from speechdp.report.runs.alike import baseline_of
from speechdp.report.runs.folders import read_run, read_sweep
from speechdp.report.runs.results import Evaluation, GpuConditions, RankTiming, RunResult, RunTiming
from speechdp.report.runs.timing_file import read_timeline
from speechdp.report.sweep.report import write_report
from speechdp.timing.gather import gather_timing, write_timing
from speechdp.timing.timeline import Span, Timeline
from tests.helpers.runs import MadeUpRun, write_run, write_sweep
from tests.helpers.usage_files import write_samples


class FakeComm:
    """Two ranks, of which the other one answers with a copy under its own number."""

    rank, size, alive = 0, 2, (0, 1)

    def allgather_object(self, value: dict[str, Any]) -> list[Any]:
        return [json.loads(json.dumps(value)), {**value, "rank": 1, "host": "other"}]

    def allreduce(self, x: torch.Tensor, *, name: str, op: ReduceOp) -> torch.Tensor:
        return x


def _rank(rank: int, wall_s: float, frames: int, *, steps: int = 10, **spans_s: float) -> RankTiming:
    return RankTiming(rank, f"host-{rank}", steps, frames, wall_s, spans_s)


#: Rank 1 computes for 9 s, rank 0 for 7 s and waits 2 s for it; the exchange itself takes 0.5 s.
UNEVEN = RunTiming(
    4,
    (
        _rank(0, 10.0, 6000, forward=3.0, backward=3.5, data_wait=0.5, comm=2.5),
        _rank(1, 10.0, 4000, forward=4.0, backward=4.5, data_wait=0.5, comm=0.5),
    ),
)
ALONE = RunTiming(4, (_rank(0, 10.0, 8000, forward=4.0, backward=5.5, data_wait=0.1),))


def _run(name: str, scores: list[float], **settings: Any) -> RunResult:
    evaluations = tuple(
        Evaluation(10 * i, float(i), 1000.0 * i, 5.0 * i, value, 0.5)
        for i, value in enumerate(scores, start=1)
    )
    return RunResult(name, Path(name), settings, evaluations, None, None, True, True, ())


def test_what_another_version_has_recorded_is_not_misread(tmp_path: Path) -> None:
    write_sweep(tmp_path, [MadeUpRun("gradient_averaging", "1")])
    (run,) = read_sweep(tmp_path).runs
    path = run.path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    read = read_run(run.path)
    assert read.settings == {} and run.settings["num_parameters"] == 1_234_567
    assert any(text.startswith("run.json: is of version 2, and this speechdp") for text in read.problems)
    (tmp_path / "sweep.json").write_text(json.dumps({"version": 2, "runs": {run.name: {}}}))
    with pytest.raises(ConfigError, match=r"sweep.json: is of version 2, .*; use the speechdp that wrote it"):
        read_sweep(tmp_path)


def test_throughput_is_all_frames_over_the_longest_wall() -> None:
    timing = RunTiming(4, (_rank(0, 8.0, 6000), _rank(1, 10.0, 4000)))
    assert derived.frames_per_s(timing) == pytest.approx(1000.0)


def test_speedup_efficiency_and_shares() -> None:
    run = RunResult("a", Path("a"), {"size": 2}, (), UNEVEN, None, True, True, ())
    row = derived.run_figures(run, ALONE, None)
    assert row.frames_per_s == pytest.approx(1000.0)  # 10,000 frames in 10 s
    assert row.speedup == pytest.approx(1.25)  # over 800 frames/s
    assert row.efficiency == pytest.approx(0.625)
    assert row.comm_share == pytest.approx(0.15)  # mean of 25 % and 5 %
    assert row.data_wait_share == pytest.approx(0.05)


def test_the_straggler_is_the_rank_with_the_short_communication() -> None:
    skew = derived.rank_skew(UNEVEN)
    assert skew is not None
    assert skew.value == pytest.approx((9.0 - 7.0) / 8.0)
    assert (skew.straggler, skew.straggler_host) == (1, "host-1")


def test_the_skew_of_ranks_with_other_numbers_of_steps_is_that_of_a_step() -> None:
    """As asynchronous ranks have them: rank 1 takes longer for a step, and so fewer of them."""
    timing = RunTiming(
        4, (_rank(0, 10.0, 6000, steps=20, forward=8.0), _rank(1, 10.0, 3000, steps=10, forward=6.0))
    )
    skew = derived.rank_skew(timing)
    assert skew is not None and skew.value == pytest.approx((0.6 - 0.4) / 0.5)


def test_no_straggler_among_even_ranks_and_no_skew_of_one() -> None:
    even = RunTiming(0, (_rank(0, 1.0, 1, forward=1.00), _rank(1, 1.0, 1, forward=1.04)))
    skew = derived.rank_skew(even)
    assert skew is not None
    assert skew.value == pytest.approx(0.04 / 1.02)
    assert skew.straggler is None
    assert derived.rank_skew(ALONE) is None


def test_losses_part_the_exchange_from_the_waiting() -> None:
    lost = derived.losses(UNEVEN, ALONE)
    assert lost is not None
    assert lost.exchange == pytest.approx(0.05)
    assert lost.waiting == pytest.approx(0.10)
    assert lost.data_wait == pytest.approx(0.05)
    # 15 s of computing for 10,000 frames here, 9.5 s for 8,000 alone; computing is 75 % of the wall.
    assert lost.slower_compute == pytest.approx(0.75 * (1 - (9.5 / 8000) / (15 / 10000)))


def test_a_run_without_a_timed_step_has_no_losses() -> None:
    assert derived.losses(RunTiming(4, (_rank(0, 0.0, 0), _rank(1, 0.0, 0))), ALONE) is None


def test_who_waits_for_a_rank_without_data_waits_for_data() -> None:
    """Rank 1 has no batch for half of each step; rank 0 has all, and waits as long at the exchange."""
    ranks = (_rank(0, 10.0, 1000, comm=5.0, forward=5.0), _rank(1, 10.0, 1000, data_wait=4.9, forward=5.0))
    lost = derived.losses(RunTiming(4, ranks), None)
    assert lost is not None
    assert (lost.data_wait, lost.waiting) == (pytest.approx(0.49), pytest.approx(0.005))


def test_ranks_that_are_late_in_turn_wait_though_their_sums_are_equal() -> None:
    """Both spend 4 s of 10 in communication, but never at the same step: the exchange takes 0.5 s of it."""
    ranks = tuple(_rank(r, 10.0, 1000, comm=4.0, forward=6.0) for r in range(2))
    lost = derived.losses(RunTiming(4, ranks, exchange_s=0.5), None)
    assert lost is not None
    assert lost.exchange == pytest.approx(0.05)
    assert lost.waiting == pytest.approx(0.35)


@pytest.mark.parametrize("exchange_s", [0.0, None])
def test_who_waits_before_an_evaluation_waits_for_slower_ranks(exchange_s: float | None) -> None:
    """Rank 0 was slow in one epoch, rank 1 in the next, and they averaged at the evaluations alone."""
    first, second = _rank(0, 6.0, 1000, forward=6.0), _rank(1, 5.0, 1000, forward=5.0)
    timing = RunTiming(4, (replace(first, meeting_s=4.0), replace(second, meeting_s=5.0)), exchange_s)
    assert derived.frames_per_s(timing) == 200  # not 333, over 6 s
    lost = derived.losses(timing, None)
    assert lost is not None
    assert (lost.exchange, lost.waiting) == (0, pytest.approx(0.45))
    assert derived.mean_share(timing, [rank.comm_s for rank in timing.ranks]) == pytest.approx(0.45)
    skew = derived.rank_skew(timing)
    assert skew is not None and skew.straggler == 0


def test_the_shortest_communication_of_each_step_is_gathered() -> None:
    naps = {0: (0.03, 0.0, 0.03, 0.0), 1: (0.0, 0.03, 0.0, 0.03)}

    def record(comm: Communicator) -> Any:
        timeline = Timeline(None, rank=comm.rank, device=torch.device("cpu"), warmup_steps=0)
        for step, nap_s in enumerate(naps[comm.rank], start=1):
            with timeline.span(Span.COMM):
                time.sleep(nap_s)
            timeline.end_step(step, 0, 10)
        return gather_timing(timeline, comm), timeline.comm_of_steps()

    (gathered, first), (_, second) = run_threads(2, record)
    assert all(rank["spans_s"]["comm"] >= 0.06 for rank in gathered["ranks"])
    # On a busy machine a nap of 0 takes its time, too: what counts are the times that were taken.
    assert gathered["exchange_s"] == pytest.approx(sum(map(min, first, second)), abs=1e-5)


def test_time_to_target_takes_the_first_evaluation_there_and_interpolates_nothing() -> None:
    evaluations = _run("a", [-1.0, -0.5, -0.6, -0.3]).evaluations
    assert derived.time_to_target(evaluations, -0.55) == 10.0
    assert derived.time_to_target(evaluations, -0.5) == 10.0
    assert derived.time_to_target(evaluations, -0.2) is None


def test_the_default_target_is_the_best_that_every_run_reached() -> None:
    runs = [_run("a", [-1.0, -0.4, -0.45]), _run("b", [-0.9, -0.5]), _run("c", []), _run("one-rank", [-0.9])]
    assert derived.target_of_all(runs) == -0.5
    assert derived.target_of_all([]) is None


def test_gather_timing_names_every_rank_and_host_and_is_read_back(tmp_path: Path) -> None:
    timeline = Timeline(None, rank=0, device=torch.device("cpu"), warmup_steps=1)
    for step in (1, 2, 3):
        timeline.end_step(step, 0, 50)
    comm: Any = FakeComm()
    of_ranks = {
        0: {"gpu": {"index": 0}},
        1: {"gpu": {"index": 3, "clock_mhz": 1980, "limits": {"heat": 0.5}}},
    }
    gathered = gather_timing(timeline, comm, of_ranks=of_ranks)
    assert gathered is not None
    write_timing(tmp_path, gathered)
    assert [path.name for path in tmp_path.iterdir()] == ["timing.json"]
    timing = read_run(tmp_path).timing
    assert timing is not None
    assert timing.warmup_steps == 1
    assert [(rank.rank, rank.frames, rank.steps) for rank in timing.ranks] == [(0, 100, 2), (1, 100, 2)]
    assert timing.ranks[1].host == "other"
    assert timing.ranks[0].gpu == GpuConditions(0)  # what held the clock down was not read
    assert timing.ranks[1].gpu == GpuConditions(3, clock_mhz=1980, limits={"heat": 0.5})
    apart = gather_timing(timeline, comm, synchronous=False)  # as many steps on each rank, by chance
    assert gathered["exchange_s"] == 0 and apart == {**gathered, "exchange_s": None, "ranks": apart["ranks"]}
    comm.rank = 1
    assert gather_timing(timeline, comm) is None


def test_write_timing_names_the_file_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"gone/timing\.json"):
        write_timing(tmp_path / "gone", {})


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(MadeUpRun("a", period="16"), tmp_path))
    assert (run.status, run.strategy, run.period, run.size) == ("complete", "model_averaging", "16", 2)
    assert run.problems == ()
    assert len(run.evaluations) == 12
    assert run.evaluations[-1].values["log_prob"] == pytest.approx(-0.40)
    assert run.word_errors is not None
    assert run.word_errors.wer == 0.013


def test_the_test_split_comes_first_else_the_only_one(tmp_path: Path) -> None:
    path = write_run(MadeUpRun("a", wer=(0.1, 0.0, 0.2)), tmp_path)
    dev = json.loads((path / "wer-test.json").read_text()) | {"split": "dev", "wer": 0.5}
    (path / "wer-dev.json").write_text(json.dumps(dev))
    errors = read_run(path).word_errors
    assert errors is not None and (errors.split, errors.wer) == ("test", 0.1)
    (path / "wer-test.json").unlink()
    errors = read_run(path).word_errors
    assert errors is not None and (errors.split, errors.wer) == ("dev", 0.5)
    (path / "wer-test@other.json").write_text(json.dumps(dev | {"wer": 0.9}))  # of other data
    errors = read_run(path).word_errors
    assert errors is not None and errors.wer == 0.5
    (path / "wer-eval.json").write_text(json.dumps(dev | {"split": "eval"}))
    run = read_run(path)
    assert run.word_errors is None
    assert [p for p in run.problems if p.startswith("wer-test.json: missing, and several")]


def test_missing_files_are_named_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = read_run(tmp_path / "run")
    assert run.status == "unfinished"
    for name in ("run.json", "metrics.jsonl", "timing.json", "completed.json"):
        assert any(problem.startswith(f"{name}: missing") for problem in run.problems), name
    gone = read_run(tmp_path / "gone")
    assert gone.status == "missing"
    assert gone.problems


@pytest.mark.parametrize("content", ["{", "[]", '{"ranks": []}', '{"ranks": [{"rank": 0}]}', "\x00\xff"])
def test_a_damaged_timing_is_named_and_the_timelines_take_its_place(tmp_path: Path, content: str) -> None:
    path = write_run(MadeUpRun("a"), tmp_path)
    (path / "timing.json").write_text(content, encoding="latin-1")
    (path / "timeline").mkdir()
    lines = [
        json.dumps({"step": i, "wall": 0.1, "frames": 100, "spans": [["comm", 0.0, 0.01 * i]]})
        for i in range(1, 8)
    ]
    lines.append('{"event": "eval", "t": 1, "wall": 0.5}')
    lines.append('{"step": 8, "wa')  # killed while writing
    (path / "timeline" / "rank-0000.jsonl").write_text("\n".join(lines))
    run = read_run(path)
    assert any("timing.json" in problem for problem in run.problems)
    assert any("rank-0000.jsonl: 1 damaged" in problem for problem in run.problems)
    assert run.timing is not None
    (rank,) = run.timing.ranks
    assert (rank.steps, rank.frames) == (3, 300)  # steps 5 to 7
    assert rank.comm_s == pytest.approx(0.18)
    assert rank.eval_s == 0.5


def test_repeated_evaluations_and_torn_lines_of_a_resumed_run(tmp_path: Path) -> None:
    path = write_run(MadeUpRun("a", num_evaluations=3), tmp_path)
    metrics = path / "metrics.jsonl"
    again = {"step": 120, "heldout_log_prob": -0.33, "time_s": 1.0, "frames": float("nan")}
    metrics.write_text(metrics.read_text() + '{"step": 180, "hel\n' + json.dumps(again) + "\n")
    run = read_run(path)
    assert [evaluation.step for evaluation in run.evaluations] == [60, 120, 180]
    assert run.evaluations[1].score == -0.33
    assert run.evaluations[1].frames is None
    assert "metrics.jsonl: 1 damaged line passed over" in run.problems


@pytest.mark.parametrize("completed", [False, True])
@pytest.mark.parametrize("owner", ["running", "killed", "none"])
def test_a_part_of_a_line_at_the_end_is_damage_only_after_the_end(
    tmp_path: Path, owner: str, completed: bool
) -> None:
    path = write_run(MadeUpRun("a", num_evaluations=3, completed=completed), tmp_path)
    (path / "timing.json").unlink()
    write_samples(path, "node-a", [[97.0] * 30])
    ranks = {f"rank-000{rank}.jsonl": '{"step": 1, "wall": 1.0, "frames": 9}\n' for rank in range(2)}
    for name, text in {**ranks, "periods.jsonl": '{"step": 0, "t": 0.0, "period": "4"}\n'}.items():
        (path / "timeline" / name).write_text(text)
    files = [path / "metrics.jsonl", *sorted((path / "timeline").iterdir())]
    for file in files:
        file.write_text(file.read_text() + '{"st')
    if owner != "none":
        claimant = Claimant.here("train", {})
        claimant = claimant if owner == "running" else replace(claimant, pid=2**30)
        (path / OWNER_FILE).write_text(json.dumps(claimant.to_json()))
    (run,) = read_sweep(path).runs
    damaged = [problem for problem in run.problems if "damaged line" in problem]
    is_running = owner == "running" and not completed
    assert len(damaged) == (0 if is_running else len(files)), run.problems
    assert len(files) == 5 and run.timing is not None and run.periods and len(run.samples) == 1
    unfinished = [problem for problem in run.problems if problem.startswith("completed.json: ")]
    wait = "so the run has not finished; wait for the job that owner.json names; if that has ended, continue"
    assert len(unfinished) == (0 if completed else 1)
    assert is_running == any(wait in problem for problem in unfinished)


def test_malformed_spans_of_a_timeline_do_not_stop_the_reader(tmp_path: Path) -> None:
    path = write_run(MadeUpRun("a"), tmp_path)
    (path / "timing.json").unlink()
    (path / "timeline").mkdir()
    odd = [{"step": 1, "wall": "x", "spans": [["comm"], 3]}, {"step": "two"}, {"step": 2, "spans": None}]
    (path / "timeline" / "rank-0000.jsonl").write_text("\n".join(json.dumps(line) for line in odd))
    run = read_run(path)
    assert run.timing is not None
    assert run.timing.ranks[0].wall_s == 0
    assert derived.run_figures(run, None, None).frames_per_s is None


def test_read_timeline_takes_the_last_record_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.jsonl"
    path.write_text('{"step": 2, "frames": 1}\n{"step": 1, "frames": 2}\n{"step": 2, "frames": 3}\n[1]\n')
    steps, events, num_damaged = read_timeline(path)
    assert {step: record["frames"] for step, record in steps.items()} == {1: 2, 2: 3}
    assert list(steps) == [1, 2]
    assert (events, num_damaged) == ([], 1)


def test_sweeps_runs_and_folders_of_runs_are_told_apart(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweep", [MadeUpRun("b"), MadeUpRun("a")], missing=["c"])
    assert [(run.name, run.status) for run in read_sweep(sweep).runs] == [
        ("b", "complete"),
        ("a", "complete"),
        ("c", "missing"),
    ]
    assert [run.name for run in read_sweep(sweep / "a").runs] == ["a"]
    (sweep / "sweep.json").unlink()
    (sweep / "report").mkdir()
    write_sweep(sweep / "inner", [MadeUpRun("d")])
    of_runs = read_sweep(sweep)
    assert [run.name for run in of_runs.runs] == ["a", "b"]
    assert of_runs.others == ("inner",)
    said = " ".join(write_report(sweep).answer)
    assert f"{sweep / 'inner'} has a report of its own and is not in this one." in said


@pytest.mark.parametrize("names", ['["../elsewhere"]', '["/etc"]', '[".."]', "[3]", "null"])
def test_a_sweep_that_names_other_folders_is_refused(tmp_path: Path, names: str) -> None:
    (tmp_path / "sweep.json").write_text(f'{{"runs": {names}}}')
    with pytest.raises(ConfigError, match=r"sweep\.json"):
        read_sweep(tmp_path)


def test_nothing_to_report_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_sweep(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder; give that of a run"):
        read_sweep(tmp_path / "file")
    (tmp_path / "file").unlink()
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_sweep(tmp_path)


def test_the_baseline_is_the_one_rank_run_or_a_run_of_size_one(tmp_path: Path) -> None:
    out = write_sweep(tmp_path / "s", [MadeUpRun("x", size=1), MadeUpRun("one-rank", size=1)])
    runs = read_sweep(out).runs
    baseline = baseline_of(runs[0], runs)
    assert baseline is not None
    assert baseline.name == "one-rank"
    runs = read_sweep(write_sweep(tmp_path / "t", [MadeUpRun("y", size=2), MadeUpRun("x", size=1)])).runs
    alone = baseline_of(runs[0], runs)
    assert alone is not None
    assert alone.name == "x"


def test_the_one_rank_run_of_a_sweep_has_a_speed_but_no_accuracy(tmp_path: Path) -> None:
    runs = [MadeUpRun("one-rank", size=1), MadeUpRun("model_averaging-16")]
    sweep = read_sweep(write_sweep(tmp_path / "sweep", runs))
    baseline = baseline_of(sweep.runs[1], sweep.runs)
    assert baseline is not None and baseline.timing is not None
    assert baseline.evaluations == ()
    assert all(run.evaluations for run in sweep.runs if not run.is_baseline)


def test_a_timeline_that_may_not_be_looked_into_is_a_problem_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(MadeUpRun("a"), tmp_path)

    def refuse(folder: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "scandir", refuse)
    (run,) = read_sweep(path).runs
    assert "timeline/: cannot be read (Permission denied)" in run.problems


@pytest.mark.parametrize(
    ("strategy", "period"),
    [
        ("bmuf:period=16,begin=0", "16"),
        ("gradient_averaging:every=16", None),
        ("of_a_script:long_period=2", None),
        ("alone", None),
    ],
)
def test_a_model_period_is_that_of_a_strategy_with_such_an_option(strategy: str, period: str | None) -> None:
    assert _run("a", [], strategy=strategy, period="16").model_period == period


def test_the_timelines_of_an_unfinished_run_are_summed_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(MadeUpRun("a", completed=False), tmp_path)
    (run / "timing.json").unlink()
    step = {"frames": 10, "wall": 1.0, "spans": [["comm", 0.0, 0.25], ["forward", 0.25, 0.5]]}
    lines = [{**step, "step": number} for number in (1, 2, 3, 4, 5, 6, 5, 6)]
    lines += [{"event": "eval", "wall": 2.0}, {"event": ["eval"]}, {"step": 10**400}]
    (run / "timeline").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines) + "torn"
    (run / "timeline" / "rank-0000.jsonl").write_text(text)
    monkeypatch.delattr("speechdp.report.runs.timing_file.read_timeline")  # it keeps every line
    timing = read_run(run).timing
    assert timing is not None
    (rank,) = timing.ranks
    assert (rank.steps, rank.frames, rank.wall_s, rank.eval_s) == (2, 20, 2.0, 2.0)
    assert rank.spans_s == {"comm": 0.5, "forward": 1.0}
    assert read_run(run, times_unfinished=False).timing is None


def test_meetings_count_from_the_first_step_that_does(tmp_path: Path) -> None:
    """Nobody trains before the first step, and the warm-up's steps do not count either."""
    run = write_run(MadeUpRun("a", completed=False), tmp_path)
    (run / "timing.json").unlink()
    (run / "timeline").mkdir(exist_ok=True)
    for num_steps, meeting_s in ((3, 1.5), (6, 1.0)):
        lines = [{"event": "meeting", "wall": 8.0}]
        for step in range(1, num_steps + 1):
            lines += [{"step": step, "wall": 1.0, "frames": 1}, {"event": "meeting", "wall": 0.5}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "timeline" / "rank-0000.jsonl").write_text(text)
        timing = read_run(run).timing
        assert timing is not None and timing.ranks[0].meeting_s == meeting_s


def test_timelines_of_another_number_of_ranks_are_not_summed_with_those_of_the_last(tmp_path: Path) -> None:
    """Of 4 ranks that went on as 2 the frames of all counted, steps lost since the checkpoint too."""
    run = write_run(MadeUpRun("a", completed=False), tmp_path)
    (run / "timing.json").unlink()
    for path in (run / "timeline").glob("*"):
        path.unlink()
    (run / "timeline").mkdir(exist_ok=True)
    steps_of = {0: range(1, 31), 1: range(1, 31), 2: range(1, 23), 3: range(1, 23)}
    for rank, steps in steps_of.items():
        lines = [
            {"step": n, "frames": 10, "wall": 0.5 if n <= 20 else 1.0, "spans": [["comm", 0.0, 0.25]]}
            for n in steps
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "timeline" / f"rank-{rank:04d}.jsonl").write_text(text)
    starts = [(0, 4), (10, 4), (20, 2), (24, 2)]
    lines = [json.dumps({"step": step, "size": size}) + "\n" for step, size in starts]
    (run / "starts.jsonl").write_text("".join(lines))
    found = read_run(run)
    assert found.timing is not None
    assert [(rank.rank, rank.steps, rank.frames, rank.wall_s) for rank in found.timing.ranks] == [
        (0, 6, 60, 6.0), (1, 6, 60, 6.0)
    ]  # fmt: skip
    assert any("summed after step 20 alone" in problem for problem in found.problems)
    # Without a step since then there is only the time before; and with one number of ranks all steps count.
    for last in (30, 4), (30, 3):
        (run / "starts.jsonl").write_text("".join(lines[:2]) + json.dumps({"step": last[0], "size": last[1]}))
        timing = read_run(run).timing
        assert timing is not None and [rank.steps for rank in timing.ranks] == [26, 26, 18, 18]


def test_evaluations_and_checkpoints_are_summed_over_the_steps_that_are(tmp_path: Path) -> None:
    """They were summed over all starts, repeated ones too, while the steps were those that count."""
    run = write_run(MadeUpRun("a", size=1, completed=False), tmp_path)
    (run / "timing.json").unlink()
    (run / "timeline").mkdir(exist_ok=True)

    def lines(*steps: int) -> list[dict[str, Any]]:
        return [{"step": n, "frames": 10, "wall": 1.0, "spans": []} for n in steps]

    def events(eval_s: float) -> list[dict[str, Any]]:
        return [{"event": "eval", "wall": eval_s}, {"event": "checkpoint", "wall": eval_s / 2}]

    # Evaluated after steps 10 and 20, begun again after 10, and once more evaluated after 20 and 30.
    whole = [*lines(*range(1, 11)), *events(1.0), *lines(*range(11, 22)), *events(2.0)]
    whole += [*lines(*range(11, 21)), *events(4.0), *lines(*range(21, 31)), *events(8.0)]
    text = "".join(json.dumps(line) + "\n" for line in whole)
    (run / "timeline" / "rank-0000.jsonl").write_text(text, encoding="utf-8")

    def sums() -> tuple[int, float, float]:
        timing = read_run(run).timing
        assert timing is not None
        (rank,) = timing.ranks
        return rank.steps, rank.eval_s, rank.checkpoint_s

    assert sums() == (26, 1.0 + 4.0 + 8.0, 0.5 + 2.0 + 4.0)
    starts = [{"step": step, "size": size} for step, size in ((0, 2), (10, 2), (20, 1))]
    (run / "starts.jsonl").write_text("".join(json.dumps(s) + "\n" for s in starts), encoding="utf-8")
    assert sums() == (6, 8.0, 4.0)


def test_why_no_run_has_a_score_is_said_also_where_some_were_never_evaluated() -> None:
    never, lost = _run("never", []), _run("lost", [float("nan")])
    terms = terms_of([never, lost])
    assert (
        lacks_scores([never, lost], terms)
        == "the last held-out log-probability of no finished run is a number"
    )
    assert lacks_scores([never], terms) == f"no finished run has {terms.kind.evaluation}"
