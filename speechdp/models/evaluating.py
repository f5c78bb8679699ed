"""Let a network compute without dropout and the like for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a network in evaluation mode in the block; afterwards each of its parts is in its own mode again.

    Parts may be in other modes than the whole, such as a batch normalisation that is to stay as it is.
    """
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
