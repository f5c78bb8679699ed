"""Use torch's optimizers without importing its compiler, which is never asked for anything here.

An optimizer imports `torch._dynamo` to tell it what not to compile: 1.1 s of every rank's start, many files
that all ranks read from one disk at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def made_without_compiler(make: Callable[[], T]) -> T:
    """Return what `make` returns, an optimizer."""
    # The decorator of this method imports the compiler where this attribute is missing, and else calls it.
    add_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    vars(add_group).setdefault("__dynamo_disable", add_group)
    return make()


def step_without_compiler(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer move its parameters by their gradients."""
    plain_step = inspect.unwrap(type(optimizer).step)
    with torch.no_grad():
        plain_step(optimizer)
