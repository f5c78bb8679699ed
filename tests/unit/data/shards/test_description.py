"""The copy of a data directory's description: a file that was removed, added or changed is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from speechdp.data.shards.dataset import LANGUAGE_MODEL_NAMES, Dataset
from speechdp.data.shards.description import (
    SMALL_NAMES,
    check_contents,
    check_description,
    check_sizes,
    checked_sha256,
    keep_description,
    record_description,
)
from speechdp.decode.language_model import StoredModel, language_model_path
from speechdp.errors import RunError
from speechdp.files import sha256_of
from tests.helpers.tiny_data import write_tiny_data

ALL_NAMES = (*SMALL_NAMES, *LANGUAGE_MODEL_NAMES)


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    dataset = write_tiny_data(tmp_path / "data")
    (dataset.path / "lm.arpa.gz").write_bytes(b"not read here")
    (dataset.path / "lm.json").write_text("{}")
    return dataset


@pytest.fixture
def kept(data: Dataset, tmp_path: Path) -> Path:
    assert keep_description(data, tmp_path / "kept") == []
    return tmp_path / "kept"


def shortened(path: Path) -> None:
    """Cut a text off at the end of a line."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_the_record_lists_what_is_there(kept: Path) -> None:
    record = json.loads((kept / "files.json").read_text())
    assert (record["format"], record["version"]) == ("speechdp-files", 1)
    assert [entry["file"] for entry in record["files"]] == sorted(
        path.name for path in kept.iterdir() if path.name != "files.json"
    )
    for entry in record["files"]:
        path = kept / entry["file"]
        assert (entry["sha256"], entry["bytes"]) == (sha256_of(path), path.stat().st_size)
        assert checked_sha256(path) == entry["sha256"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda kept: (kept / "lexicon.txt").unlink(),
            r"lexicon\.txt: is missing; copy it again from the run",
        ),
        (
            lambda kept: shortened(kept / "lexicon.txt"),
            r"lexicon\.txt: was changed \(\d+ bytes, \d+ were wri",
        ),
        (lambda kept: shortened(kept / "classes.txt"), r"classes\.txt: was changed \(\d+ bytes"),
        (
            lambda kept: (kept / "lm.arpa.gz").write_bytes(b"as long again"),
            r"lm\.arpa\.gz: was changed \(its checksum is not that in files\.json\); copy it again",
        ),
        (
            lambda kept: [(kept / name).unlink() for name in ("lm.arpa.gz", "lm.json")],
            r"lm\.arpa\.gz: is missing; .*, or delete files\.json beside it to do without it$",
        ),
        (lambda kept: (kept / "G.fst").touch(), r"G\.fst: was added, files\.json beside it does not list it"),
    ],
)
def test_a_change_is_told_in_a_line(kept: Path, change: Callable[[Path], object], said: str) -> None:
    check_contents(kept, ALL_NAMES)
    change(kept)
    with pytest.raises(RunError, match=said) as raised:
        check_contents(kept, ALL_NAMES)
    assert str(raised.value).startswith(str(kept)) and "\n" not in str(raised.value)
    (kept / "files.json").unlink()  # as the message says
    check_contents(kept, ALL_NAMES)


def test_a_language_model_that_is_gone_with_its_record_is_not_replaced_by_a_loop(kept: Path) -> None:
    assert language_model_path(kept) == kept / "lm.arpa.gz"
    (kept / "lm.arpa.gz").unlink()
    (kept / "lm.json").unlink()
    for use in (language_model_path, StoredModel.in_folder):
        with pytest.raises(RunError, match=r"lm\.arpa\.gz: is missing; copy it again"):
            use(kept)


def test_a_language_model_is_checked_when_it_is_read(kept: Path) -> None:
    stored = StoredModel.in_folder(kept)
    assert stored is not None
    (kept / "lm.arpa.gz").write_bytes(b"as long again")
    check_sizes(kept, LANGUAGE_MODEL_NAMES)  # which is all that costs nothing
    for read in (lambda: stored.model, lambda: stored.sha256):
        with pytest.raises(RunError, match=r"lm\.arpa\.gz: was changed \(its checksum"):
            read()


def test_a_copy_of_the_copy_is_as_good(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path / "copy", copy_function=shutil.copyfile)  # without the times
    check_contents(tmp_path / "copy", ALL_NAMES)
    (tmp_path / "links").mkdir()
    for path in kept.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    check_contents(tmp_path / "links", ALL_NAMES)


def test_the_record_is_renewed_with_the_data_and_made_for_an_older_copy(data: Dataset, kept: Path) -> None:
    before = (kept / "files.json").stat()
    keep_description(data, kept)
    assert (kept / "files.json").stat().st_ino == before.st_ino  # nothing has changed
    with (data.path / "lexicon.txt").open("a") as file:
        file.write("too T UW\n")
    (data.path / "lm.arpa.gz").unlink()
    (data.path / "lm.json").unlink()
    keep_description(data, kept)
    check_contents(kept, ALL_NAMES)
    whole = (kept / "files.json").read_text()
    assert "lm.arpa.gz" not in whole
    for content in (None, "", "{}", "[]", '{"format": "speechdp-files", "version": 1, "files": [{}]}'):
        (kept / "files.json").unlink()
        if content is not None:
            (kept / "files.json").write_text(content)
        keep_description(data, kept)
        assert (kept / "files.json").read_text() == whole


def test_a_copy_that_was_changed_is_made_again_by_the_next_start(data: Dataset, kept: Path) -> None:
    shortened(kept / "lexicon.txt")
    os.utime(kept / "lexicon.txt", ns=(0, 0))
    keep_description(data, kept)
    check_contents(kept, ALL_NAMES)
    assert (kept / "lexicon.txt").read_bytes() == data.lexicon_path.read_bytes()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "",
            r"cannot be read \(.*\); copy it again, or delete it to use the files beside it as",
        ),
        ("[]", r"cannot be read \(.*\); copy it again"),
        (
            '{"format": "speechdp-files", "version": 1, "files": [{}]}',
            r"\('file' is missing\); copy it again",
        ),
        ('{"format": "speechdp-run", "version": 1}', r"\(its format is 'speechdp-run'\); copy it again"),
        ('{"format": "speechdp-files", "version": 2}', "is of version 2, and this speechdp reads version 1"),
    ],
)
def test_a_damaged_record_is_told_in_a_line(kept: Path, content: str, said: str) -> None:
    (kept / "files.json").write_text(content)
    with pytest.raises(RunError, match=rf"files\.json: .*{said}"):
        check_sizes(kept, ALL_NAMES)


def recorded(dataset: Dataset) -> Dataset:
    """Record the files of a data directory, as `prepare` does."""
    record_description(dataset.path)
    check_description(dataset, read_all=True)
    return dataset


def test_a_data_directory_notices_what_was_lost_in_copying(data: Dataset) -> None:
    lexicon = recorded(data).lexicon_path
    whole = lexicon.read_text()
    shortened(lexicon)
    with pytest.raises(
        RunError, match=r"lexicon\.txt: was changed \(.*\); copy the directory again or prepare"
    ):
        check_description(data)
    (data.path / "files.json").unlink()  # as the message says
    check_description(data)
    lexicon.write_text(whole)
    recorded(data)
    (data.path / "lm.arpa.gz").write_bytes(b"as long again")
    check_description(data)  # reads no language model
    with pytest.raises(RunError, match=r"lm\.arpa\.gz: was changed \(its checksum"):
        check_description(data, read_all=True)
    (data.path / "lm.arpa.gz").unlink()
    (data.path / "lm.json").unlink()
    with pytest.raises(RunError, match=r"lm\.arpa\.gz: is missing; copy the directory again"):
        check_description(data)


def test_a_run_keeps_no_language_model_that_its_data_contradict(data: Dataset, tmp_path: Path) -> None:
    (recorded(data).path / "lm.arpa.gz").write_bytes(b"as long again")
    (notice,) = keep_description(data, tmp_path / "kept")
    assert re.search(r"kept holds no language model: .*lm\.arpa\.gz: was changed \(its checksum", notice)
    assert not (tmp_path / "kept" / "lm.arpa.gz").exists() and language_model_path(tmp_path / "kept") is None
