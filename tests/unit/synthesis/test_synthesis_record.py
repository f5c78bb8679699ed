"""What is kept of held-out speech: names of its files, and means that take little memory."""

from __future__ import annotations

import os

import numpy as np
import pytest

from speechdp.synthesis.record import Mean, SaidUtterance, SynthesisResult
from speechdp.synthesis.showcase import _file_name


@pytest.mark.parametrize("at_once", [1, 700, 2**20])
def test_the_interval_does_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    values = np.random.default_rng(0).normal(size=37)
    drawn = np.random.default_rng(1).integers(37, size=(1000, 37))
    low, high = np.percentile(values[drawn].mean(axis=1), (2.5, 97.5))
    monkeypatch.setattr("speechdp.decode.paired._DRAWN_AT_ONCE", at_once)
    assert Mean.of(values.tolist()) == Mean(values.mean(), low, high)


def test_means_are_computed_once() -> None:
    one = SaidUtterance("a", "one", 2, 3, 4.0, 0.5, 0.5, "stop", {})
    result = SynthesisResult("test", 1, (one,), {}, {}, ())
    assert result.mcd_db is result.mcd_db and result.mcd_sl_db == Mean(6.0, 6.0, 6.0)


def test_files_of_any_ids_have_names_of_their_own() -> None:
    assert _file_name("test-ann_one.1+2-b") == "test-ann_one.1+2-b"
    wanted = ["a/b", "a:b", "a_b", "x" * 160, "x" * 170, "x" * 171, "\u97f3" * 80, "\u97f3" * 81, "..", "/"]
    names = [_file_name(f"test-{one}") for one in wanted]
    assert len(set(names)) == len(names) and not any("/" in name for name in names)
    # Behind it come the source, and what a file is called while it is written.
    assert max(len(os.fsencode(name)) for name in names) < 255 - len("-synthetic.wav") - len("..1234567.tmp")
    assert len(set(map(_file_name, names))) == len(names)
