"""A GRU's steps, their derivatives and its weights' gradients, computed in place, without autograd.

Legend: T steps, B batch, I inputs, H hidden units; `...` any leading dimensions.

r = sigmoid(W_r x + b_r + U_r h + c_r); z likewise; n = tanh(W_n x + b_n + r (U_n h + c_n));
h' = n + z (h - n): Cho et al. 2014 (arXiv 1406.1078) as cuDNN and `nn.GRU` compute it. The gates are stored
side by side in (..., 4H) as [n | r | z | U_n h + c_n]: inputs contribute to the first three blocks, the
hidden state to the last three.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Views of gates (..., 4H), each (..., H) unless noted, that a step reads and writes."""

    new: Tensor
    reset: Tensor
    update: Tensor
    new_hidden: Tensor
    reset_update: Tensor  # (..., 2H)

    @classmethod
    def views(cls, gates: Tensor) -> Gates:
        """Return the views of `gates` (..., 4H)."""
        hidden = gates.shape[-1] // 4
        new, reset, update, new_hidden = gates.chunk(4, dim=-1)
        return cls(new, reset, update, new_hidden, gates[..., hidden : 3 * hidden])


def of_inputs(gates: Tensor) -> Tensor:
    """Return the blocks that inputs contribute to, a view (..., 3H) of `gates` (..., 4H)."""
    return gates[..., : gates.shape[-1] // 4 * 3]


def of_hidden(gates: Tensor) -> Tensor:
    """Return the blocks that the hidden state contributes to, a view (..., 3H) of `gates` (..., 4H)."""
    return gates[..., gates.shape[-1] // 4 :]


def input_order(weight: Tensor) -> Tensor:
    """Return `weight` (3H, ...) with its gates in the order of the input blocks: new, reset, update."""
    hidden = weight.shape[0] // 3
    return torch.cat([weight[2 * hidden :], weight[: 2 * hidden]])


def torch_order(weight: Tensor) -> Tensor:
    """Return `weight` (3H, ...) in the order reset, update, new: undo `input_order`."""
    hidden = weight.shape[0] // 3
    return torch.cat([weight[hidden:], weight[:hidden]])


def project_inputs_(gates: Tensor, x: Tensor, weights: GruWeights) -> None:
    """Set `gates` (T, B, 4H) to the contribution of `x` (T, B, I) and biases; `weights.weight_ih` (3H, I)."""
    hidden = weights.weight_hh.shape[1]
    gates.copy_(torch.cat([input_order(weights.bias_ih), weights.bias_hh[2 * hidden :]]))
    of_inputs(gates)[..., hidden:] += weights.bias_hh[: 2 * hidden]
    # Rows of `gates` may be non-contiguous, with a constant stride.
    of_inputs(gates).flatten(0, -2).addmm_(x.flatten(0, -2), input_order(weights.weight_ih).t())


def step_(gates: tuple[Tensor, ...], previous: Tensor, out: Tensor) -> None:
    """Turn one step's sums, `Gates`, into gates, in place, and write h' to `out`; `previous` is h."""
    new, reset, update, new_hidden, reset_update = gates
    reset_update.sigmoid_()
    new.addcmul_(reset, new_hidden).tanh_()
    torch.lerp(new, previous, update, out=out)


# In inference mode an in-place operation costs a tenth less; everything written was allocated outside it.
@torch.inference_mode()
def run_forward(sums: Tensor, weight_hh: Tensor, states: Tensor) -> None:
    """Turn `sums` (..., T, B, 4H) into gates, in place, and write every h to `states` (..., T + 1, B, H).

    `weight_hh` (..., 3H, H). The first state is given as zero.
    """
    add_product = _add_product(sums)
    recurrent = weight_hh.transpose(-1, -2)
    gates = zip(*(view.unbind(-3) for view in Gates.views(sums)), strict=True)
    previous, *outs = states.unbind(-3)
    for index, (now, to_add, out) in enumerate(zip(gates, of_hidden(sums).unbind(-3), outs, strict=True)):
        if index:
            add_product(to_add, previous, recurrent)
        step_(now, previous, out)
        previous = out


@torch.inference_mode()
def run_backward(slopes: Tensor, update: Tensor, weight_hh: Tensor, d_hidden: Tensor) -> None:
    """Turn `slopes` (..., T, B, 4H), from `derivatives`, into gradients of the sums, in place.

    `update` (..., T, B, H) is the update gate. `d_hidden`, of the same shape, holds the gradient of the
    outputs and becomes that of the states.
    """
    add_product = _add_product(slopes)
    blocks = slopes.view(*slopes.shape[:-1], 4, -1).unbind(-4)  # (..., B, 4, H) a step
    rows, factors = d_hidden.unbind(-3), d_hidden.unsqueeze(-2).unbind(-4)
    products, updates = of_hidden(slopes).unbind(-3), update.unbind(-3)
    for step in range(len(rows) - 1, 0, -1):
        blocks[step].mul_(factors[step])
        before = rows[step - 1]
        add_product(before, products[step], weight_hh)
        before.addcmul_(rows[step], updates[step])
    blocks[0].mul_(factors[0])


def _add_product(gates: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the in-place matrix product for a step of `gates`: (T, B, 4H) or (D, T, B, 4H)."""
    return Tensor.addmm_ if gates.dim() == 3 else Tensor.baddbmm_


def derivatives_(result: Tensor, gates: Gates, previous: Tensor) -> None:
    """Set `result` (..., 4H) to the derivatives of h' by the sums behind the gates, for all steps at once.

    Each unit's h' depends only on its own four sums, so multiplied by dL/dh' this is dL/d(sums).
    """
    new, reset, update, new_hidden, _ = gates
    d_new, d_reset, d_update, d_new_hidden = result.chunk(4, dim=-1)
    torch.addcmul(new.new_ones(()), new, new, value=-1, out=d_new)
    d_new.addcmul_(d_new, update, value=-1)  # (1 - n²) (1 - z)
    torch.mul(d_new, reset, out=d_new_hidden)
    torch.mul(d_new_hidden, new_hidden, out=d_reset)
    d_reset.addcmul_(d_reset, reset, value=-1)  # d_new (U_n h + c_n) r (1 - r)
    torch.sub(previous, new, out=d_update).mul_(update)
    d_update.addcmul_(d_update, update, value=-1)  # (h - n) z (1 - z)


def input_gradient(d_sums: Tensor, weight_ih: Tensor) -> Tensor:
    """Return dL/dx (T, B, I) for the gradients of the gates' pre-activations; `weight_ih` (3H, I)."""
    return of_inputs(d_sums) @ input_order(weight_ih)


def input_weight_gradient(d_sums: Tensor, x: Tensor) -> Tensor:
    """Return dL/d(weight_ih) (3H, I) for the gradients of the sums (T, B, 4H) and `x` (T, B, I)."""
    return torch_order(of_inputs(d_sums).flatten(0, 1).t() @ x.flatten(0, 1))


def hidden_weight_gradient(d_sums: Tensor, previous: Tensor) -> Tensor:
    """Return dL/d(weight_hh) (3H, H) for the gradients of the sums and each step's `previous` (T, B, H)."""
    return of_hidden(d_sums).flatten(0, 1).t() @ previous.flatten(0, 1)


def bias_gradients(d_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return dL/d(bias_ih) and dL/d(bias_hh), each (3H,), for the gradients of the sums (T, B, 4H)."""
    total = d_sums.sum((0, 1))
    return torch_order(of_inputs(total)), of_hidden(total)
