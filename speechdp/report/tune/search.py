"""Read a search for its report, from tune.json and the files of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from speechdp.experiments.race.shown import ShownRaces, read_races
from speechdp.experiments.tune.jobs import measured_dirs
from speechdp.experiments.tune.record import RUNS, TuneRecord, read_tune
from speechdp.report.kit.metric_names import Terms, terms_of
from speechdp.report.runs.folders import read_run
from speechdp.report.runs.records import words
from speechdp.report.runs.results import SCRIPT, RunResult
from speechdp.report.runs.script_metric import script_task
from speechdp.report.runs.steadiness import notable_load
from speechdp.timing.load import OutsideLoad

#: Source of the speeds from which training times are computed.
RACED, PREDICTED = "raced", "predicted"


@dataclass(frozen=True)
class Search:
    """A search as its report needs it.

    Attributes:
        record: the record in tune.json.
        runs: runs of each trained setting, one per seed.
        races: the race of the search; empty before it was held.
        loads: outside load of the cores while each back-end was measured, if enough to matter.
    """

    record: TuneRecord
    runs: Mapping[str, tuple[RunResult, ...]]
    races: ShownRaces = field(default_factory=ShownRaces)
    loads: Mapping[str, OutsideLoad] = field(default_factory=dict)

    @property
    def all_runs(self) -> list[RunResult]:
        """The runs of all settings."""
        return [run for found in self.runs.values() for run in found]

    @property
    def speed(self) -> str:
        """Source of the speeds for training times; predicted for a single setting, which cannot race."""
        is_unraced = any(one.frames_per_s is not None and one.ratio is None for one in self.record.tried)
        return PREDICTED if is_unraced else RACED

    @property
    def terms(self) -> Terms:
        """The words for the settings' figures; for a script, known even before its first run."""
        runs = self.all_runs
        if not runs and "script" in self.record.settings:
            return Terms(script_task(words(self.record.settings.get("metric"))), SCRIPT)
        return terms_of(runs)


def read_search(out: Path) -> Search:
    """Read a search.  Raises ConfigError if tune.json is damaged."""
    record = read_tune(out)
    metric = words(record.settings.get("metric"))
    runs = {
        one.name: tuple(
            read_run(out / RUNS / folder, metric)
            for folder in one.runs.values()
            if (out / RUNS / folder).is_dir()
        )
        for one in record.tried
    }
    loads = {
        one.name: max(found, key=lambda load: load.total)
        for one in record.backends
        if (
            found := [load for path in measured_dirs(out, one.name) if (load := notable_load(read_run(path)))]
        )
    }
    runs = {name: found for name, found in runs.items() if found}
    return Search(record, runs, read_races(out), loads)
