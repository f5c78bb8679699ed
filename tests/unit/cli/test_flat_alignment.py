"""A flat alignment is told of where the user can do something about it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from speechdp.cli.inspect import describe
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.dataset import FLAT
from speechdp.options.prepare import PrepareOptions
from tests.helpers.corpora import digit_folder, no_progress
from tests.helpers.options import options_with


def test_prepare_and_inspect_name_the_next_step(tmp_path: Path) -> None:
    options = PrepareOptions((digit_folder(tmp_path / "in"), tmp_path / "data"), workers=1)
    dataset = prepare(options, no_progress).dataset
    assert dataset.alignment == FLAT
    for alignment, is_named in ((FLAT, True), ("exact", False)):
        dataset.alignment = alignment
        out = io.StringIO()
        Console(file=out, width=200).print(describe(dataset))
        assert (
            "by train --flat-start (Gaussian mixtures) or train --realign 1" in out.getvalue()
        ) == is_named


@pytest.mark.parametrize(
    ("given", "trusts"),
    [
        ({}, True),
        ({"flat_start": True}, False),
        ({"realign": 1}, False),
        ({"alignments": Path("run/alignments/0")}, False),
        ({"criterion": "full-sum"}, False),
        ({"task": "synthesis"}, False),
    ],
)
def test_train_says_so_only_where_the_targets_in_data_are_learnt(
    given: dict[str, object], trusts: bool
) -> None:
    assert options_with(**given).trusts_alignment == trusts
