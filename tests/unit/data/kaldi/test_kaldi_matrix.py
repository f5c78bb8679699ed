"""Kaldi's matrices: an independent writer's, Kaldi's own, damaged ones; and ours, read independently."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import kaldi_native_io
import numpy as np
import pytest

from speechdp.data.kaldi.matrix import MatrixPlace, num_rows, read_matrix, read_scp, write_matrix
from speechdp.errors import ConfigError
from tests.helpers.corpora import shared_data
from tests.helpers.kaldi_files import some_features, write_feats

FEATURES = some_features((7, 1, 30))


@pytest.mark.parametrize("kind", ["float", "double", "text"])
def test_plain_matrices_are_read_back(tmp_path: Path, kind: str) -> None:
    table = read_scp(write_feats(tmp_path, FEATURES, kind=kind))
    assert list(table) == list(FEATURES)
    for utterance, matrix in FEATURES.items():
        assert num_rows(table[utterance], utterance) == len(matrix)
        read = read_matrix(table[utterance], utterance)
        np.testing.assert_allclose(
            read, matrix, rtol=1e-6 if kind == "text" else 0, atol=1e-6 * (kind == "text")
        )


@pytest.mark.parametrize(
    ("kind", "token"), [("kSpeechFeature", b"CM "), ("kTwoByteAuto", b"CM2 "), ("kOneByteAuto", b"CM3 ")]
)
def test_compressed_matrices_are_read_as_the_independent_reader_reads_them(
    tmp_path: Path, kind: str, token: bytes
) -> None:
    table = read_scp(write_feats(tmp_path, FEATURES, kind=kind))
    assert b"\0B" + token in (tmp_path / "feats.ark").read_bytes()
    for utterance in ("utt0", "utt2"):
        place = table[utterance]
        theirs = np.array(kaldi_native_io.FloatMatrix.read(f"{place.path}:{place.offset_bytes}"))
        np.testing.assert_allclose(read_matrix(place, utterance), theirs, atol=1e-6)
        assert num_rows(place, utterance) == len(theirs)


def test_kaldis_own_compressed_features_are_read() -> None:
    folder = shared_data("kaldi", "lhotse_mini_librispeech2")
    table = read_scp(folder / "feats.scp")
    frames = dict(line.split() for line in (folder / "utt2num_frames").read_text().splitlines())
    assert len(table) == 3
    for utterance, place in table.items():
        theirs = np.array(kaldi_native_io.FloatMatrix.read(f"{place.path}:{place.offset_bytes}"))
        ours = read_matrix(place, utterance)
        assert ours.shape == (int(frames[utterance]), 13) == (num_rows(place, utterance), 13)
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_what_we_write_the_independent_reader_reads(tmp_path: Path) -> None:
    with (tmp_path / "out.ark").open("wb") as file:
        starts = {key: write_matrix(file, key, matrix) for key, matrix in FEATURES.items()}
    read = {}
    with kaldi_native_io.SequentialFloatMatrixReader(f"ark:{tmp_path / 'out.ark'}") as reader:
        for key, matrix in reader:
            read[key] = np.array(matrix)
    for key, matrix in FEATURES.items():
        np.testing.assert_array_equal(read[key], matrix)
        np.testing.assert_array_equal(
            read_matrix(MatrixPlace(tmp_path / "out.ark", starts[key]), key), matrix
        )


def test_rows_are_chosen_as_kaldi_chooses_them(tmp_path: Path) -> None:
    path = write_feats(tmp_path, FEATURES)
    path.write_text("".join(f"{line}[2:4]\n" for line in path.read_text().splitlines() if line[:4] != "utt1"))
    place = read_scp(path)["utt0"]
    np.testing.assert_array_equal(read_matrix(place, "utt0"), FEATURES["utt0"][2:5])  # the last one counts
    assert num_rows(place, "utt0") == 3
    for last in (6, 9):  # a range may end somewhat late, as Kaldi has it
        late = MatrixPlace(place.path, place.offset_bytes, (6, last))
        np.testing.assert_array_equal(read_matrix(late, "utt0"), FEATURES["utt0"][6:])
        assert num_rows(late, "utt0") == 1
    for rows in ((6, 10), (7, 8)):
        wrong = MatrixPlace(place.path, place.offset_bytes, rows)
        for read in (read_matrix, num_rows):
            with pytest.raises(
                ConfigError, match=rf"asks for rows {rows[0]} to {rows[1]} of 7; correct the range"
            ):
                read(wrong, "utt0")


@pytest.mark.parametrize("kind", ["float", "text", "kSpeechFeature"])
@pytest.mark.parametrize(
    ("range_", "rows", "columns"),
    [
        ("[:]", slice(None), slice(None)),
        ("[2:4,1:2]", slice(2, 5), slice(1, 3)),
        ("[:,0:0]", slice(None), slice(0, 1)),
        ("[6:9,:]", slice(6, 7), slice(None)),
    ],
)
def test_columns_and_empty_ranges_are_read_as_kaldi_reads_them(
    tmp_path: Path, kind: str, range_: str, rows: slice, columns: slice
) -> None:
    """Held against copy-feats of Kaldi 5.5, which refuses columns that the matrix lacks, however few."""
    path = write_feats(tmp_path, FEATURES, kind=kind)
    whole = read_matrix(read_scp(path)["utt0"], "utt0")
    line = path.read_text().splitlines()[0]
    path.write_text(f"{line}{range_}\n")
    place = read_scp(path)["utt0"]
    np.testing.assert_array_equal(read_matrix(place, "utt0"), whole[rows, columns])
    assert num_rows(place, "utt0") == len(whole[rows])
    path.write_text(f"{line}[:,1:{whole.shape[1]}]\n")
    with pytest.raises(
        ConfigError, match=f"utt0: feats.scp asks for columns 1 to {whole.shape[1]} of {whole.shape[1]};"
    ):
        read_matrix(read_scp(path)["utt0"], "utt0")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["float", "double", "kSpeechFeature", "kTwoByteAuto", "kOneByteAuto"])
def test_rows_alone_are_bitwise_those_of_the_whole(tmp_path: Path, kind: str, packed: bool) -> None:
    place = read_scp(write_feats(tmp_path, FEATURES, kind=kind))["utt2"]
    if packed:
        content = place.path.read_bytes()[place.offset_bytes :]
        place = MatrixPlace(tmp_path / "utt2.gz", 0)
        place.path.write_bytes(gzip.compress(content))
    whole = read_matrix(place, "utt2")
    for first, last in ((0, 29), (0, 0), (29, 29), (3, 17), (25, 31)):
        rows = read_matrix(MatrixPlace(place.path, place.offset_bytes, (first, last)), "utt2")
        assert rows.dtype == whole.dtype and rows.tobytes() == whole[first : last + 1].tobytes()


@pytest.mark.parametrize("kind", ["float", "double", "kSpeechFeature", "kTwoByteAuto", "kOneByteAuto"])
def test_rows_cost_no_more_memory_than_they_need(tmp_path: Path, kind: str) -> None:
    place = read_scp(write_feats(tmp_path, some_features((40_000,)), kind=kind))["utt0"]
    part = MatrixPlace(place.path, place.offset_bytes, (30_000, 30_099))
    read_matrix(part, "utt0")
    tracemalloc.start()
    rows = read_matrix(part, "utt0")
    assert len(rows) == 100 and tracemalloc.get_traced_memory()[1] < 2**18
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("utt0 copy-feats ark:x ark:- |", r"a pipe \(utt0\) runs copy-feats"),
        ("utt0", "is not KEY FILE"),
        ("utt0 x.ark:5[1:2,]", "is not KEY FILE"),
        ("utt0 x.ark:5[,0:3]", "is not KEY FILE"),
        ("utt0 x.ark:5[1:2,0:3,0:3]", "is not KEY FILE"),
    ],
)
def test_lines_that_are_no_place_are_refused_by_number(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "feats.scp").write_text(f"first x.ark:3\n{line}\n")
    with pytest.raises(ConfigError, match=f"feats.scp:2: .*{reason}"):
        read_scp(tmp_path / "feats.scp")


def test_a_place_behind_the_end_or_in_the_middle_of_something_is_refused(tmp_path: Path) -> None:
    place = read_scp(write_feats(tmp_path, FEATURES))["utt2"]
    size = place.path.stat().st_size
    with pytest.raises(
        ConfigError, match=f"feats.ark: utterance utt2, byte {size}: the file ends at byte {size}"
    ):
        read_matrix(MatrixPlace(place.path, size), "utt2")
    with pytest.raises(ConfigError, match=r"utt2, byte \d+: "):
        read_matrix(MatrixPlace(place.path, place.offset_bytes + 1), "utt2")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_matrix(MatrixPlace(tmp_path / "no.ark", 0), "utt2")


@pytest.mark.parametrize(
    "kind", ["float", "double", "text", "kSpeechFeature", "kTwoByteAuto", "kOneByteAuto"]
)
def test_a_matrix_cut_short_anywhere_is_refused(tmp_path: Path, kind: str) -> None:
    place = read_scp(write_feats(tmp_path, {"utt0": FEATURES["utt0"]}, kind=kind))["utt0"]
    whole = place.path.read_bytes()
    for length in range(place.offset_bytes, len(whole) - 1):
        place.path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"feats\.ark: utterance utt0, byte \d+: "):
            read_matrix(place, "utt0")


@pytest.mark.parametrize("token", [b"FM ", b"DM ", b"CM ", b"CM2 ", b"CM3 ", b"XX "])
def test_absurd_sizes_cost_no_memory(tmp_path: Path, token: bytes) -> None:
    path = tmp_path / "feats.ark"
    most = 2**31 - 1
    sizes = [(most, most), (most, 1), (1, most), (-1, 5), (5, -1)]
    for rows, columns in sizes:
        plain = b"\4" + struct.pack("<i", rows) + b"\4" + struct.pack("<i", columns)
        packed = struct.pack("<ffii", 0.0, 1.0, rows, columns)
        path.write_bytes(b"utt0 \0B" + token + (packed if token[:2] == b"CM" else plain) + bytes(64))
        tracemalloc.start()
        with pytest.raises(ConfigError, match=r"feats\.ark: utterance utt0, byte \d+: "):
            read_matrix(MatrixPlace(path, 5), "utt0")
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()
