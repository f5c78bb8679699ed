"""One training step in stages: the same mathematics as the plain step, each module's share timed apart.

The graph is cut where modules meet: what a stage puts out is handed on as a leaf of its own, and backward
starts each stage with the gradient that has gathered in its leaves.  So nothing is computed twice, and the
parameters get the gradients they get from `task.loss(...).total.backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.experiments.profile.measured import BACKWARD, FORWARD, FunctionTime
from speechdp.tasks.base import Task

if TYPE_CHECKING:
    from speechdp.models.lstm_am import LstmAcousticModel
    from speechdp.tasks.synthesis import SynthesisTask

#: Tensors by name: what stages before this one have put out, as leaves.
Values = dict[str, Tensor]
LOSS = "loss"


@dataclass(frozen=True)
class Stage:
    """A part of the forward pass.

    Attributes:
        name: as in a profile, e.g. "decoder".
        run: computes named outputs from the outputs of the stages before, and the batch.
    """

    name: str
    run: Callable[[Values, Batch], Values]


class StageClock:
    """Notes when each function of a step began and how long it took; on a GPU waits for it at both ends.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._origin_s = device, perf_counter()
        self._functions: list[FunctionTime] = []
        self._is_inside = False

    def begin(self, origin_s: float) -> None:
        """Forget what was noted, and count from `origin_s` by `time.perf_counter`."""
        self._origin_s = origin_s
        self._functions.clear()

    def now(self) -> float:
        """Return the time since the origin, s, when the device has done all it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter() - self._origin_s

    @contextmanager
    def timed(self, name: str, phase: str) -> Iterator[None]:
        """Time the block; one inside another counts as part of the outer one."""
        if self._is_inside:
            yield
            return
        start_s = self.now()
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
        self._functions.append(FunctionTime(name, phase, start_s, self.now() - start_s))

    def take(self) -> tuple[FunctionTime, ...]:
        """Return what was noted since the last call."""
        functions = tuple(self._functions)
        self._functions.clear()
        return functions


def stages_of(task: Task, model: nn.Module) -> tuple[Stage, ...]:
    """Return the stages of a task's forward pass, the loss last."""
    if task.name == "synthesis":
        return _synthesis_stages(cast("SynthesisTask", task), model)
    return _acoustic_stages(cast("LstmAcousticModel", model))


def _acoustic_stages(model: LstmAcousticModel) -> tuple[Stage, ...]:
    """The LSTM stack (with the choice of learnt frames), the output layer, cross-entropy."""

    def encode(values: Values, batch: Batch) -> Values:
        learnt = batch.targets != IGNORED_TARGET  # (B, T)
        return {"encoded": model.encode(batch.features, batch.lengths)[learnt]}  # (frames, H)

    def classify(values: Values, batch: Batch) -> Values:
        return {"logits": model.output(values["encoded"])}  # (frames, C)

    def lose(values: Values, batch: Batch) -> Values:
        targets = batch.targets[batch.targets != IGNORED_TARGET]
        return {LOSS: nn.functional.cross_entropy(values["logits"], targets, reduction="sum")}

    return Stage("encoder", encode), Stage("output", classify), Stage("loss", lose)


def _synthesis_stages(task: SynthesisTask, module: nn.Module) -> tuple[Stage, ...]:
    """Encoder, decoder, post-processing net, and all parts of the loss."""
    from speechdp.models.tacotron.model import Tacotron, TacotronOutput  # noqa: PLC0415 - of this task alone
    from speechdp.tasks.synthesis import synthesis_losses  # noqa: PLC0415

    model = cast("Tacotron", module)

    def encode(values: Values, batch: Batch) -> Values:
        return {"memory": model.encode(batch.targets)}

    def decode(values: Values, batch: Batch) -> Values:
        taught = batch.features[:, :, : model.mel_dim]
        decoded = model.decode(values["memory"], batch.targets, taught, batch.lengths)
        return {"mel": decoded.mel, "stop": decoded.stop_logits, "attention": decoded.attention}

    def postprocess(values: Values, batch: Batch) -> Values:
        return {"linear": model.postproc(values["mel"], batch.lengths)}

    def lose(values: Values, batch: Batch) -> Values:
        output = TacotronOutput(values["mel"], values["linear"], values["stop"], values["attention"])
        return {LOSS: synthesis_losses(output, batch, model).total(task.guided_attention)}

    named = {"encoder": encode, "decoder": decode, "postproc": postprocess, "loss": lose}
    return tuple(Stage(name, run) for name, run in named.items())


@dataclass(frozen=True)
class _Passed:
    """A stage that has been run forward: its outputs, and the leaves they are handed on as."""

    name: str
    outputs: Values
    leaves: Values

    def backward(self) -> None:
        """Run the stage backward from the gradients of its leaves."""
        driven = [(out, self.leaves[name].grad) for name, out in self.outputs.items()]
        pairs = [(out, grad) for out, grad in driven if grad is not None and out.requires_grad]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])


def _pass(stage: Stage, values: Values, batch: Batch) -> _Passed:
    outputs = stage.run(values, batch)
    leaves = {name: x.detach().requires_grad_(x.requires_grad) for name, x in outputs.items()}
    return _Passed(stage.name, outputs, leaves)


class StagedStep:
    """Forward and backward pass of a training step, stage by stage."""

    def __init__(self, stages: Sequence[Stage], clock: StageClock) -> None:
        self._stages, self._clock = tuple(stages), clock
        self._passed: list[_Passed] = []

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch on the model's device; a scalar without a graph."""
        self._passed.clear()
        values: Values = {}
        for stage in self._stages:
            with self._clock.timed(stage.name, FORWARD):
                self._passed.append(_pass(stage, values, batch))
            values = {**values, **self._passed[-1].leaves}
        return values[LOSS].detach()

    def backward(self) -> None:
        """Add the gradients of the loss to the parameters'; frees what forward has kept."""
        leaf = self._passed[-1].leaves[LOSS]
        leaf.grad = torch.ones_like(leaf)
        while self._passed:
            passed = self._passed.pop()
            with self._clock.timed(passed.name, BACKWARD):
                passed.backward()


class SingleModule:
    """One stage alone, the others off: fed what they put out once, driven by random gradients.

    Its inputs ask for gradients where they do in a whole step, and the outputs that the loss reaches there
    are driven here, so the work is that of its share of a whole step.

    Args:
        stages: of the whole step.
        name: of the stage to run.
        batch: on the model's device.
    """

    def __init__(self, stages: Sequence[Stage], name: str, batch: Batch, clock: StageClock) -> None:
        self._batch, self._clock = batch, clock
        self._stage = next(stage for stage in stages if stage.name == name)
        self._inputs: Values = {}
        passed: list[_Passed] = []
        values: Values = {}
        for stage in stages:
            if stage is self._stage:
                self._inputs = values
            passed.append(_pass(stage, values, batch))
            values = {**values, **passed[-1].leaves}
        values[LOSS].grad = torch.ones_like(values[LOSS])
        for each in reversed(passed):
            each.backward()
        own = next(each for each in passed if each.name == name)
        self._gradients = {n: torch.randn_like(x) for n, x in own.leaves.items() if x.grad is not None}
        self._forget()

    def step(self) -> None:
        """Run the stage forward and backward."""
        with self._clock.timed(self._stage.name, FORWARD):
            passed = _pass(self._stage, self._inputs, self._batch)
        for name, gradient in self._gradients.items():
            passed.leaves[name].grad = gradient
        with self._clock.timed(self._stage.name, BACKWARD):
            passed.backward()
        self._forget()

    def _forget(self) -> None:
        for leaf in self._inputs.values():
            leaf.grad = None
