"""Kaldi's own decoding graphs: HCLG.fst, whose labels are the transition-ids of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kaldifst

from speechdp.data.kaldi.model import PdfMap, read_pdf_map
from speechdp.decode.graphs.fst_arrays import EPSILON, FstArrays
from speechdp.decode.graphs.fst_files import read_fst, read_symbols
from speechdp.decode.graphs.graph import DecodingGraph
from speechdp.errors import ConfigError


@dataclass(frozen=True)
class KaldiGraphFiles:
    """The files of a graph that Kaldi has made.

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
        """Take files that are not given from where Kaldi puts them: DIR/graph/words.txt and DIR/final.mdl."""
        folder = graph.absolute().parent
        return cls(graph, words or folder / "words.txt", model or folder.parent / "final.mdl")


def read_kaldi_graph(files: KaldiGraphFiles, num_classes: int) -> DecodingGraph:
    """Read a graph and let it read pdfs in place of transition-ids.

    Args:
        files: where it is.
        num_classes: pdfs of the model to decode with.

    Raises:
        ConfigError: a file is missing or damaged, or they do not belong together.
    """
    pdfs, names = read_pdf_map(files.model), read_symbols(files.words)
    if pdfs.num_pdfs != num_classes:
        raise ConfigError(
            f"{files.model}: has {pdfs.num_pdfs} pdfs, the model to decode with {num_classes}; give the "
            "graph and final.mdl of the system whose alignment it was trained on"
        )
    fst = _with_pdfs(read_fst(files.graph), pdfs, max(names, default=0), files)
    kaldifst.arcsort(fst, sort_type="ilabel")
    words = tuple(names.get(label, "") for label in range(1, max(names, default=0) + 1))
    return DecodingGraph(fst, words, is_determinised=True)


def _with_pdfs(graph: Any, pdfs: PdfMap, num_words: int, files: KaldiGraphFiles) -> Any:
    """Copy a graph, its input labels becoming pdf + 1."""
    arrays = FstArrays.of(graph)
    given, words = arrays.ilabel, arrays.olabel
    foreign = (given < 0) | (given > pdfs.num_transition_ids) | (words < 0) | (words > num_words)
    if foreign.any():
        first = int(foreign.argmax())
        raise ConfigError(
            f"{files.graph}: label {given[first]}:{words[first]} is none of {files.model} and "
            f"{files.words}; give those that it was made with"
        )
    labels = pdfs.pdfs + 1
    labels[EPSILON] = EPSILON  # there is no transition-id 0
    return replace(arrays, ilabel=labels[given]).fst()
