"""Keep recordings beside their spectrograms: those of held-out utterances, to compare synthetic speech with.

Those of train are kept on request: a recogniser that is to judge synthetic speech may be trained on them.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import soundfile

from speechdp.data.prepare.contents import Named
from speechdp.data.shards.layout import ShardHeader
from speechdp.data.signal.audio import to_int16
from speechdp.errors import ShardError
from speechdp.files import cannot_be_written, write_text_atomically

RECORDINGS_NAME = "recordings"
TRAIN_RECORDINGS_NAME = "recordings-train"

#: Most bytes of a file name without ".flac": common file systems allow 255 in all.
_MAX_STEM_BYTES = 250
_KEPT_BYTES = 200
_HALF_ESCAPE = re.compile(r"%[0-9A-F]?\Z")


def recording_path(data_dir: Path, utterance_id: str) -> Path:
    """Return the file of a held-out utterance's recording: 16-bit FLAC at the data's sampling rate.

    It exists for dev and test of data for synthesis; `data.signal.audio.read_audio` reads it.
    """
    return data_dir / RECORDINGS_NAME / f"{_stem(utterance_id)}.flac"


def _stem(utterance_id: str) -> str:
    """Return an id quoted for a file name; a long one is cut and ends in part of its checksum.

    Quoting triples every byte of a letter outside ASCII, so that an id of 30 letters may be long.
    """
    quoted = quote(utterance_id, safe="")
    if len(quoted) <= _MAX_STEM_BYTES:
        return quoted
    digest = hashlib.sha256(utterance_id.encode()).hexdigest()[:16]
    # quote never leaves a "+", so no shorter id has such a name.
    return f"{_HALF_ESCAPE.sub('', quoted[:_KEPT_BYTES])}+{digest}"


def keep_recording(
    data_dir: Path,
    header: ShardHeader,
    utterance_id: str,
    samples: npt.NDArray[np.float32],
    *,
    of_train: bool = False,
) -> None:
    """Write (S,) samples in [-1, 1] of an utterance of dev or test, or of train if that is requested.

    Raises:
        ShardError: a disk error, or FLAC does not support the sampling rate.
    """
    path = recording_path(data_dir, utterance_id)
    if header.split == "train":
        if not of_train:
            return
        path = data_dir / TRAIN_RECORDINGS_NAME / path.name
    encoded = io.BytesIO()  # libsndfile does not report why a file cannot be written
    try:
        soundfile.write(encoded, to_int16(samples), header.sampling_rate, subtype="PCM_16", format="FLAC")
    except soundfile.LibsndfileError as error:
        raise ShardError(
            f"{path}: FLAC at {header.sampling_rate} Hz cannot be written ({error.error_string}); "
            "prepare with another --resample"
        ) from error
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded.getvalue())  # a view in the error's frames would outlive the buffer
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> ShardError:
    return ShardError(cannot_be_written(path, error))


def list_recordings(data_dir: Path, splits: Mapping[str, Sequence[Named]]) -> None:
    """Write `text` and `utt2spk` beside the recordings, so that each of their folders is a corpus.

    Raises:
        ShardError: a disk error.
    """
    for name in (RECORDINGS_NAME, TRAIN_RECORDINGS_NAME):
        folder = data_dir / name
        if not folder.is_dir():
            continue
        held = [
            u for split, us in splits.items() for u in us if (split == "train") == (name != RECORDINGS_NAME)
        ]
        by_name = sorted(((_stem(u.utterance_id), u) for u in held), key=lambda pair: pair[0])
        lines = {
            "text": [f"{stem} {u.text}\n" for stem, u in by_name],
            "utt2spk": [f"{stem} {quote(u.speaker, safe='')}\n" for stem, u in by_name],
        }
        try:
            for file, content in lines.items():
                write_text_atomically(folder / file, "".join(content))
        except OSError as error:
            raise _refused(folder, error) from error
