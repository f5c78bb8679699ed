"""Check what a script gives `DataParallel`: strategy, model, optimizer, a state to continue from.

Refuse it before it does harm: ranks that differ would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from speechdp.comm.base import Communicator
from speechdp.comm.calls import CALL_ALIKE
from speechdp.errors import ConfigError, RunError, one_line
from speechdp.parallel.registry import describe, parse_strategy
from speechdp.parallel.strategy import Strategy
from speechdp.parallel.untrained import untrained
from speechdp.process.notices import warn

_LOWER_PRECISION = "for lower precision keep float32 parameters and compute under torch.autocast"
#: The one fact about an optimizer that may differ between ranks that made it in the same way.
_STATE = "state of the optimizer"
#: (strategy, option present, option without effect beside it), as saved earlier; refused today.
_WITHOUT_EFFECT = (("gradient_averaging", "compression=powersgd", "overlap=true"),)


def check_strategy(strategy: Strategy, comm: Communicator, num_steps: int) -> None:
    """Refuse a strategy with which these ranks, or a script's loop, cannot train.

    Args:
        strategy: not attached.
        comm: the ranks.
        num_steps: steps of the whole training; 0: unknown.

    Raises:
        ConfigError: the strategy is refused.
    """
    strategy.check_ranks(comm)
    if None in strategy.roster(comm.size).part_of_rank:
        raise ConfigError(f"{strategy.name}: rank 0 would train on nothing; leave out dedicated=true")
    if strategy.traits.offers_models:
        raise ConfigError(
            f"{strategy.name}:combine: a loop of your own evaluates its models itself; leave out combine="
        )
    if strategy.traits.follows_whole_run and num_steps <= 0:
        raise ConfigError(
            f"{describe(strategy)}: depends on the progress of the training; give DataParallel num_steps=, "
            "the number of steps of the whole training"
        )
    if strategy.traits.counts_epochs:
        raise ConfigError(
            f"{describe(strategy)}: a loop of your own does not say where its epochs end; write points "
            "in steps, or in % with num_steps="
        )


def check_model(model: nn.Module) -> None:
    """Refuse modules that exchange by themselves, and trainable parameters that one flat vector cannot hold.

    Raises:
        ConfigError: the model is refused.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"DataParallel(model, optimizer, comm): the model is of type {type(model).__name__}, not a "
            "torch.nn.Module; give the module whose parameters are trained"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            # Its hooks average gradients at each backward pass, whatever the strategy exchanges.
            which = f"the model's {name}" if name else "the model"
            raise ConfigError(
                f"{which} is a torch DistributedDataParallel, which exchanges gradients by itself; give the "
                "module without it, and leave out init_process_group: run_ranks and speechdp.DataParallel "
                "replace both"
            )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"the model's {name} has no shape yet, because a lazy module (such as nn.LazyLinear) was "
                "never called; call the model once on a batch before creating DataParallel"
            )
        if tensor.is_meta:
            raise ConfigError(
                f"the model's {name} is on the meta device, without values; give it values "
                "(model.to_empty(device=...), then load or initialise) before creating DataParallel"
            )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("the model has no trainable parameter (requires_grad is False for all)")
    kinds = sorted({f"{str(p.dtype).removeprefix('torch.')} on {p.device}" for p in trained})
    if len(kinds) > 1:
        raise ConfigError(
            f"the model's trainable parameters are {' and '.join(kinds)}; DataParallel takes one type on one "
            f"device ({_LOWER_PRECISION})"
        )
    if trained[0].is_complex():
        raise ConfigError(
            f"the model's trainable parameters are {kinds[0]}; DataParallel takes float32 and float64: keep "
            "complex numbers as pairs, and compute with torch.view_as_complex of them"
        )
    if trained[0].dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"the model's trainable parameters are {kinds[0]}, a type in which sums over ranks and the "
            f"weights of steps overflow or are rounded; {_LOWER_PRECISION}"
        )


def check_optimizer(optimizer: object) -> None:
    """Refuse an object that is not a torch optimizer.

    Raises:
        ConfigError: it is not one.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"DataParallel(model, optimizer, comm): the optimizer is of type {type(optimizer).__name__}, not "
            "a torch.optim.Optimizer; give one for the whole model, with a parameter group for each part "
            "that has settings of its own"
        )


def check_norm(max_gradient_norm: object) -> None:
    """Refuse a norm to which no gradient can be clipped.

    Raises:
        ConfigError: the norm is negative or not a number.
    """
    if not (isinstance(max_gradient_norm, numbers.Real) and float(max_gradient_norm) >= 0):
        raise ConfigError(
            f"max_gradient_norm={max_gradient_norm}: give a number that is positive, or 0: any norm"
        )


def note_left_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warn of trainable parameters that the optimizer lacks: a second optimizer would find no gradients."""
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in listed]
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        warn(
            f"DataParallel: the optimizer does not have {shown}, so these parameters are not trained, not "
            "even by another optimizer; to train them, add them to this optimizer (add_param_group)"
        )


def check_same(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
    """Refuse ranks whose models or optimizers differ: their exchanges would hang.  Collective.

    Raises:
        ConfigError: they differ.
    """
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters() if p.requires_grad]
    others = [(name, list(x.shape), str(x.dtype)) for name, x in untrained(model)]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    facts = {
        "number of trainable parameters": sum(math.prod(shape) for _, shape, _ in shapes),
        "trainable parameters (names, shapes)": _checksum(shapes),
        "frozen parameters and buffers (names, shapes)": _checksum(others),
        "optimizer": f"{type(optimizer).__name__} of {groups}",
        _STATE: _state_names(optimizer) or "none",
    }
    ranks = comm.allgather_object(facts)
    for rank, other in enumerate(ranks):
        for name, value in other.items():
            if value != ranks[0][name]:
                remedy = "make the same model and optimizer on every rank"
                if name == _STATE:
                    remedy = (
                        "create a new optimizer on every rank: a used one may have state on one rank only, "
                        "as with parameter_server"
                    )
                raise ConfigError(f"{name}: {ranks[0][name]} on rank 0, but {value} on rank {rank}; {remedy}")


def _checksum(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def _state_names(optimizer: torch.optim.Optimizer) -> str:
    return ", ".join(sorted({name for state in optimizer.state.values() for name in state}))


def check_loadable(
    state: dict[str, Any], strategy: Strategy, comm: Communicator, *, what: str, otherwise: str
) -> None:
    """Refuse a state of another rank, number of ranks or strategy.

    Args:
        state: what `DataParallel.state_dict` returned.
        strategy: strategy of this run.
        comm: ranks of this run.
        what: name of the state in messages.
        otherwise: what the user may do instead of continuing from it, for messages.

    Raises:
        ConfigError: the state is refused.
    """
    if (state["rank"], state["size"]) != (comm.rank, comm.size):
        raise ConfigError(
            f"{what} was saved by rank {state['rank']} of {state['size']}, this is rank {comm.rank} of "
            f"{comm.size}; use as many ranks and load on each the state that it saved, {otherwise}"
        )
    now = describe(strategy)
    saved, here = _differences(_in_full(state.get("strategy_options", now)), now)
    if saved != here:
        raise ConfigError(
            f"{what} was saved with the strategy {saved}, but this run uses {here}; give the strategy it "
            f"was saved with, {otherwise}"
        )


def _in_full(strategy: str) -> str:
    """Return a saved strategy as `describe` would write it today.

    Options added since then have their defaults; options that had no effect are left out.
    """
    name, _, rest = strategy.partition(":")
    for of, beside, option in _WITHOUT_EFFECT:
        words = rest.split(",")
        if name == of and beside in words and option in words:
            words.remove(option)
            rest = ",".join(words)
            strategy = f"{name}:{rest}"
    try:
        return describe(parse_strategy(strategy))
    except ConfigError:  # from a package that is not installed, or with options that no longer exist
        return strategy


def _differences(saved: str, here: str) -> tuple[str, str]:
    """Return two strategies in `describe` form, reduced to their differences; equal ones to the name."""
    (saved_name, _, saved_rest), (name, _, rest) = saved.partition(":"), here.partition(":")
    if saved_name != name:
        return saved_name, name
    saved_options, options = saved_rest.split(","), rest.split(",")
    saved_only = ",".join(option for option in saved_options if option not in options)
    here_only = ",".join(option for option in options if option not in saved_options)
    return ":".join(filter(None, [name, saved_only])), ":".join(filter(None, [name, here_only]))


def check_same_call(call: str, comm: Communicator) -> None:
    """Refuse a call while other ranks are at a different one.  Collective.

    Args:
        call: name of the call in messages, e.g. `run.save_checkpoint()`.
        comm: the ranks.

    Raises:
        RunError: the ranks are at different calls.
    """
    calls = comm.allgather_object({"call": call})
    named = [c["call"] if isinstance(c, dict) and "call" in c else "another exchange" for c in calls]
    for rank, other in zip(comm.alive, named, strict=True):
        if other != named[0]:
            raise RunError(
                f"rank {comm.alive[0]} is at {named[0]}, but rank {rank} is at {other}; {CALL_ALIKE}"
            )


def check_saved_together(state: dict[str, Any] | None, strategy: Strategy, comm: Communicator) -> None:
    """Refuse states of different steps, as ranks leave them that are killed while saving.  Collective.

    Args:
        state: state that this rank has loaded; None: none.
        strategy: strategy of this run.
        comm: ranks of this run.

    Raises:
        ConfigError: the states are refused.
    """
    steps = comm.allgather_object(None if state is None else state["steps"])
    for rank, step in enumerate(steps):
        if (step is None) != (steps[0] is None) or (step != steps[0] and strategy.traits.synchronous):
            first, other = ("nothing" if n is None else f"step {n}" for n in (steps[0], step))
            raise ConfigError(
                f"load_state_dict: rank 0 loads {first}, rank {rank} {other}; load states that were "
                "saved together (save_checkpoint and load_checkpoint see to it)"
            )


@contextmanager
def of_same_model() -> Iterator[None]:
    """Turn torch's errors about a state that does not fit into one line.  Raises ConfigError."""
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        message = one_line(error, 200)
        raise ConfigError(
            f"the loaded state belongs to another model or optimizer ({message}); create the model and "
            "optimizer that it was saved with, or start in another folder"
        ) from error
