"""Convert FSTs to arrays of their arcs and back, to change millions of arcs at once.

kaldifst passes one arc at a time, as a Python object.  OpenFst's file formats (vector and const FSTs of
standard arcs) pass all of them at once.

Legend: S states, A arcs.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, TypeAlias

import kaldifst
import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechdp.errors import RunError
from speechdp.files import cannot_be_written
from speechdp.labels.hmm import IntArray

#: The label that stands for no label.
EPSILON = 0

_MAGIC, _VERSION = 2125659606, 2
#: After the magic number: type of the FST (length and name).
_TYPE = struct.Struct("<i i")
#: After the type: type of arcs, version, flags, properties, start, states, arcs.
_HEADER = struct.Struct("<i8s i i Q q q q")
_VECTOR, _CONST = b"vector", b"const"
#: OpenFst's properties: all states are in the file; they may be modified; arcs are sorted by input label.
_EXPANDED, _MUTABLE, _ILABEL_SORTED = 1, 2, 1 << 28
_PROPERTIES = {_VECTOR: _EXPANDED | _MUTABLE, _CONST: _EXPANDED | _ILABEL_SORTED}
#: A state of a vector FST is three 4-byte numbers: its final cost, and the number of arcs that follow (8
#: bytes, upper half 0).  An arc is four: input label, output label, cost, target.
_STATE_WORDS, _ARC_WORDS = 3, 4
#: In const FSTs all states come first: final cost, first arc, number of arcs, number of arcs that read
#: nothing, and number of arcs that write nothing.
_CONST_STATE_WORDS = 5

#: Sources, input labels, output labels, costs and targets of arcs.
Arcs: TypeAlias = tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike, ArrayLike]


@dataclass
class FstArrays:
    """The states and arcs of an FST.

    Attributes:
        start: the start state; -1: none.
        final: final cost of each state, (S,) float32; inf: not final.
        source: state that each arc leaves, (A,), ascending if the arrays come from an FST.
        ilabel, olabel, target: of each arc, (A,).
        cost: of each arc, (A,) float32.

    Example:
        >>> fst = kaldifst.compile("0 1 3 7 0.5\\n1", acceptor=False)
        >>> arrays = FstArrays.of(fst)
        >>> arrays.ilabel[:] = 4
        >>> print(str(arrays.fst()).strip())
        0 1 4 7 0.5
        1
    """

    start: int
    final: NDArray[np.float32]
    source: IntArray
    ilabel: IntArray
    olabel: IntArray
    cost: NDArray[np.float32]
    target: IntArray

    @classmethod
    def of(cls, fst: Any) -> FstArrays:
        """Return the arrays of a StdVectorFst or a StdConstFst; symbol tables are dropped.

        Raises:
            RunError: there is not enough memory to write it to.
        """
        if fst.input_symbols is not None or fst.output_symbols is not None:
            fst = fst.copy()
            fst.input_symbols = fst.output_symbols = None
        with _in_memory() as file:
            if not fst.write(f"/proc/self/fd/{file.fileno()}"):
                raise _refusal_of(file)
            _, length = _TYPE.unpack(file.read(_TYPE.size))
            kind = file.read(length)
            *_, start, num_states, _ = _HEADER.unpack(file.read(_HEADER.size))
            numbers = np.frombuffer(file.read(), np.int32)  # gigabytes for a large grammar
        parts = _const_parts if kind == _CONST else _vector_parts
        final, counts, arcs = parts(numbers, num_states)
        ilabel, olabel, cost, target = arcs.T.copy()
        source = np.repeat(np.arange(num_states, dtype=np.int32), counts)
        return cls(start, final.view(np.float32), source, ilabel, olabel, cost.view(np.float32), target)

    @classmethod
    def joined(cls, start: int, final: ArrayLike, parts: Iterable[Arcs]) -> FstArrays:
        """Return the FST that has all arcs of several parts.

        Args:
            start: the start state.
            final: final cost of each state, (S,).
            parts: each has sources, input labels, output labels, costs and targets of some arcs.  The sources
                are an array; the others are arrays, too, or one value for all arcs.
        """
        given = [np.broadcast_arrays(*part) for part in parts]
        whole = [np.concatenate(columns) for columns in zip(*given, strict=True)]
        types = ("int32", "int32", "int32", "float32", "int32")
        columns = (column.astype(kind) for column, kind in zip(whole, types, strict=True))
        return cls(start, np.asarray(final, np.float32), *columns)

    def where(self, keep: NDArray[np.bool_] | NDArray[np.intp]) -> FstArrays:
        """Return the FST with the arcs for which `keep`, (A,), is true, or that it lists, in its order."""
        names = ("source", "ilabel", "olabel", "cost", "target")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})

    def by_source(self) -> FstArrays:
        """Return the FST with its arcs sorted by the state that they leave."""
        return self.where(np.argsort(self.source, kind="stable"))

    def fst(self) -> Any:
        """Return a StdVectorFst; the arcs of a state keep their order."""
        order = np.argsort(self.source, kind="stable")
        num_states, num_arcs = len(self.final), len(order)
        counts = np.bincount(self.source, minlength=num_states)
        content = np.empty(_STATE_WORDS * num_states + _ARC_WORDS * num_arcs, np.int32)
        at = _STATE_WORDS * np.arange(num_states) + _ARC_WORDS * (counts.cumsum() - counts)
        content[at] = self.final.view(np.int32)
        content[at + 1], content[at + 2] = counts, 0
        at = _STATE_WORDS * (self.source[order] + np.int64(1)) + _ARC_WORDS * np.arange(num_arcs)
        for place, column in enumerate(self._columns):
            content[at + place] = column[order]
        return self._read(kaldifst.StdVectorFst, _VECTOR, content)

    def const_fst(self) -> Any:
        """Return a StdConstFst, a fraction of a StdVectorFst in size; arcs of a state by input label."""
        width = np.int64(self.ilabel.max(initial=EPSILON)) + 1
        order = np.argsort(self.source * width + self.ilabel, kind="stable")
        num_states, num_arcs = len(self.final), len(order)
        counts = np.bincount(self.source, minlength=num_states)
        content = np.empty(_CONST_STATE_WORDS * num_states + _ARC_WORDS * num_arcs, np.int32)
        states = content[: _CONST_STATE_WORDS * num_states].reshape(-1, _CONST_STATE_WORDS)
        arcs = content[_CONST_STATE_WORDS * num_states :].reshape(-1, _ARC_WORDS)
        states[:, 0] = self.final.view(np.int32)
        states[:, 1], states[:, 2] = counts.cumsum() - counts, counts
        for place, labels in enumerate((self.ilabel, self.olabel), 3):
            states[:, place] = np.bincount(self.source[labels == EPSILON], minlength=num_states)
        for place, column in enumerate(self._columns):
            arcs[:, place] = column[order]
        return self._read(kaldifst.StdConstFst, _CONST, content)

    @property
    def _columns(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The parts of an arc in files, except its source, as 4-byte numbers."""
        return self.ilabel, self.olabel, self.cost.view(np.int32), self.target

    def _read(self, fst_type: Any, kind: bytes, content: IntArray) -> Any:
        num_states, num_arcs = len(self.final), len(self.source)
        header = _HEADER.pack(
            8, b"standard", _VERSION, 0, _PROPERTIES[kind], self.start, num_states, num_arcs
        )
        with _in_memory() as file:
            file.write(_TYPE.pack(_MAGIC, len(kind)) + kind + header)
            file.write(content.data)
            file.flush()
            read = fst_type.read(f"/proc/self/fd/{file.fileno()}")
        if read is None:
            raise RuntimeError("kaldifst could not read an FST from memory")
        return read


@contextmanager
def _in_memory() -> Iterator[BinaryIO]:
    """Yield a file in memory.  Raises RunError if it cannot grow: limits on files apply to it, too."""
    try:
        with os.fdopen(os.memfd_create("fst"), "w+b") as file:
            yield file
    except OSError as error:
        raise RunError(cannot_be_written("a decoding graph, in memory", error)) from error


def _refusal_of(file: BinaryIO) -> OSError:
    """Return why OpenFst, which does not say it, could not write a file: one more byte fails likewise."""
    try:
        os.pwrite(file.fileno(), b"\0", os.fstat(file.fileno()).st_size)
    except OSError as error:
        return error
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _vector_parts(numbers: IntArray, num_states: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return a vector FST's final costs as stored, numbers of arcs, (S,), and arcs, (A, 4)."""
    at, states = 0, np.empty(num_states, np.int64)
    view = numbers.data
    for state in range(num_states):
        states[state] = at
        at += _STATE_WORDS + _ARC_WORDS * view[at + 1]
    is_arc = np.ones(len(numbers), dtype=bool)
    for place in range(_STATE_WORDS):
        is_arc[states + place] = False
    return numbers[states], numbers[states + 1], numbers[is_arc].reshape(-1, _ARC_WORDS)


def _const_parts(numbers: IntArray, num_states: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return for a const FST the same as `_vector_parts` for a vector FST."""
    states, arcs = np.split(numbers, [_CONST_STATE_WORDS * num_states])
    final, _, counts, *_ = states.reshape(-1, _CONST_STATE_WORDS).T.copy()
    return final, counts, arcs.reshape(-1, _ARC_WORDS)
