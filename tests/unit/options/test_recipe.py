"""Recipes and the global batch: what is given counts, then the recipe, then preset and defaults."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from speechdp.errors import ConfigError
from speechdp.models.presets import PRESETS
from speechdp.options.recipe import RECIPES
from speechdp.options.run import TrainOptions
from speechdp.options.schedule import Schedule
from tests.helpers.options import options_with

RECIPE = "adpsgd-asr"
SQRT_HALF = math.sqrt(0.5)


def resolved(size: int = 1, /, **given: Any) -> TrainOptions:
    return options_with(**given).resolve(size)


def schedule(size: int = 1, /, **given: Any) -> Schedule:
    return resolved(size, **given).schedule()


def test_the_recipe_sets_what_the_paper_has() -> None:
    options = resolved(8, recipe=RECIPE)
    assert (options.optimizer.optimizer, options.optimizer.momentum) == ("sgd", 0.9)
    assert (options.num_epochs, options.plan().batch_size) == (16, 320)
    assert options.schedule() == Schedule(1.0, 10.0, 0.1, 10, SQRT_HALF)


def test_without_a_recipe_everything_is_as_it_was() -> None:
    options = resolved(8)
    assert (options.optimizer.optimizer, options.optimizer.momentum) == ("adam", 0.9)
    assert (options.num_epochs, options.plan().batch_size) == (12, PRESETS["tiny"].batch_size)
    assert options.schedule() == Schedule(0.002, 0.0, 0.0, 8, SQRT_HALF)
    assert TrainOptions().plan() == options.plan()  # nothing depends on the ranks, so none are needed
    assert TrainOptions().schedule() == options.schedule()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"epochs": 32}, Schedule(1.0, 20.0, 0.1, 20)),
        ({"epochs": 12}, Schedule(1.0, 7.5, 0.1, 8)),  # annealing begins with an epoch
        ({"epochs": 1}, Schedule(1.0, 0.625, 0.1, 1)),
        ({"warmup_epochs": 3.0}, Schedule(1.0, 3.0, 0.1, 3)),
        ({"warmup_epochs": 0.0}, Schedule(1.0, 0.0, 0.1, 1)),  # the first epoch is not annealed
        ({"warmup_epochs": 0.0, "anneal_from": 0}, Schedule(1.0, 0.0, 0.1, 0)),
        ({"epochs": 8, "warmup_epochs": 2.5, "anneal_from": 6}, Schedule(1.0, 2.5, 0.1, 6)),
        ({"anneal_from": -1, "anneal_factor": 0.9}, Schedule(1.0, 10.0, 0.1, 10, 0.9)),
        ({"epochs": 30, "anneal_from": -1}, Schedule(1.0, 18.75, 0.1, 20)),
        ({"global_batch": 512}, Schedule(0.2, 10.0, 0.1, 10)),
        ({"global_batch": 512, "base_learning_rate": 0.3}, Schedule(0.6, 10.0, 0.3, 10)),
        ({"global_batch": 512, "base_batch": 64}, Schedule(0.8, 10.0, 0.1, 10)),
        ({"global_batch": 128}, Schedule(0.05, 10.0, 0.05, 10)),  # never falls in the warm-up
        ({"batch_size": 128}, Schedule(0.2, 10.0, 0.1, 10)),  # 4 ranks: 512 segments per step
        ({"learning_rate": 2.0}, Schedule(2.0, 10.0, 0.2, 10)),
        ({"learning_rate": 2.0, "warmup_from": 0.0}, Schedule(2.0, 10.0, 0.0, 10)),
        ({"optimizer": "adam", "learning_rate": 0.01}, Schedule(0.01, 10.0, 0.001, 10)),
    ],
)
def test_what_is_given_wins_over_the_recipe(given: dict[str, Any], expected: Schedule) -> None:
    ours = dataclasses.asdict(schedule(4, recipe=RECIPE, **given))
    assert ours == pytest.approx(dataclasses.asdict(expected))


def test_single_options_stay_as_given() -> None:
    options = resolved(2, recipe=RECIPE, momentum=0.5, batch_size=7, epochs=3, weight_decay=0.25)
    assert (options.optimizer.momentum, options.optimizer.weight_decay) == (0.5, 0.25)
    assert (options.plan().batch_size, options.num_epochs) == (7, 3)


def test_a_global_batch_is_shared_out_with_or_without_a_recipe() -> None:
    assert resolved(5, global_batch=40).plan().batch_size == 8
    assert schedule(5, global_batch=40) == TrainOptions().schedule()  # alone it leaves the learning rate
    scaled = schedule(5, global_batch=40, base_batch=10, base_learning_rate=0.003, optimizer="adam")
    assert (scaled.learning_rate, scaled.warmup_epochs) == (pytest.approx(0.012), 0.0)
    # Batches of the preset on each of 3 ranks: 48 segments per step.
    assert schedule(3, base_batch=16, base_learning_rate=0.1).learning_rate == pytest.approx(0.3)


@pytest.mark.parametrize("given", [{}, {"recipe": RECIPE}, {"recipe": RECIPE, "warmup_epochs": 0.0}])
def test_resolved_options_are_their_own_resolution_on_any_ranks(given: dict[str, Any]) -> None:
    options = resolved(4, **given)
    assert options.resolve(4) == options.resolve(3) == options
    assert options.schedule() == options.resolve(3).schedule()


@pytest.mark.parametrize(
    ("size", "given", "message"),
    [
        (
            3,
            {"global_batch": 16},
            r"--global-batch 16: is not divisible by 3 ranks; .* continue it with 2 ranks",
        ),
        (3, {"recipe": RECIPE}, r"--global-batch 2560 \(of the recipe\): is not divisible by 3 ranks"),
        (1, {"global_batch": 16, "batch_size": 4}, r"--batch-size .* and --global-batch .* exclude"),
        (1, {"global_batch": 0}, "--global-batch 0: must be at least 1 segment"),
        (1, {"base_batch": 16}, "--base-learning-rate and --base-batch need each other"),
        (1, {"base_learning_rate": 0.1}, "--base-learning-rate and --base-batch need each other"),
        (1, {"base_learning_rate": 0.1, "learning_rate": 1.0}, "--base-learning-rate scales .*: give one"),
        (1, {"base_batch": 8, "learning_rate": 1.0}, "--base-batch scales .*: give one"),
        (1, {"base_batch": 0, "base_learning_rate": 0.1}, "--base-batch 0: must be positive"),
        (1, {"base_batch": 8, "base_learning_rate": math.nan}, "--base-learning-rate nan: must be positive"),
        (
            1,
            {"recipe": RECIPE, "optimizer": "adam"},
            "--optimizer adam: the recipe's learning rate is for sgd",
        ),
        (1, {"recipe": RECIPE, "learning_rate": 0.0}, "--learning-rate 0.0: must be positive"),
        (1, {"recipe": "kaldi"}, "--recipe kaldi: choose one of none, adpsgd-asr"),
    ],
)
def test_options_that_cannot_go_together_are_refused(size: int, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(size, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"warmup_from": 0.01}, "--warmup-from 0.01: there is no warm-up; give --warmup-epochs, or leave"),
        ({"warmup_from": 0.0, "warmup_epochs": 0.0}, "--warmup-from 0: there is no warm-up"),
        ({"recipe": RECIPE, "warmup_from": 0.1, "warmup_epochs": 0.0}, "--warmup-from 0.1: there is no"),
    ],
)
def test_a_start_of_no_warm_up_is_refused_where_a_run_begins(given: dict[str, Any], message: str) -> None:
    """Earlier versions have begun such runs, which go on."""
    options = options_with(**given)
    assert resolved(**given).schedule().warmup_epochs == 0
    with pytest.raises(ConfigError, match=message):
        options.check_warmup()
    for fits in {**given, "warmup_epochs": 1.0}, {**given, "warmup_from": None}:
        options_with(**fits).check_warmup()


def test_a_global_batch_needs_the_ranks() -> None:
    for call in (TrainOptions.plan, TrainOptions.batches, TrainOptions.schedule):
        with pytest.raises(AssertionError, match=r"resolve\(size\)"):
            call(options_with(global_batch=16))


def test_json_shows_what_was_given_and_what_it_comes_to() -> None:
    shown = options_with(recipe=RECIPE, epochs=8).to_json(4)
    assert (shown["recipe"], shown["epochs"], shown["optimizer"]["optimizer"]) == (RECIPE, 8, None)
    comes_to = shown["resolved"]
    assert comes_to["batch"]["batch_size"] == 640
    assert comes_to["optimizer"]["learning_rate"] == pytest.approx(1.0)
    assert (comes_to["optimizer"]["optimizer"], comes_to["optimizer"]["warmup_epochs"]) == ("sgd", 5.0)


def test_the_fingerprint_tells_recipes_and_their_scales_apart() -> None:
    others = [
        TrainOptions(),
        TrainOptions(recipe="adpsgd-asr"),
        options_with(recipe=RECIPE, global_batch=512),
        options_with(recipe=RECIPE, base_batch=128),
        options_with(recipe=RECIPE, epochs=16, warmup_epochs=9.0),
        options_with(global_batch=16),
    ]
    assert len({o.fingerprint() for o in others}) == len(others)


def test_a_recipe_that_has_changed_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = TrainOptions(recipe="adpsgd-asr").fingerprint()
    changed = dataclasses.replace(RECIPES[RECIPE], base_learning_rate=0.2)
    monkeypatch.setitem(RECIPES, RECIPE, changed)
    assert TrainOptions(recipe="adpsgd-asr").fingerprint() != before
