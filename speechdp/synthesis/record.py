"""Results of measuring synthetic speech on held-out texts, and their record RUN/synthesis.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from speechdp.decode.wer import WerResult, ratio_interval
from speechdp.errors import RunError
from speechdp.files import cannot_be_written, write_text_atomically

FORMAT = "speechdp-synthesis"
VERSION = 1
RECORD_NAME = "synthesis.json"

#: Sources of the samples that the recogniser hears: the model's speech; the recording's spectrogram through
#: the same Griffin-Lim, which shows the effect of that alone; the recording itself.
Source = Literal["synthetic", "copy", "recorded"]
SOURCES: tuple[Source, ...] = ("recorded", "copy", "synthetic")
#: Ways in which an utterance ends; see `generate.Speech`.
Ending = Literal["stop", "attention", "limit"]
ENDINGS: tuple[Ending, ...] = ("stop", "attention", "limit")


@dataclass(frozen=True)
class SaidUtterance:
    """One held-out text as said by the model.

    Attributes:
        utterance_id, text: as in the data.
        frames, recorded_frames: lengths of the synthetic speech and of the recording.
        mcd_db: mel-cepstral distortion, in dB (quality.py).
        focus_rate, diagonality: of the attention (quality.py).
        ending: what ended it: its stop prediction, its attention, or the limit (generate.py).
        heard: the recogniser's words by source; empty without a recogniser.
    """

    utterance_id: str
    text: str
    frames: int
    recorded_frames: int
    mcd_db: float
    focus_rate: float
    diagonality: float
    ending: Ending
    heard: Mapping[Source, str]

    @property
    def mcd_sl_db(self) -> float:
        """Mel-cepstral distortion times the longer length over the shorter one.

        Warping alone favours speech that does not end: all surplus frames are matched to the frames of the
        recording that they resemble most.

        Source: Chen et al., "V2C: visual voice cloning", CVPR 2022 (there MCD-DTW-SL).
        """
        lengths = self.frames, self.recorded_frames
        return self.mcd_db * max(lengths) / min(lengths)


@dataclass(frozen=True)
class Mean:
    """A mean over utterances with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Compute the mean, and its interval in the same way as for word error rates."""
        array = np.asarray(values, dtype=np.float64)
        return cls(float(array.mean()), *ratio_interval(array, np.ones(len(array), dtype=np.int64)))


@dataclass(frozen=True)
class SynthesisResult:
    """Results for a split.

    Attributes:
        split: name of the split.
        of_split: utterances of the whole split; fewer may have been said.
        said: the utterances, sorted by id.
        word_errors: the recogniser's word errors, by source; empty without a recogniser.
        facts: JSON-like; how the speech was made (data, options, recogniser and its grammar).
        pictures: pictures that were drawn, relative to the run.
    """

    split: str
    of_split: int
    said: tuple[SaidUtterance, ...]
    word_errors: Mapping[Source, WerResult]
    facts: Mapping[str, Any]
    pictures: tuple[str, ...]

    @cached_property
    def mcd_db(self) -> Mean:
        """Mel-cepstral distortion in dB."""
        return Mean.of([one.mcd_db for one in self.said])

    @cached_property
    def mcd_sl_db(self) -> Mean:
        """Mel-cepstral distortion times the longer length over the shorter one, in dB."""
        return Mean.of([one.mcd_sl_db for one in self.said])

    @cached_property
    def focus_rate(self) -> Mean:
        """Mean of the attention's largest weight."""
        return Mean.of([one.focus_rate for one in self.said])

    @cached_property
    def diagonality(self) -> Mean:
        """Closeness of the attention to the diagonal."""
        return Mean.of([one.diagonality for one in self.said])

    @property
    def endings(self) -> dict[Ending, int]:
        """Number of utterances by the way they ended."""
        found = Counter(one.ending for one in self.said)
        return {ending: found[ending] for ending in ENDINGS}

    @property
    def length_ratio(self) -> float:
        """Frames of all synthetic speech over frames of all recordings."""
        return sum(one.frames for one in self.said) / sum(one.recorded_frames for one in self.said)

    def to_json(self) -> str:
        """Return the text of synthesis.json."""
        values = {
            "format": FORMAT,
            "version": VERSION,
            "split": self.split,
            "utterances": len(self.said),
            "utterances_of_split": self.of_split,
            "mcd_db": asdict(self.mcd_db),
            "mcd_sl_db": asdict(self.mcd_sl_db),
            "focus_rate": asdict(self.focus_rate),
            "diagonality": asdict(self.diagonality),
            "endings": self.endings,
            "stopped_share": self.endings["stop"] / len(self.said),
            "length_ratio": self.length_ratio,
            "word_errors": {source: asdict(wer) for source, wer in self.word_errors.items()},
            **self.facts,
            "pictures": list(self.pictures),
            "said": [asdict(one) for one in self.said],
        }
        return json.dumps(values, indent=2) + "\n"

    def write(self, run_dir: Path) -> Path:
        """Write RUN/synthesis.json.  Raises RunError on a disk error."""
        path = run_dir / RECORD_NAME
        try:
            write_text_atomically(path, self.to_json())
        except OSError as error:
            raise RunError(cannot_be_written(path, error)) from error
        return path
