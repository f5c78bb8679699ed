"""What ranks compute together after an epoch, at a pause and at the end: metrics, and the best model."""

from __future__ import annotations

import torch

from speechdp.comm.base import ReduceOp
from speechdp.errors import DivergedError, RunError
from speechdp.parallel.batch_statistics import average_statistics, averaged_statistics
from speechdp.parallel.run_files import Metrics
from speechdp.parallel.strategy import final_models
from speechdp.timing.timeline import Span
from speechdp.train.evaluate import HeldOutScores, choose_final_model, relative_distance
from speechdp.train.trainer_state import TrainingParts, TrainingState


def measure_epoch(
    parts: TrainingParts, training: TrainingState, epochs_done: float, time_s: float, frames_per_s: float
) -> Metrics:
    """Return the metrics of an epoch, or of its first part, over all ranks, finite or not.  Collective.

    Args:
        parts: parts of the trainer; their strategy provides the model to score.
        training: state of training, with this rank's loss of the epoch.
        epochs_done: epochs done, including this one or the part of it that is done.
        time_s: training time of the run so far, s.
        frames_per_s: speed of all ranks together since the previous evaluation, frames/s.

    Raises:
        DivergedError: no loss was finite.
        RunError: no frame was trained on, or no held-out frame was scored.
    """
    loss, frames, learnt = parts.comm.allreduce(training.epoch_loss.clone(), name="epoch_loss").tolist()
    if frames == 0 and learnt > 0:
        scales = parts.replica.scaler is not None
        which, remedy = (
            ("--precision fp16: ", "train with --precision bf16 or fp32, ") if scales else ("", "")
        )
        raise DivergedError(
            f"{which}the loss was finite in no step of the epoch; {remedy}lower --learning-rate, or inspect "
            "the data"
        )
    if frames == 0:
        why = "" if parts.task.transcripts is None else ": no utterance fits its transcript"
        raise RunError(f"no frame of the training split was learnt{why}; choose another with --train-split")
    held_out, distance = _evaluate(parts, epochs_done)
    return Metrics(
        epoch=epochs_done,
        step=training.counters.step,
        frames=training.counters.frames,
        time_s=time_s,
        train_loss=loss / frames,
        learning_rate=parts.schedule.at(epochs_done - 1e-9),
        held_out=held_out.values,
        heldout_frames=held_out.num_frames,
        replica_distance=distance,
        period=parts.strategy.statistics().get("period"),
        frames_per_s=frames_per_s,
    )


def settle_final_model(parts: TrainingParts) -> None:
    """Give every rank the final model, after the strategy's `finish`.  Collective.

    If a strategy offers several models, the best on the held-out split is chosen (cf. Kaldi's combination).
    """
    average_statistics(parts.model, parts.comm, has_trained=_has_trained(parts))
    candidates = final_models(parts.strategy)
    if candidates:
        with parts.timeline.event(Span.EVAL):
            best = choose_final_model(
                candidates, parts.replica, lambda: parts.evaluator.evaluate(parts.model, parts.task)
            )
        parts.reporter.notice(f"final model: {best} of {len(candidates)} combinations (0: none)")


def _evaluate(parts: TrainingParts, epochs_done: float) -> tuple[HeldOutScores, float]:
    """Score the strategy's model for evaluation; also return the farthest replica's distance.  Collective."""
    values = parts.replica.parameters.values
    own = None if parts.strategy.traits.replicas_equal else values.clone()
    statistics = averaged_statistics(parts.model, parts.comm, has_trained=_has_trained(parts))
    with parts.strategy.evaluation_parameters(), statistics:
        distance = torch.zeros(1, dtype=torch.float64) if own is None else relative_distance(own, values)
        held_out = parts.evaluator.evaluate(parts.model, parts.task)
        parts.replica.bind_parameters()
        parts.average.note(epochs_done, parts.replica, parts.model)
    if own is not None:
        parts.comm.allreduce(distance, name="replica_distance", op=ReduceOp.MAX)
    return held_out, distance.item()


def _has_trained(parts: TrainingParts) -> bool:
    """Return whether this rank trains; with some strategies some ranks only serve."""
    return parts.strategy.roster(parts.comm.size).part_of_rank[parts.comm.rank] is not None
