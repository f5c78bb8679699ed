"""The pictures of a profile, for SVG and PNG; each reproduces a figure of the poster, if one is named."""

from __future__ import annotations

from dataclasses import dataclass

from speechdp.experiments.profile.derived import Scaling, loader_jobs, main_job, make_scaling
from speechdp.experiments.profile.record import MODULES, STRONG, WEAK, Profile, ProfileJob
from speechdp.report.kit.svg import Panel
from speechdp.report.profile import panels
from speechdp.report.profile.gantt import LANE, draw_gantt, make_gantt
from speechdp.report.profile.table import SCALING_TITLES, loader_title
from speechdp.report.profile.usage import draw_memory_over_time, draw_usage, usage_limits

SMALL_WIDTH = 5.6
#: The poster whose figures are reproduced, as named to readers of the page.
_POSTER = "the IBM/NTU poster (docs/profile.md)"


@dataclass(frozen=True)
class ProfilePicture:
    """Plots that belong together.

    Attributes:
        name: name of the PNG, safe as a file name.
        caption: what it shows, and which figure of the poster it reproduces.
        panels: plots, side by side.
        in_page: False if the page has another form of it.
    """

    name: str
    caption: str
    panels: tuple[Panel, ...]
    in_page: bool = True


def make_pictures(profile: Profile) -> list[ProfilePicture]:
    """Return the pictures that have something to show, in the order of the poster's figures."""
    found = [
        _utilisation(profile),
        _first_steps(profile),
        _functions(profile),
        _single(profile),
        _memory(profile),
        _gantt(profile),
    ]
    return [picture for picture in found if picture.panels]


def _utilisation(profile: Profile) -> ProfilePicture:
    caption = (
        f"Utilisation over time with and without a blocking trainloader, after figure 2 of {_POSTER}. The "
        "table has the time for which ranks waited for batches, which was measured separately."
    )
    letters = "abc"
    drawn = [job for job in loader_jobs(profile) if job.sample_paths]
    limits = usage_limits(drawn)

    def panel(job: ProfileJob, letter: str) -> Panel:
        title = f"({letter}) {loader_title(job)}"
        return Panel(
            f"utilisation-{job.kind}", title, (SMALL_WIDTH, 2.9),
            lambda ax, canvas: draw_usage(ax, job, title, limits, canvas),
        )  # fmt: skip

    return ProfilePicture(
        "utilisation", caption, tuple(panel(j, x) for j, x in zip(drawn, letters, strict=False))
    )


def _first_steps(profile: Profile) -> ProfilePicture:
    caption = f"Time of each function in the first steps, after figure 3 of {_POSTER}."
    job, warmup = main_job(profile), profile.settings.warmup_steps
    if job is None:
        return ProfilePicture("first_steps", caption, ())
    panel = Panel(
        "first-steps", caption, (SMALL_WIDTH, 3.5),
        lambda ax, canvas: panels.draw_first_steps(ax, job, warmup, canvas),
    )  # fmt: skip
    return ProfilePicture("first_steps", caption, (panel,))


def _functions(profile: Profile) -> ProfilePicture:
    scalings = [make_scaling(profile, kind) for kind in (WEAK, STRONG)]
    # In weak scaling every bar would be as long as the first.
    ideal = any(s is not None and s.kind == STRONG and s.ranks[1:] for s in scalings)
    compared = any(s is not None and s.ranks[1:] for s in scalings)
    caption = (
        f"Time of each function over numbers of ranks, after figure 4 of {_POSTER}: median step after the "
        f"warm-up; light is forward, dark is backward{'; % is the efficiency' if compared else ''}"
        f"{'; in strong scaling a line marks perfect scaling' if ideal else ''}."
    )
    found = tuple(_scaling_panel([s], s.kind, SCALING_TITLES[s.kind]) for s in scalings if s is not None)
    return ProfilePicture("functions", caption, found)


def _single(profile: Profile) -> ProfilePicture:
    caption = (
        f"Time of a single module, the others turned off, over numbers of ranks, after figure 5 of {_POSTER}."
    )
    scalings = [s for kind in MODULES if (s := make_scaling(profile, kind)) is not None]
    if not scalings:
        return ProfilePicture("single", caption, ())
    return ProfilePicture("single", caption, (_scaling_panel(scalings, "single", "A module alone"),))


def _scaling_panel(scalings: list[Scaling], name: str, title: str) -> Panel:
    size = (SMALL_WIDTH, panels.bar_height(scalings))
    return Panel(
        f"functions-{name}", title, size, lambda ax, canvas: panels.draw_scaling(ax, scalings, title, canvas)
    )


def _memory(profile: Profile) -> ProfilePicture:
    caption = f"Memory of every rank: peak and course. On {_POSTER} the first GPU used more than the others."
    job = main_job(profile)
    found: list[Panel] = []
    if job is not None and job.memory is not None:
        height = max(1.9, 0.85 + 0.27 * len(job.memory.ranks))
        found.append(
            Panel(
                "memory-ranks", "Peak memory of each rank", (SMALL_WIDTH, max(height, 2.9)),
                lambda ax, canvas: panels.draw_memory_of_ranks(ax, job, canvas),
            )
        )  # fmt: skip
    if job is not None and job.sample_paths:
        found.append(
            Panel(
                "memory-time", "Memory of each rank over time", (SMALL_WIDTH, 2.9),
                lambda ax, canvas: draw_memory_over_time(ax, job, canvas),
            )
        )  # fmt: skip
    return ProfilePicture("memory", caption, tuple(found))


def _gantt(profile: Profile) -> ProfilePicture:
    caption = "Steps of every rank, function by function; gaps are time that belongs to none of them."
    job = main_job(profile)
    gantt = None if job is None else make_gantt(job, profile.settings.warmup_steps)
    if gantt is None:
        return ProfilePicture("gantt", caption, ())
    size = (13.0, 1.3 + LANE / 72 * len(gantt.lanes))
    panel = Panel("gantt", caption, size, lambda ax, canvas: draw_gantt(ax, gantt, canvas))
    return ProfilePicture("gantt", caption, (panel,), in_page=False)
