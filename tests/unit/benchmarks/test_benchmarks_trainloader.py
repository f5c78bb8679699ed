"""The benchmark of the poster's trainloader: shares of time from timelines, command line, picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.data.trainloader import COMPUTE, WAIT, medians, outcome, over_time, parse, share
from benchmarks.data.trainloader_plot import Panel, draw


def _step(number: int, wall: float, *spans: tuple[str, float, float]) -> dict[str, Any]:
    return {
        "step": number,
        "epoch": 0,
        "t": 0.0,
        "wall": wall,
        "frames": 9,
        "spans": [list(s) for s in spans],
    }


#: Waits 0.5 s, computes 1 s in two pieces; then computes all of 0.5 s.
STEPS = [
    _step(1, 1.5, ("data_wait", 0.0, 0.5), ("forward", 0.5, 0.25), ("backward", 0.75, 0.75)),
    _step(2, 0.5, ("update", 0.0, 0.5)),
]


def test_time_is_put_into_bins_across_steps() -> None:
    np.testing.assert_allclose(over_time(STEPS, COMPUTE, 0.4), [0, 0.75, 1, 1, 1])
    np.testing.assert_allclose(over_time(STEPS, WAIT, 0.4), [1, 0.25, 0, 0, 0])
    assert len(over_time(STEPS, COMPUTE, 0.3)) == 6  # the last, incomplete bin is left out


def test_shares_of_step_time() -> None:
    assert share(STEPS, COMPUTE) == pytest.approx(0.75)
    assert share(STEPS, WAIT) == pytest.approx(0.25)


def _write_timeline(run_dir: Path, rank: int, steps: list[dict[str, Any]]) -> None:
    path = run_dir / "timeline" / f"rank-{rank:04d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_ranks_are_averaged_and_the_first_steps_left_out(tmp_path: Path) -> None:
    warm = [_step(n, 100.0, ("data_wait", 0.0, 100.0)) for n in range(4)]
    idle = [_step(4, 1.0), _step(5, 1.0)]
    busy = [_step(4, 1.0, ("forward", 0.0, 1.0)), _step(5, 2.0, ("forward", 0.0, 2.0))]
    _write_timeline(tmp_path, 0, warm + idle)
    _write_timeline(tmp_path, 1, warm + busy)
    found = outcome("pooled", tmp_path, 0.5)
    assert found.compute == pytest.approx(0.5)
    assert found.wait == 0.0
    np.testing.assert_allclose(found.over_time, [0.5] * 4)  # as far as both have steps


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    _write_timeline(tmp_path, 0, STEPS)
    with pytest.raises(SystemExit, match="no steps"):
        outcome("pooled", tmp_path, 0.5)


def test_medians_over_rounds(tmp_path: Path) -> None:
    runs = []
    for number, wait_s in enumerate((0.1, 0.4, 0.2)):
        run_dir = tmp_path / str(number)
        _write_timeline(run_dir, 0, [_step(n, 1.0, ("data_wait", 0.0, wait_s)) for n in range(9)])
        runs.append(outcome("laplace", run_dir, 1.0))
    assert medians({"laplace": runs})["laplace"].wait == pytest.approx(0.2)


def test_what_stands_behind_two_dashes_goes_to_train() -> None:
    given = parse(["DATA", "--orders", "pooled,laplace", "--", "--layers", "1"])
    assert (given.data, given.orders, given.options) == (
        Path("DATA"),
        ["pooled", "laplace"],
        ["--layers", "1"],
    )
    assert "--speed-perturb" in parse([]).options


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    shares = np.linspace(0, 1, 20)
    draw(tmp_path / "new" / "p.png", [Panel("blocking-sort", shares, 0.5), Panel("pooled", shares, 0.9)], 0.2)
    assert (tmp_path / "new" / "p.png").stat().st_size > 5_000
