"""One rank's copy of the model: flat parameters, flat gradients, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from speechdp.parallel.flat_buffer import FlatBuffer
from speechdp.parallel.uncompiled import made_without_compiler, step_without_compiler

#: Extra scalars behind the parameters and the gradients: the frame count that weights the exchange.
_NUM_EXTRA = 1


class Replica:
    """The model, its parameters and gradients as two flat vectors, and the optimizer over them.

    The optimizer sees one parameter, the flat vector: an update is a handful of kernels whatever the
    number of layers.  This equals the update tensor by tensor for every element-wise optimizer (SGD with
    momentum, Adam, AdamW).  Gradients are SUMS over this rank's frames, never means: ranks with different
    numbers of frames then combine exactly.

    Attributes:
        parameters: flat parameters; `parameters.extra[0]` is scratch space for a weight.
        gradients: flat gradients; `gradients.extra[0]` is scratch space for a frame count.
        frames: frames whose gradients have been accumulated since the last update.
        learning_rate: what the next `apply_gradients` uses; the optimizer learns of it only then, since a
            server may be updating with another worker's meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        max_gradient_norm: float = 0.0,
    ) -> None:
        self.model = model
        self.model_parameters = [p for p in model.parameters() if p.requires_grad]
        self.parameters = FlatBuffer([p.detach() for p in self.model_parameters], num_extra=_NUM_EXTRA)
        self.gradients = self.parameters.like()
        for parameter, value, gradient in zip(
            self.model_parameters, self.parameters.views, self.gradients.views, strict=True
        ):
            parameter.data = value
            parameter.grad = gradient
        self.flat = nn.Parameter(self.parameters.values)
        self.flat.grad = self.gradients.values
        self.optimizer = made_without_compiler(lambda: make_optimizer([self.flat]))
        self.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self._prime_optimizer()
        self.max_gradient_norm = max_gradient_norm
        self.frames = 0

    def _prime_optimizer(self) -> None:
        """Create the optimizer's state now, all zero, instead of at its first step.

        A rank that has had no frames yet must be able to take part in an average of the momentum, and a
        checkpoint holds the same tensors from the first step to the last.  Zero is where the first step
        of SGD with momentum and of Adam starts from anyway.
        """
        self._step_optimizer(0.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Set the optimizer's state (momentum, moments, step counts) to zero."""
        for tensor in self.optimizer_tensors().values():
            tensor.zero_()

    def apply_gradients(self, frames: float | Tensor) -> None:
        """Update the parameters with the mean gradient over `frames` and clear the gradients.

        Args:
            frames: frames the summed gradients stand for (of all ranks, if they were summed over ranks).
                A tensor stays on its device, so that the host need not wait for it.  0 changes nothing
                but clears the gradients (a tensor is taken to be positive).
        """
        if isinstance(frames, Tensor) or frames > 0:
            self.update(self.parameters.values, self.gradients.values, frames, self.learning_rate)
        self.clear_gradients()

    def update(
        self, parameters: Tensor, gradients: Tensor, frames: float | Tensor, learning_rate: float
    ) -> None:
        """Let the optimizer move `parameters`: this replica's own, or those a server keeps beside them.

        The optimizer's state is one, whatever it moves.  Not for two threads at a time.

        Args:
            parameters: flat vector in this replica's layout.
            gradients: summed over `frames`, in the same layout; overwritten with what was applied.
            frames: frames behind the gradients, positive.
            learning_rate: of this update alone.
        """
        gradients.mul_(self._gradient_scale(gradients, frames))
        self.flat.data, self.flat.grad = parameters, gradients
        self._step_optimizer(learning_rate)

    def _step_optimizer(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        step_without_compiler(self.optimizer)

    def _gradient_scale(self, gradients: Tensor, frames: float | Tensor) -> float | Tensor:
        """Return the factor that turns sums into means and clips them: one pass over the vector, not two."""
        if self.max_gradient_norm <= 0:
            return 1.0 / frames
        norm = torch.linalg.vector_norm(gradients) / frames
        # As torch.nn.utils.clip_grad_norm_ has it; on the device, so that the host need not wait.
        return torch.clamp(self.max_gradient_norm / (norm + 1e-6), max=1.0) / frames

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the parameters back, after the block, to what they were before it."""
        own = self.parameters.values.clone()
        try:
            yield
        finally:
            self.parameters.values.copy_(own)

    def clear_gradients(self) -> None:
        """Zero the gradients in place (they are views; setting them to None would lose them)."""
        self.gradients.whole.zero_()
        self.frames = 0

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use `learning_rate` from the next update on."""
        self.learning_rate = learning_rate

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state tensors by name (e.g. `momentum_buffer`), living ones, not copies."""
        state = self.optimizer.state.get(self.flat, {})
        # SGD without momentum keeps a None for its buffer.
        return {name: value for name, value in sorted(state.items()) if isinstance(value, Tensor)}

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite the optimizer's state with `tensors` (as `optimizer_tensors` gave them)."""
        living = self.optimizer_tensors()
        assert living.keys() == tensors.keys(), "a checkpoint of another optimizer"
        for name, tensor in living.items():
            tensor.copy_(tensors[name])
