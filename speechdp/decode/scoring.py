"""Run the network over utterances in batches and turn its posteriors into log-likelihoods."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike

from speechdp.comm.base import Communicator
from speechdp.labels.hmm import FloatArray, scaled_log_likelihoods
from speechdp.models.evaluating import evaluating

#: Of the entropy of the classes; a network of which less depends on what it hears has learnt little ...
_LITTLE = 0.005
#: ... or one by which nothing is recognised while one class is the likeliest in so many frames: CTC begins
#: with blanks alone.  With AN4 and FSDD it was 1.00 while all settings had 97 % word errors and more, then
#: 0.90 to 0.98.
_NEARLY_ALL = 0.999
_CHUNK = 2**16  # values that are summed together: what is made of them stays in the cache
_WINDOW = 256  # utterances that are sorted by length together
_MAX_LOGITS = 2**26  # of a batch: 256 MiB in float32


class Outputs:
    """What a network's posteriors say of how much it hears, summed over frames.

    Where they are the same whatever is heard, the mean of their entropies is the entropy of their mean; the
    better a network tells frames apart, the further it is below (the difference is the mutual information of
    frame and class).

    Args:
        num_classes: C.
    """

    def __init__(self, num_classes: int) -> None:
        self._posteriors, self._times_likeliest = np.zeros(num_classes), np.zeros(num_classes)
        self._entropy, self._frames = 0.0, 0  # in nats

    def note(self, log_posteriors: FloatArray) -> None:
        """Add the frames of an utterance, (T, C)."""
        frames, num_classes = log_posteriors.shape
        step = max(1, _CHUNK // num_classes)
        for part in (log_posteriors[first : first + step] for first in range(0, frames, step)):
            posteriors = np.exp(part)
            self._posteriors += posteriors.sum(0, dtype=np.float64)
            self._times_likeliest += np.bincount(part.argmax(1), minlength=num_classes)
            # Where a class is impossible (0 times minus infinity), nothing.
            self._entropy -= float(np.vdot(posteriors, np.maximum(part, -1e4)))
        self._frames += frames

    def remark(self, comm: Communicator, *, are_words_found: bool) -> str:
        """Return a line if the network has learnt little, by what all ranks have noted; else "".  Collective.

        Of a good one that is given digital silence alone the posteriors are the same throughout, too.

        Args:
            comm: the ranks.
            are_words_found: whether this rank knows of any recognised word, of all that was noted.
        """
        num_classes = len(self._posteriors)
        of_all = [self._entropy, float(self._frames), float(are_words_found)]
        totals = torch.from_numpy(np.concatenate([self._posteriors, self._times_likeliest, of_all]))
        comm.allreduce(totals, name="outputs")
        entropy, frames, words = totals[-3:].tolist()
        # What is not finite is refused where it is searched.
        if num_classes < 2 or frames == 0 or not bool(totals.isfinite().all()):
            return ""
        mean = totals[:num_classes] / frames
        entropy_of_mean = float(-torch.xlogy(mean, mean).sum())
        information = max(0.0, 1 - entropy / frames / entropy_of_mean) if entropy_of_mean > 0 else 0.0
        most = float(totals[num_classes : 2 * num_classes].max() / frames)
        if information < _LITTLE:
            sign = f"{100 * information:.1f} % of what its outputs say depends on what it hears"
        elif most >= _NEARLY_ALL and not words:
            share = f"{100 * most:.1f} % of the frames"
            sign = f"no word is recognised, and one class is the likeliest in {share}"
        else:
            return ""
        what = "the model has learnt little, or there is no speech in these recordings"
        return f"{what}: {sign}; train it for more epochs, or with another learning rate, or listen to them"


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

    def score(
        self, utterances: Iterable[FloatArray], outputs: Outputs | None = None
    ) -> Iterator[tuple[int, FloatArray]]:
        """Yield (position in `utterances`, log-likelihoods (T, C)), not in order: by length within a window.

        The utterances are read and scored as they are asked for, so neither a whole split's features nor
        its posteriors have to fit into memory.

        Args:
            utterances: features, (T, F) each.
            outputs: receives the posteriors; None: nobody needs them.
        """
        numbered = enumerate(utterances)
        while window := list(itertools.islice(numbered, _WINDOW)):
            # Longest first: if a batch is too large for the device, it is the first one.
            window.sort(key=lambda item: len(item[1]), reverse=True)
            while window and len(window[-1][1]) == 0:  # which no network takes
                yield window.pop()[0], np.empty((0, np.asarray(self.log_prior).size), dtype=np.float32)
            for batch in self._batches(window):
                indices, features = zip(*batch, strict=True)
                yield from zip(indices, self._score_batch(features, outputs), strict=True)

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

    def _score_batch(self, features: Sequence[FloatArray], outputs: Outputs | None) -> Iterator[FloatArray]:
        lengths = torch.tensor([len(x) for x in features], dtype=torch.int64)
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(np.asarray(x, dtype=np.float32)) for x in features], batch_first=True
        )  # (B, T, F)
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        # Another than that of training after network.double() or the like.
        dtype = dtypes.pop() if len(dtypes) == 1 else padded.dtype
        with evaluating(self.model), torch.inference_mode():
            logits = self.model(padded.to(self.device, dtype), lengths)  # (B, T, C)
            posteriors = torch.log_softmax(logits.float(), dim=-1).cpu().numpy()
        log_prior = np.asarray(self.log_prior, dtype=np.float32)
        for log_posteriors, length in zip(posteriors, lengths.tolist(), strict=True):
            if outputs is not None:
                outputs.note(log_posteriors[:length])
            yield scaled_log_likelihoods(log_posteriors[:length], log_prior, self.prior_scale)
