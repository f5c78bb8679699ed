"""Number the symbols that a synthesiser reads: characters, or the phones of a lexicon."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.files import write_text_atomically
from speechdp.json_input import parse_json
from speechdp.labels.lexicon import Lexicon, lower_case
from speechdp.labels.text_normalise import PUNCTUATION, normalise, plain_words

SymbolKind = Literal["characters", "phones"]

SYMBOLS_FORMAT = "speechdp-symbols"
SYMBOLS_VERSION = 1
END = "<end>"
SPACE = "<space>"
_CHARACTERS = (END, SPACE, *PUNCTUATION, "'", *string.ascii_lowercase)
_MAX_NAMED = 20


@dataclass(frozen=True)
class SymbolInventory:
    """The symbols of a synthesiser; the position of a name is its class.

    Attributes:
        kind: kind of symbols.
        names: <end>, <space>, punctuation, then letters or phones.
        pronunciations: for phones: word (in lower case) -> its phones; empty for characters.
    """

    kind: SymbolKind
    names: tuple[str, ...]
    pronunciations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ("characters", "phones"):
            raise ConfigError(f"symbols {self.kind!r} are not known; choose characters or phones")
        if len(set(self.names)) != len(self.names) or not {END, SPACE} <= set(self.names):
            raise ConfigError(f"symbols must differ from each other and hold {END} and {SPACE}")
        unknown = {p for phones in self.pronunciations.values() for p in phones} - set(self.names)
        if unknown:
            raise ConfigError(f"symbols: phone {min(unknown)!r} of the pronunciations is not among the names")

    @classmethod
    def of_kind(cls, kind: SymbolKind, lexicon: Lexicon | None = None) -> SymbolInventory:
        """Make the inventory of characters, or of the phones in each word's first variant in a lexicon.

        Raises:
            ConfigError: phones are requested without a lexicon.
        """
        if kind == "characters":
            return cls(kind, _CHARACTERS)
        if lexicon is None:
            raise ConfigError("phones as input need a lexicon; give one with --lexicon")
        spoken = {lower_case(word): variants[0] for word, variants in lexicon.pronunciations.items()}
        phones = sorted({phone for variant in spoken.values() for phone in variant})
        return cls(kind, (END, SPACE, *PUNCTUATION, *phones), spoken)

    def with_words_of(self, texts: Iterable[str], lexicon: Lexicon) -> SymbolInventory:
        """Add a lexicon's pronunciations of the words of texts; words it lacks keep theirs.

        Raises:
            ConfigError: the symbols are characters, or a word has a phone that is not among the symbols.
        """
        if self.kind != "phones":
            raise ConfigError("--lexicon goes with a model of phones; this one reads characters")
        given = lexicon.in_lower_case()
        words = {word for text in texts for word in plain_words(normalise(text)) if word in given}
        spoken = {word: given.pronunciations[word][0] for word in sorted(words)}
        strange = [
            (word, phone) for word, phones in spoken.items() for phone in phones if phone not in self.names
        ]
        if strange:
            word, phone = strange[0]
            known = " ".join(name for name in self.names if name[0].isalnum())
            raise ConfigError(
                f"--lexicon: {word!r} has the phone {phone}, which the model does not have; use its "
                f"phones: {known}"
            )
        return replace(self, pronunciations={**self.pronunciations, **spoken})

    @property
    def num_symbols(self) -> int:
        """Number of symbols, the end included."""
        return len(self.names)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Convert a text to the classes of its symbols: (S,) int32, with <end> last.

        The text is normalised (text_normalise.py): any case, digits and small numbers are allowed.

        Raises:
            ConfigError: the text has no words, characters outside the inventory, or words without
                pronunciation; one line that names them.
        """
        words = normalise(text).split()
        if not any(character.isalnum() for word in words for character in word):
            raise ConfigError(f"the text {text!r} has no words; give some")
        symbols = self._characters(words) if self.kind == "characters" else self._phones(words)
        return np.array([self._index[symbol] for symbol in (*symbols, END)], dtype=np.int32)

    def decode(self, classes: Iterable[int]) -> tuple[str, ...]:
        """Return the names of classes, e.g. to label the axis of a picture."""
        return tuple(self.names[number] for number in classes)

    def _characters(self, words: list[str]) -> list[str]:
        characters = [SPACE if character == " " else character for character in " ".join(words)]
        unknown = {c for c in characters if c not in self._index}
        remedy = "write them as words" if len(unknown) > 1 else "write it as a word"
        self._refuse(unknown, "character", remedy)
        return characters

    def _phones(self, words: list[str]) -> list[str]:
        symbols: list[str] = []
        missing: set[str] = set()
        for word in words:
            plain = "".join(plain_words(word))
            phones = self.pronunciations.get(plain, ())
            if plain and not phones:
                missing.add(plain)
            symbols += [*([SPACE] if symbols else []), *phones, *word[len(plain) :]]
        self._refuse(missing, "word", "use words of the training data, or --lexicon with these")
        return symbols

    def _refuse(self, unknown: set[str], what: str, remedy: str) -> None:
        if not unknown:
            return
        ordered = sorted(unknown)
        named = " ".join(repr(name) for name in ordered[:_MAX_NAMED])
        more = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
        plural = "s" if len(ordered) > 1 else ""
        where = "the inventory of symbols" if what == "character" else "the lexicon"
        raise ConfigError(f"{what}{plural} outside {where}: {named}{more}; {remedy}")

    def to_dict(self) -> dict[str, Any]:
        """Return the inventory as JSON-like values."""
        values: dict[str, Any] = {"kind": self.kind, "names": list(self.names)}
        if self.kind == "phones":
            values["pronunciations"] = {word: list(phones) for word, phones in self.pronunciations.items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SymbolInventory:
        """Read the result of `to_dict`.  Raises ConfigError on anything else."""
        try:
            spoken = {str(word): tuple(phones) for word, phones in values.get("pronunciations", {}).items()}
            return cls(values["kind"], tuple(str(name) for name in values["names"]), spoken)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"symbols are damaged ({error!r}); prepare the data again") from error

    def save(self, path: Path) -> None:
        """Write the inventory as JSON, atomically."""
        values = {"format": SYMBOLS_FORMAT, "version": SYMBOLS_VERSION, **self.to_dict()}
        write_text_atomically(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")

    def save_classes(self, path: Path) -> None:
        """Write classes.txt, one line `<index> <name>` per symbol, atomically."""
        lines = (f"{number} {name}\n" for number, name in enumerate(self.names))
        write_text_atomically(path, "".join(lines))

    @classmethod
    def load(cls, path: Path) -> SymbolInventory:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: missing, damaged, or of another version.
        """
        try:
            values = parse_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); prepare the data with --task synthesis"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path}: is damaged ({error}); prepare the data again") from error
        if not isinstance(values, dict) or values.get("format") != SYMBOLS_FORMAT:
            raise ConfigError(f"{path}: is not a {SYMBOLS_FORMAT} file; prepare the data again")
        if values.get("version") != SYMBOLS_VERSION:
            raise ConfigError(
                f"{path}: has version {values.get('version')}, this speechdp reads version "
                f"{SYMBOLS_VERSION}; prepare the data again"
            )
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def symbols_of(dataset: Dataset) -> SymbolInventory:
    """Read a data directory's symbols.

    Raises:
        ConfigError: there are none, or their number differs from data.json.
    """
    symbols = SymbolInventory.load(dataset.symbols_path)
    dataset.check_num_classes(dataset.symbols_path, symbols.num_symbols)
    return symbols
