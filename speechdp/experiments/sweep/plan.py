"""Which runs a sweep consists of, and sweep.json (docs/run-directory.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechdp.errors import ConfigError
from speechdp.experiments.record import reading, refuse_others, write_record_file
from speechdp.extensions import field_kinds, split_options
from speechdp.json_input import parse_json
from speechdp.parallel.period import Period, PeriodUnit
from speechdp.parallel.registry import StrategyChoice, strategy_class, strategy_names

FILE_NAME = "sweep.json"
#: Options that hold a strategy's period.
_PERIOD_OPTIONS = ("period", "every")


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep trains.

    Attributes:
        strategy: the strategy whose period is swept, with its other options.
        periods: the periods, e.g. ("1", "4", "16", "64").
        reference: strategies trained beside them.
        one_rank_steps: steps of the throughput baseline on one rank; 0: none.
        decode_split: split whose WER is reported; "" for none.
        others: names may be unknown here: a script can register strategies of its own, whose period is
            taken to be their option `period`.
    """

    strategy: str
    periods: tuple[str, ...]
    reference: tuple[str, ...] = ("gradient_averaging",)
    one_rank_steps: int = 200
    decode_split: str = "test"
    others: bool = False

    def runs(self) -> dict[str, StrategyChoice]:
        """Return the folder's name of each run and its strategy.

        Raises:
            ConfigError: no period, one given twice, or a strategy without a period or with one of its own.
        """
        name, _, rest = self.strategy.partition(":")
        option, kind = (_PERIOD_OPTIONS[0], Period) if self._is_other(name) else _period_option(name)
        if not self.periods:
            raise ConfigError("--periods: give at least one, e.g. --periods 1,4,16,64")
        if option in split_options(rest):
            raise ConfigError(f"--swept {self.strategy}: --periods sets the {option}; leave it out there")
        if len(set(self.periods)) < len(self.periods):
            raise ConfigError(f"--periods {','.join(self.periods)}: a period is given twice")
        result = {text.replace(":", "-"): StrategyChoice(text) for text in self.reference}
        for text in self.periods:
            period = Period.parse(text)
            if kind is int and period.unit is not PeriodUnit.STEPS:
                raise ConfigError(f"--periods {text}: {name} counts its period in steps")
            options = ",".join(filter(None, [f"{option}={period}", rest]))
            result[f"{name}-{period}"] = StrategyChoice(f"{name}:{options}")
        for choice in result.values():
            if not self._is_other(choice.name):
                _ = choice.parsed  # raises what is wrong with it
        return result

    def _is_other(self, name: str) -> bool:
        return self.others and name not in strategy_names()


def _period_option(name: str) -> tuple[str, Any]:
    """Return the option of a strategy that holds its period, and the option's type.

    Raises:
        ConfigError: it has none.
    """
    kinds = field_kinds(strategy_class(name))
    for option in _PERIOD_OPTIONS:
        if option in kinds:
            return option, kinds[option]
    raise ConfigError(f"--swept {name}: has no period; choose another strategy, e.g. model_averaging")


def write_sweep(
    out_dir: Path,
    names: Sequence[str],
    *,
    completed: bool,
    settings: dict[str, Any] | None = None,
    metric: str = "",
    decode_split: str = "",
) -> None:
    """Write OUT/sweep.json.

    Args:
        names: of the runs' folders.
        settings: what runs of a script share; None: each run of ours checks its own.
        metric: what runs of a script are judged by; "": what they log last.
        decode_split: whose word errors the runs are compared by; "": that of a script's own, if any.

    Raises:
        ConfigError: the folder holds a sweep over other runs, with other settings, or a damaged one.
        RunError: it cannot be written.
    """
    path = out_dir / FILE_NAME
    if path.is_file():
        with reading(path, "choose another folder, or --overwrite"):
            before = parse_json(path.read_text(encoding="utf-8"))
            runs, of_runs = before["runs"], dict(before.get("settings", {}))
        if runs != list(names):
            raise ConfigError(f"{path}: holds a sweep over other runs; choose another folder, or --overwrite")
        refuse_others(path, of_runs, settings or {})
    further = {"settings": settings, "metric": metric, "decode_split": decode_split}
    given = {key: value for key, value in further.items() if value}
    write_record_file(path, "sweep", {"runs": names, "completed": completed, **given})
