"""Run the network over utterances in batches and turn its posteriors into log-likelihoods."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike

from speechdp.labels.hmm import FloatArray, scaled_log_likelihoods

_WINDOW = 256  # utterances that are sorted by length together
_MAX_LOGITS = 2**26  # of a batch: 256 MiB in float32


@dataclass(frozen=True)
class AcousticScorer:
    """Scores utterances: log p(x_t | c) up to a constant a frame, for every class c.

    Attributes:
        model: `model(features (B, T, F), lengths (B,)) -> logits (B, T, C)`.
        log_prior: (C,), from `hmm.log_priors`.
        prior_scale: how much of the prior is divided out, 0 to 1.
        device: where the model is.
        max_padded_frames: frames of a batch, padding included.
    """

    model: torch.nn.Module
    log_prior: ArrayLike
    prior_scale: float = 1.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    max_padded_frames: int = 20_000

    def score(self, utterances: Iterable[FloatArray]) -> Iterator[tuple[int, FloatArray]]:
        """Yield (position in `utterances`, log-likelihoods (T, C)), not in order: by length within a window.

        The utterances are read and scored as they are asked for, so neither a whole split's features nor
        its posteriors have to fit into memory.

        Args:
            utterances: features, (T, F) each.
        """
        numbered = enumerate(utterances)
        while window := list(itertools.islice(numbered, _WINDOW)):
            # Longest first: if a batch is too large for the device, it is the first one.
            window.sort(key=lambda item: len(item[1]), reverse=True)
            while window and len(window[-1][1]) == 0:  # which no network takes
                yield window.pop()[0], np.empty((0, np.asarray(self.log_prior).size), dtype=np.float32)
            for batch in self._batches(window):
                indices, features = zip(*batch, strict=True)
                yield from zip(indices, self._score_batch(features), strict=True)

    def _batches(self, window: Sequence[tuple[int, FloatArray]]) -> Iterator[list[tuple[int, FloatArray]]]:
        num_classes = np.asarray(self.log_prior).size
        max_frames = min(self.max_padded_frames, _MAX_LOGITS // num_classes)
        batch: list[tuple[int, FloatArray]] = []
        for item in window:
            if batch and (len(batch) + 1) * len(batch[0][1]) > max_frames:
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    def _score_batch(self, features: Sequence[FloatArray]) -> Iterator[FloatArray]:
        lengths = torch.tensor([len(x) for x in features], dtype=torch.int64)
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(np.asarray(x, dtype=np.float32)) for x in features], batch_first=True
        )  # (B, T, F)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                logits = self.model(padded.to(self.device), lengths)  # (B, T, C)
                posteriors = torch.log_softmax(logits.float(), dim=-1).cpu().numpy()
        finally:
            self.model.train(was_training)
        log_prior = np.asarray(self.log_prior, dtype=np.float32)
        for log_posteriors, length in zip(posteriors, lengths.tolist(), strict=True):
            yield scaled_log_likelihoods(log_posteriors[:length], log_prior, self.prior_scale)
