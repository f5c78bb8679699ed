"""What the simulation benchmark measures and counts, without ranks."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.comm.namespaces import Nodes
from benchmarks.strategies import simulate as bench
from benchmarks.strategies.sleeping_ranks import Playback, Recording
from speechdp.parallel.registry import StrategyChoice
from speechdp.simulation.exchanges import known_strategies

PERIODS = (1, 4, 16, 64)
RECORDING = Recording(
    tuple(100.0 + number % 7 for number in range(400)),
    tuple(0.01 * (100 + number % 7) * (3.0 if number % 20 == 0 else 1.0) for number in range(400)),
)


def _compared(predicted: float, measured: float, ranks: int = 2) -> bench.Compared:
    cell = bench.Cell("bmuf:period=4", 4, ranks)
    return bench.Compared(cell, predicted, 0.95 * predicted, 1.05 * predicted, measured)


def test_every_known_strategy_is_measured_and_can_be_parsed() -> None:
    cells = bench.cells((2, 16), PERIODS, 1)
    missing = set(known_strategies()) - {cell.name for cell in cells}
    assert not missing, f"a line in the strategies of benchmarks/strategies/simulate.py for {missing}"
    assert all(StrategyChoice(cell.strategy).parsed for cell in cells)
    assert len({cell.key for cell in cells}) == len(cells)


@pytest.mark.parametrize("stride", [2, 4])
def test_some_cells_have_every_period_and_number_of_ranks(stride: int) -> None:
    cells = bench.cells((2, 4, 8, 16), PERIODS, stride)
    assert {cell.name for cell in cells} == set(known_strategies())
    assert {cell.ranks for cell in cells} == {2, 4, 8, 16}
    assert {cell.period for cell in cells} == set(PERIODS)
    assert len(cells) == pytest.approx(len(bench.cells((2, 4, 8, 16), PERIODS, 1)) / stride, abs=2)


@pytest.mark.parametrize(
    ("period", "step_s", "steps"),
    [(1, 0.1, (8, 100)), (1, 5.0, (8, 24)), (16, 0.1, (16, 96)), (64, 1.0, (64, 192))],
)
def test_whole_periods_count(period: int, step_s: float, steps: tuple[int, int]) -> None:
    assert bench.num_steps(period, step_s, 10.0) == steps


def test_a_rank_that_waits_for_nobody_lasts_until_the_others_have_counted() -> None:
    warm_up, steps = bench.num_steps(1, 0.4, 10.0, own_s=0.1)
    assert (warm_up + steps) * 0.1 >= warm_up * 0.4 + 10.0


def test_the_rate_is_of_the_time_in_which_all_ranks_count() -> None:
    quick = {"frames": [10.0] * 20, "ends": [float(n + 1) for n in range(20)]}
    slow = {"frames": [10.0] * 10, "ends": [2.0 * (n + 1) for n in range(10)]}
    assert bench.rate_of([quick, slow], 4) == pytest.approx(10 + 5)


def test_errors_are_relative_and_both_ways() -> None:
    compared = [_compared(*rates) for rates in ((100, 100), (110, 100), (80, 100), (104, 100))]
    assert bench.summary(compared) == {"median_error": 0.07, "p90_error": 0.17, "coverage": 0.5}


def test_the_table_and_the_file_have_every_strategy_and_cell(tmp_path: Path) -> None:
    compared = [_compared(110, 100), _compared(100, 100, 16)]
    lines = bench.table(compared).splitlines()
    assert lines[1].split() == ["bmuf", "10.0", "(+10.0)", "0.0", "(+0.0)"]
    bench.write_cells(compared, tmp_path / "cells.csv")
    rows = list(csv.DictReader((tmp_path / "cells.csv").open()))
    assert [(row["ranks"], row["error"]) for row in rows] == [("2", "+0.1000"), ("16", "+0.0000")]


def test_steps_are_played_back_alike_in_frames_and_apart_in_time() -> None:
    first, again, other = (
        [playback.next_step() for _ in range(2000)]
        for playback in (Playback(RECORDING, 0.06, rank, 5) for rank in (0, 0, 1))
    )
    assert first == again
    assert [frames for frames, _ in first] == [frames for frames, _ in other]
    assert [seconds for _, seconds in first] != [seconds for _, seconds in other]
    assert np.mean([seconds for _, seconds in first]) == pytest.approx(0.06, rel=0.1)


def test_ranks_fill_one_node_after_another() -> None:
    command = Nodes(4).mpirun(["true"], ranks=4, ranks_per_node=2)[2]
    assert " -n 4 --host n1:2,n2:2 " in command
