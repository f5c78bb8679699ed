"""GRUs over sequences: they are `nn.GRU`, each row by itself where rows are padded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from speechdp.models.tacotron.recurrent import BiGru, gru_directions, gru_sequence

TOLERANCE = 1e-11
SHAPES = [(1, 1, 1, 1), (1, 3, 2, 4), (7, 2, 5, 3), (12, 6, 4, 8)]  # T, B, I, H
LENGTHS = [9, 4, 1, 9, 6]


def random_like(part: Tensor) -> Tensor:
    return torch.randn(part.shape, generator=torch.Generator().manual_seed(2)).to(part)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same_gradients(
    actual: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]], tolerance: float = TOLERANCE
) -> None:
    """Both are an output and the leaves it came from."""
    assert_close(actual[0], expected[0], tolerance)
    slopes = [torch.autograd.grad(*each, random_like(each[0])) for each in (actual, expected)]
    for one, other in zip(*slopes, strict=True):
        assert_close(one, other, 10 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_is_torchs(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    steps, batch, inputs, hidden = shape
    gru = nn.GRU(inputs, hidden).to(dtype)
    x = torch.randn(steps, batch, inputs, dtype=dtype, requires_grad=True)
    leaves = [x, *gru.parameters()]
    tolerance = TOLERANCE if dtype == torch.float64 else 1e-5
    assert_same_gradients((gru_sequence(*leaves), leaves), (gru(x)[0], leaves), tolerance)


def test_gradients_of_two_directions_are_those_of_differences() -> None:
    torch.manual_seed(1)
    shapes = [(2, 3, 2, 2), (2, 9, 2), (2, 9, 3), (2, 9), (2, 9)]
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(gru_directions, leaves)


def test_both_directions_begin_at_each_rows_ends() -> None:
    torch.manual_seed(1)
    gru = nn.GRU(3, 4, batch_first=True, bidirectional=True).double()
    own = BiGru(3, 4).double()
    own.load_state_dict(gru.state_dict())
    lengths = torch.tensor(LENGTHS)
    x = torch.randn(len(LENGTHS), max(LENGTHS), 3, dtype=torch.float64, requires_grad=True)
    rows = [gru(row[None, :length])[0][0] for row, length in zip(x, LENGTHS, strict=True)]
    hidden = own(x, lengths)
    inside = torch.cat([row[:length] for row, length in zip(hidden, LENGTHS, strict=True)])
    expected = torch.cat(rows), [x, *gru.parameters()]
    assert_same_gradients((inside, [x, *own.parameters()]), expected)


def test_padding_reaches_no_frame_before_it() -> None:
    torch.manual_seed(1)
    gru, lengths = BiGru(3, 4).double(), torch.tensor(LENGTHS)
    x = torch.randn(len(LENGTHS), max(LENGTHS), 3, dtype=torch.float64)
    inside = torch.arange(max(LENGTHS)) < lengths.unsqueeze(1)  # (B, T)
    noisy = x + 9 * ~inside.unsqueeze(2)
    assert bool((gru(noisy, lengths)[inside] == gru(x, lengths)[inside]).all())
    assert bool((gru(noisy, lengths)[~inside] != gru(x, lengths)[~inside]).any())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_what_a_cpu_gives() -> None:
    torch.manual_seed(1)
    gru, lengths = BiGru(3, 4).double(), torch.tensor(LENGTHS)
    x = torch.randn(len(LENGTHS), max(LENGTHS), 3, dtype=torch.float64)
    expected = gru(x, lengths)
    assert_close(gru.cuda()(x.cuda(), lengths).cpu(), expected)
