"""Read the measures of a run's synthetic speech: RUN/synthesis.json, docs/synthesis.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speechdp.report.runs.records import amount, read_object, whole_amount, words
from speechdp.report.runs.results import Estimate, Spoken

FILE_NAME = "synthesis.json"
#: Kinds of speech whose words the recogniser decoded.
SOURCES = ("recorded", "copy", "synthetic")
_FORMAT, _VERSION = "speechdp-synthesis", 1


def read_spoken(run_dir: Path, problems: list[str]) -> Spoken | None:
    """Return the measures of a run's speech; None if there is no file, or if it is damaged (a problem)."""
    path = run_dir / FILE_NAME
    record = read_object(path, problems) if path.is_file() else None
    if record is None:
        return None
    if record.get("format") != _FORMAT or record.get("version") != _VERSION:
        problems.append(
            f"{FILE_NAME}: not a record of {_FORMAT} version {_VERSION}; measure it again with "
            "`speechdp synthesize --data`"
        )
        return None
    found = record.get("word_errors")
    spoken = Spoken(
        split=words(record.get("split")),
        utterances=whole_amount(record, "utterances"),
        mcd_db=_estimate(record.get("mcd_db"), "mean"),
        focus_rate=_estimate(record.get("focus_rate"), "mean"),
        stopped_share=amount(record, "stopped_share"),
        length_ratio=amount(record, "length_ratio"),
        word_errors=_word_errors(found) if isinstance(found, dict) else {},
    )
    if spoken.mcd_db is None:
        problems.append(
            f"{FILE_NAME}: no distortion in it; measure it again with `speechdp synthesize --data`"
        )
        return None
    return spoken


def _word_errors(record: dict[str, Any]) -> dict[str, Estimate]:
    found = ((source, _estimate(record.get(source), "wer", "wer_")) for source in SOURCES)
    return {source: rate for source, rate in found if rate is not None}


def _estimate(value: Any, mean_key: str, prefix: str = "") -> Estimate | None:
    if not isinstance(value, dict):
        return None
    mean = amount(value, mean_key)
    if mean is None:
        return None
    return Estimate(mean, amount(value, f"{prefix}low"), amount(value, f"{prefix}high"))
