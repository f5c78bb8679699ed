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
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # By `train`, in which networks may do more than note their mode, such as take merged weights apart; a
        # part comes after the whole, whose mode it would take.
        for part, mode in modes:
            if part.training != mode:
                part.train(mode)
