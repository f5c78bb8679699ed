"""HCLG.fst of a monophone system in the steps of Kaldi's utils/mkgraph.sh, by kaldifst."""

from __future__ import annotations

import struct
from pathlib import Path

import kaldifst
import numpy as np

from speechdp.data.kaldi.model import PdfMap, read_pdf_map

#: mkgraph.sh's --self-loop-scale; its --transition-scale is 1.
SELF_LOOP_SCALE = 0.1


def make_graph(lang: Path, model: Path, target: Path) -> None:
    """Write HCLG.fst of L_disambig.fst, G.fst and a monophone final.mdl (binary); loops are reordered."""
    pdfs, log_probs = read_pdf_map(model), _log_probs(model)
    disambig = [int(line) for line in (lang / "phones" / "disambig.int").read_text().split()]
    graph = kaldifst.compose(_read(lang / "L_disambig.fst"), _sorted(_read(lang / "G.fst")))
    kaldifst.determinize_star(graph, use_log=True)
    kaldifst.minimize_encoded(graph)
    graph, contexts = kaldifst.compose_context(disambig, 1, 0, graph)
    symbols = [number for number, context in enumerate(contexts) if context and context[0] <= 0]
    hmms, symbols = _hmms(pdfs, log_probs, contexts, symbols)
    graph = kaldifst.compose(hmms, _sorted(graph))
    kaldifst.determinize_star(graph, use_log=True)
    _with_self_loops(graph, pdfs, log_probs, symbols).write(str(target))


def _read(path: Path) -> kaldifst.StdVectorFst:
    return kaldifst.StdVectorFst(kaldifst.StdFst.read(str(path)))


def _sorted(fst: kaldifst.StdVectorFst) -> kaldifst.StdVectorFst:
    kaldifst.arcsort(fst, sort_type="ilabel")
    return fst


def _log_probs(model: Path) -> np.ndarray:
    """Return the log-probability of each transition-id; that of 0 means nothing."""
    content = model.read_bytes()
    at = content.index(b"<LogProbs> FV \4") + len(b"<LogProbs> FV \4")
    (count,) = struct.unpack_from("<i", content, at)
    return np.frombuffer(content, "<f4", count, at + 4)


def _hmms(
    pdfs: PdfMap, log_probs: np.ndarray, contexts: list[list[int]], symbols: list[int]
) -> tuple[kaldifst.StdVectorFst, list[int]]:
    """Return H without self-loops (make-h-transducer), and its disambiguation symbols as input labels."""
    fst = kaldifst.StdVectorFst()
    fst.start = hub = fst.add_state()
    fst.set_final(hub, 0.0)
    new_symbols = []
    for number, context in enumerate(contexts):
        if not context:
            continue
        if number in symbols:
            new_symbols.append(pdfs.num_transition_ids + 1 + len(new_symbols))
            fst.add_arc(hub, kaldifst.StdArc(new_symbols[-1], number, 0.0, hub))
            continue
        states: dict[int, int] = {-1: fst.add_state()}
        fst.add_arc(states[-1], kaldifst.StdArc(0, 0, 0.0, hub))
        for id_ in np.flatnonzero(pdfs.phones == context[0]).tolist():
            source, entered = int(pdfs.sources[id_]), int(pdfs.destinations[id_])
            for state in (source, entered):
                if state not in states:
                    states[state] = fst.add_state()
            if entered != source:
                loop = _loop_of(pdfs, id_)
                cost = -log_probs[id_] + (np.log1p(-np.exp(log_probs[loop])) if loop else 0.0)
                fst.add_arc(states[source], kaldifst.StdArc(id_, 0, float(cost), states[entered]))
        fst.add_arc(hub, kaldifst.StdArc(0, number, 0.0, states[0]))
    return fst, new_symbols


def _loop_of(pdfs: PdfMap, id_: int) -> int:
    """Return the self-loop of the state that a transition-id leaves; 0: none."""
    found = np.flatnonzero((pdfs.states == pdfs.states[id_]) & (pdfs.destinations == pdfs.sources))
    return int(found[-1]) if len(found) else 0


def _with_self_loops(
    graph: kaldifst.StdVectorFst, pdfs: PdfMap, log_probs: np.ndarray, symbols: list[int]
) -> kaldifst.StdVectorFst:
    """Make disambiguation symbols epsilons and add self-loops behind what leaves a state (add-self-loops).

    A state of the result is one of the graph together with the transition-id that came last, so that all
    that enters it has left the same HMM state.
    """
    fst = kaldifst.StdVectorFst()
    numbers: dict[tuple[int, int], int] = {}
    pending: list[tuple[int, int]] = []

    def number_of(state: int, loop: int) -> int:
        if (state, loop) not in numbers:
            numbers[state, loop] = fst.add_state()
            pending.append((state, loop))
        return numbers[state, loop]

    fst.start = number_of(graph.start, 0)
    while pending:
        state, loop = pending.pop()
        own, leaving = numbers[state, loop], 0.0
        if loop:
            fst.add_arc(own, kaldifst.StdArc(loop, 0, float(-log_probs[loop] * SELF_LOOP_SCALE), own))
            leaving = float(-np.log1p(-np.exp(log_probs[loop])) * SELF_LOOP_SCALE)
        final = graph.final(state).value
        if np.isfinite(final):
            fst.set_final(own, final + leaving)
        for arc in kaldifst.ArcIterator(graph, state):
            label = 0 if arc.ilabel in symbols else arc.ilabel
            # What reads nothing enters a state without loops, or a state would loop twice.
            target = number_of(arc.nextstate, _loop_of(pdfs, label) if label else 0)
            fst.add_arc(own, kaldifst.StdArc(label, arc.olabel, arc.weight.value + leaving, target))
    return fst
