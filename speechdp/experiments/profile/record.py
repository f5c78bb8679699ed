"""profile.json: settings and jobs of a profile, and functions to read them (docs/profile.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechdp.errors import RunError
from speechdp.experiments.checked import checked_fields
from speechdp.experiments.profile.measured import (
    FACTS_NAME,
    FUNCTIONS,
    MEMORY_NAME,
    Memory,
    RankRecord,
    StepRecord,
    rank_path,
    read_json,
    read_memory,
    read_rank,
)
from speechdp.experiments.record import COMPLETE, STATES, check_format, reading, write_record_file
from speechdp.json_input import parse_json
from speechdp.report.runs.records import check_beside

if TYPE_CHECKING:
    from speechdp.report.runs.samples import Samples

FILE_NAME = "profile.json"

#: Kinds of jobs: the whole step with a constant batch per rank (weak) or over all ranks (strong), and kinds
#: of trainloader. Jobs of single modules have the module's name.
WEAK, STRONG, BLOCKING, POOLED, FED = "weak", "strong", "blocking", "pooled", "fed"
MODULES = ("encoder", "decoder", "postproc", "output")
#: Kinds of jobs that compare trainloaders; `--loader-steps` sets their steps.
LOADER_KINDS = (BLOCKING, POOLED, FED)
KINDS = (WEAK, STRONG, *MODULES, *LOADER_KINDS)


def in_order(functions: set[str]) -> list[str]:
    """Return functions in the order of a step; unknown ones last, by name."""
    known = [name for name in FUNCTIONS if name in functions]
    return known + sorted(functions - set(FUNCTIONS))


@dataclass(frozen=True)
class JobEntry:
    """A job as profile.json lists it.

    Attributes:
        name: name, e.g. "weak-2".
        kind: one of KINDS.
        ranks: number of training ranks, without feeders.
        batch_size: utterances or segments per rank and step; 0: batches are filled by frames.
        loader: "pooled", "blocking-sort", ..., "none" for a single module.
        folder: folder beside profile.json.
        steps: steps of each rank.
        state: pending, complete or failed.
        message: cause of failure.
        wall_s: time of the job including its start, s.
    """

    name: str
    kind: str
    ranks: int
    batch_size: int
    loader: str
    folder: str
    steps: int = 0
    state: str = COMPLETE
    message: str = ""
    wall_s: float | None = None


@dataclass(frozen=True)
class ProfileJob:
    """A job and the records of its ranks, which are empty if it is pending or failed.

    Attributes:
        entry: the job's entry in profile.json.
        path: folder of the job.
        rank_records: records by rank.
        memory: memory; None if not recorded.
        facts: content of job.json: device, hosts, threads, parameters, ...
        sample_paths: files of the sampler, one for each host.
    """

    entry: JobEntry
    path: Path
    rank_records: tuple[RankRecord, ...] = ()
    memory: Memory | None = None
    facts: Mapping[str, Any] | None = None
    sample_paths: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Name of the job, e.g. "weak-2"."""
        return self.entry.name

    @property
    def kind(self) -> str:
        """Kind of the job, e.g. "weak"."""
        return self.entry.kind

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self.entry.ranks

    @property
    def steps(self) -> list[tuple[StepRecord, ...]]:
        """The steps of each rank, by rank."""
        return [record.steps for record in self.rank_records]

    @property
    def samples(self) -> tuple[Samples, ...]:
        """The sampler's data, one entry for each host; read from disk at each call."""
        from speechdp.report.runs.samples import read_samples  # noqa: PLC0415 - only where it is drawn

        return tuple(read_samples(path) for path in self.sample_paths)


@dataclass(frozen=True)
class Settings:
    """Settings that all jobs of a profile share.

    Attributes:
        task: "synthesis" or "acoustic".
        decoder: "fast" or "loop"; "" for an acoustic model.
        batch_size: batch of a rank in the jobs `weak`.
        reduction: frames per decoder step; 0 for an acoustic model.
        steps: steps of each rank.
        warmup_steps: initial steps that are left out of means.
        device: e.g. "CPU" or the name of the GPU.
        machine: e.g. "Linux x86_64".
        cores: cores of this machine.
        command: words of the command line.
        threads: CPU threads of a rank.
        notes: cautions about the figures, one line each.
        options: all other options that affect what is measured.
    """

    task: str
    preset: str
    decoder: str
    batch_size: int
    reduction: int
    steps: int
    warmup_steps: int
    device: str
    machine: str
    cores: int
    command: tuple[str, ...]
    threads: int = 1
    notes: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ProfileRecord:
    """The content of profile.json; frozen, so that a change is a new record."""

    settings: Settings
    jobs: tuple[JobEntry, ...]

    def with_job(self, index: int, **changes: Any) -> ProfileRecord:
        """Return the record with some fields of job `index` changed."""
        jobs = list(self.jobs)
        jobs[index] = replace(jobs[index], **changes)
        return replace(self, jobs=tuple(jobs))


@dataclass(frozen=True)
class Profile:
    """A profile as read from its folder: settings and jobs, in the order in which they were run."""

    path: Path
    settings: Settings
    jobs: tuple[ProfileJob, ...]

    def of_kind(self, kind: str) -> tuple[ProfileJob, ...]:
        """Return the jobs of a kind that have steps, in ascending number of ranks."""
        jobs = [job for job in self.jobs if job.kind == kind and any(job.steps)]
        return tuple(sorted(jobs, key=lambda job: job.ranks))


def write_record(out: Path, record: ProfileRecord) -> None:
    """Write OUT/profile.json.  Raises RunError (disk)."""
    content = {**asdict(record.settings), "jobs": [asdict(job) for job in record.jobs]}
    write_record_file(out / FILE_NAME, "profile", content)


def read_record(out: Path) -> ProfileRecord:
    """Read OUT/profile.json.

    Raises:
        ConfigError: the file is missing, damaged, of another version, or names a folder outside OUT.
    """
    path = out / FILE_NAME
    with reading(path, f"run speechdp profile into {out}"):
        content = parse_json(path.read_text(encoding="utf-8"))
        check_format(content, "profile")
        jobs = tuple(_checked_job(JobEntry(**checked_fields(JobEntry, job))) for job in content["jobs"])
        values = checked_fields(Settings, content)
        listed = {key: tuple(values.get(key, ())) for key in ("command", "notes")}
        settings = Settings(**{**values, **listed})
    for job in jobs:
        check_beside(path, job.folder)
    return ProfileRecord(settings, jobs)


def _checked_job(job: JobEntry) -> JobEntry:
    """Return the job.  Raises ValueError if its kind or state is unknown, or it has no ranks."""
    if job.kind not in KINDS or job.state not in STATES or job.ranks < 1:
        raise ValueError(f"job {job.name!r} of kind {job.kind!r}, {job.ranks} ranks, state {job.state!r}")
    return job


def threads_before(out: Path) -> int | None:
    """Return the threads of a rank in the finished jobs of a folder; None: no such jobs.

    Raises:
        ConfigError: its record is damaged.
    """
    if not (out / FILE_NAME).is_file():
        return None
    record = read_record(out)
    return record.settings.threads if any(job.state == COMPLETE for job in record.jobs) else None


def read_profile(out: Path) -> Profile:
    """Read a profile with all records of its jobs.

    Raises:
        ConfigError: profile.json is missing or damaged.
        RunError: a finished job's files are missing or damaged.
    """
    record = read_record(out)
    jobs = []
    for entry in record.jobs:
        path = out / entry.folder
        jobs.append(read_job(entry, path) if entry.state == COMPLETE else ProfileJob(entry, path))
    return Profile(out, record.settings, tuple(jobs))


def read_job(entry: JobEntry, path: Path) -> ProfileJob:
    """Read the records of a finished job's ranks.  Raises RunError: missing or damaged files."""
    records = tuple(read_rank(rank_path(path, rank)) for rank in range(entry.ranks))
    for rank, record in enumerate(records):
        _check_rank(entry, rank_path(path, rank), rank, record)
    memory, facts = path / MEMORY_NAME, path / FACTS_NAME
    return ProfileJob(
        entry,
        path,
        records,
        read_memory(memory) if memory.is_file() else None,
        read_json(facts) if facts.is_file() else None,
        tuple(sorted(path.glob("samples-*.jsonl"))),
    )


def _check_rank(entry: JobEntry, path: Path, rank: int, record: RankRecord) -> None:
    """Refuse the file of another rank, or one without all steps.  Raises RunError."""
    if record.rank != rank:
        raise RunError(f"{path}: is that of rank {record.rank}; run the profile again")
    if entry.steps and len(record.steps) != entry.steps:
        raise RunError(f"{path}: has {len(record.steps)} of {entry.steps} steps; run the profile again")
