"""The files of a run directory, as typed records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.decode.paired import Difference, UtteranceErrors, rate_difference
from speechdp.extensions import split_options
from speechdp.parallel.period import Period
from speechdp.report.runs.records import words
from speechdp.report.runs.samples import Samples
from speechdp.tasks.metrics import LOG_PROB, Metric, TaskRecord, task_record

#: Name of a sweep's run that measures the throughput of one rank.
ONE_RANK = "one-rank"


@dataclass(frozen=True)
class DataTimes:
    """Totals of the data path of one rank or feeder over all its training batches, including the warm-up.

    Values that were not recorded are None or empty.

    Attributes:
        stages_s: time that each stage was busy, s, summed over its threads.
        frames: frames that are trained on.
        computed_frames: frames that are computed: those, context and padding.
        threads: number of preprocessing threads.
        preprocess_on: `cpu` or `cuda`.
        storage: how the shards are stored: `contiguous`, `chunked gzip`, ...
    """

    stages_s: dict[str, float] = field(default_factory=dict)
    read_bytes: float | None = None
    frames: float | None = None
    computed_frames: float | None = None
    threads: int | None = None
    preprocess_on: str = ""
    storage: str = ""


@dataclass(frozen=True)
class Feeder:
    """A rank that prepared batches for others."""

    rank: int | None
    host: str
    data: DataTimes


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank, bytes; values that were not recorded are None.

    Attributes:
        rss: peak RSS of its process.
        gpu: peak of tensors on its GPU.
        live: part of its process's memory that was in use at the end.
    """

    rss: float | None = None
    gpu: float | None = None
    live: float | None = None


@dataclass(frozen=True)
class HostLoad:
    """Mean load of a rank's host during training, in cores.

    Attributes:
        own: cores busy with the rank's process.
        host: cores busy with any process.
        stolen: cores taken from a virtual machine by its host.
    """

    own: float
    host: float
    stolen: float


@dataclass(frozen=True)
class GpuConditions:
    """Operating conditions of a rank's GPU, as far as they were read.

    Attributes:
        index: NVML's index of the GPU on its host; in older runs, its position among those sampled there.
        clock_mhz, lowest_clock_mhz: SM clock while a kernel ran, median and lowest.
        limits: share of that time in which the clock was throttled, by reason (CLOCK_LIMITS in
            timing/gpu.py); reasons may overlap.  Empty: never throttled; None: not read.
        others: number of processes of others on the GPU, mean over time.
        most_others: maximum number of them.
        others_bytes: their memory, mean over time; None if unknown.
    """

    index: int
    clock_mhz: float | None = None
    lowest_clock_mhz: float | None = None
    limits: Mapping[str, float] | None = None
    others: float | None = None
    most_others: int | None = None
    others_bytes: float | None = None


@dataclass(frozen=True)
class RankTiming:
    """Totals of one rank over the steps after its warm-up; times in s.

    Attributes:
        first_step, last_step: numbers of the first and last of these steps, counted from the start of the
            run; None if not recorded.
        sent_bytes: payload that this rank sent while training, including warm-up; None if not counted.
        trained_s: training time of the same steps.
        meeting_s: time waiting for slower ranks between these steps, before an evaluation.
        statistics: additional figures of the strategy; e.g. `staleness`: counts of exchanges by age.
        data: its data path; None if not recorded.
        memory: its peak memory.
        load: load of its host; None if not recorded.
        gpu: conditions of its GPU; None without a GPU, or if not recorded.
    """

    rank: int
    host: str
    steps: int
    frames: int
    wall_s: float
    spans_s: dict[str, float]
    eval_s: float = 0.0
    checkpoint_s: float = 0.0
    meeting_s: float = 0.0
    first_step: int | None = None
    last_step: int | None = None
    sent_bytes: float | None = None
    trained_s: float | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    data: DataTimes | None = None
    memory: RankMemory = RankMemory()
    load: HostLoad | None = None
    gpu: GpuConditions | None = None

    @property
    def training_s(self) -> float:
        """Time of the steps and of the meetings between them, s."""
        return self.wall_s + self.meeting_s

    @property
    def comm_s(self) -> float:
        """Time in exchanges and meetings between steps, s, including waiting for other ranks."""
        return self.spans_s.get("comm", 0.0) + self.meeting_s

    @property
    def data_wait_s(self) -> float:
        """Time without a batch to work on, s."""
        return self.spans_s.get("data_wait", 0.0)

    @property
    def compute_s(self) -> float:
        """Time of this rank's own work, s: all spans except communication."""
        return sum(seconds for name, seconds in self.spans_s.items() if name != "comm")

    @property
    def other_s(self) -> float:
        """Time of the steps that no span covers, s."""
        return max(self.wall_s - sum(self.spans_s.values()), 0.0)


@dataclass(frozen=True)
class RunTiming:
    """Totals of every rank, in rank order, without the first `warmup_steps` of each rank.

    `exchange_s` is the sum over steps of the shortest communication of all ranks; None if unknown.
    `feeders` made the batches of all ranks; empty: each rank made its own.  `lost`: ranks that were lost
    during training, of which nothing is known (`--tolerate-loss`).
    """

    warmup_steps: int
    ranks: tuple[RankTiming, ...]
    exchange_s: float | None = None
    feeders: tuple[Feeder, ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """One line of metrics.jsonl; missing values are None.

    Attributes:
        frames: frames that all ranks together had trained on.
        time_s: training time until then, s, without evaluations and checkpoints.
        values: the task's metrics of held-out data by key, as recorded.
        score: the first metric, negated if smaller is better, so that higher is always better.
        train_loss: per frame, in the unit of the task's loss.
        replica_distance: largest over ranks of |w_i - w| / |w| just before, w the parameters evaluated.
    """

    step: int
    epoch: float | None
    frames: float | None
    time_s: float | None
    score: float | None
    train_loss: float | None
    replica_distance: float | None = None
    values: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class MeanModel:
    """The mean of the models after the last `num_epochs` epochs, and its evaluation."""

    num_epochs: int
    evaluation: Evaluation


@dataclass(frozen=True)
class PeriodChange:
    """An averaging period that was in force from step `step` on, until the next change."""

    step: int
    period: Period


@dataclass(frozen=True)
class Estimate:
    """A mean over utterances and its 95 % interval."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class WordErrors:
    """The figures of wer-<split>.json; rates 0 to 1, `low` and `high` bound the 95 % interval.

    `ser` is the share of utterances with an error, `weights` the weights of the scores, `chosen_on` the
    split on which they were chosen, `rescoring` the language model of rescoring, if any, and `utterances`
    the errors by utterance.  Older files do not have these.
    """

    wer: float
    low: float | None
    high: float | None
    words: int | None
    insertions: int | None
    deletions: int | None
    substitutions: int | None
    split: str
    grammar: str
    ser: Estimate | None = None
    weights: str = ""
    chosen_on: str = ""
    rescoring: str = ""
    utterances: UtteranceErrors | None = None

    def over(self, other: WordErrors, among: int = 2) -> Difference | None:
        """Return this rate minus another on the same utterances; None if errors by utterance are unknown.

        Args:
            among: as in `rate_difference`.
        """
        if self.utterances is None or other.utterances is None:
            return None
        return rate_difference(self.utterances, other.utterances, among)

    def may_be_as_low_as(self, other: WordErrors, among: int) -> bool:
        """Return whether this rate may be as low as another, as far as chance can tell.

        If their difference includes the chance of training, it decides.  Otherwise this rate may be as low if
        its interval begins at or below the end of the other's.  That nearly always holds for two single
        models that differ only by the chance of training.

        Args:
            among: as in `rate_difference`.
        """
        difference = self.over(other, among)
        if difference is not None and difference.has_seeds:
            return not difference.is_sure
        low, high = (
            (self.wer if self.low is None else self.low),
            (other.wer if other.high is None else other.high),
        )
        return low <= high

    @property
    def how(self) -> str:
        """How the split was decoded, as far as word errors depend on it; "" if not recorded."""
        weights = f"weights chosen on {self.chosen_on}" if self.chosen_on else self.weights
        return ", ".join(filter(None, (self.grammar, weights, self.rescoring))) if self.weights else ""


@dataclass(frozen=True)
class Spoken:
    """The figures of synthesis.json (docs/synthesis.md); missing values are None or empty.

    Attributes:
        utterances: number of utterances of the split that were spoken.
        mcd_db: mel-cepstral distortion, dB.
        focus_rate: mean of the attention's largest weight, 0 to 1.
        stopped_share: share of utterances ended by the stop prediction, 0 to 1.
        length_ratio: frames of all synthetic speech divided by those of the recordings.
        word_errors: word errors of the recogniser, by source: `recorded`, `copy`, `synthetic`.
    """

    split: str
    utterances: int | None = None
    mcd_db: Estimate | None = None
    focus_rate: Estimate | None = None
    stopped_share: float | None = None
    length_ratio: float | None = None
    word_errors: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class RunKind:
    """What made a run (our trainer or a script), as far as reports differ.

    Attributes:
        amount: unit of throughput.
        counted: explanation of that unit.
        material: name of the training material.
        evaluation: what a run needs for its accuracy to be known.
        measures: figures that only such runs record: `epochs` if given, `steps`, `wer`, ...
    """

    amount: str
    counted: str
    material: str
    evaluation: str
    measures: frozenset[str]


TRAINER = RunKind(
    "frames",
    "Frames",
    "speech",
    "a held-out evaluation",
    frozenset({"epochs", "wer", "replica_distance"}),
)
SCRIPT = RunKind(
    "items",
    "What `step(weight=)` counts (tokens, examples or the like; else steps)",
    "data",
    "logged a metric by run.log()",
    frozenset({"steps"}),
)


@dataclass(frozen=True)
class RunResult:
    """A run directory as found.

    Attributes:
        name: name of its folder.
        settings: content of run.json; empty if it is missing or damaged.
        problems: missing or damaged files, one line each.
        completed: whether completed.json exists.
        exists: whether the folder exists.
        samples: utilisation over time, one entry for each host; read only with a sweep.
        spoken: measures of its synthetic speech; None if nothing was measured.
        script_task: substitute for the task in runs of a user's script; None: the task is in the settings.
        periods: periods in force over time, for a strategy that changes its averaging period.
        mean: mean of the last epochs' models, if that is the run's model (--average-epochs).
        ended_by: why an unfinished run was ended, if its folder records that; else "".
    """

    name: str
    path: Path
    settings: dict[str, Any]
    evaluations: tuple[Evaluation, ...]
    timing: RunTiming | None
    word_errors: WordErrors | None
    completed: bool
    exists: bool
    problems: tuple[str, ...]
    samples: tuple[Samples, ...] = ()
    spoken: Spoken | None = None
    script_task: TaskRecord | None = None
    periods: tuple[PeriodChange, ...] = ()
    mean: MeanModel | None = None
    ended_by: str = ""

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation during training; None: there was none."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def final(self) -> Evaluation | None:
        """The evaluation of the run's final model; None: it was not evaluated."""
        return self.last if self.mean is None else self.mean.evaluation

    @property
    def guessing(self) -> float | None:
        """The log-probability of guessing among its classes; None: its metric is another, or unknown."""
        classes = self.setting("num_classes")
        if self.metric.key != LOG_PROB.key or not isinstance(classes, int) or classes < 2:
            return None
        return -math.log(classes)

    @property
    def is_guessing(self) -> bool:
        """Whether its final model is no better than guessing: it learned nothing, or has diverged."""
        score = self.final.score if self.final is not None else None
        return score is not None and self.guessing is not None and score < self.guessing

    @property
    def is_mean_worse(self) -> bool:
        """Whether its last model is better than the mean by more than the tolerance of equal accuracy."""
        last, mean = self.last, self.mean
        if mean is None or mean.evaluation.score is None or last is None or last.score is None:
            return False
        return self.metric.is_past(last.score, mean.evaluation.score)

    @property
    def kind(self) -> RunKind:
        """What made the run."""
        return TRAINER if self.script_task is None else SCRIPT

    @property
    def status(self) -> str:
        """Return `complete`, `unfinished` or `missing`."""
        if not self.exists:
            return "missing"
        return "complete" if self.completed else "unfinished"

    @property
    def damage(self) -> str:
        """The first problem with the files that its figures come from; "": none.

        Missing files and a last score that is not finite are reported elsewhere, where they matter.
        """
        found = [
            problem
            for problem in self.problems
            if not (problem.startswith("timeline/") or ": missing" in problem or "is not finite" in problem)
        ]
        more = f", and {counted(len(found) - 1, 'more problem')} that its page names" if found[1:] else ""
        return found[0] + more if found else ""

    def setting(self, *keys: str) -> Any:
        """Return the value in run.json under a path of nested keys; None: there is none."""
        value: Any = self.settings
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def strategy(self) -> str:
        """Name of the strategy without its options."""
        return str(self.settings.get("strategy_name") or self.settings.get("strategy") or "")

    @property
    def period(self) -> str | None:
        """Steps, frames or seconds between exchanges, e.g. `16` or `600kf`; None if unknown."""
        period = self.settings.get("period")
        return None if period in (None, "") else str(period)

    @property
    def model_period(self) -> str | None:
        """The period of a strategy with a period option; None for one that exchanges gradients."""
        _, _, options = str(self.settings.get("strategy")).partition(":")
        return self.period if "period" in split_options(options) else None

    @property
    def task(self) -> TaskRecord:
        """The declarations of its task: metrics, and whether its models are decoded."""
        return self.script_task or task_record(self.settings)

    @property
    def metric(self) -> Metric:
        """The metric that compares runs."""
        return self.task.metrics[0]

    @property
    def size(self) -> int | None:
        """Number of ranks."""
        size = self.settings.get("size")
        if isinstance(size, int) and size > 0:
            return size
        return len(self.timing.ranks) if self.timing else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that it trained on in turn, if it was continued on another; empty if unknown."""
        earlier = self.settings.get("earlier_sizes")
        found = [*(earlier if isinstance(earlier, list) else []), self.size]
        return tuple(size for size, _ in itertools.groupby(found) if isinstance(size, int))

    @property
    def without_lost_ranks(self) -> str:
        """A clause on what its times lack because ranks were lost; "": none were lost."""
        if self.timing is None or not self.timing.lost:
            return ""
        lost = ", ".join(map(str, self.timing.lost))
        ranks, were = ("rank", "was") if len(self.timing.lost) == 1 else ("ranks", "were")
        return (
            f"{ranks} {lost} {were} lost in training, so its speed, efficiency and shares of time count only "
            f"what the {counted(len(self.timing.ranks), 'rank')} left at the end did"
        )

    @property
    def timed_from(self) -> int | None:
        """The first step that its times include, if it was resumed and earlier steps are missing.

        None: the times start with the run, or this was not recorded.
        """
        if self.timing is None:
            return None
        first = max((rank.first_step or 0 for rank in self.timing.ranks), default=0)
        return first if first > self.timing.warmup_steps + 1 else None

    @property
    def order(self) -> str:
        """Order of utterances, e.g. `pooled`; empty if unknown."""
        return words(self.setting("options", "batch", "order"))

    @property
    def has_changed_period(self) -> bool:
        """Whether the averaging period changed during training."""
        return len({change.period for change in self.periods}) > 1

    @property
    def changes_over_time(self) -> bool:
        """Whether what it exchanges, or how often, changes in training, as a script's run tells."""
        return self.settings.get("changes_over_time") is True or self.has_changed_period

    @property
    def on_gpu(self) -> bool:
        """Whether the model ran on GPUs."""
        return str(self.settings.get("device", "")).startswith("cuda")

    @property
    def is_baseline(self) -> bool:
        """Whether this is the sweep's run on one rank."""
        return self.name == ONE_RANK


@dataclass(frozen=True)
class Sweep:
    """The runs of a folder, in the sweep's order.

    Attributes:
        path: the folder.
        runs: its runs.
        failed: causes of failure, by the names of failed runs.
        others: subfolders with their own report: sweeps, comparisons, searches and profiles.
    """

    path: Path
    runs: tuple[RunResult, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
