"""Decide on the runs of a comparison, their epochs and batches: pure functions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from speechdp.errors import ConfigError
from speechdp.options.run import TrainOptions
from speechdp.options.seed import check_seed
from speechdp.parallel.registry import StrategyChoice, describe, strategy_names
from speechdp.report.kit import formatting

#: Every run trains for the same number of epochs, hence on the same frames.
FRAMES = "frames"
#: Every run trains for about as long as the slowest run of `FRAMES` with as many ranks and the same seed.
TIME = "time"
MODES = (FRAMES, TIME)
#: Each learning rate is tried once, at equal frames, with a seed that no other run has.
RATES = "rates"
#: First candidate for that seed; skipped if it is one of the comparison's.
_RATES_SEED = 1000
#: What one rank trains with, whatever the strategies, because it has nothing to exchange.
SEQUENTIAL = StrategyChoice("gradient_averaging")


@dataclass(frozen=True)
class PlannedRun:
    """One training of a comparison.

    Attributes:
        epochs: None until known (mode `TIME`), and for a script, which decides itself how long it trains.
        learning_rate: None: the training's own.
    """

    strategy: StrategyChoice
    ranks: int
    seed: int
    mode: str
    epochs: int | None
    learning_rate: float | None = None

    @property
    def folder(self) -> str:
        """Name of the run's folder; a run with another number of epochs is another run."""
        assert self.epochs is not None or self.is_of_script
        words = [f"{self.ranks}x-{self.strategy.file_name}-seed{self.seed}"]
        if not self.is_of_script or self.mode != FRAMES:
            words.insert(0, self.mode)
        if self.epochs is not None:
            words.append(f"{self.epochs}ep")
        if self.learning_rate is not None:
            words.append(f"rate{formatting.learning_rate(self.learning_rate)}")
        return "-".join(words)

    @property
    def title(self) -> str:
        """Name of the run in lines of progress and on the page."""
        words = [] if self.is_of_script or self.mode == RATES else [f"equal {self.mode}"]
        words += [formatting.rank_count(self.ranks)] if self.ranks > 1 else []
        words.append(formatting.strategy_label(self.strategy.text, self.ranks))
        words += [] if self.mode == RATES else [f"seed {self.seed}"]
        if self.learning_rate is not None:
            words.append(f"learning rate {formatting.learning_rate(self.learning_rate)}")
        return ", ".join(words)

    @property
    def is_of_script(self) -> bool:
        """Whether a user's script decides how long the run trains."""
        return self.mode != TIME and self.epochs is None


@dataclass(frozen=True)
class ComparePlan:
    """What is compared.

    Attributes:
        strategies: strategies, without duplicates.  A script may know names that are unknown here.
        ranks: numbers of ranks.
        seeds: seeds with which each strategy is trained once.
        modes: some of `MODES`, including `FRAMES`.
        epochs: epochs of the runs at equal frames; None: a script's own.
        learning_rates: rates to try for every strategy on every number of ranks; empty: all train with the
            training's own rate.
    """

    strategies: tuple[StrategyChoice, ...]
    ranks: tuple[int, ...]
    seeds: tuple[int, ...]
    modes: tuple[str, ...]
    epochs: int | None
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ConfigError("--strategies: name at least one, e.g. gradient_averaging,bmuf:period=16")
        for name in ("strategies", "ranks", "seeds", "modes"):
            refuse_twice(name, getattr(self, name))
        if self.epochs is not None:  # a script decides which seeds it accepts
            for seed in self.seeds:
                check_seed(seed, "--seeds")
        if FRAMES not in self.modes or set(self.modes) - set(MODES):
            raise ConfigError("--modes: write frames, or frames,time (times are taken from the frames runs)")

    def strategies_on(self, ranks: int) -> tuple[StrategyChoice, ...]:
        """Return the strategies to train on `ranks` ranks."""
        return self.strategies if ranks > 1 else (SEQUENTIAL,)

    def trials(self) -> list[PlannedRun]:
        """Return the runs that try learning rates, in training order.

        Their seed is not one of the comparison's: a rate that was chosen by a run would look too good in it.
        """
        seed = next(seed for seed in itertools.count(_RATES_SEED) if seed not in self.seeds)
        return [
            PlannedRun(choice, ranks, seed, RATES, self.epochs, rate)
            for ranks in sorted(self.ranks)
            for choice in self.strategies_on(ranks)
            for rate in sorted(self.learning_rates)
        ]

    def runs(self) -> list[PlannedRun]:
        """Return all runs in training order; every other seed has the strategies reversed.

        If the machine becomes slower during the comparison, this does not always slow the same strategy.
        """
        result: list[PlannedRun] = []
        for mode in sorted(self.modes, key=MODES.index):
            for number, seed in enumerate(self.seeds):
                for ranks in sorted(self.ranks):
                    epochs = self.epochs if mode == FRAMES else None
                    chosen = self.strategies_on(ranks)
                    runs = [PlannedRun(choice, ranks, seed, mode, epochs) for choice in chosen]
                    result += runs if number % 2 == 0 else runs[::-1]
        return result


def split_strategies(text: str) -> tuple[str, ...]:
    """Split `a,b:period=16,momentum=reset,c` into (`a`, `b:period=16,momentum=reset`, `c`).

    A piece between commas of the form option=value is another option of the previous strategy; any other
    piece begins a strategy.  This is unambiguous: names contain no `=`, and every option has one.

    Raises:
        ConfigError: an option without a strategy before it.
    """
    strategies: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if "=" not in piece.partition(":")[0]:
            strategies.append(piece)
        elif strategies and ":" in strategies[-1]:
            strategies[-1] += f",{piece}"
        else:
            raise ConfigError(f"--strategies: {piece!r} follows no strategy with options; write NAME:{piece}")
    return tuple(strategies)


def checked_strategies(text: str, *, others: bool = False) -> tuple[StrategyChoice, ...]:
    """Parse strategies in the form of `split_strategies`, and refuse those that no run could use.

    Args:
        others: allow unknown names, because a script can register its own strategies.

    Raises:
        ConfigError: an unknown strategy or option, a duplicate, or an empty list.
    """
    strategies = tuple(StrategyChoice(choice) for choice in split_strategies(text))
    if text and not strategies:
        raise ConfigError(f"--strategies {text!r}: names no strategy; write names separated by commas")
    known = strategy_names()
    meanings = [
        choice.text if others and choice.name not in known else describe(choice.parsed)
        for choice in strategies
    ]
    twice = [str(choice) for choice, m in zip(strategies, meanings, strict=True) if meanings.count(m) > 1]
    if twice:
        raise ConfigError(f"--strategies: {' and '.join(twice)} are the same")
    return strategies


def refuse_twice(option: str, given: Sequence[object]) -> None:
    """Refuse a list with duplicates.  Raises ConfigError."""
    twice = [str(item) for item in given if given.count(item) > 1]
    if twice:
        raise ConfigError(f"--{option}: {twice[0]} is given twice")


def whole_numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    """Parse integers such as `1,2,4`.

    Raises:
        ConfigError: something else, or a number below `least`.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError(f"--{option} {text!r}: write whole numbers from {least} on, separated by commas")
    return tuple(int(word) for word in words)


def rates(text: str | None) -> tuple[float, ...]:
    """Parse `--learning-rates 0.001,0.002,0.004`; None: no rates.

    Raises:
        ConfigError: something else, a single rate, or a duplicate.
    """
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        found = tuple(float(word) for word in words)
    except ValueError:
        found = ()
    if not words or len(found) != len(words) or not all(0 < rate < math.inf for rate in found):
        raise ConfigError(f"--learning-rates {text!r}: write numbers above 0, separated by commas")
    if len(found) == 1:
        raise ConfigError(
            f"--learning-rates {text}: a single rate leaves nothing to choose; write several, for example "
            f"{found[0] / 2:g},{found[0]:g},{found[0] * 2:g}"
        )
    refuse_twice("learning-rates", found)
    return found


def equal_time_epochs(epochs: int, own_s: float, reference_s: float) -> int:
    """Return the epochs, at least 1, that take about `reference_s` if `epochs` take `own_s`."""
    return max(1, int(epochs * reference_s / own_s + 0.5))


def stretched(options: TrainOptions, epochs: int) -> TrainOptions:
    """Return options for another number of epochs, with the learning rate schedule stretched accordingly.

    Warm-up and annealing begin and end at the same fractions of the training, at the same learning rates.
    Options that were not given follow the epochs anyway.  If there are fewer epochs than `average_epochs`,
    all are averaged.
    """
    factor = epochs / options.num_epochs
    given = options.optimizer
    warmup, anneal_from = given.warmup_epochs, given.anneal_from
    optimizer = dataclasses.replace(
        given,
        warmup_epochs=None if warmup is None else warmup * factor,
        anneal_from=anneal_from if anneal_from is None or anneal_from < 0 else round(anneal_from * factor),
        anneal_factor=given.anneal_factor ** (1 / factor),
    )
    average = min(options.average_epochs, epochs)
    return dataclasses.replace(options, optimizer=optimizer, epochs=epochs, average_epochs=average)
