"""FSTs as arrays of their arcs, to change millions of arcs at once.

kaldifst gives out and takes one arc at a time, as a Python object; through OpenFst's file format (vector
FSTs of standard arcs) all of them pass at once.

Legend: S states, A arcs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import kaldifst
import numpy as np
from numpy.typing import ArrayLike, NDArray

from speechdp.labels.hmm import IntArray

#: The label that stands for none.
EPSILON = 0

_MAGIC, _VERSION = 2125659606, 2
#: Magic, types of FST and of arcs (length and name), version, flags, properties, start, states, arcs.
_HEADER = struct.Struct("<i i6s i8s i i Q q q q")
#: Properties of a header that only says that all states are in the file and may be changed.
_PROPERTIES = 3
#: A state: cost of ending there, number of arcs.  They follow it.
_STATE = struct.Struct("<f q")
_ARC = np.dtype([("ilabel", "<i4"), ("olabel", "<i4"), ("cost", "<f4"), ("target", "<i4")])

#: Sources, input labels, output labels, costs and targets of arcs.
Arcs: TypeAlias = tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike, ArrayLike]


@dataclass
class FstArrays:
    """The states and arcs of an FST.

    Attributes:
        start: the state that it begins in; -1: none.
        final: cost of ending in each state, (S,) float32; inf: it may not end there.
        source: state that each arc leaves, (A,), ascending where it comes from an FST.
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
        """Take the arcs out of a StdVectorFst; tables of symbols are left out.

        Raises:
            RuntimeError: there is no memory to write it to.
        """
        if fst.input_symbols is not None or fst.output_symbols is not None:
            fst = fst.copy()
            fst.input_symbols = fst.output_symbols = None
        with os.fdopen(os.memfd_create("fst"), "rb") as file:
            if not fst.write(f"/proc/self/fd/{file.fileno()}"):
                raise RuntimeError("kaldifst could not write an FST to memory")
            content = file.read()
        *_, start, num_states, _ = _HEADER.unpack_from(content)
        final, counts = np.empty(num_states, np.float32), np.empty(num_states, np.int64)
        parts, at = [], _HEADER.size
        view = memoryview(content)
        for state in range(num_states):
            final[state], count = _STATE.unpack_from(content, at)
            at += _STATE.size
            counts[state] = count
            if count:
                parts.append(view[at : at + count * _ARC.itemsize])
                at += count * _ARC.itemsize
        arcs = np.frombuffer(b"".join(parts), _ARC)
        del content, view, parts  # of a large grammar, gigabytes
        source = np.repeat(np.arange(num_states, dtype=np.int32), counts)
        columns = (arcs[name].copy() for name in ("ilabel", "olabel", "cost", "target"))
        return cls(start, final, source, *columns)

    @classmethod
    def joined(cls, start: int, final: ArrayLike, parts: Iterable[Arcs]) -> FstArrays:
        """Return the FST that has all arcs of several parts.

        Args:
            start: state that it begins in.
            final: cost of ending in each state, (S,).
            parts: sources, input labels, output labels, costs and targets of some arcs each; of these the
                sources are an array, the others too, or one value for all.
        """
        given = [np.broadcast_arrays(*part) for part in parts]
        whole = [np.concatenate(columns) for columns in zip(*given, strict=True)]
        types = ("int32", "int32", "int32", "float32", "int32")
        columns = (column.astype(kind) for column, kind in zip(whole, types, strict=True))
        return cls(start, np.asarray(final, np.float32), *columns)

    def where(self, keep: NDArray[np.bool_]) -> FstArrays:
        """Return it with the arcs that `keep`, (A,), is true of."""
        names = ("source", "ilabel", "olabel", "cost", "target")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})

    def fst(self) -> Any:
        """Return a StdVectorFst; arcs of a state keep their order."""
        order = np.argsort(self.source, kind="stable")
        arcs = np.empty(len(order), _ARC)
        for name in ("ilabel", "olabel", "cost", "target"):
            arcs[name] = getattr(self, name)[order]
        content, num_states = arcs.view(np.uint8).data, len(self.final)
        ends = (_ARC.itemsize * np.bincount(self.source, minlength=num_states).cumsum()).tolist()
        names = (6, b"vector", 8, b"standard")
        parts: list[bytes | memoryview] = [
            _HEADER.pack(_MAGIC, *names, _VERSION, 0, _PROPERTIES, self.start, num_states, len(arcs))
        ]
        begin = 0
        for final, end in zip(self.final.tolist(), ends, strict=True):
            parts += (_STATE.pack(final, (end - begin) // _ARC.itemsize), content[begin:end])
            begin = end
        with os.fdopen(os.memfd_create("fst"), "wb") as file:
            file.writelines(parts)
            file.flush()
            read = kaldifst.StdVectorFst.read(f"/proc/self/fd/{file.fileno()}")
        if read is None:
            raise RuntimeError("kaldifst could not read an FST from memory")
        return read
