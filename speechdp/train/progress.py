"""Progress shown to the user: a progress bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from speechdp.counting import epoch_text
from speechdp.parallel.run_files import Metrics
from speechdp.tasks.metrics import Metric

#: Seconds between log lines if the output is not a terminal, and between updates of the rate.
_LOG_INTERVAL_S = 10.0
_RATE_INTERVAL_S = 0.5


class Reporter(Protocol):
    """Receives a run's progress; rank 0 shows it, the other ranks are silent."""

    def notice(self, text: str) -> None:
        """Show one line."""

    def begin(self, num_epochs: int, epoch: float) -> None:
        """Training starts, or resumes, after `epoch` epochs."""

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        """A step of `frames` frames (of all ranks) is done; `loss` is this rank's loss, nats per frame."""

    def evaluated(self, metrics: Metrics, held_out: Sequence[Metric]) -> None:
        """An evaluation is done; `held_out` are the task's metrics."""

    def end(self) -> None:
        """Training has ended."""


class SilentReporter:
    """Shows nothing: ranks other than 0, and tests."""

    def notice(self, text: str) -> None:
        return None

    def begin(self, num_epochs: int, epoch: float) -> None:
        return None

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        return None

    def evaluated(self, metrics: Metrics, held_out: Sequence[Metric]) -> None:
        return None

    def end(self) -> None:
        return None


class ConsoleReporter(SilentReporter):
    """A progress bar with frames/s, loss and time left on a terminal; a log line every 10 s elsewhere."""

    def __init__(self, console: Console, label: str) -> None:
        self._console = console
        self._label = label
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._num_epochs = 1
        self._window_frames = 0
        self._window_start_s = 0.0

    def notice(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, num_epochs: int, epoch: float) -> None:
        self._num_epochs = num_epochs
        self._window_frames, self._window_start_s = 0, time.monotonic()
        if not self._console.is_terminal:
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("epoch {task.completed:.1f}/{task.total}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(self._label, total=num_epochs, rate="")
        self._bar.update(self._task, completed=epoch)
        self._bar.start()

    def step(self, epoch: float, frames: int, loss: float | None) -> None:
        self._window_frames += frames
        elapsed_s = time.monotonic() - self._window_start_s
        if elapsed_s < (_RATE_INTERVAL_S if self._bar else _LOG_INTERVAL_S):
            return
        rate = f"{self._window_frames / elapsed_s:,.0f} frames/s"
        if loss is not None:
            rate += f", loss {loss:.3f}"
        self._window_frames, self._window_start_s = 0, time.monotonic()
        if self._bar is None:
            self.notice(f"{self._label}: epoch {epoch:.2f}/{self._num_epochs}, {rate}")
        else:
            assert self._task is not None
            self._bar.update(self._task, completed=epoch, rate=rate)

    def evaluated(self, metrics: Metrics, held_out: Sequence[Metric]) -> None:
        judged = (
            f"{metric.name} {metric.number(metrics.held_out[metric.key])} {metric.unit}"
            for metric in held_out
            if metric.key in metrics.held_out
        )
        self.notice(
            f"{self._label}: epoch {epoch_text(metrics.epoch)}/{self._num_epochs}, "
            f"{metrics.frames_per_s:,.0f} frames/s, "
            f"train loss {metrics.train_loss:.3f}, {', '.join(judged)}"
        )
        self._window_frames, self._window_start_s = 0, time.monotonic()

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
