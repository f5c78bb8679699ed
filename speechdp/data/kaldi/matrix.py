"""Read and write Kaldi's matrices: float, double, compressed and text, by file, byte and rows.

Legend: T rows (frames), D columns.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from speechdp.data.corpora.corpus import file_lines
from speechdp.data.corpora.kaldi_dir import PLAIN_RULES, ReadingRules, Segment
from speechdp.data.kaldi.stream import KaldiStream
from speechdp.data.signal.audio import MAX_OVERSHOOT_S
from speechdp.errors import ConfigError

_DTYPES = {"FM": "<f4", "DM": "<f8"}
_COMPRESSED = ("CM", "CM2", "CM3")
#: FILE, FILE:BYTE, FILE:BYTE[ROWS], FILE:BYTE[ROWS,COLUMNS]; these are FIRST:LAST, or : for all
#: (Kaldi's ParseMatrixRangeSpecifier).
_PLACE = re.compile(
    r"(?P<file>.+?)(:(?P<byte>\d+))?"
    r"(?P<range>\[(?P<rows>:|\d+:\d+)(,(?P<columns>:|\d+:\d+))?\])?"
)
_MOST_TEXT_LINES = 1 << 24
#: Kaldi truncates a range that exceeds its matrix by at most this many rows: times of segments are rounded.
_MOST_ROWS_TOO_FAR = 3


@dataclass(frozen=True)
class MatrixPlace:
    """Location of a matrix: `rows` and `columns` are the first and last to use; None: all."""

    path: Path
    offset_bytes: int
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


def read_scp(path: Path, rules: ReadingRules = PLAIN_RULES) -> dict[str, MatrixPlace]:
    """Read a table of matrices (feats.scp, cmvn.scp) by key; pipes are run if the rules allow it.

    Paths are resolved as by Kaldi, from the working directory, or else from the table's folder.

    Raises:
        ConfigError: a pipe that may not run or fails, a line without a valid location, or a repeated key.
    """
    table: dict[str, MatrixPlace] = {}
    pipes: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for number, line in file_lines(path):
        where = f"{path}:{number}"
        key, value = [*line.split(maxsplit=1), ""][:2]
        if key in numbers:
            raise ConfigError(f"{where}: {key} is listed a second time; remove one of the lines")
        numbers[key] = number
        if line.endswith("|"):
            pipes[key] = value
            continue
        match = _PLACE.fullmatch(value)
        if match is None or value.endswith("]") != (match["range"] is not None):
            raise ConfigError(
                f"{where}: {line[:100]!r} is not KEY FILE:BYTE, KEY FILE:BYTE[FIRST:LAST] of its rows or "
                "KEY FILE:BYTE[FIRST:LAST,FIRST:LAST] of rows and columns"
            )
        file = rules.find_file(path.parent, match["file"])
        rows, columns = _range(match["rows"]), _range(match["columns"])
        table[key] = MatrixPlace(file, int(match["byte"] or 0), rows, columns)
    written = rules.run_pipes(pipes, path, numbers)
    return table | {key: MatrixPlace(file, 0) for key, file in written.items()}


def _range(text: str | None) -> tuple[int, int] | None:
    """Return the first and the last of FIRST:LAST; None: all."""
    if text is None or text == ":":
        return None
    first, _, last = text.partition(":")
    return int(first), int(last)


def rows_of_segments(
    table: Mapping[str, MatrixPlace],
    segments: Mapping[str, Segment],
    frame_shift_s: float,
    path: Path,
    *,
    snipped: int = 0,
) -> dict[str, MatrixPlace]:
    """Cut features of whole recordings into utterances, counting frames as Kaldi's extract-feature-segments.

    Times are rounded to frames, as in Kaldi since 2015.

    Args:
        table: features by recording; if it is by utterance already, it is returned unchanged.
        segments: the stretch of each utterance; those of recordings that the table lacks are left out, and
            those in a file that does not exist are returned whole, for the caller to report.
        frame_shift_s: seconds between frames.
        path: the file segments, for messages.
        snipped: frames to take off the ends, as by Kaldi's --snip-edges=true, its default.

    Raises:
        ConfigError: a stretch is empty, begins after the end of its recording, or ends 0.5 s or more beyond
            it; names the utterance.
    """
    if not table.keys().isdisjoint(segments):
        return dict(table)

    def frames(seconds: float) -> int:
        return math.floor(seconds * 1000.0 / (frame_shift_s * 1000.0) + 0.5)

    lengths: dict[str, int | None] = {}
    cut = {}
    for utterance, segment in segments.items():
        recording = segment.recording
        place = table.get(recording)
        if place is None:
            continue
        if recording not in lengths:
            lengths[recording] = num_rows(place, recording) if place.path.exists() else None
        num = lengths[recording]
        if num is None:
            cut[utterance] = place
            continue
        start = frames(segment.start_s)
        end = num if segment.end_s is None else frames(segment.end_s) - snipped
        if start >= num or end >= num + frames(MAX_OVERSHOOT_S) or start >= end:
            raise ConfigError(
                f"{path}: utterance {utterance} is frames {start} to {end} of recording {recording}, which "
                f"has {num}; correct its times, or leave it out"
            )
        before = place.rows[0] if place.rows else 0
        rows = (before + start, before + min(end, num) - 1)
        cut[utterance] = replace(place, rows=rows)
    return cut


def read_matrix(place: MatrixPlace, utterance: str) -> npt.NDArray[Any]:
    """Read the part (T, D) of a matrix that a place specifies: float64 if it is stored so, else float32.

    The header is checked against the file's size before anything is read, so a damaged header costs no
    memory.  Of a binary matrix only the specified rows are read: utterances may be cut out of the features of
    an hour.

    Args:
        place: location of the matrix, and the rows and columns to read.
        utterance: the utterance's id, for messages.

    Raises:
        ConfigError: truncated, damaged, another kind of data, or fewer rows or columns than specified; names
            file, utterance and byte.
    """
    with KaldiStream(place.path, place.offset_bytes, utterance) as stream:
        if stream.is_binary():
            header = _header(stream)
            matrix = _binary_matrix(stream, header, _rows_in(place, header.rows, utterance))
        else:
            whole = _text_matrix(stream)
            rows = _rows_in(place, len(whole), utterance)
            matrix = whole[rows.start : rows.stop]
    return matrix if place.columns is None else matrix[:, _columns_in(place, matrix.shape[1], utterance)]


def num_rows(place: MatrixPlace, utterance: str) -> int:
    """Return the number of rows that a place specifies, from the header alone if there is one.

    Raises:
        ConfigError: as `read_matrix`, as far as the header shows it.
    """
    with KaldiStream(place.path, place.offset_bytes, utterance) as stream:
        rows = _header(stream).rows if stream.is_binary() else len(_text_matrix(stream))
    return len(_rows_in(place, rows, utterance))


def _rows_in(place: MatrixPlace, rows: int, utterance: str) -> range:
    """Return which of a matrix's `rows` a place specifies, treating a range that ends too late like Kaldi.

    Raises:
        ConfigError: the range begins after the end, or ends later than Kaldi allows.
    """
    if place.rows is None:
        return range(rows)
    first, last = place.rows
    if not (first <= last < rows + _MOST_ROWS_TOO_FAR and first < rows):
        raise ConfigError(
            f"{place.path}: utterance {utterance}: feats.scp asks for rows {first} to {last} of {rows}; "
            "correct the range"
        )
    return range(first, min(last, rows - 1) + 1)


def _columns_in(place: MatrixPlace, columns: int, utterance: str) -> slice:
    """Return which of a matrix's `columns` a place specifies.  Raises ConfigError if it lacks some."""
    assert place.columns is not None
    first, last = place.columns
    if not first <= last < columns:
        raise ConfigError(
            f"{place.path}: utterance {utterance}: feats.scp asks for columns {first} to {last} of "
            f"{columns}; correct the range"
        )
    return slice(first, last + 1)


def write_matrix(file: BinaryIO, key: str, matrix: npt.NDArray[np.float32]) -> int:
    """Append a (T, D) float matrix to an archive; return its position for an scp."""
    head = key.encode() + b" "
    start = file.tell() + len(head)
    sizes = b"".join(b"\4" + struct.pack("<i", size) for size in matrix.shape)
    file.write(head + b"\0BFM " + sizes)
    file.write(np.ascontiguousarray(matrix, dtype="<f4").data)
    return start


@dataclass(frozen=True)
class _Header:
    kind: str
    rows: int
    columns: int
    low: float = 0.0  # for a compressed matrix: its least value, and the range of its values
    span: float = 0.0

    @property
    def what(self) -> str:
        """Name of the matrix in messages."""
        return f"a matrix of {self.rows} x {self.columns}"


def _header(stream: KaldiStream) -> _Header:
    kind = stream.word()
    if kind in _DTYPES:
        header = _Header(kind, stream.sized_int32("the rows"), stream.sized_int32("the columns"))
    elif kind in _COMPRESSED:
        low, span, rows, columns = struct.unpack("<ffii", stream.take(16, "the header"))
        header = _Header(kind, rows, columns, low, span)
    else:
        raise stream.failure(f"{kind[:20]!r} is no kind of matrix; FM, DM, CM, CM2 and CM3 are read")
    if header.rows < 0 or header.columns < 0:
        raise stream.failure(f"a matrix of {header.rows} x {header.columns} cannot be")
    return header


def _binary_matrix(stream: KaldiStream, header: _Header, rows: range) -> npt.NDArray[Any]:
    """Read some rows of the matrix whose header has been read."""
    if header.kind in _DTYPES:
        return _rows(stream, header, _DTYPES[header.kind], rows)
    if header.kind == "CM":
        return _uncompressed_by_columns(stream, header, rows)
    dtype, most = ("<u2", 65535.0) if header.kind == "CM2" else ("<u1", 255.0)
    steps = _rows(stream, header, dtype, rows).astype(np.float32)
    return np.float32(header.low) + steps * np.float32(header.span / most)


def _rows(stream: KaldiStream, header: _Header, dtype: str, rows: range) -> npt.NDArray[Any]:
    """Read some rows of a matrix stored row by row."""
    row_bytes = header.columns * np.dtype(dtype).itemsize
    stream.expect(header.rows * row_bytes, header.what)
    stream.skip(rows.start * row_bytes, header.what)
    values = np.frombuffer(stream.take(len(rows) * row_bytes, header.what), dtype=dtype)
    return values.reshape(len(rows), header.columns)


def _uncompressed_by_columns(stream: KaldiStream, header: _Header, rows: range) -> npt.NDArray[np.float32]:
    """Read Kaldi's speech-feature compression: four 16-bit percentiles a column, then a byte a value.

    Bytes up to 64, 192 and 255 lie, evenly, between the percentiles 0, 25, 75 and 100
    (matrix/compressed-matrix.cc, CharToFloat).
    """
    heads = np.frombuffer(stream.take(8 * header.columns, "the columns' percentiles"), dtype="<u2")
    edges = np.float32(header.low) + heads.astype(np.float32) * np.float32(header.span / 65535.0)
    edges = edges.reshape(-1, 4)  # (D, 4)
    stream.expect(header.rows * header.columns, header.what)
    matrix = np.empty((len(rows), header.columns), dtype=np.float32)
    knots, codes = np.array([0, 64, 192, 255]), np.arange(256)
    for column in range(header.columns):  # columns are stored one after the other
        stream.skip(rows.start, header.what)
        steps = np.frombuffer(stream.take(len(rows), header.what), dtype="<u1")
        stream.skip(header.rows - rows.stop, header.what)
        table = np.interp(codes, knots, edges[column]).astype(np.float32)  # (256,)
        matrix[:, column] = table[steps]
    return matrix


def _text_matrix(stream: KaldiStream) -> npt.NDArray[np.float32]:
    if stream.word() != "[":
        raise stream.failure("neither a matrix in Kaldi's binary form nor '[' stands here")
    rows: list[npt.NDArray[np.float32]] = []
    for _ in range(_MOST_TEXT_LINES):
        text, bracket, _ = stream.line().partition("]")
        try:
            row = np.array(text.split(), dtype=np.float32)
        except ValueError as error:
            raise stream.failure("the line before holds something else than numbers") from error
        if len(row):
            rows.append(row)
        if bracket:
            break
    if len({len(row) for row in rows}) > 1:
        raise stream.failure("the rows of the matrix differ in length")
    return np.stack(rows) if rows else np.empty((0, 0), dtype=np.float32)
