"""Speak text with eSpeak NG's library, and find out when each phone was spoken.

eSpeak NG (GPL-3) is not part of speechdp: the optional package espeakng-loader contains it, and it is loaded
at run time.  The library is not deterministic within a process (lengths vary by some ten samples with what
was spoken before).  A new process that speaks the same texts in the same order with the same seeds gives the
same samples.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speechdp.errors import ConfigError

_REMEDY = "install it with: pip install 'speechdp[synthetic]'"

# From speak_lib.h.
_OUTPUT_SYNCHRONOUS = 2
_INITIALIZE_PHONEME_EVENTS = 0x0001
_INITIALIZE_DONT_EXIT = 0x8000
_EVENT_LIST_TERMINATED = 0
_EVENT_PHONEME = 7
_PARAMETER_RATE = 1
_PARAMETER_PITCH = 3
_CHARS_UTF8 = 1

# Marks that eSpeak writes before a vowel (stress) and after a phone (length, numbered allophones).
_STRESS = "',%="
_ALLOPHONE = re.compile(r"(?<=.)[0-9:#\[\]~*;^\"-]+$")

# Phones whose name is a digit, which a lexicon would read as a probability: the vowels of "lot" and "nurse".
_DIGIT_PHONES = {"0": "Q", "3": "3r"}


class _EventId(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _EspeakEvent(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _EventId),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_EspeakEvent)
)


@dataclass(frozen=True)
class Voice:
    """A voice and its settings.

    Attributes:
        name: accent+variant, e.g. "en-us+f2".
        rate_wpm: words per minute, 80 to 450.
        pitch: 0 to 100; 50 is the voice's own pitch.
    """

    name: str
    rate_wpm: int = 150
    pitch: int = 50


@dataclass(frozen=True)
class SpokenWord:
    """A word and its phones: (phone, first sample, one past the last sample)."""

    word: str
    phones: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class EspeakSpeech:
    """eSpeak's output: (S,) float32 samples in [-1, 1], and the words in order."""

    samples: npt.NDArray[np.float32]
    words: tuple[SpokenWord, ...]


def check_espeak() -> None:
    """Raise ConfigError if espeakng-loader is not installed."""
    if importlib.util.find_spec("espeakng_loader") is None:
        raise ConfigError(f"synthetic speech needs the package espeakng-loader; {_REMEDY}")


@functools.cache
def start_espeak() -> Espeak:
    """Return this process's eSpeak NG; the first call starts it.

    There is only one per process: the library keeps voice, buffers and callback in globals, which a second
    start would change during the use of the first.

    Raises:
        ConfigError: espeakng-loader is missing, or its library does not start.
    """
    return Espeak()


class Espeak:
    """eSpeak NG's library; use `start_espeak` to get the one of this process."""

    def __init__(self) -> None:
        check_espeak()
        loader = importlib.import_module("espeakng_loader")
        data = Path(loader.get_data_path())
        try:
            self._library: Any = ctypes.CDLL(loader.get_library_path())
        except OSError as error:
            raise ConfigError(f"eSpeak NG does not load ({error}); {_REMEDY}") from error
        options = _INITIALIZE_PHONEME_EVENTS | _INITIALIZE_DONT_EXIT
        self.sampling_rate: int = self._library.espeak_Initialize(
            _OUTPUT_SYNCHRONOUS, 0, str(data).encode(), options
        )
        if self.sampling_rate <= 0:
            raise ConfigError(f"{data}: eSpeak NG does not start; {_REMEDY}")
        self._blocks: list[bytes] = []
        self._phones: list[tuple[str, int, int]] = []  # (name, sample, text position from 1)
        self._callback = _Callback(self._receive)  # keep a reference: the library holds only its address
        self._library.espeak_SetSynthCallback(self._callback)

    def speak(self, words: Sequence[str], voice: Voice, seed: int) -> EspeakSpeech:
        """Speak a sequence of words.

        Args:
            words: lower-case English words.
            voice: the voice and its settings.
            seed: for the breath noise of some voices, above 0; without it eSpeak NG takes the time of day.

        Raises:
            ConfigError: the voice does not exist, or eSpeak NG fails.
        """
        if self._library.espeak_SetVoiceByName(voice.name.encode()) != 0:
            raise ConfigError(f"eSpeak NG has no voice {voice.name!r}; {_REMEDY}")
        self._library.espeak_SetParameter(_PARAMETER_RATE, voice.rate_wpm, 0)
        self._library.espeak_SetParameter(_PARAMETER_PITCH, voice.pitch, 0)
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
        self._blocks.clear()
        self._phones.clear()
        text = " ".join(words).encode()
        status = self._library.espeak_Synth(text, len(text) + 1, 0, 1, 0, _CHARS_UTF8, None, None)
        if status != 0:
            raise ConfigError(f"eSpeak NG cannot speak {' '.join(words)!r} (status {status}); {_REMEDY}")
        samples = np.frombuffer(b"".join(self._blocks), dtype=np.int16).astype(np.float32) / 32768.0
        return EspeakSpeech(samples, words_of(words, self._phones, samples))

    def _receive(self, wave: Any, num_samples: int, events: Any) -> int:
        if wave and num_samples > 0:
            self._blocks.append(ctypes.string_at(wave, 2 * num_samples))
        number = 0
        while events[number].type != _EVENT_LIST_TERMINATED:
            event = events[number]
            if event.type == _EVENT_PHONEME:
                name = bytes(event.id.string).decode("ascii", "replace")
                self._phones.append((name, event.sample, event.text_position))
            number += 1
        return 0


def plain_phone(name: str) -> str:
    """Reduce an eSpeak phone to one without stress, length and allophone marks; "" if nothing is left.

    Then all accents together have about 40 phones for digits and commands.  Pauses ("_", "_:") give "_".
    """
    if name.startswith("_"):
        return "_"
    phone = _ALLOPHONE.sub("", name.lstrip(_STRESS))
    phone = _DIGIT_PHONES.get(phone, phone)
    return phone if any(character.isalnum() or character == "@" for character in phone) else ""


def words_of(
    words: Sequence[str], events: Sequence[tuple[str, int, int]], samples: npt.NDArray[np.float32]
) -> tuple[SpokenWord, ...]:
    """Return the phones of each word, from the sample at which their sound, or their pause, begins.

    eSpeak NG reports a phone only after the pause that it makes for it: the closure of a stop, whose samples
    are 0.  That pause belongs to the phone; by the events alone it would be the end of the previous phone.
    After a separate pause ("_") the two cannot be distinguished, and all of it stays silence.

    Args:
        words: words spoken in sequence, with a blank between two.
        events: (name, first sample, position in the text from 1), in order.
        samples: (S,).
    """
    # A mark by itself (palatalised, long) belongs to the previous phone: dropping it prolongs that phone.
    kept = [(plain_phone(name), sample, position) for name, sample, position in events if plain_phone(name)]
    starts = _with_their_pauses(kept, samples)
    ends = [*starts[1:], len(samples)]
    of_position: dict[int, list[tuple[str, int, int]]] = {}
    # Without any phone there is still one end, hence strict=False.
    for (phone, _, position), start, end in zip(kept, starts, ends, strict=False):
        if phone != "_":
            of_position.setdefault(position, []).append((phone, start, end))
    spoken = []
    position = 1
    for word in words:
        # eSpeak speaks some pairs as one word ("no one"): then the second word has no phones.
        spoken.append(SpokenWord(word, tuple(of_position.get(position, ()))))
        position += len(word) + 1
    return tuple(spoken)


def _with_their_pauses(phones: Sequence[tuple[str, int, int]], samples: npt.NDArray[np.float32]) -> list[int]:
    """Return the first sample of each phone, including its pause unless the previous phone is all silent."""
    starts = [sample for _, sample, _ in phones]
    for number in range(1, len(phones)):
        before, since, event = phones[number - 1][0], phones[number - 1][1], phones[number][1]
        heard = np.flatnonzero(samples[since:event])
        if before != "_" and len(heard):
            starts[number] = since + int(heard[-1]) + 1
    return starts
