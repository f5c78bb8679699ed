"""A reader of speechdp's, the files it reads, and how they are changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from speechdp.errors import SpeechDPError

#: Changed files by their path in the reader's folder.
Files = dict[str, bytes]
Change = Callable[[bytes], st.SearchStrategy[bytes]]


@dataclass(frozen=True)
class Reader:
    """A reader, and what it is given to read.

    Attributes:
        name: what records call it.
        read: reads all there is in a folder.
        files: sound content of each file.
        inputs: draws files that are changed.
    """

    name: str
    read: Callable[[Path], object]
    files: Mapping[str, bytes]
    inputs: st.SearchStrategy[Files]

    def write(self, folder: Path) -> None:
        """Write the sound files."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def refusal(self, folder: Path, changed: Files) -> SpeechDPError | None:
        """Let the reader read changed files; return its error, if any.  Anything else it raises comes out."""
        with _laid_down(folder, changed, self.files):
            try:
                self.read(folder)
            except SpeechDPError as error:
                return error
        return None


@contextmanager
def _laid_down(folder: Path, changed: Files, sound: Mapping[str, bytes]) -> Iterator[None]:
    for name, content in changed.items():
        (folder / name).write_bytes(content)
    try:
        yield
    finally:
        for name in changed:
            (folder / name).write_bytes(sound[name])


def changing(name: str, read: Callable[[Path], object], files: Files, *changes: tuple[str, Change]) -> Reader:
    """Return a reader of which one file a time is changed; `changes` are (file's name, how)."""

    def drawn(file: str, change: Change) -> st.SearchStrategy[Files]:
        return change(files[file]).map(lambda new: {file: new})

    return Reader(name, read, files, st.one_of([drawn(*change) for change in changes]))


def content_of(folder: Path) -> Files:
    """Return all files of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
