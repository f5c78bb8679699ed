"""Estimate n-gram models by interpolated modified Kneser-Ney smoothing.

Source: Chen & Goodman, "An empirical study of smoothing techniques for language modeling", Computer Speech
and Language 13, 1999, sections 2.7 and 3; n-grams at the beginning of a sentence keep their counts, as in
Heafield et al., "Scalable modified Kneser-Ney language model estimation", ACL 2013.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from speechdp.errors import ConfigError
from speechdp.language.ngram import END, NEVER, START, Ngram, NgramModel

#: Discounts of n-grams seen once, twice, and more often, if too few were counted to estimate them.
_USUAL_DISCOUNTS = (0.5, 1.0, 1.5)
_CLASSES = 3  # n-grams seen once, twice, and more often


def estimate(texts: Iterable[Sequence[str]], order: int, vocabulary: Collection[str] = ()) -> NgramModel:
    """Estimate a model; its probabilities sum to 1 in every context.

    Args:
        texts: the words of each sentence.
        order: length of the longest n-grams, 1 or more.
        vocabulary: words that may occur besides those of the texts; they get a share of the unigrams.

    Raises:
        ConfigError: there is no text, or it holds <s> or </s>.
    """
    counts = _count(texts, order)
    words = ({gram[0] for gram in counts[0]} | set(vocabulary) | {END}) - {START}
    probs: dict[Ngram, float] = dict.fromkeys(((word,) for word in words), 0.0)
    log10_backoffs: dict[Ngram, float] = {}
    for of_order in counts:
        _add_order(of_order, probs, log10_backoffs, 1.0 / len(words))
    log10_probs = {gram: math.log10(prob) for gram, prob in probs.items()}
    return NgramModel({(START,): NEVER, **log10_probs}, log10_backoffs)


def discounts_of(counts: Iterable[int]) -> tuple[float, float, float]:
    """Return the discounts for n-grams seen once, twice and more often, from the numbers of each.

    With few texts the estimate may be undefined or negative; then 0.5, 1 and 1.5 are used.
    """
    n = Counter(counts)
    if not all(n[k] for k in range(1, _CLASSES + 2)):
        return _USUAL_DISCOUNTS
    y = n[1] / (n[1] + 2 * n[2])
    first, second, third = (k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))
    return (first, second, third) if min(first, second, third) > 0 else _USUAL_DISCOUNTS


def _count(texts: Iterable[Sequence[str]], order: int) -> list[Counter[Ngram]]:
    """Count n-grams by order: occurrences of the longest, different previous words of the others."""
    counts: list[Counter[Ngram]] = [Counter() for _ in range(order)]
    for text in texts:
        if START in text or END in text:
            raise ConfigError(f"a text of the language model holds {START} or {END}; leave them out")
        padded = (START, *text, END)
        # The beginning of a sentence has no word before it: there, occurrences count at all orders.
        for n in range(2, min(order, len(padded) + 1)):
            counts[n - 1][padded[:n]] += 1
        first = 1 if order == 1 else 0
        for i in range(first, len(padded) - order + 1):
            counts[-1][padded[i : i + order]] += 1
    if not any(counts):
        raise ConfigError("there is no text to estimate a language model from; give training transcripts")
    for shorter, longer in zip(counts[-2::-1], counts[:0:-1], strict=True):
        shorter.update(gram[1:] for gram in longer)
    return counts


def _add_order(
    counts: Mapping[Ngram, int],
    probs: dict[Ngram, float],
    log10_backoffs: dict[Ngram, float],
    uniform: float,
) -> None:
    """Add one order's probabilities, interpolated with those of the order below, and back-off weights."""
    discounts = discounts_of(counts.values())
    total: defaultdict[Ngram, int] = defaultdict(int)
    reserved: defaultdict[Ngram, float] = defaultdict(float)
    for gram, count in counts.items():
        total[gram[:-1]] += count
        reserved[gram[:-1]] += discounts[min(count, _CLASSES) - 1]
    weights = {context: reserved[context] / total[context] for context in total}
    if () in weights:  # unigrams: the order below is the uniform distribution over the vocabulary
        for gram in probs:
            probs[gram] = weights[()] * uniform
    for gram, count in counts.items():
        context = gram[:-1]
        lower = probs[gram[1:]] if context else probs[gram]
        seen = (count - discounts[min(count, _CLASSES) - 1]) / total[context]
        share = seen + (weights[context] * lower if context else lower)
        probs[gram] = share
    log10_backoffs.update((context, math.log10(weight)) for context, weight in weights.items() if context)
