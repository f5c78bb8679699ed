"""The description of its data that a run keeps, as `transcribe` opens it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from speechdp.data.shards import description
from speechdp.data.shards.description import SMALL_NAMES, keep_description
from speechdp.decode.transcribe import kept_data
from speechdp.files import sha256_of
from tests.helpers.tiny_data import write_tiny_data


def test_each_file_is_compared_with_the_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    keep_description(dataset, tmp_path / "run" / "trained_on")
    read = Counter[str]()

    def counted(path: Path) -> str:
        read[path.name] += 1
        return sha256_of(path)

    monkeypatch.setattr(description, "sha256_of", counted)
    assert kept_data(tmp_path / "run").checksum == dataset.checksum
    assert set(read) <= {*SMALL_NAMES} and set(read.values()) == {1}
