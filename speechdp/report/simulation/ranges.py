"""Find the periods that are fast enough on each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speechdp.parallel.registry import StrategyChoice
from speechdp.report.kit import formatting
from speechdp.simulation.predict import Prediction

#: A period is among the best if it has this share of the fastest one's frames/s.
NEAR_BEST = 0.95
NEAR_BEST_TEXT = f"{formatting.percent(NEAR_BEST)} %"


@dataclass(frozen=True)
class Family:
    """A strategy with all its periods.

    Attributes:
        label: name with all options but the period.
        predictions: predictions for all its periods and numbers of ranks.
    """

    label: str
    predictions: tuple[Prediction, ...]

    @property
    def periods(self) -> tuple[int, ...]:
        """The periods that were simulated, ascending."""
        return tuple(sorted({one.period for one in self.predictions}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of ranks that were simulated, ascending."""
        return tuple(sorted({one.ranks for one in self.predictions}))

    def at(self, ranks: int) -> tuple[Prediction, ...]:
        """Return the predictions for a number of ranks, ordered by period."""
        found = [one for one in self.predictions if one.ranks == ranks]
        return tuple(sorted(found, key=lambda one: one.period))

    def near_best(self, ranks: int) -> tuple[Prediction, ...]:
        """Return the predictions of periods about as fast as the fastest one, the shortest first."""
        found = self.at(ranks)
        fastest = max((one.frames_per_s.mean for one in found), default=0.0)
        return tuple(one for one in found if one.frames_per_s.mean >= NEAR_BEST * fastest)


def families_of(predictions: Sequence[Prediction]) -> list[Family]:
    """Return the strategies, each with all its periods, in the order of the predictions."""
    found: dict[str, list[Prediction]] = {}
    for one in predictions:
        found.setdefault(label_of(one.strategy), []).append(one)
    return [Family(label, tuple(members)) for label, members in found.items()]


def label_of(choice: StrategyChoice) -> str:
    """Name a strategy for readers, without its period: `bmuf (eta=0.5)`."""
    options = choice.text.partition(":")[2].split(",")
    others = ",".join(option for option in options if not option.startswith("period="))
    return formatting.strategy_label(f"{choice.name}:{others}", ranks=2)


def has_periods(family: Family) -> bool:
    """Return whether more than one period of a strategy was simulated."""
    return len(family.periods) > 1
