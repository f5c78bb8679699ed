"""The tables of a search, for its settings and its back-ends, and the CSV of the settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from markupsafe import Markup

from speechdp.counting import counted
from speechdp.experiments.tune.record import BackendRecord, SettingRecord, TuneRecord
from speechdp.report.kit import formatting
from speechdp.report.kit.metric_names import Terms
from speechdp.report.kit.speeds import times_text
from speechdp.report.kit.tables import Column, RowHead, ShownTable, csv_text, with_figures
from speechdp.report.tune.search import Search

_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
#: Terminal width for a setting on one line, characters.
_WIDE = 120


def make_table(search: Search, marks: Mapping[str, Markup]) -> ShownTable[SettingRecord]:
    """Return the table of all settings; those that came furthest are first."""
    record, terms = search.record, search.terms
    order = sorted(record.tried, key=lambda one: _place(one, record))
    columns = with_figures(_columns(record, terms), order)
    rows = [
        (
            RowHead(
                one.name,
                mark=marks.get(one.name),
                is_pale=bool(one.out_in),
                is_chosen=one.name == record.chosen,
            ),
            one,
        )
        for one in order
    ]
    note = " ".join(_notes(search, {column.key for column in columns}))
    return ShownTable(
        "settings", "What was tried", columns, rows, first="setting", note=note, wide_columns=_WIDE
    )


def _notes(search: Search, shown: Collection[str]) -> list[str]:
    """Return what the figures of the shown columns are, and how the race was held."""
    intervals = {
        "predicted": "predicted: 90 % interval",
        "ratio": "raced: ratio within rounds, 95 % interval",
    }
    known = [text for key, text in intervals.items() if key in shown]
    notes = [f"{formatting.capital('; '.join(known))}."] if known else []
    if "time" in shown:
        notes.append(f"Times are at the {search.speed} speed; brackets hold the runs of the seeds.")
    held = search.races.notes({ranks: list(race.speeds()) for ranks, race in search.races.races.items()})
    return [*notes, *held]


def _columns(record: TuneRecord, terms: Terms) -> tuple[Column[SettingRecord], ...]:
    rate = f"{terms.amount}/s"
    # The time to the target decides; before it is known, the score is all that is.
    has_times = any(one.times_s for one in record.tried)
    return (
        Column("predicted", "predicted", rate, "From the measured steps and exchanges [90 % interval].",
               lambda one: one.predicted, cell=predicted_text, is_detail=True),
        Column("ratio", "raced", "times", "Speed over gradient averaging's in a round [95 % interval].",
               lambda one: one.ratio, cell=ratio_text),
        Column("frames_per_s", rate, "", "From the race; without one, as predicted.",
               lambda one: one.frames_per_s, formatting.count, is_detail=True),
        Column("rungs", "rungs", "", "In how many rungs of the halving it was trained.",
               lambda one: one.rungs or None, is_detail=True),
        Column("score", terms.short_name, terms.metric.unit, "At the end of its last rung.",
               lambda one: _score(one, record), terms.number, is_detail=has_times),
        Column("time", "to target", "s", "Training time until the target [shortest, longest of the "
               "seeds]; extrapolated if that is after the last rung.",
               _time_s, cell=_time_text),
        Column("why", "why not", "", "In which stage it was ruled out, and why; for the last settings, "
               "how far behind they are.", lambda one: _why(one) or None,
               is_number=False),
    )  # fmt: skip


def _place(one: SettingRecord, record: TuneRecord) -> tuple[object, ...]:
    end = one.finish
    return (
        one.name != record.chosen,
        end is None,
        -one.rungs,
        () if end is None else end.rank,
        -(one.ratio or 0.0),
        -(one.predicted or 0.0),
    )


def _score(one: SettingRecord, record: TuneRecord) -> float | None:
    if one.scores:
        return sum(one.scores) / len(one.scores)
    return next((rung.scores[one.name] for rung in reversed(record.rungs) if one.name in rung.scores), None)


def _time_s(one: SettingRecord) -> float | None:
    end = one.finish
    return end.mean_s if end is not None and end.is_reached else None


def _time_text(one: SettingRecord) -> str:
    end = one.finish
    if end is None:
        return formatting.MISSING
    if not end.is_reached:
        missed, runs = end.times_s.count(None), len(end.times_s)
        return "not reached" if missed == runs else f"not by {missed} of {runs} seeds"
    low, high = end.range_s
    write = formatting.number
    return write(end.mean_s) + (f" [{write(low)}, {write(high)}]" if len(end.times_s) > 1 else "")


def _why(one: SettingRecord) -> str:
    return f"{one.out_in}: {one.why}" if one.out_in else one.why


def predicted_text(one: SettingRecord) -> str:
    """Write a setting's predicted speed and its interval, without a unit: `21,400 [20,100, 22,800]`."""
    if one.predicted is None:
        return formatting.MISSING
    write = formatting.count
    return f"{write(one.predicted)} [{write(one.predicted_low)}, {write(one.predicted_high)}]"


def ratio_text(one: SettingRecord) -> str:
    """Write a setting's raced speed relative to gradient averaging, with interval: `1.28 [1.21, 1.35]`."""
    low, high = one.ratio_low, one.ratio_high
    return times_text(one.ratio, None if low is None or high is None else (low, high))


def backends_table(search: Search) -> ShownTable[BackendRecord]:
    """Return the table of the back-ends with their measured exchange times."""
    record = search.record
    rows = [
        (RowHead(one.name, is_pale=bool(one.why), is_chosen=one.name == record.backend), one)
        for one in record.backends
    ]
    columns = with_figures(_backend_columns(record, search.terms.amount), record.backends)
    note = _measured_text(record)
    return ShownTable("backends", "Back-ends", columns, rows, first="back-end", note=note, wide_columns=_WIDE)


def _backend_columns(record: TuneRecord, amount: str) -> tuple[Column[BackendRecord], ...]:
    measured = _measured_exchanges(record)
    largest = max((nbytes for _, nbytes, _ in measured), default=0.0)
    return (
        Column("predicted", "predicted", f"{amount}/s", "Geometric mean over the settings.",
               lambda one: one.speed, formatting.count),
        Column("latency", "latency", "µs", "Of a message, fitted to the exchanges [90 % interval].",
               lambda one: None if one.link is None else one.link.latency_s, cell=_latency_text),
        Column("bandwidth", "bandwidth", "Gbit/s", "Each way, fitted to the exchanges [90 % interval].",
               lambda one: None if one.link is None else one.link.bytes_per_s, cell=_bandwidth_text),
        *(_exchange_column(*one, is_all=one[1] == largest) for one in measured),
        Column("choice", "choice", "", "Whether it was chosen, or why not.",
               lambda one: one.why or ("chosen" if one.name == record.backend else None), is_number=False),
    )  # fmt: skip


def _measured_exchanges(record: TuneRecord) -> list[tuple[str, float, int]]:
    """Return (strategy, bytes, pieces) of each exchange measured with any back-end."""
    found = [(each.strategy, each.nbytes, each.pieces) for one in record.backends for each in one.exchanges]
    return list(dict.fromkeys(found))


def _exchange_column(strategy: str, nbytes: float, pieces: int, *, is_all: bool) -> Column[BackendRecord]:
    """Return the column of an exchange.

    Args:
        strategy: strategy of the exchange, with its options.
        nbytes: size of the exchanged vector.
        pieces: number of buckets.
        is_all: the whole model is exchanged, rather than a part.
    """
    gradients = strategy.partition(":")[0] == "gradient_averaging"
    how = f"in {counted(pieces, 'bucket')}" if gradients else "whole" if is_all else "(a part)"
    meaning = f"Mean time to exchange {_size(nbytes)} with {strategy}, from when the last rank arrived"
    meaning += "; with several buckets, the part that backward did not hide." if pieces > 1 else "."

    def seconds(one: BackendRecord) -> float | None:
        return next((each.seconds for each in one.exchanges if each.strategy == strategy), None)

    return Column(
        strategy, f"{_size(nbytes)} {how}", "ms", meaning, seconds, formatting.milliseconds, is_detail=True
    )


def _size(nbytes: float) -> str:
    """Write the size of a vector: `3.4 MB`, `14.7 kB`, `306 B`."""
    unit, of_unit = next(one for one in _SIZES if nbytes >= one[1] or one[1] == 1)
    return f"{nbytes / of_unit:.3g} {unit}"


def _latency_text(one: BackendRecord) -> str:
    if one.link is None:
        return formatting.MISSING
    micro = formatting.number
    if not one.link.knows_latency:
        return f"{micro(1e6 * one.link.latency_s)} (assumed)"
    low, high = 1e6 * one.link.latency_low, 1e6 * one.link.latency_high
    return f"{micro(1e6 * one.link.latency_s)} [{micro(low)}, {micro(high)}]"


def _bandwidth_text(one: BackendRecord) -> str:
    if one.link is None:
        return formatting.MISSING
    rates = one.link.bytes_per_s, one.link.bytes_per_s_low, one.link.bytes_per_s_high
    mean, low, high = ("unlimited" if rate is None else formatting.gigabits(rate) for rate in rates)
    return f"{mean} [{low}, {high}]"


def _measured_text(record: TuneRecord) -> str:
    """Return the note on what the figures of the back-ends mean."""
    links = [one.link for one in record.backends if one.link is not None]
    if not links:
        return ""
    where = "between nodes" if links[0].crosses else "inside a node"
    return (
        f"Measured on {formatting.rank_count(record.settings['ranks'])}; latency and bandwidth are those of "
        f"the link {where}, fitted as by speechdp simulate [90 % interval]; ms are means of an exchange "
        "from when its last rank arrived; with several buckets, of the part that backward did not hide."
    )


def csv_of(record: TuneRecord) -> str:
    """Return all settings as CSV, in plain units."""
    head = [
        *("strategy", "batch_size", "learning_rate"),
        *("predicted_frames_per_s", "predicted_low", "predicted_high"),
        *("ratio", "ratio_low", "ratio_high", "frames_per_s", "rungs", "score", "time_to_target_s"),
        *("chosen", "ruled_out_in", "why"),
    ]
    lines = [
        [
            *(one.strategy, one.batch_size or None, one.learning_rate),
            *(one.predicted, one.predicted_low, one.predicted_high),
            *(one.ratio, one.ratio_low, one.ratio_high, one.frames_per_s, one.rungs, _score(one, record)),
            *(_time_s(one), int(one.name == record.chosen), one.out_in, one.why),
        ]
        for one in record.tried
    ]
    return csv_text(head, lines)
