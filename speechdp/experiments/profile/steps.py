"""A training step in stages: the same computation as the plain step, but each module is timed separately.

The autograd graph is cut between modules: the outputs of a stage are passed on as new leaves, and backward
starts each stage with the gradients accumulated in its leaves.  Nothing is computed twice, and the
parameters get the same gradients as from `task.loss(...).total.backward()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from speechdp.data.loading.batch import Batch
from speechdp.experiments.profile.measured import BACKWARD, FORWARD, FunctionTime
from speechdp.models.captured import driving
from speechdp.models.precision import Precision
from speechdp.tasks.base import LOSS, Stage, Values


class StageClock:
    """Records start and duration of each function of a step; on a GPU synchronises before and after it.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._origin_s = device, perf_counter()
        self._functions: list[FunctionTime] = []
        self._is_inside = False

    def begin(self, origin_s: float) -> None:
        """Discard all records, and count time from `origin_s`, a value of `time.perf_counter`."""
        self._origin_s = origin_s
        self._functions.clear()

    def now(self) -> float:
        """Synchronise the device, and return the time since the origin, s."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter() - self._origin_s

    @contextmanager
    def timed(self, name: str, phase: str) -> Iterator[None]:
        """Time the block; a nested block counts as part of the outer one."""
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
        """Return the records since the last call."""
        functions = tuple(self._functions)
        self._functions.clear()
        return functions


@dataclass(frozen=True)
class _Passed:
    """A stage after its forward pass: its outputs, and the leaves that pass them on."""

    name: str
    outputs: Values
    leaves: Values

    def backward(self) -> None:
        """Run the stage's backward pass from the gradients of its leaves."""
        driven = [(out, self.leaves[name].grad) for name, out in self.outputs.items()]
        pairs = [(out, grad) for out, grad in driven if grad is not None and out.requires_grad]
        if pairs:
            driving(*zip(*pairs, strict=True)).backward()  # type: ignore[no-untyped-call]


def _pass(stage: Stage, values: Values, batch: Batch, precision: Precision) -> _Passed:
    with precision.computing():
        outputs = stage.run(values, batch)
    leaves = {name: x.detach().requires_grad_(x.requires_grad) for name, x in outputs.items()}
    return _Passed(stage.name, outputs, leaves)


class StagedStep:
    """Forward and backward pass of a training step, stage by stage."""

    def __init__(self, stages: Sequence[Stage], clock: StageClock, precision: Precision) -> None:
        self._stages, self._clock, self._precision = tuple(stages), clock, precision
        self._passed: list[_Passed] = []

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch on the model's device: a scalar, detached from the graph."""
        self._passed.clear()
        values: Values = {}
        for stage in self._stages:
            with self._clock.timed(stage.name, FORWARD):
                self._passed.append(_pass(stage, values, batch, self._precision))
            values = {**values, **self._passed[-1].leaves}
        return values[LOSS].detach()

    def backward(self, gradient: Tensor | None = None) -> None:
        """Accumulate the gradients of the loss, scaled by `gradient` (default 1); free forward's graph."""
        loss = self._passed[-1].leaves[LOSS]
        loss.grad = torch.ones_like(loss) if gradient is None else gradient
        while self._passed:
            passed = self._passed.pop()
            with self._clock.timed(passed.name, BACKWARD):
                passed.backward()


class SingleModule:
    """One stage alone: its inputs are computed once by the other stages, its output gradients are random.

    Its inputs require gradients if they do in a whole step, and the outputs that the loss reaches in a whole
    step get gradients here, so the work is the same as in a whole step.

    Args:
        stages: stages of the whole step.
        name: name of the stage to run.
        batch: batch on the model's device.
        precision: precision of the passes.
    """

    def __init__(
        self, stages: Sequence[Stage], name: str, batch: Batch, clock: StageClock, precision: Precision
    ) -> None:
        self._batch, self._clock, self._precision = batch, clock, precision
        self._stage = next(stage for stage in stages if stage.name == name)
        self._inputs: Values = {}
        passed: list[_Passed] = []
        values: Values = {}
        for stage in stages:
            if stage is self._stage:
                self._inputs = values
            passed.append(_pass(stage, values, batch, precision))
            values = {**values, **passed[-1].leaves}
        values[LOSS].grad = torch.ones_like(values[LOSS])
        for each in reversed(passed):
            each.backward()
        own = next(each for each in passed if each.name == name)
        self._gradients = {n: torch.randn_like(x) for n, x in own.leaves.items() if x.grad is not None}
        self._forget()

    def step(self) -> None:
        """Run the stage's forward and backward pass."""
        with self._clock.timed(self._stage.name, FORWARD):
            passed = _pass(self._stage, self._inputs, self._batch, self._precision)
        for name, gradient in self._gradients.items():
            passed.leaves[name].grad = gradient
        with self._clock.timed(self._stage.name, BACKWARD):
            passed.backward()
        self._forget()

    def _forget(self) -> None:
        for leaf in self._inputs.values():
            leaf.grad = None
