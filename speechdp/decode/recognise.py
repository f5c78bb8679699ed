"""Recognise a split of a data directory with a trained model, over N ranks, and write what came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from speechdp.comm.base import Communicator
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import InputOptions, Preprocessor, inputs_of
from speechdp.decode.graph import DecodingGraph, Grammar, LexiconTransducer, build_graph, choose_grammar
from speechdp.decode.kaldi_graph import KaldiGraphFiles, read_kaldi_graph
from speechdp.decode.language_model import LanguageModel, language_model_in
from speechdp.decode.scoring import AcousticScorer
from speechdp.decode.search import Searcher, SearchOptions
from speechdp.decode.wer import WerResult, word_error_rate
from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_written, check_writable, write_text_atomically
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.kaldi_pdfs import KaldiPdfs, is_kaldi_pdfs, load_classes, refuse_kaldi_pdfs
from speechdp.labels.lexicon import Lexicon
from speechdp.process.ending import Stopped


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
        graph: Kaldi's own graph to use in place of grammar, lexicon and language model; only the beam,
            max_active and the scales of the network's scores matter then.
    """

    grammar: Grammar | None = None
    beam: float = 16.0
    max_active: int = 10_000
    acoustic_scale: float = 1.0
    prior_scale: float = 1.0
    insertion_log_prob: float = 0.0
    lm_scale: float = 1.0
    silence_probability: float = 0.5
    graph: KaldiGraphFiles | None = None

    def __post_init__(self) -> None:
        for name in ("beam", "acoustic_scale", "lm_scale"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be more than 0")
        if self.max_active < 2:
            raise ConfigError(f"--max-active {self.max_active}: must be at least 2")
        if not self.prior_scale >= 0:
            raise ConfigError(f"--prior-scale {self.prior_scale}: must not be negative")
        if not 0 <= self.silence_probability < 1:
            raise ConfigError(f"--silence-probability {self.silence_probability}: must lie in [0, 1)")


@dataclass(frozen=True)
class Hypothesis:
    """One recognised utterance; `found` is False where no path survived and `hyp` is empty for that."""

    utterance_id: str
    ref: str
    hyp: str
    found: bool = True


@dataclass(frozen=True)
class DecodingResult:
    """A decoded split.

    Attributes:
        split: its name.
        grammar: the grammar used.
        wer: word errors.
        retried: utterances that needed a wider beam.
        failed: utterances without any hypothesis: counted as deletions.
        unknown_words: reference words that cannot be recognised, each of which is an error.
        hypotheses: the file of hypotheses.
    """

    split: str
    grammar: Grammar
    wer: WerResult
    retried: int
    failed: int
    unknown_words: int
    hypotheses: Path


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
        self_loop = trained.self_loop.detach().cpu().double().numpy()
        self.transducer = LexiconTransducer(lexicon, inventory, self_loop, options.silence_probability)
        self._transcripts, self._language_model = transcripts, language_model
        self._attach(trained, options)

    def _attach(self, trained: TrainedModel, options: DecodingOptions) -> None:
        """Take the network and the options of the search."""
        log_prior = trained.class_log_prior.detach().cpu().numpy()
        device = next(trained.model.parameters(), trained.class_log_prior).device
        self._scorer = AcousticScorer(trained.model, log_prior, options.prior_scale, device)
        self._of_graph: tuple[float, float] | None = None
        self.use(options)

    def _build(self, insertion_log_prob: float, lm_scale: float) -> DecodingGraph:
        return build_graph(
            self.transducer,
            self.grammar,
            self._transcripts,
            insertion_log_prob,
            self._language_model,
            lm_scale,
        )

    def use(self, options: DecodingOptions) -> None:
        """Search with other scales or insertion scores from now on; the other options stay.

        Raises:
            ConfigError: as the constructor.
        """
        of_graph = options.insertion_log_prob, options.lm_scale
        if self._of_graph != of_graph:
            self.graph = self._build(*of_graph)
            self._of_graph = of_graph
        self.searcher = Searcher(
            self.graph, SearchOptions(options.beam, options.max_active, options.acoustic_scale)
        )

    def score(self, utterances: Iterable[FloatArray]) -> Iterator[tuple[int, FloatArray]]:
        """Yield (position in `utterances`, log-likelihoods (T, C)), in any order."""
        return self._scorer.score(utterances)

    def recognise(self, utterances: Iterable[FloatArray]) -> Iterator[tuple[int, tuple[str, ...] | None]]:
        """Yield (position in `utterances`, words), in any order; None where no path survived.

        Args:
            utterances: features, (T, F) each.
        """
        for index, log_likelihoods in self.score(utterances):
            path = self.searcher.search(log_likelihoods)
            yield index, None if path is None else path.words


class GraphRecogniser(Recogniser):
    """Recognises with a graph that is there already, in place of lexicon and grammar."""

    def __init__(self, trained: TrainedModel, graph: DecodingGraph, options: DecodingOptions) -> None:
        self.grammar = Grammar.GRAPH
        self.words = frozenset(graph.words) - {""}
        self._ready = graph
        self._attach(trained, options)

    def _build(self, insertion_log_prob: float, lm_scale: float) -> DecodingGraph:
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
            raise ConfigError(f"{dataset.path}: split {split!r} has no reference words; there is no WER")
        owners = [(shard, i) for shard in shards for i in range(shard.num_utterances)]
        self.own = owners[comm.rank :: comm.size]

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

    def features(self, inputs: InputOptions) -> Iterator[FloatArray]:
        """Yield what the network sees of each own utterance, (T, F)."""
        for shard, i in self.own:
            yield Preprocessor.for_shard(shard.header, inputs).read(shard, i)[0]

    def reference(self, position: int) -> str:
        """Return the words of an own utterance."""
        shard, i = self.own[position]
        return " ".join(shard.text(i).split())


def check_decodable(trained: TrainedModel, dataset: Dataset, options: DecodingOptions) -> None:
    """Refuse data that the model was not trained for, or that the graph does not fit, by ConfigError."""
    if options.graph is None:
        refuse_kaldi_pdfs(dataset.classes_path, "decode")
    elif not is_kaldi_pdfs(dataset.classes_path):
        raise ConfigError(
            f"--graph {options.graph.graph}: {dataset.path} has states of phones as classes, not the pdfs of "
            "a Kaldi system; leave --graph out"
        )
    check_origin(trained.config, dataset, load_classes(dataset.classes_path))


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
    """Decode a split and write RUN/hypotheses/<split>.txt (Kaldi `text`) and RUN/wer-<split>.json.

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
    check_decodable(trained, dataset, options)
    path = run_dir / "hypotheses" / f"{split}.txt"
    if comm.rank == 0:
        with _results_at(run_dir):
            check_writable(path.parent)  # of somebody else's run, say: before the work
    with SpokenSplit.open(dataset, split, comm) as reader:
        recogniser = recogniser_for(trained, dataset, options, reader.transcripts)
        own = _recognise_own(recogniser, reader, inputs_of(trained.config), is_asked_to_stop)
    parts = comm.allgather_object(
        {
            "hypotheses": [asdict(h) for h in own],
            "retried": recogniser.searcher.num_retried,
            "stopped": len(own) < len(reader.own),
        }
    )
    if any(part["stopped"] for part in parts):
        raise Stopped
    everything = (Hypothesis(**values) for part in parts for values in part["hypotheses"])
    hypotheses = sorted(everything, key=lambda h: h.utterance_id)  # the order Kaldi's tools expect
    wer = word_error_rate([h.ref for h in hypotheses], [h.hyp for h in hypotheses])
    retried = sum(part["retried"] for part in parts)
    failed = sum(not h.found for h in hypotheses)
    unknown = sum(word not in recogniser.words for words in reader.transcripts for word in words)
    result = DecodingResult(split, recogniser.grammar, wer, retried, failed, unknown, path)
    if comm.rank == 0:
        extra = {"graph": _graph_record(recogniser.graph, options), **({"tuning": tuning} if tuning else {})}
        _write(run_dir, result, hypotheses, options, extra)
    comm.barrier()  # nobody reports success before the files are there
    return result


def _graph_record(graph: DecodingGraph, options: DecodingOptions) -> dict[str, Any]:
    values = {"states": graph.num_states, "arcs": graph.num_arcs, "determinised": graph.is_determinised}
    files = {} if options.graph is None else {name: str(path) for name, path in vars(options.graph).items()}
    return {**values, **files}


def wer_path(run_dir: Path, split: str) -> Path:
    """Return the record of a split's word errors: a file a split, so that none overwrites another."""
    return run_dir / f"wer-{split}.json"


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


def _recognise_own(
    recogniser: Recogniser,
    reader: SpokenSplit,
    inputs: InputOptions,
    is_asked_to_stop: Callable[[], bool],
) -> list[Hypothesis]:
    """Recognise this rank's utterances until asked to stop."""
    hypotheses = []
    for position, words in recogniser.recognise(reader.features(inputs)):
        if is_asked_to_stop():
            break
        shard, i = reader.own[position]
        hyp = " ".join(words or ())
        ref = reader.reference(position)
        hypotheses.append(Hypothesis(shard.utterance_id(i), ref, hyp, found=words is not None))
    return hypotheses


def _write(
    run_dir: Path,
    result: DecodingResult,
    hypotheses: Sequence[Hypothesis],
    options: DecodingOptions,
    extra: Mapping[str, Any],
) -> None:
    settings = asdict(options) | {"grammar": result.grammar.value}
    del settings["graph"]  # it has a record of its own
    values = {
        "split": result.split,
        "grammar": result.grammar.value,
        **asdict(result.wer),
        "unknown_words": result.unknown_words,
        "retried": result.retried,
        "failed": result.failed,
        "hypotheses": str(result.hypotheses.relative_to(run_dir)),
        "options": settings,
        **extra,
    }
    lines = (f"{h.utterance_id} {h.hyp}".rstrip() + "\n" for h in hypotheses)
    with _results_at(run_dir):
        write_text_atomically(result.hypotheses, "".join(lines))
        write_text_atomically(wer_path(run_dir, result.split), json.dumps(values, indent=2) + "\n")


@contextmanager
def _results_at(run_dir: Path) -> Iterator[None]:
    """Raise RunError where the disk refuses results of the run."""
    try:
        yield
    except OSError as error:
        raise RunError(cannot_be_written(error.filename or run_dir, error)) from error
