"""Write the report of a comparison: CSV, PNG and one self-contained page, from the runs' files alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from speechdp.report.compare.choice import StrategyChoice, choose, rule_for
from speechdp.report.compare.groups import Comparison, Group, common_target, make_groups, read_comparison
from speechdp.report.compare.panels import ComparePanel, dashes, make_canvas, make_panels
from speechdp.report.compare.table import (
    SPREAD_NOTE,
    ComparisonTable,
    csv_text,
    group_terms,
    is_of_script,
    page_rows,
    shown_columns,
    titles,
)
from speechdp.report.kit import theme
from speechdp.report.kit.metric_names import terms_of
from speechdp.report.kit.pages import WrittenReport, page_templates, writing_into
from speechdp.report.kit.svg import STYLE, svg_of

#: Settings that say nothing to a reader: the checksum of the data.
_UNSHOWN = ("data",)


def write_comparison(out: Path, target: float | None = None, metric: str = "") -> WrittenReport:
    """Write OUT/compare/compare.{csv,png,html}.

    Args:
        out: a comparison's folder.
        target: of the task's first metric, e.g. a held-out log-probability in nats/frame, for the time to
            target; None: the best that three quarters of the runs at equal frames reached.
        metric: what runs of a script are judged by; "": what compare.json says, else what they log last.

    Raises:
        ConfigError: compare.json is damaged, or `target` cannot be reached.
        RunError: the report cannot be written.
    """
    comparison = read_comparison(out, metric)
    runs = [run.result for run in comparison.runs if run.result is not None]
    target = terms_of(runs).score_of_target(target)
    if target is None:
        target = common_target(comparison.runs)
    groups = make_groups(comparison, target)
    choice = choose(groups)
    folder = out / "compare"
    html_path, csv_path, png_path = (folder / f"compare.{kind}" for kind in ("html", "csv", "png"))
    with writing_into(folder):
        csv_path.write_text(csv_text(groups, target), encoding="utf-8")
        drawn = render_png(png_path, groups)
        html_path.write_text(render_page(comparison, groups, choice, target), encoding="utf-8")
    sentences = (choice.headline, *choice.details, *choice.cautions)
    return WrittenReport(
        html_path, csv_path, png_path if drawn else None, ComparisonTable(groups, target), sentences
    )


def render_page(
    comparison: Comparison, groups: Sequence[Group], choice: StrategyChoice, target: float | None
) -> str:
    """Return the page: one HTML document without a reference to anything outside of it."""
    environment = page_templates()
    canvas, columns = make_canvas(groups, theme.PAGE), shown_columns(groups)
    terms = group_terms(groups)
    # Our own drawings, whose every text matplotlib or html.escape has escaped.
    lines = [
        [(panel.name, Markup(svg)) for panel in line if (svg := _svg(panel, groups)) is not None]
        for line in make_panels(groups)
    ]
    return environment.get_template("compare.html.j2").render(
        title=comparison.path.resolve().name,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        choice=choice,
        rule=rule_for(groups),
        target=None if target is None else group_terms(groups).with_unit(target),
        spread_note=SPREAD_NOTE,
        amount=terms.amount,
        is_of_script=is_of_script(groups),
        columns=columns,
        tables=[
            (mode, title, page_rows([group for group in groups if group.mode == mode], columns))
            for mode, title in titles(groups).items()
            if any(group.mode == mode for group in groups)
        ],
        chosen={(group.mode, group.ranks, group.strategy) for group in choice.chosen.values()},
        legend=[
            (label, theme.with_variables(colour), " ".join(map(str, dashes(label, canvas))))
            for label, colour in canvas.colours.items()
        ],
        colours={label: theme.with_variables(colour) for label, colour in canvas.colours.items()},
        lines=[line for line in lines if line],
        settings=_settings(comparison),
        runs=comparison.runs,
        light_colours=theme.css_variables(dark=False),
        dark_colours=theme.css_variables(dark=True),
    )


def _svg(panel: ComparePanel, groups: Sequence[Group]) -> str | None:
    # A canvas of its own for each plot: the ids of its texts begin anew.
    canvas = make_canvas(groups, theme.PAGE)
    return svg_of(panel, canvas, lambda ax: panel.draw(ax, canvas))


def render_png(path: Path, groups: Sequence[Group]) -> bool:
    """Write all plots as one picture; return False, with nothing written, where there is nothing to draw."""
    canvas = make_canvas(groups, theme.PRINT)
    lines = make_panels(groups)
    columns = max(map(len, lines), default=0)
    drawn = False
    with mpl.rc_context({**STYLE, "savefig.facecolor": "white"}):
        figure = Figure(figsize=(4.6 * max(columns, 2), 3.5 * len(lines) + 0.7), layout="constrained")
        for row, line in enumerate(lines):
            for column, panel in enumerate(line):
                ax = figure.add_subplot(len(lines), columns, row * columns + column + 1)
                if panel.draw(ax, canvas):
                    drawn = True
                else:
                    ax.set_axis_off()
        keys = [
            Line2D(
                [], [], color=colour, linewidth=2, linestyle=(0, dashes(label, canvas) or (1, 0)), label=label
            )
            for label, colour in canvas.colours.items()
        ]
        figure.legend(handles=keys, loc="outside upper left", ncols=max(columns, 2), frameon=False)
        if drawn:
            figure.savefig(path, format="png", dpi=120)
    return drawn


def _settings(comparison: Comparison) -> list[tuple[str, str]]:
    """Return what all runs share as (title, text); what was left at its default is not repeated."""
    found: list[tuple[str, str]] = []
    for key, value in comparison.settings.items():
        given = value.items() if isinstance(value, dict) else [(key, value)]
        found += [
            (name.replace("_", " "), str(item))
            for name, item in given
            if item not in (None, "", False, 0) and name not in _UNSHOWN
        ]
    return found
