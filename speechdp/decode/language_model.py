"""The language model of a data directory: n-grams in an ARPA file, or a grammar made elsewhere (G.fst)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import kaldifst
import numpy as np

from speechdp.data.shards.dataset import (
    ARPA_NAME,
    GRAMMAR_NAME,
    LANGUAGE_MODEL_NAMES,
    LM_RECORD_NAME,
    WORDS_NAME,
)
from speechdp.data.shards.description import check_contents, check_sizes, checked_sha256
from speechdp.decode.graphs.fst_arrays import EPSILON, FstArrays
from speechdp.decode.graphs.fst_files import read_fst, read_symbols
from speechdp.decode.graphs.ngram_grammar import BACKOFF_SYMBOL
from speechdp.errors import ConfigError
from speechdp.files import atomic_path, write_text_atomically
from speechdp.labels.lexicon import Lexicon
from speechdp.language.arpa import read_arpa, write_arpa
from speechdp.language.ngram import END, START, UNKNOWN_NAMES, NgramModel

_EPSILON_NAME = "<eps>"


@dataclass(frozen=True)
class GrammarFst:
    """An acceptor of word sequences with costs, like Kaldi's G.fst.

    Attributes:
        fst: the acceptor.
        names: the word of each label, without epsilon; "#0" is the label of back-off arcs.
    """

    fst: Any
    names: Mapping[int, str]

    @cached_property
    def words(self) -> frozenset[str]:
        """All words that the acceptor accepts."""
        labels = np.unique(FstArrays.of(self.fst).ilabel).tolist()
        return frozenset(self.names[label] for label in labels if label in self.names) - {BACKOFF_SYMBOL}

    def acceptor(self, word_ids: Mapping[str, int], *, scale: float) -> Any:
        """Return the acceptor with labels of `word_ids`; arcs of other words are left out.

        Args:
            word_ids: label of each word.
            scale: factor on the acceptor's costs.
        """
        arrays = FstArrays.of(self.fst)
        labels, label_of = np.unique(arrays.ilabel, return_inverse=True)
        names = {**self.names, EPSILON: BACKOFF_SYMBOL}
        known = {**word_ids, BACKOFF_SYMBOL: EPSILON}
        ids = np.array([known.get(names.get(label, ""), -1) for label in labels.tolist()], np.int32)[label_of]
        for costs in (arrays.final, arrays.cost):
            costs[np.isfinite(costs)] *= scale
        return replace(arrays, ilabel=ids, olabel=ids).where(ids >= 0).fst()

    def respelled(self, spelling: Callable[[str], str | None]) -> GrammarFst:
        """Return the acceptor with words in another spelling; arcs of words without one are left out.

        States and arcs that are then on no complete path are left out, too: `words` are those that can be
        recognised.
        """
        spelt = {
            label: name if name == BACKOFF_SYMBOL else spelling(name) for label, name in self.names.items()
        }
        names = {label: name for label, name in spelt.items() if name is not None}
        arrays = FstArrays.of(self.fst)
        fst = arrays.where(np.isin(arrays.ilabel, [EPSILON, *names])).fst()
        kaldifst.connect(fst)
        return GrammarFst(fst, names)

    @classmethod
    def load(cls, path: Path) -> GrammarFst:
        """Read an OpenFst file and the words.txt beside it.

        Sentence ends, which arpa2fst writes as words without --disambig-symbol, become epsilon because nobody
        says them.  Arcs of infinite cost, which no sentence takes, are left out.

        Raises:
            ConfigError: one of the files is missing or damaged, or they do not belong together.
        """
        fst = read_fst(path)
        names = read_symbols(path.with_name(WORDS_NAME))
        arrays = FstArrays.of(fst)
        labels = np.unique(arrays.ilabel).tolist()
        if missing := [label for label in labels if label != EPSILON and label not in names]:
            raise ConfigError(
                f"{path}: label {missing[0]} is not in {WORDS_NAME} beside it; give the words.txt that "
                "it was made with"
            )
        costs = np.concatenate((arrays.cost, arrays.final))
        if not (costs > -np.inf).all():  # refuses NaN, too
            raise ConfigError(f"{path}: has costs that are no number or minus infinity; make it again")
        ends = [label for label in labels if names.get(label) in (START, END)]
        is_taken = arrays.cost < np.inf
        if is_taken.all() and not ends:
            return cls(fst, names)
        arrays = arrays.where(is_taken)
        silent = np.where(np.isin(arrays.ilabel, ends), EPSILON, arrays.ilabel)
        return cls(replace(arrays, ilabel=silent, olabel=silent).fst(), names)

    def save(self, folder: Path) -> None:
        """Write G.fst and words.txt into a folder, each atomically.  Raises OSError."""
        with atomic_path(folder / GRAMMAR_NAME) as temporary:
            if not self.fst.write(str(temporary)):
                raise OSError(None, "OpenFst cannot write it", str(folder / GRAMMAR_NAME))
        lines = [f"{_EPSILON_NAME} 0\n", *(f"{name} {label}\n" for label, name in sorted(self.names.items()))]
        write_text_atomically(folder / WORDS_NAME, "".join(lines))


LanguageModel = NgramModel | GrammarFst


def read_language_model(path: Path) -> LanguageModel:
    """Read a language model by its name: FILE.arpa, FILE.arpa.gz, or FILE.fst with words.txt beside it.

    Raises:
        ConfigError: the name is none of these, or the file cannot be read.
    """
    if path.suffix == ".fst":
        return GrammarFst.load(path)
    if path.name.endswith((".arpa", ".arpa.gz")):
        return read_arpa(path)
    raise ConfigError(f"{path}: give a name that ends in .arpa, .arpa.gz or .fst")


@dataclass(frozen=True)
class RespelledModel:
    """A language model with the words of a lexicon.

    Attributes:
        model: the model with these words.
        left_out: number of the model's words that the lexicon lacks.
        without_entry: number of the lexicon's words that the model lacks and for which it has no <unk>.
    """

    model: LanguageModel
    left_out: int
    without_entry: int


def read_given_model(path: Path) -> LanguageModel:
    """Read a language model that was made elsewhere.

    Raises:
        ConfigError: it cannot be read, or lacks the probability of the end of a sentence.
    """
    given = read_language_model(path)
    if isinstance(given, NgramModel) and (END,) not in given.log10_probs:
        raise ConfigError(f"{path}: has no 1-gram {END}, the end of a sentence; make it on whole sentences")
    return given


def respelled_model(given: LanguageModel, lexicon: Lexicon) -> RespelledModel | None:
    """Return a model with its words spelt as in the lexicon; words that the lexicon lacks are left out.

    Words of the lexicon that the model lacks share the probability of its <unk>.

    Returns:
        The model; None if it has no word of the lexicon, or as a G.fst no sentence of such words.
    """
    words = given.words.difference(UNKNOWN_NAMES)
    recognised = set(lexicon.recognised_words)

    def spelling(word: str) -> str | None:
        spelt = None if word in UNKNOWN_NAMES else lexicon.spelling_of(word)
        return spelt if spelt in recognised else None

    model = given.respelled(spelling)
    if not model.words:
        return None
    missing = sorted(recognised - model.words)
    if isinstance(given, NgramModel) and isinstance(model, NgramModel) and missing:
        unknown = next((name for name in UNKNOWN_NAMES if name in given.words), None)
        if unknown is not None:
            model, missing = model.with_words(missing, given.log10_probs[unknown,]), []
    return RespelledModel(model, sum(spelling(word) is None for word in words), len(missing))


def nothing_fits(given_as: Path) -> str:
    """Return a clause that says why no word of a model with this name fits the lexicon."""
    what = "sentences has only words of" if given_as.suffix == ".fst" else "words is in"
    return f"none of its {what} the lexicon"


def save_language_model(model: LanguageModel, folder: Path) -> None:
    """Write a language model into a data directory (or beside a trained model).  Raises OSError."""
    if isinstance(model, GrammarFst):
        model.save(folder)
    else:
        write_arpa(model, folder / ARPA_NAME)


def language_model_path(folder: Path) -> Path | None:
    """Return the file that `save_language_model` wrote; None if there is none.

    Raises:
        ConfigError: the file is gone but its record is there: otherwise nobody would notice that the model is
            not used.
        RunError: a run keeps other files of a language model than it wrote.
    """
    check_sizes(folder, LANGUAGE_MODEL_NAMES)
    paths = (folder / name for name in (ARPA_NAME, GRAMMAR_NAME))
    found = next((path for path in paths if path.exists()), None)
    if found is None and (folder / LM_RECORD_NAME).exists():
        raise ConfigError(
            f"{folder}: {LM_RECORD_NAME} tells of a language model, but neither {ARPA_NAME} nor "
            f"{GRAMMAR_NAME} is there; copy the file again, or remove {LM_RECORD_NAME} to do without"
        )
    return found


class StoredModel:
    """The language model of a data directory (or of a trained model), read when it is first needed.

    Args:
        path: result of `language_model_path`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def in_folder(cls, folder: Path) -> StoredModel | None:
        """Return the model that `save_language_model` wrote; None if there is none.

        Raises:
            ConfigError, RunError: as `language_model_path`.
        """
        path = language_model_path(folder)
        return None if path is None else cls(path)

    @cached_property
    def model(self) -> LanguageModel:
        """Read the model.

        Raises:
            ConfigError: the file is damaged.
            RunError: a run keeps another file than it wrote.
        """
        check_contents(self._path.parent, [path.name for path in self._files])
        return read_language_model(self._path)

    @property
    def _files(self) -> tuple[Path, ...]:
        words = (self._path.with_name(WORDS_NAME),) if self._path.name == GRAMMAR_NAME else ()
        return (self._path, *words)

    @property
    def num_bytes(self) -> int:
        """Size of the model's file.  Raises OSError."""
        return self._path.stat().st_size

    @cached_property
    def sha256(self) -> str:
        """Checksum of the model's files, which identifies it.

        Raises:
            RunError: a file cannot be read, or a run keeps another than it wrote.
        """
        facts = self._path.name, *map(checked_sha256, self._files)
        return hashlib.sha256(repr(facts).encode()).hexdigest()
