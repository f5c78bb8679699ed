"""Write the report of a simulation: CSV, PNG and one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import RenderableType

from speechdp.counting import counted
from speechdp.report.kit import formatting, theme
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.pages import WrittenReport, legend_marks, render_page, write_files
from speechdp.report.kit.svg import panel_svgs, write_png
from speechdp.report.simulation.panels import make_canvas, make_panels
from speechdp.report.simulation.ranges import NEAR_BEST_TEXT, Family, families_of, has_periods
from speechdp.report.simulation.table import TargetAmount, csv_of, full_table, overview
from speechdp.simulation.exchanges import has_period
from speechdp.simulation.links import LinkSpeed
from speechdp.simulation.predict import Prediction
from speechdp.simulation.simulate import Simulation

FOLDER = "simulation"
#: Note that predictions say nothing about accuracy.
TIME_ONLY = (
    "Only time is predicted, never accuracy: whether a model learns as well with a longer period, or on more "
    "ranks, a sweep or comparison has to show."
)
#: Largest number of lines for which a terminal shows the full table; else it shows the overview.
_MOST_LINES = 48
_NO_FRAMES = 1e9


def write_simulation(out: Path, simulation: Simulation, frames: float | None = None) -> WrittenReport:
    """Write OUT/simulation/simulation.{csv,png,html}.

    Args:
        out: folder of the run, or of the experiment, that was simulated.
        frames: training amount for the hours of all ranks; None: that of the run that trained on the most.

    Raises:
        RunError: the folder cannot be written.
    """
    predictions, families = simulation.predictions, families_of(simulation.predictions)
    frames = frames or max((run.frames_trained or 0.0 for run in simulation.runs), default=0.0) or _NO_FRAMES
    hours = "GPU-hours" if any(run.on_gpu for run in simulation.runs) else "rank-hours"
    target = TargetAmount(frames, simulation.runs[0].amount, hours)
    marks = legend_marks(make_canvas(families, theme.PAGE))
    answer, panels = find_answer(simulation, families), make_panels(families, target)
    table, summary = full_table(predictions, target, marks), overview(families, marks, target.amount)
    drawn = [panel_svgs(line, lambda: make_canvas(families, theme.PAGE)) for line in panels]
    page = render_page(
        "simulation",
        out.resolve().name,
        answer,
        TIME_ONLY,
        lines=[line for line in drawn if line],
        legend=list(marks.items()),
        over_ranks=len({one.ranks for one in predictions}) > 1,
        with_ranges=any(map(has_periods, families)),
        near_best=NEAR_BEST_TEXT,
        overview=summary,
        table=table,
        settings=settings_of(simulation, target),
        amount=target.amount,
        runs=[run.name for run in simulation.runs],
    )
    canvas = make_canvas(families, theme.PRINT)
    picture = partial(write_png, lines=panels, canvas=canvas, with_names=True)
    html, csv, png = write_files(
        out / FOLDER,
        "simulation",
        page,
        csv_of(predictions, frames),
        {"simulation": picture},
    )
    shown: RenderableType = table if len(predictions) <= _MOST_LINES else summary
    return WrittenReport(html, csv, png, shown, (*answer.sentences, TIME_ONLY))


def find_answer(simulation: Simulation, families: Sequence[Family]) -> Answer:
    """State the prediction for the largest number of ranks."""
    ranks = max(simulation.request.ranks)
    found = [one for one in simulation.predictions if one.ranks == ranks]
    if not found:
        return Answer(
            f"Nothing can be predicted for {formatting.rank_count(ranks)}: {simulation.refusals[0]}."
        )
    gradients = next((one for one in found if one.strategy.name == "gradient_averaging"), found[0])
    amount = simulation.runs[0].amount
    headline = (
        f"On {formatting.rank_count(ranks)}{_link_words(simulation)}, {_name(gradients)} would train at "
        f"{_speed(gradients, amount)}."
    )
    others = tuple(
        f"{formatting.capital(family.label)} with period {near[0].period}, the shortest that has "
        f"{NEAR_BEST_TEXT} of the fastest period's speed, would train at {_speed(near[0], amount)}."
        for family in families
        if has_periods(family) and family.label in ("model averaging", families[0].label)
        if (near := family.near_best(ranks))
    )
    return Answer(headline, others, simulation.assumptions)


def settings_of(simulation: Simulation, target: TargetAmount) -> list[tuple[str, str]]:
    """Return the settings of a simulation as (title, text)."""
    request, scenario = simulation.request, simulation.scenario
    cluster, work = scenario.cluster, scenario.work
    factors = ", ".join(f"rank {rank}: {factor:g} times as long" for rank, factor in request.factors.items())
    most = max(run.ranks for run in simulation.runs)
    steps = sum(int(run.times.trained.sum()) for run in simulation.runs)
    shown = [
        ("measured", f"{counted(steps, 'step')} on {formatting.rank_count(most)}, "
                     f"{formatting.milliseconds(work.step_s)} ms and {work.frames:,.0f} "
                     f"{target.amount} each, as simulated"),
        ("parameters", f"{scenario.model.nbytes / 1e6:,.1f} MB"),
        ("ranks of a node", str(cluster.ranks_per_node)),
        ("link between nodes", _link(cluster.between) if max(request.ranks) > cluster.ranks_per_node else ""),
        ("link inside a node", _link(cluster.within)),
        ("allreduce", cluster.algorithm),
        ("computing", f"{request.speedup:g} times as fast as measured" if request.speedup != 1 else ""),
        ("slower ranks", factors),
        ("correlation of ranks", f"{work.alike:.2f}"),
        ("exchange beside backward", f"{formatting.percent(scenario.progress)} % as fast as alone"),
        (f"{target.amount} to train on", f"{target.frames:,.0f}"),
    ]  # fmt: skip
    return [(title, text) for title, text in shown if text]


def _link(link: LinkSpeed) -> str:
    latency = formatting.count(1e6 * float(link.latency_s.mean()))
    return f"{formatting.gigabits(link.bytes_per_s)} Gbit/s, {latency} µs"


def _link_words(simulation: Simulation) -> str:
    cluster = simulation.scenario.cluster
    if max(simulation.request.ranks) <= cluster.ranks_per_node:
        return " of one node"
    return f" over {formatting.gigabits(cluster.between.bytes_per_s)} Gbit/s"


def _name(one: Prediction) -> str:
    name = one.strategy.name.replace("_", " ")
    return f"{name} with period {one.period}" if has_period(one.strategy) else name


def _speed(one: Prediction, amount: str) -> str:
    rate, efficiency = one.frames_per_s, one.efficiency
    # Two digits would round 104,000 to 100,000, an error as large as half of such an interval.
    mean, low, high = (formatting.estimate(value, 3) for value in (rate.mean, rate.low, rate.high))
    return (
        f"{mean} {amount}/s [{low}, {high}], {formatting.percent(efficiency.mean)} % of what so many ranks "
        "could do without exchanging or waiting"
    )
