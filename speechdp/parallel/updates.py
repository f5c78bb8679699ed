"""Update a replica's parameters with its gradients: an optimizer, and its state in the replica's layout."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speechdp.errors import ConfigError, RunError
from speechdp.parallel.flat_buffer import FlatBuffer
from speechdp.parallel.uncompiled import made_without_compiler, step_without_compiler

#: torch's attributes with the functions called before and after an optimizer's step.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Update(ABC):
    """An optimizer for vectors in a replica's layout: the replica's parameters or others, as of a server.

    There is one optimizer state, whichever vector is updated.  Not for two threads at a time.

    Attributes:
        optimizer: torch's optimizer.
    """

    optimizer: torch.optim.Optimizer

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """Learning rate of the next update; that of the first parameter group."""

    @abstractmethod
    def set_learning_rate(self, learning_rate: float) -> None:
        """Use `learning_rate` from the next update on."""

    @abstractmethod
    def move(
        self,
        parameters: Tensor,
        gradients: Tensor,
        learning_rate: float,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Update `parameters` with the mean `gradients`: flat vectors in the replica's layout.

        Args:
            parameters: vector to update.
            gradients: with any loss scale removed.
            learning_rate: rate of this update.
            scaler: scaler that has unscaled the gradients; after an overflow nothing is updated.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the existing state by name (e.g. `momentum_buffer`): the tensors themselves, not copies."""

    @abstractmethod
    def vectors(self) -> dict[str, Tensor]:
        """Return the state with one element per parameter: the flat vectors themselves, not copies.

        The names are the same on every rank, even before the first update.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget all state: momentum, moments, step counts."""

    def left_out(self) -> Sequence[int]:
        """Return the indices, in the layout, of parameters that no update changes."""
        return ()

    def check_hooks(self, strategy: str) -> None:
        """Refuse hooks on the optimizer's step if it updates other parameters than the hooks expect.

        Args:
            strategy: name, for the message, of the strategy that has it update other parameters than the
                model's.

        Raises:
            ConfigError: the optimizer has such hooks.
        """
        return None

    def check_rates(self, strategy: str) -> None:
        """Refuse learning rates that `move` cannot derive from the first group's: it is 0, others are not.

        Args:
            strategy: name, for the message, of the strategy that uses the first group's rate.

        Raises:
            ConfigError: the optimizer has such groups.
        """
        return None

    def release(self) -> None:
        """Return the optimizer to its owner."""
        return None


class FlatUpdate(Update):
    """An optimizer with one parameter, the flat vector: a few kernels, whatever the number of layers.

    This equals the update tensor by tensor for every element-wise optimizer (SGD with momentum, Adam, AdamW).

    Args:
        parameters: flat.  (n,)
        gradients: flat.  (n,)
        make: returns an optimizer of a list of parameters.
    """

    def __init__(
        self,
        parameters: Tensor,
        gradients: Tensor,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._flat = nn.Parameter(parameters)
        self._flat.grad = gradients
        self.optimizer = made_without_compiler(lambda: make([self._flat]))
        self._learning_rate = float(self.optimizer.param_groups[0]["lr"])
        # Create the state now, all zero, instead of at the first step: a rank without frames so far must be
        # able to take part in an average of the momentum, and every checkpoint must hold the same tensors.
        # SGD with momentum and Adam also start from zero in their first step.
        self._step(0.0)
        self._set_rate(self._learning_rate)
        self.reset()

    @property
    def learning_rate(self) -> float:
        return self._learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        # The optimizer gets it only in `move`: a server may be using another worker's rate meanwhile.
        self._learning_rate = learning_rate

    def move(
        self,
        parameters: Tensor,
        gradients: Tensor,
        learning_rate: float,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._flat.data, self._flat.grad = parameters, gradients
        self._step(learning_rate, scaler)

    def _step(self, learning_rate: float, scaler: torch.amp.GradScaler | None = None) -> None:
        self._set_rate(learning_rate)
        step_without_compiler(self.optimizer, scaler)

    def _set_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def tensors(self) -> dict[str, Tensor]:
        state = self.optimizer.state.get(self._flat, {})
        # SGD without momentum keeps a None for its buffer.
        return {name: value for name, value in sorted(state.items()) if isinstance(value, Tensor)}

    def vectors(self) -> dict[str, Tensor]:
        # Adam's step count is not a vector, and each rank has its own.
        return {name: tensor for name, tensor in self.tensors().items() if tensor.dim() == 1}

    def reset(self) -> None:
        for tensor in self.tensors().values():
            tensor.zero_()


class ParameterwiseUpdate(Update):
    """A user's optimizer over the model's own parameters; groups, schedules, hooks and state stay the user's.

    State with the shape of its parameter is kept as views into a vector in the replica's layout, so that an
    average over ranks is one exchange.  State without dimensions (step counts) is kept in a vector with one
    element per parameter.  State moves there when it is first requested.

    A copy of the optimizer that shares its state updates other vectors, such as a server's parameters beside
    those of the worker on its rank.

    Args:
        optimizer: over parameters of `model_parameters` alone.
        model_parameters: trainable, in the order of the layout.
        layout: the replica's parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model_parameters: Sequence[nn.Parameter],
        layout: FlatBuffer,
    ) -> None:
        self.optimizer = optimizer
        self._parameters, self._layout = list(model_parameters), layout
        self._index = {parameter: i for i, parameter in enumerate(self._parameters)}
        self._check(optimizer)
        self._vectors: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor]] = {}
        #: State that some optimizers (Adagrad) have before their first step.
        self._initial = {
            i: copy.deepcopy(optimizer.state[p]) for p, i in self._moved() if _is_fresh(optimizer.state[p])
        }
        self._ratios = self._proportions([1.0] * len(optimizer.param_groups))
        self._is_moving = False
        self._hook = optimizer.register_step_pre_hook(self._refuse_a_step_of_the_script)
        # Schedulers warn if `step` was not called before them; a server's workers never call it.
        vars(optimizer)["_opt_called"] = True

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        strange = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        strange = [p for p in strange if p not in self._index]
        if strange:
            raise ConfigError(
                f"the optimizer has parameters that are not the model's ({len(strange)}, the first of shape "
                f"{list(strange[0].shape)}); put everything that is trained into one module, or create the "
                "optimizer with model.parameters()"
            )
        if not any(p in self._index for g in optimizer.param_groups for p in g["params"]):
            raise ConfigError(
                "the optimizer has no parameter of the model; create it with model.parameters()"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS needs the loss several times a step; use SGD, AdamW or the like")
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ConfigError(
                "SparseAdam needs sparse gradients, but ranks exchange dense ones; use Adam, and leave "
                "sparse=True out of the model's nn.Embedding"
            )

    def _moved(self) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters that the optimizer updates, with their indices in the layout."""
        listed = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [(p, self._index[p]) for p in listed if p in self._index]

    def _refuse_a_step_of_the_script(self, *_: object) -> None:
        if not self._is_moving:
            raise RunError(
                "the script called optimizer.step(); remove the call: `with run.step()` updates the "
                "parameters, after the strategy's exchange"
            )

    @property
    def learning_rate(self) -> float:
        return self._own_rates()[0]

    def _own_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def left_out(self) -> Sequence[int]:
        moved = {i for _, i in self._moved()}
        return [i for i in range(len(self._parameters)) if i not in moved]

    def check_hooks(self, strategy: str) -> None:
        before, after = (vars(self.optimizer)[name] for name in _HOOKS)
        if len(before) > 1 or after:  # one is ours
            raise ConfigError(
                f"{strategy}: the optimizer has step hooks, which would see the model, while the optimizer "
                "updates the server's parameters; remove them, or give another strategy "
                "(parameter_server:mode=sync supports them)"
            )

    def check_rates(self, strategy: str) -> None:
        rates = self._own_rates()
        if rates[0] == 0 and any(rates):
            raise ConfigError(
                f"{strategy}: sets the learning rates of all parameter groups by the first one's, which is "
                "0 while others are not; put a group whose rate is not 0 first, or leave parameters that "
                "are not to be trained out of the optimizer"
            )

    def set_learning_rate(self, learning_rate: float) -> None:
        raise AssertionError("the learning rate is the user's")

    def move(
        self,
        parameters: Tensor,
        gradients: Tensor,
        learning_rate: float,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._is_moving = True
        try:
            if parameters is not self._layout.values:
                self._move_others(parameters, gradients, self._rates(learning_rate))
            elif learning_rate == self.learning_rate:
                self._step(scaler)
            else:
                own = [group["lr"] for group in self.optimizer.param_groups]
                for group, rate in zip(self.optimizer.param_groups, self._rates(learning_rate), strict=True):
                    group["lr"] = rate
                self._step(scaler)
                for group, rate in zip(self.optimizer.param_groups, own, strict=True):
                    group["lr"] = rate
        finally:
            self._is_moving = False

    def _step(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def _proportions(self, otherwise: list[float]) -> list[float]:
        """Return the groups' learning rates as multiples of the first group's."""
        rates = self._own_rates()
        if rates[0]:
            return [rate / rates[0] for rate in rates]
        # Groups that a script has added since then have no ratio yet.
        return (otherwise + [1.0] * len(rates))[: len(rates)]

    def _rates(self, learning_rate: float) -> list[float]:
        """Return every group's learning rate when the first has `learning_rate`."""
        # While a warm-up schedule is at 0, there are no ratios: keep the last ones.
        self._ratios = self._proportions(self._ratios)
        return [ratio * learning_rate for ratio in self._ratios]

    def _move_others(
        self, parameters: Tensor, gradients: Tensor, rates: Sequence[float], **options: object
    ) -> None:
        """Update parameters other than the model's, with a copy of the optimizer that shares its state.

        The model's own are not touched, because a worker of this rank may be computing with them.
        """
        values, grads = self._layout.views_of(parameters), self._layout.views_of(gradients)
        copies: dict[int, nn.Parameter] = {}
        for _, i in self._moved():
            copies[i] = nn.Parameter(values[i])
            copies[i].grad = grads[i]
        other = copy.copy(self.optimizer)
        # torch copies only state and groups; a user's class may need its own attributes.  Do not copy hooks,
        # or a `step` that a scheduler has bound to the user's optimizer.
        others = vars(self.optimizer).items()
        vars(other).update({k: v for k, v in others if k not in vars(other) and k != "step"})
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update({copies[i]: self.optimizer.state[p] for p, i in self._moved()})
        other.state = state
        other.param_groups = [
            {**group, **{k: v for k, v in options.items() if k in group}, "lr": rate}
            | {"params": [copies[self._index[p]] for p in group["params"] if p in self._index]}
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True)
        ]
        # Call the class's own method: a scheduler may have replaced the instance's `step`.
        type(other).step(other)

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in self._names():
            members = [(p, i) for p, i in self._moved() if isinstance(self._state(p).get(name), Tensor)]
            if name != "step" and all(self._state(p)[name].shape == p.shape for p, _ in members):
                found[name] = self._gathered(name, members, self._layout.values.numel())
            elif all(self._state(p)[name].dim() == 0 for p, _ in members):
                found[name] = self._gathered(name, members, len(self._parameters))
            else:
                found |= {f"{name}.{i}": self._state(p)[name] for p, i in members}
        return found

    def vectors(self) -> dict[str, Tensor]:
        if not self._names():
            self._make_state()
        size = self._layout.values.numel()
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if name in self._vectors and tensor.numel() == size and name != "step"
        }

    def reset(self) -> None:
        for p, i in self._moved():
            self._state(p).clear()
            self._state(p).update(copy.deepcopy(self._initial.get(i, {})))

    def release(self) -> None:
        self._hook.remove()

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[parameter]
        return state

    def _names(self) -> list[str]:
        """Return the names of the optimizer's state tensors."""
        return sorted(
            {
                name
                for p, _ in self._moved()
                for name, value in self._state(p).items()
                if torch.is_tensor(value)
            }
        )

    def _gathered(self, name: str, members: list[tuple[nn.Parameter, int]], size: int) -> Tensor:
        """Return the vector that holds one kind of state for all parameters; first move state into it."""
        first = self._state(members[0][0])[name]
        vector = self._vectors.get(name)
        if vector is None or vector.numel() != size or vector.dtype != first.dtype:
            vector = torch.zeros(size, dtype=first.dtype, device=first.device)
            self._vectors[name] = vector
            in_layout = size == self._layout.values.numel()
            self._views[name] = self._layout.views_of(vector) if in_layout else list(vector.unbind())
        for p, i in members:
            state, view = self._state(p), self._views[name][i]
            if state[name] is not view:
                view.copy_(state[name])
                state[name] = view
        return vector

    def _make_state(self) -> None:
        """Create the state as it is before the first update, without changing the parameters."""
        parameters = self._layout.values.clone()
        self._is_moving = True
        try:
            rates = self._own_rates()
            self._move_others(parameters, torch.zeros_like(parameters), rates, weight_decay=0.0)
        finally:
            self._is_moving = False
        for p, _ in self._moved():
            for name, start in (("step", 0.0), ("mu_product", 1.0)):
                if torch.is_tensor(self._state(p).get(name)):
                    self._state(p)[name].fill_(start)


def _is_fresh(state: dict[str, Any]) -> bool:
    """Return whether an optimizer created this state before its first step, rather than loaded it."""
    return "step" in state and float(state["step"]) == 0
