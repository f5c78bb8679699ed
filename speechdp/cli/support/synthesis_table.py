"""Show measurements on held-out texts as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from speechdp.decode.wer import WerResult
from speechdp.synthesis.record import SOURCES, Mean, SynthesisResult

_ENDING_NAMES = {
    "stop": "Stopped by itself",
    "attention": "Ended where attention rested on the text's end",
    "limit": "Never ended, cut at --max-seconds",
}
_SOURCE_NAMES = {
    "recorded": "Word errors, recordings",
    "copy": "Word errors, recordings' spectrograms through Griffin-Lim",
    "synthetic": "Word errors, synthetic speech",
}

#: A mean diagonality below this means that the model does not yet follow the text.
_FOLLOWS_TEXT = 0.5


def print_result(console: Console, result: SynthesisResult) -> None:
    """Print the table, and a line for each caution about it."""
    number = len(result.said)
    of = "" if number == result.of_split else f" of {result.of_split:,}"
    table = Table(title=f"{result.split}: {number:,}{of} utterances", title_justify="left")
    for heading in ("Measure", "Value", "95 % interval", "Counted"):
        table.add_column(heading, justify="left" if heading in ("Measure", "Counted") else "right")
    table.add_row("Mel-cepstral distortion (lower is better)", *_mean(result.mcd_db, " dB"), "")
    table.add_row("The same, times longer / shorter length", *_mean(result.mcd_sl_db, " dB"), "")
    table.add_row("Focus rate of the attention (1: sharp)", *_mean(result.focus_rate), "")
    table.add_row("Diagonality of the attention (1: diagonal)", *_mean(result.diagonality), "")
    table.add_row("Length, synthetic / recorded", f"{result.length_ratio:.2f}", "", "")
    for ending, count in result.endings.items():
        share = f"{100 * count / number:.1f} %"
        table.add_row(_ENDING_NAMES[ending], share, "", f"{count:,} of {number:,}")
    for source in SOURCES:
        if source in result.word_errors:
            table.add_row(_SOURCE_NAMES[source], *_errors(result.word_errors[source]))
    console.print(table)
    if result.diagonality.mean < _FOLLOWS_TEXT:
        console.print(
            f"Attention does not follow the texts yet (focus rate {result.focus_rate.mean:.2f}, diagonality "
            f"{result.diagonality.mean:.2f}): the speech cannot be understood until it does; train longer"
        )
    unknown = (result.facts["recogniser"] or {}).get("unknown_words", 0)
    if result.word_errors and unknown:
        words = result.word_errors["synthetic"].words
        console.print(
            f"{unknown:,} of {words:,} words are unknown to the recogniser: they count as errors in each row"
        )
    if result.word_errors and "recorded" not in result.word_errors:
        console.print(
            "The recogniser was not run on the recordings: the data directory names no files for them"
        )


def _mean(value: Mean, unit: str = "") -> tuple[str, str]:
    return f"{value.mean:.2f}{unit}", f"{value.low:.2f} to {value.high:.2f}"


def _errors(wer: WerResult) -> tuple[str, str, str]:
    interval = f"{100 * wer.wer_low:.1f} to {100 * wer.wer_high:.1f}"
    return f"{100 * wer.wer:.1f} %", interval, f"{wer.errors:,} of {wer.words:,} words"
