"""Codes of 8 and 4 bits with a scale a block: what is read back of what was written."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speechdp.strategies.mechanisms import quantisation
from speechdp.strategies.mechanisms.number_formats import BLOCK, message_bytes
from speechdp.strategies.mechanisms.quantisation import Quantiser, stretches

LEVELS = {8: 127, 4: 7}


def written_and_read(values: Tensor, bits: int) -> Tensor:
    """Return what the message of `values` says, in memory that held something else before."""
    quantiser = Quantiser(bits, values)
    quantiser.values.fill_(1e6)
    memory = torch.full((message_bytes(values.numel(), bits) + 8,), 0xAB, dtype=torch.uint8)
    message = quantiser.message(memory[:-8], values.numel())
    for start, end in stretches(values.numel()):
        quantiser.values[: end - start].copy_(values[start:end])
        quantiser.write(message, start, end - start)
    assert bool((memory[-8:] == 0xAB).all()), "bytes behind the message are written"
    found = torch.empty_like(values)
    for start, end in stretches(values.numel()):
        found[start:end].copy_(quantiser.read(message, start, end - start))
    return found


@pytest.mark.parametrize("bits", [8, 4])
def test_every_code_comes_back(bits: int) -> None:
    levels = LEVELS[bits]
    codes = torch.arange(-levels, levels + 1, dtype=torch.float32).repeat(3 * BLOCK // levels)
    for scale in (1.0, 2.0**-20, 2.0**30):
        assert torch.equal(written_and_read(codes * scale, bits), codes * scale)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 7, 12 * BLOCK])
def test_an_error_is_at_most_half_of_its_own_blocks_scale(
    bits: int, dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantisation, "_STRETCH", 2 * BLOCK)
    values = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=dtype)
    values *= 10.0 ** (torch.arange(length) // BLOCK - 3)  # each block has another scale
    found = written_and_read(values, bits)
    for block, back in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
        half = 0.5 * float(block.abs().max()) / LEVELS[bits]
        assert float((back - block).abs().max()) <= half * (1 + 1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_what_is_next_to_nothing_are_zeros(bits: int) -> None:
    values = torch.zeros(2 * BLOCK)
    values[0] = 1e-44
    assert torch.equal(written_and_read(values, bits), torch.zeros(2 * BLOCK))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_spoils_its_block_alone(bits: int, value: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = value
    first, second = written_and_read(values, bits).split(BLOCK)
    assert not bool(first.isfinite().any())
    assert torch.equal(second, torch.ones(BLOCK))


@pytest.mark.parametrize(("bits", "share"), [(8, 260 / 1024), (4, 132 / 1024)])
def test_a_message_is_codes_scales_and_a_weight(bits: int, share: float) -> None:
    assert message_bytes(BLOCK * 1000, bits) == pytest.approx(share * 4 * BLOCK * 1000, abs=16)
    assert message_bytes(0, bits) == 8
