"""Train once for each averaging period, on the same data from the same seed, and decode each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from speechdp.comm.serial import SerialCommunicator
from speechdp.decode.recognise import DecodingOptions, decode_split
from speechdp.decode.results import wer_path
from speechdp.decode.tuning import tune
from speechdp.experiments.arguments import refuse_throughout, split_to_tune_on
from speechdp.experiments.race.plan import RaceOptions, RacePlan, RaceSetting
from speechdp.experiments.race.run import hold_race
from speechdp.experiments.sweep.plan import SweepPlan, write_sweep
from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.process.ending import Stopped
from speechdp.report.runs.results import ONE_RANK
from speechdp.tasks.model_file import load_model
from speechdp.train.ownership import owned
from speechdp.train.progress import Reporter
from speechdp.train.realign import make_alignments, train_or_go_on
from speechdp.train.session import Session

#: What one rank alone trains with: it has nothing to exchange.
ONE_RANK_STRATEGY = StrategyChoice("gradient_averaging")


def run_sweep(
    session: Session,
    options: TrainOptions,
    plan: SweepPlan,
    out_dir: Path,
    reporter_for: Callable[[str], Reporter],
    race: RaceOptions,
) -> None:
    """Train, decode and record every run of a sweep, then let their settings race.  Collective.

    Finished runs are kept, interrupted ones go on, so the same command can be given again.

    Args:
        reporter_for: makes the reporter of a run from its name.
        race: how long the race lasts.

    Raises:
        as `train_run`; ConfigError where `out_dir` holds a sweep with other options.
    """
    refuse_throughout(options)
    runs = plan.runs()
    with_baseline = session.comm.size > 1 and plan.one_rank_steps > 0
    names = [*([ONE_RANK] if with_baseline else []), *runs]
    if plan.decode_split:
        refuse_kaldi_pdfs(session.dataset.classes_path, '--decode-split ("" for none)')
    if session.comm.rank == 0:
        write_sweep(out_dir, names, completed=False, decode_split=plan.decode_split)
    session.comm.barrier()
    alignments = make_alignments(
        dataclasses.replace(session, reporter=reporter_for("alignment")), options, out_dir
    )
    options = options.on_alignments(alignments)
    for position, name in enumerate(names, start=1):
        run_session = dataclasses.replace(session, reporter=reporter_for(f"[{position}/{len(names)}] {name}"))
        with owned(run_session, out_dir / name, "sweep"):
            if name == ONE_RANK:
                _train_one_rank(run_session, options, plan, out_dir / name)
                continue
            own = dataclasses.replace(options, strategy=runs[name])
            train_or_go_on(run_session, own, out_dir / name)
            if plan.decode_split:
                _decode(run_session, options.held_out, plan.decode_split, out_dir / name)
    race_session = dataclasses.replace(session, reporter=reporter_for("race"))
    hold_race(race_session, options, race_of(session, options, names, runs, race), out_dir)
    if session.comm.rank == 0:
        write_sweep(out_dir, names, completed=True, decode_split=plan.decode_split)
    session.comm.barrier()


def race_of(
    session: Session,
    options: TrainOptions,
    names: Sequence[str],
    runs: Mapping[str, StrategyChoice],
    race: RaceOptions,
) -> RacePlan:
    """Return the race of a sweep's runs.

    Args:
        options: what the runs share.
        names: of all runs.
        runs: the strategies of those on all ranks.
    """
    ranks = session.comm.size
    settings = [
        RaceSetting(name, runs[name])
        if name in runs
        else RaceSetting(name, ONE_RANK_STRATEGY, alone=True, batch_of=ranks)
        for name in names
    ]
    shared = {key: value for key, value in options.to_json().items() if key != "strategy"}
    return race.plan(ranks, options.seed, settings, {"data": session.dataset.checksum, "options": shared})


def _train_one_rank(session: Session, options: TrainOptions, plan: SweepPlan, run_dir: Path) -> None:
    """Time rank 0 by itself while the others sleep in the exchange after it."""
    stopped = False
    if session.comm.rank == 0:
        session.reporter.notice(f"one rank alone for {plan.one_rank_steps} steps, to compare the speed with")
        facts = {**session.facts, "hosts": session.facts.get("hosts", [])[:1]}
        alone = dataclasses.replace(session, comm=SerialCommunicator(), facts=facts)
        # Resolved for all ranks, so that this one has the batch of one of them, not that of all together.
        own = dataclasses.replace(
            options.resolve(session.comm.size),
            strategy=ONE_RANK_STRATEGY,
            max_steps=plan.one_rank_steps,
        )
        try:
            train_or_go_on(alone, own, run_dir)
        except Stopped:
            stopped = True
    if session.comm.broadcast_object(stopped):  # the others have not trained, but must leave as well
        raise Stopped


def _decode(session: Session, held_out: str, split: str, run_dir: Path) -> None:
    """Decode a split once; a result that stands there is kept.  Raises Stopped, having kept nothing."""
    dataset, comm = session.dataset, session.comm
    if session.comm.broadcast_object(wer_path(run_dir, split).is_file()):
        return
    trained = load_model(run_dir, session.device)
    options, tuning = DecodingOptions(), None
    tune_on = split_to_tune_on(dataset.path, held_out, split)
    if tune_on is not None:
        tuned = tune(trained, dataset, tune_on, options, comm, session.is_asked_to_stop)
        options, tuning = tuned.options, tuned.record
    result = decode_split(
        trained, dataset, split, run_dir, options, comm, session.is_asked_to_stop, tuning=tuning
    )
    session.reporter.notice(f"{run_dir.name}: {result.wer.summary()} on {split}")
