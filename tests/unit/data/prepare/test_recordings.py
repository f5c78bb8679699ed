"""Recordings beside spectrograms: names of any id, and what is said of a disk that refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

from speechdp.data.prepare.recordings import keep_recording, list_recordings, recording_path
from speechdp.data.shards.layout import ShardHeader
from speechdp.data.signal.audio import read_audio
from speechdp.errors import ShardError

HEADER = cast(ShardHeader, SimpleNamespace(split="test", sampling_rate=8000))
SAMPLES = np.array([0.0, 0.5, -0.25], dtype=np.float32)
JAPANESE = "\u97f3" * 40  # 360 bytes, quoted


def _utterance(name: str) -> Any:
    return SimpleNamespace(utterance_id=name, speaker="ann", text="one")


def test_any_id_has_a_file_of_its_own(tmp_path: Path) -> None:
    ids = [JAPANESE, JAPANESE + "!", "x" * 240, "x" * 250, "x" * 251, "x" * 252, "a/b", "a%2Fb"]
    for name in ids:
        keep_recording(tmp_path, HEADER, name, SAMPLES)
        np.testing.assert_allclose(read_audio(recording_path(tmp_path, name), 8000), SAMPLES, atol=1e-4)
    assert len({path.name for path in (tmp_path / "recordings").iterdir()}) == len(ids)
    assert recording_path(tmp_path, "x" * 250).stem == "x" * 250
    list_recordings(tmp_path, {"test": [_utterance(name) for name in ids]})
    listed = [line.split()[0] for line in (tmp_path / "recordings" / "text").read_text().splitlines()]
    assert listed == sorted(path.stem for path in (tmp_path / "recordings").glob("*.flac"))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.ENAMETOOLONG, "use shorter names"),
        (errno.EACCES, "make it writable"),
    ],
)
def test_the_remedy_is_that_of_the_refusal(tmp_path: Path, number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number))
    with (
        mock.patch.object(Path, "write_bytes", side_effect=error),
        pytest.raises(ShardError, match=rf"one\.flac: cannot be written \({os.strerror(number)}\); {remedy}"),
    ):
        keep_recording(tmp_path, HEADER, "one", SAMPLES)


def test_a_rate_that_flac_does_not_know_is_no_full_disk(tmp_path: Path) -> None:
    header = cast(ShardHeader, SimpleNamespace(split="test", sampling_rate=10_000_000))
    with pytest.raises(ShardError, match="FLAC at 10000000 Hz"):
        keep_recording(tmp_path, header, "one", SAMPLES)
