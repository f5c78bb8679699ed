"""Capture passes over many small kernels as CUDA graphs, and replay each with one call.

A recurrent layer launches several kernels per step, forward and backward, and a current GPU finishes each
before the host has launched the next: the host limits the speed of training.  A graph holds all the kernels
of a pass over inputs of one shape, with the addresses that they read and write.  Replaying it does exactly
what calling the function does, kernel for kernel, in the graph's own memory.
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

#: Kinds of inputs for which one function keeps graphs; other kinds are computed without graphs.  Each kind
#: costs memory and, when it is captured, the time of some passes.
MOST_KINDS = 32


_REMEDY = "train with --cuda-graphs off"


class Recorder(Protocol):
    """Turn work on a device into a replay of it.  Tests replace it by one that needs no GPU."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do the work once where it will be recorded, because libraries allocate memory at first use."""
        ...

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Record work without doing it; return a function that does it, and the tensors for its results."""
        ...


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream that records on a device.

    It has high priority because torch reuses the same 32 streams of a device, and would also record what
    another thread does on this one.  No other code here asks for one of the 32 high-priority streams.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class CudaRecorder:
    """Record into CUDA graphs that share a memory pool for intermediate results.

    Each function therefore has its own recorder: while one waits for its backward pass, others run forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _recording_stream(device)

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do the work on the recording stream."""
        self._pool = torch.cuda.graph_pool_handle()  # a pool whose graphs are all freed cannot be reused
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:
            current.wait_stream(self._stream)
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # cached blocks of this work would stay with the stream

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Record work; other threads, such as the loader's, may use the GPU meanwhile.

        Raises:
            RunError: recording failed, and torch's memory is in a state from which training cannot continue.
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
    """End a recording.  Raises RunError if it fails so that torch keeps memory that training needs."""
    try:
        graph.capture_end()
    except RuntimeError as failure:
        why = one_line(error or failure, 200)
        raise RunError(f"CUDA graphs cannot be captured ({why}); {_REMEDY}") from failure


class Capturable(nn.Module):
    """A model, or part of one, that can train with CUDA graphs."""

    def by_graphs(self, make_recorder: Callable[[], Recorder]) -> Sequence[CapturedFunction]:
        """Train with graphs as soon as they are captured; return the functions to capture.

        Calls `make_recorder` once per function.
        """
        raise NotImplementedError


class Graphs:
    """The functions of a model that train with CUDA graphs, and when to capture them.

    Capturing takes as long as several steps, and other ranks would wait for it.  So ranks that train together
    capture at the same time, between steps: after the 4th, 16th, 64th, ... step of the process, and at each
    pause.

    Args:
        functions: functions of the model.
        device: the device that they compute on.
    """

    def __init__(self, functions: Sequence[CapturedFunction], device: torch.device) -> None:
        self._functions, self._device = functions, device
        self._num_steps, self._due = 0, _FIRST_CAPTURE
        self._has_warned = False

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, make_recorder: Callable[[], Recorder]) -> Graphs:
        """Make all capturable parts of a model train with graphs."""
        parts = [module for module in model.modules() if isinstance(module, Capturable)]
        return cls([function for part in parts for function in part.by_graphs(make_recorder)], device)

    def is_due(self) -> bool:
        """Count a step; return whether to capture new graphs after it."""
        self._num_steps += 1
        if self._num_steps < self._due:
            return False
        self._due *= _FIRST_CAPTURE
        return True

    def wait_for_pauses(self) -> None:
        """From now on capture only at pauses: `is_due` stays False."""
        self._due = sys.maxsize

    @property
    def has_new(self) -> bool:
        """Whether inputs of a kind without graphs have come more than once."""
        return any(function.has_new for function in self._functions)

    def capture(self) -> None:
        """Capture kinds of inputs that have come again, while memory remains for training beside the graphs.

        Warns once if memory runs out.  If capturing fails, warns and training continues without graphs.

        Raises:
            RunError: training cannot continue.
        """
        if not self.has_new:
            return
        has_room = _memory_left(self._device)
        try:
            had_room = True
            for function in self._functions:
                had_room = function.capture(has_room) and had_room
            if not (had_room or self._has_warned):
                self._has_warned = True
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
        """Whether all graphs were dropped: capturing failed, or `close` was called."""
        return any(function.has_given_up for function in self._functions)

    def close(self) -> None:
        """Free all graphs and their memory, and capture no more."""
        for function in self._functions:
            function.give_up()


_FIRST_CAPTURE = 4


def _memory_left(device: torch.device) -> Callable[[], bool]:
    """Return a function that tells whether training still has room beside the graphs.

    It has if the free memory exceeds what training needed at its peak beyond what is allocated now.
    """
    if device.type != "cuda":
        return lambda: True
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # during capture, torch cannot free memory by itself
    beside = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    total = torch.cuda.mem_get_info(device)[1]
    return lambda: torch.cuda.mem_get_info(device)[0] > 1.1 * beside + _SPARE * total


#: Share of a device's memory that graphs must leave free.
_SPARE = 0.05


@dataclass(frozen=True)
class _Kind:
    """The properties that inputs of the same graphs must share.

    Attributes:
        autocast: dtype of autocast; None: it is off.
        inputs: shape, dtype and `requires_grad` of each input.
    """

    autocast: torch.dtype | None
    inputs: tuple[tuple[torch.Size, torch.dtype, bool], ...]

    @classmethod
    def of(cls, inputs: Sequence[Tensor]) -> _Kind:
        return cls(_autocast(inputs[0]), tuple((x.shape, x.dtype, x.requires_grad) for x in inputs))

    def make(self, device: torch.device) -> list[Tensor]:
        """Return zero inputs of this kind."""
        return [torch.zeros(x, dtype=t, device=device, requires_grad=asks) for x, t, asks in self.inputs]


class CapturedFunction:
    """A differentiable function, replayed as CUDA graphs for the kinds of inputs that were captured.

    A kind consists of shapes, dtypes, whether gradients are required, and autocast's dtype.  The function
    itself is called for other kinds, where no gradients are needed, and while an earlier forward pass still
    awaits its backward pass: graphs have only one place for what backward needs.  Results and gradients are
    bitwise the same either way.

    Example::

        captured = CapturedFunction(lambda x, weight: (torch.tanh(x @ weight),), CudaRecorder(device))
        for x in batches:
            (y,) = captured([x], [weight])
            ...
            captured.capture()  # kinds that have come twice

    Args:
        function: returns the same outputs for the same inputs (no dropout), and does not write its inputs.
            Gradients that `torch.autograd.grad` returns for inputs and parameters are overwritten by the next
            backward pass.
        recorder: recorder for the device of the inputs.
    """

    def __init__(self, function: Function, recorder: Recorder) -> None:
        self._function, self._recorder = function, recorder
        self._passes: dict[_Kind, _Passes] = {}
        self._seen: Counter[_Kind] = Counter()  # uses of kinds without graphs
        self._parameters: list[Tensor] = []
        self._places: tuple[tuple[int, bool], ...] = ()
        self._gradients: list[Tensor] = []
        self._under_way: weakref.ref[_Turn] | None = None
        self.has_given_up = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Become None when the model is copied or saved: graphs belong to one model on one device."""
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
        """Return the graphs for such inputs; None if the function is to be called."""
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
        """Drop graphs that read parameters at other addresses, or compute gradients of other parameters."""
        found = tuple((p.data_ptr(), p.requires_grad) for p in parameters)
        if found != self._places:
            # New leaves on the same memory: the model's own belong to the stream that training uses.
            self._parameters = [p.detach().requires_grad_(p.requires_grad) for p in parameters]
            self._places = found
            self._seen.update(dict.fromkeys(self._passes, 2))
            self._passes.clear()
            self._gradients = [torch.empty_like(p) for p in parameters if p.requires_grad]

    @property
    def has_new(self) -> bool:
        """Whether `capture` has anything to capture."""
        return bool(self._new())

    def _new(self) -> list[_Kind]:
        """Return the kinds that have come at least twice, the most frequent first, up to the limit."""
        room = 0 if self.has_given_up else MOST_KINDS - len(self._passes)
        return [kind for kind, times in self._seen.most_common(room) if times > 1]

    def capture(self, has_room: Callable[[], bool] = lambda: True) -> bool:
        """Capture graphs for the kinds that have come at least twice, while there is room.

        Returns:
            Whether there was room for all.

        Raises:
            RuntimeError: capturing failed.
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
        """Drop all graphs, and call the function from now on."""
        self.has_given_up = True
        self._passes.clear()
        self._seen.clear()
        self._parameters, self._gradients = [], []


@dataclass(eq=False)
class _Turn:
    """One forward pass through graphs, and its pending backward pass."""

    passes: _Passes
    is_over: bool = False


class _Work:
    """Both passes of a function over inputs of one kind, as they are recorded.

    Parameters are read in place.  Inputs and output gradients have their own buffers.
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
        # Cached casts from before the capture would be missing when the graph is replayed.
        casting = torch.autocast(
            self._device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False
        )
        with casting, torch.enable_grad():
            self._made = self._function(*self.inputs, *self._parameters)
        return [y.detach() for y in self._made]

    def make_output_gradients(self) -> None:
        self.output_gradients = [torch.zeros_like(y) for y in self._made]

    def backward(self) -> list[Tensor]:
        """Write the parameters' gradients to buffers that all kinds share; return the inputs' gradients."""
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
        """Release what backward needed; graphs may now overwrite it."""
        self._made = ()


class _Passes:
    """The graphs of both passes over inputs of one kind."""

    def __init__(self, work: _Work, recorder: Recorder) -> None:
        self._work = work
        self._replay_forward, self._outputs = recorder.record(work.forward)
        work.make_output_gradients()
        self._replay_backward, self._input_gradients = recorder.record(work.backward)
        work.forget()

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return copies of the outputs."""
        for place, x in zip(self._work.inputs, inputs, strict=False):  # parameters follow
            place.detach().copy_(x.detach())
        self._replay_forward()
        return tuple(y.clone() for y in self._outputs)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of inputs and parameters, in buffers that the next pass overwrites.

        Returns the buffers themselves.  If nothing else held a returned tensor, autograd would take it,
        without a copy, as the gradient of a parameter that has none.
        """
        for place, gradient in zip(self._work.output_gradients, gradients, strict=True):
            place.copy_(gradient)
        self._replay_backward()
        found = iter([*self._input_gradients, *self._work.gradients])
        return [next(found) if asks else None for asks in self._work.asks]


class _Replayed(torch.autograd.Function):
    """The forward and backward pass of one turn."""

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
    """Return a scalar whose backward pass gives the outputs these gradients.

    `torch.autograd.backward(outputs, gradients)` does the same, but first imports torch's compiler, which
    takes seconds.

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
    """Return the dtype of autocast on the device of `x`; None: it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def rounded_up(length: int) -> int:
    """Return a length to pad to, so that few lengths remain: 8 per doubling, at most an eighth longer.

    Example::

        >>> [rounded_up(n) for n in (5, 16, 17, 31, 100, 1000)]
        [5, 16, 18, 32, 104, 1024]
    """
    step = 1 << max(0, (length - 1).bit_length() - 4)
    return -(-length // step) * step
