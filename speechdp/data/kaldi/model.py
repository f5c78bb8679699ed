"""Read the transition model at the front of a Kaldi acoustic model: the pdf of each transition-id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.kaldi.stream import KaldiStream

#: Limit for any count in a model; a larger one means damage.
_MOST = 1 << 24


#: Destination of a transition that ends its phone.
_END = -1


@dataclass(frozen=True)
class PdfMap:
    """Maps transition-ids to pdfs, and knows which transition-ids may follow which.

    Arrays are (N + 1,) int32; transition-ids count from 1, so the first value of each array is meaningless.

    Attributes:
        path: file of the model.
        pdfs: pdf of each transition-id.
        num_pdfs: 1 + the largest pdf of any state, as Kaldi's TransitionModel::NumPdfs.
        states: transition-state of each transition-id.
        phones: phone of each transition-id.
        sources: HMM state that each transition-id leaves.
        destinations: HMM state that each enters; -1: it ends the phone.
    """

    path: Path
    pdfs: npt.NDArray[np.int32]
    num_pdfs: int
    states: npt.NDArray[np.int32]
    phones: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]
    destinations: npt.NDArray[np.int32]

    @property
    def num_transition_ids(self) -> int:
        """Number of transition-ids (N)."""
        return len(self.pdfs) - 1

    @property
    def may_begin(self) -> npt.NDArray[np.bool_]:
        """Whether a path of the model may begin with each transition-id, (N + 1,)."""
        begins: npt.NDArray[np.bool_] = self.sources == 0
        return begins

    @property
    def may_end(self) -> npt.NDArray[np.bool_]:
        """Whether a path may end with each, (N + 1,): it ends its phone, or loops in a state that can."""
        ends: npt.NDArray[np.bool_] = self.destinations == _END
        loops = self.destinations == self.sources
        ends |= loops & np.isin(self.states, self.states[ends])
        return ends

    def first_fault(self, alignment: npt.NDArray[np.int32]) -> int | None:
        """Return the first frame of an alignment (T,) that fits no path of the model; None: it is a path.

        A path consists of whole phones, each from its first state to its end.  The self-loops of a visit to a
        state come before the transition that leaves it, or after it, the default of Kaldi's graphs
        (hmm/hmm-utils.cc, SplitToPhones).  Contexts are not compared: that would need the tree.
        """
        if len(alignment) == 0:
            return None
        loops = self.destinations[alignment] == self.sources[alignment]
        leaving = np.flatnonzero(~loops)  # frames of transitions that leave their state
        if len(leaving) == 0:
            return 0
        faults = [self._misplaced_loop(alignment, loops, leaving), self._broken_chain(alignment, leaving)]
        return min((fault for fault in faults if fault is not None), default=None)

    def _misplaced_loop(
        self, alignment: npt.NDArray[np.int32], loops: npt.NDArray[np.bool_], leaving: npt.NDArray[np.intp]
    ) -> int | None:
        """Return the first self-loop that does not belong to the visit around it."""
        frames = np.flatnonzero(loops)
        following = np.searchsorted(leaving, frames)
        misplaced = []
        for neighbour in (following - 1, following):  # self-loops after the transition that leaves, or before
            is_there = (neighbour >= 0) & (neighbour < len(leaving))
            other = alignment[leaving[np.clip(neighbour, 0, len(leaving) - 1)]]
            wrong = frames[~is_there | (self.states[other] != self.states[alignment[frames]])]
            if len(wrong) == 0:
                return None
            misplaced.append(int(wrong[0]))
        return max(misplaced)  # from the order that explains more frames

    def _broken_chain(self, alignment: npt.NDArray[np.int32], leaving: npt.NDArray[np.intp]) -> int | None:
        """Return the first transition that does not begin in the state where the previous one ended."""
        ids = alignment[leaving]
        entered = self.destinations[ids]
        wrong = np.empty(len(ids), dtype=bool)
        wrong[0] = self.sources[ids[0]] != 0
        begins = (entered[:-1] == _END) & (self.sources[ids[1:]] == 0)
        continues = (entered[:-1] == self.sources[ids[1:]]) & (self.phones[ids[:-1]] == self.phones[ids[1:]])
        wrong[1:] = ~(begins | continues)
        if wrong.any():
            return int(leaving[np.flatnonzero(wrong)[0]])
        return None if entered[-1] == _END else len(alignment) - 1


@dataclass(frozen=True)
class _Topology:
    """Destinations of the transitions of each HMM state of each phone's entry."""

    entries: list[list[list[int]]]
    entry_of_phone: dict[int, int]


def read_pdf_map(path: Path) -> PdfMap:
    """Read the transition model of final.mdl, text or binary.

    Only the front of the file is read, whatever acoustic model follows.  Kaldi numbers transition-ids by
    state, then by the state's transitions (hmm/transition-model.cc, ComputeDerivedOfProbs).  In topologies
    with <SelfLoopPdfClass>, a self-loop has its own pdf.

    Raises:
        ConfigError: not a Kaldi model, truncated or damaged; names file and byte.
    """
    with KaldiStream(path) as stream:
        numbers: _Numbers = _BinaryNumbers(stream) if stream.is_binary() else _TextNumbers(stream)
        for token in ("<TransitionModel>", "<Topology>"):
            numbers.expect(token)
        topology = numbers.topology()
        kind = stream.word()
        if kind not in ("<Triples>", "<Tuples>"):
            raise stream.failure(f"<Triples> or <Tuples> should stand here, not {kind!r}")
        width = 3 if kind == "<Triples>" else 4
        num_states = numbers.count("the number of states")
        # In a list that grows: a wrong number then costs no memory before the file ends.
        states = [[numbers.integer("a state") for _ in range(width)] for _ in range(num_states)]
        numbers.expect(f"</{kind[1:]}")
        return _number(stream, topology, states)


def _number(stream: KaldiStream, topology: _Topology, states: Sequence[Sequence[int]]) -> PdfMap:
    rows: list[tuple[int, int, int, int, int]] = [(-1, 0, 0, 0, 0)]
    for number, (phone, hmm_state, forward_pdf, *rest) in enumerate(states, 1):
        entry = topology.entry_of_phone.get(phone, -1)
        if not 0 <= entry < len(topology.entries) or not 0 <= hmm_state < len(topology.entries[entry]):
            raise stream.failure(f"state {hmm_state} of phone {phone} is not in the topology")
        self_loop_pdf = rest[0] if rest else forward_pdf
        if min(forward_pdf, self_loop_pdf) < 0 or max(forward_pdf, self_loop_pdf) >= _MOST:
            raise stream.failure(f"pdf {forward_pdf} of phone {phone} cannot be")
        hmm = topology.entries[entry]
        for destination in hmm[hmm_state]:
            if not 0 <= destination < len(hmm):
                raise stream.failure(f"a transition of phone {phone} leads to state {destination}")
            pdf = self_loop_pdf if destination == hmm_state else forward_pdf
            is_end = not hmm[destination]  # the last state of a phone has no transition
            rows.append((pdf, number, phone, hmm_state, _END if is_end else destination))
    if len(rows) == 1:
        raise stream.failure("the model has no transition")
    pdfs, *others = np.array(rows, dtype=np.int32).T.copy()
    return PdfMap(stream.path, pdfs, 1 + max(max(state[2:]) for state in states), *others)


class _Numbers:
    """Reads tokens and numbers; subclasses know how numbers are stored."""

    def __init__(self, stream: KaldiStream) -> None:
        self.stream = stream

    def expect(self, token: str) -> None:
        """Read a token.  Raises ConfigError if it is a different one."""
        found = self.stream.word()
        if found != token:
            raise self.stream.failure(f"{token} should stand here, not {found[:40]!r}")

    def integer(self, what: str) -> int:
        """Read a number."""
        raise NotImplementedError

    def topology(self) -> _Topology:
        """Read the topology up to </Topology>."""
        raise NotImplementedError

    def count(self, what: str) -> int:
        """Read a number that is a count."""
        value = self.integer(what)
        if not 0 <= value < _MOST:
            raise self.stream.failure(f"{what} cannot be {value}")
        return value


class _BinaryNumbers(_Numbers):
    def integer(self, what: str) -> int:
        return self.stream.sized_int32(what)

    def topology(self) -> _Topology:
        phones = self.stream.int32_vector("the phones").tolist()
        entry_of_phone = self.stream.int32_vector("the phones' entries").tolist()
        num_entries = self.integer("the number of entries")
        has_self_loop_pdfs = num_entries == -1
        if has_self_loop_pdfs:
            num_entries = self.integer("the number of entries")
        if not 0 <= num_entries < _MOST:
            raise self.stream.failure(f"the number of entries cannot be {num_entries}")
        entries = [self._entry(has_self_loop_pdfs) for _ in range(num_entries)]
        self.expect("</Topology>")
        known = {phone: entry_of_phone[phone] for phone in phones if 0 <= phone < len(entry_of_phone)}
        return _Topology(entries, known)

    def _entry(self, has_self_loop_pdfs: bool) -> list[list[int]]:
        states = []
        for _ in range(self.count("the number of HMM states")):
            self.integer("a pdf class")
            if has_self_loop_pdfs:
                self.integer("a pdf class")
            destinations = []
            for _ in range(self.count("the number of transitions")):
                destinations.append(self.integer("a transition"))
                if self.stream.take(1, "a probability") != b"\4":
                    raise self.stream.failure("a probability is no 4-byte number")
                self.stream.take(4, "a probability")
            states.append(destinations)
        return states


class _TextNumbers(_Numbers):
    def integer(self, what: str) -> int:
        word = self.stream.word()
        try:
            return int(word)
        except ValueError as error:
            raise self.stream.failure(f"{what} should stand here, not {word[:40]!r}") from error

    def topology(self) -> _Topology:
        topology = _Topology([], {})
        while (word := self.stream.word()) == "<TopologyEntry>":
            self.expect("<ForPhones>")
            while (phone := self.stream.word()) != "</ForPhones>":
                if not phone.isdigit():
                    raise self.stream.failure(f"the number of a phone should stand here, not {phone[:40]!r}")
                topology.entry_of_phone[int(phone)] = len(topology.entries)
            topology.entries.append(self._entry())
        if word != "</Topology>":
            raise self.stream.failure(f"</Topology> should stand here, not {word[:40]!r}")
        return topology

    def _entry(self) -> list[list[int]]:
        states: list[list[int]] = []
        while (word := self.stream.word()) != "</TopologyEntry>":
            if word == "<State>":
                self.integer("the number of a state")
                states.append([])
            elif word in ("<PdfClass>", "<ForwardPdfClass>", "<SelfLoopPdfClass>", "<Final>"):
                self.integer(f"the number after {word}")
            elif word == "<Transition>" and states:
                states[-1].append(self.integer("the destination of a transition"))
                self.stream.word()
            elif word != "</State>":
                raise self.stream.failure(f"{word[:40]!r} has no place in a topology")
        return states
