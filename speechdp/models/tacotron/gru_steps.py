"""What a GRU's step, its derivatives and its weights' gradients are made of, in place and without autograd.

Legend: T steps, B batch, I inputs, H hidden units; `...` any leading dimensions.

r = sigmoid(W_r x + b_r + U_r h + c_r); z alike; n = tanh(W_n x + b_n + r (U_n h + c_n)); h' = n + z (h - n):
Cho et al. 2014 (arXiv 1406.1078) as cuDNN and `nn.GRU` compute it. The gates stand side by side in (..., 4H)
as [n | r | z | U_n h + c_n]: inputs reach the first three blocks, the hidden state the last three.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GruWeights(NamedTuple):
    """Weights as in `nn.GRU`, gates in the order reset, update, new: (3H, I), (3H, H), (3H,), (3H,)."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor


class Gates(NamedTuple):
    """Views of gates (..., 4H), each (..., H) but where named: of all steps at first, then of one."""

    new: Tensor
    reset: Tensor
    update: Tensor
    new_hidden: Tensor
    reset_update: Tensor  # (..., 2H)
    of_inputs: Tensor  # (..., 3H), what inputs reach
    of_hidden: Tensor  # (..., 3H), what the hidden state reaches

    @classmethod
    def views(cls, gates: Tensor) -> Gates:
        """Return the views of `gates` (..., 4H)."""
        hidden = gates.shape[-1] // 4
        new, reset, update, new_hidden = gates.chunk(4, dim=-1)
        return cls(
            new,
            reset,
            update,
            new_hidden,
            gates[..., hidden : 3 * hidden],
            gates[..., : 3 * hidden],
            gates[..., hidden:],
        )

    def steps(self, dim: int) -> list[Gates]:
        """Return the views of each step; steps lie along `dim`."""
        return [Gates(*parts) for parts in zip(*(view.unbind(dim) for view in self), strict=True)]


def input_order(weight: Tensor) -> Tensor:
    """Return `weight` (3H, ...) with its gates as inputs reach them: new, reset, update."""
    hidden = weight.shape[0] // 3
    return torch.cat([weight[2 * hidden :], weight[: 2 * hidden]])


def torch_order(weight: Tensor) -> Tensor:
    """Return `weight` (3H, ...) in the order reset, update, new: undo `input_order`."""
    hidden = weight.shape[0] // 3
    return torch.cat([weight[hidden:], weight[:hidden]])


def project_inputs_(gates: Tensor, x: Tensor, weights: GruWeights) -> None:
    """Set `gates` (T, B, 4H) to what `x` (T, B, I) and the biases contribute; `weights.weight_ih` (3H, I)."""
    rows = gates.view(-1, gates.shape[-1])  # (T B, 4H)
    hidden = gates.shape[-1] // 4
    rows[:, : 3 * hidden] = input_order(weights.bias_ih)
    rows[:, hidden : 3 * hidden] += weights.bias_hh[: 2 * hidden]
    rows[:, 3 * hidden :] = weights.bias_hh[2 * hidden :]
    rows[:, : 3 * hidden].addmm_(x.reshape(-1, x.shape[-1]), input_order(weights.weight_ih).t())


def step_(gates: Gates, previous: Tensor, out: Tensor) -> None:
    """Turn one step's sums into gates, in place, and write h' (..., H) to `out`; `previous` is h."""
    gates.reset_update.sigmoid_()
    gates.new.addcmul_(gates.reset, gates.new_hidden).tanh_()
    torch.lerp(gates.new, previous, gates.update, out=out)


def derivatives(gates: Gates, previous: Tensor) -> Tensor:
    """Return by how much h' changes with each sum behind the gates, (..., 4H), for all steps at once.

    Each unit's h' depends on its own four sums alone, so times dL/dh' this is dL/d(sums).
    """
    new, reset, update, new_hidden = gates[:4]
    result = new.new_empty(*new.shape[:-1], 4 * new.shape[-1])
    d_new, d_reset, d_update, d_new_hidden = Gates.views(result)[:4]
    one = new.new_ones(())
    torch.addcmul(one, new, new, value=-1, out=d_new)
    d_new.addcmul_(d_new, update, value=-1)  # (1 - n²) (1 - z)
    torch.mul(d_new, reset, out=d_new_hidden)
    torch.mul(d_new_hidden, new_hidden, out=d_reset)
    d_reset.addcmul_(d_reset, reset, value=-1)  # d_new (U_n h + c_n) r (1 - r)
    torch.sub(previous, new, out=d_update).mul_(update)
    d_update.addcmul_(d_update, update, value=-1)  # (h - n) z (1 - z)
    return result


def input_gradient(d_sums: Gates, weight_ih: Tensor) -> Tensor:
    """Return dL/dx (T, B, I) for the gradients of the sums behind the gates; `weight_ih` (3H, I)."""
    return d_sums.of_inputs @ input_order(weight_ih)


def input_weight_gradient(d_sums: Gates, x: Tensor) -> Tensor:
    """Return dL/d(weight_ih) (3H, I) for the gradients of the sums and `x` (T, B, I)."""
    return torch_order(d_sums.of_inputs.flatten(0, 1).t() @ x.flatten(0, 1))


def hidden_weight_gradient(d_sums: Gates, hidden: Tensor) -> Tensor:
    """Return dL/d(weight_hh) (3H, H) for the gradients of the sums and all steps' `hidden` (T, B, H)."""
    return d_sums.of_hidden[1:].flatten(0, 1).t() @ hidden[:-1].flatten(0, 1)


def bias_gradients(d_sums: Gates) -> tuple[Tensor, Tensor]:
    """Return dL/d(bias_ih) and dL/d(bias_hh), each (3H,)."""
    return torch_order(d_sums.of_inputs.sum((0, 1))), d_sums.of_hidden.sum((0, 1))
