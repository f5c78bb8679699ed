"""Kaldi's own decoding graphs: HCLG.fst, whose labels are the transition-ids of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kaldifst

from speechdp.data.kaldi.model import PdfMap, read_pdf_map
from speechdp.decode.fst_files import read_fst, read_symbols
from speechdp.decode.graph import DecodingGraph
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
    fst = kaldifst.StdVectorFst()
    for state in range(graph.num_states):
        fst.add_state()
        fst.set_final(state, graph.final(state).value)
    fst.start = graph.start
    to_pdf = pdfs.pdfs.tolist()
    for state in range(graph.num_states):
        for arc in kaldifst.ArcIterator(graph, state):
            if not 0 <= arc.ilabel <= pdfs.num_transition_ids or not 0 <= arc.olabel <= num_words:
                raise ConfigError(
                    f"{files.graph}: label {arc.ilabel}:{arc.olabel} is none of {files.model} and "
                    f"{files.words}; give those that it was made with"
                )
            label = to_pdf[arc.ilabel] + 1 if arc.ilabel else 0
            fst.add_arc(state, kaldifst.StdArc(label, arc.olabel, arc.weight.value, arc.nextstate))
    return fst
