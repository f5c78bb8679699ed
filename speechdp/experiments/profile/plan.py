"""Decide on the jobs of a profile, with their batches, loaders and steps: pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from speechdp.data.plan.orders import GROUP_BATCHES
from speechdp.errors import ConfigError
from speechdp.experiments.profile.record import (
    BLOCKING,
    FED,
    KINDS,
    LOADER_KINDS,
    MODULES,
    POOLED,
    STRONG,
    WEAK,
    JobEntry,
)
from speechdp.options.batch import BatchOptions, LoadingOptions
from speechdp.options.recipe import find_recipe
from speechdp.options.run import TrainOptions

#: Twice the steps between two stops of the blocking trainloader; the first stop alone would not be typical.
TWO_STOPS = 2 * GROUP_BATCHES


@dataclass(frozen=True)
class PlannedJob:
    """A job to be run and the options of its training steps."""

    entry: JobEntry
    options: TrainOptions

    @property
    def num_processes(self) -> int:
        """Ranks to start on one machine: training ranks and feeders."""
        return self.entry.ranks + self.options.loading.feeders


@dataclass(frozen=True)
class ProfilePlan:
    """What to measure.

    Attributes:
        ranks: numbers of ranks, ascending.
        only: kinds of jobs; empty: all that the other fields request.
        strong: also measure with a constant batch over all ranks.
        steps: steps of each rank.
        warmup: initial steps that are recorded but left out of means.
        loader_steps: steps of the jobs that compare loaders; None: enough for the blocking one.
        poster_iterations: N ranks take N times as many steps, as on the IBM/NTU poster.
    """

    ranks: tuple[int, ...]
    only: tuple[str, ...] = ()
    strong: bool = False
    steps: int = 20
    warmup: int = 3
    loader_steps: int | None = None
    poster_iterations: bool = False

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1 or len(set(self.ranks)) < len(self.ranks):
            raise ConfigError(f"--ranks {self.ranks}: write different numbers of ranks from 1, e.g. 1,2,4")
        for kind in self.only:
            if kind not in KINDS:
                raise ConfigError(f"--only {kind}: choose from {', '.join(KINDS)}")
        if not 0 <= self.warmup < self.steps:
            raise ConfigError(f"--warmup {self.warmup}: leaves none of --steps {self.steps}; give more steps")
        if self.loader_steps is not None and self.loader_steps <= self.warmup:
            raise ConfigError(f"--loader-steps {self.loader_steps}: must be more than --warmup {self.warmup}")

    def kinds(self, options: TrainOptions) -> tuple[str, ...]:
        """Return the kinds of jobs, in the order of KINDS.  Raises ConfigError: not for this task."""
        task = options.task_class
        modules = task.modules
        for kind in self.only:
            if kind in MODULES and kind not in modules:
                raise ConfigError(
                    f"--only {kind}: a model of --task {task.name} has no {kind}, but {', '.join(modules)}"
                )
        chosen = set(self.only) or {WEAK, *modules, POOLED}
        if not self.only and not options.batch.batch_frames:
            chosen.add(BLOCKING)
        if not self.only and options.loading.feeders:
            chosen.add(FED)
        if self.strong and (not self.only or WEAK in chosen):
            chosen.add(STRONG)
        if FED in chosen and not options.loading.feeders:
            raise ConfigError("--only fed: needs --feeders, the ranks that feed the others")
        return tuple(kind for kind in KINDS if kind in chosen)

    def jobs(self, options: TrainOptions) -> list[PlannedJob]:
        """Return all jobs in the order in which they are run.

        Raises:
            ConfigError: options that a profile does not support, or a batch not divisible by the ranks.
        """
        check_options(options)
        return list(self._jobs(options, self.kinds(options)))

    def _jobs(self, options: TrainOptions, kinds: tuple[str, ...]) -> Iterator[PlannedJob]:
        for kind in kinds:
            # Trainloaders are compared with one another only on the most ranks.
            for ranks in sorted(self.ranks)[-1:] if kind in LOADER_KINDS else sorted(self.ranks):
                own = _options_of(kind, ranks, options)
                # On one rank both batches are the same, so measure it once.
                folder = f"{WEAK if kind == STRONG and ranks == 1 and WEAK in kinds else kind}-{ranks}"
                yield PlannedJob(
                    JobEntry(
                        name=f"{kind}-{ranks}",
                        kind=kind,
                        ranks=ranks,
                        batch_size=own.batch.batch_size or 0,
                        loader="none" if kind in MODULES else own.batch.order,
                        folder=folder,
                        steps=self._steps(kind, ranks),
                    ),
                    own,
                )

    def _steps(self, kind: str, ranks: int) -> int:
        if kind in LOADER_KINDS:
            # The second stop comes just before the next step.
            return self.loader_steps or max(self.steps, TWO_STOPS + max(1, self.warmup))
        return self.steps * ranks if self.poster_iterations and kind != STRONG else self.steps


def check_options(options: TrainOptions) -> None:
    """Refuse training options that a profile does not support.  Raises ConfigError."""
    recipe_batch = options.batch.batch_size is None and find_recipe(options.recipe).global_batch is not None
    if options.batch.global_batch is not None or (recipe_batch and not options.batch.batch_frames):
        raise ConfigError(
            "--global-batch does not apply to profile: give --batch-size, the batch of each rank; --strong "
            "measures with a constant batch over all ranks too"
        )
    if options.max_steps:
        raise ConfigError("--max-steps does not apply to profile: use --steps")
    if not options.task_class.modules:
        raise ConfigError(
            f"--task {options.task_class.name}: declares no modules that profile could time; give the class "
            "`modules` and `stages` (docs/api.md), or see where the steps' time goes by speechdp report RUN"
        )
    if options.aligns:
        raise ConfigError(
            f"{options.aligning[0]} does not apply to profile: it measures steps of one training"
        )
    if options.batch.order == "blocking-sort":
        raise ConfigError("--order blocking-sort: profile measures it by itself, in the job blocking-N")
    strategy = options.strategy.parsed
    if not strategy.traits.synchronous:
        raise ConfigError(
            f"--strategy {strategy.name}: its ranks take no common steps that could be measured; give "
            "--strategy gradient_averaging, which differs only in exchange and waiting"
        )


def batch_of_rank(options: TrainOptions) -> int:
    """Return the segments or utterances of a rank per step; 0 with --batch-frames.

    Args:
        options: options without a global batch, so that the result does not depend on the number of ranks.
    """
    return options.resolve(1).batch.batch_size or 0


def _options_of(kind: str, ranks: int, options: TrainOptions) -> TrainOptions:
    loading: LoadingOptions = options.loading
    if kind != FED:
        loading = dataclasses.replace(loading, feeders=0)
    batch = dataclasses.replace(options.batch, batch_size=batch_of_rank(options) or None)
    if kind == STRONG:
        batch = _shared_out(batch, ranks)
    if kind == BLOCKING:
        batch = dataclasses.replace(batch, order="blocking-sort")
    if kind == POOLED:
        batch = dataclasses.replace(batch, order="pooled")
    # Exchange after backward, not during it, so that functions can be timed separately.
    strategy = options.strategy.with_default("overlap", "false")
    # One rank needs no back-end; some require a launcher, which may be missing.
    backend = "auto" if ranks == 1 and not loading.feeders else options.backend
    return dataclasses.replace(options, batch=batch, loading=loading, strategy=strategy, backend=backend)


def _shared_out(batch: BatchOptions, ranks: int) -> BatchOptions:
    """Return a rank's share of the batch that one rank has in `weak`."""
    if batch.batch_frames:
        return dataclasses.replace(batch, batch_frames=max(1, batch.batch_frames // ranks))
    assert batch.batch_size is not None
    if batch.batch_size % ranks:
        raise ConfigError(
            f"--strong: a batch of {batch.batch_size} does not divide by {ranks} ranks; give a --batch-size "
            f"that is a multiple of {ranks}"
        )
    return dataclasses.replace(batch, batch_size=batch.batch_size // ranks)
