"""Batch normalisation over frames: what nn.BatchNorm1d gives for the frames without padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from speechdp.models.tacotron.padding import MaskedBatchNorm, frame_mask

LENGTHS = torch.tensor([7, 3, 5])


def make_norms(relu: bool) -> tuple[MaskedBatchNorm, nn.BatchNorm1d]:
    torch.manual_seed(0)
    masked, plain = MaskedBatchNorm(4, relu=relu).double(), nn.BatchNorm1d(4).double()
    for parameter in masked.parameters():
        nn.init.normal_(parameter)
    plain.load_state_dict(masked.state_dict() | {"num_batches_tracked": torch.tensor(0)})
    return masked, plain


def frames_of(x: Tensor) -> Tensor:
    """Return (frames, C) of (B, C, T) without padding."""
    return torch.cat([row[:, :length].T for row, length in zip(x, LENGTHS.tolist(), strict=True)])


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_equals_batch_norm_of_the_frames(relu: bool, training: bool) -> None:
    masked, plain = make_norms(relu)
    mask = frame_mask(LENGTHS, 7, torch.device("cpu")).unsqueeze(1).double()
    x = torch.randn(3, 4, 7, dtype=torch.float64) * 3 + 5
    masked(x, mask), plain(frames_of(x))  # statistics that are not the first ones
    masked.train(training), plain.train(training)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    y = masked(inputs[0], mask)
    assert bool((y * (1 - mask) == 0).all())
    expected = plain(frames_of(inputs[1]))
    expected = expected.relu() if relu else expected
    torch.testing.assert_close(frames_of(y), expected)
    weights = torch.randn_like(expected)
    (frames_of(y) * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(masked.weight.grad, plain.weight.grad)
    torch.testing.assert_close(masked.bias.grad, plain.bias.grad)
    torch.testing.assert_close(masked.running_mean, plain.running_mean)
    torch.testing.assert_close(masked.running_var, plain.running_var)


def test_the_input_is_left_alone_and_padding_gets_no_gradient() -> None:
    masked, _ = make_norms(relu=True)
    mask = frame_mask(LENGTHS, 7, torch.device("cpu")).unsqueeze(1).double()
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    y = masked(x, mask)
    y.square().sum().backward()
    assert torch.equal(x.detach(), before)
    assert x.grad is not None
    assert bool((x.grad * (1 - mask) == 0).all())


def test_one_frame_keeps_statistics_finite() -> None:
    masked = MaskedBatchNorm(2, relu=False)
    masked(torch.ones(1, 2, 1), torch.ones(1, 1, 1))
    assert bool(torch.isfinite(masked.running_var).all())
