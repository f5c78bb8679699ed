"""Which contenders are compared with which peers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.strategies import peers
from benchmarks.strategies.contenders import NUM_CLASSES, make_data
from benchmarks.strategies.peer_loops import PEER_LOOPS
from speechdp.data.shards.dataset import Dataset
from speechdp.labels.kaldi_pdfs import classes_of


def test_every_peer_has_a_loop_and_every_loop_is_a_peer() -> None:
    assert [p.name for p in peers.PEERS] == list(PEER_LOOPS)


def test_a_peer_that_is_not_installed_is_left_out_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "accelerate" else found(name)
    )
    _, here = peers.available(8)
    assert "accelerate LocalSGD" not in [p.name for p in here]
    assert "left out: accelerate LocalSGD" in (out := capsys.readouterr().out)
    assert "pip install accelerate" in out


def test_a_strategy_that_does_not_exist_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = peers.Ours(peers.OVERLAPPED, "telepathy:period=8", "mpi")
    monkeypatch.setattr(peers, "our_contenders", lambda period: (unknown,))
    ours, _ = peers.available(8)
    assert ours == []
    assert "left out: telepathy on mpi" in capsys.readouterr().out


def test_ours_have_the_period_of_the_peers() -> None:
    strategies = {o.strategy for o in peers.our_contenders(12)}
    assert "model_averaging:period=12" in strategies
    assert "delayed_averaging:period=12,delay=3" in strategies


def test_each_is_compared_with_its_kind_and_overlapped_ones_with_the_best_of_all() -> None:
    ours = [
        peers.Ours(peers.GRADIENTS, "gradient_averaging", "torch"),
        peers.Ours(peers.GRADIENTS, "gradient_averaging", "mpi"),
        peers.Ours(peers.OVERLAPPED, "ad_psgd", "mpi"),
    ]
    chosen = [p for p in peers.PEERS if p.key in ("ddp", "post_local_sgd")]
    rates = {
        "gradient_averaging on torch": [12.0, 12.0],
        "gradient_averaging on mpi": [15.0, 15.0],
        "ad_psgd on mpi": [30.0, 40.0],
        "torch DDP": [10.0, 10.0],
        "torch PostLocalSGD": [20.0, 20.0],
    }
    assert peers.summarise(rates, ours, chosen) == {
        "gradient_averaging_torch_vs_ddp": 1.2,
        "gradient_averaging_vs_best_peer": 1.5,
        "ad_psgd_vs_best_peer": 1.75,
    }


def test_contenders_train_on_whole_data(tmp_path: Path) -> None:
    make_data(tmp_path)
    dataset = Dataset.open(tmp_path)
    assert dataset.splits["train"].utterances == 2000 and dataset.splits["dev"].utterances == 20
    assert classes_of(dataset).num_classes == NUM_CLASSES  # which training reads, too
