"""The report on the data path: figures worked out by hand, and each sentence exactly where it belongs."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from speechdp.report.kit.formatting import MINUS
from speechdp.report.kit.pages import WrittenReport
from speechdp.report.runs.data_path import data_figures, data_wait
from speechdp.report.runs.derived import sweep_figures, target_of_all
from speechdp.report.runs.folders import read_run, read_sweep
from speechdp.report.runs.results import DataTimes, Feeder, RankTiming, RunTiming
from speechdp.report.sweep.answer import SweepAnswer, find_answer
from speechdp.report.sweep.report import write_report
from tests.helpers.page_reader import PageReader
from tests.helpers.runs import MadeUpRun, write_run, write_sweep
from tests.helpers.terminal import on_terminal

HOSTILE = '<script>alert("x")</script>$x_1$&[red]'
#: Shares of the step time with 12 % of waiting for data on one rank and 1 % on the other.
LATE = (0.01, 0, 0.35, 0.5, 0.12, 0.02)
LATE_RANK = {1: (0.12, 0, 0.35, 0.5, 0.01, 0.02)}


def _entry(seconds: dict[str, float], **more: Any) -> dict[str, Any]:
    """Return what a rank writes after a minute of 600,000 frames."""
    return {
        "stages_s": seconds, "read_bytes": 1_200_000_000, "batches": 604, "frames": 600_000,
        "computed_frames": 640_000, "threads": 2, "preprocess_on": "cpu", "storage": "contiguous", **more,
    }  # fmt: skip


def _late(data: Any, order: str = "pooled", device: str = "cpu", **more: Any) -> MadeUpRun:
    settings = {"device": device, "options": {"batch": {"order": order}}}
    return MadeUpRun("late", spans=LATE, rank_spans=LATE_RANK, settings=settings, data=data, **more)


def _answer(tmp_path: Path, *runs: MadeUpRun) -> SweepAnswer:
    sweep = read_sweep(write_sweep(tmp_path / "sweep", runs))
    return find_answer(sweep_figures(sweep, target_of_all(sweep.runs)))


def _said(tmp_path: Path, *runs: MadeUpRun) -> str:
    return " ".join(_answer(tmp_path, *runs).data)


def _printed(report: WrittenReport, width: int) -> str:
    return on_terminal(report.table, width)


def _timing(*data: DataTimes, feeders: tuple[Feeder, ...] = (), exchange_s: float | None = 0.0) -> RunTiming:
    """Return ranks that trained for 20 s, 16 s of them after the warm-up; None: without steps in common."""
    ranks = tuple(RankTiming(i, "h", 10, 900, 16.0, {}, trained_s=20.0, data=d) for i, d in enumerate(data))
    return RunTiming(4, ranks, exchange_s, feeders)


def test_data_wait_is_the_mean_and_the_rank_with_most() -> None:
    ranks = tuple(RankTiming(i, "h", 10, 1, 10.0, {"data_wait": s}) for i, s in enumerate((0.1, 0.5, 0.0)))
    wait = data_wait(RunTiming(4, ranks))
    assert wait is not None
    assert (wait.mean, wait.largest, wait.rank) == (pytest.approx(0.02), pytest.approx(0.05), 1)
    assert data_wait(RunTiming(4, (RankTiming(0, "h", 0, 0, 0.0, {}),))) is None


def test_figures_of_ranks_that_read_for_themselves() -> None:
    one = DataTimes(
        {"read": 3.0, "collate": 1.0, "preprocess": 12.0}, 6e8, 1000, 1250, 2, "cpu", "contiguous"
    )
    two = DataTimes({"read": 1.0, "collate": 1.0, "preprocess": 4.0}, 2e8, 1000, 1250, 2, "cpu", "contiguous")
    figures = data_figures(_timing(one, two))
    assert figures is not None
    assert figures.busy == pytest.approx({"read": 0.2, "preprocess": 0.8, "collate": 0.1})
    assert figures.read_bytes_per_s == pytest.approx(2e8)  # 800 MB in 4 s of reading
    assert figures.padding == pytest.approx(0.2)
    # Two threads preprocess rank 0's 1000 frames in 6 s and rank 1's in 2 s.
    assert figures.deliverable_per_s == pytest.approx(1000 / 6 + 1000 / 2)
    assert figures.bottleneck is not None
    assert (figures.bottleneck.stage, figures.bottleneck.busy) == ("preprocess", pytest.approx(0.3))
    assert (figures.threads, figures.storage, figures.is_slow_storage) == (2, "contiguous", False)


def test_one_thread_reads_and_collates() -> None:
    figures = data_figures(_timing(DataTimes({"read": 3.0, "collate": 2.0, "preprocess": 4.0}, frames=1000)))
    assert figures is not None and figures.bottleneck is not None
    assert (figures.bottleneck.stage, figures.bottleneck.busy) == ("read", pytest.approx(0.25))
    assert figures.deliverable_per_s == pytest.approx(200)


def test_the_blocking_order_does_one_stage_after_the_other() -> None:
    times = DataTimes({"read": 3.0, "collate": 2.0, "preprocess": 5.0}, frames=1000, threads=4)
    figures = data_figures(_timing(times), "blocking-sort")
    assert figures is not None
    assert figures.deliverable_per_s == pytest.approx(100)


def test_asynchronous_ranks_make_one_batch_at_a_time() -> None:
    times = DataTimes({"read": 3.0, "collate": 2.0, "preprocess": 5.0}, frames=1000, threads=4)
    figures = data_figures(_timing(times, exchange_s=None))
    assert figures is not None and figures.bottleneck is not None and figures.apart
    assert figures.deliverable_per_s == pytest.approx(100)
    assert (figures.bottleneck.stage, figures.bottleneck.busy) == ("preprocess", pytest.approx(0.5))
    # A feeder makes batches for several of them.
    fed = data_figures(_timing(DataTimes({"h2d": 1.0}), feeders=(Feeder(1, "a", times),), exchange_s=None))
    assert fed is not None and fed.deliverable_per_s == pytest.approx(200)


def test_feeders_make_the_frames_and_ranks_only_take_them() -> None:
    fed = DataTimes({"read": 2.0, "preprocess": 8.0, "send": 1.0}, 1e8, 2000, 2500, 1, "cpu", "contiguous")
    taken = DataTimes({"h2d": 0.5}, frames=2000, computed_frames=2000)
    figures = data_figures(_timing(taken, feeders=(Feeder(1, "a", fed), Feeder(2, "b", DataTimes()))))
    assert figures is not None
    assert [(f.rank, f.host, f.busy) for f in figures.feeders] == [
        (1, "a", pytest.approx(0.4)),
        (2, "b", None),
    ]
    assert figures.padding == pytest.approx(0.2)  # what the ranks count again plays no part
    assert figures.busy["h2d"] == pytest.approx(0.025)
    one = data_figures(_timing(taken, feeders=(Feeder(1, "a", fed),)))
    assert one is not None and one.deliverable_per_s == pytest.approx(250)


def test_a_run_without_records_has_no_section(tmp_path: Path) -> None:
    report = write_report(write_run(MadeUpRun("a"), tmp_path))
    page = report.html.read_text()
    assert "<h2>Data path</h2>" not in page
    assert "plot-data-rates" not in page
    assert "Data path" not in _printed(report, 100)
    row = next(csv.DictReader(io.StringIO(report.csv.read_text())))
    assert row["data_wait_share_max"] == "0.01"
    assert row["data_read_busy"] == row["feeders"] == row["storage"] == ""


def test_page_table_and_csv_show_the_data_path(tmp_path: Path) -> None:
    feeders = [{"rank": 2, "host": "node-b", "data": _entry({"read": 6.0, "preprocess": 60.0, "send": 3.0})}]
    runs = [
        MadeUpRun("own", data=_entry({"read": 6.0, "preprocess": 24.0, "collate": 3.0})),
        MadeUpRun("fed", period="4", data={"stages_s": {"h2d": 0.6}, "frames": 300_000}, feeders=feeders),
        MadeUpRun("old", period="64"),
    ]
    report = write_report(write_sweep(tmp_path / "sweep", runs))
    page = report.html.read_text().replace("\u00a0", " ")
    assert "<h2>Data path</h2>" in page
    assert PageReader(page).tags.count("svg") == 7
    assert "Feeders: rank 2 on node-b 50 % busy." in page
    assert "could deliver about 100,000 frames/s, estimated from its slowest stage (preprocessing)" in page
    rows = {row["run"]: row for row in csv.DictReader(io.StringIO(report.csv.read_text()))}
    own = rows["own"]
    assert float(own["data_preprocess_busy"]) == pytest.approx(0.8)  # of two ranks
    assert float(own["data_read_bytes_per_s"]) == pytest.approx(2e8)
    assert float(own["data_deliverable_frames_per_s"]) == pytest.approx(2 * 600_000 / 12)
    assert float(own["padding_and_context_share"]) == pytest.approx(1 - 600 / 640)
    assert (own["storage"], own["loader_threads"], own["preprocess_on"]) == ("contiguous", "2", "cpu")
    assert (rows["fed"]["feeders"], rows["fed"]["feeder_busy_share"]) == ("1", "0.5")
    assert rows["old"]["data_read_busy"] == ""
    for width in (250, 80):
        printed = _printed(report, width)
        assert "Data path" in printed
        assert "100,000" in printed
        assert max(map(len, printed.splitlines())) <= width
    assert report.png is not None and report.png.stat().st_size > 0


@pytest.mark.parametrize(
    ("seconds", "more", "words"),
    [
        (
            {"preprocess": 114.0},
            {},
            "is preprocessing, busy 95 % of the training time: try --loader-threads 4",
        ),
        ({"preprocess": 59.0}, {"threads": 1}, "try --loader-threads 2 or --feeders. Threads"),
        (
            {"preprocess": 59.0},
            {"preprocess_on": "cuda"},
            "--preprocess-on cpu with several --loader-threads",
        ),
        (
            {"read": 50.0},
            {"storage": "chunked gzip"},
            "is reading, busy 83 % of the training time: try `speechdp",
        ),
        ({"read": 50.0}, {"threads": 1}, "try --loader-threads 2 or --feeders. Threads"),
        (
            {"collate": 50.0},
            {"computed_frames": 900_000},
            "--order, e.g. laplace (33 % are padding and context)",
        ),
        (
            {"h2d": 50.0},
            {},
            "is copy to GPU, busy 83 % of the training time: try another --order, e.g. laplace.",
        ),
        (
            {"read": 20.0},
            {},
            "No stage of the data path is busy all the time (most of all reading, 33 % of it)",
        ),
    ],
)
def test_the_slow_stage_is_named_with_its_remedy(
    tmp_path: Path, seconds: dict[str, float], more: dict[str, Any], words: str
) -> None:
    said = _said(tmp_path, _late(_entry(seconds, **more)))
    assert "waits for data 6.5 % of the step time (rank 1: 12.0 %)" in said
    assert words in said
    assert ("stored chunked gzip" in said) == ("storage" in more)
    assert "--preprocess-on gpu" not in said  # there is none


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_asynchronous_ranks_are_not_told_of_more_threads(tmp_path: Path, place: str) -> None:
    run = _late(_entry({"preprocess": 50.0, "read": 7.0}, preprocess_on=place), together=False)
    said = _said(tmp_path, run)
    assert "is preprocessing, busy 95 % of the training time: try " in said
    assert "--feeders" in said and "hreads" not in said.split("feeders help only if")[0]


def test_preprocessing_on_the_gpu_is_proposed_where_there_is_one(tmp_path: Path) -> None:
    assert "--preprocess-on gpu" in _said(tmp_path / "a", _late(_entry({"preprocess": 110.0}), device="cuda"))
    feeders = [{"rank": 2, "host": "a", "data": _entry({"preprocess": 110.0})}]
    said = _said(tmp_path / "b", _late(None, device="cuda", feeders=feeders))
    assert "--preprocess-on gpu" not in said
    assert "more --feeders" in said


def test_nothing_is_said_where_nothing_waits(tmp_path: Path) -> None:
    assert _said(tmp_path / "a", MadeUpRun("a", data=_entry({"preprocess": 110.0}))) == ""
    aim = (0.02, 0, 0.4, 0.5, 0.05, 0.02)
    assert _said(tmp_path / "b", MadeUpRun("a", spans=aim)) == ""
    above = (0.021, 0, 0.4, 0.5, 0.05, 0.02)
    assert "was not recorded" in _said(tmp_path / "c", MadeUpRun("a", spans=above))


def test_slow_storage_is_named_though_nothing_waits(tmp_path: Path) -> None:
    said = _said(tmp_path, MadeUpRun("a", data=_entry({"read": 6.0}, storage="chunked gzip")))
    assert said.startswith("The shards of model averaging, period 16 are stored chunked gzip and")
    assert "are read at 200 MB/s; `speechdp shard` rewrites them as contiguous ones" in said


def test_the_blocking_order_stands_still_and_only_that_one(tmp_path: Path) -> None:
    said = _said(tmp_path / "a", _late(_entry({"preprocess": 7.0}), "blocking-sort"))
    assert "With --order blocking-sort training of" in said
    assert "stops while data are read (6.5 % of the step time)" in said
    assert "Most of it is preprocessing: try --order pooled." in said
    assert "stops while" not in _said(tmp_path / "b", _late(_entry({"preprocess": 7.0}), "laplace"))


def test_other_runs_that_wait_are_named(tmp_path: Path) -> None:
    blocking = _late(None, "blocking-sort", period="4", frames_per_s=10.0)
    said = _said(tmp_path, MadeUpRun("a", period="16"), blocking)
    assert "With --order blocking-sort training of period 4 stops while" in said
    assert "a rank waits for data for over 2 % of the step time: period 4 (12.0\u00a0%)." in said


@pytest.mark.parametrize(
    "data",
    [
        None, 3, [], {}, {"stages_s": 7}, {"frames": 1},
        {"stages_s": {"read": "x", "nap": 1.0, "collate": -1.0}},
        {"stages_s": {"read": 10**400}, "threads": -2, "storage": ["a", {"b": 1}], "preprocess_on": 5},
        {"stages_s": {"read": 1.0}, "read_bytes": None, "computed_frames": 0, "threads": "many"},
    ],
)  # fmt: skip
def test_odd_and_missing_entries_never_stop_the_report(tmp_path: Path, data: Any) -> None:
    run = _late(data, feeders=[data, {"rank": "x", "data": data}])
    out = write_sweep(
        tmp_path / "sweep", [run, MadeUpRun("b", settings={"options": {"batch": 3}}, feeders=3)]
    )
    timing = json.loads((out / "late" / "timing.json").read_text())
    timing["ranks"][1].pop("data", None)
    (out / "late" / "timing.json").write_text(json.dumps(timing))
    assert read_run(out / "late").problems == ()
    report = write_report(out)
    assert "data wait" in _printed(report, 100)


def test_hostile_words_are_text(tmp_path: Path) -> None:
    entry = _entry({"read": 59.0}, storage=f"chunked {HOSTILE}\x1b[31m\n", preprocess_on=HOSTILE)
    feeders = [{"rank": 2, "host": HOSTILE, "data": entry}]
    report = write_report(write_run(_late(entry, HOSTILE, feeders=feeders), tmp_path))
    page = report.html.read_text()
    assert PageReader(page).tags.count("script") == 1  # our own
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    printed = _printed(report, 250)
    assert "[red]" in printed
    assert "\x1b[31m" not in printed
    assert len(list(csv.reader(io.StringIO(report.csv.read_text())))) == 2


def test_runs_that_are_past_their_best_are_named_and_one_alone_too(tmp_path: Path) -> None:
    fallen = MadeUpRun("a", period="4", last_gain=-0.3)
    rested = MadeUpRun("b", period="16", last_gain=-0.01)
    for folder, runs in (("1", [fallen, rested]), ("2", [fallen])):
        (caution,) = [c for c in _answer(tmp_path / folder, *runs).cautions if c.startswith("Past the best")]
        name = "period 4" if len(runs) > 1 else "model averaging, period 4"
        told = f"({MINUS}0.100 nats/frame after epoch 11, {MINUS}0.400 at the end)"
        assert caution.startswith(f"Past the best: {name} {told}. Such a model overfits")
    assert "Past the best" not in " ".join(_answer(tmp_path / "3", rested).cautions)


def test_means_of_the_last_epochs_are_the_runs_figures_and_told_beside_the_last_models(
    tmp_path: Path,
) -> None:
    runs = [MadeUpRun("a", period="4", last_gain=-0.005), MadeUpRun("b", period="16")]
    folder = write_sweep(tmp_path / "sweep", runs)
    path = folder / "a" / "metrics.jsonl"
    last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    mean = {**last, "averaged_epochs": 5, "heldout_log_prob": -0.2}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(mean) + "\n")
    sweep = read_sweep(folder)
    rows = sweep_figures(sweep, target_of_all(sweep.runs))
    averaged, other = rows
    assert averaged.score == -0.2 and averaged.values["log_prob"] == -0.2 and other.score == -0.4
    # What training reached, and when, is without the mean.
    assert averaged.best_score == pytest.approx(-0.395)
    assert [one.score for one in averaged.run.evaluations][-1] == -0.4
    assert averaged.frames_trained == last["frames"] and averaged.training_time_s == last["time_s"]
    cautions = find_answer(rows).cautions
    assert (
        "Final models are means of the last epochs' models (--average-epochs): "
        f"period 4 (mean of 5: {MINUS}0.200 nats/frame; last alone: {MINUS}0.400)."
    ) in cautions
    courses = [one for one in cautions if "Past the best" in one or "till improving" in one]
    assert not any("period 4 (" in one for one in courses)
    with path.open("a", encoding="utf-8") as file:  # as of a training that still learnt fast
        file.write(json.dumps({**mean, "heldout_log_prob": -0.6}) + "\n")
    sweep = read_sweep(folder)
    found = find_answer(sweep_figures(sweep, target_of_all(sweep.runs))).cautions
    told = f"period 4 (mean of 5: {MINUS}0.600 nats/frame; last alone: {MINUS}0.400, which is better)"
    assert any(told in one for one in found)
    assert not any("Past the best" in one for one in found)


def test_runs_that_were_still_improving_are_named_in_a_sweep(tmp_path: Path) -> None:
    risen = MadeUpRun("a", period="4", last_gain=0.0041)
    rested = MadeUpRun("b", period="16", last_gain=0.0039)
    (caution,) = [c for c in _answer(tmp_path / "1", risen, rested).cautions if "improving" in c]
    assert caution.startswith(
        "Still improving at the last evaluation: period 4 (+0.004 nats/frame). After more"
    )
    rested.last_gain = -0.02
    assert "improving" not in " ".join(
        _answer(tmp_path / "2", rested, MadeUpRun("c", last_gain=0.0)).cautions
    )
    assert "improving" not in " ".join(_answer(tmp_path / "3", risen).cautions)  # compared with nothing
    single = MadeUpRun("d", period="64", num_evaluations=1)
    assert "period 64 (" not in " ".join(_answer(tmp_path / "4", risen, single).cautions)
