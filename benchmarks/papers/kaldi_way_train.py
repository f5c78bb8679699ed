"""Train on one archive, as a job of Kaldi's nnet3 does: started anew for every iteration.

    python benchmarks/papers/kaldi_way_train.py EXP ITERATION JOB SPAWNED_S

One thing after the other: read the model from disk, read all utterances of the archive, make batches of them,
train on these, write the model.  The optimizer starts with nothing, and what it has learnt of the gradients
is gone with the process.  Model, loss, optimizer and gradient clipping are speechdp's own.
SPAWNED_S is the monotonic clock when the process was asked for.

Legend: S segments, B batch, T frames, F feature dimensions.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch

from benchmarks.models.acoustic import make_acoustic_model
from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.data.loading.source_options import make_preprocessor
from speechdp.data.plan.segments import Segments
from speechdp.data.shards.alignment_file import open_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import Preprocessor, UtteranceKey
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.options.run import TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.parallel.replica import Replica
from speechdp.tasks.acoustic import AcousticTask
from speechdp.train.build import make_replica


@dataclass(frozen=True)
class Archive:
    """What a job trains on: segments in the order of training, cut into batches.

    Attributes:
        shard, utterance, start, num_frames: (S,) of each segment.
        sizes: segments of each batch; 0 where only other jobs have one.
        learning_rates: of each batch.
    """

    shard: npt.NDArray[np.int64]
    utterance: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    num_frames: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    learning_rates: npt.NDArray[np.float64]

    @classmethod
    def of(cls, batches: Sequence[Segments], learning_rates: Sequence[float]) -> Archive:
        """Put batches one behind the other."""
        columns = [
            np.concatenate([getattr(batch, name) for batch in batches])
            for name in ("shard", "utterance", "start", "num_frames")
        ]
        sizes = np.array([len(batch) for batch in batches])
        return cls(*columns, sizes=sizes, learning_rates=np.array(learning_rates))

    def write(self, path: Path) -> None:
        """Write it as a .npz."""
        np.savez(path, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    @classmethod
    def read(cls, path: Path) -> Archive:
        """Read what `write` wrote."""
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in arrays.files})


@dataclass(frozen=True)
class Raw:
    """An utterance as read: stored features (T, F) or samples (S,), and targets (T,)."""

    stored: npt.NDArray[Any]
    targets: npt.NDArray[np.int32]


Key = tuple[int, int]  # shard, utterance


def read_utterances(
    dataset: Dataset, split: str, archive: Archive, alignments: Path | None
) -> dict[Key, Raw]:
    """Read every utterance of an archive whole, shard by shard; checksums are not looked at."""
    result = {}
    keys = np.unique(np.stack([archive.shard, archive.utterance], axis=1), axis=0)
    for index in np.unique(keys[:, 0]).tolist():
        utterances = keys[keys[:, 0] == index, 1].tolist()
        with dataset.open_shard(split, index) as shard:
            read = shard.read_samples if dataset.stored == "audio" else shard.read
            raw = {utterance: Raw(*read(utterance, verify=False)) for utterance in utterances}
            if alignments is not None:
                aligned = open_targets(alignments / shard.path.name, shard)
                raw = {u: Raw(r.stored, aligned.read(u)) for u, r in raw.items()}
                aligned.close()
        result.update({(index, utterance): each for utterance, each in raw.items()})
    return result


def make_batches(
    dataset: Dataset, options: TrainOptions, archive: Archive, raw: dict[Key, Raw]
) -> list[Batch]:
    """Preprocess as the loader of `speechdp train` does, by the same code, batch by batch.

    Features are computed where audio is stored (of an utterance once a job), then cut, converted, padded;
    then come deltas and splicing.
    """
    batches = options.batches()
    context = (batches.left_context or 0, batches.right_context)
    preprocessor = make_preprocessor(dataset, options.source(options.train_split, augmented=False))
    ends = np.cumsum(archive.sizes)
    result = []
    for begin, end in zip((ends - archive.sizes).tolist(), ends.tolist(), strict=True):
        places = range(begin, end)
        keys = [(int(archive.shard[i]), int(archive.utterance[i])) for i in places]
        features = _features(preprocessor, {key: raw[key] for key in keys})
        pieces = [
            _cut(features[key], raw[key].targets, int(archive.start[i]), int(archive.num_frames[i]), context)
            for i, key in zip(places, keys, strict=True)
        ]
        batch = _pad(pieces, dataset.feature_dim)
        if not preprocessor.is_plain:
            batch = dataclasses.replace(batch, features=preprocessor.finish(batch.features, batch.lengths))
        result.append(batch)
    return result


def _features(preprocessor: Preprocessor, raw: dict[Key, Raw]) -> dict[Key, npt.NDArray[Any]]:
    """Return the features (T, F) of utterances."""
    if preprocessor.stored == "features":
        return {key: each.stored for key, each in raw.items()}
    keys = [UtteranceKey(None, shard, utterance) for shard, utterance in raw]
    samples = [each.stored for each in raw.values()]
    computed = preprocessor.features_of(samples, keys, torch.device("cpu"))
    return {key: value.numpy() for key, value in zip(raw, computed, strict=True)}


@dataclass(frozen=True)
class _Piece:
    features: npt.NDArray[Any]  # (T, F), context included
    targets: npt.NDArray[np.int64]  # (T,), IGNORED_TARGET in the context
    num_frames: int


def _cut(
    features: npt.NDArray[Any],
    targets: npt.NDArray[np.int32],
    start: int,
    num_frames: int,
    context: tuple[int, int],
) -> _Piece:
    begin, end = max(0, start - context[0]), min(len(features), start + num_frames + context[1])
    kept = np.full(end - begin, IGNORED_TARGET, dtype=np.int64)
    learnt = slice(start - begin, start - begin + num_frames)
    kept[learnt] = targets[start : start + num_frames]
    return _Piece(features[begin:end], kept, num_frames)


def _pad(pieces: Sequence[_Piece], feature_dim: int) -> Batch:
    """Put pieces into one batch, zeros behind their ends."""
    lengths = [len(piece.features) for piece in pieces]
    features = np.zeros((len(pieces), max(lengths, default=0), feature_dim), dtype=np.float32)  # (B, T, F)
    targets = np.full(features.shape[:2], IGNORED_TARGET, dtype=np.int64)  # (B, T)
    for row, piece in enumerate(pieces):
        features[row, : lengths[row]] = piece.features
        targets[row, : lengths[row]] = piece.targets
    return Batch(
        torch.from_numpy(features),
        torch.from_numpy(targets),
        torch.tensor(lengths, dtype=torch.int64),
        sum(piece.num_frames for piece in pieces),
    )


def train(
    model: LstmAcousticModel, replica: Replica, batches: Sequence[Batch], rates: Sequence[float]
) -> float:
    """Train on batches in order, each with its learning rate; return the mean loss in nats a frame."""
    task = AcousticTask()
    model.train()
    total, frames = 0.0, 0
    for batch, rate in zip(batches, rates, strict=True):
        if batch.num_frames == 0:
            continue
        replica.set_learning_rate(rate)
        loss = task.loss(model, batch)
        loss.total.backward()  # type: ignore[no-untyped-call]
        replica.apply_gradients(batch.num_frames)
        total, frames = total + loss.total.item(), frames + batch.num_frames
    return total / max(frames, 1)


def options_to_json(options: TrainOptions) -> dict[str, Any]:
    """Return options as JSON-like values."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(options), default=str))
    return values


def options_from_json(kind: type[Any], values: dict[str, Any]) -> Any:
    """Rebuild a dataclass of options from what `options_to_json` returned."""
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value, hint = values[field.name], hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            value = options_from_json(hint, value)
        elif hint is StrategyChoice:
            value = StrategyChoice(value)
        elif value is not None and (hint is Path or Path in typing.get_args(hint)):
            value = Path(value)
        given[field.name] = value
    return kind(**given)


def write_weights(path: Path, model: LstmAcousticModel) -> None:
    """Write the model's weights alone."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    safetensors.torch.save_file(weights, path)


def _laps() -> Iterator[float]:
    """Yield the seconds since the last time."""
    last_s = time.monotonic()
    while True:
        last_s, before_s = time.monotonic(), last_s
        yield last_s - before_s


def main(arguments: Sequence[str]) -> None:
    """Run the job; leave the model and, for the driver, the times."""
    exp, iteration, job, spawned_s = Path(arguments[0]), int(arguments[1]), int(arguments[2]), arguments[3]
    torch.set_num_threads(1)
    config = json.loads((exp / "config.json").read_text())
    options: TrainOptions = options_from_json(TrainOptions, config["options"])
    dataset = Dataset.open(config["data"])
    model = make_acoustic_model(dataset, options)
    replica = make_replica(model, options)
    # Starting ends here: to make its first optimizer torch imports more than half as much again.
    seconds, laps = {"start": time.monotonic() - float(spawned_s)}, _laps()
    next(laps)
    model.load_state_dict(safetensors.torch.load_file(exp / f"{iteration}.safetensors"))
    torch.manual_seed(job_seed(options.seed, iteration, job))  # of the dropout, as Kaldi's --srand
    seconds["read_model"] = next(laps)
    archive = Archive.read(exp / "archives" / f"{iteration}.{job}.npz")
    raw = read_utterances(dataset, options.train_split, archive, options.alignments)
    seconds["load"] = next(laps)
    batches = make_batches(dataset, options, archive, raw)
    seconds["preprocess"] = next(laps)
    loss = train(model, replica, batches, archive.learning_rates.tolist())
    seconds["compute"] = next(laps)
    write_weights(exp / f"{iteration}.{job}.safetensors", model)
    seconds["write"] = next(laps)
    report = {"seconds": seconds, "done_s": time.monotonic(), "loss": loss}
    (exp / "log" / f"{iteration}.{job}.json").write_text(json.dumps(report))


def job_seed(seed: int, iteration: int, job: int) -> int:
    """Return the seed of a job's random numbers: different for each, the same in each repetition."""
    return int(np.random.SeedSequence([seed, iteration, job]).generate_state(1)[0])


if __name__ == "__main__":
    main(sys.argv[1:])
