"""A first alignment from transcripts alone, by training Gaussian mixtures and aligning with them in turn.

Viterbi training as in Kaldi's monophone stage, over N ranks.  Every rank aligns its own utterances and
accumulates counts; one exchange per round sums the counts, and every rank estimates the same mixtures.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from speechdp.data.shards.shard import Shard
from speechdp.data.transforms.inputs import FEATURES_ALONE
from speechdp.data.transforms.preprocess import Preprocessor
from speechdp.decode.align import Aligner
from speechdp.decode.graphs.graph import LexiconTransducer
from speechdp.errors import RunError
from speechdp.labels.gaussian_mixtures import DoubleArray, GaussianMixtures, Statistics, cepstra_of
from speechdp.labels.hmm import (
    STATES_PER_PHONE,
    FloatArray,
    IntArray,
    StateInventory,
    count_frames_and_runs,
    flat_alignment,
    self_loop_probabilities,
    states_of,
)
from speechdp.labels.lexicon import SILENCE, Lexicon
from speechdp.process.ending import Stopped
from speechdp.train.session import Session

_ROUNDS = 32
#: Rounds that realign; the rounds between them re-estimate the Gaussians on the same alignment (as in Kaldi).
_ALIGNING = frozenset((*range(1, 11), *range(12, _ROUNDS, 2)))
_FIRST_SPLIT, _LAST_SPLIT = 5, 26
_GAUSSIANS_PER_CLASS = 10
#: Most frames to train on (20 hours), which are enough for so few parameters; the shortest utterances are
#: used.
_MAX_FRAMES = 20 * 360_000
_LONGEST = 12_000  # frames of an utterance; longer utterances are left out
_TOGETHER = 256  # utterances that are accumulated at once


@dataclass(frozen=True)
class FlatStart:
    """The result of `train_mixtures`.

    Attributes:
        mixtures: Gaussian mixtures of the states, for inputs `cepstra_of(features)`.
        self_loop: self-loop probabilities, (C,).
        are_cepstra: whether the data's features are cepstra.
        utterances: number of training utterances, over all ranks.
        log_likelihood: final log-likelihood per frame, nats.
    """

    mixtures: GaussianMixtures
    self_loop: DoubleArray
    are_cepstra: bool
    utterances: int
    log_likelihood: float

    def score(self, features: Iterable[FloatArray]) -> Iterator[tuple[int, FloatArray]]:
        """Yield (position, log-likelihoods (T, C)) for each utterance; this is an `align.Scorer`."""
        for position, x in enumerate(features):
            yield position, self.mixtures.log_likelihoods(cepstra_of(x, are_cepstra=self.are_cepstra))


@dataclass
class _Utterance:
    words: list[str]
    classes: frozenset[int]  # of all its pronunciations, and silence
    x: FloatArray
    alignment: IntArray


def train_mixtures(session: Session, split: str) -> FlatStart:
    """Train the mixtures on a split.  Collective.

    The result is the same on all ranks and, to rounding, for any number of ranks.

    Raises:
        Stopped: a rank was asked to stop.
        ShardError: a shard is damaged.
        RunError: no utterance is both long enough for its transcript and free of unknown words, or an
            utterance has features that are not finite.
    """
    dataset, comm = session.dataset, session.comm
    lexicon, inventory = Lexicon.load(dataset.lexicon_path), StateInventory.load(dataset.classes_path)
    are_cepstra = dataset.features.kind != "log_mel"
    own = _Reader(session, lexicon, inventory, are_cepstra).read(split)
    dim = max(comm.allgather_object(own[0].x.shape[1] if own else 0))
    sums = _sum(session, _moments(own, dim))
    frames, utterances = sums[0], int(sums[1])
    if utterances == 0:
        raise RunError(
            f"{dataset.path}: no utterance of {split!r} has frames enough for its transcript and only words "
            "of the lexicon; check that transcripts, lexicon and audio belong together"
        )
    mean = sums[2 : 2 + dim] / frames
    mixtures = GaussianMixtures(inventory.num_classes, mean, sums[2 + dim :] / frames - mean**2)
    self_loop = np.full(inventory.num_classes, 0.5)
    spoken = lexicon.restrict({word for utterance in own for word in utterance.words})
    statistics = Statistics.empty(0, dim)
    for number in range(_ROUNDS):
        if number in _ALIGNING:
            aligner = Aligner(LexiconTransducer(spoken, inventory, self_loop))
            _align(session, own, aligner, mixtures)
        statistics, self_loop = _count(session, own, mixtures)
        mixtures.update(statistics)
        if _FIRST_SPLIT <= number < _LAST_SPLIT:
            share = (number + 1 - _FIRST_SPLIT) / (_LAST_SPLIT - _FIRST_SPLIT)
            wanted = inventory.num_classes * (1 + share * (_GAUSSIANS_PER_CLASS - 1))
            mixtures.split(int(wanted), statistics)
    return FlatStart(mixtures, self_loop, are_cepstra, utterances, statistics.log_likelihood / frames)


@dataclass(frozen=True)
class _Reader:
    """Reads this rank's utterances of a split, with uniform alignments."""

    session: Session
    lexicon: Lexicon
    inventory: StateInventory
    are_cepstra: bool

    def read(self, split: str) -> list[_Utterance]:
        """Read the utterances among the shortest 20 hours whose words are in the lexicon.  Collective.

        Utterances with too few frames for their transcript are left out, too.
        """
        comm = self.session.comm
        with ExitStack() as stack:
            paths = self.session.dataset.shard_paths(split)[comm.rank :: comm.size]
            shards = [stack.enter_context(Shard(path)) for path in paths]
            longest, share = self._longest(shards)
            read = (
                self._utterance(shard, u)
                for shard in shards
                for u, num_frames in enumerate(np.diff(shard.offsets).tolist())
                if num_frames <= longest
                or (num_frames == longest + 1 and _lot(shard.utterance_id(u)) < share)
            )
            return [utterance for utterance in read if utterance is not None]

    def _longest(self, shards: Sequence[Shard]) -> tuple[int, float]:
        """Choose the shortest utterances of all ranks, up to the wanted number of frames.  Collective.

        Returns:
            The length up to which all utterances are used, and the share to use of those one frame longer.

        Raises:
            RunError: all utterances are too long.
        """
        frames = np.zeros(_LONGEST + 2)  # the last element counts utterances that are too long
        for shard in shards:
            lengths = np.diff(shard.offsets)
            np.add.at(frames, np.minimum(lengths, _LONGEST + 1), lengths)
        frames = _sum(self.session, frames)
        if frames[-1] > 0 and not frames[:-1].any():
            raise RunError(
                f"{self.session.dataset.path}: all utterances have more than {_LONGEST} frames, too many for "
                "--flat-start; cut them at pauses (a file segments in a Kaldi data directory)"
            )
        total = np.cumsum(frames[:-1])
        longest = int(np.searchsorted(total, _MAX_FRAMES, side="right")) - 1
        if longest >= _LONGEST:
            return _LONGEST, 0.0
        taken = total[longest] if longest >= 0 else 0.0
        return longest, float((_MAX_FRAMES - taken) / frames[longest + 1])

    def _utterance(self, shard: Shard, u: int) -> _Utterance | None:
        spoken = shard.text(u).split()
        words = self.lexicon.pronounceable(spoken)
        if len(words) < len(spoken):
            return None
        features, _ = Preprocessor.for_shard(shard.header, FEATURES_ALONE).read(shard, u)
        if not np.isfinite(features).all():
            raise RunError(
                f"{shard.path}: utterance {shard.utterance_id(u)} has features that are NaN or infinite; "
                "leave it out and prepare again"
            )
        alignment = _uniform(words, len(features), self.lexicon, self.inventory)
        if len(alignment) == 0:
            return None
        phones = {phone for w in words for variant in self.lexicon.pronunciations[w] for phone in variant}
        classes = frozenset(states_of([SILENCE, *phones], self.inventory))
        return _Utterance(words, classes, cepstra_of(features, are_cepstra=self.are_cepstra), alignment)


def _lot(utterance_id: str) -> float:
    """Return a number from 0 to 1 that depends on the utterance only, whichever rank reads it."""
    return zlib.crc32(utterance_id.encode()) / 2**32


def _uniform(words: Sequence[str], num_frames: int, lexicon: Lexicon, inventory: StateInventory) -> IntArray:
    """Spread silence, the words and silence over the frames; empty if there are too few frames."""
    states = STATES_PER_PHONE * sum(len(lexicon.pronunciations[word][0]) for word in words)
    if num_frames < states:
        return np.empty(0, dtype=np.int32)
    silence = STATES_PER_PHONE * num_frames // (states + 2 * STATES_PER_PHONE)
    return flat_alignment(words, num_frames, lexicon, inventory, silence, silence)


def _align(session: Session, own: Sequence[_Utterance], aligner: Aligner, mixtures: GaussianMixtures) -> None:
    """Realign this rank's utterances until it is asked to stop; without a path one keeps its alignment."""
    for utterance in own:
        if session.is_asked_to_stop():
            return
        found = aligner.align(utterance.words, mixtures.log_likelihoods(utterance.x, utterance.classes))
        if found is not None:
            utterance.alignment = found


def _moments(own: Sequence[_Utterance], dim: int) -> DoubleArray:
    """Return the numbers of frames and utterances, and the sums of the inputs and of their squares."""
    total = np.zeros(2 + 2 * dim)
    for utterance in own:
        x = utterance.x.astype(np.float64)
        total += np.concatenate([[len(x), 1], x.sum(axis=0), (x * x).sum(axis=0)])
    return total


def _count(
    session: Session, own: Sequence[_Utterance], mixtures: GaussianMixtures
) -> tuple[Statistics, DoubleArray]:
    """Return all ranks' statistics over the alignments, and the self-loop probabilities from their counts."""
    size, dim, num_classes = mixtures.num_gaussians, mixtures.dim, mixtures.num_classes
    statistics = Statistics.empty(size, dim)
    frames, runs = np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64)
    for utterance in own:
        counts = count_frames_and_runs(utterance.alignment, num_classes)
        frames, runs = frames + counts[0], runs + counts[1]
    for first in range(0, len(own), _TOGETHER):
        some = own[first : first + _TOGETHER]
        x = np.concatenate([utterance.x for utterance in some])
        mixtures.accumulate(x, np.concatenate([utterance.alignment for utterance in some]), statistics)
    total = _sum(session, np.concatenate([frames, runs, statistics.to_vector()]))
    frames, runs = total[:num_classes].astype(np.int64), total[num_classes : 2 * num_classes].astype(np.int64)
    statistics = Statistics.from_vector(total[2 * num_classes :], size, dim)
    return statistics, self_loop_probabilities(frames, runs)


def _sum(session: Session, values: DoubleArray) -> DoubleArray:
    """Sum `values` over the ranks.  Raises Stopped on all ranks if any was asked to stop."""
    asked = float(session.is_asked_to_stop())
    total = session.comm.allreduce(torch.from_numpy(np.append(values, asked)), name="flat-start").numpy()
    if total[-1]:
        raise Stopped
    return np.asarray(total[:-1])
