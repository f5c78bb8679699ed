"""Write a network's scores as a Kaldi archive, for Kaldi's decoders (latgen-faster-mapped).

Legend: T frames of an utterance, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from speechdp.data.kaldi.matrix import write_matrix
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.data.transforms.preprocess import Preprocessor, inputs_of
from speechdp.decode.origin import check_origin, check_task
from speechdp.decode.recogniser import LARGEST_WEIGHT, TrainedModel
from speechdp.decode.scoring import AcousticScorer
from speechdp.errors import ConfigError, RunError
from speechdp.files import atomic_path, cannot_be_written
from speechdp.labels.hmm import FloatArray
from speechdp.labels.kaldi_pdfs import load_classes

Kind = Literal["log_likelihood", "log_posterior"]

#: Scores held in memory until they are written in order: 256 MiB in float32.
_MAX_HELD_VALUES = 2**26


@dataclass(frozen=True)
class PosteriorOptions:
    """What to write, and where.

    Attributes:
        split: of the data directory.
        archive: the Kaldi archive to write.
        scp: the table to write beside it, or None.
        kind: log_likelihood: log posterior - prior_scale * log prior; log_posterior: the network's output.
        prior_scale: exponent of the prior that posteriors are divided by.
    """

    split: str
    archive: Path
    scp: Path | None = None
    kind: Kind = "log_likelihood"
    prior_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.prior_scale <= LARGEST_WEIGHT:
            raise ConfigError(
                f"--prior-scale {self.prior_scale}: must be a number from 0 on, at most {LARGEST_WEIGHT:,.0f}"
            )
        if self.kind == "log_posterior" and self.prior_scale != 1:
            raise ConfigError("--prior-scale has no effect with --kind log_posterior; leave it out")
        if self.scp is not None and self.scp.absolute() == self.archive.absolute():
            raise ConfigError(f"--scp {self.scp}: is the archive itself; give another name")


@dataclass(frozen=True)
class PosteriorResult:
    """Numbers of utterances, frames and classes (columns) written."""

    num_utterances: int
    num_frames: int
    num_classes: int


def write_posteriors(
    trained: TrainedModel,
    dataset: Dataset,
    options: PosteriorOptions,
    advance: Callable[[int, int], None],
) -> PosteriorResult:
    """Write a split's scores: a (T, C) float matrix an utterance, sorted by id.  Writes whole files or none.

    Args:
        trained: the model.
        dataset: prepared with the settings of the training data.
        options: what to write, and where.
        advance: called with the number of utterances done and the total number.

    Raises:
        ConfigError: the model does not fit the data, or the files cannot be created.
        ShardError: a shard is damaged.
        RunError: the model gives NaN, or a disk error.
    """
    check_task(dataset)
    check_origin(trained.config, dataset, load_classes(dataset.classes_path))
    for path in filter(None, (options.archive, options.scp)):
        if not path.absolute().parent.is_dir() or path.is_dir():
            raise ConfigError(f"{path}: cannot be written there; give a file in a folder that exists")
    with dataset.open_shards(options.split) as shards:
        owned = _sorted_utterances(shards)
        starts: list[tuple[str, int]] = []
        num_frames = 0
        try:
            with atomic_path(options.archive) as temporary, temporary.open("wb") as file:
                for name, scores in _scores(trained, shards, owned, options):
                    starts.append((name, write_matrix(file, name, scores)))
                    num_frames += len(scores)
                    advance(len(starts), len(owned))
            if options.scp is not None:
                _write_scp(options.scp, options.archive, starts)
        except OSError as error:
            raise RunError(cannot_be_written(options.archive, error)) from error
    return PosteriorResult(len(starts), num_frames, trained.class_log_prior.numel())


@dataclass(frozen=True)
class _Owned:
    """An utterance and its place."""

    name: str
    shard: int
    utterance: int
    num_frames: int


def _sorted_utterances(shards: Sequence[Shard]) -> list[_Owned]:
    owned = [
        _Owned(name, number, utterance, int(shard.offsets[utterance + 1] - shard.offsets[utterance]))
        for number, shard in enumerate(shards)
        for utterance, name in enumerate(shard.utterance_ids)
    ]
    # By bytes (LC_ALL=C), because Kaldi's tools expect this order when they read two tables side by side.
    return sorted(owned, key=lambda one: one.name.encode())


def _scores(
    trained: TrainedModel, shards: Sequence[Shard], owned: Sequence[_Owned], options: PosteriorOptions
) -> Iterator[tuple[str, FloatArray]]:
    """Yield (utterance id, scores (T, C)) in the order of `owned`."""
    inputs = inputs_of(trained.config)
    preprocessors = [Preprocessor.for_shard(shard.header, inputs) for shard in shards]
    scorer = _scorer(trained, options)
    for group in _groups(owned, np.asarray(scorer.log_prior).size):
        features = (preprocessors[one.shard].read(shards[one.shard], one.utterance)[0] for one in group)
        scores = dict(scorer.score(features))
        for position, one in enumerate(group):
            if not np.isfinite(scores[position]).all():
                raise RunError(
                    f"{options.archive}: utterance {one.name}: the model's output is NaN or infinite; train "
                    "it again with a smaller learning rate"
                )
            yield one.name, scores.pop(position)


def _scorer(trained: TrainedModel, options: PosteriorOptions) -> AcousticScorer:
    log_prior = trained.class_log_prior.detach().cpu().numpy()
    prior_scale = options.prior_scale
    if options.kind == "log_posterior":
        log_prior, prior_scale = np.zeros_like(log_prior), 0.0
    device = next(trained.model.parameters(), trained.class_log_prior).device
    return AcousticScorer(trained.model, log_prior, prior_scale, device)


def _groups(owned: Sequence[_Owned], num_classes: int) -> Iterator[list[_Owned]]:
    """Divide the utterances into runs whose scores may be held in memory at once."""
    group: list[_Owned] = []
    num_values = 0
    for one in owned:
        if group and num_values + one.num_frames * num_classes > _MAX_HELD_VALUES:
            yield group
            group, num_values = [], 0
        group.append(one)
        num_values += one.num_frames * num_classes
    if group:
        yield group


def _write_scp(scp: Path, archive: Path, starts: Sequence[tuple[str, int]]) -> None:
    # The archive's path as given: Kaldi also resolves it from the working directory.
    with atomic_path(scp) as temporary, temporary.open("w", encoding="utf-8") as file:
        for name, start in starts:
            file.write(f"{name} {archive}:{start}\n")
