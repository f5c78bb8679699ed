"""The runs of a sweep, and sweep.json (docs/run-directory.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.experiments.record import read_record_file, reading, refuse_others, write_record_file
from speechdp.extensions import field_kinds, split_options
from speechdp.parallel.period import Period, PeriodUnit
from speechdp.parallel.registry import StrategyChoice, strategy_class, strategy_names
from speechdp.parallel.run_files import RunDirectory

FILE_NAME = "sweep.json"
#: Options that hold a strategy's period.
_PERIOD_OPTIONS = ("period", "every")


@dataclass(frozen=True)
class SweepPlan:
    """The runs that a sweep trains.

    Attributes:
        strategy: the strategy whose period is swept, with its other options.
        periods: the periods, e.g. ("1", "4", "16", "64").
        reference: strategies trained in addition.
        one_rank_steps: steps of the throughput baseline on one rank; 0: none.
        decode_split: split whose WER is reported; "" for none.
        others: allow unknown names, because a script can register its own strategies; their period is
            assumed to be their option `period`.
    """

    strategy: str
    periods: tuple[str, ...]
    reference: tuple[str, ...] = ("gradient_averaging",)
    one_rank_steps: int = 200
    decode_split: str = "test"
    others: bool = False

    def runs(self) -> dict[str, StrategyChoice]:
        """Return the strategy of each run, by the name of its folder.

        Raises:
            ConfigError: no period, a period given twice, or a strategy without a period option or with a
                given period.
        """
        name, _, rest = self.strategy.partition(":")
        option, kind = (_PERIOD_OPTIONS[0], Period) if self._is_other(name) else _period_option(name)
        check_periods(self.periods)
        if option in split_options(rest):
            raise ConfigError(f"--swept {self.strategy}: --periods sets the {option}; leave it out there")
        result = {text.replace(":", "-"): StrategyChoice(text) for text in self.reference}
        for text in self.periods:
            period = Period.parse(text)
            if kind is int and period.unit is not PeriodUnit.STEPS:
                raise ConfigError(f"--periods {text}: {name} counts its period in steps")
            options = ",".join(filter(None, [f"{option}={period}", rest]))
            result[f"{name}-{period}"] = StrategyChoice(f"{name}:{options}")
        for choice in result.values():
            if not self._is_other(choice.name):
                _ = choice.parsed  # raises if it is invalid
        return result

    def _is_other(self, name: str) -> bool:
        return self.others and name not in strategy_names()


def check_periods(periods: Sequence[str]) -> None:
    """Refuse invalid periods and duplicates.  Raises ConfigError."""
    if not periods:
        raise ConfigError("--periods: give at least one, e.g. --periods 1,4,16,64")
    given = f"--periods {','.join(periods)}"
    try:
        different = {str(Period.parse(text)) for text in periods}
    except ConfigError as error:
        raise ConfigError(f"{given}: {error}") from error
    if len(different) < len(periods):
        raise ConfigError(f"{given}: a period is given twice")


def _period_option(name: str) -> tuple[str, Any]:
    """Return the option of a strategy that holds its period, and the option's type.

    Raises:
        ConfigError: it has no period.
    """
    kinds = field_kinds(strategy_class(name))
    for option in _PERIOD_OPTIONS:
        if option in kinds:
            return option, kinds[option]
    raise ConfigError(f"--swept {name}: has no period; choose another strategy, e.g. model_averaging")


@dataclass(frozen=True)
class SweepRecord:
    """The content of sweep.json.

    Attributes:
        runs: names of the runs' folders, in the report's order.
        completed: all runs are done.
        settings: settings that runs of a script share; empty for runs of our trainer, which check their own.
        metric: metric that ranks the runs of a script; "": the value that they log last.
        decode_split: split whose word errors compare the runs; "": a script's own figures, if any.
        ranks: number of ranks of our trainer's runs; None: recorded by an earlier version, or a script's.
        threads: threads of a rank in a script's runs; None: recorded by an earlier version, or our trainer's.
        failed: causes of failure, by the names of the failed runs.
    """

    runs: tuple[str, ...]
    completed: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    metric: str = ""
    decode_split: str = ""
    ranks: int | None = None
    threads: int | None = None
    failed: Mapping[str, str] = field(default_factory=dict)


def find_sweep(out_dir: Path) -> SweepRecord | None:
    """Return the content of OUT/sweep.json; None: no such file.  Raises ConfigError: it is damaged."""
    path = out_dir / FILE_NAME
    if not path.is_file():
        return None
    with reading(path, "delete it, and the same command writes it anew (its runs are kept)"):
        content = read_record_file(path, "sweep")
        ranks, threads = (
            None if content.get(key) is None else int(content[key]) for key in ("ranks", "threads")
        )
        return SweepRecord(
            tuple(map(str, content["runs"])),
            content.get("completed") is True,
            dict(content.get("settings", {})),
            str(content.get("metric", "")),
            str(content.get("decode_split", "")),
            ranks,
            threads,
            {str(name): str(why) for name, why in content.get("failed", {}).items()},
        )


def refuse_other_sweep(out_dir: Path, record: SweepRecord) -> SweepRecord | None:
    """Refuse to continue another sweep; return the record in the folder, None: there is none.

    Runs of our trainer may be added and left out, because each checks its own options.  Runs of a script
    can only be checked by the settings recorded for all of them.

    Raises:
        ConfigError: a sweep with other settings, of a script over other runs, or a damaged one.
    """
    before, path = find_sweep(out_dir), out_dir / FILE_NAME
    if before is None:
        return None
    if record.settings and before.runs != record.runs:
        raise ConfigError(f"{path}: holds a sweep over other runs; choose another folder, or --overwrite")
    refuse_others(path, before.settings, record.settings)
    return before


def refuse_other_ranks(out_dir: Path, ranks: int) -> None:
    """Refuse to continue a sweep of our trainer on another number of ranks: its runs would not be comparable.

    Raises:
        ConfigError: it was begun on another number, or its record is damaged.
    """
    before = find_sweep(out_dir)
    if before is not None and before.ranks not in (None, ranks):
        raise ConfigError(
            f"{out_dir / FILE_NAME}: was begun on {counted(before.ranks or 0, 'rank')}, and runs on {ranks} "
            "would not compare with those; start as many, choose another folder, or --overwrite"
        )


def write_sweep(out_dir: Path, record: SweepRecord) -> None:
    """Write OUT/sweep.json.  Raises RunError (disk)."""
    given = {key: value for key, value in vars(record).items() if value or key in ("runs", "completed")}
    write_record_file(out_dir / FILE_NAME, "sweep", given)


def threads_before(out_dir: Path) -> int | None:
    """Return the threads of a rank in the finished runs of a script's sweep; None: no such runs, or unknown.

    Raises:
        ConfigError: its record is damaged.
    """
    before = find_sweep(out_dir)
    if before is None or not any(RunDirectory(out_dir / name).script_has_ended_well for name in before.runs):
        return None
    return before.threads
