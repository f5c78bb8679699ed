"""The benchmark of the data path: what is compared with what, and that all deliver the same."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.data import data_path
from benchmarks.data.contenders import READERS, Checksum, checksum, pad
from benchmarks.data.corpora import BATCH_SIZE, CORPORA, NUM_ARCHIVES, lengths_of

REPOSITORY = Path(__file__).resolve().parents[3]
BENCHMARK = REPOSITORY / "benchmarks" / "data" / "data_path.py"
NEEDS = {"vs_webdataset_or_shar": ("webdataset", "lhotse"), "vs_ark": ("kaldi_native_io",)}


def test_a_quick_run_checks_all_contenders_and_ends_with_ratios(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--folder", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    ratios = json.loads(done.stdout.splitlines()[-1])
    missing = {
        key for key, modules in NEEDS.items() if not any(importlib.util.find_spec(name) for name in modules)
    }
    assert set(ratios) == {"vs_dataloader", "vs_webdataset_or_shar", "vs_ark", "vs_limit"} - missing
    assert all(ratio > 0 for ratio in ratios.values())
    checked = [line.split(",", 1) for line in done.stdout.splitlines() if line.startswith("checked: ")]
    assert checked[0][0] == "checked: ours" and len(checked) >= 2
    assert len({what for _, what in checked}) == 1
    assert list(tmp_path.iterdir()) == []


def test_every_contender_has_a_reader_and_every_reader_a_contender() -> None:
    assert {c.reader for c in data_path.CONTENDERS} == set(READERS)
    assert {c.corpus for c in data_path.CONTENDERS} == set(CORPORA)
    assert len({c.name for c in data_path.CONTENDERS}) == len(data_path.CONTENDERS)


def test_a_peer_that_is_not_installed_is_left_out_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lhotse" else object())
    found = data_path.available(argparse.Namespace(only="", quick=False))
    assert {c.needs for c in found} == {"torch", "webdataset", "kaldi_native_io"}
    assert "left out: Lhotse Shar (pip install lhotse)" in capsys.readouterr().out


def test_ours_is_compared_with_the_best_peer_and_the_slower_limit() -> None:
    names = ("ours", "DataLoader over h5py", "DataLoader, 2 workers", "Kaldi archives, compressed")
    chosen = [c for c in data_path.CONTENDERS if c.name in names or c.moves_only]
    rates = {
        "ours": [12.0, 24.0],
        "DataLoader over h5py": [2.0, 4.0],
        "DataLoader, 2 workers": [6.0, 8.0],
        "Kaldi archives, compressed": [100.0, 100.0],
        "reading the files' bytes": [48.0, 48.0],
        "copying as many bytes": [20.0, 36.0],
    }
    assert data_path.summarise(rates, chosen) == {"vs_dataloader": 2.5, "vs_limit": 0.633}


def test_a_contender_that_delivers_other_frames_ends_the_benchmark() -> None:
    ours, peer = (c for c in data_path.CONTENDERS if c.name in ("ours", "DataLoader over h5py"))
    good = Checksum(frames=9, batches=2, padded_sum=1.0, weighted_sum=5.0)
    agreement = data_path.Agreement()
    agreement.check(ours, good)
    agreement.check(peer, good)
    with pytest.raises(SystemExit, match="DataLoader over h5py delivers"):
        agreement.check(peer, replace(good, weighted_sum=5.1))


def test_the_checksum_finds_swapped_targets_and_dirty_padding() -> None:
    rng = np.random.default_rng(1)
    samples = [(rng.random((n, 3), dtype=np.float32), rng.integers(0, 9, n, dtype=np.int32)) for n in (4, 2)]
    features, targets, lengths = pad(samples)
    whole = checksum([(features, targets, lengths)])
    assert (whole.frames, whole.batches) == (6, 1)
    assert whole.padded_sum == pytest.approx(sum(float(f.sum()) for f, _ in samples))
    swapped = targets.clone()
    swapped[0, :2] = swapped[0, :2] + torch.tensor([1, 0])
    assert checksum([(features, swapped, lengths)]).weighted_sum != pytest.approx(
        whole.weighted_sum, rel=1e-9
    )
    features[1, 3] = 1.0
    with pytest.raises(AssertionError):
        checksum([(features, targets, lengths)])


def test_lengths_fill_whole_batches_of_every_archive() -> None:
    lengths = lengths_of(CORPORA["long"], 100_000_000, np.random.default_rng(1))
    assert len(lengths) % BATCH_SIZE == 0
    assert lengths.min() >= 100 and lengths.max() <= 2000
    assert 600 < lengths.mean() < 800
    assert 0.95 < lengths.sum() * 164 / 100_000_000 <= 1.0
    assert len(lengths_of(CORPORA["long"], 1, np.random.default_rng(1))) == NUM_ARCHIVES * BATCH_SIZE
