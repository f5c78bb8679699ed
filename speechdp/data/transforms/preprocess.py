"""Preprocess between reading and training: features from audio, perturbation, deltas, splicing, SpecAugment.

The same code runs on the CPU and on a GPU.  Random values are drawn by numpy on the host, from the seed and
the name of the utterance or the batch.  So values agree whichever rank, thread or device computes them: to
the bit on the CPU, up to rounding on a GPU.

Legend: B segments of a batch, T frames, F features of a frame, I dimensions of the model's input, S samples.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speechdp.data.plan.assignment import PlanPosition, augmentation_seed
from speechdp.data.plan.segments import AS_RECORDED, size_at_speed
from speechdp.data.shards.layout import ShardHeader, Stored
from speechdp.data.signal.features import FeatureConfig, num_frames_of
from speechdp.data.transforms.augment import SpecAugment
from speechdp.data.transforms.augment_options import AugmentOptions
from speechdp.data.transforms.inputs import FEATURES_ALONE, InputOptions
from speechdp.data.transforms.moments import Moments
from speechdp.data.transforms.perturb import add_noise, at_speed, draw_noise
from speechdp.data.transforms.torch_features import normalise_rows, raw_features
from speechdp.errors import ConfigError

if TYPE_CHECKING:
    from speechdp.data.shards.shard import Shard

__all__ = ["AugmentOptions", "InputOptions", "Preprocessor", "UtteranceKey", "inputs_of"]

#: Limit for cached features, because other chunks of the same utterance come soon.
CACHE_BYTES = 64 << 20
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class UtteranceKey:
    """Identifies an utterance in an epoch; with epoch None nothing is drawn.  Speed is in percent."""

    epoch: int | None
    shard: int
    utterance: int
    speed: int = AS_RECORDED


_UNCHANGED = AugmentOptions()


class Preprocessor:
    """Turns the contents of shards into the model's input.  Thread-safe.

    Args:
        features: how features were or will be computed.
        sampling_rate: in Hz.
        stored: what the shards hold.
        inputs: context that the model sees beside the features.
        augment: random changes of the input.
        seed: of the random numbers.
        cache_bytes: limit for cached features computed from audio: chunks of an utterance come in several
            batches.

    Attributes:
        stored: as given.
        base_dim: features per frame (F).
        output_dim: values per frame of the model's input (I).
        is_plain: whether features are the model's input as they are read, without preprocessing.

    Raises:
        ConfigError: recordings are to be perturbed but the shards hold features, or the features cannot be
            computed here.
    """

    def __init__(
        self,
        features: FeatureConfig,
        sampling_rate: int,
        stored: Stored,
        inputs: InputOptions = FEATURES_ALONE,
        augment: AugmentOptions = _UNCHANGED,
        seed: int = 0,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        _check(features, stored, augment)
        if stored == "spectrograms" and (inputs.copies > 1 or augment.spec_augment):
            raise ConfigError(
                "--deltas, --splice and --spec-augment change a model's input, but spectrograms are the "
                "output of a synthesis model: leave them out"
            )
        self.stored: Stored = stored
        self.base_dim = features.feature_dim
        self.output_dim = features.feature_dim * inputs.copies
        self.is_plain = stored != "audio" and inputs.copies == 1 and not augment.spec_augment
        self._features, self._sampling_rate = features, sampling_rate
        self._inputs, self._seed = inputs, seed
        self._noise = augment.noise()
        self._masks = SpecAugment() if augment.spec_augment else None
        self._cache = _FeatureCache(cache_bytes)

    @classmethod
    def for_shard(cls, header: ShardHeader, inputs: InputOptions) -> Preprocessor:
        """Make the preprocessor with which decoding and alignment read a shard for a model with `inputs`."""
        return cls(header.features, header.sampling_rate, header.stored, inputs)

    def features_of(
        self, samples: Sequence[npt.NDArray[np.int16]], keys: Sequence[UtteranceKey], device: torch.device
    ) -> list[Tensor]:
        """Compute the features of whole utterances, perturbed according to their keys, and normalise them.

        Args:
            samples: (S,) int16 of each.
            keys: identify the utterances.
            device: computes and holds the results.

        Returns:
            (T, F) float32 each, T as `perturb.size_at_speed` of the recorded frames; must not be modified.
        """
        if device.type != "cpu":
            return self.compute_together(samples, keys, device)
        return [self._compute_once(x, key) for x, key in zip(samples, keys, strict=True)]

    def compute_together(
        self, samples: Sequence[npt.NDArray[np.int16]], keys: Sequence[UtteranceKey], device: torch.device
    ) -> list[Tensor]:
        """Compute the same as `features_of` in as few operations as possible, without the cache.

        For a GPU; on the CPU an utterance's values may depend on its neighbours, up to rounding.
        """
        frames = [num_frames_of(len(x), self._sampling_rate, self._features) for x in samples]
        frames = [size_at_speed(num, key.speed) for num, key in zip(frames, keys, strict=True)]
        if 0 in frames:
            some = [number for number, num in enumerate(frames) if num]
            made = self.compute_together([samples[n] for n in some], [keys[n] for n in some], device)
            empty = torch.empty(0, self.base_dim, device=device)
            return [made.pop(0) if num else empty for num in frames]
        if not frames:
            return []
        waves = _to_device(samples, device)
        for speed in {key.speed for key in keys} - {AS_RECORDED}:
            changed = [number for number, key in enumerate(keys) if key.speed == speed]
            for number, wave in zip(changed, at_speed([waves[n] for n in changed], speed), strict=True):
                waves[number] = wave
        waves = self._with_noise(waves, keys)
        rows = raw_features(waves, frames, self._sampling_rate, self._features)
        return list(torch.split(normalise_rows(rows, frames, self._features), frames))

    def finish(self, features: Tensor, lengths: Tensor, place: PlanPosition | None = None) -> Tensor:
        """Add deltas, splice, and apply SpecAugment.

        Args:
            features: (B, T, F) float32; may be modified.
            lengths: (B,) int64, on the CPU.
            place: place of the batch in training; None: nothing is masked.

        Returns:
            (B, T, I), 0 past each segment's end.
        """
        if features.numel() == 0:
            return features.new_zeros(*features.shape[:2], self.output_dim)
        features = self._inputs.apply(features, lengths)
        if self._masks is not None and place is not None:
            rng = augmentation_seed(self._seed, place)
            self._masks.apply(features, lengths, rng, self._inputs.copies)
        if features.shape[1] > int(lengths.min()):
            behind = torch.arange(features.shape[1]) >= lengths.unsqueeze(1)  # (B, T)
            features.masked_fill_(behind.to(features.device).unsqueeze(2), 0.0)
        return features

    def not_normalised(self, samples: npt.NDArray[np.int16]) -> Tensor:
        """Compute the features (T, F) of (S,) samples without normalising them."""
        frames = num_frames_of(len(samples), self._sampling_rate, self._features)
        if frames == 0:
            return torch.empty(0, self.base_dim)
        return raw_features(_to_device([samples], _CPU), [frames], self._sampling_rate, self._features)

    def whole(self, stored: npt.NDArray[Any], moments: Moments | None = None) -> npt.NDArray[np.float32]:
        """Return the model's input for an utterance, without random changes, as held-out evaluation uses it.

        Args:
            stored: the utterance as the shard holds it: samples (S,) int16, or features (T, F).
            moments: normalise features of samples with these; None: with the utterance's own statistics.

        Returns:
            (T, I) float32.
        """
        if moments is not None:
            features = moments.normalise(self.not_normalised(stored), self._features)
        elif self.stored == "audio":
            features = self.compute_together([stored], [UtteranceKey(None, 0, 0)], _CPU)[0]
        else:
            features = torch.from_numpy(stored.astype(np.float32))
        finished = self.finish(features.unsqueeze(0), torch.tensor([len(features)]))
        result: npt.NDArray[np.float32] = finished[0].numpy()
        return result

    def read(
        self, shard: Shard, utterance: int, moments: Moments | None = None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Read the model's input (T, I) for an utterance of a shard, as by `whole`, and its targets (T,).

        Raises:
            ShardError: the utterance is damaged.
        """
        stored, targets = (shard.read_samples if self.stored == "audio" else shard.read)(utterance)
        return self.whole(stored, moments), targets

    def _compute_once(self, samples: npt.NDArray[np.int16], key: UtteranceKey) -> Tensor:
        # Without noise an utterance is the same in every epoch.
        name = key if self._noise is not None else UtteranceKey(None, key.shard, key.utterance, key.speed)
        features = self._cache.get(name)
        if features is None:
            features = self.compute_together([samples], [key], _CPU)[0]
            self._cache.put(name, features)
        return features

    def _with_noise(self, waves: list[Tensor], keys: Sequence[UtteranceKey]) -> list[Tensor]:
        level = self._noise
        if level is None or keys[0].epoch is None:
            return waves
        draws = [draw_noise(level, self._seed, (k.epoch or 0, k.shard, k.utterance)) for k in keys]
        return add_noise(waves, draws, self._seed)


def inputs_of(config: dict[str, Any]) -> InputOptions:
    """Return the input options that a model file records; the defaults if it is older and has none."""
    return InputOptions(**config.get("inputs", {}))


def _check(features: FeatureConfig, stored: Stored, augment: AugmentOptions) -> None:
    perturbing = {"--speed-perturb": augment.speed_perturb, "--noise-snr-db": augment.noise() is not None}
    for option, given in perturbing.items():
        if given and stored != "audio":
            raise ConfigError(
                f"{option}: needs a data directory prepared with --store audio; this one holds {stored}"
            )
    if stored == "audio" and (features.kind == "kaldi" or features.cmvn != "utterance"):
        raise ConfigError(
            "features that Kaldi made cannot be computed from audio; prepare the data without --store audio"
        )


def _to_device(samples: Sequence[npt.NDArray[np.int16]], device: torch.device) -> list[Tensor]:
    """Copy samples to a device as one tensor; return them as float32, in 16-bit scale."""
    waves = [torch.from_numpy(x) for x in samples]
    if device.type == "cpu":
        return [wave.float() for wave in waves]
    sizes = [len(wave) for wave in waves]
    together = torch.empty(sum(sizes), dtype=torch.int16, pin_memory=True)
    torch.cat(waves, out=together)
    return list(torch.split(together.to(device, non_blocking=True).float(), sizes))


class _FeatureCache:
    """Caches the utterances requested most recently, up to `max_bytes`.  Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[UtteranceKey, Tensor] = OrderedDict()

    def get(self, key: UtteranceKey) -> Tensor | None:
        with self._lock:
            features = self._kept.get(key)
            if features is not None:
                self._kept.move_to_end(key)
            return features

    def put(self, key: UtteranceKey, features: Tensor) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = features
            self._num_bytes += features.nbytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
