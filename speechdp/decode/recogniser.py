"""Recognise utterances: a trained model, a decoding graph, and a search of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from speechdp.counting import counted
from speechdp.data.shards.dataset import Dataset
from speechdp.decode.graphs.graph import (
    LOOPS,
    OF_ANY_LENGTH,
    CtcTransducer,
    DecodingGraph,
    Grammar,
    LexiconTransducer,
    build_graph,
    choose_grammar,
    loop_vocabulary,
)
from speechdp.decode.graphs.kaldi_graph import KaldiGraphFiles, read_kaldi_graph
from speechdp.decode.kept_graph import LARGE_MODEL_BYTES, KeptGraph, graph_key
from speechdp.decode.language_model import StoredModel, nothing_fits, read_given_model, respelled_model
from speechdp.decode.nbest import Candidate, NBestSearcher, Rescorer, SentenceCost, ngram_cost
from speechdp.decode.origin import is_ctc
from speechdp.decode.scoring import AcousticScorer, Outputs
from speechdp.decode.search import SearchOptions
from speechdp.errors import ConfigError
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.state_tying import StateTying
from speechdp.language.ngram import NgramModel

#: Graphs of other scales are cached for a search of scales up to this total number of arcs: some 150 MB.
_MOST_KEPT_ARCS = 4_000_000
#: Word sequences of an utterance to rescore, if the user does not say how many.
_TO_RESCORE = 100
#: Costs are added in float32: with much larger factors and scores they overflow, and nothing is found.
LARGEST_WEIGHT = 1e6
#: What kaldifst takes.
_MOST_CANDIDATES = 2**31 - 1
#: What features are normalised over: the utterance alone, or all utterances of its speaker in the split.
Normalise = Literal["utterance", "speaker"]


class TrainedModel(Protocol):
    """What decoding needs from `speechdp.tasks.model_file.LoadedModel`."""

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
        """What the model was trained on: classes, features and sampling rate are compared."""

    @property
    def tying(self) -> StateTying | None:
        """The tying of context-dependent states, if its classes are such states."""


@dataclass(frozen=True)
class DecodingOptions:
    """How to decode; recorded in wer-<split>.json.

    Attributes:
        grammar: which word sequences are allowed; None: ngram if there is a language model, else digit-loop
            if all reference words are digits, else word-loop.
        beam: search beam, nats.
        max_active: most paths kept per frame.
        acoustic_scale: factor on the acoustic log-likelihoods.
        prior_scale: exponent of the class priors that posteriors are divided by.
        insertion_log_prob: added to each word's log-probability in loops and n-grams; negative: fewer words.
        lm_scale: factor on the costs of the language model (ngram).
        silence_probability: probability of a pause at a word boundary.
        normalise: what features are normalised over, for data that store audio.
        graph: a graph made by Kaldi that replaces grammar, lexicon and language model; then only the beam,
            max_active and the scales of the network's scores matter.
        nbest: word sequences to find for each utterance; 0: only the best, or 100 to rescore.
        lattice_beam: beam of the lattice that they are taken from, nats.
        rescore_lm: file of a language model to rescore them with.
        rescore_weight: share of that model in their log-probability, 0 to 1.
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
            if not abs(getattr(self, name)) <= LARGEST_WEIGHT:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: must be finite, and at most "
                    f"{LARGEST_WEIGHT:,.0f} in size"
                )
        if not self.prior_scale >= 0:
            raise ConfigError(f"--prior-scale {self.prior_scale}: must not be negative")
        if not 0 <= self.silence_probability < 1:
            raise ConfigError(f"--silence-probability {self.silence_probability}: must lie in [0, 1)")
        if self.nbest < 0:
            raise ConfigError(f"--nbest {self.nbest}: must not be negative")
        if self.nbest > _MOST_CANDIDATES:
            raise ConfigError(f"--nbest {self.nbest}: must be at most {_MOST_CANDIDATES:,}")
        if not 0 <= self.rescore_weight <= 1:
            raise ConfigError(f"--rescore-weight {self.rescore_weight}: must lie in [0, 1]")

    @property
    def num_candidates(self) -> int:
        """Word sequences to find for each utterance; 0: only the best, without a lattice."""
        return self.nbest or (_TO_RESCORE if self.rescore_lm is not None else 0)

    def record(self) -> dict[str, Any]:
        """Return the options for wer-<split>.json, without the graph, which has its own record."""
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
        transcripts: the corpus's word sequences.  They choose the grammar if neither `options` nor a language
            model does, and define the grammar transcript-set.
        language_model: the model for the grammar ngram, which is the default if there is one.
        kept: cache for the graph of a large language model; None: no cache.

    Attributes:
        grammar: the grammar used.
        transducer: HL, from which graphs are built.
        graph: the graph that is searched.
        searcher: searches the graph.

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
        language_model: StoredModel | None = None,
        kept: KeptGraph | None = None,
    ) -> None:
        without = choose_grammar(transcripts) if language_model is None else Grammar.NGRAM
        self.grammar = options.grammar or without
        if is_ctc(trained.config):
            self.transducer: LexiconTransducer = CtcTransducer(lexicon, inventory)
        else:
            self_loop = trained.self_loop.detach().cpu().double().numpy()
            self.transducer = LexiconTransducer(
                lexicon, inventory, self_loop, options.silence_probability, trained.tying
            )
        self._transcripts, self._language_model, self._kept = transcripts, language_model, kept
        self._attach(trained, options)

    def _sentence_cost(self) -> tuple[SentenceCost, float] | None:
        """Return the cost of a word sequence by the grammar's language model, and its scale in the graph."""
        if self.grammar is Grammar.NGRAM:
            model = None if self._language_model is None else self._language_model.model
            return (ngram_cost(model), self._options.lm_scale) if isinstance(model, NgramModel) else None
        if self.grammar in LOOPS:
            cost = math.log(len(loop_vocabulary(self.transducer.lexicon, self.grammar)))
            return (lambda words: len(words) * cost), 1.0
        return None

    def _rescorer(self) -> Rescorer | None:
        options = self._options
        if options.rescore_lm is None:
            return None
        first = self._sentence_cost()
        if first is None:
            raise ConfigError(
                f"--rescore-lm {options.rescore_lm}: the grammar {self.grammar.value} has no n-grams for it "
                "to replace; decode with an ARPA file or estimated n-grams (prepare --lm-order) or a loop"
            )
        if self._second is None:
            self._second = self._second_model(options.rescore_lm)
        cost, scale = first
        return Rescorer(cost, scale, self._second, options.lm_scale, options.rescore_weight)

    def _second_model(self, path: Path) -> SentenceCost:
        given = read_given_model(path)
        if not isinstance(given, NgramModel):
            raise ConfigError(f"--rescore-lm {path}: has no n-grams; give an ARPA file")
        found = respelled_model(given, self.transducer.lexicon)
        if found is None:
            raise ConfigError(f"--rescore-lm {path}: {nothing_fits(path)}; give one that fits")
        assert isinstance(found.model, NgramModel)
        if found.without_entry:
            lacks = (
                f"{path.name} lacks {counted(found.without_entry, 'word')} of the lexicon and has no <unk>"
            )
            self.rescoring_remark = f"{lacks}: rescoring puts sequences with them last"
        return ngram_cost(found.model)

    def _attach(self, trained: TrainedModel, options: DecodingOptions) -> None:
        """Set the network and the search options."""
        log_prior = trained.class_log_prior.detach().cpu().numpy()
        device = next(trained.model.parameters(), trained.class_log_prior).device
        self._scorer = AcousticScorer(trained.model, log_prior, options.prior_scale, device)
        #: By scale of the language model.
        self._graphs: dict[float, DecodingGraph] = {}
        self._num_kept_arcs = 0
        self._second = None
        #: Message for the user of --rescore-lm; "": none.
        self.rescoring_remark = ""
        self.use(options)

    def _place_of(self, lm_scale: float) -> tuple[KeptGraph, str] | None:
        """Return the cache for a graph, and its key; None: it is built quickly, or there is no cache."""
        stored = self._language_model if self.grammar is Grammar.NGRAM else None
        if stored is None or self._kept is None or stored.num_bytes < LARGE_MODEL_BYTES:
            return None
        return self._kept, graph_key(self.transducer, stored, lm_scale)

    def keep_graph(self, options: DecodingOptions) -> None:
        """Search with these options, as `use`, and keep their graph instead of the one built last.

        Collective among the ranks of `kept`.
        """
        place = self._place_of(options.lm_scale)
        if place is not None:
            kept, key = place
            graph = self._graph_with(options.lm_scale)
            graph.set_insertion(0.0)  # as it was when built
            kept.put(key, graph)
        self.use(options)

    def _build(self, lm_scale: float) -> DecodingGraph:
        stored = self._language_model if self.grammar is Grammar.NGRAM else None

        def build() -> DecodingGraph:
            return build_graph(
                self.transducer,
                self.grammar,
                self._transcripts,
                language_model=None if stored is None else stored.model,
                lm_scale=lm_scale,
            )

        place = self._place_of(lm_scale)
        if place is None:
            return build()
        kept, key = place
        return kept.get(key, self.transducer.words, build)

    def _graph_with(self, lm_scale: float) -> DecodingGraph:
        """Return a graph from memory, or build it; as many are kept in memory as fit the limit."""
        if lm_scale not in self._graphs:
            if self._num_kept_arcs > _MOST_KEPT_ARCS:  # it may take gigabytes: never hold two such graphs
                del self.graph, self.searcher  # `use` sets them again
                self._forget_graphs()
            graph = self._build(lm_scale)
            if self._num_kept_arcs + graph.num_arcs > _MOST_KEPT_ARCS:
                self._forget_graphs()
            self._graphs[lm_scale] = graph
            self._num_kept_arcs += graph.num_arcs
        return self._graphs[lm_scale]

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._num_kept_arcs = 0

    def use(self, options: DecodingOptions) -> None:
        """Search with other scales, insertion scores or list lengths from now on; other options stay.

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
    def words(self) -> frozenset[str]:
        """The words that can be recognised."""
        return self.graph.recognised

    @property
    def gives_lists(self) -> bool:
        """Whether, with these options, `candidates` returns more than the best word sequence."""
        return self._options.num_candidates > 0

    def score(
        self, utterances: Iterable[FloatArray], outputs: Outputs | None = None
    ) -> Iterator[tuple[int, FloatArray]]:
        """Yield (position in `utterances`, log-likelihoods (T, C)), in any order; count all in `outputs`."""
        return self._scorer.score(utterances, outputs)

    def candidates(self, log_likelihoods: FloatArray) -> list[Candidate]:
        """Return the most probable word sequences, best first: as many as the options request.

        Args:
            log_likelihoods: (T, C), nats, of one utterance.

        Returns:
            The sequences, rescored if requested; empty if no path survived.
        """
        if not self.gives_lists:
            path = self.searcher.search(log_likelihoods)
            return [] if path is None else [Candidate(path.words, path.cost)]
        return self.rescored(self.searcher.search_nbest(log_likelihoods))

    def rescored(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Add the language models' costs to results of `searcher.search_nbest`; return them best first."""
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
    """Recognises with a ready graph instead of lexicon and grammar."""

    def __init__(self, trained: TrainedModel, graph: DecodingGraph, options: DecodingOptions) -> None:
        self.grammar = Grammar.GRAPH
        self._ready = graph
        self._attach(trained, options)

    def _build(self, lm_scale: float) -> DecodingGraph:
        return self._ready


def recogniser_for(
    trained: TrainedModel,
    dataset: Dataset,
    options: DecodingOptions,
    transcripts: Sequence[Sequence[str]],
    kept: KeptGraph | None = None,
) -> Recogniser:
    """Make a recogniser with the lexicon, classes and language model of a data directory.

    Collective among the ranks of `kept`.

    Raises:
        ConfigError: model and lexicon differ in classes, or something that the grammar needs is missing.
    """
    if options.graph is not None:
        graph = read_kaldi_graph(options.graph, dataset.num_classes)
        return GraphRecogniser(trained, graph, options)
    inventory = StateInventory.load(dataset.classes_path)
    lexicon, language_model = Lexicon.load(dataset.lexicon_path), StoredModel.in_folder(dataset.path)
    return Recogniser(trained, lexicon, inventory, options, transcripts, language_model, kept)
