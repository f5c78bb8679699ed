"""What all pages share: colours that can be told apart, and where sentences and figures may be broken."""

from __future__ import annotations

import itertools
import re
import resource
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.axes import Axes

from speechdp.errors import RunError
from speechdp.report.kit import formatting
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.canvas import Canvas, dashes, named_canvas, style_axes
from speechdp.report.kit.pages import render_page, write_files
from speechdp.report.kit.svg import Panel, panel_svgs, write_png
from speechdp.report.kit.tables import Column, RowHead, ShownTable
from speechdp.report.kit.theme import PAGE, RUN_COLOURS, RUN_COLOURS_DARK

Colours = npt.NDArray[np.float64]

#: Linear RGB as it is seen (Machado, Oliveira & Fernandes 2009, severity 1).
SIGHTS = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
#: Linear RGB (sRGB's primaries) to XYZ.
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colours: Sequence[str]) -> Colours:
    """Return (N, 3) linear RGB of `#rrggbb`."""
    values = np.array([[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in colours])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: Colours) -> Colours:
    """Return (N, 3) CIELAB of linear RGB, to the white of D65."""
    ratios = np.clip(rgb @ TO_XYZ.T, 0, None) / np.array([0.9505, 1.0, 1.089])
    f = np.where(ratios > 0.008856, np.cbrt(ratios), 7.787 * ratios + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("colours", [RUN_COLOURS, RUN_COLOURS_DARK], ids=["light", "dark"])
def test_colours_of_runs_are_told_apart_with_any_sight(colours: Sequence[str], sight: str) -> None:
    seen = lab(np.clip(linear(colours) @ SIGHTS[sight].T, 0, 1))
    for one, other in itertools.combinations(range(len(colours)), 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= 16, (colours[one], colours[other])


@pytest.mark.parametrize(("colours", "surface"), [(RUN_COLOURS, "#ffffff"), (RUN_COLOURS_DARK, "#1a2128")])
def test_names_in_the_colours_of_runs_are_legible(colours: Sequence[str], surface: str) -> None:
    """WCAG 2's contrast of text."""
    lights = linear([surface, *colours]) @ TO_XYZ[1] + 0.05
    ratios = np.maximum(lights[0], lights[1:]) / np.minimum(lights[0], lights[1:])
    assert ratios.min() >= 4.5


def test_every_text_of_a_plot_follows_the_page() -> None:
    """Black is not seen on a dark page."""

    def draw(ax: Axes, canvas: Canvas) -> bool:
        style_axes(ax, "title", "unit", canvas.theme)
        ax.plot([0, 1], [0, 1])
        ax.set_xlabel("across")
        ax.set_ylabel("up")
        return True

    ((_, svg),) = panel_svgs([Panel("one", "", (4, 3), draw)], lambda: named_canvas(["a"], PAGE))
    texts = re.findall(r"<text style=\"([^\"]*)\"[^>]*>([^<]+)", svg)
    assert {"across", "up", "title (unit)"} <= {text for _, text in texts}
    assert [text for style, text in texts if "fill: var(--" not in style] == []


@pytest.mark.parametrize("large", ["page", "csv", "picture"])
def test_what_cannot_be_written_anew_stays_as_it_was(tmp_path: Path, large: str) -> None:
    """A full disk must not take the report that is there; here files may not become larger than 200 bytes."""

    def draw(ax: Axes, canvas: Canvas) -> bool:
        ax.plot([0, 1], [0, 1])
        return True

    def write(page: str, csv: str, **pictures: Panel) -> None:
        canvas = named_canvas(["a"], PAGE)
        drawn = {name: partial(write_png, lines=[[panel]], canvas=canvas) for name, panel in pictures.items()}
        write_files(tmp_path, "report", page, csv, drawn)

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    picture = Panel("one", "", (4, 3), draw)
    write("page", "a,b", one=picture)
    before = files()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(RunError, match="cannot be written"):
            write(
                "p" * (1000 if large == "page" else 4),
                "c" * (1000 if large == "csv" else 3),
                **({"one": picture} if large == "picture" else {}),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    unwritten = {"page": "report.html", "csv": "report.csv", "picture": "one.png"}[large]
    assert files().keys() == before.keys()
    assert files()[unwritten] == before[unwritten]


def page_of(sentence: str, text: str) -> str:
    column = Column[str]("figure", "figure", "", "What it is.", len, cell=lambda row: row)
    shown = ShownTable("figures", "Figures", (column,), [(RowHead("a"), text)])
    return render_page(
        "simulation", "page", Answer(sentence), lines=[], legend=[], over_ranks=True, with_ranges=False,
        amount="frames", overview=shown, table=shown, settings=[], runs=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1.05\u00a0[0.98,\u00a01.12]", "1.05 [0.98,\u00a01.12]"),
        ("84,077 ± 1,248 (1 of 2)", "84,077 ±\u00a01,248 (1\u00a0of\u00a02)"),
        (
            "0.8\u00a0[0.7,\u00a00.9]\u00a0on\u00a02; 0.9 on 4",
            "0.8 [0.7,\u00a00.9]\u00a0on\u00a02; 0.9\u00a0on\u00a04",
        ),
        ("1 min 5 s", "1\u00a0min\u00a05\u00a0s"),
    ],
)
def test_a_narrow_cell_breaks_its_figure_before_the_interval_only(text: str, shown: str) -> None:
    assert f">{shown}</td>" in page_of("a", text)


def test_options_are_not_broken_and_sentences_are_escaped() -> None:
    page = page_of("Repeat it with --seeds 1,2 (--race 24), not <b> or a--b.", "1")
    whole = '<span class="whole">{}</span>'.format
    assert f"Repeat it with {whole('--seeds')} 1,2 {whole('(--race')} 24), not &lt;b&gt; or a--b." in page


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It took 6 min 05 s, 2.5 GB.", "It took 6\u00a0min 05\u00a0s, 2.5\u00a0GB."),
        ("23,710 frames/s on 2 ranks", "23,710\u00a0frames/s on 2\u00a0ranks"),
        ("\u22120.16 nats/frame after 16 steps", "\u22120.16\u00a0nats/frame after 16\u00a0steps"),
        ("1.1 [\u22120.3, 1.17] times, 5 %.", "1.1 [\u22120.3,\u00a01.17]\u00a0times, 5\u00a0%."),
        ("rank 3, from step 35, L1 0.15", "rank\u00a03, from step\u00a035, L1\u00a00.15"),
        ("in 3 of 16 runs, 4, 8 and 2 stages", "in 3 of 16 runs, 4, 8 and 2 stages"),
    ],
)
def test_a_sentence_is_not_broken_before_a_unit_nor_inside_an_interval(text: str, shown: str) -> None:
    assert f">{shown}</p>" in page_of(text, "1")


def test_lines_of_a_family_have_one_colour_and_strokes_of_their_own() -> None:
    names = [f"{family} {member}" for family in "ab" for member in range(6)]
    canvas = named_canvas(names, PAGE, {name: name[0] for name in names})
    assert len({canvas.colours[name] for name in names if name[0] == "a"}) == 1
    assert canvas.colours["a 0"] != canvas.colours["b 0"]
    assert len({(canvas.colours[name], dashes(name, canvas)) for name in names}) == len(names)
    assert dashes("b 0", canvas) == ()


def test_large_figures_are_not_written_as_powers_of_ten() -> None:
    assert [formatting.rough(value) for value in (0, 0.0421, 3.14, 255.3)] == ["0", "0.042", "3.1", "255"]
    assert [formatting.gigabits(value / 8e-9) for value in (0.0878, 25, 3600)] == ["0.0878", "25", "3,600"]
