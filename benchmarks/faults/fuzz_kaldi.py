"""Readers of what Kaldi writes: matrices, statistics, alignments, models and tables."""

from __future__ import annotations

import gzip
from pathlib import Path

from benchmarks.faults.fuzz_files import Files, Reader, changing
from benchmarks.faults.fuzz_inputs import damaged
from speechdp.data.corpora.kaldi_dir import read_kaldi_dir, read_table
from speechdp.data.kaldi.alignments import alignment_source
from speechdp.data.kaldi.cmvn import SpeakerCmvn
from speechdp.data.kaldi.matrix import num_rows, read_matrix, read_scp
from speechdp.data.kaldi.model import read_pdf_map
from tests.helpers.kaldi_files import binary_model, some_features, text_model, write_alignments, write_feats


def kaldi_readers(scratch: Path) -> list[Reader]:
    """Return the readers; their sound files are made in `scratch`."""
    folder = scratch / "kaldi"
    tables = {
        "wav.scp": b"a a.wav\nb b.wav\n", "text": b"a one two\nb two\n", "utt2spk": b"a s1\nb s2\n",
        "segments": b"a a 0 1\nb b 0.5 -1 1\n",
    }  # fmt: skip
    return [
        *_matrix_readers(folder),
        *_alignment_readers(folder),
        *_model_readers(),
        changing("Kaldi data directory", _read_tables, tables, *((name, damaged) for name in tables)),
    ]


def _matrix_readers(folder: Path) -> list[Reader]:
    matrices: dict[str, Files] = {}
    for kind in ("float", "double", "text", "kSpeechFeature", "kTwoByteAuto", "kOneByteAuto"):
        write_feats(folder / kind, some_features((3, 2)), kind=kind)
        ark = (folder / kind / "feats.ark").read_bytes()
        scp = (folder / kind / "feats.scp").read_text().replace(f"{folder / kind}/", "")
        matrices[kind] = {"feats.ark": ark, "feats.scp": scp.encode()}

    def read_features(changed: Path) -> None:
        for key, place in read_scp(changed / "feats.scp").items():
            num_rows(place, key)
            read_matrix(place, key)

    def read_statistics(changed: Path) -> None:
        SpeakerCmvn(changed / "feats.scp").of("utt1", 4)

    readers = [
        changing(f"Kaldi matrices, {kind}", read_features, files, *((name, damaged) for name in files))
        for kind, files in matrices.items()
    ]
    statistics = changing("Kaldi statistics", read_statistics, matrices["double"], ("feats.ark", damaged))
    return [*readers, statistics]


def _alignment_readers(folder: Path) -> list[Reader]:
    alignments = {"utt0": [1, 2, 2, 5], "utt1": [2]}
    packed = write_alignments(folder / "ali.1.gz", alignments).read_bytes()
    text = write_alignments(folder / "ali.t.gz", alignments, text=True).read_bytes()
    contents = {"binary": gzip.decompress(packed), "text": gzip.decompress(text), "gzip": packed}
    others = {"final.mdl": binary_model(tuples=True), "num_jobs": b"1\n"}
    changes = (("ali.1.gz", damaged), ("num_jobs", damaged))

    def read(changed: Path) -> None:
        list(alignment_source(changed, None).pdfs())

    return [
        changing(f"Kaldi alignments, {kind}", read, {**others, "ali.1.gz": content}, *changes)
        for kind, content in contents.items()
    ]


def _model_readers() -> list[Reader]:
    contents = {
        "binary": binary_model(tuples=True),
        "text": text_model(tuples=True),
        "triples": binary_model(tuples=False),
    }

    def read(changed: Path) -> None:
        read_pdf_map(changed / "final.mdl")

    return [
        changing(f"Kaldi model, {kind}", read, {"final.mdl": content}, ("final.mdl", damaged))
        for kind, content in contents.items()
    ]


def _read_tables(folder: Path) -> None:
    read_table(folder / "utt2spk")
    read_kaldi_dir(folder)
