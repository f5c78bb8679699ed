"""Find files named in tables that are missing or empty, and where they may be instead."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from speechdp.data.corpora.path_map import PathMap
from speechdp.errors import ConfigError

#: Most files to search for the missing ones: a folder may be a whole disk.
_MOST_FILES = 500_000
_MOST_TRIED = 200


def find_unusable(
    files: Iterable[Path], where: str, folder: Path | None, *, may_be_left_out: bool, path_map: PathMap
) -> tuple[frozenset[Path], frozenset[Path]]:
    """Return the files that do not exist, and those of 0 bytes.

    Args:
        files: the files; repetitions are allowed.
        where: the table that names them, or the corpus.
        folder: as in missing_error.
        may_be_left_out: whether they are tolerated as long as others are left.
        path_map: as in missing_error.

    Raises:
        ConfigError: there are such files and they may not be left out, or one cannot be examined.
    """
    every = list(dict.fromkeys(files))
    missing = [path for path in every if not path.exists()]
    gone = frozenset(missing)
    empty = _empty_files([path for path in every if path not in gone])
    num_unusable = len(missing) + len(empty)
    if num_unusable and not (may_be_left_out and num_unusable < len(every)):
        if missing:
            if folder is not None:
                path_map.refuse_unused(folder)  # a typo in the map may be the reason
            raise missing_error(sorted(missing), len(every), where, folder, path_map)
        raise _empty_error(empty, len(every), where)
    return gone, frozenset(empty)


def _empty_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files of 0 bytes, which failed downloads and copies leave.  Raises ConfigError."""
    try:
        return [path for path in paths if path.stat().st_size == 0 and path.is_file()]
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _empty_error(empty: Sequence[Path], num_files: int, where: str) -> ConfigError:
    """Return the error for empty files.

    Args:
        empty, num_files, where: as in missing_error.
    """
    some = ", or leave them out with --skip-incomplete" if len(empty) < num_files else ""
    what = f"{len(empty)} of {num_files} audio files are empty (0 bytes), first {empty[0]}"
    return ConfigError(f"{where}: {what}; copy or fetch them again{some}")


def missing_error(
    missing: Sequence[Path],
    num_files: int,
    where: str,
    folder: Path | None = None,
    path_map: PathMap | None = None,
) -> ConfigError:
    """Return the error for files that do not exist; its remedy is a --path-map that would find them.

    Args:
        missing: the files, at least one.
        num_files: number of all files, including those that exist.
        where: the table that names them, or the corpus.
        folder: the corpus, which is searched for files of the same names; None: its paths are not mapped.
        path_map: the map that has been applied to the paths.
    """
    first = missing[0]
    given = None if path_map is None else path_map.leading_to(first)
    if num_files == 1:
        gone = f"{first}: no such file"
    elif given is not None and len(missing) == num_files:
        gone = f"{where}: none of {num_files} files is there, first {first}"
    else:
        gone = f"{where}: {len(missing)} of {num_files} files do not exist, first {first}"
    mapping = None if folder is None else suggest_mapping(missing, folder)
    if mapping is not None:
        old, new = mapping
        num_found = sum(_mapped(path, old, new).exists() for path in missing)
        if given is not None:
            old, new = _of_table(given, old, new)
        return ConfigError(f"{gone}; --path-map {old}={new} finds {num_found} of them")
    if first.is_symlink():
        return ConfigError(f"{gone}; it is a symbolic link to {first.readlink()}, which is missing")
    if given is None:
        remedies = ["check the paths"]
    else:
        remedies = [f"--path-map {given[0]}={given[1]} leads there: give the folder that holds them"]
    if folder is not None and given is None:
        remedies.append("say where they are now with --path-map OLD=NEW")
    if len(missing) < num_files:
        remedies.append("leave them out with --skip-incomplete")
    return ConfigError(f"{gone}; {', or '.join(remedies)}")


def suggest_mapping(missing: Sequence[Path], folder: Path) -> tuple[str, str] | None:
    """Find the beginning of missing paths to replace, by looking for files of the same names in a folder.

    Returns:
        What to replace and by what, for the path with the longest common end among those found; None: none
        was found.
    """
    tried = missing[:_MOST_TRIED]
    wanted = {path.name for path in tried}
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for path in islice(_files_below(folder), _MOST_FILES):
        if path.name in wanted:
            found[path.name].append(path)
    best: tuple[int, Path, Path] | None = None
    for path in tried:
        for candidate in found[path.name]:
            # Part of the replaced path must remain, and "/" alone is no beginning.
            length = min(_common_end(path, candidate), len(path.parts) - (2 if path.is_absolute() else 1))
            # A symbolic link may exist without its target.
            if length > 0 and (best is None or length > best[0]) and candidate.exists():
                best = (length, path, candidate)
    if best is None:
        return None
    length, path, candidate = best
    return str(Path(*path.parts[:-length])), str(Path(*candidate.parts[:-length]))


def _files_below(folder: Path) -> Iterable[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names))


def _common_end(path: Path, other: Path) -> int:
    """Return how many of their last parts two paths have in common."""
    length = 0
    for part, another in zip(reversed(path.parts), reversed(other.parts), strict=False):
        if part != another:
            break
        length += 1
    return length


def _mapped(path: Path, old: str, new: str) -> Path:
    return Path(new, path.relative_to(old)) if path.is_relative_to(old) else path


def _of_table(given: tuple[str, str], old: str, new: str) -> tuple[str, str]:
    """Return a map for the table's own paths that has the effect of old -> new after the `given` one."""
    if Path(old).is_relative_to(given[1]):
        return str(_mapped(Path(old), given[1], given[0])), new
    return given[0], str(_mapped(Path(given[1]), old, new))
