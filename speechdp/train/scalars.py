"""The metrics of a run as TensorBoard scalars: one event file per start, in RUN/tensorboard."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from speechdp.comm.environment import host_name
from speechdp.files import cannot_be_written, sync_name, sync_open
from speechdp.parallel.run_files import Metrics
from speechdp.tasks.metrics import Metric

_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


class Scalars:
    """Writes evaluations for TensorBoard (rank 0 only); an unwritable file causes only a notice.

    Each evaluation is on disk before the next checkpoint, like a line of metrics.jsonl.  torch's
    SummaryWriter would write minutes later, in a thread whose errors are raised in whatever is called next.

    Args:
        folder: RUN/tensorboard.
        after_step: last step whose evaluation counts.  TensorBoard drops what earlier starts wrote for later
            steps, which are trained again.
        held_out: the task's metrics.
        notice: called, at most once, with a line about a file that cannot be written.
    """

    def __init__(
        self, folder: Path, after_step: int, held_out: Sequence[Metric], notice: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._held_out = held_out
        self._notice = notice
        self._is_noticed = False
        self._path: Path | None = None
        self._written_bytes = 0
        self._begun_after, self._began = after_step, time.time()
        self._unwritten = b""

    def add(self, metrics: Metrics) -> None:
        """Record an evaluation."""
        self._add(_records(metrics, self._held_out))

    def add_mean(self, step: int, values: Mapping[str, float]) -> None:
        """Record the task's metrics of the mean of several epochs' models, made after the last step."""
        self._add(_event(step, _of_task(values, self._held_out, "held_out_mean")))

    def _add(self, records: bytes) -> None:
        if not self._unwritten and self._written_bytes == 0:
            self._unwritten = _first_records(self._began, self._begun_after)
        self._unwritten += records
        self._write()

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None and self._unwritten:
            self._write()

    def _write(self) -> None:
        """Write the pending records; after a failure they are tried again with the next evaluation."""
        try:
            if self._path is None:
                self._path = self._make_file()
            with self._path.open("r+b") as file:
                # Not appended: half a record, left by a full disk, would make the rest unreadable.
                file.seek(self._written_bytes)
                file.write(self._unwritten)
                file.flush()
                sync_open(file.fileno())
        except OSError as error:
            if not self._is_noticed:
                then = "the next evaluation adds what is missing; training continues"
                self._notice(cannot_be_written(self._path or self._folder, error, then))
                self._is_noticed = True
        else:
            self._written_bytes += len(self._unwritten)
            self._unwritten = b""

    def _make_file(self) -> Path:
        """Make a file that TensorBoard, which sorts by name, reads after those of earlier starts."""
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(match[1]) for path in self._folder.iterdir() if (match := _NAME.match(path.name))]
        # Another host's clock may be behind, and two starts may fall into the same second.
        number = max(int(time.time()), 1 + max(numbers, default=0))
        path = self._folder / f"events.out.tfevents.{number:010d}.{host_name()}.{os.getpid()}"
        path.touch(exist_ok=False)
        sync_name(path)
        return path


def _first_records(began: float, after_step: int) -> bytes:
    """Return the first records of a file; made only once there is something to write, to start runs fast."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415 (slow to import)

    start = SessionLog(status=SessionLog.START)
    return _encoded(
        Event(wall_time=began, file_version="brain.Event:2"),
        Event(wall_time=began, step=after_step + 1, session_log=start),
    )


def _of_task(values: Mapping[str, float], metrics: Sequence[Metric], group: str) -> dict[str, float]:
    """Return the available metrics under the names that TensorBoard shows."""
    return {
        f"{group}/{metric.key}{'_per_frame' if metric.is_per_frame else ''}": values[metric.key]
        for metric in metrics
        if metric.key in values
    }


def _records(metrics: Metrics, held_out: Sequence[Metric]) -> bytes:
    values = {
        "train/loss": metrics.train_loss,
        "train/learning_rate": metrics.learning_rate,
        "train/frames_per_s": metrics.frames_per_s,
        **_of_task(metrics.held_out, held_out, "held_out"),
    }
    return _event(metrics.step, values)


def _event(step: int, values: Mapping[str, float]) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 (slow to import)
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415

    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return _encoded(Event(wall_time=time.time(), step=step, summary=summary))


def _encoded(*events: object) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415 (slow to import)

    file = io.BytesIO()
    writer = RecordWriter(file)
    for event in events:
        writer.write(event.SerializeToString())  # type: ignore[attr-defined]
    return file.getvalue()
