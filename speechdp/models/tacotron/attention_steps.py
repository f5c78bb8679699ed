"""The attention GRU's steps and their gradients, in place and by hand: what `attention_rnn` is made of.

Legend: N decoder steps, B batch, S symbols, P pre-net outputs, H hidden units, C memory dimensions, A
attention dimensions; `d_x` is the loss's gradient by x.

The scores need no tanh: with u = 1 / (1 + e^{2 key} e^{2 query}), tanh(key + query) = 1 - 2u, the softmax
does not see the constant v . 1, and e^{2 key} is the same at every step. So of (B, S, A) a step costs a
product, a sum and a reciprocal, a tenth of the time of a tanh, and u is computed again in the backward pass
rather than stored: what is stored grows with N B (4H + H + C + S + A), not with N B S A.
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


class _Steps(NamedTuple):
    """All steps' outputs and e^{2 query}: (N, B, H), (N, B, C), (N, B, S) and (N, B, A)."""

    hidden: Tensor
    context: Tensor
    attention: Tensor
    exp_query: Tensor


class AttentionSteps(torch.autograd.Function):
    """`attention_rnn` and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, prenet: Tensor, memory: Tensor, keys: Tensor, mask: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        named = AttentionWeights(*weights)
        gru = GruWeights(named.weight_ih[:, : prenet.shape[2]], *weights[1:4])
        sums = prenet.new_empty(*prenet.shape[:2], 4 * named.weight_hh.shape[1])  # (N, B, 4H)
        gru_steps.project_inputs_(sums, prenet, gru)
        memory = memory.contiguous()
        scorer = _Scorer.of_keys(keys)
        steps = _run_forward(sums, memory, scorer, mask, named)
        ctx.save_for_backward(prenet, memory, *weights, scorer.exp_keys, sums, *steps)
        return steps.hidden, steps.context, steps.attention

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_hidden: Tensor, d_context: Tensor, d_attention: Tensor
    ) -> tuple[Tensor | None, ...]:
        prenet, memory, *rest = ctx.saved_tensors
        weights, sums, steps = AttentionWeights(*rest[:6]), rest[7], _Steps(*rest[8:])
        outputs = [
            gradient.clone(memory_format=torch.contiguous_format)
            for gradient in (d_hidden, d_context, d_attention)
        ]
        loop = _BackwardLoop(memory, _Scorer(rest[6]), weights)
        d_sums, d_query = loop.run(sums, steps, outputs)
        four_v = 4 * weights.v
        d_query.mul_(four_v)
        d_memory = torch.bmm(steps.attention.permute(1, 2, 0), outputs[1].transpose(0, 1))
        return (
            gru_steps.input_gradient(Gates.views(d_sums), weights.weight_ih[:, : prenet.shape[2]]),
            d_memory,
            loop.d_keys.mul_(four_v),
            None,
            *_gru_gradients(d_sums, prenet, steps),
            d_query.flatten(0, 1).t() @ steps.hidden.flatten(0, 1),
            loop.d_v.mul_(-2),
        )


def _run_forward(
    sums: Tensor, memory: Tensor, scorer: _Scorer, mask: Tensor, weights: AttentionWeights
) -> _Steps:
    """Return all steps' outputs; turn `sums` (N, B, 4H), what the pre-net contributes, into the gates."""
    num_steps, batch, symbols, dim = *sums.shape[:2], *memory.shape[1:]
    widths = (weights.weight_hh.shape[1], dim, symbols, weights.v.shape[0])
    result = _Steps(*(sums.new_empty(num_steps, batch, width) for width in widths))
    of_context = gru_steps.input_order(weights.weight_ih[:, -dim:]).t()  # (C, 3H)
    of_hidden, of_query, of_unit = weights.weight_hh.t(), 2 * weights.query.t(), -2 * weights.v
    padding = sums.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(sums.dtype).min).view(-1)  # (B S)
    scores = torch.empty_like(padding)
    by_row = scores.view(batch, symbols)
    previous, context = sums.new_zeros(batch, widths[0]), None
    singles = (part.unsqueeze(2).unbind(0) for part in result[1:])  # (B, 1, width) a step
    steps = zip(Gates.views(sums).steps(0), *(part.unbind(0) for part in result), *singles, strict=True)
    for gates, hidden, next_context, attention, exp_query, context_row, attention_row, query_row in steps:
        if context is not None:
            gates.of_inputs.addmm_(context, of_context)
            gates.of_hidden.addmm_(previous, of_hidden)
        gru_steps.step_(gates, previous, hidden)
        torch.mm(hidden, of_query, out=exp_query).exp_()
        scorer.compute(query_row)
        torch.addmv(padding, scorer.rows, of_unit, out=scores)
        torch.softmax(by_row, 1, out=attention)
        torch.bmm(attention_row, memory, out=context_row)
        previous, context = hidden, next_context
    return result


class _BackStep(NamedTuple):
    """One step's views in the backward loop; what it read and, added to or written, its gradients."""

    attention: Tensor  # (B, S)
    exp_query: Tensor  # (B, 1, A)
    update: Tensor  # (B, H)
    d_hidden: Tensor  # (B, H)
    d_context: Tensor  # (B, C)
    d_attention: Tensor  # (B, S)
    d_query: Tensor  # (B, A), short of the factor 4v
    d_blocks: Tensor  # (B, 4, H), from derivatives to gradients of the sums behind the gates
    d_of_inputs: Tensor  # (B, 3H), of the same
    d_of_hidden: Tensor  # (B, 3H), of the same


class _BackwardLoop:
    """The steps backward.

    d score / d query = d score / d key = v 4 u (1 - u), whose factor 4v is left out of `d_keys`.
    d score / d v = 1 - 2u: the 1 drops out because a row's `d_scores` sum to zero, and the factor -2 is left
    out of `d_v`.
    """

    def __init__(self, memory: Tensor, scorer: _Scorer, weights: AttentionWeights) -> None:
        self.d_keys = torch.zeros_like(scorer.exp_keys)
        self.d_v = torch.zeros_like(weights.v)
        self._scorer = scorer
        self._by_symbol = memory.transpose(1, 2)
        self._columns = scorer.rows.t()
        self._of_context = gru_steps.input_order(weights.weight_ih[:, -memory.shape[2] :])  # (3H, C)
        self._of_hidden = weights.weight_hh
        self._of_query = 4 * weights.v.unsqueeze(1) * weights.query  # (A, H)

    def run(self, sums: Tensor, steps: _Steps, outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the gradients of the sums behind the gates (N, B, 4H) and of the queries, short of 4v.

        `sums` are the gates; `outputs`, the gradients of hidden, context and attention, are added to.
        """
        gates = Gates.views(sums)
        previous = torch.cat([torch.zeros_like(steps.hidden[:1]), steps.hidden[:-1]])
        d_sums = gru_steps.derivatives(gates, previous)
        d_query = torch.empty_like(steps.exp_query)
        views = Gates.views(d_sums)
        parts = (steps.attention, steps.exp_query.unsqueeze(2), gates.update, *outputs, d_query)
        parts += (d_sums.view(*d_sums.shape[:2], 4, -1), views.of_inputs, views.of_hidden)
        back = [_BackStep(*step) for step in zip(*(part.unbind(0) for part in parts), strict=True)]
        for step in reversed(range(len(back))):
            self._through_attention(back[step])
            back[step].d_blocks.mul_(back[step].d_hidden.unsqueeze(1))
            if step:
                self._into_previous(back[step], back[step - 1])
        return d_sums, d_query

    def _through_attention(self, now: _BackStep) -> None:
        now.d_attention.unsqueeze(1).baddbmm_(now.d_context.unsqueeze(1), self._by_symbol)
        d_scores = torch._softmax_backward_data(now.d_attention, now.attention, 1, now.attention.dtype)
        self._scorer.compute(now.exp_query)
        self.d_v.addmv_(self._columns, d_scores.view(-1))
        slopes = self._scorer.units
        slopes.addcmul_(slopes, slopes, value=-1)  # u (1 - u)
        torch.bmm(d_scores.unsqueeze(1), slopes, out=now.d_query.unsqueeze(1))
        self.d_keys.addcmul_(slopes, d_scores.unsqueeze(2))
        now.d_hidden.addmm_(now.d_query, self._of_query)

    def _into_previous(self, now: _BackStep, before: _BackStep) -> None:
        before.d_context.addmm_(now.d_of_inputs, self._of_context)
        before.d_hidden.addmm_(now.d_of_hidden, self._of_hidden)
        before.d_hidden.addcmul_(now.d_hidden, now.update)


def _gru_gradients(d_sums: Tensor, prenet: Tensor, steps: _Steps) -> tuple[Tensor, ...]:
    """Return the gradients of weight_ih, weight_hh, bias_ih and bias_hh."""
    views, later = Gates.views(d_sums), Gates.views(d_sums[1:])
    of_prenet = gru_steps.input_weight_gradient(views, prenet)
    of_context = gru_steps.input_weight_gradient(later, steps.context[:-1])
    return (
        torch.cat([of_prenet, of_context], dim=1),
        gru_steps.hidden_weight_gradient(views, steps.hidden),
        *gru_steps.bias_gradients(views),
    )
