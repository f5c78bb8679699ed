"""Rounds of training and forced alignment: from uniform targets to the network's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.inputs import FEATURES_ALONE, InputOptions
from speechdp.data.transforms.preprocess import inputs_of
from speechdp.decode.align import Aligner, AlignmentJob, AlignmentReport, Scorer, align_shards
from speechdp.decode.graph import LexiconTransducer
from speechdp.decode.scoring import AcousticScorer
from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_read
from speechdp.json_input import parse_json
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs
from speechdp.labels.lexicon import Lexicon
from speechdp.options.run import TrainOptions
from speechdp.parallel.run_files import RunDirectory
from speechdp.process.ending import Stopped
from speechdp.tasks.model_file import LoadedModel, load_model
from speechdp.train.flat_start import train_mixtures
from speechdp.train.run import check_beginning, train_run
from speechdp.train.session import Session


def train_with_realignment(
    session: Session, options: TrainOptions, run_dir: Path, *, resume: bool = False
) -> None:
    """Train `options.realign` rounds, aligning after each, then the run proper.  Collective.

    The run proper trains on the last alignment, from the same initial weights as the rounds.

    Raises:
        as `train_run`.
    """
    if options.aligns:
        check_beginning(session, options, run_dir, resume=resume)
    proper = options.on_alignments(make_alignments(session, options, run_dir))
    train_run(session, proper, run_dir, resume=resume)


def make_alignments(session: Session, options: TrainOptions, out_dir: Path) -> Path | None:
    """Align from nothing if asked to, then train and align `options.realign` times.  Collective.

    Returns the last alignment's folder: OUT/alignments/0 is the one from nothing, K that of round K, which
    trains in OUT/realign/K; the first by the criterion of `options.realign_criterion`.  What is done already
    is not done again.  Without either the alignment is the one in `options`.

    Raises:
        as `train_run`; ConfigError where the targets are Kaldi's pdfs, which have no pronunciations here.
    """
    alignments = options.alignments
    for given, name in ((options.flat_start, "--flat-start"), (options.realign, "--realign")):
        if given:
            refuse_kaldi_pdfs(session.dataset.classes_path, name, "leave it out, they are aligned already")
    if options.flat_start:
        alignments = out_dir / "alignments" / "0"
        if not _is_made(session, alignments, {"flat_start": True}):
            align_from_nothing(session, options, alignments)
    for number in range(1, options.realign + 1):
        output = out_dir / "alignments" / str(number)
        round_dir = out_dir / "realign" / str(number)
        epochs = options.realign_epochs or options.num_epochs
        criterion = options.realign_criterion if number == 1 else None
        made_by = {"flat_start": options.flat_start, "epochs": epochs, "realign_criterion": criterion}
        if not _is_made(session, output, made_by):
            round_options = dataclasses.replace(options.on_alignments(alignments), epochs=epochs)
            if number == 1:
                round_options = dataclasses.replace(round_options, model=options.first_round_model())
            session.reporter.notice(f"round {number} of {options.realign} before the alignment: {round_dir}")
            train_or_go_on(session, round_options, round_dir)
            report = align(session, options, round_dir, alignments, output, made_by)
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


def _is_made(session: Session, folder: Path, made_by: Mapping[str, Any]) -> bool:
    """Tell whether an alignment is complete.  Collective.

    Args:
        session: rank 0 looks.
        folder: of the alignment.
        made_by: the options that it has to be made by; versions that recorded none are believed.

    Raises:
        ConfigError: it was made by others.
    """
    found = None
    path = folder / "completed.json"
    if session.comm.rank == 0 and path.is_file():
        try:
            found = dict(parse_json(path.read_text(encoding="utf-8"))).get("made_by", dict(made_by))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(cannot_be_read(path, error, "delete its folder to align again")) from error
    found = session.comm.broadcast_object(found)
    if found is not None and found != dict(made_by):
        raise ConfigError(
            f"{folder}: was made with other options ({_shown(found)}); repeat the command it was made by, or "
            "choose another folder"
        )
    return found is not None


def _shown(made_by: Mapping[str, Any]) -> str:
    given = (f"--{n.replace('_', '-')}{'' if v is True else f' {v}'}" for n, v in made_by.items() if v)
    return " ".join(given) or "none"


def align(
    session: Session,
    options: TrainOptions,
    run_dir: Path,
    previous: Path | None,
    output: Path,
    made_by: Mapping[str, Any] = MappingProxyType({}),
) -> AlignmentReport:
    """Align the training and held-out splits with the model in `run_dir`.  Collective.

    Each rank aligns some of the shards; the report counts all of them.  `made_by` is recorded.

    Raises:
        Stopped: a rank was asked to; it aligned no further.
        RunError: nothing could be aligned.
    """
    trained = load_model(run_dir, session.device)
    scorer = _scorer(trained, session)
    aligner = _aligner(session.dataset, trained.self_loop.numpy())
    how = _HowToAlign(f"realigned-{output.name}", aligner, scorer.score, inputs_of(trained.config), made_by)
    return _align(session, options, how, previous, output)


def align_from_nothing(session: Session, options: TrainOptions, output: Path) -> None:
    """Align the training and held-out splits with Gaussian mixtures trained for it.  Collective.

    Raises:
        as `align` and `train_mixtures`.
    """
    session.reporter.notice(f"flat start: training Gaussian mixtures to align {options.train_split!r} with")
    found = train_mixtures(session, options.train_split)
    aligner = _aligner(session.dataset, found.self_loop)
    how = _HowToAlign("flat-start", aligner, found.score, FEATURES_ALONE, {"flat_start": True})
    report = _align(session, options, how, None, output)
    text = f"flat start: {found.mixtures.num_gaussians} Gaussians, trained on {found.utterances} utterances"
    session.reporter.notice(f"{text}; {_describe(0, report)}")


@dataclass(frozen=True)
class _HowToAlign:
    """What aligns utterances: `align_shards` says what each is; and the options that it comes from."""

    name: str
    aligner: Aligner
    score: Scorer
    inputs: InputOptions
    made_by: Mapping[str, Any]


def _align(
    session: Session, options: TrainOptions, how: _HowToAlign, previous: Path | None, output: Path
) -> AlignmentReport:
    """Align the training and held-out splits; see `align`.  Collective."""
    comm, dataset = session.comm, session.dataset
    output.mkdir(parents=True, exist_ok=True)
    shards = [p for split in (options.train_split, options.held_out) for p in dataset.shard_paths(split)]
    jobs = [
        AlignmentJob(shard, previous / shard.name if previous else None, output / shard.name)
        for shard in shards[comm.rank :: comm.size]
    ]
    report = AlignmentReport.empty(dataset.num_classes)
    stopped = False
    try:
        align_shards(jobs, how.aligner, _until_asked(session, how.score), report, how.name, how.inputs)
    except Stopped:
        stopped = True
    parts = comm.allgather_object({"report": report.to_dict(), "stopped": stopped})
    if any(part["stopped"] for part in parts):
        raise Stopped
    merged = AlignmentReport.merge(part["report"] for part in parts)
    if merged.failed + merged.too_short + merged.unknown == merged.utterances:
        remedy = "train more --realign-epochs" if merged.failed else "check transcripts, lexicon and audio"
        raise RunError(f"{output}: no utterance could be aligned; {remedy}")
    if comm.rank == 0:
        counts = {"utterances": merged.utterances, "changed_frames": merged.changed_frames}
        RunDirectory(output).complete({**counts, "made_by": dict(how.made_by)})
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


def _aligner(dataset: Dataset, self_loop: NDArray[np.float64]) -> Aligner:
    inventory = StateInventory.load(dataset.classes_path)
    return Aligner(LexiconTransducer(Lexicon.load(dataset.lexicon_path), inventory, self_loop))


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
