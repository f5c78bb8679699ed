"""Large decoding graphs: one rank builds, the others read what it wrote, and so does the next command.

A graph of millions of n-grams takes a minute and gigabytes to build, and a second and a sixth of the memory
to read.  The newest is kept in the run, with a record of what it was made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kaldifst

from speechdp.comm.base import Communicator
from speechdp.decode import graphs
from speechdp.decode.graphs.graph import DecodingGraph, LexiconTransducer
from speechdp.decode.language_model import StoredModel
from speechdp.errors import one_line
from speechdp.files import atomic_path, write_text_atomically
from speechdp.process.notices import warn

#: In a run directory; what it holds.
GRAPH_FOLDER, GRAPH_NAME, RECORD_NAME = "graph", "graph.fst", "graph.json"
_FORMAT = "speechdp-graph"
#: Language models of fewer bytes make graphs within a second or two, in which every rank builds its own.
LARGE_MODEL_BYTES = 1 << 20
_PIECE_BYTES = 1 << 24


def graph_key(transducer: LexiconTransducer, model: StoredModel, lm_scale: float) -> str:
    """Return a checksum of all that a graph of n-grams is made of, the code that makes it included."""
    digest = hashlib.sha256(f"{transducer.checksum} {model.sha256} {lm_scale!r}".encode())
    for folder in graphs.__path__:
        for file in sorted(Path(folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


class KeptGraph:
    """The newest large graph of a run.

    Args:
        folder: what it is kept in, e.g. RUN/graph.
        comm: the ranks that want the same graph; None: this process alone.

    Example::

        graph = KeptGraph(run_dir / GRAPH_FOLDER, comm).get(graph_key(transducer, model, 1.0), words, build)
    """

    def __init__(self, folder: Path, comm: Communicator | None = None) -> None:
        self._folder, self._comm = folder, comm

    def get(self, key: str, words: tuple[str, ...], build: Callable[[], DecodingGraph]) -> DecodingGraph:
        """Return the graph of a key.  Collective.

        Rank 0 reads it, or builds it and puts it in place of the one that is kept; then the others read it.
        Where it cannot be kept every rank builds its own, and a warning says so.

        Args:
            key: `graph_key`.
            words: of the lexicon.
            build: makes the graph.

        Raises:
            ConfigError: as `build`.
        """
        comm = self._comm
        graph, is_kept = None, True
        if comm is None or comm.rank == 0:
            graph = self._read(key, words)
            if graph is None:
                graph = build()
                is_kept = self._keep(key, graph)
        if comm is not None:
            is_kept = bool(comm.broadcast_object(is_kept))
        if graph is None and is_kept:
            graph = self._read(key, words)
        return build() if graph is None else graph

    def discard(self) -> None:
        """Remove the graph that is kept, if there is one."""
        if self._comm is None or self._comm.rank == 0:
            with contextlib.suppress(OSError):
                for name in (RECORD_NAME, GRAPH_NAME):
                    (self._folder / name).unlink(missing_ok=True)
                self._folder.rmdir()

    def _read(self, key: str, words: tuple[str, ...]) -> DecodingGraph | None:
        """Return the graph that is kept, if it is that of the key and undamaged."""
        path = self._folder / GRAPH_NAME
        try:
            record = json.loads((self._folder / RECORD_NAME).read_text(encoding="utf-8"))
            if record["key"] != key or record["crc32"] != _crc32(path):
                return None
            fst = kaldifst.StdConstFst.read(str(path))
            recognised = frozenset(record["recognised"])
            about = bool(record["is_determinised"]), int(record["num_arcs"])
        except (OSError, ValueError, KeyError, TypeError):  # none is kept, or not one of this program
            return None
        return None if fst is None else DecodingGraph(fst, words, *about, recognised)

    def _keep(self, key: str, graph: DecodingGraph) -> bool:
        """Put a graph in place of the one that is kept; return whether that could be done."""
        try:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / GRAPH_NAME
            with atomic_path(path) as temporary:
                if not graph.fst.write(str(temporary)):
                    raise OSError(None, "OpenFst cannot write it", str(path))
            record: dict[str, Any] = {
                "format": _FORMAT,
                "key": key,
                "crc32": _crc32(path),
                "is_determinised": graph.is_determinised,
                "num_arcs": graph.num_arcs,
                "recognised": sorted(graph.recognised),
            }
            write_text_atomically(self._folder / RECORD_NAME, json.dumps(record) + "\n")
        except OSError as error:
            warn(
                f"{self._folder}: the decoding graph cannot be kept ({one_line(error)}): every rank builds "
                "its own, and so does the next command"
            )
            return False
        return True


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum
