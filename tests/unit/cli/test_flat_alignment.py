"""A flat alignment is told of where the user can do something about it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from speechdp.cli.inspect import describe
from speechdp.cli.main import run
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.dataset import FLAT, Dataset
from speechdp.options.prepare import PrepareOptions
from speechdp.options.targets import warn_of_spread_targets
from tests.helpers.corpora import digit_folder, no_progress
from tests.helpers.options import options_with
from tests.helpers.tiny_data import write_tiny_data


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


@pytest.mark.parametrize("internal", [(), ("--advise=no",)])
def test_quickstart_which_aligns_by_itself_is_not_advised_to(
    internal: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, data = digit_folder(tmp_path / "in"), tmp_path / "data"
    assert run(["prepare", str(source), str(data), "--workers", "1", *internal]) == 0
    assert ("--flat-start" in capsys.readouterr().out) == (not internal)


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
    tmp_path: Path, given: dict[str, object], trusts: bool
) -> None:
    options = options_with(**given)
    assert options.trusts_alignment == trusts
    dataset, opened = write_tiny_data(tmp_path / "data"), []

    def open_data() -> Dataset:
        opened.append(dataset.path)
        return dataset

    for alignment, is_spread in ((FLAT, True), ("exact", False)):
        dataset.alignment = alignment
        said: list[str] = []
        warn_of_spread_targets(options, open_data, said.append)
        assert ["only spread each transcript" in line for line in said] == [True] * (trusts and is_spread)
        assert all(line.startswith(f"the targets in {dataset.path} only") for line in said)
    assert len(opened) == 2 * trusts  # it is not opened where nothing can be said
