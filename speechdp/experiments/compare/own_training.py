"""Make the runs of a comparison with our trainer: `speechdp train`, then `speechdp decode`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.data.shards.dataset import Dataset
from speechdp.decode.results import has_word_errors
from speechdp.errors import RunError
from speechdp.experiments.arguments import refuse_throughout, split_to_tune_on, train_arguments
from speechdp.experiments.compare.plan import RATES, SEQUENTIAL, ComparePlan, stretched
from speechdp.experiments.compare.record import RunRecord
from speechdp.experiments.compare.training import ComparedTraining, log_of
from speechdp.experiments.jobs import JobStarter
from speechdp.experiments.race.plan import RaceOptions, RacePlan, RaceSetting, shared_training
from speechdp.experiments.race.record import find_race, is_of
from speechdp.options.run import TrainOptions
from speechdp.options.targets import warn_of_spread_targets
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.run_files import RunDirectory
from speechdp.report.runs.results import ONE_RANK
from speechdp.train.realign import last_alignment

ALIGNMENT = "alignment"
#: Message about a job that ended well without writing its record.
NOTHING_LEFT = "the job exited with code 0 but left no record (is OUT a shared folder?)"


@dataclass(frozen=True)
class CompareRequest:
    """A comparison to be made.

    Attributes:
        data: data directory, and its checksum.
        out: folder of the comparison.
        options: options of every run; strategy, seed, and epochs at equal time are set for each run.
        decode_split: split whose word error rate is reported; "" for none.
        most_decoding_ranks: ranks above which decoding on this machine gets no faster; None: no limit.
        race: length of the races; there is one for each number of ranks.
    """

    data: Path
    data_checksum: str
    out: Path
    options: TrainOptions
    plan: ComparePlan
    decode_split: str
    most_decoding_ranks: int | None = None
    race: RaceOptions = field(default_factory=RaceOptions)

    def settings(self) -> dict[str, Any]:
        """Return the settings that all runs share."""
        options = self.options.to_json()
        return {
            "data": self.data_checksum,
            "decode_split": self.decode_split,
            **{key: value for key, value in options.items() if key not in ("strategy", "seed")},
        }

    def options_of(
        self, strategy: StrategyChoice, seed: int, learning_rate: float | None = None
    ) -> TrainOptions:
        """Return the options of a run at equal frames, with the run's own learning rate if it has one."""
        options = self.options.with_setting(strategy, learning_rate=learning_rate)
        return dataclasses.replace(options, seed=seed)

    def race_on(self, ranks: int, strategies: Sequence[StrategyChoice], options: TrainOptions) -> RacePlan:
        """Return the race of strategies on `ranks` ranks; if one rank was compared, it races too.

        The learning rate does not change the time of a step, so all race with the training's own rate.

        Args:
            options: options that the settings share, as passed to the ranks.
        """
        settings = [RaceSetting(strategy.text, strategy) for strategy in strategies]
        if 1 in self.plan.ranks:
            settings.insert(0, RaceSetting(ONE_RANK, SEQUENTIAL, alone=True))
        training = shared_training(self.data_checksum, options)
        return self.race.plan(ranks, self.plan.seeds[0], settings, training)


class OwnTraining(ComparedTraining):
    """Trains and decodes with `speechdp`.

    Args:
        print_line: prints a line of progress.

    Raises:
        ConfigError: options that runs to be compared cannot have.
    """

    def __init__(
        self, request: CompareRequest, starter: JobStarter, print_line: Callable[[str], None]
    ) -> None:
        refuse_throughout(request.options)
        self._request, self._starter, self._print_line = request, starter, print_line
        self._alignments = request.options.alignments

    def settings(self) -> dict[str, Any]:
        """Return the settings that all runs share."""
        return self._request.settings()

    def begin(self) -> None:
        """Make the targets of all runs once, with the fewest ranks, which is closest to plain training.

        This also prints, once for all runs, the notice of `train` about targets that are not an alignment.
        """
        request, options = self._request, self._request.options
        warn_of_spread_targets(options, lambda: Dataset.open(request.data), self._print_line)
        if not options.aligns:
            return
        run_dir = (request.out / ALIGNMENT).absolute()
        if not RunDirectory(run_dir).is_complete:
            plan = request.plan
            ranks = min(plan.ranks)
            own = dataclasses.replace(
                request.options_of(SEQUENTIAL, plan.seeds[0]),
                epochs=1,
                average_epochs=1,
                realign_epochs=(options.realign_epochs or options.num_epochs) if options.realign else None,
            )
            log = log_of(request.out / ALIGNMENT)
            self._print_line(f"alignment: started; {log} shows how far it is")
            message = self._train(run_dir, own, ranks)
            if message is not None:
                raise RunError(f"{run_dir}: the alignment failed: {message}")
        self._alignments = last_alignment(run_dir, options)

    def is_done(self, run: RunRecord, run_dir: Path) -> bool:
        """Return whether a run is trained and, unless it only tries a learning rate, decoded."""
        split = self._split_of(run)
        decoded = split == "" or has_word_errors(run_dir, split)
        return decoded and RunDirectory(run_dir).is_complete

    def _split_of(self, run: RunRecord) -> str:
        """Return the split to decode after a run; "": none."""
        return "" if run.mode == RATES else self._request.decode_split

    def run(self, run: RunRecord, run_dir: Path) -> str | None:
        """Train and decode a run as far as it is not done; return None, or the cause of failure."""
        request, directory = self._request, RunDirectory(run_dir)
        if not (directory.is_complete and directory.has_model):
            options = request.options_of(run.strategy, run.seed, run.learning_rate)
            assert run.epochs is not None
            if run.epochs != options.num_epochs:
                options = stretched(options, run.epochs)
            message = self._train(run_dir, options.on_alignments(self._alignments), run.ranks)
            if message is not None:
                return message
        split = self._split_of(run)
        if not split:
            return None
        ranks = min(run.ranks, request.most_decoding_ranks or run.ranks)
        words = ["decode", str(run_dir), str(request.data.absolute()), "--split", split]
        words += [f"--device={request.options.device}"]
        if request.options.task != TrainOptions().task:  # the file does not name the network's class
            words += [f"--task={request.options.task}"]
        tune_on = split_to_tune_on(request.data, request.options.held_out, split)
        words += [f"--tune-on={tune_on}"] if tune_on is not None else []
        if ranks > 1:
            words += [f"--backend={request.options.backend}"]
        from speechdp.decode.kept_graph import KeptGraph  # noqa: PLC0415 (OpenFst)

        message = self._starter.run(ranks, words, log_of(run_dir), folder=run_dir)
        KeptGraph(run_dir).discard()  # each run has its own graph; together they would fill a disk
        return message

    def race(self, ranks: int, runs: Sequence[RunRecord]) -> str | None:
        """Race strategies on `ranks` ranks, unless they have raced; return None, or the cause of failure."""
        request, strategies = self._request, [run.strategy for run in runs if run.ranks == ranks]
        options = request.options_of(SEQUENTIAL, request.plan.seeds[0]).on_alignments(self._alignments)
        plan = request.race_on(ranks, strategies, options)
        if not plan.is_race or _was_held(request.out, plan):
            return None
        log = log_of(request.out / f"race-{ranks}")
        settings, rounds = counted(len(plan.settings), "setting"), counted(plan.rounds, "round")
        self._print_line(
            f"race on {ranks} ranks: {settings} in turn, {rounds}, started; {log} shows the time left"
        )
        words = ["compare", str(request.data.absolute()), str(request.out.absolute()), f"--job=race-{ranks}"]
        words += [f"--strategies={','.join(choice.text for choice in strategies)}", f"--seeds={options.seed}"]
        words += [f"--ranks={'1,' if 1 in request.plan.ranks else ''}{ranks}"]
        words += [f"--race={request.race.rounds}", f"--race-steps={request.race.least_steps}"]
        words += [f"--decode-split={request.decode_split}"]
        words += train_arguments(dataclasses.replace(options, seed=TrainOptions().seed))
        num_ranks = ranks + options.loading.feeders
        message = self._starter.run(num_ranks, words, log, folder=request.out)
        if message is None and not _was_held(request.out, plan):
            message = NOTHING_LEFT
        self._print_line(f"race on {ranks} ranks: {'done' if message is None else f'failed: {message}'}")
        return message

    def _train(self, run_dir: Path, options: TrainOptions, ranks: int, pause_at: int = 0) -> str | None:
        """Start or continue a run, to its end or to a step; return None, or the cause of failure."""
        if ranks == 1:  # other back-ends would have nothing to do, and some need a launcher
            options = dataclasses.replace(options, backend="auto")
        words = ["train", str(self._request.data.absolute()), str(run_dir), *train_arguments(options)]
        # `ranks` counts only the ranks that train.
        num_ranks = ranks + options.loading.feeders
        words += ["--resume", *([f"--pause-at={pause_at}"] if pause_at else [])]
        message = self._starter.run(num_ranks, words, log_of(run_dir), folder=run_dir, may_pause=pause_at > 0)
        if message is None and not pause_at and not RunDirectory(run_dir).is_complete:
            return "the job exited with code 0 but left no completed.json (a host may have been lost)"
        return message


def _was_held(out: Path, plan: RacePlan) -> bool:
    """Return whether a race is recorded; one whose record is damaged is held again."""
    try:
        race = find_race(out, plan.ranks)
    except RunError:
        return False
    return race is not None and is_of(race, plan)
