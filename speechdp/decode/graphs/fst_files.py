"""Read graphs and symbols made by Kaldi: OpenFst files and words.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kaldifst

from speechdp.errors import ConfigError
from speechdp.files import named_file_cannot_be_read


def read_fst(path: Path) -> Any:
    """Read an OpenFst file, of type vector or const, as a StdVectorFst.

    Raises:
        ConfigError: the file is missing or damaged, has non-standard arcs, or has no start state.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(named_file_cannot_be_read(path, error)) from error
    fst = kaldifst.StdFst.read(str(path))
    if fst is None or fst.start < 0:
        raise ConfigError(
            f"{path}: is no FST of OpenFst (vector or const, standard arcs), or is damaged; give another"
        )
    return kaldifst.StdVectorFst(fst)


def read_symbols(path: Path) -> dict[int, str]:
    """Read a Kaldi words.txt with lines `word number`; 0, which is epsilon, is left out.

    Raises:
        ConfigError: the file is missing, or a line is malformed; names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(named_file_cannot_be_read(path, error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text; convert it with iconv") from error
    names: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2 or not fields[1].isdecimal():
            raise ConfigError(f"{path}:{number}: {line[:60]!r} is not 'word number'; give Kaldi's words.txt")
        label = int(fields[1])
        if label in names:
            raise ConfigError(f"{path}:{number}: {label} is listed a second time; give Kaldi's words.txt")
        names[label] = fields[0]
    names.pop(0, None)
    return names
