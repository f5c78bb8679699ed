"""Compute from a profile's records the time of each function, efficiencies, first steps, and waiting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from speechdp.experiments.profile.measured import BACKWARD, FORWARD, WHOLE, StepRecord
from speechdp.experiments.profile.record import (
    LOADER_KINDS,
    MODULES,
    STRONG,
    WEAK,
    Profile,
    ProfileJob,
    in_order,
)

#: Name of all functions together, in tables and answers.
STEP = "whole step"
#: Functions that wait only in some steps, which a median would hide.
_BY_MEAN = frozenset({"trainloader"})
#: Functions that wait for batches or other ranks; they contain no work that could scale.
WAITING_FUNCTIONS = frozenset({"trainloader", "exchange"})


@dataclass(frozen=True)
class Cost:
    """The time of a function in a step, s: mean over ranks, median over the steps after the warm-up.

    Attributes:
        forward_s: time of the forward pass; 0 if the function has no phases.
        backward_s: time of the backward pass.
        whole_s: time of a function without phases.
        share: share of the step's time, over all those steps.
        spread: interquartile range divided by the median; 0 with fewer than four steps.
    """

    forward_s: float
    backward_s: float
    whole_s: float
    share: float
    spread: float

    @property
    def total_s(self) -> float:
        """Total time, s."""
        return self.forward_s + self.backward_s + self.whole_s


@dataclass(frozen=True)
class Scaling:
    """One kind of jobs on several numbers of ranks.

    Attributes:
        kind: kind of the jobs: weak, strong, or a module.
        jobs: jobs by ascending number of ranks.
        costs: costs by function, including STEP, and number of ranks.
        base: number of ranks that efficiencies are relative to: the smallest.  For single modules the
            smallest that all of them have, so that values shown side by side are comparable.
    """

    kind: str
    jobs: tuple[ProfileJob, ...]
    costs: dict[str, dict[int, Cost]]
    base: int

    @property
    def ranks(self) -> list[int]:
        """The numbers of ranks, ascending."""
        return [job.ranks for job in self.jobs]

    def efficiency(self, function: str, ranks: int) -> float | None:
        """Return weak t1/tN or strong t1/(N tN), 1 for the base; None: not timed on both, or waiting."""
        if function in WAITING_FUNCTIONS:
            return None
        costs, base = self.costs[function], self.base
        if ranks not in costs or base not in costs or not costs[ranks].total_s or not costs[base].total_s:
            return None
        factor = base / ranks if self.kind == STRONG else 1.0
        return factor * costs[base].total_s / costs[ranks].total_s


def make_scaling(profile: Profile, kind: str) -> Scaling | None:
    """Return the scaling of a kind of jobs; None if it has no job with steps."""
    jobs = profile.of_kind(kind)
    if not jobs:
        return None
    costs: dict[str, dict[int, Cost]] = {}
    for job in jobs:
        for function, cost in job_costs(job, profile.settings.warmup_steps).items():
            costs.setdefault(function, {})[job.ranks] = cost
    ordered = in_order(set(costs) - {STEP})
    alike = MODULES if kind in MODULES else (kind,)
    base = min(job.ranks for each in alike for job in profile.of_kind(each))
    return Scaling(kind, jobs, {name: costs[name] for name in [*ordered, STEP]}, base)


def all_scalings(profile: Profile) -> list[Scaling]:
    """Return the scalings of weak, strong and each single module, if they were run."""
    found = (make_scaling(profile, kind) for kind in (WEAK, STRONG, *MODULES))
    return [scaling for scaling in found if scaling is not None]


def job_costs(job: ProfileJob, warmup_steps: int) -> dict[str, Cost]:
    """Return the time of every function of a job, and of the whole step."""
    steps = _counted_steps(job, warmup_steps)
    names = in_order({f.name for together in steps for step in together for f in step.functions})
    costs = {name: _cost(name, steps) for name in names}
    walls = [_mean([step.wall_s for step in together]) for together in steps]
    costs[STEP] = Cost(0.0, 0.0, statistics.median(walls) if walls else 0.0, 1.0, _spread(walls))
    return costs


def job_steps(job: ProfileJob) -> list[tuple[StepRecord, ...]]:
    """Return the records of all ranks for each step that all of them recorded."""
    by_rank = [{step.step: step for step in steps} for steps in job.steps]
    if not by_rank:
        return []
    common = sorted(set.intersection(*(set(steps) for steps in by_rank)))
    return [tuple(steps[number] for steps in by_rank) for number in common]


def _counted_steps(job: ProfileJob, warmup_steps: int) -> list[tuple[StepRecord, ...]]:
    """Return the steps after the warm-up; if there are none, the last step."""
    steps = job_steps(job)
    return [together for together in steps if together[0].step > warmup_steps] or steps[-1:]


def _cost(name: str, steps: Sequence[tuple[StepRecord, ...]]) -> Cost:
    middle = _mean if name in _BY_MEAN else statistics.median
    of_phase = {
        phase: [_mean([step.seconds(name, phase) for step in together]) for together in steps]
        for phase in (FORWARD, BACKWARD, WHOLE)
    }
    totals = [sum(values) for values in zip(*of_phase.values(), strict=True)]
    wall_s = sum(_mean([step.wall_s for step in together]) for together in steps)
    return Cost(
        float(middle(of_phase[FORWARD])),
        float(middle(of_phase[BACKWARD])),
        float(middle(of_phase[WHOLE])),
        sum(totals) / wall_s if wall_s else 0.0,
        _spread(totals),
    )


def _spread(values: Sequence[float]) -> float:
    if len(values) < 4 or not statistics.median(values):
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True)
class Loading:
    """Cost of waiting for batches in a job, over all ranks and all steps after the warm-up.

    Attributes:
        wait_s: waiting time per step, s.
        step_s: time of a whole step, s.
        frames_per_s: throughput of all ranks.
    """

    job: ProfileJob
    wait_s: float
    step_s: float
    frames_per_s: float

    @property
    def share(self) -> float:
        """Waiting time as a share of the step's time."""
        return self.wait_s / self.step_s if self.step_s else 0.0


def make_loading(job: ProfileJob, warmup_steps: int) -> Loading:
    """Return the cost of waiting for batches in a job, as means, because some loaders wait in few steps."""
    steps = _counted_steps(job, warmup_steps)
    records = [step for together in steps for step in together]
    wall_s = _mean([step.wall_s for step in records])
    # The slowest rank's time, because the others wait for it sooner or later.
    longest_s = max((sum(step.wall_s for step in of_rank) for of_rank in zip(*steps, strict=True)), default=0)
    frames = sum(step.frames for step in records)
    wait_s = _mean([step.seconds("trainloader") for step in records])
    return Loading(job, wait_s, wall_s, frames / longest_s if longest_s else 0.0)


def main_job(profile: Profile) -> ProfileJob | None:
    """Return the job for pictures of single steps: the largest of the first kind that was run."""
    for kind in (WEAK, STRONG, *MODULES, *dict.fromkeys(job.kind for job in profile.jobs)):
        if jobs := profile.of_kind(kind):
            return jobs[-1]
    return None


def loader_jobs(profile: Profile) -> list[ProfileJob]:
    """Return the jobs that compare trainloaders, the largest of each kind."""
    return [jobs[-1] for kind in LOADER_KINDS if (jobs := profile.of_kind(kind))]


def waiting_s(job: ProfileJob) -> dict[tuple[int, int, int], float]:
    """Return how long each exchange of a rank waited for the last rank to arrive, s.

    Returns:
        Times by (rank, step, index of the function in the step), for exchanges only.
    """
    found: dict[tuple[int, int, int], float] = {}
    for together in job_steps(job):
        places = [
            [i for i, function in enumerate(step.functions) if function.name == "exchange"]
            for step in together
        ]
        for numbers in zip(*places, strict=False):
            spans = [step.functions[i] for step, i in zip(together, numbers, strict=True)]
            last_s = max(span.start_s for span in spans)
            for rank, (span, i) in enumerate(zip(spans, numbers, strict=True)):
                waited_s = min(max(last_s - span.start_s, 0.0), span.duration_s)
                found[rank, together[rank].step, i] = waited_s
    return found


def waited_share(job: ProfileJob, warmup_steps: int) -> float | None:
    """Return the share of a job's exchange time spent waiting, after the warm-up; None without exchanges."""
    steps = [step for together in job_steps(job) for step in together if step.step > warmup_steps]
    exchanged_s = sum(step.seconds("exchange") for step in steps)
    waited_s = sum(seconds for (_, step, _), seconds in waiting_s(job).items() if step > warmup_steps)
    return waited_s / exchanged_s if exchanged_s else None


def first_step_factor(job: ProfileJob, function: str, warmup_steps: int) -> float | None:
    """Return a function's time in the first step divided by its time after the warm-up; None: unknown."""
    steps = job_steps(job)
    later = job_costs(job, warmup_steps).get(function) if steps else None
    if later is None or not later.total_s:
        return None
    first = steps[0]
    if function == STEP:
        return _mean([step.wall_s for step in first]) / later.total_s
    return _mean([step.seconds(function) for step in first]) / later.total_s
