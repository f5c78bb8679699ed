"""What the reader of a profile must know before trusting it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from speechdp.counting import counted
from speechdp.experiments.profile.derived import STEP, Scaling, job_costs, job_steps, main_job
from speechdp.experiments.profile.notes import about_cores
from speechdp.experiments.profile.record import LOADER_KINDS, STRONG, WEAK, Profile, ProfileJob
from speechdp.experiments.record import COMPLETE, FAILED
from speechdp.report.kit import formatting

#: Fewer steps than this after the warm-up make a poor median.
FEW_STEPS = 10
#: Quartiles of the steps further apart than this part of the median.
WIDE_SPREAD = 0.25
#: Functions with a smaller share of the step are not looked at.
SPREAD_SHARE = 0.05
#: How the ranks record the cores of their host, behind its CPU (docs/profile.md).
_CORES = re.compile(r", ([1-9][0-9]{0,5}) cores?$", re.ASCII)
#: An efficiency above this is an error of measurement.
IMPOSSIBLE = 1.15
#: Frames of a rank's step that differ by more between jobs make times hard to compare.
FRAMES_TOLERANCE = 0.05


def find_cautions(profile: Profile, scalings: Sequence[Scaling]) -> tuple[str, ...]:
    """Return one sentence a reservation."""
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
    """Return how many of a job's ranks share how many cores, for each of its hosts.

    Args:
        here: cores of the machine that started the job, which count where the ranks did not record theirs.
    """
    cpus = (job.facts or {}).get("cpus")
    told = cpus if isinstance(cpus, list) and len(cpus) == job.ranks else [""] * job.ranks
    ranks_on: dict[str, int] = {}
    cores_of: dict[str, int] = {}
    for record, cpu in zip(job.rank_records, told, strict=True):
        found = _CORES.search(cpu) if isinstance(cpu, str) else None
        ranks_on[record.host] = ranks_on.get(record.host, 0) + 1
        cores_of[record.host] = max(cores_of.get(record.host, 0), int(found[1]) if found else here)
    return [(ranks_on[host], cores_of[host]) for host in ranks_on]


def _kinds_of_hosts(profile: Profile) -> str:
    """Say which jobs ran on which hardware, where that differs: an efficiency compares two jobs."""
    jobs_of: dict[str, list[str]] = {}
    for job in profile.jobs:
        if kinds := sorted(set(_hardware(job))):
            jobs_of.setdefault(" and ".join(kinds), []).append(job.name)
    if len(jobs_of) < 2:
        return ""
    parts = "; ".join(f"{', '.join(names)} on {kinds}" for kinds, names in jobs_of.items())
    return f"The jobs' hosts differ in kind, so their times do not compare: {parts}."


def _hardware(job: ProfileJob) -> list[str]:
    """Return the GPU, else the CPU, of each rank; none where that was not recorded."""
    facts = job.facts or {}
    gpus, cpus = (facts.get(key) for key in ("gpus", "cpus"))
    names = [gpu.get("name") for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    kinds = names or (cpus if isinstance(cpus, list) else [])
    return [kind for kind in kinds if isinstance(kind, str)]


def _notes(profile: Profile) -> list[str]:
    """Return what was noted when the profile was begun, but for what `_cores` says of the jobs that ran."""
    said = about_cores(tuple({job.ranks for job in profile.jobs}), profile.settings.cores)
    return [f"{formatting.capital(note).rstrip('.')}." for note in profile.settings.notes if note not in said]


def _on_gpu(job: ProfileJob) -> bool:
    return job.memory is not None and job.memory.unit == "gpu"


def about_few_steps(profile: Profile) -> str:
    """Return the warning that goes before everything else where too few steps were taken, else ""."""
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
    """Name efficiencies that no machine has: what was compared is not alike."""
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
    """Compare the frames of a step over numbers of ranks: a function's time follows them."""
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
