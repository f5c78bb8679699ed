"""Plan what a few synthetic voices say, for synthesis; pure: the same seed gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Iterator

from speechdp.data.espeak.synthetic_plan import ACCENTS, SHARES, VARIANTS, PlannedUtterance, deck
from speechdp.errors import ConfigError
from speechdp.labels.lexicon import command_words, digit_words

#: eSpeak NG's voices in the order of use, alternating women's and men's: clear voices that differ.
VOICES = (
    "en-us",
    "en-us+f2",
    "en+m3",
    "en+f4",
    "en-gb-scotland+m1",
    "en-us+f5",
    "en-us-nyc+m7",
    "en-gb-x-rp+f1",
    "en-029+m2",
    "en+f3",
)
_MAX_WORDS = 5
_RATE_WPM = 140
_PITCH = 50
#: People do not say everything in the same way, either.
_RATE_SPREAD = 0.05
_PITCH_SPREAD = 3
_FEWEST_UTTERANCES = 2
_TRIES = 50


def voices_of(speakers: str | None) -> tuple[str, ...]:
    """Return eSpeak NG's names of the voices in the value of --speakers: their number, or the name of one.

    Raises:
        ConfigError: no such voice, or more voices than there are.
    """
    if speakers is None:
        return VOICES[:1]
    if speakers.isdecimal():
        if not 1 <= int(speakers) <= len(VOICES):
            raise ConfigError(f"--speakers {speakers}: give 1 to {len(VOICES)} voices, or the name of one")
        return VOICES[: int(speakers)]
    accent, plus, variant = speakers.partition("+")
    # eSpeak NG itself ignores a variant that it does not know.
    if accent not in ACCENTS or (plus and variant not in VARIANTS):
        raise ConfigError(
            f"--speakers {speakers}: eSpeak NG has no such voice; give a number, or one such as "
            f"{' or '.join(VOICES[:3])}"
        )
    return (speakers,)


def plan_voices(hours: float, voices: tuple[str, ...], seed: int) -> dict[str, list[PlannedUtterance]]:
    """Return the utterances of train, dev and test, spoken by the same voices.

    Texts of dev and test do not occur in train.  They have two words or more, which leaves enough other texts
    for train.
    """
    held_out: set[str] = set()
    planned = {}
    for name in ("test", "dev", "train"):
        seconds = hours * 3600.0 * SHARES[name]
        planned[name] = list(_plan_split(name, voices, seconds, seed, held_out))
        held_out |= {utterance.text for utterance in planned[name]}
    return {name: planned[name] for name in SHARES}


def _plan_split(
    name: str, voices: tuple[str, ...], seconds: float, seed: int, held_out: set[str]
) -> Iterator[PlannedUtterance]:
    rng = random.Random(f"{seed} voices {name}")
    decks = [deck(digit_words(), rng), deck(command_words(), rng)]
    planned_s, number = 0.0, 0
    while planned_s < seconds or number < _FEWEST_UTTERANCES * len(voices):
        voice = voices[number % len(voices)]
        fewest = 1 if name == "train" else 2
        for _ in range(_TRIES):
            words = decks[rng.randrange(len(decks))]
            text = " ".join(next(words) for _ in range(rng.randint(fewest, _MAX_WORDS)))
            if text not in held_out:
                break
        speaker = voice.replace("+", "_")
        utterance = PlannedUtterance(
            utterance_id=f"{speaker}-{name}-{number:06d}",
            speaker=speaker,
            text=text,
            voice=voice,
            rate_wpm=round(_RATE_WPM * rng.uniform(1.0 - _RATE_SPREAD, 1.0 + _RATE_SPREAD)),
            pitch=_PITCH + rng.randint(-_PITCH_SPREAD, _PITCH_SPREAD),
        )
        yield utterance
        planned_s += utterance.expected_s
        number += 1
