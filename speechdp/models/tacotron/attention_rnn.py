"""The decoder's attention GRU over all teacher-forced steps.

Legend: N decoder steps, B batch, S symbols, P pre-net outputs, H hidden units, C memory dimensions, A
attention dimensions.

A step: h_n = GRU([prenet_n | context_{n-1}], h_{n-1}); score_s = v . tanh(keys_s + W_q h_n); attention_n =
softmax of the scores over the symbols; context_n = attention_n memory (Bahdanau et al. 2015, arXiv 1409.0473,
A.1.2; h and context begin at zero).

`attention_rnn_loop` says just that; `attention_rnn` is the same function by few operations a step and a
backward pass written by hand (`attention_steps.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from speechdp.models.tacotron.attention_steps import AttentionSteps, AttentionWeights


class AttentionOutput(NamedTuple):
    """What every step gives: hidden (N, B, H), context (N, B, C), attention (N, B, S)."""

    hidden: Tensor
    context: Tensor
    attention: Tensor


def attention_rnn_loop(
    prenet: Tensor, memory: Tensor, keys: Tensor, mask: Tensor, weights: AttentionWeights
) -> AttentionOutput:
    """Return all steps' outputs by plain torch operations, a step after the other: the reference.

    `prenet` (N, B, P), `memory` (B, S, C), `keys` (B, S, A), `mask` (B, S) bool, true at a symbol. N is at
    least 1 and every row has a symbol.
    """
    assert len(prenet) >= 1, "a decoder needs at least one step"
    hidden = prenet.new_zeros(prenet.shape[1], weights.weight_hh.shape[1])  # (B, H)
    context = prenet.new_zeros(prenet.shape[1], memory.shape[2])  # (B, C)
    steps = []
    for frame in prenet:
        hidden = torch.gru_cell(torch.cat([frame, context], dim=1), hidden, *weights[:4])
        context, attention = attend(hidden, memory, keys, mask, weights)
        steps.append((hidden, context, attention))
    return AttentionOutput(*(torch.stack(parts) for parts in zip(*steps, strict=True)))


def attend(
    hidden: Tensor, memory: Tensor, keys: Tensor, mask: Tensor, weights: AttentionWeights
) -> tuple[Tensor, Tensor]:
    """Return context (B, C) and attention (B, S) of one step for `hidden` (B, H)."""
    query = torch.nn.functional.linear(hidden, weights.query).unsqueeze(1)  # (B, 1, A)
    scores = torch.tanh(keys + query) @ weights.v  # (B, S)
    attention = torch.softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), dim=1)
    context = torch.bmm(attention.unsqueeze(1), memory).squeeze(1)
    return context, attention


def attention_rnn(
    prenet: Tensor, memory: Tensor, keys: Tensor, mask: Tensor, weights: AttentionWeights
) -> AttentionOutput:
    """Return what `attention_rnn_loop` returns, faster, forward and backward; float32 or float64.

    A key beyond ±43 (float32) counts as ±43: exact as long as no query is as large the other way.
    """
    assert len(prenet) >= 1, "a decoder needs at least one step"
    assert memory.dtype in (torch.float32, torch.float64), memory.dtype
    outputs: tuple[Tensor, Tensor, Tensor]
    outputs = AttentionSteps.apply(prenet, memory, keys, mask, *weights)  # type: ignore[no-untyped-call]
    return AttentionOutput(*outputs)
