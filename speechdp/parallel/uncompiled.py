"""Use torch's optimizers without importing torch's compiler, which is never used here.

An optimizer imports `torch._dynamo` to exclude functions from compilation.  That takes 1.1 s of every rank's
start, and reads many files, which all ranks read from one disk at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def made_without_compiler(make: Callable[[], T]) -> T:
    """Return what `make` returns, an optimizer, without importing the compiler."""
    # This method's decorator imports the compiler if the attribute is missing, else calls the attribute.
    add_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    vars(add_group).setdefault("__dynamo_disable", add_group)
    return make()


def step_without_compiler(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Let an optimizer update its parameters with their gradients.

    Args:
        optimizer: optimizer whose parameters have gradients.
        scaler: scaler that has unscaled the gradients; after an overflow nothing is updated.
    """
    plain_step = inspect.unwrap(type(optimizer).step)

    @torch.no_grad()
    def step() -> None:
        plain_step(optimizer)

    if scaler is None:
        step()
        return
    # A scaler calls the optimizer's own method, which would import the compiler.
    vars(optimizer)["step"] = step
    try:
        scaler.step(optimizer)
    finally:
        del vars(optimizer)["step"]
    scaler.update()
