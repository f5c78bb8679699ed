"""Read and write classes.txt, the file of a data directory or run that names the classes of a network."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path

from speechdp.errors import ConfigError
from speechdp.files import record_cannot_be_read, write_text_atomically

#: Remedy for a damaged classes.txt; it may be the copy that a run keeps, which no `prepare` repairs.
_REMEDY = "copy it from the data that were trained on, or prepare these again"


class ClassList(ABC):
    """Named classes; `classes.txt` has a line `<index> <name>` for each.

    Example:
        >>> from speechdp.labels.kaldi_pdfs import KaldiPdfs
        >>> KaldiPdfs(2).text()
        '0 pdf-0\\n1 pdf-1\\n'
    """

    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """Return the name of every class, in class order; names have no blanks."""

    def text(self) -> str:
        """Return the text that `save` writes."""
        return "".join(f"{index} {name}\n" for index, name in enumerate(self.class_names()))

    @property
    def sha256(self) -> str:
        """Checksum of the `classes.txt`, which identifies the classes."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write `classes.txt` atomically.

        Raises:
            OSError: a disk error.
        """
        write_text_atomically(path, self.text())


def read_class_list(path: Path) -> str:
    """Return the text of a `classes.txt`, whatever its classes are.

    Raises:
        ConfigError: the file is missing, or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: is missing; {_REMEDY}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(record_cannot_be_read(path, error, _REMEDY)) from error


def no_class_list(path: Path) -> ConfigError:
    """Return the error for a `classes.txt` that `ClassList.save` did not write."""
    return ConfigError(f"{path}: not a class list of speechdp; {_REMEDY}")
