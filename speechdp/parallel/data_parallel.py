"""Data-parallel training of a user's own model, with the user's own optimizer and loop (docs/api.md)."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, SupportsFloat, TypeVar

import torch
from torch import Tensor, nn

from speechdp.comm.base import Communicator, Work
from speechdp.comm.calls import Calls
from speechdp.errors import ConfigError, DivergedError, RunError, one_line
from speechdp.launching.variables import FOLDER
from speechdp.models.evaluating import evaluating
from speechdp.parallel.batch_statistics import (
    average_statistics,
    averaged_statistics,
    refuse_unsynchronised,
)
from speechdp.parallel.joined_batches import BatchJoiner
from speechdp.parallel.registry import describe, parse_strategy
from speechdp.parallel.replica import Replica, name_of
from speechdp.parallel.script_checks import (
    check_loadable,
    check_model,
    check_norm,
    check_optimizer,
    check_same,
    check_same_call,
    check_saved_together,
    check_strategy,
    note_left_out,
    of_same_model,
)
from speechdp.parallel.script_folder import OWN_STATE, ScriptFolder, write_tensors
from speechdp.parallel.stop import Pause, StopWatch
from speechdp.parallel.strategy import Progress, Strategy
from speechdp.parallel.training_step import DivergenceWatch, TrainingStep, given_for_loss
from speechdp.parallel.untrained import StaysUntrained, share_untrained
from speechdp.process.ending import Paused, Stopped, StoppedUnsaved
from speechdp.timing.gather import gather_timing
from speechdp.timing.memory import peak_memory
from speechdp.timing.timeline import Span, Timeline

#: Overrides the script's strategy, as FOLDER overrides its folder: a script is compared without edits.
STRATEGY = "SPEECHDP_STRATEGY"

#: Names of calls in messages.
_BEGINNING, _END = "the beginning of `with run`", "the end of `with run`"
_MAKING, _EVALUATING = "DataParallel(...)", "run.evaluating()"

#: Keys that `log` itself writes into a line.
_LOGGED = ("step", "time_s", "learning_rate", "frames", "period")

Batch = TypeVar("Batch")


class DataParallel:
    """Train a model on all ranks of a communicator; a strategy decides what they exchange and when.

    The model's parameters become views into one vector, which is exchanged as a whole; `model` and
    `optimizer` remain the script's own objects.  `with run:` starts and ends training; inside it, each
    `with run.step():` is one step of every rank.  After the block all ranks hold the same parameters.

    Example::

        run = DataParallel(model, optimizer, comm, strategy="model_averaging:period=16", folder="runs/ma-16")
        with run:
            for x, y in run.batches(loader):
                with run.step(weight=len(x)) as step:
                    step.backward(cross_entropy(model(x), y, reduction="sum"))
        run.save("model.pt")

    Args:
        model: the same on every rank, with trainable parameters on one device and of one type, float32 or
            float64.  Parameters that are to be trained later must be trainable now.  All ranks start with
            rank 0's parameters and buffers.
        optimizer: optimizer of the model's parameters, in any number of groups.  The script never calls its
            `step` or `zero_grad`; it sets learning rates, with a scheduler or by hand.
        comm: the ranks, as `run_ranks` gives them.
        strategy: `NAME` or `NAME:option=value,...` as in docs/strategies.md; SPEECHDP_STRATEGY overrides it.
        folder: folder for run.json, metrics.jsonl, timeline/, timing.json and checkpoints/; None: nothing is
            written.  SPEECHDP_FOLDER overrides it.
        max_gradient_norm: norm to which the mean gradient of an update is clipped; 0: no limit.
        num_steps: steps of the whole training, for strategies that depend on its progress; 0: unknown.
        scaler: gradient scaler, for training in float16.

    Raises:
        ConfigError: the ranks' models differ, or an option cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        strategy: str = "gradient_averaging",
        folder: str | Path | None = None,
        *,
        max_gradient_norm: float = 0.0,
        num_steps: int = 0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model, self.optimizer, self.comm = model, optimizer, comm
        self._calls = comm.calls = comm.calls or Calls()
        with self._calls.of(_MAKING):
            check_same_call(_MAKING, comm)
            settings = _settings(comm, strategy, folder)
            self.strategy: Strategy = parse_strategy(settings["strategy"])
            check_strategy(self.strategy, comm, num_steps)
            check_model(model)
            check_optimizer(optimizer)
            refuse_unsynchronised(model, comm, together=self.strategy.traits.synchronous)
            check_norm(max_gradient_norm)
            check_same(model, optimizer, comm)
            if comm.rank == 0:
                note_left_out(model, optimizer)
        traits = self.strategy.traits
        #: Whether the strategy counts frames: periods in frames must end at the same step on all ranks.
        self._counts_frames = traits.synchronous and traits.counts_frames
        self._replica = Replica(model, optimizer, max_gradient_norm=max_gradient_norm, scaler=scaler)
        # Gradients count only between the beginning and the end of a step.  Scripts that clear them before
        # each step, as in plain torch, may leave gradients of other models' losses there.
        self._replica.unbind_gradients()
        self._stays_untrained = StaysUntrained(self._replica)
        self._num_steps, self._scaler = num_steps, scaler
        self._device = next(iter(self._replica.model_parameters)).device
        self._folder = ScriptFolder(None if settings["folder"] is None else Path(settings["folder"]), comm)
        #: Steps of this rank so far, including those that it only joined.
        self.steps = 0
        self._weight_here = 0  # of this rank so far
        self._weight_per_rank = 0.0
        self._weight_of_all: int | None = None  # known while all ranks evaluate, and at the end of training
        self._phase = _Phase.NEW
        self._is_in_step = False
        #: The step or evaluation that an error ended early, and the error; None: there is none.
        self._left_by: tuple[str, str] | None = None
        self._total_weight = torch.zeros(1, dtype=torch.float64)  # of all ranks, in the current step
        self._weighing: Work | None = None
        self._losses: Tensor | None = None  # sum of those not yet checked
        #: Bytes the communicator had sent when the current step began, and bytes it has sent in steps.
        self._sent_before = self._sent_bytes = 0.0
        self._begun_s = 0.0  # training time of earlier processes
        self._loaded: dict[str, Any] | None = None
        self._stop: StopWatch | None = None
        #: Step after which training is cut off; 0: never.
        self._cut_at = 0
        #: Whether the script has asked for its state since training began.
        self._has_saved = False

    @property
    def folder(self) -> Path | None:
        """Folder in which the run is recorded; None: none."""
        return self._folder.path

    # -- start and end ----------------------------------------------------------------------------------

    def __enter__(self) -> DataParallel:
        """Start training.  Collective."""
        if self._phase is not _Phase.NEW:
            raise RunError("`with run` is entered a second time; make a new DataParallel to train again")
        pause = Pause.of_environment()
        self._cut_at = pause.step if pause is not None and pause.cut else 0
        with ExitStack() as undo, self._calls.of(_BEGINNING):
            undo.callback(self._end)
            together = self.strategy.traits.replicas_equal and self.comm.spans_job
            self._calls.begin(self, together=together)
            check_same_call(_BEGINNING, self.comm)
            # First everything that may refuse: then the model is still the script's own, and no folder is
            # touched.
            self._stays_untrained.check_model()
            self._replica.check_parameters()
            check_saved_together(self._loaded, self.strategy, self.comm)
            self._replica.bind_parameters()
            loaded, self._loaded = self._loaded, None
            state_of = None if loaded is None else loaded.get("run_id", "")
            path = self._folder.begin(self._facts(), self._device, state_of=state_of)
            undo.callback(self._folder.fail)
            #: Where this rank's time goes; `with run.timeline.span(...)` times parts of the script.
            self.timeline = Timeline(path, rank=self.comm.rank, device=self._device)
            undo.callback(self.timeline.close)
            self._joiner = BatchJoiner(self.model, self.comm, self.timeline, self._calls)
            own = None if loaded is None else self._laid_aside()
            share_untrained(self.model, self.comm, known={} if loaded is None else loaded["model"])
            self.strategy = self.strategy.attach(self._replica, self.comm, self.timeline)
            self._watch = DivergenceWatch(self.strategy, self.comm)
            self._phase = _Phase.TRAINING
            if loaded is not None and own is not None:
                with ExitStack() as abandoning:
                    abandoning.callback(self.strategy.abandon)
                    self._take_up(loaded, own)
                    abandoning.pop_all()
            self.strategy.resume()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End training: give all ranks the same parameters and complete the folder.  Collective.

        After `should_stop` was true, the run is not complete: replicas stay as they are.  After an error this
        rank closes only its own timeline; whatever ends the job deals with the other ranks.

        Raises:
            Stopped: `should_stop` was true; `run_ranks` ends the job with exit code 75.
            StoppedUnsaved: likewise, but the script has saved no state since training began; exit code 76.
            DivergedError: the final parameters, or a loss, are not finite; the run is not complete.
        """
        if self._is_cut and self._phase is _Phase.ENDED:  # done at the step that cut training off
            return
        is_stopped = error is None and self._stop is not None and self._stop.is_reported
        with ExitStack() as ending:
            ending.callback(self._end)
            ending.callback(self.timeline.close)
            try:
                if error is None:
                    with self._calls.of(_END):
                        self._finish(is_stopped=is_stopped)
            except BaseException:
                self._folder.fail()
                raise
            if error is not None:
                self._folder.fail()
        if is_stopped and not self._has_saved:
            raise StoppedUnsaved(
                f"stopped as requested at step {self.steps}, but the script has saved nothing since it "
                f"started: the same command repeats these steps{self._folder.once_removed()}; call "
                "run.save_checkpoint when run.should_stop is true"
            )
        if is_stopped:
            raise Stopped

    def _end(self) -> None:
        """Release optimizer, signals and folder."""
        self._phase = _Phase.ENDED
        self._calls.end(self)
        self._replica.update_rule.release()
        self._folder.release()
        if self._stop is not None:
            self._stop.close()

    def _take_model(self) -> None:
        """Take the parameters as the script left them.  Raises RunError if one was added later."""
        self._stays_untrained.check_model()
        self._replica.bind_parameters()

    def _finish(self, *, is_stopped: bool) -> None:
        """Give all ranks the same parameters; record that the run ended well.  Collective."""
        self._check_whole()
        self._take_model()
        self._look_at_losses()
        self._joiner.complete()
        self.strategy.pause()
        check_same_call(_END, self.comm)
        if self._stop is not None:
            self._stop.drain()
        if is_stopped:
            if self._has_paused():
                self._folder.record_timing(self._gather_timing())
            self.strategy.close()
            return
        self._replica.bind_gradients()  # gradients of an incomplete round are still to be applied
        self.strategy.finish()
        self._replica.unbind_gradients()
        average_statistics(self.model, self.comm, has_trained=self._weight_here > 0)
        self._weight_of_all = self._sum_of_weights()
        timing, is_finite = self._gather_timing(), self._watch.all_finite()
        if is_finite:
            self._folder.complete(timing, self.steps)
        self.strategy.close()
        if not is_finite:
            self._refuse(f"a parameter of the final model is not finite after step {self.steps}")

    @property
    def _is_cut(self) -> bool:
        return 0 < self._cut_at <= self.steps

    def _end_where_cut(self) -> None:
        """End training after the step at which it is cut off, whatever the script's loop does.

        Collective at that step.

        Raises:
            Paused: training is cut off and the timing recorded; `run_ranks` ends the job with exit code 75.
        """
        if not self._is_cut:
            return
        with ExitStack() as ending:
            ending.callback(self._end)
            ending.callback(self.timeline.close)
            with self._calls.of(_END):
                self._finish(is_stopped=True)
        raise Paused

    def _has_paused(self) -> bool:
        """Return whether all ranks have reached their pause, with no signal before it.  Collective."""
        if self._is_cut:
            return True
        stop = self._stop
        if stop is None or stop.pause is None:
            return False
        return all(self.comm.allgather_object(stop.has_paused(self.steps)))

    def _gather_timing(self) -> dict[str, Any] | None:
        """Return on rank 0 the contents of timing.json.  Collective."""
        others = {
            "sent_bytes": round(self._sent_bytes + self.strategy.peer_bytes),
            "trained_s": self.timeline.training_time_s - self._begun_s,
            "statistics": self.strategy.statistics(),
            "memory": peak_memory(self._device),
        }
        synchronous = self.strategy.traits.synchronous
        return gather_timing(self.timeline, self.comm, others, synchronous=synchronous)

    def _facts(self) -> dict[str, Any]:
        return {
            "strategy": describe(self.strategy),
            "strategy_name": self.strategy.name,
            "period": self.strategy.traits.period,
            "changes_over_time": self.strategy.traits.changes_over_time,
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
        }

    # -- steps ------------------------------------------------------------------------------------------

    def step(self, weight: int = 1) -> ScriptStep:
        """Return one step as a context manager, whose end exchanges and updates.  Collective.

        All ranks take their steps together or, with an asynchronous strategy, each at its own pace.  The
        update uses the sum of all ranks' gradients divided by the sum of their weights.

        Args:
            weight: number of items the loss is summed over: frames, tokens, examples; 0: this rank only
                joins.  If the loss is a mean, give 1; then all ranks count equally.

        Raises:
            ConfigError: the weight is negative or not a whole number.
            RunError: training has not begun, or has ended.
        """
        self._check_training("step()")
        try:
            number = int(weight)
            is_number = bool(number == weight) and number >= 0
        except (TypeError, ValueError, OverflowError):  # None, several numbers; one that is not finite
            is_number = False
        if not is_number:
            raise ConfigError(f"step(weight={weight}): give a whole number of frames or examples, 0 or more")
        joins_only = self._joiner.joins_only
        return ScriptStep(self, 0 if joins_only else number, joins_only=joins_only)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's batches, as often as the rank with the most batches has one.  Collective.

        A rank that has run out gets its last batch again.  It only joins in those steps: their weight is 0,
        they add no gradients, and leave its buffers (running statistics) as they were.  So all ranks pass
        through the loop equally often, and may evaluate or save in it.  Take one batch per step: if a step
        takes several, the last one decides whether this rank only joins.

        If a loader has no length (`len(loader)`), the ranks tell each other at each batch whether they have
        one, in a message that travels during the step before.  Asynchronous strategies need lengths.

        Raises:
            ConfigError: a rank has no batch at all, or no length where it needs one.
        """
        self._check_training("batches()")
        return self._joiner.join(loader, self.strategy)

    @property
    def should_stop(self) -> bool:
        """Whether any rank got a signal to stop: SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2.  Collective.

        Read it after each step.  It becomes true on all ranks at the same step, about a second after the
        signal: save, and leave `with run`, which then ends the job with exit code 75 ("stopped, and saved")
        instead of completing the run, or with 76 if nothing has been saved since training began.  From the
        first read on, these signals no longer end the process by themselves.

        With an asynchronous strategy, whose ranks are not at the same step, it becomes true where all ranks
        meet: at the next `evaluating`, `state_dict` or `save_checkpoint`.

        Example::

            if run.should_stop:
                run.save_checkpoint()
                break
        """
        self._check_training("should_stop")
        if self._stop is None:
            together = self.strategy.traits.synchronous
            self._stop = StopWatch(self.comm, self.timeline, together=together, pause=Pause.of_environment())
        with self._calls.of("run.should_stop"):
            return self._stop.look(self.steps)

    def _begin_step(self, step: TrainingStep) -> None:
        self._sent_before = self.comm.sent_bytes
        self._replica.bind_parameters()
        self._replica.bind_gradients()
        self._stays_untrained.check()
        if self._counts_frames:
            # Before the backward passes, which a rank that only joins does not have: their hooks exchange
            # too, and all ranks must exchange in the same order.
            self._total_weight[0] = step.weight
            self._weighing = self.comm.allreduce_async(self._total_weight, name="weights")
        step.begin()

    def _end_step(self, step: TrainingStep) -> None:
        self.steps += 1
        self._weight_here += step.weight
        if self._weighing is not None:
            self._weighing.wait()
            self._weight_per_rank += self._total_weight.item() / self.comm.size
        else:
            self._weight_per_rank += step.weight
        done = self.steps / self._num_steps if self._num_steps else 0.0
        time_s = self.timeline.training_time_s
        step.end(Progress(self.steps, self._weight_per_rank, time_s, done), number=self.steps)
        self._sent_bytes += self.comm.sent_bytes - self._sent_before
        self._replica.unbind_gradients()
        if self._watch.is_due(self.steps) and (scale := self._watch.fallen_scale()) is not None:
            self._refuse(
                f"non-finite gradients have reduced the scale of the GradScaler to {scale:g} at step "
                f"{self.steps}",
                "compute in bfloat16 or float32, ",
            )

    # -- values that are not finite ---------------------------------------------------------------------

    def _note_loss(self, loss: Tensor, weight: int) -> None:
        """Refuse a loss that is not finite before its gradients are exchanged; on a GPU, some steps later."""
        total, _ = self._watch.counted(loss.detach(), weight)
        self._losses = total if self._losses is None else self._losses + total.double()
        if self._watch.is_due(self.steps):
            self._look_at_losses()

    def _look_at_losses(self) -> None:
        """Refuse losses that are not finite; waits for the device, if there were any."""
        if self._losses is None:
            return
        value, self._losses = self._losses.item(), None
        if not math.isfinite(value):
            self._refuse(f"the loss is {value} at step {self.steps + self._is_in_step}")

    def _check_parameters(self) -> None:
        """Before parameters are saved, refuse them if no run could continue from them."""
        if not (self._replica.is_finite or self._watch.others_mend):
            self._refuse(f"a parameter is not finite after step {self.steps}")

    def _refuse(self, what: str, first: str = "") -> NoReturn:
        raise DivergedError(
            f"{what} on rank {self.comm.rank}: {first}lower the learning rate, clip gradients by a lower "
            f"max_gradient_norm= of DataParallel, or inspect the data{self._folder.last_checkpoint_note()}"
        )

    # -- evaluating, recording --------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the average of the ranks into the model inside the block, for evaluation.  Collective.

        Parameters are those the strategy evaluates, running statistics are the ranks' mean, and the model is
        in evaluation mode.  After the block every rank continues with its own values, as if there had been no
        evaluation.  The block's time counts as evaluation, not as training; so does the wait at its end for a
        rank that does more in it.  The wait at its start for ranks that still train counts as training.
        """
        self._check_training("evaluating()")
        with self._calls.of(_EVALUATING):
            yield from self._evaluated()

    def _evaluated(self) -> Iterator[None]:
        """Implement `evaluating`, around its single yield."""
        self._take_model()
        self._look_at_losses()
        self.strategy.pause()
        try:
            with self.timeline.event(Span.MEETING):
                check_same_call(_EVALUATING, self.comm)
            with self.timeline.event(Span.EVAL):
                self._weight_of_all = self._sum_of_weights(evaluates=True)
                trained = self._weight_here > 0
                with (
                    self.strategy.evaluation_parameters(),
                    averaged_statistics(self.model, self.comm, has_trained=trained),
                ):
                    try:
                        with evaluating(self.model), self._calls.of(""):
                            yield
                    finally:
                        # After the parts have their modes again: they may change their weights with it.
                        self._replica.bind_parameters()
                # One rank may evaluate or write alone; the others' wait for it must not count as a step's
                # exchange.
                self.comm.barrier()
        except BaseException as error:
            # The other ranks may still be evaluating: this one can no longer follow them.
            self._note_left("`with run.evaluating()`", error)
            raise
        finally:
            self._weight_of_all = None
        self.strategy.resume()

    def _note_left(self, block: str, error: BaseException) -> None:
        """Note which error left a block: from there on this rank is not where the others are."""
        message = one_line(error, 200)
        self._left_by = (block, f"{type(error).__name__}{message and ': '}{message}")

    def _sum_of_weights(self, *, evaluates: bool = False) -> int:
        """Return the sum of all ranks' weights so far; agree on whether to stop.  Collective."""
        asks = False
        if self._stop is not None:
            # Ranks that step together agree on signals elsewhere, beside the steps.
            asks = self._stop.is_asked and not self.strategy.traits.synchronous
            asks |= evaluates and self._stop.is_due(self.steps)
        total = torch.tensor([self._weight_here, asks], dtype=torch.float64)
        weight, num_asking = self.comm.allreduce(total, name="weights").tolist()
        if self._stop is not None:
            self._stop.is_agreed |= num_asking > 0
        return int(weight)

    def log(self, **values: SupportsFloat | str | None) -> None:
        """Append a line to the folder's metrics.jsonl on rank 0; other ranks' values are ignored.

        Not collective.  Beside `values` the line holds `step`, `time_s`, `learning_rate`, the current
        `period` if the strategy changes it, and, inside `evaluating` and after `with run`, `frames`: the sum
        of all ranks' weights so far.

        Example::

            run.log(valid_loss=loss, epoch=epoch)

        Args:
            values: whatever `float()` takes, such as numpy numbers and one-element tensors; strings; None.

        Raises:
            ConfigError: a value of another type, or a name that the line already uses.
            RunError: training has not begun, or the line cannot be written.
        """
        if self._phase is _Phase.NEW:
            raise RunError("run.log() is called before `with run`; call it inside that block, or after it")
        facts: dict[str, Any] = {"step": self.steps, "time_s": self.timeline.training_time_s}
        facts["learning_rate"] = self._replica.learning_rate
        if self._weight_of_all is not None:
            facts["frames"] = self._weight_of_all
        if self.strategy.traits.synchronous and "period" in (shown := self.strategy.statistics()):
            facts["period"] = shown["period"]
        self._folder.add_values({**facts, **{name: _plain(name, value) for name, value in values.items()}})

    def save(self, path: str | Path) -> None:
        """Write the model's state dict on rank 0, completely or not at all.

        Not collective.  After `with run`, and inside `evaluating`, the model is the average of the ranks.
        `.safetensors` files are written in that format, all others with `torch.save`.

        Raises:
            ConfigError: the state has values that are not tensors, which `.safetensors` cannot hold.
            RunError: the file cannot be written.
            DivergedError: a parameter is not finite.
        """
        if self.comm.rank != 0:
            return
        for parameter in self._replica.model_parameters:
            if not parameter.isfinite().all():
                name = name_of(parameter, self.model)
                self._refuse(f"{path} is not written: {name} is not finite after step {self.steps}")
        # Copies, because a view would save the whole vector.  Modules may add values that are not tensors.
        state = {
            name: value.detach().cpu().clone() if isinstance(value, Tensor) else _copied(value)
            for name, value in self.model.state_dict().items()
        }
        write_tensors(Path(path), state)

    # -- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that this rank needs to continue, as copies; every rank saves its own.  Collective.

        The state of model, optimizer, strategy, scaler and counters on this rank; not the script's scheduler,
        its position in the data or random states.  Numbers and tensors only:
        `torch.load(..., weights_only=True)` reads it.

        Raises:
            DivergedError: a loss or parameter is not finite, and the strategy does not repair it.
        """
        self._check_training("state_dict()")
        with self._calls.of("run.state_dict()"):
            state = self._state("run.state_dict()")
        self._has_saved = True
        return state

    def _state(self, call: str) -> dict[str, Any]:
        """Return what `state_dict` returns; `call` is the public call, for messages.  Collective."""
        self._take_model()
        self._look_at_losses()
        self.strategy.pause()
        with self.timeline.event(Span.MEETING):
            check_same_call(call, self.comm)
        self._check_parameters()
        state = {
            "rank": self.comm.rank,
            "size": self.comm.size,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "strategy_name": self.strategy.name,
            "strategy_options": describe(self.strategy),
            "run_id": self._folder.run_id,
            "strategy": self.strategy.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "steps": self.steps,
            "weight_here": self._weight_here,
            "weight_per_rank": self._weight_per_rank,
            "time_s": self.timeline.training_time_s,
        }
        with self.timeline.event(Span.CHECKPOINT):
            copied: dict[str, Any] = _copied(state)
        if not self.strategy.traits.synchronous:
            self._sum_of_weights()  # asynchronous ranks agree on whether to stop where they meet
        self.strategy.resume()
        return copied

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned on the same rank.  Collective, before `with run`.

        Model, optimizer, scaler and `steps` are restored at once, as in plain torch; the model is this rank's
        own, not the average of all.  Changes that the script makes between this call and `with run` are kept.

        Raises:
            ConfigError: the state is of another rank, number of ranks, strategy, model or optimizer.
            RunError: training has begun.
        """
        self._check_new("load_state_dict")
        otherwise = f"or {OWN_STATE}" if self._folder.is_set_by_environment else "or leave the state out"
        self._load(state, "load_state_dict: the state", otherwise)

    def _load(self, state: dict[str, Any], what: str, otherwise: str) -> None:
        """Restore model and optimizer; keep the strategy's state until the strategy is attached.

        Args:
            what: name of the state in messages.
            otherwise: what the user may do instead of continuing from it, for messages.
        """
        check_loadable(state, self.strategy, self.comm, what=what, otherwise=otherwise)
        with of_same_model():
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(_copied(state["optimizer"]))
        if self._scaler is not None and state["scaler"]:  # the state of a disabled scaler is empty
            self._scaler.load_state_dict(state["scaler"])
        self.steps, self._weight_here = state["steps"], state["weight_here"]
        self._weight_per_rank = state["weight_per_rank"]
        self._loaded = state

    def save_checkpoint(self, **more: Any) -> None:
        """Save the state of all ranks in the run's folder, for `load_checkpoint`.  Collective.

        Keeps the last two checkpoints.  A checkpoint counts only once every rank has written its part.

        Example::

            run.save_checkpoint(epoch=epoch, scheduler=scheduler.state_dict())

        Args:
            more: values of this rank: numbers, strings, tensors, and lists and dicts of them.

        Raises:
            ConfigError: the run has no folder.
            RunError: the checkpoint cannot be written.
            DivergedError: as `state_dict`.
        """
        self._check_training("save_checkpoint()")
        call = "run.save_checkpoint()"
        with self._calls.of(call):
            state = {"run": self._state(call), "more": more}
            with self.timeline.event(Span.CHECKPOINT):
                self._folder.write_checkpoint(state, self.steps)
        self._has_saved = True

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Continue from the folder's last checkpoint, if there is one.  Collective, before `with run`.

        Takes effect at once, as `load_state_dict` does.  Create schedulers before it, because they set
        learning rates.

        Returns:
            The arguments of `save_checkpoint` on this rank; None: there is no checkpoint.

        Raises:
            ConfigError: the run has no folder, or the checkpoint is of other ranks or another strategy.
            RunError: the checkpoint cannot be read, or training has begun.
        """
        self._check_new("load_checkpoint")
        try:
            with self._calls.of("run.load_checkpoint()"):
                check_same_call("run.load_checkpoint()", self.comm)
                state = self._folder.read_checkpoint()
            if state is None:
                return None
            self._load(state["run"], f"{self.folder}: its checkpoint", "or choose another folder")
        except BaseException:
            self._folder.release()
            raise
        more: dict[str, Any] = state["more"]
        return more

    def _laid_aside(self) -> dict[str, Any]:
        """Return a copy of model and optimizer state, and reset the optimizer as for a new run.

        `attach` gives all ranks rank 0's optimizer state, in exchanges that need the same tensors on all
        ranks.  Loaded states may differ: a server's optimizer has tensors that its workers' lack.
        """
        own: dict[str, Any] = _copied(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )
        self._replica.reset_optimizer()
        return own

    def _take_up(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Restore the attached strategy's state, and this rank's own model and optimizer."""
        with of_same_model():
            self.model.load_state_dict(own["model"])
            self.optimizer.load_state_dict(own["optimizer"])
            # After the parameters: a strategy may keep values that depend on them.
            self.strategy.load_state_dict(_copied(state["strategy"]))
        self._begun_s = state["time_s"]
        self.timeline.resume_at(self._begun_s)
        self._folder.resume_after(self.steps)

    def _check_new(self, what: str) -> None:
        if self._phase is not _Phase.NEW:
            raise RunError(f"{what} is called after training has begun; call it before `with run`")

    def _check_training(self, what: str) -> None:
        if self._is_cut and self._phase is _Phase.ENDED:
            raise Paused  # again: a loop that catches every error of a step has caught the first one
        if self._phase is not _Phase.TRAINING:
            when = "before" if self._phase is _Phase.NEW else "after"
            raise RunError(f"run.{what} is called {when} `with run`; call it inside that block")
        if self._weight_of_all is not None:
            raise RunError(f"run.{what} is called inside `with run.evaluating()`; call it after that block")
        if self._is_in_step:
            raise RunError(f"run.{what} is called inside `with run.step()`; call it after that block")
        self._check_whole()

    def _check_whole(self) -> None:
        """Refuse to continue after a step or an evaluation that was done, and exchanged, only in part."""
        if self._left_by is not None:
            block, error = self._left_by
            others = ", and the other ranks wait for its exchange" if self.comm.size > 1 else ""
            raise RunError(
                f"{block} was interrupted by {error}, so it was only partly done{others}: let such an error "
                "end the run, and restart from a checkpoint"
            )


class ScriptStep(AbstractContextManager["ScriptStep"]):
    """One step of a `DataParallel`, as a context manager.  Made by `DataParallel.step`."""

    def __init__(self, run: DataParallel, weight: int, *, joins_only: bool) -> None:
        self._run, self._joins_only = run, joins_only
        self._step = TrainingStep(run.strategy, run.timeline, weight)
        self._forward: AbstractContextManager[None] | None = None
        self._is_open = self._is_complete = False
        self._writes: list[int] = []  # to each gradient, up to the end of the last pass

    @property
    def weight(self) -> int:
        """Weight of this rank in the update; 0 if it only joins."""
        return self._step.weight

    def __enter__(self) -> ScriptStep:
        run = self._run
        with self._calls():
            run._begin_step(self._step)
        run._is_in_step = self._is_open = True
        self._begin_forward()
        return self

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Compute the gradients of `loss` and add them to this step's.

        Args:
            loss: a scalar, summed over (part of) the items that the step's weight counts.  With weight 0 it
                adds no gradients, whatever its value.
            last: whether this is the last backward pass of the step.  Give False for all but the last of
                several: gradients are exchanged while the last one runs.

        Raises:
            ConfigError: the loss is not a tensor of one number that requires grad.
            RunError: a pass after the last one, or outside the step's `with` block.
            DivergedError: the loss is not finite; on a GPU this is noticed within 20 steps.  Not raised where
                a scaler skips the update or the strategy repairs the loss.
        """
        if not self._is_open:
            raise RunError(
                "step.backward() is called outside of `with run.step() as step:`, whose end exchanges and "
                "updates; call it inside that block"
            )
        self._end_forward()
        if self._is_complete:
            raise RunError(
                "step.backward() was called again after the last pass of the step, whose gradients may "
                "already be in exchange; call backward(loss, last=False) in all passes but the last"
            )
        self._is_complete = last
        if not self._joins_only:
            if not (isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1):
                raise ConfigError(
                    f"step.backward(loss) takes a scalar tensor that requires grad, and was given "
                    f"{given_for_loss(loss)}"
                )
            if self.weight > 0:
                self._run._note_loss(loss, self.weight)
                self._run._replica.bind_gradients()  # optimizer.zero_grad() may have unbound them
                self._step.backward(loss, last=last)
                self._writes = self._run._replica.gradient_writes()
            # With weight 0, some strategies would count the gradients and others not: none are computed.
        if not last:
            self._begin_forward()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_forward()
        self._run._is_in_step = self._is_open = False
        try:
            if error is None:
                with self._calls():
                    self._end()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._run._note_left("`with run.step()`", error)
        if error is None:
            self._run._end_where_cut()

    def _calls(self) -> AbstractContextManager[None]:
        """Return a context in which this rank may wait for others."""
        return self._run._calls.of(f"step {self._run.steps + 1}")

    def _end(self) -> None:
        if not self._is_complete and self.weight > 0:
            raise RunError(
                "the step ended without its last backward pass; call step.backward(loss), not "
                "loss.backward(), the last time in a step without last=False; or use run.step(weight=0)"
            )
        if self.weight > 0 and not self._run._replica.holds_gradients():
            raise RunError(
                "gradients were replaced inside the step, after its backward pass: do not call "
                "optimizer.zero_grad(), the step clears the gradients itself"
            )
        if self.weight > 0 and self._run._replica.gradient_writes() != self._writes:
            raise RunError(
                "gradients were changed inside the step, after its backward pass, when they are this rank's "
                "sums and may already be in exchange; instead of clip_grad_norm_ use max_gradient_norm= of "
                "DataParallel, and log or change gradients in a hook (optimizer.register_step_pre_hook)"
            )
        self._run._end_step(self._step)
        if self._joins_only:
            self._run._joiner.take_back()

    def _begin_forward(self) -> None:
        self._forward = self._run.timeline.span(Span.FORWARD)
        self._forward.__enter__()

    def _end_forward(self) -> None:
        if self._forward is not None:
            self._forward.__exit__(None, None, None)
            self._forward = None


class _Phase(Enum):
    """The phases of a run."""

    NEW = "before training"
    TRAINING = "in training"
    ENDED = "after training"


def _settings(comm: Communicator, strategy: str, folder: str | Path | None) -> dict[str, Any]:
    """Return rank 0's strategy and folder: a launcher may not pass its environment to all ranks."""
    settings = {
        "strategy": os.environ.get(STRATEGY) or strategy,
        "folder": os.environ.get(FOLDER) or (None if folder is None else str(folder)),
    }
    found: dict[str, Any] = comm.broadcast_object(settings)
    return found


def _plain(name: str, value: SupportsFloat | str | None) -> float | int | str | None:
    """Return a value that a script logs in the form that JSON takes.  Raises ConfigError."""
    if name in _LOGGED:
        raise ConfigError(
            f"run.log({name}=...): every logged line already has a field {name}; choose another name"
        )
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, (str, int, float)):
        return value
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # the last is torch's
        message = one_line(error)
        raise ConfigError(
            f"run.log({name}=...): float() cannot convert the value ({message}); give a number or a text"
        ) from error


def _copied(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tensors; each tensor gets its own memory."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
