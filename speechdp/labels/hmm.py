"""The HMM behind the network: 3-state left-to-right phones, alignments, transitions and priors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speechdp.errors import ConfigError
from speechdp.labels.class_list import ClassList, no_class_list, read_class_list
from speechdp.labels.lexicon import SILENCE, Lexicon

STATES_PER_PHONE = 3

#: Log-likelihood of a class without training frames, in nats per frame; see `log_priors`.
UNSEEN_LOG_LIKELIHOOD = -100.0

_MIN_SELF_LOOP = 0.05
_MAX_SELF_LOOP = 0.98
_DEFAULT_SELF_LOOP = 0.5
_MIN_PRIOR_SHARE = 0.01

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class StateInventory(ClassList):
    """Numbers the states of all phones: silence has classes 0, 1, 2, then three for each phone.

    Attributes:
        phones: the phones without silence, sorted and unique (`Lexicon.phones`).
    """

    phones: tuple[str, ...]

    def __post_init__(self) -> None:
        assert SILENCE not in self.phones
        assert len(set(self.phones)) == len(self.phones)

    @property
    def num_classes(self) -> int:
        """Number of classes, silence included."""
        return STATES_PER_PHONE * (len(self.phones) + 1)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {phone: i for i, phone in enumerate((SILENCE, *self.phones))}

    def classes_of(self, phone: str) -> tuple[int, int, int]:
        """Return the classes of a phone's (or silence's) three states, in order.

        Raises:
            ConfigError: the phone is not in the inventory.
        """
        index = self._index.get(phone)
        if index is None:
            raise ConfigError(f"phone {phone!r} is not among the {len(self.phones)} phones of the lexicon")
        first = STATES_PER_PHONE * index
        return first, first + 1, first + 2

    @property
    def silence(self) -> tuple[int, ...]:
        """The classes of silence."""
        return self.classes_of(SILENCE)

    def class_names(self) -> tuple[str, ...]:
        """Name every class `<phone>_<state>`, in class order."""
        return tuple(f"{phone}_{s}" for phone in (SILENCE, *self.phones) for s in range(STATES_PER_PHONE))

    @classmethod
    def load(cls, path: Path) -> StateInventory:
        """Read a `classes.txt`.

        Raises:
            ConfigError: the file cannot be read, or `save` did not write it.
        """
        lines = read_class_list(path).splitlines()
        phones = tuple(
            line.split()[-1].rpartition("_")[0] for line in lines[::STATES_PER_PHONE] if line.split()
        )
        intact = bool(phones) and phones[0] == SILENCE and len(set(phones)) == len(phones)
        inventory = cls(phones[1:]) if intact else cls(())
        if not intact or lines != [f"{i} {name}" for i, name in enumerate(inventory.class_names())]:
            raise no_class_list(path)
        return inventory


def states_of(phones: Iterable[str], inventory: StateInventory) -> list[int]:
    """Return the classes that a sequence of phones passes through, in order."""
    return [state for phone in phones for state in inventory.classes_of(phone)]


def phones_of(phones: Iterable[str], inventory: StateInventory) -> list[int]:
    """Return the numbers of a sequence of phones; silence is 0."""
    return [inventory.classes_of(phone)[0] // STATES_PER_PHONE for phone in phones]


def flat_alignment(
    words: Sequence[str],
    num_frames: int,
    lexicon: Lexicon,
    inventory: StateInventory,
    leading_silence: int = 0,
    trailing_silence: int = 0,
) -> IntArray:
    """Spread the frames uniformly over the HMM states of the words' first pronunciations.

    If there are fewer frames than states, the states are subsampled in order.  An utterance without words is
    silence throughout.  Silence that would leave no frame for the words is left out.

    Args:
        words: the transcript.
        num_frames: frames of the utterance.
        lexicon: holds every word of the transcript.
        inventory: numbers the states.
        leading_silence: frames of silence before the first word.
        trailing_silence: frames of silence after the last word.

    Returns:
        Classes, (T,).

    Raises:
        ConfigError: a word has no pronunciation.
    """
    unknown = [word for word in words if word not in lexicon]
    if unknown:
        raise ConfigError(f"word {unknown[0]!r} has no pronunciation; add it to the lexicon")
    states = [s for word in words for s in states_of(lexicon.pronunciations[word][0], inventory)]
    silence = list(inventory.classes_of(SILENCE))
    if not states:
        return _spread(silence, num_frames)
    if leading_silence + trailing_silence >= num_frames:
        leading_silence = trailing_silence = 0
    num_speech = num_frames - leading_silence - trailing_silence
    parts = (
        _spread(silence, leading_silence),
        _spread(states, num_speech),
        _spread(silence, trailing_silence),
    )
    return np.concatenate(parts)


def _spread(states: Sequence[int], num_frames: int) -> IntArray:
    """Repeat (or subsample) `states` in order so that they fill `num_frames` frames evenly."""
    position = np.arange(num_frames, dtype=np.int64) * len(states) // max(num_frames, 1)
    return np.asarray(states, dtype=np.int32)[position]


def alignment_from_phone_times(
    phones: Sequence[tuple[str, float, float]],
    num_frames: int,
    frame_shift_s: float,
    inventory: StateInventory,
) -> IntArray:
    """Convert phone times to classes: each phone in three equal thirds, and silence everywhere else.

    A frame belongs to the phone that is spoken at its centre, (t + 1/2) * frame_shift_s: Kaldi's frames
    without snip_edges.

    Args:
        phones: (phone, start_s, end_s), in order and without overlap.
        num_frames: frames of the utterance.
        frame_shift_s: seconds from frame to frame.
        inventory: numbers the states.

    Returns:
        Classes, (T,).
    """
    centres = (np.arange(num_frames) + 0.5) * frame_shift_s
    targets = np.full(num_frames, -1, dtype=np.int32)
    for phone, start_s, end_s in phones:
        if phone == SILENCE or end_s <= start_s:
            continue
        first, last = np.searchsorted(centres, [start_s, end_s])
        third = (centres[first:last] - start_s) * STATES_PER_PHONE / (end_s - start_s)
        state = np.clip(third.astype(np.int32), 0, STATES_PER_PHONE - 1)
        targets[first:last] = inventory.classes_of(phone)[0] + state
    return _fill_silence(targets, inventory)


def _fill_silence(targets: IntArray, inventory: StateInventory) -> IntArray:
    """Fill each run of frames marked -1 with the three silence states in equal thirds."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], targets < 0, [False])).astype(np.int8)))
    for start, end in edges.reshape(-1, 2):
        targets[start:end] = _spread(inventory.classes_of(SILENCE), int(end - start))
    return targets


def count_frames_and_runs(
    targets: IntArray, num_classes: int, begins: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count each class's frames and its runs (visits) in the alignment of one or several utterances.

    Args:
        targets: (T,) classes; several utterances are concatenated.
        num_classes: C.
        begins: (U,) where each of several utterances begins in `targets`; no run continues across it.

    Returns:
        Frames and runs of each class, each (C,); add them up over utterances (and ranks).
    """
    frames = np.bincount(targets, minlength=num_classes)
    starts = np.concatenate(([True], targets[1:] != targets[:-1])) if len(targets) else np.zeros(0, bool)
    if begins is not None:
        starts[begins[begins < len(targets)]] = True
    return frames.astype(np.int64), np.bincount(targets[starts], minlength=num_classes).astype(np.int64)


def self_loop_probabilities(
    frames_per_class: NDArray[np.int64], runs_per_class: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Estimate each state's self-loop probability from an alignment's counts.

    A visit of n frames takes the self-loop n - 1 times and leaves once, so the maximum-likelihood estimate
    is p = 1 - runs / frames.  It is limited to [0.05, 0.98]: a state must be able both to last and to be
    left.  Classes without frames get 0.5.

    Args:
        frames_per_class: frames aligned with each class, (C,).
        runs_per_class: uninterrupted visits to each class, (C,).

    Returns:
        Self-loop probabilities, (C,).
    """
    seen = frames_per_class > 0
    estimate = 1.0 - runs_per_class / np.maximum(frames_per_class, 1)
    return np.where(seen, np.clip(estimate, _MIN_SELF_LOOP, _MAX_SELF_LOOP), _DEFAULT_SELF_LOOP)


def log_priors(frames_per_class: NDArray[np.int64]) -> FloatArray:
    """Return the log of each class's share of the frames, to be subtracted from log-posteriors.

    A hybrid divides posteriors by priors, so a tiny prior makes a class likely.  Two guards prevent that.
    Classes with few frames are floored at 1 % of the uniform prior.  Classes without any frame get
    100 (-UNSEEN_LOG_LIKELIHOOD) instead of log 0: subtracting it makes them nearly impossible instead of
    certain.  The value is finite, so that a transcript that needs such a class can still be aligned.

    Args:
        frames_per_class: frames aligned with each class, (C,); at least one frame in all.

    Returns:
        Log-priors, (C,), finite.
    """
    total = frames_per_class.sum()
    assert total > 0
    floor = _MIN_PRIOR_SHARE / len(frames_per_class)
    seen = np.log(np.maximum(frames_per_class / total, floor))
    return np.where(frames_per_class > 0, seen, -UNSEEN_LOG_LIKELIHOOD).astype(np.float32)


def scaled_log_likelihoods(
    log_posteriors: FloatArray, log_prior: FloatArray, prior_scale: float
) -> FloatArray:
    """Convert log-posteriors to log-likelihoods up to a constant per frame: log p(c|x) - scale * log p(c).

    Classes without training frames (see `log_priors`) get UNSEEN_LOG_LIKELIHOOD, whatever the scale.

    Args:
        log_posteriors: (T, C), nats.
        log_prior: (C,), from `log_priors`.
        prior_scale: 1 divides by the prior, 0 leaves the posteriors unchanged.

    Returns:
        Log-likelihoods, (T, C), contiguous.
    """
    unseen = log_prior >= -UNSEEN_LOG_LIKELIHOOD
    likelihoods = log_posteriors - np.float32(prior_scale) * np.where(unseen, 0, log_prior).astype(np.float32)
    likelihoods[:, unseen] = UNSEEN_LOG_LIKELIHOOD
    return np.ascontiguousarray(likelihoods, dtype=np.float32)
