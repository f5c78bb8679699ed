"""State a profile's result in words: what scales, what does not, the cost of memory and trainloader."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.experiments.profile.derived import (
    STEP,
    WAITING_FUNCTIONS,
    Scaling,
    first_step_factor,
    job_costs,
    job_steps,
    main_job,
    waited_share,
)
from speechdp.experiments.profile.record import STRONG, WEAK, Profile, ProfileJob
from speechdp.report.kit import formatting
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.formatting import milliseconds, rank_count
from speechdp.report.profile.cautions import IMPOSSIBLE, about_few_steps, find_cautions
from speechdp.report.profile.loading_answer import loading_sentences

#: Functions with a smaller share of the step on the most ranks are not judged.
JUDGED_SHARE = 0.03
#: Lowest efficiency of a function that counts as scaling.
SCALES = 0.85
#: Memory is balanced if the largest peak is below this multiple of the smallest.
BALANCED = 1.1
#: Entries that are no functions of the model and are not judged as such.
_NOT_OF_THE_MODEL = WAITING_FUNCTIONS | {STEP}


RULE = (
    "Times are the median step after the warm-up, mean over ranks, forward and backward. Efficiency is "
    "t1 / tN for weak scaling (a constant batch per rank) and t1 / (N·tN) for strong scaling (a constant "
    f"batch of all ranks together). Functions with less than {JUDGED_SHARE:.0%} of the step are not judged; "
    f"a function scales if its efficiency is at least {SCALES:.0%}."
).replace("%", " %")


def find_answer(profile: Profile, scalings: Sequence[Scaling]) -> Answer:
    """Return the answer of a profile."""
    of_kind = {scaling.kind: scaling for scaling in scalings}
    compared = [s for s in scalings if len(s.ranks) > 1 and s.ranks[0] == s.base]
    job = main_job(profile)
    details = [
        _others(of_kind.get(WEAK)),
        _step(of_kind.get(WEAK), profile.settings.warmup_steps),
        _strong(of_kind.get(STRONG)),
        _single([s for s in compared if s.kind not in (WEAK, STRONG)], of_kind.get(WEAK)),
        *_of_job(profile, job),
        *loading_sentences(profile),
    ]
    return Answer(
        _headline(of_kind, compared),
        tuple(filter(None, details)),
        find_cautions(profile, scalings),
        about_few_steps(profile),
    )


def _judged(scaling: Scaling) -> list[tuple[float, str]]:
    """Return (efficiency, function) of functions large enough to matter, those that lose most time first.

    The loss is the time on the most ranks beyond what the function would take there if it scaled fully.
    """
    most = scaling.ranks[-1]
    found = [
        (efficiency, name)
        for name, costs in scaling.costs.items()
        if name not in _NOT_OF_THE_MODEL
        and most in costs
        and costs[most].share >= JUDGED_SHARE
        and (efficiency := scaling.efficiency(name, most)) is not None
    ]
    return sorted(found, key=lambda each: (each[0] - 1) * scaling.costs[each[1]][most].total_s)


def _headline(of_kind: dict[str, Scaling], compared: Sequence[Scaling]) -> str:
    weak = of_kind.get(WEAK)
    if weak is not None and len(weak.ranks) > 1 and (judged := _judged(weak)):
        return _loses_most(weak, judged)
    if compared:
        name = compared[0].kind
        if name not in (WEAK, STRONG):
            return f"Alone, {_pace(compared[0], name)}."
        constant = "a constant batch per rank" if name == WEAK else "all ranks' batch constant"
        return f"With {constant} {_pace(compared[0], STEP)}."
    if of_kind:
        return _unscaled(weak or next(iter(of_kind.values())))
    return "No job of this profile has finished a step, so there are no results yet."


def _unscaled(only: Scaling) -> str:
    """State which function takes the most time if only one number of ranks was profiled."""
    ranks = only.ranks[-1]
    were = "was" if ranks == 1 else "were"
    text = f"Only {rank_count(ranks)} {were} profiled, so nothing can be said about scaling"
    shares = [(costs[ranks].share, name) for name, costs in only.costs.items() if name != STEP]
    if only.kind not in (WEAK, STRONG) or not shares:
        return f"{text}."
    return (
        f"{text}; the largest part of the step is {max(shares)[1]}, {formatting.percent(max(shares)[0])} %."
    )


def _loses_most(weak: Scaling, judged: list[tuple[float, str]]) -> str:
    few, most = weak.ranks[0], weak.ranks[-1]
    worst, of_worst = min(judged)
    if worst > IMPOSSIBLE:
        return (
            f"Nothing can be said about scaling: even {of_worst}, the function that scales worst, seems to "
            f"have an efficiency of {formatting.percent(worst)} % on {rank_count(most)}. Profile again, in "
            "another folder, while nothing else runs there."
        )
    if worst >= SCALES and (text := _lost_by_waiting(weak)):
        return text
    if worst >= SCALES:
        return (
            f"Every function scales to {rank_count(most)}: the worst, {of_worst}, keeps an efficiency of "
            f"{formatting.percent(worst)} %."
        )
    efficiency, name = judged[0]
    costs, exchanged = weak.costs[name], weak.costs.get("exchange", {})
    lost_s = costs[most].total_s - costs[few].total_s
    times = f"{milliseconds(costs[most].total_s)} instead of {milliseconds(costs[few].total_s)} ms"
    text = (
        f"{name.capitalize()} loses most: on {rank_count(most)} it takes {milliseconds(lost_s)} ms per step "
        f"more than on {few} ({times}), which is an efficiency of {formatting.percent(efficiency)} %, "
        f"and takes {formatting.percent(costs[most].share)} % of the step."
    )
    exchange_s = exchanged[most].total_s if most in exchanged else 0.0
    return f"{text} Exchange costs more, {milliseconds(exchange_s)} ms." if exchange_s > lost_s else text


def _lost_by_waiting(weak: Scaling) -> str:
    """State which wait keeps the step from scaling although its functions scale; "": the step scales."""
    few, most = weak.ranks[0], weak.ranks[-1]
    efficiency = weak.efficiency(STEP, most)
    if efficiency is None or efficiency >= SCALES:
        return ""
    step = weak.costs[STEP]
    text = (
        f"The step keeps an efficiency of {formatting.percent(efficiency)} % on {rank_count(most)} although "
        "every function of the model scales"
    )
    longer = {
        name: _seconds(weak, name, most) - _seconds(weak, name, few)
        for name in sorted(WAITING_FUNCTIONS)
        if most in weak.costs.get(name, {})
    }
    if not longer or max(longer.values()) <= 0:
        return f"{text}."
    name, lost_s = max(longer.items(), key=lambda each: each[1])
    gained_s = step[most].total_s - step[few].total_s
    return (
        f"{text}: {name} takes {milliseconds(lost_s)} ms per step more than on {few}, of "
        f"{milliseconds(gained_s)} ms that the step takes longer, and has "
        f"{formatting.percent(weak.costs[name][most].share)} % of it."
    )


def _seconds(scaling: Scaling, name: str, ranks: int) -> float:
    costs = scaling.costs[name]
    return costs[ranks].total_s if ranks in costs else 0.0


def _pace(scaling: Scaling, name: str) -> str:
    most = scaling.ranks[-1]
    efficiency = scaling.efficiency(name, most)
    what = "the " + name
    if efficiency is None:
        return f"{what} was not timed on both {scaling.ranks[0]} and {most} ranks"
    return f"{what} keeps an efficiency of {formatting.percent(efficiency)} % on {rank_count(most)}"


def _others(weak: Scaling | None) -> str:
    """Name the functions that scale, and further ones that do not."""
    if weak is None or len(weak.ranks) < 2:
        return ""
    judged = _judged(weak)
    good = [f"{name} {formatting.percent(e)} %" for e, name in reversed(judged) if e >= SCALES]
    bad = [f"{name} {formatting.percent(e)} %" for e, name in judged[1:] if e < SCALES]
    text = ""
    if good and len(good) < len(judged):
        text = f"These scale: {', '.join(good)}. "
    if bad:
        others = "Others" if judged[0][0] < SCALES else "Functions"
        text += f"{others} that do not scale: {', '.join(bad)}."
    return text.strip()


def _step(weak: Scaling | None, warmup_steps: int) -> str:
    if weak is None or len(weak.ranks) < 2:
        return ""
    few, most = weak.ranks[0], weak.ranks[-1]
    efficiency = weak.efficiency(STEP, most)
    if efficiency is None:
        return ""
    costs = weak.costs[STEP]
    text = (
        f"The whole step takes {milliseconds(costs[most].total_s)} ms on {rank_count(most)} and "
        f"{milliseconds(costs[few].total_s)} ms on {few}: {formatting.percent(efficiency)} % efficiency at a "
        "constant batch per rank"
    )
    exchange = weak.costs.get("exchange", {}).get(most)
    if exchange is None:
        return text + "."
    waited = waited_share(weak.jobs[-1], warmup_steps)
    part = "" if waited is None else f", {formatting.percent(waited)} % of it waiting for the last rank"
    return f"{text}; exchange takes {formatting.percent(exchange.share, 1)} % of the step{part}."


def _strong(strong: Scaling | None) -> str:
    if strong is None or len(strong.ranks) < 2:
        return ""
    most = strong.ranks[-1]
    efficiency, judged = strong.efficiency(STEP, most), _judged(strong)
    if efficiency is None:
        return ""
    worst = judged[0] if judged and judged[0][0] < SCALES else None
    kept = formatting.percent(efficiency)
    text = f"With all ranks' batch constant the step keeps {kept} % on {rank_count(most)}"
    if worst is not None:
        text += f"; {worst[1]} loses most, with {formatting.percent(worst[0])} %"
    return text + "."


def _single(singles: Sequence[Scaling], weak: Scaling | None) -> str:
    """State how each module scales alone and in the whole step, on the largest number of ranks."""
    parts = []
    most = max((scaling.ranks[-1] for scaling in singles), default=0)
    for scaling in singles:
        alone = scaling.efficiency(scaling.kind, most)
        if alone is None:
            continue
        text = f"{scaling.kind} {formatting.percent(alone)} %"
        inside = weak is not None and scaling.kind in weak.costs and weak.base == scaling.base
        within = weak.efficiency(scaling.kind, most) if weak is not None and inside else None
        parts.append(text if within is None else f"{text} (in the whole step {formatting.percent(within)} %)")
    if not parts:
        return ""
    return f"Alone, with the other modules off, on {rank_count(most)}: {', '.join(parts)}."


def _of_job(profile: Profile, job: ProfileJob | None) -> list[str]:
    if job is None:
        return []
    return [_memory(job), _first_steps(job, profile.settings.warmup_steps)]


def _memory(job: ProfileJob) -> str:
    if job.memory is None or len(job.memory.ranks) < 2:
        return ""
    ranks = sorted(job.memory.ranks, key=lambda rank: rank.peak_bytes)
    least, most = ranks[0], ranks[-1]
    what = "GPU memory" if job.memory.unit == "gpu" else "memory of the process"
    state = "is balanced" if job.memory.balance < BALANCED else "is not balanced"
    return (
        f"Memory {state} over {rank_count(job.ranks)}: the largest peak is {job.memory.balance:.2f} times "
        f"the smallest (rank {most.rank}: {formatting.megabytes(most.peak_bytes)} MB, rank {least.rank}: "
        f"{formatting.megabytes(least.peak_bytes)} MB; {what})."
    )


def _first_steps(job: ProfileJob, warmup_steps: int) -> str:
    whole = first_step_factor(job, STEP, warmup_steps)
    if whole is None or len(job_steps(job)) < 2 or job_steps(job)[0][0].step > warmup_steps:
        return ""
    factors = [
        (factor, name)
        for name, cost in job_costs(job, warmup_steps).items()
        if name not in _NOT_OF_THE_MODEL
        and cost.share >= JUDGED_SHARE
        and (factor := first_step_factor(job, name, warmup_steps)) is not None
    ]
    worst = f", {max(factors)[1]} {max(factors)[0]:.1f} times" if factors else ""
    steps = "first step is" if warmup_steps == 1 else f"first {warmup_steps} steps are"
    return (
        f"The first step takes {whole:.1f} times as long as the usual one{worst}: the {steps} left out of "
        "all figures."
    )
