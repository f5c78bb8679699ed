"""Model averaging whose period grows: frequent averages while the models move far, rare ones later."""

from dataclasses import dataclass, replace
from typing import Any

from speechdp.errors import ConfigError
from speechdp.parallel.period import Period, PeriodUnit
from speechdp.parallel.strategy import Traits
from speechdp.strategies.mechanisms.periodic import PeriodicStrategy
from speechdp.timing.timeline import Span


@dataclass(eq=False)
class GrowingAveraging(PeriodicStrategy):
    """Average parameters over all ranks; double the period after every `stay` averages.

    Update rule: model averaging with a period of min(period * 2^(r / stay), longest) steps after r averages.

    Exchange: the flat parameters with the weight appended, in one allreduce.

    Guarantee: replicas are bitwise equal after each average, and after finish.
    """

    #: Longest period, in steps.
    longest: int = 64
    #: Averages before the period is doubled.
    stay: int = 4

    @property
    def traits(self) -> Traits:
        return replace(super().traits, period_changes=True)  # then runs record the period in use

    def check_options(self) -> None:
        if self.period.unit is not PeriodUnit.STEPS:
            raise ConfigError(f"{self.name}:period={self.period}: give a number of steps")
        if self.stay < 1 or self.longest < self.period.value:
            raise ConfigError(f"{self.name}: stay must be at least 1, longest at least the period")

    def set_up(self) -> None:
        super().set_up()
        self._rounds = 0

    @property
    def current_period(self) -> Period:
        return Period(min(self.period.value * 2 ** min(self._rounds // self.stay, 30), self.longest))

    def exchange(self) -> None:
        with self.timeline.span(Span.COMM):
            self.average_parameters()
        self._rounds += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self._rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rounds = state["rounds"]
