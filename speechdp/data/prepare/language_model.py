"""Estimate or adopt the language model of a data directory, and record how well it fits the texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechdp.counting import counted
from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.corpora.splits import RANDOM_DEFAULT, original_name
from speechdp.data.shards.dataset import LM_RECORD_NAME, Dataset
from speechdp.data.shards.layout import printable
from speechdp.decode.language_model import (
    GrammarFst,
    LanguageModel,
    language_model_path,
    nothing_fits,
    read_given_model,
    respelled_model,
    save_language_model,
)
from speechdp.errors import ConfigError
from speechdp.files import record_cannot_be_read, write_text_atomically
from speechdp.json_input import parse_json
from speechdp.labels.lexicon import UNKNOWN_WORD, Lexicon
from speechdp.language.kneser_ney import estimate
from speechdp.language.ngram import NgramModel, TextFit
from speechdp.options.prepare import LanguageModelOptions

_FORMAT, _VERSION = "speechdp-language-model", 1

#: The words of each utterance of each split.
Texts = Mapping[str, Sequence[Sequence[str]]]


def texts_of(splits: Mapping[str, Sequence[CorpusUtterance]]) -> Texts:
    """Return the words of the transcripts of each split; in train, copies of an utterance count once.

    An utterance without a transcript has no text: an empty one would count as a sentence without words.
    """
    texts = {name: [u.words for u in utterances if u.words] for name, utterances in splits.items()}
    if "train" in splits:
        # A sentence does not become more probable because augmentation repeats it at other speeds.
        texts_by_id = dict.fromkeys(
            (original_name(u.utterance_id), u.words) for u in splits["train"] if u.words
        )
        texts["train"] = [words for _, words in texts_by_id]
    return texts


@dataclass(frozen=True)
class PreparedLanguageModel:
    """A language model and the contents of lm.json."""

    model: LanguageModel
    record: Mapping[str, Any]

    def save(self, directory: Path) -> None:
        """Write the model and lm.json into a data directory."""
        save_language_model(self.model, directory)
        values = {"format": _FORMAT, "version": _VERSION, **self.record}
        write_text_atomically(
            directory / LM_RECORD_NAME, json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        )


def users_model(options: LanguageModelOptions) -> LanguageModel | None:
    """Read the language model given by the user, if any.  Raises ConfigError as `read_given_model`."""
    return None if options.lm is None else read_given_model(options.lm)


def prepare_language_model(
    options: LanguageModelOptions, lexicon: Lexicon, texts: Texts, given: LanguageModel | None
) -> PreparedLanguageModel | None:
    """Estimate a model on the training texts, or adopt the user's; None if neither is requested.

    Args:
        options: which model is requested.
        lexicon: the words that can be recognised.
        texts: those of train are used for estimation; the others are only measured.
        given: result of `users_model`.

    Raises:
        ConfigError: the user's model has no word of the lexicon, or there are no training texts.
    """
    if options.lm_order is not None:
        if "train" not in texts:
            raise ConfigError(
                f"--lm-order {options.lm_order}: there is no train split to estimate the language model "
                f"from; make one, e.g. with --split {RANDOM_DEFAULT}, or give a language model with --lm"
            )
        # Words outside of the lexicon separate their neighbours as <unk>, which is never recognised.
        train = ([word if word in lexicon else UNKNOWN_WORD for word in words] for words in texts["train"])
        model: LanguageModel = estimate(train, options.lm_order, lexicon.recognised_words)
        return _measured(model, {"source": "train", "left_out": 0, "without_entry": 0}, texts)
    if given is None or options.lm is None:
        return None
    prepared = _taken_over(given, options.lm, lexicon, texts)
    if prepared is None:
        raise ConfigError(f"{options.lm}: {nothing_fits(options.lm)}; give one that fits it")
    return prepared


def take_over_language_model(path: Path, lexicon: Lexicon, texts: Texts) -> PreparedLanguageModel | None:
    """Read a model made elsewhere, with words spelt as in the lexicon; words it lacks are left out.

    Words of the lexicon that the model lacks share the probability of its <unk>.

    Args:
        path: the model's file.
        lexicon: the words that can be recognised.
        texts: texts of all splits but train are measured.

    Returns:
        The model; None if it has no word of the lexicon, or as a G.fst no sentence of such words.

    Raises:
        ConfigError: it cannot be read, or lacks the probability of the end of a sentence.
    """
    return _taken_over(read_given_model(path), path, lexicon, texts)


def _taken_over(
    given: LanguageModel, path: Path, lexicon: Lexicon, texts: Texts
) -> PreparedLanguageModel | None:
    found = respelled_model(given, lexicon)
    if found is None:
        return None
    origin = {"source": path.name, "left_out": found.left_out, "without_entry": found.without_entry}
    return _measured(found.model, origin, texts)


def _measured(model: LanguageModel, origin: Mapping[str, Any], texts: Texts) -> PreparedLanguageModel:
    kind = {"kind": "fst"} if isinstance(model, GrammarFst) else _sizes(model)
    fits = {name: _fit(model, each) for name, each in texts.items() if name != "train"}
    return PreparedLanguageModel(model, {**origin, **kind, "splits": fits})


def _sizes(model: NgramModel) -> dict[str, Any]:
    return {"kind": "ngram", "order": model.order, "ngrams": list(model.num_ngrams)}


def _fit(model: LanguageModel, texts: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Return figures of one split; the perplexity only if words are known and it is a JSON number.

    A G.fst may have several paths for a text, so it has no perplexity.
    """
    if isinstance(model, GrammarFst):
        words = [word for text in texts for word in text]
        return {"words": len(words), "unknown": sum(word not in model.words for word in words)}
    fit: TextFit = model.fit(texts)
    counts = {"words": fit.words, "unknown": fit.unknown}
    # A perplexity of sentence ends alone would mean nothing.
    if fit.words > fit.unknown and math.isfinite(fit.perplexity):
        return {**counts, "perplexity": round(fit.perplexity, 3)}
    return counts


def describe_language_model(dataset: Dataset) -> list[str]:
    """Return a few lines on the contents of a data directory's lm.json; none without a language model.

    Raises:
        ConfigError: lm.json is damaged, or the language model is missing.
    """
    path = dataset.path / LM_RECORD_NAME
    if not path.exists():
        return []
    language_model_path(dataset.path)
    try:
        values = parse_json(path.read_bytes())
        if values["format"] != _FORMAT or values["version"] != _VERSION:
            raise ValueError(f"it is {values['format']!r}, version {values['version']!r}")
        return [_model_line(values), *(_split_line(name, fit) for name, fit in values["splits"].items())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(record_cannot_be_read(path, error, "prepare the data again")) from error


def _model_line(values: Mapping[str, Any]) -> str:
    origin = "estimated on train" if values["source"] == "train" else f"from {printable(values['source'])}"
    if values["kind"] == "ngram":
        counts = ", ".join(f"{count:,} {n}-grams" for n, count in enumerate(values["ngrams"], 1))
        line = f"language model: order {values['order']}, {counts}, {origin}"
    else:
        line = f"language model: {values['kind']}, {origin}"
    if values["left_out"]:
        line += f"; left out: {counted(values['left_out'], 'word')} that the lexicon lacks"
    if values["without_entry"]:
        words = counted(values["without_entry"], "word")
        line += (
            f"; {words} of the lexicon that it lacks cannot be recognised: prepare with a --lm FILE that has "
            "them, or with --lm-order N where there is a train split"
        )
    return line


def _split_line(name: str, fit: Mapping[str, Any]) -> str:
    if not fit["words"]:
        return f"  {printable(name)}: no transcripts"
    share = fit["unknown"] / fit["words"]
    perplexity = f", perplexity {fit['perplexity']:.1f} without these" if "perplexity" in fit else ""
    return f"  {printable(name)}: {100 * share:.1f} % of {fit['words']:,} words unknown (OOV){perplexity}"
