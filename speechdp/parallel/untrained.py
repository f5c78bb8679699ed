"""What a model has beside its trainable parameters, and no strategy exchanges: frozen ones, and buffers."""

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
    """Return `untrained` by name, living ones, as a checkpoint holds them: complex numbers as pairs."""
    return {
        name: torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for name, tensor in untrained(model)
    }


def load_untrained(model: nn.Module, saved: Mapping[str, Tensor], where: str) -> None:
    """Overwrite what `untrained_tensors` gave, where it was saved.

    Args:
        saved: by name; earlier versions saved fewer.
        where: stands before the message.

    Raises:
        RunError: the model has another shape for one.
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
    """Give all ranks what rank 0's model has beside its trainable parameters.  Collective.

    Ranks that have drawn other random numbers would each train another model.

    Args:
        model: has tensors of the same names, shapes and types on every rank.
        known: names of those that stay as they are: a rank that goes on has loaded its own.
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
    """Refuses that an optimizer begins to train what has no place in the flat vector.

    Nobody would exchange it, so it would become another on each rank.

    Args:
        replica: with the optimizer of a script.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._there = set(replica.model.parameters())
        #: What the optimizer listed when it was last looked at: by identity, which is cheap to compare.
        self._listed: list[int] = []
        #: What the optimizer lists and the vector does not hold.
        self._outside: list[nn.Parameter] = []

    def check_model(self) -> None:
        """Look at the model's parameters, which takes a pass over its modules.

        Raises:
            RunError: one has come after the run was made, and is trainable.
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
        """Look at the optimizer's groups, before a step.

        Raises:
            RunError: one has a parameter to train that was frozen, or not there, when the run was made.
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
