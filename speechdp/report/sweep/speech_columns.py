"""The columns of the table of synthetic speech."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from speechdp.report.kit import formatting
from speechdp.report.kit.columns import FigureColumn
from speechdp.report.kit.tables import Column
from speechdp.report.runs.derived import RunFigures
from speechdp.report.runs.results import Estimate, Spoken

SPEECH_TITLE = "Speech on held-out texts"
_INTERVALS = "[ ]: 95 % intervals over utterances."
_OF_RECOGNISER = (
    "Word errors are those of the recogniser: in the recordings (its own), in their spectrograms made "
    "audible (with Griffin-Lim's), in the synthetic speech."
)


def speech_caption(rows: Sequence[RunFigures]) -> str:
    """Return the note on the table of these runs; on word errors only if a recogniser decoded any."""
    has_word_errors = any(row.run.spoken is not None and row.run.spoken.word_errors for row in rows)
    return f"{_OF_RECOGNISER} {_INTERVALS}" if has_word_errors else _INTERVALS


def _figure(
    name: tuple[str, str, str, str], of: Callable[[Spoken], Estimate | None], factor: float, digits: int
) -> FigureColumn:
    """Return a column whose figures are displayed multiplied by `factor`.

    Args:
        name: key, title, unit and meaning.
        of: returns the figure.
        digits: digits after the decimal point.
    """

    def found(row: RunFigures) -> Estimate | None:
        return None if row.run.spoken is None else of(row.run.spoken)

    def cell(row: RunFigures) -> str:
        estimate = found(row)
        if estimate is None:
            return formatting.MISSING
        mean, low, high = (
            None if value is None else f"{factor * value:.{digits}f}"
            for value in (estimate.mean, estimate.low, estimate.high)
        )
        return f"{mean}" if low is None or high is None else f"{mean} [{low}, {high}]"

    return Column(*name, lambda row: estimate.mean if (estimate := found(row)) else None, cell=cell)


def _word_errors(source: str, title: str, meaning: str) -> FigureColumn:
    name = (f"speech_wer_{source}", title, "%", meaning)
    return _figure(name, lambda spoken: spoken.word_errors.get(source), 100, 1)


def _share(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value)


def _split(row: RunFigures) -> str:
    spoken = row.run.spoken
    if spoken is None or not spoken.split:
        return formatting.MISSING
    return spoken.split if spoken.utterances is None else f"{spoken.split} ({spoken.utterances})"


SPEECH_COLUMNS: tuple[FigureColumn, ...] = (
    Column(
        "speech_split", "split (texts)", "", "Split whose texts were synthesised, and how many of them.",
        lambda row: row.run.spoken.split if row.run.spoken else None, cell=_split, is_number=False,
    ),
    _figure(
        ("speech_mcd_db", "MCD", "dB", "Mel-cepstral distortion from the recording; less is better."),
        lambda spoken: spoken.mcd_db, 1, 2,
    ),
    _figure(
        ("speech_focus_rate", "focus rate", "%", "Mean of attention's largest weight; 100: a clear choice."),
        lambda spoken: spoken.focus_rate, 100, 1,
    ),
    _figure(
        ("speech_stopped_share", "stopped by itself", "%", "Utterances that the stop prediction ended."),
        lambda spoken: _share(spoken.stopped_share), 100, 0,
    ),
    _figure(
        ("speech_length_ratio", "length", "times", "Synthetic frames divided by those of the recordings."),
        lambda spoken: _share(spoken.length_ratio), 1, 2,
    ),
    _word_errors("recorded", "WER, recorded", "Word errors that the recogniser makes on the recordings."),
    _word_errors("copy", "WER, copy", "The same on the recordings' spectrograms made audible."),
    _word_errors("synthetic", "WER, synthetic", "The same on the synthetic speech."),
)  # fmt: skip
