"""Write the report of a comparison: CSV, PNG and one self-contained page, from the files of its runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from markupsafe import Markup
from rich.console import Group as RichGroup
from rich.text import Text

from speechdp.report.compare.choice import choose, rule_for
from speechdp.report.compare.groups import (
    ComparedRun,
    Comparison,
    compared_by_race,
    make_groups,
    make_trials,
    read_comparison,
    target_of_most,
)
from speechdp.report.compare.panels import make_canvas, make_panels, plots_note
from speechdp.report.compare.rates import rate_cautions
from speechdp.report.compare.table import csv_of_groups, make_tables, spread_note, trial_table
from speechdp.report.kit import theme
from speechdp.report.kit.choice import metric_meanings
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.kit.outside import outside_sentences
from speechdp.report.kit.pages import (
    WrittenReport,
    legend_marks,
    render_page,
    setting_facts,
    setting_text,
    write_files,
)
from speechdp.report.kit.svg import panel_svgs, write_png

#: Settings that mean nothing to a reader: the checksum of the data.
_UNSHOWN = ("data",)


def write_comparison(out: Path, target: float | None = None, metric: str = "") -> WrittenReport:
    """Write OUT/compare/compare.{csv,png,html}.

    Args:
        out: folder of a comparison.
        target: value of the task's first metric for the time to target, e.g. a held-out log-probability in
            nats/frame; None: the best that three quarters of the runs at equal frames reached.
        metric: metric of runs of a script; "": the one in compare.json, else the one they log last.

    Raises:
        ConfigError: compare.json is damaged, or `target` cannot be reached.
        RunError: the report cannot be written.
    """
    comparison = read_comparison(out, metric)
    # Include trials: a comparison that is still trying learning rates has no other results.
    results = [run.result for run in (*comparison.runs, *comparison.trials) if run.result is not None]
    terms = terms_of(results)
    target = terms.score_of_target(target)
    if target is None:
        target = target_of_most(comparison.runs)
    until = None if target is None else terms.with_unit(target)
    groups, trials = make_groups(comparison, target), make_trials(comparison, target)
    before = (
        *rate_cautions(trials, groups),
        *_failed_races(comparison),
        *comparison.races.cautions(compared_by_race(groups)),
    )
    choice, lines = choose(groups, before), make_panels(groups)
    canvas = make_canvas(groups, theme.PAGE)
    marks = legend_marks(canvas)
    tables = make_tables(groups, choice.chosen.values(), marks)
    tables += [trial_table(trials, groups, marks)] if trials else []
    drawn = [panel_svgs(line, lambda: make_canvas(groups, theme.PAGE)) for line in lines]
    page = render_page(
        "comparison",
        out.resolve().name,
        choice,
        " ".join(filter(None, (rule_for(groups) if choice.chosen else "", metric_meanings(results)))),
        race_notes=comparison.races.notes(compared_by_race(groups)),
        lines=_lines([line for line in drawn if line]),
        legend=list(marks.items()),
        amount=terms.amount,
        tables=tables,
        target=until,
        spread_note=spread_note(groups),
        plots_note=plots_note(groups),
        settings=_settings(comparison),
        runs=[_facts(run) for run in (*comparison.trials, *comparison.runs)],
    )
    picture = partial(write_png, lines=lines, canvas=make_canvas(groups, theme.PRINT), with_names=True)
    html, csv, png = write_files(
        out / "compare", "compare", page, csv_of_groups([*groups, *trials], target), {"compare": picture}
    )
    to_target = "" if until is None else f"To target: until {until} on held-out data."
    notes = " ".join(filter(None, (to_target, spread_note(groups))))
    below = [Text(f"{notes}\n")] if notes else []
    terminal = [replace(table, note="") for table in tables]
    return WrittenReport(html, csv, png, RichGroup(*terminal, *below), choice.sentences)


def _failed_races(comparison: Comparison) -> list[str]:
    return [
        f"The race on {ranks} ranks failed: {message}. The same command tries it again."
        for ranks, message in comparison.failed_races.items()
    ]


def _lines(drawn: list[list[tuple[str, Markup]]]) -> list[list[tuple[str, Markup]]]:
    """Return the plots in lines as on the page; if each line has only one plot, all go into one line."""
    return drawn if any(len(line) > 1 for line in drawn) else [list(chain.from_iterable(drawn))] * bool(drawn)


def _settings(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the settings that all runs share as (title, text), without those left at their defaults."""
    found: list[tuple[str, str]] = []
    for key, value in comparison.settings.items():
        given = value if isinstance(value, dict) else {key: value}
        found += setting_facts(given, _UNSHOWN)
    return found


def _facts(run: ComparedRun) -> tuple[str, str, list[tuple[str, str]], tuple[str, ...]]:
    """Return a run's title, its state ("" if finished), settings as (title, text), and problems."""
    record, result = run.record, run.result
    facts = [("folder", record.folder or "not begun")]
    facts += [("epochs", str(record.epochs))] if record.epochs else []
    facts += [("failed", record.message)] if record.message else []
    if result is not None and result.settings:
        facts += [
            (title, setting_text(title, result.settings.get(key, "not recorded")))
            for key, title in (("strategy", "strategy"), ("backend", "back-end"))
        ]
        if "batch_size" in result.settings:
            facts.append(("batch size", f"{result.settings['batch_size']} a rank"))
        if outside := outside_sentences(result):
            facts.append(("conditions", " ".join(outside)))
    state = "" if run.is_finished else record.state
    return record.planned.title, state, facts, result.problems if result else ()
