"""Rounds of training and forced alignment: from uniform targets to the network's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import inputs_of
from speechdp.decode.align import Aligner, AlignmentJob, AlignmentReport, Scorer, align_shards
from speechdp.decode.graph import LexiconTransducer
from speechdp.decode.scoring import AcousticScorer
from speechdp.errors import RunError
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs
from speechdp.labels.lexicon import Lexicon
from speechdp.options.run import TrainOptions
from speechdp.parallel.run_files import RunDirectory
from speechdp.process.ending import Stopped
from speechdp.tasks.model_file import LoadedModel, load_model
from speechdp.train.run import train_run
from speechdp.train.session import Session


def train_with_realignment(
    session: Session, options: TrainOptions, run_dir: Path, *, resume: bool = False
) -> None:
    """Train `options.realign` rounds, aligning after each, then the run proper.  Collective.

    The run proper trains on the last alignment, from the same initial weights as the rounds.

    Raises:
        as `train_run`.
    """
    proper = with_alignments(options, make_alignments(session, options, run_dir))
    train_run(session, proper, run_dir, resume=resume)


def with_alignments(options: TrainOptions, alignments: Path | None) -> TrainOptions:
    """Return the options of a run that trains on these targets and makes none itself."""
    return dataclasses.replace(options, alignments=alignments, realign=0, realign_epochs=None)


def make_alignments(session: Session, options: TrainOptions, out_dir: Path) -> Path | None:
    """Train and align `options.realign` times; return the last alignment's folder.  Collective.

    Round k trains in OUT/realign/k and leaves targets in OUT/alignments/k.  What is done already is not
    done again.  Without rounds the alignment is the one in `options`.

    Raises:
        as `train_run`; ConfigError where the targets are Kaldi's pdfs, which have no pronunciations here.
    """
    alignments = options.alignments
    if options.realign:
        refuse_kaldi_pdfs(session.dataset.classes_path, "--realign")
    for number in range(1, options.realign + 1):
        output = out_dir / "alignments" / str(number)
        round_dir = out_dir / "realign" / str(number)
        if not session.comm.broadcast_object(RunDirectory(output).is_complete):
            epochs = options.realign_epochs or options.num_epochs
            round_options = dataclasses.replace(with_alignments(options, alignments), epochs=epochs)
            session.reporter.notice(f"round {number} of {options.realign} before the alignment: {round_dir}")
            train_or_go_on(session, round_options, round_dir)
            report = align(session, options, round_dir, alignments, output)
            session.reporter.notice(_describe(number, report))
        alignments = output
    return alignments


def train_or_go_on(session: Session, options: TrainOptions, run_dir: Path) -> None:
    """Train a run, go on with one that was interrupted, or keep one that is complete.  Collective.

    Raises:
        ConfigError: the folder holds a run with other options.
    """
    run = RunDirectory(run_dir)
    done, begun = session.comm.broadcast_object([run.is_complete, run.is_begun])
    if done:
        run.check_same(options.fingerprint(), session.dataset.checksum)
    else:
        train_run(session, options, run_dir, resume=begun)


def align(
    session: Session, options: TrainOptions, run_dir: Path, previous: Path | None, output: Path
) -> AlignmentReport:
    """Align the training and held-out splits with the model in `run_dir`.  Collective.

    Each rank aligns some of the shards; the report counts all of them.

    Raises:
        Stopped: a rank was asked to; it aligned no further.
        RunError: nothing could be aligned.
    """
    comm, dataset = session.comm, session.dataset
    trained = load_model(run_dir, session.device)
    output.mkdir(parents=True, exist_ok=True)
    shards = [p for split in (options.train_split, options.held_out) for p in dataset.shard_paths(split)]
    jobs = [
        AlignmentJob(shard, previous / shard.name if previous else None, output / shard.name)
        for shard in shards[comm.rank :: comm.size]
    ]
    report = AlignmentReport.empty(dataset.num_classes)
    scorer = _scorer(trained, session)
    alignment, inputs = f"realigned-{output.name}", inputs_of(trained.config)
    stopped = False
    try:
        score = _until_asked(session, scorer.score)
        align_shards(jobs, _aligner(dataset, trained), score, report, alignment, inputs)
    except Stopped:
        stopped = True
    parts = comm.allgather_object({"report": report.to_dict(), "stopped": stopped})
    if any(part["stopped"] for part in parts):
        raise Stopped
    merged = AlignmentReport.merge(part["report"] for part in parts)
    if merged.failed == merged.utterances:
        raise RunError(f"{output}: no utterance could be aligned; train more --realign-epochs")
    if comm.rank == 0:
        RunDirectory(output).complete(
            {"utterances": merged.utterances, "changed_frames": merged.changed_frames}
        )
    comm.barrier()
    return merged


def _until_asked(session: Session, score: Scorer) -> Scorer:
    """Return a scorer that raises Stopped at the next utterance once this rank is asked to stop."""

    def scored(features: Iterable[FloatArray]) -> Iterator[tuple[int, FloatArray]]:
        for item in score(features):
            if session.is_asked_to_stop():
                raise Stopped
            yield item

    return scored


def _aligner(dataset: Dataset, trained: LoadedModel) -> Aligner:
    inventory = StateInventory.load(dataset.classes_path)
    return Aligner(
        LexiconTransducer(Lexicon.load(dataset.lexicon_path), inventory, trained.self_loop.numpy())
    )


def _scorer(trained: LoadedModel, session: Session) -> AcousticScorer:
    return AcousticScorer(trained.model, trained.class_log_prior.numpy(), device=session.device)


def _describe(number: int, report: AlignmentReport) -> str:
    changed = 100 * report.changed_frames / max(report.frames, 1)
    text = f"alignment {number}: {report.utterances} utterances, {changed:.1f} % of the frames changed class"
    if report.too_short or report.failed:
        text += f"; kept the old targets of {report.too_short} too short and {report.failed} without a path"
    if report.unknown:
        text += f"; kept the old targets of {report.unknown} with words that are not in the lexicon"
    return text
