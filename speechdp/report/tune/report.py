"""Write the report of a search: CSV, PNG and one self-contained page, from tune.json and the runs' files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from rich.console import Group

from speechdp.report.kit import formatting, theme
from speechdp.report.kit.canvas import Canvas, dashes, named_canvas, style_axes
from speechdp.report.kit.pages import WrittenReport, legend_marks, render_page, setting_facts, write_files
from speechdp.report.kit.svg import Panel, panel_svgs, write_png
from speechdp.report.kit.theme import Theme
from speechdp.report.runs.records import words
from speechdp.report.tune.answer import find_answer
from speechdp.report.tune.search import Search, read_search
from speechdp.report.tune.tables import backends_table, csv_of, make_table

FOLDER = "tune"
_SIZE = (5.6, 3.6)
#: Settings that the page shows elsewhere, or that mean nothing to a reader.
_UNSHOWN = ("data", "strategies", "backends")


def write_search(out: Path) -> WrittenReport:
    """Write OUT/tune/tune.{csv,png,html}.

    Raises:
        ConfigError: tune.json is damaged.
        RunError: the report cannot be written.
    """
    search = read_search(out)
    record = search.record
    answer, panel = find_answer(search), curves_panel(search)
    marks = legend_marks(_canvas(search, theme.PAGE))
    table, measured = make_table(search, marks), backends_table(search)
    drawn = panel_svgs([panel], lambda: _canvas(search, theme.PAGE))
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
    canvas = _canvas(search, theme.PRINT)
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
    """Return the settings of a search as (title, text), first the model and batch size that its runs used."""
    own = [run for one in search.record.tried if not one.batch_size for run in search.runs.get(one.name, ())]
    used = next((run.settings for run in own if run.settings), {})
    first = [("preset", name)] if (name := words(used.get("preset"))) else []
    first += [("batch size", f"{size:,} a rank")] if isinstance(size := used.get("batch_size"), int) else []
    given = dict(search.record.settings)
    shown = [("model", "preset"), ("batch", "batch_size")] if first else []
    # Only measurements and races used this learning rate, the lowest of several.
    shown += [("optimizer", "learning_rate")] if given.get("learning_rates") else []
    for group, option in shown:
        if isinstance(given.get(group), dict):
            given[group] = {key: value for key, value in given[group].items() if key != option}
    return [*first, *setting_facts(given, _UNSHOWN)]


def _canvas(search: Search, shown: Theme) -> Canvas:
    """Return a canvas on which settings that differ only in the learning rate share a colour."""
    of = {one.name: one.setting.raced.name for one in search.record.tried}
    return named_canvas(list(search.runs), shown, of)


def curves_panel(search: Search) -> Panel:
    """Return the plot of held-out scores over training time."""
    return Panel("curves", "held-out figures over training time", _SIZE, lambda ax, c: _draw(ax, search, c))


def _draw(ax: Axes, search: Search, canvas: Canvas) -> bool:
    terms = search.terms
    name = formatting.capital(terms.metric.name)
    style_axes(ax, f"{name} over training time", terms.metric.unit, canvas.theme)
    drawn = False
    for setting, runs in search.runs.items():
        rate = search.record.of(setting).steps_per_s
        for run in runs:
            points = [(one.step, one.score) for one in run.evaluations if one.score is not None]
            if not rate or not points:
                continue
            xs = [step / rate for step, _ in points]
            ys = [terms.metric.score(score) * terms.metric.scale for _, score in points]
            (line,) = ax.plot(
                xs, ys, color=canvas.colours[setting], linewidth=1.6, marker="o", markersize=3,
                linestyle=(0, dashes(setting, canvas) or (1, 0)),
            )  # fmt: skip
            canvas.tip(line, setting)
            drawn = True
    ax.set_xlabel(f"training time (s), at the {search.speed} speed")
    return drawn
