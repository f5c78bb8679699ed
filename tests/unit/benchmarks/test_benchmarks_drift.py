"""The benchmark of a machine that others use: what is compared with the quiet sweep, and the disturbance."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.strategies import drift
from benchmarks.strategies.drift import (
    Speeds,
    Verdict,
    disturbed,
    judge,
    pairs_apart,
    parse,
    read_speeds,
    show,
    summary,
)
from speechdp.report.runs.raced import RacedSpeed
from tests.helpers.races import made_up_race, write_made_up_race
from tests.helpers.runs import realistic_sweep, write_sweep

#: What rounds differ from the median by.
GAPS = [place / 500 - 0.011 for place in range(12)]
RATIOS = {"gradient_averaging": 1.0, "slow": 0.9, "fast": 1.3, "as fast": 1.302}


def speeds(of_runs: dict[str, float] | None = None, **changes: float) -> Speeds:
    ratios = {**RATIOS, **{name.replace("_fast", " fast"): ratio for name, ratio in changes.items()}}
    raced = {
        name: RacedSpeed(
            tuple(ratio + gap for gap in random.Random(name).sample(GAPS, 12)), "gradient_averaging"
        )
        for name, ratio in ratios.items()
    }
    return Speeds(raced, of_runs or ratios)


def test_only_what_the_quiet_race_tells_apart_is_ranked() -> None:
    pairs = pairs_apart(speeds().raced)
    assert ("fast", "as fast") not in pairs and ("as fast", "fast") not in pairs
    assert ("slow", "gradient_averaging") in pairs and ("gradient_averaging", "fast") in pairs
    assert len(pairs) == 5


def test_a_try_is_judged_by_its_race_and_by_its_runs() -> None:
    quiet = speeds()
    assert judge(quiet, speeds(as_fast=1.29)).race_is_right
    verdict = judge(quiet, speeds(of_runs={**RATIOS, "slow": 1.4}, fast=1.302))
    assert verdict == Verdict(True, False, {"slow": True, "fast": True, "as fast": True})
    verdict = judge(quiet, speeds(slow=1.2))
    assert not verdict.race_is_right and not verdict.covered["slow"] and verdict.covered["fast"]


def test_the_last_line_counts_tries_and_cells() -> None:
    verdicts = [Verdict(True, False, {"a": True, "b": False}), Verdict(False, False, {"a": True, "b": True})]
    assert summary(verdicts) == {"same_ranking": 0.5, "coverage": 0.75, "same_ranking_of_runs": 0.0}


def test_speeds_of_a_sweep_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write_sweep(tmp_path / "sweep", realistic_sweep())
    with pytest.raises(SystemExit, match="holds no race on 2 ranks"):
        read_speeds(out, 2)
    write_made_up_race(
        out, made_up_race({"one-rank": 0.7, "gradient_averaging": 1.0, "model_averaging-4": 1.2})
    )
    found = read_speeds(out, 2)
    assert set(found.raced) == set(found.of_runs) == {"gradient_averaging", "model_averaging-4"}
    assert found.of_runs["model_averaging-4"] == pytest.approx(19_800 / 17_900, rel=0.01)
    show(found, [(found, judge(found, found))])
    assert "yes / yes" in capsys.readouterr().out


def test_busy_loops_come_and_go_and_end_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[Any]] = []
    popen = subprocess.Popen

    def start(arguments: list[str]) -> subprocess.Popen[Any]:
        assert "while True" in arguments[-1]
        started.append(popen(["sleep", "600"]))
        return started[-1]

    monkeypatch.setattr(drift.subprocess, "Popen", start)
    monkeypatch.setattr(drift, "_SHORTEST_S", 0.0)
    monkeypatch.setattr(drift, "_LONGEST_S", 0.001)
    with disturbed(2, seed=1):
        while len(started) < 6:
            pass
    assert all(process.poll() is not None for process in started)


def test_what_stands_behind_two_dashes_goes_to_sweep() -> None:
    given = parse(["--tries", "1", "--rounds", "6", "--", "--layers", "1"])
    assert (given.tries, given.rounds, given.options) == (1, 6, ["--layers", "1"])
    with pytest.raises(SystemExit):
        parse(["--rounds", "5"])
