"""CUDA without a GPU: tensors without data that are on a device, streams and events that record their order.

`load` is called before anything imports torch; `fake_cuda` then makes torch believe in a GPU, in this process
alone.  Operations that mix tensors of the host with those of the device raise, as CUDA's would.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: What streams and events were told, in order: "copy: wait compute", ...
Log = list[str]


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def load(library: Path) -> None:
    """Load the device that `device.cpp` was compiled to."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


class Stream:
    """Records the operations that are queued on it."""

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name}: waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name}: waits for {event.name}")


class Event:
    """Named by the stream that it is recorded on."""

    def __init__(self, log: Log) -> None:
        self.log, self.name = log, "an event never recorded"

    def record(self, stream: Stream) -> None:
        self.name = f"event of {stream.name}"
        self.log.append(f"{stream.name}: event")

    def synchronize(self) -> None:
        self.log.append(f"host: waits for {self.name}")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@contextlib.contextmanager
def fake_cuda() -> Iterator[Log]:
    """Give torch a GPU for the block, whose tensors have no data; yield what its streams recorded.

    A number that is read from a tensor is 1, and no element of a mask is 0.  Tensors without data are for one
    thread at a time: whoever lets a `JobThread` begin waits until its job is done.
    """
    from unittest import mock  # noqa: PLC0415 (after `load`, as all below)

    import torch  # noqa: PLC0415
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    from speechdp.comm.background import JobThread  # noqa: PLC0415
    from speechdp.parallel import flat_buffer  # noqa: PLC0415

    class Mode(FakeTensorMode):
        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                dtype = args[0].dtype
                return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
            if func is torch.ops.aten.nonzero.default:
                x = args[0]
                return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)
            # torch knows no shapes of these two.
            if func is torch.ops.aten._thnn_fused_gru_cell.default:
                hidden = args[2]
                return torch.empty_like(hidden), hidden.new_empty(len(hidden), 5 * hidden.shape[1])
            if func is torch.ops.aten._thnn_fused_gru_cell_backward.default:
                gradient = args[0]
                gates = [gradient.new_empty(len(gradient), 3 * gradient.shape[1]) for _ in range(2)]
                biases = [gates[0].new_empty(gates[0].shape[1]) for _ in range(2)]
                return *gates, torch.empty_like(gradient), *biases
            return super().dispatch(func, types, args, kwargs)

    log: Log = []
    compute = Stream(log, "compute")
    chosen_streams = threading.local()  # each thread chooses its own, and begins with that of all
    made = iter(f"side {number}" for number in range(1000))

    def current() -> Stream:
        return getattr(chosen_streams, "last", compute)

    @contextlib.contextmanager
    def stream(chosen: Stream | None) -> Iterator[None]:
        before = current()
        chosen_streams.last = before if chosen is None else chosen
        try:
            yield
        finally:
            chosen_streams.last = before

    def copy_(x: Any, source: Any, non_blocking: bool = False) -> Any:
        if x.is_cuda != source.is_cuda:
            direction = "to the device" if x.is_cuda else "to the host"
            log.append(f"{current().name}: copy {direction}{', not waiting' if non_blocking else ''}")
        return plain_copy(x, source, non_blocking)

    def tolist(x: Any) -> Any:
        return [tolist(row) for row in x] if x.dim() else x.item()

    mode, make_thread, start_thread = Mode(), JobThread.__init__, JobThread.start
    over = weakref.WeakKeyDictionary[JobThread, threading.Semaphore]()

    def make_here(thread: JobThread, name: str, job: Callable[[], None]) -> None:
        over[thread] = is_over = threading.Semaphore(0)

        def alone() -> None:
            try:
                with mode:
                    job()
            finally:
                is_over.release()

        make_thread(thread, name, alone)

    def start_and_wait(thread: JobThread) -> None:
        start_thread(thread)
        over[thread].acquire()

    plain_copy = torch.Tensor.copy_
    stand_ins: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "is_bf16_supported": lambda including_emulation=True: True,
            "Stream": lambda device=None: Stream(log, next(made)),
            "Event": lambda **options: Event(log),
            "current_stream": lambda device=None: current(),
            "current_device": lambda: 0,
            "stream": stream,
            "is_current_stream_capturing": lambda: False,
        },
        torch.Tensor: {
            "copy_": copy_,
            "data_ptr": lambda x: x.untyped_storage().data_ptr(),
            "tolist": tolist,
            "record_stream": lambda x, s: log.append(f"memory kept for {s.name}"),
        },
        torch.UntypedStorage: {"data_ptr": lambda storage: storage._cdata},
        flat_buffer: {"from_dlpack": lambda x: x},
        JobThread: {"__init__": make_here, "start": start_and_wait},
    }
    with contextlib.ExitStack() as stack:
        for owner, names in stand_ins.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mode)
        yield log
