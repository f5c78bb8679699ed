"""Gaussian mixtures for the HMM's states: a model that needs no initial alignment.

A network trained on uniform targets learns at best the positions of words in the middle of their sentence,
and aligns accordingly.  Gaussians start with almost no knowledge and find the states within some ten rounds,
because each has few parameters and is estimated in closed form: Kaldi's monophone stage (steps/train_mono.sh,
S. Young et al., The HTK Book, section 8).  The training of a network begins with their alignment.

Legend: T frames, D dimensions of the input, C classes, G Gaussians.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speechdp.labels.hmm import FloatArray, IntArray

DoubleArray = NDArray[np.float64]

#: Number of cepstral coefficients; these and their differences are the input.
NUM_CEPSTRA = 13
_LEAST_FRAMES = 4.0  # to estimate a Gaussian; with fewer it keeps its mean and variance
_VARIANCE_FLOOR = 0.01  # as a share of the variance of all frames
_LEAST_WEIGHT = 1e-4
_NOT_WANTED = -1e4  # nats: no path goes through a class with this value
_SMALLEST = 1e-37
_SHIFT = 0.2  # standard deviations by which the halves of a split Gaussian are moved apart
#: Gaussians are allotted to classes by this power of their frames, so that silence does not get most of them.
_POWER = 0.25


def cepstra_of(features: FloatArray, *, are_cepstra: bool = False) -> FloatArray:
    """Return features that Gaussians with diagonal covariances describe well: cepstra and their differences.

    Args:
        features: (T, F), log-mel spectra, to which the cosine transform is applied.
        are_cepstra: whether the features are cepstra already, the most important first.

    Returns:
        (T, 2 * min(F, 13)), float32; each coefficient's mean over the utterance is 0.
    """
    x = np.asarray(features, dtype=np.float64)
    static = x[:, :NUM_CEPSTRA].copy() if are_cepstra else x @ _cosines(x.shape[1])
    static -= static.mean(axis=0, keepdims=True) if len(static) else 0.0
    return np.concatenate([static, _differences(static)], axis=1).astype(np.float32)


def _cosines(size: int) -> DoubleArray:
    """Return the first columns of the orthonormal cosine transform (DCT-II)."""
    k, n = np.arange(min(size, NUM_CEPSTRA)), np.arange(size)[:, np.newaxis]
    basis = np.sqrt(2 / size) * np.cos(np.pi * k * (n + 0.5) / size)
    basis[:, 0] /= np.sqrt(2)
    return np.asarray(basis)


def _differences(x: DoubleArray) -> DoubleArray:
    """Return the slope of each column over three frames; beyond the ends the outermost frames are repeated.

    Over five frames, and with second-order slopes as in Kaldi, a change affects nine frames: the last state
    of a phone then takes the beginning of the next phone, 30 to 110 ms.
    """
    if len(x) == 0:
        return x
    padded = np.pad(x, ((1, 1), (0, 0)), mode="edge")
    return np.asarray(padded[2:] - padded[:-2]) / 2


@dataclass
class Statistics:
    """Sums over frames from which mixtures are estimated; the sums of several ranks are added.

    Attributes:
        occupancy: frames of each Gaussian, (G,); a frame may be divided among the Gaussians of its class.
        first: sum of these frames, (G, D).
        second: sum of their squares, (G, D).
        log_likelihood: of all frames, nats.
    """

    occupancy: DoubleArray
    first: DoubleArray
    second: DoubleArray
    log_likelihood: float = 0.0

    @classmethod
    def empty(cls, num_gaussians: int, dim: int) -> Statistics:
        """Return sums over no frames."""
        return cls(np.zeros(num_gaussians), np.zeros((num_gaussians, dim)), np.zeros((num_gaussians, dim)))

    def to_vector(self) -> DoubleArray:
        """Return everything in one vector, (G + 2 G D + 1,), so that ranks can sum in one exchange."""
        parts = (self.occupancy, self.first.ravel(), self.second.ravel(), [self.log_likelihood])
        return np.concatenate(parts)

    @classmethod
    def from_vector(cls, vector: DoubleArray, num_gaussians: int, dim: int) -> Statistics:
        """Return the statistics from a result of `to_vector`, or a sum of such results.

        Args:
            vector: (G + 2 G D + 1,).
            num_gaussians: G, Gaussians of all classes.
            dim: D, values per frame.
        """
        occupancy, first, second, rest = np.split(
            vector, np.cumsum([num_gaussians, num_gaussians * dim, num_gaussians * dim])
        )
        shape = (num_gaussians, dim)
        return cls(occupancy, first.reshape(shape), second.reshape(shape), float(rest[0]))


class GaussianMixtures:
    """A mixture of Gaussians with diagonal covariances for each class.

    Args:
        num_classes: C.
        mean, variance: of all frames, (D,): every class begins with one such Gaussian.

    Attributes:
        classes: the class of each Gaussian, (G,).

    Example:
        >>> x = cepstra_of(np.random.default_rng(0).normal(size=(200, 40)).astype(np.float32))
        >>> mixtures = GaussianMixtures(6, x.mean(axis=0), x.var(axis=0))
        >>> mixtures.log_likelihoods(x).shape
        (200, 6)
    """

    def __init__(self, num_classes: int, mean: DoubleArray, variance: DoubleArray) -> None:
        self.num_classes = num_classes
        self.classes = np.arange(num_classes)
        self._floor = _VARIANCE_FLOOR * np.maximum(variance, 1e-6)
        self._mean = np.tile(mean.astype(np.float64), (num_classes, 1))
        self._variance = np.tile(np.maximum(variance.astype(np.float64), self._floor), (num_classes, 1))
        self._weight = np.ones(num_classes)

    @property
    def num_gaussians(self) -> int:
        """G."""
        return len(self.classes)

    @property
    def dim(self) -> int:
        """D."""
        return int(self._mean.shape[1])

    def log_likelihoods(self, x: FloatArray, classes: Collection[int] | None = None) -> FloatArray:
        """Return log p(x_t | c), (T, C), nats, for inputs (T, D).

        Args:
            x: inputs.
            classes: the classes to compute, e.g. those of a transcript; the others get -1e4.  None: all.
        """
        wanted = np.arange(self.num_classes) if classes is None else np.array(sorted(set(classes)))
        own = np.flatnonzero(np.isin(self.classes, wanted))
        own = own[np.argsort(self.classes[own], kind="stable")]
        scores = self._of_gaussians(x, own)
        best = scores.max(axis=1, keepdims=True, initial=-np.inf)
        scores -= best
        starts = np.searchsorted(self.classes[own], wanted)
        sums = np.add.reduceat(np.exp(scores, out=scores), starts, axis=1)
        result = np.full((len(x), self.num_classes), _NOT_WANTED, np.float32)
        # Without the floor, a class far from the best would give log 0.
        result[:, wanted] = np.log(np.maximum(sums, _SMALLEST)) + best
        return result

    def accumulate(self, x: FloatArray, alignment: IntArray, into: Statistics) -> None:
        """Add an utterance's frames to `into`; each frame is divided among the Gaussians of its class.

        Args:
            x: inputs, (T, D).
            alignment: the class of each frame, (T,).
            into: sums for all Gaussians.
        """
        for c in np.unique(alignment):
            frames = x[alignment == c]
            own = np.flatnonzero(self.classes == c)
            scores = self._of_gaussians(frames, own).astype(np.float64)
            total = np.logaddexp.reduce(scores, axis=1)
            share = np.exp(scores - total[:, np.newaxis])
            into.occupancy[own] += share.sum(axis=0)
            into.first[own] += share.T @ frames
            into.second[own] += share.T @ np.square(frames, dtype=np.float64)
            into.log_likelihood += float(total.sum())

    def update(self, sums: Statistics) -> None:
        """Estimate all Gaussians again from `sums`; those with too few frames keep mean and variance."""
        ok = sums.occupancy >= _LEAST_FRAMES
        occupancy = sums.occupancy[ok, np.newaxis]
        self._mean[ok] = sums.first[ok] / occupancy
        self._variance[ok] = np.maximum(sums.second[ok] / occupancy - self._mean[ok] ** 2, self._floor)
        of_class = np.bincount(self.classes, sums.occupancy, self.num_classes)[self.classes]
        share = np.divide(sums.occupancy, of_class, out=self._weight.copy(), where=of_class > 0)
        self._weight = np.maximum(share, _LEAST_WEIGHT)

    def split(self, num_gaussians: int, sums: Statistics) -> None:
        """Split the Gaussians with the most frames in two until there are `num_gaussians`.

        The next class to get a Gaussian is chosen by a power of its frames over its number of Gaussians.
        No Gaussian is split if that leaves too few frames.
        """
        frames = sums.occupancy.copy()
        while self.num_gaussians < num_gaussians:
            splittable = frames >= 4 * _LEAST_FRAMES
            if not splittable.any():
                return
            count = np.bincount(self.classes, minlength=self.num_classes)
            of_class = np.bincount(self.classes, frames, self.num_classes) ** _POWER / count
            neediest = self.classes[np.argmax(np.where(splittable, of_class[self.classes], -1.0))]
            chosen = int(np.argmax(np.where(self.classes == neediest, frames, -1.0)))
            self._halve(chosen)
            frames[chosen] /= 2
            frames = np.append(frames, frames[chosen])

    def _halve(self, g: int) -> None:
        shift = _SHIFT * np.sqrt(self._variance[g])
        self._mean = np.vstack([self._mean, self._mean[g] + shift])
        self._mean[g] -= shift
        self._variance = np.vstack([self._variance, self._variance[g]])
        self._weight[g] /= 2
        self._weight = np.append(self._weight, self._weight[g])
        self.classes = np.append(self.classes, self.classes[g])

    def _of_gaussians(self, x: FloatArray, which: NDArray[np.int64]) -> FloatArray:
        """Return log w_g N(x_t; g) of the chosen Gaussians, (T, number chosen)."""
        mean, variance = self._mean[which], self._variance[which]
        precision = 1 / variance
        terms = np.log(2 * np.pi * variance) + mean**2 * precision
        constant = np.log(self._weight[which]) - 0.5 * terms.sum(axis=1)
        # A single product: [x, x^2, 1] with the coefficients of each Gaussian.
        columns = np.concatenate([mean * precision, -0.5 * precision, constant[:, np.newaxis]], axis=1)
        rows = np.concatenate([x, x * x, np.ones((len(x), 1))], axis=1, dtype=np.float32)
        return np.asarray(rows @ columns.astype(np.float32).T)
