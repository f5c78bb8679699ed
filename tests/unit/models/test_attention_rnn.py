"""The attention GRU: made fast, it is the plain loop; padding is attended to by nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from speechdp.models.captured import CapturedFunction, CudaRecorder, Recorder
from speechdp.models.tacotron import attention_steps
from speechdp.models.tacotron.attention_rnn import (
    AttentionOutput,
    attention_rnn,
    attention_rnn_by_graphs,
)
from speechdp.models.tacotron.attention_rnn import attention_steps as attention_rnn_steps
from speechdp.models.tacotron.attention_steps import AttentionWeights
from tests.helpers.repeats import Repeats


class Case(NamedTuple):
    """What both implementations take."""

    prenet: Tensor
    memory: Tensor
    keys: Tensor
    mask: Tensor
    weights: AttentionWeights

    def leaves(self) -> list[Tensor]:
        return [self.prenet, self.memory, self.keys, *self.weights]


@dataclass(frozen=True)
class Sizes:
    steps: int
    batch: int
    symbols: int
    prenet: int
    memory: int
    attention: int
    hidden: int


ODD = Sizes(5, 3, 4, 2, 3, 5, 4)
SIZES = [ODD, Sizes(1, 2, 3, 2, 2, 2, 2), Sizes(7, 1, 1, 1, 1, 1, 1), Sizes(6, 4, 9, 8, 6, 4, 10)]
LARGER = Sizes(25, 8, 12, 16, 32, 24, 48)


def make_case(sizes: Sizes, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Case:
    """Return noise for everything; the first row has all its symbols, the others at least one."""
    generator = torch.Generator().manual_seed(4)

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        values = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    gates, scale = 3 * sizes.hidden, 2 * sizes.hidden**-0.5
    shapes = [(gates, sizes.prenet + sizes.memory), (gates, sizes.hidden), (gates,), (gates,)]
    shapes += [(sizes.attention, sizes.hidden), (sizes.attention,)]
    lengths = torch.randint(1, sizes.symbols + 1, (sizes.batch,), generator=generator)
    lengths[0] = sizes.symbols
    return Case(
        noise(sizes.steps, sizes.batch, sizes.prenet),
        noise(sizes.batch, sizes.symbols, sizes.memory),
        noise(sizes.batch, sizes.symbols, sizes.attention),
        (torch.arange(sizes.symbols) < lengths.unsqueeze(1)).to(device),
        AttentionWeights(*(noise(*shape, scale=scale) for shape in shapes)),
    )


def attention_rnn_loop(
    prenet: Tensor, memory: Tensor, keys: Tensor, mask: Tensor, weights: AttentionWeights
) -> AttentionOutput:
    """Return what `attention_rnn` returns, by plain torch operations, one step after another."""
    hidden = prenet.new_zeros(prenet.shape[1], weights.weight_hh.shape[1])  # (B, H)
    context = prenet.new_zeros(prenet.shape[1], memory.shape[2])  # (B, C)
    steps = []
    for frame in prenet:
        hidden = torch.gru_cell(torch.cat([frame, context], dim=1), hidden, *weights[:4])
        query = torch.nn.functional.linear(hidden, weights.query).unsqueeze(1)  # (B, 1, A)
        scores = torch.tanh(keys + query) @ weights.v  # (B, S)
        attention = torch.softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), dim=1)
        context = torch.bmm(attention.unsqueeze(1), memory).squeeze(1)
        steps.append((hidden, context, attention))
    return AttentionOutput(*(torch.stack(parts) for parts in zip(*steps, strict=True)))


def gradients(output: AttentionOutput, case: Case) -> list[Tensor]:
    """Return the gradients of all leaves for a random weight on every output."""
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(part.shape, generator=generator).to(part) for part in output]
    return list(torch.autograd.grad(list(output), case.leaves(), weights))


def assert_equal(sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> None:
    case = make_case(sizes, dtype, device)
    loop, fast = attention_rnn_loop(*case), attention_rnn(*case)
    outputs, slopes = (1e-12, 1e-11) if dtype == torch.float64 else (1e-5, 1e-4)
    for expected, actual in zip(loop, fast, strict=True):
        torch.testing.assert_close(actual, expected, rtol=outputs, atol=outputs)
    for expected, actual in zip(gradients(loop, case), gradients(fast, case), strict=True):
        torch.testing.assert_close(actual, expected, rtol=slopes, atol=slopes * float(expected.abs().max()))


@pytest.mark.parametrize("projected_bytes", [0, attention_steps.PROJECTED_BYTES])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fast_is_the_loop(sizes: Sizes, projected_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_steps, "PROJECTED_BYTES", projected_bytes)
    assert_equal(sizes, torch.float64)


def test_fast_is_the_loop_in_single_precision() -> None:
    assert_equal(LARGER, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fast_is_the_loop_on_a_gpu() -> None:
    assert_equal(LARGER, torch.float64, "cuda")


def assert_graphs_equal(
    sizes: Sizes, dtype: torch.dtype, make_recorder: Callable[[], Recorder], device: str
) -> None:
    """Steps and symbols are padded there, which may change the order of sums."""
    case, captured = make_case(sizes, dtype, device), CapturedFunction(attention_rnn_steps, make_recorder())
    expected = attention_rnn(*case)
    slopes = gradients(expected, case)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for _ in range(4):
        output = attention_rnn_by_graphs(captured, *case)
        for actual, other in zip(output, expected, strict=True):
            torch.testing.assert_close(actual, other, rtol=tolerance, atol=tolerance)
        for actual, other in zip(gradients(output, case), slopes, strict=True):
            atol = 10 * tolerance * float(other.abs().max())
            torch.testing.assert_close(actual, other, rtol=10 * tolerance, atol=atol)
        captured.capture()
    assert not captured.has_new


LONG = Sizes(37, 3, 21, 4, 6, 5, 8)


@pytest.mark.parametrize("sizes", [*SIZES, LONG], ids=str)
def test_by_graphs_it_is_the_same(sizes: Sizes) -> None:
    assert_graphs_equal(sizes, torch.float64, Repeats, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sizes", [LONG, LARGER], ids=str)
def test_by_graphs_it_is_the_same_on_a_gpu(sizes: Sizes, capsys: pytest.CaptureFixture[str]) -> None:
    device = torch.device("cuda")
    assert_graphs_equal(sizes, torch.float64, lambda: CudaRecorder(device), "cuda")
    assert not capsys.readouterr().err


def test_gradients_are_those_of_differences() -> None:
    case = make_case(Sizes(3, 2, 3, 2, 3, 2, 2))

    def function(*leaves: Tensor) -> AttentionOutput:
        return attention_rnn(*leaves[:3], case.mask, AttentionWeights(*leaves[3:]))

    assert torch.autograd.gradcheck(function, case.leaves())


@pytest.mark.parametrize("function", [attention_rnn, attention_rnn_loop])
def test_padding_reaches_nothing(function: Callable[..., AttentionOutput]) -> None:
    case = make_case(ODD)
    output = function(*case)
    padding = ~case.mask.unsqueeze(2)
    assert bool(padding.any())
    assert bool((output.attention[:, ~case.mask] == 0).all())
    torch.testing.assert_close(output.attention.sum(2), torch.ones(ODD.steps, ODD.batch).double())
    noisy = case._replace(memory=case.memory + 7 * padding, keys=case.keys - 5 * padding)
    torch.testing.assert_close(tuple(function(*noisy)), tuple(output), rtol=0, atol=0)
    d_memory, d_keys = gradients(output, case)[1:3]
    assert bool((d_memory[~case.mask] == 0).all())
    assert bool((d_keys[~case.mask] == 0).all())


def test_large_keys_and_queries_stay_finite() -> None:
    case = make_case(ODD, torch.float32)
    signs = case.keys.detach().sign()
    large = case._replace(keys=(200 * signs).requires_grad_())
    for factor in (1, 1e4):
        weights = large.weights._replace(query=(factor * case.weights.query.detach()).requires_grad_())
        now = large._replace(weights=weights)
        if factor == 1:
            torch.testing.assert_close(tuple(attention_rnn(*now)), tuple(attention_rnn_loop(*now)))
        assert all(bool(part.isfinite().all()) for part in gradients(attention_rnn(*now), now))


def test_without_gradients_it_is_the_same() -> None:
    case = make_case(ODD)
    with torch.no_grad():
        silent = attention_rnn(*case)
    assert not silent.hidden.requires_grad
    torch.testing.assert_close(tuple(silent), tuple(attention_rnn(*case)), rtol=0, atol=0)


def test_a_gradient_is_repeatable_and_adds_up() -> None:
    case = make_case(ODD)
    output = attention_rnn(*case)
    total = sum(part.sum() for part in output)
    first = torch.autograd.grad(total, case.leaves(), retain_graph=True)
    second = torch.autograd.grad(total, case.leaves())
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_what_is_stored_does_not_grow_with_symbols_times_steps() -> None:
    sizes = Sizes(20, 2, 30, 2, 3, 16, 4)
    stored: list[int] = []

    def note(part: Tensor) -> Tensor:
        stored.append(part.numel())
        return part

    with torch.autograd.graph.saved_tensors_hooks(note, lambda part: part):
        attention_rnn(*make_case(sizes))
    units = sizes.steps * sizes.batch * sizes.symbols * sizes.attention
    assert 0 < sum(stored) < units / 2
