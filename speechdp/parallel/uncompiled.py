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


def step_without_compiler(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Let an optimizer move its parameters by their gradients.

    Args:
        scaler: that has unscaled them; nothing moves where it has found an overflow.
    """
    plain_step = inspect.unwrap(type(optimizer).step)

    @torch.no_grad()
    def step() -> None:
        plain_step(optimizer)

    if scaler is None:
        step()
        return
    # A scaler calls the optimizer's own method, which imports the compiler.
    vars(optimizer)["step"] = step
    try:
        scaler.step(optimizer)
    finally:
        del vars(optimizer)["step"]
    scaler.update()
