"""Choose scales and insertion scores on a development split, from scores that the network gives once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from speechdp.comm.base import Communicator
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import inputs_of
from speechdp.decode.graph import Grammar
from speechdp.decode.recognise import (
    DecodingOptions,
    Recogniser,
    SpokenSplit,
    TrainedModel,
    check_decodable,
    recogniser_for,
)
from speechdp.decode.wer import count_errors
from speechdp.labels.hmm import FloatArray
from speechdp.process.ending import Stopped

#: Values tried of each option; scales are compared by their ratio, insertion scores by their difference.
_VALUES = {
    "acoustic_scale": (0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.4, 2.0),
    "lm_scale": (0.5, 0.7, 1.0, 1.4, 2.0, 2.8),
    "insertion_log_prob": (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 6.0),
}
_ROUNDS = 2


@dataclass(frozen=True)
class Tuned:
    """What was chosen.

    Attributes:
        options: those given, with the chosen values.
        record: the split, the chosen values, the errors with them and all trials, for wer-<split>.json.
    """

    options: DecodingOptions
    record: dict[str, Any]

    def summary(self) -> str:
        """Say in one line what was chosen and how it does."""
        values = self.record["chosen"].items()
        chosen = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in values)
        percent, trials = 100 * self.record["errors"] / self.record["words"], len(self.record["trials"])
        where = self.record["split"]
        return f"tuned on {where}: {chosen}; WER {percent:.2f} % there, best of {trials} settings"


def tune(
    trained: TrainedModel,
    dataset: Dataset,
    split: str,
    options: DecodingOptions,
    comm: Communicator,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Choose acoustic scale, scale of the language model and insertion score by the word errors of a split.

    Collective.

    One option after the other, twice: the value with the fewest errors, among equals that which changes
    least.  The network runs once; its scores stay in memory, 4 bytes a frame and class, divided among the
    ranks.  The result is the same for any number of ranks, and on every rank.

    Args:
        trained: the model.
        dataset: the data directory.
        split: a development split, which is not judged afterwards.
        options: how to decode; where to start from.
        comm: the ranks to share the work.
        is_asked_to_stop: looked at before every utterance.

    Raises:
        Stopped: a rank was asked to.
        as `decode_split`, but for results, which are not written.
    """
    check_decodable(trained, dataset, options)
    with SpokenSplit.open(dataset, split, comm) as reader:
        recogniser = recogniser_for(trained, dataset, options, reader.transcripts)
        scored = [
            (reader.reference(position), scores)
            for position, scores in recogniser.score(reader.features(inputs_of(trained.config)))
        ]
    trials = _Trials(recogniser, scored, comm, is_asked_to_stop)
    best = options
    for _ in range(_ROUNDS):
        before = best
        for name in _tunable(recogniser.grammar):
            values = sorted({*_VALUES[name], getattr(best, name)})
            tried = [dataclasses.replace(best, **{name: value}) for value in values]
            ranked = [(trials.errors(each), _change(name, each, best), each) for each in tried]
            best = min(ranked, key=lambda ranks: ranks[:2])[2]
        if best == before:
            break
    chosen = {name: getattr(best, name) for name in _tunable(recogniser.grammar)}
    num_words = sum(map(len, reader.transcripts))
    record = {"split": split, "chosen": chosen, "errors": trials.errors(best), "words": num_words}
    return Tuned(best, {**record, "trials": trials.table()})


def _tunable(grammar: Grammar) -> tuple[str, ...]:
    """Return the options that matter to a grammar."""
    if grammar is Grammar.NGRAM:
        return tuple(_VALUES)
    is_loop = grammar in (Grammar.WORD_LOOP, Grammar.DIGIT_LOOP)
    return ("acoustic_scale", "insertion_log_prob") if is_loop else ("acoustic_scale",)


def _change(name: str, options: DecodingOptions, now: DecodingOptions) -> tuple[float, float]:
    """Return how much an option changes, and its value, so that no two are equal."""
    value, old = getattr(options, name), getattr(now, name)
    change = value - old if name == "insertion_log_prob" else math.log(value / old)
    return round(abs(change), 9), value


class _Trials:
    """Counts the word errors of settings over all ranks, each once."""

    def __init__(
        self,
        recogniser: Recogniser,
        scored: Sequence[tuple[str, FloatArray]],
        comm: Communicator,
        is_asked_to_stop: Callable[[], bool],
    ) -> None:
        self._recogniser, self._scored, self._comm = recogniser, scored, comm
        self._is_asked_to_stop = is_asked_to_stop
        self._errors: dict[DecodingOptions, int] = {}

    def errors(self, options: DecodingOptions) -> int:
        """Return the word errors of a setting.  Collective.  Raises Stopped."""
        if options not in self._errors:
            self._recogniser.use(options)
            hypotheses = self._search()
            own = count_errors([ref for ref, _ in self._scored[: len(hypotheses)]], hypotheses)
            mine = {"errors": int(own[:, :3].sum()), "stopped": len(hypotheses) < len(self._scored)}
            parts = self._comm.allgather_object(mine)
            if any(part["stopped"] for part in parts):
                raise Stopped
            self._errors[options] = sum(part["errors"] for part in parts)
        return self._errors[options]

    def _search(self) -> list[str]:
        hypotheses: list[str] = []
        for _, scores in self._scored:
            if self._is_asked_to_stop():
                break
            path = self._recogniser.searcher.search(scores)
            hypotheses.append("" if path is None else " ".join(path.words))
        return hypotheses

    def table(self) -> list[dict[str, float]]:
        """Return every setting tried with its errors, in order."""
        return [
            {
                **{name: getattr(options, name) for name in _tunable(self._recogniser.grammar)},
                "errors": errors,
            }
            for options, errors in self._errors.items()
        ]
