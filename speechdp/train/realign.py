"""Rounds of training and forced alignment, from uniform targets to the network's own alignment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from speechdp import remedies
from speechdp.counting import counted
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.inputs import FEATURES_ALONE, InputOptions
from speechdp.data.transforms.preprocess import inputs_of
from speechdp.errors import ConfigError, RunError
from speechdp.files import record_cannot_be_read
from speechdp.json_input import parse_json
from speechdp.labels.hmm import FloatArray, StateInventory
from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.state_tying import context_shape, tying_in
from speechdp.options.run import TrainOptions
from speechdp.parallel.run_files import RunDirectory
from speechdp.process.ending import Stopped
from speechdp.tasks.model_file import LoadedModel, load_model
from speechdp.tasks.registry import networks_of
from speechdp.train.models import check_initial_model
from speechdp.train.run import check_beginning, is_done, train_run
from speechdp.train.session import Session
from speechdp.train.tolerance import require_all_ranks

if TYPE_CHECKING:  # a run without alignment does not import the aligner
    from speechdp.decode.align import Aligner, AlignmentReport, Scorer
    from speechdp.decode.scoring import AcousticScorer

#: Name of the folder of targets with states in context.
_TIED = "tied"
#: Rounds "auto" end when a round changes the class of fewer than this share of the frames.  A phone's states
#: may keep starting a frame earlier or later without any gain.
SETTLED_SHARE = 0.05
#: Largest number of rounds "auto".
MOST_ROUNDS = 6


def train_with_realignment(
    session: Session, options: TrainOptions, run_dir: Path, *, resume: bool = False, pause_at: int = 0
) -> None:
    """Train `options.realign` rounds, aligning after each, then train the main run.  Collective.

    The main run trains on the last alignment.  It starts from initial weights or, if `options.realign_from`
    says so, from the weights of the last round.

    Args:
        pause_at: step of the main run after which it evaluates and stops as if asked to; 0: none.

    Raises:
        as `train_run`.
    """
    if options.aligns:
        check_beginning(session, options, run_dir, resume=resume)
        _check_begun(session, options, run_dir)
        complete = _as_completed(session, options, run_dir) if resume else None
        if complete is not None:
            train_run(session, complete, run_dir, resume=True)
            return
    untied = _align_in_rounds(session, options, run_dir)
    proper = options.on_alignments(_tie(session, options, untied, run_dir))
    if options.realign_from == "throughout":
        assert untied is not None  # there was a round
        proper = dataclasses.replace(proper, initial_model=_round_dir(run_dir, int(untied.name)))
    train_run(dataclasses.replace(session, pause_at=pause_at), proper, run_dir, resume=resume)


def check_overwriting(session: Session, options: TrainOptions, run_dir: Path) -> None:
    """Refuse, before its folder is emptied, a run that `train_with_realignment` would refuse.

    Collective: when it returns, no rank has found anything to refuse.

    Raises:
        as `train_run`.
    """
    _check_targets(session.dataset, options)
    check_beginning(session, options, run_dir, resume=False, overwrite=True)


def _check_begun(session: Session, options: TrainOptions, run_dir: Path) -> None:
    """Refuse to resume a run on targets other than those these options make, before hours of making them.

    Raises:
        ConfigError: on rank 0, the run was begun on other targets.
        RunError: on rank 0, run.json cannot be read.
    """
    run = RunDirectory(run_dir)
    if session.comm.rank != 0 or not run.is_begun:
        return
    begun_on, made = run.recorded_option("alignments"), _last_made(options, run_dir)
    if begun_on is None or Path(str(begun_on)).resolve() not in [folder.resolve() for folder in made]:
        raise ConfigError(
            f"{run_dir / 'run.json'}: the run was begun on {begun_on or 'the targets in DATA'}, and "
            f"--realign {options.realign} leads to {made[-1]}; {remedies.resuming_as_begun()}, or choose "
            "another folder"
        )


def _as_completed(session: Session, options: TrainOptions, run_dir: Path) -> TrainOptions | None:
    """Return the options that a complete run was trained with; None: it is not complete.  Collective.

    Its targets are not made again, even if they were deleted.

    Raises:
        ConfigError: its targets, or an earlier round's, exist and were made with other options.
    """
    run, found = RunDirectory(run_dir), None
    if session.comm.rank == 0 and run.is_complete:
        found = [run.recorded_option(name) for name in ("alignments", "initial_model")]
    found = session.comm.broadcast_object(found)
    if found is None:
        return None
    alignments, initial_model = found
    folder = Path(alignments)
    rounds = MOST_ROUNDS if options.realign == "auto" else options.realign
    names = [str(number) for number in range(0 if options.flat_start else 1, rounds + 1)]
    for name in [*names, _TIED] if options.context != "none" else names:
        _made(session, folder.parent / name, _made_by(options, name))
    proper = options.on_alignments(folder)
    if options.realign_from == "throughout":  # a run trained otherwise is refused, whichever round is named
        proper = dataclasses.replace(proper, initial_model=Path(initial_model or _round_dir(run_dir, 1)))
    return proper


def _last_made(options: TrainOptions, out_dir: Path) -> list[Path]:
    """Return the folder of the last targets of `make_alignments`; for rounds "auto" all possible folders.

    Raises:
        RunError: the record of an alignment cannot be read.
    """
    folder = out_dir / "alignments"
    if options.context != "none":
        return [folder / _TIED]
    if options.realign != "auto":
        return [folder / str(options.realign)]
    for number in range(1, MOST_ROUNDS):
        record = _record_of(folder / str(number))
        if record is None:
            return [folder / str(later) for later in range(number, MOST_ROUNDS + 1)]
        if _has_settled(record.get("changed_share")):
            return [folder / str(number)]
    return [folder / str(MOST_ROUNDS)]


def last_alignment(out_dir: Path, options: TrainOptions) -> Path:
    """Return the last alignment that `make_alignments` made in a folder with these options.

    Raises:
        RunError: there is no complete alignment.
    """
    made = [path.parent for path in (out_dir / "alignments").glob("*/completed.json")]
    tied = options.context != "none"
    found = [folder for folder in made if (folder.name == _TIED if tied else folder.name.isdigit())]
    if not found:
        raise RunError(
            f"{out_dir}/alignments: holds no whole alignment; make it with --realign or --flat-start"
        )
    return found[0] if tied else max(found, key=lambda folder: int(folder.name))


def make_alignments(session: Session, options: TrainOptions, out_dir: Path) -> Path | None:
    """Make a flat start if requested, then train and align `options.realign` times, then tie.  Collective.

    Return the folder of the last targets.  OUT/alignments/0 is the flat start's alignment,
    OUT/alignments/K the alignment of round K, which trains in OUT/realign/K.  The first round trains by
    `options.realign_criterion`.  Rounds "auto" end when fewer than SETTLED_SHARE of the frames change their
    class, or after MOST_ROUNDS.  OUT/alignments/tied has the last of these alignments (or the one in
    `options`) with states in context.  Steps already done are not repeated.  If no step is requested, the
    result is the alignment in `options`.

    Raises:
        as `train_run`; ConfigError if the targets are Kaldi's pdfs, which have no pronunciations here, or
            cannot be tied.
    """
    return _tie(session, options, _align_in_rounds(session, options, out_dir), out_dir)


def _align_in_rounds(session: Session, options: TrainOptions, out_dir: Path) -> Path | None:
    """Make the alignments without context (see `make_alignments`); return the last folder.  Collective."""
    alignments = options.alignments
    _check_targets(session.dataset, options)
    _check_tied(session, options, out_dir)
    if options.flat_start:
        alignments = out_dir / "alignments" / "0"
        if _made(session, alignments, _made_by(options, alignments.name)) is None:
            align_from_nothing(session, options, alignments)
    rounds = MOST_ROUNDS if options.realign == "auto" else options.realign
    for number in range(1, rounds + 1):
        changed_share = _make_round(session, options, out_dir, number, alignments)
        alignments = out_dir / "alignments" / str(number)
        if options.realign == "auto" and _is_last(session, number, changed_share):
            break
    return alignments


def _tie(session: Session, options: TrainOptions, alignments: Path | None, out_dir: Path) -> Path | None:
    """Tie the states of an alignment, if requested; return the folder to train on.  Collective."""
    if options.context == "none":
        return alignments
    output = out_dir / "alignments" / _TIED
    made_by = _made_by(options, _TIED)
    if _made(session, output, made_by) is None:
        from speechdp.train.tied_states import tie_states  # noqa: PLC0415

        tie_states(session, options, alignments, output, made_by)
    return output


def _made_by(options: TrainOptions, name: str) -> dict[str, Any]:
    """Return the options that determine the alignment in the folder `name`: flat start, a round, or tied."""
    if name == _TIED:
        return {
            "context": options.context,
            "tied_states": options.max_classes,
            "alignments": None if options.alignments is None else str(options.alignments),
            "flat_start": options.flat_start,
            "realign": options.realign,
            "initial_model": _first_model(options) if options.realign else None,
        }
    if name == "0":
        return {"flat_start": True}
    return {
        "flat_start": options.flat_start,
        "epochs": options.realign_epochs or options.num_epochs,
        "realign_criterion": options.realign_criterion if name == "1" else None,
        "realign_from": None if name == "1" else "scratch" if options.realign_from == "scratch" else "last",
        "initial_model": _first_model(options),
    }


def _first_model(options: TrainOptions) -> str | None:
    """Return the model that the first round starts from; None: initial weights."""
    return None if options.initial_model is None else str(options.initial_model)


def _check_tied(session: Session, options: TrainOptions, out_dir: Path) -> None:
    """Refuse states in context made with other options, before hours of alignment.  Collective.

    If they are not made yet, also check the initial model; if they are, the model may have been deleted.

    Raises:
        ConfigError: the states were made with other options, or the initial model does not fit.
    """
    if options.context == "none":
        return
    if _made(session, out_dir / "alignments" / _TIED, _made_by(options, _TIED)) is None:
        check_initial_model(session.dataset, options)


def _check_targets(dataset: Dataset, options: TrainOptions) -> None:
    """Refuse targets that cannot be realigned or tied.  Raises ConfigError."""
    for name in options.aligning:
        refuse_kaldi_pdfs(dataset.classes_path, name, "leave it out, they are aligned already")
    if options.aligns and tying_in(options.alignments) is not None:
        raise ConfigError(
            f"{options.aligning[0]}: {options.alignments} has states in context already; leave it out, or "
            "give an alignment without"
        )
    if options.context != "none":  # before hours of alignment
        from speechdp.labels.decision_tree import check_max_classes  # noqa: PLC0415

        inventory = StateInventory.load(dataset.classes_path)
        context_shape(inventory, options.context)
        check_max_classes(inventory, options.max_classes)
    if options.aligning == ("--context",) and options.alignments is None and dataset.alignment == "flat":
        raise ConfigError(
            f"--context {options.context}: {dataset.path} has no alignment, its targets only spread each "
            "transcript evenly; add --flat-start"
        )


def _make_round(
    session: Session, options: TrainOptions, out_dir: Path, number: int, previous: Path | None
) -> float | None:
    """Train and align once, skipping what is already done.  Collective.

    Return the share of the frames whose class changed; None: an earlier version did not record it.

    Args:
        number: number of the round, from 1.
        previous: targets to train on; None: those in the shards.
    """
    output, round_dir = out_dir / "alignments" / str(number), _round_dir(out_dir, number)
    made_by = _made_by(options, output.name)
    made = _made(session, output, made_by)
    if made is not None:
        share: float | None = made.get("changed_share")
        return share
    # A round serves only to align; epochs are averaged only in the main run.
    round_options = dataclasses.replace(
        options.on_alignments(previous), epochs=made_by["epochs"], average_epochs=1
    )
    if number == 1:
        round_options = dataclasses.replace(round_options, model=options.first_round_model())
    elif _was_begun_by_earlier_version(session, round_dir):
        del made_by["realign_from"]  # it continues as it was begun, from initial weights
    elif options.realign_from != "scratch":
        round_options = dataclasses.replace(round_options, initial_model=_round_dir(out_dir, number - 1))
    session.reporter.notice(f"round {number} of {options.realign} before the alignment: {round_dir}")
    train_or_resume(session, round_options, round_dir)
    report = align(session, options, round_dir, previous, output, made_by)
    session.reporter.notice(_describe(number, report))
    return report.changed_share


def _round_dir(out_dir: Path, number: int) -> Path:
    return out_dir / "realign" / str(number)


def _was_begun_by_earlier_version(session: Session, round_dir: Path) -> bool:
    """Return whether a round was begun by a version in which rounds could not start from the one before.

    Collective.
    """
    run, found = RunDirectory(round_dir), None
    if session.comm.rank == 0:
        with remedies.of_part(round_dir):
            found = run.is_begun and not run.records_option("initial_model")
    return bool(session.comm.broadcast_object(found))


def _has_settled(changed_share: float | None) -> bool:
    return changed_share is not None and changed_share < SETTLED_SHARE


def _is_last(session: Session, number: int, changed_share: float | None) -> bool:
    """Return whether rounds "auto" end with this one; print why."""
    if _has_settled(changed_share):
        session.reporter.notice(
            f"alignment {number}: has converged, fewer than {SETTLED_SHARE:.0%} of the frames changed class"
        )
        return True
    if number == MOST_ROUNDS:
        session.reporter.notice(
            f"alignment {number}: has not converged after {MOST_ROUNDS} rounds, the maximum"
        )
    return number == MOST_ROUNDS


def train_or_resume(session: Session, options: TrainOptions, run_dir: Path) -> None:
    """Train a run, resume an interrupted one, or keep a complete one.  Collective.

    Raises:
        ConfigError: the folder holds a run with other options.
    """
    run = RunDirectory(run_dir)
    done, begun = session.comm.broadcast_object([is_done(run), run.is_begun])
    with remedies.of_part(run_dir):
        if done:
            given, defaults = options.to_json(), TrainOptions().to_json()
            run.check_same(options.fingerprint(), session.dataset.checksum, given, defaults)
        else:
            train_run(session, options, run_dir, resume=begun)


def _made(session: Session, folder: Path, made_by: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of an alignment; None: it is not complete.  Collective.

    Args:
        session: the ranks; rank 0 reads the folder.
        folder: folder of the alignment.
        made_by: required options; those that an earlier version did not record are assumed to be the same.

    Raises:
        ConfigError: the alignment was made with other options.
    """
    found: dict[str, Any] | None = _record_of(folder, made_by) if session.comm.rank == 0 else None
    found = session.comm.broadcast_object(found)
    if found is not None and found["made_by"] != dict(made_by):
        raise ConfigError(
            f"{folder}: was made with other options ({_shown(found['made_by'])}); repeat the command it was "
            "made by, or choose another folder"
        )
    return found


def _record_of(folder: Path, made_by: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any] | None:
    """Return the record of an alignment, with defaults from `made_by`; None: it is not complete.

    Raises:
        RunError: the record cannot be read.
    """
    path = folder / "completed.json"
    if not path.is_file():
        return None
    try:
        found = dict(parse_json(path.read_text(encoding="utf-8")))
        found["made_by"] = {**made_by, **found.get("made_by", {})}
    except (OSError, ValueError, TypeError) as error:
        raise RunError(record_cannot_be_read(path, error, "delete its folder to align again")) from error
    return found


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

    Each rank aligns some of the shards; the report covers all of them.  `made_by` is recorded.

    Raises:
        Stopped: a rank was asked to stop, and aligned no further.
        RunError: nothing could be aligned, or a rank is lost.
    """
    trained = load_model(run_dir, session.device, own=networks_of(options.task))
    scorer = _scorer(trained, session)
    aligner = _aligner(session.dataset, trained.self_loop.numpy())
    how = _HowToAlign(f"realigned-{output.name}", aligner, scorer.score, inputs_of(trained.config), made_by)
    return _align(session, options, how, previous, output)


def align_from_nothing(session: Session, options: TrainOptions, output: Path) -> None:
    """Align the training and held-out splits with Gaussian mixtures trained for this.  Collective.

    Raises:
        as `align` and `train_mixtures`.
    """
    from speechdp.train.flat_start import train_mixtures  # noqa: PLC0415

    session.reporter.notice(f"flat start: training Gaussian mixtures that align {options.train_split!r}")
    found = train_mixtures(session, options.train_split)
    aligner = _aligner(session.dataset, found.self_loop)
    how = _HowToAlign("flat-start", aligner, found.score, FEATURES_ALONE, {"flat_start": True})
    report = _align(session, options, how, None, output)
    utterances = counted(found.utterances, "utterance")
    text = f"flat start: {found.mixtures.num_gaussians} Gaussians, trained on {utterances}"
    session.reporter.notice(f"{text}; {_describe(0, report)}")


@dataclass(frozen=True)
class _HowToAlign:
    """The arguments of `align_shards` that align utterances, and the options they come from."""

    name: str
    aligner: Aligner
    score: Scorer
    inputs: InputOptions
    made_by: Mapping[str, Any]


def _align(
    session: Session, options: TrainOptions, how: _HowToAlign, previous: Path | None, output: Path
) -> AlignmentReport:
    """Align the training and held-out splits; see `align`.  Collective.

    Every rank aligns its own shards, so the folder is complete only if no rank is lost.
    """
    from speechdp.decode.align import AlignmentJob, AlignmentReport, align_shards  # noqa: PLC0415

    comm, dataset = session.comm, session.dataset
    require_all_ranks(comm)
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
    require_all_ranks(comm)
    if any(part["stopped"] for part in parts):
        raise Stopped
    merged = AlignmentReport.merge(part["report"] for part in parts)
    if merged.failed + merged.too_short + merged.unknown == merged.utterances:
        remedy = "train more --realign-epochs" if merged.failed else "check transcripts, lexicon and audio"
        raise RunError(f"{output}: no utterance could be aligned; {remedy}")
    if comm.rank == 0:
        counts = {name: getattr(merged, name) for name in ("utterances", "frames", "changed_frames")}
        share = {"changed_share": round(merged.changed_share, 6)}
        RunDirectory(output).complete({**counts, **share, "made_by": dict(how.made_by)})
    comm.barrier()
    return merged


def _until_asked(session: Session, score: Scorer) -> Scorer:
    """Return a scorer that raises Stopped at the next utterance after a stop request to this rank."""

    def scored(features: Iterable[FloatArray]) -> Iterator[tuple[int, FloatArray]]:
        for item in score(features):
            if session.is_asked_to_stop():
                raise Stopped
            yield item

    return scored


def _aligner(dataset: Dataset, self_loop: NDArray[np.float64]) -> Aligner:
    from speechdp.decode.align import Aligner  # noqa: PLC0415
    from speechdp.decode.graphs.graph import LexiconTransducer  # noqa: PLC0415

    inventory = StateInventory.load(dataset.classes_path)
    return Aligner(LexiconTransducer(Lexicon.load(dataset.lexicon_path), inventory, self_loop))


def _scorer(trained: LoadedModel, session: Session) -> AcousticScorer:
    from speechdp.decode.scoring import AcousticScorer  # noqa: PLC0415

    return AcousticScorer(trained.model, trained.class_log_prior.numpy(), device=session.device)


def _describe(number: int, report: AlignmentReport) -> str:
    changed = f"{100 * report.changed_share:.1f} % of the frames changed class"
    text = f"alignment {number}: {counted(report.utterances, 'utterance')}, {changed}"
    if report.too_short or report.failed:
        text += f"; kept the old targets of {report.too_short} too short and {report.failed} without a path"
    if report.unknown:
        text += f"; kept the old targets of {report.unknown} with words that are not in the lexicon"
    return text
