"""Write the report of a sweep or a run: CSV, PNG and one self-contained page, from the runs' files alone."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from rich.console import Group, RenderableType

from speechdp.report.kit import formatting, theme
from speechdp.report.kit.canvas import make_canvas
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.kit.pages import WrittenReport, page_templates, writing_into
from speechdp.report.kit.tables import TerminalTable, csv_text, page_rows, target_caption
from speechdp.report.runs.derived import RunFigures, common_target, sweep_figures
from speechdp.report.runs.folders import read_sweep
from speechdp.report.runs.results import Sweep
from speechdp.report.sweep import figures
from speechdp.report.sweep.answer import find_answer, rule_for
from speechdp.report.sweep.columns import all_columns, main_columns
from speechdp.report.sweep.data_answer import path_sentences
from speechdp.report.sweep.data_columns import CSV_COLUMNS, shown_columns
from speechdp.report.sweep.resources import sampling_notices
from speechdp.report.sweep.speech_columns import SPEECH_CAPTION, SPEECH_COLUMNS, SPEECH_TITLE

#: Columns of a terminal that holds a run's data path on one line.
_WIDE_DATA_COLUMNS = 230
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
        out_dir: a sweep's folder, a folder of runs, or one run.
        target: of the task's first metric, for the time to target: a held-out log-probability in nats/frame,
            of synthesis the L1 error, a share in %; None: the best that every run reached.
        metric: what runs of a script are judged by; see read_sweep.

    Raises:
        ConfigError: there is no run in `out_dir`, `target` cannot be reached, or `metric` is none of its.
        RunError: the report cannot be written.
    """
    sweep = read_sweep(out_dir, metric)
    target = terms_of(sweep.runs).score_of_target(target)
    if target is None:
        target = common_target(sweep.runs)
    rows = sweep_figures(sweep, target)
    folder = out_dir / "report"
    html_path, csv_path, png_path = (folder / f"report.{kind}" for kind in ("html", "csv", "png"))
    more = (*CSV_COLUMNS, *(SPEECH_COLUMNS if _spoken(rows) else ()))
    with writing_into(folder):
        csv_path.write_text(csv_text(rows, target, all_columns(rows), more), encoding="utf-8")
        png_written = figures.render_png(png_path, rows)
        html_path.write_text(render_page(sweep, rows, target), encoding="utf-8")
    sentences = find_answer(rows).sentences
    png = png_path if png_written else None
    return WrittenReport(html_path, csv_path, png, _terminal_tables(rows, target), sentences)


def render_page(sweep: Sweep, rows: Sequence[RunFigures], target: float | None) -> str:
    """Return the page: one HTML document without a reference to anything outside of it."""
    environment = page_templates()
    environment.filters["breakable"] = _breakable
    svgs = {plot.name: figures.render_svg(plot, rows) for plot in figures.make_plots(rows)}
    colours = make_canvas(rows, theme.PAGE).colours
    recorded = [row for row in rows if row.data is not None]
    data_columns = shown_columns(recorded)
    columns = main_columns(rows)
    return environment.get_template("report.html.j2").render(
        title=sweep.path.resolve().name,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        answer=find_answer(rows),
        rule=rule_for(rows),
        target=_target_text(rows, target),
        columns=columns,
        rows=page_rows(rows, columns),
        speech_title=SPEECH_TITLE,
        speech_caption=SPEECH_CAPTION,
        speech_columns=SPEECH_COLUMNS,
        speech_rows=page_rows(_spoken(rows), SPEECH_COLUMNS),
        data_columns=data_columns,
        data_rows=page_rows(recorded, data_columns),
        data_notes=_data_path_notes(rows),
        colours={name: theme.with_variables(colour) for name, colour in colours.items()},
        # Our own drawings, whose every text matplotlib or html.escape has escaped.
        svgs={name: Markup(svg) for name, svg in svgs.items() if svg is not None},
        span_legend=figures.span_legend(),
        settings=[(row, _settings(row.run.settings)) for row in rows],
        light_colours=theme.css_variables(dark=False),
        dark_colours=theme.css_variables(dark=True),
        sampling_notices=sampling_notices(rows),
        warmup_steps=max((row.run.timing.warmup_steps for row in rows if row.run.timing), default=0),
    )


def _terminal_tables(rows: Sequence[RunFigures], target: float | None) -> RenderableType:
    """Return the tables to print; those of speech and of the data path only where a run recorded them."""
    tables = [TerminalTable(rows, main_columns(rows), caption=target_caption(_target_text(rows, target)))]
    if spoken := _spoken(rows):
        tables.append(TerminalTable(spoken, SPEECH_COLUMNS, title=SPEECH_TITLE, caption=SPEECH_CAPTION))
    recorded = [row for row in rows if row.data is not None]
    columns = shown_columns(recorded)
    if recorded:
        tables.append(TerminalTable(recorded, columns, wide_columns=_WIDE_DATA_COLUMNS, title="Data path"))
    return Group(*tables) if len(tables) > 1 else tables[0]


def _spoken(rows: Sequence[RunFigures]) -> list[RunFigures]:
    """Return the runs whose synthetic speech was measured."""
    return [row for row in rows if row.run.spoken is not None]


def _target_text(rows: Sequence[RunFigures], target: float | None) -> str | None:
    return None if target is None else terms_of(row.run for row in rows).with_unit(target)


def _data_path_notes(rows: Sequence[RunFigures]) -> list[tuple[str, list[str]]]:
    """Return (label, sentences) of each run that recorded its data path."""
    labels = formatting.run_labels([row.run for row in rows])
    notes = ((labels[row.run.name], path_sentences(row, labels[row.run.name])) for row in rows)
    return [(label, sentences) for label, sentences in notes if sentences]


def _breakable(name: str) -> Markup:
    """Return a run's name, escaped, that a narrow cell may break behind its underscores and dashes."""
    return Markup(re.sub(r"([_-])", r"\1<wbr>", str(escape(name))))


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
        "launch",
        *SETTINGS,
    }
    more = [(key.replace("_", " "), value) for key, value in settings.items() if key not in hidden]
    return [(title, _setting_text(title, value)) for title, value in known + more]


def _setting_text(title: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        words = [item if isinstance(item, str) else json.dumps(item) for item in value]
        if title == "command":
            return shlex.join(words)
        return ", ".join(f"{word} ({words.count(word)})" for word in dict.fromkeys(words))
    if isinstance(value, dict):
        given = {key: item for key, item in value.items() if item is not None}
        return ", ".join(f"{key} {_nested(item)}" for key, item in given.items())
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:,}"
    return json.dumps(value)


def _nested(value: Any) -> str:
    """Write a group of settings in brackets, so that it can stand among others; unset ones are left out."""
    if not isinstance(value, dict):
        return _setting_text("", value)
    given = (f"{key}={_nested(item)}" for key, item in value.items() if item is not None)
    return f"({', '.join(given)})"
