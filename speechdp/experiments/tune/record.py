"""tune.json: the settings that a search has tried, ruled out and chosen so far (docs/tune.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from speechdp.experiments.checked import checked_fields
from speechdp.experiments.race.record import FOLDER as RACES
from speechdp.experiments.record import (
    first_difference,
    read_record_file,
    reading,
    refuse_others,
    write_record_file,
)
from speechdp.experiments.tune.curves import Finish
from speechdp.experiments.tune.plan import Besides, Setting
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.records import check_beside, finite

FILE_NAME = "tune.json"
#: Folder of the runs of settings.
RUNS = "runs"
#: Stages of a search, in order.
STAGES = MEASURE, PREDICT, RACE, HALVING = "measure", "predict", "race", "halving"
#: The setting that may differ between searches in one folder, because only the choice depends on it.
TARGET = "target"
_THEN = "delete it and give the command of the search again (its runs are kept), or with --overwrite"


@dataclass(frozen=True)
class SettingRecord:
    """Record of a setting; unknown values are None or "".

    Attributes:
        strategy: strategy with its options.
        batch_size, learning_rate: as in Setting.
        predicted, predicted_low, predicted_high: frames/s.
        ratio, ratio_low, ratio_high: raced speed relative to gradient averaging's.
        frames_per_s, steps_per_s: speed according to that ratio.
        rungs: number of rungs in which it was trained.
        out_in: stage in which it was ruled out; "": not ruled out.
        why: reason for ruling it out.
        runs: its folders in RUNS, by seed; the first seed's run is trained in all rungs.
        times_s: times to the target, by seed, s; expected times after the last rung; None: not reached.
        scores: final scores, by seed.
    """

    name: str
    strategy: str
    batch_size: int = 0
    learning_rate: float | None = None
    predicted: float | None = None
    predicted_low: float | None = None
    predicted_high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    frames_per_s: float | None = None
    steps_per_s: float | None = None
    rungs: int = 0
    out_in: str = ""
    why: str = ""
    runs: dict[str, str] = field(default_factory=dict)
    times_s: tuple[float | None, ...] = ()
    scores: tuple[float, ...] = ()

    @classmethod
    def of(cls, setting: Setting) -> SettingRecord:
        """Return the record of a setting without any results."""
        return cls(setting.name, setting.strategy.text, setting.batch_size, setting.learning_rate)

    @property
    def setting(self) -> Setting:
        """The recorded setting."""
        return Setting(StrategyChoice(self.strategy), self.batch_size, self.learning_rate)

    def at_rate(self, learning_rate: float) -> SettingRecord:
        """Return the record of the same setting with a learning rate, which does not change its speed."""
        setting = replace(self.setting, learning_rate=learning_rate)
        return replace(self, name=setting.name, learning_rate=learning_rate)

    @property
    def finish(self) -> Finish | None:
        """How soon it reached the target; None: not one of the last settings, or not known yet."""
        return Finish(self.times_s, self.scores) if self.times_s else None


@dataclass(frozen=True)
class RungRecord:
    """A rung of the halving.

    Attributes:
        seconds: training time of each setting by its end, s.
        settings: names of the settings trained in it.
        scores: scores at its end, by name; a setting that failed has none.
        expected: scores expected after twice the time, by which the best are chosen; empty: unknown.
    """

    seconds: float
    settings: tuple[str, ...]
    scores: dict[str, float] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)

    @property
    def by_score(self) -> list[str]:
        """Names of its settings, the best first, by expected scores if known."""
        scores = self.expected or self.scores
        return sorted(scores, key=lambda name: -scores[name])


@dataclass(frozen=True)
class ExchangeRecord:
    """Time of a measurement run's exchanges, each counted from the arrival of its last rank.

    Attributes:
        nbytes: size of the vector that was summed.
        pieces: number of pieces, summed during backward; 1: summed as a whole after backward.
        seconds: mean time, s; with several pieces, the part that backward did not hide.
    """

    strategy: str
    nbytes: float
    pieces: int
    seconds: float


@dataclass(frozen=True)
class LinkRecord:
    """The link between ranks with a back-end, as `speechdp simulate` fits it; 90 % intervals.

    Attributes:
        crosses: the link is between nodes; else inside a node.
        latency_s, latency_low, latency_high: latency of a message, s.
        knows_latency: exchanges of several sizes show the latency, at least in some resamples; else it is
            assumed.
        bytes_per_s, bytes_per_s_low, bytes_per_s_high: bandwidth; None: the size had no effect on times.
    """

    crosses: bool
    latency_s: float
    latency_low: float
    latency_high: float
    knows_latency: bool
    bytes_per_s: float | None
    bytes_per_s_low: float | None
    bytes_per_s_high: float | None


@dataclass(frozen=True)
class BackendRecord:
    """A measured back-end.

    Attributes:
        speed: predicted frames/s, geometric mean over the settings; None: nothing could be predicted.
        why: reason for ruling it out; "": it was chosen, or is not judged yet.
        start_s: measured time of a start of the ranks, s; None: unknown.
        run_s: measured time of a run besides its steps and a start, s; None: unknown.
        link: link that its exchanges show; None: they show none.
        exchanges: measured exchanges.
    """

    name: str
    speed: float | None = None
    why: str = ""
    start_s: float | None = None
    run_s: float | None = None
    link: LinkRecord | None = None
    exchanges: tuple[ExchangeRecord, ...] = ()

    @property
    def besides(self) -> Besides | None:
        """The measured overhead; None: incomplete (an earlier version did not measure `run_s`)."""
        if self.start_s is None or self.run_s is None:
            return None
        return Besides(self.start_s, self.run_s)


@dataclass(frozen=True)
class TuneRecord:
    """The content of tune.json.

    Attributes:
        settings: data, options and ranks, which identify the search.
        stage: stage in progress, one of STAGES.
        spent_s: time spent by all commands so far, s.
        start_s: time of a start of the ranks, s: first as measured, later as in the last rung.
        run_s: time of a run besides its steps and a start, s: likewise.
        backends: back-ends in order of preference.
        tried: settings in the order in which they are tried.
        rungs: rungs that are finished or in progress.
        target: score to reach; None: not known yet.
        seen_s: training time, s, after which the curves behind the choice are extrapolated; None: not at all.
        chosen: name of the best setting so far; "": none yet.
        untold: names of settings that cannot be distinguished from it.
        command: command line that trains with it.
    """

    settings: dict[str, Any]
    stage: str = MEASURE
    spent_s: float = 0.0
    start_s: float = 0.0
    run_s: float = 0.0
    completed: bool = False
    backends: tuple[BackendRecord, ...] = ()
    tried: tuple[SettingRecord, ...] = ()
    rungs: tuple[RungRecord, ...] = ()
    target: float | None = None
    seen_s: float | None = None
    chosen: str = ""
    untold: tuple[str, ...] = ()
    command: str = ""

    @property
    def besides(self) -> Besides:
        """Overhead of jobs and runs besides their steps."""
        return Besides(self.start_s, self.run_s)

    @property
    def backend(self) -> str:
        """The chosen back-end; "": none yet."""
        left = [one.name for one in self.backends if not one.why]
        return left[0] if len(left) == 1 else ""

    def measured_besides(self, backend: str) -> Besides:
        """Return the measured overhead of jobs and runs with a back-end."""
        besides = next(one.besides for one in self.backends if one.name == backend)
        assert besides is not None  # it was measured
        return besides

    def of(self, name: str) -> SettingRecord:
        """Return the record of a setting."""
        return next(one for one in self.tried if one.name == name)

    def with_setting(self, name: str, **changes: Any) -> TuneRecord:
        """Return the record with some fields of a setting changed."""
        return replace(
            self, tried=tuple(replace(one, **changes) if one.name == name else one for one in self.tried)
        )

    @property
    def has_measured(self) -> bool:
        """Whether a back-end was measured; before that, other settings would invalidate nothing."""
        without = all(one == BackendRecord(one.name, why=one.why) for one in self.backends)
        return self.stage != MEASURE or self.completed or bool(self.rungs) or not without

    @property
    def left(self) -> tuple[str, ...]:
        """Names of the settings that are not ruled out."""
        return tuple(one.name for one in self.tried if not one.out_in)


def write_tune(out: Path, record: TuneRecord) -> None:
    """Write OUT/tune.json.  Raises RunError (disk)."""
    content = {
        **vars(record),
        "backends": [asdict(one) for one in record.backends],
        "tried": [vars(one) for one in record.tried],
        "rungs": [vars(one) for one in record.rungs],
    }
    write_record_file(out / FILE_NAME, "tune", content)


def read_tune(out: Path) -> TuneRecord:
    """Read OUT/tune.json.

    Raises:
        ConfigError: it cannot be read, is damaged, or names a folder elsewhere.
    """
    path = out / FILE_NAME
    with reading(path, _THEN):
        content = read_record_file(path, "tune")
        if content["stage"] not in STAGES:
            raise ValueError(f"stage {content['stage']!r}")
        values = checked_fields(TuneRecord, content)
        record = TuneRecord(
            **{
                **values,
                "settings": dict(content["settings"]),
                "completed": content["completed"] is True,
                "backends": tuple(_backend_of(one) for one in content["backends"]),
                "tried": tuple(_setting_of(one) for one in content["tried"]),
                "rungs": tuple(_rung_of(one) for one in content["rungs"]),
                "untold": tuple(values.get("untold", ())),
            }
        )
        names = {one.name for one in record.tried}
        named = {
            *record.untold,
            *filter(None, [record.chosen]),
            *(n for r in record.rungs for n in r.settings),
        }
        if len(names) < len(record.tried):
            raise ValueError("two settings have the same name")
        if record.target is None and any(one.times_s for one in record.tried):
            raise ValueError("there are times to a target, but no target")
        if named - names:
            raise ValueError(f"there is no setting {min(named - names)}")
    for one in record.tried:
        for folder in one.runs.values():
            check_beside(path, folder)
    return record


def _backend_of(values: Any) -> BackendRecord:
    found = checked_fields(BackendRecord, values)
    link, exchanges = found.get("link"), found.get("exchanges", ())
    return BackendRecord(
        **{
            **found,
            "link": None if link is None else _link_of(link),
            "exchanges": tuple(ExchangeRecord(**checked_fields(ExchangeRecord, one)) for one in exchanges),
        }
    )


def _link_of(values: Any) -> LinkRecord:
    found = checked_fields(LinkRecord, values)
    flags = {key: found[key] is True for key in ("crosses", "knows_latency")}
    return LinkRecord(**{**found, **flags})


def _setting_of(values: Any) -> SettingRecord:
    found = checked_fields(SettingRecord, values)
    runs = {str(seed): str(folder) for seed, folder in dict(found.get("runs", {})).items()}
    times = tuple(None if time is None else _number(time) for time in found.get("times_s", ()))
    scores = tuple(map(_number, found.get("scores", ())))
    if len(times) != len(scores) or any(time is not None and time <= 0 for time in times):
        raise ValueError(f"{found['name']}: times {times} and scores {scores} are not those of its runs")
    return SettingRecord(**{**found, "runs": runs, "times_s": times, "scores": scores})


def _rung_of(values: Any) -> RungRecord:
    found = checked_fields(RungRecord, values)
    scores, expected = (
        {str(name): _number(score) for name, score in dict(found.get(key, {})).items()}
        for key in ("scores", "expected")
    )
    if expected and expected.keys() != scores.keys():
        raise ValueError("what settings of a rung are expected to come to is not known of all, or of others")
    settings = tuple(map(str, found["settings"]))
    return RungRecord(**{**found, "settings": settings, "scores": scores, "expected": expected})


def _number(value: Any) -> float:
    """Return a number.  Raises ValueError if it is not a finite number."""
    found = finite(value)
    if found is None:
        raise ValueError(f"{value!r} is no number")
    return found


def check_same_search(out: Path, settings: dict[str, Any], defaults: dict[str, Any]) -> TuneRecord | None:
    """Return the search in a folder, whatever its target; None: there is none.

    Args:
        defaults: defaults of options that an earlier version did not have.

    Raises:
        ConfigError: it was begun with other settings, or its record is damaged.
    """
    if not (out / FILE_NAME).is_file():
        return None
    record = read_tune(out)
    refuse_others(out / FILE_NAME, _begun_with(record, settings), settings, defaults=defaults)
    return record


def holds_other_unmeasured(out: Path, settings: dict[str, Any], defaults: dict[str, Any]) -> bool:
    """Return whether a folder holds a search with other settings that has no results and may be replaced.

    A search that has made an alignment, which can take hours, may not be replaced.

    Args:
        defaults: as in `check_same_search`.

    Raises:
        ConfigError: its record is damaged.
    """
    from speechdp.experiments.compare.own_training import ALIGNMENT  # noqa: PLC0415 - torch, for reports

    if not (out / FILE_NAME).is_file() or (out / ALIGNMENT).exists():
        return False
    record = read_tune(out)
    if record.has_measured or next((out / RACES).glob("*.json"), None):
        return False
    return bool(first_difference(_begun_with(record, settings), settings, defaults=defaults))


def _begun_with(record: TuneRecord, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that identify a search: all except the target."""
    return {**record.settings, TARGET: settings[TARGET]}
