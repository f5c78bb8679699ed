"""Draw pictures of synthetic speech: the decoder's attention, and the spectrograms.

Legend: T frames, M mel bins, L linear bins, N decoder steps, S symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from speechdp.errors import RunError
from speechdp.files import atomic_path, cannot_be_written
from speechdp.report.kit.svg import STYLE
from speechdp.report.kit.theme import PRINT

_WIDTH_INCHES = 8.0
_PANEL_INCHES = 2.1
_MIN_ATTENTION_INCHES, _INCHES_A_SYMBOL, _MAX_ATTENTION_INCHES = 2.1, 0.15, 6.0
_DPI = 120
#: More symbols than this are not labelled one by one.
_MAX_LABELS = 40
_MAX_TITLE = 90


@dataclass(frozen=True)
class SpeechPicture:
    """The contents of a picture.

    Attributes:
        title: the text that was said.
        symbols: names of the symbols, (S,).
        attention: (N, S).
        mel, linear: (T, M) and (T, L), in [0, 1].
        recorded_mel: (T', M) of the recording; None: there is no recording.
        sampling_rate: in Hz.
        frame_shift_s: time between frames.
    """

    title: str
    symbols: tuple[str, ...]
    attention: npt.NDArray[Any]
    mel: npt.NDArray[Any]
    linear: npt.NDArray[Any]
    recorded_mel: npt.NDArray[Any] | None
    sampling_rate: int
    frame_shift_s: float


def draw_picture(picture: SpeechPicture, path: Path) -> None:
    """Write a PNG: attention over time, mel spectrogram (also of the recording), linear spectrogram.

    Raises:
        RunError: a disk error.
    """
    spectrograms = [("Mel spectrogram, synthetic", picture.mel, "mel bin")]
    if picture.recorded_mel is not None:
        spectrograms.append(("Mel spectrogram, recording", picture.recorded_mel, "mel bin"))
    spectrograms.append(("Linear spectrogram, synthetic", picture.linear, "kHz"))
    tall = np.clip(_INCHES_A_SYMBOL * len(picture.symbols), _MIN_ATTENTION_INCHES, _MAX_ATTENTION_INCHES)
    heights = [float(tall), *[_PANEL_INCHES] * len(spectrograms)]
    with mpl.rc_context({**STYLE, "figure.facecolor": PRINT.surface}):
        figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.6), dpi=_DPI, layout="constrained")
        figure.suptitle(_shortened(picture.title), x=0.01, ha="left", color=PRINT.ink, fontweight="bold")
        attention_axes, *others = figure.subplots(len(heights), 1, height_ratios=heights)
        _draw_attention(attention_axes, picture)
        for ax, (title, values, unit) in zip(others, spectrograms, strict=True):
            _draw_spectrogram(ax, title, values, unit, picture)
        longest = max(len(values) for _, values, _ in spectrograms) * picture.frame_shift_s
        for ax in (attention_axes, *others):
            ax.set_xlim(0, longest)
        others[-1].set_xlabel("time (s)", color=PRINT.muted)
        try:
            with atomic_path(path) as temporary:
                # Not `savefig`, which first draws everything once more, only for the layout.
                FigureCanvasAgg(figure).print_png(temporary)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise RunError(cannot_be_written(path, error)) from error


def _draw_attention(ax: Axes, picture: SpeechPicture) -> None:
    duration_s = len(picture.mel) * picture.frame_shift_s
    num_symbols = len(picture.symbols)
    image = ax.imshow(
        picture.attention.T,
        origin="upper",
        aspect="auto",
        interpolation="antialiased",
        cmap="Blues",
        vmin=0.0,
        vmax=1.0,
        extent=(0.0, duration_s, num_symbols - 0.5, -0.5),
    )
    places = list(range(0, num_symbols, -(-num_symbols // _MAX_LABELS)))
    ax.set_yticks(places, [_visible(picture.symbols[place]) for place in places])
    _style(ax, "Attention: the symbol that each frame is generated from")
    _bar(ax, image, "weight")


def _draw_spectrogram(
    ax: Axes, title: str, values: npt.NDArray[Any], unit: str, picture: SpeechPicture
) -> None:
    top = picture.sampling_rate / 2000.0 if unit == "kHz" else values.shape[1]
    image = ax.imshow(
        values.T,
        origin="lower",
        aspect="auto",
        interpolation="antialiased",
        cmap="magma",
        vmin=0.0,
        vmax=1.0,
        extent=(0.0, len(values) * picture.frame_shift_s, 0.0, top),
    )
    _style(ax, f"{title} ({unit})")
    _bar(ax, image, "level, 0 to 1")


def _style(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", color=PRINT.ink, fontweight="bold", pad=6)
    ax.tick_params(length=0, colors=PRINT.muted, labelcolor=PRINT.muted)
    for spine in ax.spines.values():
        spine.set_color(PRINT.grid)


def _bar(ax: Axes, image: Any, label: str) -> None:
    figure = ax.get_figure()
    assert figure is not None
    bar = figure.colorbar(image, ax=ax, pad=0.01, fraction=0.03)
    bar.set_label(label, color=PRINT.muted)
    bar.ax.tick_params(length=0, labelcolor=PRINT.muted)
    bar.outline.set_visible(False)


def _visible(symbol: str) -> str:
    return "space" if symbol in (" ", "<space>") else symbol.strip("<>") or symbol


def _shortened(title: str) -> str:
    title = " ".join(title.split())
    return title if len(title) <= _MAX_TITLE else title[: _MAX_TITLE - 1] + "…"
