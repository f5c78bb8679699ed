"""Train the runs of settings leg by leg within the budget, and read their scores over training time.

A leg is planned in training time, which is the same for all settings.  A setting's raced speed converts it to
the steps of a job (`Stretch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from speechdp.experiments.tune.curves import Curve, shrinkage
from speechdp.experiments.tune.jobs import Scored, Stretch
from speechdp.experiments.tune.plan import Besides
from speechdp.experiments.tune.record import HALVING
from speechdp.experiments.tune.search import SearchState
from speechdp.report.kit.metric_names import Terms

#: Share of the budget by which a job may be expected to end late and still be started.
_LATE = 0.01
#: Steps by which asynchronous ranks may overshoot the end of a leg.
_PASSED = 2


@dataclass(frozen=True)
class Leg:
    """A part of a setting's run; a job trains it unless that is done.

    Attributes:
        name: name of the setting.
        begin_s, end_s: training time of the run at the beginning and end of the leg, s.
    """

    name: str
    seed: int
    begin_s: float
    end_s: float


class TunedRuns:
    """The runs of a search; its settings must have raced before any method is called."""

    def __init__(self, search: SearchState) -> None:
        self._search = search
        self._first_seed = search.request.seeds[0]
        #: Terms in which scores are shown; if no metric of a script was named, they come from its runs.
        self._terms = Terms(search.request.target.task)
        #: Overhead of starts and runs, s, since the last `forget_besides`.
        self._starts_s: list[float] = []
        self._besides_s: list[float] = []

    def legs(self, names: Iterable[str], begin_s: float, end_s: float) -> list[Leg]:
        """Return legs of the first seed's runs of some settings."""
        return [Leg(name, self._first_seed, begin_s, end_s) for name in names]

    def steps_per_s(self, name: str) -> float:
        """Return a setting's raced speed, in steps per second."""
        rate = self._search.record.of(name).steps_per_s
        assert rate is not None  # it has raced
        return rate

    def whole_s(self, name: str) -> float:
        """Return the time of a whole training, s."""
        rate, frames = self.steps_per_s(name), self._search.record.of(name).frames_per_s
        assert frames is not None  # it has raced
        return self._search.jobs.total_steps(frames / rate) / rate

    def continued(self, curves: Mapping[str, Sequence[Curve]], end_s: float) -> dict[str, list[Curve]]:
        """Return settings' curves with their expected continuation, up to twice the time at most.

        Args:
            end_s: training time so far, s.
        """
        share = shrinkage([curve for found in curves.values() for curve in found])
        return {
            name: [curve.continued(min(2 * end_s, self.whole_s(name)), share) for curve in found]
            for name, found in curves.items()
        }

    def first_seen_s(self, curves: Mapping[str, Curve], end_s: float) -> float:
        """Return the time from which all settings have a score, s, at least the end of a rung."""
        late = [end_s]
        for name, curve in curves.items():
            first_s, rate = curve.points[0][0], self.steps_per_s(name)
            if first_s > max(end_s, self._step_at(name, end_s) / rate) + _PASSED / rate:
                late.append(first_s)
        return max(late)

    def has_trained(self, leg: Leg) -> bool:
        """Return whether a run has reached the end of a leg, or its own end."""
        # A run of an earlier version may have stopped shortly before the end of a period.
        step = min(self._step(leg), self._steps_in(leg.name, leg.end_s))
        return self._search.jobs.has_trained_to(self._search.settings[leg.name], leg.seed, step)

    def forget_besides(self) -> None:
        """Discard the measured overhead of starts and runs, to measure that of the next rung."""
        self._starts_s, self._besides_s = [], []

    def learn_besides(self) -> None:
        """Record the overhead of starts and runs since the last `forget_besides`."""
        now = self._search.record.besides
        start_s, run_s = _mean(self._starts_s, now.start_s), _mean(self._besides_s, now.run_s)
        self._search.keep_besides(Besides(start_s, max(0.0, run_s)))

    def train(self, legs: Sequence[Leg], *, may_end: bool = True) -> dict[str, Curve] | None:
        """Train legs; return their scores by setting.  Rules out settings that cannot be trained.

        Args:
            may_end: give up and return None as soon as not all are expected to end within the budget.

        Raises:
            RunError: the disk is full.
            JobStopped: a signal arrived meanwhile.
        """
        due = {leg for leg in legs if not self.has_trained(leg)}
        tries: dict[Leg, float | str] = {}  # times of the legs that a job reached, or the cause of failure
        curves: dict[str, Curve] = {}
        failed: dict[str, str] = {}
        printed: set[Leg] = set()
        is_over = False
        for number, leg in enumerate(legs):
            if leg.name in failed:
                continue
            if leg in due and leg not in tries and self.has_trained(leg):
                due.remove(leg)  # the leg before has reached the training's end
            if leg in due and leg not in tries:
                ahead = [one for one in legs[number:] if one in due and one.name not in failed]
                is_over = may_end and self._cost_s(ahead) > self._time_s
                if is_over:
                    break
                tries |= self._try(ahead, partial(self._show, legs, printed, ahead), may_end=may_end)
            curve = self._curve(leg, tries.get(leg))
            if isinstance(curve, str):
                of_seed = "it" if leg.seed == self._first_seed else f"seed {leg.seed}"
                failed[leg.name] = f"{of_seed} failed: {curve}"
                curves.pop(leg.name, None)
                self._search.print_line(f"halving: {self._place(leg, legs)} failed: {curve}")
                continue
            curves[leg.name] = curve
            self._search.keep()
            if leg in due and leg not in printed:
                self._print_score(leg, legs, curve)
        if failed:
            self._search.rule_out(HALVING, failed)
        return None if is_over else curves

    def _try(
        self, legs: Sequence[Leg], on_trained: Callable[[int], None], *, may_end: bool
    ) -> dict[Leg, float | str]:
        """Train legs within one start, as far as possible.

        Args:
            legs: legs to train, at least one.
            on_trained: as in `train_together`.
            may_end: begin no leg that would end too late.

        Returns:
            Times of the legs that it reached, s, or the cause of failure of the last of them.
        """
        search = self._search
        for leg in legs:
            self._note_folder(leg)
        search.keep()
        longest_s = max(self._time_s - self._cost_s(legs[-1:]), 1.0) if may_end else 0.0
        stretches = [Stretch(search.settings[leg.name], leg.seed, self._step(leg)) for leg in legs]
        trained = search.jobs.train_together(stretches, search.record.backend, longest_s, on_trained)
        tries: dict[Leg, float | str] = dict(zip(legs, trained.took_s, strict=False))
        if len(tries) < len(legs) and (trained.message or not tries):
            tries[legs[len(tries)]] = trained.message or "it was not trained"
        else:
            self._starts_s.append(trained.start_s)
        return tries

    def _show(self, legs: Sequence[Leg], printed: set[Leg], ahead: Sequence[Leg], done: int) -> None:
        """Print the scores of the legs that a running job has trained so far.

        Args:
            legs: legs of the rung.
            printed: legs whose scores were printed.
            ahead: legs that the job trains, in order.
            done: number of legs that it has trained.
        """
        for leg in ahead[:done]:
            curve = self._scored(leg) if leg not in printed else ""
            if isinstance(curve, Curve):  # else it is printed when the job has ended
                printed.add(leg)
                self._search.keep()
                self._print_score(leg, legs, curve)

    def _print_score(self, leg: Leg, legs: Sequence[Leg], curve: Curve) -> None:
        score = self._terms.with_unit(curve.at(leg.end_s))
        self._search.print_line(f"halving: {self._place(leg, legs)}: {score}")

    def _place(self, leg: Leg, legs: Sequence[Leg]) -> str:
        seed = "" if leg.seed == self._first_seed else f", seed {leg.seed}"
        return f"[{legs.index(leg) + 1}/{len(legs)}] {leg.name}{seed}"

    def _curve(self, leg: Leg, tried: float | str | None) -> Curve | str:
        """Return the scores of a run over its time at its raced speed, or the cause of failure.

        Args:
            tried: time that a job took for it, or the cause of failure, after which the leg is trained once
                more by itself; None: it was trained before.
        """
        search = self._search
        self._note_folder(leg)
        has_trained = self.has_trained(leg)
        curve = tried if isinstance(tried, str) and not has_trained else self._scored(leg)
        if isinstance(curve, str):
            if has_trained:  # no job would continue it
                return tried if isinstance(tried, str) else curve
            # A rank may have been lost, which is not the setting's fault.
            search.print_line(f"halving: {leg.name} failed and is tried once more: {curve}")
            setting, step = search.settings[leg.name], self._step(leg)
            found = search.jobs.train_to(setting, search.record.backend, leg.seed, step)
            return self._curve_of(leg, found)
        if isinstance(tried, float) and not curve.is_over:  # it has reached at least its first evaluation
            begin_s, end_s = self._ends_s(leg)
            self._besides_s.append(tried - (max(end_s, curve.points[0][0]) - begin_s))
        return curve

    def _scored(self, leg: Leg) -> Curve | str:
        """Return the scores of a run, or why it has none."""
        setting = self._search.settings[leg.name]
        return self._curve_of(leg, self._search.jobs.scored(setting, leg.seed, self._step(leg)))

    def _curve_of(self, leg: Leg, found: Scored | str) -> Curve | str:
        rate = self.steps_per_s(leg.name)
        if isinstance(found, str):
            return found
        if found.task is not None:
            self._terms = Terms(found.task)
        return Curve(tuple((at / rate, score) for at, score in found.points), found.is_over)

    def _note_folder(self, leg: Leg) -> None:
        folder = self._search.jobs.run_dir(self._search.settings[leg.name], leg.seed)
        runs = {**self._search.record.of(leg.name).runs, str(leg.seed): folder.name}
        self._search.note(leg.name, runs=runs)

    @property
    def _time_s(self) -> float:
        """Remaining budget, plus a small tolerance, s."""
        return (1 + _LATE) * self._search.request.budget_s - self._search.spent_s

    def _cost_s(self, legs: Sequence[Leg]) -> float:
        """Return the time of training legs in one start, s."""
        ends_s = map(self._ends_s, legs)
        return sum(end - begin for begin, end in ends_s) + self._search.record.besides.cost_s(len(legs))

    def _ends_s(self, leg: Leg) -> tuple[float, float]:
        """Return the training time at the beginning and end of a leg, s, according to its steps."""
        rate = self.steps_per_s(leg.name)
        begin = self._step_at(leg.name, leg.begin_s) if leg.begin_s else 0
        return begin / rate, self._step(leg) / rate

    def _step(self, leg: Leg) -> int:
        """Return the last step of a leg."""
        return self._step_at(leg.name, leg.end_s)

    def _step_at(self, name: str, seconds: float) -> int:
        return self._search.settings[name].stop(self._steps_in(name, seconds))

    def _steps_in(self, name: str, seconds: float) -> int:
        return max(1, round(seconds * self.steps_per_s(name)))


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
