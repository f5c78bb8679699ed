"""FSTs as arrays: nothing is lost on the way there and back."""

from __future__ import annotations

import math
import subprocess
import sys

import kaldifst
import numpy as np
import pytest

from speechdp.decode.graphs.fst_arrays import EPSILON, FstArrays


def random_fst(seed: int, num_states: int = 40, num_arcs: int = 120) -> kaldifst.StdVectorFst:
    """Return an FST with states that have no arcs, that end, and that nothing reaches."""
    random = np.random.default_rng(seed)
    fst = kaldifst.StdVectorFst()
    for _ in range(num_states):
        state = fst.add_state()
        if random.random() < 0.3:
            fst.set_final(state, float(np.float32(random.normal())))
    fst.start = int(random.integers(num_states))
    for _ in range(num_arcs):
        labels = (int(x) for x in random.integers(0, 2**31 - 1, 2))
        source, target = (int(x) for x in random.integers(0, num_states, 2))
        fst.add_arc(source, kaldifst.StdArc(*labels, float(np.float32(random.normal())), target))
    return fst


Arc = tuple[int, int, int, float, int]


def arcs_of(fst: kaldifst.StdVectorFst) -> list[Arc]:
    """Return all arcs, one by one: state, labels, cost, next state."""
    return [
        (state, arc.ilabel, arc.olabel, arc.weight.value, arc.nextstate)
        for state in range(fst.num_states)
        for arc in kaldifst.ArcIterator(fst, state)
    ]


def finals_of(fst: kaldifst.StdVectorFst) -> list[float]:
    return [fst.final(state).value for state in range(fst.num_states)]


@pytest.mark.parametrize("seed", range(5))
def test_there_and_back(seed: int) -> None:
    fst = random_fst(seed)
    arrays = FstArrays.of(fst)
    columns = (arrays.source, arrays.ilabel, arrays.olabel, arrays.cost, arrays.target)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == arcs_of(fst)
    assert (arrays.start, arrays.final.tolist()) == (fst.start, finals_of(fst))
    back = arrays.fst()
    assert (back.start, finals_of(back), arcs_of(back)) == (fst.start, finals_of(fst), arcs_of(fst))


@pytest.mark.parametrize("seed", range(5))
def test_a_const_fst_is_the_same_with_its_arcs_sorted(seed: int) -> None:
    fst = random_fst(seed)
    arrays = FstArrays.of(fst)
    const = arrays.const_fst()
    kaldifst.arcsort(fst, sort_type="ilabel")  # labels are all different: there is one order
    assert isinstance(const, kaldifst.StdConstFst) and const.is_ilabel_sorted
    assert str(kaldifst.StdVectorFst(const)) == str(fst)
    assert str(FstArrays.of(const).fst()) == str(fst)
    arrays.ilabel[::3] = EPSILON
    silent = arrays.const_fst()
    counts = [silent.num_input_epsilons(state) for state in range(silent.num_states)]
    assert counts == np.bincount(arrays.source[::3], minlength=len(counts)).tolist() and sum(counts) == 40


def test_without_states_or_arcs() -> None:
    empty = FstArrays.of(kaldifst.StdVectorFst())
    assert empty.start == -1 and empty.fst().num_states == 0 and empty.const_fst().num_states == 0
    alone = random_fst(1, num_arcs=0)
    back = FstArrays.of(alone).fst()
    assert (back.start, finals_of(back)) == (alone.start, finals_of(alone))


def test_what_comes_back_can_be_changed_and_sorted() -> None:
    fst = FstArrays.of(random_fst(2)).fst()
    fst.add_arc(0, kaldifst.StdArc(1, 1, 0.5, fst.add_state()))
    kaldifst.arcsort(fst, sort_type="ilabel")
    assert fst.is_ilabel_sorted and len(arcs_of(fst)) == 121


def test_parts_are_joined_in_the_order_of_their_states() -> None:
    parts = (
        (np.array([1, 0]), np.array([5, 6]), EPSILON, 0.5, np.array([0, 1])),
        (np.array([0]), 7, 8, 0.0, 1),
    )
    fst = FstArrays.joined(1, [math.inf, 2.0], parts).fst()
    assert arcs_of(fst) == [(0, 6, 0, 0.5, 1), (0, 7, 8, 0.0, 1), (1, 5, 0, 0.5, 0)]
    assert fst.start == 1 and finals_of(fst) == [math.inf, 2.0]


def test_some_arcs() -> None:
    fst = random_fst(4)
    arrays = FstArrays.of(fst)
    kept = arrays.where(arrays.cost > 0).fst()
    assert arcs_of(kept) == [arc for arc in arcs_of(fst) if arc[3] > 0]
    assert finals_of(kept) == finals_of(fst)


def test_tables_of_symbols_are_left_out() -> None:
    fst = random_fst(3)
    arcs = arcs_of(fst)
    symbols = kaldifst.SymbolTable()
    symbols.add_symbol("<eps>", 0)
    fst.input_symbols = symbols
    back = FstArrays.of(fst).fst()
    assert arcs_of(back) == arcs and back.input_symbols is None
    assert fst.input_symbols is not None  # of the given one nothing has changed


def run_with_file_limit(program: str) -> str:
    """Return the last line that a Python program prints whose files may have 64 bytes."""
    limited = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n{program}"
    ended = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=False)
    return ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("what", ["FstArrays.of(fst)", "arrays.fst()", "arrays.const_fst()"])
def test_a_limit_on_files_that_holds_in_memory_too_is_told(what: str) -> None:
    program = (
        "import kaldifst, numpy as np\n"
        "from speechdp.decode.graphs.fst_arrays import FstArrays\n"
        "fst = kaldifst.compile('0 1 3 7 0.5\\n0 1 4 8 0.5\\n1', acceptor=False)\n"
        "no, one = np.zeros(9, np.int32), np.ones(9, np.float32)\n"
        "arrays = FstArrays(0, one, no, no, no, one, no)\n"
    )
    assert run_with_file_limit(program + what) == (
        "speechdp.errors.RunError: a decoding graph, in memory: cannot be written (File too large); "
        "raise the limit on the size of a file (ulimit -f), then run again"
    )
