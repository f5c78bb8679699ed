"""Hold a race of a user's script; every turn starts it anew, because one start has one strategy."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from speechdp.comm.startup.folder_owner import owner_of
from speechdp.counting import counted
from speechdp.experiments.race.plan import CHANGES, RacePlan, RaceSetting, order_of_rounds
from speechdp.experiments.race.record import (
    FOLDER,
    RaceRecord,
    Turn,
    begun_path,
    find_whole_race,
    is_of,
    race_path,
    write_race,
)
from speechdp.experiments.record import delete_file
from speechdp.ownership.overwrite import RUN, empty
from speechdp.parallel.run_files import utc_now
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.results import HostLoad
from speechdp.report.runs.timing_file import DEFAULT_WARMUP_STEPS, read_timing

#: Trains a setting in a folder from its beginning up to a step; returns None, or the cause of failure.
TrainSome = Callable[[RaceSetting, Path, int], str | None]
#: Keys of a host's load during a turn, as in records.
_LOADS = ("own", "host", "stolen")


@dataclasses.dataclass(frozen=True)
class ScriptTurns:
    """The turns of a script's race.

    Attributes:
        steps: steps of a turn by the setting's name, not counting the warm-up.
        train: starts the script.
    """

    steps: Mapping[str, int]
    train: TrainSome

    def last_step(self, name: str) -> int:
        """Return the step at which a turn of a setting ends."""
        return DEFAULT_WARMUP_STEPS + self.steps[name]


class ScriptRace:
    """A race of a script, held turn by turn; complete rounds are kept.

    Args:
        out: folder of the experiment.
        plan: plan with `own_starts`.
        command: the user's command, for messages.
        print_line: prints a line of progress.

    Attributes:
        plan: as given.
        place: name of the race in lines of progress.
    """

    def __init__(
        self, out: Path, plan: RacePlan, turns: ScriptTurns, command: str, print_line: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self._out, self._of, self._command, self._print_line = out, turns, command, print_line
        self.place = f"race on {counted(plan.ranks, 'rank')}"
        self._left_out = dict(plan.left_out)
        self._turns: list[Turn] = []
        self._loads: list[tuple[float, Sequence[Mapping[str, float]]]] = []
        self._hosts: tuple[str, ...] = ("",) * plan.ranks
        self._begun, self._before_s, self._clock_s = utc_now(), 0.0, time.monotonic()

    @property
    def rounds_held(self) -> int:
        """Number of rounds held before, whether or not the race was finished."""
        held = _longest(self._read(lambda _: None))
        return 0 if held is None else held.plan.rounds

    def hold(self) -> RaceRecord | str:
        """Hold the remaining rounds and record the race; return its record, or the cause of failure.

        Raises:
            JobStopped, RunError: raised by the training; complete rounds are kept.
        """
        over, begun = self._read(self._print_line)
        held = _longest((over, begun))
        if held is not None and held.plan.rounds >= self.plan.rounds:
            if held is not over:  # it was begun with more rounds, and has as many as are requested now
                rounds = counted(held.plan.rounds, "round")
                self._print_line(f"{self.place}: {rounds} were done before and are enough; none is added")
                self._finish(held)
            return held
        if held is not None:
            self._take_up(held)
        for number, order in enumerate(self._order, start=1):
            if held is not None and number <= held.plan.rounds:
                continue
            self._print_line(f"{self.place}: round {number} of {self.plan.rounds}")
            message = self._hold_round(number, order)
            if message is not None:
                return message
            if not self._record(number).plan.is_race:
                break
            write_race(begun_path(self._out, self.plan.ranks), self._record(number))
        record = self._record(self.plan.rounds)
        self._finish(record)
        return record

    def _finish(self, record: RaceRecord) -> None:
        """Record the race as finished.  Raises RunError (disk)."""
        write_race(race_path(self._out, self.plan.ranks), record)
        delete_file(begun_path(self._out, self.plan.ranks))

    def record_none(self) -> None:
        """Record that fewer than two settings can take part, and why.  Raises RunError (disk)."""
        write_race(race_path(self._out, self.plan.ranks), self._record(self.plan.rounds))

    def _read(self, print_line: Callable[[str], None]) -> tuple[RaceRecord | None, RaceRecord | None]:
        """Return the finished and the unfinished race of these settings; None: there is none."""
        over, begun = (of(self._out, self.plan.ranks) for of in (race_path, begun_path))
        return self._read_from(over, print_line), self._read_from(begun, print_line)

    def _read_from(self, path: Path, print_line: Callable[[str], None]) -> RaceRecord | None:
        race = find_whole_race(path, lambda words: print_line(f"{self.place}: {words}"))
        if race is None or not is_of(race, dataclasses.replace(self.plan, rounds=race.plan.rounds)):
            return None
        return race

    def _take_up(self, held: RaceRecord) -> None:
        """Start with the rounds of an earlier command."""
        self._left_out |= held.plan.left_out
        names = {setting.name for setting in self.plan.settings}
        self._turns = [turn for turn in held.turns if turn.setting in names]
        self._loads = [(_seconds(held.turns), held.load)]
        self._hosts, self._begun, self._before_s = held.hosts, held.begun, held.wall_s

    @property
    def _order(self) -> list[list[RaceSetting]]:
        settings = self.plan.settings
        orders = order_of_rounds(len(settings), self.plan.rounds, self.plan.seed)[1:]
        return [[settings[number] for number in order] for order in orders]

    def _hold_round(self, number: int, order: Sequence[RaceSetting]) -> str | None:
        """Give each setting its turn until fewer than two are left.

        Returns:
            None, or the cause of failure if fewer than two are left because one failed.
        """
        for setting in order:
            if setting.name in self._left_out:
                continue
            turn = self._take_turn(number, setting)
            if isinstance(turn, Turn):
                self._turns.append(turn)
                continue
            has_failed = turn != CHANGES
            self._left_out[setting.name] = f"it failed: {turn}" if has_failed else turn
            what = "failed and is" if has_failed else "is"
            self._print_line(f"{self.place}: {setting.name} {what} left out: {turn}")
            if not self.plan.without(self._left_out).is_race:
                return f"{setting.name}: {turn}; fewer than two settings are left" if has_failed else None
        return None

    def _take_turn(self, number: int, setting: RaceSetting) -> Turn | str:
        """Train some steps in a temporary folder; return the turn, or why the setting is left out."""
        name = f"{'one-rank-' if setting.alone else ''}{setting.strategy.file_name}"
        folder = (self._out / FOLDER / f"ranks-{self.plan.ranks}" / name).absolute()
        if folder.exists():  # steps left by an earlier start would not be timed
            with owner_of(folder, self._command, self._print_line) as owner:
                empty(owner, RUN)
        try:
            message = self._of.train(setting, folder, self._of.last_step(setting.name))
            return message or self._turn_in(folder, number, setting)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # checkpoints would accumulate

    def _turn_in(self, folder: Path, number: int, setting: RaceSetting) -> Turn | str:
        """Return the measurements of a turn, and keep its hosts and their load; or why there are none."""
        if not (folder / "timing.json").is_file():
            return "it left no timing.json (is OUT a shared folder?)"
        if read_run(folder).changes_over_time:  # only the run of a script's own strategy says so
            return CHANGES
        problems: list[str] = []
        timing = read_timing(folder, problems)
        ranks = [] if timing is None else sorted(timing.ranks, key=lambda rank: rank.rank)
        wanted = 1 if setting.alone else self.plan.ranks
        if len(ranks) != wanted or not any(rank.frames for rank in ranks) or problems:
            return f"it left a timing.json that does not tell {counted(wanted, 'rank')}"
        idle = self.plan.ranks - wanted
        turn = Turn(
            number,
            setting.name,
            max(rank.steps for rank in ranks),
            (*(rank.frames for rank in ranks), *[0] * idle),
            (*(rank.training_s for rank in ranks), *[0.0] * idle),
        )
        if not setting.alone:
            self._hosts = tuple(rank.host for rank in ranks)
            self._loads.append((max(turn.seconds), [_load_of(rank.load) for rank in ranks]))
        return turn

    def _record(self, rounds: int) -> RaceRecord:
        plan = dataclasses.replace(self.plan, rounds=rounds).without(self._left_out)
        names = {setting.name for setting in plan.settings if plan.is_race}
        return RaceRecord(
            plan,
            tuple(turn for turn in self._turns if turn.setting in names),
            self._hosts,
            tuple(
                _mean_load([(weight, of[rank]) for weight, of in self._loads]) for rank in range(plan.ranks)
            ),
            self._begun,
            self._before_s + time.monotonic() - self._clock_s,
        )


def _longest(races: Iterable[RaceRecord | None]) -> RaceRecord | None:
    """Return the (first) race with the most rounds; None: there is none."""
    found = (race for race in races if race is not None)
    return max(found, key=lambda race: race.plan.rounds, default=None)


def _seconds(turns: Sequence[Turn]) -> float:
    return sum(max(turn.seconds) for turn in turns)


def _load_of(load: HostLoad | None) -> dict[str, float]:
    return {} if load is None else {name: getattr(load, name) for name in _LOADS}


def _mean_load(parts: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the mean of a host's loads, weighted by their seconds; empty if none was measured."""
    known = [(weight, load) for weight, load in parts if load]
    total = sum(weight for weight, _ in known)
    if not total:
        return {}
    return {name: round(sum(w * load[name] for w, load in known) / total, 3) for name in _LOADS}
