"""GRUs over whole sequences. Legend: T steps, B batch, I inputs, H hidden units, D directions.

On a CPU `nn.GRU` runs many small operations per step, and as many again backward. `gru_directions` computes
the inputs' part of all steps in one matrix product, has few in-place operations per step, and computes the
derivatives of all gates before its backward loop starts. On a GPU cuDNN does all this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speechdp.models.tacotron import gru_steps
from speechdp.models.tacotron.gru_steps import Gates, GruWeights


def gru_sequence(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor) -> Tensor:
    """Return hidden states (T, B, H) of a GRU over `x` (T, B, I), T at least 1, starting at zero.

    Weights as in `GruWeights`.
    """
    if not x.is_cuda:
        weights = (weight.unsqueeze(0) for weight in (weight_ih, weight_hh, bias_ih, bias_hh))
        return gru_directions(x.unsqueeze(0), *weights)[0]
    start = x.new_zeros(1, x.shape[1], weight_hh.shape[1])
    layer = _in_one_piece([weight_ih, weight_hh, bias_ih, bias_hh])
    # has_biases, num_layers, dropout, train, bidirectional, batch_first
    hidden: Tensor = torch.gru(x, start, layer, True, 1, 0.0, torch.is_grad_enabled(), False, False)[0]
    return hidden


def gru_directions(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor, bias_hh: Tensor
) -> Tensor:
    """Return hidden states (D, T, B, H) of D GRUs of one size, side by side over `x` (D, T, B, I).

    T is at least 1; weights as in `GruWeights`, each with D in front.
    """
    assert x.shape[1] >= 1, "a GRU needs at least one step"
    hidden: Tensor
    x = x.to(weight_ih.dtype)
    with torch.autocast(x.device.type, enabled=False):  # in-place operations need memory of one type
        hidden = _GruDirections.apply(x, weight_ih, weight_hh, bias_ih, bias_hh)  # type: ignore[no-untyped-call]
    return hidden


class BiGru(nn.Module):
    """One bidirectional GRU layer, with weights named as in `nn.GRU`, that handles padded rows.

    The backward direction starts at each row's own end; values past the ends affect no frame before them.
    """

    def __init__(self, input_dim: int, hidden: int) -> None:
        super().__init__()
        self.input_dim = input_dim
        self.hidden = hidden
        like = nn.GRU(input_dim, hidden, bidirectional=True)  # for its names, shapes and initial values
        for name, parameter in like.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return (B, T, 2H), forward and backward halves, for `x` (B, T, I) and CPU lengths (B,)."""
        inputs = x.transpose(0, 1)  # (T, B, I)
        # Created on the device: copying (T, B) numbers from pageable memory would wait for it.
        turn = turned_indices(lengths.to(x.device, non_blocking=True), x.shape[1])  # (T, B)
        batch = torch.arange(x.shape[0], device=x.device)
        turned = inputs[turn, batch]
        weights = self._weights("l0"), self._weights("l0_reverse")
        if x.is_cuda:
            forward, backward = gru_sequence(inputs, *weights[0]), gru_sequence(turned, *weights[1])
        else:
            pairs = (torch.stack(pair) for pair in zip(*weights, strict=True))
            forward, backward = gru_directions(torch.stack([inputs, turned]), *pairs)
        return torch.cat([forward, backward[turn, batch]], dim=2).transpose(0, 1)

    def _weights(self, suffix: str) -> GruWeights:
        return GruWeights(*(self.get_parameter(f"{name}_{suffix}") for name in GruWeights._fields))


def _in_one_piece(weights: list[Tensor]) -> list[Tensor]:
    """Return `weights` as views of one vector: cuDNN copies separate ones, and torch warns about them."""
    whole = torch.cat([weight.reshape(-1) for weight in weights])
    pieces = torch.split_with_sizes(whole, [weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]


def turned_indices(lengths: Tensor, num_frames: int) -> Tensor:
    """Return (T, B) indices that reverse each row's frames and leave its padding in place."""
    frame = torch.arange(num_frames, device=lengths.device).unsqueeze(1)  # (T, 1)
    return torch.where(frame < lengths, lengths - 1 - frame, frame)


class _GruDirections(torch.autograd.Function):
    """`gru_directions` and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        directions, num_steps, batch, _ = x.shape
        hidden = weights[1].shape[2]
        sums = x.new_empty(directions, num_steps, batch, 4 * hidden)
        for direction, one in enumerate(zip(*weights, strict=True)):
            gru_steps.project_inputs_(sums[direction], x[direction], GruWeights(*one))
        states = x.new_empty(directions, num_steps + 1, batch, hidden)
        states[:, 0] = 0
        gru_steps.run_forward(*_plain(sums, weights[1], states))
        ctx.save_for_backward(x, *weights[:2], sums, states)
        return states[:, 1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, ...]:
        x, weight_ih, weight_hh, sums, states = ctx.saved_tensors
        gates, previous = Gates.views(sums), states[:, :-1]
        d_sums = torch.empty_like(sums)
        gru_steps.derivatives_(d_sums, gates, previous)
        d_states = d_output.clone(memory_format=torch.contiguous_format)
        gru_steps.run_backward(*_plain(d_sums, gates.update, weight_hh, d_states))
        parts = [_gradients(*one) for one in zip(d_sums, x, previous, weight_ih, strict=True)]
        if len(parts) == 1:
            return tuple(gradient.unsqueeze(0) for gradient in parts[0])
        return tuple(torch.stack(gradients) for gradients in zip(*parts, strict=True))


def _plain(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return `parts` (D, ...), without D if there is one direction, because a plain product is faster."""
    return tuple(part[0] for part in parts) if len(parts[0]) == 1 else parts


def _gradients(d_sums: Tensor, x: Tensor, previous: Tensor, weight_ih: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of one direction's x (T, B, I) and four weights; `d_sums` (T, B, 4H)."""
    return (
        gru_steps.input_gradient(d_sums, weight_ih),
        gru_steps.input_weight_gradient(d_sums, x),
        gru_steps.hidden_weight_gradient(d_sums, previous),
        *gru_steps.bias_gradients(d_sums),
    )
