"""Find the most probable word sequences of an utterance in a lattice, and rescore them.

    LatticeSimpleDecoder -> arcs of words with their costs -> determinised -> the N shortest paths

The lattice has a path for each way to place the words on the frames.  Determinised, it has one path for each
word sequence, with the cost of the best of those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kaldi_decoder
import kaldifst

from speechdp.decode.graphs.determinise import determinise_within
from speechdp.decode.graphs.graph import DecodingGraph
from speechdp.decode.search import Searcher, SearchOptions
from speechdp.labels.hmm import FloatArray
from speechdp.language.ngram import NgramModel

_LN_10 = math.log(10.0)
#: If a determinised lattice would have more states than this, it is made again with half the lattice beam,
#: down to the narrowest beam; then only the best path is returned.  The cost of a state grows with the number
#: of paths that lead to it: with uninformative scores, ten times as many states take minutes an utterance.
_MAX_STATES = 20_000
_NARROWEST_BEAM = 0.25


@dataclass(frozen=True)
class Candidate:
    """A word sequence that may have been said in an utterance.

    Attributes:
        words: the sequence.
        cost: -log probability of the graph plus the scaled acoustics, nats; after rescoring it includes the
            second language model.
        lm_cost: cost by the language model alone, unscaled, nats; None without a language model.
        rescored_lm_cost: cost by the second language model alone, as `lm_cost`.
    """

    words: tuple[str, ...]
    cost: float
    lm_cost: float | None = None
    rescored_lm_cost: float | None = None


class NBestSearcher(Searcher):
    """Finds the most probable word sequences in one graph.

    The decoder has no `max_active`: with scores of a network that has learnt little, use a narrower beam.

    Args:
        graph: the graph to search.
        options: width of the search; max_active is ignored.
        size: most sequences to find.
        lattice_beam: beam of the lattice that they are taken from, nats: parts of it that are on no path
            within this cost of the best are left out.
    """

    def __init__(self, graph: DecodingGraph, options: SearchOptions, size: int, lattice_beam: float) -> None:
        super().__init__(graph, options)
        self._size, self._lattice_beam = size, lattice_beam

    def search_nbest(self, log_likelihoods: FloatArray) -> list[Candidate]:
        """Find the best word sequences that end in a final state, all different, best first.

        Args:
            log_likelihoods: (T, C), nats; see `hmm.scaled_log_likelihoods`.

        Returns:
            The sequences; empty if none survives the widest beam (counted in `num_failed`).

        Raises:
            RunError: a value is NaN or infinite.
        """
        return self._widening(log_likelihoods, self._candidates) or []

    def _candidates(self, matrix: FloatArray, widening: int) -> list[Candidate] | None:
        if len(matrix) == 0 or self._graph.fst.num_states == 0:
            return None
        beam = self._options.beam * widening
        lattice_beam = min(self._lattice_beam, beam)
        while True:
            words = self._word_lattice(matrix, beam, lattice_beam)
            if words is None:
                return None
            if determinise_within(words, _MAX_STATES):
                return list(self._shortest(words))
            lattice_beam /= 2
            if lattice_beam < _NARROWEST_BEAM:
                break
        path = self._search(matrix, widening)
        return None if path is None else [Candidate(path.words, path.cost)]

    def _word_lattice(self, matrix: FloatArray, beam: float, lattice_beam: float) -> Any | None:
        """Return an acceptor of words with the lattice's paths; None if no path ends in a final state."""
        options = kaldi_decoder.LatticeSimpleDecoderConfig(beam=beam, lattice_beam=lattice_beam)
        decoder = kaldi_decoder.LatticeSimpleDecoder(self._graph.fst, options)
        is_complete = decoder.decode(kaldi_decoder.DecodableCtc(matrix))
        # A decoder that reached no final state treats every state of the last frame as final.
        if not is_complete or not math.isfinite(decoder.final_relative_cost()):
            return None
        found, lattice = decoder.get_raw_lattice()
        return kaldifst.compile("".join(_word_arcs(lattice.to_str())), acceptor=True) if found else None

    def _shortest(self, words: Any) -> Iterator[Candidate]:
        paths = kaldifst.convert_nbest_to_vector(kaldifst.shortest_path(words, self._size))
        each = [kaldifst.get_linear_symbol_sequence(path) for path in paths]
        for cost, labels in sorted((weight.value, labels) for _, _, labels, weight in each):
            yield Candidate(tuple(self._graph.words[label - 1] for label in labels), cost)


def _word_arcs(lattice: str) -> Iterator[str]:
    """Convert OpenFst's text of a lattice to that of an acceptor of its words, with the sums of the costs."""
    for line in lattice.splitlines():
        fields = line.split()
        is_final = len(fields) <= 2  # a state and its final cost
        position = 1 if is_final else 4
        cost = sum(map(float, fields[position].split(","))) if len(fields) > position else 0.0
        yield f"{fields[0]} {cost!r}\n" if is_final else f"{fields[0]} {fields[1]} {fields[3]} {cost!r}\n"


#: The cost of a word sequence by a language model, -log probability in nats.
SentenceCost = Callable[[Sequence[str]], float]


def ngram_cost(model: NgramModel) -> SentenceCost:
    """Return the cost function of an n-gram model; costs include the sentence end."""
    return lambda words: -_LN_10 * model.log10_sentence(words)


@dataclass(frozen=True)
class Rescorer:
    """Replaces part of the first language model's costs by those of a second one.

    Attributes:
        first: costs by the model in the graph.
        first_scale: factor on these costs in the graph.
        second: costs by the model to rescore with.
        second_scale: factor on these costs.
        weight: share of the second model, 0 to 1; 0 changes nothing, 1 replaces the first.
    """

    first: SentenceCost
    first_scale: float
    second: SentenceCost
    second_scale: float
    weight: float

    def rescored(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return candidates with new costs, best first."""
        each = [self._rescored(candidate) for candidate in candidates]
        return sorted(each, key=lambda candidate: (candidate.cost, candidate.words))

    def _rescored(self, candidate: Candidate) -> Candidate:
        first, second = self.first(candidate.words), self.second(candidate.words)
        change = self.weight * (self.second_scale * second - self.first_scale * first)
        return replace(candidate, cost=candidate.cost + change, lm_cost=first, rescored_lm_cost=second)


def nbest_lines(name: str, candidates: Sequence[Candidate]) -> str:
    """Return an utterance's lines in a file of n-best lists.

    NAME-RANK, the cost, the cost by the language model, that by the second one, then the words; `-` stands
    for a cost that does not exist.

    Example:
        >>> nbest_lines("utt", [Candidate(("one", "two"), 12.5, 3.25)])
        'utt-1 12.500 3.250 - one two\\n'
    """
    lines = []
    for rank, each in enumerate(candidates, start=1):
        costs = (each.cost, each.lm_cost, each.rescored_lm_cost)
        shown = ("-" if cost is None else f"{cost:.3f}" for cost in costs)
        lines.append(" ".join((f"{name}-{rank}", *shown, *each.words)) + "\n")
    return "".join(lines)


def joined(first: Sequence[Candidate], second: Sequence[Candidate], size: int) -> list[Candidate]:
    """Return the best word sequences of two consecutive pieces of speech.

    A sequence that can be divided in several ways takes several places among `size`, but is returned once.

    Args:
        first: candidates of the first piece, best first; empty if nothing was found there.
        second: candidates of the second piece.
        size: most candidates to return.
    """
    if not first or not second:
        return list(first or second)
    # The pair at (i, j) has (i + 1) * (j + 1) - 1 others that cost no more.
    pairs = [_pair(a, b) for i, a in enumerate(first[:size]) for b in second[: size // (i + 1)]]
    best: dict[tuple[str, ...], Candidate] = {}
    for each in sorted(pairs, key=lambda pair: (pair.cost, pair.words)):
        best.setdefault(each.words, each)
    return list(best.values())[:size]


def _pair(first: Candidate, second: Candidate) -> Candidate:
    def total(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + b

    return Candidate(
        first.words + second.words,
        first.cost + second.cost,
        total(first.lm_cost, second.lm_cost),
        total(first.rescored_lm_cost, second.rescored_lm_cost),
    )
