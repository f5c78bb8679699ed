"""Passes over many small kernels, captured on a GPU as CUDA graphs and replayed with one call each.

A recurrent layer starts several kernels a step, forward and backward, and a GPU of today has done each before
the host has started the next: the host decides how long a step of training takes.  A graph holds all the
kernels of a pass over inputs of one shape, with the addresses that they read and write.  Replaying it does
exactly what calling the function does, kernel for kernel, in memory of its own.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speechdp.errors import RunError, one_line
from speechdp.process.notices import warn

#: A function of inputs (B, ...) and of parameters, in this order; several outputs are a tuple.
Function = Callable[..., tuple[Tensor, ...]]

#: Kinds of inputs of which one function keeps graphs; more are computed as without: each kind costs memory
#: and, when it is captured, the time of some passes.
MOST_KINDS = 32


_REMEDY = "train with --cuda-graphs off"


class Recorder(Protocol):
    """What turns work on a device into a replay of it.  Tests put one that has no GPU here."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do work once where work will be recorded, for what libraries allocate at first use."""
        ...

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Record work without doing it; return what does it, and the tensors that then hold its results."""
        ...


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream that records on a device.

    Of high priority: torch hands out the same 32 streams of a device again and again, and what another thread
    did on this one would be recorded.  Nobody else here asks for one of the 32 of high priority.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class CudaRecorder:
    """Records into CUDA graphs that share a pool of memory for what they compute in between.

    So each function has a recorder of its own: while one waits to go backward, others go forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _recording_stream(device)

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do work on the stream that records."""
        self._pool = torch.cuda.graph_pool_handle()  # one whose graphs are all gone cannot be used again
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:
            current.wait_stream(self._stream)
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # what that took would stay with the stream

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Record work; other threads may use the GPU meanwhile, as the loader's does.

        Raises:
            RunError: the work cannot be recorded, and torch's memory is in no state to go on with.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = work()
            except BaseException as error:
                _end(graph, error)
                raise
            _end(graph)
        return graph.replay, results


def _end(graph: torch.cuda.CUDAGraph, error: BaseException | None = None) -> None:
    """End a recording.  Raises RunError: it has failed such that torch keeps what training needs back."""
    try:
        graph.capture_end()
    except RuntimeError as failure:
        why = one_line(error or failure, 200)
        raise RunError(f"CUDA graphs cannot be captured ({why}); {_REMEDY}") from failure


class Capturable(nn.Module):
    """A model, or part of one, that can train by graphs."""

    def by_graphs(self, make_recorder: Callable[[], Recorder]) -> Sequence[CapturedFunction]:
        """Train by graphs as soon as they are captured; return the functions that they are captured of.

        `make_recorder` is called for each function.
        """
        raise NotImplementedError


class Graphs:
    """The functions of a model that train by graphs, and when these are captured.

    Capturing takes as long as some steps, and other ranks would wait for it.  So ranks that train together do
    it at the same time, between steps: after the 4th, 16th, 64th, ... step of the process, and at each pause.

    Args:
        functions: of the model.
        device: that they compute on.
    """

    def __init__(self, functions: Sequence[CapturedFunction], device: torch.device) -> None:
        self._functions, self._device = functions, device
        self._num_steps, self._due = 0, _FIRST_CAPTURE
        self._is_told = False

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, make_recorder: Callable[[], Recorder]) -> Graphs:
        """Let all parts of a model that can be captured train by graphs."""
        parts = [module for module in model.modules() if isinstance(module, Capturable)]
        return cls([function for part in parts for function in part.by_graphs(make_recorder)], device)

    def is_due(self) -> bool:
        """Count a step; return whether it is one after which to capture what is new."""
        self._num_steps += 1
        if self._num_steps < self._due:
            return False
        self._due *= _FIRST_CAPTURE
        return True

    def wait_for_pauses(self) -> None:
        """From now on capture at pauses alone: no step is one after which to do it."""
        self._due = sys.maxsize

    @property
    def has_new(self) -> bool:
        """Whether inputs of a kind have come again whose graphs are not there yet."""
        return any(function.has_new for function in self._functions)

    def capture(self) -> None:
        """Capture what has come again since the last time, as long as memory is left for training beside it.

        Where it is not, a line says so once.  Where capturing fails, another does, and training goes on
        without graphs.

        Raises:
            RunError: nor can it go on.
        """
        if not self.has_new:
            return
        has_room = _memory_left(self._device)
        try:
            had_room = True
            for function in self._functions:
                had_room = function.capture(has_room) and had_room
            if not (had_room or self._is_told):
                self._is_told = True
                warn(
                    "not enough GPU memory for more CUDA graphs beside training: batches of other lengths "
                    "are computed without graphs, which is slower; smaller batches leave more memory"
                )
        except RuntimeError as error:
            self.close()
            why = one_line(error, 200)
            warn(f"CUDA graphs cannot be captured, so training continues without them ({why}); {_REMEDY}")

    @property
    def has_given_up(self) -> bool:
        """Whether there are none any more, as capturing has failed."""
        return any(function.has_given_up for function in self._functions)

    def close(self) -> None:
        """Let go of all graphs and their memory; from now on there are none."""
        for function in self._functions:
            function.give_up()


_FIRST_CAPTURE = 4


def _memory_left(device: torch.device) -> Callable[[], bool]:
    """Return what tells whether a device has memory left for all that was ever in use beside what is now."""
    if device.type != "cuda":
        return lambda: True
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # while graphs are captured, torch cannot make room by itself
    beside = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    total = torch.cuda.mem_get_info(device)[1]
    return lambda: torch.cuda.mem_get_info(device)[0] > 1.1 * beside + _SPARE * total


#: Share of a device's memory that graphs leave alone.
_SPARE = 0.05


@dataclass(frozen=True)
class _Kind:
    """What inputs must have in common to be computed by the same graphs.

    Attributes:
        autocast: what autocast computes in; None: it is off.
        inputs: shape, type, and whether a gradient is asked for, of each.
    """

    autocast: torch.dtype | None
    inputs: tuple[tuple[torch.Size, torch.dtype, bool], ...]

    @classmethod
    def of(cls, inputs: Sequence[Tensor]) -> _Kind:
        return cls(_autocast(inputs[0]), tuple((x.shape, x.dtype, x.requires_grad) for x in inputs))

    def make(self, device: torch.device) -> list[Tensor]:
        """Return inputs of this kind, zeros."""
        return [torch.zeros(x, dtype=t, device=device, requires_grad=asks) for x, t, asks in self.inputs]


class CapturedFunction:
    """A differentiable function, replayed as graphs for inputs of the kinds that they have been captured for.

    A kind is shapes, types, and whether gradients are asked for.  Inputs of others are computed by calling
    the function, and so are inputs that come while a pass forward is still to be gone through backward:
    graphs keep what backward needs in one place.  Results and gradients are the same to the bit either way.

    Example::

        captured = CapturedFunction(lambda x, weight: (torch.tanh(x @ weight),), CudaRecorder(device))
        for x in batches:
            (y,) = captured([x], [weight])
            ...
            captured.capture()  # what has come twice

    Args:
        function: returns the same for the same inputs (no dropout) and, of its inputs, writes none.  What
            `torch.autograd.grad` returns is in places that the next pass backward writes over.
        recorder: of the device that its inputs are on.
    """

    def __init__(self, function: Function, recorder: Recorder) -> None:
        self._function, self._recorder = function, recorder
        self._passes: dict[_Kind, _Passes] = {}
        self._seen: Counter[_Kind] = Counter()  # of kinds without graphs
        self._parameters: list[Tensor] = []
        self._places: tuple[tuple[int, bool], ...] = ()
        self._gradients: list[Tensor] = []
        self._under_way: weakref.ref[_Turn] | None = None
        self.has_given_up = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Be None in a copy of the model, or where it is saved: graphs belong to one model on one device."""
        return type(None), ()

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
        if self.has_given_up or not torch.is_grad_enabled() or self._is_under_way:
            return None
        if not any(x.requires_grad for x in (*inputs, *parameters)):
            return None
        self._forget_others(parameters)
        kind = _Kind.of(inputs)
        passes = self._passes.get(kind)
        if passes is None:
            self._seen[kind] += 1
        return passes

    @property
    def _is_under_way(self) -> bool:
        turn = None if self._under_way is None else self._under_way()
        return turn is not None and not turn.is_over

    def _forget_others(self, parameters: Sequence[Tensor]) -> None:
        """Forget graphs that read parameters from elsewhere, or have gradients of others."""
        found = tuple((p.data_ptr(), p.requires_grad) for p in parameters)
        if found != self._places:
            # Other leaves on the same memory: the model's own belong to the stream that training is on.
            self._parameters = [p.detach().requires_grad_(p.requires_grad) for p in parameters]
            self._places = found
            self._seen.update(dict.fromkeys(self._passes, 2))
            self._passes.clear()
            self._gradients = [torch.empty_like(p) for p in parameters if p.requires_grad]

    @property
    def has_new(self) -> bool:
        """Whether `capture` has something to do."""
        return bool(self._new())

    def _new(self) -> list[_Kind]:
        """Return the kinds that have come twice, the most frequent first, as many as there is room for."""
        room = 0 if self.has_given_up else MOST_KINDS - len(self._passes)
        return [kind for kind, times in self._seen.most_common(room) if times > 1]

    def capture(self, has_room: Callable[[], bool] = lambda: True) -> bool:
        """Capture graphs for the kinds that have come twice, as long as there is room for them.

        Returns:
            Whether there was for all.

        Raises:
            RuntimeError: that cannot be done.
        """
        for kind in self._new():
            if not has_room():
                return False
            work = _Work(self._function, kind, self._parameters, self._gradients)
            if not self._passes:
                self._recorder.warm_up(work.both)
            self._passes[kind] = _Passes(work, self._recorder)
            del self._seen[kind]
        return True

    def give_up(self) -> None:
        """Call the function from now on."""
        self.has_given_up = True
        self._passes.clear()
        self._seen.clear()
        self._parameters, self._gradients = [], []


@dataclass(eq=False)
class _Turn:
    """One pass forward through graphs, and the one backward that it waits for."""

    passes: _Passes
    is_over: bool = False


class _Work:
    """Both passes of a function over inputs of one kind: what is recorded.

    Parameters are read where they are.  Inputs and outputs' gradients have places of their own.
    """

    def __init__(
        self, function: Function, kind: _Kind, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        self._function, self._autocast, self.gradients = function, kind.autocast, gradients
        self._device = parameters[0].device
        self.inputs = kind.make(self._device)
        self._parameters = parameters
        self.asks = [x.requires_grad for x in (*self.inputs, *parameters)]
        self._made: tuple[Tensor, ...] = ()
        self.output_gradients: list[Tensor] = []

    def both(self) -> None:
        self.forward()
        self.make_output_gradients()
        self.backward()

    def forward(self) -> list[Tensor]:
        """Return the outputs."""
        dtype = self._autocast
        # Casts that were made before, outside of the graph, would not be there when it is replayed.
        casting = torch.autocast(
            self._device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False
        )
        with casting, torch.enable_grad():
            self._made = self._function(*self.inputs, *self._parameters)
        return [y.detach() for y in self._made]

    def make_output_gradients(self) -> None:
        self.output_gradients = [torch.zeros_like(y) for y in self._made]

    def backward(self) -> list[Tensor]:
        """Put the parameters' gradients in their place, which all kinds share; return the inputs'."""
        leaves = [x for x in (*self.inputs, *self._parameters) if x.requires_grad]
        pairs = [(y, g) for y, g in zip(self._made, self.output_gradients, strict=True) if y.requires_grad]
        driven = driving(*zip(*pairs, strict=True))
        with torch.autocast(self._device.type, enabled=False):
            found = list(torch.autograd.grad(driven, leaves))
        num_inputs = len(found) - len(self.gradients)
        for place, gradient in zip(self.gradients, found[num_inputs:], strict=True):
            place.copy_(gradient)
        return found[:num_inputs]

    def forget(self) -> None:
        """Let go of what backward needed, which graphs may now write over."""
        self._made = ()


class _Passes:
    """Graphs of both passes over inputs of one kind."""

    def __init__(self, work: _Work, recorder: Recorder) -> None:
        self._work = work
        self._replay_forward, self._outputs = recorder.record(work.forward)
        work.make_output_gradients()
        self._replay_backward, self._input_gradients = recorder.record(work.backward)
        work.forget()

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, copies."""
        for place, x in zip(self._work.inputs, inputs, strict=False):  # parameters follow
            place.detach().copy_(x.detach())
        self._replay_forward()
        return tuple(y.clone() for y in self._outputs)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of inputs and parameters, in places that the next pass writes over.

        They are these very tensors: of a tensor that nobody else holds autograd would make a parameter's
        gradient, where it has none yet, without a copy.
        """
        for place, gradient in zip(self._work.output_gradients, gradients, strict=True):
            place.copy_(gradient)
        self._replay_backward()
        found = iter([*self._input_gradients, *self._work.gradients])
        return [next(found) if asks else None for asks in self._work.asks]


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
            raise RuntimeError(f"a second backward pass through CUDA graphs; {_REMEDY}")
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


def rounded_up(length: int) -> int:
    """Return a length to pad to, so that few are left: 8 in each doubling, at most an eighth more.

    Example::

        >>> [rounded_up(n) for n in (5, 16, 17, 31, 100, 1000)]
        [5, 16, 18, 32, 104, 1024]
    """
    step = 1 << max(0, (length - 1).bit_length() - 4)
    return -(-length // step) * step
