"""Readers of what training reads: shards, targets, data.json, lexicon, classes, symbols and audio."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import soundfile
from hypothesis import strategies as st

from benchmarks.faults.fuzz_files import Files, Reader, changing, content_of
from benchmarks.faults.fuzz_inputs import damaged, other_hdf5, other_json
from speechdp.data.loading.reader import SplitReader
from speechdp.data.plan.epoch_plan import PlanOptions, plan_epoch
from speechdp.data.shards.alignment_file import open_targets, write_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.layout import STRING_NAMES, ShardIndex, string_blocks
from speechdp.data.shards.shard import Shard
from speechdp.data.signal.audio import probe, read_audio
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.symbols import SymbolInventory
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.tiny_speech import write_tiny_speech

_SMALL = TinySizes(train=3, dev=1, test=1, shards=1)


def data_readers(scratch: Path) -> list[Reader]:
    """Return the readers; their sound files are made in `scratch`."""
    write_tiny_data(scratch / "data", _SMALL)
    write_tiny_speech(scratch / "speech", _SMALL)
    return [*_shard_readers(scratch), *_folder_readers(scratch), _audio_reader()]


def _shard_readers(scratch: Path) -> list[Reader]:
    sound, speech = ((scratch / name / "train-00000.h5").read_bytes() for name in ("data", "speech"))
    with Shard(scratch / "data" / "train-00000.h5") as shard:
        lengths = np.diff(shard.offsets)
        write_targets(scratch / "targets.h5", shard, [np.zeros(n, np.int32) for n in lengths], "realigned-1")
    both = {"shard.h5": sound, "targets.h5": (scratch / "targets.h5").read_bytes()}

    def read(folder: Path) -> None:
        with Shard(folder / "shard.h5") as opened:
            opened.verify()
            assert len({len(opened.utterance_ids), len(opened.speakers), len(opened.texts)}) == 1
            for utterance in range(opened.num_utterances):
                opened.read_utterance(utterance)

    def read_targets(folder: Path) -> None:
        with Shard(folder / "shard.h5") as opened:
            targets = open_targets(folder / "targets.h5", opened)
            for utterance in range(opened.num_utterances):
                targets.read(utterance)

    foreign = _rewritten(sound)
    return [
        changing("shard", read, {"shard.h5": sound}, ("shard.h5", damaged)),
        changing("shard of spectrograms", read, {"shard.h5": speech}, ("shard.h5", damaged)),
        changing("shard, packed elsewhere", read, {"shard.h5": foreign}, ("shard.h5", damaged)),
        changing("shard, other structure", read, {"shard.h5": sound}, ("shard.h5", _other_shard)),
        changing("targets", read_targets, both, ("targets.h5", damaged), ("targets.h5", _other_targets)),
    ]


def _other_shard(content: bytes) -> st.SearchStrategy[bytes]:
    return other_hdf5(content, _seal_shard)


def _other_targets(content: bytes) -> st.SearchStrategy[bytes]:
    return other_hdf5(content, lambda file: None)


def _seal_shard(file: Any) -> None:
    """Write the checksum that fits the index, where the file still has one."""
    names = ("offsets", "crc32", *STRING_NAMES)
    if not all(_is_plain(file, name) for name in names) or any(np.ndim(v) for v in file.attrs.values()):
        return
    attributes = {k: v.item() if isinstance(v, np.generic) else v for k, v in file.attrs.items()}
    attributes.pop("index_sha256", None)
    index = ShardIndex(file["offsets"][:], file["crc32"][:])
    with suppress(TypeError, ValueError, AttributeError):
        file.attrs["index_sha256"] = index.sha256(attributes, [string_blocks(file[n]) for n in STRING_NAMES])


def _is_plain(file: Any, name: str) -> bool:
    """Tell whether a small array of numbers or strings of fixed length stands here."""
    link = file.get(name, getlink=True, default=None)
    if not isinstance(link, h5py.HardLink) or not isinstance(file[name], h5py.Dataset):
        return False
    dataset = file[name]
    return bool(dataset.ndim == 1 and dataset.size < 1 << 16 and dataset.dtype.kind in "iufS")


def _rewritten(content: bytes) -> bytes:
    """Return a shard as other tools write it: early HDF5, packed chunks, strings of variable length."""
    with h5py.File.in_memory(content) as old, h5py.File.in_memory() as new:
        for name, value in old.attrs.items():
            new.attrs[name] = value
        for name, dataset in old.items():
            if name == "text":
                new.create_dataset(name, data=dataset.asstr()[:].tolist(), dtype=h5py.string_dtype())
            elif name in ("features", "targets"):
                new.create_dataset(name, data=dataset[:], chunks=True, compression="gzip", shuffle=True)
            else:
                old.copy(name, new)
        new.flush()
        return bytes(new.id.get_file_image())


def _folder_readers(scratch: Path) -> list[Reader]:
    folder = scratch / "data"

    def read(changed: Path) -> None:
        dataset = Dataset.open(changed)
        for split in dataset.split_names:
            reader = SplitReader(dataset, split)
            try:
                plan = plan_epoch(reader.index, PlanOptions(2), 0, 1)
                for number in range(plan.num_steps):
                    reader.batch(plan.ranks[0].batch(number))
            finally:
                reader.close()

    lists = {n: (folder / n).read_bytes() for n in ("lexicon.txt", "classes.txt")}
    symbols = {"symbols.json": (scratch / "speech" / "symbols.json").read_bytes()}
    return [
        changing("data.json", read, content_of(folder), ("data.json", damaged), ("data.json", other_json)),
        changing("lexicon", lambda f: Lexicon.load(f / "lexicon.txt"), lists, ("lexicon.txt", damaged)),
        changing(
            "classes", lambda f: StateInventory.load(f / "classes.txt"), lists, ("classes.txt", damaged)
        ),
        changing(
            "symbols", lambda f: SymbolInventory.load(f / "symbols.json"), symbols,
            ("symbols.json", damaged), ("symbols.json", other_json),
        ),
    ]  # fmt: skip


def _audio_reader() -> Reader:
    samples = np.sin(np.arange(200) / 5).astype(np.float32)
    files: Files = {}
    for kind in ("wav", "flac"):
        file = io.BytesIO()
        soundfile.write(file, samples, 8000, format=kind)
        files[f"a.{kind}"] = file.getvalue()

    def read(folder: Path) -> None:
        for name in files:
            probe(folder / name)
            read_audio(folder / name, 8000)

    return changing("audio", read, files, *((name, damaged) for name in files))
