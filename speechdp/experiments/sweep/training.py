"""Train once with each averaging period, on the same data with the same seed, and decode each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from speechdp.counting import counted
from speechdp.decode.kept_graph import KeptGraph
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.results import has_word_errors
from speechdp.decode.split import decode_split
from speechdp.decode.tuning import tune
from speechdp.experiments.arguments import refuse_throughout, split_to_tune_on
from speechdp.experiments.compare.plan import SEQUENTIAL
from speechdp.experiments.race.plan import RaceOptions, RacePlan, RaceSetting, shared_training
from speechdp.experiments.race.run import hold_race
from speechdp.experiments.sweep.failures import failure_of, has_failed
from speechdp.experiments.sweep.plan import (
    SweepPlan,
    SweepRecord,
    refuse_other_ranks,
    refuse_other_sweep,
    write_sweep,
)
from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.run_files import RunDirectory
from speechdp.parallel.stop import LoneStop
from speechdp.process.ending import Stopped
from speechdp.report.runs.results import ONE_RANK
from speechdp.tasks.model_file import load_model
from speechdp.tasks.registry import networks_of
from speechdp.train.build import check_shards
from speechdp.train.ownership import owned
from speechdp.train.progress import Reporter
from speechdp.train.realign import check_overwriting, make_alignments, train_or_resume
from speechdp.train.session import Session


def check_sweep(
    session: Session,
    options: TrainOptions,
    plan: SweepPlan,
    out_dir: Path,
    *,
    overwrite: bool = False,
    restarted: bool = False,
) -> None:
    """Refuse an impossible sweep before anything is deleted or trained for it.  Collective.

    Args:
        overwrite: the contents of `out_dir` will be deleted afterwards.
        restarted: `speechdp launch` has restarted the sweep, perhaps on fewer ranks.

    Raises:
        ConfigError, ShardError: options that do not fit the data, a missing split to decode, or a sweep
            that was begun on another number of ranks.
    """
    refuse_throughout(options)
    if not restarted:
        options.check_slow_ranks(session.comm.size)
    if plan.decode_split:
        refuse_kaldi_pdfs(session.dataset.classes_path, '--decode-split ("" for none)')
        session.dataset.shard_paths(plan.decode_split)
    if overwrite:
        for name, strategy in plan.runs().items():
            check_overwriting(session, dataclasses.replace(options, strategy=strategy), out_dir / name)
        check_shards(session, options)
    elif session.comm.rank == 0 and not restarted:
        refuse_other_ranks(out_dir, session.comm.size)
    session.comm.barrier()


def names_of(plan: SweepPlan, ranks: int) -> list[str]:
    """Return the names of the runs that a sweep trains on `ranks` ranks, in order."""
    with_baseline = ranks > 1 and plan.one_rank_steps > 0
    return [*([ONE_RANK] if with_baseline else []), *plan.runs()]


def run_sweep(
    session: Session,
    options: TrainOptions,
    plan: SweepPlan,
    out_dir: Path,
    reporter_for: Callable[[str], Reporter],
    race: RaceOptions,
) -> int:
    """Train, decode and record every run of a sweep, then race their settings.  Collective.

    Finished runs are kept and interrupted ones continue, so the same command can be given again.  A run
    that fails on all ranks does not end the others.  A run that ended an earlier job is tried again last.

    Returns:
        The number of runs that failed.

    Args:
        reporter_for: makes the reporter of a run from its name.
        race: how long the race lasts.

    Raises:
        As `train_run`; ConfigError if `out_dir` holds a sweep with other options.
    """
    runs = plan.runs()
    names = names_of(plan, session.comm.size)
    record = SweepRecord(tuple(names), decode_split=plan.decode_split, ranks=session.comm.size)
    record = _begin(session, record, out_dir)
    alignments = make_alignments(
        dataclasses.replace(session, reporter=reporter_for("alignment")), options, out_dir
    )
    options = options.on_alignments(alignments)
    failed: dict[str, str] = {}
    for name in _in_order(session, names, out_dir):
        place = f"[{names.index(name) + 1}/{len(names)}] {name}"
        run_session = dataclasses.replace(session, reporter=reporter_for(place))
        with owned(run_session, out_dir / name, "sweep"):
            if name == ONE_RANK:
                message = _train_one_rank(run_session, options, plan, out_dir / name, place)
            else:
                own = dataclasses.replace(options, strategy=runs[name])
                message = _train_and_decode(run_session, own, plan.decode_split, out_dir / name)
        if message is not None:
            failed[name] = message
            record = dataclasses.replace(record, failed={**failed})
            _write(session, record, out_dir)
            run_session.reporter.notice(f"{name}: failed: {message}")
    racing = [name for name in names if name not in failed]
    race_session = dataclasses.replace(session, reporter=reporter_for("race"))
    hold_race(race_session, options, race_of(session, options, racing, runs, race), out_dir)
    _write(session, dataclasses.replace(record, completed=not failed), out_dir)
    return len(failed)


def _begin(session: Session, record: SweepRecord, out_dir: Path) -> SweepRecord:
    """Write the record of a new or continued sweep; return it.  Collective."""
    if session.comm.rank == 0:
        before = refuse_other_sweep(out_dir, record)
        if before is not None:
            # The number at the first start, because launch may have restarted the sweep on fewer ranks.
            record = dataclasses.replace(record, ranks=before.ranks or record.ranks)
            if others := [name for name in before.runs if name not in record.runs]:
                session.reporter.notice(
                    f"{counted(len(others), 'run')} of {out_dir} will not be in the report, first "
                    f"{others[0]}: this command does not name their settings"
                )
    _write(session, record, out_dir)
    return record


def _write(session: Session, record: SweepRecord, out_dir: Path) -> None:
    """Write the record on rank 0, and wait for it.  Collective."""
    if session.comm.rank == 0:
        write_sweep(out_dir, record)
    session.comm.barrier()


def _in_order(session: Session, names: Sequence[str], out_dir: Path) -> list[str]:
    """Return the runs in training order: last those that ended an earlier job, because they may again."""
    ended = [name for name in names if has_failed(out_dir / name)] if session.comm.rank == 0 else []
    ended = session.comm.broadcast_object(ended)
    return [*(name for name in names if name not in ended), *ended]


def _train_and_decode(session: Session, options: TrainOptions, split: str, run_dir: Path) -> str | None:
    """Finish a run; return None, or why it failed on all ranks.  Collective."""
    message = failure_of(
        session.comm,
        run_dir,
        lambda: train_or_resume(session, options, run_dir),
        synchronous=options.strategy.parsed.traits.synchronous,
    )
    if message is None and split:
        _decode(session, options, split, run_dir)
    return message


def race_of(
    session: Session,
    options: TrainOptions,
    names: Sequence[str],
    runs: Mapping[str, StrategyChoice],
    race: RaceOptions,
) -> RacePlan:
    """Return the race of a sweep's runs.

    Args:
        options: options that the runs share.
        names: names of all runs.
        runs: strategies of the runs on all ranks, by name.
    """
    ranks = session.comm.size
    settings = [
        RaceSetting(name, runs[name])
        if name in runs
        else RaceSetting(name, SEQUENTIAL, alone=True, batch_of=ranks)
        for name in names
    ]
    training = shared_training(session.dataset.checksum, options)
    return race.plan(ranks, options.seed, settings, training)


def _train_one_rank(
    session: Session, options: TrainOptions, plan: SweepPlan, run_dir: Path, place: str
) -> str | None:
    """Time rank 0 by itself while the others wait; return None, or why it failed.  Collective.

    Args:
        place: start of the line of progress, as for other runs.
    """
    stopped, message = False, None
    lone = LoneStop(session.stop, session.comm)
    with lone.while_others_wait():
        if session.comm.rank == 0:
            if not RunDirectory(run_dir).is_complete:
                session.reporter.notice(
                    f"{place}: rank 0 alone for {plan.one_rank_steps} steps, to compare the speed with"
                )
            alone = session.alone(lone)
            # Resolved for all ranks, so that this rank has the batch of one rank, not the global batch.
            own = dataclasses.replace(
                options.resolve(session.comm.size),
                strategy=SEQUENTIAL,
                max_steps=plan.one_rank_steps,
                average_epochs=1,
            )
            try:
                message = failure_of(
                    alone.comm, run_dir, lambda: train_or_resume(alone, own, run_dir), synchronous=True
                )
            except Stopped:
                stopped = True
    # The others have not trained, but must also leave, or learn of a failure.
    stopped, message = session.comm.broadcast_object([stopped, message])
    if stopped:
        raise Stopped
    return None if message is None else str(message)


def _decode(session: Session, options: TrainOptions, split: str, run_dir: Path) -> None:
    """Decode a split, unless a result exists.  Raises Stopped, without keeping a partial result."""
    comm = session.comm
    kept = KeptGraph(run_dir, comm)
    try:
        _decode_once(session, options, split, run_dir, kept)
    finally:
        kept.discard()  # each run has its own graph; those of many runs would fill a disk


def _decode_once(
    session: Session, trained_by: TrainOptions, split: str, run_dir: Path, kept: KeptGraph
) -> None:
    dataset, comm = session.dataset, session.comm
    if comm.broadcast_object(has_word_errors(run_dir, split)):
        return
    trained = load_model(run_dir, session.device, ctc=True, own=networks_of(trained_by.task))
    options, tuning = DecodingOptions(), None
    tune_on = split_to_tune_on(dataset.path, trained_by.held_out, split)
    if tune_on is not None:
        session.reporter.notice(f"{run_dir.name}: choosing the scales for decoding on {tune_on}")
        tuned = tune(trained, dataset, tune_on, options, comm, session.is_asked_to_stop, kept=kept)
        options, tuning = tuned.options, tuned.record
    result = decode_split(
        trained, dataset, split, run_dir, options, comm, session.is_asked_to_stop, tuning=tuning
    )
    session.reporter.notice(f"{run_dir.name}: {result.wer.summary()} on {split}")
    if result.learnt_remark:
        session.reporter.notice(f"{run_dir.name}: {result.learnt_remark}")
