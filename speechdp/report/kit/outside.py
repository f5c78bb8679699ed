"""Sentences on resources that runs had to share: cores of their hosts, and GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from speechdp.counting import counted
from speechdp.report.kit import formatting
from speechdp.report.runs.results import GpuConditions, RankTiming, RunResult
from speechdp.report.runs.steadiness import NOTABLE_BYTES, NOTABLE_OTHERS, outside_load
from speechdp.timing.load import NOTABLE_LOAD, OutsideLoad

#: Words for the causes of a throttled clock, by their names in the records.
_LIMITS = {
    "power": "the power limit",
    "heat": "heat",
    "hardware": "the hardware's slow-down",
    "settings": "a clock that was set",
}
#: Shares of the time below this are not mentioned.
_SMALL_SHARE = 0.005
#: Amounts that would be displayed as zero, and are not mentioned: cores, and bytes displayed in GB.
_SMALL_CORES = 0.005
_SMALL_BYTES = 5e6
#: Largest number of GPUs that a sentence names individually.
_NAMED_GPUS = 4


@dataclass(frozen=True)
class _Gpu:
    """A GPU of a run, and the first rank that used it."""

    rank: RankTiming
    conditions: GpuConditions
    num_hosts: int

    def __str__(self) -> str:
        where = f" on {self.rank.host}" if self.num_hosts > 1 else ""
        return f"GPU {self.conditions.index}{where}"


def load_text(load: OutsideLoad) -> str:
    """State cores the job did not have: `0.4 cores busy with other work and 0.2 stolen by the virtual ...`.

    A part too small to matter is omitted if the other one matters.  If neither matters, parts that are zero
    are omitted; if both are zero, the first is stated.
    """
    parts = [
        (load.others, "busy with other work"),
        (load.stolen, "stolen by the virtual machine's host"),
    ]
    named = (
        [part for part in parts if part[0] > NOTABLE_LOAD]
        or [part for part in parts if part[0] >= _SMALL_CORES]
        or [(0.0, parts[0][1])]
    )
    noun = "core" if formatting.rough(named[0][0]) == "1" else "cores"
    (first, what), *more = [(formatting.rough(amount), what) for amount, what in named]
    return " and ".join([f"{first} {noun} {what}", *(f"{amount} {what}" for amount, what in more)])


def conditions_text(gpu: GpuConditions) -> str:
    """State a GPU's clock and its other users in a few words; "" if unknown."""
    facts = [] if gpu.clock_mhz is None else [f"GPU clock {formatting.count(gpu.clock_mhz)} MHz"]
    facts += [others] if (others := _others_text(gpu)) else []
    return ", ".join(facts)


def outside_sentences(run: RunResult) -> list[str]:
    """State clocks and other users of a run's GPUs, and cores of its hosts that others used.

    For a run without a GPU, the cores are stated only if some were stolen.
    """
    if run.timing is None:
        return []
    gpus = _gpus_of(run.timing.ranks)
    sentences = [_clocks(gpus), _limits(gpus), _other_users(gpus)]
    hosts = {rank.host: rank for rank in reversed(run.timing.ranks)}
    for rank in reversed(hosts.values()):
        load = outside_load(run.timing, rank)
        if load is not None and load.is_notable and (gpus or load.is_notably_stolen):
            where = f"On {rank.host}: " if len(hosts) > 1 else ""
            sentences.append(f"{where}{load_text(load)}.")
    return [sentence for sentence in sentences if sentence]


def shares_gpus(run: RunResult) -> bool:
    """Return whether others used a run's GPUs long enough, or held enough of their memory, to matter."""
    ranks = () if run.timing is None else run.timing.ranks
    return any(
        (gpu.conditions.others or 0.0) > NOTABLE_OTHERS
        or (gpu.conditions.others_bytes or 0.0) > NOTABLE_BYTES
        for gpu in _gpus_of(ranks)
    )


def _gpus_of(ranks: Sequence[RankTiming]) -> list[_Gpu]:
    num_hosts = len({rank.host for rank in ranks})
    found: dict[tuple[str, int], _Gpu] = {}
    for rank in ranks:
        if rank.gpu is not None:
            found.setdefault((rank.host, rank.gpu.index), _Gpu(rank, rank.gpu, num_hosts))
    return list(found.values())


def _clocks(gpus: Sequence[_Gpu]) -> str:
    known = [gpu for gpu in gpus if gpu.conditions.clock_mhz is not None]
    if not known:
        return ""
    medians = [gpu.conditions.clock_mhz or 0.0 for gpu in known]
    lowest = min(known, key=lambda gpu: gpu.conditions.lowest_clock_mhz or gpu.conditions.clock_mhz or 0.0)
    whose = f" ({lowest})" if len(known) > 1 else ""
    low, high = formatting.count(min(medians)), formatting.count(max(medians))
    median = low if low == high else f"{low} to {high}"
    least = formatting.count(lowest.conditions.lowest_clock_mhz)
    return f"SM clock while a kernel ran: median {median} MHz, lowest {least} MHz{whose}."


def _limits(gpus: Sequence[_Gpu]) -> str:
    """State what throttled the clocks: means over the GPUs for which this was read."""
    known = [limits for gpu in gpus if (limits := gpu.conditions.limits) is not None]
    if not known:
        return ""
    shares = {name: sum(limits.get(name, 0.0) for limits in known) / len(known) for name in _LIMITS}
    named = [
        (_LIMITS[name], formatting.percent(share)) for name, share in shares.items() if share >= _SMALL_SHARE
    ]
    if not named:
        return ""
    (cause, percent), *more = named
    clocks = "The clock was" if len(known) == 1 else "Clocks were"
    texts = [f"by {cause} for {percent}\u00a0% of the time a kernel ran"]
    texts += [f"by {cause} for {percent}\u00a0%" for cause, percent in more]
    return f"{clocks} held down {', '.join(texts)}."


def _other_users(gpus: Sequence[_Gpu]) -> str:
    reporting = [gpu for gpu in gpus if gpu.conditions.others is not None]
    if not reporting:
        return ""
    used = [(gpu, text) for gpu in reporting if (text := _others_text(gpu.conditions))]
    if not used:
        which = "the" if len(reporting) == len(gpus) else f"{len(reporting)} of the"
        return f"No other process was seen on {which} GPU{'s' if len(gpus) > 1 else ''}."
    named = [f"{gpu}: {text}" for gpu, text in used[:_NAMED_GPUS]]
    num_more = len(used) - _NAMED_GPUS
    more = [f"and others on {counted(num_more, 'more GPU')}"] if num_more > 0 else []
    return f"{'; '.join([*named, *more])}."


def _others_text(gpu: GpuConditions) -> str:
    """State who else used a GPU, however briefly; "" if nobody is known to have used it."""
    mean, num_bytes = gpu.others or 0.0, gpu.others_bytes or 0.0
    most = math.ceil(mean) if gpu.most_others is None else gpu.most_others
    held = f"{formatting.times(num_bytes / 1e9)} GB"
    if not most:
        if num_bytes <= NOTABLE_BYTES:
            return ""
        return f"{held} held by others on average, whose processes are not listed"
    whose = f"{most:,} other process{'es' if most != 1 else ''}"
    with_bytes = f" with {held}" if num_bytes >= _SMALL_BYTES else ""
    if mean < most - NOTABLE_OTHERS:
        number = f"{mean:.2g}" if mean >= 0.01 else "less than 0.01"
        return f"up to {whose} (in the mean {number}{with_bytes})"
    return whose + (f"{with_bytes} in the mean" if with_bytes else "")
