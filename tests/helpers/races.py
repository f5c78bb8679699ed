"""Races with made-up figures, in the format of docs/run-directory.md."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from speechdp.experiments.race.plan import RacePlan, RaceSetting, order_of_rounds
from speechdp.experiments.race.record import RaceRecord, Turn, race_path, write_race
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.results import ONE_RANK

_STEPS, _FRAMES = 32, 3_200


def made_up_race(
    speeds: Mapping[str, float],
    *,
    ranks: int = 2,
    rounds: int = 12,
    noise: float = 0.01,
    strategies: Mapping[str, str] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> RaceRecord:
    """Return a race in which the machine slows down from round to round, up to 3 times.

    Args:
        speeds: relative speed of each setting.
        noise: relative standard deviation of a turn's time.
        strategies: strategies of settings whose name is not their strategy; `one-rank` trains alone.
    """
    drawn = random.Random(1)
    settings = []
    for name in speeds:
        given = (strategies or {}).get(name, name if name in ("gradient_averaging",) else "model_averaging")
        choice = StrategyChoice("gradient_averaging" if name == ONE_RANK else given)
        settings.append(RaceSetting(name, choice, alone=name == ONE_RANK))
    plan = RacePlan(ranks, rounds, _STEPS, 1, tuple(settings), dict(left_out or {}), {"data": "9f2c"})
    turns = []
    for number, order in enumerate(order_of_rounds(len(settings), rounds, 1)):
        slow = 1 + 2 * number / rounds
        for setting in (settings[place] for place in order):
            seconds = slow * abs(drawn.gauss(1, noise)) / speeds[setting.name]
            sharing = [True] + [not setting.alone] * (ranks - 1)
            turns.append(
                Turn(
                    number,
                    setting.name,
                    _STEPS,
                    tuple(_FRAMES * ranks // sum(sharing) if takes_part else 0 for takes_part in sharing),
                    tuple(seconds if takes_part else 0.0 for takes_part in sharing),
                )
            )
    load = tuple({"own": 0.9, "host": 0.9 * ranks + 0.3, "stolen": 0.0} for _ in range(ranks))
    return RaceRecord(plan, tuple(turns), ("node-a",) * ranks, load, "2026-11-23T15:42:10+00:00", 61.5)


def write_made_up_race(out: Path, race: RaceRecord) -> Path:
    """Write OUT/race/ranks-N.json; return its path."""
    path = race_path(out, race.plan.ranks)
    write_race(path, race)
    return path
