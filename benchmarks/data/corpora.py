"""A generated corpus in every format of benchmarks/data/data_path.py: our shards, tar files, Kaldi archives.

Archives hold the utterances in the order of the planned batches, so that reading them from front to end gives
the very batches that ours and h5py gather from all over the shards: no peer has to shuffle or pads more.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from speechdp.data.plan.epoch_plan import CorpusIndex, EpochPlan, PlanOptions, plan_epoch
from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig

NUM_CLASSES = 3000
BATCH_SIZE = 32
#: A quarter of the corpus each; two workers of a peer get as many each.
NUM_ARCHIVES = 4
SAMPLING_RATE = 16000
FORMATS = ("tars", "shar", "arks", "compressed")
_SIGMA = 0.5
_FRAME_BYTES = 40 * 4 + 4


@dataclass(frozen=True)
class Recorded:
    """One utterance as it is stored: features (T, F) float32, targets (T,) int32."""

    key: str
    features: npt.NDArray[np.float32]
    targets: npt.NDArray[np.int32]


@dataclass(frozen=True)
class CorpusShape:
    """What a corpus is like: lengths are lognormal, clipped.

    Attributes:
        name: of its folder.
        mean_frames, least, most: lengths of utterances.
        share: of the megabytes asked for.
        dtype: of the features in our shards; archives hold float32.
    """

    name: str
    mean_frames: int
    least: int
    most: int
    share: float
    dtype: Literal["float16", "float32"] = "float32"


CORPORA = {
    "long": CorpusShape("long", 700, 100, 2000, 1.0),
    "half": CorpusShape("half", 700, 100, 2000, 1.0, dtype="float16"),
    "short": CorpusShape("short", 50, 10, 200, 0.25),
    "small": CorpusShape("small", 700, 100, 2000, 0.125),
}


def write_corpus(folder: Path, shape: CorpusShape, megabytes: float, formats: Collection[str]) -> None:
    """Write a corpus below `folder`: our shards, and those of `formats` that are in FORMATS."""
    folder = folder / shape.name
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    write_shards(folder, shape, lengths_of(shape, int(1e6 * megabytes * shape.share), rng), rng)
    dataset = Dataset.open(folder)
    writers = {"tars": write_tars, "shar": write_shar, "arks": write_arks, "compressed": write_compressed}
    for kind in FORMATS:
        if kind in formats:
            (folder / kind).mkdir()
            writers[kind](folder / kind, dataset)


def lengths_of(shape: CorpusShape, num_bytes: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw lengths in frames that fill `num_bytes` as float32; all batches can be full."""
    mean = np.log(shape.mean_frames) - _SIGMA**2 / 2
    count = 2 * num_bytes // (_FRAME_BYTES * shape.mean_frames) + 2 * NUM_ARCHIVES * BATCH_SIZE
    lengths = np.clip(rng.lognormal(mean, _SIGMA, count), shape.least, shape.most).astype(np.int64)
    fit = int(np.searchsorted(np.cumsum(lengths) * _FRAME_BYTES, num_bytes))
    return lengths[: max(NUM_ARCHIVES, fit // BATCH_SIZE) * BATCH_SIZE]


def write_shards(
    folder: Path, shape: CorpusShape, lengths: npt.NDArray[np.int64], rng: np.random.Generator
) -> None:
    """Write our shards and data.json."""
    features = FeatureConfig(dtype=shape.dtype)
    header = ShardHeader(features, SAMPLING_RATE, NUM_CLASSES, "exact", "train")
    entries = []
    for shard, part in enumerate(np.array_split(lengths, NUM_ARCHIVES)):
        path = folder / f"train-{shard:05d}.h5"
        with ShardWriter(path, header) as writer:
            for number, length in enumerate(part.tolist()):
                values = rng.standard_normal((length, features.feature_dim), dtype=np.float32)
                values += 10.0  # a sum of many frames keeps its digits
                targets = rng.integers(0, NUM_CLASSES, length, dtype=np.int32)
                writer.add(Utterance(f"{shard}-{number:06d}", "random", "zero", values, targets))
        entries.append(ShardEntry(path.name, writer.num_utterances, writer.num_frames, writer.index_sha256))
    split = SplitEntry(tuple(entries), len(lengths), int(lengths.sum()), 1)
    Manifest(SAMPLING_RATE, features, NUM_CLASSES, "exact", "index:", {"train": split}).write(folder)


def index_of(dataset: Dataset) -> CorpusIndex:
    """Return the lengths of all utterances of the training split."""
    lengths = []
    for number in range(len(dataset.shard_paths("train"))):
        with dataset.open_shard("train", number) as shard:
            lengths.append(np.diff(shard.offsets))
    return CorpusIndex.of_lengths(lengths)


def plan_of(index: CorpusIndex, chunk_frames: int = 0) -> EpochPlan:
    """Return the batches that every contender delivers, epoch after epoch."""
    options = PlanOptions(BATCH_SIZE, chunk_frames=chunk_frames, seed=1)
    return plan_epoch(index, options, 0, 1)


def archives(dataset: Dataset) -> Iterator[Iterator[Recorded]]:
    """Yield the utterances of each archive, in the order of the batches; whole batches to an archive."""
    plan = plan_of(index_of(dataset)).ranks[0]
    with ExitStack() as stack:
        paths = dataset.shard_paths("train")
        shards = [stack.enter_context(dataset.open_shard("train", i)) for i in range(len(paths))]

        def utterances(batches: list[int]) -> Iterator[Recorded]:
            for segments in map(plan.batch, batches):
                for s, u in zip(segments.shard.tolist(), segments.utterance.tolist(), strict=True):
                    features, targets = shards[s].read(u)
                    yield Recorded(f"{s}-{u:06d}", features, targets)

        for part in np.array_split(np.arange(plan.num_batches), NUM_ARCHIVES):
            yield utterances(part.tolist())


def write_tars(folder: Path, dataset: Dataset) -> None:
    """Write tar files as WebDataset reads them: KEY.features.npy and KEY.targets.npy."""
    wds: Any = importlib.import_module("webdataset")
    for number, utterances in enumerate(archives(dataset)):
        with wds.TarWriter(str(folder / f"{number:06d}.tar")) as writer:
            for u in utterances:
                writer.write(
                    {"__key__": u.key, "features.npy": _npy(u.features), "targets.npy": _npy(u.targets)}
                )


def write_shar(folder: Path, dataset: Dataset) -> None:
    """Write Lhotse Shar: cuts with features and targets, as numpy arrays."""
    lhotse: Any = importlib.import_module("lhotse")
    shar: Any = importlib.import_module("lhotse.shar")
    shift_s = dataset.features.frame_shift_s
    fields = {"features": "numpy", "targets": "numpy"}
    for number, utterances in enumerate(archives(dataset)):
        with shar.SharWriter(folder, fields, shard_size=1_000_000, shard_offset=number) as writer:
            for u in utterances:
                writer.write(_cut(lhotse, u, shift_s))


def _cut(lhotse: Any, utterance: Recorded, shift_s: float) -> Any:
    num_frames, feature_dim = utterance.features.shape
    duration = num_frames * shift_s
    features = lhotse.Features(
        type="log_mel", num_frames=num_frames, num_features=feature_dim, frame_shift=shift_s,
        sampling_rate=SAMPLING_RATE, start=0, duration=duration, storage_type="memory_npy", storage_path="",
        storage_key=_npy(utterance.features), channels=0,
    )  # fmt: skip
    array: Any = importlib.import_module("lhotse.array")
    targets = array.Array("memory_npy", "", _npy(utterance.targets), [num_frames])
    return lhotse.MonoCut(
        utterance.key, start=0, duration=duration, channel=0, features=features, custom={"targets": targets}
    )


def write_arks(folder: Path, dataset: Dataset) -> None:
    """Write Kaldi archives of float matrices and of int32 vectors."""
    kaldi: Any = importlib.import_module("kaldi_native_io")
    for number, utterances in enumerate(archives(dataset)):
        with (
            kaldi.FloatMatrixWriter(f"ark:{folder}/features.{number}.ark") as features,
            kaldi.Int32VectorWriter(f"ark:{folder}/targets.{number}.ark") as targets,
        ):
            for u in utterances:
                features.write(u.key, u.features)
                targets.write(u.key, u.targets.tolist())


def write_compressed(folder: Path, dataset: Dataset) -> None:
    """Write Kaldi archives of matrices compressed for speech (CM: a byte a value) and of int32 vectors."""
    kaldi: Any = importlib.import_module("kaldi_native_io")
    method = kaldi.CompressionMethod.kSpeechFeature
    for number, utterances in enumerate(archives(dataset)):
        with (
            kaldi.CompressedMatrixWriter(f"ark:{folder}/features.{number}.ark") as features,
            kaldi.Int32VectorWriter(f"ark:{folder}/targets.{number}.ark") as targets,
        ):
            for u in utterances:
                features.write(u.key, u.features, method)
                targets.write(u.key, u.targets.tolist())


def _npy(values: npt.NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=False)
    return stream.getvalue()
