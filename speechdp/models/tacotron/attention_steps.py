"""The attention GRU's steps and their gradients, in place and by hand: what `attention_rnn` is made of.

Legend: N decoder steps, B batch, S symbols, P pre-net outputs, H hidden units, C memory dimensions, A
attention dimensions; `d_x` is the loss's gradient by x.

The scores need no tanh: with u = 1 / (1 + e^{2 key} e^{2 query}), tanh(key + query) = 1 - 2u, the softmax
does not see the constant v . 1, and e^{2 key} is the same at every step. So of (B, S, A) a step costs a
product, a sum and a reciprocal, a tenth of the time of a tanh, and u is computed again in the backward pass
rather than stored: what is stored grows with N B (4H + H + C + S + A), not with N B S A.

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
from speechdp.models.tacotron.gru_steps import Gates, GruWeights, of_inputs


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

    @classmethod
    def of_keys(cls, keys: Tensor) -> _Scorer:
        """Return the scorer of `keys` (B, S, A); e^{2 keys} is kept neither 0 nor infinite."""
        limit = math.log(torch.finfo(keys.dtype).max) / 2 - 1
        return cls((2 * keys.clamp(-limit, limit)).exp_().contiguous())

    def compute(self, exp_query: Tensor) -> None:
        """Set u to 1 / (1 + e^{2 keys} e^{2 query}) for `exp_query` (B, 1, A).

        An e^{2 query} of 0 or infinity gives 1 or 0, as it should.
        """
        torch.addcmul(self._one, self.exp_keys, exp_query, out=self.units).reciprocal_()


class _Run(NamedTuple):
    """What all steps compute, written in place.

    Attributes:
        blocks: (N + 1, B, 4H + A): gates of step n and e^{2 query} of step n - 1.
        states: (N + 1, B, H), zero and all steps' h.
        context: (N, B, C).
        attention: (N, B, S).
    """

    blocks: Tensor
    states: Tensor
    context: Tensor
    attention: Tensor

    def gates(self) -> Tensor:
        """Return (N, B, 4H)."""
        return self.blocks[:-1, :, : 4 * self.states.shape[2]]

    def exp_query(self) -> Tensor:
        """Return (N, B, 1, A)."""
        return self.blocks[1:, :, None, 4 * self.states.shape[2] :]


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
            context=prenet.new_empty(num_steps, batch, memory.shape[2]),
            attention=prenet.new_empty(num_steps, batch, memory.shape[1]),
        )
        run.states[0] = 0
        gru = GruWeights(named.weight_ih[:, :inputs], *weights[1:4])
        gru_steps.project_inputs_(run.gates(), prenet, gru)
        memory = memory.contiguous()
        scorer = _Scorer.of_keys(keys)
        _run_forward(run, memory, scorer, mask, named)
        ctx.save_for_backward(prenet, memory, *weights, scorer.exp_keys, *run)
        return run.states[1:], run.context, run.attention

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_hidden: Tensor, d_context: Tensor, d_attention: Tensor
    ) -> tuple[Tensor | None, ...]:
        prenet, memory, *rest = ctx.saved_tensors
        weights, run = AttentionWeights(*rest[:6]), _Run(*rest[7:])
        outputs = _Outputs(
            *(
                gradient.clone(memory_format=torch.contiguous_format)
                for gradient in (d_hidden, d_context, d_attention)
            )
        )
        sums = _Sums.empty(run, rest[6])
        _run_backward(run, outputs, sums, _Scorer(rest[6]), memory, weights)
        width, four_v = 4 * run.states.shape[2], 4 * weights.v
        d_sums = sums.blocks[:-1, :, :width]
        # dL/d(query) lacks the factor 4v, and so do the rows of its weight's gradient.
        d_of_states = sums.blocks[1:, :, width // 4 :].flatten(0, 1).t() @ run.states[1:].flatten(0, 1)
        d_weight_hh, d_query = d_of_states.split_with_sizes([width // 4 * 3, len(four_v)])
        d_memory = torch.bmm(run.attention.permute(1, 2, 0), outputs.context.transpose(0, 1))
        return (
            gru_steps.input_gradient(d_sums, weights.weight_ih[:, : prenet.shape[2]]),
            d_memory,
            sums.keys.mul_(four_v),
            None,
            _input_weight_gradient(d_sums, prenet, run.context),
            d_weight_hh,
            *gru_steps.bias_gradients(d_sums),
            d_query * four_v.unsqueeze(1),
            sums.v.mul_(-2),
        )


def _input_weight_gradient(d_sums: Tensor, prenet: Tensor, context: Tensor) -> Tensor:
    of_prenet = gru_steps.input_weight_gradient(d_sums, prenet)
    of_context = gru_steps.input_weight_gradient(d_sums[1:], context[:-1])
    return torch.cat([of_prenet, of_context], dim=1)


# In inference mode an operation in place costs a tenth less: everything kept was allocated outside it.
@torch.inference_mode()
def _run_forward(run: _Run, memory: Tensor, scorer: _Scorer, mask: Tensor, weights: AttentionWeights) -> None:
    """Compute all steps, in place; the gates begin as what the pre-net contributes, all else in blocks as 0."""
    gates, batch = run.gates(), len(memory)
    of_context = gru_steps.input_order(weights.weight_ih[:, -memory.shape[2] :]).t()  # (C, 3H)
    of_state = torch.cat([weights.weight_hh, 2 * weights.query]).t()  # (H, 3H + A)
    of_unit = -2 * weights.v
    padding = gates.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(gates.dtype).min).view(-1)  # (B S)
    scores = torch.empty_like(padding)
    by_row = scores.view(batch, 1, -1)
    (previous, *states), by_gates = run.states.unbind(0), zip(*(view.unbind(0) for view in Gates.views(gates)))
    from_states = run.blocks[1:, :, weights.weight_hh.shape[1] :].unbind(0)  # (B, 3H + A) a step
    from_contexts = of_inputs(run.blocks[1:, :, : gates.shape[2]]).unbind(0)  # (B, 3H) a step
    rows = (part.unsqueeze(2).unbind(0) for part in (run.context, run.attention))  # (B, 1, ...) a step
    steps = zip(by_gates, states, from_states, from_contexts, run.exp_query().unbind(0),
        run.context.unbind(0), *rows, strict=True)
    for now, state, from_state, from_context, exp_query, context, context_row, attention in steps:
        gru_steps.step_(now, previous, state)
        from_state.addmm_(state, of_state)
        scorer.compute(exp_query.exp_())
        torch.addmv(padding, scorer.rows, of_unit, out=scores)
        torch.softmax(by_row, 2, out=attention)
        torch.bmm(attention, memory, out=context_row)
        from_context.addmm_(context, of_context)
        previous = state


class _Outputs(NamedTuple):
    """Gradients of the outputs, added to until they are those of hidden, context and attention."""

    hidden: Tensor
    context: Tensor
    attention: Tensor


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
    def empty(cls, run: _Run, exp_keys: Tensor) -> _Sums:
        """Return no gradients of keys and v, and the gates' derivatives in the blocks."""
        blocks = torch.empty_like(run.blocks)
        blocks[-1] = 0  # no step follows the last
        gates = run.gates()
        gru_steps.derivatives_(blocks[:-1, :, : gates.shape[2]], Gates.views(gates), run.states[:-1])
        return cls(blocks, torch.zeros_like(exp_keys), exp_keys.new_zeros(exp_keys.shape[2]))


@torch.inference_mode()
def _run_backward(
    run: _Run, outputs: _Outputs, sums: _Sums, scorer: _Scorer, memory: Tensor, weights: AttentionWeights
) -> None:
    """Go through the steps from the last to the first, adding to `outputs` and `sums`."""
    hidden, units, columns = weights.weight_hh.shape[1], scorer.units, scorer.rows.t()
    by_symbol = memory.transpose(1, 2).contiguous()
    of_context = gru_steps.input_order(weights.weight_ih[:, -memory.shape[2] :])  # (3H, C)
    of_state = torch.cat([weights.weight_hh, 4 * weights.v.unsqueeze(1) * weights.query])  # (3H + A, H)
    d_scores = torch.empty_like(run.attention[0].unsqueeze(1))  # (B, 1, S)
    flat, by_unit = d_scores.view(-1), d_scores.transpose(1, 2)
    d_keys, d_v, blocks = sums.keys, sums.v, sums.blocks
    d_gates = blocks[:-1, :, : 4 * hidden]
    steps = list(zip(
        run.attention.unsqueeze(2).unbind(0),
        run.exp_query().unbind(0),
        outputs.attention.unsqueeze(2).unbind(0),
        outputs.context.unsqueeze(2).unbind(0),
        blocks[1:, :, None, 4 * hidden:].unbind(0),
        blocks[1:, :, hidden:].unbind(0),
        outputs.hidden.unbind(0),
        outputs.hidden.unsqueeze(2).unbind(0),
        d_gates.unflatten(2, (4, hidden)).unbind(0),
        of_inputs(d_gates).unbind(0),
        Gates.views(run.gates()).update.unbind(0),
        outputs.context.unbind(0), strict=True,
    ))
    later = None
    for attention, exp_query, d_attention, d_context_row, d_query, d_from_state, d_state, d_unit, d_block, d_of_inputs, update, d_context in reversed(steps):
        if later:
            d_context.addmm_(later[0], of_context)
            d_state.addcmul_(later[1], later[2])
        d_attention.baddbmm_(d_context_row, by_symbol)
        torch._softmax_backward_data(d_attention, attention, 2, d_attention.dtype, grad_input=d_scores)
        scorer.compute(exp_query)
        d_v.addmv_(columns, flat)
        units.addcmul_(units, units, value=-1)  # u (1 - u)
        torch.bmm(d_scores, units, out=d_query)
        d_keys.addcmul_(units, by_unit)
        d_state.addmm_(d_from_state, of_state)
        d_block.mul_(d_unit)
        later = d_of_inputs, d_state, update
