"""The attention GRU's steps and their gradients, in place and by hand: what `attention_rnn` is made of.

Legend: N decoder steps, B batch, S symbols, P pre-net outputs, H hidden units, C memory dimensions, A
attention dimensions; `d_x` is the loss's gradient by x.

The scores need no tanh: with u = 1 / (1 + e^{2 key} e^{2 query}), tanh(key + query) = 1 - 2u, the softmax
does not see the constant v . 1, and e^{2 key} is the same at every step. So of (B, S, A) a step costs a
product, a sum and a reciprocal, a tenth of the time of a tanh, and u is computed again in the backward pass
rather than stored: what is stored grows with N B (4H + H + C + S + A), not with N B S A.

What the context contributes to the gates is attention (memory W_c), where memory W_c (B, S, 3H) is the same at
every step. So no step needs its context, and all of them follow at once from the attention.

h_n goes by one product into the gates of step n + 1 and into the query of step n, so these stand side by side
in a block: (N + 1, B, 4H + A), gates of step n and query of step n - 1, and so do their gradients.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from speechdp.models.tacotron import gru_steps
from speechdp.models.tacotron.gru_steps import Gates, GruWeights


class AttentionWeights(NamedTuple):
    """Weights of the attention GRU (gates in torch's order: reset, update, new) and of the scores.

    Attributes:
        weight_ih: (3H, P + C), on [pre-net | context].
        weight_hh: (3H, H).
        bias_ih: (3H,).
        bias_hh: (3H,).
        query: (A, H).
        v: (A,).
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor
    query: Tensor
    v: Tensor


def _exp_keys(keys: Tensor) -> Tensor:
    """Return e^{2 keys}, neither 0 nor infinite."""
    limit = math.log(torch.finfo(keys.dtype).max) / 2 - 1
    return (2 * keys.clamp(-limit, limit)).exp_().contiguous()


class _Scorer:
    """u of one step after the other, in the same memory.

    Attributes:
        exp_keys: e^{2 keys}, (B, S, A).
        units: u of the latest step, (B, S, A).
        rows: the same, (B S, A).
    """

    def __init__(self, exp_keys: Tensor) -> None:
        self.exp_keys = exp_keys
        self.units = torch.empty_like(exp_keys)
        self.rows = self.units.view(-1, exp_keys.shape[2])
        self._one = exp_keys.new_ones(())

    def compute(self, exp_query: Tensor) -> None:
        """Set u to 1 / (1 + e^{2 keys} e^{2 query}) for `exp_query` (B, 1, A).

        An e^{2 query} of 0 or infinity gives 1 or 0, as it should.
        """
        torch.addcmul(self._one, self.exp_keys, exp_query, out=self.units).reciprocal_()


class _Run(NamedTuple):
    """What all steps compute, written in place, and what they all read.

    Attributes:
        blocks: (N + 1, B, 4H + A): gates of step n and e^{2 query} of step n - 1.
        states: (N + 1, B, H), zero and all steps' h.
        attention: (N, B, S).
        projected: (B, S, 3H), what a symbol fully attended to contributes to the gates.
        exp_keys: (B, S, A), see `_Scorer`.
    """

    blocks: Tensor
    states: Tensor
    attention: Tensor
    projected: Tensor
    exp_keys: Tensor


class _Block(NamedTuple):
    """Views of blocks (N + 1, B, 4H + A) by the step that makes or reads each part."""

    gates: Tensor  # (N, B, 4H)
    next_inputs: Tensor  # (N, B, 3H), where the context goes
    next_hidden: Tensor  # (N, B, 3H + A), where the state goes
    query: Tensor  # (N, B, 1, A)

    @classmethod
    def views(cls, blocks: Tensor, hidden: int) -> _Block:
        """Return the views for H = `hidden`."""
        made, later = blocks[:-1], blocks[1:]
        return cls(
            made[..., : 4 * hidden],
            later[..., : 3 * hidden],
            later[..., hidden:],
            later[..., 4 * hidden :].unsqueeze(2),
        )


class AttentionSteps(torch.autograd.Function):
    """`attention_rnn` and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, prenet: Tensor, memory: Tensor, keys: Tensor, mask: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        named = AttentionWeights(*weights)
        num_steps, batch, inputs = prenet.shape
        attention, hidden = named.query.shape
        run = _Run(
            blocks=prenet.new_zeros(num_steps + 1, batch, 4 * hidden + attention),
            states=prenet.new_empty(num_steps + 1, batch, hidden),
            attention=prenet.new_empty(num_steps, batch, memory.shape[1]),
            projected=memory @ gru_steps.input_order(named.weight_ih[:, inputs:]).t(),
            exp_keys=_exp_keys(keys),
        )
        run.states[0] = 0
        gru = GruWeights(named.weight_ih[:, :inputs], *weights[1:4])
        gru_steps.project_inputs_(_Block.views(run.blocks, hidden).gates, prenet, gru)
        _run_forward(run, mask, named)
        ctx.save_for_backward(prenet, memory, *weights, *run)
        context = torch.bmm(run.attention.transpose(0, 1), memory).transpose(0, 1)
        return run.states[1:], context, run.attention

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_hidden: Tensor, d_context: Tensor, d_attention: Tensor
    ) -> tuple[Tensor | None, ...]:
        prenet, memory, *rest = ctx.saved_tensors
        weights, run = AttentionWeights(*rest[:6]), _Run(*rest[6:])
        d_states = d_hidden.clone(memory_format=torch.contiguous_format)
        through_context = torch.bmm(d_context.transpose(0, 1), memory.transpose(1, 2)).transpose(0, 1)
        sums = _Sums.empty(run)
        _run_backward(run, d_states, (d_attention + through_context).contiguous(), sums, weights)
        block, four_v = _Block.views(sums.blocks, run.states.shape[2]), 4 * weights.v
        of_prenet, of_context = weights.weight_ih.split_with_sizes([prenet.shape[2], memory.shape[2]], dim=1)
        by_symbol = run.attention.permute(1, 2, 0)  # (B, S, N)
        d_projected = torch.bmm(by_symbol, block.next_inputs.transpose(0, 1))
        d_memory = torch.bmm(by_symbol, d_context.transpose(0, 1))
        d_of_prenet = gru_steps.input_weight_gradient(block.gates, prenet)
        d_of_context = gru_steps.torch_order(d_projected.flatten(0, 1).t() @ memory.flatten(0, 1))
        d_of_state = block.next_hidden.flatten(0, 1).t() @ run.states[1:].flatten(0, 1)
        d_weight_hh, d_query = d_of_state.split_with_sizes([len(d_of_state) - len(four_v), len(four_v)])
        return (
            gru_steps.input_gradient(block.gates, of_prenet),
            d_memory + d_projected @ gru_steps.input_order(of_context),
            sums.keys.mul_(four_v),
            None,
            torch.cat([d_of_prenet, d_of_context], dim=1),
            d_weight_hh,
            *gru_steps.bias_gradients(block.gates),
            d_query * four_v.unsqueeze(1),
            sums.v.mul_(-2),
        )


# In inference mode an operation in place costs a tenth less: everything kept was allocated outside it.
@torch.inference_mode()
def _run_forward(run: _Run, mask: Tensor, weights: AttentionWeights) -> None:
    """Compute all steps, in place; gates begin as what the pre-net contributes, the rest of blocks as 0."""
    block = _Block.views(run.blocks, run.states.shape[2])
    of_state = torch.cat([weights.weight_hh, 2 / math.log(2) * weights.query]).t()  # (H, 3H + A)
    of_unit, projected, scorer = -2 * weights.v, run.projected, _Scorer(run.exp_keys)
    padding = run.exp_keys.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(of_unit.dtype).min).view(-1)
    scores = torch.empty_like(padding)  # (B S,)
    by_row = scores.view(len(mask), 1, -1)
    product = projected.new_empty(len(mask), 1, projected.shape[2])
    to_add = product.squeeze(1)
    previous, *states = run.states.unbind(0)
    gates = zip(*(view.unbind(0) for view in Gates.views(block.gates)), strict=True)
    others = (part.unbind(0) for part in (*block[1:], run.attention.unsqueeze(2)))
    for now, state, next_inputs, next_hidden, query, attention in zip(gates, states, *others, strict=True):
        gru_steps.step_(now, previous, state)
        next_hidden.addmm_(state, of_state)
        scorer.compute(query.exp2_())
        torch.addmv(padding, scorer.rows, of_unit, out=scores)
        torch.softmax(by_row, 2, out=attention)
        # A batched product into rows that lie apart is slow.
        torch.bmm(attention, projected, out=product)
        next_inputs.add_(to_add)
        previous = state


class _Sums(NamedTuple):
    """Gradients that the loop backward makes.

    d score / d query = d score / d key = v 4 u (1 - u), whose factor 4v is left out of both. d score / d v =
    1 - 2u: the 1 drops out because a row's gradients sum to zero, and the factor -2 is left out.

    Attributes:
        blocks: (N + 1, B, 4H + A): of the sums behind the gates of step n and of the query of step n - 1.
        keys: (B, S, A).
        v: (A,).
    """

    blocks: Tensor
    keys: Tensor
    v: Tensor

    @classmethod
    def empty(cls, run: _Run) -> _Sums:
        """Return no gradients of keys and v, and the gates' derivatives in the blocks."""
        blocks, hidden = torch.empty_like(run.blocks), run.states.shape[2]
        blocks[-1] = 0  # no step follows the last
        gates = Gates.views(_Block.views(run.blocks, hidden).gates)
        gru_steps.derivatives_(_Block.views(blocks, hidden).gates, gates, run.states[:-1])
        return cls(blocks, torch.zeros_like(run.exp_keys), run.exp_keys.new_zeros(run.exp_keys.shape[2]))


class _BackStep(NamedTuple):
    """What a step reads, and the gradients (d_) that it adds to or writes."""

    attention: Tensor  # (B, 1, S)
    exp_query: Tensor  # (B, 1, A)
    next_update: Tensor  # (B, H)
    d_attention: Tensor  # (B, 1, S)
    d_state: Tensor  # (B, H)
    d_unit: Tensor  # (B, 1, H), the same
    d_gates: Tensor  # (B, 4, H), from derivatives to gradients of the sums behind the gates
    d_next_inputs: Tensor  # (B, 1, 3H)
    d_next_hidden: Tensor  # (B, 3H + A), which the latter ends
    d_query: Tensor  # (B, 1, A), short of the factor 4v


def _back_steps(run: _Run, d_states: Tensor, d_attention: Tensor, d_blocks: Tensor) -> list[_BackStep]:
    """Return every step's views; the gradients are (N, B, H), (N, B, S) and (N + 1, B, 4H + A)."""
    hidden = run.states.shape[2]
    block = _Block.views(d_blocks, hidden)
    parts = _BackStep(
        attention=run.attention.unsqueeze(2),
        exp_query=_Block.views(run.blocks, hidden).query,
        next_update=Gates.views(run.blocks[1:, :, : 4 * hidden]).update,
        d_attention=d_attention.unsqueeze(2),
        d_state=d_states,
        d_unit=d_states.unsqueeze(2),
        d_gates=block.gates.view(*block.gates.shape[:2], 4, hidden),
        d_next_inputs=block.next_inputs.unsqueeze(2),
        d_next_hidden=block.next_hidden,
        d_query=block.query,
    )
    return [_BackStep(*views) for views in zip(*(part.unbind(0) for part in parts), strict=True)]


@torch.inference_mode()
def _run_backward(
    run: _Run, d_states: Tensor, d_attention: Tensor, sums: _Sums, weights: AttentionWeights
) -> None:
    """Go through the steps from the last to the first, adding to `sums`, d_states and d_attention."""
    scorer = _Scorer(run.exp_keys)
    units, columns, by_symbol = scorer.units, scorer.rows.t(), run.projected.transpose(1, 2)
    of_state = torch.cat([weights.weight_hh, 4 * weights.v.unsqueeze(1) * weights.query])  # (3H + A, H)
    d_scores = torch.empty_like(run.attention[0]).unsqueeze(1)  # (B, 1, S)
    flat, by_unit = d_scores.view(-1), d_scores.transpose(1, 2)
    later: Tensor | None = None
    for now in reversed(_back_steps(run, d_states, d_attention, sums.blocks)):
        if later is not None:
            now.d_attention.baddbmm_(now.d_next_inputs, by_symbol)
            now.d_state.addcmul_(later, now.next_update)
        torch._softmax_backward_data(now.d_attention, now.attention, 2, units.dtype, grad_input=d_scores)
        scorer.compute(now.exp_query)
        sums.v.addmv_(columns, flat)
        units.addcmul_(units, units, value=-1)  # u (1 - u)
        now.d_query.copy_(torch.bmm(d_scores, units))
        sums.keys.addcmul_(units, by_unit)
        now.d_state.addmm_(now.d_next_hidden, of_state)
        now.d_gates.mul_(now.d_unit)
        later = now.d_state
