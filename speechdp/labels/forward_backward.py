"""Sum over all state sequences of transcripts, one batch at a time.

The sums are exact: log domain, float64, no pruning.  Both passes loop only over frames.  The backward pass
needs no backward probabilities.  It passes the occupancies of a frame on to the states of the previous frame:
each state's occupancy is divided among its predecessors in proportion to their contributions.  So occupancies
sum to 1 in every frame by construction, and only occupancies below 1e-308 underflow.

Source: Baum et al. 1970; only the forward recursion is kept in memory.

Legend: B utterances, T frames of the longest, S states, K predecessors of a state, C classes, N = B * S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from speechdp.labels.transcript_hmm import LOG_ZERO, TranscriptHmms


@dataclass(frozen=True)
class Occupancies:
    """Result of the forward-backward algorithm.

    Attributes:
        log_probs: (B,) float64, log p(x | transcript) of each utterance; 0 if it does not fit.
        classes: (B, T, C) probability of each class in each frame given the whole utterance, in the dtype of
            the log-likelihoods; 0 past the end of an utterance, and everywhere if it does not fit.
        fits: (B,) bool, on the CPU: whether the utterance has as many frames as its transcript needs.
    """

    log_probs: Tensor
    classes: Tensor
    fits: Tensor


def full_sum(log_likelihoods: Tensor, lengths: Tensor, hmms: TranscriptHmms) -> tuple[Tensor, Tensor]:
    """Sum the probability of each utterance over all state sequences of its transcript; differentiable.

    The gradient of log p with respect to the log-likelihoods is the occupancy of each class.

    Args:
        log_likelihoods: (B, T, C), nats, finite (up to a constant a frame).
        lengths: (B,) frames of each utterance, on the CPU.
        hmms: HMMs of the B transcripts.

    Returns:
        log p (B,) float64, and which utterances fit, (B,) bool on the CPU.  An utterance with fewer frames
        than its transcript needs has log p 0 and no gradient; the caller should count it.

    Example::

        log_probs, fits = full_sum(log_posteriors - prior_scale * log_prior, lengths, hmms)
        loss = -log_probs.sum()
    """
    fits = lengths >= torch.from_numpy(hmms.min_frames)
    log_probs: Tensor = _FullSum.apply(log_likelihoods, lengths, hmms)  # type: ignore[no-untyped-call]
    return log_probs, fits


def occupancies(log_likelihoods: Tensor, lengths: Tensor, hmms: TranscriptHmms) -> Occupancies:
    """Compute the probability of each class in each frame, given the utterance and its transcript.

    Args, Returns: see `full_sum` and `Occupancies`.
    """
    trellis = _Trellis(log_likelihoods.detach(), lengths, hmms)
    alphas, ended = trellis.forward()
    log_probs = trellis.totals(ended)
    classes = trellis.class_occupancies(alphas, ended, log_probs)
    return Occupancies(log_probs, classes, trellis.fits)


class _FullSum(torch.autograd.Function):
    """log p (B,) of log-likelihoods (B, T, C); its gradient is the occupancies."""

    @staticmethod
    def forward(ctx: Any, log_likelihoods: Tensor, lengths: Tensor, hmms: TranscriptHmms) -> Tensor:
        if ctx.needs_input_grad[0]:
            found = occupancies(log_likelihoods, lengths, hmms)
            ctx.save_for_backward(found.classes)
            return found.log_probs
        trellis = _Trellis(log_likelihoods, lengths, hmms)
        _, ended = trellis.forward(keep=False)
        return trellis.totals(ended)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (classes,) = ctx.saved_tensors
        return gradients[0].to(classes.dtype)[:, None, None] * classes, None, None


class _Trellis:
    """The states of all utterances of a batch side by side, over its frames.

    Most states have two predecessors, themselves and the state before; states at the beginning of a word or a
    pause have more.  So each frame takes one pass over all states for the first two predecessors, and one
    over those few states for the others.

    Attributes:
        fits: (B,) bool, on the CPU.
    """

    def __init__(self, log_likelihoods: Tensor, lengths: Tensor, hmms: TranscriptHmms) -> None:
        device = log_likelihoods.device
        batch, states, width = hmms.predecessors.shape
        assert log_likelihoods.shape[0] == batch
        self._shape = (batch, states)
        self._log_likelihoods = log_likelihoods
        self._rows_by_end: dict[int, list[int]] = {}  # utterances by their last frame
        for row, length in enumerate(lengths.tolist()):
            self._rows_by_end.setdefault(length - 1, []).append(row)
        self.fits = lengths >= torch.from_numpy(hmms.min_frames)
        flat = (hmms.predecessors + states * np.arange(batch)[:, None, None]).reshape(-1, width)
        log_probs = hmms.log_probs.reshape(-1, width)
        wide = np.flatnonzero((log_probs[:, 2:] > LOG_ZERO).any(axis=1))

        def moved(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self._stay, self._enter = moved(log_probs[:, 0]), moved(log_probs[:, 1])  # (N,)
        self._before = moved(flat[:, 1])  # (N,)
        self._wide = moved(wide)  # (W,)
        self._others = moved(flat[wide, 2:].T)  # (K-2, W)
        self._other_log_probs = moved(log_probs[wide, 2:].T)
        self._classes = moved(hmms.classes)
        self._initial, self._final = moved(hmms.initial.reshape(-1)), moved(hmms.final)
        # (T, N) in the dtype of the log-likelihoods
        by_frame = log_likelihoods.transpose(0, 1)
        index = self._classes.expand(by_frame.shape[0], batch, states)
        self._emissions = by_frame.gather(2, index).reshape(-1, batch * states)

    def forward(self, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        """Compute the forward log-probabilities.

        Args:
            keep: return the log-probabilities of all frames.

        Returns:
            (T, N) float64, or without `keep` only some frames; and the log-probabilities of ending in each
            state at each utterance's last frame, (B, S).
        """
        emissions = self._emissions
        kept = len(emissions) if keep else min(2, len(emissions))
        alphas = self._stay.new_empty(kept, len(self._stay))
        ended = self._final.clone()
        stayed, entered = torch.empty_like(self._stay), torch.empty_like(self._stay)
        for frame in range(len(emissions)):
            here = alphas[frame % kept]
            if frame == 0:
                here.copy_(self._initial)
            else:
                before = alphas[(frame - 1) % kept]
                torch.add(before, self._stay, out=stayed)
                torch.index_select(before, 0, self._before, out=entered)
                entered += self._enter
                torch.logaddexp(stayed, entered, out=here)
                if len(self._wide):
                    many = torch.cat([here[self._wide].unsqueeze(0), self._wide_terms(before)])  # (K-1, W)
                    here.index_copy_(0, self._wide, torch.logsumexp(many, 0))
            here += emissions[frame]
            if frame in self._rows_by_end:
                rows = self._rows_by_end[frame]
                ended[rows] += here.view(self._shape)[rows]
        return alphas, ended

    def totals(self, ended: Tensor) -> Tensor:
        """Return log p (B,) from the second result of `forward`; 0 for utterances that do not fit."""
        return torch.logsumexp(ended, 1).where(self.fits.to(ended.device), 0.0)

    def class_occupancies(self, alphas: Tensor, ended: Tensor, log_probs: Tensor) -> Tensor:
        """Return the probability of each class in each frame, (B, T, C); 0 in utterances that do not fit.

        Args:
            alphas: (T, N) from `forward`, for all frames; overwritten with the occupancies of states.
            ended: (B, S) from `forward`.
            log_probs: (B,) from `totals`.
        """
        batch, states = self._shape
        occupied = torch.zeros_like(self._log_likelihoods)
        fits = self.fits.to(ended.device).unsqueeze(1)
        at_end = (ended - log_probs.unsqueeze(1)).exp().where(fits, 0.0)  # (B, S)
        occupancy = torch.zeros_like(self._stay)  # (N,) of the current frame
        for frame in range(len(alphas) - 1, -1, -1):
            if frame in self._rows_by_end:
                rows = self._rows_by_end[frame]
                occupancy.view(self._shape)[rows] = at_end[rows]
            earlier = self._hand_on(alphas, frame, occupancy) if frame else occupancy
            alphas[frame] = occupancy
            occupancy = earlier
        by_class = occupied.transpose(0, 1)  # (T, B, C)
        index = self._classes.expand(len(alphas), batch, states)
        by_class.scatter_add_(2, index, alphas.view(-1, batch, states).to(by_class.dtype))
        return occupied

    def _hand_on(self, alphas: Tensor, frame: int, occupancy: Tensor) -> Tensor:
        """Return the occupancies (N,) of the frame before `frame`."""
        before = alphas[frame - 1]
        arrived = alphas[frame].sub_(self._emissions[frame])  # before the frame was emitted
        entered = before.index_select(0, self._before).add_(self._enter).sub_(arrived).exp_().mul_(occupancy)
        earlier = (before + self._stay).sub_(arrived).exp_().mul_(occupancy)
        earlier.index_add_(0, self._before, entered)
        if len(self._wide):
            shares = self._wide_terms(before).sub_(arrived[self._wide]).exp_().mul_(occupancy[self._wide])
            earlier.index_add_(0, self._others.view(-1), shares.view(-1))
        return earlier

    def _wide_terms(self, before: Tensor) -> Tensor:
        """Return the terms of predecessors from the third on, for states with more than two, (K-2, W)."""
        return before[self._others].add_(self._other_log_probs)
