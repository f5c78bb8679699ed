"""Search a decoding graph with kaldi-decoder: words, cost and the class of every frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import kaldi_decoder
import kaldifst
import numpy as np

from speechdp.decode.graphs.graph import DecodingGraph
from speechdp.errors import RunError
from speechdp.labels.hmm import FloatArray, IntArray

Found = TypeVar("Found")

_UNLIMITED = 2**31 - 1
_MIN_ACTIVE = 20  # paths kept however narrow the beam; Kaldi's default


@dataclass(frozen=True)
class SearchOptions:
    """Width and scale of the search.

    Attributes:
        beam: paths that cost this much more than the best are dropped (nats, after scaling).
        max_active: most paths kept per frame; 2 or more.
        acoustic_scale: factor on the acoustic log-likelihoods before they meet the graph's costs.
        max_beam_doublings: how often a search that ends in no final state is repeated, each time with twice
            the beam and twice max_active.
    """

    beam: float = 16.0
    max_active: int = _UNLIMITED
    acoustic_scale: float = 1.0
    max_beam_doublings: int = 5


@dataclass(frozen=True)
class BestPath:
    """The most probable path.

    Attributes:
        words: the word sequence.
        cost: -log probability of the graph plus the scaled acoustics, nats.
        classes: the class of each frame, (T,).
    """

    words: tuple[str, ...]
    cost: float
    classes: IntArray


class Searcher:
    """Finds best paths through one graph.

    Attributes:
        num_retried: utterances that needed a wider beam.
        num_failed: utterances for which no path reached a final state with the widest beam either.
    """

    def __init__(self, graph: DecodingGraph, options: SearchOptions | None = None) -> None:
        self._graph = graph
        self._options = options or SearchOptions()
        self.num_retried = self.num_failed = 0

    def search(self, log_likelihoods: FloatArray) -> BestPath | None:
        """Find the best path that ends in a final state.

        Args:
            log_likelihoods: (T, C), nats; see `hmm.scaled_log_likelihoods`.

        Returns:
            The best path, or None if none survives the widest beam (counted in `num_failed`).

        Raises:
            RunError: a value is NaN or infinite.
        """
        return self._widening(log_likelihoods, self._search)

    def _widening(
        self, log_likelihoods: FloatArray, attempt: Callable[[FloatArray, int], Found | None]
    ) -> Found | None:
        """Search with wider and wider beams until something is found.

        Args:
            log_likelihoods: (T, C), nats.
            attempt: called with the scaled log-likelihoods and the factor on the beam; returns None if it
                found nothing.
        """
        if not np.isfinite(log_likelihoods).all():
            raise RunError(
                "the model's output is NaN or infinite; train it again with a smaller learning rate"
            )
        # DecodableCtc does nothing specific to CTC: it returns matrix[t, label - 1], so labels are class + 1.
        matrix = np.multiply(log_likelihoods, self._options.acoustic_scale, dtype=np.float32, order="C")
        for doubling in range(self._options.max_beam_doublings + 1):
            found = attempt(matrix, 2**doubling)
            if found is not None or len(matrix) == 0:
                break
            self.num_retried += doubling == 0 and self._options.max_beam_doublings > 0
        self.num_failed += found is None
        return found

    def _search(self, matrix: FloatArray, widening: int) -> BestPath | None:
        if len(matrix) == 0 or self._graph.fst.num_states == 0:
            return None
        max_active = min(self._options.max_active * widening, _UNLIMITED)
        options = kaldi_decoder.FasterDecoderOptions(
            beam=self._options.beam * widening,
            max_active=max_active,
            min_active=min(_MIN_ACTIVE, max_active - 1),
        )
        decoder = kaldi_decoder.FasterDecoder(self._graph.fst, options)
        decoder.decode(kaldi_decoder.DecodableCtc(matrix))
        # If no path ends in a final state, get_best_path returns one that ends anywhere.
        if not decoder.reached_final():
            return None
        found, lattice = decoder.get_best_path()
        linear, labels, word_ids, weight = kaldifst.get_linear_symbol_sequence(lattice)
        assert found and linear and len(labels) == len(matrix)
        words = tuple(self._graph.words[i - 1] for i in word_ids)
        return BestPath(words, weight.value1 + weight.value2, np.asarray(labels, dtype=np.int32) - 1)
