"""Folders that commands write: distinguish their kinds, and empty them for --overwrite.

Only files that a command writes are deleted.  Anything else in the folder stays.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_read, cannot_be_written, may_write
from speechdp.json_input import parse_json
from speechdp.ownership.owner import OWNER_FILE, FolderOwner, is_owners


@dataclass(frozen=True)
class FolderKind:
    """What one command writes into a folder of its own (docs/run-directory.md).

    Attributes:
        name: what the folder holds, in messages, e.g. "run".
        what: the name with its article, e.g. "a run".
        record: file that distinguishes it from folders of other commands.
        begun: further patterns, one of which matches in a folder that was left before it had its record.
        contents: patterns of the names that may be in it, except those that patterns of `begun` start with.
        parts: patterns, one of which matches in each of its parts (e.g. a run of a sweep); empty: it has no
            parts.
    """

    name: str
    what: str
    record: str
    begun: tuple[str, ...] = ()
    contents: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def records(self) -> tuple[str, ...]:
        """Patterns, one of which every folder of this kind has."""
        return (self.record, *self.begun)

    def owns(self, path: Path) -> bool:
        """Return whether this kind's command wrote a file or folder at the top of such a folder."""
        name = path.name
        beginnings = (pattern.split("/")[0] for pattern in self.records)
        if any(fnmatch(name, pattern) for pattern in (*beginnings, *self.contents, ".*.tmp")):
            return True
        if not self.parts or path.is_symlink() or not path.is_dir():
            return False
        return any(next(path.glob(part), None) for part in self.parts) or not any(path.iterdir())


#: Until its targets are complete, a run or sweep has only the runs that make them, or some of the targets,
#: perhaps half written (.NAME.h5.*.tmp).
_TARGETS = (
    "alignments/0/completed.json",
    "alignments/0/*.h5*",
    "alignments/tied/completed.json",
    "alignments/tied/*.h5*",
    "realign/*/run.json",
)
RUN = FolderKind(
    "run",
    "a run",
    "run.json",
    (*_TARGETS, "completed.json", "checkpoints/step-*"),
    (
        *("trained_on", "starts.jsonl", "metrics.jsonl", "timeline", "status", "timing.json", "tensorboard"),
        *("model.safetensors", "notices.txt", "report"),
        *(
            "simulation",
            "wer-*.json",
            "hypotheses",
            "decoding-graph",
            "tuned.json",
            "synthesis.json",
            "synthesis",
        ),
    ),
)
_RUNS = (*RUN.records, OWNER_FILE)
SWEEP = FolderKind(
    "sweep", "a sweep", "sweep.json", _TARGETS, ("report", "race", "simulation", "logs", "notices.txt"), _RUNS
)
COMPARISON = FolderKind(
    "comparison",
    "a comparison",
    "compare.json",
    (),
    ("compare", "race", "logs", "report", "simulation", "notices.txt"),
    _RUNS,
)
PROFILE = FolderKind(
    "profile",
    "a profile",
    "profile.json",
    (),
    ("logs", "report", "simulation", "notices.txt"),
    ("rank-*.jsonl", "samples-*.jsonl", "memory.json", "job.json"),
)
TUNE = FolderKind(
    "search",
    "a search",
    "tune.json",
    (),
    ("measure", "runs", "alignment", "race", "logs", "tune", "notices.txt"),
)
DATA = FolderKind(
    "prepared data",
    "prepared data",
    "data.json",
    (),
    (
        *("*.h5", "classes.txt", "lexicon.txt", "symbols.json", "files.json"),
        *("lm.json", "lm.arpa.gz", "G.fst", "words.txt"),
    ),
)
#: Where inside a folder other folders may have owners: a sweep's runs are in OUT, a search's in OUT/runs.
_OWNED = ("*", "*/*")
#: What a start that was killed early may leave besides its owner's file: statuses, half-written files.
_TRACES = ("status", ".*.tmp")
_KINDS = (RUN, SWEEP, COMPARISON, PROFILE, TUNE, DATA)


def check_kind(folder: Path, kind: FolderKind) -> None:
    """Refuse a folder that another command writes.

    Raises:
        ConfigError: the folder has another command's record.
    """
    for other in _KINDS:
        if other is not kind and os.path.lexists(folder / other.record):
            raise ConfigError(
                f"{folder}: holds {other.what} ({other.record}); give {kind.what} another folder"
            )


def refuse_inside(folder: Path) -> None:
    """Refuse a place inside a folder that a command has written, where nobody expects or keeps other files.

    Raises:
        ConfigError: it lies in such a folder; the message names the outermost.
    """
    for parent in reversed(Path(os.path.realpath(folder)).parents):
        for kind in _KINDS:
            if is_record(parent / kind.record):
                raise ConfigError(
                    f"{folder}: lies in {parent}, which holds {kind.what} ({kind.record}); give a folder "
                    "beside it"
                )


def how_to_continue(run_dir: Path, option: str = "--resume") -> str:
    """Return the remedy for an unfinished run, as the end of a message such as "continue it ...".

    Args:
        run_dir: folder of the run.
        option: what continues a run that is not part of a sweep, comparison or search.
    """
    for parent in Path(os.path.realpath(run_dir)).parents[:2]:  # a search keeps its runs in SEARCH/runs
        for kind in (SWEEP, COMPARISON, TUNE):
            if is_record(parent / kind.record):
                return f"by giving the command of the {kind.name} again"
    return f"with {option}"


def is_record(path: Path) -> bool:
    """Return whether a file is a command's record of what its folder holds, not another program's."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and str(content.get("format")).startswith("speechdp-")


def check_overwrite(
    folder: Path, kind: FolderKind, read: Mapping[str, Path | None] = MappingProxyType({})
) -> None:
    """Refuse a folder that --overwrite must not, or cannot, empty.

    Args:
        folder: folder to empty; a symbolic link stands for its target, and is kept.
        kind: what the command writes.
        read: paths that the command reads, by the option that names them; None: not given.

    Raises:
        ConfigError: the folder holds something else, or a path to read, or this user may not delete its
            files.
    """
    check_kind(folder, kind)
    for name, given in read.items():
        if given is not None and given.resolve().is_relative_to(folder.resolve()):
            lies = f"lies in {folder}, which --overwrite empties"
            raise ConfigError(f"{name} {given}: {lies}; give {kind.what} another folder")
    try:
        if not folder.exists():
            return
    except OSError:
        return  # the attempt to own it will report why
    try:
        holds_what_is_said = _is_left(folder, kind) or any(
            next(folder.glob(record), None) for record in kind.records
        )
    except OSError as error:
        _refuse(error)
    if not holds_what_is_said:
        raise ConfigError(
            f"{folder}: --overwrite deletes only folders that hold {kind.what}; remove it yourself"
        )
    check_deletable(folder)


def _is_left(folder: Path, kind: FolderKind) -> bool:
    """Return whether a folder is empty, or holds only the leftovers of a start that was killed early.

    Raises:
        OSError: the folder cannot be read.
    """
    return folder.is_dir() and all(is_owners(path.name) or _is_trace(path, kind) for path in folder.iterdir())


def _is_trace(path: Path, kind: FolderKind) -> bool:
    # Not everything the kind owns: a folder with only `alignments` or `report` may be somebody else's.
    return any(fnmatch(path.name, pattern) for pattern in _TRACES) and kind.owns(path)


def check_deletable(folder: Path) -> None:
    """Refuse a folder whose contents this user may not delete completely.  Raises ConfigError."""
    for directory, folders, files in os.walk(folder, onerror=_refuse):
        if not may_write(Path(directory)):
            raise _not_deletable(directory)
        try:
            other = _of_another_user(Path(directory), [*folders, *files])
        except OSError as error:
            _refuse(error)
        if other is not None:
            raise ConfigError(
                f"{other}: belongs to another user, so --overwrite cannot delete it; choose another folder"
            )


def _of_another_user(directory: Path, names: Sequence[str]) -> Path | None:
    """Return another user's file that this user may not delete from a folder, though it may write there."""
    state = directory.stat()
    if not state.st_mode & stat.S_ISVTX or os.geteuid() in (0, state.st_uid):
        return None
    paths = (directory / name for name in names)
    return next((path for path in paths if path.lstat().st_uid != os.geteuid()), None)


def empty(owner: FolderOwner, kind: FolderKind) -> str:
    """Delete everything that a command has written to a folder, except the owner's files.

    The records are deleted last, so that an interrupted deletion can be repeated.

    Args:
        owner: owner of the folder.
        kind: as in `check_overwrite`.

    Returns:
        A line naming files that are somebody else's and stay; "" if there are none.

    Raises:
        ConfigError: a folder in it is in use.
        RunError: something cannot be deleted.
    """
    with ExitStack() as stack:
        for place in _OWNED:
            for file in _list(owner.folder, f"{place}/{OWNER_FILE}"):
                stack.enter_context(owner.of(file.parent))
        entries = [path for path in sorted(_list(owner.folder)) if not is_owners(path.name)]
        paths = [path for path in entries if _is_to_go(path, kind)]
        last = {path for record in kind.records for path in _list(owner.folder, record)}
        for path in [
            *(path for path in paths if path not in last),
            *(path for path in paths if path in last),
        ]:
            _delete(path)
    others = sorted(path.name for path in {*entries} - {*paths})
    return f"{owner.folder}: {first_of(others)} is not part of {kind.what} and is kept" if others else ""


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _is_to_go(path: Path, kind: FolderKind) -> bool:
    try:
        return kind.owns(path)
    except OSError as error:
        raise _not_emptied(path, error) from error


def _list(folder: Path, pattern: str = "") -> list[Path]:
    try:
        return list(folder.glob(pattern) if pattern else folder.iterdir())
    except OSError as error:
        raise _not_emptied(folder, error) from error


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        raise _not_emptied(path, error) from error


def _not_emptied(path: Path, error: OSError) -> RunError:
    return RunError(cannot_be_written(path, error, "give the same command again"))


def _refuse(error: OSError) -> NoReturn:
    if isinstance(error, PermissionError):
        raise _not_deletable(error.filename) from error
    raise ConfigError(cannot_be_read(error.filename, error, "give the same command again")) from error


def _not_deletable(directory: str) -> ConfigError:
    return ConfigError(
        f"{directory}: this user may not delete its contents ({_rights(Path(directory))}), which "
        "--overwrite has to do; choose another folder"
    )


def _rights(directory: Path) -> str:
    state = directory.stat()
    return f"it belongs to user {state.st_uid}, rights {stat.S_IMODE(state.st_mode):04o}"
