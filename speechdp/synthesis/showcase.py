"""Write pictures and sound of a few held-out utterances to RUN/synthesis."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.errors import RunError
from speechdp.files import cannot_be_written, check_writable
from speechdp.synthesis.generate import Speech, write_wav
from speechdp.synthesis.pictures import SpeechPicture, draw_picture
from speechdp.synthesis.record import Source
from speechdp.tasks.model_file import LoadedSynthesis

FOLDER = "synthesis"
_UNSAFE = re.compile(r"[^\w.+-]+")
#: Leaves room within 255 bytes for "-recorded.wav" and for the suffix of a file being written.
_MAX_NAME_BYTES = 160
_ENDINGS = {"stop": "", "attention": " (ended by its attention)", "limit": " (did not stop; cut)"}


@dataclass(frozen=True)
class Example:
    """One utterance: the model's speech and the recording.

    Attributes:
        utterance_id, text: as in the data; the id names the files.
        symbols: (S,) of the text.
        speech: the model's speech.
        recorded_mel: (T, M); None: there is no recording.
        sound: samples by source.
    """

    utterance_id: str
    text: str
    symbols: npt.NDArray[np.int32]
    speech: Speech
    recorded_mel: npt.NDArray[np.float32] | None
    sound: Mapping[Source, npt.NDArray[np.float32]]


def picture_of(
    text: str,
    symbols: npt.NDArray[np.int32],
    speech: Speech,
    loaded: LoadedSynthesis,
    recorded_mel: npt.NDArray[np.float32] | None = None,
) -> SpeechPicture:
    """Return the picture of an utterance."""
    names = loaded.symbols.decode(symbols.tolist())
    return SpeechPicture(
        title=text + _ENDINGS[speech.ending],
        symbols=names,
        attention=speech.attention,
        mel=speech.mel,
        linear=speech.linear,
        recorded_mel=recorded_mel,
        sampling_rate=loaded.sampling_rate,
        frame_shift_s=loaded.features.frame_shift_s,
    )


def show(example: Example, loaded: LoadedSynthesis, run_dir: Path, split: str) -> str:
    """Write RUN/synthesis/SPLIT-ID.png and a WAV per source beside it; return the picture's path in the run.

    If an id is long or has characters unsuitable for a file name, the name ends in part of a checksum.

    Raises:
        RunError: a disk error.
    """
    folder = run_dir / FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(cannot_be_written(folder, error)) from error
    name = _file_name(f"{split}-{example.utterance_id}")
    picture = picture_of(example.text, example.symbols, example.speech, loaded, example.recorded_mel)
    draw_picture(picture, folder / f"{name}.png")
    for source, samples in example.sound.items():
        write_wav(folder / f"{name}-{source}.wav", samples, loaded.sampling_rate)
    return f"{FOLDER}/{name}.png"


def clear(run_dir: Path, split: str) -> None:
    """Delete the pictures and sound of an earlier measurement, and check that new ones can be written.

    Raises:
        RunError: a disk error.
    """
    folder = run_dir / FOLDER
    try:
        check_writable(run_dir)
        for path in [
            *folder.glob(f"{glob.escape(split)}-*.png"),
            *folder.glob(f"{glob.escape(split)}-*.wav"),
        ]:
            path.unlink()
    except OSError as error:
        raise RunError(cannot_be_written(error.filename or folder, error)) from error


def _file_name(wanted: str) -> str:
    """Return a file name without special characters and not too long; different names stay different."""
    cleaned = _UNSAFE.sub("_", wanted)
    encoded = cleaned.encode()
    if cleaned == wanted and len(encoded) <= _MAX_NAME_BYTES:
        return wanted
    digest = hashlib.sha256(wanted.encode(errors="backslashreplace")).hexdigest()[:8]
    # A cleaned name has no "~", so none of those ends like this.
    return f"{encoded[:_MAX_NAME_BYTES].decode(errors='ignore')}~{digest}"
