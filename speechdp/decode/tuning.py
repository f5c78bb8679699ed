"""Choose scales and insertion scores on a development split, from posteriors computed once."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from speechdp.comm.base import Communicator
from speechdp.counting import counted
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import inputs_of
from speechdp.decode.graphs.graph import LOOPS, OF_ANY_LENGTH, Grammar
from speechdp.decode.kept_graph import KeptGraph
from speechdp.decode.origin import is_ctc
from speechdp.decode.recogniser import (
    DecodingOptions,
    Normalise,
    Recogniser,
    TrainedModel,
    recogniser_for,
)
from speechdp.decode.scoring import Outputs
from speechdp.decode.split import SpokenSplit, check_decodable
from speechdp.decode.wer import count_errors
from speechdp.errors import RunError
from speechdp.files import record_cannot_be_read
from speechdp.json_input import parse_json
from speechdp.labels.hmm import FloatArray, scaled_log_likelihoods
from speechdp.parallel.run_files import TUNED_NAME, WEIGHTS
from speechdp.process.ending import Stopped

#: Values to try for each option.
_VALUES = {
    "acoustic_scale": (0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.4, 2.0),
    "prior_scale": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "lm_scale": (0.5, 0.7, 1.0, 1.4, 2.0, 2.8),
    "insertion_log_prob": (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0),
}
_RESCORE_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: Options whose values are compared by their ratio; the others are compared by their difference.
_RATIOS = ("acoustic_scale", "lm_scale")
#: Options whose range of meaning ends with the values above: a best value at the end is not reported.
_BOUNDED = ("prior_scale",)
_ROUNDS = 2
#: Most paths per frame while settings are compared; more take long with small acoustic scales, and changed no
#: word of AN4 (docs/decoding.md).
_FEW_ACTIVE = 2000
_SILENCE_S = 30.0  # after this, a line reports the progress of a setting that takes long
_PATIENCE = 3  # values in a row that are worse than the best, after which no more are tried


@dataclass(frozen=True)
class Tuned:
    """The values chosen by tuning.

    Attributes:
        options: the given options with the chosen values.
        record: for wer-<split>.json: the split, the limit on paths per frame (`max_active`), the chosen
            values, which of them are the smallest or largest tried (`at_edge`), the errors with them and all
            trials.
    """

    options: DecodingOptions
    record: dict[str, Any]

    def summary(self) -> str:
        """Return one line: chosen values, their WER, and which values beyond those tried may be better."""
        values = self.record["chosen"]
        chosen = _listed(values)
        percent = 100 * self.record["errors"] / self.record["words"]
        trials = counted(len(self.record["trials"]), "setting")
        where = self.record["split"]
        text = f"tuned on {where}: {chosen}; WER {percent:.2f} % there, best of {trials}"
        for name, edge in self.record["at_edge"].items():
            option, more = name.replace("_", "-"), {"smallest": "smaller", "largest": "larger"}[edge]
            text += (
                f"; no {more} --{option} than {values[name]:g} was tried; give one on the command line to "
                "try it too"
            )
            text += " (and the others as chosen)" if len(values) > 1 else ""
        return text


@dataclass(frozen=True)
class EarlierTuning:
    """The values that `decode --tune-on` has chosen for a run.

    Attributes:
        path: the file of its record.
        split: the split it was tuned on.
        grammar: the grammar it was tuned for.
        normalise: what features were normalised over.
        chosen: the chosen values.
        weights: these and the values they are used with, by their names in `DecodingOptions`.
    """

    path: Path
    split: str
    grammar: Grammar
    normalise: Normalise
    chosen: dict[str, float]
    weights: dict[str, Any]

    def is_for(self, grammar: Grammar) -> bool:
        """Return whether the values fit a grammar; all loops weigh words in the same way."""
        return grammar is self.grammar or {grammar, self.grammar} <= LOOPS

    def summary(self) -> str:
        """Return one line on which values are used."""
        how = "" if self.normalise == "utterance" else f" with --normalise {self.normalise}"
        return f"{_listed(self.chosen)}, as decode --tune-on {self.split}{how} chose them ({self.path})"

    def refusal(self, grammar: Grammar) -> str:
        """Return one line on why the values are not used for another grammar."""
        return (
            f"{self.path}: decode --tune-on {self.split} chose these options for the grammar "
            f"{self.grammar.value}, so they are not used with {grammar.value}"
        )

    def set_aside(self, given: Collection[str]) -> str:
        """Return one line saying that the values are not used because the options `given` are set."""
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        return (
            f"{options} {'is' if len(given) == 1 else 'are'} given, so what decode --tune-on {self.split} "
            f"chose ({_listed(self.chosen)}) is not used; scales and scores that are not given have their "
            "defaults"
        )


def earlier_tuning(run_dir: Path, rescore_lm: Path | None = None) -> EarlierTuning | None:
    """Read what the latest decoding with --tune-on chose for a run; None if there was none.

    Args:
        run_dir: the run.
        rescore_lm: the language model to rescore with; its weight is among the values if it was tuned.

    Raises:
        RunError: the record is damaged.
    """
    path = run_dir / TUNED_NAME
    try:
        values = parse_json(path.read_bytes())
        options, tuning = values["options"], values["tuning"]
        weights = {name: float(options[name]) for name in WEIGHTS}
        chosen = {name: float(value) for name, value in tuning["chosen"].items()}
        weight = chosen.pop("rescore_weight", None)
        if weight is not None and options["rescore_lm"] == str(rescore_lm.resolve() if rescore_lm else None):
            chosen["rescore_weight"] = weights["rescore_weight"] = weight
        normalise: Normalise = "speaker" if options.get("normalise") == "speaker" else "utterance"
        grammar = Grammar(values["grammar"])
        return EarlierTuning(path, str(tuning["split"]), grammar, normalise, chosen, weights)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(record_cannot_be_read(path, error, "tune again, or remove it")) from error


class EarlierWeights(NamedTuple):
    """Weights taken from an earlier tuning.

    Attributes:
        weights: by their names in `DecodingOptions`; empty: none.
        line: says which weights are used, or why none are; empty: nothing was tuned.
        normalise: what features were normalised over when the weights were chosen; None without weights.
    """

    weights: dict[str, Any]
    line: str
    normalise: Normalise | None = None


def earlier_weights(run_dir: Path, grammar: Grammar, rescore_lm: Path | None = None) -> EarlierWeights:
    """Return the weights that were tuned for a run.

    Args:
        run_dir: the run.
        grammar: the grammar to search; weights for another one are not taken, and the line says so.
        rescore_lm: as for `earlier_tuning`.

    Raises:
        RunError: the record of the tuning is damaged.
    """
    earlier = earlier_tuning(run_dir, rescore_lm)
    if earlier is None:
        return EarlierWeights({}, "")
    if not earlier.is_for(grammar):
        return EarlierWeights({}, earlier.refusal(grammar))
    return EarlierWeights(earlier.weights, earlier.summary(), earlier.normalise)


def weights_set_aside(
    run_dir: Path, grammar: Grammar, given: Collection[str], rescore_lm: Path | None = None
) -> str:
    """Return a line on tuned weights that are not used because weights are given; "": none were tuned.

    Args:
        run_dir: the run.
        grammar: the grammar to search.
        given: names of the given weights.
        rescore_lm: as for `earlier_tuning`.
    """
    try:
        earlier = earlier_tuning(run_dir, rescore_lm)
    except RunError:  # the record would not have been used
        return ""
    return "" if earlier is None or not earlier.is_for(grammar) else earlier.set_aside(given)


def tune(
    trained: TrainedModel,
    dataset: Dataset,
    split: str,
    options: DecodingOptions,
    comm: Communicator,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
    print_line: Callable[[str], None] = lambda _: None,
    kept: KeptGraph | None = None,
) -> Tuned:
    """Choose scales of scores, priors and language model and the insertion score by a split's word errors.

    Collective.

    Options are tuned one after the other, twice.  Values are tried upwards and downwards from the present
    one, each way until three in a row had more errors than the best; the value with the fewest errors is
    chosen, among equals the one that changes least.  Last comes the weight of the language model to rescore
    with, on the lists that these values give.  The network runs once; its posteriors stay in memory, 4 bytes
    per frame and class, divided among the ranks.  Values are compared with at most 2,000 paths per frame.
    The result is the same for any number of ranks, and on every rank.  For a model that has learnt little
    (`Outputs.remark`), only the initial setting is tried, and kept.

    Args:
        trained: the model.
        dataset: the data directory.
        split: a development split, not the one to be evaluated afterwards.
        options: how to decode; the initial setting.
        comm: the ranks to share the work.
        is_asked_to_stop: called before every utterance.
        print_line: on rank 0, prints a line about each setting that was tried, and from time to time one on
            progress.
        kept: cache for the graph of a large language model; None: no cache.

    Raises:
        Stopped: a rank was asked to stop.
        as `decode_split`, except for results, which are not written.
    """
    check_decodable(trained, dataset, options)
    scored = _Scored.of(trained, dataset, split, options, comm, kept)
    trials = _Trials(scored, split, comm, is_asked_to_stop, print_line)
    recogniser = scored.recogniser
    tunable = [n for n in _tunable(recogniser.grammar) if n != "prior_scale" or not is_ctc(trained.config)]
    best, has_learnt_little = options, trials.begin(options, tunable)
    if not has_learnt_little:
        best = trials.best(options, tunable)
    elif comm.rank == 0:
        why = "the model has learnt little, or hears no speech"
        print_line(f"tuning on {split}: {why}, so only the initial setting is tried")
    chosen = {name: getattr(best, name) for name in tunable}
    edges = {name: "" if has_learnt_little else _edge(name, chosen[name], options) for name in tunable}
    errors, tried_weights = trials.errors(best, tunable[-1]), []
    if options.rescore_lm is not None and not has_learnt_little:
        tried_weights = trials.rescored(best)
        chosen["rescore_weight"], errors = _fewest_errors(tried_weights, best.rescore_weight)
        best = dataclasses.replace(best, rescore_weight=chosen["rescore_weight"])
    recogniser.keep_graph(best)  # the next decoding uses it
    record = {
        "split": split,
        "max_active": min(options.max_active, _FEW_ACTIVE),
        "chosen": chosen,
        "at_edge": {name: edge for name, edge in edges.items() if edge},
        "errors": errors,
        "words": scored.num_words,
    }
    return Tuned(best, {**record, "trials": trials.table() + tried_weights})


def _fewest_errors(tried: Sequence[Mapping[str, float]], given: float) -> tuple[float, int]:
    """Return the best weight to rescore with and its word errors: among equals the nearest to `given`."""
    fewest = min(tried, key=lambda trial: (trial["errors"], abs(trial["rescore_weight"] - given)))
    return fewest["rescore_weight"], int(fewest["errors"])


class _Scored(NamedTuple):
    """The network's output on a split.

    Attributes:
        recogniser: decodes scores without priors.
        log_prior: log-priors of the classes, (C,).
        utterances: this rank's: the reference, and log-posteriors (T, C).
        num_words: reference words of all ranks' utterances.
        outputs: statistics of this rank's posteriors.
    """

    recogniser: Recogniser
    log_prior: FloatArray
    utterances: Sequence[tuple[str, FloatArray]]
    num_words: int
    outputs: Outputs

    @classmethod
    def of(
        cls,
        trained: TrainedModel,
        dataset: Dataset,
        split: str,
        options: DecodingOptions,
        comm: Communicator,
        kept: KeptGraph | None,
    ) -> _Scored:
        """Run the network over this rank's utterances."""
        log_prior = trained.class_log_prior.detach().cpu().numpy()
        outputs = Outputs(len(log_prior))
        with SpokenSplit.open(dataset, split, comm) as reader:
            without_priors = dataclasses.replace(options, prior_scale=0.0)
            recogniser = recogniser_for(trained, dataset, without_priors, reader.transcripts, kept)
            features = reader.features(inputs_of(trained.config), options.normalise)
            utterances = [
                (reference, posteriors)
                for position, posteriors in recogniser.score(features, outputs)
                if (reference := reader.reference(position))
            ]
            return cls(recogniser, log_prior, utterances, sum(map(len, reader.transcripts)), outputs)


def _tunable(grammar: Grammar) -> tuple[str, ...]:
    """Return the options that have an effect with a grammar."""
    if grammar is Grammar.NGRAM:
        return tuple(_VALUES)
    of_network = ("acoustic_scale", "prior_scale")
    return (*of_network, "insertion_log_prob") if grammar in OF_ANY_LENGTH else of_network


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in values.items())


def _values(name: str, given: DecodingOptions) -> list[Any]:
    """Return the values of an option to try, in order: the usual ones and the given one."""
    return sorted({*_VALUES[name], getattr(given, name)})


def _edge(name: str, value: float, given: DecodingOptions) -> str:
    """Return "smallest" or "largest" if a value is the last one tried on that side, else ""."""
    values = _values(name, given)
    if name in _BOUNDED or value not in (values[0], values[-1]):
        return ""
    return "smallest" if value == values[0] else "largest"


def _change(name: str, options: DecodingOptions, now: DecodingOptions) -> tuple[float, float]:
    """Return how much an option changes, and its value as a tie-breaker."""
    value, old = getattr(options, name), getattr(now, name)
    change = math.log(value / old) if name in _RATIOS else value - old
    return round(abs(change), 9), value


class _Clock:
    """Measures how long tuning takes, and decides when a progress line is due."""

    def __init__(self) -> None:
        self._began = self._printed_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since tuning began."""
        return time.monotonic() - self._began

    def is_time_for_a_line(self) -> bool:
        """Return whether a line is due; if so, the next one is due a while later."""
        if time.monotonic() - self._printed_s < _SILENCE_S:
            return False
        self._printed_s = time.monotonic()
        return True


@dataclass
class _Trials:
    """Counts the word errors of settings over all ranks, each setting once.

    Attributes:
        scored: the network's output.
        split: name of the split.
        comm: the ranks.
        is_asked_to_stop: called before every utterance.
        print_line: on rank 0, prints a line about each new setting, and from time to time one on progress.
    """

    scored: _Scored
    split: str
    comm: Communicator
    is_asked_to_stop: Callable[[], bool]
    print_line: Callable[[str], None]
    _errors: dict[DecodingOptions, int] = field(default_factory=dict)
    _most_settings: int = 1
    _are_words_found: bool = False  # by this rank, with the latest setting
    _clock: _Clock = field(default_factory=_Clock)

    @property
    def recogniser(self) -> Recogniser:
        """The recogniser of the network's output."""
        return self.scored.recogniser

    def begin(self, given: DecodingOptions, names: Sequence[str]) -> bool:
        """Try the given setting; return whether the model has learnt so little that others would do as badly.

        Collective.

        Raises:
            Stopped: a rank was asked to stop.
        """
        self._most_settings = 1 + _ROUNDS * sum(len(_values(name, given)) - 1 for name in names)
        self.errors(given, names[0])
        return bool(self.scored.outputs.remark(self.comm, are_words_found=self._are_words_found))

    def best(self, given: DecodingOptions, names: Sequence[str]) -> DecodingOptions:
        """Return the best setting found from `given` on, tuning one option after the other, twice.

        Collective.

        Raises:
            Stopped: a rank was asked to stop.
        """
        best = given
        for _ in range(_ROUNDS):
            before = best
            for name in names:
                best = self._walk(best, name, _values(name, given))
            if best == before:
                break
        return best

    def _walk(self, now: DecodingOptions, name: str, values: Sequence[Any]) -> DecodingOptions:
        """Return the setting with an option's best value near the present.  Collective.  Raises Stopped."""
        here = values.index(getattr(now, name))
        found = [(self.errors(now, name), _change(name, now, now), now)]
        fewest = found[0][0]
        for way in (values[here + 1 :], values[:here][::-1]):
            worse = 0
            for value in way:
                tried = dataclasses.replace(now, **{name: value})
                errors = self.errors(tried, name)
                found.append((errors, _change(name, tried, now), tried))
                worse = worse + 1 if errors > fewest else 0
                fewest = min(fewest, errors)
                if worse == _PATIENCE:
                    break
        return min(found, key=lambda each: each[:2])[2]

    def errors(self, options: DecodingOptions, name: str) -> int:
        """Return a setting's word errors; messages name its value of `name`.  Collective.  Raises Stopped."""
        if options not in self._errors:
            few = min(options.max_active, _FEW_ACTIVE)
            self.recogniser.use(dataclasses.replace(options, max_active=few))
            setting = f"{name.replace('_', '-')} {getattr(options, name):g}"
            hypotheses = self._search(options, setting)
            self._are_words_found = any(hypotheses)
            self._errors[options] = self._count(hypotheses)
            if self.comm.rank == 0:
                percent = 100 * self._errors[options] / self.scored.num_words
                self.print_line(f"tuning on {self.split}: {setting}: {percent:.1f} % WER")
        return self._errors[options]

    def rescored(self, options: DecodingOptions) -> list[dict[str, float]]:
        """Return the word errors with each weight of the language model to rescore with.

        Collective.  The lists are searched only once.

        Raises:
            Stopped: a rank was asked to stop.
        """
        self.recogniser.use(options)
        lists = []
        for _, log_posteriors in self.scored.utterances:
            if self.is_asked_to_stop():
                break
            lists.append(self.recogniser.searcher.search_nbest(self._scores(log_posteriors, options)))
        trials = []
        for weight in sorted({*_RESCORE_WEIGHTS, options.rescore_weight}):
            self.recogniser.use(dataclasses.replace(options, rescore_weight=weight))
            best = [self.recogniser.rescored(each)[:1] for each in lists]
            errors = self._count([" ".join(each[0].words) if each else "" for each in best])
            trials.append({"rescore_weight": weight, "errors": errors})
        return trials

    def _scores(self, log_posteriors: FloatArray, options: DecodingOptions) -> FloatArray:
        return scaled_log_likelihoods(log_posteriors, self.scored.log_prior, options.prior_scale)

    def _count(self, hypotheses: Sequence[str]) -> int:
        """Count the errors of all ranks' hypotheses, of which a rank asked to stop has too few."""
        utterances = self.scored.utterances
        own = count_errors([ref for ref, _ in utterances[: len(hypotheses)]], hypotheses)
        mine = {"errors": int(own[:, :3].sum()), "stopped": len(hypotheses) < len(utterances)}
        parts = self.comm.allgather_object(mine)
        if any(part["stopped"] for part in parts):
            raise Stopped
        return sum(part["errors"] for part in parts)

    def _search(self, options: DecodingOptions, setting: str) -> list[str]:
        hypotheses: list[str] = []
        for _, log_posteriors in self.scored.utterances:
            if self.is_asked_to_stop():
                break
            path = self.recogniser.searcher.search(self._scores(log_posteriors, options))
            hypotheses.append("" if path is None else " ".join(path.words))
            if self.comm.rank == 0 and self._clock.is_time_for_a_line():
                self._print_progress(len(hypotheses), setting)
        return hypotheses

    def _print_progress(self, utterances: int, setting: str) -> None:
        """Report how many of rank 0's utterances a setting has done, and how long all others may take."""
        whole = max(1, len(self.scored.utterances))
        done = len(self._errors) + utterances / whole
        minutes = math.ceil(self._clock.seconds * (self._most_settings - done) / done / 60)
        number = f"setting {len(self._errors) + 1} of at most {self._most_settings}"
        self.print_line(
            f"tuning on {self.split}: {setting}: {utterances} of {whole} utterances; {number}; trying "
            f"all would take some {minutes} min more at this pace"
        )

    def table(self) -> list[dict[str, float]]:
        """Return every setting tried with its errors, in order."""
        return [
            {
                **{name: getattr(options, name) for name in _tunable(self.recogniser.grammar)},
                "errors": errors,
            }
            for options, errors in self._errors.items()
        ]
