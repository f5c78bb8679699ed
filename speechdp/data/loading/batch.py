"""A batch of segments, padded to the longest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechdp.labels.transcript_hmm import TranscriptHmms

#: Target of frames that are input only: padding, and context beside a chunk.
IGNORED_TARGET = -1


@dataclass(frozen=True)
class Batch:
    """What a rank trains on in one step.

    Attributes:
        features: (B, T, F) float32, zero past each segment's end; of spectrograms, mel and linear bins.
        targets: (B, T) int64 class indices, IGNORED_TARGET where no frame is to be learnt; of spectrograms,
            (B, S) symbols of the texts, IGNORED_TARGET past each end.
        lengths: (B,) int64, on the CPU: frames of each segment, context included.
        num_frames: frames to be learnt; 0 is a step this rank only joins.  With transcripts, those of
            utterances that are long enough for theirs.
        ready: CUDA event after which features and targets are there; None: they are.
        transcripts: HMMs of the utterances' transcripts, on the CPU, where the task asks for them.
    """

    features: Tensor
    targets: Tensor
    lengths: Tensor
    num_frames: int
    ready: Any = None
    transcripts: TranscriptHmms | None = None

    def to(self, device: torch.device) -> Batch:
        """Return this batch on `device`; waits for a copy that is under way (see `device_stream.py`)."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.features.device)
            stream.wait_event(self.ready)
            # Their memory was taken on the copying stream: it must not be used anew before this one is done.
            self.features.record_stream(stream)
            self.targets.record_stream(stream)
            return dataclasses.replace(self, ready=None)
        if self.features.device == device:
            return self
        # Not asynchronous: memory of a pool may be filled anew as soon as this batch is let go.
        return dataclasses.replace(self, features=self.features.to(device), targets=self.targets.to(device))
