"""Run and record the jobs of a profile one after another, each on its own number of ranks."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speechdp.errors import RunError
from speechdp.experiments.arguments import train_arguments
from speechdp.experiments.jobs import LOGS, JobStarter
from speechdp.experiments.profile.derived import STEP, job_costs
from speechdp.experiments.profile.measured import rank_path
from speechdp.experiments.profile.plan import PlannedJob
from speechdp.experiments.profile.record import (
    FILE_NAME,
    KINDS,
    MODULES,
    JobEntry,
    ProfileJob,
    ProfileRecord,
    Settings,
    read_job,
    read_record,
    write_record,
)
from speechdp.experiments.record import COMPLETE, FAILED, PENDING, refuse_others
from speechdp.options.run import TrainOptions
from speechdp.report.kit import formatting
from speechdp.report.kit.formatting import milliseconds, rank_count

#: Settings that may differ between two commands for one folder, because they only describe.
_DESCRIPTIONS = ("command", "notes", "device")


@dataclass(frozen=True)
class ProfileRequest:
    """A profile to make.

    Attributes:
        data: data directory.
        out: folder of the profile.
        jobs: jobs to run, in order.
        settings: settings that all jobs share.
    """

    data: Path
    out: Path
    jobs: Sequence[PlannedJob]
    settings: Settings


class Profiler:
    """Makes a profile.  Finished jobs in the folder are kept.

    Args:
        print_line: prints a line of progress.
    """

    def __init__(
        self, request: ProfileRequest, starter: JobStarter, print_line: Callable[[str], None]
    ) -> None:
        self._request, self._starter, self._print_line = request, starter, print_line
        self._planned = {job.entry.name: job for job in request.jobs}
        entries = [dataclasses.replace(job.entry, state=PENDING) for job in request.jobs]
        self._record = ProfileRecord(request.settings, tuple(entries))

    def run(self) -> ProfileRecord:
        """Run all jobs that are not done; return the record of all jobs.

        Raises:
            JobStopped: a signal requested a stop; the same command continues.
            ConfigError: the folder holds another profile.
            RunError: the disk is full.
        """
        self._update(merged(self._request.out, self._record, self._print_line))
        for index, job in enumerate(self._record.jobs):
            if job.state == PENDING:
                self._carry_out(index)
        return self._record

    def _update(self, record: ProfileRecord) -> None:
        self._record = record
        write_record(self._request.out, record)

    def _carry_out(self, index: int) -> None:
        entry = self._record.jobs[index]
        place = f"[{index + 1}/{len(self._record.jobs)}] {entry.name}"
        same = [job for job in self._record.jobs[:index] if job.folder == entry.folder]
        if same:
            self._update(self._record.with_job(index, state=same[0].state, message=same[0].message))
            self._print_line(f"{place}: is {same[0].name}")
            return
        self._print_line(f"{place}: {rank_count(entry.ranks)}, {entry.steps} steps")
        start_s = time.monotonic()
        job = self._run(self._planned[entry.name])
        message = job if isinstance(job, str) else None
        changes: dict[str, Any] = {"wall_s": time.monotonic() - start_s, "message": message or ""}
        self._update(self._record.with_job(index, state=FAILED if message else COMPLETE, **changes))
        if isinstance(job, str):
            self._print_line(f"{place}: failed: {message}")
            return
        self._note_device(job)
        self._print_line(f"{place}: {job_summary(job, self._request.settings.warmup_steps)}")

    def _run(self, job: PlannedJob) -> ProfileJob | str:
        """Run a job; return its records, or the cause of failure."""
        out, entry = self._request.out, job.entry
        if (out / entry.folder).exists():  # left by a job that failed or was stopped
            shutil.rmtree(out / entry.folder)
        words = ["profile", str(self._request.data.absolute()), str(out.absolute()), f"--job={entry.name}"]
        words += [f"--steps={entry.steps}", "--warmup=0", *train_arguments(job.options)]
        log = out / LOGS / f"{entry.name}.log"
        message = self._starter.run(job.num_processes, words, log, folder=out / entry.folder)
        missing = [rank for rank in range(entry.ranks) if not rank_path(out / entry.folder, rank).is_file()]
        if message is None and missing:
            return f"rank {missing[0]} has left no record in {out / entry.folder} (is OUT a shared folder?)"
        return message or _recorded(entry, out)

    def _note_device(self, job: ProfileJob) -> None:
        device = (job.facts or {}).get("device")
        if isinstance(device, str) and device != self._record.settings.device:
            settings = dataclasses.replace(self._record.settings, device=device)
            self._update(dataclasses.replace(self._record, settings=settings))


def merged(out: Path, record: ProfileRecord, print_line: Callable[[str], None]) -> ProfileRecord:
    """Return `record` with the finished jobs that are in OUT.

    A job is finished if its files can be read; one with missing files is measured again.

    Args:
        print_line: prints which jobs are measured again.

    Raises:
        ConfigError: OUT holds a profile with other settings.
    """
    if not (out / FILE_NAME).is_file():
        return record
    before = read_record(out)
    _check_same(out, before.settings, record.settings)
    done = {}
    for job in before.jobs:
        if job.state != COMPLETE:
            continue
        if isinstance(found := _recorded(job, out), str):
            print_line(f"{job.name}: was finished, but {found}")
        else:
            done[job.name] = job
    jobs = {job.name: done[job.name] if _is_same(done.get(job.name), job) else job for job in record.jobs}
    jobs = {**{name: job for name, job in done.items() if name not in jobs}, **jobs}
    ordered = sorted(jobs.values(), key=lambda job: (KINDS.index(job.kind), job.ranks))
    settings = dataclasses.replace(record.settings, device=before.settings.device)
    return ProfileRecord(settings, tuple(ordered))


def _recorded(job: JobEntry, out: Path) -> ProfileJob | str:
    """Return a job's records, or why they cannot be read."""
    try:
        return read_job(job, out / job.folder)
    except RunError as error:
        return str(error)


def _is_same(done: JobEntry | None, job: JobEntry) -> bool:
    keys = ("ranks", "batch_size", "loader", "folder", "steps")
    return done is not None and all(getattr(done, key) == getattr(job, key) for key in keys)


def _check_same(out: Path, before: Settings, now: Settings) -> None:
    left_out = (*_DESCRIPTIONS, "options")
    old, new = (
        {key: value for key, value in asdict(settings).items() if key not in left_out}
        | dict(settings.options or {})  # these also contain a device: the requested one
        for settings in (before, now)
    )
    refuse_others(out / FILE_NAME, old, new, _named, TrainOptions().to_json())


def _named(key: str) -> str:
    """Return the name of a setting; that of an option as on the command line."""
    return {"steps": "--steps", "warmup_steps": "--warmup", "threads": "--threads"}.get(key, key)


def job_summary(job: ProfileJob, warmup: int) -> str:
    """Return one line with the time of a step, or of the module that ran alone, as in the tables."""
    costs = job_costs(job, warmup)
    if job.kind in MODULES and job.kind in costs:
        return f"{milliseconds(costs[job.kind].total_s)} ms per step ({job.kind} alone)"
    longest = sorted(set(costs) - {STEP}, key=lambda name: -costs[name].share)[:3]
    parts = [f"{name} {formatting.percent(costs[name].share)} %" for name in longest]
    return f"{milliseconds(costs[STEP].total_s)} ms per step ({', '.join(parts)})"
