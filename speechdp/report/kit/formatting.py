"""Write numbers and run names in one style for tables, plots and the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from speechdp.counting import counted
from speechdp.decode.paired import Difference
from speechdp.report.runs.results import Estimate, RunResult, WordErrors

#: Placeholder for a value that a run did not record.
MISSING = "-"
MINUS = "\u2212"
#: Name of training on one rank, whatever its strategy.
ONE_RANK_LABEL = "one rank"


def count(value: float | None) -> str:
    """Write a rate or a count with thousands separated: `21,400`; below 100 with three significant digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def estimate(value: float | None, digits: int = 2) -> str:
    """Write a rate that is known only roughly: `21,000`.

    Args:
        digits: number of significant digits; more if an interval beside it needs them.
    """
    return MISSING if value is None else count(float(f"{value:.{digits}g}"))


def number(value: float) -> str:
    """Write a number with three digits, at most three of them after the decimal point: `1,240`, `12.3`."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:.{digits}f}"


def rough(value: float) -> str:
    """Write a number with two digits, or with all those before the decimal point: `0.042`, `3.1`, `255`."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def milliseconds(seconds: float) -> str:
    """Write seconds in ms without the unit: `12.3`, `1,240`."""
    return number(1e3 * seconds)


def rank_count(ranks: int) -> str:
    """Write a number of ranks: `1 rank`, `4 ranks`."""
    return counted(ranks, "rank")


def learning_rate(value: float) -> str:
    """Write a learning rate with the fewest digits that identify it: `0.002`, `1e-05`, `0.00123456789`."""
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def times(value: float | None) -> str:
    """Write a ratio: `1.72`."""
    return MISSING if value is None else f"{value:.2f}"


def percent(value: float | None, digits: int = 0) -> str:
    """Write a share, 0 to 1, in percent without the sign: `8.6`."""
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
    """Write bytes, or bytes/s, in units of 10^6: `1,240`, `3.4`."""
    return MISSING if value is None else count(value / 1e6)


def gigabits(bytes_per_s: float) -> str:
    """Write a bandwidth in Gbit/s without the unit: `0.0878`, `25`, `3,600`."""
    return count(8e-9 * bytes_per_s)


def capital(text: str) -> str:
    """Capitalize the first letter of a label; leave folder names (no spaces) as they are."""
    return text[:1].upper() + text[1:] if " " in text else text


def word_errors(value: WordErrors | None) -> str:
    """Write a word error rate and its interval, in percent without the sign: `1.3 [0.3, 2.7]`."""
    return MISSING if value is None else error_rate(Estimate(value.wer, value.low, value.high))


def difference(value: Difference | None) -> str:
    """Write the difference of two rates, in percentage points: `0.8 [−0.3, 1.9]`.

    A difference without uncertainty has no interval: `0.0` for the lowest rate itself.
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
    """Name a strategy for readers: `bmuf (period=16)`, `gradient averaging`, `one rank`.

    Args:
        strategy: the strategy with its options, as the user chose it.
        ranks: number of ranks; a single rank has nothing to exchange, so its strategy is not named.
    """
    if ranks == 1:
        return ONE_RANK_LABEL
    name, _, options = strategy.partition(":")
    words = name.replace("_", " ")
    return f"{words} ({options.replace(',', ', ')})" if options else words


def run_labels(runs: Sequence[RunResult]) -> dict[str, str]:
    """Name the runs for readers: `period 16`, `gradient averaging`, `one rank`.

    The strategy is omitted if all runs with a period have the same one.  A run is named by its folder if its
    label would not be unique, or if its settings are lost.
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
