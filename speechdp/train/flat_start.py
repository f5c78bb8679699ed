"""A first alignment from nothing but transcripts: Gaussian mixtures, trained and aligned in turn.

Viterbi training as in Kaldi's monophone stage, over N ranks: every rank aligns its own utterances and counts;
one exchange a round adds the counts up, and every rank estimates the same mixtures from the sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from speechdp.data.shards.shard import Shard
from speechdp.data.transforms.inputs import FEATURES_ALONE
from speechdp.data.transforms.preprocess import Preprocessor
from speechdp.decode.align import Aligner
from speechdp.decode.graph import LexiconTransducer
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
#: Rounds that align anew; between them the Gaussians move to the same alignment (as Kaldi's do).
_ALIGNING = frozenset((*range(1, 11), *range(12, _ROUNDS, 2)))
_FIRST_SPLIT, _LAST_SPLIT = 5, 26
_GAUSSIANS_PER_CLASS = 10
#: Utterances of so many frames in all (20 hours) are enough for so few parameters; the shortest are taken.
_MAX_FRAMES = 20 * 360_000
_TOGETHER = 256  # utterances that are counted at once


@dataclass(frozen=True)
class FlatStart:
    """What `train_mixtures` has found.

    Attributes:
        mixtures: of the states, for inputs `cepstra_of(features)`.
        self_loop: probabilities, (C,).
        utterances: how many it was trained on, over all ranks.
        log_likelihood: of a frame in the end, nats.
    """

    mixtures: GaussianMixtures
    self_loop: DoubleArray
    utterances: int
    log_likelihood: float

    def score(self, features: Iterable[FloatArray]) -> Iterator[tuple[int, FloatArray]]:
        """Yield (position, log-likelihoods (T, C)) of utterances: an `align.Scorer`."""
        for position, x in enumerate(features):
            yield position, self.mixtures.log_likelihoods(cepstra_of(x))


@dataclass
class _Utterance:
    words: list[str]
    classes: frozenset[int]  # of all its pronunciations, and silence
    x: FloatArray
    alignment: IntArray


def train_mixtures(session: Session, split: str) -> FlatStart:
    """Train the mixtures on a split.  Collective; the same on every rank, to rounding for any number of them.

    Raises:
        Stopped: a rank was asked to.
        ConfigError: a word of the split is not in the lexicon.
        ShardError: a shard is damaged.
        RunError: no utterance is long enough for its transcript.
    """
    dataset, comm = session.dataset, session.comm
    lexicon, inventory = Lexicon.load(dataset.lexicon_path), StateInventory.load(dataset.classes_path)
    own = _read(session, split, lexicon, inventory)
    dim = max(comm.allgather_object(own[0].x.shape[1] if own else 0))
    sums = _sum(session, _moments(own, dim))
    frames, utterances = sums[0], int(sums[1])
    if utterances == 0:
        raise RunError(f"{dataset.path}: no utterance of {split!r} has frames enough for its transcript")
    mean = sums[2 : 2 + dim] / frames
    mixtures = GaussianMixtures(inventory.num_classes, mean, sums[2 + dim :] / frames - mean**2)
    self_loop = np.full(inventory.num_classes, 0.5)
    statistics = Statistics.empty(0, dim)
    for number in range(_ROUNDS):
        if number in _ALIGNING:
            aligner = Aligner(LexiconTransducer(lexicon, inventory, self_loop))
            _align(session, own, aligner, mixtures)
        statistics, self_loop = _count(session, own, mixtures)
        mixtures.update(statistics)
        if _FIRST_SPLIT <= number < _LAST_SPLIT:
            share = (number + 1 - _FIRST_SPLIT) / (_LAST_SPLIT - _FIRST_SPLIT)
            wanted = inventory.num_classes * (1 + share * (_GAUSSIANS_PER_CLASS - 1))
            mixtures.split(int(wanted), statistics)
    return FlatStart(mixtures, self_loop, utterances, statistics.log_likelihood / frames)


def _read(session: Session, split: str, lexicon: Lexicon, inventory: StateInventory) -> list[_Utterance]:
    """Read this rank's utterances, with uniform alignments: the shortest, up to its share of the frames."""
    comm = session.comm
    left = _MAX_FRAMES // comm.size
    result = []
    with ExitStack() as stack:
        paths = session.dataset.shard_paths(split)[comm.rank :: comm.size]
        shards = [stack.enter_context(Shard(path)) for path in paths]
        preprocessors = [Preprocessor.for_shard(shard.header, FEATURES_ALONE) for shard in shards]
        lengths = [
            (int(n), s, u) for s, shard in enumerate(shards) for u, n in enumerate(np.diff(shard.offsets))
        ]
        for num_frames, s, u in sorted(lengths):
            left -= num_frames
            if left < 0:
                break
            words = shards[s].text(u).split()
            alignment = _uniform(words, num_frames, lexicon, inventory)
            if len(alignment):
                x = cepstra_of(preprocessors[s].read(shards[s], u)[0])
                result.append(_Utterance(words, _classes_of(words, lexicon, inventory), x, alignment))
    return result


def _classes_of(words: Sequence[str], lexicon: Lexicon, inventory: StateInventory) -> frozenset[int]:
    phones = {phone for word in words for variant in lexicon.pronunciations[word] for phone in variant}
    return frozenset(states_of([SILENCE, *phones], inventory))


def _uniform(words: Sequence[str], num_frames: int, lexicon: Lexicon, inventory: StateInventory) -> IntArray:
    """Spread silence, the words and silence over the frames; nothing where there are too few frames."""
    states = STATES_PER_PHONE * sum(len(lexicon.pronunciations[word][0]) for word in words if word in lexicon)
    if num_frames < states:
        return np.empty(0, dtype=np.int32)
    silence = STATES_PER_PHONE * num_frames // (states + 2 * STATES_PER_PHONE)
    return flat_alignment(words, num_frames, lexicon, inventory, silence, silence)


def _align(session: Session, own: Sequence[_Utterance], aligner: Aligner, mixtures: GaussianMixtures) -> None:
    """Align this rank's utterances anew, until it is asked to stop; what has no path keeps its alignment."""
    for utterance in own:
        if session.is_asked_to_stop():
            return
        found = aligner.align(utterance.words, mixtures.log_likelihoods(utterance.x, utterance.classes))
        if found is not None:
            utterance.alignment = found


def _moments(own: Sequence[_Utterance], dim: int) -> DoubleArray:
    """Return numbers of frames and of utterances, and the sums of inputs and of their squares."""
    total = np.zeros(2 + 2 * dim)
    for utterance in own:
        x = utterance.x.astype(np.float64)
        total += np.concatenate([[len(x), 1], x.sum(axis=0), (x * x).sum(axis=0)])
    return total


def _count(
    session: Session, own: Sequence[_Utterance], mixtures: GaussianMixtures
) -> tuple[Statistics, DoubleArray]:
    """Return all ranks' sums over the alignments, and the self-loop probabilities that follow from them."""
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
    """Add up over the ranks.  Raises Stopped on all of them where one was asked to stop."""
    asked = float(session.is_asked_to_stop())
    total = session.comm.allreduce(torch.from_numpy(np.append(values, asked)), name="flat-start").numpy()
    if total[-1]:
        raise Stopped
    return np.asarray(total[:-1])
