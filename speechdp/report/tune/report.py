"""Write the report of a search: CSV, PNG and one self-contained page, from tune.json and the runs' files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from rich.console import Group

from speechdp.counting import counted
from speechdp.experiments.race.shown import ShownRaces, read_races
from speechdp.experiments.tune.curves import Finish
from speechdp.experiments.tune.jobs import measured_dirs
from speechdp.experiments.tune.record import (
    PREDICT,
    RUNS,
    BackendRecord,
    SettingRecord,
    TuneRecord,
    read_tune,
)
from speechdp.report.kit import formatting, theme
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.canvas import Canvas, dashes, named_canvas, style_axes
from speechdp.report.kit.metric_names import Terms, terms_of
from speechdp.report.kit.outside import load_text
from speechdp.report.kit.pages import WrittenReport, legend_marks, render_page, setting_facts, write_files
from speechdp.report.kit.scripts import several_versions, without_seed, wrong_way
from speechdp.report.kit.svg import Panel, panel_svgs, write_png
from speechdp.report.kit.tables import Column, RowHead, ShownTable, csv_text, with_figures
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.records import words
from speechdp.report.runs.results import SCRIPT, RunResult
from speechdp.report.runs.script_metric import script_task
from speechdp.report.runs.steadiness import notable_load
from speechdp.timing.load import OutsideLoad

FOLDER = "tune"
_SIZE = (5.6, 3.6)
_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
#: Columns of a terminal that holds a setting on one line.
_WIDE = 120
#: By which factor the interval of a race lies from a prediction that is called wrong.
_OFF = 1.1
#: Settings that the page shows elsewhere, or that say nothing to a reader.
_UNSHOWN = ("data", "strategies", "backends")


@dataclass(frozen=True)
class Search:
    """A search as its report needs it.

    Attributes:
        runs: of each setting that was trained, by seed.
        races: that of the search, unless none was held yet.
        loads: cores that did not work for the search as each back-end was measured, where enough to matter.
    """

    record: TuneRecord
    runs: Mapping[str, tuple[RunResult, ...]]
    races: ShownRaces = field(default_factory=ShownRaces)
    loads: Mapping[str, OutsideLoad] = field(default_factory=dict)

    @property
    def all_runs(self) -> list[RunResult]:
        """Those of all settings."""
        return [run for found in self.runs.values() for run in found]

    @property
    def terms(self) -> Terms:
        """The words for what settings are judged by; of a script also where no run tells them yet."""
        runs = self.all_runs
        if not runs and "script" in self.record.settings:
            return Terms(script_task(words(self.record.settings.get("metric"))), SCRIPT)
        return terms_of(runs)


def read_search(out: Path) -> Search:
    """Read a search.  Raises ConfigError where tune.json is damaged."""
    record = read_tune(out)
    metric = words(record.settings.get("metric"))
    runs = {
        one.name: tuple(
            read_run(out / RUNS / folder, metric)
            for folder in one.runs.values()
            if (out / RUNS / folder).is_dir()
        )
        for one in record.tried
    }
    loads = {
        one.name: max(found, key=lambda load: load.total)
        for one in record.backends
        if (
            found := [load for path in measured_dirs(out, one.name) if (load := notable_load(read_run(path)))]
        )
    }
    runs = {name: found for name, found in runs.items() if found}
    return Search(record, runs, read_races(out), loads)


def write_search(out: Path) -> WrittenReport:
    """Write OUT/tune/tune.{csv,png,html}.

    Raises:
        ConfigError: tune.json is damaged.
        RunError: the report cannot be written.
    """
    search = read_search(out)
    record = search.record
    answer, panel = find_answer(search), curves_panel(search)
    marks = legend_marks(named_canvas(list(search.runs), theme.PAGE))
    table, measured = make_table(search, marks), backends_table(search)
    drawn = panel_svgs([panel], lambda: named_canvas(list(search.runs), theme.PAGE))
    page = render_page(
        "tune",
        out.resolve().name,
        answer,
        plots_line=drawn,
        legend=list(marks.items()),
        table=table,
        backends=measured,
        command=record.command,
        settings=shown_settings(search),
    )
    canvas = named_canvas(list(search.runs), theme.PRINT)
    picture = partial(write_png, lines=[[panel]], canvas=canvas, with_names=True)
    html, csv, png = write_files(
        out / FOLDER,
        "tune",
        page,
        csv_of(record),
        {"tune": picture},
    )
    commands = (record.command,) if record.command else ()
    return WrittenReport(html, csv, png, Group(measured, table), (*answer.sentences, *commands))


def shown_settings(search: Search) -> list[tuple[str, str]]:
    """Return how the search was run as (title, text): the model and the batch of a rank first, as used."""
    own = [run for one in search.record.tried if not one.batch_size for run in search.runs.get(one.name, ())]
    used = next((run.settings for run in own if run.settings), {})
    first = [("preset", name)] if (name := words(used.get("preset"))) else []
    first += [("batch size", f"{size:,} a rank")] if isinstance(size := used.get("batch_size"), int) else []
    given = dict(search.record.settings)
    for group, option in (("model", "preset"), ("batch", "batch_size")):
        if first and isinstance(given.get(group), dict):
            given[group] = {key: value for key, value in given[group].items() if key != option}
    return [*first, *setting_facts(given, _UNSHOWN)]


def find_answer(search: Search) -> Answer:
    """Put what was found into words."""
    record, terms = search.record, search.terms
    cautions = ["Settings were judged on held-out data, which are no longer fit to report a final figure on."]
    if not record.has_measured:
        return Answer("Nothing is measured yet: the same command tries again, also with other settings.")
    if not record.chosen:
        return Answer("Nothing is chosen yet: the same command goes on with the search.")
    best = record.of(record.chosen)
    if record.completed and not best.times_s:
        return _alone(search, best)
    if not best.times_s:
        # The figures of a setting are read again by each command, which may have stopped before.
        has_learnt = bool(best.rungs) or any(best.name in rung.scores for rung in record.rungs)
        by = f"at {formatting.count(best.frames_per_s)} {terms.amount}/s"
        if best.frames_per_s is None:
            by = "as an earlier command found; the race has to be held again"
        cautions = ["The search is not over: the same command goes on with it."]
        if not has_learnt:
            cautions.insert(0, "It was chosen by its speed alone: how well settings learn was not seen yet.")
        headline = f"{'Best' if has_learnt else 'Fastest'} so far: {best.name}, {by}."
        return Answer(headline, (), tuple(cautions))
    end = Finish(best.times_s, best.scores)
    assert record.target is not None
    target = _target_text(terms, record.target)
    if end.mean_s == float("inf"):
        headline = f"{_none_reaches(record, target)}; {best.name} comes closest."
    else:
        compared = any(one.times_s for one in record.tried if one is not best)
        how = "soonest" if compared else "and is the only one left to do so"
        headline = f"{best.name} {_reaches(best, record)} {target} {how}: {_range_text(end)}."
    details = [
        *_expected_text(record),
        f"It trains at {formatting.count(best.frames_per_s)} {terms.amount}/s with back-end {record.backend}"
        + ("." if best.ratio is None else f", {_ratio_text(best)} times the speed of gradient averaging."),
    ]
    for one in record.tried:
        if one.name != record.chosen and one.times_s:
            details.append(_other(one, record))
    if record.untold:
        names = ", ".join(record.untold)
        cautions.insert(0, f"{names} cannot be told from {best.name} by so few seeds and so short a race.")
    if len(best.times_s) < 2:
        cautions.insert(0, "There was one seed: which differences are chance is not known.")
    cautions += [*_of_runs(search), *_one_batch_only(record), *_doubts(search)]
    ruled_out = sum(bool(one.out_in) for one in record.tried)
    details.append(
        f"{counted(len(record.tried), 'setting')} were tried, {ruled_out} of them ruled out before the end, "
        f"in {formatting.seconds(record.spent_s)}."
    )
    return Answer(headline, tuple(details), tuple(cautions))


def _of_runs(search: Search) -> list[str]:
    """Say what is to be known of the runs of a script, and of a race that was too short."""
    raced = {one.name: one.name for one in search.record.tried if one.ratio is not None}
    labelled = [(run, run.name) for run in search.all_runs]
    of_script = (
        without_seed(search.runs.values()),
        wrong_way(search.all_runs, " in another folder"),
        several_versions(labelled),
    )
    return [
        *search.races.cautions(dict.fromkeys(search.races.races, raced)),
        *filter(None, of_script),
    ]


def _alone(search: Search, best: SettingRecord) -> Answer:
    """Say which setting is left, where nothing had to be trained, and whether it was compared at all."""
    record, amount = search.record, search.terms.amount
    others = [one for one in record.tried if one is not best]
    uncompared = [one.name for one in others if one.out_in != PREDICT and one.ratio is None]
    headline, cautions = f"{best.name}: all other settings are ruled out by their speed.", list[str]()
    if not others:
        headline = f"{best.name}: no other setting was to be tried."
    elif uncompared:
        by_speed = len(others) - len(uncompared)
        headline = f"{best.name}: all other settings are ruled out, {by_speed or 'none'} of them by speed."
        cautions = [f"The speed of {', '.join(uncompared)} was not compared: the table says why."]
    if best.frames_per_s is None:
        speed = f"It is predicted to train at {_predicted_text(best)} {amount}/s; it has not raced."
    else:
        speed = f"It trains at {formatting.count(best.frames_per_s)} {amount}/s."
    return Answer(headline, (speed,), (*cautions, *_doubts(search)))


def _target_text(terms: Terms, target: float) -> str:
    """Write the target with the name of what it is of: `the held-out log-probability −0.407 nats/frame`."""
    text = terms.with_unit(target)
    return f"the {terms.metric.name} {text}" if terms.axis == terms.metric.unit else text


def _other(one: SettingRecord, record: TuneRecord) -> str:
    """Say when another of the last settings reaches the target."""
    end = Finish(one.times_s, one.scores)
    if end.mean_s == float("inf"):
        return f"{one.name}: {_range_text(end)}."
    return f"{one.name} {_reaches(one, record)} it after {_range_text(end)}."


def _none_reaches(record: TuneRecord, target: str) -> str:
    """Say that the target is not reached: by which settings, by how many of their runs, and until when."""
    times = [time for one in record.tried for time in one.times_s]
    every = " with every seed" if any(time is not None for time in times) else ""
    end_s = record.rungs[-1].seconds
    if record.seen_s is None:
        until, reaches = formatting.seconds(end_s), "reaches"
    else:  # curves are continued for as long again at most
        until, reaches = formatting.seconds(2 * end_s), "is expected to reach"
    return f"None of the last settings {reaches} {target}{every} within {until} of training"


def _one_batch_only(record: TuneRecord) -> list[str]:
    """Say where other batches were tried, but not with what was chosen."""
    with_others = list(dict.fromkeys(one.strategy for one in record.tried if one.batch_size))
    chosen = record.of(record.chosen).strategy
    if not with_others or chosen in with_others:
        return []
    return [
        f"Other batches were tried with {' and '.join(with_others)} only; to try them with the chosen "
        f"setting, give the same command another folder and --strategies {chosen}."
    ]


def _doubts(search: Search) -> list[str]:
    """Say what speaks against the predictions, where something rests on them: a sentence for each doubt."""
    record, notes = search.record, list[str]()
    ruled_out = sum(one.out_in == PREDICT for one in record.tried)
    what = f"what was ruled out by prediction ({counted(ruled_out, 'setting')})"
    compared = [one.name for one in record.backends if one.speed is not None]
    rests = [what] if ruled_out and record.backend in search.loads else []
    rests += ["which back-end was chosen"] if len(compared) > 1 else []
    busy = [f"{name}: {load_text(search.loads[name])}" for name in compared if name in search.loads]
    if busy and rests:
        notes.append(
            f"As back-ends were measured, they did not have the cores to themselves ({'; '.join(busy)}), by "
            f"which predictions may be off: {' and '.join(rests)} should be searched for again, in another "
            "folder, while nothing else runs there."
        )
    refuted = [text for one in record.tried if (text := _refuted(record, one))]
    if ruled_out and refuted:
        notes.append(
            f"The race refutes a prediction: {refuted[0]}. To be sure of {what}, compare those settings by "
            "`speechdp compare`."
        )
    return notes


def _refuted(record: TuneRecord, one: SettingRecord) -> str:
    """Say how far a setting's race is from its prediction, beside gradient averaging; "" where it is near."""
    reference = record.tried[0]
    if not (one.predicted and reference.predicted) or one.ratio_low is None or one.ratio_high is None:
        return ""
    predicted = one.predicted / reference.predicted
    if one.ratio_low <= predicted * _OFF and one.ratio_high >= predicted / _OFF:
        return ""
    return (
        f"{one.name} was to be {predicted:.2f} times as fast as {reference.name}, and is {_ratio_text(one)}"
    )


def make_table(search: Search, marks: Mapping[str, object]) -> ShownTable[SettingRecord]:
    """Return the table of all settings: those that came furthest first."""
    record, terms = search.record, search.terms
    order = sorted(record.tried, key=lambda one: _place(one, record))
    columns = with_figures(_columns(record, terms), order)
    rows = [
        (
            RowHead(
                one.name,
                mark=marks.get(one.name),  # type: ignore[arg-type]
                is_pale=bool(one.out_in),
                is_chosen=one.name == record.chosen,
            ),
            one,
        )
        for one in order
    ]
    held = " ".join(
        search.races.notes({ranks: list(race.speeds()) for ranks, race in search.races.races.items()})
    )
    note = (
        "Predicted: 90 % interval; raced: ratio within rounds, 95 % interval. Times are at the raced speed; "
        f"brackets hold the runs of the seeds. {held}"
    ).rstrip()
    return ShownTable(
        "settings", "What was tried", columns, rows, first="setting", note=note, wide_columns=_WIDE
    )


def backends_table(search: Search) -> ShownTable[BackendRecord]:
    """Return the table of the back-ends: what an exchange takes with each, as it was measured."""
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
        Column("latency", "latency", "µs", "Of a message, fitted to the exchanges [90 %].",
               lambda one: None if one.link is None else one.link.latency_s, cell=_latency_text),
        Column("bandwidth", "bandwidth", "Gbit/s", "In each direction, fitted to the exchanges [90 %].",
               lambda one: None if one.link is None else one.link.bytes_per_s, cell=_bandwidth_text),
        *(_exchange_column(*one, is_all=one[1] == largest) for one in measured),
        Column("choice", "choice", "", "Whether it was chosen, or why not.",
               lambda one: one.why or ("chosen" if one.name == record.backend else None), is_number=False),
    )  # fmt: skip


def _measured_exchanges(record: TuneRecord) -> list[tuple[str, float, int]]:
    """Return strategy, bytes and pieces of what was measured, with any back-end."""
    found = [(each.strategy, each.nbytes, each.pieces) for one in record.backends for each in one.exchanges]
    return list(dict.fromkeys(found))


def _exchange_column(strategy: str, nbytes: float, pieces: int, *, is_all: bool) -> Column[BackendRecord]:
    """Return the column of an exchange.

    Args:
        is_all: it is the whole model; else a part of it.
    """
    gradients = strategy.partition(":")[0] == "gradient_averaging"
    how = f"in {counted(pieces, 'bucket')}" if gradients else "whole" if is_all else "(a part)"
    meaning = f"Mean time to exchange {_size(nbytes)} with {strategy}, from when the last rank had come"
    meaning += "; of several buckets what backward did not hide." if pieces > 1 else "."

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
    mean, low, high = ("unlimited" if rate is None else f"{8e-9 * rate:.3g}" for rate in rates)
    return f"{mean} [{low}, {high}]"


def _measured_text(record: TuneRecord) -> str:
    """Say what the figures of exchanges are of."""
    links = [one.link for one in record.backends if one.link is not None]
    if not links:
        return ""
    where = "between nodes" if links[0].crosses else "inside a node"
    return (
        f"Measured on {formatting.rank_count(record.settings['ranks'])}; latency and bandwidth are those of "
        f"the link {where}, fitted as by speechdp simulate [90 % interval]; ms are means of an exchange once "
        "its last rank has come, in several buckets of what backward did not hide."
    )


def csv_of(record: TuneRecord) -> str:
    """Return every setting in plain units."""
    head = [
        *("strategy", "batch_size", "predicted_frames_per_s", "predicted_low", "predicted_high"),
        *("ratio", "ratio_low", "ratio_high", "frames_per_s", "rungs", "score", "time_to_target_s"),
        *("chosen", "ruled_out_in", "why"),
    ]
    lines = [
        [
            *(one.strategy, one.batch_size or None, one.predicted, one.predicted_low, one.predicted_high),
            *(one.ratio, one.ratio_low, one.ratio_high, one.frames_per_s, one.rungs, _score(one, record)),
            *(_time_s(one), int(one.name == record.chosen), one.out_in, one.why),
        ]
        for one in record.tried
    ]
    return csv_text(head, lines)


def curves_panel(search: Search) -> Panel:
    """Return the plot of held-out scores over training time."""
    return Panel("curves", "held-out figures over training time", _SIZE, lambda ax, c: _draw(ax, search, c))


def _draw(ax: Axes, search: Search, canvas: Canvas) -> bool:
    terms = search.terms
    style_axes(ax, "Over training time, at the speed of the race", terms.axis, canvas.theme)
    drawn = False
    for name, runs in search.runs.items():
        rate = search.record.of(name).steps_per_s
        for run in runs:
            points = [(one.step, one.score) for one in run.evaluations if one.score is not None]
            if not rate or not points:
                continue
            xs = [step / rate for step, _ in points]
            ys = [terms.metric.score(score) * terms.metric.scale for _, score in points]
            ax.plot(
                xs, ys, color=canvas.colours[name], linewidth=1.6, marker="o", markersize=3,
                linestyle=(0, dashes(name, canvas) or (1, 0)),
            )  # fmt: skip
            drawn = True
    ax.set_xlabel("training time (s)")
    return drawn


def _columns(record: TuneRecord, terms: Terms) -> tuple[Column[SettingRecord], ...]:
    rate = f"{terms.amount}/s"
    return (
        Column("predicted", "predicted", rate, "Predicted before anything but exchanges was measured [90 %].",
               lambda one: one.predicted, cell=_predicted_text, is_detail=True),
        Column("ratio", "raced", "times", "Speed over gradient averaging's in the same rounds [95 %].",
               lambda one: one.ratio, cell=_ratio_text),
        Column("frames_per_s", rate, "", "By the race.", lambda one: one.frames_per_s, formatting.count,
               is_detail=True),
        Column("rungs", "rungs", "", "In how many rungs of the halving it was trained.",
               lambda one: one.rungs or None, is_detail=True),
        Column("score", terms.short_name, terms.metric.unit, "At the end of its last rung.",
               lambda one: _score(one, record), terms.number),
        Column("time", "to target", "s", "Training time until the target [shortest, longest of the seeds]; "
               "after the last rung as it is expected.",
               _time_s, cell=_time_text),
        Column("why", "why not", "", "In which stage it was ruled out, and why; of the last "
               "settings how far behind.", lambda one: _why(one) or None,
               is_number=False),
    )  # fmt: skip


def _place(one: SettingRecord, record: TuneRecord) -> tuple[object, ...]:
    ended = Finish(one.times_s, one.scores).rank if one.times_s else (float("inf"), 0.0)
    return (
        one.name != record.chosen,
        not one.times_s,
        -one.rungs,
        ended,
        -(one.ratio or 0.0),
        -(one.predicted or 0.0),
    )


def _score(one: SettingRecord, record: TuneRecord) -> float | None:
    if one.scores:
        return sum(one.scores) / len(one.scores)
    return next((rung.scores[one.name] for rung in reversed(record.rungs) if one.name in rung.scores), None)


def _time_s(one: SettingRecord) -> float | None:
    if not one.times_s:
        return None
    mean = Finish(one.times_s, one.scores).mean_s
    return None if mean == float("inf") else mean


def _time_text(one: SettingRecord) -> str:
    if not one.times_s:
        return formatting.MISSING
    end = Finish(one.times_s, one.scores)
    if end.mean_s == float("inf"):
        missed, runs = end.times_s.count(None), len(end.times_s)
        return "not reached" if missed == runs else f"not by {missed} of {runs} seeds"
    low, high = end.range_s
    write = formatting.number
    return write(end.mean_s) + (f" [{write(low)}, {write(high)}]" if len(one.times_s) > 1 else "")


def _range_text(end: Finish) -> str:
    if end.mean_s == float("inf"):
        runs = len(end.times_s)
        reached = runs - end.times_s.count(None)
        return (
            f"the target is reached by {reached} of {runs} runs" if reached else "the target is not reached"
        )
    text = f"{formatting.seconds(end.mean_s)} of training"
    if len(end.times_s) < 2:
        return text  # one seed has no range
    low, high = end.range_s
    return f"{text} [{formatting.number(low)} to {formatting.number(high)} s]"


def _reaches(one: SettingRecord, record: TuneRecord) -> str:
    """Return the verb for what a setting does with the target."""
    return "is expected to reach" if _is_ahead(one, record) else "reaches"


def _is_ahead(one: SettingRecord, record: TuneRecord) -> bool:
    """Tell whether nobody has seen a setting reach the target with all seeds."""
    seen_s = record.seen_s
    return seen_s is not None and any(time is None or time > seen_s for time in one.times_s)


def _expected_text(record: TuneRecord) -> tuple[str, ...]:
    """Say what nobody has seen."""
    if record.seen_s is None or not any(_is_ahead(one, record) for one in record.tried):
        return ()
    return (
        f"They were trained for {formatting.seconds(record.seen_s)}; what comes after that is expected, from "
        "how much less each doubling of the time brought.",
    )


def _predicted_text(one: SettingRecord) -> str:
    if one.predicted is None:
        return formatting.MISSING
    write = formatting.count
    return f"{write(one.predicted)} [{write(one.predicted_low)}, {write(one.predicted_high)}]"


def _ratio_text(one: SettingRecord) -> str:
    if one.ratio is None:
        return formatting.MISSING
    if one.ratio_low is None or one.ratio_high is None:
        return formatting.times(one.ratio)
    return f"{one.ratio:.2f} [{one.ratio_low:.2f}, {one.ratio_high:.2f}]"


def _why(one: SettingRecord) -> str:
    return f"{one.out_in}: {one.why}" if one.out_in else one.why
