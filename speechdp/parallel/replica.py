"""One rank's copy of the model: flat parameters, flat gradients, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from speechdp.errors import RunError
from speechdp.parallel import loss_scale
from speechdp.parallel.flat_buffer import FlatBuffer
from speechdp.parallel.updates import FlatUpdate, ParameterwiseUpdate, Update

#: Extra scalars after the parameters and the gradients: the frame count that weights the exchange.
_NUM_EXTRA = 1


class Replica:
    """The model, its parameters and gradients as two flat vectors, and the optimizer over them.

    The model's trainable parameters become views into one vector, their gradients views into the other.
    Gradients are SUMS over this rank's frames, never means: ranks with different numbers of frames then
    combine exactly.

    Args:
        model: model whose parameters are of one type, on one device.
        optimizer: a function that makes an optimizer of a list of parameters; it gets the flat vector alone,
            which is fast, and correct for element-wise optimizers.  Or an optimizer of the model's
            parameters, which keeps them: its groups, learning rates and state remain its owner's.
        max_gradient_norm: norm to which the mean gradient of an update is clipped; 0: no limit.
        scaler: scaler of the losses; updates whose gradients overflow are skipped.

    Attributes:
        parameters: flat parameters; `parameters.extra[0]` is scratch space for a weight.
        gradients: flat gradients; `gradients.extra[0]` is scratch space for a frame count.
        update_rule: the optimizer and its state.
        learning_rate_factor: factor by which the rates that the optimizer's owner sets are multiplied.
        frames: frames whose gradients have been accumulated since the last update.
        more_to_come: whether another backward pass follows in this step, so no gradient is complete.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | torch.optim.Optimizer,
        *,
        max_gradient_norm: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model = model
        self.model_parameters = [p for p in model.parameters() if p.requires_grad]
        self.parameters = FlatBuffer([p.detach() for p in self.model_parameters], num_extra=_NUM_EXTRA)
        self.gradients = self.parameters.like()
        self._make_gradient_views()
        self.update_rule: Update
        if isinstance(optimizer, torch.optim.Optimizer):
            self.update_rule = ParameterwiseUpdate(optimizer, self.model_parameters, self.parameters)
        else:
            self.update_rule = FlatUpdate(self.parameters.values, self.gradients.values, optimizer)
        for parameter, value in zip(self.model_parameters, self.parameters.views, strict=True):
            parameter.data = value
        self._addresses = [parameter.data_ptr() for parameter in self.model_parameters]
        self._gradients_are_bound = False
        self.bind_gradients()
        self.max_gradient_norm, self.scaler = max_gradient_norm, scaler
        if scaler is not None:
            loss_scale.begin(scaler, self.parameters.values.device)
        # Read now: after loading a state, a scaler has that state's scale as its initial one.
        self._first_scale = self.loss_scale
        self.learning_rate_factor = 1.0
        self.frames = 0
        self.more_to_come = False

    def bind_parameters(self) -> None:
        """Make the model use the flat vector again, even where a parameter has got its own memory.

        The vector takes over the values in that memory: `flatten_parameters` of an LSTM on a GPU has copied
        the parameter there, or `parameter.data = ...` has set it.  Call this after forward passes, before
        anything else writes the vector: the model would not see the change.

        Raises:
            RunError: a parameter has another type or shape, or is on another device.
        """
        # Called twice a step: this is the cheapest check that notices the change.
        if [parameter.data_ptr() for parameter in self.model_parameters] != self._addresses:
            self._take_back()

    def check_parameters(self) -> None:
        """Check that the model's parameters fit the flat vector; change nothing.

        Raises:
            RunError: one has another type or shape, or is on another device.
        """
        for parameter, view in zip(self.model_parameters, self.parameters.views, strict=True):
            if _kind(parameter) != _kind(view):
                raise RunError(
                    f"{name_of(parameter, self.model)} is now {_kind(parameter)}, but ranks exchange it as "
                    f"{_kind(view)}; change type, device and shapes of a model (`to`, `half`, `cuda`) "
                    "before creating DataParallel"
                )

    def _take_back(self) -> None:
        self.check_parameters()
        views = zip(self.model_parameters, self.parameters.views, self._addresses, strict=True)
        for parameter, view, address in views:
            if parameter.data_ptr() != address:
                view.copy_(parameter.detach())
                parameter.data = view
        # Whatever moves a module's parameters, such as `to`, also moves the memory of these same tensors.
        self._make_gradient_views()
        if self._gradients_are_bound:
            self.bind_gradients()

    def _make_gradient_views(self) -> None:
        # `data` gives each view its own version counter, for writes through that view alone.  Exchanges,
        # which write the whole vector, do not count.
        self.gradients.views = [view.data for view in self.gradients.views_of(self.gradients.values)]

    def gradient_writes(self) -> list[int]:
        """Return how often backward passes or a script have written each parameter's gradient."""
        return [gradient._version for gradient in self.gradients.views]

    def bind_gradients(self) -> None:
        """Make backward fill the flat vector, even after a script has set gradients to None."""
        self._gradients_are_bound = True
        for parameter, gradient in zip(self.model_parameters, self.gradients.views, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def unbind_gradients(self) -> None:
        """Make backward fill other memory until gradients are bound again; what it adds there does not count.

        The vector keeps what has been accumulated.
        """
        self._gradients_are_bound = False
        for parameter in self.model_parameters:
            parameter.grad = None

    def holds_gradients(self) -> bool:
        """Return whether every gradient is a view of the flat vector."""
        pairs = zip(self.model_parameters, self.gradients.views, strict=True)
        return all(parameter.grad is gradient for parameter, gradient in pairs)

    @property
    def is_finite(self) -> bool:
        """Whether all parameters are finite; the host waits for the device."""
        return bool(self.parameters.values.isfinite().all())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Torch's optimizer."""
        return self.update_rule.optimizer

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next `apply_gradients`; that of the first parameter group."""
        return self.update_rule.learning_rate * self.learning_rate_factor

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use `learning_rate`, times the factor, from the next update on."""
        self.update_rule.set_learning_rate(learning_rate)

    def reset_optimizer(self) -> None:
        """Forget the optimizer's state (momentum, moments, step counts)."""
        self.update_rule.reset()

    def apply_gradients(self, frames: float | Tensor) -> None:
        """Update the parameters with the mean gradient over `frames` and clear the gradients.

        Args:
            frames: number of frames in the summed gradients (of all ranks, if the sum is over ranks).  A
                tensor, which must be positive, stays on its device, so the host need not wait for it.  With 0
                the gradients are cleared and nothing else changes.
        """
        if isinstance(frames, Tensor) or frames > 0:
            if self.scaler is not None:  # before the gradients are clipped
                self.scaler.unscale_(self.optimizer)
            own = self.parameters.values, self.gradients.values
            self._update(*own, frames, self.learning_rate, self.scaler)
        self.clear_gradients()

    def hand_over_gradients(self, take: Callable[[], object]) -> None:
        """Let `take` use the gradients for an update elsewhere, unless they have overflowed; clear them."""
        loss_scale.hand_over(self.scaler, self.gradients.values, take)
        self.clear_gradients()

    @property
    def loss_scale(self) -> float:
        """Scale of the losses that the gradients come from; the host waits for the device."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def reset_loss_scale(self) -> None:
        """Reset the loss scale to its first value, and the count of steps towards raising it."""
        if self.scaler is not None:
            begun = {"scale": self._first_scale, "_growth_tracker": 0}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **begun})

    def give_loss_scale(self) -> None:
        """Put this rank's loss scale behind its parameters, for ranks that take over both."""
        if self.scaler is not None:
            self.parameters.extra[0] = self.loss_scale

    def take_loss_scale(self) -> None:
        """Scale losses from now on as the rank does whose parameters this rank has copied."""
        if self.scaler is not None:
            self.scaler.update(self.parameters.extra[0].float())

    def update(
        self, parameters: Tensor, gradients: Tensor, frames: float | Tensor, learning_rate: float
    ) -> None:
        """Let the optimizer update `parameters` that a server keeps beside this replica's own.

        The optimizer has one state, whatever it updates.  Not for two threads at a time.

        Args:
            parameters: flat vector in this replica's layout.
            gradients: summed over `frames`, in the same layout, with any loss scale removed; overwritten with
                the values applied.
            frames: number of frames in the gradients, positive.
            learning_rate: rate of this update alone; other parameter groups keep their ratio to the first.
        """
        self._update(parameters, gradients, frames, learning_rate, None)

    def _update(
        self,
        parameters: Tensor,
        gradients: Tensor,
        frames: float | Tensor,
        learning_rate: float,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.clear_left_out(gradients)  # they must not count in the norm for clipping
        gradients.mul_(self._gradient_scale(gradients, frames))
        self.update_rule.move(parameters, gradients, learning_rate, scaler)

    def clear_left_out(self, gradients: Tensor) -> None:
        """Zero the gradients, in a flat vector, of parameters that the optimizer does not update."""
        if left_out := self.update_rule.left_out():
            views = self.gradients.views_of(gradients)
            for index in left_out:
                views[index].zero_()

    def _gradient_scale(self, gradients: Tensor, frames: float | Tensor) -> float | Tensor:
        """Return the factor that turns sums into means and clips them: one pass over the vector does both."""
        if self.max_gradient_norm <= 0:
            return 1.0 / frames
        norm = torch.linalg.vector_norm(gradients) / frames
        # As torch.nn.utils.clip_grad_norm_ has it; on the device, so that the host need not wait.
        return torch.clamp(self.max_gradient_norm / (norm + 1e-6), max=1.0) / frames

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the parameters after the block to their values before it."""
        own = self.parameters.values.clone()
        try:
            yield
        finally:
            self.parameters.values.copy_(own)

    def clear_gradients(self) -> None:
        """Zero the gradients in place (they are views; setting them to None would lose them)."""
        self.gradients.whole.zero_()
        self.frames = 0

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state tensors by name (e.g. `momentum_buffer`), not copies."""
        return self.update_rule.tensors()

    def optimizer_vectors(self) -> dict[str, Tensor]:
        """Return the optimizer's flat vectors in the parameters' layout, which ranks can average.

        The names are the same on every rank.
        """
        return self.update_rule.vectors()

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite the optimizer's state with `tensors`, as `optimizer_tensors` returned them."""
        living = self.optimizer_tensors()
        assert living.keys() == tensors.keys(), "a checkpoint of another optimizer"
        for name, tensor in living.items():
            tensor.copy_(tensors[name])


def name_of(parameter: Tensor, model: nn.Module) -> str:
    """Return a parameter's name in messages; it may belong to the model or only to the optimizer."""
    names = [name for name, p in model.named_parameters() if p is parameter]
    return f"the model's {names[0]}" if names else f"a parameter of shape {list(parameter.shape)}"


def _kind(tensor: Tensor) -> str:
    """Return the properties of a tensor that an exchange between ranks depends on."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)} on {tensor.device}"
