"""Join recordings of single words into longer utterances, so that word sequences can be learnt."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.signal.audio import AudioSource
from speechdp.errors import ConfigError

#: Pauses between words, and at the edges, in seconds.
PAUSE_S = (0.06, 0.12)
EDGE_S = 0.05
#: Root mean square to which every recording is scaled, unless its peak would then exceed the second value.
#: Takes of one speaker may differ by 20 dB, which nobody could predict from the text of an utterance.
_LEVEL = 10.0 ** (-25.0 / 20.0)
_MOST_PEAK = 0.95
_FADE_S = 0.005
#: Level of the noise in pauses: this share of a recording's frames is quieter; zeros would sound like gaps.
_QUIET_SHARE = 0.05
_QUIET_FRAME_S = 0.01
_TRIES = 20


@dataclass(frozen=True)
class JoinRule:
    """How many recordings form an utterance (`fewest` to `most`), and how often each is used (`times`)."""

    fewest: int
    most: int
    times: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise ConfigError(f"--join {self.fewest}-{self.most}: give A-B with 1 <= A <= B, e.g. 1-3")
        if self.times < 1:
            raise ConfigError(f"--join-times {self.times}: give at least 1")

    @classmethod
    def parse(cls, text: str, times: int) -> JoinRule:
        """Parse "A-B" or "A".  Raises ConfigError."""
        fewest, dash, most = text.partition("-")
        try:
            numbers = int(fewest), int(most if dash else fewest)
        except ValueError as error:
            raise ConfigError(f"--join {text}: is not understood; give A-B, e.g. 1-3") from error
        return cls(*numbers, times)

    @property
    def spec(self) -> str:
        """The rule as written in data.json."""
        return f"join={self.fewest}-{self.most},times={self.times}"


@dataclass(frozen=True)
class JoinedUtterance:
    """An utterance that consists of one or more recordings of a speaker, in this order."""

    utterance_id: str
    speaker: str
    text: str
    recordings: tuple[AudioSource, ...]


Splits = dict[str, list[JoinedUtterance]]


def unjoined(splits: Mapping[str, Sequence[CorpusUtterance]]) -> Splits:
    """Make every recording an utterance of its own."""
    return {
        name: [JoinedUtterance(u.utterance_id, u.speaker, u.text, (u.audio,)) for u in utterances]
        for name, utterances in splits.items()
    }


def plan_joins(splits: Mapping[str, Sequence[CorpusUtterance]], rule: JoinRule, seed: int) -> Splits:
    """Choose which recordings are joined: at random by the seed, within one split and one speaker.

    Every recording is used `rule.times` times.  For train, texts of several words that occur in the other
    splits are avoided if its recordings allow it.  A speaker's last utterance may have fewer recordings than
    the rule's fewest if the numbers do not come out even.
    """
    planned: Splits = {}
    held_out: set[str] = set()
    for name in sorted(splits, key=lambda name: name == "train"):  # train comes last
        planned[name] = []
        avoided = held_out if name == "train" else frozenset[str]()
        for speaker in sorted({utterance.speaker for utterance in splits[name]}):
            own = [utterance for utterance in splits[name] if utterance.speaker == speaker]
            rng = random.Random(f"{seed} join {name} {speaker}")
            groups = (group for _ in range(rule.times) for group in _groups(own, rule, rng, avoided))
            planned[name] += [
                JoinedUtterance(
                    f"{speaker}-{name}-{number:06d}", speaker, _text(group), tuple(u.audio for u in group)
                )
                for number, group in enumerate(groups)
            ]
        held_out |= {utterance.text for utterance in planned[name]}
    return {name: planned[name] for name in splits}


def _groups(
    utterances: Sequence[CorpusUtterance], rule: JoinRule, rng: random.Random, avoided: Iterable[str]
) -> Iterator[list[CorpusUtterance]]:
    """Shuffle recordings and cut them into groups, if possible without the texts to be avoided."""
    rest = list(utterances)
    rng.shuffle(rest)
    while rest:
        fitting = [
            size
            for size in range(rule.fewest, min(rule.most, len(rest)) + 1)
            if len(rest) == size or len(rest) - size >= rule.fewest
        ]
        size = rng.choice(fitting) if fitting else min(rule.most, len(rest))
        for _ in range(_TRIES):
            if size == 1 or _text(rest[:size]) not in avoided:
                break
            # Exchange a recording of the group for any other that is left; near the end only the order
            # changes.
            one, other = rng.randrange(size), rng.randrange(len(rest))
            rest[one], rest[other] = rest[other], rest[one]
        yield rest[:size]
        rest = rest[size:]


def _text(group: Iterable[CorpusUtterance]) -> str:
    return " ".join(utterance.text for utterance in group)


def join_recordings(
    recordings: Sequence[npt.NDArray[np.float32]], sampling_rate: int, rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Concatenate (S,) recordings, scaled to one level, with short pauses of low noise.

    Args:
        recordings: float32 in [-1, 1], of one speaker.
        sampling_rate: in Hz.
        rng: draws the pauses' lengths and noise.
    """
    levelled = [_faded(_levelled(samples), sampling_rate) for samples in recordings]
    noise_level = min(_quiet_level(samples, sampling_rate) for samples in levelled)

    def pause(seconds: float) -> npt.NDArray[np.float32]:
        num_samples = round(seconds * sampling_rate)
        return (noise_level * rng.standard_normal(num_samples)).astype(np.float32)

    pieces = [pause(EDGE_S)]
    for number, samples in enumerate(levelled):
        if number > 0:
            pieces.append(pause(rng.uniform(*PAUSE_S)))
        pieces.append(samples)
    return np.concatenate([*pieces, pause(EDGE_S)])


def _levelled(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    level = float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))
    peak = float(np.abs(samples).max())
    if level == 0.0:
        return samples
    return samples * np.float32(min(_LEVEL / level, _MOST_PEAK / peak))


def _faded(samples: npt.NDArray[np.float32], sampling_rate: int) -> npt.NDArray[np.float32]:
    """Fade both edges, which would click otherwise."""
    num_samples = min(round(_FADE_S * sampling_rate), len(samples) // 2)
    ramp = np.linspace(0.0, 1.0, num_samples, endpoint=False, dtype=np.float32)
    faded = samples.copy()
    faded[:num_samples] *= ramp
    faded[len(faded) - num_samples :] *= ramp[::-1]
    return faded


def _quiet_level(samples: npt.NDArray[np.float32], sampling_rate: int) -> float:
    frame = max(1, round(_QUIET_FRAME_S * sampling_rate))
    whole = samples[: len(samples) // frame * frame].reshape(-1, frame)
    if len(whole) == 0:
        return 0.0
    levels = np.sqrt(np.mean(np.square(whole, dtype=np.float64), axis=1))
    return float(np.quantile(levels, _QUIET_SHARE))
