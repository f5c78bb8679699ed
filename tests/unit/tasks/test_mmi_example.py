"""examples/mmi: a training criterion of one's own, whose models decode as ours do."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.alignment_file import write_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory, states_of
from speechdp.labels.state_tying import TYING_NAME, Split, StateTying
from speechdp.options.batch import BatchOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import TrainOptions
from speechdp.tasks.model_file import load_model
from speechdp.tasks.registry import TASKS, networks_of, task
from speechdp.testing import task_contract
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.mpi import REPOSITORY
from tests.helpers.tiny_data import TinySizes, write_tiny_data

CPU = torch.device("cpu")
INVENTORY = StateInventory(("A", "B"))


@pytest.fixture
def mmi(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(TASKS, "registered", {})
    monkeypatch.delitem(sys.modules, "mmi", raising=False)
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "mmi")
    import mmi  # noqa: PLC0415

    return mmi


def aligned(phones: str, frames: int) -> np.ndarray:
    states = states_of([{"s": "SIL"}.get(phone, phone) for phone in phones], INVENTORY)
    return np.repeat(np.array(states, np.int32), frames)


def brute_force(
    scores: torch.Tensor, alignments: list[np.ndarray], tying: StateTying | None, stay: torch.Tensor
) -> torch.Tensor:
    """Sum over the state sequences of one utterance (T, C): a dense matrix over phones in their contexts."""
    sequences = []
    for states in alignments:
        phone, state = np.divmod(states, 3)
        begins = np.flatnonzero(np.r_[True, (phone[1:] != phone[:-1]) | (state[1:] < state[:-1])])
        sequences.append([0, *phone[begins].tolist(), 0])
    triples = [tuple(s[i - 1 : i + 2]) for s in sequences for i in range(1, len(s) - 1)]
    kinds = sorted(set(triples))
    counts = {kind: triples.count(kind) for kind in kinds}
    size = 3 * len(kinds)
    arcs, start = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    classes = []
    for kind in kinds:
        left, phone, right = kind
        own = 3 * phone + np.arange(3)
        if tying is not None:
            own = tying.table[left, phone, right if tying.looks_right else 0]
        classes += own.tolist()
    for place, kind in enumerate(kinds):
        for state in range(3):
            here = 3 * place + state
            arcs[here, here] = stay[classes[here]]
            if state < 2:
                arcs[here, here + 1] = 1 - stay[classes[here]]
        for other, after in enumerate(kinds):
            if after[:2] == kind[1:]:
                among = sum(counts[k] for k in kinds if k[:2] == after[:2])
                arcs[3 * place + 2, 3 * other] = (1 - stay[classes[3 * place + 2]]) * counts[after] / among
        start[3 * place] = sum(tuple(s[:3]) == kind for s in sequences) / len(sequences)
    reached = start * scores[0, classes].exp()
    for frame in range(1, len(scores)):
        reached = (reached @ arcs) * scores[frame, classes].exp()
    return reached.sum().log()


@pytest.mark.parametrize("context", ["none", "left", "both"])
def test_sums_and_gradients_are_those_over_all_paths(mmi: ModuleType, context: str) -> None:
    alignments = [aligned("sABAs", 2), aligned("sBBAs", 3), aligned("ABs", 1), aligned("sAAABs", 2)]
    tying = None
    if context != "none":
        split = Split("left", 0, 3, 4) if context == "left" else Split("right", 0, 3, 4)
        trees = [0, 1, 2, split, 5, 6, 7, 8, 9]
        tying = StateTying(INVENTORY, context, [("SIL", "A")], trees)  # type: ignore[arg-type]
    num_classes = 9 if tying is None else tying.num_classes
    denominator = mmi.Denominator(alignments, tying, num_classes)
    stay = torch.zeros(num_classes, dtype=torch.float64)
    stay[denominator._classes.flatten()] = denominator._stay.double().flatten()
    torch.manual_seed(0)
    lengths = torch.tensor([9, 5, 7])
    scores = torch.randn(3, 9, num_classes)
    found = scores.clone().requires_grad_()
    sums = mmi.log_sum(found, lengths, denominator)
    weights = torch.tensor([1.0, 2.0, -1.0])
    (weights * sums).sum().backward()
    exact = scores.double().requires_grad_()
    expected = torch.stack(
        [brute_force(exact[row, :length], alignments, tying, stay) for row, length in enumerate(lengths)]
    )
    (weights * expected).sum().backward()
    torch.testing.assert_close(sums.double(), expected, atol=1e-5, rtol=1e-5)
    assert found.grad is not None and exact.grad is not None
    torch.testing.assert_close(found.grad.double(), exact.grad, atol=1e-5, rtol=1e-4)


def test_it_keeps_what_training_relies_on(mmi: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(path: Path, *others: object) -> object:  # the contract's data have no targets to count
        num_classes = Dataset.open(path).num_classes
        states = np.arange(3 * (num_classes // 3), dtype=np.int32)
        return mmi.Denominator([states, states[::-1].reshape(-1, 3)[:, ::-1].flatten()], None, num_classes)

    monkeypatch.setattr(mmi, "_denominator", made_up)
    task_contract("mmi:Mmi:layers=1,cells=8,dropout=0")


def test_what_was_spoken_becomes_more_likely_and_the_model_decodes(mmi: ModuleType, tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=48, dev=8))
    options = TrainOptions(
        batch=BatchOptions(batch_size=4),
        optimizer=OptimizerOptions(learning_rate=0.01),
        task="mmi:Mmi:layers=1,cells=8,dropout=0",
        epochs=3,
    )
    run_dir = tmp_path / "run"
    run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, run_dir))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["heldout_mmi_log_ratio"] > lines[0]["heldout_mmi_log_ratio"]
    assert load_model(run_dir, CPU).config["num_classes"] == dataset.num_classes


def test_a_network_of_ones_own_learns_by_it_and_is_read_without_data(
    mmi: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "tdnn", raising=False)
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "own_network")
    import tdnn  # noqa: PLC0415

    cls = dataclasses.make_dataclass("TdnnMmi", [], bases=(tdnn.Tdnn, mmi.Mmi), frozen=True)
    task("tdnn_mmi")(cls)
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=24, dev=8))
    sizes = "width=16,inner=6,layers=3,bottleneck=8,dropout=0"
    options = TrainOptions(
        batch=BatchOptions(batch_size=4),
        optimizer=OptimizerOptions(learning_rate=0.01),
        task=f"tdnn_mmi:{sizes}",
        epochs=3,
    )
    run_dir = tmp_path / "run"
    run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, run_dir))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["heldout_mmi_log_ratio"] > lines[0]["heldout_mmi_log_ratio"]
    model = load_model(run_dir, CPU, own=networks_of("tdnn_mmi")).model
    assert isinstance(model, tdnn.TdnnNetwork) and not hasattr(model, "denominator")


def test_targets_of_another_folder_than_those_trained_on_are_refused(mmi: ModuleType, tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    inventory = StateInventory.load(dataset.classes_path)
    tying = StateTying(inventory, "left", [], list(range(inventory.num_classes)))
    folder = tmp_path / "tied"
    folder.mkdir()
    for index, path in enumerate(dataset.shard_paths("train")):
        with dataset.open_shard("train", index) as shard:
            targets = [shard.read_utterance(u).targets for u in range(shard.num_utterances)]
            write_targets(folder / path.name, shard, targets, "tied-left", tying.num_classes)
    (folder / TYING_NAME).write_text(json.dumps(tying.to_json()))
    options = TrainOptions(task=f"mmi:Mmi:alignments={folder}", batch=BatchOptions(batch_size=4), epochs=1)
    with pytest.raises(ConfigError, match="the same folder as --alignments"):
        run_threads(
            1, lambda comm: train_run(Session(Dataset.open(dataset.path), comm, CPU), options, tmp_path / "r")
        )
