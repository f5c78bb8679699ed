"""Staging: what an exchange gets to see of a tensor, on the CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch

from speechdp.comm.staging import Staged, as_bytes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("load", [False, True])
def test_on_the_cpu_the_tensor_itself_is_exchanged(direct: bool, load: bool) -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    staged = Staged(x, direct=direct, load=load)
    buffer = staged.fetch()
    assert buffer.data_ptr() == x.data_ptr() and buffer.shape == (6,) and not buffer.requires_grad
    buffer += 1
    staged.store()
    assert x.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_bytes_are_a_view_of_any_dtype() -> None:
    x = torch.zeros(2, 2, dtype=torch.bfloat16)
    view = as_bytes(x)
    assert view.dtype == torch.uint8 and view.shape == (8,)
    view.copy_(as_bytes(torch.ones(2, 2, dtype=torch.bfloat16)))
    assert x.tolist() == [[1, 1], [1, 1]]
    assert as_bytes(torch.tensor(1.0)).numel() == 4 and as_bytes(torch.empty(0, 3)).numel() == 0


def _warm_up(x: torch.Tensor) -> None:
    """Leave pinned memory of this size with its allocator: taking it from CUDA may wait for the device."""
    Staged(x).fetch()
    _slow_kernels(x)
    torch.cuda.synchronize()


def _slow_kernels(x: torch.Tensor) -> torch.Tensor:
    """Keep the current stream busy for a while, then return `x` times 2."""
    y = torch.randn(4096, 4096, device=x.device)
    for _ in range(30):
        y = (y @ y).clamp(-1, 1)
    return x * 2 + y[0, 0] * 0


@pytest.mark.gpu
@needs_gpu
def test_values_are_those_after_the_kernels_before_and_before_the_kernels_after() -> None:
    torch.cuda.synchronize()
    for number in range(10):
        x = _slow_kernels(torch.full((1_000_000,), float(number), device="cuda"))
        staged = Staged(x)
        buffer = staged.fetch()
        assert buffer.is_pinned() and torch.all(buffer == 2 * number)
        buffer += 1
        staged.store()
        after = x * 10  # on the current stream, which waits for the copy
        del staged, buffer, x
        torch.empty(1_000_000, device="cuda").fill_(-1)  # takes the memory that was freed, if it may
        assert torch.all(after == 10 * (2 * number + 1))


@pytest.mark.gpu
@needs_gpu
def test_a_tensor_freed_while_it_is_copied_keeps_its_values_until_then() -> None:
    for number in range(10):
        x = _slow_kernels(torch.full((1_000_000,), float(number), device="cuda"))
        staged = Staged(x)
        staged._x = torch.empty(0)
        del x
        torch.empty(1_000_000, device="cuda").fill_(-1)
        assert torch.all(staged.fetch() == 2 * number)


@pytest.mark.gpu
@needs_gpu
def test_what_is_only_overwritten_is_not_waited_for_but_written_after_what_reads_it() -> None:
    x = torch.zeros(1_000_000, device="cuda")
    _warm_up(x)
    y = _slow_kernels(torch.ones(1_000_000, device="cuda"))
    read = y + x
    staged = Staged(x, load=False)
    buffer = staged.fetch()
    assert not torch.cuda.current_stream().query()  # the kernels above are still at work
    buffer.fill_(5)
    staged.store()
    assert torch.all(read == 2) and torch.all(x == 5)


@pytest.mark.gpu
@needs_gpu
def test_a_copy_does_not_wait_behind_kernels_that_came_later() -> None:
    x = torch.ones(1_000_000, device="cuda")
    _warm_up(x)
    staged = Staged(x)
    _slow_kernels(torch.ones(1, device="cuda"))
    assert torch.all(staged.fetch() == 1)
    assert not torch.cuda.current_stream().query()
