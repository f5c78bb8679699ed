"""`speechdp tune`: find the strategy, period, back-end, batch and learning rate that learn fastest."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro

from speechdp import exit_codes
from speechdp.cli.support.out_folder import OutFolder, inputs_of, owned_folder
from speechdp.cli.support.script_options import ScriptOptions, StartsJobs
from speechdp.cli.support.several_runs import (
    check_new,
    check_precision,
    check_training,
    race_until_stopped,
    until_stopped,
)
from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.options.run import TrainOptions
from speechdp.options.shown import BATCH_JOB_OR_HERE, heading, shown
from speechdp.process.ending import Ended

if TYPE_CHECKING:
    from speechdp.cli.support.starting import JobHosts
    from speechdp.experiments.compare.own_training import CompareRequest
    from speechdp.experiments.compare.script_training import UserScript
    from speechdp.experiments.tune.jobs import TunedJobs
    from speechdp.experiments.tune.plan import Setting
    from speechdp.experiments.tune.search import TuneRequest
    from speechdp.train.session import Session

#: Formats of a budget, for messages.
_BUDGETS = "90s, 20m or 2h"


@dataclass(frozen=True)
class TuneOptions:
    """What to try, on how many ranks, and for how long."""

    budget: Annotated[str, shown("TIME")] = "20m"
    """Time for the whole search, e.g. 90s, 20m or 2h.  Whatever is running at its end is finished."""
    ranks: Annotated[
        int | None, shown("N", "all slots of --hostfile or of the batch job, else all GPUs, else all cores")
    ] = None
    """Number of ranks that train; any --feeders are started in addition."""
    strategies: Annotated[str, shown("STRATEGY,...", "eight that are often best; docs/tune.md")] = ""
    """Strategies to try besides gradient averaging; docs/strategies.md lists them with their options.
    Those that average parameters are tried with each of --periods, unless they are given with a period."""
    periods: Annotated[str, shown("STEPS,...")] = "4,16,64"
    """Averaging periods to try, in steps."""
    seeds: Annotated[str, shown("SEED,...")] = "1,2"
    """Seeds to train the last two settings with; earlier trainings use the first seed.
    A script gets the seed in place of {seed} in its arguments, and in SPEECHDP_SEED."""
    learning_rates: Annotated[str | None, shown("RATE,...", "none: all settings have the training's own")] = (
        None
    )
    """Learning rates to train each setting with that remains after the race.
    A script gets the rate in place of {learning_rate} in its arguments: -- --lr {learning_rate}."""
    overwrite: bool = False
    """Delete the search in OUT and start over."""

    def num_ranks(self, hosts: JobHosts, *, device: str | None = None, feeders: int = 0) -> int:
        """Return the number of ranks.  Raises ConfigError if it is only one.

        Args:
            hosts: hosts of the search.
            device: auto, cpu or cuda; None: the user's script chooses.
            feeders: ranks started in addition, on cores of this machine.
        """
        if self.ranks is not None and self.ranks < 2:
            raise ConfigError(f"--ranks {self.ranks}: one rank has nothing to exchange; give 2 at least")
        if self.ranks is not None:
            return self.ranks
        if hosts.hostfile is None:
            return _ranks_here(device, feeders)
        slots = hosts.hostfile.num_slots
        ranks = slots - feeders
        if ranks < 2:
            raise ConfigError(
                f"{hosts.hostfile.source}: has {counted(slots, 'slot')}, and a search needs 2 ranks at least "
                "besides --feeders; raise slots=, add hosts or ask the scheduler for more"
            )
        # Slots may be cores, but each rank needs its own GPU if there are GPUs.
        on_gpus = _ranks_on_gpus(device) if hosts.are_counted_here else 0
        return min(ranks, on_gpus) if on_gpus else ranks

    def whole_seeds(self) -> tuple[int, ...]:
        """Return the seeds.  Raises ConfigError if one is invalid or given twice."""
        from speechdp.experiments.compare.plan import refuse_twice, whole_numbers  # noqa: PLC0415

        seeds = whole_numbers("seeds", self.seeds, least=0)
        refuse_twice("seeds", seeds)
        return seeds

    def tried(self, hosts: JobHosts, ranks: int, *, others: bool = False) -> tuple[Setting, ...]:
        """Return the settings to try.

        Args:
            others: as in `checked_strategies`.

        Raises:
            ConfigError: a strategy or a period cannot be used.
        """
        from speechdp.experiments.compare.plan import (  # noqa: PLC0415
            checked_strategies,
            refuse_twice,
            whole_numbers,
        )
        from speechdp.experiments.tune.plan import settings_of  # noqa: PLC0415

        periods = whole_numbers("periods", self.periods, least=1)
        refuse_twice("periods", periods)
        strategies = self.strategies or _strategies_for(hosts, ranks, periods)
        return settings_of(checked_strategies(strategies, others=others), periods)

    def rates(self) -> tuple[float, ...]:
        """Return the learning rates to try; empty: none.  Raises ConfigError."""
        from speechdp.experiments.compare.plan import rates  # noqa: PLC0415

        return rates(self.learning_rates)

    @property
    def budget_s(self) -> float:
        """The budget in seconds.  Raises ConfigError."""
        from speechdp.simulation.quantities import duration  # noqa: PLC0415

        return duration("--budget", self.budget, _BUDGETS)


def _ranks_here(device: str | None, feeders: int) -> int:
    """Return how many ranks fit on this machine.  Raises ConfigError, as `_ranks_on_gpus` does."""
    from speechdp.launching.cores import available_cores  # noqa: PLC0415 - keeps --help fast

    return _ranks_on_gpus(device) or max(2, available_cores() - feeders)


def _ranks_on_gpus(device: str | None) -> int:
    """Return how many ranks fit on the GPUs of this machine; 0: no GPU is used.

    Raises:
        ConfigError: only one rank fits.
    """
    from speechdp.comm.device import ranks_on_gpus  # noqa: PLC0415 - torch, for which --help must not wait

    on_gpus = ranks_on_gpus(device or "auto")
    if on_gpus == 1:
        on_cpu = "give --ranks, and an empty CUDA_VISIBLE_DEVICES" if device is None else "use --device cpu"
        raise ConfigError(
            "a search needs 2 ranks at least, and this machine has one GPU; give --hostfile, or to search on "
            f"the CPU {on_cpu}"
        )
    return on_gpus


def _strategies_for(hosts: JobHosts, ranks: int, periods: tuple[int, ...]) -> str:
    """Return the default strategies."""
    from speechdp.experiments.tune.plan import STRATEGIES, in_two_levels  # noqa: PLC0415

    placed = hosts.allocate(ranks)
    has_nodes = len(placed) > 1 and any(host.slots > 1 for host in placed)
    return f"{STRATEGIES},{in_two_levels(periods)}" if has_nodes else STRATEGIES


@dataclass(frozen=True, kw_only=True)  # fields without a default follow those of TuneOptions
class TuneCommand(TuneOptions, StartsJobs):
    """Find the setting that reaches a held-out value soonest, within a budget of time.

    It starts the ranks itself: speechdp tune DATA OUT --hostfile F --budget 20m

    It measures computing, data loading and every back-end, predicts the speed of all settings, and races the
    promising ones.  It trains the remaining ones in rungs and keeps the better half after each rung.  Ctrl-C
    shows the best so far.

    For a training script of your own: speechdp tune --script train.py OUT; see tune --script --help."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the search and its report.  The same command continues an interrupted search."""
    options: Annotated[TrainOptions, heading("training")] = field(default_factory=TrainOptions)
    backends: Annotated[str, shown("NAME,...")] = "horovod,mpi,torch"
    """Back-ends to choose from, in order of preference; those not installed are left out."""
    batch_sizes: Annotated[str, shown("SEGMENTS,...", "half and twice --batch-size")] = ""
    """Other batches per rank to try, with gradient averaging and the fastest setting; none: no others."""
    target: Annotated[float | None, shown("VALUE", "the best that all of the last settings reached")] = None
    """Held-out value to reach soonest.
    A log-probability in nats per frame; an L1 error with --task synthesis; else the task's first metric."""
    race: Annotated[int, shown("ROUNDS")] = 24
    """Rounds of the race, at least 6."""
    race_steps: Annotated[int, shown("STEPS")] = 16
    """Minimum number of steps of a turn in the race; each turn has whole averaging periods."""
    hostfile: Annotated[Path | None, shown("FILE", BATCH_JOB_OR_HERE)] = None
    """File with a line `host slots=N` for each host."""
    launch_args: Annotated[str, shown("'OPTIONS'", "none")] = ""
    """More options for `speechdp launch`, quoted as one argument: "--launcher horovodrun"."""
    threads: Annotated[int | None, shown("N", "cores / ranks, at least 1")] = None
    """CPU threads of each rank."""
    job: tyro.conf.Suppress[str] = ""
    """Job that this process is a rank of: the race, or runs in a folder of OUT; set by `tune`."""
    racing: tyro.conf.Suppress[str] = ""
    """Settings of the race."""
    parts: tyro.conf.Suppress[str] = ""
    """Parts of runs to train."""

    def run(self) -> int:
        """Search and report, or be a rank of the race; return the exit code."""
        from speechdp.experiments.tune.training import TunedTraining  # noqa: PLC0415
        from speechdp.ownership.overwrite import TUNE  # noqa: PLC0415

        if self.job:
            return self._be_a_rank()
        ranks = self._ranks()
        check_new(self.options, self.out_dir, TUNE)
        compared = self._compared(ranks)
        request = self._request(compared, ranks)
        starter = self.starter("tune", ranks, feeders=self.options.loading.feeders)
        here = starter.starts_here
        if self.overwrite:
            check_training(self.data, self.options, self.out_dir, on_this_machine=here)
        check_precision(self.data, self.options, on_this_machine=here)
        return _search(
            request,
            lambda print_line: TunedTraining(compared, starter, print_line),
            OutFolder(self.out_dir, self.overwrite, inputs_of(self.data, self.options)),
        )

    def _be_a_rank(self) -> int:
        from speechdp.cli.support.distributed import SessionRequest, train_over_ranks  # noqa: PLC0415

        job = [self.racing, self.ranks, self.race, self.race_steps, self.parts]
        others = {"OUT folder": self.out_dir, "--job": self.job, "the job": job}
        request = SessionRequest(self.data, self._shared, self.job, others)
        return train_over_ranks(request, self._train_parts if self.parts else self._hold_race)

    @property
    def _shared(self) -> TrainOptions:
        """Training options shared by the settings of a job, which has one back-end and one seed."""
        return dataclasses.replace(self.options, backend=cast(Any, self.backends), seed=int(self.seeds))

    def _train_parts(self, session: Session) -> int:
        from speechdp.cli.support.distributed import reporter_maker  # noqa: PLC0415
        from speechdp.experiments.tune.parts import Parts, train_parts  # noqa: PLC0415
        from speechdp.process.ending import Stopped  # noqa: PLC0415

        try:
            train_parts(
                session,
                self._shared,
                Parts.of(self.parts),
                self.out_dir / self.job,
                reporter_maker(session.comm),
            )
        except Stopped:
            session.reporter.notice("stopped as requested; the same command continues the search")
            return exit_codes.STOPPED
        return 0

    def _hold_race(self, session: Session) -> int:
        from speechdp.experiments.race.run import hold_race  # noqa: PLC0415
        from speechdp.experiments.tune.training import race_of, settings_in  # noqa: PLC0415

        ranks = session.comm.size
        plan = race_of(self._compared(ranks), settings_in(self.racing), ranks, self._shared)
        remedy = "a setting that fails by itself is left out"
        return race_until_stopped(
            session, lambda: hold_race(session, self._shared, plan, self.out_dir, remedy)
        )

    @property
    def _trained(self) -> TrainOptions:
        """Options for measuring and racing, with the lowest learning rate, the least likely to diverge."""
        rates = self.rates()
        if not rates:
            return self.options
        self.options.optimizer.refuse_rate()
        return self.options.with_setting(self.options.strategy, learning_rate=min(rates))

    def _ranks(self) -> int:
        options = self.options
        return self.num_ranks(self.hosts, device=options.device, feeders=options.loading.feeders)

    def _compared(self, ranks: int) -> CompareRequest:
        """Return the search as a comparison, because it runs a comparison's jobs."""
        from speechdp.data.shards.dataset import Dataset  # noqa: PLC0415
        from speechdp.experiments.compare.own_training import CompareRequest  # noqa: PLC0415
        from speechdp.experiments.compare.plan import FRAMES, SEQUENTIAL, ComparePlan  # noqa: PLC0415
        from speechdp.experiments.race.plan import RaceOptions  # noqa: PLC0415
        from speechdp.report.runs.raced import LEAST_ROUNDS  # noqa: PLC0415

        if self.race < LEAST_ROUNDS:
            raise ConfigError(f"--race {self.race}: intervals need {LEAST_ROUNDS} rounds at least")
        dataset = Dataset.open(self.data)
        for split in (self.options.train_split, self.options.held_out):
            dataset.shard_paths(split)
        return CompareRequest(
            data=self.data,
            data_checksum=dataset.checksum,
            out=self.out_dir,
            options=self._trained,
            plan=ComparePlan((SEQUENTIAL,), (ranks,), self.whole_seeds(), (FRAMES,), self.options.num_epochs),
            decode_split="",
            race=RaceOptions(self.race, self.race_steps),
        )

    def _request(self, compared: CompareRequest, ranks: int) -> TuneRequest:
        from speechdp.experiments.tune.search import TunedTarget, TuneRequest, other_batches  # noqa: PLC0415
        from speechdp.tasks.metrics import TaskRecord  # noqa: PLC0415

        return TuneRequest(
            out=self.out_dir,
            ranks=ranks,
            tried=self.tried(self.hosts, ranks),
            backends=_backends(self.backends),
            batch_sizes=other_batches(self.options, ranks, self._batch_sizes()),
            budget_s=self.budget_s,
            target=TunedTarget(self.target, TaskRecord(self.options.make_task().metrics)),
            seeds=self.whole_seeds(),
            race=compared.race,
            trained=compared.settings(),
            own_batch=self.options.resolve(ranks).plan().batch_size,
            learning_rates=self.rates(),
        )

    def _batch_sizes(self) -> tuple[int, ...] | None:
        from speechdp.experiments.compare.plan import whole_numbers  # noqa: PLC0415

        if not self.batch_sizes:
            return None
        return () if self.batch_sizes == "none" else whole_numbers("batch-sizes", self.batch_sizes, least=1)


@dataclass(frozen=True, kw_only=True)
class TuneScriptCommand(TuneOptions):
    """Find the setting with which a script of your own reaches a value soonest, within a budget of time.

    It starts the ranks itself: speechdp tune --script train.py OUT --budget 30m -- ARGUMENTS

    The script trains with speechdp.DataParallel and is not edited.  The search pauses and continues it, so it
    has to check run.should_stop after each step and save if it is set, to load its checkpoint, and to log a
    value inside run.evaluating() (docs/api.md).  The strategy, the folder and the seed (SPEECHDP_SEED) are
    passed in environment variables."""

    out_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the search and its report.  The same command continues an interrupted search."""
    script: Annotated[ScriptOptions, heading("script")]
    budget: Annotated[str, shown("TIME")] = "30m"
    backends: Annotated[str, shown("NAME,...", "that of --backend")] = ""
    """Back-ends to choose from, in order of preference; those not installed are left out."""
    race: Annotated[int, shown("ROUNDS")] = 6
    """Rounds of short runs that compare speeds; fewer if they would take more than a quarter of the budget.
    An interval needs 6."""
    race_steps: Annotated[int, shown("STEPS")] = 32
    """Minimum number of steps of such a run; each has whole averaging periods."""
    script_arguments: tyro.conf.Suppress[tuple[str, ...]] = ()
    """What follows `--`."""

    def run(self) -> int:
        """Search and report; return the exit code."""
        from speechdp.experiments.tune.script import TunedScript  # noqa: PLC0415

        self.script.check()
        if self.race < 1:
            raise ConfigError(f"--race {self.race}: speeds are compared in one round at least")
        ranks = self.num_ranks(self.script.hosts)
        script = self.script.user_script(self.script_arguments)
        script.check_rates(given=bool(self.rates()))
        starter = self.script.starter("tune", ranks)
        request = self._request(script, ranks)
        return _search(
            request,
            lambda print_line: TunedScript(request, script, starter, self.script.metric, print_line),
            OutFolder(self.out_dir, self.overwrite),
        )

    def _request(self, script: UserScript, ranks: int) -> TuneRequest:
        from speechdp.experiments.race.plan import RaceOptions  # noqa: PLC0415
        from speechdp.experiments.tune.search import TunedTarget, TuneRequest  # noqa: PLC0415
        from speechdp.report.runs.script_metric import script_task  # noqa: PLC0415

        metric, target = self.script.metric, self.script.target
        if target is not None and not metric:
            raise ConfigError(f"--target {target:g}: give --metric, the name of the value")
        return TuneRequest(
            out=self.out_dir,
            ranks=ranks,
            tried=self.tried(self.script.hosts, ranks, others=True),
            backends=_backends(self.backends) if self.backends else (script.backend,),
            batch_sizes=(),
            budget_s=self.budget_s,
            target=TunedTarget(target, script_task(metric)),
            seeds=self.whole_seeds(),
            race=RaceOptions(self.race, self.race_steps),
            trained={
                "script": str(script.path.absolute()),
                "command line": shlex.join(script.arguments),
                "metric": metric,
            },
            learning_rates=self.rates(),
        )


def _search(request: TuneRequest, jobs: Callable[[Callable[[str], None]], TunedJobs], out: OutFolder) -> int:
    """Search and report; return the exit code.

    Args:
        jobs: makes the jobs, given a function that takes a line of progress.
    """
    from speechdp.cli.report import print_report  # noqa: PLC0415
    from speechdp.cli.support.console import line_printer  # noqa: PLC0415
    from speechdp.experiments.tune.record import holds_other_unmeasured  # noqa: PLC0415
    from speechdp.experiments.tune.run import Tuner  # noqa: PLC0415
    from speechdp.experiments.tune.search import earlier_settings  # noqa: PLC0415
    from speechdp.ownership.overwrite import TUNE, empty  # noqa: PLC0415

    print_line = line_printer()
    # Before the folder is emptied, because this refuses an impossible search.
    tuner = Tuner(request, jobs(print_line), print_line)
    with owned_folder(out, "tune", print_line, TUNE) as owner:
        if holds_other_unmeasured(request.out, request.settings, earlier_settings()):
            print_line(
                f"{request.out}: an earlier search with other options measured nothing; it is replaced"
            )
            empty(owner, TUNE)

        def work() -> int:
            tuner.run()
            print_report(request.out, None)
            return 0

        code = until_stopped(request.out, print_line, work)
        if code == exit_codes.STOPPED and _has_best(request.out):
            with suppress(Ended):  # a stop may be requested again
                print_report(request.out, None)
    return code


def _backends(text: str) -> tuple[str, ...]:
    from speechdp.comm.startup.create import BACKENDS  # noqa: PLC0415

    backends = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not backends or set(backends) - set(BACKENDS):
        raise ConfigError(f"--backends {text!r}: choose among {', '.join(BACKENDS)}")
    return backends


def _has_best(out: Path) -> bool:
    from speechdp.experiments.tune.record import FILE_NAME, read_tune  # noqa: PLC0415

    return (out / FILE_NAME).is_file() and bool(read_tune(out).chosen)
