"""Memory that returns to the pool when the last tensor on it is gone, and not before."""

from __future__ import annotations

import gc
import threading

import torch

from speechdp.data.loading.buffers import BufferPool


def test_a_tensor_has_the_shape_and_dtype_asked_for() -> None:
    pool = BufferPool()
    for shape, dtype in [((2, 3, 4), torch.float32), ((5,), torch.int64), ((0, 7), torch.float16)]:
        tensor = pool.take(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        tensor.fill_(3)
        assert bool((tensor == 3).all())


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.take((1000, 40), torch.float32)
    address, piece = first.data_ptr(), first[3:5]
    array = first.numpy()
    del first
    assert pool.take((1000, 40), torch.float32).data_ptr() != address
    del piece
    assert pool.take((1000, 40), torch.float32).data_ptr() != address
    del array
    assert pool.take((1000, 40), torch.float32).data_ptr() == address


def test_lent_memory_is_nobody_elses() -> None:
    """Many threads that take, fill and look again."""
    pool = BufferPool()
    wrong = []

    def use(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        held = []
        for turn in range(300):
            size = int(torch.randint(1, 2000, (1,), generator=generator))
            value = 1000 * number + turn
            held.append((pool.take((size, 40), torch.int32).fill_(value), value))
            if len(held) > 3:
                tensor, value = held.pop(0)
                wrong.extend([value] * int((tensor != value).any()))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_is_kept_is_bounded() -> None:
    pool = BufferPool()
    held = [pool.take((10 * size, 100), torch.float32) for size in range(1, 200)]
    del held
    gc.collect()
    assert pool.take((10, 100), torch.float32).numel() == 1000
    assert 0 < len(pool._free) <= 32
