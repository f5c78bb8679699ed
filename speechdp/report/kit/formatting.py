"""How numbers and runs are written in the table, the plots and the answer: one place, one style."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from speechdp.counting import counted
from speechdp.decode.paired import Difference
from speechdp.report.runs.results import Estimate, RunResult, WordErrors

#: Stands where a run recorded nothing.
MISSING = "-"
MINUS = "\u2212"
#: What training on one rank is called, whatever strategy it was started with.
ONE_RANK_LABEL = "one rank"


def count(value: float | None) -> str:
    """Write a rate or a count with thousands separated: `21,400`; three digits at least."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def estimate(value: float | None, digits: int = 2) -> str:
    """Write a rate that is known roughly: two digits, `21,000`, or as many as an interval needs beside it."""
    return MISSING if value is None else count(float(f"{value:.{digits}g}"))


def number(value: float) -> str:
    """Write a number with three digits, at most three of them after the point, thousands separated."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:.{digits}f}"


def milliseconds(seconds: float) -> str:
    """Write seconds in ms without the unit: `12.3`, `1,240`."""
    return number(1e3 * seconds)


def rank_count(ranks: int) -> str:
    """Write a number of ranks: `1 rank`, `4 ranks`."""
    return counted(ranks, "rank")


def learning_rate(value: float) -> str:
    """Return a learning rate in as few digits as tell it from every other: 0.002, 1e-05, 0.00123456789."""
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def times(value: float | None) -> str:
    """Write a ratio: `1.72`."""
    return MISSING if value is None else f"{value:.2f}"


def percent(value: float | None, digits: int = 0) -> str:
    """Write a share of 0 to 1 without its sign: `8.6`."""
    return MISSING if value is None else f"{100 * value:.{digits}f}"


def seconds(value: float | None) -> str:
    """Write a duration: `8.3 s`, `6 min 05 s`, `2 h 10 min`."""
    if value is None:
        return MISSING
    if value < 100:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def megabytes(value: float | None) -> str:
    """Write bytes (a second) in 10^6: `1,240`, `3.4`."""
    return MISSING if value is None else count(value / 1e6)


def capital(text: str) -> str:
    """Upper-case the first letter of a label, but leave folder names as they are."""
    return text[:1].upper() + text[1:] if " " in text else text


def word_errors(value: WordErrors | None) -> str:
    """Write a word error rate and its interval, in percent without the sign: `1.3 [0.3, 2.7]`."""
    return MISSING if value is None else error_rate(Estimate(value.wer, value.low, value.high))


def difference(value: Difference | None) -> str:
    """Write what a rate is above another, in percentage points: `0.8 [−0.3, 1.9]`.

    Without an interval where there is no chance in it: `0.0` of the lowest itself.
    """
    if value is None:
        return MISSING
    is_certain = value.low == value.high
    ends = (None, None) if is_certain else (value.low, value.high)
    return error_rate(Estimate(value.mean, *ends)).replace("-", MINUS)


def error_rate(value: Estimate | None) -> str:
    """Write a rate and its interval, in percent without the sign: `1.3 [0.3, 2.7]`."""
    if value is None:
        return MISSING
    if value.low is None or value.high is None:
        return percent(value.mean, 1)
    return f"{percent(value.mean, 1)} [{percent(value.low, 1)}, {percent(value.high, 1)}]"


def strategy_label(strategy: str, ranks: int) -> str:
    """Name what was trained for people: `bmuf (period=16)`, `gradient averaging`, `one rank`.

    Args:
        strategy: with its options, as it was chosen.
        ranks: how many it was trained on; one alone has nothing to exchange.
    """
    if ranks == 1:
        return ONE_RANK_LABEL
    name, _, options = strategy.partition(":")
    words = name.replace("_", " ")
    return f"{words} ({options.replace(',', ', ')})" if options else words


def run_labels(runs: Sequence[RunResult]) -> dict[str, str]:
    """Name the runs for people: `period 16`, `gradient averaging`, `one rank`.

    The strategy is left out where several periods of one are compared; where two runs would read alike, or a
    run lost its settings, the folder's name stands instead.
    """
    with_period = [run.strategy for run in runs if run.model_period is not None]
    compares_periods = len(with_period) > 1 and len(set(with_period)) == 1
    labels: dict[str, str] = {}
    for run in runs:
        strategy = run.strategy.replace("_", " ")
        if run.is_baseline or (run.size == 1 and run.model_period is None):
            labels[run.name] = ONE_RANK_LABEL
        elif run.model_period is not None:
            prefix = "" if compares_periods else f"{strategy}, "
            labels[run.name] = f"{prefix}period {run.model_period}"
        else:
            labels[run.name] = strategy or run.name
    uses = Counter(labels.values())
    return {name: label if uses[label] == 1 else name for name, label in labels.items()}
