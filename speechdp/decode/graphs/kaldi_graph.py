"""Read Kaldi's own decoding graphs: HCLG.fst, whose labels are the transition-ids of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechdp.data.kaldi.model import PdfMap, read_pdf_map
from speechdp.decode.graphs.fst_arrays import EPSILON, FstArrays
from speechdp.decode.graphs.fst_files import read_fst, read_symbols
from speechdp.decode.graphs.graph import DecodingGraph
from speechdp.errors import ConfigError
from speechdp.labels.hmm import IntArray


@dataclass(frozen=True)
class KaldiGraphFiles:
    """The files of a graph made by Kaldi.

    Attributes:
        graph: HCLG.fst.
        words: its words.txt.
        model: the final.mdl that it was made with.
    """

    graph: Path
    words: Path
    model: Path

    @classmethod
    def of(cls, graph: Path, words: Path | None, model: Path | None) -> KaldiGraphFiles:
        """Fill in files that are not given with Kaldi's defaults: DIR/graph/words.txt and DIR/final.mdl."""
        folder = graph.absolute().parent
        return cls(graph, words or folder / "words.txt", model or folder.parent / "final.mdl")


def read_kaldi_graph(files: KaldiGraphFiles, num_classes: int) -> DecodingGraph:
    """Read a graph, and make it read pdfs instead of transition-ids.

    Args:
        files: files of the graph.
        num_classes: number of pdfs of the model to decode with.

    Raises:
        ConfigError: a file is missing or damaged, or they do not belong together.
    """
    names, given = read_symbols(files.words), FstArrays.of(read_fst(files.graph))
    _refuse_grammar(given, names, files.graph)
    pdfs = read_pdf_map(files.model)
    if pdfs.num_pdfs != num_classes:
        raise ConfigError(
            f"{files.model}: has {pdfs.num_pdfs} pdfs, the model to decode with {num_classes}; give the "
            "graph and final.mdl of the system whose alignment it was trained on"
        )
    arrays = _with_pdfs(given, pdfs, max(names, default=0), files)
    words = tuple(names.get(label, "") for label in range(1, max(names, default=0) + 1))
    return DecodingGraph.of(arrays, words, is_determinised=True)


def _refuse_grammar(arrays: FstArrays, names: dict[int, str], path: Path) -> None:
    """Refuse a G.fst, which reads words, and disambiguation symbols that it does not write."""
    symbols = [label for label, name in names.items() if name.startswith("#")]
    is_same = (arrays.ilabel == arrays.olabel) | (
        np.isin(arrays.ilabel, symbols) & (arrays.olabel == EPSILON)
    )
    if is_same.all() and (arrays.ilabel != EPSILON).any():
        raise ConfigError(
            f"{path}: is a grammar of words (G.fst), not a decoding graph; give the HCLG.fst that Kaldi's "
            "utils/mkgraph.sh makes of it (prepare --lm G.fst takes it where phones are speechdp's own)"
        )


def _with_pdfs(arrays: FstArrays, pdfs: PdfMap, num_words: int, files: KaldiGraphFiles) -> FstArrays:
    """Return a graph with pdf + 1 as its input labels."""
    given, words = arrays.ilabel, arrays.olabel
    foreign = (given < 0) | (given > pdfs.num_transition_ids) | (words < 0) | (words > num_words)
    if foreign.any():
        first = int(foreign.argmax())
        raise ConfigError(
            f"{files.graph}: label {given[first]}:{words[first]} is none of {files.model} and "
            f"{files.words}; give those that it was made with"
        )
    if (label := _misplaced(arrays, pdfs)) is not None:
        raise ConfigError(
            f"{files.graph}: no path of {files.model} begins or ends as this graph does, with the "
            f"transition-id {label}; give an HCLG.fst (no L.fst) and the final.mdl that it was made with"
        )
    labels = pdfs.pdfs + 1
    labels[EPSILON] = EPSILON  # there is no transition-id 0
    return replace(arrays, ilabel=labels[given])


def _misplaced(graph: FstArrays, pdfs: PdfMap) -> int | None:
    """Return a transition-id that a path of the graph begins or ends with although it may not.

    An L.fst has phones as input labels, which look like the first transition-ids.  The transition-ids of
    another model look the same, too.
    """
    reads = graph.ilabel != EPSILON
    silent = graph.where(~reads)
    first = _closure([graph.start], silent.source, silent.target, len(graph.final))
    last = _closure(np.flatnonzero(np.isfinite(graph.final)), silent.target, silent.source, len(graph.final))
    wrong = reads & (
        (first[graph.source] & ~pdfs.may_begin[graph.ilabel])
        | (last[graph.target] & ~pdfs.may_end[graph.ilabel])
    )
    return int(graph.ilabel[wrong.argmax()]) if wrong.any() else None


def _closure(states: ArrayLike, source: IntArray, target: IntArray, num_states: int) -> NDArray[np.bool_]:
    """Return which states, (S,), are among `states` or reached from them by the given arcs."""
    reached = np.zeros(num_states, dtype=bool)
    reached[np.asarray(states)] = True
    while True:
        new = reached[source] & ~reached[target]
        if not new.any():
            return reached
        reached[target[new]] = True
