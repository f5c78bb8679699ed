"""Cache large decoding graphs: one rank builds a graph; the other ranks and the next command read its file.

A graph of millions of n-grams takes a minute and gigabytes to build, but a second and a sixth of the memory
to read.  The newest graph is kept in the run, with a record of what it was built from.
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
from speechdp.files import atomic_path, disk_reason, remove_left_over, write_text_atomically
from speechdp.json_input import parse_json
from speechdp.process.notices import warn

#: The folder in a run directory, and its files.
GRAPH_FOLDER, GRAPH_NAME, RECORD_NAME = "decoding-graph", "graph.fst", "graph.json"
_FORMAT = "speechdp-graph"
#: Language models with fewer bytes make graphs within a second or two; then every rank builds its own.
LARGE_MODEL_BYTES = 1 << 20
_PIECE_BYTES = 1 << 24
#: The code that reads language models and lexicons and builds graphs from them.
_CODE = tuple(Path(speechdp.__file__).parent / name for name in ("decode", "labels", "language"))


def graph_key(transducer: LexiconTransducer, model: StoredModel, lm_scale: float) -> str:
    """Return a checksum of all inputs of an n-gram graph, including the code that builds it."""
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
        comm: the ranks that need the same graph; None: this process alone.

    Example::

        graph = KeptGraph(run_dir, comm).get(graph_key(transducer, model, 1.0), words, build)
    """

    def __init__(self, run_dir: Path, comm: Communicator | None = None) -> None:
        self._folder, self._comm = run_dir / GRAPH_FOLDER, comm

    def get(self, key: str, words: tuple[str, ...], build: Callable[[], DecodingGraph]) -> DecodingGraph:
        """Return the graph for a key.  Collective.

        Rank 0 reads it, or builds it and replaces the kept graph; then the other ranks read it.  If it cannot
        be kept, every rank builds its own, and a warning says so.

        Args:
            key: result of `graph_key`.
            words: words of the lexicon.
            build: builds the graph.

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
        """Keep a graph that has been built, unless it is kept already.  Rank 0 writes.

        Args:
            key: result of `graph_key`.
            graph: as it was built, without an insertion score.
        """
        if (self._comm is None or self._comm.rank == 0) and self._record().get("key") != key:
            self._keep(key, graph)

    def discard(self) -> None:
        """Remove the kept graph, if there is one."""
        if self._comm is None or self._comm.rank == 0:
            with contextlib.suppress(OSError):
                left = self._folder.glob(".*.tmp")  # left by a command that was killed
                for path in (self._folder / RECORD_NAME, self._folder / GRAPH_NAME, *left):
                    path.unlink(missing_ok=True)
                self._folder.rmdir()

    def _record(self) -> dict[str, Any]:
        """Return the record of the kept graph; empty if there is none or the record is damaged."""
        try:
            record = parse_json((self._folder / RECORD_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _read(self, key: str, words: tuple[str, ...]) -> DecodingGraph | None:
        """Return the kept graph if it belongs to the key and is undamaged, else None."""
        try:
            record = self._record()
            if record["key"] != key:
                return None
            # Another command may replace the graph meanwhile, so the file is opened only once.
            with (self._folder / GRAPH_NAME).open("rb", buffering=0) as file:
                if record["crc32"] != _crc32(file):
                    return None
                fst = kaldifst.StdConstFst.read(f"/proc/self/fd/{file.fileno()}")
            recognised = frozenset(record["recognised"])
            about = bool(record["is_determinised"]), int(record["num_arcs"])
        except (OSError, ValueError, KeyError, TypeError):  # none is kept, or another program wrote it
            return None
        return None if fst is None else DecodingGraph(fst, words, *about, recognised)

    def _keep(self, key: str, graph: DecodingGraph) -> bool:
        """Replace the kept graph; return whether that succeeded."""
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
            remove_left_over(path)
        except OSError as error:
            warn(
                f"{self._folder}: the decoding graph cannot be kept ({disk_reason(error)}): every rank "
                "builds its own, and so does the next command"
            )
            return False
        return True


def _crc32(file: FileIO) -> int:
    checksum = 0
    while piece := file.read(_PIECE_BYTES):
        checksum = zlib.crc32(piece, checksum)
    return checksum
