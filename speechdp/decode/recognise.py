"""Recognise a split of a data directory with a trained model, over N ranks, and write what came out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from speechdp.comm.base import Communicator
from speechdp.data.corpora.corpus import UNKNOWN_SPEAKER
from speechdp.data.shards.dataset import Dataset
from speechdp.data.signal.features import shift_s
from speechdp.data.transforms.moments import Moments, moments_by_speaker, sums_of
from speechdp.data.transforms.preprocess import InputOptions, Preprocessor, inputs_of
from speechdp.decode.graph import (
    LOOPS,
    OF_ANY_LENGTH,
    DecodingGraph,
    Grammar,
    LexiconTransducer,
    build_graph,
    choose_grammar,
    loop_vocabulary,
)
from speechdp.decode.kaldi_graph import KaldiGraphFiles, read_kaldi_graph
from speechdp.decode.language_model import LanguageModel, language_model_in, read_respelled
from speechdp.decode.nbest import (
    Candidate,
    NBestSearcher,
    Rescorer,
    SentenceCost,
    nbest_lines,
    ngram_cost,
)
from speechdp.decode.results import (
    DecodingResult,
    DecodingSpeed,
    Hypothesis,
    NBestLists,
    errors_by_speaker,
    judged,
    nbest_path,
    results_at,
    results_name,
    write_results,
)
from speechdp.decode.scoring import AcousticScorer
from speechdp.decode.search import SearchOptions
from speechdp.decode.wer import word_error_rate
from speechdp.errors import ConfigError
from speechdp.files import check_writable
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.kaldi_pdfs import KaldiPdfs, is_kaldi_pdfs, load_classes, refuse_kaldi_pdfs
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.state_tying import StateTying
from speechdp.language.ngram import NgramModel
from speechdp.process.ending import Stopped
from speechdp.timing.memory import peak_rss_bytes

#: Graphs of other scales are kept, for a search of scales, while they have fewer arcs together: some 150 MB.
_MOST_KEPT_ARCS = 4_000_000


class TrainedModel(Protocol):
    """What decoding needs of `speechdp.checkpoint.state.LoadedModel`."""

    @property
    def model(self) -> torch.nn.Module:
        """Map features (B, T, F) and lengths (B,) to logits (B, T, C)."""

    @property
    def class_log_prior(self) -> torch.Tensor:
        """Log-priors, (C,), from `hmm.log_priors`."""

    @property
    def self_loop(self) -> torch.Tensor:
        """Self-loop probabilities, (C,)."""

    @property
    def config(self) -> dict[str, Any]:
        """Tell what it was trained on: classes, features and sampling rate are compared."""

    @property
    def tying(self) -> StateTying | None:
        """What its classes are where states depend on context."""


#: Word sequences of an utterance that are rescored, where the user does not say how many.
_TO_RESCORE = 100
#: Utterances of a rank whose n-best lists are passed on at once.
_PORTION = 256
#: Over what features are normalised: the utterance alone, or all utterances of its speaker in the split.
Normalise = Literal["utterance", "speaker"]


@dataclass(frozen=True)
class DecodingOptions:
    """How to decode; recorded in wer-<split>.json.

    Attributes:
        grammar: which word sequences are allowed; None: ngram if there is a language model, else digit-loop
            if all reference words are digits, else word-loop.
        beam: search beam, nats.
        max_active: at most this many paths a frame.
        acoustic_scale: factor on the acoustic log-likelihoods.
        prior_scale: how much of the class priors is divided out of the posteriors.
        insertion_log_prob: added to each word's log-probability in loops and n-grams; negative: fewer words.
        lm_scale: factor on the costs of the language model (ngram).
        silence_probability: of a pause at a word boundary.
        normalise: over what features of data that store audio are normalised.
        graph: Kaldi's own graph to use in place of grammar, lexicon and language model; only the beam,
            max_active and the scales of the network's scores matter then.
        nbest: find so many word sequences for each utterance; 0: the best alone, or 100 to rescore.
        lattice_beam: of the lattice that they are taken from, nats.
        rescore_lm: file of a language model to weigh these anew with.
        rescore_weight: its share in their log-probability, 0 to 1.
    """

    grammar: Grammar | None = None
    beam: float = 16.0
    max_active: int = 10_000
    acoustic_scale: float = 1.0
    prior_scale: float = 1.0
    insertion_log_prob: float = 0.0
    lm_scale: float = 1.0
    silence_probability: float = 0.5
    normalise: Normalise = "utterance"
    graph: KaldiGraphFiles | None = None
    nbest: int = 0
    lattice_beam: float = 10.0
    rescore_lm: Path | None = None
    rescore_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beam", "acoustic_scale", "lm_scale", "lattice_beam"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be more than 0")
        if self.max_active < 2:
            raise ConfigError(f"--max-active {self.max_active}: must be at least 2")
        for name in ("acoustic_scale", "prior_scale", "lm_scale", "insertion_log_prob", "lattice_beam"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be finite")
        if not self.prior_scale >= 0:
            raise ConfigError(f"--prior-scale {self.prior_scale}: must not be negative")
        if not 0 <= self.silence_probability < 1:
            raise ConfigError(f"--silence-probability {self.silence_probability}: must lie in [0, 1)")
        if self.nbest < 0:
            raise ConfigError(f"--nbest {self.nbest}: must not be negative")
        if not 0 <= self.rescore_weight <= 1:
            raise ConfigError(f"--rescore-weight {self.rescore_weight}: must lie in [0, 1]")

    @property
    def num_candidates(self) -> int:
        """Word sequences to find for each utterance; 0: the best alone, without a lattice."""
        return self.nbest or (_TO_RESCORE if self.rescore_lm is not None else 0)

    def record(self) -> dict[str, Any]:
        """Return them as wer-<split>.json records them: but for the graph, which has a record of its own."""
        values = {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()
        }
        del values["graph"]
        return values


class Recogniser:
    """Recognises utterances with one model and one grammar.

    Args:
        trained: the model with its priors and transitions.
        lexicon: pronunciations, as the model was trained with.
        inventory: classes, as the model was trained with.
        options: how to decode.
        transcripts: the corpus's word sequences: they choose the grammar where neither `options` nor a
            language model does, and are the grammar transcript-set.
        language_model: that of the grammar ngram, which is the default where there is one.

    Attributes:
        grammar: the grammar used.
        words: the words that can be recognised.
        transducer: HL, of which graphs are made.
        graph: what is searched.
        searcher: searches it.

    Raises:
        ConfigError: model and lexicon differ in classes, or the grammar needs words that are missing.
    """

    _second: SentenceCost | None

    def __init__(
        self,
        trained: TrainedModel,
        lexicon: Lexicon,
        inventory: StateInventory,
        options: DecodingOptions,
        transcripts: Sequence[Sequence[str]],
        language_model: LanguageModel | None = None,
    ) -> None:
        without = choose_grammar(transcripts) if language_model is None else Grammar.NGRAM
        self.grammar = options.grammar or without
        self.words = frozenset(lexicon.recognised_words)
        if self.grammar is Grammar.NGRAM and language_model is not None:
            self.words &= language_model.words
        elif self.grammar in LOOPS:
            self.words = frozenset(loop_vocabulary(lexicon, self.grammar))
        self_loop = trained.self_loop.detach().cpu().double().numpy()
        self.transducer = LexiconTransducer(
            lexicon, inventory, self_loop, options.silence_probability, trained.tying
        )
        self._transcripts, self._language_model = transcripts, language_model
        self._attach(trained, options)

    def _sentence_cost(self) -> tuple[SentenceCost, float] | None:
        """Return what a word sequence costs by the grammar's language model, and its scale in the graph."""
        if self.grammar is Grammar.NGRAM:
            model = self._language_model
            return (ngram_cost(model), self._options.lm_scale) if isinstance(model, NgramModel) else None
        if self.grammar in LOOPS:
            cost = math.log(len(loop_vocabulary(self.transducer.lexicon, self.grammar)))
            return (lambda words: len(words) * cost), 1.0
        return None

    def _rescorer(self) -> Rescorer | None:
        options, first = self._options, self._sentence_cost()
        if options.rescore_lm is None:
            return None
        if first is None:
            raise ConfigError(
                f"--rescore-lm {options.rescore_lm}: the grammar {self.grammar.value} has no n-grams to put "
                "it in place of; decode with an ARPA file or estimated n-grams (prepare --lm-order) or a loop"
            )
        if self._second is None:
            self._second = self._second_model(options.rescore_lm)
        cost, scale = first
        return Rescorer(cost, scale, self._second, options.lm_scale, options.rescore_weight)

    def _second_model(self, path: Path) -> SentenceCost:
        found = read_respelled(path, self.transducer.lexicon)
        if found is None:
            raise ConfigError(f"--rescore-lm {path}: none of its words is in the lexicon; give one that fits")
        if not isinstance(found.model, NgramModel):
            raise ConfigError(f"--rescore-lm {path}: has no n-grams; give an ARPA file")
        return ngram_cost(found.model)

    def _attach(self, trained: TrainedModel, options: DecodingOptions) -> None:
        """Take the network and the options of the search."""
        log_prior = trained.class_log_prior.detach().cpu().numpy()
        device = next(trained.model.parameters(), trained.class_log_prior).device
        self._scorer = AcousticScorer(trained.model, log_prior, options.prior_scale, device)
        #: By the scale of the language model.
        self._graphs: dict[float, DecodingGraph] = {}
        self._num_kept_arcs = 0
        self._second = None
        self.use(options)

    def _build(self, lm_scale: float) -> DecodingGraph:
        return build_graph(
            self.transducer,
            self.grammar,
            self._transcripts,
            language_model=self._language_model,
            lm_scale=lm_scale,
        )

    def _graph_with(self, lm_scale: float) -> DecodingGraph:
        """Return a graph that is there, or build it; as many are kept as memory bears."""
        if lm_scale not in self._graphs:
            graph = self._build(lm_scale)
            num_arcs = graph.num_arcs  # counted state by state
            if self._num_kept_arcs + num_arcs > _MOST_KEPT_ARCS:
                self._graphs.clear()
                self._num_kept_arcs = 0
            self._graphs[lm_scale] = graph
            self._num_kept_arcs += num_arcs
        return self._graphs[lm_scale]

    def use(self, options: DecodingOptions) -> None:
        """Search with other scales, insertion scores or lengths of lists from now on; other options stay.

        Raises:
            ConfigError: as the constructor.
        """
        self.graph = self._graph_with(options.lm_scale)
        if self.grammar in OF_ANY_LENGTH:
            self.graph.set_insertion(options.insertion_log_prob)
        self._options = options
        search = SearchOptions(options.beam, options.max_active, options.acoustic_scale)
        self.searcher = NBestSearcher(self.graph, search, options.num_candidates, options.lattice_beam)
        self._rescore = self._rescorer()

    @property
    def gives_lists(self) -> bool:
        """Whether `candidates` returns more than the best word sequence, by the options."""
        return self._options.num_candidates > 0

    def score(self, utterances: Iterable[FloatArray]) -> Iterator[tuple[int, FloatArray]]:
        """Yield (position in `utterances`, log-likelihoods (T, C)), in any order."""
        return self._scorer.score(utterances)

    def candidates(self, log_likelihoods: FloatArray) -> list[Candidate]:
        """Return the most probable word sequences, the best first: as many as the options ask for.

        Args:
            log_likelihoods: (T, C), nats, of one utterance.

        Returns:
            They are rescored, if that is asked for; empty where no path survived.
        """
        if not self.gives_lists:
            path = self.searcher.search(log_likelihoods)
            return [] if path is None else [Candidate(path.words, path.cost)]
        return self.rescored(self.searcher.search_nbest(log_likelihoods))

    def rescored(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return what `searcher.search_nbest` found with the costs of the language models, the best first."""
        if self._rescore is not None:
            return self._rescore.rescored(found)
        first = self._sentence_cost()
        return [each if first is None else replace(each, lm_cost=first[0](each.words)) for each in found]

    def recognise(self, utterances: Iterable[FloatArray]) -> Iterator[tuple[int, list[Candidate]]]:
        """Yield (position in `utterances`, its most probable word sequences), in any order.

        Args:
            utterances: features, (T, F) each.
        """
        for index, log_likelihoods in self.score(utterances):
            yield index, self.candidates(log_likelihoods)


class GraphRecogniser(Recogniser):
    """Recognises with a graph that is there already, in place of lexicon and grammar."""

    def __init__(self, trained: TrainedModel, graph: DecodingGraph, options: DecodingOptions) -> None:
        self.grammar = Grammar.GRAPH
        self.words = frozenset(graph.words) - {""}
        self._ready = graph
        self._attach(trained, options)

    def _build(self, lm_scale: float) -> DecodingGraph:
        return self._ready


class SpokenSplit:
    """A split to be recognised, over N ranks: rank r takes utterances r, r + N, ...

    Attributes:
        transcripts: the words of all utterances.
        own: those of this rank, each given by its shard and its place there.
    """

    def __init__(self, dataset: Dataset, split: str, comm: Communicator, stack: ExitStack) -> None:
        num_shards = len(dataset.shard_paths(split))
        shards = [stack.enter_context(dataset.open_shard(split, i)) for i in range(num_shards)]
        self.transcripts = [text.split() for shard in shards for text in shard.texts]
        if not any(self.transcripts):
            remedy = "recognise its recordings with speechdp transcribe RUN FILES"
            if is_kaldi_pdfs(dataset.classes_path):  # which transcribe refuses
                remedy = "write its scores with speechdp posteriors"
            raise ConfigError(
                f"{dataset.path}: split {split!r} has no transcripts to count errors by; {remedy}"
            )
        self._all = [(shard, i) for shard in shards for i in range(shard.num_utterances)]
        self._comm = comm
        self.own = self._all[comm.rank :: comm.size]

    @classmethod
    @contextmanager
    def open(cls, dataset: Dataset, split: str, comm: Communicator) -> Iterator[SpokenSplit]:
        """Open the shards of a split.

        Raises:
            ConfigError: the split has no reference words.
            ShardError: no such split, or a shard is damaged.
        """
        with ExitStack() as stack:
            yield cls(dataset, split, comm, stack)

    def features(self, inputs: InputOptions, normalise: Normalise = "utterance") -> Iterator[FloatArray]:
        """Return what the network sees of each own utterance, (T, F), one by one.  Collective.

        Raises:
            ShardError: a shard is damaged.
        """
        own: list[Moments | None] = [None] * len(self.own)
        if normalise == "speaker":
            own[:] = self._moments_by_speaker(inputs)[self._comm.rank :: self._comm.size]
        return (
            Preprocessor.for_shard(shard.header, inputs).read(shard, i, moments)[0]
            for (shard, i), moments in zip(self.own, own, strict=True)
        )

    def _moments_by_speaker(self, inputs: InputOptions) -> list[Moments]:
        """Return what each utterance of the split is normalised by.  Collective."""
        preprocessor = Preprocessor.for_shard(self._all[0][0].header, inputs)
        sums = torch.zeros(len(self._all), 1 + 2 * preprocessor.base_dim, dtype=torch.float64)
        for place, (shard, i) in zip(sums[self._comm.rank :: self._comm.size], self.own, strict=True):
            place.copy_(sums_of(preprocessor.not_normalised(shard.read_samples(i)[0])))
        speakers = [shard.speaker(i) for shard, i in self._all]
        known = ["" if speaker == UNKNOWN_SPEAKER else speaker for speaker in speakers]
        if known and not any(known):
            raise ConfigError("--normalise speaker: the data do not say who speaks; leave it out")
        return moments_by_speaker(sums, known, self._comm)

    def reference(self, position: int) -> str:
        """Return the words of an own utterance."""
        shard, i = self.own[position]
        return " ".join(shard.text(i).split())


def check_decodable(trained: TrainedModel, dataset: Dataset, options: DecodingOptions) -> None:
    """Refuse data that the model was not trained for, or that the graph does not fit, by ConfigError."""
    check_task(dataset)
    if options.graph is None:
        refuse_kaldi_pdfs(dataset.classes_path, "decode")
    elif not is_kaldi_pdfs(dataset.classes_path):
        raise ConfigError(
            f"--graph {options.graph.graph}: {dataset.path} has states of phones as classes, not the pdfs of "
            "a Kaldi system; leave --graph out"
        )
    check_origin(trained.config, dataset, load_classes(dataset.classes_path))
    if options.normalise == "speaker" and dataset.stored != "audio":
        raise ConfigError(
            f"--normalise speaker: {dataset.path} holds features, which are normalised already; prepare it "
            "with --store audio"
        )


def recogniser_for(
    trained: TrainedModel, dataset: Dataset, options: DecodingOptions, transcripts: Sequence[Sequence[str]]
) -> Recogniser:
    """Make a recogniser with the lexicon, the classes and the language model of a data directory.

    Raises:
        ConfigError: model and lexicon differ in classes, or the grammar needs what is missing.
    """
    if options.graph is not None:
        graph = read_kaldi_graph(options.graph, dataset.num_classes)
        return GraphRecogniser(trained, graph, options)
    inventory = StateInventory.load(dataset.classes_path)
    lexicon, language_model = Lexicon.load(dataset.lexicon_path), language_model_in(dataset.path)
    return Recogniser(trained, lexicon, inventory, options, transcripts, language_model)


@contextmanager
def opened_split(
    trained: TrainedModel,
    dataset: Dataset,
    split: str,
    run_dir: Path,
    options: DecodingOptions,
    comm: Communicator,
) -> Iterator[tuple[SpokenSplit, str]]:
    """Open a split to be decoded, and say how the files of its decoding are called.  Collective.

    What `decode_split` would refuse is refused, as far as that is known before the work.

    Raises:
        ConfigError, ShardError, RunError: as `decode_split`.
    """
    check_decodable(trained, dataset, options)
    name = _agreed_name(trained, dataset, split, run_dir, comm)
    with SpokenSplit.open(dataset, split, comm) as reader:
        yield reader, name


def decode_split(
    trained: TrainedModel,
    dataset: Dataset,
    split: str,
    run_dir: Path,
    options: DecodingOptions,
    comm: Communicator,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
    tuning: Mapping[str, Any] | None = None,
) -> DecodingResult:
    """Decode a split and write RUN/hypotheses/<name>.txt (Kaldi `text`) and RUN/wer-<name>.json.

    The name is that of `results_name`.

    Collective.

    Rank r decodes utterances r, r + size, ...; rank 0 writes.  The result is the same for any number of
    ranks, and the same on every rank.

    Args:
        trained: the model.
        dataset: the data directory; its lexicon and classes must be those of the training data.
        split: name of the split.
        run_dir: the run directory.
        options: how to decode.
        comm: the ranks to share the work.
        is_asked_to_stop: looked at before every utterance; where one rank is, none writes anything.
        tuning: how the options were chosen, to be recorded.

    Raises:
        Stopped: a rank was asked to.
        ConfigError: the model does not fit the data, or the split has no reference words.
        ShardError: a shard is damaged.
        RunError: the model gives NaN, or the results cannot be written.
    """
    with opened_split(trained, dataset, split, run_dir, options, comm) as (reader, name):
        path = run_dir / "hypotheses" / f"{name}.txt"
        began = time.process_time()
        recogniser = recogniser_for(trained, dataset, options, reader.transcripts)
        step_s = shift_s(dataset.sampling_rate, dataset.features)
        own = _OwnUtterances(step_s, time.process_time() - began)
        features = reader.features(inputs_of(trained.config), options.normalise)
        own.recognise(recogniser, reader, features, is_asked_to_stop)
    parts = comm.allgather_object(
        {
            "hypotheses": [vars(h) for h in own.hypotheses],
            "speed": vars(own.speed()),
            "retried": recogniser.searcher.num_retried,
            "stopped": len(own.hypotheses) < len(reader.own),
        }
    )
    if any(part["stopped"] for part in parts):
        raise Stopped
    everything = (Hypothesis(**values) for part in parts for values in part["hypotheses"])
    hypotheses = sorted(everything, key=lambda h: h.utterance_id)  # the order Kaldi's tools expect
    told = judged(hypotheses)
    wer = word_error_rate([h.ref for h in told], [h.hyp for h in told])
    result = DecodingResult(
        split=split,
        name=name,
        data={"path": str(dataset.path), "checksum": dataset.checksum},
        grammar=recogniser.grammar,
        wer=wer,
        speakers=errors_by_speaker(told),
        retried=sum(part["retried"] for part in parts),
        failed=sum(h.num_candidates == 0 for h in hypotheses),
        unknown_words=sum(word not in recogniser.words for words in reader.transcripts for word in words),
        hypotheses=path,
        utterances=tuple(hypotheses),
        settings=_settings(recogniser, options, tuning),
        nbest=NBestLists.of(hypotheses, nbest_path(path), options.num_candidates),
        speed=DecodingSpeed.over([part["speed"] for part in parts]),
    )
    lists = _gathered(own.lists, comm)
    if comm.rank == 0:
        write_results(run_dir, result, lists)
    comm.barrier()  # nobody reports success before the files are there
    return result


def _agreed_name(
    trained: TrainedModel, dataset: Dataset, split: str, run_dir: Path, comm: Communicator
) -> str:
    """Return how the files of a decoding are called, on every rank, if they can be written.  Collective."""
    name = split
    if comm.rank == 0:
        name = results_name(run_dir, split, dataset, trained.config.get("data_checksum"))
        with results_at(run_dir):
            check_writable(run_dir / "hypotheses")  # of somebody else's run, say: before the work
    return str(comm.broadcast_object(name))


def _gathered(own: Mapping[str, str], comm: Communicator) -> dict[str, str]:
    """Return on rank 0 what all ranks have; collective.  In portions: long lists of a large split are GB."""
    names, lists = list(own), dict[str, str]()
    for first in range(0, max(comm.allgather_object(len(names))), _PORTION):
        portion = {name: own[name] for name in names[first : first + _PORTION]}
        for part in comm.allgather_object(portion):
            if comm.rank == 0:
                lists |= part
    return lists


def _settings(
    recogniser: Recogniser, options: DecodingOptions, tuning: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what is to be recorded of the search."""
    settings = options.record() | {"grammar": recogniser.grammar.value}
    graph = recogniser.graph
    values = {"states": graph.num_states, "arcs": graph.num_arcs, "determinised": graph.is_determinised}
    files = {} if options.graph is None else {name: str(path) for name, path in vars(options.graph).items()}
    return {"options": settings, "graph": values | files, **({"tuning": tuning} if tuning else {})}


def check_task(dataset: Dataset) -> None:
    """Refuse data whose speech is not to be recognised, by ConfigError; their class list is another's."""
    if dataset.task != "acoustic":
        raise ConfigError(
            f"{dataset.path}: holds spectrograms for synthesis; give data prepared without --task synthesis"
        )


def check_origin(config: dict[str, Any], dataset: Dataset, classes: StateInventory | KaldiPdfs) -> None:
    """Refuse data made otherwise than those of training, by ConfigError; nothing else might notice."""
    if config.get("classes_sha256", classes.sha256) != classes.sha256:
        raise ConfigError(
            f"{dataset.classes_path}: is not the class list the model was trained on; prepare the data with "
            "--like RUN, the run of the model (--lexicon as well, for other words in its phones)"
        )
    of_data = {"sampling_rate": dataset.sampling_rate, "features": dataset.features.to_dict()}
    for name, value in of_data.items():
        if config.get(name, value) != value:
            raise ConfigError(
                f"{dataset.path}: {name} {value} is not what the model was trained on ({config[name]}); "
                "prepare the data with --like RUN, the run of the model"
            )


class _OwnUtterances:
    """What this rank recognises, and what that takes.

    Attributes:
        hypotheses: in the order in which they were found.
        lists: lines of n-best lists, by utterance, where they were asked for.
    """

    def __init__(self, frame_shift_s: float, graph_s: float) -> None:
        self.hypotheses: list[Hypothesis] = []
        self.lists: dict[str, str] = {}
        self._frame_shift_s, self._graph_s = frame_shift_s, graph_s
        self._frames = 0
        self._network_s = self._search_s = 0.0
        self._began = time.process_time()  # before features are normalised over speakers

    def recognise(
        self,
        recogniser: Recogniser,
        reader: SpokenSplit,
        features: Iterable[FloatArray],
        is_asked_to_stop: Callable[[], bool],
    ) -> None:
        """Recognise this rank's utterances until asked to stop."""
        before = self._began
        for position, log_likelihoods in recogniser.score(features):
            if is_asked_to_stop():
                break
            scored = time.process_time()
            candidates = recogniser.candidates(log_likelihoods)
            shard, i = reader.own[position]
            name, speaker = shard.utterance_id(i), shard.speaker(i)
            known = "" if speaker == UNKNOWN_SPEAKER else speaker
            self.hypotheses.append(Hypothesis.of(name, known, reader.reference(position), candidates))
            if recogniser.gives_lists:
                self.lists[name] = nbest_lines(name, candidates)
            found = time.process_time()
            self._frames += len(log_likelihoods)
            self._network_s += scored - before
            self._search_s += found - scored
            before = found

    def speed(self) -> DecodingSpeed:
        """Return what it took so far."""
        speech = self._frames * self._frame_shift_s
        return DecodingSpeed(speech, self._graph_s, self._network_s, self._search_s, peak_rss_bytes())
