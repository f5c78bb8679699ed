"""Hold a race on all ranks: in each round, every setting has one short turn, in random order."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from speechdp.comm.environment import host_name
from speechdp.counting import counted
from speechdp.errors import CommunicationError, ConfigError, RunError, ShardError, SpeechDPError
from speechdp.experiments.race.plan import TOO_LONG, RacePlan, RaceSetting, order_of_rounds
from speechdp.experiments.race.racer import RaceBase, Racer, RaceSession
from speechdp.experiments.race.record import (
    FOLDER,
    FailedSetting,
    RaceRecord,
    Turn,
    failure_path,
    find_whole_race,
    is_of,
    race_path,
    write_failure,
    write_race,
)
from speechdp.options.run import TrainOptions
from speechdp.parallel.run_files import utc_now
from speechdp.parallel.stop import LoneStop
from speechdp.process.ending import Stopped
from speechdp.report.kit import formatting
from speechdp.timing.load import LoadMeter
from speechdp.train.session import Session
from speechdp.train.tolerance import lost_ranks
from speechdp.train.watching import watched
from speechdp.watchdog.status import StatusFolder

#: Least time between two lines of progress, s.
_NEWS_S = 10.0
#: Maximum length of a foreign error message; CUDA's out-of-memory messages have several lines.
_LONGEST_WORDS = 160


def hold_race(
    session: Session,
    options: TrainOptions,
    plan: RacePlan,
    out: Path,
    remedy: str = "--race 0 leaves the race out",
) -> None:
    """Hold a race and record it in OUT/race, unless a complete record exists.  Collective.

    Args:
        options: options that all settings share.
        remedy: what the command's user can do if a setting cannot be trained.

    Raises:
        RunError: a training of the race failed, or the record cannot be written.
        Stopped: a signal requested it; nothing is recorded, and the same command holds the race again.
    """
    if lost_ranks(session.comm):
        session.reporter.notice("race: skipped, because ranks were lost")
        return
    if not plan.is_race or not session.comm.broadcast_object(_is_due(session, plan, out)):
        return
    session.reporter.notice(
        f"race: {counted(len(plan.settings), 'setting')} in turn, {counted(plan.rounds, 'round')}, to "
        "compare their speeds"
    )
    try:
        race = _Race(session, options, plan, out).run()
    except RunError as error:
        raise RunError(f"the race of the settings failed: {error}; {remedy}") from error
    if session.comm.rank == 0:
        write_race(race_path(out, plan.ranks), race)
        news = f"done in {race.wall_s:.0f} s"
        if not race.plan.is_race:
            news = "skipped, because fewer than two settings can take part"
        session.reporter.notice(f"race: {news}")
    session.comm.barrier()


def _is_due(session: Session, plan: RacePlan, out: Path) -> bool:
    """Return on rank 0 whether the race has to be held; the result of other ranks is ignored."""
    if session.comm.rank > 0:
        return True
    held = find_whole_race(
        race_path(out, plan.ranks), lambda words: session.reporter.notice(f"race: {words}")
    )
    return held is None or not is_of(held, plan)


class _Race:
    """A race in progress on this rank."""

    def __init__(self, session: Session, options: TrainOptions, plan: RacePlan, out: Path) -> None:
        self._session, self._options, self._plan, self._out = session, options, plan, out
        #: Racers by their settings' names; None on ranks that take no part.
        self._racers: dict[str, Racer | None] = {}
        self._lone = LoneStop(session.stop, session.comm)
        self._is_alone = {setting.name: setting.alone for setting in plan.settings}
        self._left_out = dict(plan.left_out)
        self._turns: list[Turn] = []
        self._printed_s = time.monotonic()

    def run(self) -> RaceRecord:
        """Hold the race; return its record, with only the warm-up if too few settings fit."""
        begun, begun_s = utc_now(), time.monotonic()
        with ExitStack() as stack:
            self._enter_all(stack)
            try:
                self._warm_up()
                plan = self._plan.without(self._left_out)
                load = self._take_turns(plan) if plan.is_race else {}
            except Stopped:
                self._close_all()
                raise
            self._close_all()
        facts = self._session.comm.allgather_object({"host": host_name(), "load": load})
        names = {setting.name for setting in plan.settings}
        return RaceRecord(
            plan,
            tuple(turn for turn in self._turns if turn.setting in names),
            tuple(fact["host"] for fact in facts),
            tuple(fact["load"] for fact in facts),
            begun,
            time.monotonic() - begun_s,
        )

    def _enter_all(self, stack: ExitStack) -> None:
        """Create the trainings of all settings, guarded by the watchdog against hangs.  Collective."""
        folder = self._out / FOLDER
        base = RaceBase(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="speechdp-race-"))))
        base.pulse.beat("the race")
        self._group, self._alone = self._sessions()
        for setting in self._plan.settings:
            session = self._alone if setting.alone else self._group
            self._racers[setting.name] = (
                None if session is None else self._enter(setting, session, base, stack)
            )
        if self._session.comm.rank == 0:
            StatusFolder(folder).clear()
        self._session.comm.barrier()
        entered = [racer for racer in self._racers.values() if racer is not None]
        if not entered:
            raise ConfigError(next(iter(self._left_out.values())))
        trainer = entered[0].trainer
        stack.enter_context(watched(self._session, self._options, folder, trainer))

    def _close_all(self) -> None:
        """End all trainings.  Collective."""
        for session in (self._group, self._alone):
            if session is not None:
                session.over.set()
        for racer in self._racers.values():
            if racer is not None:
                racer.close()

    def _sessions(self) -> tuple[RaceSession, RaceSession | None]:
        """Return the session for settings that all ranks train, and that for rank 0 training alone."""
        group = RaceSession.of(self._session)
        if self._session.comm.rank > 0:
            return group, None
        return group, RaceSession.of(self._session.alone(self._lone))

    def _enter(
        self, setting: RaceSetting, session: RaceSession, base: RaceBase, stack: ExitStack
    ) -> Racer | None:
        """Create a setting's training; None if all ranks refuse it, in which case the others still race."""
        options = self._options.with_setting(setting.strategy, setting.batch_size)
        if setting.alone and setting.batch_of:
            options = options.resolve(setting.batch_of)
        try:
            with self._named(setting.name):
                return Racer(session, options, self._plan.least_steps, base, stack)
        except ConfigError as error:
            if setting.alone:  # the other ranks have not noticed
                raise
            self._left_out[setting.name] = str(error)
            return None

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """If this rank alone fails in the block, record in OUT/race the setting that ends the race.

        Options that all ranks refuse do not end the race.  Damaged data or a lost rank are not the setting's
        fault.
        """
        try:
            yield
        except (ConfigError, CommunicationError, ShardError, Stopped):
            raise
        except Exception as error:
            with suppress(RunError):  # the first error is the one to report
                write_failure(
                    failure_path(self._out, self._plan.ranks), FailedSetting(name, _words_of(error))
                )
            raise

    def _warm_up(self) -> None:
        """Give each setting its first turn, which shows the steps of periods in seconds.  Collective."""
        names = self._order[0]
        for place, name in enumerate(names, start=1):
            self._print_progress(f"warming up, setting {place} of {len(names)}")
            if name in self._left_out:
                continue
            racer = self._racers[name]
            if racer is None:
                self._turn(0, name)
                continue
            if racer.is_fit:
                turn = self._turn(0, name)
                racer.know_pace(max(turn.seconds) / turn.steps)
            if not racer.is_fit:
                self._left_out[name] = TOO_LONG

    @property
    def _order(self) -> list[list[str]]:
        """Names of the settings in the order of their turns, for each round; the warm-up is the first."""
        names = [setting.name for setting in self._plan.settings]
        order = order_of_rounds(len(names), self._plan.rounds, self._plan.seed)
        return [[names[number] for number in turns] for turns in order]

    def _take_turns(self, plan: RacePlan) -> dict[str, float]:
        """Hold the rounds that count; return the load of this rank's host.  Collective."""
        load, began_s = LoadMeter(), time.monotonic()
        per_round = len(plan.settings)
        for number, names in enumerate(self._order[1:], start=1):
            self._go_by_graphs_alike()
            racing = [name for name in names if name not in self._left_out]
            for place, name in enumerate(racing):
                news = f"setting {place + 1} of {per_round}"
                if number > 1:  # all settings have shown how long their turns are
                    done = (number - 1) * per_round + place
                    left_s = (time.monotonic() - began_s) * (plan.rounds * per_round / done - 1)
                    news = f"about {formatting.seconds(left_s)} left"
                self._print_progress(f"round {number} of {plan.rounds}, {news}")
                self._turn(number, name)
        return load.so_far()

    def _print_progress(self, news: str) -> None:
        """Print how far the race is, unless a line was printed a moment ago."""
        now_s = time.monotonic()
        if now_s - self._printed_s > _NEWS_S:
            self._printed_s = now_s
            self._session.reporter.notice(f"race: {news}")

    def _go_by_graphs_alike(self) -> None:
        """Turn CUDA graphs off for all settings if a rank lacks the memory for those of one.  Collective."""
        all_graphs = [racer.trainer.parts.graphs for racer in self._racers.values() if racer is not None]
        has_given_up = any(graphs.has_given_up for graphs in all_graphs)
        if any(self._session.comm.allgather_object(has_given_up)):
            for graphs in all_graphs:
                graphs.close()

    def _turn(self, number: int, name: str) -> Turn:
        """Run a turn.  Collective.  Raises Stopped (a rank was asked to), RunError (a rank was lost)."""
        comm, racer = self._session.comm, self._racers[name]
        if racer is not None:
            racer.ready()
        comm.barrier()
        begun_s, frames, seconds, steps = time.perf_counter(), 0, 0.0, 0
        with self._lone.while_others_wait() if self._is_alone[name] else nullcontext():
            if racer is not None:
                try:
                    with self._named(name):
                        frames, steps = racer.run(), racer.steps
                except RunError as error:
                    raise RunError(f"{name}: {error}") from error
                seconds = time.perf_counter() - begun_s
        comm.barrier()
        if racer is not None:
            racer.settle()
        parts = comm.allgather_object([frames, seconds, steps, self._session.is_asked_to_stop()])
        if any(stop for _, _, _, stop in parts):
            raise Stopped
        if lost := lost_ranks(comm):  # with --tolerate-loss the others continue, but at another speed
            raise RunError(f"rank {lost[0]} was lost")
        frames_of, seconds_of, steps_of, _ = zip(*parts, strict=True)
        turn = Turn(number, name, max(steps_of), frames_of, seconds_of)
        self._turns.append(turn)
        return turn


def _words_of(error: Exception) -> str:
    """Return an error's message as one line that a page can show."""
    if isinstance(error, SpeechDPError):
        return str(error)
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line[:_LONGEST_WORDS]}"
