"""Forced alignment: find the HMM state of each frame from the network's posteriors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechdp.data.shards.alignment_file import TargetsFile, open_targets, write_targets
from speechdp.data.shards.shard import Shard
from speechdp.data.transforms.inputs import FEATURES_ALONE, InputOptions
from speechdp.data.transforms.preprocess import Preprocessor
from speechdp.decode.graphs.graph import LexiconTransducer, transcript, word_ids_of
from speechdp.decode.search import Searcher, SearchOptions
from speechdp.labels.hmm import FloatArray, IntArray, count_frames_and_runs

#: `AcousticScorer.score`: takes features one by one, yields (position, log-likelihoods (T, C)) in any order.
Scorer = Callable[[Iterable[FloatArray]], Iterable[tuple[int, FloatArray]]]

#: Limit for the states of cached graphs, 200 bytes each: enough for some 10,000 short transcripts.
_MAX_KEPT_STATES = 500_000
# A transcript's graph is small, so a beam that is practically exact costs little.
_SEARCH = SearchOptions(beam=200.0)


class Aligner:
    """Aligns utterances with their transcripts.

    Attributes:
        num_too_short: utterances so far with fewer frames than their shortest pronunciation has states.
        num_unknown: utterances so far with words that are not in the lexicon, which has no <unk>.
        num_failed: other utterances so far for which no path was found.
    """

    def __init__(self, transducer: LexiconTransducer) -> None:
        self._transducer = transducer
        self._searchers: OrderedDict[tuple[str, ...], tuple[Searcher, int]] = OrderedDict()
        self._num_kept_states = 0
        self.num_too_short = self.num_unknown = self.num_failed = 0

    def align(self, words: Sequence[str], log_likelihoods: FloatArray) -> IntArray | None:
        """Find the most probable state sequence of a transcript.

        Args:
            words: the transcript; silence before, between and after them is optional.
            log_likelihoods: (T, C), nats.

        Returns:
            Classes, (T,), or None if the utterance is too short, has unknown words, or no path was found
            (each case is counted).

        Raises:
            RunError: a log-likelihood is NaN or infinite.
        """
        known = self._transducer.lexicon.pronounceable(words)
        if len(known) < len(words):
            self.num_unknown += 1
            return None
        searcher = self._searcher(tuple(known))
        if len(log_likelihoods) < self._transducer.min_frames(known):
            self.num_too_short += 1
            return None
        path = searcher.search(log_likelihoods)
        self.num_failed += path is None
        return None if path is None else path.classes

    def _searcher(self, words: tuple[str, ...]) -> Searcher:
        if words not in self._searchers:
            ids = word_ids_of(words, self._transducer.word_ids)
            graph = self._transducer.compose(transcript(ids), dict.fromkeys(words))
            self._searchers[words] = Searcher(graph, _SEARCH), graph.num_states
            self._num_kept_states += graph.num_states
            while self._num_kept_states > _MAX_KEPT_STATES and len(self._searchers) > 1:
                _, (_, num_states) = self._searchers.popitem(last=False)
                self._num_kept_states -= num_states
        self._searchers.move_to_end(words)
        return self._searchers[words][0]


@dataclass(frozen=True)
class AlignmentJob:
    """One shard to align.

    Attributes:
        shard: the shard.
        previous: file of its present targets if they are not those in the shard, else None.
        output: file for the new targets.
    """

    shard: Path
    previous: Path | None
    output: Path


@dataclass
class AlignmentReport:
    """Counts from a round of alignment; `merge` sums those of several ranks.

    Attributes:
        utterances: number of utterances aligned or kept.
        too_short: utterances that kept their old targets because they have fewer frames than states.
        unknown: utterances that kept them because they have words that are not in the lexicon.
        failed: utterances that kept them because no path was found.
        frames: number of frames seen.
        changed_frames: frames whose class changed.
        frames_per_class, runs_per_class: counts of the new targets, (C,) each, for priors and self-loops.
    """

    frames_per_class: NDArray[np.int64]
    runs_per_class: NDArray[np.int64]
    utterances: int = 0
    too_short: int = 0
    unknown: int = 0
    failed: int = 0
    frames: int = 0
    changed_frames: int = 0

    @classmethod
    def empty(cls, num_classes: int) -> AlignmentReport:
        """Return a report with all counts 0."""
        return cls(np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64))

    @property
    def changed_share(self) -> float:
        """Share of the frames whose class changed, 0 to 1."""
        return self.changed_frames / max(self.frames, 1)

    def add(self, old: IntArray, new: IntArray) -> None:
        """Count one utterance's old and new targets, (T,) each."""
        frames, runs = count_frames_and_runs(new, len(self.frames_per_class))
        self.frames_per_class += frames
        self.runs_per_class += runs
        self.utterances += 1
        self.frames += len(new)
        self.changed_frames += int((old != new).sum())

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for `Communicator.allgather_object`."""
        return {name: np.asarray(value).tolist() for name, value in vars(self).items()}

    @classmethod
    def merge(cls, parts: Iterable[dict[str, Any]]) -> AlignmentReport:
        """Sum the results of `to_dict` of all ranks; at least one part."""
        values = list(parts)
        return cls(
            frames_per_class=np.sum([part["frames_per_class"] for part in values], axis=0, dtype=np.int64),
            runs_per_class=np.sum([part["runs_per_class"] for part in values], axis=0, dtype=np.int64),
            utterances=sum(part["utterances"] for part in values),
            too_short=sum(part["too_short"] for part in values),
            unknown=sum(part["unknown"] for part in values),
            failed=sum(part["failed"] for part in values),
            frames=sum(part["frames"] for part in values),
            changed_frames=sum(part["changed_frames"] for part in values),
        )


def align_shards(
    jobs: Iterable[AlignmentJob],
    aligner: Aligner,
    scorer: Scorer,
    report: AlignmentReport,
    alignment: str,
    inputs: InputOptions = FEATURES_ALONE,
) -> AlignmentReport:
    """Align shards again and write each one's targets to a separate file.

    Not collective: every rank passes its own share of the shards and joins the reports afterwards.
    An utterance that cannot be aligned keeps its old targets and is counted.

    Args:
        jobs: the shards.
        aligner: finds the alignments.
        scorer: gives the log-likelihoods, e.g. `AcousticScorer(...).score`.
        report: the counts are added to it; it is returned.
        alignment: name of the new alignment, e.g. "realigned-1".
        inputs: how the model's input is made from the features.

    Raises:
        ShardError: a shard or its previous targets are damaged, or the disk is full.
    """
    too_short, unknown, failed = aligner.num_too_short, aligner.num_unknown, aligner.num_failed
    for job in jobs:
        with ExitStack() as stack:
            shard = stack.enter_context(Shard(job.shard))
            previous = None
            if job.previous is not None:
                previous = stack.enter_context(closing(open_targets(job.previous, shard)))
            old: list[IntArray] = []
            new: dict[int, IntArray | None] = {}
            for u, log_likelihoods in scorer(_features(shard, inputs, previous, old)):
                new[u] = aligner.align(shard.text(u).split(), log_likelihoods)
            targets = [old[u] if found is None else found for u, found in sorted(new.items())]
            for before, after in zip(old, targets, strict=True):
                report.add(before, after)
            write_targets(job.output, shard, targets, alignment)
    report.too_short += aligner.num_too_short - too_short
    report.unknown += aligner.num_unknown - unknown
    report.failed += aligner.num_failed - failed
    return report


def _features(
    shard: Shard, inputs: InputOptions, previous: TargetsFile | None, old: list[IntArray]
) -> Iterator[FloatArray]:
    """Yield the model's input of each utterance; append the present targets of each to `old`."""
    preprocessor = Preprocessor.for_shard(shard.header, inputs)
    for u in range(shard.num_utterances):
        features, targets = preprocessor.read(shard, u)
        old.append(targets if previous is None else previous.read(u))
        yield features
