"""Passes over many small kernels, captured on a GPU as CUDA graphs and replayed with one call each.

A recurrent layer starts several kernels a step, forward and backward, and a GPU of today has done each before
the host has started the next: the host decides how long a step of training takes.  A graph holds all the
kernels of a pass over inputs of one shape, with the addresses that they read and write.  Replaying it does
exactly what calling the function does, kernel for kernel, in memory of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speechdp.process.notices import warn

#: A function of inputs (B, ...) and of parameters, in this order; several outputs are a tuple.
Function = Callable[..., tuple[Tensor, ...]]

#: Kinds of inputs of which one function keeps graphs; more are computed as without: each kind costs memory
#: and, when it is captured, the time of some passes.
MOST_KINDS = 32


class Recorder(Protocol):
    """What turns work on a device into a replay of it.  Tests put one that has no GPU here."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do work once where work will be recorded, for what libraries allocate at first use."""
        ...

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Record work without doing it; return what does it, and the tensors that then hold its results."""
        ...


class CudaRecorder:
    """Records into CUDA graphs that share memory for what they compute in between.

    So each function has one of its own: while one waits to go backward, others go forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do work on the stream that records."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Record work; other threads may use the GPU meanwhile, as the loader's does."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = work()
            finally:
                graph.capture_end()
        return graph.replay, results


class Capturable(nn.Module):
    """A model, or part of one, that trains by graphs where it is asked to."""

    def capture(self, make_recorder: Callable[[], Recorder]) -> None:
        """Train by graphs from now on; `make_recorder` is called for each function that is captured."""
        raise NotImplementedError


def train_by_graphs(model: nn.Module, device: torch.device) -> None:
    """Let all parts of a model that can be captured train by CUDA graphs on this device."""
    for module in model.modules():
        if isinstance(module, Capturable):
            module.capture(lambda: CudaRecorder(device))


class CapturedFunction:
    """A differentiable function, replayed as graphs for inputs of a kind that has been seen before.

    A kind is shapes, types, and whether gradients are asked for.  The first inputs of a kind are computed as
    without graphs, which makes libraries ready for them.  So are those that come while a pass forward is
    still to be gone through backward: graphs keep what backward needs in one place.  Results and gradients
    are the same to the bit either way.

    Example::

        captured = CapturedFunction(lambda x, weight: (torch.tanh(x @ weight),), CudaRecorder(device))
        (y,) = captured([x], [weight])

    Args:
        function: returns the same for the same inputs (no dropout) and, of its inputs, writes none.
        recorder: of the device that its inputs are on.
    """

    def __init__(self, function: Function, recorder: Recorder) -> None:
        self._function, self._recorder = function, recorder
        self._passes: dict[object, _Passes | None] = {}  # None: seen once
        self._parameters: tuple[tuple[int, bool], ...] = ()
        self._gradients: list[Tensor] = []
        self._under_way: weakref.ref[_Turn] | None = None
        self._has_failed = False

    def __call__(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the function's outputs."""
        passes = self._find(inputs, parameters)
        if passes is None:
            return self._function(*inputs, *parameters)
        turn = _Turn(passes)
        self._under_way = weakref.ref(turn)
        outputs: tuple[Tensor, ...] = _Replayed.apply(turn, *inputs, *parameters)  # type: ignore[no-untyped-call]
        return outputs

    def _find(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> _Passes | None:
        """Return the graphs for such inputs; None where the function is to be called."""
        if self._has_failed or not torch.is_grad_enabled() or self._is_under_way:
            return None
        self._forget_others(parameters)
        kind = (_autocast(inputs[0]), *((x.shape, x.dtype, x.requires_grad) for x in inputs))
        if kind not in self._passes:
            if len(self._passes) < MOST_KINDS:
                self._passes[kind] = None
            return None
        passes = self._passes[kind]
        if passes is None:
            passes = self._passes[kind] = self._capture(inputs, parameters)
        return passes

    @property
    def _is_under_way(self) -> bool:
        turn = None if self._under_way is None else self._under_way()
        return turn is not None and not turn.is_over

    def _forget_others(self, parameters: Sequence[Tensor]) -> None:
        """Forget graphs that read parameters from elsewhere, or have gradients of others."""
        found = tuple((p.data_ptr(), p.requires_grad) for p in parameters)
        if found != self._parameters:
            self._parameters = found
            self._passes.clear()
            self._gradients = [torch.empty_like(p) for p in parameters if p.requires_grad]

    def _capture(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> _Passes | None:
        try:
            passes = _Passes(
                self._function,
                self._recorder,
                inputs,
                parameters,
                self._gradients,
                is_first=not any(self._passes.values()),
            )
        except RuntimeError as error:  # no memory, or an operation that cannot be captured
            self._has_failed = True
            self._passes.clear()
            said = " ".join(str(error).split())[:200]
            warn(f"CUDA graphs cannot be captured, and training goes on without ({said}); --cuda-graphs off")
            return None
        return passes


@dataclass(eq=False)
class _Turn:
    """One pass forward through graphs, and the one backward that it waits for."""

    passes: _Passes
    is_over: bool = False


class _Passes:
    """Graphs of both passes over inputs of one kind.

    Parameters are read where they are.  Inputs, outputs' gradients and results have places of their own.
    """

    def __init__(
        self,
        function: Function,
        recorder: Recorder,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        *,
        is_first: bool,
    ) -> None:
        self._function, self._parameter_gradients = function, gradients
        self._casting = _autocast_again(inputs[0])
        self._inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        # Other leaves on the same memory: those of the model belong to the stream that training is on.
        self._parameters = [p.detach().requires_grad_(p.requires_grad) for p in parameters]
        self._asks = [x.requires_grad for x in (*inputs, *parameters)]
        self._made: tuple[Tensor, ...] = ()
        if is_first:
            recorder.warm_up(self._both)
        self._replay_forward, self._outputs = recorder.record(self._forward)
        self._output_gradients = [torch.zeros_like(y) for y in self._outputs]
        self._replay_backward, self._input_gradients = recorder.record(self._backward)
        self._made = ()  # what backward needed, and may now be written over

    def _both(self) -> None:
        self._output_gradients = [torch.zeros_like(y) for y in self._forward()]
        self._backward()

    def _forward(self) -> list[Tensor]:
        with self._casting(), torch.enable_grad():
            self._made = self._function(*self._inputs, *self._parameters)
        return [y.detach() for y in self._made]

    def _backward(self) -> list[Tensor]:
        """Put the parameters' gradients in their place, which all kinds share; return the inputs'."""
        leaves = [x for x in (*self._inputs, *self._parameters) if x.requires_grad]
        pairs = [(y, g) for y, g in zip(self._made, self._output_gradients, strict=True) if y.requires_grad]
        driven = driving(*zip(*pairs, strict=True))
        with torch.autocast(driven.device.type, enabled=False):  # which a pass forward has around it
            found = list(torch.autograd.grad(driven, leaves))
        num_inputs = len(found) - len(self._parameter_gradients)
        for place, gradient in zip(self._parameter_gradients, found[num_inputs:], strict=True):
            place.copy_(gradient)
        return found[:num_inputs]

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, copies."""
        for place, x in zip(self._inputs, inputs, strict=False):  # parameters follow
            place.detach().copy_(x.detach())
        self._replay_forward()
        return tuple(y.clone() for y in self._outputs)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of inputs and parameters, in places that the next pass writes over."""
        for place, gradient in zip(self._output_gradients, gradients, strict=True):
            place.copy_(gradient)
        self._replay_backward()
        found = iter([*self._input_gradients, *self._parameter_gradients])
        return [next(found).detach() if asks else None for asks in self._asks]


class _Replayed(torch.autograd.Function):
    """Both passes of a turn."""

    @staticmethod
    def forward(ctx: Any, turn: _Turn, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.turn = turn
        return turn.passes.forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        turn = ctx.turn
        if turn.is_over:
            raise RuntimeError("a second pass backward through CUDA graphs; train with --cuda-graphs off")
        turn.is_over = True
        return None, *turn.passes.backward(gradients)


def driving(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return a scalar whose pass backward drives the outputs with these gradients.

    `torch.autograd.backward(outputs, gradients)` does the same, but imports torch's compiler first: seconds.

    Example::

        driving([y], [gradient_of_y]).backward()
    """
    with torch.enable_grad():
        scalar: Tensor = _Driving.apply(tuple(gradients), *outputs)  # type: ignore[no-untyped-call]
    return scalar


class _Driving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_scalar: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


def _autocast(x: Tensor) -> torch.dtype | None:
    """Return what autocast computes in on the device of `x`; None: it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _autocast_again(x: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes the autocast that is in force now, but never from casts that were made before."""
    kind, dtype = x.device.type, _autocast(x)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def rounded_up(length: int) -> int:
    """Return a length to pad to, so that few are left: 8 in each doubling, at most an eighth more.

    Example::

        >>> [rounded_up(n) for n in (5, 16, 17, 31, 100, 1000)]
        [5, 16, 18, 32, 104, 1024]
    """
    step = 1 << max(0, (length - 1).bit_length() - 4)
    return -(-length // step) * step
