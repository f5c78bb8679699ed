"""The trained model as a file: back as it was, or one line that says why not."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError, RunError
from speechdp.labels.hmm import log_priors, self_loop_probabilities
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.report.runs.folders import read_run
from speechdp.simulation.measured import measured_run
from speechdp.tasks.model_file import ClassCounts, load_model, load_weights, save_model
from tests.helpers.faulty_disk import faulty_disk, full

CPU = torch.device("cpu")
COUNTS = ClassCounts(np.array([10, 0, 40, 5]), np.array([2, 0, 4, 5]))
FACTS = {"feature_dim": 6, "num_classes": 4, "sampling_rate": 8000, "classes_sha256": "abc"}


def make_model() -> LstmAcousticModel:
    torch.manual_seed(0)
    return LstmAcousticModel(6, 4, LstmConfig(2, 5, True, bottleneck=3, dropout=0.1))


def saved(run: Path) -> Path:
    return save_model(run, make_model(), COUNTS, FACTS)


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    assert saved(tmp_path) == tmp_path / "model.safetensors"
    loaded, model = load_model(tmp_path, CPU), make_model()
    assert loaded.model.config == model.config and not loaded.model.training
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(loaded.class_log_prior, torch.from_numpy(log_priors(COUNTS.frames)))
    expected = self_loop_probabilities(COUNTS.frames, COUNTS.runs)
    assert torch.equal(loaded.self_loop, torch.from_numpy(expected))
    assert FACTS.items() <= loaded.config.items()
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_full_disk_leaves_the_old_model(tmp_path: Path) -> None:
    saved(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    for fails_at in (1, 2, 3):
        with (
            faulty_disk(fails_at, full()),
            pytest.raises(RunError, match=r"cannot be written \(No space left.* some space, then run again"),
        ):
            saved(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
        assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_run_without_a_model_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no such model; .* is not a finished run, train it first"):
        load_model(tmp_path, CPU)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"is not a finished run, finish it with train --resume"):
        load_model(tmp_path, CPU)
    (tmp_path / "owner.json").touch()
    with pytest.raises(RunError, match=r"run, wait for the job that trains it; if that has ended, finish it"):
        load_model(tmp_path, CPU)
    (tmp_path / "completed.json").write_text("{}")
    with pytest.raises(RunError, match=r"though the run is complete; the command .* again .*--resume"):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize(
    ("record", "inside", "whole"),
    [("sweep.json", "", "sweep"), ("compare.json", "", "comparison"), ("tune.json", "runs", "search")],
)
def test_a_run_of_several_is_finished_by_their_command(
    record: str, inside: str, whole: str, tmp_path: Path
) -> None:
    (tmp_path / record).write_text('{"format": "speechdp-any"}')
    run = tmp_path / inside / "bmuf-4"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    how = f"by giving the command of the {whole} again"
    with pytest.raises(RunError, match=f"is not a finished run, finish it {how}$"):
        load_model(run, CPU)
    assert f"completed.json: missing, so the run did not finish; continue it {how}" in read_run(run).problems
    with pytest.raises(ConfigError, match=f"continue it {how}, then simulate$"):
        measured_run(read_run(run))


def test_a_model_that_may_not_be_read_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = saved(tmp_path), Path.open

    def forbidden(self: Path, *arguments: str) -> object:
        if self == path:  # root may read everything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(self, *arguments)

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(RunError, match=r"cannot be read \(Permission denied\); make it readable"):
        load_model(tmp_path, CPU)


def rewrite(path: Path, changes: dict[str, object], drop: str = "") -> None:
    """Change the file's head, or drop one of its tensors."""
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(str(path), "pt") as file:
        head = json.loads(file.metadata()["speechdp"])
    tensors.pop(drop, None)
    safetensors.torch.save_file(tensors, path, {"speechdp": json.dumps({**head, **changes})})


def test_another_version_is_refused(tmp_path: Path) -> None:
    rewrite(saved(tmp_path), {"version": 99})
    with pytest.raises(RunError, match="written by another version of speechdp; train again"):
        load_model(tmp_path, CPU)


def test_a_model_that_memory_does_not_hold_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)

    def short_of_memory(_: Path) -> None:
        raise RuntimeError(f"unable to mmap 276271268 bytes from file <{path}>: Cannot allocate memory (12)")

    monkeypatch.setattr(safetensors.torch, "load_file", short_of_memory)
    with pytest.raises(RunError) as raised:
        load_model(tmp_path, CPU)
    assert str(raised.value) == (
        f"{path}: cannot be read (Cannot allocate memory); free some memory, or raise its limit (ulimit -v), "
        "then run again"
    )


def test_an_option_of_a_newer_version_is_not_called_damage(tmp_path: Path) -> None:
    path = saved(tmp_path)
    sizes = dataclasses.asdict(make_model().config)
    features = FeatureConfig(num_mel_bins=6).to_dict()
    recorded = {"data_checksum": "abc", "features": features}
    for changes, option in (
        ({"lstm": {**sizes, "heads": 4}}, r"'heads' \(lstm\)"),
        ({**recorded, "features": {**features, "dither": 1.0}}, r"'dither' \(features\)"),
        ({"inputs": {"deltas": 0, "splice": 0, "skip": 2}}, r"'skip' \(inputs\)"),
    ):
        rewrite(path, changes)
        said = rf"has an option {option} .* a newer version or was edited by hand; use the"
        with pytest.raises(RunError, match=said) as raised:
            load_model(tmp_path, CPU)
        assert str(raised.value).startswith(f"{path}: ") and "damaged" not in str(raised.value)
        if "lstm" not in changes:  # the weights alone do not need it
            with pytest.raises(RunError, match=said):
                load_weights(tmp_path)
        rewrite(path, {"lstm": sizes, "features": features, "inputs": {"deltas": 0, "splice": 0}})
    load_model(tmp_path, CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"lstm": {"layers": 2, "cells": 5, "bidirectional": 3, "bottleneck": 3, "dropout": 0.1}},
        {"inputs": {"deltas": 1.5}},
        {"sampling_rate": None},
        {"sampling_rate": "x"},
        {"sampling_rate": -1},
        {"features": {"num_mel_bins": 6, "mean_normalise": []}},
        {"features": None},
    ],
)
def test_an_option_of_another_type_is_damage(tmp_path: Path, changes: dict[str, object]) -> None:
    path, features = saved(tmp_path), FeatureConfig(num_mel_bins=6).to_dict()
    rewrite(path, {"data_checksum": "abc", "features": features})
    load_model(tmp_path, CPU)
    rewrite(path, changes)
    with pytest.raises(RunError, match=r"model\.safetensors: damaged \("):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize("damage", ["truncated", "empty", "pickle", "head", "sizes", "tensor", "option"])
def test_damage_is_one_line(tmp_path: Path, damage: str) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-10])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "pickle":
        path.write_bytes(pickle.dumps({"model": 1}))
    elif damage == "head":
        safetensors.torch.save_file(safetensors.torch.load_file(path), path)
    elif damage == "sizes":
        rewrite(path, {"num_classes": 5})
    elif damage == "tensor":
        rewrite(path, {}, drop="class_frames")
    else:
        rewrite(path, {"lstm": {"layers": 1}})
    with pytest.raises(RunError) as raised:
        load_model(tmp_path, CPU)
    assert str(raised.value).startswith(f"{path}: damaged (") and "\n" not in str(raised.value)
