"""Say first of all where the machine was not the same for the runs that are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from speechdp.report.kit import formatting
from speechdp.report.runs.results import RunResult
from speechdp.report.runs.steadiness import Circumstances, find_unsteadiness


def machine_warning(runs: Iterable[RunResult], labels: Mapping[str, str], *, raced: bool = False) -> str:
    """Return a sentence or two, by what to measure and when; "" where nothing speaks against the runs.

    Args:
        runs: those whose speeds are compared.
        labels: of runs, by their names.
        raced: speeds are compared by a race, and only what else the runs timed is in doubt.
    """
    found = find_unsteadiness(runs)
    if found is None:
        return ""
    slow, fast = found.slow, found.fast
    where = f" on {slow.host}" if slow.host else ""
    doubt = (
        "Speeds that were measured one after another under such conditions say little about the settings: "
        "measure them again while nothing else runs there."
    )
    if raced:
        doubt = (
            "The race's speeds do not suffer from it, but the runs' own figures of time do (throughput, time "
            "to target, shares of the step time)."
        )
    return (
        f"The machine was not the same for all runs: on rank {slow.rank}{where} a forward pass of the same "
        f"model took {formatting.percent(found.excess)} % longer in {_named(slow, labels)} than in "
        f"{_named(fast, labels)}. {doubt}"
    )


def _named(one: Circumstances, labels: Mapping[str, str]) -> str:
    started = str(one.run.settings.get("started", ""))[:16].replace("T", " ")
    facts = [f"started {started}"] if started else []
    if one.elsewhere is not None:
        facts.append(f"{one.elsewhere:.2g} cores busy with other work")
    return labels[one.run.name] + (f" ({', '.join(facts)})" if facts else "")
