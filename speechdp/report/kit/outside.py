"""Words for what runs did not have to themselves: cores of their hosts, and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speechdp.counting import counted
from speechdp.report.kit import formatting
from speechdp.report.runs.results import GpuConditions, RankTiming, RunResult
from speechdp.report.runs.steadiness import NOTABLE_BYTES, NOTABLE_LOAD, NOTABLE_OTHERS, outside_load
from speechdp.timing.load import OutsideLoad

#: What held a clock down, by its name in the records.
_LIMITS = {
    "power": "the power limit",
    "heat": "heat",
    "hardware": "the hardware's slow-down",
    "settings": "a clock that was set",
}
#: Shares of the time below this are not named.
_SMALL_SHARE = 0.005
#: GPUs that a sentence names one by one.
_NAMED_GPUS = 4


@dataclass(frozen=True)
class _Gpu:
    """A GPU of a run, with the first of the ranks that used it."""

    rank: RankTiming
    conditions: GpuConditions
    num_hosts: int

    def __str__(self) -> str:
        where = f" on {self.rank.host}" if self.num_hosts > 1 else ""
        return f"GPU {self.conditions.index}{where}"


def stolen_text(load: OutsideLoad, before: str = "") -> str:
    """Name the cores that were stolen, apart from those busy with others' work; "" where too few to matter.

    Args:
        before: what goes before it where there is something to say.
    """
    if load.stolen <= NOTABLE_LOAD:
        return ""
    return f"{before}{load.stolen:.2g} stolen by the virtual machine's host"


def conditions_text(gpu: GpuConditions) -> str:
    """Say in a few words at which clock a GPU worked, and who else used it; "" where it is not known."""
    facts = [] if gpu.clock_mhz is None else [f"GPU clock {formatting.count(gpu.clock_mhz)} MHz"]
    facts += [others] if (others := _others_text(gpu)) else []
    return ", ".join(facts)


def outside_sentences(run: RunResult) -> list[str]:
    """Say what a run did not have to itself: clocks and other users of its GPUs, and cores of its hosts.

    Of a run without a GPU the cores are named only where some were stolen.
    """
    if run.timing is None:
        return []
    gpus = _gpus_of(run.timing.ranks)
    sentences = [_clocks(gpus), _limits(gpus), _other_users(gpus)]
    hosts = {rank.host: rank for rank in reversed(run.timing.ranks)}
    for rank in reversed(hosts.values()):
        load = outside_load(run.timing, rank)
        if load is not None and (gpus or stolen_text(load)) and load.total > NOTABLE_LOAD:
            where = f"On {rank.host}: " if len(hosts) > 1 else ""
            text = f"{where}{load.others:.2g} cores busy with other work{stolen_text(load, ' and ')}."
            sentences.append(text)
    return [sentence for sentence in sentences if sentence]


def shares_gpus(run: RunResult) -> bool:
    """Return whether others were seen on a run's GPUs."""
    ranks = () if run.timing is None else run.timing.ranks
    return any(_others_text(gpu.conditions) for gpu in _gpus_of(ranks))


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
    """Say what held clocks down, in the mean over the GPUs."""
    shares = {name: sum(gpu.conditions.limits.get(name, 0.0) for gpu in gpus) / len(gpus)
              for name in _LIMITS if gpus}  # fmt: skip
    named = [
        f"{formatting.percent(share)}\u00a0% of that time by {_LIMITS[name]}"
        for name, share in shares.items()
        if share >= _SMALL_SHARE
    ]
    return f"Held down {', '.join(named)}." if named else ""


def _other_users(gpus: Sequence[_Gpu]) -> str:
    told = [gpu for gpu in gpus if gpu.conditions.others is not None]
    if not told:
        return ""
    used = [(gpu, text) for gpu in told if (text := _others_text(gpu.conditions))]
    if not used:
        which = "the" if len(told) == len(gpus) else f"{len(told)} of the"
        return f"Nobody else was seen on {which} GPU{'s' if len(gpus) > 1 else ''}."
    named = [f"{gpu}: {text}" for gpu, text in used[:_NAMED_GPUS]]
    num_more = len(used) - _NAMED_GPUS
    more = [f"and others on {counted(num_more, 'more GPU')}"] if num_more > 0 else []
    return f"{'; '.join([*named, *more])}."


def _others_text(gpu: GpuConditions) -> str:
    """Say who else used a GPU; "" where nobody is known to have."""
    num_bytes = gpu.others_bytes or 0.0
    held = f"{formatting.times(num_bytes / 1e9)} GB"
    if (gpu.others or 0.0) > NOTABLE_OTHERS:
        most, mean = gpu.most_others or 1, gpu.others or 0.0
        whose = f"{most} other process{'es' if most != 1 else ''}"
        if mean < most - NOTABLE_OTHERS:
            whose = f"up to {whose} ({mean:.2g} in the mean)"
        return whose + (f" with {held}" if num_bytes else "")
    return f"{held} held by others, whose processes are not listed" if num_bytes > NOTABLE_BYTES else ""
