"""The file of a data directory or run that names the classes of a network, of whatever kind they are."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path

from speechdp.errors import ConfigError
from speechdp.files import record_cannot_be_read, write_text_atomically

#: Of a damaged classes.txt; it may be the copy that a run keeps, which no `prepare` mends.
_REMEDY = "copy it from the data that were trained on, or prepare these again"


class ClassList(ABC):
    """Classes with names, which `classes.txt` keeps: a line `<index> <name>` for each.

    Example:
        >>> from speechdp.labels.kaldi_pdfs import KaldiPdfs
        >>> KaldiPdfs(2).text()
        '0 pdf-0\\n1 pdf-1\\n'
    """

    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """Name every class, in class order; a name has no blanks."""

    def text(self) -> str:
        """Return what `save` writes."""
        return "".join(f"{index} {name}\n" for index, name in enumerate(self.class_names()))

    @property
    def sha256(self) -> str:
        """Identify the classes: the checksum of their `classes.txt`."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write `classes.txt` atomically.

        Raises:
            OSError: the disk refuses it.
        """
        write_text_atomically(path, self.text())


def read_class_list(path: Path) -> str:
    """Return what a `classes.txt` holds, of whatever classes.

    Raises:
        ConfigError: it is missing, or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: is missing; {_REMEDY}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(record_cannot_be_read(path, error, _REMEDY)) from error


def no_class_list(path: Path) -> ConfigError:
    """Return the error for a `classes.txt` that does not hold what `ClassList.save` writes."""
    return ConfigError(f"{path}: not a class list of speechdp; {_REMEDY}")
