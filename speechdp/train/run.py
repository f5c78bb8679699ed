"""Carry out one run, from options to finished model: build, train, time, save."""

from __future__ import annotations

import dataclasses
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from speechdp import remedies
from speechdp.checkpoint.state import RankState, checkpoint_steps, load_checkpoint
from speechdp.comm.startup.start_guard import StartGuard
from speechdp.counting import agreeing, counted, epoch_text
from speechdp.data.loading.loader import StepLoader
from speechdp.data.shards.dataset import UNALIGNED
from speechdp.data.shards.description import check_description, keep_description
from speechdp.dealing.batch_client import Dealing
from speechdp.errors import ConfigError, RunError
from speechdp.feeding.fed_source import gather_feeder_times
from speechdp.models.precision import has_amx, tf32_in_force
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import describe
from speechdp.parallel.run_files import MODEL_NAME, TRAINED_ON, RunDirectory
from speechdp.parallel.stop import StopAgreement
from speechdp.process.ending import Stopped
from speechdp.process.output import losses_noted_in
from speechdp.tasks.metrics import Metric
from speechdp.timing.gather import gather_timing, has_timed_steps, write_timing
from speechdp.timing.memory import peak_memory
from speechdp.timing.sampler import Sampler
from speechdp.train.build import (
    Sources,
    build_trainer,
    check_sources,
    epoch_planner,
    open_loader,
    training_ranks,
)
from speechdp.train.models import (
    check_initial_model,
    check_precision,
    check_task,
    describe_data,
    outline,
    save_trained,
    task_data,
)
from speechdp.train.origin import origin_facts, start_facts
from speechdp.train.sampling import sampled
from speechdp.train.session import Session
from speechdp.train.tolerance import begin_tolerating, check_tolerance, lost_ranks
from speechdp.train.trainer import Trainer
from speechdp.train.watching import watched
from speechdp.watchdog.status import StatusFolder


def train_run(session: Session, options: TrainOptions, run_dir: Path, *, resume: bool = False) -> None:
    """Train one run to its end; leave model, metrics, timing and completion marker in `run_dir`.

    Collective.

    Raises:
        ConfigError: options that do not fit the data, or a folder that already holds a run.
        RunError: NaN in the loss, a full disk, no complete checkpoint.
        ShardError: damaged data.
        Stopped: a signal asked to stop; a checkpoint holds everything.
    """
    with StartGuard(options.faults.hang_timeout, "begin the run") as start:
        _train_run(session, options, run_dir, start, resume=resume)


def _train_run(
    session: Session, options: TrainOptions, run_dir: Path, start: StartGuard, *, resume: bool
) -> None:
    run = RunDirectory(run_dir)
    if resume and session.comm.broadcast_object(is_done(run)):
        _keep_complete(session, options, run)  # the data it was trained on may have been deleted
        return
    # Before the folder holds a run, which the corrected command would then refuse to replace.
    resolved = _check_options(session, options, resume=resume)
    begin_tolerating(session, options)
    data_facts = describe_data(session.dataset, options)
    # On rank 0 alone, for run.json and the notice: counting takes time that the others need not spend.
    num_parameters = _num_parameters(session, resolved) if session.comm.rank == 0 else 0
    state = _prepare_folder(session, options, run, num_parameters, resume=resume)
    if options.recipe != "none":
        session.reporter.notice(_describe_recipe(options, resolved))
    if session.comm.rank == 0:
        session.reporter.notice(_describe_model(session, resolved, num_parameters))
        for line in _describe_precision(session, resolved):
            session.reporter.notice(line)
    with ExitStack() as stack:
        if session.comm.rank == 0:
            stack.enter_context(losses_noted_in(run_dir))
        stack.callback(session.reporter.end)  # also after a failure: a live bar hides the cursor
        begun_from = options if state is None else dataclasses.replace(options, initial_model=None)
        trainer, sources = build_trainer(session, begun_from, run_dir, stack)
        trainer.open_checkpoints()
        stack.enter_context(watched(session, options, run_dir, trainer))
        start.over()
        stack.callback(trainer.close)
        if state is not None:
            trainer.restore(state)
            if state.size != session.comm.size:
                _move_to_fraction(session, resolved, trainer, sources, state.size)
        loader, dealing = open_loader(session, resolved, trainer, sources.training, stack)
        origin_s = trainer.parts.timeline.origin_s
        with sampled(session, options.loading.sample_hz, run_dir / "timeline", origin_s) as sampler:
            _run_to_end(session, trainer, loader, dealing)
        _record_timing(session, resolved, run, trainer, sources, sampler)
        _complete(session, resolved, run, trainer, sources, data_facts)


def is_done(run: RunDirectory) -> bool:
    """Return whether a run is complete and needs no model made again from its last checkpoint."""
    return run.is_complete and (run.has_model or next(checkpoint_steps(run.path), None) is None)


def check_beginning(
    session: Session, options: TrainOptions, run_dir: Path, *, resume: bool, overwrite: bool = False
) -> None:
    """Refuse, before its targets are made, a run that `train_run` would refuse afterwards.  Collective.

    Args:
        overwrite: whether the contents of `run_dir` will be deleted once all ranks have returned.

    Raises:
        as `train_run`.
    """
    _check_options(session, options, resume=resume)
    describe_data(session.dataset, options)
    if session.comm.rank == 0 and not overwrite:
        _refuse_begun(RunDirectory(run_dir), resume=resume)
    session.comm.barrier()


def _check_options(session: Session, options: TrainOptions, *, resume: bool) -> TrainOptions:
    """Return the options resolved for these ranks; refuse those that cannot be trained with.  Collective."""
    resolved = options.resolve(training_ranks(options, session.comm.size))
    check_tolerance(session, options)
    options.strategy.parsed.check_ranks(session.comm)
    _check_data(session, resolved, resume=resume)
    return resolved


def _check_data(session: Session, resolved: TrainOptions, *, resume: bool) -> None:
    """Refuse data that cannot be trained on with these options, or from this initial model."""
    if session.dataset.alignment == UNALIGNED:
        raise ConfigError(f"{session.dataset.path}: has no alignment (prepare --like) and can only be scored")
    check_description(session.dataset)
    check_task(session.dataset, resolved)
    check_sources(session, resolved)
    check_precision(session, resolved)
    if not resume:  # a checkpoint has its own weights, and the initial model may have been deleted
        check_initial_model(session.dataset, resolved)


def _refuse_begun(run: RunDirectory, *, resume: bool) -> None:
    if not resume and run.is_begun:
        raise ConfigError(f"{run.path}: already holds a run; continue with --resume, or --overwrite it")


def _run_to_end(session: Session, trainer: Trainer, loader: StepLoader, dealing: Dealing | None) -> None:
    """Train, and close the dealing with all ranks together, also after a stop request."""
    stopped: Stopped | None = None
    try:
        stop = StopAgreement(session.stop, session.comm, trainer.parts.timeline)
        trainer.run(loader, stop, session.pause_at)
    except Stopped as request:
        stopped = request
    if dealing is not None:
        dealing.close()
    if stopped is not None:
        raise stopped


def _describe_recipe(options: TrainOptions, resolved: TrainOptions) -> str:
    """Describe what a recipe amounts to on these ranks: without scaling there is no warm-up."""
    schedule, batch = resolved.schedule(), resolved.batches().batch_size
    rise = "no warm-up"
    if schedule.warmup_epochs > 0 and schedule.learning_rate != schedule.warmup_from:
        rise = f"from {schedule.warmup_from:g} over {schedule.warmup_epochs:g} epochs"
    elif schedule.warmup_epochs > 0 and options.optimizer.warmup_from is None:  # nothing to rise by
        rise += ": the batch is not larger than --base-batch"
    return (
        f"recipe {options.recipe}: {batch} segments per rank and step, "
        f"learning rate {schedule.learning_rate:g} ({rise}), strategy {options.strategy.name}"
    )


def _describe_model(session: Session, resolved: TrainOptions, num_parameters: int) -> str:
    """Return one line on the model, the batch and the amount of data."""
    batch = resolved.batches()
    what = f"{batch.batch_size} segments" if batch.batch_size else f"up to {batch.batch_frames} frames"
    dataset, split = session.dataset, resolved.train_split
    hours = dataset.num_frames(split) * dataset.features.frame_shift_s / 3600
    return (
        f"{resolved.preset_name}, {num_parameters:,} parameters; {what} a rank and step; "
        f"{hours:.2f} h in {counted(dataset.num_utterances(split), 'utterance')}; "
        f"{counted(resolved.num_epochs, 'epoch')}"
    )


def _describe_precision(session: Session, options: TrainOptions) -> list[str]:
    """Describe the precision of the computation, unless it is simply float32 on a CPU."""
    formats = []
    if options.precision != "fp32":
        formats.append(f"{options.precision} (autocast) in training and evaluation, weights in float32")
    elif session.device.type == "cpu" and has_amx():
        formats.append(
            "fp32; LSTMs may train faster with --precision bf16 on this CPU, which has AMX (docs/training.md)"
        )
    if session.device.type == "cuda":
        formats.append(tf32_in_force())
    return [f"precision: {'; '.join(formats)}"] if formats else []


def _num_parameters(session: Session, resolved: TrainOptions) -> int:
    return sum(parameter.numel() for parameter in outline(session.dataset, resolved).parameters())


def _keep_complete(session: Session, options: TrainOptions, run: RunDirectory) -> None:
    """Leave a complete run unchanged: even training zero steps would replace its timing."""
    _check_same(session, options, run)
    if session.comm.rank == 0:
        if not run.has_model:
            raise RunError(
                f"{run.path}: is complete, but holds neither {MODEL_NAME} nor a checkpoint to make it of; "
                f"put one of them back, or {remedies.starting_over(run.path)}"
            )
        run.complete_again()
    session.comm.barrier()
    session.reporter.notice(f"{run.path}: is complete already{_how_to_train_on(options, run)}")


def _check_same(session: Session, options: TrainOptions, run: RunDirectory) -> None:
    """Refuse to resume a run of other options or data.  Raises ConfigError, or RunError (run.json)."""
    try:
        run.check_same(
            options.fingerprint(), session.dataset.checksum, options.to_json(), TrainOptions().to_json()
        )
    except ConfigError as error:
        # The run is a part of a command that has its own advice on how to continue.
        if not run.is_complete and not remedies.resumes_by_option():
            raise
        raise ConfigError(f"{error}{_how_to_train_on(options, run)}") from error


def _how_to_train_on(options: TrainOptions, run: RunDirectory) -> str:
    """Return advice on training a run's model for longer, or with other options; "": it is not possible."""
    if not options.may_begin_from_model:
        return ""
    targets = "" if options.alignments is None else f" --alignments {options.alignments}"
    first = "" if run.is_complete else "let the run end by its own command, then "
    return f"; to train its model further, {first}begin another run with --initial-model {run.path}{targets}"


def _prepare_folder(
    session: Session, options: TrainOptions, run: RunDirectory, num_parameters: int, *, resume: bool
) -> RankState | None:
    """Begin or resume the run in its folder; return the state to resume from, or None.  Collective."""
    comm, is_new = session.comm, False
    if comm.rank == 0:
        _check_folder(session, options, run, resume=resume)
    comm.barrier()
    state = _load_state(session, options, run) if resume else None
    if comm.rank == 0:
        is_new = not run.is_begun
        if is_new:
            run.begin(_facts(session, options, num_parameters))
        _record_start(session, options, run, state, resume=resume)
    comm.barrier()
    if resume and (state is None or state.size == comm.size):
        done = "the beginning" if state is None else f"step {state.values['counters']['step']}"
        happens = "holds no run to resume, starting a new one" if is_new else f"resuming from {done}"
        session.reporter.notice(f"{run.path}: {happens}")
    return state


def _check_folder(session: Session, options: TrainOptions, run: RunDirectory, *, resume: bool) -> None:
    """Refuse a folder in which this run can neither begin nor resume; on rank 0.

    Raises:
        ConfigError: it holds a run that is not to be resumed, or one of other options or data.
        RunError: its run.json is missing or damaged.
    """
    _refuse_begun(run, resume=resume)
    if run.is_begun:
        _check_same(session, options, run)
    elif resume and next(checkpoint_steps(run.path), None) is not None:
        raise RunError(
            f"{run.path}: has checkpoints, but no run.json that says what run they are of; put it back, "
            "or start over with --overwrite"
        )


def _load_state(session: Session, options: TrainOptions, run: RunDirectory) -> RankState | None:
    """Return this rank's state from the last usable checkpoint; None: there is none.  Collective."""
    notices: list[str] = []
    any_size = options.strategy.parsed.traits.resumes_with_other_size
    num_feeders = options.loading.feeders
    state = load_checkpoint(run.path, session.comm, notices, any_size=any_size, num_feeders=num_feeders)
    for notice in notices:
        session.reporter.notice(notice)
    return state


def _record_start(
    session: Session, options: TrainOptions, run: RunDirectory, state: RankState | None, *, resume: bool
) -> None:
    """Record in the folder that training starts from `state`; remove what came after it.  On rank 0."""
    for notice in keep_description(session.dataset, run.path / TRAINED_ON):
        session.reporter.notice(notice)
    StatusFolder(run.path).clear()
    if resume:
        run.resize(_facts_of_size(session, options))
    counters = {"step": 0, "epoch": 0} if state is None else state.values["counters"]
    run.truncate_metrics(counters["step"], counters["epoch"])
    run.add_start(start_facts(session, counters["step"], os.environ))


def _move_to_fraction(
    session: Session, options: TrainOptions, trainer: Trainer, sources: Sources, begun_with: int
) -> None:
    """Move to the fraction of the epoch that a different number of ranks had reached, and print a notice.

    Args:
        options: resolved options.
        begun_with: number of ranks that wrote the checkpoint.
    """
    counters = trainer.counters
    place = "the next epoch begins"
    if counters.step_in_epoch > 0 and counters.epoch_steps > 0:
        plan = epoch_planner(session, sources.training, options)(counters.epoch)
        done, of = counters.step_in_epoch, counters.epoch_steps
        counters.step_in_epoch, counters.epoch_steps = done * plan.num_steps // of, plan.num_steps
        place = (
            f"epoch {counters.epoch + 1} continues at the same fraction, step {counters.step_in_epoch} of "
            f"{plan.num_steps} instead of {done} of {of}, and may repeat or miss segments"
        )
    session.reporter.notice(
        f"resuming from step {counters.step}, written by {counted(begun_with, 'rank')}, with "
        f"{counted(session.comm.size, 'rank')}: {place}; every rank takes "
        f"{options.batches().batch_size or 'as many'} segments per step, learning rate "
        f"{options.schedule().learning_rate:g}"
    )


def _facts_of_size(session: Session, options: TrainOptions) -> dict[str, Any]:
    """Return the facts about the ranks for run.json."""
    workers = training_ranks(options, session.comm.size)
    here: dict[str, Any] = {name: session.facts[name] for name in ("hosts", "gpus") if name in session.facts}
    return {
        "size": session.comm.size,
        "batch_size": options.resolve(workers).batches().batch_size,
        "options": options.to_json(workers),
        **here,
    }


def _facts(session: Session, options: TrainOptions, num_parameters: int) -> dict[str, Any]:
    strategy = options.strategy.parsed
    return {
        "strategy": describe(strategy),
        "strategy_name": strategy.name,
        "period": strategy.traits.period,
        "backend": session.comm.backend,
        "device": str(session.device.type),
        "precision": options.precision,
        "evaluation_precision": options.precision,
        "seed": options.seed,
        "task": options.task_class.name,
        **options.make_task().record().to_json(),
        "preset": options.preset_name,
        "num_parameters": num_parameters,
        "num_classes": task_data(session.dataset, options).num_classes,
        "fingerprint": options.fingerprint(),
        "data": {"path": str(session.dataset.path), "checksum": session.dataset.checksum},
        **origin_facts(os.environ),
        **session.facts,
        **_facts_of_size(session, options),
    }


def _utterances_left_out(session: Session, options: TrainOptions, sources: Sources) -> dict[str, Any]:
    """Count the utterances of each split that do not fit their transcripts; print notices.  Collective.

    Returns:
        `left_out` of timing.json, see `LeftOut.gather`; only splits that have such utterances.
    """
    because = {
        "too_short": "have fewer frames than their transcripts have states",
        "unknown_words": "have words that are not in the lexicon",
    }
    found = {}
    for split, source in ((options.train_split, sources.training), (options.held_out, sources.held_out)):
        numbers = source.left_out.gather(session.comm)
        for why, number in numbers.items():
            session.reporter.notice(
                f"left out of {split!r}: {counted(number, 'utterance')} that {agreeing(number, because[why])}"
            )
        if numbers:
            found[split] = numbers
    return found


def _record_timing(
    session: Session,
    options: TrainOptions,
    run: RunDirectory,
    trainer: Trainer,
    sources: Sources,
    sampler: Sampler | None,
) -> None:
    """Write timing.json from the times and the traffic of all ranks.  Collective."""
    parts, comm = trainer.parts, session.comm
    parts.pulse.beat("the end of the run")
    data = sources.training.times.summary()  # before counting the targets, which is not part of training
    gpus = {} if sampler is None else sampler.gpu_summaries()
    timing = gather_timing(
        parts.timeline,
        comm,
        {**trainer.traffic(), "data": data, "memory": peak_memory(session.device)},
        of_ranks={rank: {"gpu": gpu} for rank, gpu in gpus.items()},
        synchronous=parts.strategy.traits.synchronous,
    )
    feeders = gather_feeder_times(sources.training, comm)
    left_out = {}
    if parts.task.transcripts is not None:
        left_out = _utterances_left_out(session, options, sources)
    if timing is not None and left_out:
        timing["left_out"] = left_out
    if timing is not None and feeders:
        timing["feeders"] = feeders
    # A run resumed at its very end has timed only a meeting; its timeline still holds all steps.
    if timing is not None and has_timed_steps(timing):
        write_timing(run.path, timing)


def _complete(
    session: Session,
    options: TrainOptions,
    run: RunDirectory,
    trainer: Trainer,
    sources: Sources,
    data_facts: dict[str, Any],
) -> None:
    """Save the model and mark the run as complete.  Collective.

    Args:
        data_facts: description of the data for the model file, as `describe_data` returns it.
    """
    parts, comm = trainer.parts, session.comm
    parts.reporter.end()
    parts.pulse.beat("saving the model")
    save_trained(session, options, sources.training, run.path, parts.model, data_facts)
    if comm.rank == 0:
        counters = trainer.counters
        facts = {"step": counters.step, "epochs": counters.epoch, "host": socket.gethostname()}
        if past := _past_best(run, parts.task.metrics[0]):
            parts.reporter.notice(past)
        lost = lost_ranks(comm)
        run.complete({**facts, "lost_ranks": lost} if lost else facts)
    comm.barrier()


def _past_best(run: RunDirectory, metric: Metric) -> str:
    """Return a notice if the model was better earlier, as when it overfits; else ""."""
    found = [(metric.score(value), epoch) for epoch, value in run.values(metric.recorded_as)]
    if not found:
        return ""
    (best, when), last = max(found, key=lambda pair: pair[0]), found[-1][0]  # the first, as in reports
    if not metric.is_past(best, last):
        return ""
    scores = [metric.with_unit(metric.score(each)) for each in (best, last)]
    return (
        f"{run.path}: past its best: {metric.name} {scores[0]} after epoch {epoch_text(when)}, {scores[1]} "
        "at the end; train for fewer epochs, on more data, or with more regularisation (such as dropout)"
    )
