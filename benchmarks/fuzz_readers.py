"""What is fuzzed: each reader of speechdp's, sound files for it, and how they are changed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import safetensors.torch
import soundfile
import torch
from hypothesis import strategies as st

from benchmarks.fuzz_inputs import damaged, other_hdf5, other_json
from speechdp.comm.serial import SerialCommunicator
from speechdp.data.alignment_file import open_targets, write_targets
from speechdp.data.audio import probe, read_audio
from speechdp.data.dataset import Dataset
from speechdp.data.kaldi_ali import alignment_source
from speechdp.data.kaldi_cmvn import SpeakerCmvn
from speechdp.data.kaldi_dir import read_kaldi_dir, read_table
from speechdp.data.kaldi_matrix import num_rows, read_matrix, read_scp
from speechdp.data.kaldi_model import read_pdf_map
from speechdp.data.plan import PlanOptions, plan_epoch
from speechdp.data.reader import SplitReader
from speechdp.data.shard_layout import STRING_NAMES, ShardIndex, string_blocks
from speechdp.data.shards import Shard
from speechdp.data.symbols import SymbolInventory
from speechdp.decode.hmm import StateInventory
from speechdp.decode.lexicon import Lexicon
from speechdp.errors import SpeechDPError
from speechdp.launching.allocation import find_allocation
from speechdp.launching.hostfile import read_hostfile
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.timing.answer import find_answer
from speechdp.timing.derived import sweep_figures
from speechdp.timing.summary import read_sweep
from speechdp.train.checkpoint import load_checkpoint
from speechdp.train.model_file import ClassCounts, load_model, save_model
from tests.helpers.kaldi_files import binary_model, some_features, text_model, write_alignments, write_feats
from tests.helpers.runs import MadeUpRun, write_run
from tests.helpers.tiny_data import TinySizes, write_tiny_data
from tests.helpers.tiny_speech import write_tiny_speech

#: Changed files by their path in the reader's folder.
Files = dict[str, bytes]
Change = Callable[[bytes], st.SearchStrategy[bytes]]

ALONE = SerialCommunicator()
_SMALL = TinySizes(train=3, dev=1, test=1, shards=1)


@dataclass(frozen=True)
class Reader:
    """A reader, and what it is given to read.

    Attributes:
        name: what records call it.
        read: reads all there is in a folder.
        files: sound content of each file.
        inputs: draws files that are changed.
    """

    name: str
    read: Callable[[Path], object]
    files: Mapping[str, bytes]
    inputs: st.SearchStrategy[Files]

    def write(self, folder: Path) -> None:
        """Write the sound files."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def refusal(self, folder: Path, changed: Files) -> SpeechDPError | None:
        """Let the reader read changed files; return its error, if any.  Anything else it raises comes out."""
        with _laid_down(folder, changed, self.files):
            try:
                self.read(folder)
            except SpeechDPError as error:
                return error
        return None


@contextmanager
def _laid_down(folder: Path, changed: Files, sound: Mapping[str, bytes]) -> Iterator[None]:
    for name, content in changed.items():
        (folder / name).write_bytes(content)
    try:
        yield
    finally:
        for name in changed:
            (folder / name).write_bytes(sound[name])


def make_readers(scratch: Path) -> list[Reader]:
    """Return all readers; their sound files are made in `scratch`."""
    return [
        *_shard_readers(scratch),
        *_data_readers(scratch),
        *_model_readers(scratch),
        *_kaldi_readers(scratch),
        *_launch_readers(),
        *_run_readers(scratch),
        _audio_reader(),
    ]


def _changing(
    name: str, read: Callable[[Path], object], files: Files, *changes: tuple[str, Change]
) -> Reader:
    """Return a reader of which one file a time is changed; `changes` are (file's name, how)."""

    def drawn(file: str, change: Change) -> st.SearchStrategy[Files]:
        return change(files[file]).map(lambda new: {file: new})

    return Reader(name, read, files, st.one_of([drawn(*change) for change in changes]))


def _content(folder: Path) -> Files:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _shard_readers(scratch: Path) -> list[Reader]:
    write_tiny_data(scratch / "data", _SMALL)
    write_tiny_speech(scratch / "speech", _SMALL)
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
        _changing("shard", read, {"shard.h5": sound}, ("shard.h5", damaged)),
        _changing("shard of spectrograms", read, {"shard.h5": speech}, ("shard.h5", damaged)),
        _changing("shard, packed elsewhere", read, {"shard.h5": foreign}, ("shard.h5", damaged)),
        _changing("shard, other structure", read, {"shard.h5": sound}, ("shard.h5", _other_shard)),
        _changing("targets", read_targets, both, ("targets.h5", damaged), ("targets.h5", _other_targets)),
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


def _data_readers(scratch: Path) -> list[Reader]:
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
        _changing("data.json", read, _content(folder), ("data.json", damaged), ("data.json", other_json)),
        _changing("lexicon", lambda f: Lexicon.load(f / "lexicon.txt"), lists, ("lexicon.txt", damaged)),
        _changing(
            "classes", lambda f: StateInventory.load(f / "classes.txt"), lists, ("classes.txt", damaged)
        ),
        _changing(
            "symbols", lambda f: SymbolInventory.load(f / "symbols.json"), symbols,
            ("symbols.json", damaged), ("symbols.json", other_json),
        ),
    ]  # fmt: skip


def _model_readers(scratch: Path) -> list[Reader]:
    """The model's file and checkpoints; damaged ones also with a checksum that fits."""
    run = scratch / "run"
    run.mkdir()
    torch.manual_seed(0)
    counts = ClassCounts(np.array([10, 0, 40, 5]), np.array([2, 0, 4, 5]))
    save_model(
        run, LstmAcousticModel(6, 4, LstmConfig(1, 3, False)), counts, {"feature_dim": 6, "num_classes": 4}
    )
    model = {"model.safetensors": (run / "model.safetensors").read_bytes()}
    folder = "checkpoints/step-00000012"
    head, part = f"{folder}/checkpoint.json", f"{folder}/rank-0000.safetensors"
    tensors = {"parameters": torch.arange(5.0), "random.cpu": torch.zeros(3, dtype=torch.uint8)}
    saved = safetensors.torch.save(tensors, {"state": json.dumps({"counters": {"step": 12}, "rank": 0})})
    checkpoint = _checkpoint(saved, head, part)

    def sealed(content: bytes) -> Files:
        return _checkpoint(content, head, part)

    def read_checkpoint(changed: Path) -> None:
        load_checkpoint(changed, ALONE, [])

    inputs = st.one_of(
        damaged(checkpoint[head]).map(lambda new: {head: new}),
        other_json(checkpoint[head]).map(lambda new: {head: new}),
        damaged(checkpoint[part]).map(sealed),
        other_safetensors(checkpoint[part]).map(sealed),
    )
    return [
        _changing(
            "model", lambda f: load_model(f, torch.device("cpu")), model,
            ("model.safetensors", damaged), ("model.safetensors", other_safetensors),
        ),
        Reader("checkpoint", read_checkpoint, checkpoint, inputs),
    ]  # fmt: skip


def _checkpoint(part_content: bytes, head: str, part: str) -> Files:
    entry = {"file": Path(part).name, "sha256": hashlib.sha256(part_content).hexdigest()}
    values = {"format": "speechdp-checkpoint", "version": 1, "step": 12, "ranks": [entry]}
    return {head: json.dumps(values).encode(), part: part_content}


def other_safetensors(content: bytes) -> st.SearchStrategy[bytes]:
    """Draw a safetensors file of another head, JSON as it should be: other types, shapes and places."""
    length = int.from_bytes(content[:8], "little")
    head, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    ((key, text),) = head["__metadata__"].items()

    def joined(new_head: bytes) -> bytes:
        return len(new_head).to_bytes(8, "little") + new_head + body

    def with_text(new_text: bytes) -> bytes:
        return joined(json.dumps({**head, "__metadata__": {key: new_text.decode()}}).encode())

    return other_json(json.dumps(head).encode()).map(joined) | other_json(text.encode()).map(with_text)


def _kaldi_readers(scratch: Path) -> list[Reader]:
    folder = scratch / "kaldi"
    features = some_features((3, 2))
    matrices: dict[str, Files] = {}
    for kind in ("float", "double", "text", "kSpeechFeature", "kTwoByteAuto", "kOneByteAuto"):
        write_feats(folder / kind, features, kind=kind)
        ark = (folder / kind / "feats.ark").read_bytes()
        scp = (folder / kind / "feats.scp").read_text().replace(f"{folder / kind}/", "")
        matrices[kind] = {"feats.ark": ark, "feats.scp": scp.encode()}
    alignments = {"utt0": [1, 2, 2, 7], "utt1": [3]}
    binary = write_alignments(folder / "ali.1.gz", alignments).read_bytes()
    text = write_alignments(folder / "ali.t.gz", alignments, text=True).read_bytes()
    model = binary_model(tuples=True)

    def read_features(changed: Path) -> None:
        for key, place in read_scp(changed / "feats.scp").items():
            num_rows(place, key)
            read_matrix(place, key)

    def read_alignments(changed: Path) -> None:
        list(alignment_source(changed, None).pdfs())

    def read_statistics(changed: Path) -> None:
        SpeakerCmvn(changed / "feats.scp").of("utt1", 4)

    tables = {
        "wav.scp": b"a a.wav\nb b.wav\n", "text": b"a one two\nb two\n", "utt2spk": b"a s1\nb s2\n",
    }  # fmt: skip
    repacked = {"final.mdl": model, "num_jobs": b"1\n", "ali.1.gz": gzip.decompress(binary)}
    return [
        *(
            _changing(f"Kaldi matrices, {kind}", read_features, files, *((n, damaged) for n in files))
            for kind, files in matrices.items()
        ),
        _changing("Kaldi statistics", read_statistics, matrices["double"], ("feats.ark", damaged)),
        *(
            _changing(f"Kaldi alignments, {kind}", read_alignments, {**repacked, "ali.1.gz": content},
                      ("ali.1.gz", damaged), ("num_jobs", damaged))
            for kind, content in (("binary", gzip.decompress(binary)), ("text", gzip.decompress(text)),
                                  ("gzip", binary))
        ),
        *(
            _changing(f"Kaldi model, {kind}", lambda f: read_pdf_map(f / "final.mdl"), {"final.mdl": content},
                      ("final.mdl", damaged))
            for kind, content in (
                ("binary", model), ("text", text_model(tuples=True)), ("triples", binary_model(tuples=False)),
            )
        ),
        _changing("Kaldi data directory", _read_tables, tables, *((n, damaged) for n in tables)),
    ]  # fmt: skip


def _read_tables(folder: Path) -> None:
    read_table(folder / "utt2spk")
    read_kaldi_dir(folder)


def _launch_readers() -> list[Reader]:
    hostfile = b"# two\nnode01 slots=2\nnode02.cluster slots=4 # fast\n\n10.0.0.3 slots=1\n"
    nodes = {"sge": b"n01 4 q1@n01 UNDEFINED\nn02 4 q1@n02 UNDEFINED\n"}
    environments: dict[str, dict[str, str]] = {
        "slurm": {
            "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3,7],a[1-2]-b", "SLURM_TASKS_PER_NODE": "2(x5),1",
        },
        "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 n01 4 n02 4"},
        "lsf hosts": {"LSB_JOBID": "7", "LSB_HOSTS": "n01 n01 n02"},
        "pbs": {"PBS_JOBID": "7.server", "PBS_NODEFILE": "{nodes}"},
        "sge": {"JOB_ID": "7", "PE_HOSTFILE": "{nodes}", "SGE_TASK_ID": "3"},
    }  # fmt: skip

    def read(folder: Path) -> None:
        for line in (folder / "environments").read_text("utf-8", "surrogateescape").split("\n"):
            words = [word.partition("=") for word in line.split("\t")]
            environ = {name: value.replace("{nodes}", str(folder / "nodes")) for name, _, value in words}
            find_allocation(environ)

    readers = [
        _changing("hostfile", lambda f: read_hostfile(f / "hosts"), {"hosts": hostfile}, ("hosts", damaged))
    ]
    for name, variables in environments.items():
        text = "\t".join(f"{key}={value}" for key, value in variables.items()).encode()
        files = {"environments": text, "nodes": nodes.get(name, b"n01\nn01\nn02\n")}
        changes = [(file, damaged) for file in files if file == "environments" or b"{nodes}" in text]
        readers.append(_changing(f"allocation, {name}", read, files, *changes))
    return readers


def _run_readers(scratch: Path) -> list[Reader]:
    data = {"stages_s": {"read": 0.1}, "read_bytes": 100, "frames": 10, "threads": 1, "storage": "contiguous"}
    run = MadeUpRun("a", num_evaluations=3, data=data, feeders=[{"rank": 2, "host": "n", "data": data}])
    files = _content(write_run(run, scratch / "runs"))
    steps = [{"step": n, "frames": 10, "wall": 0.1, "spans": [["forward", 0.0, 0.1]]} for n in range(7)]
    events = [{"event": "eval", "wall": 0.2, "begin": 0.1}]
    head = {"kind": "cpu", "hz": 10, "host": "n", "ranks": {"0": 17}, "gpus": [], "gpu_of_rank": {}}
    rows = [{"t_s": n / 10, "ranks": [[0, 50.0, 1e6]], "gpus": []} for n in range(3)]
    files["timeline/rank-0000.jsonl"] = _lines([*steps, *events])
    files["timeline/samples-n.jsonl"] = _lines([head, *rows])
    untimed = {name: content for name, content in files.items() if name != "timing.json"}

    def read(folder: Path) -> None:
        rows = sweep_figures(read_sweep(folder), None)
        find_answer(rows)

    def changes(present: Files) -> list[tuple[str, Change]]:
        return [(name, change) for name in present for change in (damaged, other_json, other_json)]

    return [
        _changing("run records", read, files, *changes(files)),
        _changing("run records, untimed", read, untimed, *changes(untimed)),
    ]


def _lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


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

    return _changing("audio", read, files, *((name, damaged) for name in files))
