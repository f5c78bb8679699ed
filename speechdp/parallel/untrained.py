"""The tensors of a model that no strategy exchanges: frozen parameters and buffers."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator
from speechdp.errors import RunError
from speechdp.parallel.replica import Replica, name_of


def untrained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield frozen parameters and all buffers, with their names."""
    frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    for name, tensor in chain(frozen, model.named_buffers()):
        yield name, tensor.detach()


def untrained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `untrained` by name, not copies; complex ones as pairs, as in checkpoints."""
    return {
        name: torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for name, tensor in untrained(model)
    }


def load_untrained(model: nn.Module, saved: Mapping[str, Tensor], where: str) -> None:
    """Overwrite the tensors of `untrained_tensors` with those that were saved.

    Args:
        saved: tensors by name; earlier versions saved fewer.
        where: start of the message.

    Raises:
        RunError: a tensor of the model has another shape.
    """
    for name, tensor in untrained_tensors(model).items():
        found = saved.get(name, tensor).to(tensor)
        if found.shape != tensor.shape:
            raise RunError(
                f"{where}: the checkpoint has {name} with the shape {list(found.shape)}, but the model's is "
                f"{list(tensor.shape)}; create the model as it was when saved, or start in another folder"
            )
        # An expanded tensor cannot be written, and need not be where it is equal anyway.
        if not torch.equal(found, tensor):
            tensor.copy_(found)


def share_untrained(model: nn.Module, comm: Communicator, *, known: Container[str]) -> None:
    """Give all ranks rank 0's frozen parameters and buffers.  Collective.

    Ranks that drew other random numbers would otherwise each train a different model.

    Args:
        model: model with tensors of the same names, shapes and types on every rank.
        known: names of tensors that stay as they are: a resuming rank has loaded its own.
    """
    for name, tensor in untrained(model):
        if name in known:
            continue
        sent = tensor.contiguous()
        comm.broadcast(sent, name=f"untrained.{name}")
        # An expanded tensor cannot be written, and need not be where it is equal anyway.
        if not tensor.is_contiguous() and not torch.equal(sent, tensor):
            tensor.copy_(sent)


class StaysUntrained:
    """Refuse to let an optimizer start training a parameter that has no place in the flat vector.

    No rank would exchange it, so it would differ between ranks.

    Args:
        replica: replica with a script's optimizer.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._there = set(replica.model.parameters())
        #: The optimizer's parameters when last checked, as ids, which are cheap to compare.
        self._listed: list[int] = []
        #: The optimizer's parameters that the flat vector does not hold.
        self._outside: list[nn.Parameter] = []

    def check_model(self) -> None:
        """Check the model's parameters, in a pass over its modules.

        Raises:
            RunError: a trainable parameter was added after the run was made.
        """
        for name, parameter in self._replica.model.named_parameters():
            if parameter.requires_grad and parameter not in self._there:
                raise RunError(
                    f"the model's {name} did not exist when DataParallel was created, so ranks neither "
                    "train nor exchange it; add or replace parameters (layers, weight_norm) before creating "
                    "DataParallel, or call requires_grad_(False) on what is not to be trained (a copy of "
                    "the model)"
                )

    def check(self) -> None:
        """Check the optimizer's groups, before a step.

        Raises:
            RunError: a group has a trainable parameter that was frozen, or missing, when the run was made.
        """
        groups = self._replica.optimizer.param_groups
        listed = [id(p) for group in groups for p in group["params"]]
        if listed != self._listed:
            held = set(self._replica.model_parameters)
            self._outside = [p for group in groups for p in group["params"] if p not in held]
            self._listed = listed
        for parameter in self._outside:
            if parameter.requires_grad:
                raise RunError(
                    f"the optimizer is to train {name_of(parameter, self._replica.model)}, which was frozen "
                    "or missing when DataParallel was created, so ranks do not exchange it; create "
                    "DataParallel while everything that will ever be trained requires gradients, and call "
                    "optimizer.add_param_group when its training starts"
                )
