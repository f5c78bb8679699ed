"""Write the page of a profile: HTML, CSV, pictures and a trace, from the records alone."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from speechdp.experiments.profile.derived import all_scalings, main_job
from speechdp.experiments.profile.record import BACKWARD, FORWARD, Profile, ProfileJob, in_order, read_profile
from speechdp.report.kit import theme
from speechdp.report.kit.pages import WrittenReport, page_templates, writing_into
from speechdp.report.profile.answer import RULE, ProfileAnswer, find_answer
from speechdp.report.profile.figures import ProfilePicture, make_pictures, picture_svgs, write_png
from speechdp.report.profile.gantt import AXIS, LANE, Gantt, make_gantt, svg_of_gantt
from speechdp.report.profile.numbers import csv_text
from speechdp.report.profile.palette import MEANINGS, WAITING, WAITING_FILL, fill_of
from speechdp.report.profile.table import ShownTable, make_tables, terminal_tables
from speechdp.report.profile.trace import write_trace

#: Settings in this order, with their names; `options` follow.
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
#: Sections of the page: id, heading, picture and tables.
_SECTIONS = (
    ("functions", "Which function scales", "functions", ("times-weak", "times-strong")),
    ("single", "Modules alone", "single", ("times-single",)),
    ("loaders", "What the trainloader costs", "utilisation", ("loaders",)),
    ("first-steps", "First steps", "first_steps", ("first-steps",)),
    ("memory", "Memory of the ranks", "memory", ("memory",)),
)
#: A table of so many letters across fits beside a single plot.
_NARROW = 66


def write_profile_page(out: Path) -> WrittenReport:
    """Write OUT/report/: profile.html, profile.csv, trace.json and a PNG a picture.

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
    folder = out / "report"
    html_path, csv_path = folder / "profile.html", folder / "profile.csv"
    with writing_into(folder):
        csv_path.write_text(csv_text(profile, scalings), encoding="utf-8")
        drawn = [path for picture in pictures if write_png(path := folder / f"{picture.name}.png", picture)]
        if job is not None:
            write_trace(folder / "trace.json", job)
        html_path.write_text(render_page(profile, answer, pictures, tables), encoding="utf-8")
    # The picture to show first: the one that answers the question.
    drawn.sort(key=lambda path: path.name != "functions.png")
    return WrittenReport(
        html_path, csv_path, drawn[0] if drawn else None, terminal_tables(tables), answer.sentences
    )


def render_page(
    profile: Profile, answer: ProfileAnswer, pictures: Sequence[ProfilePicture], tables: Sequence[ShownTable]
) -> str:
    """Return the page: one HTML document without a reference to anything outside of it."""
    job = main_job(profile)
    gantt = None if job is None else make_gantt(job, profile.settings.warmup_steps)
    shown = {picture.name: picture for picture in pictures if picture.in_page}
    # Our own drawings, whose every text matplotlib or html.escape has escaped.
    svgs = {name: [(n, Markup(s)) for n, s in picture_svgs(picture)] for name, picture in shown.items()}
    captions = {picture.name: picture.caption for picture in pictures}
    environment = page_templates()
    environment.filters["unbroken"] = _unbroken
    return environment.get_template("profile.html.j2").render(
        title=profile.path.resolve().name,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        answer=answer,
        rule=RULE,
        sections=_sections(svgs, captions, tables),
        gantt=gantt,
        gantt_svg=None if gantt is None else Markup(svg_of_gantt(gantt)),
        gantt_caption=captions.get("gantt", ""),
        gantt_keys=[] if gantt is None else _gantt_keys(gantt),
        legend=_legend(profile),
        waiting=(WAITING, WAITING_FILL),
        axis_height=AXIS,
        lane_height=LANE,
        settings=_settings(profile),
        jobs=profile.jobs,
        light_colours=theme.css_variables(dark=False),
        dark_colours=theme.css_variables(dark=True),
    )  # fmt: skip


def _unbroken(sentence: str) -> str:
    """Keep numbers and their units on one line."""
    return re.sub(r"(?<=\d) (?=(%|ms|MB|ranks?|times)\b|%)", "\u00a0", sentence)


def _sections(
    svgs: dict[str, list[tuple[str, Markup]]], captions: dict[str, str], tables: Sequence[ShownTable]
) -> list[dict[str, Any]]:
    """Return the page's sections that have something to show."""
    by_id = {table.id: table for table in tables}
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
    """Return the phases of every function that was recorded."""
    phases: dict[str, set[str]] = {}
    for job in jobs:
        for steps in job.steps:
            for function in steps[-1].functions if steps else ():
                phases.setdefault(function.name, set()).add(function.phase)
    return phases


def _legend(profile: Profile) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (name, [(colour, phase)]) of every function."""
    phases = _phases(profile.jobs)
    return [
        (
            MEANINGS.get(name, name),
            [(fill_of(name, p)[0], p) for p in (FORWARD, BACKWARD, "") if p in phases[name]],
        )
        for name in in_order(set(phases))
    ]


def _gantt_keys(gantt: Gantt) -> list[tuple[str, list[tuple[str, str]]]]:
    phases = _phases([gantt.job])
    return [
        (
            MEANINGS.get(name, name),
            [(fill_of(name, p)[0], p) for p in (FORWARD, BACKWARD, "") if p in phases.get(name, set())],
        )
        for name in gantt.functions
    ]


def _settings(profile: Profile) -> list[tuple[str, str]]:
    """Return the settings as (name, text); what does not apply is left out."""
    shown = [(title, getattr(profile.settings, key)) for key, title in _SETTINGS.items()]
    shown += [(key.replace("_", " "), value) for key, value in (profile.settings.options or {}).items()]
    return [(title, _text(title, value)) for title, value in shown if value not in ("", None, (), [], {})]


def _text(title: str, value: Any) -> str:
    if title == "command":
        return shlex.join(str(word) for word in value)
    return value if isinstance(value, str) else json.dumps(value)
