"""Distinguish class lists: states of our own phones, or pdfs of a Kaldi system, which only Kaldi decodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.labels.class_list import ClassList, no_class_list, read_class_list
from speechdp.labels.hmm import StateInventory

_FIRST_LINE = "0 pdf-0\n"


@dataclass(frozen=True)
class KaldiPdfs(ClassList):
    """The pdfs 0 ... num_classes - 1 of a Kaldi system as classes."""

    num_classes: int

    @property
    def silence(self) -> tuple[int, ...]:
        """Empty: the pdfs of silence are not known."""
        return ()

    def class_names(self) -> tuple[str, ...]:
        """Return the names `pdf-<index>` of all classes, in class order."""
        return tuple(f"pdf-{index}" for index in range(self.num_classes))

    @classmethod
    def load(cls, path: Path) -> KaldiPdfs:
        """Read a `classes.txt`.  Raises ConfigError if `save` did not write it."""
        text = read_class_list(path)
        pdfs = cls(text.count("\n"))
        if text != pdfs.text():
            raise no_class_list(path)
        return pdfs


def is_kaldi_pdfs(path: Path) -> bool:
    """Return whether a class list consists of Kaldi's pdfs; False also if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline() == _FIRST_LINE
    except (OSError, UnicodeDecodeError):
        return False


def load_classes(path: Path) -> StateInventory | KaldiPdfs:
    """Read a class list of either kind.  Raises ConfigError if it is neither."""
    return KaldiPdfs.load(path) if is_kaldi_pdfs(path) else StateInventory.load(path)


def classes_of(dataset: Dataset) -> StateInventory | KaldiPdfs:
    """Read a data directory's class list.

    Raises:
        ConfigError: there is none, or its number of classes differs from data.json.
    """
    classes = load_classes(dataset.classes_path)
    dataset.check_num_classes(dataset.classes_path, classes.num_classes)
    return classes


_WITH_KALDI = (
    "write posteriors with speechdp posteriors and decode with Kaldi, or decode with its graph, "
    "speechdp decode --graph HCLG.fst"
)


def refuse_kaldi_pdfs(path: Path, what: str, remedy: str = _WITH_KALDI) -> None:
    """Refuse an operation that needs pronunciations if the targets are Kaldi's pdfs.

    Args:
        path: the class list.
        what: the operation, e.g. "decode".
        remedy: what to do instead.

    Raises:
        ConfigError: the classes are Kaldi's pdfs.
    """
    if is_kaldi_pdfs(path):
        raise ConfigError(f"{what}: {path.parent}: targets are Kaldi pdfs; {remedy}")
