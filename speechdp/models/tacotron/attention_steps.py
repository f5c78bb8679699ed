"""The attention GRU's steps and their gradients, in place and hand-written: the parts of `attention_rnn`.

Legend: N decoder steps, B batch, S symbols, P pre-net outputs, H hidden units, C memory dimensions, A
attention dimensions; `d_x` is the gradient of the loss with respect to x.

The scores need no tanh: with u = 1 / (1 + e^{2 key} e^{2 query}), tanh(key + query) = 1 - 2u. The constant
v . 1 does not change the softmax, and e^{2 key} is the same at every step. So a step on (B, S, A) costs a
product, a sum and a reciprocal, a tenth of the time of a tanh. The backward pass computes u again instead of
storing it: memory grows with N B (4H + H + S + A), not with N B S A.

The context contributes attention (memory W_c) to the gates, and memory W_c (B, S, 3H) is the same at every
step: if it is small enough for a processor's cache, no step computes its context. In any case all contexts
are computed together from the attention.

One product takes h_n to the gates of step n + 1 and to the query of step n. So these are stored side by side
in one block, (N + 1, B, 4H + A): gates of step n and query of step n - 1; so are their gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from speechdp.models.tacotron import gru_steps
from speechdp.models.tacotron.gru_steps import Gates

PROJECTED_BYTES = 2**20
"""Size up to which memory W_c is computed beforehand; twice that was measured to be slower on a CPU."""


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


def exp_keys(keys: Tensor) -> Tensor:
    """Return e^{2 keys}, neither 0 nor infinite."""
    limit = math.log(torch.finfo(keys.dtype).max) / 2 - 1
    return (2 * keys.clamp(-limit, limit)).exp_().contiguous()


class _Scorer:
    """Computes u of one step after another, in the same memory.

    Attributes:
        exp_keys: e^{2 keys}, (B, S, A).
        units: u of the latest step, (B, S, A).
        rows: view of `units`, (B S, A).
    """

    def __init__(self, exp_keys: Tensor) -> None:
        self.exp_keys = exp_keys
        self.units = torch.empty_like(exp_keys)
        self.rows = self.units.view(-1, exp_keys.shape[2])
        self._one = exp_keys.new_ones(())

    def compute(self, exp_query: Tensor) -> None:
        """Set u to 1 / (1 + e^{2 keys} e^{2 query}) for `exp_query` (B, 1, A).

        If e^{2 query} is 0 or infinite, u is 1 or 0, which is correct.
        """
        torch.addcmul(self._one, self.exp_keys, exp_query, out=self.units).reciprocal_()


class Run(NamedTuple):
    """What all steps compute, written in place, and their common inputs.

    Attributes:
        blocks: (N + 1, B, 4H + A): gates of step n and e^{2 query} of step n - 1.
        states: (N + 1, B, H): zero, then h of all steps.
        attention: (N, B, S).
        values: what attention averages: (B, S, C), memory, or (B, S, 3H), its contribution to the gates.
        exp_keys: (B, S, A), see `_Scorer`.
    """

    blocks: Tensor
    states: Tensor
    attention: Tensor
    values: Tensor
    exp_keys: Tensor

    def of_context(self, weight: Tensor) -> Tensor | None:
        """Return `weight` (3H, C) if the values are memory; None if they are its product with it."""
        return None if is_small(self.exp_keys, weight) else weight


def is_small(keys: Tensor, weight: Tensor) -> bool:
    """Return whether memory W_c is small, for keys (B, S, A) and `weight` W_c (3H, C)."""
    return keys[..., 0].numel() * len(weight) * keys.element_size() <= PROJECTED_BYTES


class Block(NamedTuple):
    """Views of blocks (N + 1, B, 4H + A), by the step that writes or reads each part."""

    gates: Tensor  # (N, B, 4H)
    next_inputs: Tensor  # (N, B, 3H), written from the context
    next_hidden: Tensor  # (N, B, 3H + A), written from the state
    query: Tensor  # (N, B, 1, A)

    @classmethod
    def views(cls, blocks: Tensor, hidden: int) -> Block:
        """Return the views for H = `hidden`."""
        made, later = blocks[:-1], blocks[1:]
        return cls(
            made[..., : 4 * hidden],
            later[..., : 3 * hidden],
            later[..., hidden:],
            later[..., 4 * hidden :].unsqueeze(2),
        )


# In inference mode an in-place operation costs a tenth less; everything kept was allocated outside it.
@torch.inference_mode()
def run_forward(run: Run, mask: Tensor, weight: Tensor, weights: AttentionWeights) -> None:
    """Compute all steps, in place; gates start as the pre-net's contribution, the rest of the blocks as 0.

    `weight` is W_c (3H, C).
    """
    block = Block.views(run.blocks, run.states.shape[2])
    of_state = torch.cat([weights.weight_hh, 2 / math.log(2) * weights.query]).t()  # (H, 3H + A)
    of_unit, values, scorer = -2 * weights.v, run.values, _Scorer(run.exp_keys)
    of_context = run.of_context(weight)
    padding = run.exp_keys.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(of_unit.dtype).min).view(-1)
    scores = torch.empty_like(padding)  # (B S,)
    by_row = scores.view(len(mask), 1, -1)
    product = torch.empty_like(values[:, :1])
    context = product.squeeze(1)  # or its contribution
    previous, *states = run.states.unbind(0)
    gates = zip(*(view.unbind(0) for view in Gates.views(block.gates)), strict=True)
    others = (part.unbind(0) for part in (*block[1:], run.attention.unsqueeze(2)))
    for now, state, next_inputs, next_hidden, query, attention in zip(gates, states, *others, strict=True):
        gru_steps.step_(now, previous, state)
        next_hidden.addmm_(state, of_state)
        scorer.compute(query.exp2_())
        torch.addmv(padding, scorer.rows, of_unit, out=scores)
        torch.softmax(by_row, 2, out=attention)
        # A batched product into non-contiguous rows is slow.
        torch.bmm(attention, values, out=product)
        if of_context is None:
            next_inputs.add_(context)
        else:
            next_inputs.addmm_(context, of_context.t())
        previous = state


class Sums(NamedTuple):
    """Gradients accumulated by the backward loop.

    d score / d query = d score / d key = v 4 u (1 - u); the factor 4v is left out of both. d score / d v = 1
    - 2u; the 1 drops out because a row's gradients sum to zero, and the factor -2 is left out.

    Attributes:
        blocks: (N + 1, B, 4H + A): of the gates' pre-activations of step n and of the query of step n - 1.
        keys: (B, S, A).
        v: (A,).
    """

    blocks: Tensor
    keys: Tensor
    v: Tensor

    @classmethod
    def empty(cls, run: Run) -> Sums:
        """Return zero gradients of keys and v, and blocks with the gates' derivatives."""
        blocks, hidden = torch.empty_like(run.blocks), run.states.shape[2]
        blocks[-1] = 0  # no step follows the last
        gates = Gates.views(Block.views(run.blocks, hidden).gates)
        gru_steps.derivatives_(Block.views(blocks, hidden).gates, gates, run.states[:-1])
        return cls(blocks, torch.zeros_like(run.exp_keys), run.exp_keys.new_zeros(run.exp_keys.shape[2]))


class _BackStep(NamedTuple):
    """Inputs of a backward step, and the gradients (d_) that it adds to or writes."""

    attention: Tensor  # (B, 1, S)
    exp_query: Tensor  # (B, 1, A)
    next_update: Tensor  # (B, H)
    d_attention: Tensor  # (B, 1, S)
    d_state: Tensor  # (B, H)
    d_unit: Tensor  # (B, 1, H), view of d_state
    d_gates: Tensor  # (B, 4, H), derivatives, then gradients of the gates' pre-activations
    d_next_inputs: Tensor  # (B, 1, 3H)
    d_next_hidden: Tensor  # (B, 3H + A), its last A columns are d_query's
    d_query: Tensor  # (B, 1, A), without the factor 4v


def _back_steps(run: Run, d_states: Tensor, d_attention: Tensor, d_blocks: Tensor) -> list[_BackStep]:
    """Return views for every step; the gradients are (N, B, H), (N, B, S) and (N + 1, B, 4H + A)."""
    hidden = run.states.shape[2]
    block = Block.views(d_blocks, hidden)
    parts = _BackStep(
        attention=run.attention.unsqueeze(2),
        exp_query=Block.views(run.blocks, hidden).query,
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
def run_backward(
    run: Run, outputs: tuple[Tensor, Tensor], sums: Sums, weight: Tensor, weights: AttentionWeights
) -> None:
    """Process the steps from the last to the first; add to `sums` and to the outputs' gradients.

    `outputs` are the gradients of states (N, B, H) and attention (N, B, S); `weight` is W_c (3H, C).
    """
    scorer = _Scorer(run.exp_keys)
    units, columns, by_symbol = scorer.units, scorer.rows.t(), run.values.transpose(1, 2)
    of_state = torch.cat([weights.weight_hh, 4 * weights.v.unsqueeze(1) * weights.query])  # (3H + A, H)
    d_scores = torch.empty_like(run.attention[0]).unsqueeze(1)  # (B, 1, S)
    flat, by_unit = d_scores.view(-1), d_scores.transpose(1, 2)
    of_context, later = run.of_context(weight), None
    for now in reversed(_back_steps(run, *outputs, sums.blocks)):
        if later is not None:
            d_product = now.d_next_inputs
            if of_context is not None:
                d_product = (d_product.squeeze(1) @ of_context).unsqueeze(1)
            now.d_attention.baddbmm_(d_product, by_symbol)
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
