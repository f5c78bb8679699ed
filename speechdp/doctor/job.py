"""Run the probe by the launcher, collect its reports, and end it when no more arrive."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import psutil

from speechdp.doctor.wire import ALL, Report, ReportListener
from speechdp.launching.faults import first_cause
from speechdp.launching.launcher_output import LauncherOutput

#: Added to every limit, s: lines take time to arrive, and a rank's own limit is to come first.
_MARGIN_S = 10.0
_ENDING_S = 5.0
_MOST_LINES = 40


@dataclass
class ProbeRecord:
    """What one rank has reported.

    Attributes:
        begun, ended: parts of the probe that it has begun and ended, in order.
        facts: results of each part.
    """

    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def open_part(self) -> str:
        """The part that the rank is in; "" between two parts."""
        return self.begun[-1] if len(self.begun) > len(self.ended) else ""


@dataclass
class JobRecord:
    """The course of the probe's job.

    Attributes:
        num_ranks: number of ranks requested.
        ranks: what each rank reported, by the launcher's numbers.
        exit_code: exit code of the launcher; None: it was ended because no more reports arrived.
        output: first lines that the launcher and the ranks printed besides reports.
        cause: which rank or host failed and how, if the launcher reported it; else "".
    """

    num_ranks: int
    ranks: dict[int, ProbeRecord] = field(default_factory=dict)
    exit_code: int | None = None
    output: list[str] = field(default_factory=list)
    cause: str = ""

    def note(self, report: Report) -> None:
        """Record a report."""
        record = self.ranks.setdefault(report.rank, ProbeRecord())
        if report.phase == ALL:
            # It has ended these parts, also if a line that said so was torn by the output of other ranks.
            record.begun, record.ended = [*report.facts], [*report.facts]
            record.facts.update(report.facts)
        elif report.is_end:
            record.ended.append(report.phase)
            record.facts[report.phase] = dict(report.facts)
        else:
            record.begun.append(report.phase)


def run_probe(
    argv: Sequence[str], environment: Mapping[str, str], num_ranks: int, limit_s: float
) -> JobRecord:
    """Run the job to its end, or end it when no report arrives for longer than a part may take.

    Args:
        argv, environment: command line and environment of the launcher.
        num_ranks: number of ranks that the launcher starts.
        limit_s: time limit for starting, and for each part that reports no longer one, s.
    """
    job = JobRecord(num_ranks)
    try:
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        job.exit_code, job.cause = 127, f"{argv[0]} cannot be started ({error.strerror})"
        return job
    assert process.stdout is not None and process.stderr is not None
    lines: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
    readers = [
        threading.Thread(target=_read, args=(name, stream, lines), daemon=True)
        for name, stream in (("out", process.stdout), ("err", process.stderr))
    ]
    try:
        for reader in readers:
            reader.start()
        if _read_output(job, lines, limit_s):
            job.exit_code = process.wait(_MARGIN_S)
    except subprocess.TimeoutExpired:
        pass  # the launcher has closed its output, but does not end
    finally:
        _end(process)
    return job


def _read_output(job: JobRecord, lines: queue.SimpleQueue[tuple[str, bytes | None]], limit_s: float) -> bool:
    """Read lines until both streams have ended; return False if no report arrived for too long."""
    listener, launcher = ReportListener(), LauncherOutput()
    limits_s = {-1: limit_s}
    last_report_s = time.monotonic()
    open_streams = 2
    while open_streams:
        try:
            left_s = last_report_s + max(limits_s.values()) + _MARGIN_S - time.monotonic()
            name, line = lines.get(timeout=max(0.1, left_s))
        except queue.Empty:
            break
        if line is None:
            open_streams -= 1
            continue
        report = listener.read(line.decode(errors="replace")) if name == "out" else None
        if report is not None:
            job.note(report)
            limits_s[report.rank] = max(limit_s, report.limit_s)
            last_report_s = time.monotonic()
        elif name == "err" or b"@speechdp-doctor" not in line:
            _keep(job, launcher.feed(line) if name == "err" else line)
    _keep(job, launcher.end())
    cause = first_cause(launcher.faults)
    job.cause = "" if cause is None or cause.kind == "reported" else cause.describe()
    return open_streams == 0


def _keep(job: JobRecord, shown: bytes) -> None:
    text = shown.decode(errors="replace")
    job.output += [line.strip() for line in text.splitlines() if line.strip()]
    del job.output[_MOST_LINES:]


def _read(name: str, stream: IO[bytes], lines: queue.SimpleQueue[tuple[str, bytes | None]]) -> None:
    with stream:
        for line in stream:
            lines.put((name, line))
    lines.put((name, None))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what still runs: the launcher by SIGTERM, so that it ends ranks elsewhere, then its descendants."""
    family = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in family:
        # The child may have ended by itself.
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(family, timeout=_ENDING_S)
