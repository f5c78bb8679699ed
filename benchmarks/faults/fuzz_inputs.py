"""Inputs that readers of files should survive: bytes damaged, JSON with other values, HDF5 of odd structure.

Strategies of hypothesis; every one draws bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
from hypothesis import strategies as st

#: Numbers that lengths, offsets and counts are replaced by.
_NUMBERS = (
    0, 1, 7, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, 2**63 - 1, 2**64 - 1,
)  # fmt: skip
_WORDS = (
    "", "-1", "0", "nan", "inf", "1e999", "../../etc/passwd", "a\nb", "\x1b[31m", "\0", "\udc80", "$(id)",
    "id |", "é",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    *_WORDS, None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -1e300, float("nan"), float("inf"),
    [], {}, [[]], [None], {"": ""}, [0, 1], "x" * 5000,
)  # fmt: skip


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Draw `content` after one to a dozen changes: bits, bytes, numbers, pieces gone, put in, repeated."""
    most = max(len(content) - 1, 0)
    # Heads of files say most, so half of the changes are made there.
    places = st.integers(0, most) | st.integers(0, min(most, 64))
    change = st.tuples(st.integers(0, len(_CHANGES) - 1), places, st.integers(0, 255))

    def apply(changes: list[tuple[int, int, int]]) -> bytes:
        out = bytearray(content)
        for kind, place, value in changes:
            _CHANGES[kind](out, min(place, len(out)), value)
        return bytes(out)

    return st.lists(change, min_size=1, max_size=12).map(apply)


def _flip(out: bytearray, place: int, value: int) -> None:
    if place < len(out):
        out[place] ^= 1 << value % 8


def _set(out: bytearray, place: int, value: int) -> None:
    out[place : place + 1] = bytes([value])


def _number(out: bytearray, place: int, value: int) -> None:
    width, code = (4, "<I") if value % 2 else (8, "<Q")
    number = _NUMBERS[value // 2 % len(_NUMBERS)] & (2 ** (8 * width) - 1)
    out[place : place + width] = struct.pack(code, number)


def _cut(out: bytearray, place: int, value: int) -> None:
    del out[place:]


def _remove(out: bytearray, place: int, value: int) -> None:
    del out[place : place + value]


def _insert(out: bytearray, place: int, value: int) -> None:
    out[place:place] = bytes([value]) * (1 + value % 9)


def _repeat(out: bytearray, place: int, value: int) -> None:
    out[place:place] = out[place : place + value]


def _word(out: bytearray, place: int, value: int) -> None:
    word = _WORDS[value % len(_WORDS)].encode("utf-8", "surrogateescape")
    out[place : place + value % 4] = word


_CHANGES = (_flip, _flip, _set, _set, _number, _number, _cut, _remove, _insert, _repeat, _word)


def other_json(content: bytes) -> st.SearchStrategy[bytes]:
    """Draw a JSON file (or one of JSON lines) in which one to four values are others, gone or doubled."""
    lines = [json.loads(line) for line in _json_texts(content)]
    places = [(n, path) for n, line in enumerate(lines) for path in _paths(line)]
    change = st.tuples(st.sampled_from(places), st.sampled_from((*ODD_VALUES, _GONE, _DEEP)))

    def apply(changes: list[tuple[tuple[int, tuple[Any, ...]], Any]]) -> bytes:
        texts = list(lines)
        for (n, path), value in changes:
            texts[n] = _replaced(texts[n], path, value)
        text = "\n".join(json.dumps(line) for line in texts)
        return text.replace(json.dumps(_DEEP), "[" * 100_000).encode()

    return st.lists(change, min_size=1, max_size=4).map(apply)


_GONE, _DEEP = "a value that is gone", "a value that is deep"


def _json_texts(content: bytes) -> list[str]:
    text = content.decode()
    try:
        json.loads(text)
    except ValueError:
        return text.splitlines()
    return [text]


def _paths(value: Any) -> list[tuple[Any, ...]]:
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = list(range(len(value)))
    return [(), *((key, *rest) for key in keys for rest in _paths(value[key]))]


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value at `path`; unchanged where an earlier change took the path away."""
    if not path:
        return None if new == _GONE else new
    key, *rest = path
    if isinstance(value, dict) and key in value:
        if new == _GONE and not rest:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _replaced(value[key], tuple(rest), new)}
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return [_replaced(v, tuple(rest), new) if n == key else v for n, v in enumerate(value)]
    return value


def other_hdf5(content: bytes, seal: Callable[[Any], None]) -> st.SearchStrategy[bytes]:
    """Draw a sound HDF5 file with one to three datasets or attributes of other types, shapes or values.

    Args:
        seal: makes the file's own checksum right again, so that it is not the checksum that refuses it.
    """
    with h5py.File.in_memory(content) as file:
        names = [*file, "absent"]
        attributes = [*file.attrs, "absent"]
    dataset = st.tuples(st.sampled_from(names), st.sampled_from(sorted(_DATASETS)))
    attribute = st.tuples(st.sampled_from(attributes), st.sampled_from(_ATTRIBUTES))

    def apply(changes: list[tuple[str, Any]], sealed: bool) -> bytes:
        with h5py.File.in_memory(content) as file:
            for name, change in changes:
                if isinstance(change, str) and change in _DATASETS:
                    _DATASETS[change](file, name)
                else:
                    file.attrs[name] = change
            if sealed:
                seal(file)
            file.flush()
            return bytes(file.id.get_file_image())

    changes = st.lists(dataset | attribute, min_size=1, max_size=3)
    return st.builds(apply, changes, st.booleans())


def _delete(file: Any, name: str) -> None:
    if file.get(name, getlink=True, default=None) is not None:
        del file[name]


def _as(make: Callable[[Any, str, Any], None]) -> Callable[[Any, str], None]:
    """Return what replaces a dataset by one made of its values."""

    def replace(file: Any, name: str) -> None:
        values = _values(file, name)
        _delete(file, name)
        make(file, name, values)

    return replace


def _values(file: Any, name: str) -> Any:
    """Return a dataset's values; others where there is none, or where a change before has made it strange."""
    link = file.get(name, getlink=True, default=None)
    if isinstance(link, h5py.HardLink) and isinstance(file[name], h5py.Dataset):
        dataset = file[name]
        if dataset.ndim and dataset.size < 1 << 20 and dataset.dtype.kind in "iufS":
            return dataset[()]
    return np.arange(3)


def _new(**options: Any) -> Callable[[Any, str], None]:
    return _as(lambda file, name, values: file.create_dataset(name, **options))


_OTHER_FILE = h5py.ExternalLink("/etc/passwd", "/x")
_DATASETS: dict[str, Callable[[Any, str], None]] = {
    "gone": _delete,
    "float": _as(lambda f, n, v: f.create_dataset(n, data=np.zeros(np.shape(v), "f8"))),
    "big-endian": _as(lambda f, n, v: f.create_dataset(n, data=v, dtype=v.dtype.newbyteorder(">"))),
    "shorter": _as(lambda f, n, v: f.create_dataset(n, data=v[:-1])),
    "longer": _as(lambda f, n, v: f.create_dataset(n, data=np.concatenate([v, v]))),
    "another shape": _as(lambda f, n, v: f.create_dataset(n, data=np.broadcast_to(v, (2, *v.shape)))),
    "reversed": _as(lambda f, n, v: f.create_dataset(n, data=v[::-1])),
    "chunked": _as(lambda f, n, v: f.create_dataset(n, data=v, chunks=True)),
    "packed": _as(lambda f, n, v: f.create_dataset(n, data=v, chunks=True, compression="gzip", shuffle=True)),
    "scalar": _new(data=3),
    "empty": _new(data=h5py.Empty("f4")),
    "no rows": _new(shape=(0,), dtype="i8"),
    "huge": _new(shape=(1 << 50,), dtype="i8"),
    "huge in chunks": _new(shape=(1 << 50,), dtype="i8", chunks=(1 << 16,)),
    "huge text": _new(shape=(1 << 40,), dtype="S9", chunks=(1 << 10,)),
    "texts": _new(data=["a", "é", ""], dtype=h5py.string_dtype()),
    "texts in chunks": _new(data=["a", "b"], dtype=h5py.string_dtype(), chunks=(1,)),
    "lists": _new(shape=(3,), dtype=h5py.vlen_dtype(np.int32)),
    "compound": _new(data=np.zeros(3, [("a", "i4"), ("b", "S3")])),
    "elsewhere": _new(shape=(3,), dtype="i8", external=[("/etc/passwd", 0, 24)]),
    "group": _as(lambda file, name, values: file.create_group(name)),
    "soft link": _as(lambda file, name, values: file.__setitem__(name, h5py.SoftLink("/" + name))),
    "other file": _as(lambda file, name, values: file.__setitem__(name, _OTHER_FILE)),
}  # fmt: skip

_ATTRIBUTES: tuple[Any, ...] = (
    "", "text", "../x", "a\nb", "features", "audio", "spectrograms", "{}", "[]", "null", '{"kind": 1}',
    "é" * 300,
    '{"num_mel_bins": 1e9}', "[" * 20_000, 0, 1, 2, 3, -1, 2**31, 2**62, 0.5, float("nan"), b"bytes", [1, 2],
    ["a", "b"], np.zeros((2, 2)), h5py.Empty("i4"), np.bool_(1), np.uint8(1),
)  # fmt: skip
