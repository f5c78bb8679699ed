"""OUT/race/ranks-N.json: a race's settings, their order, and every rank's times (docs/run-directory.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speechdp.errors import RunError
from speechdp.experiments.checked import checked_fields
from speechdp.experiments.race.plan import RacePlan, RaceSetting
from speechdp.experiments.record import check_format, write_record_file
from speechdp.files import record_cannot_be_read
from speechdp.json_input import parse_json
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.raced import RacedSpeed
from speechdp.timing.load import OutsideLoad

FOLDER = "race"
_KIND, _FAILURE = "race", "failed-setting"
#: Bounds on the frames and seconds of a turn; ratios of values beyond them might not be finite.
_MOST, _SHORTEST_S = 1e15, 1e-9


@dataclass(frozen=True)
class Turn:
    """One turn of a setting.

    Attributes:
        round: number of the round; 0 is the warm-up, which does not count.
        setting: name of the setting.
        steps: steps of each rank; for asynchronous settings, as if all ranks were equally fast.
        frames: frames that each rank trained on.
        seconds: time of each rank, s, from a moment at which all were ready.
    """

    round: int
    setting: str
    steps: int
    frames: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def frames_per_s(self) -> float:
        """Frames of all ranks divided by the slowest rank's time."""
        return sum(self.frames) / max(self.seconds)


@dataclass(frozen=True)
class RaceRecord:
    """A finished race.

    Attributes:
        turns: turns in the order in which they were run.
        hosts: host of each rank.
        load: load of each rank's host during the rounds that count, as in timing.json (docs/timing.md).
        begun: start time, ISO 8601.
        wall_s: total time, s.
    """

    plan: RacePlan
    turns: tuple[Turn, ...]
    hosts: tuple[str, ...]
    load: tuple[Mapping[str, float], ...]
    begun: str
    wall_s: float

    def speeds(self) -> dict[str, RacedSpeed]:
        """Return the speed of each setting by name; empty if too few could take part."""
        if not self.plan.is_race:
            return {}
        rates: dict[str, dict[int, float]] = {}
        for turn in self.turns:
            if turn.round > 0:
                rates.setdefault(turn.setting, {})[turn.round] = turn.frames_per_s
        baseline, rounds = self.plan.baseline, range(1, self.plan.rounds + 1)
        return {
            name: RacedSpeed(tuple(of[number] / rates[baseline][number] for number in rounds), baseline)
            for name, of in rates.items()
        }

    def frames_per_s(self, name: str) -> float:
        """Return a setting's throughput over all its rounds, not corrected for the machine's load."""
        counted = [s for s in self.turns if s.setting == name and s.round > 0]
        return sum(sum(s.frames) for s in counted) / sum(max(s.seconds) for s in counted)

    @property
    def outside(self) -> OutsideLoad:
        """Cores not available to the race, on the host where it lacked most; empty if not measured."""
        found = [OutsideLoad(0.0, 0.0)]
        for host in dict.fromkeys(self.hosts):
            here = [load for load, where in zip(self.load, self.hosts, strict=True) if where == host and load]
            if here:
                own = (load["own"] for load in here)
                found.append(OutsideLoad.of(own, here[0]["host"], here[0]["stolen"]))
        return max(found, key=lambda load: load.total)


@dataclass(frozen=True)
class FailedSetting:
    """A setting whose failure ended a race.

    Attributes:
        why: message of the first error.
    """

    name: str
    why: str


def race_path(out: Path, ranks: int) -> Path:
    """Return the path of the record of the race on `ranks` ranks."""
    return out / FOLDER / f"ranks-{ranks}.json"


def begun_path(out: Path, ranks: int) -> Path:
    """Return the path of the record of a script's unfinished race, with its complete rounds."""
    return out / FOLDER / f"begun-{ranks}.json"


def write_race(path: Path, race: RaceRecord) -> None:
    """Write a race's record.  Raises RunError (disk)."""
    plan = {**vars(race.plan), "settings": [setting.to_json() for setting in race.plan.settings]}
    content = {
        "plan": plan,
        "begun": race.begun,
        "wall_s": round(race.wall_s, 3),
        "hosts": race.hosts,
        "load": race.load,
        "turns": [asdict(turn) for turn in race.turns],
    }
    write_record_file(path, _KIND, content)


def read_race(path: Path) -> RaceRecord:
    """Read a race's record.

    Raises:
        RunError: it cannot be read, or is damaged; one line that names it.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        check_format(content, _KIND)
        return _record_of(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(record_cannot_be_read(path, error, "delete it to hold the race again")) from error


def _record_of(content: Mapping[str, Any]) -> RaceRecord:
    plan = _plan_of(content["plan"])
    turns = tuple(_turn_of(values, plan) for values in content["turns"])
    held = {(turn.round, turn.setting) for turn in turns}
    rounds = plan.rounds if plan.is_race else 0  # if too few fit, there was only the warm-up
    if plan.own_starts:
        due = {(number, s.name) for number in range(1, rounds + 1) for s in plan.settings}
    else:
        due = {(number, s.name) for number in range(rounds + 1) for s in plan.settings}
    if len(turns) != len(due) or held != due:
        raise ValueError(f"it has {len(turns)} turns that are not {rounds} rounds of its settings")
    hosts, load = tuple(map(str, content["hosts"])), tuple(map(_load_of, content["load"]))
    if not len(hosts) == len(load) == plan.ranks:
        raise ValueError(f"hosts and load are not those of {plan.ranks} ranks")
    own = checked_fields(RaceRecord, {**content, "plan": plan, "turns": turns, "hosts": hosts})
    return RaceRecord(**{**own, "load": load})


def _plan_of(values: Any) -> RacePlan:
    settings = tuple(_setting_of(setting) for setting in values["settings"])
    plan = RacePlan(**checked_fields(RacePlan, {**values, "settings": settings}))
    names = [setting.name for setting in settings]
    could_race = plan.is_race or (plan.rounds > 0 and bool(values["left_out"]))
    if plan.ranks < 1 or not could_race or len(set(names)) < len(names):
        raise ValueError(f"{len(names)} settings in {plan.rounds} rounds on {plan.ranks} ranks are no race")
    if not isinstance(plan.own_starts, bool):
        raise ValueError(f"own_starts is {plan.own_starts!r}, not true or false")
    if not isinstance(plan.left_out, dict) or not all(isinstance(v, str) for v in plan.left_out.values()):
        raise ValueError("left_out is no list of reasons")
    return plan


def _setting_of(values: Any) -> RaceSetting:
    if not isinstance(values["strategy"], str) or not isinstance(values["alone"], bool):
        raise ValueError(f"{json.dumps(values)} is no setting")
    return RaceSetting(
        **checked_fields(RaceSetting, {**values, "strategy": StrategyChoice(values["strategy"])})
    )


def _turn_of(values: Any, plan: RacePlan) -> Turn:
    given = checked_fields(Turn, values)
    turn = Turn(**{**given, **{key: tuple(given[key]) for key in ("frames", "seconds")}})
    frames, seconds = turn.frames, turn.seconds
    fits = len(frames) == len(seconds) == plan.ranks and turn.steps > 0
    fits = fits and _are_amounts(frames) and _are_amounts(seconds)
    if not fits or max(frames) <= 0 or max(seconds) <= _SHORTEST_S:
        raise ValueError(
            f"round {turn.round} of {turn.setting}: {frames} frames in {seconds} s cannot be of "
            f"{plan.ranks} ranks"
        )
    return turn


def _are_amounts(values: Sequence[Any]) -> bool:
    kinds_fit = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return kinds_fit and all(0 <= value < _MOST for value in values)


def _load_of(values: Any) -> dict[str, float]:
    """Return the load of a rank's host; empty if none was measured."""
    if values and not (set(values) >= {"own", "host", "stolen"} and _are_amounts(list(values.values()))):
        raise ValueError(f"{json.dumps(values)} is no load of a host")
    return dict(values)


def is_of(race: RaceRecord, plan: RacePlan) -> bool:
    """Return whether a finished race is the planned one; it may have had more settings."""
    held = race.plan
    alike = all(
        getattr(held, key) == getattr(plan, key)
        for key in ("ranks", "rounds", "least_steps", "seed", "own_starts")
    )
    same_training = held.training == json.loads(json.dumps(plan.training))
    # The ranks may have found that a setting does not fit into turns.
    fitting = plan.without(held.left_out)
    same_settings = {*fitting.settings} <= {*held.settings}
    # With fewer than two that fit there are no speeds, so there is no baseline to compare.
    same_baseline = not fitting.is_race or held.baseline == fitting.baseline
    return alike and same_training and same_settings and same_baseline


def failure_path(out: Path, ranks: int) -> Path:
    """Return the path where a rank records the setting whose failure ended a race."""
    return out / FOLDER / f"failure-{ranks}.json"


def write_failure(path: Path, failure: FailedSetting) -> None:
    """Record the setting whose failure ends a race.  Raises RunError (disk)."""
    write_record_file(path, _FAILURE, vars(failure))


def find_failure(path: Path) -> FailedSetting | None:
    """Return the setting whose failure ended a race; None: there is none, or the file cannot be read."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        check_format(content, _FAILURE)
        return FailedSetting(**checked_fields(FailedSetting, content))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_race(out: Path, ranks: int) -> RaceRecord | None:
    """Return the race on `ranks` ranks; None: none was held.

    Raises:
        RunError: its record cannot be read.
    """
    path = race_path(out, ranks)
    return read_race(path) if path.exists() else None


def find_whole_race(path: Path, print_line: Callable[[str], None]) -> RaceRecord | None:
    """Return the race recorded in a file; None: there is none, or it is damaged.

    Args:
        print_line: prints that the record is damaged and the race is therefore held again.
    """
    try:
        return read_race(path) if path.exists() else None
    except RunError:
        print_line(f"{path} cannot be read, so it is held again")
        return None
