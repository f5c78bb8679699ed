"""TensorBoard's files: each evaluation once, also after a resume; a disk that refuses them ends nothing."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from speechdp.comm.serial import SerialCommunicator
from speechdp.options.batch import BatchOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.run_files import Metrics
from speechdp.tasks.metrics import RECORDS, Metric
from speechdp.train.progress import SilentReporter
from speechdp.train.run import train_run
from speechdp.train.scalars import Scalars
from speechdp.train.session import Session
from tests.helpers.finished_run import evaluations
from tests.helpers.tiny_data import write_tiny_data

OPTIONS = TrainOptions(ModelOptions(layers=1, cells=4), BatchOptions(batch_size=4), epochs=3)
METRICS = RECORDS["acoustic"].metrics
TAGS = {
    "train/loss",
    "train/learning_rate",
    "train/frames_per_s",
    "held_out/log_prob_per_frame",
    "held_out/frame_accuracy",
    "held_out/frame_accuracy_no_silence",
}


def metrics(step: int, loss: float = 2.0) -> Metrics:
    held_out = {"log_prob": -2.5, "frame_accuracy": 0.5, "frame_accuracy_no_silence": 0.4}
    return Metrics(step / 6, step, 100 * step, 1.0, loss, 0.1, held_out, 100, frames_per_s=7.0 * step)


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of every scalar as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_a_later_start_takes_the_place_of_what_it_does_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    now = time.time()
    # The third goes on from step 6 on a host whose clock is behind, the second had no time for a checkpoint.
    for start, (after_step, clock, steps) in enumerate(
        [(0, now, (6, 12)), (6, now, (10, 15)), (6, now - 3600, (12, 18))]
    ):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        with Scalars(tmp_path, after_step, METRICS, notices.append) as scalars:
            for step in steps:
                scalars.add(metrics(step, loss=float(start)))
    assert notices == [] and set(shown(tmp_path)) == TAGS
    assert shown(tmp_path)["train/loss"] == [(6, 0.0), (12, 2.0), (18, 2.0)]
    assert shown(tmp_path)["train/frames_per_s"] == [(6, 42.0), (12, 84.0), (18, 126.0)]


class DeliberateError(Exception):
    """Ends the run."""


class Killed(SilentReporter):
    """Ends the run between an evaluation and its checkpoint."""

    def __init__(self, at_epoch: int) -> None:
        self._at_epoch = at_epoch

    def evaluated(self, metrics: Metrics, held_out: Sequence[Metric]) -> None:
        if metrics.epoch == self._at_epoch:
            raise DeliberateError


def test_a_resumed_run_shows_what_stands_in_metrics_jsonl(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    run = tmp_path / "run"

    def train(reporter: Any, *, resume: bool) -> None:
        session = Session(dataset, SerialCommunicator(), torch.device("cpu"), reporter)
        train_run(session, OPTIONS, run, resume=resume)

    for at_epoch, resume in ((1, False), (2, True)):  # the first before there is any checkpoint
        with pytest.raises(DeliberateError):
            train(Killed(at_epoch), resume=resume)
    train(SilentReporter(), resume=True)
    lines = evaluations(run)
    assert [line["step"] for line in lines] == [6, 12, 18]
    for steps in shown(run / "tensorboard").values():
        assert [step for step, _ in steps] == [6, 12, 18]
    assert shown(run / "tensorboard")["train/loss"] == [
        (line["step"], round(line["train_loss"], 4)) for line in lines
    ]


def test_the_mean_of_the_last_epochs_has_curves_of_its_own(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    run, options = tmp_path / "run", dataclasses.replace(OPTIONS, average_epochs=2)
    train_run(Session(dataset, SerialCommunicator(), torch.device("cpu"), SilentReporter()), options, run)
    (mean,) = [
        line
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "averaged_epochs" in line
    ]
    curves = shown(run / "tensorboard")
    assert set(curves) == TAGS | {tag.replace("held_out/", "held_out_mean/") for tag in TAGS}
    assert curves["held_out_mean/log_prob_per_frame"] == [(18, round(mean["heldout_log_prob"], 4))]
    assert [step for step, _ in curves["held_out/log_prob_per_frame"]] == [6, 12, 18]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_what_a_full_disk_refuses_is_written_when_there_is_space_again(tmp_path: Path) -> None:
    notices: list[str] = []
    with Scalars(tmp_path, 0, METRICS, notices.append) as scalars:
        scalars.add(metrics(6))
        (file,) = tmp_path.iterdir()
        file.rename(tmp_path / "kept")
        file.symlink_to("/dev/full")
        scalars.add(metrics(12))
        scalars.add(metrics(18))
        with (tmp_path / "kept").open("ab") as half:  # what a disk that is full may leave of it
            half.write(b"\x18\0\0\0")
        (tmp_path / "kept").rename(file)
        scalars.add(metrics(24))
    (notice,) = notices
    assert notice.startswith(
        f"{file}: cannot be written (No space left on device); free some space, then the"
    )
    assert [step for step, _ in shown(tmp_path)["train/loss"]] == [6, 12, 18, 24]


def test_what_the_disk_does_not_keep_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is only on its way when the checkpoint is on disk may be lost by a crash."""
    notices: list[str] = []
    kept: list[str] = []

    def fsync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_file():
            kept.append(path.name)
        if len(kept) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with Scalars(tmp_path, 0, METRICS, notices.append) as scalars:
        for step in (6, 12, 18):
            scalars.add(metrics(step))
    (file,) = tmp_path.iterdir()
    assert kept == [file.name] * 3 and "cannot be written (Input/output error)" in notices[0]
    assert [step for step, _ in shown(tmp_path)["train/loss"]] == [6, 12, 18]


class Listening(SilentReporter):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def test_a_run_goes_on_without_them(tmp_path: Path) -> None:
    run, reporter = tmp_path / "run", Listening()
    run.mkdir()
    (run / "tensorboard").touch()  # no folder, and no rights are needed to find that out
    dataset = write_tiny_data(tmp_path / "data")
    train_run(Session(dataset, SerialCommunicator(), torch.device("cpu"), reporter), OPTIONS, run)
    assert (run / "completed.json").exists()
    (notice,) = [text for text in reporter.notices if "tensorboard" in text]
    assert notice.startswith(f"{run / 'tensorboard'}: cannot be written (File exists); ")
    (line,) = (run / "notices.txt").read_text().splitlines()
    assert line.endswith(notice)
