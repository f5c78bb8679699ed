"""The files that describe a data directory's shards: notice if one was changed, and copy them for a run.

A record beside them, in the data directory as in a run's copy, has their sizes and checksums.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from speechdp import remedies
from speechdp.data.shards.dataset import LANGUAGE_MODEL_NAMES, MANIFEST_NAME, SYMBOLS_NAME, Dataset
from speechdp.errors import RunError, ShardError
from speechdp.files import (
    atomic_path,
    cannot_be_read,
    cannot_be_written,
    record_cannot_be_read,
    sha256_of,
    write_text_atomically,
)
from speechdp.json_input import other_version, parse_json

#: Files beside the shards that describe their contents, apart from data.json and the language model.
_NAMES = ("classes.txt", "lexicon.txt", SYMBOLS_NAME)
#: All files of a copy that are read in full whenever it is used.
SMALL_NAMES = (MANIFEST_NAME, *_NAMES)
#: The record.  Folders that earlier versions wrote have none.
RECORD_NAME = "files.json"
_FORMAT, _VERSION = "speechdp-files", 1
_OTHER_CHECKSUM = f"its checksum is not that in {RECORD_NAME}"
#: Remedy for missing or damaged files of a copy, such as that of a run that was itself copied in part.
COPY_AGAIN = "copy it again from the run, or from the data that were trained on"
#: The same for a data directory.
_MAKE_AGAIN = "copy the directory again or prepare the data again"
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class _Entry:
    """What the record says about a file."""

    sha256: str
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> _Entry:
        """Describe a file.  Raises OSError."""
        return cls(sha256_of(path), path.stat().st_size)


def record_description(folder: Path) -> None:
    """Write the record of a new data directory, once all but data.json is there.  Raises OSError."""
    names = (*_NAMES, *LANGUAGE_MODEL_NAMES)
    _write_record(folder, {name: _Entry.of(folder / name) for name in names if (folder / name).exists()})


def check_description(dataset: Dataset, *, read_all: bool = False) -> None:
    """Refuse a data directory in which a file beside the shards differs from the record.

    Args:
        read_all: compare the checksum of a language model too, not its size alone.

    Raises:
        RunError: as `check_sizes`.
    """
    check_contents(dataset.path, _NAMES)
    (check_contents if read_all else check_sizes)(dataset.path, LANGUAGE_MODEL_NAMES)


def keep_description(dataset: Dataset, folder: Path) -> list[str]:
    """Copy all files of a data directory except its shards to `folder`, data.json last.

    The copy can be opened as a data directory whose shards are missing.  Files that `folder` has already,
    with the same size and modification time, are not read again.  A language model that cannot be read is
    left out: the rest can be used without it; so is one that the record of the data contradicts.  A record
    of the copied files is written before data.json.

    Returns:
        A line for each thing that could not be copied.

    Raises:
        ShardError: a file of the data directory cannot be read.
        RunError: a disk error.
    """
    notices: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recorded = _usable_record(folder)
        entries = _copy_or_remove(_NAMES, dataset.path, folder, recorded)
        try:
            of_model = _copy_or_remove(LANGUAGE_MODEL_NAMES, dataset.path, folder, recorded)
            _refuse_contradictions(dataset.path, of_model)
            entries |= of_model
        except ShardError as error:
            for name in LANGUAGE_MODEL_NAMES:  # parts of two models would not fit together
                (folder / name).unlink(missing_ok=True)
            notices.append(f"{folder} holds no language model: {error}")
        entries[MANIFEST_NAME] = _entry_of_source(dataset.path / MANIFEST_NAME)
        if entries != recorded:
            _write_record(folder, entries)
        _copy(dataset.path / MANIFEST_NAME, folder / MANIFEST_NAME, entries[MANIFEST_NAME])
    except OSError as error:
        raise RunError(cannot_be_written(folder, error, remedies.resuming())) from error
    return notices


def _copy_or_remove(
    names: tuple[str, ...], source: Path, folder: Path, recorded: Mapping[str, _Entry]
) -> dict[str, _Entry]:
    """Copy the files that exist, remove the others, and return the entries of the copies."""
    entries = {}
    for name in names:
        try:
            is_there = (source / name).exists()
        except OSError as error:
            raise ShardError(cannot_be_read(source / name, error)) from error
        if is_there:
            entries[name] = _copy(source / name, folder / name, recorded.get(name))
        else:
            (folder / name).unlink(missing_ok=True)
    return entries


def _copy(source: Path, target: Path, recorded: _Entry | None) -> _Entry:
    """Copy a file and its modification time, unless the target has both its size and its time already.

    Args:
        recorded: entry of the target, if it has one already.

    Returns:
        The entry of the target.

    Raises:
        ShardError: the file cannot be read.
        OSError: the copy cannot be written.
    """
    try:
        state = source.stat()
    except OSError as error:
        raise ShardError(cannot_be_read(source, error)) from error
    with contextlib.suppress(FileNotFoundError):
        kept = target.stat()
        if (kept.st_size, kept.st_mtime_ns) == (state.st_size, state.st_mtime_ns):
            if recorded is not None and recorded.num_bytes == kept.st_size:
                return recorded
            return _Entry.of(target)
    checksum, num_bytes = hashlib.sha256(), 0
    with atomic_path(target) as temporary:
        with temporary.open("wb") as file:
            for piece in _pieces(source):
                file.write(piece)
                checksum.update(piece)
                num_bytes += len(piece)
        with contextlib.suppress(OSError):  # the time only saves copying again
            os.utime(temporary, ns=(state.st_atime_ns, state.st_mtime_ns))
    return _Entry(checksum.hexdigest(), num_bytes)


def _refuse_contradictions(source: Path, entries: Mapping[str, _Entry]) -> None:
    """Refuse copies that differ from the record of the data directory.  Raises ShardError."""
    recorded = _usable_record(source)
    for name, entry in entries.items():
        if recorded.get(name, entry) != entry:
            raise ShardError(str(_changed(source / name, _OTHER_CHECKSUM, recorded)))


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file in pieces.  Raises ShardError."""
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise ShardError(cannot_be_read(path, error)) from error


def _entry_of_source(path: Path) -> _Entry:
    """Describe a file of the data directory.  Raises ShardError."""
    try:
        return _Entry.of(path)
    except OSError as error:
        raise ShardError(cannot_be_read(path, error)) from error


def _write_record(folder: Path, entries: Mapping[str, _Entry]) -> None:
    files = [
        {"file": name, "sha256": entry.sha256, "bytes": entry.num_bytes}
        for name, entry in sorted(entries.items())
    ]
    record = {"format": _FORMAT, "version": _VERSION, "files": files}
    write_text_atomically(folder / RECORD_NAME, json.dumps(record, indent=2) + "\n")


def _usable_record(folder: Path) -> dict[str, _Entry]:
    """Return a folder's record; empty if there is none that can be used."""
    try:
        return _read_record(folder) or {}
    except RunError:
        return {}


def _read_record(folder: Path) -> dict[str, _Entry] | None:
    """Return a folder's record; None: an earlier version made the folder, or the user deleted the record.

    Raises:
        RunError: it cannot be read.
    """
    path = folder / RECORD_NAME
    try:
        values = parse_json(path.read_bytes())
        if values["format"] != _FORMAT:
            raise ValueError(f"its format is {values['format']!r}")
        if what := other_version(values, _VERSION):
            raise RunError(f"{path}: {what}")
        return {
            str(entry["file"]): _Entry(str(entry["sha256"]), int(entry["bytes"])) for entry in values["files"]
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        remedy = "copy it again, or delete it to use the files beside it as they are"
        raise RunError(record_cannot_be_read(path, error, remedy)) from error


def is_recorded(folder: Path) -> bool:
    """Return whether a folder has a record.  Raises RunError: it cannot be read."""
    return _read_record(folder) is not None


def differing_names(dataset: Dataset, folder: Path) -> list[str]:
    """Return the names of files of a data directory that differ from those copied to `folder` before.

    A language model is compared by its size alone, because reading it may take long.

    Args:
        folder: a copy; without a record, or if it is of other data, nothing is compared.

    Raises:
        RunError: a file cannot be read.
    """
    recorded = _usable_record(folder)
    if MANIFEST_NAME not in recorded or recorded[MANIFEST_NAME].sha256 != dataset.checksum:
        return []

    def differs(name: str) -> bool:
        entry, num_bytes = recorded.get(name), _size_of(dataset.path / name)
        if entry is None or num_bytes != entry.num_bytes:
            return entry is not None or num_bytes is not None
        return name in _NAMES and checked_sha256(dataset.path / name) != entry.sha256

    return list(filter(differs, (*_NAMES, *LANGUAGE_MODEL_NAMES)))


def check_sizes(folder: Path, names: Iterable[str], instead: str = "") -> None:
    """Refuse files that are missing, were added, or have another size than recorded.

    Anything is accepted in a folder without a record.

    Args:
        folder: a data directory, or a run's copy of its description.
        names: names of the files that are about to be used.
        instead: another remedy, as an imperative: options of the command that replace the files.

    Raises:
        RunError: names the first such file.
    """
    recorded = _read_record(folder)
    if recorded is not None:
        _refuse_other_sizes(folder, recorded, names, instead)


def _refuse_other_sizes(
    folder: Path, recorded: Mapping[str, _Entry], names: Iterable[str], instead: str
) -> None:
    """Do what `check_sizes` does, with a record that has been read."""
    for name in names:
        path, entry = folder / name, recorded.get(name)
        num_bytes = _size_of(path)
        if num_bytes is None and entry is not None:
            raise RunError(f"{path}: is missing; {_remedy(recorded, instead, 'to do without it')}")
        if num_bytes is not None and entry is None:
            raise RunError(
                f"{path}: was added, {RECORD_NAME} beside it does not list it; remove it, or delete "
                f"{RECORD_NAME} to use it"
            )
        if entry is not None and num_bytes != entry.num_bytes:
            raise _changed(path, f"{num_bytes} bytes, {entry.num_bytes} were written", recorded, instead)


def check_contents(folder: Path, names: Iterable[str], instead: str = "") -> None:
    """Refuse files as `check_sizes`, and those whose checksum is not the recorded one."""
    names, recorded = tuple(names), _read_record(folder)
    if recorded is None:
        return
    _refuse_other_sizes(folder, recorded, names, instead)
    for name in filter(recorded.__contains__, names):
        _sha256_as_recorded(folder / name, recorded, instead)


def checked_sha256(path: Path) -> str:
    """Return the checksum of a file, which is the recorded one if the record beside it lists the file.

    Raises:
        RunError: it is not the recorded one, or the file cannot be read.
    """
    return _sha256_as_recorded(path, _read_record(path.parent) or {})


def _sha256_as_recorded(path: Path, recorded: Mapping[str, _Entry], instead: str = "") -> str:
    try:
        found = sha256_of(path)
    except OSError as error:
        raise RunError(cannot_be_read(path, error)) from error
    if path.name in recorded and found != recorded[path.name].sha256:
        raise _changed(path, _OTHER_CHECKSUM, recorded, instead)
    return found


def _size_of(path: Path) -> int | None:
    """Return the size of a file; None: there is none.  Raises RunError."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(cannot_be_read(path, error)) from error


def _changed(path: Path, how: str, recorded: Mapping[str, _Entry], instead: str = "") -> RunError:
    return RunError(f"{path}: was changed ({how}); {_remedy(recorded, instead, 'to use it as it is')}")


def _remedy(recorded: Mapping[str, _Entry], instead: str, purpose: str) -> str:
    again = COPY_AGAIN if MANIFEST_NAME in recorded else _MAKE_AGAIN
    return ", or ".join(filter(None, (again, instead, f"delete {RECORD_NAME} beside it {purpose}")))
