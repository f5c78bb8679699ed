"""The metric of runs of a user's script: one of the values that the script logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speechdp.errors import ConfigError
from speechdp.tasks.metrics import Metric, TaskRecord

#: Values that DataParallel itself writes into each line, and values that only count.
_NOT_METRICS = ("step", "time_s", "learning_rate", "frames", "epoch")
#: Words in the names of metrics of which more is better; of all others, less is better.
_MORE_IS_BETTER = {
    "acc", "accuracy", "auc", "bleu", "f1", "logprob", "precision", "r2", "recall", "score", "scores", "snr",
}  # fmt: skip
#: Words for which less is better, even if one of the above is in the same name.
_LESS_IS_BETTER = {"cer", "err", "error", "errors", "loss", "losses", "perplexity", "ppl", "wer"}
_DIRECTIONS = {"min": False, "max": True}


@dataclass(frozen=True)
class LoggedMetric(Metric):
    """A value in metrics.jsonl, with the name and unit under which the script logs it.

    Attributes:
        is_guessed: neither the user nor the name says which direction is better.
    """

    is_guessed: bool = False

    @property
    def recorded_as(self) -> str:
        """Its key in metrics.jsonl and in the CSV."""
        return self.key

    def number(self, value: float) -> str:
        """Write a value with four significant digits, or more before the decimal point: any magnitude."""
        return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"


def parse_metric(text: str) -> LoggedMetric:
    """Parse `NAME`, `NAME:min` (less is better) or `NAME:max`.

    Without a direction, more is better if the name is that of an accuracy, a score or a log-probability; else
    less is better.

    Raises:
        ConfigError: another direction, or no name.
    """
    name, colon, direction = text.partition(":")
    if not name or (colon and direction not in _DIRECTIONS):
        raise ConfigError(f"--metric {text!r}: write NAME, NAME:min (less is better) or NAME:max")
    is_more_better = _DIRECTIONS[direction] if colon else _more_is_better(name)
    meaning = f"As the script logged it last; {'more' if is_more_better else 'less'} is better."
    return LoggedMetric(
        name, name, name, "", meaning,
        higher_is_better=bool(is_more_better), tolerance_is_relative=True, is_guessed=is_more_better is None,
    )  # fmt: skip


def _more_is_better(name: str) -> bool | None:
    """Return whether more of a metric is better, judging by its name; None: the name does not say."""
    spread = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("log_prob", "logprob")
    words = set(re.findall(r"[a-z0-9]+", spread))
    words |= {word.rstrip("0123456789") for word in words}  # acc5
    words |= {word.lstrip("0123456789") for word in words}  # 5acc
    if words & _LESS_IS_BETTER:
        return False
    return True if words & _MORE_IS_BETTER else None


def has_logged(record: dict[str, Any], name: str) -> bool:
    """Return whether a line has a number under a name; infinity and NaN count."""
    return isinstance(record.get(name), (int, float)) and not isinstance(record[name], bool)


def metric_names(record: dict[str, Any]) -> list[str]:
    """Return the names of the numbers that a script logged in a line."""
    # --metric would read a colon as the start of a direction.
    return [
        name for name in record if name not in _NOT_METRICS and ":" not in name and has_logged(record, name)
    ]


def last_metric(records: Sequence[dict[str, Any]]) -> str:
    """Return the name of the value that a script logged last; "" if it logged none."""
    return next((names[-1] for record in reversed(records) if (names := metric_names(record))), "")


def script_task(metric: str) -> TaskRecord:
    """Return the stand-in for a task in runs of a script, judged by `metric`; "": no metric is logged."""
    return TaskRecord((parse_metric(metric or "metric"),))
