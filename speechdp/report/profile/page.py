"""Write the report of a profile: HTML, CSV, pictures and a trace, from its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Group

from speechdp.experiments.profile.derived import all_scalings, main_job
from speechdp.experiments.profile.measured import BACKWARD, FORWARD
from speechdp.experiments.profile.record import Profile, ProfileJob, in_order, read_profile
from speechdp.report.kit import theme
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.pages import (
    DrawPicture,
    WrittenReport,
    render_page,
    setting_text,
    write_files,
    writing_into,
)
from speechdp.report.kit.svg import panel_svgs, write_png
from speechdp.report.profile.answer import RULE, find_answer
from speechdp.report.profile.figures import ProfilePicture, make_pictures
from speechdp.report.profile.gantt import AXIS, LANE, make_gantt, svg_of_gantt
from speechdp.report.profile.numbers import csv_of_profile
from speechdp.report.profile.palette import MEANINGS, WAITING, WAITING_FILL, fill_of, make_canvas
from speechdp.report.profile.table import ProfileTable, make_tables
from speechdp.report.profile.trace import write_trace

#: Names of the settings, in the order shown; `options` follow them.
_SETTINGS = {
    "task": "task",
    "preset": "model",
    "decoder": "decoder",
    "reduction": "frames a decoder step",
    "batch_size": "batch size of a rank",
    "steps": "steps of a job",
    "warmup_steps": "warm-up steps",
    "device": "device",
    "machine": "machine",
    "cores": "cores",
    "threads": "threads of a rank",
    "command": "command",
}
#: Sections of the page: id, heading, name of the picture, ids of the tables.
_SECTIONS = (
    ("functions", "Which function scales", "functions", ("times-weak", "times-strong")),
    ("single", "Modules alone", "single", ("times-single",)),
    ("loaders", "What the trainloader costs", "utilisation", ("loaders",)),
    ("first-steps", "First steps", "first_steps", ("first-steps",)),
    ("memory", "Memory of the ranks", "memory", ("memory",)),
)
#: Largest width of a table that fits beside a single plot, characters.
_NARROW = 66


def write_profile_page(out: Path) -> WrittenReport:
    """Write OUT/report/: profile.html, profile.csv, trace.json and a PNG for each picture.

    Args:
        out: folder of a profile.

    Raises:
        ConfigError: there is no profile, or profile.json is damaged.
        RunError: a job's files are damaged, or the report cannot be written.
    """
    profile = read_profile(out)
    scalings, job = all_scalings(profile), main_job(profile)
    answer, pictures = find_answer(profile, scalings), make_pictures(profile)
    tables = make_tables(profile, scalings, job)
    # The picture that answers the question comes first.
    ordered = sorted(pictures, key=lambda picture: picture.name != "functions")
    html, csv, png = write_files(
        out / "report",
        "profile",
        profile_page(profile, answer, pictures, tables),
        csv_of_profile(profile, scalings),
        {picture.name: _drawing(picture) for picture in ordered},
    )
    if job is not None:
        with writing_into(html.parent):
            write_trace(html.parent / "trace.json", job)
    return WrittenReport(html, csv, png, Group(*tables), answer.sentences)


def _drawing(picture: ProfilePicture) -> DrawPicture:
    canvas = make_canvas(theme.PRINT)
    return lambda path: write_png(path, [picture.panels], canvas, caption=picture.caption)


def profile_page(
    profile: Profile, answer: Answer, pictures: Sequence[ProfilePicture], tables: Sequence[ProfileTable]
) -> str:
    """Return the HTML page of a profile."""
    job = main_job(profile)
    gantt = None if job is None else make_gantt(job, profile.settings.warmup_steps)
    svgs = {
        picture.name: panel_svgs(picture.panels, lambda: make_canvas(theme.PAGE))
        for picture in pictures
        if picture.in_page
    }
    captions = {picture.name: picture.caption for picture in pictures}
    return render_page(
        "profile",
        profile.path.resolve().name,
        answer,
        RULE,
        sections=_sections(svgs, captions, tables),
        gantt=gantt,
        # Safe markup: the drawing is ours, and html.escape has escaped all of its text.
        gantt_svg=None if gantt is None else Markup(svg_of_gantt(gantt)),
        gantt_caption=captions.get("gantt", ""),
        gantt_keys=[] if gantt is None else _keys([gantt.job], gantt.functions),
        legend=_keys(profile.jobs),
        waiting=(WAITING, WAITING_FILL),
        axis_height=AXIS,
        lane_height=LANE,
        settings=_settings(profile),
        jobs=profile.jobs,
    )


def _sections(
    svgs: dict[str, list[tuple[str, Markup]]], captions: dict[str, str], tables: Sequence[ProfileTable]
) -> list[dict[str, Any]]:
    """Return the page's sections that have something to show."""
    by_id = {table.id.removeprefix("table-"): table for table in tables}
    found = []
    for name, heading, picture, ids in _SECTIONS:
        drawn = svgs.get(picture, [])
        listed = [by_id[i] for i in ids if i in by_id]
        if not drawn and not listed:
            continue
        found.append(
            {
                "id": name,
                "heading": heading,
                "svgs": drawn,
                "caption": captions[picture] if drawn else "",
                "tables": listed,
                "beside": len(drawn) == 1 and len(listed) == 1 and listed[0].width <= _NARROW,
            }
        )
    return found


def _phases(jobs: Sequence[ProfileJob]) -> dict[str, set[str]]:
    """Return the phases of each recorded function."""
    phases: dict[str, set[str]] = {}
    for job in jobs:
        for steps in job.steps:
            for function in steps[-1].functions if steps else ():
                phases.setdefault(function.name, set()).add(function.phase)
    return phases


def _keys(
    jobs: Sequence[ProfileJob], functions: Sequence[str] | None = None
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the legend, (name, [(colour, phase)]), of `functions`; None: of all recorded functions."""
    phases = _phases(jobs)
    return [
        (
            MEANINGS.get(name, name),
            [(fill_of(name, p)[0], p) for p in (FORWARD, BACKWARD, "") if p in phases.get(name, set())],
        )
        for name in functions or in_order(set(phases))
    ]


def _settings(profile: Profile) -> list[tuple[str, str]]:
    """Return the settings as (name, text), without those that do not apply."""
    shown = [(title, getattr(profile.settings, key)) for key, title in _SETTINGS.items()]
    shown += [(key.replace("_", " "), value) for key, value in (profile.settings.options or {}).items()]
    return [
        (title, setting_text(title, value)) for title, value in shown if value not in ("", None, (), [], {})
    ]
