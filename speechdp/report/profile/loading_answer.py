"""State the cost of waiting for batches with each kind of trainloader."""

from __future__ import annotations

from speechdp.experiments.profile.derived import Loading, job_steps, make_loading
from speechdp.experiments.profile.plan import TWO_STOPS
from speechdp.experiments.profile.record import BLOCKING, FED, LOADER_KINDS, POOLED, Profile
from speechdp.report.kit import formatting
from speechdp.report.kit.formatting import number, rank_count

#: Relative difference of two jobs' speeds, beyond what waiting explains, that has another cause.
_OTHERWISE = 0.03


def loading_sentences(profile: Profile) -> list[str]:
    """Return sentences on the cost of waiting for batches with each kind of trainloader."""
    found = {
        kind: make_loading(jobs[-1], profile.settings.warmup_steps)
        for kind in LOADER_KINDS
        if (jobs := profile.of_kind(kind))
    }
    blocking, pooled, fed = (found.get(kind) for kind in (BLOCKING, POOLED, FED))
    too_short = "" if blocking is None else _too_short(blocking)
    sentences = [too_short] if too_short else []
    if blocking is not None and not too_short:
        sentences.append(_blocking(blocking, pooled))
    elif pooled is not None:
        sentences.append(f"Waiting for batches takes {_share(pooled)} of the step.")
    if fed is not None:
        sentences.append(
            f"With feeder ranks waiting takes {_share(fed)}, at {number(fed.frames_per_s)} frames/s."
        )
    return sentences


def _too_short(blocking: Loading) -> str:
    """Return a sentence if the job had only the first stop of a blocking trainloader, too few for a mean."""
    steps = max((together[0].step for together in job_steps(blocking.job)), default=0)
    if steps > TWO_STOPS:
        return ""
    return (
        f"The cost of a blocking trainloader is not known: {blocking.job.name} took {steps} steps, too few "
        f"for its second stop, which needs more than {TWO_STOPS}: leave out --loader-steps."
    )


def _blocking(blocking: Loading, pooled: Loading | None) -> str:
    text = f"A blocking trainloader takes {_share(blocking)} of the step on {rank_count(blocking.job.ranks)}"
    if pooled is None:
        return text + "."
    text += f", one that works beside training {_share(pooled)}"
    if not blocking.frames_per_s:
        return text + "."
    more = pooled.frames_per_s / blocking.frames_per_s
    text += f", with {more:.2f} times as many frames per second"
    if not pooled.share < blocking.share < 1:
        return f"{text}."
    by_waiting = (1 - pooled.share) / (1 - blocking.share)
    if abs(more / by_waiting - 1) > _OTHERWISE:
        text += (
            f"; less waiting alone would give {by_waiting:.2f} times: the two jobs, which ran one after the "
            "other, also differed in other ways"
        )
    return f"{text}."


def _share(loading: Loading) -> str:
    return f"{formatting.percent(loading.share, 1)} %"
