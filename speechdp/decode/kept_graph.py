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
from io import FileIO
from pathlib import Path
from typing import Any

import kaldifst

import speechdp
from speechdp.comm.base import Communicator
from speechdp.decode.graphs.graph import DecodingGraph, LexiconTransducer
from speechdp.decode.language_model import StoredModel
from speechdp.errors import one_line
from speechdp.files import atomic_path, write_text_atomically
from speechdp.json_input import parse_json
from speechdp.process.notices import warn

#: In a run directory; what it holds.
GRAPH_FOLDER, GRAPH_NAME, RECORD_NAME = "decoding-graph", "graph.fst", "graph.json"
_FORMAT = "speechdp-graph"
#: Language models of fewer bytes make graphs within a second or two, in which every rank builds its own.
LARGE_MODEL_BYTES = 1 << 20
_PIECE_BYTES = 1 << 24
#: What reads language models and lexicons and makes graphs of them.
_CODE = tuple(Path(speechdp.__file__).parent / name for name in ("decode", "labels", "language"))


def graph_key(transducer: LexiconTransducer, model: StoredModel, lm_scale: float) -> str:
    """Return a checksum of all that a graph of n-grams is made of, the code that makes it included."""
    facts = transducer.checksum, model.sha256, lm_scale, kaldifst.__version__
    digest = hashlib.sha256(repr(facts).encode())
    for folder in _CODE:
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


class KeptGraph:
    """The newest large graph of a run.

    Args:
        run_dir: the run directory.
        comm: the ranks that want the same graph; None: this process alone.

    Example::

        graph = KeptGraph(run_dir, comm).get(graph_key(transducer, model, 1.0), words, build)
    """

    def __init__(self, run_dir: Path, comm: Communicator | None = None) -> None:
        self._folder, self._comm = run_dir / GRAPH_FOLDER, comm

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

    def put(self, key: str, graph: DecodingGraph) -> None:
        """Keep a graph that is there already, unless it is the one that is kept.  Rank 0 writes.

        Args:
            key: `graph_key`.
            graph: as it was built, without an insertion score.
        """
        if (self._comm is None or self._comm.rank == 0) and self._record().get("key") != key:
            self._keep(key, graph)

    def discard(self) -> None:
        """Remove the graph that is kept, if there is one."""
        if self._comm is None or self._comm.rank == 0:
            with contextlib.suppress(OSError):
                left = self._folder.glob(".*.tmp")  # by a command that was killed
                for path in (self._folder / RECORD_NAME, self._folder / GRAPH_NAME, *left):
                    path.unlink(missing_ok=True)
                self._folder.rmdir()

    def _record(self) -> dict[str, Any]:
        """Return the record of the graph that is kept; empty: none is, or its record is damaged."""
        try:
            record = parse_json((self._folder / RECORD_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _read(self, key: str, words: tuple[str, ...]) -> DecodingGraph | None:
        """Return the graph that is kept, if it is that of the key and undamaged."""
        try:
            record = self._record()
            if record["key"] != key:
                return None
            # Another command may put its own graph in place of this one meanwhile: it is opened once.
            with (self._folder / GRAPH_NAME).open("rb", buffering=0) as file:
                if record["crc32"] != _crc32(file):
                    return None
                fst = kaldifst.StdConstFst.read(f"/proc/self/fd/{file.fileno()}")
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
                with temporary.open("rb", buffering=0) as file:
                    checksum = _crc32(file)
            record: dict[str, Any] = {
                "format": _FORMAT,
                "key": key,
                "crc32": checksum,
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


def _crc32(file: FileIO) -> int:
    checksum = 0
    while piece := file.read(_PIECE_BYTES):
        checksum = zlib.crc32(piece, checksum)
    return checksum
