"""The races of an experiment as reports show them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from speechdp.counting import counted
from speechdp.errors import RunError
from speechdp.experiments.race.record import FOLDER, RaceRecord, read_race
from speechdp.report.kit.formatting import capital
from speechdp.report.kit.outside import load_text
from speechdp.report.runs.raced import LEAST_ROUNDS, RacedSpeed


@dataclass(frozen=True)
class ShownRaces:
    """The races of an experiment.

    Attributes:
        races: by the number of ranks.
        problems: one sentence for each unreadable record.
    """

    races: Mapping[int, RaceRecord] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def speeds(self, ranks: int | None) -> dict[str, RacedSpeed]:
        """Return the speeds of the settings on `ranks` ranks by name; empty if there was no race."""
        race = self.races.get(ranks or 0)
        return {} if race is None else race.speeds()

    def compares(self, ranks: int | None, names: Collection[str]) -> bool:
        """Return whether the race on `ranks` ranks compares these: two of them raced, or the only one did."""
        raced = {*names} & {*self.speeds(ranks)}
        return len(raced) >= min(2, len(names)) > 0

    def cautions(self, compared: Mapping[int, Mapping[str, str]]) -> tuple[str, ...]:
        """Return cautions about the races, one sentence each.

        Args:
            compared: labels of the compared settings, by number of ranks and by name.
        """
        notes = list(self.problems)
        for ranks, labels in sorted(compared.items()):
            if (race := self.races.get(ranks)) is None:
                continue
            where = f"the race on {counted(ranks, 'rank')}"
            compares = self.compares(ranks, labels)
            notes += _without(race, where, labels, compares=compares)
            if compares and race.plan.rounds < LEAST_ROUNDS:
                notes.append(
                    f"{where.capitalize()} had {counted(race.plan.rounds, 'round')}, too few for intervals "
                    f"({LEAST_ROUNDS} are needed): which differences are chance is not known."
                )
        return tuple(notes)

    def notes(self, compared: Mapping[int, Collection[str]]) -> tuple[str, ...]:
        """Return how each race with shown speeds was held, one sentence each.

        Args:
            compared: names of the settings, by number of ranks.
        """
        return tuple(
            _described(race)
            for ranks, race in sorted(self.races.items())
            if self.compares(ranks, compared.get(ranks, ()))
        )


def read_races(out: Path) -> ShownRaces:
    """Read the races of an experiment; unreadable ones are listed among the problems."""
    races, problems = {}, []
    for path in sorted((out / FOLDER).glob("ranks-*.json")):
        try:
            race = read_race(path)
        except RunError as error:
            problems.append(f"{error}; until then speeds are those of the runs, which followed one another.")
            continue
        races[race.plan.ranks] = race
    return ShownRaces(races, tuple(problems))


def _without(race: RaceRecord, where: str, labels: Mapping[str, str], *, compares: bool) -> list[str]:
    """Return which settings a race cannot compare with the others, why, and what is shown as their speed.

    Args:
        compares: the race compares the others.
    """
    so = "So speeds are those of the runs, which followed one another."
    if compares:
        so = "So its speed is that of its own run, and is compared with none of those that raced."
    raced = {setting.name for setting in race.plan.settings}
    reasons = {name: race.plan.left_out.get(name, "it was added since") for name in labels}
    return [
        f"{capital(labels[name])} took no part in {where}: {reason}. {so}"
        for name, reason in reasons.items()
        if name not in raced
    ]


def _described(race: RaceRecord) -> str:
    steps = [turn.steps for turn in race.turns if turn.round]
    turns = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    text = (
        f"Race on {counted(race.plan.ranks, 'rank')}, begun {race.begun[:16].replace('T', ' ')} UTC: "
        f"{counted(race.plan.rounds, 'round')}, in each of which every setting had a turn of {turns} steps"
        f"{', a start of the script' if race.plan.own_starts else ''}."
    )
    if race.outside.is_notable:
        text += f" Load from outside meanwhile: {load_text(race.outside)}."
    return text
