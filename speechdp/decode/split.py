"""Recognise a split of a data directory with a trained model on N ranks, and write the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from speechdp.comm.base import Communicator
from speechdp.data.corpora.corpus import UNKNOWN_SPEAKER
from speechdp.data.corpora.splits import original_name
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.data.signal.features import shift_s
from speechdp.data.transforms.moments import Moments, moments_by_speaker, sums_of
from speechdp.data.transforms.preprocess import InputOptions, Preprocessor, inputs_of
from speechdp.decode.kept_graph import KeptGraph
from speechdp.decode.nbest import nbest_lines
from speechdp.decode.origin import check_origin, check_task
from speechdp.decode.recogniser import (
    DecodingOptions,
    Normalise,
    Recogniser,
    TrainedModel,
    recogniser_for,
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
from speechdp.decode.scoring import Outputs
from speechdp.decode.wer import word_error_rate
from speechdp.errors import ConfigError, ShardError
from speechdp.files import check_writable
from speechdp.labels.hmm import FloatArray
from speechdp.labels.kaldi_pdfs import is_kaldi_pdfs, load_classes, refuse_kaldi_pdfs
from speechdp.process.ending import Stopped
from speechdp.timing.memory import peak_rss_bytes

#: Utterances of a rank whose n-best lists are gathered at a time.
_PORTION = 256


class SpokenSplit:
    """A split to be recognised on N ranks: rank r takes utterances r, r + N, ...

    Attributes:
        transcripts: the words of all utterances.
        own: this rank's utterances, each as its shard and its place there.
    """

    def __init__(self, dataset: Dataset, split: str, shards: Sequence[Shard], comm: Communicator) -> None:
        self.transcripts = [text.split() for shard in shards for text in shard.texts]
        if not any(self.transcripts):
            remedy = "recognise its recordings with speechdp transcribe RUN FILES"
            if is_kaldi_pdfs(dataset.classes_path):  # transcribe refuses these
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
        with dataset.open_shards(split) as shards:
            yield cls(dataset, split, shards, comm)

    def features(self, inputs: InputOptions, normalise: Normalise = "utterance") -> Iterator[FloatArray]:
        """Return the network's input of each own utterance, (T, F), one by one.  Collective.

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
        """Return the moments that each utterance of the split is normalised with.  Collective."""
        preprocessor = Preprocessor.for_shard(self._all[0][0].header, inputs)
        sums = torch.zeros(len(self._all), 1 + 2 * preprocessor.base_dim, dtype=torch.float64)
        for place, (shard, i) in zip(sums[self._comm.rank :: self._comm.size], self.own, strict=True):
            place.copy_(sums_of(preprocessor.not_normalised(shard.read_samples(i)[0]), shard.header.features))
        speakers = [shard.speaker(i) for shard, i in self._all]
        known = ["" if speaker == UNKNOWN_SPEAKER else speaker for speaker in speakers]
        if known and not any(known):
            raise ConfigError(
                "--normalise speaker: the data do not say who speaks; give --normalise utterance"
            )
        return moments_by_speaker(sums, known, self._comm)

    def reference(self, position: int) -> str:
        """Return the reference words of an own utterance."""
        shard, i = self.own[position]
        return " ".join(shard.text(i).split())


def check_decodable(trained: TrainedModel, dataset: Dataset, options: DecodingOptions) -> None:
    """Refuse data that the model was not trained for, or that the graph does not fit.

    Args:
        trained: the model.
        dataset: the data to be decoded.
        options: how to decode; only the graph and the normalisation are checked.

    Raises:
        ConfigError: the data do not fit; the message says what would.
    """
    check_task(dataset)
    if options.graph is None:
        refuse_kaldi_pdfs(dataset.classes_path, "decode")
    elif not is_kaldi_pdfs(dataset.classes_path):
        raise ConfigError(
            f"--graph {options.graph.graph}: {dataset.path} has states of phones as classes, not the pdfs of "
            "a Kaldi system; leave --graph out (prepare --lm takes a G.fst)"
        )
    check_origin(trained.config, dataset, load_classes(dataset.classes_path))
    if options.normalise == "speaker" and dataset.stored != "audio":
        raise ConfigError(
            f"--normalise speaker: {dataset.path} holds features, which are normalised already; prepare it "
            "with --store audio, or give --normalise utterance"
        )


@contextmanager
def opened_split(
    trained: TrainedModel,
    dataset: Dataset,
    split: str,
    run_dir: Path,
    options: DecodingOptions,
    comm: Communicator,
) -> Iterator[tuple[SpokenSplit, str]]:
    """Open a split to be decoded; return it with the base name of the decoding's files.  Collective.

    Refuses what `decode_split` would refuse, as far as that is known before the work begins.

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

    The name is the result of `results_name`.

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
        Stopped: a rank was asked to stop.
        ConfigError: the model does not fit the data, or the split has no reference words.
        ShardError: a shard is damaged.
        RunError: the model gives NaN, or the results cannot be written.
    """
    with opened_split(trained, dataset, split, run_dir, options, comm) as (reader, name):
        path = run_dir / "hypotheses" / f"{name}.txt"
        began = time.process_time()
        recogniser = recogniser_for(trained, dataset, options, reader.transcripts, KeptGraph(run_dir, comm))
        step_s = shift_s(dataset.sampling_rate, dataset.features)
        outputs = Outputs(len(trained.class_log_prior))
        own = _OwnUtterances(step_s, time.process_time() - began, outputs)
        features = reader.features(inputs_of(trained.config), options.normalise)
        own.recognise(recogniser, reader, features, is_asked_to_stop)
    found = _found_by_all(own, recogniser, reader, comm)
    transcribed = judged(found.hypotheses)
    speakers = errors_by_speaker(transcribed)
    result = DecodingResult(
        split=split,
        name=name,
        data={"path": str(dataset.path), "checksum": dataset.checksum},
        grammar=recogniser.grammar,
        wer=word_error_rate([h.ref for h in transcribed], [h.hyp for h in transcribed]),
        speakers=speakers,
        retried=found.num_retried,
        failed=sum(h.num_candidates == 0 for h in found.hypotheses),
        unknown_words=sum(word not in recogniser.words for words in reader.transcripts for word in words),
        hypotheses=path,
        utterances=found.hypotheses,
        settings=_settings(recogniser, options, tuning),
        nbest=NBestLists.of(found.hypotheses, nbest_path(path), options.num_candidates),
        speed=found.speed,
        rescoring_remark=recogniser.rescoring_remark,
        learnt_remark=outputs.remark(comm, are_words_found=any(h.hyp for h in found.hypotheses)),
        are_speakers_new=_are_new(speakers, trained, dataset, comm),
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


def _are_new(speakers: Collection[str], trained: TrainedModel, dataset: Dataset, comm: Communicator) -> bool:
    """Return whether none of these speakers is in the train split, where it is the model's.  Collective."""
    are_new = True
    if comm.rank == 0 and speakers and trained.config.get("data_checksum") == dataset.checksum:
        names = set(map(original_name, speakers))
        try:
            with dataset.open_shards("train") as shards:
                are_new = all(names.isdisjoint(map(original_name, set(shard.speakers))) for shard in shards)
        except ShardError:  # e.g. only the shards to be decoded were copied here
            are_new = False  # unknown
    return bool(comm.broadcast_object(are_new))


def _gathered(own: Mapping[str, str], comm: Communicator) -> dict[str, str]:
    """Gather all ranks' entries on rank 0, in portions: a large split's lists take gigabytes.  Collective."""
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
    """Return what is recorded about the search."""
    settings = options.record() | {"grammar": recogniser.grammar.value}
    graph = recogniser.graph
    values = {"states": graph.num_states, "arcs": graph.num_arcs, "determinised": graph.is_determinised}
    files = {} if options.graph is None else {name: str(path) for name, path in vars(options.graph).items()}
    return {"options": settings, "graph": values | files, **({"tuning": tuning} if tuning else {})}


class _OwnUtterances:
    """What this rank recognises, and the time it takes.

    Attributes:
        hypotheses: in the order in which they were found.
        lists: lines of n-best lists, by utterance, if they were requested.
    """

    def __init__(self, frame_shift_s: float, graph_s: float, outputs: Outputs) -> None:
        self.hypotheses: list[Hypothesis] = []
        self.lists: dict[str, str] = {}
        self._frame_shift_s, self._graph_s, self._outputs = frame_shift_s, graph_s, outputs
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
        for position, log_likelihoods in recogniser.score(features, self._outputs):
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
        """Return the time and memory used so far."""
        speech = self._frames * self._frame_shift_s
        return DecodingSpeed(speech, self._graph_s, self._network_s, self._search_s, peak_rss_bytes())


class _Found(NamedTuple):
    """Results of all ranks.

    Attributes:
        hypotheses: sorted by utterance id.
        num_retried: utterances that needed a wider beam.
        speed: time and memory of all ranks.
    """

    hypotheses: tuple[Hypothesis, ...]
    num_retried: int
    speed: DecodingSpeed


def _found_by_all(
    own: _OwnUtterances, recogniser: Recogniser, reader: SpokenSplit, comm: Communicator
) -> _Found:
    """Return the results of all ranks, on every rank.  Collective.

    Raises:
        Stopped: a rank was asked to stop.
    """
    parts = comm.allgather_object(
        {
            "hypotheses": [vars(h) for h in own.hypotheses],
            "retried": recogniser.searcher.num_retried,
            "speed": vars(own.speed()),
            "stopped": len(own.hypotheses) < len(reader.own),
        }
    )
    if any(part["stopped"] for part in parts):
        raise Stopped
    hypotheses = (Hypothesis(**values) for part in parts for values in part["hypotheses"])
    return _Found(
        tuple(sorted(hypotheses, key=lambda h: h.utterance_id)),  # the order Kaldi's tools expect
        sum(part["retried"] for part in parts),
        DecodingSpeed.over([part["speed"] for part in parts]),
    )
