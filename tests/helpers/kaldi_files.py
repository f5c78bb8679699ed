"""Kaldi's files for tests: those Kaldi wrote itself, and made-up ones by an independent writer."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kaldi_native_io
import numpy as np
import numpy.typing as npt

from tests.helpers.corpora import shared_data


def yesno_system() -> Path:
    """Return the folder of a monophone system that Kaldi trained on yesno; skip the test without it."""
    return shared_data("kaldi", "yesno_keighrim", "exp", "mono")


def yesno_data_dir(folder: Path) -> Path:
    """Make the Kaldi data directory that system was trained on, with wav.scp naming the FLAC copies."""
    waves = shared_data("yesno", "waves_yesno")
    source = shared_data("kaldi", "yesno_keighrim", "data", "train_yesno")
    folder.mkdir(parents=True)
    for name in ("text", "utt2spk"):
        (folder / name).write_text((source / name).read_text())
    ids = [line.split()[0] for line in (source / "wav.scp").read_text().splitlines()]
    (folder / "wav.scp").write_text("".join(f"{u} {waves / u}.flac\n" for u in ids))
    return folder


@dataclass(frozen=True)
class State:
    """A state of a made-up model: phone, HMM state, pdf, and the pdf of its self-loop."""

    phone: int
    hmm_state: int
    pdf: int
    self_loop_pdf: int


#: Phone 1: one state that loops and leaves.  Phone 2: two states, the first with a skip.
DESTINATIONS = {1: [[0, 1], []], 2: [[0, 1, 2], [1, 2], []]}
STATES = (State(1, 0, 0, 3), State(2, 0, 1, 4), State(2, 1, 2, 5))
#: What those states' transition-ids 1 ... 7 stand for, with self-loop pdfs and without.
PDFS_OF_TUPLES = (3, 0, 4, 1, 1, 5, 2)
PDFS_OF_TRIPLES = (0, 0, 1, 1, 1, 2, 2)


def some_path(num_frames: int, seed: int = 0) -> list[int]:
    """Draw a path of the made-up model, with self-loops after the transition that leaves a state."""
    rng = np.random.default_rng([seed, num_frames])
    path: list[int] = []
    while len(path) < num_frames:
        left = num_frames - len(path)
        phone = (((2, 1),), ((5, 3),), ((4, 3), (7, 6)))[rng.integers(3 if left > 1 else 2)]
        for number, (leave, loop) in enumerate(phone):
            num_loops = int(rng.integers(0, num_frames - len(path) - len(phone) + number + 1))
            path += [leave] + [loop] * min(num_loops, 4)
    return path


def text_model(*, tuples: bool) -> bytes:
    """Write the made-up model as Kaldi's text form, with an acoustic model's beginning behind it."""
    lines = ["<TransitionModel> ", "<Topology> "]
    for phone, states in DESTINATIONS.items():
        lines += ["<TopologyEntry> ", "<ForPhones> ", f"{phone} ", "</ForPhones> "]
        for number, destinations in enumerate(states):
            classes = f"<ForwardPdfClass> {number} <SelfLoopPdfClass> {number} " if tuples else ""
            classes = classes or f"<PdfClass> {number} "
            arcs = "".join(f"<Transition> {d} 0.5 " for d in destinations)
            lines.append(f"<State> {number} {classes if destinations else ''}{arcs}</State> ")
        lines.append("</TopologyEntry> ")
    kind = "Tuples" if tuples else "Triples"
    lines += ["</Topology> ", f"<{kind}> {len(STATES)} "]
    lines += [" ".join(map(str, row)) + " " for row in _rows(tuples)]
    lines += [
        f"</{kind}> ",
        "<LogProbs> ",
        " [ 0 -0.3 ]",
        "</LogProbs> ",
        "</TransitionModel> ",
        "<DIMENSION> ",
    ]
    return "\n".join(lines).encode() + b"\n"


def binary_model(*, tuples: bool) -> bytes:
    """Write the made-up model as Kaldi's binary form."""
    phones = list(DESTINATIONS)
    out = b"\0B<TransitionModel> <Topology> "
    out += _vector(phones) + _vector([-1, 0, 1])
    out += _sized(-1) if tuples else b""
    out += _sized(len(phones))
    for states in DESTINATIONS.values():
        out += _sized(len(states))
        for number, destinations in enumerate(states):
            out += _sized(number if destinations else -1) * (2 if tuples else 1)
            out += _sized(len(destinations))
            out += b"".join(_sized(d) + b"\4" + struct.pack("<f", 0.5) for d in destinations)
    kind = b"Tuples" if tuples else b"Triples"
    out += b"</Topology> <" + kind + b"> " + _sized(len(STATES))
    out += b"".join(_sized(value) for row in _rows(tuples) for value in row)
    return out + b"</" + kind + b"> <LogProbs> FV \4" + struct.pack("<i", 0)


def _rows(tuples: bool) -> list[list[int]]:
    return [[s.phone, s.hmm_state, s.pdf, *([s.self_loop_pdf] if tuples else [])] for s in STATES]


def _sized(value: int) -> bytes:
    return b"\4" + struct.pack("<i", value)


def _vector(values: Sequence[int]) -> bytes:
    return b"\4" + struct.pack(f"<i{len(values)}i", len(values), *values)


def write_alignments(path: Path, alignments: Mapping[str, Sequence[int]], *, text: bool = False) -> Path:
    """Write an archive of integer vectors with kaldi_native_io, packed if its name ends with .gz."""
    plain = path.with_suffix(".plain")
    writer = kaldi_native_io.Int32VectorWriter(f"ark{',t' if text else ''}:{plain}")
    for utterance, values in alignments.items():
        writer.write(utterance, list(values))
    writer.close()
    content = plain.read_bytes()
    plain.unlink()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_feats(
    folder: Path, features: Mapping[str, npt.NDArray[np.float32]], *, name: str = "feats", kind: str = "float"
) -> Path:
    """Write FOLDER/NAME.scp and its archive with kaldi_native_io: float, double, text or a compression."""
    folder.mkdir(parents=True, exist_ok=True)
    target = f"ark{',t' if kind == 'text' else ''},scp:{folder / f'{name}.ark'},{folder / f'{name}.scp'}"
    if kind in ("float", "text"):
        writer = kaldi_native_io.FloatMatrixWriter(target)
    elif kind == "double":
        writer = kaldi_native_io.DoubleMatrixWriter(target)
    else:
        writer = kaldi_native_io.CompressedMatrixWriter(target)
    for key, matrix in features.items():
        if kind in ("float", "text", "double"):
            writer.write(key, matrix.astype(np.float64 if kind == "double" else np.float32))
        else:
            writer.write(key, matrix, getattr(kaldi_native_io.CompressionMethod, kind))
    writer.close()
    return folder / f"{name}.scp"


def some_features(lengths: Iterable[int], dim: int = 5, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Make random features of utterances utt0, utt1, ..."""
    rng = np.random.default_rng(seed)
    return {
        f"utt{number}": rng.standard_normal((length, dim)).astype(np.float32)
        for number, length in enumerate(lengths)
    }


def feats_dir(folder: Path, features: Mapping[str, npt.NDArray[np.float32]], *, speakers: int = 2) -> Path:
    """Write a Kaldi data directory without audio or text: feats.scp and utt2spk."""
    write_feats(folder, features)
    lines = (f"{u} spk{number % speakers}\n" for number, u in enumerate(features))
    (folder / "utt2spk").write_text("".join(lines))
    return folder


def ali_dir(folder: Path, alignments: Mapping[str, Sequence[int]]) -> Path:
    """Write the folder of an alignment: two ali.*.gz and the made-up model with self-loop pdfs."""
    folder.mkdir(parents=True)
    (folder / "final.mdl").write_bytes(binary_model(tuples=True))
    (folder / "num_jobs").write_text("2\n")
    for job in (1, 2):
        part = {u: values for n, (u, values) in enumerate(alignments.items()) if n % 2 == job - 1}
        write_alignments(folder / f"ali.{job}.gz", part)
    return folder
