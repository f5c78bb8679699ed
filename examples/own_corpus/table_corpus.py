"""A corpus whose utterances stand in a table, with the splits that its authors have chosen.

    speechdp prepare --corpus table_corpus:file=all.csv SOURCE DATA

SOURCE/all.csv has the columns id, speaker, split (train, dev or test), audio (a path below SOURCE) and text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import speechdp
from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.corpora.reader import CorpusReader
from speechdp.errors import ConfigError

COLUMNS = {"id", "speaker", "split", "audio", "text"}


@speechdp.corpus("table_corpus")
@dataclass(frozen=True)
class TableCorpus(CorpusReader):
    """Reads the table.

    Attributes:
        file: its name.
        lower_case: whether transcripts are taken in lower case.
    """

    file: str = "corpus.csv"
    lower_case: bool = True

    def read(self, source: Path) -> Iterator[CorpusUtterance]:
        """Yield a line's utterance."""
        path = source / self.file
        with path.open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            missing = COLUMNS - set(table.fieldnames or ())
            if missing:
                raise ConfigError(f"{path}: has no column {min(missing)}; add it")
            for line in table:
                if None in line.values():
                    raise ConfigError(f"{path}:{table.line_num}: has fewer fields than columns; fill them in")
                text = line["text"].lower() if self.lower_case else line["text"]
                yield CorpusUtterance(
                    line["id"], line["speaker"], text, Path(line["audio"]), split=line["split"]
                )
