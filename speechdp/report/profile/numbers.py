"""Write every number that a profile's page shows or plots as CSV, one per line, in plain units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from speechdp.experiments.profile.derived import (
    Scaling,
    first_step_factor,
    job_costs,
    loader_jobs,
    make_loading,
    waiting_s,
)
from speechdp.experiments.profile.measured import BACKWARD, FORWARD, WHOLE
from speechdp.experiments.profile.record import Profile, ProfileJob
from speechdp.report.kit.tables import Value, csv_text
from speechdp.report.profile.usage import mean_utilisation, memory_of, on_gpus, utilisation_of

#: Columns; `rank`, `step`, `function`, `phase` and `time_s` are empty if they do not apply.
HEAD = (
    "job", "kind", "ranks", "batch_size", "rank", "step", "time_s", "function", "phase", "quantity", "unit",
    "value",
)  # fmt: skip
Key = dict[str, Value]
Line = tuple[Key, str, str, float | int]


def csv_of_profile(profile: Profile, scalings: Sequence[Scaling]) -> str:
    """Return the numbers of all jobs: costs, efficiencies, steps, memory, samples."""

    def lines() -> Iterator[list[Value]]:
        for job in profile.jobs:
            of_job: Key = {
                "job": job.name, "kind": job.kind, "ranks": job.ranks, "batch_size": job.entry.batch_size
            }  # fmt: skip
            for key, quantity, unit, value in _job_lines(profile, job, scalings):
                line = {**of_job, **key, "quantity": quantity, "unit": unit, "value": repr(value)}
                yield [line.get(column) for column in HEAD]

    return csv_text(HEAD, lines())


def _job_lines(profile: Profile, job: ProfileJob, scalings: Sequence[Scaling]) -> Iterator[Line]:
    if any(job.steps):
        yield from _cost_lines(profile, job, scalings)
        yield from _step_lines(job)
    yield from _memory_lines(job)
    yield from _sample_lines(job)
    if job in loader_jobs(profile):
        loading = make_loading(job, profile.settings.warmup_steps)
        yield {}, "step_mean", "s", loading.step_s
        yield {"function": "trainloader"}, "wait_mean", "s", loading.wait_s
        yield {"function": "trainloader"}, "wait_share", "1", loading.share
        yield {}, "frames_per_s", "1/s", loading.frames_per_s
        use = mean_utilisation(job)
        if use is not None:
            yield {}, "utilisation_mean", "%", use


def _cost_lines(profile: Profile, job: ProfileJob, scalings: Sequence[Scaling]) -> Iterator[Line]:
    for function, cost in job_costs(job, profile.settings.warmup_steps).items():
        key: Key = {"function": function}
        for phase, seconds in ((FORWARD, cost.forward_s), (BACKWARD, cost.backward_s), (WHOLE, cost.total_s)):
            yield {**key, "phase": phase or "all"}, "time_a_step", "s", seconds
        yield key, "share", "1", cost.share
        yield key, "spread", "1", cost.spread
        factor = first_step_factor(job, function, profile.settings.warmup_steps)
        if factor is not None:
            yield key, "first_step_factor", "1", factor
        for scaling in scalings:
            if scaling.kind == job.kind and (value := scaling.efficiency(function, job.ranks)) is not None:
                yield key, "efficiency", "1", value


def _step_lines(job: ProfileJob) -> Iterator[Line]:
    waited = waiting_s(job)
    for record in job.rank_records:
        for step in record.steps:
            key: Key = {"rank": record.rank, "step": step.step}
            yield {**key, "time_s": step.start_s}, "step", "s", step.wall_s
            yield key, "frames", "1", step.frames
            for number, span in enumerate(step.functions):
                place: Key = {
                    **key, "time_s": span.start_s, "function": span.name, "phase": span.phase
                }  # fmt: skip
                yield place, "duration", "s", span.duration_s
                if (record.rank, step.step, number) in waited:
                    yield place, "waited_for_last_rank", "s", waited[record.rank, step.step, number]


def _memory_lines(job: ProfileJob) -> Iterator[Line]:
    if job.memory is None:
        return
    for rank in job.memory.ranks:
        key: Key = {"rank": rank.rank}
        yield key, f"peak_{job.memory.unit}", "B", rank.peak_bytes
        yield key, "rss", "B", rank.rss_bytes
        yield key, "parameters_and_gradients", "B", rank.parameters_bytes
        yield key, "optimizer", "B", rank.optimizer_bytes
        if rank.gpu_peak_bytes is not None:
            yield key, "gpu_peak", "B", rank.gpu_peak_bytes
    if job.memory.ranks:
        yield {}, "memory_balance", "1", job.memory.balance


def _sample_lines(job: ProfileJob) -> Iterator[Line]:
    for samples in job.samples:
        what = "gpu" if on_gpus(samples) else "cpu"
        for quantity, unit, of_rank in (
            (f"{what}_utilisation", "%", utilisation_of(samples)),
            (f"{what}_memory", "B", memory_of(samples)),
        ):
            for rank, values in of_rank.items():
                for time_s, value in zip(samples.t_s, values, strict=True):
                    if math.isfinite(value):
                        yield {"rank": rank, "time_s": float(time_s)}, quantity, unit, float(value)
