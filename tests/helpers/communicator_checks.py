"""Checks that every communicator must pass, with ranks as threads or as processes.

Each function is collective and takes this rank's communicator; `CHECKS` lists them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from speechdp.comm.base import Communicator, ReduceOp
from speechdp.errors import CommunicationError


def _everyone(comm: Communicator) -> list[int]:
    return list(range(1, comm.size + 1))


def ranks_are_distinct_and_complete(comm: Communicator) -> None:
    assert comm.allgather_object(comm.rank) == list(range(comm.size))
    assert comm.allgather_object(comm.size) == [comm.size] * comm.size
    assert comm.local_rank == comm.rank  # all ranks of these tests are on one host


def allreduce_combines_in_place(comm: Communicator) -> None:
    expected = {ReduceOp.SUM: sum(_everyone(comm)), ReduceOp.MAX: comm.size, ReduceOp.MIN: 1}
    for dtype in sorted(comm.reducible, key=str):
        for op, value in expected.items():
            x = torch.full((2, 3), comm.rank + 1, dtype=dtype)
            returned = comm.allreduce(x, name=f"{dtype}-{op.value}", op=op)
            assert returned is x
            assert x.dtype == dtype and x.shape == (2, 3)
            assert x.tolist() == [[value] * 3] * 2, (dtype, op)


def allreduce_sums_what_needs_precision(comm: Communicator) -> None:
    # Above 2^24 and 2^53: a sum that took a detour through a narrower type would show.
    x = torch.tensor([(1 << 58) + comm.rank])
    assert comm.allreduce(x, name="int64").item() == (1 << 58) * comm.size + sum(range(comm.size))
    y = torch.tensor([2.0**30 + comm.rank + 1], dtype=torch.float64)
    assert comm.allreduce(y, name="float64").item() == 2.0**30 * comm.size + sum(_everyone(comm))


def allreduce_equals_rank_order_sum(comm: Communicator) -> None:
    # Odd lengths leave a tail in every ring; 40,001 crosses Open MPI's change of algorithm.
    for num in (1, 3, 1023, 40_001):
        parts = [torch.randn(num, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)]
        x = parts[comm.rank].clone()
        comm.allreduce(x, name=f"random-{num}")
        torch.testing.assert_close(x.double(), sum(p.double() for p in parts), rtol=0, atol=1e-5)
        digests = comm.allgather_object([*x.double().tolist()[:50], x.double().sum().item()])
        assert all(d == digests[0] for d in digests), "the ranks hold different bits"


def unknown_dtypes_are_refused(comm: Communicator) -> None:
    refused = {torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.uint8} - comm.reducible
    assert torch.bool in refused
    for dtype in refused:
        with pytest.raises(CommunicationError, match=f"cannot sum {str(dtype).split('.')[1]}.*'grad'"):
            comm.allreduce(torch.ones(2, dtype=dtype), name="grad")


def non_contiguous_tensors_are_refused(comm: Communicator) -> None:
    x = torch.ones(4, 4)[:, 1]
    with pytest.raises(CommunicationError, match="'column' is not contiguous"):
        comm.allreduce(x, name="column")
    with pytest.raises(CommunicationError, match="'column' is not contiguous"):
        comm.broadcast(x, name="column")


def empty_and_scalar_tensors_pass(comm: Communicator) -> None:
    empty = torch.empty(0)
    assert comm.allreduce(empty, name="empty").numel() == 0
    assert comm.broadcast(empty, name="empty", root=comm.size - 1).numel() == 0
    scalar = torch.tensor(comm.rank + 1.0)
    assert comm.allreduce(scalar, name="scalar").item() == sum(_everyone(comm))
    assert scalar.shape == ()


def parts_of_a_buffer_leave_the_rest_alone(comm: Communicator) -> None:
    flat = torch.ones(100)
    comm.allreduce(flat[10:20], name="slice")
    assert flat.sum().item() == 90 + 10 * comm.size
    leaf = torch.ones(5, requires_grad=True)
    comm.allreduce(leaf, name="parameter")
    assert leaf.requires_grad and leaf.is_leaf and leaf.tolist() == [comm.size] * 5


def many_exchanges_may_be_under_way(comm: Communicator) -> None:
    num = 20
    buffers = [torch.full((1000 + i,), float(comm.rank + i)) for i in range(num)]
    works = [comm.allreduce_async(b, name=f"bucket-{i}") for i, b in enumerate(buffers)]
    for i in reversed(range(num)):  # waiting in another order is allowed
        works[i].wait()
        works[i].wait()  # and so is waiting twice
        assert torch.all(buffers[i] == sum(range(comm.size)) + i * comm.size)


def names_may_be_used_again(comm: Communicator) -> None:
    for step in range(5):
        x = torch.full((8,), float(step))
        comm.allreduce(x, name="again")
        assert x.tolist() == [float(step * comm.size)] * 8


def exchanges_of_one_name_may_be_under_way(comm: Communicator) -> None:
    # As those of two runs of a script are, whose steps take turns.
    for _ in range(2):
        first, second = torch.tensor([1.0]), torch.tensor([10.0, 20.0])
        works = [comm.allreduce_async(x, name="twice") for x in (first, second)]
        works[0].wait()
        third = torch.tensor([float(comm.rank)])
        works.append(comm.allreduce_async(third, name="twice", op=ReduceOp.MAX))
        for work in works:
            work.wait()
        assert first.tolist() == [comm.size] and second.tolist() == [10 * comm.size, 20 * comm.size]
        assert third.item() == comm.size - 1


def broadcast_moves_the_bits_of_any_root(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16, torch.bool):
        for root in range(comm.size):
            values = torch.arange(7).to(dtype) if comm.rank == root else torch.zeros(7).to(dtype)
            comm.broadcast(values, name=f"b-{dtype}-{root}", root=root)
            assert torch.equal(values, torch.arange(7).to(dtype)), (dtype, root)
    nan = torch.full((3,), math.nan if comm.rank == 0 else 0.0)
    assert comm.broadcast(nan, name="nan").isnan().all()


def objects_of_any_size_come_back_in_rank_order(comm: Communicator) -> None:
    values = comm.allgather_object({"rank": comm.rank, "text": "ßπ語😀" * comm.rank * 1000, "none": None})
    assert [v["rank"] for v in values] == list(range(comm.size))
    assert [len(v["text"]) for v in values] == [4000 * r for r in range(comm.size)]
    assert values[-1]["text"] == "ßπ語😀" * (comm.size - 1) * 1000
    numbers = comm.allgather_object([math.nan, math.inf, -0.0, 1e-300, 0.1, 2**70])
    for value in numbers:
        assert math.isnan(value[0]) and value[1:] == [math.inf, 0.0, 1e-300, 0.1, 2**70]
    with pytest.raises(TypeError):
        comm.allgather_object(object())  # nothing that would need pickle


def objects_are_broadcast_from_any_root(comm: Communicator) -> None:
    for root in range(comm.size):
        assert comm.broadcast_object(["from", comm.rank], root=root) == ["from", root]


def barrier_waits_for_the_last_without_burning_the_core(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.5)
    begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
    comm.barrier()
    ended_s, cpu_s = time.monotonic(), time.thread_time() - begun_cpu_s
    # All are on one host, which has one such clock; how late each comes is the machine's affair.
    assert ended_s >= max(comm.allgather_object(begun_s))
    if comm.rank != comm.size - 1:
        assert cpu_s < max(0.2, 0.4 * (ended_s - begun_s))


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    ranks_are_distinct_and_complete,
    allreduce_combines_in_place,
    allreduce_sums_what_needs_precision,
    allreduce_equals_rank_order_sum,
    unknown_dtypes_are_refused,
    non_contiguous_tensors_are_refused,
    empty_and_scalar_tensors_pass,
    parts_of_a_buffer_leave_the_rest_alone,
    many_exchanges_may_be_under_way,
    names_may_be_used_again,
    exchanges_of_one_name_may_be_under_way,
    broadcast_moves_the_bits_of_any_root,
    objects_of_any_size_come_back_in_rank_order,
    objects_are_broadcast_from_any_root,
    barrier_waits_for_the_last_without_burning_the_core,
)
