"""Plan who says what in a synthetic corpus; pure: the same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from speechdp.data.corpora.corpus import SPLIT_NAMES
from speechdp.labels.lexicon import command_words, digit_words

#: eSpeak NG's accents of English ("en" is the British one; the library refuses a bare "en-gb").
ACCENTS = (
    "en",
    "en-us",
    "en-029",
    "en-gb-scotland",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-gb-x-rp",
    "en-us-nyc",
)
# Its voice variants without robots, whispers and buzzing ones.
_VARIANTS = """
    Alex Alicia Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario Michael
    Mike Nguyen Reed RicishayMax adam anika antonio aunty belinda benjamin boris caleb david ed
    edward edward2 f1 f2 f3 f4 f5 grandma grandpa gustave ian iven iven2 iven3 iven4 john kaukovalta
    klatt3 klatt4 klatt6 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel mike2 norbert pablo
    paul pedro quincy rob robert sandro shelby steph steph2 steph3 travis victor zac
"""
VARIANTS = tuple(_VARIANTS.split())
#: Each split's share of the hours (and of the variants).
SHARES = {"train": 0.8, "dev": 0.1, "test": 0.1}

_MAX_DIGITS = 7
_MAX_COMMANDS = 4
_RATE_WPM = (90, 190)
_PITCH = (25, 75)
_UTTERANCES_A_SPEAKER = 5
_FEWEST_SPEAKERS = 4
#: Time that eSpeak NG needs for one of our words, and for lengthening the last one, at 170 words a minute: a
#: least-squares fit over 801 utterances.
_WORD_S_AT_170_WPM = 0.267
_LENGTHENING_S_AT_170_WPM = 0.138
#: Silence at each edge, kept or added, in seconds.
EDGE_S = (0.05, 0.25)


@dataclass(frozen=True)
class PlannedUtterance:
    """One utterance to speak."""

    utterance_id: str
    speaker: str
    text: str
    voice: str
    rate_wpm: int
    pitch: int

    @property
    def expected_s(self) -> float:
        """Expected duration, roughly, in seconds."""
        speech_s = len(self.text.split()) * _WORD_S_AT_170_WPM + _LENGTHENING_S_AT_170_WPM
        return speech_s * 170.0 / self.rate_wpm + sum(EDGE_S)


@dataclass(frozen=True)
class _Speaker:
    name: str
    voice: str
    rate_wpm: int
    pitch: int


def plan_corpus(hours: float, seed: int) -> dict[str, list[PlannedUtterance]]:
    """Return the utterances of train, dev and test; no voice variant occurs in two of them."""
    variants = list(VARIANTS)
    random.Random(f"{seed} variants").shuffle(variants)
    num_held_out = max(1, round(SHARES["dev"] * len(variants)))
    parts = {
        "dev": variants[:num_held_out],
        "test": variants[num_held_out : 2 * num_held_out],
        "train": variants[2 * num_held_out :],
    }
    return {
        name: list(_plan_split(name, parts[name], hours * 3600.0 * SHARES[name], seed))
        for name in SPLIT_NAMES
    }


def _plan_split(name: str, variants: Sequence[str], seconds: float, seed: int) -> Iterator[PlannedUtterance]:
    rng = random.Random(f"{seed} {name}")
    speakers = _make_speakers(variants, seconds, rng)
    digits, commands = deck(digit_words(), rng), deck(command_words(), rng)
    planned_s, number = 0.0, 0
    fewest = _fewest_utterances()
    while planned_s < seconds or number < fewest:
        speaker = speakers[number % len(speakers)] if number < len(speakers) else rng.choice(speakers)
        if number % 2 == 0:
            words = [next(digits) for _ in range(rng.randint(1, _MAX_DIGITS))]
        else:
            words = [next(commands) for _ in range(rng.randint(1, _MAX_COMMANDS))]
        utterance = PlannedUtterance(
            utterance_id=f"{speaker.name}-{name}-{number:06d}",
            speaker=speaker.name,
            text=" ".join(words),
            voice=speaker.voice,
            rate_wpm=round(speaker.rate_wpm * rng.uniform(0.9, 1.1)),
            pitch=speaker.pitch + rng.randint(-5, 5),
        )
        yield utterance
        planned_s += utterance.expected_s
        number += 1


def _fewest_utterances() -> int:
    """Return how many utterances give every split every word: half are commands, of at least one word."""
    return 2 * len(command_words())


def _make_speakers(variants: Sequence[str], seconds: float, rng: random.Random) -> list[_Speaker]:
    pairs = [(accent, variant) for accent in ACCENTS for variant in variants]
    rng.shuffle(pairs)
    mean_s = 1.5  # of an utterance, roughly
    wanted = round(seconds / mean_s / _UTTERANCES_A_SPEAKER)
    return [
        _Speaker(
            name=f"{accent}_{variant}",
            voice=f"{accent}+{variant}",
            rate_wpm=rng.randint(*_RATE_WPM),
            pitch=rng.randint(*_PITCH),
        )
        for accent, variant in pairs[: max(_FEWEST_SPEAKERS, wanted)]
    ]


def deck(words: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yield the words endlessly, each once per shuffle, so that all are equally frequent."""
    while True:
        order = list(words)
        rng.shuffle(order)
        yield from order
