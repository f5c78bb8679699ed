"""The rungs: settings train for equal times, half of them continue to twice that, until few are left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from speechdp.counting import counted
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.jobs import LOGS
from speechdp.experiments.tune.curves import Curve
from speechdp.experiments.tune.plan import LAST, LEAST_STEPS, next_rung, plan_rungs, shortest_rungs
from speechdp.experiments.tune.record import HALVING, RUNS, RungRecord
from speechdp.experiments.tune.runs import TunedRuns
from speechdp.experiments.tune.search import SearchState
from speechdp.report.kit import formatting

_USED_UP = "halving: the budget is used up, so settings are judged by what they have trained"


class Halving:
    """Holds the rungs of a search whose settings have raced.

    Args:
        runs: of the search.
    """

    def __init__(self, search: SearchState, runs: TunedRuns) -> None:
        self._search, self._runs = search, runs
        #: Rungs of an earlier command, which keep their lengths; recorded until this command gets there.
        self._earlier = search.record.rungs

    def hold(self) -> None:
        """Train the remaining settings rung by rung within the budget; choose the best of the last rung.

        Raises:
            ConfigError: the budget does not suffice for the first rung.
            RunError: no setting can be trained, or the disk is full.
            JobStopped: a signal arrived meanwhile.
        """
        search = self._search
        search.keep(stage=HALVING)
        done: list[RungRecord] = []
        end_s: float | None = self._earlier[0].seconds if self._earlier else self._first_rung_s()
        while end_s is not None:
            rung = self._hold_rung(end_s, done)
            if rung is None:
                search.print_line(_USED_UP)
                self._leave_behind(done[-1], LAST)
                break
            done.append(rung)
            self._keep_rungs(*done)
            if not rung.scores:
                raise RunError(self._nothing_trained(rung))
            search.choose(rung.by_score[0])
            count, end_s = self._rung_after(done)
            self._leave_behind(rung, count)
        search.keep(rungs=tuple(done))

    def _hold_rung(self, end_s: float, done: Sequence[RungRecord]) -> RungRecord | None:
        """Train the remaining settings until `end_s`; return the rung, None: not all fit into the budget.

        The first rung is always held: it was planned, and without it nothing could be chosen.
        """
        search, runs = self._search, self._runs
        rung = RungRecord(end_s, search.record.left)
        self._keep_rungs(*done, rung)
        number = counted(len(rung.settings), "setting")
        search.print_line(f"halving: training {number} until {formatting.seconds(end_s)} of training time")
        begin_s = done[-1].seconds if done else 0.0
        runs.forget_besides()
        curves = runs.train(runs.legs(rung.settings, begin_s, end_s), may_end=bool(done))
        seen_s = runs.first_seen_s(curves or {}, end_s)
        if curves and seen_s > end_s:
            until = formatting.seconds(seen_s)
            search.print_line(f"halving: not all settings were evaluated by then, so all train until {until}")
            rung = replace(rung, seconds=seen_s)
            self._keep_rungs(*done, rung)
            curves = runs.train(runs.legs(curves, end_s, seen_s), may_end=bool(done))
        if curves is None:
            return None
        for name in curves:
            search.note(name, rungs=search.record.of(name).rungs + 1)
        if len(done) >= len(self._earlier):  # it is unknown how far interrupted runs had come
            runs.learn_besides()
        return self._scored(rung, curves, len(done))

    def _scored(self, rung: RungRecord, curves: Mapping[str, Curve], number: int) -> RungRecord:
        """Return a rung with its scores and expected scores.

        Args:
            number: number of rungs before it.
        """
        scores = {name: curve.at(rung.seconds) for name, curve in curves.items()}
        before = self._earlier[number] if number < len(self._earlier) else RungRecord(0.0, ())
        if before.scores.keys() == scores.keys():  # the settings that continued from it have been trained
            return replace(rung, scores=scores, expected=before.expected)
        ahead = self._runs.continued({name: [curve] for name, curve in curves.items()}, rung.seconds)
        is_known = any(ahead[name][0] is not curve for name, curve in curves.items())
        expected = {name: one.last for name, (one,) in ahead.items()} if is_known else {}
        return replace(rung, scores=scores, expected=expected)

    def _first_rung_s(self) -> float:
        """Return the training time in the first rung, s.  Raises ConfigError: the budget is too small."""
        search, left = self._search, self._search.record.left
        besides, whole_s, budget_s = search.record.besides, self._slowest_s, search.request.budget_s
        least_s = max(LEAST_STEPS / self._runs.steps_per_s(name) for name in left)
        needed = shortest_rungs(len(left), len(search.request.seeds), least_s, whole_s)
        rungs = plan_rungs(needed.counts, needed.seeds, search.left_s, besides, whole_s)
        if rungs.seconds[0] < needed.seconds[0]:
            raise ConfigError(
                f"--budget: {formatting.seconds(search.spent_s)} of {formatting.seconds(budget_s)} are "
                f"used, and the rest would train each of {counted(needed.counts[0], 'setting')} for fewer "
                f"than {LEAST_STEPS} steps; give at least {search.enough_s(needed.cost_s(besides)):.0f}s "
                "(what was measured is kept)"
            )
        return rungs.seconds[0]

    def _rung_after(self, done: Sequence[RungRecord]) -> tuple[int, float | None]:
        """Return how many settings continue after some rungs, and until when, s; None: no further rung."""
        search, left = self._search, len(self._search.record.left)
        if len(done[-1].settings) <= LAST:
            return left, None
        if len(done) < len(self._earlier):
            following = self._earlier[len(done)]
            return len(following.settings), following.seconds
        ahead = next_rung(
            left,
            len(search.request.seeds),
            search.left_s,
            search.record.besides,
            self._slowest_s,
            [rung.seconds for rung in done],
        )
        if ahead is None:
            search.print_line(_USED_UP)
            return LAST, None
        if ahead[0] < math.ceil(left / 2):
            search.print_line(
                f"halving: the budget does not suffice for all rungs, so only the best {ahead[0]} continue"
            )
        return ahead

    @property
    def _slowest_s(self) -> float:
        """Time of a whole training of the slowest remaining setting, s."""
        return max(map(self._runs.whole_s, self._search.record.left))

    def _keep_rungs(self, *rungs: RungRecord) -> None:
        self._search.keep(rungs=(*rungs, *self._earlier[len(rungs) :]))

    def _leave_behind(self, rung: RungRecord, count: int) -> None:
        """Rule out all but the `count` best settings of a rung."""
        was = "expected to stay behind" if rung.expected else "behind"
        why = f"after {formatting.seconds(rung.seconds)} of training it was {was} {counted(count, 'other')}"
        order = [name for name in rung.by_score if name in self._search.record.left]
        self._search.rule_out(HALVING, dict.fromkeys(order[count:], why))

    def _nothing_trained(self, rung: RungRecord) -> str:
        """Return the message, with its remedy, for a rung in which every setting failed."""
        out, first = self._search.request.out, rung.settings[0]
        remedy = "the same command tries again; other options need another folder"
        if all(map(self._runs.has_trained, self._runs.legs(rung.settings, 0.0, rung.seconds))):
            remedy = "the same command would find no more: correct what is trained, and give another folder"
        return (
            f"{out}: no setting could be trained: {first}: {self._search.record.of(first).why}; their output "
            f"is in {out / RUNS / LOGS}; {remedy}"
        )
