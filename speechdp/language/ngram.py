"""Back-off n-gram models: probabilities of words, and how well a model fits a text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

START = "<s>"
END = "</s>"
UNKNOWN_NAMES = ("<unk>", "<UNK>")
#: log10 probability of impossible events in ARPA files: that of <s>.
NEVER = -99.0

Ngram = tuple[str, ...]


@dataclass(frozen=True)
class TextFit:
    """How well a model fits a text; `+` is not defined because texts are measured as a whole.

    Attributes:
        sentences: number of sentences, each of which ends in a </s> that is predicted as well.
        words: number of words.
        unknown: number of these that the model does not know (OOV); they have no probability.
        log10_prob: log10 probability of all known words and of the sentence ends.
    """

    sentences: int
    words: int
    unknown: int
    log10_prob: float

    @property
    def perplexity(self) -> float:
        """Perplexity per known word or sentence end; NaN without any, infinite beyond 1e308."""
        predicted = self.words - self.unknown + self.sentences
        if not predicted:
            return math.nan
        try:
            return float(10.0 ** (-self.log10_prob / predicted))
        except OverflowError:  # back-off weights of -99 add up
            return math.inf


@dataclass(frozen=True)
class NgramModel:
    """An n-gram model in back-off form.

    p(w | h) is that of the n-gram (*h, w) if it is listed, else backoff(h) * p(w | h without its first word).

    Attributes:
        log10_probs: n-grams of all orders -> log10 p(last word | previous words).  That of <s> is -99.
        log10_backoffs: contexts -> log10 back-off weight; missing ones have weight 1.
    """

    log10_probs: Mapping[Ngram, float]
    log10_backoffs: Mapping[Ngram, float]

    @cached_property
    def num_ngrams(self) -> tuple[int, ...]:
        """Number of n-grams of each order, from 1."""
        counts = Counter(map(len, self.log10_probs))
        return tuple(counts[n] for n in range(1, max(counts, default=0) + 1))

    @property
    def order(self) -> int:
        """Length of the longest n-grams."""
        return len(self.num_ngrams)

    @cached_property
    def words(self) -> frozenset[str]:
        """All words with a probability, without <s> and </s>."""
        return frozenset(gram[0] for gram in self.log10_probs if len(gram) == 1) - {START, END}

    def log10_prob(self, word: str, history: Ngram) -> float:
        """Return log10 p(word | history); the word must be known, or be </s>.

        Args:
            word: the word to predict.
            history: the previous words, beginning with <s>; only as many as the order needs are used.
        """
        history = history[max(0, len(history) - self.order + 1) :]
        weight = 0.0
        while (found := self.log10_probs.get((*history, word))) is None:
            weight += self.log10_backoffs.get(history, 0.0)
            history = history[1:] if history else _unknown(word)
        return weight + found

    def log10_sentence(self, words: Sequence[str]) -> float:
        """Return the log10 probability of a sentence, including its end; unknown words are impossible."""
        history: Ngram = (START,)
        total = 0.0
        for word in (*words, END):
            known = (word,) in self.log10_probs
            total += self.log10_prob(word, history) if known else NEVER
            history = (*history[max(0, len(history) - self.order + 1) :], word) if known else ()
        return total

    def fit(self, texts: Iterable[Sequence[str]]) -> TextFit:
        """Measure how well the model fits a text.

        Unknown words get no probability, and words after them are predicted without them.

        Args:
            texts: the words of each sentence.
        """
        sentences = words = unknown = 0
        total = 0.0
        for text in texts:
            history: Ngram = (START,)
            for word in text:
                if (word,) not in self.log10_probs:
                    unknown, history = unknown + 1, ()
                    continue
                total += self.log10_prob(word, history)
                history = (*history[max(0, len(history) - self.order + 1) :], word)
            total += self.log10_prob(END, history)
            sentences, words = sentences + 1, words + len(text)
        return TextFit(sentences, words, unknown, total)

    def respelled(self, spelling: Callable[[str], str | None]) -> NgramModel:
        """Return the model with words in another spelling; n-grams of words without one are left out.

        The remaining n-grams keep their probabilities, which then sum to less than 1.  If several words get
        the same spelling, the n-grams of one word are kept: the one spelt so already, else the first.

        Args:
            spelling: returns the spelling of a word, or None.
        """
        spelt: dict[str, str] = {START: START, END: END}
        taken: set[str] = set()
        for word in sorted(self.words, key=lambda word: (spelling(word) != word, word)):
            to = spelling(word)
            if to is not None and to not in taken:
                spelt[word] = to
                taken.add(to)
        return NgramModel(*(_respell(each, spelt) for each in (self.log10_probs, self.log10_backoffs)))

    def with_words(self, words: Sequence[str], log10_prob: float) -> NgramModel:
        """Return the model with additional words, which share a probability, e.g. that of <unk>, equally."""
        share = log10_prob - math.log10(len(words))
        return NgramModel({**self.log10_probs, **{(word,): share for word in words}}, self.log10_backoffs)


def _respell(values: Mapping[Ngram, float], spelt: Mapping[str, str]) -> dict[Ngram, float]:
    return {
        tuple(spelt[word] for word in gram): value
        for gram, value in values.items()
        if all(word in spelt for word in gram)
    }


def _unknown(word: str) -> Ngram:
    raise KeyError(f"{word!r} is not in the language model")
