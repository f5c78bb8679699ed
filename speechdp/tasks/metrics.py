"""Metrics of models on held-out data: declared once, recorded with each run, shown by reports.

Nothing here imports torch: reports read these.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

PERCENT = "%"
#: Names of other columns of reports; and `frames`, as metrics.jsonl has heldout_frames in every evaluation.
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
#: Prefixes of further reserved names.
_RESERVED_PREFIXES = ("data_", "heldout_", "speech_", "target_")
#: A change smaller than this share of a score's magnitude is negligible.
LITTLE = 0.01


@dataclass(frozen=True)
class Metric:
    """A figure computed on held-out data: a mean over all frames, or over some of them.

    Attributes:
        key: its name in files, an identifier: `heldout_KEY` in metrics.jsonl.
        title: its column heading.
        name: its name in a sentence.
        unit: e.g. "nats/frame"; "%" means that a share from 0 to 1 is recorded and shown times 100.
        meaning: a sentence that explains it.
        higher_is_better: whether higher values are better.
        tolerance: a model counts as equally accurate if it is worse than the best by no more than this, in
            the unit that is recorded; as a share of the best if `tolerance_is_relative`.
        limit: a value that no model reaches, None: there is none; targets must be on this side of it.
        symbol: stands before a number in a sentence, e.g. "L1"; empty: the name, if the unit is vague.
        decimals: digits shown after the decimal point.
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
        """Whether its unit is per frame."""
        return self.unit.endswith("/frame") or self.unit == "per frame"

    @property
    def scale(self) -> float:
        """Factor that turns recorded values into shown ones."""
        return 100.0 if self.unit == PERCENT else 1.0

    def score(self, value: float) -> float:
        """Turn a recorded value into a score, where higher is better, or a score into a recorded value."""
        return value if self.higher_is_better else -value

    def near_enough(self, best: float) -> float:
        """Return how far below the best score a model still counts as equally accurate."""
        return self.tolerance * abs(best) if self.tolerance_is_relative else self.tolerance

    def is_past(self, best: float, last: float) -> bool:
        """Return whether training has lost again what it had learnt: the last score is far below the best."""
        return best - last > max(self.near_enough(best), LITTLE * abs(best))

    def number(self, value: float) -> str:
        """Write a recorded value without its unit."""
        return f"{self.scale * value:,.{self.decimals}f}"

    def with_unit(self, value: float) -> str:
        """Write a recorded value: `-0.407 nats/frame`, `L1 0.1233 per frame`."""
        return self.labelled(self.number(value))

    def labelled(self, number: str) -> str:
        """Add to a number its unit and, if the unit says too little, the metric's symbol or name."""
        is_vague = self.unit in ("", PERCENT, "per frame")
        return " ".join(filter(None, (self.symbol or (self.name if is_vague else ""), number, self.unit)))


def is_reserved(key: str) -> bool:
    """Return whether a run's files and reports use this key for something other than a metric."""
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
    """What run.json records about a task.

    Attributes:
        metrics: models are chosen and compared by the first.
        decodes: whether `decode` reads its models, so a run may have a word error rate.
    """

    metrics: tuple[Metric, ...]
    decodes: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the task's entries in run.json."""
        return {"metrics": [asdict(metric) for metric in self.metrics], "decodes": self.decodes}


#: Our tasks, by name; also used for runs that older versions recorded without metrics.
RECORDS = {
    "acoustic": TaskRecord((LOG_PROB, FRAME_ACCURACY, SPEECH_ACCURACY), decodes=True),
    "synthesis": TaskRecord((L1_ERROR, ATTENTION_MAXIMUM)),
}


def task_record(settings: dict[str, Any], problems: list[str] | None = None) -> TaskRecord:
    """Return what run.json records about its task.

    If there are no metrics in it, or none that can be used, return those of our task that it names; of the
    acoustic task if it names none of ours.

    Args:
        settings: the content of run.json.
        problems: gets a line if the recorded metrics cannot be used.
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


#: JSON types of a metric's fields, by their Python types.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
}


def _metrics(found: Any) -> tuple[Metric, ...]:
    """Create metrics from their record.  Raises TypeError, ValueError or OverflowError for invalid ones."""
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
    # A later version may record more about a metric.
    metric = Metric(**{name: value for name, value in record.items() if name in known})
    for name, field in known.items():
        # Not isinstance: true is an int to Python.
        if type(getattr(metric, name)) not in _JSON_TYPES[str(field.type)]:
            raise TypeError(f"{name} is no {field.type}")
    numbers = (metric.tolerance, 0.0 if metric.limit is None else metric.limit)
    if not (all(map(math.isfinite, numbers)) and metric.decimals in range(10) and metric.key.isidentifier()):
        raise ValueError("no tolerance, limit, decimals or key that can be used")
    return metric
