"""G of an n-gram model: an acceptor whose states are the preceding words, with back-off arcs.

All n-grams of a length are numbered at once: one by one, millions of them would take most of the time of
building a graph.

Legend: N n-grams (or contexts) of a length, L words of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from speechdp.decode.graphs.fst_arrays import EPSILON, Arcs, FstArrays
from speechdp.errors import ConfigError
from speechdp.language.ngram import END, START, Ngram, NgramModel

#: Name of back-off arcs in Kaldi's words.txt.
BACKOFF_SYMBOL = "#0"
_LN_10 = math.log(10.0)
#: Numbers of sentence start and end and of words without id; those of words are positive.
_START, _END, _NO_ID = 0, -1, -2

#: Numbers of the words of n-grams, (N, L) int64, in the model's order, and the n-grams' values, (N,).
_Numbered: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]


def ngram_acceptor(
    model: NgramModel,
    word_ids: Mapping[str, int],
    *,
    scale: float = 1.0,
) -> Any:
    """Accept sequences of words with the costs of an n-gram model.

    A word that is listed after its context may also be reached by backing off, as in Kaldi's graphs; the
    cheaper path counts.  N-grams with words that have no id are left out.

    Args:
        model: the n-grams.
        word_ids: label of each word, more than 0.
        scale: factor on the model's costs.

    Raises:
        ConfigError: the model has no </s>, so that no sentence could end.
    """
    if (END,) not in model.log10_probs:
        raise ConfigError("the language model has no </s>, so no sentence can end; add it and prepare again")
    ids = {**word_ids, START: _START, END: _END}
    # <s> is never predicted, and nothing follows </s>.
    grams = {
        length: _where(numbered, _have_ids(numbered[0][:, :-1]) & _are_predicted(numbered[0][:, -1]))
        for length, numbered in _numbered(model.log10_probs, ids).items()
    }
    # A context may have only words without an id listed after it: backing off from it still has its cost.
    weights = {
        length: _where(numbered, _have_ids(numbered[0]))
        for length, numbered in _numbered(model.log10_backoffs, ids).items()
    }
    states = _States(grams, weights)
    final = np.full(states.num_states, np.inf)
    arcs: list[Arcs] = []
    for words, log10_prob in grams.values():
        source, cost = states.after(words[:, :-1]), -scale * _LN_10 * log10_prob
        ends = words[:, -1] == _END
        final[source[ends]] = cost[ends]
        label, target = words[~ends, -1], states.after(words[~ends])
        arcs.append((source[~ends], label, label, cost[~ends], target))
    for length, contexts in states.contexts.items():
        if length and len(contexts):  # the unigram context has nothing to back off to
            first, cost = states.first[length], np.zeros(len(contexts))
            source = first + np.arange(len(contexts))
            if length in weights:
                listed, log10_weight = weights[length]
                cost[states.after(listed) - first] = -scale * _LN_10 * log10_weight
            arcs.append((source, EPSILON, EPSILON, cost, states.after(contexts[:, 1:])))
    start = int(states.after(np.array([[_START]]))[0])
    return FstArrays.joined(start, final, arcs).fst()


def _numbered(values: Mapping[Ngram, float], ids: Mapping[str, int]) -> dict[int, _Numbered]:
    """Return the n-grams as numbers, by length."""
    by_length: dict[int, tuple[list[Ngram], list[float]]] = {}
    for gram, value in values.items():
        grams, listed = by_length.setdefault(len(gram), ([], []))
        grams.append(gram)
        listed.append(value)
    numbered = {}
    for length, (grams, listed) in sorted(by_length.items()):
        of_words = (ids.get(word, _NO_ID) for word in itertools.chain.from_iterable(grams))
        words = np.fromiter(of_words, np.int64, length * len(grams)).reshape(-1, length)
        numbered[length] = words, np.array(listed)
    return numbered


def _where(numbered: _Numbered, keep: NDArray[np.bool_]) -> _Numbered:
    return numbered[0][keep], numbered[1][keep]


def _have_ids(contexts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for contexts, (N, L), whether all their words have an id; the first may be <s>."""
    known = contexts > _START
    if contexts.shape[1]:
        known[:, 0] |= contexts[:, 0] == _START
    return np.asarray(known.all(axis=1))


def _are_predicted(words: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray((words > _START) | (words == _END))


class _States:
    """The states of an acceptor: one for each context, shorter ones first; 0 is the unigram context.

    Args:
        grams: n-grams with predicted words, by length.
        weights: contexts with a back-off weight, by length.

    Attributes:
        contexts: by length, (N, L), in the order of their states.
        first: state of the first context of each length.
    """

    def __init__(self, grams: Mapping[int, _Numbered], weights: Mapping[int, _Numbered]) -> None:
        lengths = {length - 1 for length in grams} | weights.keys()
        self.contexts: dict[int, NDArray[np.int64]] = {}
        self.num_states = 0
        self.first: dict[int, int] = {}
        for length in sorted(lengths):
            found = [grams[length + 1][0][:, :-1]] if length + 1 in grams else []
            found += [weights[length][0]] if length in weights else []
            contexts = np.concatenate(found)
            _, one_of_each = np.unique(_codes(contexts), return_index=True)
            self.first[length] = self.num_states
            self.contexts[length] = contexts[one_of_each]
            self.num_states += len(one_of_each)

    def after(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the state of the longest suffix of each row of words, (N, L), that is a context; (N,)."""
        state = np.zeros(len(words), np.int64)
        missing = np.arange(len(words))
        for length in range(words.shape[1], 0, -1):
            if length in self.contexts and len(self.contexts[length]):
                place = _places(self.contexts[length], words[missing, words.shape[1] - length :])
                state[missing] = np.where(place < 0, 0, self.first[length] + place)
                missing = missing[place < 0]
        return state


def _places(rows: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each wanted row among distinct rows; -1: it is not among them."""
    codes = _codes(np.concatenate([rows, wanted]))
    place_of = np.full(codes.max(initial=-1) + 1, -1)
    place_of[codes[: len(rows)]] = np.arange(len(rows))
    places: NDArray[np.int64] = place_of[codes[len(rows) :]]
    return places


def _codes(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number rows so that equal rows, and only these, have the same number; (N,), from 0."""
    codes = np.zeros(len(rows), np.int64)
    width = rows.max(initial=0) - _NO_ID + 1
    for column in rows.T:
        _, codes = np.unique(codes * width + column - _NO_ID, return_inverse=True)
    return codes
