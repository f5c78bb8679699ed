"""The decoder's attention GRU over all teacher-forced steps.

Legend: N decoder steps, B batch, S symbols, P pre-net outputs, H hidden units, C memory dimensions, A
attention dimensions.

A step: h_n = GRU([prenet_n | context_{n-1}], h_{n-1}); score_s = v . tanh(keys_s + W_q h_n); attention_n =
softmax of the scores over the symbols; context_n = attention_n memory (Bahdanau et al. 2015, arXiv 1409.0473,
A.1.2; h and context start at zero).

`attention_rnn` computes this with few operations per step and a hand-written backward pass (its steps:
`attention_steps.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from speechdp.models.captured import CapturedFunction, rounded_up
from speechdp.models.tacotron import gru_steps
from speechdp.models.tacotron.attention_steps import (
    AttentionWeights,
    Block,
    Run,
    Sums,
    exp_keys,
    is_small,
    run_backward,
    run_forward,
)
from speechdp.models.tacotron.gru_steps import GruWeights


class AttentionOutput(NamedTuple):
    """Outputs of all steps: hidden (N, B, H), context (N, B, C), attention (N, B, S)."""

    hidden: Tensor
    context: Tensor
    attention: Tensor


def attention_rnn(
    prenet: Tensor, memory: Tensor, keys: Tensor, mask: Tensor, weights: AttentionWeights
) -> AttentionOutput:
    """Return the outputs of all steps, in the weights' type.

    `prenet` (N, B, P), `memory` (B, S, C), `keys` (B, S, A), `mask` (B, S) bool, true at a symbol. N is at
    least 1, and every row has a symbol.

    A key beyond ±43 (float32) counts as ±43, which is exact unless a query is as large with the opposite
    sign.
    """
    assert len(prenet) >= 1, "a decoder needs at least one step"
    inputs = (x.to(weights.v.dtype) for x in (prenet, memory, keys))
    return AttentionOutput(*attention_steps(*inputs, mask, *weights))


def attention_steps(
    prenet: Tensor, memory: Tensor, keys: Tensor, mask: Tensor, *weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_rnn` for inputs of the weights' type, all in tensors, so graphs can replay it."""
    outputs: tuple[Tensor, Tensor, Tensor]
    with torch.autocast(memory.device.type, enabled=False):  # in-place operations need memory of one type
        outputs = _AttentionSteps.apply(prenet, memory, keys, mask, *weights)  # type: ignore[no-untyped-call]
    return outputs


def attention_rnn_by_graphs(
    captured: CapturedFunction,
    prenet: Tensor,
    memory: Tensor,
    keys: Tensor,
    mask: Tensor,
    weights: AttentionWeights,
) -> AttentionOutput:
    """Return what `attention_rnn` returns, by graphs of `attention_steps`, padded to recurring sizes."""
    (num_steps, _, _), num_symbols = prenet.shape, memory.shape[1]
    steps, symbols = rounded_up(num_steps) - num_steps, rounded_up(num_symbols) - num_symbols
    longer = nn.functional.pad(prenet.to(weights.v.dtype), (0, 0, 0, 0, 0, steps))
    wider = [nn.functional.pad(x.to(weights.v.dtype), (0, 0, 0, symbols)) for x in (memory, keys)]
    inputs = [longer, *wider, nn.functional.pad(mask, (0, symbols))]
    hidden, context, attention = captured(inputs, weights)
    return AttentionOutput(hidden[:num_steps], context[:num_steps], attention[:num_steps, :, :num_symbols])


class _AttentionSteps(torch.autograd.Function):
    """`attention_rnn` and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, prenet: Tensor, memory: Tensor, keys: Tensor, mask: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        named = AttentionWeights(*weights)
        num_steps, batch, inputs = prenet.shape
        attention, hidden = named.query.shape
        of_context = gru_steps.input_order(named.weight_ih[:, inputs:])
        memory = memory.contiguous()
        run = Run(
            blocks=prenet.new_zeros(num_steps + 1, batch, 4 * hidden + attention),
            states=prenet.new_empty(num_steps + 1, batch, hidden),
            attention=prenet.new_empty(num_steps, batch, memory.shape[1]),
            values=memory @ of_context.t() if is_small(keys, of_context) else memory,
            exp_keys=exp_keys(keys),
        )
        run.states[0] = 0
        gru = GruWeights(named.weight_ih[:, :inputs], *weights[1:4])
        gru_steps.project_inputs_(Block.views(run.blocks, hidden).gates, prenet, gru)
        run_forward(run, mask, of_context, named)
        ctx.save_for_backward(prenet, memory, *weights, *run)
        context = torch.bmm(run.attention.transpose(0, 1), memory).transpose(0, 1)
        return run.states[1:], context, run.attention

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_hidden: Tensor, d_context: Tensor, d_attention: Tensor
    ) -> tuple[Tensor | None, ...]:
        prenet, memory, *rest = ctx.saved_tensors
        weights, run = AttentionWeights(*rest[:6]), Run(*rest[6:])
        d_states = d_hidden.clone(memory_format=torch.contiguous_format)
        through_context = torch.bmm(d_context.transpose(0, 1), memory.transpose(1, 2)).transpose(0, 1)
        sums = Sums.empty(run)
        of_prenet, of_context = weights.weight_ih.split_with_sizes([prenet.shape[2], memory.shape[2]], dim=1)
        of_context = gru_steps.input_order(of_context)
        outputs = d_states, (d_attention + through_context).contiguous()
        run_backward(run, outputs, sums, of_context, weights)
        block, four_v = Block.views(sums.blocks, run.states.shape[2]), 4 * weights.v
        by_symbol = run.attention.permute(1, 2, 0)  # (B, S, N)
        d_projected = torch.bmm(by_symbol, block.next_inputs.transpose(0, 1))
        d_memory = torch.bmm(by_symbol, d_context.transpose(0, 1))
        d_of_prenet = gru_steps.input_weight_gradient(block.gates, prenet)
        d_of_context = gru_steps.torch_order(d_projected.flatten(0, 1).t() @ memory.flatten(0, 1))
        d_of_state = block.next_hidden.flatten(0, 1).t() @ run.states[1:].flatten(0, 1)
        d_weight_hh, d_query = d_of_state.split_with_sizes([len(d_of_state) - len(four_v), len(four_v)])
        return (
            gru_steps.input_gradient(block.gates, of_prenet),
            d_memory + d_projected @ of_context,
            sums.keys.mul_(four_v),
            None,
            torch.cat([d_of_prenet, d_of_context], dim=1),
            d_weight_hh,
            *gru_steps.bias_gradients(block.gates),
            d_query * four_v.unsqueeze(1),
            sums.v.mul_(-2),
        )
