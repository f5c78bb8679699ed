"""`speechdp compare`: train with several strategies on several numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from speechdp.cli.support.out_folder import OutFolder, inputs_of, owned_folder
from speechdp.cli.support.script_options import ScriptOptions, StartsJobs
from speechdp.cli.support.several_runs import (
    check_new,
    check_precision,
    check_target,
    check_training,
    race_until_stopped,
    report_failures,
    until_stopped,
)
from speechdp.counting import counted
from speechdp.options.run import TrainOptions
from speechdp.options.shown import BATCH_JOB_OR_HERE, MAY_BE_EMPTY, heading, shown

if TYPE_CHECKING:
    from speechdp.experiments.compare.own_training import CompareRequest
    from speechdp.experiments.compare.plan import ComparePlan
    from speechdp.experiments.compare.training import ComparedTraining
    from speechdp.train.session import Session


@dataclass(frozen=True)
class CompareCommand(StartsJobs):
    """Train with several strategies on several numbers of ranks, decode, and report.

    It starts the ranks itself: speechdp compare DATA OUT --strategies gradient_averaging,bmuf:period=16

    For a training script of your own: speechdp compare --script train.py OUT; see compare --script --help."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the runs and the report.  Finished runs in it are kept, interrupted ones continue."""
    options: Annotated[TrainOptions, heading("training")] = field(default_factory=TrainOptions)
    strategies: Annotated[str, shown("STRATEGY,...")] = "gradient_averaging,model_averaging:period=16"
    """Strategies to compare; docs/strategies.md lists them with their options.
    For example, gradient_averaging,bmuf:period=16,eta=0.5,diloco are three strategies."""
    ranks: Annotated[str, shown("N,...")] = "1,2"
    """Numbers of training ranks to compare on; --feeders are started in addition.
    One rank has nothing to exchange and is run once, as the reference for all strategies."""
    seeds: Annotated[str, shown("SEED,...")] = "1"
    """Seeds to train every strategy with; use at least three to draw conclusions."""
    learning_rates: Annotated[str | None, shown("RATE,...", "none: all train with --learning-rate")] = None
    """Learning rates to try, each once for every strategy on every number of ranks.
    The runs of a strategy then use its best rate by held-out value, so none is judged at another's rate."""
    modes: Annotated[str, shown("MODE,...")] = "frames,time"
    """What is kept equal across runs.
    frames: the number of epochs; time: the training time, about that of the slowest run in mode frames."""
    decode_split: Annotated[str, shown("SPLIT"), MAY_BE_EMPTY] = "test"
    """Split to decode for the word error rate; empty: none.  Not used with --task synthesis."""
    race: Annotated[int, shown("ROUNDS")] = 24
    """Rounds of the race after the runs: all strategies take turns, so that their speeds can be compared.
    There is one race for each number of ranks.  An interval needs at least 6 rounds.
    0: no race; speeds are those of the runs, or of an earlier race."""
    race_steps: Annotated[int, shown("STEPS")] = 16
    """Minimum number of steps of a turn in the race; each turn has whole averaging periods."""
    hostfile: Annotated[Path | None, shown("FILE", BATCH_JOB_OR_HERE)] = None
    """File with a line `host slots=N` for each host."""
    launch_args: Annotated[str, shown("'OPTIONS'", "none")] = ""
    """More options for `speechdp launch`, quoted as one argument: "--launcher horovodrun"."""
    threads: Annotated[int | None, shown("N", "cores / largest number of ranks, at least 1")] = None
    """CPU threads of each rank, the same in all runs."""
    target: Annotated[
        float | None, shown("VALUE", "the best value that three quarters of the runs in mode frames reached")
    ] = None
    """Report the time each run took to reach this held-out value.
    A log-probability in nats per frame; an L1 error with --task synthesis; else the task's first metric."""
    overwrite: bool = False
    """Delete the comparison in OUT and start over."""
    job: tyro.conf.Suppress[str] = ""
    """Race that this process is a rank of; given by `compare` to the ranks it starts."""

    def run(self) -> int:
        """Make the comparison and its report, or be a rank of a race; return the exit code."""
        from speechdp.experiments.compare.own_training import OwnTraining  # noqa: PLC0415
        from speechdp.experiments.compare.record import threads_before  # noqa: PLC0415
        from speechdp.ownership.overwrite import COMPARISON  # noqa: PLC0415

        if self.job:
            return self._be_a_rank()
        check_target(self.target, self.options.make_task().record())
        check_new(self.options, self.out_dir, COMPARISON)
        request = self._request(self._plan())
        before = None if self.overwrite else threads_before(self.out_dir)
        starter = self.starter("compare", max(request.plan.ranks), before, self.options.loading.feeders)
        here = starter.starts_here
        if self.overwrite:
            check_training(self.data, self.options, self.out_dir, on_this_machine=here)
        check_precision(self.data, self.options, on_this_machine=here)
        return _compare(
            OutFolder(self.out_dir, self.overwrite, inputs_of(self.data, self.options)),
            request.plan,
            lambda print_line: OwnTraining(request, starter, print_line),
            _announcement(request),
            starter.threads,
            target=self.target,
        )

    def _be_a_rank(self) -> int:
        from speechdp.cli.support.distributed import SessionRequest, train_over_ranks  # noqa: PLC0415

        race = [self.strategies, self.ranks, self.seeds, self.race, self.race_steps]
        others = {"OUT folder": self.out_dir, "--job": self.job, "race": race}
        return train_over_ranks(SessionRequest(self.data, self.options, self.job, others), self._on_rank)

    def _on_rank(self, session: Session) -> int:
        from speechdp.experiments.compare.plan import SEQUENTIAL  # noqa: PLC0415
        from speechdp.experiments.race.run import hold_race  # noqa: PLC0415

        plan = self._plan()
        request = self._request(plan)
        options = request.options_of(SEQUENTIAL, plan.seeds[0])
        race = request.race_on(session.comm.size, plan.strategies, options)
        return race_until_stopped(session, lambda: hold_race(session, options, race, self.out_dir))

    def _plan(self) -> ComparePlan:
        from speechdp.experiments.compare.plan import ComparePlan, checked_strategies, rates, whole_numbers  # noqa: PLC0415

        return ComparePlan(
            strategies=checked_strategies(self.strategies),
            ranks=whole_numbers("ranks", self.ranks, least=1),
            seeds=whole_numbers("seeds", self.seeds, least=0),
            modes=tuple(filter(None, self.modes.split(","))),
            epochs=self.options.num_epochs,
            learning_rates=rates(self.learning_rates),
        )

    def _request(self, plan: ComparePlan) -> CompareRequest:
        from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
        from speechdp.experiments.compare.own_training import CompareRequest  # noqa: PLC0415
        from speechdp.experiments.race.plan import RaceOptions  # noqa: PLC0415
        from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs  # noqa: PLC0415
        from speechdp.launching.cores import available_cores  # noqa: PLC0415

        dataset = Dataset.open(self.data)
        decode_split = self.options.to_decode(self.decode_split)
        if decode_split:
            refuse_kaldi_pdfs(dataset.classes_path, '--decode-split ("" for none)')
        for split in filter(None, (self.options.train_split, self.options.held_out, decode_split)):
            dataset.shard_paths(split)
        if plan.learning_rates:
            self.options.optimizer.refuse_rate()
        # A rank of a race decodes nothing, and may see other hosts than the command that started it.
        decodes_here = not self.job and self.hosts.are_counted_here
        return CompareRequest(
            data=self.data,
            data_checksum=dataset.checksum,
            out=self.out_dir,
            options=self.options,
            plan=plan,
            decode_split=decode_split,
            most_decoding_ranks=available_cores() if decodes_here else None,
            race=RaceOptions(self.race, self.race_steps),
        )


@dataclass(frozen=True)
class CompareScriptCommand:
    """Run a training script of your own with several strategies on several numbers of ranks, and report.

    It starts the ranks itself:

    speechdp compare --script train.py OUT --strategies gradient_averaging,bmuf:period=16 -- ARGUMENTS

    The script trains with speechdp.DataParallel and is not edited: the strategy, the folder and
    the seed (SPEECHDP_SEED) are passed in environment variables."""

    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the runs and the report.  Finished runs in it are kept.
    Others resume if the script loads its checkpoint, else they start over."""
    script: Annotated[ScriptOptions, heading("script")]
    strategies: Annotated[str, shown("STRATEGY,...")] = "gradient_averaging,model_averaging:period=16"
    """Strategies to compare; docs/strategies.md lists them with their options.
    For example, gradient_averaging,bmuf:period=16,eta=0.5,diloco are three strategies."""
    ranks: Annotated[str, shown("N,...")] = "1,2"
    """Numbers of ranks to compare on.
    One rank has nothing to exchange and is run once, as the reference for all strategies."""
    seeds: Annotated[str, shown("SEED,...")] = "1"
    """Seeds, one run each: a seed replaces {seed} in the script's arguments and is in SPEECHDP_SEED.
    Use at least three to draw conclusions."""
    learning_rates: Annotated[str | None, shown("RATE,...", "none: the script's own")] = None
    """Learning rates to try, each in one run of every strategy on every number of ranks.
    A rate replaces {learning_rate} in the script's arguments: -- --lr {learning_rate}.
    The runs of a strategy then use its best rate by final metric."""
    race: Annotated[int, shown("ROUNDS")] = 6
    """Rounds of the race after the runs: short runs of all settings in turn, so that speeds can be compared.
    Each starts the script anew.  An interval needs at least 6 rounds.
    0: no race; speeds are those of the runs, or of an earlier race."""
    race_steps: Annotated[int, shown("STEPS")] = 32
    """Minimum number of steps of such a short run; each has whole averaging periods."""
    overwrite: bool = False
    """Delete the comparison in OUT and start over."""
    script_arguments: tyro.conf.Suppress[tuple[str, ...]] = ()
    """What follows `--`."""

    def run(self) -> int:
        """Make the comparison and its report; return the exit code: 1 if a run failed."""
        from speechdp.experiments.compare.plan import (  # noqa: PLC0415
            FRAMES,
            ComparePlan,
            checked_strategies,
            rates,
            whole_numbers,
        )
        from speechdp.experiments.compare.record import threads_before  # noqa: PLC0415
        from speechdp.experiments.compare.script_training import ComparedScript  # noqa: PLC0415
        from speechdp.experiments.race.plan import RaceOptions  # noqa: PLC0415

        self.script.check()
        plan = ComparePlan(
            strategies=checked_strategies(self.strategies, others=True),
            ranks=whole_numbers("ranks", self.ranks, least=1),
            seeds=whole_numbers("seeds", self.seeds, least=0),
            modes=(FRAMES,),
            epochs=None,
            learning_rates=rates(self.learning_rates),
        )
        race = RaceOptions(self.race, self.race_steps)
        script = self.script.user_script(self.script_arguments)
        script.check_rates(given=bool(plan.learning_rates))
        before = None if self.overwrite else threads_before(self.out_dir)
        starter = self.script.starter("compare", max(plan.ranks), before)
        return _compare(
            OutFolder(self.out_dir, self.overwrite),
            plan,
            lambda print_line: ComparedScript(script, starter, race, print_line, self.out_dir, plan),
            [f"{_runs_of(plan)} of {self.script.script}"],
            starter.threads,
            target=self.script.target,
            metric=self.script.metric,
        )


def _compare(
    out: OutFolder,
    plan: ComparePlan,
    training: Callable[[Callable[[str], None]], ComparedTraining],
    announcement: Sequence[str],
    threads: int | None,
    *,
    target: float | None,
    metric: str = "",
) -> int:
    """Make a comparison and its report; return the exit code: 1 if a run failed.

    Args:
        training: makes the training, given a function that takes a line of progress.
        announcement: lines to print first.
        threads: CPU threads of each rank.
    """
    from speechdp.cli.report import print_report  # noqa: PLC0415
    from speechdp.cli.support.console import line_printer  # noqa: PLC0415
    from speechdp.experiments.compare.run import Comparer  # noqa: PLC0415
    from speechdp.experiments.jobs import LOGS  # noqa: PLC0415
    from speechdp.experiments.record import FAILED  # noqa: PLC0415
    from speechdp.ownership.overwrite import COMPARISON  # noqa: PLC0415

    print_line = line_printer()
    # Before the folder is emptied, because this refuses an impossible comparison.
    comparer = Comparer(out.path, plan, training(print_line), print_line, metric=metric, threads=threads)
    with owned_folder(out, "compare", print_line, COMPARISON):
        for line in announcement:
            print_line(line)

        def work() -> int:
            record = comparer.run()
            print_report(out.path, target, metric)
            failed = sum(run.state == FAILED for run in record.runs)
            report_failures(failed, len(record.runs), out.path / LOGS)
            return 1 if failed or record.failed_races else 0

        return until_stopped(out.path, print_line, work)


def _runs_of(plan: ComparePlan) -> str:
    """Return a line on how many runs there are, and how many runs before them try learning rates."""
    runs, trials = counted(len(plan.runs()), "run"), len(plan.trials())
    return f"{runs}, after {trials} that try learning rates" if trials else runs


def _announcement(request: CompareRequest) -> list[str]:
    """Return lines on what will be trained and what a step holds; refuse an indivisible global batch."""
    from speechdp.train.build import training_ranks  # noqa: PLC0415

    plan = request.plan
    batches: dict[int, int] = {}
    for ranks in sorted(plan.ranks):
        workers = {training_ranks(request.options_of(name, 0), ranks) for name in plan.strategies_on(ranks)}
        batches |= {count: request.options.resolve(count).plan().batch_size for count in sorted(workers)}
    words = [
        f"{batch} on each of {counted(count, 'training rank')} ({count * batch} together)"
        for count, batch in batches.items()
    ]
    lines = [f"{_runs_of(plan)}; segments per step: {', '.join(words)}"]
    if len({count * batch for count, batch in batches.items()}) > 1:
        lines.append(
            "the batch size is per rank: at equal frames, more ranks make fewer updates "
            "(--global-batch keeps their number)"
        )
    return lines
