"""A batch of segments, padded to the longest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechdp.labels.transcript_hmm import TranscriptHmms

#: Target of frames that are input only: padding, and the context on both sides of a chunk.
IGNORED_TARGET = -1


@dataclass(frozen=True)
class Batch:
    """What a rank trains on in one step.

    Attributes:
        features: (B, T, F) float32, zero past each segment's end; for spectrograms, mel and linear bins.
        targets: (B, T) int64 class indices, IGNORED_TARGET where no frame is to be learnt; for spectrograms,
            (B, S) symbols of the texts, IGNORED_TARGET past each end.
        lengths: (B,) int64, on the CPU: frames of each segment, context included.
        num_frames: frames to be learnt; 0 is a step that this rank only joins.  With transcripts, only
            utterances that are long enough for their transcript count.
        ready: CUDA event after which features and targets may be used; None: they may be used now.
        transcripts: HMMs of the utterances' transcripts, on the CPU, where the task asks for them.
    """

    features: Tensor
    targets: Tensor
    lengths: Tensor
    num_frames: int
    ready: Any = None
    transcripts: TranscriptHmms | None = None

    def to(self, device: torch.device) -> Batch:
        """Return this batch on `device`; wait for a copy that is under way (see `device_stream.py`)."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.features.device)
            stream.wait_event(self.ready)
            # The memory was allocated on the copying stream: it must not be reused before this stream is
            # done.
            self.features.record_stream(stream)
            self.targets.record_stream(stream)
            return dataclasses.replace(self, ready=None)
        if self.features.device == device:
            return self
        # Not asynchronous: a pool may refill its memory as soon as this batch is released.
        return dataclasses.replace(self, features=self.features.to(device), targets=self.targets.to(device))
