"""Keep the recordings of held-out utterances beside their spectrograms, to compare synthetic speech with."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import soundfile

from speechdp.data.audio import to_int16
from speechdp.data.shard_layout import ShardHeader
from speechdp.errors import ShardError

RECORDINGS_NAME = "recordings"


def recording_path(data_dir: Path, utterance_id: str) -> Path:
    """Return where a held-out utterance's recording lies: 16-bit FLAC at the data's sampling rate.

    It is there for dev and test of data for synthesis; `data.audio.read_audio` reads it.
    """
    return data_dir / RECORDINGS_NAME / f"{quote(utterance_id, safe='')}.flac"


def keep_recording(
    data_dir: Path, header: ShardHeader, utterance_id: str, samples: npt.NDArray[np.float32]
) -> None:
    """Write (S,) samples in [-1, 1] of an utterance of dev or test; of train nothing is kept.

    Raises:
        ShardError: the disk refuses.
    """
    if header.split == "train":
        return
    path = recording_path(data_dir, utterance_id)
    try:
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, to_int16(samples), header.sampling_rate, subtype="PCM_16", format="FLAC")
    except (soundfile.LibsndfileError, OSError) as error:
        raise ShardError(f"{path}: cannot be written ({error}); free some space and run again") from error
