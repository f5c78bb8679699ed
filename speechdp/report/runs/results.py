"""What a run left behind, as typed records: the files of a run directory after reading."""

from __future__ import annotations

import itertools
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
from speechdp.tasks.metrics import Metric, TaskRecord, task_record

#: Name of the run that a sweep makes for the throughput of one rank.
ONE_RANK = "one-rank"
#: The stages that a batch passes before training has it, in order (speechdp/data/loading/stage_times.py).
DATA_STAGES = ("read", "preprocess", "collate", "send", "h2d")


@dataclass(frozen=True)
class DataTimes:
    """Sums of the data path of one rank or feeder over all its training batches, warm-up included.

    What was not recorded is None or empty.

    Attributes:
        stages_s: seconds a stage was busy, summed over its threads.
        frames: frames to be learnt.
        computed_frames: frames computed on: those, context and padding.
        threads: that preprocess.
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
    """A rank that made batches ready for others."""

    rank: int | None
    host: str
    data: DataTimes


@dataclass(frozen=True)
class RankMemory:
    """The memory of a rank, bytes; what was not recorded is None.

    Attributes:
        rss: the most that its process has held.
        gpu: the most of tensors on its GPU.
        live: what of its process's memory was in use at the end.
    """

    rss: float | None = None
    gpu: float | None = None
    live: float | None = None


@dataclass(frozen=True)
class HostLoad:
    """How busy the host of a rank was while it trained, mean numbers of cores.

    Attributes:
        own: busy with the rank's process.
        host: with any process.
        stolen: taken from a virtual machine by its host.
    """

    own: float
    host: float
    stolen: float


@dataclass(frozen=True)
class GpuConditions:
    """Under which a rank's GPU worked, as far as it was read.

    Attributes:
        index: NVML's number of the GPU on its host; of older runs, its place among those sampled there.
        clock_mhz, lowest_clock_mhz: SM clock while a kernel ran, median and lowest.
        limits: share of that time in which something held the clock down, by its name (timing/gpu.py); empty
            where nothing did.
        others: processes on the GPU that are none of the run's, mean over time.
        most_others: the most at any time.
        others_bytes: memory that they held, mean over time; None where it is not known.
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
    """Sums of one rank over the steps after its warm-up; times in s.

    Attributes:
        first_step, last_step: numbers of the first and last of these steps, counted from the run's begin;
            None where they were not recorded.
        sent_bytes: payload this rank sent while training, warm-up included; None where it was not counted.
        trained_s: training time of the same steps.
        meeting_s: waiting for slower ranks between these steps, before an evaluation.
        statistics: what the strategy tells besides; e.g. `staleness`: counts of exchanges by age.
        data: its data path; None where it was not recorded.
        memory: what it has held at most.
        load: of its host; None where it was not recorded.
        gpu: conditions of its GPU; None without one, or where they were not recorded.
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
        """Seconds of the steps, and of the meetings between them."""
        return self.wall_s + self.meeting_s

    @property
    def comm_s(self) -> float:
        """Seconds in exchanges, waiting for other ranks included, also where they meet between steps."""
        return self.spans_s.get("comm", 0.0) + self.meeting_s

    @property
    def data_wait_s(self) -> float:
        """Seconds without a batch to work on."""
        return self.spans_s.get("data_wait", 0.0)

    @property
    def compute_s(self) -> float:
        """Seconds of this rank's own work: all spans but communication."""
        return sum(seconds for name, seconds in self.spans_s.items() if name != "comm")

    @property
    def other_s(self) -> float:
        """Seconds of the steps that no span covers."""
        return max(self.wall_s - sum(self.spans_s.values()), 0.0)


@dataclass(frozen=True)
class RunTiming:
    """Every rank's sums, in rank order.  `warmup_steps` of each rank are left out.

    `exchange_s` is the sum over steps of the shortest communication of all ranks; None where unknown.
    `feeders` made the batches of all ranks; none: each rank made its own.  `lost`: ranks that ended before
    the training did, of which nothing is known (`--tolerate-loss`).
    """

    warmup_steps: int
    ranks: tuple[RankTiming, ...]
    exchange_s: float | None = None
    feeders: tuple[Feeder, ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """One line of metrics.jsonl; what it lacks is None.

    Attributes:
        frames: frames that all ranks together had trained on.
        time_s: training time until then, s, without evaluations and checkpoints.
        values: the task's metrics of held-out data by their keys, as they are recorded.
        score: the first of them, with its sign turned where smaller is better: higher is always better.
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
    """An averaging period that was in force once `step` steps were done, until the next change."""

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

    `ser` is the share of the utterances with an error, `weights` says what scores were weighted with,
    `chosen_on` on which split those weights were chosen, `rescoring` what lists were rescored with, where
    they were, and `utterances` the errors by utterance; older files do not have them.
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
        """Return this rate less another, on the same utterances; None where those are not known.

        Args:
            among: as in `rate_difference`.
        """
        if self.utterances is None or other.utterances is None:
            return None
        return rate_difference(self.utterances, other.utterances, among)

    def may_be_as_low_as(self, other: WordErrors, among: int) -> bool:
        """Say whether this rate is not surely above another.

        By their difference where that has the chance of training, else by whether their intervals overlap,
        which two single models' hardly ever fail to do by that chance alone.

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
        """How the split was decoded, as far as word errors depend on it; "" where that was not recorded."""
        weights = f"weights chosen on {self.chosen_on}" if self.chosen_on else self.weights
        return ", ".join(filter(None, (self.grammar, weights, self.rescoring))) if self.weights else ""


@dataclass(frozen=True)
class Spoken:
    """The figures of synthesis.json (docs/synthesis.md); what it lacks is None or empty.

    Attributes:
        utterances: of the split that were said.
        mcd_db: mel-cepstral distortion, dB.
        focus_rate: mean of the attention's largest weight, 0 to 1.
        stopped_share: of the utterances, those ended by the stop prediction, 0 to 1.
        length_ratio: frames of all synthetic speech over those of the recordings.
        word_errors: of the recogniser, by source: `recorded`, `copy`, `synthetic`.
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
    """What made runs, as far as it tells in reports.

    Attributes:
        amount: what throughput counts.
        counted: what that is.
        material: what is trained on.
        evaluation: what a run of known accuracy has.
        measures: what they record that others do not: `epochs` that are given, `steps`, `wer`, ...
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
    """A run directory as it was found.

    Attributes:
        name: name of its folder.
        settings: run.json; empty where it is missing or damaged.
        problems: what is missing or damaged, one line each, naming the file.
        completed: completed.json is there.
        exists: the folder is there.
        samples: utilisation over time, one entry a host; read with a sweep only.
        spoken: measures of its synthetic speech; None where nothing was measured.
        script_task: of a user's script: what stands for its task; None: it is in the settings.
        periods: what was in force when, of a strategy that changes its averaging period.
        mean: of its last epochs' models, where that is its model (--average-epochs).
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

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation in training; None: there was none."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def final(self) -> Evaluation | None:
        """The evaluation of the model that it has left; None: it was not evaluated."""
        return self.last if self.mean is None else self.mean.evaluation

    @property
    def is_mean_worse(self) -> bool:
        """Whether its last model alone is better than the mean, by more than counts as equally accurate."""
        last, mean = self.last, self.mean
        if mean is None or mean.evaluation.score is None or last is None or last.score is None:
            return False
        return self.metric.is_past(last.score, mean.evaluation.score)

    @property
    def kind(self) -> RunKind:
        """What made it."""
        return TRAINER if self.script_task is None else SCRIPT

    @property
    def status(self) -> str:
        """Return `complete`, `unfinished` or `missing`."""
        if not self.exists:
            return "missing"
        return "complete" if self.completed else "unfinished"

    @property
    def damage(self) -> str:
        """What is wrong with the files that its figures come from, the first of it; "": nothing.

        Not what is missing, nor a last score that is no number: where these count, they are told otherwise.
        """
        found = [
            problem
            for problem in self.problems
            if not (problem.startswith("timeline/") or ": missing" in problem or "is not finite" in problem)
        ]
        more = f", and {counted(len(found) - 1, 'more problem')} that its page names" if found[1:] else ""
        return found[0] + more if found else ""

    def setting(self, *keys: str) -> Any:
        """Return what run.json holds under some keys, each in what the one before holds; None: nothing."""
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
        """Steps, frames or seconds between exchanges, e.g. `16` or `600kf`; None where it is not known."""
        period = self.settings.get("period")
        return None if period in (None, "") else str(period)

    @property
    def model_period(self) -> str | None:
        """The period of a strategy that has one as its option; None for one that exchanges gradients."""
        _, _, options = str(self.settings.get("strategy")).partition(":")
        return self.period if "period" in split_options(options) else None

    @property
    def task(self) -> TaskRecord:
        """What its task declares: metrics, and whether its models are decoded."""
        return self.script_task or task_record(self.settings)

    @property
    def metric(self) -> Metric:
        """What it is compared by."""
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
        """Numbers of ranks it trained on, in turn, where it was continued on another; none where unknown."""
        earlier = self.settings.get("earlier_sizes")
        found = [*(earlier if isinstance(earlier, list) else []), self.size]
        return tuple(size for size, _ in itertools.groupby(found) if isinstance(size, int))

    @property
    def without_lost_ranks(self) -> str:
        """What its figures of time lack where ranks were lost, a clause; "": none were."""
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
        """The first step that its times count, where it was resumed: those before are in none of them.

        None: it was begun with what is timed, or that was not recorded.
        """
        if self.timing is None:
            return None
        first = max((rank.first_step or 0 for rank in self.timing.ranks), default=0)
        return first if first > self.timing.warmup_steps + 1 else None

    @property
    def order(self) -> str:
        """How utterances were put in order, e.g. `pooled`; empty where it is not known."""
        return words(self.setting("options", "batch", "order"))

    @property
    def on_gpu(self) -> bool:
        """Say whether the model ran on GPUs."""
        return str(self.settings.get("device", "")).startswith("cuda")

    @property
    def is_baseline(self) -> bool:
        """Say whether this is the sweep's run of one rank."""
        return self.name == ONE_RANK


@dataclass(frozen=True)
class Sweep:
    """The runs of a folder, in the sweep's order.

    Attributes:
        path: the folder.
        runs: of it.
        failed: of runs that failed, why, by their names.
        others: folders in it with a report of their own: sweeps, comparisons, searches and profiles.
    """

    path: Path
    runs: tuple[RunResult, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
