"""The jobs of a search: short runs that measure, a race, and runs that are trained rung by rung."""

from __future__ import annotations

import dataclasses
import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from speechdp.counting import counted
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import SpeechDPError
from speechdp.experiments.arguments import train_arguments
from speechdp.experiments.compare.own_training import NOTHING_LEFT, CompareRequest, OwnTraining
from speechdp.experiments.compare.plan import SEQUENTIAL
from speechdp.experiments.compare.training import log_of
from speechdp.experiments.jobs import JobStarter
from speechdp.experiments.race.plan import RaceOptions, RacePlan, RaceSetting, shared_training
from speechdp.experiments.race.record import (
    FailedSetting,
    RaceRecord,
    failure_path,
    find_failure,
    find_whole_race,
    is_of,
    race_path,
)
from speechdp.experiments.record import delete_file
from speechdp.experiments.tune.jobs import (
    MEASURED,
    NEW_RUN,
    RacedSettings,
    Stretch,
    Trained,
    TunedJobs,
    besides_steps_s,
    is_timed,
    steps_of_turn,
)
from speechdp.experiments.tune.parts import Part, Parts, forget_took, read_took
from speechdp.experiments.tune.plan import Besides, ExpectedTimes, Setting
from speechdp.experiments.tune.record import RUNS
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.kit import formatting
from speechdp.report.runs.raced import LEAST_ROUNDS

#: Interval between two checks of a job's progress, s.
_LOOK_S = 0.5


class TunedTraining(OwnTraining, TunedJobs):
    """Trains settings of a search with `speechdp`, like a comparison, but several in one start.

    Args:
        request: request with the ranks of the search and one strategy, which is ignored.
        print_line: prints a line of progress.
    """

    def __init__(
        self, request: CompareRequest, starter: JobStarter, print_line: Callable[[str], None]
    ) -> None:
        OwnTraining.__init__(self, request, starter, print_line)
        TunedJobs.__init__(self, request.out)
        self._ranks = request.plan.ranks[0]

    def hold_race(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> RacedSettings | str:
        """See TunedJobs: one start of the ranks, and another one without a setting that failed."""
        options, given = self._options(settings[0], backend, self.seeds[0]), dict.fromkeys(settings, "")
        while True:
            plan = self._race_plan(self._request.race, options, given)
            if not plan.is_race:
                return RacedSettings({}, 0.0, {}, plan.left_out)
            race = self._race(options, longest_s, pace, given)
            if isinstance(race, str):
                return race
            if isinstance(race, RaceRecord):
                raced = RacedSettings.of(race)
                return dataclasses.replace(raced, left_out={**raced.left_out, **plan.left_out})
            self._print_line(f"race: {race.name} failed and is left out: {race.why}")
            given |= {one: f"it failed: {race.why}" for one in settings if one.name == race.name}

    def expected_race_s(
        self, settings: Sequence[Setting], backend: str, longest_s: float, pace: ExpectedTimes
    ) -> float:
        """See TunedJobs."""
        options, given = self._options(settings[0], backend, self.seeds[0]), dict.fromkeys(settings, "")
        plan = self._race_plan(self._request.race, options, given)
        if not plan.is_race or self._race_before(options, given) is not None:
            return 0.0
        steps_s = {one: pace.steps_s[one] for one in settings if one.name not in plan.left_out}
        return pace.start_s + race_s(fitting_race(self._request.race, steps_s, longest_s), steps_s)

    def _race(
        self, options: TrainOptions, longest_s: float, pace: ExpectedTimes, given: Mapping[Setting, str]
    ) -> RaceRecord | FailedSetting | str:
        """Hold a race unless done; return its record, or the setting that failed, or the cause of failure.

        Args:
            longest_s, pace: as in `hold_race`.
            given: as in `race_of`.
        """
        out = self._out
        before = self._race_before(options, given, lambda words: self._print_line(f"race: {words}"))
        if before is not None:
            return before
        settings = [one for one, why in given.items() if not why]
        steps_s = {one: pace.steps_s[one] for one in settings}
        length = fitting_race(self._request.race, steps_s, longest_s)
        expected_s = race_s(length, steps_s)
        if expected_s > longest_s:
            duration = formatting.seconds
            self._print_line(
                f"race: the shortest takes {duration(expected_s)}, longer than its share of the budget, "
                f"{duration(longest_s)}; fewer --strategies, --periods or --batch-sizes shorten it"
            )
        log = log_of(self._request.out / "race")
        racing, rounds = counted(len(settings), "setting"), counted(length.rounds, "round")
        self._print_line(f"race: {racing} in turn, {rounds}, started; {log} shows the time left")
        words = [f"--racing={racing_text(given)}", f"--race={length.rounds}"]
        words += [f"--race-steps={length.least_steps}"]
        noted = failure_path(out, self._ranks)
        delete_file(noted)
        message = self._start("race", options, words, log)
        race = find_whole_race(race_path(out, self._ranks), _nobody)
        if race is not None and is_of(race, self._race_plan(length, options, given)):
            return race
        failure = find_failure(noted)
        if failure is not None and any(one.name == failure.name for one in settings):
            return failure
        return message or NOTHING_LEFT

    def _race_before(
        self,
        options: TrainOptions,
        given: Mapping[Setting, str],
        print_line: Callable[[str], None] | None = None,
    ) -> RaceRecord | None:
        """Return the finished race of settings, perhaps held with another budget; None: there is none.

        Args:
            print_line: prints that a record is damaged; None: print nothing.
        """
        before = find_whole_race(race_path(self._out, self._ranks), print_line or _nobody)
        if before is None:
            return None
        length = RaceOptions(before.plan.rounds, before.plan.least_steps)
        return before if is_of(before, self._race_plan(length, options, given)) else None

    def _race_plan(
        self, length: RaceOptions, options: TrainOptions, given: Mapping[Setting, str]
    ) -> RacePlan:
        return race_of(dataclasses.replace(self._request, race=length), given, self._ranks, options)

    def _start(self, job: str, options: TrainOptions, own_words: Sequence[str], log: Path) -> str | None:
        """Run a job of the search on its ranks; return None, or the cause of failure.

        Args:
            options: options that its runs share, with a back-end and a seed.
            own_words: additional arguments of the job.
        """
        words = ["tune", str(self._request.data.absolute()), str(self._out), f"--job={job}", *own_words]
        words += [f"--ranks={self._ranks}", f"--backends={options.backend}", f"--seeds={options.seed}"]
        own = TrainOptions()
        words += train_arguments(
            dataclasses.replace(options, strategy=own.strategy, backend=own.backend, seed=own.seed)
        )
        return self._starter.run(self._ranks + options.loading.feeders, words, log, folder=self._out)

    def _train_some(
        self, strategies: Mapping[Path, StrategyChoice], backend: str, steps: int
    ) -> Besides | str:
        parts = [
            Part(run_dir.name, strategy.text, seed=self.seeds[0], max_steps=steps, anew=True)
            for run_dir, strategy in strategies.items()
        ]
        log = log_of(self._out / MEASURED / backend)
        found = self._train_parts(MEASURED, parts, backend, log)
        if found.message or not all(map(is_timed, strategies)):
            return found.message or NOTHING_LEFT
        took_s = [besides_steps_s(*one) for one in zip(strategies, found.took_s, strict=False)]
        return Besides(found.start_s, min(took_s, default=0.0))

    def train_together(
        self,
        stretches: Sequence[Stretch],
        backend: str,
        longest_s: float,
        on_trained: Callable[[int], None],
    ) -> Trained:
        """See TunedJobs."""
        parts = [
            Part(
                self.run_dir(one.setting, one.seed).name,
                one.setting.strategy.text,
                one.setting.batch_size,
                one.seed,
                pause_at=one.step,
                learning_rate=one.setting.learning_rate,
            )
            for one in stretches
        ]
        log = log_of(self._out / RUNS / "rungs")
        return self._train_parts(RUNS, parts, backend, log, longest_s, on_trained)

    def _train_parts(
        self,
        job: str,
        parts: Sequence[Part],
        backend: str,
        log: Path,
        longest_s: float = 0.0,
        on_trained: Callable[[int], None] | None = None,
    ) -> Trained:
        """Train parts of runs within one start.

        Args:
            job: name of the job and of the folder in OUT with its runs.
            longest_s, on_trained: as in `train_together`.
        """
        root, begun_s = self._out / job, time.monotonic()
        options = self._options(Setting(SEQUENTIAL), backend, self.seeds[0])
        text = Parts(tuple(parts), round(longest_s, 1)).text
        forget_took(root)
        with _Watch(root, on_trained):
            message = self._start(job, options, [f"--parts={text}"], log)
        took_s = tuple(read_took(root, is_over=True))
        return Trained(took_s, max(0.0, time.monotonic() - begun_s - sum(took_s)), message or "")

    def _train_on(self, run_dir: Path, setting: Setting, backend: str, seed: int, step: int) -> str | None:
        return self._train(run_dir, self._options(setting, backend, seed), self._ranks, pause_at=step)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the runs."""
        return self._request.plan.seeds

    def total_steps(self, frames_per_step: float) -> float:
        """See TunedJobs."""
        return self._request.options.num_epochs * self._frames / frames_per_step

    @cached_property
    def _frames(self) -> int:
        """Frames per epoch."""
        return Dataset.open(self._request.data).num_frames(self._request.options.train_split)

    def command(self, setting: Setting, backend: str) -> str:
        """See TunedJobs."""
        options = self._own_options(setting, backend, self.seeds[0])
        processes = self._ranks + options.loading.feeders
        launch = ["speechdp", "launch", *self._starter.launch_options, "-np", str(processes), "--"]
        return shlex.join([*launch, "train", str(self._request.data), NEW_RUN, *train_arguments(options)])

    def _options(self, setting: Setting, backend: str, seed: int) -> TrainOptions:
        return self._own_options(setting, backend, seed).on_alignments(self._alignments)

    def _own_options(self, setting: Setting, backend: str, seed: int) -> TrainOptions:
        """Return the options of a run, which makes its own targets."""
        options = self._request.options.with_setting(
            setting.strategy, setting.batch_size, setting.learning_rate
        )
        return dataclasses.replace(options, backend=cast(Any, backend), seed=seed)


class _Watch:
    """Reports the number of finished parts of a job, during the block and at its end.

    Args:
        root: folder of the job's runs.
        on_trained: called with the number, in a separate thread; None: report nothing.
    """

    def __init__(self, root: Path, on_trained: Callable[[int], None] | None) -> None:
        self._root, self._on_trained = root, on_trained
        self._over, self._reported = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, name="parts of a job", daemon=True)

    def __enter__(self) -> None:
        if self._on_trained is not None:
            self._thread.start()

    def __exit__(self, *exception: object) -> None:
        if self._on_trained is not None:
            self._over.set()
            self._thread.join()
            # The block's own error (a full disk, for example) tells more than the failure to record progress.
            with suppress(SpeechDPError) if exception[0] is not None else nullcontext():
                self._look()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            with suppress(SpeechDPError):  # raised again at the end of the block
                self._look()

    def _look(self) -> None:
        done = len(read_took(self._root))
        if done > self._reported and self._on_trained is not None:
            self._on_trained(done)
            self._reported = done


def race_of(
    request: CompareRequest, given: Mapping[Setting, str], ranks: int, options: TrainOptions
) -> RacePlan:
    """Return the race of the settings of a search.

    Args:
        given: settings, with the reason why one does not race ("": it races).
        options: options that they share, as passed to the ranks.
    """
    settings = [RaceSetting(one.name, one.strategy, batch_size=one.batch_size) for one in given]
    own = dataclasses.replace(options, seed=request.plan.seeds[0])
    training = shared_training(request.data_checksum, own)
    failed = {one.name: why for one, why in given.items() if why}
    return request.race.plan(ranks, own.seed, settings, training, failed)


def fitting_race(wanted: RaceOptions, steps_s: Mapping[Setting, float], longest_s: float) -> RaceOptions:
    """Return a race that fits into `longest_s`, with fewer rounds, then shorter turns; else the shortest.

    Args:
        wanted: maximum length of the race.
        steps_s: time of a step of each setting, s.
        longest_s: time for the race, s.
    """
    fewest = min(wanted.rounds, LEAST_ROUNDS)
    tried = [
        RaceOptions(rounds, steps)
        for steps in dict.fromkeys((wanted.least_steps, *(s for s in (16, 8) if s < wanted.least_steps)))
        for rounds in range(wanted.rounds if steps == wanted.least_steps else fewest, fewest - 1, -1)
    ]
    for length in tried:
        if race_s(length, steps_s) <= longest_s:
            return length
    return tried[-1]


def race_s(length: RaceOptions, steps_s: Mapping[Setting, float]) -> float:
    """Return the expected time of a race from the time of each setting's step, s."""
    round_s = sum(steps_of_turn(one, length.least_steps) * step_s for one, step_s in steps_s.items())
    return (length.rounds + 1) * round_s


def racing_text(given: Mapping[Setting, str]) -> str:
    """Encode settings, in the form of `race_of`, as one command-line word for the ranks of a race."""
    return json.dumps([[one.strategy.text, one.batch_size, why] for one, why in given.items()])


def settings_in(text: str) -> dict[Setting, str]:
    """Decode settings encoded by `racing_text`."""
    return {Setting(StrategyChoice(strategy), size): why for strategy, size, why in json.loads(text)}


def _nobody(_: str) -> None:
    """Ignore the line about a damaged race, which is printed only when the race begins."""
