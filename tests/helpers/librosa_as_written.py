"""librosa without compilation, which would take 25 s of a core for little computation."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest


def librosa_as_written() -> Any:
    """Return librosa with those of its modules that tests use; skip the test where it is not installed."""
    uncompiled = types.ModuleType("numba")
    vars(uncompiled).update(dict.fromkeys(("jit", "stencil", "vectorize", "guvectorize"), _as_it_is))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numba", uncompiled)
        librosa = pytest.importorskip("librosa")
        for name in ("core", "filters", "sequence"):
            importlib.import_module(f"librosa.{name}")
    return librosa


def _as_it_is(*given: Any, **options: Any) -> Any:
    """Decorate a function with nothing, as `@jit` and as `@jit(...)`."""
    return given[0] if given and callable(given[0]) else lambda function: function
