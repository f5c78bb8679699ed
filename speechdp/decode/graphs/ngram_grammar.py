"""G of an n-gram model: an acceptor whose states are the words before, with back-off arcs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import kaldifst

from speechdp.decode.graphs.fst_arrays import EPSILON
from speechdp.errors import ConfigError
from speechdp.language.ngram import END, START, Ngram, NgramModel

#: What back-off arcs are called in Kaldi's words.txt.
BACKOFF_SYMBOL = "#0"
_LN_10 = math.log(10.0)


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
        word_ids: label of each word.
        scale: factor on the model's costs.

    Raises:
        ConfigError: the model has no </s>, so that no sentence could end.
    """
    grams = [gram for gram in sorted(model.log10_probs) if _is_wanted(gram, word_ids)]
    # Also those after which only words without an id are listed: leaving them has its cost.
    weighted = (context for context in model.log10_backoffs if _has_ids(context, word_ids))
    contexts = sorted({*(gram[:-1] for gram in grams), *weighted}, key=lambda words: (len(words), words))
    fst = kaldifst.StdVectorFst()
    states = {context: fst.add_state() for context in contexts}
    if (END,) not in model.log10_probs:
        raise ConfigError("the language model has no </s>, so no sentence can end; add it and prepare again")
    fst.start = states.get((START,), states[()])
    for gram in grams:
        source, cost = states[gram[:-1]], -scale * _LN_10 * model.log10_probs[gram]
        if gram[-1] == END:
            fst.set_final(source, cost)
        else:
            label, target = word_ids[gram[-1]], states[_longest_known(gram, states)]
            fst.add_arc(source, kaldifst.StdArc(label, label, cost, target))
    for context in contexts[1:]:  # the first is that of unigrams
        cost = -scale * _LN_10 * model.log10_backoffs.get(context, 0.0)
        target = states[_longest_known(context[1:], states)]
        fst.add_arc(states[context], kaldifst.StdArc(EPSILON, EPSILON, cost, target))
    return fst


def _is_wanted(gram: Ngram, word_ids: Mapping[str, int]) -> bool:
    """Tell whether an n-gram predicts something: <s> is never predicted, nothing follows </s>."""
    last = gram[-1]
    return _has_ids(gram[:-1], word_ids) and (last == END or last in word_ids)


def _has_ids(context: Ngram, word_ids: Mapping[str, int]) -> bool:
    """Tell whether all words of a context have an id; <s> may begin it."""
    return all(word in word_ids for word in (context[1:] if context[:1] == (START,) else context))


def _longest_known(words: Ngram, states: Mapping[Ngram, int]) -> Ngram:
    """Return the longest end of `words` that is a context."""
    while words not in states:
        words = words[1:]
    return words
