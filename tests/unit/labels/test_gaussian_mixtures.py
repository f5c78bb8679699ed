"""Gaussian mixtures: densities, estimates, halving, and sums of several ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from speechdp.labels.gaussian_mixtures import GaussianMixtures, Statistics, cepstra_of

RNG = np.random.default_rng(0)


def mixtures_of(x: np.ndarray, num_classes: int = 2) -> GaussianMixtures:
    return GaussianMixtures(num_classes, x.mean(axis=0), x.var(axis=0))


def fit(mixtures: GaussianMixtures, x: np.ndarray, alignment: np.ndarray) -> Statistics:
    sums = Statistics.empty(mixtures.num_gaussians, mixtures.dim)
    mixtures.accumulate(x, alignment, sums)
    mixtures.update(sums)
    return sums


def test_a_class_is_described_by_the_moments_of_its_frames() -> None:
    x = RNG.normal([[2.0, -1.0, 0.5]], [[0.5, 2.0, 1.0]], (500, 3)).astype(np.float32)
    alignment = (np.arange(500) % 2).astype(np.int32)
    x[alignment == 1] += 3
    mixtures = mixtures_of(x)
    fit(mixtures, x, alignment)
    found = mixtures.log_likelihoods(x)
    for c in range(2):
        own = x[alignment == c].astype(np.float64)
        mean, variance = own.mean(axis=0), own.var(axis=0)
        density = -0.5 * (np.log(2 * np.pi * variance) + (x - mean) ** 2 / variance).sum(axis=1)
        np.testing.assert_allclose(found[:, c], density, rtol=1e-4, atol=1e-4)


def test_halved_gaussians_find_two_clusters() -> None:
    x = np.concatenate([RNG.normal(-4, 0.3, (300, 2)), RNG.normal(4, 0.3, (100, 2))]).astype(np.float32)
    alignment = np.zeros(400, np.int32)
    mixtures = mixtures_of(x, num_classes=1)
    before = fit(mixtures, x, alignment)
    mixtures.split(2, before)
    for _ in range(20):
        after = fit(mixtures, x, alignment)
    assert sorted(np.rint(after.occupancy)) == [100, 300]
    assert after.log_likelihood > before.log_likelihood
    # Each cluster has its own Gaussian and its own share: a density of 0.25 or 0.75 times that of one.
    of_one = -np.log(2 * np.pi * 0.3**2)
    assert mixtures.log_likelihoods(np.full((1, 2), 4.0, np.float32)).item() == pytest.approx(
        np.log(0.25) + of_one, abs=0.3
    )


def test_log_likelihood_never_falls_from_round_to_round() -> None:
    x = RNG.standard_gamma(2.0, (600, 4)).astype(np.float32)
    alignment = RNG.integers(0, 3, 600).astype(np.int32)
    mixtures = mixtures_of(x, 3)
    mixtures.split(12, fit(mixtures, x, alignment))
    assert np.bincount(mixtures.classes).tolist() == [4, 4, 4]
    trace = [fit(mixtures, x, alignment).log_likelihood for _ in range(12)]
    assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(trace))


def test_gaussians_are_not_halved_below_the_frames_they_need() -> None:
    x = RNG.normal(size=(40, 2)).astype(np.float32)
    alignment = np.r_[np.zeros(37), np.ones(3)].astype(np.int32)
    mixtures = mixtures_of(x)
    untouched = mixtures.log_likelihoods(x)[:, 1]
    mixtures.split(100, fit(mixtures, x, alignment))
    assert np.bincount(mixtures.classes)[1] == 1 and mixtures.num_gaussians < 8
    # Three frames are no estimate: the class keeps the Gaussian it began with.
    np.testing.assert_array_equal(mixtures.log_likelihoods(x)[:, 1], untouched)


def test_sums_of_several_ranks_are_those_of_all_utterances() -> None:
    x = RNG.normal(size=(90, 3)).astype(np.float32)
    alignment = RNG.integers(0, 2, 90).astype(np.int32)
    mixtures = mixtures_of(x)
    mixtures.split(5, fit(mixtures, x, alignment))
    whole = Statistics.empty(5, 3)
    mixtures.accumulate(x, alignment, whole)
    vectors = []
    for part in (slice(0, 30), slice(30, 90)):
        sums = Statistics.empty(5, 3)
        mixtures.accumulate(x[part], alignment[part], sums)
        vectors.append(sums.to_vector())
    joined = Statistics.from_vector(np.sum(vectors, axis=0), 5, 3)
    for name, value in vars(whole).items():
        np.testing.assert_allclose(getattr(joined, name), value, rtol=1e-9)


def test_cepstra_are_the_cosine_transform_with_its_slopes() -> None:
    ramp = np.outer(np.arange(20.0), np.cos(np.pi * (np.arange(40) + 0.5) / 40)).astype(np.float32)
    x = cepstra_of(ramp)
    assert x.shape == (20, 26) and x.dtype == np.float32
    np.testing.assert_allclose(x[:, :13].mean(axis=0), 0, atol=1e-4)
    # A spectrum that is the first cosine: only coefficient 1 moves, by sqrt(size / 2) a frame.
    np.testing.assert_allclose(np.diff(x[:, 1]), np.sqrt(20), rtol=1e-4)
    np.testing.assert_allclose(x[:, [0, *range(2, 13)]], 0, atol=1e-3)
    np.testing.assert_allclose(x[1:-1, 13 + 1], np.sqrt(20), rtol=1e-4)
    assert cepstra_of(np.empty((0, 40), np.float32)).shape == (0, 26)
    mfcc = RNG.normal(size=(20, 20)).astype(np.float32)
    taken = cepstra_of(mfcc, are_cepstra=True)
    np.testing.assert_allclose(taken[:, :13], mfcc[:, :13] - mfcc[:, :13].mean(axis=0), atol=1e-5)
