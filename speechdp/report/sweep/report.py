"""Write the report of a sweep or a run: CSV, PNG and one self-contained page, from the files of its runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group

from speechdp.experiments.race.shown import ShownRaces, read_races
from speechdp.report.kit import formatting, theme
from speechdp.report.kit.canvas import make_canvas
from speechdp.report.kit.choice import metric_meanings, over_lowest
from speechdp.report.kit.columns import FigureColumn, resumed_note
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.kit.outside import outside_sentences
from speechdp.report.kit.pages import WrittenReport, render_page, setting_text, swatch, write_files
from speechdp.report.kit.svg import Panel, panel_svgs, write_png
from speechdp.report.kit.tables import RowHead, ShownTable, with_figures
from speechdp.report.runs.derived import RunFigures, sweep_figures, target_of_all, with_race
from speechdp.report.runs.folders import read_sweep
from speechdp.report.runs.results import Sweep
from speechdp.report.sweep.answer import SweepAnswer, comparable_rows, find_answer, rule_for
from speechdp.report.sweep.bars import SPAN_KEYS
from speechdp.report.sweep.columns import csv_of_runs, main_columns
from speechdp.report.sweep.data_answer import path_sentences
from speechdp.report.sweep.data_columns import CSV_COLUMNS, shown_columns
from speechdp.report.sweep.figures import make_panels
from speechdp.report.sweep.resources import sampling_notices
from speechdp.report.sweep.speech_columns import SPEECH_COLUMNS, SPEECH_TITLE, speech_caption

#: Terminal width for the figures of a run on one line, and for its data path, characters.
_WIDE, _WIDE_DATA = 160, 230
#: Additional width for speeds in a race, characters.
_RACED = 20
#: Settings shown for each run, in this order; run.json may hold more.
SETTINGS = {
    "strategy": "strategy",
    "backend": "back-end",
    "size": "ranks",
    "hosts": "hosts",
    "device": "device",
    "preset": "model",
    "num_parameters": "parameters",
    "batch_size": "batch size",
    "seed": "seed",
    "data": "data",
    "started": "started",
    "command": "command",
    "versions": "versions",
}


def write_report(out_dir: Path, target: float | None = None, metric: str = "") -> WrittenReport:
    """Write OUT/report/report.{csv,png,html}.

    Args:
        out_dir: folder of a sweep, of several runs, or of one run.
        target: value of the task's first metric for the time to target: a held-out log-probability in
            nats/frame, the L1 error for synthesis, a share in %; None: the best that every run reached.
        metric: metric of runs of a script; see `read_sweep`.

    Raises:
        ConfigError: there is no run in `out_dir`, `target` cannot be reached, or no run logged `metric`.
        RunError: the report cannot be written.
    """
    sweep = read_sweep(out_dir, metric)
    terms = terms_of(sweep.runs)
    target = terms.score_of_target(target)
    if target is None:
        target = target_of_all(sweep.runs)
    until = None if target is None else terms.with_unit(target)
    races = read_races(out_dir)
    labels = formatting.run_labels(sweep.runs)
    rows = sweep_figures(sweep, target)
    comparable = comparable_rows(rows)
    names = [row.run.name for row in comparable]
    rows = [
        replace(
            row, wer_over_lowest=over_lowest(row, comparable, comparable) if row.run.name in names else None
        )
        for row in rows
    ]
    sizes = {run.size for run in sweep.runs if not run.is_baseline and run.size}
    compared = {size: {name: labels[name] for name in names} for size in sizes if names and len(sizes) == 1}
    for size in compared:
        rows = with_race(rows, races.speeds(size)) if races.compares(size, names) else rows
    of_races = (*races.cautions(compared), *_unused(races, sizes)) if names else races.problems
    answer = find_answer(rows, (*_failures(sweep, labels), *_left_out(sweep), *of_races))
    panels = make_panels(rows)
    tables = _make_tables(rows, answer.chosen, until)
    more = (*CSV_COLUMNS, *(SPEECH_COLUMNS if "speech" in tables else ()))
    html, csv, png = write_files(
        out_dir / "report",
        "report",
        _page(sweep, rows, answer, tables, panels, race_notes=races.notes(compared)),
        csv_of_runs(rows, target, more),
        {"report": lambda path: write_png(path, _lines(panels), make_canvas(rows, theme.PRINT))},
    )
    return WrittenReport(html, csv, png, Group(*tables.values()), answer.sentences)


def _failures(sweep: Sweep, labels: Mapping[str, str]) -> list[str]:
    unfinished = [run for run in sweep.runs if not run.completed]
    failed = {run.name: sweep.failed.get(run.name, run.ended_by) for run in unfinished}
    return [f"Failed: {formatting.capital(labels[name])}: {why}" for name, why in failed.items() if why]


def _left_out(sweep: Sweep) -> list[str]:
    return [f"{sweep.path / name} has a report of its own and is not in this one." for name in sweep.others]


def _unused(races: ShownRaces, sizes: Collection[int]) -> list[str]:
    """Name the races that were not used, because the runs trained on other or several numbers of ranks.

    Args:
        sizes: numbers of ranks of all runs.
    """
    trained = " and ".join(map(str, sorted(sizes)))
    return [
        f"The race on {formatting.rank_count(ranks)} was not used, because the runs trained on {trained}: "
        "speeds are those of the runs, which followed one another."
        for ranks in sorted(races.races)
        if {*sizes} != {ranks}
    ]


def _page(
    sweep: Sweep,
    rows: Sequence[RunFigures],
    answer: SweepAnswer,
    tables: dict[str, ShownTable[RunFigures]],
    panels: dict[str, list[Panel]],
    *,
    race_notes: Sequence[str],
) -> str:
    rule = rule_for(rows) if answer.chosen and len(rows) > 1 else ""
    return render_page(
        "report",
        sweep.path.resolve().name,
        answer,
        " ".join(filter(None, (rule, metric_meanings(sweep.runs)))),
        race_notes=race_notes,
        amount=terms_of(sweep.runs).amount,
        has_skew=any(row.skew is not None for row in rows),
        **{name: tables.get(name) for name in ("figures", "speech", "data_path")},
        **{
            section: panel_svgs(drawn, lambda: make_canvas(rows, theme.PAGE))
            for section, drawn in panels.items()
        },
        data_notes=_data_path_notes(rows),
        span_legend=[(title, swatch(colour)) for title, colour in SPAN_KEYS],
        settings=[(row.run, _settings(row.run.settings)) for row in rows],
        sampling_notices=sampling_notices(rows),
        outside_notes=_outside_notes(rows),
        warmup_steps=max((row.run.timing.warmup_steps for row in rows if row.run.timing), default=0),
    )


def _lines(panels: dict[str, list[Panel]]) -> list[list[Panel]]:
    """Return the plots of the PNG, line by line."""
    return [line for line in panels.values() if line]


def _make_tables(
    rows: Sequence[RunFigures], chosen: RunFigures | None, until: str | None
) -> dict[str, ShownTable[RunFigures]]:
    """Return the tables by name; those of speech and of the data path only if a run recorded them.

    Args:
        until: the target as text; None: there is none.
    """
    labels = formatting.run_labels([row.run for row in rows])
    colours = make_canvas(rows, theme.PAGE).colours

    def head(row: RunFigures, num_rows: int) -> RowHead:
        run, complete = row.run, row.run.completed
        return RowHead(
            run.name,
            labels[run.name],
            "" if complete else run.status,
            swatch(colours[run.name]),
            is_pale=not complete,
            is_chosen=row is chosen and num_rows > 1,
        )

    def table(id_: str, title: str, columns: Sequence[FigureColumn], of: Sequence[RunFigures], **others: Any
              ) -> ShownTable[RunFigures]:  # fmt: skip
        return ShownTable(id_, title, columns, [(head(row, len(of)), row) for row in of], **others)

    to_target = "" if until is None else f"To target: until {until} on held-out data."
    resumed = resumed_note((row.run, labels[row.run.name]) for row in rows)
    note = " ".join(filter(None, (to_target, resumed)))
    wide = _WIDE + (_RACED if any(row.raced is not None for row in rows) else 0)
    tables = {"figures": table("figures", "", main_columns(rows), rows, note=note, wide_columns=wide)}
    if spoken := [row for row in rows if row.run.spoken is not None]:
        columns, note = with_figures(SPEECH_COLUMNS, spoken), speech_caption(spoken)
        tables["speech"] = table("speech", SPEECH_TITLE, columns, spoken, note=note, wide_columns=_WIDE)
    if recorded := [row for row in rows if row.data is not None]:
        columns = shown_columns(recorded)
        tables["data_path"] = table("data-path", "Data path", columns, recorded, wide_columns=_WIDE_DATA)
    return tables


def _data_path_notes(rows: Sequence[RunFigures]) -> list[tuple[str, list[str]]]:
    """Return (label, sentences) for each run that recorded its data path."""
    labels = formatting.run_labels([row.run for row in rows])
    notes = ((labels[row.run.name], path_sentences(row, labels[row.run.name])) for row in rows)
    return [(label, sentences) for label, sentences in notes if sentences]


def _outside_notes(rows: Sequence[RunFigures]) -> list[tuple[str, list[str]]]:
    """Return (label, sentences) for each run with known outside use of its GPUs or cores."""
    labels = formatting.run_labels([row.run for row in rows])
    notes = ((labels[row.run.name], outside_sentences(row.run)) for row in rows)
    return [(label, sentences) for label, sentences in notes if sentences]


def _settings(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a run's settings as (title, text), the known ones first."""
    known = [(title, settings[key]) for key, title in SETTINGS.items() if key in settings]
    hidden = {
        "format",
        "version",
        "strategy_name",
        "period",
        "metrics",
        "decodes",
        "script",
        "script_versions",
        "launch",
        *SETTINGS,
    }
    more = [(key.replace("_", " "), value) for key, value in settings.items() if key not in hidden]
    return [(title, setting_text(title, value)) for title, value in known + more]
