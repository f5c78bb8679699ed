"""The benchmark of slow ranks: order of runs, what is compared with what, its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.strategies.straggler import Case, cases_in_order, outcomes, parse, sum_of_speeds
from benchmarks.strategies.straggler_plot import Bar, draw
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.results import RunResult
from tests.helpers.runs import MadeUpRun, write_run


def _run(folder: Path, case: Case, frames_per_s: float) -> RunResult:
    return read_run(write_run(MadeUpRun(case.folder, frames_per_s=frames_per_s), folder))


def test_every_other_seed_has_the_opposite_order() -> None:
    cases = cases_in_order(("a", "b"), (2, 5), (1, 2))
    first = [(case.strategy, case.factor) for case in cases if case.seed == 1]
    assert first == [("a", 1), ("a", 2), ("a", 5), ("b", 1), ("b", 2), ("b", 5)]
    assert [(case.strategy, case.factor) for case in cases[6:]] == first[::-1]
    assert len({case.folder for case in cases}) == 12


@pytest.mark.parametrize(("ranks", "factor", "share"), [(2, 2, 0.75), (2, 5, 0.6), (4, 5, 0.8), (1, 5, 0.2)])
def test_the_sum_of_the_ranks_own_speeds(ranks: int, factor: int, share: float) -> None:
    assert sum_of_speeds(ranks, factor) == pytest.approx(share)


def test_a_slowed_run_is_compared_with_its_own_seed_unslowed(tmp_path: Path) -> None:
    runs = {}
    for seed, plain, slowed in ((1, 10_000.0, 6_000.0), (2, 20_000.0, 8_000.0), (3, 10_000.0, 5_000.0)):
        for factor, rate in ((1, plain), (5, slowed)):
            case = Case("ad_psgd", factor, seed)
            runs[case] = _run(tmp_path, case, rate)
    del runs[Case("ad_psgd", 1, 3)]  # it failed: its slowed run is compared with nothing
    (found,) = outcomes(runs, ranks=2)
    assert (found.strategy, found.factor) == ("ad_psgd", 5)
    assert found.of_own == pytest.approx(0.5)
    assert found.of_sum == pytest.approx(0.5 / 0.6)
    assert found.frames_per_s == pytest.approx(7_000)
    # Both learn the same from as many frames, so time goes as throughput does.
    assert found.target_of_own == pytest.approx(0.5)


def test_what_stands_behind_two_dashes_goes_to_train() -> None:
    given = parse(["DATA", "--ranks", "4", "--steps", "9", "--", "--layers", "1", "--backend", "mpi"])
    assert (given.data, given.ranks) == (Path("DATA"), 4)
    assert given.options == ["--layers", "1", "--backend", "mpi"]
    assert given.length[-2:] == ["--max-steps", "9"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "p.png", [Bar("a", 2, 0.7), Bar("a", 5, 0.5), Bar("b", 2, 1.3)], {2: 0.75, 5: 0.6}, 2)
    assert (tmp_path / "p.png").stat().st_size > 5_000
