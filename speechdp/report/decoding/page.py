"""Write the page of a decoding: error rates, confusions, speakers, the worst utterances with audio."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group

from speechdp.counting import counted
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.layout import printable
from speechdp.decode.results import DecodingResult, judged
from speechdp.decode.wer import WerResult, align_words
from speechdp.report.decoding.mistakes import (
    AlignedUtterance,
    Confusion,
    LostOrAdded,
    confusions,
    lost_and_added,
    worst,
)
from speechdp.report.decoding.sound import embedded_audio
from speechdp.report.kit import formatting
from speechdp.report.kit.answer import Answer
from speechdp.report.kit.pages import WrittenReport, render_page, setting_text, write_files
from speechdp.report.kit.tables import Column, RowHead, ShownTable, csv_text
from speechdp.report.runs.results import Estimate

#: Largest number of rows in a table of words, and of utterances shown.
_MOST_WORDS, _MOST_UTTERANCES = 20, 40
#: Largest number of speakers shown on a terminal.
_MOST_SPEAKERS = 10
#: Largest size of the samples in a page: about 6 minutes at 16 kHz.  In base64 they take a third more.
MAX_AUDIO_BYTES = 12_000_000
_ARROW = "\u2192"


def write_decoding_page(result: DecodingResult, dataset: Dataset, run_dir: Path) -> WrittenReport:
    """Write RUN/report/decoding-NAME.html, and a CSV with a line for each utterance.

    Args:
        result: result of `decode_split`, which has written the records of the run.
        dataset: the decoded data; recordings are embedded if it stores audio.

    Raises:
        RunError: the page cannot be written.
        ShardError: a shard is damaged.
    """
    utterances = _aligned(result)
    shown = worst(utterances, _MOST_UTTERANCES)
    ids = [utterance.utterance_id for utterance in shown]
    speakers = speaker_table(result.speakers)
    answer = _answer(result)
    page = render_page(
        "decoding",
        f"{run_dir.resolve().name}: {result.name}",
        answer,
        confusions=_confusion_table(confusions(utterances, _MOST_WORDS)),
        lost_and_added=_lost_and_added_table(lost_and_added(utterances, _MOST_WORDS)),
        speakers=speakers,
        utterances=shown,
        num_wrong=result.wer.sentence_errors,
        audio=embedded_audio(dataset, result.split, ids, MAX_AUDIO_BYTES),
        has_audio=dataset.stored == "audio",
        settings=_settings(result, dataset),
    )
    html, csv, _ = write_files(
        run_dir / "report", f"decoding-{result.name}", page, _csv(result, utterances), {}
    )
    table = Group(*([_shortened(speakers)] if len(speakers.rows) > 1 else []))
    return WrittenReport(html, csv, None, table, answer.sentences)


def _aligned(result: DecodingResult) -> list[AlignedUtterance]:
    transcribed = judged(result.utterances)
    aligned = align_words([one.ref for one in transcribed], [one.hyp for one in transcribed])
    return [
        AlignedUtterance(one.utterance_id, one.speaker, words)
        for one, words in zip(transcribed, aligned, strict=True)
    ]


def _answer(result: DecodingResult) -> Answer:
    wer = result.wer
    headline = (
        f"WER {_rate(wer.wer, wer.wer_low, wer.wer_high)}: {counted(wer.errors, 'error')} in "
        f"{counted(wer.words, 'word')}."
    )
    details = [
        f"{counted(wer.substitutions, 'substitution')}, {counted(wer.deletions, 'deletion')}, "
        f"{counted(wer.insertions, 'insertion')}.",
        f"SER {_rate(wer.ser, wer.ser_low, wer.ser_high)}: {wer.sentence_errors:,} of {wer.utterances:,} "
        "utterances have at least one error.",
        *_on_speakers(result.speakers),
        *([f"{formatting.capital(result.speakers_remark)}."] if result.speakers_remark else []),
        "[ ]: 95 % bootstrap intervals over utterances.",
    ]
    cautions = []
    if result.unknown_remark:
        cautions.append(f"{result.unknown_remark}.")
    if result.settings.get("tuning", {}).get("split") == result.split:
        cautions.append("The scales were chosen on this split: on new speech the error rate may be higher.")
    if result.failed:
        failed = counted(result.failed, "utterance")
        cautions.append(f"For {failed} nothing was recognised: all their words count as deletions.")
    return Answer(headline, tuple(details), tuple(cautions))


def _on_speakers(speakers: Mapping[str, WerResult]) -> list[str]:
    if len(speakers) < 2:
        return []
    names, errors = list(speakers), list(speakers.values())
    median = statistics.median(one.wer for one in errors)
    return [
        f"By speaker the WER is {formatting.percent(errors[-1].wer, 1)} % ({printable(names[-1])}) to "
        f"{formatting.percent(errors[0].wer, 1)} % ({printable(names[0])}), median "
        f"{formatting.percent(median, 1)} % of {len(speakers)} speakers."
    ]


def _rate(mean: float, low: float, high: float) -> str:
    rate, _, interval = formatting.error_rate(Estimate(mean, low, high)).partition(" ")
    return f"{rate} % {interval}"


def speaker_table(speakers: Mapping[str, WerResult]) -> ShownTable[WerResult]:
    """Return the table of speakers, in the order given."""
    columns: tuple[Column[WerResult], ...] = (
        Column("utterances", "utterances", "", "Utterances.", lambda row: row.utterances),
        Column("words", "words", "", "Words of the references.", lambda row: row.words, formatting.count),
        Column("errors", "errors", "", "Word errors of all kinds.", lambda row: row.errors),
        Column("substitutions", "substituted", "", "Words recognised as others.",
               lambda row: row.substitutions),
        Column("deletions", "deleted", "", "Words that were not recognised.", lambda row: row.deletions),
        Column("insertions", "inserted", "", "Words recognised, but not spoken.", lambda row: row.insertions),
        Column(
            "wer", "WER", "%", "Word error rate and its 95 % bootstrap interval over utterances.",
            lambda row: row.wer,
            cell=lambda row: formatting.error_rate(Estimate(row.wer, row.wer_low, row.wer_high)),
        ),
        Column(
            "ser", "SER", "%", "Share of the utterances with at least one error and its interval.",
            lambda row: row.ser,
            cell=lambda row: formatting.error_rate(Estimate(row.ser, row.ser_low, row.ser_high)),
        ),
    )  # fmt: skip
    rows = [(RowHead(printable(name)), errors) for name, errors in speakers.items()]
    return ShownTable("speakers", "Word errors by speaker", columns, rows, first="speaker")


def _shortened(table: ShownTable[WerResult]) -> ShownTable[WerResult]:
    """Return the table for a terminal, with only the first, i.e. worst, speakers."""
    left_out = len(table.rows) - _MOST_SPEAKERS
    are = "is" if left_out == 1 else "are"
    note = f"{counted(left_out, 'more speaker')} with a lower rate {are} on the page." if left_out > 0 else ""
    return ShownTable(table.id, table.title, table.columns, table.rows[:_MOST_SPEAKERS], table.first, note)


def _confusion_table(rows: Sequence[Confusion]) -> ShownTable[Confusion]:
    columns: tuple[Column[Confusion], ...] = (
        Column("times", "times", "", "How often this confusion occurs.", lambda row: row.times),
        Column("said", "spoken", "", "How often the reference word was spoken.", lambda row: row.said),
        Column(
            "share", "share", "%", "Share of the spoken words.",
            lambda row: row.times / row.said, formatting.percent,
        ),
    )  # fmt: skip
    heads = [RowHead(f"{row.reference} {_ARROW} {row.hypothesis}") for row in rows]
    pairs = list(zip(heads, rows, strict=True))
    return ShownTable("confusions", "Confused words", columns, pairs, first="spoken \u2192 recognised")


def _lost_and_added_table(rows: Sequence[LostOrAdded]) -> ShownTable[LostOrAdded]:
    columns: tuple[Column[LostOrAdded], ...] = (
        Column("deleted", "deleted", "", "Spoken, but not recognised.", lambda row: row.deleted),
        Column("inserted", "inserted", "", "Recognised, but not spoken.", lambda row: row.inserted),
        Column("said", "spoken", "", "How often it was spoken.", lambda row: row.said),
    )  # fmt: skip
    pairs = [(RowHead(row.word), row) for row in rows]
    return ShownTable("lost-and-added", "Deleted and inserted words", columns, pairs, first="word")


def _settings(result: DecodingResult, dataset: Dataset) -> list[tuple[str, str]]:
    shown: dict[str, Any] = {
        "data": str(dataset.path.resolve()),
        "split": result.split,
        "grammar": result.grammar.value,
        "graph": result.settings["graph"],
        "options": result.settings["options"],
    }
    if tuning := result.settings.get("tuning"):
        shown["tuned on"] = tuning["split"]
    return [(name, setting_text(name, value)) for name, value in shown.items()]


def _csv(result: DecodingResult, utterances: Sequence[AlignedUtterance]) -> str:
    head = (
        "utterance",
        "speaker",
        "words",
        "substitutions",
        "deletions",
        "insertions",
        "reference",
        "hypothesis",
    )
    lines = (
        (
            one.utterance_id,
            one.speaker,
            aligned.num_said,
            aligned.count("substitution"),
            aligned.count("deletion"),
            aligned.count("insertion"),
            one.ref,
            one.hyp,
        )
        for one, aligned in zip(judged(result.utterances), utterances, strict=True)
    )
    return csv_text(head, lines)
