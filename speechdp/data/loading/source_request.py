"""The options with which a source is opened, on this rank or on a feeder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from speechdp.data.transforms.augment_options import AugmentOptions
from speechdp.data.transforms.inputs import InputOptions
from speechdp.labels.transcript_hmm import TranscriptOptions


@dataclass(frozen=True)
class Context:
    """Frames around a segment that are input but not learnt (never beyond the utterance)."""

    left: int = 0
    right: int = 0


@dataclass(frozen=True)
class SourceRequest:
    """Everything that determines what a source's batches hold.

    Attributes:
        split: e.g. "train".
        alignments: directory of targets files, or None for the shards' own targets.
        context: frames around each segment.
        inputs: what is computed from every frame.
        augment: random changes of the input.
        seed: of the random numbers.
        transcripts: options for the HMMs of transcripts in batches; None: batches hold none.
    """

    split: str
    alignments: Path | None = None
    context: Context = field(default_factory=Context)
    inputs: InputOptions = field(default_factory=InputOptions)
    augment: AugmentOptions = field(default_factory=AugmentOptions)
    seed: int = 0
    transcripts: TranscriptOptions | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON-like values."""
        return {**asdict(self), "alignments": None if self.alignments is None else str(self.alignments)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SourceRequest:
        """Read the result of `to_json`."""
        alignments, transcripts = values["alignments"], values["transcripts"]
        return cls(
            split=values["split"],
            alignments=None if alignments is None else Path(alignments),
            context=Context(**values["context"]),
            inputs=InputOptions(**values["inputs"]),
            augment=AugmentOptions(**values["augment"]),
            seed=values["seed"],
            transcripts=None if transcripts is None else TranscriptOptions(**transcripts),
        )
