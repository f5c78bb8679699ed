"""Sequence training of an acoustic model: lattice-free maximum mutual information (MMI).

Cross-entropy makes each frame's class likely.  MMI makes the sequence of classes that was spoken more likely
than all others that the phones of a language may form: the loss of an utterance is

    log of the sum over all state sequences of  p(sequence) * product over frames of exp(s[frame, class])
    - sum over the frames of  s[frame, class it is aligned with]

where s is `scale` times what a decoder adds up, log p(class | x) - prior_scale * log p(class).  p(sequence)
is a trigram of phones with self-loops, both counted in the alignment.  The gradient is the occupancy of each
class in that sum, less 1 for the class it is aligned with.

It goes on from a model trained by cross-entropy, of states without context or with:

    speechdp launch -np 2 -- train DATA MMI --task mmi:Mmi:alignments=RUN/alignments/tied \
        --alignments RUN/alignments/tied --initial-model RUN --learning-rate 2e-4 --epochs 4

Every rank reads all targets once, which takes a second for three hours of speech.

Sources: Bahl et al. 1986; Povey et al. 2016, "Purely sequence-trained neural networks for ASR based on
lattice-free MMI", whose sum over phones this is, with an alignment instead of a lattice for what was spoken.

Legend: B utterances, T frames of the longest, C classes, M phones in their contexts, with 3 states each,
Q pairs of a phone and the next.
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.data.shards.alignment_file import open_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.labels.hmm import (
    STATES_PER_PHONE,
    IntArray,
    StateInventory,
    count_frames_and_runs,
    log_priors,
    self_loop_probabilities,
)
from speechdp.labels.state_tying import StateTying, contexts_of, tying_in
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.models.lstm_config import LstmConfig
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.base import FrameScores, LossSum, TaskData
from speechdp.tasks.metrics import LOG_PROB, Metric

MMI = Metric(
    "mmi_log_ratio",
    "MMI",
    "log of spoken over all",
    "nats/frame",
    "Log-probability of the aligned classes over that of all sequences of phones, times the scale.",
    decimals=3,
    tolerance=0.002,
)


class Denominator:
    """All sequences of phones, as an HMM, and the sums over its state sequences, exact but for float32.

    Args:
        alignments: states without context of each utterance, (T,).
        tying: how states in context are tied; None: they have none.
        num_classes: of the model.
    """

    def __init__(self, alignments: list[IntArray], tying: StateTying | None, num_classes: int) -> None:
        triples, first = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        frames, runs = np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64)
        for states in alignments:
            at = contexts_of(states)
            contexts = np.stack([at.left, at.phone, at.right], 1)[at.begins].tolist()
            triples.update(map(tuple, contexts))
            first[tuple(contexts[0])] += 1
            counted = count_frames_and_runs(states if tying is None else tying.tied(states), num_classes)
            frames += counted[0]
            runs += counted[1]
        self.log_prior = torch.from_numpy(log_priors(frames))
        self._build(triples, first, tying, self_loop_probabilities(frames, runs))

    def _build(
        self,
        triples: Counter[tuple[int, ...]],
        first: Counter[tuple[int, ...]],
        tying: StateTying | None,
        stay: NDArray[np.float64],
    ) -> None:
        left, phone, right = np.array(list(triples), np.int64).T
        counts = np.array(list(triples.values()), np.float64)
        size = int(max(left.max(), phone.max(), right.max())) + 1
        if tying is None:
            classes = STATES_PER_PHONE * phone[:, np.newaxis] + np.arange(STATES_PER_PHONE)
        else:
            classes = tying.table[left, phone, right if tying.looks_right else 0]
        # Left neighbours after which nothing differs are one.
        rows = np.column_stack([phone, right, classes])
        merged, number = np.unique(rows, axis=0, return_inverse=True)
        number = number.reshape(-1)
        entered_by, leads_to = left * size + phone, merged[:, 0] * size + merged[:, 1]
        pairs = np.unique(np.concatenate([entered_by, leads_to]))
        probability = counts / np.bincount(entered_by, counts)[entered_by]
        self._num_pairs = len(pairs)
        # Arcs from a pair to a phone with its context, by the left neighbours that this may have.
        self._arc_to = torch.from_numpy(number)
        self._arc_from = torch.from_numpy(np.searchsorted(pairs, entered_by))
        self._arc_probability = torch.from_numpy(probability).float().unsqueeze(1)
        self._leads_to = torch.from_numpy(np.searchsorted(pairs, leads_to))  # (M,)
        self._classes = torch.from_numpy(np.ascontiguousarray(merged[:, 2:].T)).long()  # (3, M)
        self._stay = torch.from_numpy(stay).float()[self._classes].unsqueeze(2)  # (3, M, 1)
        initial = np.bincount(number, [first[triple] for triple in triples], len(merged))
        self._initial = torch.from_numpy(initial / initial.sum()).float()

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def sums(self, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over all state sequences.

        Args:
            scores: (B, T, C), nats, on the device that this was moved to.
            lengths: (B,), on the CPU.

        Returns:
            The log of the sum, (B,), and the occupancy of each class in each frame, (B, T, C).
        """
        top = scores.amax(2, keepdim=True)
        probs = (scores - top).exp().permute(1, 2, 0).contiguous()  # (T, C, B)
        alphas, norms = self._forward(probs)
        inside = (torch.arange(len(probs)).unsqueeze(1) < lengths).to(scores.device)  # (T, B)
        logs = ((norms.log() + top.squeeze(2).T) * inside).sum(0)
        return logs, self._occupancies(probs, alphas, norms, lengths)

    def _forward(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return forward probabilities (T, 3, M, B), 1 in all in each frame, and their divisors (T, B)."""
        num_frames, _, batch = probs.shape
        num_phones = len(self._initial)
        alphas = probs.new_empty(num_frames, STATES_PER_PHONE, num_phones, batch)
        norms = probs.new_empty(num_frames, batch)
        leave = 1 - self._stay
        for frame in range(num_frames):
            here = alphas[frame]
            if frame == 0:
                here.zero_()
                here[0] = self._initial.unsqueeze(1)
            else:
                before = alphas[frame - 1]
                left = before * leave
                torch.mul(before, self._stay, out=here)
                here[1:] += left[:-1]
                here[0] += self._follow(left[-1])
            here *= self._emitted(probs[frame])
            norms[frame] = here.sum((0, 1)).clamp_min(1e-30)
            here /= norms[frame]
        return alphas, norms

    def _occupancies(self, probs: Tensor, alphas: Tensor, norms: Tensor, lengths: Tensor) -> Tensor:
        """Return the occupancies (B, T, C), by the backward recursion."""
        leave = 1 - self._stay
        occupied = torch.zeros_like(probs)
        ends = (torch.arange(len(probs)).unsqueeze(1) == lengths - 1).to(probs)  # (T, B)
        beta = torch.zeros_like(alphas[0])
        for frame in range(len(probs) - 1, -1, -1):
            if frame + 1 < len(probs):
                after = beta * self._emitted(probs[frame + 1]) / norms[frame + 1]
                beta = self._stay * after
                beta[:-1] += leave[:-1] * after[1:]
                beta[-1] += leave[-1] * self._precede(after[0])
            beta += ends[frame]
            here = (alphas[frame] * beta).flatten(0, 1)
            occupied[frame].index_add_(0, self._classes.flatten(), here)
        return occupied.permute(2, 0, 1)

    def _follow(self, left: Tensor) -> Tensor:
        """Return what enters each phone, (M, B), of what leaves each, (M, B)."""
        pairs = left.new_zeros(self._num_pairs, left.shape[1]).index_add_(0, self._leads_to, left)
        arcs = pairs[self._arc_from].mul_(self._arc_probability)
        return torch.zeros_like(left).index_add_(0, self._arc_to, arcs)

    def _precede(self, entered: Tensor) -> Tensor:
        """Return `_follow` the other way round."""
        arcs = entered[self._arc_to].mul_(self._arc_probability)
        pairs = entered.new_zeros(self._num_pairs, entered.shape[1]).index_add_(0, self._arc_from, arcs)
        return pairs[self._leads_to]

    def _emitted(self, probs: Tensor) -> Tensor:
        return probs.index_select(0, self._classes.flatten()).view(*self._classes.shape, -1)


class _LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, lengths: Tensor, denominator: Denominator) -> Tensor:
        logs, occupied = denominator.sums(scores, lengths)
        ctx.save_for_backward(occupied.contiguous())
        return logs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (occupied,) = ctx.saved_tensors
        return gradients[0][:, None, None] * occupied, None, None


def log_sum(scores: Tensor, lengths: Tensor, denominator: Denominator) -> Tensor:
    """Return the log of the sum over all state sequences, (B,), differentiable; see `Denominator.sums`."""
    found: Tensor = _LogSum.apply(scores, lengths, denominator)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Mmi(AcousticTask):
    """An acoustic model trained by MMI.

    Attributes:
        alignments: folder of the targets, the one of --alignments; none: the targets in DATA.
        scale: of the scores; 1 over the weight that a decoder gives the language model.
        prior_scale: as in decoding.
        cross_entropy: weight of the cross-entropy beside MMI, from 0 to 1; it keeps posteriors what they are.
        train_split: whose targets are counted.
        layers, cells, bottleneck, subsampling, dropout: of the model, those of the initial one.
    """

    metrics = (MMI, *AcousticTask.metrics)
    presets = ()
    model_options = ()
    batch_size = 6

    alignments: Path | None = None
    scale: float = 0.2
    prior_scale: float = 0.5
    cross_entropy: float = 0.1
    train_split: str = "train"
    layers: int = 2
    cells: int = 128
    bottleneck: int = 0
    subsampling: int = 1
    dropout: float = 0.4

    def __post_init__(self) -> None:
        if self.scale <= 0 or not 0 <= self.cross_entropy <= 1:
            raise ConfigError("mmi: scale is positive, and cross_entropy from 0 to 1")
        sizes = LstmConfig(
            layers=self.layers,
            cells=self.cells,
            bidirectional=True,
            bottleneck=self.bottleneck,
            subsampling=self.subsampling,
            dropout=self.dropout,
        )
        object.__setattr__(self, "sizes", sizes)

    def make_model(self, data: TaskData) -> LstmAcousticModel:
        if (tying_in(self.alignments) is None) != (data.tying is None):
            raise ConfigError("mmi: give the same folder as --alignments and as the task's option alignments")
        model = super().make_model(data)
        model.denominator = _denominator(data.dataset.path, self.alignments, self.train_split)
        return model

    def loss(self, model: LstmAcousticModel, batch: Batch) -> LossSum:
        total, log_posteriors = self._total(model, batch)
        log_probs = _of_targets(log_posteriors, batch)
        total = (1 - self.cross_entropy) / self.scale * total - self.cross_entropy * log_probs
        return LossSum(total, batch.num_frames)

    def score(self, model: LstmAcousticModel, batch: Batch) -> FrameScores:
        with torch.no_grad():
            total, log_posteriors = self._total(model, batch)
        log_probs = _of_targets(log_posteriors, batch)
        accuracy = self._accuracy(log_posteriors.argmax(2) == batch.targets, batch.targets, batch.num_frames)
        sums = {MMI.key: -total.item(), LOG_PROB.key: log_probs.item(), **accuracy.sums}
        return FrameScores(sums, batch.num_frames, accuracy.counts)

    def _total(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed MMI loss, in which scores have their scale, and log-posteriors (B, T, C)."""
        log_posteriors = model(batch.features, batch.lengths).float().log_softmax(2)
        denominator = model.denominator
        denominator.to(log_posteriors.device)
        scores = self.scale * (log_posteriors - self.prior_scale * denominator.log_prior)
        total = log_sum(scores, batch.lengths, denominator).sum() - _of_targets(scores, batch)
        return total, log_posteriors


def _of_targets(scores: Tensor, batch: Batch) -> Tensor:
    """Return the sum of the targets' scores."""
    found = scores.gather(2, batch.targets.clamp_min(0).unsqueeze(2)).squeeze(2)  # (B, T)
    return found[batch.targets != IGNORED_TARGET].sum()


@functools.cache
def _denominator(path: Path, alignments: Path | None, split: str) -> Denominator:
    """Count over all targets of a split."""
    dataset = Dataset.open(path)
    tying = tying_in(alignments)
    states = []
    for index, shard_path in enumerate(dataset.shard_paths(split)):
        with dataset.open_shard(split, index) as shard:
            if alignments is None:
                states += [shard.read_utterance(u).targets for u in range(shard.num_utterances)]
                continue
            with closing(open_targets(alignments / shard_path.name, shard)) as targets:
                states += [targets.read(u) for u in range(shard.num_utterances)]
    if tying is not None:
        return Denominator([tying.states[classes] for classes in states], tying, tying.num_classes)
    inventory = StateInventory.load(dataset.classes_path)
    return Denominator(states, None, inventory.num_classes)
