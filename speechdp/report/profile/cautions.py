"""Cautions that the reader of a profile must know before trusting it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from speechdp.counting import counted
from speechdp.experiments.profile.derived import STEP, Scaling, job_costs, job_steps, main_job
from speechdp.experiments.profile.notes import about_cores
from speechdp.experiments.profile.record import LOADER_KINDS, STRONG, WEAK, Profile, ProfileJob
from speechdp.experiments.record import COMPLETE, FAILED
from speechdp.report.kit import formatting

#: Fewest steps after the warm-up for a reliable median.
FEW_STEPS = 10
#: Distance of the quartiles of step times, over the median, above which a caution is given.
WIDE_SPREAD = 0.25
#: Functions with a smaller share of the step are not checked.
SPREAD_SHARE = 0.05
#: The number of cores at the end of the CPU's name, as ranks record it (docs/profile.md).
_CORES = re.compile(r", ([1-9][0-9]{0,5}) cores?$", re.ASCII)
#: An efficiency above this is a measurement error.
IMPOSSIBLE = 1.15
#: Relative difference in frames per step between jobs above which their times are hard to compare.
FRAMES_TOLERANCE = 0.05


def find_cautions(profile: Profile, scalings: Sequence[Scaling]) -> tuple[str, ...]:
    """Return the cautions, one sentence each."""
    notes = [
        _cores(profile),
        _kinds_of_hosts(profile),
        _spread(profile),
        _impossible(scalings),
        *(_frames(scaling, profile.settings.warmup_steps) for scaling in scalings),
        *_unfinished(profile),
        *_notes(profile),
    ]
    return tuple(dict.fromkeys(filter(None, notes)))


def _cores(profile: Profile) -> str:
    settings = profile.settings
    jobs = [job for job in profile.jobs if any(job.steps) and not _on_gpu(job)]
    crowded = {
        job.ranks: cores
        for job in jobs
        for sharing, cores in _cores_of_hosts(job, settings.cores)
        if sharing * max(1, settings.threads) > cores
    }
    if not crowded:
        return ""
    most = max(crowded)
    threads = f" with {settings.threads} threads each" if settings.threads > 1 else ""
    cores = counted(crowded[most], "core")
    if any(len({record.host for record in job.rank_records}) > 1 for job in jobs if job.ranks == most):
        cores += " a host"
    return (
        f"More ranks than cores: {most} ranks{threads} share {cores}, so from {min(crowded)} "
        "ranks on times say more about the machine than about the functions."
    )


def _cores_of_hosts(job: ProfileJob, here: int) -> list[tuple[int, int]]:
    """Return (number of ranks, number of cores) for each host of a job.

    Args:
        here: number of cores of the machine that started the job; used if the ranks did not record theirs.
    """
    cpus = (job.facts or {}).get("cpus")
    names = cpus if isinstance(cpus, list) and len(cpus) == job.ranks else [""] * job.ranks
    ranks_on: dict[str, int] = {}
    cores_of: dict[str, int] = {}
    for record, cpu in zip(job.rank_records, names, strict=True):
        found = _CORES.search(cpu) if isinstance(cpu, str) else None
        ranks_on[record.host] = ranks_on.get(record.host, 0) + 1
        cores_of[record.host] = max(cores_of.get(record.host, 0), int(found[1]) if found else here)
    return [(ranks_on[host], cores_of[host]) for host in ranks_on]


def _kinds_of_hosts(profile: Profile) -> str:
    """Return a caution if jobs ran on different hardware, because an efficiency compares two jobs."""
    jobs_of: dict[str, list[str]] = {}
    for job in profile.jobs:
        if kinds := sorted(set(_hardware(job))):
            jobs_of.setdefault(" and ".join(kinds), []).append(job.name)
    if len(jobs_of) < 2:
        return ""
    parts = "; ".join(f"{', '.join(names)} on {kinds}" for kinds, names in jobs_of.items())
    return f"The jobs' hosts differ in kind, so their times do not compare: {parts}."


def _hardware(job: ProfileJob) -> list[str]:
    """Return the name of each rank's GPU, else of its CPU; empty if not recorded."""
    facts = job.facts or {}
    gpus, cpus = (facts.get(key) for key in ("gpus", "cpus"))
    names = [gpu.get("name") for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    kinds = names or (cpus if isinstance(cpus, list) else [])
    return [kind for kind in kinds if isinstance(kind, str)]


def _notes(profile: Profile) -> list[str]:
    """Return the notes made at the start of the profile, without those that `_cores` repeats."""
    known = about_cores(tuple({job.ranks for job in profile.jobs}), profile.settings.cores)
    return [
        f"{formatting.capital(note).rstrip('.')}." for note in profile.settings.notes if note not in known
    ]


def _on_gpu(job: ProfileJob) -> bool:
    return job.memory is not None and job.memory.unit == "gpu"


def about_few_steps(profile: Profile) -> str:
    """Return the warning at the top of the report if there were too few steps, else ""."""
    fewest: dict[str, int] = {}
    for job in profile.jobs:
        if any(job.steps):
            option = "--loader-steps" if job.entry.kind in LOADER_KINDS else "--steps"
            count = sum(together[0].step > profile.settings.warmup_steps for together in job_steps(job))
            fewest[option] = min(count, fewest.get(option, count))
    few = {option: count for option, count in fewest.items() if count < FEW_STEPS}
    if not few:
        return ""
    options, least = " and ".join(sorted(few, reverse=True)), min(few.values())
    whose = "of trainloaders " if "--steps" not in few else ""
    if least == 0:
        return (
            f"Some jobs {whose}have no step after the {profile.settings.warmup_steps} of the warm-up, so "
            f"their figures are those of the last step alone. Take more with {options}."
        )
    return (
        f"Figures {whose}rest on {counted(least, 'step')} after the warm-up and may be chance: take more "
        f"with {options}, {FEW_STEPS + profile.settings.warmup_steps} at least."
    )


def _spread(profile: Profile) -> str:
    job = main_job(profile)
    if job is None:
        return ""
    costs = job_costs(job, profile.settings.warmup_steps)
    wide = [
        f"{name} {formatting.percent(cost.spread)} %"
        for name, cost in costs.items()
        if cost.spread > WIDE_SPREAD and (name == STEP or cost.share >= SPREAD_SHARE)
    ]
    if not wide:
        return ""
    return (
        f"Times of {job.name} vary from step to step (distance of the quartiles over the median): "
        f"{', '.join(wide)}. Small differences mean nothing."
    )


def _impossible(scalings: Sequence[Scaling]) -> str:
    """Return a caution naming impossibly high efficiencies: conditions of the jobs differed."""
    found = [
        f"{name} {_of_kind(scaling.kind)}: {formatting.percent(efficiency)} % on {ranks} ranks"
        for scaling in scalings
        for name, costs in scaling.costs.items()
        if scaling.kind in (WEAK, STRONG, name)
        for ranks, cost in costs.items()
        if cost.share >= SPREAD_SHARE
        and (efficiency := scaling.efficiency(name, ranks)) is not None
        and efficiency > IMPOSSIBLE
    ]
    if not found:
        return ""
    return (
        "Efficiencies far above 100 % mean that the machine was also busy with other work or that batches "
        f"differ. {formatting.capital('; '.join(found))}."
    )


def _of_kind(kind: str) -> str:
    return f"in {kind} scaling" if kind in (WEAK, STRONG) else "alone"


def _frames(scaling: Scaling, warmup_steps: int) -> str:
    """Return a caution if frames per step differ between numbers of ranks; times depend on them."""
    per_step = {}
    for job in scaling.jobs:
        steps = [together for together in job_steps(job) if together[0].step > warmup_steps]
        frames = [sum(step.frames for step in together) for together in steps]
        if frames and sum(frames):
            scale = 1 if scaling.kind == STRONG else job.ranks
            per_step[job.ranks] = sum(frames) / len(frames) / scale
    if len(per_step) < 2 or max(per_step.values()) <= min(per_step.values()) * (1 + FRAMES_TOLERANCE):
        return ""
    whose = "of all ranks" if scaling.kind == STRONG else "of a rank"
    parts = ", ".join(f"{frames:,.0f} on {ranks}" for ranks, frames in per_step.items())
    return f"Batches of the {scaling.kind} jobs are not alike: frames {whose} in a step are {parts}."


def _unfinished(profile: Profile) -> list[str]:
    notes = [
        f"{job.name} failed: {job.entry.message or 'without a message'}"
        for job in profile.jobs
        if job.entry.state == FAILED
    ]
    pending = [job.name for job in profile.jobs if job.entry.state not in (COMPLETE, FAILED)]
    if pending:
        notes.append(f"Not run yet: {', '.join(pending)}.")
    empty = [job.name for job in profile.jobs if job.entry.state == COMPLETE and not any(job.steps)]
    if empty:
        notes.append(f"Without a step: {', '.join(empty)}.")
    return notes
