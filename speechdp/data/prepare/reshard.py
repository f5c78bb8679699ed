"""Divide a data directory into another number of shards, with every utterance unchanged.

Legend: U utterances of a split, N shards.
"""

from __future__ import annotations

import heapq
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.counting import counted
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.recordings import RECORDINGS_NAME, TRAIN_RECORDINGS_NAME
from speechdp.data.shards.data_dir import check_target, new_data_dir
from speechdp.data.shards.dataset import MANIFEST_NAME, Dataset, ShardEntry
from speechdp.data.shards.description import check_description
from speechdp.data.shards.shard import Shard
from speechdp.data.shards.writer import ShardWriter
from speechdp.errors import ShardError
from speechdp.files import cannot_be_written, write_text_atomically
from speechdp.options.reshard import ReshardOptions

IntArray = npt.NDArray[np.int64]

_STAGE = "dealing utterances"
_EVERY = 256


def reshard(options: ReshardOptions, progress: Progress) -> Dataset:
    """Write the utterances of a data directory to N shards a split, completely or not at all.

    A split with fewer utterances gets one shard for each, as by `prepare`: there may be more ranks than
    shards.

    Every checksum is verified on the way.  Memory holds some tens of bytes an utterance, for the index of the
    shards and the dealing, and one utterance.

    Args:
        options: see ReshardOptions.
        progress: called with the number of utterances done.

    Raises:
        ConfigError: `out` may not be written, or lies in the data.
        ShardError: a damaged shard, no such split, or the disk is full.
        RunError: another file was changed.
    """
    check_target(options.out, options.overwrite)
    dataset = Dataset.open(options.data)
    check_description(dataset, read_all=True)
    splits = dataset.split_names if options.split is None else (options.split,)
    dealt = {}
    with new_data_dir(options.out, options.overwrite) as directory:
        count = _Count(progress, sum(dataset.num_utterances(split) for split in splits))
        for split in splits:
            with dataset.open_shards(split) as shards:
                dealt[split] = _write_split(_Source(shards), split, directory, options, count)
        _copy_rest(dataset, directory, splits)
        _write_manifest(dataset, directory, dealt)
    return Dataset.open(options.out, just_written=True)


def deal_by_frames(num_frames: IntArray, num_shards: int, seed: int) -> npt.NDArray[np.int32]:
    """Return the shard (U,) of each utterance: the longest come first, each to the shard with fewest frames.

    So every shard gets utterances of all lengths, and their numbers of frames differ little.  The order of
    equally long ones is random.  Source: Graham, Bounds on multiprocessing timing anomalies, 1969 (LPT).
    """
    shuffled = np.random.default_rng(seed).permutation(len(num_frames))
    order = shuffled[np.argsort(-num_frames[shuffled], kind="stable")]
    shard_of = np.empty(len(num_frames), dtype=np.int32)
    fewest = [(0, shard) for shard in range(num_shards)]  # a heap
    for utterance in order:
        frames, shard = fewest[0]
        shard_of[utterance] = shard
        heapq.heapreplace(fewest, (frames + int(num_frames[utterance]), shard))
    return shard_of


def deal_by_utterances(num_utterances: int, num_shards: int, seed: int) -> npt.NDArray[np.int32]:
    """Return the shard (U,) of each utterance, at random; the shards' numbers differ by 1 at most."""
    in_turn = np.arange(num_utterances, dtype=np.int32) % num_shards
    return np.random.default_rng(seed).permutation(in_turn)


class _Count:
    """Reports from time to time how many utterances are done."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        progress(_STAGE, 0, total)

    def advance(self) -> None:
        self._done += 1
        if self._done % _EVERY == 0 or self._done == self._total:
            self._progress(_STAGE, self._done, self._total)


class _Source:
    """A split's shards, and the place of each utterance."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.first = np.cumsum([0, *(shard.num_utterances for shard in shards)])

    @property
    def num_frames(self) -> IntArray:
        """Frames of each utterance (U,), counted over all shards."""
        return np.concatenate([np.diff(shard.offsets) for shard in self.shards])

    def find(self, utterance: int) -> tuple[Shard, int]:
        """Return the shard of an utterance, and its place there."""
        number = int(np.searchsorted(self.first, utterance, side="right")) - 1
        return self.shards[number], utterance - int(self.first[number])


def _write_split(
    source: _Source, split: str, directory: Path, options: ReshardOptions, count: _Count
) -> list[ShardEntry]:
    num_utterances = int(source.first[-1])
    num_shards = min(options.shards, num_utterances)
    if options.balance == "frames":
        shard_of = deal_by_frames(source.num_frames, num_shards, options.seed)
    else:
        shard_of = deal_by_utterances(num_utterances, num_shards, options.seed)
    # The order within a shard is random, too: whoever reads only its beginning gets a random sample.
    order = np.random.default_rng([options.seed, 1]).permutation(len(shard_of)).astype(np.int32)
    order = order[np.argsort(shard_of[order], kind="stable")]
    ends = np.cumsum(np.bincount(shard_of, minlength=num_shards))
    entries = []
    for number, utterances in enumerate(np.split(order, ends[:-1])):
        path = directory / f"{split}-{number:05d}.h5"
        with ShardWriter(path, source.shards[0].header) as writer:
            for utterance in utterances:
                shard, place = source.find(int(utterance))
                writer.add(shard.read_utterance(place))
                count.advance()
        entries.append(ShardEntry.of(writer))
    return entries


def too_few_utterances(dataset: Dataset, options: ReshardOptions) -> list[str]:
    """Return a line for each split of the written data that has fewer shards than requested."""
    splits = dataset.split_names if options.split is None else (options.split,)
    numbers = {split: dataset.num_utterances(split) for split in splits}
    return [
        f"{split} has {counted(number, 'utterance')}, too few for --shards {options.shards}: a shard for each"
        for split, number in numbers.items()
        if number < options.shards
    ]


def _copy_rest(dataset: Dataset, directory: Path, dealt: tuple[str, ...]) -> None:
    """Verify and copy the shards of the other splits; copy recordings and all other files."""
    names = {entry.file for split in dataset.splits.values() for entry in split.shards}
    rest = [p for p in sorted(dataset.path.iterdir()) if p.is_file() and not p.name.startswith(".")]
    rest = [path for path in rest if path.name not in names | {MANIFEST_NAME}]
    others = [split for split in dataset.split_names if split not in dealt]
    dataset.verify(others)
    rest += [path for split in others for path in dataset.shard_paths(split)]
    for name in (RECORDINGS_NAME, TRAIN_RECORDINGS_NAME):
        if (dataset.path / name).is_dir():
            (directory / name).mkdir()
            rest += sorted((dataset.path / name).iterdir())
    for path in rest:
        try:
            shutil.copyfile(path, directory / path.relative_to(dataset.path))
        except OSError as error:
            raise ShardError(cannot_be_written(f"{path}: its copy in {directory}", error)) from error


def _write_manifest(dataset: Dataset, directory: Path, dealt: dict[str, list[ShardEntry]]) -> None:
    """Write data.json unchanged except for the shards; keys of other versions stay, too."""
    values = json.loads((dataset.path / MANIFEST_NAME).read_text(encoding="utf-8"))
    for split, entries in dealt.items():
        values["splits"][split]["shards"] = [asdict(entry) for entry in entries]
    write_text_atomically(directory / MANIFEST_NAME, json.dumps(values, indent=2) + "\n")
