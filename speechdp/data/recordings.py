"""Keep recordings beside their spectrograms: of held-out utterances to compare synthetic speech with.

Those of train are kept where asked for: a recogniser that is to hear synthetic speech may be trained on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import soundfile

from speechdp.atomic_file import write_text_atomically
from speechdp.data.audio import to_int16
from speechdp.data.shard_layout import ShardHeader
from speechdp.errors import ShardError

RECORDINGS_NAME = "recordings"
TRAIN_RECORDINGS_NAME = "recordings-train"


def recording_path(data_dir: Path, utterance_id: str) -> Path:
    """Return where a held-out utterance's recording lies: 16-bit FLAC at the data's sampling rate.

    It is there for dev and test of data for synthesis; `data.audio.read_audio` reads it.
    """
    return data_dir / RECORDINGS_NAME / f"{quote(utterance_id, safe='')}.flac"


def keep_recording(
    data_dir: Path,
    header: ShardHeader,
    utterance_id: str,
    samples: npt.NDArray[np.float32],
    *,
    of_train: bool = False,
) -> None:
    """Write (S,) samples in [-1, 1] of an utterance of dev or test; of train only if that is asked for.

    Raises:
        ShardError: the disk refuses.
    """
    path = recording_path(data_dir, utterance_id)
    if header.split == "train":
        if not of_train:
            return
        path = data_dir / TRAIN_RECORDINGS_NAME / path.name
    try:
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, to_int16(samples), header.sampling_rate, subtype="PCM_16", format="FLAC")
    except (soundfile.LibsndfileError, OSError) as error:
        raise ShardError(f"{path}: cannot be written ({error}); free some space and run again") from error


class _Spoken(Protocol):
    @property
    def utterance_id(self) -> str: ...
    @property
    def speaker(self) -> str: ...
    @property
    def text(self) -> str: ...


def list_recordings(data_dir: Path, splits: Mapping[str, Sequence[_Spoken]]) -> None:
    """Write `text` and `utt2spk` beside the recordings: each folder of them is a corpus of its own.

    Raises:
        ShardError: the disk refuses.
    """
    for name in (RECORDINGS_NAME, TRAIN_RECORDINGS_NAME):
        folder = data_dir / name
        if not folder.is_dir():
            continue
        held = [
            u for split, us in splits.items() for u in us if (split == "train") == (name != RECORDINGS_NAME)
        ]
        by_name = sorted(((quote(u.utterance_id, safe=""), u) for u in held), key=lambda pair: pair[0])
        lines = {
            "text": [f"{stem} {u.text}\n" for stem, u in by_name],
            "utt2spk": [f"{stem} {quote(u.speaker, safe='')}\n" for stem, u in by_name],
        }
        try:
            for file, content in lines.items():
                write_text_atomically(folder / file, "".join(content))
        except OSError as error:
            raise ShardError(
                f"{folder}: cannot be written ({error.strerror}); free some space and run again"
            ) from error
