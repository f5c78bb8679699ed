"""Many tensors as one vector: nothing lost, nothing split, nothing moved that cuDNN wants to stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from speechdp.errors import ConfigError
from speechdp.parallel.flat_buffer import FlatBuffer

shapes = st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3), min_size=1, max_size=8)


def numbered(shapes: list[list[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Make tensors whose elements are 1, 2, 3, ... throughout."""
    tensors, first = [], 1
    for shape in shapes:
        size = int(torch.Size(shape).numel())
        tensors.append(torch.arange(first, first + size, dtype=dtype).view(shape))
        first += size
    return tensors


@given(shapes, st.integers(0, 3), st.sampled_from([torch.float32, torch.float64, torch.float16]))
def test_views_hold_the_values_and_share_the_vector(
    shapes: list[list[int]], num_extra: int, dtype: torch.dtype
) -> None:
    tensors = numbered(shapes, dtype)
    flat = FlatBuffer(tensors, num_extra=num_extra)
    assert flat.extra.numel() == num_extra
    assert flat.values.numel() + num_extra == flat.whole.numel()
    for tensor, view, place in zip(tensors, flat.views, flat.places, strict=True):
        assert torch.equal(view, tensor) and view.shape == tensor.shape == place.shape
        if view.numel():
            assert view.data_ptr() == flat.whole[place.offset :].data_ptr()
            assert view.data_ptr() % 64 == flat.whole.data_ptr() % 64
    # Every value once, the rest is padding.
    total = sum(t.numel() for t in tensors)
    held = flat.values[flat.values != 0].tolist()
    assert sorted(held) == [float(x) for x in torch.arange(1, total + 1, dtype=dtype)]
    assert not flat.extra.any()
    flat.whole.fill_(2.0)
    assert all((view == 2.0).all() for view in flat.views)


@given(shapes, st.integers(1, 200))
def test_every_element_is_in_one_bucket_and_no_tensor_is_split(
    shapes: list[list[int]], bucket_bytes: int
) -> None:
    flat = FlatBuffer(numbered(shapes), num_extra=1)
    buckets = flat.buckets(bucket_bytes)
    for bucket in buckets:
        bucket.piece.add_(1000.0)  # in place: the pieces are the vector itself
    assert torch.equal(flat.whole.div(1000, rounding_mode="floor"), torch.ones_like(flat.whole))
    assert sorted(i for bucket in buckets for i in bucket.tensor_indices) == list(range(len(shapes)))
    address = flat.whole.data_ptr()
    for bucket in buckets:
        start = (bucket.piece.data_ptr() - address) // 4 if bucket.piece.numel() else None
        for index in bucket.tensor_indices:
            place = flat.places[index]
            if start is not None and place.num_elements:
                assert start <= place.offset
                assert place.offset + place.num_elements <= start + bucket.piece.numel()
    if flat.extra.numel():
        assert buckets[0].piece.numel() and torch.equal(buckets[0].piece[-1:], flat.extra)


@given(shapes, st.integers(64, 400))
def test_a_bucket_is_too_large_only_where_one_tensor_is(shapes: list[list[int]], bucket_bytes: int) -> None:
    flat = FlatBuffer(numbered(shapes), num_extra=1)
    for bucket in flat.buckets(bucket_bytes):
        held = [index for index in bucket.tensor_indices if flat.places[index].num_elements]
        assert bucket.piece.numel() * 4 <= bucket_bytes or len(held) <= 1


def test_buckets_follow_the_order_of_backward_and_a_large_tensor_has_one_to_itself() -> None:
    flat = FlatBuffer(numbered([[16], [100], [16], [7]]), num_extra=1)
    buckets = flat.buckets(4 * 48)
    assert [bucket.tensor_indices for bucket in buckets] == [(3, 2), (1,), (0,)]
    assert [bucket.piece.numel() for bucket in buckets] == [16 + 16 + 1, 112, 16]


def test_one_bucket_holds_all_where_it_is_large_enough() -> None:
    flat = FlatBuffer(numbered([[3], [0], [], [2, 2]]), num_extra=1)
    (bucket,) = flat.buckets(2**20)
    assert bucket.piece.numel() == flat.whole.numel()


def test_tensors_of_one_storage_keep_their_relative_places() -> None:
    """As cuDNN's packed LSTM weights after flatten_parameters."""
    packed = torch.arange(100, dtype=torch.float32)
    weights = [packed[40:60].view(4, 5), packed[10:30].view(5, 4), packed[60:65], packed[70:100]]
    flat = FlatBuffer([torch.full((3,), -1.0), *weights], num_extra=1)
    for view, weight in zip(flat.views[1:], weights, strict=True):
        assert torch.equal(view, weight)
    offsets = [place.offset for place in flat.places[1:]]
    assert [offset - offsets[1] for offset in offsets] == [30, 0, 50, 60]
    # cuDNN recognises packed weights by their storage: one of their own, that begins where they do.
    storages = {view.untyped_storage().data_ptr() for view in flat.views[1:]}
    assert storages == {flat.views[2].data_ptr()}
    assert flat.views[2].storage_offset() == 0
    assert flat.views[0].untyped_storage().data_ptr() not in storages
    # The gap between them (30:40) belongs to no tensor, is zero, and is exchanged like the rest.
    assert flat.values[offsets[1] + 20 : offsets[1] + 30].tolist() == [0.0] * 10


def test_all_weights_of_an_lstm_keep_their_values() -> None:
    lstm = nn.LSTM(3, 4, 2, bidirectional=True)
    parameters = [p.detach() for p in lstm.parameters()]
    flat = FlatBuffer(parameters)
    assert all(torch.equal(view, p) for view, p in zip(flat.views, parameters, strict=True))
    assert len({place.offset for place in flat.places}) == len(parameters)


def test_tied_and_overlapping_tensors_are_refused() -> None:
    x = torch.zeros(10)
    for tensors in ([x, x], [x[:6], x[4:]], [x[2:3], x]):
        with pytest.raises(ConfigError, match=r"share memory .* assign the same Parameter to both modules"):
            FlatBuffer(tensors)


def test_a_tensor_that_is_not_contiguous_is_laid_out_as_its_values_go() -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    flat = FlatBuffer([transposed, torch.ones(2)])
    assert torch.equal(flat.views[0], transposed) and flat.views[0].is_contiguous()


def test_like_has_the_layout_and_none_of_the_values() -> None:
    flat = FlatBuffer(numbered([[2, 3], [0], [5]]), num_extra=2)
    other = flat.like()
    assert other.places == flat.places and other.whole.shape == flat.whole.shape
    assert not other.whole.any() and other.whole.data_ptr() != flat.whole.data_ptr()
    other.views[2].fill_(3.0)
    assert other.values.sum() == 15.0 and other.extra.numel() == 2


def test_nothing_and_mixed_types_are_refused() -> None:
    with pytest.raises(AssertionError):
        FlatBuffer([])
    with pytest.raises(AssertionError):
        FlatBuffer([torch.zeros(1), torch.zeros(1, dtype=torch.float64)])
