"""What models of a task are judged by on held-out data: declared once, recorded with a run, shown by reports.

Nothing here imports torch: reports read these.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

PERCENT = "%"
#: Names of other columns of reports, and `frames`: metrics.jsonl says heldout_frames of every evaluation.
_RESERVED = frozenset(
    (
        "communication_share", "efficiency", "epochs", "feeder_busy_share", "feeders", "frames",
        "frames_per_s", "loader_threads", "padding_and_context_share", "period", "preprocess_on",
        "raced_speed", "raced_speed_high", "raced_speed_low",
        "rank_skew", "ranks", "replica_distance", "run", "sent_bytes_per_s", "ser", "speedup", "staleness",
        "status", "storage", "straggler_rank", "strategy", "time_to_target_s", "wer", "wer_high", "wer_low",
        "wer_over_lowest", "wer_over_lowest_high", "wer_over_lowest_low", "words",
    )
)  # fmt: skip
#: What such names begin with.
_RESERVED_PREFIXES = ("data_", "heldout_", "speech_", "target_")
#: A change by less than this part of a score's magnitude is none to speak of.
LITTLE = 0.01


@dataclass(frozen=True)
class Metric:
    """A figure of held-out data, a mean over frames, or over some of them.

    Attributes:
        key: its name on disk, a word: `heldout_KEY` in metrics.jsonl.
        title: its name at the head of a column.
        name: its name in a sentence.
        unit: e.g. "nats/frame"; of "%" a share of 0 to 1 is recorded, and a hundred times that shown.
        meaning: a sentence on what it is.
        higher_is_better: which way is better.
        tolerance: a model that is worse than the best by no more than this is as accurate, in the unit as it
            is recorded; as a share of the best where `tolerance_is_relative`.
        limit: what no model reaches, None for none; a target has to be on this side of it.
        symbol: stands before a number in a sentence, e.g. "L1"; empty: the name, with units that say little.
        decimals: digits shown after the point.
    """

    key: str
    title: str
    name: str
    unit: str
    meaning: str
    higher_is_better: bool = True
    tolerance: float = 0.02
    tolerance_is_relative: bool = False
    limit: float | None = None
    symbol: str = ""
    decimals: int = 3

    @property
    def recorded_as(self) -> str:
        """Its key in metrics.jsonl."""
        return f"heldout_{self.key}"

    @property
    def is_per_frame(self) -> bool:
        """Whether its unit says so."""
        return self.unit.endswith("/frame") or self.unit == "per frame"

    @property
    def scale(self) -> float:
        """What a recorded value is multiplied by where it is shown."""
        return 100.0 if self.unit == PERCENT else 1.0

    def score(self, value: float) -> float:
        """Return a recorded value so that higher is better; the same turns a score back into a value."""
        return value if self.higher_is_better else -value

    def near_enough(self, best: float) -> float:
        """Return how far below the best score a model is as accurate still."""
        return self.tolerance * abs(best) if self.tolerance_is_relative else self.tolerance

    def is_past(self, best: float, last: float) -> bool:
        """Tell whether a training has lost again, by its last score, what it had learnt by its best."""
        return best - last > max(self.near_enough(best), LITTLE * abs(best))

    def number(self, value: float) -> str:
        """Write a recorded value without its unit."""
        return f"{self.scale * value:.{self.decimals}f}"

    def with_unit(self, value: float) -> str:
        """Write a recorded value: `-0.407 nats/frame`, `L1 0.1233 per frame`."""
        return self.labelled(self.number(value))

    def labelled(self, number: str) -> str:
        """Put a number between what it is called, where its unit does not say enough, and its unit."""
        is_vague = self.unit in ("", PERCENT, "per frame")
        return " ".join(filter(None, (self.symbol or (self.name if is_vague else ""), number, self.unit)))


def is_reserved(key: str) -> bool:
    """Tell whether a run's files and reports use a metric's key for something else."""
    return key in _RESERVED or key.startswith(_RESERVED_PREFIXES)


LOG_PROB = Metric(
    "log_prob",
    "log-prob",
    "held-out log-probability",
    "nats/frame",
    "Mean held-out log-probability of the aligned state, at the end of training.",
    limit=0.0,
)
FRAME_ACCURACY = Metric(
    "frame_accuracy",
    "frame acc.",
    "frame accuracy",
    PERCENT,
    "Held-out frames whose most probable state is the aligned one, at the end of training.",
    decimals=1,
)
SPEECH_ACCURACY = Metric(
    "frame_accuracy_no_silence",
    "frame acc., no silence",
    "frame accuracy without silence",
    PERCENT,
    "The same without the frames that are aligned to silence.",
    decimals=1,
)
TRANSCRIPT_LOG_PROB = Metric(
    "transcript_log_prob",
    "transcript log-prob",
    "held-out log-probability of the transcript",
    "nats/frame",
    "Held-out log-probability of the transcript, summed over all its state sequences, a frame, at the end of "
    "training.",
    limit=0.0,
)
L1_ERROR = Metric(
    "l1_error",
    "held-out L1",
    "held-out L1 error",
    "per frame",
    "Absolute error of mel and linear spectrogram (each a mean over bins from 0 to 1) on held-out data, at "
    "the end of training; smaller is better.",
    higher_is_better=False,
    tolerance_is_relative=True,
    limit=0.0,
    symbol="L1",
    decimals=4,
)
ATTENTION_MAXIMUM = Metric(
    "attention_maximum",
    "attention max.",
    "attention maximum",
    PERCENT,
    "Mean of the attention's largest weight on held-out data, at the end of training; 100: a clear choice.",
    decimals=1,
)


@dataclass(frozen=True)
class TaskRecord:
    """What run.json says of a task.

    Attributes:
        metrics: the first is what models are chosen and compared by.
        decodes: whether `decode` reads its models, so that a run may have a word error rate.
    """

    metrics: tuple[Metric, ...]
    decodes: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what stands in run.json."""
        return {"metrics": [asdict(metric) for metric in self.metrics], "decodes": self.decodes}


#: Our tasks, by name; also those of runs that older versions recorded without their metrics.
RECORDS = {
    "acoustic": TaskRecord((LOG_PROB, FRAME_ACCURACY, SPEECH_ACCURACY), decodes=True),
    "synthesis": TaskRecord((L1_ERROR, ATTENTION_MAXIMUM)),
}


def task_record(settings: dict[str, Any], problems: list[str] | None = None) -> TaskRecord:
    """Return what a run.json says of its task; a run that does not say is taken for one of recognition.

    Args:
        problems: takes a line where what it says cannot be used.
    """
    name = str(settings.get("task"))
    name = name if name in RECORDS else "acoustic"
    found = settings.get("metrics")
    if found is None:
        return RECORDS[name]
    try:
        metrics = _metrics(found)
    except (TypeError, ValueError, OverflowError) as error:
        if problems is not None:
            problems.append(f"run.json: metrics cannot be used ({error}); shown as a run of --task {name}")
        return RECORDS[name]
    return TaskRecord(metrics, settings.get("decodes") is True)


#: The types that the fields of a metric have in JSON, by their types in Python.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
}


def _metrics(found: Any) -> tuple[Metric, ...]:
    """Make metrics of their record.  Raises TypeError, ValueError or OverflowError for what is none."""
    if not isinstance(found, list) or not found:
        raise TypeError("not a list of metrics")
    metrics = tuple(map(_metric, found))
    if len({metric.key for metric in metrics}) < len(metrics):
        raise ValueError("two of one key")
    return metrics


def _metric(record: Any) -> Metric:
    if not isinstance(record, dict):
        raise TypeError("a metric is an object")
    known = {field.name: field for field in fields(Metric)}
    # A later version may say more of a metric.
    metric = Metric(**{name: value for name, value in record.items() if name in known})
    for name, field in known.items():
        # Not isinstance: true is an int to Python.
        if type(getattr(metric, name)) not in _JSON_TYPES[str(field.type)]:
            raise TypeError(f"{name} is no {field.type}")
    numbers = (metric.tolerance, 0.0 if metric.limit is None else metric.limit)
    if not (all(map(math.isfinite, numbers)) and metric.decimals in range(10) and metric.key.isidentifier()):
        raise ValueError("no tolerance, limit, decimals or key that can be used")
    return metric
