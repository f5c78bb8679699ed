"""The benchmark of Kaldi's way: its programs train and average as they should, its times add up."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from benchmarks.models.acoustic import make_acoustic_model
from benchmarks.papers import (
    hpcs2017_predicted,
    kaldi_way,
    kaldi_way_average,
    kaldi_way_train,
    published_scaling,
)
from benchmarks.papers.hpcs2017 import Task, frame_count, parse, write_run
from benchmarks.papers.hpcs2017_plot import draw
from benchmarks.papers.hpcs2017_results import Result, count, read_our_run, saved_shares, write_csv
from speechdp.data.loading.source_options import SourceOptions, open_local_source
from speechdp.data.plan.epoch_plan import plan_epoch
from speechdp.data.shards.dataset import Dataset
from speechdp.options.run import TrainOptions
from speechdp.parallel.period import Period
from speechdp.parallel.strategy import Progress
from speechdp.strategies.model_averaging import ModelAveraging
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.model_file import ClassCounts, load_model, save_model
from speechdp.train.build import make_replica
from tests.helpers.options import options_with
from tests.helpers.tiny_data import write_tiny_data


def tiny_options(**given: object) -> TrainOptions:
    """Options of two short epochs of a tiny model."""
    values = {"layers": 1, "cells": 8, "dropout": 0.0, "batch_size": 4, "optimizer": "sgd", "epochs": 2}
    return options_with(**{**values, "learning_rate": 0.1, **given}).resolve(1)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_tiny_data(tmp_path / "data")


def setting(dataset: Dataset, exp: Path, options: TrainOptions, jobs: int, period: int) -> kaldi_way.Setting:
    return kaldi_way.Setting(dataset.path, options, jobs, period, exp)


def test_the_averaging_program_writes_the_mean(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    models = [
        {"a": rng.standard_normal((3, 2)).astype(np.float32), "b": np.array([n], np.float32)}
        for n in range(3)
    ]
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for path, model in zip(paths, models, strict=True):
        safetensors.numpy.save_file(model, path)
    out, report = tmp_path / "mean.safetensors", tmp_path / "report.json"
    kaldi_way_average.main([str(time.monotonic()), str(report), str(out), *map(str, paths)])
    mean = safetensors.numpy.load_file(out)
    np.testing.assert_allclose(mean["a"], sum(m["a"] for m in models) / 3, atol=1e-7)
    assert mean["b"].tolist() == [1.0] and mean["b"].dtype == np.float32
    assert json.loads(report.read_text())["seconds"]["average"] > 0


def test_one_job_and_one_iteration_is_plain_training(tmp_path: Path, dataset: Dataset) -> None:
    options = tiny_options(momentum=0.9)
    exp = tmp_path / "exp"
    (frames,) = kaldi_way.prepare(setting(dataset, exp, options, 1, 10**9))
    assert frames == 2 * dataset.splits["train"].frames
    threads = torch.get_num_threads()
    try:
        kaldi_way_train.main([str(exp), "0", "0", str(time.monotonic())])
    finally:
        torch.set_num_threads(threads)
    trained = safetensors.torch.load_file(exp / "0.0.safetensors")
    expected = _train_here(dataset, options)
    begun = safetensors.torch.load_file(exp / "0.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-6)
        assert not torch.equal(begun[name], value)
    seconds = json.loads((exp / "log" / "0.0.json").read_text())["seconds"]
    assert set(seconds) <= set(kaldi_way.PARTS)


def _train_here(dataset: Dataset, options: TrainOptions) -> dict[str, torch.Tensor]:
    """Train on what the loader of `speechdp train` reads."""
    model = make_acoustic_model(dataset, options)
    replica, schedule = make_replica(model, options), options.schedule()
    source = open_local_source(dataset, options.source("train", augmented=True), SourceOptions())
    for epoch in range(options.num_epochs):
        plan = plan_epoch(source.index, options.plan(), epoch, 1)
        for step in range(plan.num_steps):
            batch = source.batch(plan.ranks[0].batch(step))
            replica.set_learning_rate(schedule.at(epoch + step / plan.num_steps))
            AcousticTask().loss(model, batch).total.backward()
            replica.apply_gradients(batch.num_frames)
    source.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_iterations_end_where_model_averaging_averages() -> None:
    rng = np.random.default_rng(1)
    frames = rng.integers(50, 200, 40).astype(float).tolist()
    strategy = ModelAveraging(period=Period.parse("500f"))
    strategy._last_frames = done = 0.0
    ends = []
    for step, each in enumerate(frames, start=1):
        done += each
        if strategy.is_due(Progress(step, done, 0.0, 0.0, 1)):
            ends.append(step)
            strategy._last_frames = done
    parts = kaldi_way.cut_into_iterations(frames, 500)
    assert [part.stop for part in parts if part.stop in ends] == ends
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(40))
    assert kaldi_way.cut_into_iterations([100.0], 1000) == [slice(0, 1)]


def test_kaldis_way_runs_and_its_model_can_be_decoded_with(tmp_path: Path, dataset: Dataset) -> None:
    options, exp = tiny_options(epochs=1), tmp_path / "exp"
    one = setting(dataset, exp, options, 2, 10**9)
    (iteration,) = kaldi_way.train(one, kaldi_way.prepare(one))
    assert iteration.frames == dataset.splits["train"].frames
    assert sum(iteration.seconds.values()) == pytest.approx(iteration.total_s)
    assert iteration.seconds["start"] > iteration.seconds["read_model"] > 0
    assert not list(exp.glob("0.[01].safetensors"))  # the jobs' models have gone
    held_out = kaldi_way.HeldOutSplit(dataset.path, options)
    assert held_out.log_prob(exp / "1.safetensors") > held_out.log_prob(exp / "0.safetensors")

    like = tmp_path / "ours"
    like.mkdir()
    counts = ClassCounts(np.ones(dataset.num_classes, np.int64), np.ones(dataset.num_classes, np.int64))
    facts = {"feature_dim": dataset.feature_dim, "num_classes": dataset.num_classes}
    save_model(like, make_acoustic_model(dataset, options), counts, facts)
    write_run(exp, like, held_out.load(exp / "1.safetensors"))
    loaded = load_model(exp, torch.device("cpu"))
    weights = safetensors.torch.load_file(exp / "1.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in loaded.model.state_dict().items())


def test_a_program_that_fails_is_named(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = setting(dataset, tmp_path / "exp", tiny_options(epochs=1), 1, 10**9)
    frames = kaldi_way.prepare(one)
    (tmp_path / "kaldi_way_train.py").write_text("raise SystemExit('the disk is full')")
    monkeypatch.setattr(kaldi_way, "_PROGRAMS", tmp_path)
    with pytest.raises(SystemExit, match=r"kaldi_way_train\.py .* ended with 1\nthe disk is full"):
        kaldi_way.train(one, frames)


def test_options_survive_their_json(tmp_path: Path) -> None:
    options = tiny_options(alignments=tmp_path, max_gradient_norm=0.5)
    values = kaldi_way_train.options_to_json(options)
    assert kaldi_way_train.options_from_json(TrainOptions, json.loads(json.dumps(values))) == options


def _our_run(run_dir: Path) -> Path:
    """Write a run of two ranks and two steps: 3 s of start, 1 s of evaluation, 0.5 s of checkpoints."""
    (run_dir / "timeline").mkdir(parents=True)
    for rank, comms in enumerate(((0.1, 0.4), (0.3, 0.2))):
        steps = [
            {"step": i + 1, "epoch": 0, "t": 1.0 + i, "wall": 1.0, "frames": 10,
             "spans": [["data_wait", 0.0, 0.1], ["forward", 0.1, 0.2], ["backward", 0.3, 0.2],
                       ["comm", 0.5, comm], ["update", 0.9, 0.05]]}
            for i, comm in enumerate(comms)
        ]  # fmt: skip
        events = [{"event": "eval", "t": 3.0, "wall": 1.0}, {"event": "checkpoint", "t": 4.0, "wall": 0.5}]
        lines = [json.dumps(record) for record in (*steps, *events)]
        (run_dir / "timeline" / f"rank-{rank:04}.jsonl").write_text("\n".join(lines) + "\n")
    metrics = {"epoch": 1.0, "step": 2, "frames": 40, "time_s": 2.0, "heldout_log_prob": -1.5}
    (run_dir / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return run_dir


def test_our_times_add_up(tmp_path: Path) -> None:
    result = read_our_run(_our_run(tmp_path / "run"), 600_000, 1, 6.5)
    assert result.total_s == pytest.approx(5.5)  # no evaluation
    assert sum(result.seconds.values()) == pytest.approx(result.total_s)
    expected = {"start": 3.0, "load": 0.2, "compute": 0.9, "write": 0.5, "average": 0.3, "wait": 0.2}
    assert {name: result.seconds[name] for name in expected} == pytest.approx(expected)
    assert result.curve == [(40, pytest.approx(5.5), -1.5)]


def _result(way: str, total_s: float, start_s: float, load_s: float) -> Result:
    seconds = {"start": start_s, "load": load_s, "preprocess": 0.0, "compute": total_s - start_s - load_s}
    return Result(way, 600_000, 4, total_s, seconds, [(10, 1.0, -2.0), (20, 2.0, -1.0)], 0.05)


def test_saved_shares() -> None:
    results = [_result("kaldi", 100.0, 41.2, 10.0), _result("ours", 40.0, 4.3, 0.0)]
    # With 4 starts of 0.3 s Kaldi's way takes 60 s, 50 s without loading; ours takes 36 s with one.
    assert saved_shares(results, 600_000) == pytest.approx(
        {
            "saved_at_600k": 1 - 40 / 100,
            "saved_at_600k_kaldi_start_0.3s": 1 - 40 / 60,
            "saved_at_600k_both_starts_0.3s": 1 - 36 / 60,
            "saved_at_600k_both_starts_0.3s_loading_hidden": 1 - 36 / 50,
        }
    )


def test_saved_shares_are_medians_over_rounds() -> None:
    results = [
        _result(way, total_s, 1.0, 0.0)
        for total_s, ours_s in ((100.0, 50.0), (80.0, 60.0), (100.0, 60.0))
        for way, total_s in (("kaldi", total_s), ("ours", ours_s))
    ]
    assert saved_shares(results, 600_000)["saved_at_600k"] == pytest.approx(0.4)


def test_results_are_kept_and_drawn(tmp_path: Path) -> None:
    results = [_result("kaldi", 100.0, 41.2, 10.0), _result("ours", 40.0, 4.0, 0.0)]
    results[0].write(tmp_path / "r.json")
    assert Result.read(tmp_path / "r.json") == results[0]
    assert Result.read(tmp_path / "none.json") is None
    write_csv(tmp_path / "r.csv", results)
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    assert [(row["way"], row["start_s"]) for row in rows] == [("kaldi", "41.2"), ("ours", "4.0")]
    draw(tmp_path / "r.png", results)
    assert (tmp_path / "r.png").stat().st_size > 5_000


def test_frames_an_iteration_are_those_of_all_jobs(dataset: Dataset) -> None:
    task = Task(dataset.path, tiny_options(), [], jobs=2, frames=2_310_000)
    assert (task.num_iterations(600_000), task.period_frames(600_000)) == (4, 288_750)
    assert task.num_iterations(9_000_000) == 1
    assert [frame_count(text) for text in ("50k", "1.2m", "700")] == [50_000, 1_200_000, 700]
    assert [count(frames) for frames in (50_000, 1_200_000)] == ["50k", "1.2m"]


def test_what_stands_behind_two_dashes_goes_to_train() -> None:
    given = parse(["DATA", "--frames-per-iteration", "50k,1m", "--", "--cells", "9"])
    assert given.frames_per_iteration == [50_000, 1_000_000] and given.options == ["--cells", "9"]
    assert parse(["DATA"]).total_frames == 2_400_000


def test_the_restart_that_explains_a_share_saves_it() -> None:
    ways = hpcs2017_predicted.Ways(ours=8.0, kaldi=7.0)
    assert ways.saved(ways.explaining(0.549)) == pytest.approx(0.549)
    assert ways.saved(9.0) == pytest.approx(0.5)


def test_only_restarts_save_more_the_more_often_one_averages() -> None:
    assert 15e6 < hpcs2017_predicted.paper_parameters() < 25e6
    often, seldom = (
        hpcs2017_predicted.at_other_frequencies(frames, 1.25e8) for frames in (150_000, 1_200_000)
    )
    reported = hpcs2017_predicted.REPORTED
    assert min(often[0]) > reported > max(seldom[0])
    # What is there for every frame is saved alike, and the average over the link comes more often.
    assert max(often[1]) < reported < min(seldom[1])


def test_a_known_training_predicts_others_of_the_same_phases() -> None:
    """Two ranks, 100 steps of 10 frames and 0.1 s, of a job 0.08 s; restarts of 1.5 s, one start of 3 s."""
    run = dataclasses.replace(published_scaling.run_of(0.1, 0.0, 10), nbytes=4.0)
    seconds = {"compute": 7.0, "load": 0.5, "preprocess": 0.5, "start": 4.0, "average": 2.0, "wait": 0.0}
    seconds |= {"read_model": 0.0, "write": 0.0, "other": 0.0}
    kaldi = Result("kaldi", 500, 4, 14.0, seconds, [(2000, 14.0, -1.0)])
    ours = Result("ours", 500, 4, 13.0, {"average": 0.0, "wait": 0.0}, [(2000, 13.0, -1.0)])
    for iterations in (2, 4, 20):
        totals = hpcs2017_predicted.predicted_totals({"kaldi": kaldi, "ours": ours}, run, iterations)
        assert totals["kaldi"] == pytest.approx(8.0 + 1.5 * iterations, rel=0.01)
        assert totals["ours"] == pytest.approx(13.0, rel=0.01)


def _finish(out: Path, number: int, way: str, frames: int) -> None:
    folder = out / f"round-{number}" / f"{way}-{frames}"
    folder.mkdir(parents=True)
    Result(way, frames, 4, 1.0, {}, [(1, 1.0, -1.0)]).write(folder / "result.json")


def test_rounds_that_are_not_finished_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, frames in ((1, 50_000), (1, 600_000), (2, 600_000), (3, 50_000)):
        for way in ("ours", "kaldi"):
            _finish(tmp_path, number, way, frames)
    _finish(tmp_path, 2, "ours", 50_000)
    (tmp_path / "round-2" / "kaldi-50000").mkdir()
    _finish(tmp_path, 3, "kaldi", 600_000)
    (tmp_path / "round-4" / "ours-600000").mkdir(parents=True)
    first, second = hpcs2017_predicted.rounds_of(tmp_path, 600_000)
    assert (first.folder.name, list(first.pairs)) == ("round-1", [50_000, 600_000])
    assert (second.folder.name, list(second.pairs)) == ("round-2", [600_000])
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == [
        f"{tmp_path}/round-2: passed over at 50k frames an iteration, not finished",
        f"{tmp_path}/round-3: passed over as a whole, not finished at 600k frames an iteration",
        f"{tmp_path}/round-4: passed over as a whole, not finished at 600k frames an iteration",
    ]


def test_other_frequencies_than_the_one_asked_for_are_named(tmp_path: Path) -> None:
    for way in ("ours", "kaldi"):
        _finish(tmp_path, 1, way, 20_000)
        _finish(tmp_path, 1, way, 40_000)
    with pytest.raises(SystemExit, match=r"with 20k, 40k frames .* not with 600k; choose by --from 40k$"):
        hpcs2017_predicted.rounds_of(tmp_path, 600_000)


def test_a_pair_that_is_alone_predicts_nothing(tmp_path: Path) -> None:
    for way in ("ours", "kaldi"):
        _finish(tmp_path, 1, way, 600_000)
    with pytest.raises(SystemExit, match=r"beside 600k .* others in --frames-per-iteration, too$"):
        hpcs2017_predicted.rounds_of(tmp_path, 600_000)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_without_a_finished_pair_is_told_in_a_line(
    tmp_path: Path,
    is_there: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    if is_there:
        _finish(out, 1, "ours", 600_000)
    monkeypatch.setattr("sys.argv", ["hpcs2017_predicted.py", "--measured", str(out)])
    with pytest.raises(SystemExit, match=r"out: no round-\*/ has a result.json of both ways"):
        hpcs2017_predicted.main()
    assert capsys.readouterr().out == ""  # told before what needs no OUT


def test_what_a_folder_holds_is_predicted_from_one_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarts of 1.5 s and 8 s of the jobs' own work; at 50k ours took a tenth longer than it should."""
    run = dataclasses.replace(published_scaling.run_of(0.1, 0.0, 10), nbytes=4.0)
    monkeypatch.setattr(hpcs2017_predicted, "measured_run", lambda _: run)
    monkeypatch.setattr(hpcs2017_predicted, "read_run", lambda folder: folder)
    parts = dict.fromkeys(("read_model", "load", "preprocess", "write", "average", "wait", "other"), 0.0)
    for frames, iterations, ours_s in ((600_000, 4, 13.0), (50_000, 20, 14.3)):
        kaldi_s = 8.0 + 1.5 * iterations
        for way, total_s in (("kaldi", kaldi_s), ("ours", ours_s)):
            seconds = {**parts, "compute": 8.0, "start": 1.5 * iterations}
            folder = tmp_path / "round-1" / f"{way}-{frames}"
            folder.mkdir(parents=True)
            Result(way, frames, iterations, total_s, seconds, [(2000, total_s, -1.0)]).write(
                folder / "result.json"
            )
    rounds = hpcs2017_predicted.rounds_of(tmp_path, 600_000)
    errors = hpcs2017_predicted.show_measured(rounds, 600_000)
    assert errors["worst_error"] == pytest.approx(1 - 13.0 / 14.3, rel=0.05)
    assert errors["median_error"] == pytest.approx(errors["worst_error"] / 2, rel=0.1)
    assert errors["saved_error"] == pytest.approx(1.3 / 38.0, rel=0.1)
