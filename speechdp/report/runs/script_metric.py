"""What runs of a user's script are judged by: one of the values that it logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speechdp.errors import ConfigError
from speechdp.tasks.metrics import Metric, TaskRecord

#: What DataParallel writes into each line itself, and values that only count.
_NOT_METRICS = ("step", "time_s", "learning_rate", "frames", "epoch")
#: Words in the names of metrics of which more is better; of all others less is.
_MORE_IS_BETTER = {
    "acc", "accuracy", "auc", "bleu", "f1", "logprob", "precision", "r2", "recall", "score", "scores", "snr",
}  # fmt: skip
#: Words that say the contrary, whatever stands beside them.
_LESS_IS_BETTER = {"cer", "err", "error", "errors", "loss", "losses", "perplexity", "ppl", "wer"}
_DIRECTIONS = {"min": False, "max": True}


@dataclass(frozen=True)
class LoggedMetric(Metric):
    """A value of metrics.jsonl, under the name and in the unit in which the script logs it.

    Attributes:
        is_guessed: neither the user nor its name has told which way is better.
    """

    is_guessed: bool = False

    @property
    def recorded_as(self) -> str:
        """Its key in metrics.jsonl, and that of the CSV's column."""
        return self.key

    def number(self, value: float) -> str:
        """Write a value; of what size it is nobody knows."""
        return f"{value:.4g}"


def parse_metric(text: str) -> LoggedMetric:
    """Read `NAME`, `NAME:min` (less is better) or `NAME:max`.

    Without a direction more is better of what is named after an accuracy, a score or a log-probability, and
    less of anything else.

    Raises:
        ConfigError: another direction, or no name.
    """
    name, colon, direction = text.partition(":")
    if not name or (colon and direction not in _DIRECTIONS):
        raise ConfigError(f"--metric {text!r}: write NAME, NAME:min (less is better) or NAME:max")
    told = _DIRECTIONS[direction] if colon else _more_is_better(name)
    meaning = f"As the script logged it last; {'more' if told else 'less'} is better."
    return LoggedMetric(
        name, name, name, "", meaning,
        higher_is_better=bool(told), tolerance_is_relative=True, is_guessed=told is None,
    )  # fmt: skip


def _more_is_better(name: str) -> bool | None:
    """Tell by a metric's name whether more is better; None: it does not say."""
    spread = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("log_prob", "logprob")
    words = set(re.findall(r"[a-z0-9]+", spread))
    words |= {word.rstrip("0123456789") for word in words}  # acc5
    words |= {word.lstrip("0123456789") for word in words}  # 5acc
    if words & _LESS_IS_BETTER:
        return False
    return True if words & _MORE_IS_BETTER else None


def has_logged(record: dict[str, Any], name: str) -> bool:
    """Tell whether a line holds a number under a name, be it infinite or none at all (NaN)."""
    return isinstance(record.get(name), (int, float)) and not isinstance(record[name], bool)


def metric_names(record: dict[str, Any]) -> list[str]:
    """Return the names of the numbers that a script logged in a line."""
    # A colon would be taken for the beginning of a direction.
    return [
        name for name in record if name not in _NOT_METRICS and ":" not in name and has_logged(record, name)
    ]


def last_metric(records: Sequence[dict[str, Any]]) -> str:
    """Return the name of what a script logged last; "" where it logged nothing."""
    return next((names[-1] for record in reversed(records) if (names := metric_names(record))), "")


def script_task(metric: str) -> TaskRecord:
    """Return what stands for a task in runs of a script, which are judged by `metric`; "": by nothing."""
    return TaskRecord((parse_metric(metric or "metric"),))
