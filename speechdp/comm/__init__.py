"""Communicators: how N equal ranks exchange tensors, behind one contract (`base.py`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speechdp.comm.base import Communicator, CompletedWork, ReduceOp, Work
    from speechdp.comm.create import Choice, choose_backend, create_communicator

__all__ = [
    "Choice",
    "Communicator",
    "CompletedWork",
    "ReduceOp",
    "Work",
    "choose_backend",
    "create_communicator",
]


def __getattr__(name: str) -> Any:
    # Imported when asked for: base and create need torch, environment, which launchers read, does not.
    for module in ("speechdp.comm.base", "speechdp.comm.create"):
        if name in __all__ and hasattr(importlib.import_module(module), name):
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
