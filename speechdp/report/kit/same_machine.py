"""Warn if the machine's speed was not the same for all runs of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from speechdp.report.kit import formatting
from speechdp.report.kit.outside import conditions_text, load_text
from speechdp.report.runs.results import RunResult
from speechdp.report.runs.steadiness import Circumstances, find_unsteadiness

#: What is in doubt if the machine was not the same for all runs: the speeds compared; if those come from a
#: race, all other times; the predictions made from the runs.
SPEEDS = (
    "Speeds that were measured one after another under such conditions say little about the settings: "
    "measure them again while nothing else runs there."
)
ALL_BUT_SPEEDS = (
    "The race's speeds do not suffer from it, but the runs' own figures of time do (throughput, time "
    "to target, shares of the step time)."
)
PREDICTIONS = (
    "What is predicted from both may be off by as much: train again while nothing else runs there, or "
    "simulate from one run that nothing disturbed."
)


def machine_warning(runs: Iterable[RunResult], labels: Mapping[str, str], doubt: str = SPEEDS) -> str:
    """Return a warning naming the two runs that differ most and their conditions; "" if none is needed.

    Args:
        runs: runs that are compared, or combined.
        labels: labels of the runs, by run name.
        doubt: a sentence on what is in doubt because of it.
    """
    found = find_unsteadiness(runs)
    if found is None:
        return ""
    slow, fast = found.slow, found.fast
    where = f" on {slow.host}" if slow.host else ""
    longer, than = f"{formatting.percent(found.excess)} % longer", "than"
    if found.excess >= 1:
        longer, than = f"{formatting.number(1 + found.excess)} times as long", "as"
    return (
        f"The machine was not the same for all runs: on rank {slow.rank}{where} a forward pass of the same "
        f"model took {longer} in {_named(slow, labels)} {than} in {_named(fast, labels)}. {doubt}"
    )


def _named(one: Circumstances, labels: Mapping[str, str]) -> str:
    started = str(one.run.settings.get("started", ""))[:16].replace("T", " ")
    facts = [f"started {started}"] if started else []
    if one.outside is not None:
        facts.append(load_text(one.outside))
    if one.gpu is not None and (conditions := conditions_text(one.gpu)):
        facts.append(conditions)
    return labels[one.run.name] + (f" ({', '.join(facts)})" if facts else "")
