"""Make models without weights: to count their parameters, or to load weights from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Uninitialised(TorchFunctionMode):
    """Skip initialisation: on the meta device it would import torch's compiler, which takes a second."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__module__", "") == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


@contextmanager
def without_weights() -> Iterator[None]:
    """Give models that are made in the block sizes, but no memory."""
    with torch.device("meta"), _Uninitialised():
        yield
