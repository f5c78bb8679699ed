"""Options of a run: presets, defaults that depend on others, and what is refused before step 1."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest

from speechdp.data.plan.epoch_plan import PlanOptions
from speechdp.errors import ConfigError
from speechdp.models.lstm_am import LstmConfig
from speechdp.models.presets import PRESETS
from speechdp.models.tacotron import config as tacotron
from speechdp.options.batch import BatchOptions
from speechdp.options.model import PresetName
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.registry import task_class
from speechdp.tasks.synthesis import SynthesisTask
from tests.helpers.options import options_with


def _sizes(model: ModelOptions) -> LstmConfig:
    task = TrainOptions(model).make_task()
    assert isinstance(task, AcousticTask)
    return task.sizes


def test_presets_are_changed_option_by_option() -> None:
    assert _sizes(ModelOptions()) == PRESETS["tiny"].model
    changed = _sizes(ModelOptions("swb2000", cells=64, dropout=0.0, bottleneck=0))
    assert changed == dataclasses.replace(PRESETS["swb2000"].model, cells=64, bottleneck=0)
    assert not _sizes(ModelOptions(bidirectional=False)).bidirectional
    guided = TrainOptions(ModelOptions("tacotron", guided_attention=0.5, reduction=3), task="synthesis")
    sizes = dataclasses.replace(tacotron.PAPER, reduction=3)
    assert guided.make_task() == SynthesisTask(0.5, sizes)
    assert TrainOptions(task="synthesis").make_task() == SynthesisTask(1.0, tacotron.TINY)


def test_batches_come_from_the_preset_unless_given() -> None:
    options = TrainOptions(ModelOptions("kaldi-4x800"), BatchOptions(chunk_frames=30), seed=7)
    assert options.plan() == PlanOptions(100, 30, 7)
    assert options.batches() == BatchOptions(100, chunk_frames=30, left_context=40)
    assert TrainOptions(batch=BatchOptions(left_context=0)).batches().left_context == 0


@pytest.mark.parametrize(("epochs", "expected"), [(12, 8), (1, 1), (2, 1), (3, 2)])
def test_annealing_begins_after_two_thirds(epochs: int, expected: int) -> None:
    assert TrainOptions(epochs=epochs).schedule().anneal_from == expected


def test_learning_rates_suit_their_optimizers() -> None:
    names = ("sgd", "adam", "adamw")
    rates = {name: options_with(optimizer=name).schedule().learning_rate for name in names}
    assert rates == {"sgd": 0.1, "adam": 0.002, "adamw": 0.002}
    assert options_with(learning_rate=0.5, anneal_from=1).schedule().anneal_from == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "--epochs 0: must be at least 1"),
        ({"realign": -1}, "--realign -1: must be at least 0"),
        ({"realign_epochs": 0}, "--realign-epochs 0: must be at least 1"),
        ({"max_steps": -1}, "--max-steps -1"),
        ({"checkpoint_steps": -5}, "--checkpoint-steps -5"),
        ({"seed": -1}, r"--seed -1: must lie in 0\.\.4294967295"),
        ({"seed": 2**32}, r"--seed 4294967296: must lie in 0\.\.4294967295"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"left_context": -1}, "--left-context -1: must not be negative"),
        ({"right_context": -1}, "--right-context -1: must not be negative"),
        ({"cells": 0}, "--cells 0: must be at least 1"),
        ({"learning_rate": -1.0}, "--learning-rate -1.0"),
        ({"momentum": 1.0}, r"--momentum 1.0: must lie in \[0, 1\)"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1: must not be negative"),
        ({"max_gradient_norm": float("nan")}, "--max-gradient-norm nan"),
        ({"realign_epochs": 3}, "--realign-epochs: goes with --realign; leave it out"),
        ({"left_context": 40}, "--left-context 40: goes with --chunk-frames; leave it out, or give both"),
        ({"right_context": 10}, "--right-context 10: goes with --chunk-frames; leave it out, or give both"),
        ({"preset": "kaldi-4x800", "chunk_frames": 0, "left_context": 30}, "--left-context 30: goes with"),
    ],
)
def test_impossible_options_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_with(**values)


def test_only_ranks_that_train_are_slowed_down() -> None:
    options = TrainOptions(slow_ranks="1:5,0:2")
    options.check_slow_ranks(2)
    with pytest.raises(ConfigError, match="--slow-ranks 1:5,0:2: there is no rank 1, only 1 rank, numbered"):
        options.check_slow_ranks(1)
    server = dataclasses.replace(options, strategy=StrategyChoice("easgd:dedicated=true"))
    with pytest.raises(ConfigError, match="rank 0 does not train with --strategy easgd:dedicated=true"):
        server.check_slow_ranks(3)


def test_contexts_of_a_preset_may_stay_where_nothing_is_cut() -> None:
    options = options_with(preset="kaldi-4x800", chunk_frames=0)
    assert options.resolve(2).resolve(2) == options.resolve(2)
    assert options_with(chunk_frames=20, left_context=40, right_context=10).batches().right_context == 10


@pytest.mark.parametrize(
    "given",
    [
        {"criterion": "full-sum", "global_batch": 32},
        {"criterion": "full-sum", "recipe": "adpsgd-asr"},
        {"criterion": "ctc", "base_batch": 16, "base_learning_rate": 0.01},
        {"realign": 1, "realign_criterion": "full-sum", "global_batch": 32},
    ],
)
def test_transcripts_go_with_a_batch_over_all_ranks(given: dict[str, Any]) -> None:
    assert options_with(**given).resolve(2).batch.chunk_frames == 0
    with pytest.raises(ConfigError, match="training on transcripts needs whole utterances"):
        options_with(**given, chunk_frames=20)


def test_every_preset_can_be_given() -> None:
    assert set(typing.get_args(PresetName)) == set(PRESETS), "PresetName of speechdp/options/model.py"
    of_tasks = [name for task in ("acoustic", "synthesis") for name in task_class(task).presets]
    assert sorted(of_tasks) == sorted(PRESETS), "`presets` of the task whose model it is"


def test_runs_of_earlier_versions_can_be_resumed() -> None:
    """They have the fingerprint of these options in run.json."""
    assert TrainOptions().fingerprint() == "897388f258dfd87a", (
        "a new option belongs into _ADDED_LATER of speechdp/options/run.py; another default, also of a "
        "preset, is another run: tell of it in CHANGELOG.md, Runs begun before, and note the new one here"
    )


def test_the_fingerprint_tells_any_two_runs_apart_and_survives_json() -> None:
    options = TrainOptions()
    others = [
        TrainOptions(seed=2),
        TrainOptions(strategy=StrategyChoice("model_averaging:period=4")),
        TrainOptions(ModelOptions(cells=8)),
        TrainOptions(optimizer=OptimizerOptions(weight_decay=0.1)),
        TrainOptions(batch=BatchOptions(chunk_frames=20)),
        TrainOptions(batch=BatchOptions(chunk_frames=20, right_context=2)),
        TrainOptions(alignments=Path("run/alignments/1")),
    ]
    assert len({o.fingerprint() for o in [options, *others]}) == 1 + len(others)
    assert options.fingerprint() == TrainOptions().fingerprint()
    for one in [options, *others]:
        assert json.loads(json.dumps(one.to_json())) == one.to_json()
