"""Damaged and odd files for every reader, some of each; benchmarks/faults/fuzz.py has 100,000 and more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from benchmarks.faults.fuzz import SETTINGS, Tally, fuzz
from benchmarks.faults.fuzz_files import Files, Reader
from benchmarks.faults.fuzz_inputs import damaged
from benchmarks.faults.fuzz_readers import make_readers
from speechdp.errors import ConfigError

NUM_INPUTS = 15


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Reader, Path]]]:
    found = []
    for number, reader in enumerate(make_readers(tmp_path_factory.mktemp("sound"))):
        folder = tmp_path_factory.mktemp(f"reader{number}")
        reader.write(folder)
        found.append((reader, folder))
    before = Path.cwd()
    yield found
    os.chdir(before)


def test_sound_files_are_read(readers: list[tuple[Reader, Path]]) -> None:
    for reader, folder in readers:
        os.chdir(folder)  # Kaldi's tables name files from here
        assert reader.refusal(folder, {}) is None, reader.name


def test_only_our_own_errors_come_out(readers: list[tuple[Reader, Path]]) -> None:
    num_refused = {}
    for reader, folder in readers:
        os.chdir(folder)
        num_refused[reader.name] = _refused(reader, folder)
    assert sum(count > 0 for count in num_refused.values()) > len(readers) / 2, num_refused


def _refused(reader: Reader, folder: Path) -> int:
    refused = []

    @settings(SETTINGS, max_examples=NUM_INPUTS, derandomize=True)
    @given(reader.inputs)
    def read(changed: Files) -> None:
        error = reader.refusal(folder, changed)
        if error is not None:
            assert str(error).isprintable(), f"{reader.name}: {error!r}"
            refused.append(error)

    read()
    return len(refused)


def test_the_fuzzer_sees_what_escapes(tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        content = (folder / "a").read_bytes()
        if content.startswith(b"good"):
            return
        if len(content) % 2:
            raise ConfigError("line\nbreak \x1b[31m")
        raise ZeroDivisionError

    inputs = damaged(b"good1").map(lambda new: {"a": new})
    reader = Reader("made up", read, {"a": b"good1"}, inputs)
    reader.write(tmp_path)
    with pytest.raises(ZeroDivisionError):
        reader.refusal(tmp_path, {"a": b"bad!"})
    refusal = reader.refusal(tmp_path, {"a": b"bad"})
    assert str(refusal) == r"line\nbreak \x1b[31m"
    assert reader.refusal(tmp_path, {}) is None
    total = Tally("all")
    total.add(Tally("made up", inputs=3, hung=1, seen={"a": 2}))
    assert (total.inputs, total.is_clean, total.seen) == (3, False, {"a": 2})
    assert callable(fuzz)
