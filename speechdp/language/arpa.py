"""Read and write n-gram models as ARPA files, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from speechdp.errors import ConfigError
from speechdp.files import atomic_path, named_file_cannot_be_read
from speechdp.language.ngram import NEVER, Ngram, NgramModel

_DATA, _END = "\\data\\", "\\end\\"
#: Field separators; other blanks, such as the no-break space of "10 000", belong to their word.
_BLANKS = " \t\r\n\f\v"
_BETWEEN_FIELDS = re.compile(f"[{_BLANKS}]+")


def write_arpa(model: NgramModel, path: Path) -> None:
    """Write a model, atomically, gzipped if the name ends in .gz; the same model gives the same bytes.

    Raises:
        OSError: a disk error.
    """
    content = "".join(_lines(model)).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def _lines(model: NgramModel) -> Iterator[str]:
    yield f"{_DATA}\n"
    for n, count in enumerate(model.num_ngrams, 1):
        yield f"ngram {n}={count}\n"
    by_order: list[list[Ngram]] = [[] for _ in range(model.order)]
    for gram in sorted(model.log10_probs):
        by_order[len(gram) - 1].append(gram)
    for n, grams in enumerate(by_order, 1):
        yield f"\n\\{n}-grams:\n"
        for gram in grams:
            weight = model.log10_backoffs.get(gram)
            behind = "" if weight is None else f"\t{weight:.7g}"
            yield f"{model.log10_probs[gram]:.7g}\t{' '.join(gram)}{behind}\n"
    yield f"\n{_END}\n"


def read_arpa(path: Path) -> NgramModel:
    """Read an ARPA file; decompress it if its name ends in .gz.

    Raises:
        ConfigError: the file cannot be read or is truncated, or a line is malformed; names file and line.
    """
    with _opened(path) as file:
        return _Parser(path).parse(file)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a file; convert errors in reading it to messages."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text; convert it with iconv") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: is cut off, or no gzip file ({error}); make it again") from error
    except OSError as error:
        raise ConfigError(named_file_cannot_be_read(path, error)) from error


class _Parser:
    """Parses the lines of one file; `number` is the current line, for messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self.declared: list[int] = []
        self.found: list[int] = []
        self.log10_probs: dict[Ngram, float] = {}
        self.log10_backoffs: dict[Ngram, float] = {}

    def parse(self, file: TextIO) -> NgramModel:
        section = ""
        for self.number, raw in enumerate(file, 1):
            line = raw.strip(_BLANKS)
            if line == _END and section:
                self._check_count()
                if len(self.found) != len(self.declared):
                    raise self._error(f"there are no {len(self.found) + 1}-grams, which \\data\\ announces")
                return NgramModel(self.log10_probs, self.log10_backoffs)
            if not line or (not section and line != _DATA):  # before \data\ anything may stand
                continue
            if line.startswith("\\") and (line == _DATA or line.endswith("-grams:")):
                section = self._begin(line)
            elif section == _DATA:
                self._declare(line)
            else:
                self._add(line.split() if line.isascii() else _BETWEEN_FIELDS.split(line))
        what = (
            "has no \\data\\ section; give an ARPA file" if not section else "is cut off: it has no \\end\\"
        )
        raise ConfigError(f"{self.path}:{max(self.number, 1)}: {what}")

    def _begin(self, line: str) -> str:
        if line != _DATA:
            self._check_count()
            self.found.append(0)
            if line != f"\\{len(self.found)}-grams:" or len(self.found) > len(self.declared):
                raise self._error(f"{line!r} does not belong here; give all orders in turn, as announced")
        return line

    def _declare(self, line: str) -> None:
        name, _, count = line.partition("=")
        if name.split() != ["ngram", str(len(self.declared) + 1)] or not count.strip().isdecimal():
            raise self._error(f"{line[:60]!r} is not 'ngram {len(self.declared) + 1}=COUNT'")
        self.declared.append(int(count))

    def _check_count(self) -> None:
        if self.found and self.found[-1] != self.declared[len(self.found) - 1]:
            n = len(self.found)
            raise self._error(
                f"{self.found[-1]} {n}-grams end here, \\data\\ announces {self.declared[n - 1]}"
            )

    def _add(self, fields: list[str]) -> None:
        n = len(self.found)
        if len(fields) not in (n + 1, n + 2):
            raise self._error(
                f"has {len(fields)} fields; a {n}-gram has a log10 probability, {n} words, weight"
            )
        gram = tuple(fields[1 : n + 1])
        if gram in self.log10_probs:
            raise self._error(f"{' '.join(gram)!r} is listed a second time")
        self.log10_probs[gram] = self._number(fields[0], highest=0.0)
        if len(fields) == n + 2:
            self.log10_backoffs[gram] = self._number(fields[-1], highest=math.inf)
        self.found[-1] += 1

    def _number(self, text: str, highest: float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not value <= highest or value == math.inf:
            raise self._error(f"{text!r} is no log10 probability or back-off weight")
        return max(value, NEVER)

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}:{self.number}: {what}; make the ARPA file again")
